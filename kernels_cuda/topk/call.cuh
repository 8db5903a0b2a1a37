// A call of the top-k kernels, as the host knows it.

#pragma once

namespace topk_kernels {

enum Method { kPositions, kPaged, kRagged };

struct Call {
  const void* logits;         // float32 or bfloat16 [rows, columns]
  const int* lengths;         // [rows]
  const int* row_starts;      // [rows] or null
  const int* page_table;      // [num_requests, num_pages], if PAGED
  const int* row_to_request;  // [rows] or null
  const int* offsets;         // [rows], if RAGGED
  int* out;                   // [rows, topk]
  int columns, topk, method, page_size, num_requests, num_pages;
  int page_shift;  // log2 of page_size, or -1; without pages 31
  int last_page;   // where the slot INT_MAX lies
  int capacity;    // entries that fit shared memory
  int segments;    // of a row of candidates; 0 if they do not fit
};

}  // namespace topk

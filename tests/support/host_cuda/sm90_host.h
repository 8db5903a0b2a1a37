// What sm90.cuh has, on the host, as late as it may happen: a copy lands when somebody waits for it, and its place holds
// 0xFF until then; products read their operands and write their sums when they are waited for.

#pragma once

#include "cuda_bf16.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>

#define SM90_DEVICE
#define __grid_constant__

struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct __half {
  _Float16 value;
};
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline uint16_t __half_as_ushort(__half x) { return bits_as<uint16_t>(x.value); }
inline int __shfl_xor_sync(unsigned, int x, int mask) { return static_cast<int>(host::meet_warp(x)[host::lane() ^ mask]); }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
  return __int_as_float(__shfl_xor_sync(~0u, __float_as_int(x), mask));
}

namespace sm90 {

using Barrier = uint64_t;

struct Copy {
  void* to;
  const void* from;
  int bytes;
};
struct State {
  int arrivals = 0, missing = 0, bytes = 0, phase = 0;
  std::vector<Copy> copies;
};
struct Product {
  float* sums;
  int columns;
  const uint32_t* operand;
  uint64_t matrix;
  bool add;
};

// Of the thread block that runs.
inline std::vector<uint64_t> arena;
inline std::map<const Barrier*, State> barriers;
inline std::map<int, host::Meeting> named;
inline std::vector<std::deque<std::vector<Product>>> products;  // of each thread: groups, the last one open
inline const uint8_t *readable, *readable_end;                  // what copies may read

inline void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

inline uint8_t* tiles_memory() {
  uint8_t* begin = reinterpret_cast<uint8_t*>(arena.data());
  return begin + (1024 - reinterpret_cast<uintptr_t>(begin) % 1024) % 1024;
}
inline uint32_t shared_address(const void* x) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(x) - tiles_memory()) + 1024;
}

inline void begin_block(int threads, size_t shared_bytes) {
  arena.assign(shared_bytes / 8 + 1, ~uint64_t{0});
  barriers.clear();
  named.clear();
  products.assign(threads, {{}});
}

inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t which = selector >> 4 * i & 15, byte = (which & 4 ? y : x) >> which % 4 * 8 & 0xFF;
    if (which & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  return result;
}

inline float bfloat16(uint32_t bits) { return __int_as_float(static_cast<int>(bits << 16)); }

// Of products that bfloat16 holds.
inline uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  float low = bfloat16(x & 0xFFFF) * bfloat16(y & 0xFFFF), high = bfloat16(x >> 16) * bfloat16(y >> 16);
  return bits_as<uint32_t>(low) >> 16 | (bits_as<uint32_t>(high) & 0xFFFF0000);
}

// --- barriers ---------------------------------------------------------------------------------------------------

constexpr int kArrivalsOfWarp = 1;

inline void init(Barrier* barrier, int arrivals) { barriers[barrier] = {arrivals, arrivals}; }
inline void fence_barriers() {}
inline void fence_matrix_reads() {}

inline void complete(State& state) {
  if (state.missing || state.bytes) return;
  state.phase++;
  state.missing = state.arrivals;
}
inline void arrive(Barrier* barrier) {
  State& state = barriers.at(barrier);
  require(state.missing > 0, "more arrivals than a barrier has");
  state.missing--;
  complete(state);
}
inline void arrive_warp(Barrier* barrier, int lane) {
  if (lane == 0) arrive(barrier);
}
inline void expect(Barrier* barrier, int bytes) {
  barriers.at(barrier).bytes += bytes;
  arrive(barrier);
}
inline void wait(Barrier* barrier, int parity) {
  State& state = barriers.at(barrier);
  for (int turns = 0; state.phase % 2 == parity; turns++) {
    require(turns < 1000000, "nobody arrives");
    if (state.missing == 0) {
      for (const Copy& copy : state.copies) memcpy(copy.to, copy.from, copy.bytes), state.bytes -= copy.bytes;
      state.copies.clear();
      complete(state);
    } else {
      host::give_way();
    }
  }
}
inline void sync_threads(int barrier, int threads) {
  host::Meeting& meeting = named[barrier];
  meeting.members = threads;
  host::meet(meeting, threadIdx.x, 0);
}

inline void copy_bytes(void* to, const void* from, int bytes, Barrier* barrier) {
  const uint8_t* begin = static_cast<const uint8_t*>(from);
  require(begin >= readable && begin + bytes <= readable_end, "a copy from outside the cache");
  require((begin - readable) % 16 == 0 && shared_address(to) % 16 == 0 && bytes % 16 == 0, "a copy that is not aligned");
  memset(to, 0xFF, bytes);
  barriers.at(barrier).copies.push_back({to, from, bytes});
}

template <int kRegisters>
void grow_registers() {}
template <int kRegisters>
void shrink_registers() {}

// --- matrix products --------------------------------------------------------------------------------------------

inline uint64_t by_rows(uint32_t address) {
  return uint64_t{address >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

inline uint64_t advance(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }

inline float e5m2(uint8_t byte) { return static_cast<float>(bits_as<_Float16>(static_cast<uint16_t>(byte << 8))); }

// This lane's sums of a product of a warp's 16 rows: of rows l / 4 and l / 4 + 8 columns 2 (l % 4) and the next of 8.
inline void multiply(const Product& product) {
  uint8_t rows[16][32];
  for (int word = 0; word < 4; word++) {
    std::vector<int64_t> words = host::meet_warp(product.operand[word]);
    for (int lane = 0; lane < 32; lane++)
      for (int byte = 0; byte < 4; byte++)
        rows[lane / 4 + word % 2 * 8][word / 2 * 16 + lane % 4 * 4 + byte] = words[lane] >> 8 * byte & 0xFF;
  }
  uint32_t start = (product.matrix & 0x3FFF) << 4, stride = (product.matrix >> 32 & 0x3FFF) << 4;
  for (int i = 0; i < product.columns / 2; i++) {
    int row = host::lane() / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + host::lane() % 4 * 2 + i % 2;
    float sum = product.add ? product.sums[i] : 0;
    for (int k = 0; k < 32; k++) {
      uint32_t at = start + column / 8 * stride + column % 8 * 128 + k;
      at ^= (at >> 7 & 7) << 4;
      sum += e5m2(rows[row][k]) * e5m2(tiles_memory()[at - 1024]);
    }
    product.sums[i] = sum;
  }
}

inline void begin_products() {}
inline void commit_products() { products[threadIdx.x].emplace_back(); }
template <int kLeft>
void wait_products() {
  auto& groups = products[threadIdx.x];
  for (; groups.size() > kLeft + 1; groups.pop_front())
    for (const Product& product : groups.front()) multiply(product);
}
template <int kSums>
void multiply_e5m2(float (&sums)[kSums], const uint32_t (&operand)[4], uint64_t matrix, bool add) {
  if (!add) std::fill(sums, sums + kSums, NAN);
  products[threadIdx.x].back().push_back({sums, kSums * 2, operand, matrix, add});
}

inline void multiply_in_warp(float* sums, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float first[16][16], second[8][16];
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int word = 0; word < 6; word++) {
    std::vector<int64_t> all = host::meet_warp(words[word]);
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 2; i++) {
        float value = bfloat16(all[lane] >> 16 * i & 0xFFFF);
        if (word < 4)
          first[lane / 4 + word % 2 * 8][word / 2 * 8 + lane % 4 * 2 + i] = value;
        else
          second[lane / 4][word % 2 * 8 + lane % 4 * 2 + i] = value;
      }
  }
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++)
      sums[i] += first[host::lane() / 4 + i / 2 * 8][k] * second[host::lane() % 4 * 2 + i % 2][k];
}

}  // namespace sm90

// The wide cluster kernel, for rows of many heads that are too few for all multiprocessors: the thread blocks of a
// cluster share a row's keys, each with the roles of the persistent kernel, and add up their parts in each other's
// shared memory.

#pragma once

#include "attend.cuh"
#include "cluster.cuh"

namespace sparse_decode {

// What thread blocks send each other, once none of the cluster needs its keys: this lies in their place. Of a part and
// a head, for either half of V's columns: the base-2 score whose weight is 1, the sum of the weights of the blocks that
// the half's consumer scored, and the power of two by which values are multiplied again.
struct Exchange {
  float4 statistics[kMostParts][2][kHeads];
  // Of the columns that this thread block adds up, in eights: those of the first part, then of the second, and so on.
  // They are float16 times a power of two, as in Unit.
  uint4 values[2 * places_of(kValues / 16)][kHeads];
};

template <Format kFormat>
struct WideShared : Shared<kFormat> {
  Barrier statistics_full, values_full;
  int used;  // parts that have keys

  static_assert(sizeof(Exchange) <= sizeof(Shared<kFormat>::keys));
  __device__ __forceinline__ Exchange& exchange() { return reinterpret_cast<Exchange&>(this->keys); }
};

// Columns are dealt to the parts by sixteens, in turn. For each sixteen heads another part begins, so that a consumer's
// warps do not all send to one thread block at a time.
struct Sixteens {
  Divisor parts;

  __device__ __forceinline__ int rest(int n) const { return n - parts.quotient(n) * static_cast<int>(parts.divisor); }
  // Part rest(rest(n) + heads) adds up the n-th sixteen columns of the heads-th sixteen heads. They are its place(n)-th.
  __device__ __forceinline__ int place(int n) const { return parts.quotient(n); }
  // The first sixteen columns that a part adds up of these heads, how many it adds up, and the most that any part does.
  __device__ __forceinline__ int first(int rank, int heads) const { return rest(rank + 4 * parts.divisor - heads); }
  __device__ __forceinline__ int count(int first) const { return parts.quotient(kValues / 16 - 1 - first) + 1; }
  __device__ __forceinline__ int most() const { return count(0); }
};

// Tells the barriers how many bytes come. One thread calls it.
template <Format kFormat>
__device__ __forceinline__ void expect_parts(const Call& call, WideShared<kFormat>& shared, int blocks) {
  int each = Part(call, blocks, true, 0).last, sixteens = 0;
  shared.used = (blocks + each - 1) / each;
  Sixteens dealt{call.deal.parts};
  for (int heads = 0; heads < kHeads / 16; heads++) sixteens += dealt.count(dealt.first(blockIdx.x, heads));
  sm90::expect(&shared.statistics_full, shared.used * sizeof(Exchange::statistics[0]));
  sm90::expect(&shared.values_full, shared.used * sixteens * 2 * 16 * sizeof(uint4));
}

// Sends a consumer's values of a thread's two heads to the parts that add them up, once it has summed all its blocks.
// They become float16 while the other thread blocks arrive.
template <Format kFormat>
__device__ __forceinline__ void send_part(const Call& call, WideShared<kFormat>& shared, int side,
                                          const float (&sums)[2][64], const Statistics& statistics) {
  __syncwarp();
  sm90::release_in_cluster();
  int lane = threadIdx.x % 32, quarter = lane % 4, tile_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  int rank = blockIdx.x, parts = call.deal.parts.divisor;
  Sixteens dealt{call.deal.parts};
  int ahead = dealt.rest(tile_row / 16);
  Exchange& exchange = shared.exchange();
  uint4 own[2], values[2][8];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) top = fmaxf(top, fabsf(sums[i / 32][i % 32 / 2 * 4 + 2 * r + i % 2]));
    HalfScale scale(__float_as_int(over_quad(top, larger)));
    float sum = over_quad(statistics.sum[r], total);
    auto word = [](float x) { return static_cast<uint32_t>(__float_as_int(x)); };
    own[r] = {word(statistics.reference[r]), word(sum), word(scale.down), 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      uint32_t x[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float* pair = &sums[i / 4][(i % 4 * 4 + k) * 4 + 2 * r];
        x[k] = sm90::rounded_to_halves({pair[0] * scale.up, pair[1] * scale.up});
      }
      values[r][i] = transpose_quad(x);
    }
  }
  sm90::wait_cluster();  // no thread block needs its keys
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll 1
    for (int part = quarter; part < parts; part += 4)
      sm90::send(sm90::address_of(&exchange.statistics[rank][side][tile_row + 8 * r], part), own[r],
                 sm90::address_of(&shared.statistics_full, part));
  }
  // A thread has every fourth eight, in every other sixteen.
  int sixteen = side * 16 + quarter / 2, place = rank * dealt.most() + dealt.place(sixteen), n = dealt.rest(sixteen);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int part = n + ahead - (n + ahead < parts ? 0 : parts);
    uint32_t to = sm90::address_of(&exchange.values[place * 2 + quarter % 2][tile_row], part);
    uint32_t barrier = sm90::address_of(&shared.values_full, part);
#pragma unroll
    for (int r = 0; r < 2; r++) sm90::send(to + r * 8 * sizeof(uint4), values[r][i], barrier);
    if ((n += 2) >= parts) n -= parts, place++;
  }
}

// Adds the parts in the order of the keys, not of arrival. A consumer's thread has every fourth eight of the columns of
// one head.
template <Format kFormat>
__device__ __forceinline__ void add_parts(const Call& call, WideShared<kFormat>& shared, int tile) {
  int thread = threadIdx.x % 256, tile_row = thread % kHeads, head = tile * kHeads + tile_row, row = blockIdx.z;
  int rank = blockIdx.x, parts = call.deal.parts.divisor, used = shared.used;
  Sixteens dealt{call.deal.parts};
  bool there = head < call.heads;
  float sink = call.sink && there ? call.sink[head] * kLog2E : -INFINITY;
  const Exchange& exchange = shared.exchange();
  sm90::wait_for_sent(&shared.statistics_full, 0);
  float largest = -INFINITY, sum = 0;
#pragma unroll 4
  for (int part = 0; part < used; part++) largest = fmaxf(largest, exchange.statistics[part][0][tile_row].x);
  float base = largest == -INFINITY ? 0 : largest;
#pragma unroll 4
  for (int part = 0; part < used; part++) {
    float4 of_part = exchange.statistics[part][0][tile_row];
    sum += (of_part.y + exchange.statistics[part][1][tile_row].y) * exp2_approx(of_part.x - base);
  }
  float factor = sum == 0 ? 0.0f : 1 / (sum + exp2f(sink - base));
  int64_t at = static_cast<int64_t>(row) * call.heads + head;
  if (rank == 0 && thread < kHeads && there) call.lse[at] = sum == 0 ? call.empty_lse : kLn2 * (base + log2f(sum));
  sm90::wait_for_sent(&shared.values_full, 0);
  int first = dealt.first(rank, tile_row / 16), here = dealt.count(first) * 2, most = dealt.most() * 2;
#pragma unroll 1
  for (int i = thread / kHeads; i < here; i += 4) {
    int eight = (i / 2 * parts + first) * 2 + i % 2;
    float joined[8] = {};
#pragma unroll 4
    for (int part = 0; part < used; part++) {
      float4 of_part = exchange.statistics[part][eight / 32][tile_row];
      uint4 x = exchange.values[part * most + i][tile_row];
      uint32_t words[4] = {x.x, x.y, x.z, x.w};
      float weight = exp2_approx(of_part.x - base) * factor * of_part.z;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float2 two = sm90::two_floats(words[k]);
        joined[2 * k] += weight * two.x, joined[2 * k + 1] += weight * two.y;
      }
    }
    uint32_t out[4];
#pragma unroll
    for (int k = 0; k < 4; k++) out[k] = bits(__floats2bfloat162_rn(joined[2 * k], joined[2 * k + 1]));
    if (there) *reinterpret_cast<uint4*>(call.out + at * kValues + eight * 8) = {out[0], out[1], out[2], out[3]};
  }
}

}  // namespace sparse_decode

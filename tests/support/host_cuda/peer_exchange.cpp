// The peer exchange on the host: each thread of each block of each device is a thread, and devices are groups of them that
// share memory. Flags are atomics and everything else is plain memory, so ThreadSanitizer sees every read that nothing
// orders against the write.

#include <sched.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define PEER_SYSTEM
#define PEER_THREADS 16
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
thread_local dim3 threadIdx, blockIdx, gridDim;
thread_local std::barrier<>* of_block;
inline void __syncthreads() { of_block->arrive_and_wait(); }

namespace peer {

thread_local std::minstd_rand chance;
inline int seldom = 0;  // one in so many of the steps below waits; 0: none does

inline void dawdle() {
  if (seldom && chance() % seldom == 0) std::this_thread::sleep_for(std::chrono::microseconds(chance() % 300));
}

inline void release(uint32_t* flag, uint32_t value) {
  dawdle();
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
  dawdle();
}
inline uint32_t acquire(const uint32_t* flag) {
  uint32_t value = std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire);
  if (chance() % 2) sched_yield();
  return value;
}
inline uint64_t nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
inline void pause() { sched_yield(); }
inline void give_up(int*, int rank, int source, int block, uint32_t epoch) {
  printf("rank %d gave up waiting for rank %d: block %d, epoch %u\n", rank, source, block, epoch);
  fflush(stdout);
  _Exit(3);
}
inline uint4 load_received(const uint4* from) {
  dawdle();
  return *from;
}
inline float load_received(const float* from) { return *from; }
inline uint4 load_once(const uint4* from) { return *from; }
inline float exponential(float x) { return std::exp(x); }
inline float logarithm(float x) { return std::log(x); }
inline float quotient(float x, float y) { return x / y; }
inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline uint32_t rounded(float x) {
  uint32_t bits = as_bits(x);
  return x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t rounded_pair(float low, float high) { return rounded(low) | rounded(high) << 16; }

}  // namespace peer

#include "kernel.cuh"

namespace {

struct Device {
  std::vector<uint8_t> received;
  std::vector<uint32_t> flags, epochs;
};

template <typename T>
void run(int size, int launches, const int* rows, int heads, int shift, int most_blocks, int resident, uint32_t start,
         int absent, int64_t patience, const uint4* const* out, const float* const* lse, const float* sink,
         uint4* const* merged, float* const* merged_lse) {
  using namespace peer;
  const int own = heads / size, each = kPieces >> shift;
  std::vector<Device> devices(size);
  for (Device& device : devices) {
    // What has not come is a large number.
    device.received.assign(int64_t{2} * size * most_blocks * kSlotBytes, 0x4B);
    device.flags.assign(size * most_blocks, start);
    device.epochs.assign(most_blocks, start);
  }
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<std::unique_ptr<std::atomic<int>[]>> next;
  for (int rank = 0; rank < size; rank++) {
    if (rank == absent) continue;
    auto of_device = barriers.emplace_back(std::make_unique<std::barrier<>>(resident * kThreads)).get();
    auto blocks = next.emplace_back(std::make_unique<std::atomic<int>[]>(launches)).get();
    for (int i = 0; i < launches; i++) blocks[i] = 0;
    for (int place = 0; place < resident; place++) {
      auto barrier = barriers.emplace_back(std::make_unique<std::barrier<>>(kThreads)).get();
      auto taken = std::make_shared<int>();
      for (int thread = 0; thread < kThreads; thread++)
        threads.emplace_back([=, &devices] {
          threadIdx.x = thread;
          of_block = barrier;
          chance.seed(1 + rank * 1000 + place * 100 + thread);
          int64_t row = 0;
          for (int launch = 0; launch < launches; row += rows[launch++]) {
            Call call = {};
            call.out = out[rank] + (row * heads << shift);
            call.lse = lse[rank] + row * heads;
            call.sink = sink ? sink + rank * own : nullptr;
            call.merged = merged[rank] + (row * own << shift);
            call.merged_lse = merged_lse[rank] + row * own;
            call.items = rows[launch] * own;
            call.heads = heads;
            call.own = own;
            call.piece_shift = shift;
            call.chunks = (call.items + each - 1) / each;
            call.rank = rank;
            call.size = size;
            call.most_blocks = most_blocks;
            call.patience = patience;
            for (int i = 0; i < size; i++) {
              call.received[i] = devices[i].received.data();
              call.flags[i] = devices[i].flags.data();
            }
            call.epochs = devices[rank].epochs.data();
            gridDim.x = std::min(call.chunks, most_blocks);
            for (;;) {  // a place takes the next block when it is free
              if (thread == 0) *taken = blocks[launch]++;
              barrier->arrive_and_wait();
              blockIdx.x = *taken;
              barrier->arrive_and_wait();
              if (blockIdx.x >= gridDim.x) break;
              if (size <= 2)
                peer_exchange_kernel<T, 2>(call);
              else
                peer_exchange_kernel<T, 4>(call);
            }
            of_device->arrive_and_wait();  // launches of a device follow each other
          }
        });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

extern "C" void peer_run(int half, int size, int launches, const int* rows, int heads, int shift,
                         int most_blocks, int resident, uint32_t start, int absent, int64_t patience, int seldom,
                         const void* const* out, const float* const* lse, const float* sink, void* const* merged,
                         float* const* merged_lse) {
  peer::seldom = seldom;
  const auto call = half ? run<uint16_t> : run<float>;
  call(size, launches, rows, heads, shift, most_blocks, resident, start, absent, patience,
       reinterpret_cast<const uint4* const*>(out), lse, sink, reinterpret_cast<uint4* const*>(merged), merged_lse);
}

// Many launches, checked to the bit against sums in one thread. Prints how many numbers were wrong.
extern "C" int peer_main(int count, char** words) {
  const int size = atoi(words[1]), launches = atoi(words[2]), seldom = atoi(words[3]), most_blocks = atoi(words[4]),
            resident = atoi(words[5]), absent = count > 6 ? atoi(words[6]) : -1;
  const int64_t patience = count > 7 ? atoll(words[7]) : 60'000'000'000;
  const int heads = 3 * size, own = 3, shift = 3, width = 64;
  std::minstd_rand random(7);
  std::vector<int> rows(launches);
  int64_t total = 0;
  for (int& some : rows) total += some = 1 + random() % 17;
  std::vector<std::vector<uint16_t>> out(size), merged(size);
  std::vector<std::vector<float>> lse(size), merged_lse(size);
  std::vector<const void*> out_at;
  std::vector<const float*> lse_at;
  std::vector<void*> merged_at;
  std::vector<float*> merged_lse_at;
  for (int rank = 0; rank < size; rank++) {
    for (int64_t i = 0; i < total * heads * width; i++)
      out[rank].push_back(peer::rounded(static_cast<int>(random() % 4001 - 2000) / 1000.0f));
    for (int64_t i = 0; i < total * heads; i++)
      lse[rank].push_back(random() % 8 ? static_cast<int>(random() % 8001 - 4000) / 1000.0f : -INFINITY);
    merged[rank].assign(total * own * width, 0xFFFF);
    merged_lse[rank].assign(total * own, NAN);
    out_at.push_back(out[rank].data());
    lse_at.push_back(lse[rank].data());
    merged_at.push_back(merged[rank].data());
    merged_lse_at.push_back(merged_lse[rank].data());
  }
  std::vector<float> sink(heads, 0.25f);
  peer_run(1, size, launches, rows.data(), heads, shift, most_blocks, resident, -5u, absent, patience, seldom, out_at.data(),
           lse_at.data(), sink.data(), merged_at.data(), merged_lse_at.data());
  int64_t wrong = 0;
  for (int rank = 0; rank < size; rank++)
    for (int64_t item = 0; item < total * own; item++) {
      const int64_t at = item / own * heads + rank * own + item % own;
      float top = -INFINITY, sum = 0;
      for (int part = 0; part < size; part++) top = std::max(top, lse[part][at]);
      const bool empty = top == -INFINITY;
      const float shifted = empty ? 0 : top;
      for (int part = 0; part < size; part++) sum += std::exp(lse[part][at] - shifted);
      float factor = empty ? 0 : 1.0f / sum, both = empty ? -INFINITY : shifted + std::log(sum);
      factor = empty ? 0 : factor / (1.0f + std::exp(0.25f - both));
      wrong += !(merged_lse[rank][item] == both);
      for (int i = 0; i < width; i++) {
        float value = 0;
        for (int part = 0; part < size; part++)
          if (lse[part][at] != -INFINITY)
            value += peer::as_float(uint32_t{out[part][at * width + i]} << 16) * (std::exp(lse[part][at] - shifted) * factor);
        wrong += merged[rank][item * width + i] != peer::rounded(value);
      }
    }
  printf("%d devices, %d launches, %lld rows: %lld wrong\n", size, launches, static_cast<long long>(total),
         static_cast<long long>(wrong));
  fflush(stdout);
  return wrong != 0;
}

#ifdef PEER_MAIN
int main(int count, char** words) { return peer_main(count, words); }
#endif

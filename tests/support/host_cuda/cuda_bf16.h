// As much of CUDA as our kernels need, on the host: the threads of a thread block, or of several that run together, take
// turns in one thread of the host, each until it waits for others.

#pragma once

#include "races.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __CUDACC__ 1
#define __device__
#define __forceinline__ inline
#define __global__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static

struct int2 {
  int x, y;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace host {

// Values of those who meet, kept until they have all met again.
struct Meeting {
  int members = 0, arrived = 0, round = 0;
  std::vector<int64_t> values[2];
  races::Order order;
};

struct Block {
  static constexpr int kStack = 64 << 10;
  int number, threads, current = 0;
  ucontext_t start;
  jmp_buf scheduler;
  std::vector<std::array<jmp_buf, 1>> contexts;
  std::vector<bool> begun, ended;
  Meeting all;
  std::vector<Meeting> warps;
  std::function<void()> program;

  Block(int number, int threads, std::function<void()> program)
      : number(number), threads(threads), contexts(threads), begun(threads), ended(threads), warps(threads / 32),
        program(std::move(program)) {
    all.members = threads;
    for (Meeting& warp : warps) warp.members = 32;
  }
};

inline Block* block;     // that has its turn
inline int64_t news = 0;  // how often those who waited could go on

inline void require(bool holds, const char* what) {
  if (holds) return;
  if (block) fprintf(stderr, "block %d, thread %d: ", block->number, static_cast<int>(threadIdx.x));
  fprintf(stderr, "%s\n", what);
  abort();
}
inline std::vector<std::unique_ptr<char[]>> stacks;

// Where all threads of all blocks that run together meet. A thread may do something else between its arrival and its
// wait.
struct Crossing {
  int members = 0, arrived = 0, round = 0;
  std::vector<int> rounds;  // of each thread's arrival, or -1 once it has waited
  races::Order order;

  void reset(int threads) { *this = {threads, 0, 0, std::vector<int>(threads, -1)}; }
  void arrive(bool releases = true) {
    require(rounds[me()] < 0, "a second arrival without a wait");
    rounds[me()] = round;
    if (releases) order.arrive();
    if (++arrived == members) arrived = 0, round++, news++, order.end();
  }
  void wait();
  static int me() { return block->number * block->threads + threadIdx.x; }
};

inline Crossing grid;

// Jumps, unlike swapcontext, leave the signal mask alone, which takes a system call.
inline void give_way() {
  if (!_setjmp(block->contexts[block->current][0])) _longjmp(block->scheduler, 1);
}

// The current thread's first turn, on a stack of its own.
inline void begin() {
  Block& here = *block;
  here.begun[here.current] = true;
  getcontext(&here.start);
  here.start.uc_stack.ss_sp = stacks[here.number * here.threads + here.current].get();
  here.start.uc_stack.ss_size = Block::kStack;
  makecontext(&here.start, [] {
    block->program();
    block->ended[block->current] = true;
    _longjmp(block->scheduler, 1);
  }, 0);
  setcontext(&here.start);
}

// The current thread's turn, until it gives way or ends.
inline void resume() {
  if (_setjmp(block->scheduler)) return;
  block->begun[block->current] ? _longjmp(block->contexts[block->current][0], 1) : begin();
}

// Waits for all others; what each of them brought.
inline const std::vector<int64_t>& meet(Meeting& meeting, int me, int64_t value, bool is_barrier = false) {
  int round = meeting.round;
  if (is_barrier) meeting.order.arrive();
  std::vector<int64_t>& values = meeting.values[round % 2];
  values.resize(meeting.members);
  values[me] = value;
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    meeting.round++;
    news++;
    if (is_barrier) meeting.order.end();
  }
  while (meeting.round == round) give_way();
  if (is_barrier) meeting.order.wait(round);
  return values;
}

inline int lane() { return threadIdx.x % 32; }
inline const std::vector<int64_t>& meet_warp(int64_t value) {
  return meet(block->warps[threadIdx.x / 32], lane(), value);
}

inline void Crossing::wait() {
  while (round == rounds[me()]) give_way();
  order.wait(rounds[me()]);
  rounds[me()] = -1;
}
inline void meet_all_blocks() {
  grid.arrive();
  grid.wait();
}

// Runs a program in all threads of some thread blocks; `enter` makes a block the current one. A thread's turn ends where
// it waits. Threads have their turns in order, or, by another seed than 0, blocks begin late and warps fall behind at
// random, from any of their lanes on: some seldom, some for most of the time.
inline void run_together(int blocks, int threads, std::function<void()> program, std::function<void(int)> enter,
                         unsigned seed = 0) {
  std::vector<std::unique_ptr<Block>> all;
  std::minstd_rand random(seed);
  std::vector<int> late(blocks), turns_of_16(blocks * threads / 32);
  for (int& turns : turns_of_16) turns = !seed ? 16 : random() % 4 ? 12 : 2;
  for (int i = 0; i < blocks; i++) {
    all.emplace_back(new Block(i, threads, program));
    late[i] = seed ? random() % 3 * 40 : 0;
  }
  while (static_cast<int>(stacks.size()) < blocks * threads) stacks.emplace_back(new char[Block::kStack]);
  grid.reset(blocks * threads);
  int64_t known = news;
  for (int left = blocks * threads, sweeps = 0; left; sweeps = news == known ? sweeps + 1 : 0, known = news) {
    require(sweeps < 1000, "thread blocks wait for each other for ever");
    for (auto& here : all) {
      if (late[here->number]-- > 0) continue;
      block = here.get();
      enter(here->number);
      int behind = 0;  // the first lane of a warp that does
      for (int i = 0; i < threads; i++) {
        if (i % 32 == 0) {
          bool has_turn = static_cast<int>(random() % 16) < turns_of_16[(here->number * threads + i) / 32];
          behind = has_turn ? i + 32 : i + static_cast<int>(random() % 32);
        }
        if (i >= behind) {
          i |= 31;
        } else if (!here->ended[i]) {
          here->current = i;
          threadIdx.x = i;
          resume();
          left -= here->ended[i];
        }
      }
    }
  }
  block = nullptr;
}

inline void run(int threads, std::function<void()> program) {
  run_together(1, threads, std::move(program), [](int) {});
}

}  // namespace host

#ifdef RACES
inline __attribute__((used, no_sanitize("thread"))) int races::me() {
  return host::block ? (host::block->number * host::block->threads + threadIdx.x) / 32 : -1;
}
#endif

inline void __syncthreads() { host::meet(host::block->all, threadIdx.x, 0, true); }
inline void __syncwarp() { host::meet_warp(0); }

template <typename T>
T __shfl_up_sync(unsigned, T x, int step) {
  const auto& values = host::meet_warp(x);
  return static_cast<T>(values[std::max(host::lane() - step, host::lane() < step ? host::lane() : 0)]);
}
template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  return static_cast<T>(host::meet_warp(x)[from % 32]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return static_cast<T>(host::meet_warp(x)[host::lane() ^ mask]);
}
inline int __reduce_max_sync(unsigned, int x) {
  const auto& values = host::meet_warp(x);
  return static_cast<int>(*std::max_element(values.begin(), values.end()));
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
  unsigned bits = 0;
  for (int64_t value : host::meet_warp(x)) bits |= static_cast<unsigned>(value);
  return bits;
}
inline int __reduce_add_sync(unsigned, int x) {
  int sum = 0;
  for (int64_t value : host::meet_warp(x)) sum += static_cast<int>(value);
  return sum;
}
inline unsigned __match_any_sync(unsigned, int x) {
  unsigned same = 0;
  const auto& values = host::meet_warp(x);
  for (int i = 0; i < 32; i++) same |= unsigned{values[i] == x} << i;
  return same;
}
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned which = 0;
  const auto& values = host::meet_warp(x);
  for (int i = 0; i < 32; i++) which |= static_cast<unsigned>(values[i]) << i;
  return which;
}
inline bool __all_sync(unsigned, bool x) { return __ballot_sync(~0u, x) == ~0u; }
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(~0u, x) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clzll(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

template <typename To, typename From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  memcpy(&bits, &x, sizeof x);
  return bits;
}
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __shfl_sync(unsigned all, float x, int from) {
  return __int_as_float(__shfl_sync(all, __float_as_int(x), from));
}
inline float __shfl_xor_sync(unsigned all, float x, int mask) {
  return __int_as_float(__shfl_xor_sync(all, __float_as_int(x), mask));
}
inline float __bfloat162float(__nv_bfloat16 x) { return bits_as<float>(uint32_t{x.bits} << 16); }

template <typename T>
T atomicAdd(T* to, T x) {
  races::read(to, sizeof x);
  races::Quiet quiet;
  return (*to += x) - x;
}
inline unsigned atomicOr(unsigned* to, unsigned x) {
  races::read(to, sizeof x);
  races::Quiet quiet;
  return (*to |= x) & ~x;
}

template <typename T>
T __ldcg(const T* x) { return *x; }

template <typename T>
T min(T a, T b) { return std::min(a, b); }
template <typename T>
T max(T a, T b) { return std::max(a, b); }

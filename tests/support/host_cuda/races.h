// Which accesses of a thread block's shared memory no barrier orders, found while kernels run on the host. The kernel is
// built with -DRACES and -fsanitize=thread, whose calls before every load and store end in races.cpp, and linked with
// that file in place of the sanitizer's library.
//
// Vector clocks: each warp counts what it has released, and knows how far it has seen the others. In this order an
// access must come behind the last write of its place, and a write behind all reads of it. Copies are writes of their
// own; whoever has waited for their barrier has seen them. What this does not see:
//
// * All lanes of a warp count as one thread. What one lane has waited for, all have seen, and what a lane does behind a
//   __syncwarp may count as done before an arrival of another lane, if that one comes later.
// * Who waits for a phase of a barrier counts as having waited for a later phase of the same parity, if that has ended.
// * Scopes, proxies, the initialisation of barriers and global memory are not looked at. An atomic addition counts as a
//   read.
// * A place has two bytes: neighbours that are written as bytes by two warps are reported.

#pragma once

#include <cstddef>

namespace races {

#ifdef RACES

constexpr int kWarps = 64, kCopiers = 256;

struct Clock {
  int seen[kWarps + kCopiers] = {};
  void join(const Clock& other);
};

// A barrier, whose rounds end one after the other.
struct Order {
  Clock open, done[2];
  int rounds = 0;

  void arrive();
  void end();
  void wait(int round);     // what arrived in that round comes before what follows
  void see();               // the same for the round that is still open
  void pass_to(Order& to);  // what has arrived here arrives there too
};

// An asynchronous writer: the copies of a warp, or those that a barrier counts.
struct Copier {
  int number = -1, time = 0;

  void write(const void* to, int bytes, Order& order);
};

// Accesses in its scope are the emulation's, not the kernel's.
struct Quiet {
  Quiet();
  ~Quiet();
};

void begin(int warps);  // a launch of so many
void watch(const void* memory, size_t bytes);
void read(const void* from, int bytes);
void written(const void* to, int bytes);

int me();  // the warp that has its turn, or -1 between launches: defined in cuda_bf16.h

#else

struct Order {
  void arrive() {}
  void end() {}
  void wait(int) {}
  void see() {}
  void pass_to(Order&) {}
};
struct Copier {
  void write(const void*, int, Order&) {}
};
struct Quiet {
  Quiet() {}
};
inline void begin(int) {}
inline void watch(const void*, size_t) {}
inline void read(const void*, int) {}
inline void written(const void*, int) {}

#endif

}  // namespace races

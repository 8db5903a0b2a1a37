// Which accesses of shared memory have no order between them, found while kernels run on the host. The kernel is built
// with -DRACES and -fsanitize=thread, whose calls before every load and store end in races.cpp, and linked with that
// file in place of the sanitizer's library.
//
// Each warp counts what it has released, and knows how far it has seen the others: vector clocks. An access must come
// behind the write before it in this order, and a write behind all reads before it. Copies are writes of their own,
// which are seen by who waits for their barrier. A warp counts as one: no order among its lanes is looked for, and what
// one lane has waited for, all have seen. Nor are the proxies of the memory model.

#pragma once

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
  void wait(int round);     // what arrived in it comes before what follows
  void see();               // the same of the round that has not ended
  void pass_to(Order& to);  // what arrived here has arrived there
};

// What writes in place of a warp, for those who have waited for the round in which it ends.
struct Copier {
  int number = -1, time = 0;

  void write(const void* to, int bytes, Order& order);
};

// What is done in its scope is no access of the kernel's.
struct Quiet {
  Quiet();
  ~Quiet();
};

void begin(int warps);  // a launch
void watch(const void* memory, long bytes);
void read(const void* from, int bytes);
void written(const void* to, int bytes);

int me();  // the warp that has its turn, or -1; of who includes this

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
inline void watch(const void*, long) {}
inline void read(const void*, int) {}
inline void written(const void*, int) {}

#endif

}  // namespace races

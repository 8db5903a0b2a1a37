// See races.h. This file is built without the sanitizer.

#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <tuple>
#include <vector>

namespace races {

namespace {

constexpr int kPrinted = 20;

struct Place {  // two bytes
  int writer = -1, written = 0;
  void *written_by = nullptr, *read_by = nullptr;
  int reads[kWarps] = {};
};

struct Region {
  uintptr_t begin, end;
  std::vector<Place> places;
};

Clock clocks[kWarps];
std::vector<Region> regions;
int warps, numbers_of_copiers, quiet;  // warps of the launch
std::set<std::tuple<const char*, void*, void*>> found;  // by kind and two places in the code

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

long in_library(void* code) {
  Dl_info info{};
  dladdr(code, &info);
  return static_cast<char*>(code) - static_cast<char*>(info.dli_fbase);
}

// `addr2line -f -C -i -e LIBRARY` turns the places in the code into lines, if it is built with -g. Of several warps that
// have read, `first` is the last one's place.
void report(const char* kind, int other, void* first, void* second, long at) {
  if (found.emplace(kind, first, second).second && static_cast<int>(found.size()) <= kPrinted)
    fprintf(stderr, "%s: %s %d at %#lx, warp %d at %#lx, byte %ld of shared memory\n", kind,
            other < kWarps ? "warp" : "copies", other, in_library(first), me(), in_library(second), at);
}

// An access of this warp; a write is `writer`'s, at its time `now`.
void access(const void* at, int bytes, bool write, void* by, int writer, int now) {
  auto from = reinterpret_cast<uintptr_t>(at);
  for (Region& region : regions) {
    if (from < region.begin || from >= region.end) continue;
    require(from + bytes <= region.end, "an access beyond shared memory");
    const Clock& clock = clocks[me()];
    for (uintptr_t i = (from - region.begin) / 2; i <= (from + bytes - 1 - region.begin) / 2; i++) {
      Place& place = region.places[i];
      if (place.writer >= 0 && place.written > clock.seen[place.writer])
        report(write ? "written twice" : "read after a write", place.writer, place.written_by, by, i * 2);
      if (!write) {
        place.reads[me()] = clock.seen[me()], place.read_by = by;
        continue;
      }
      for (int warp = 0; warp < warps; warp++)
        if (warp != me() && place.reads[warp] > clock.seen[warp])
          report("written after a read", warp, place.read_by, by, i * 2);
      place.writer = writer, place.written = now, place.written_by = by;
    }
    return;
  }
}

void accessed(const void* at, int bytes, bool write, void* by) {
  if (!quiet && me() >= 0) access(at, bytes, write, by, me(), clocks[me()].seen[me()]);
}

}  // namespace

void Clock::join(const Clock& other) {
  for (int i = 0; i < kWarps + kCopiers; i++) seen[i] = std::max(seen[i], other.seen[i]);
}

void Order::arrive() {
  open.join(clocks[me()]);
  clocks[me()].seen[me()]++;
}
void Order::end() {
  done[rounds++ % 2] = open;
  open = {};
}
void Order::wait(int round) { clocks[me()].join(done[round % 2]); }
void Order::see() { clocks[me()].join(open); }
void Order::pass_to(Order& to) { to.open.join(open); }

void Copier::write(const void* to, int bytes, Order& order) {
  if (number < 0) number = kWarps + numbers_of_copiers++;
  require(number < kWarps + kCopiers, "too many barriers");
  access(to, bytes, true, __builtin_return_address(0), number, ++time);
  order.open.seen[number] = std::max(order.open.seen[number], time);
}

Quiet::Quiet() { quiet++; }
Quiet::~Quiet() { quiet--; }

void begin(int count) {
  require(count <= kWarps, "too many warps");
  warps = count;
  for (int i = 0; i < kWarps; i++) clocks[i] = {}, clocks[i].seen[i] = 1;
  regions.clear();
  numbers_of_copiers = 0;
}
void watch(const void* memory, size_t bytes) {
  auto from = reinterpret_cast<uintptr_t>(memory);
  regions.push_back({from, from + bytes, std::vector<Place>(bytes / 2 + 1)});
}
void read(const void* from, int bytes) { accessed(from, bytes, false, __builtin_return_address(0)); }
void written(const void* to, int bytes) { accessed(to, bytes, true, __builtin_return_address(0)); }

}  // namespace races

extern "C" {

// Pairs of places in the code whose accesses have no order, since this was called last.
int races_found() {
  int count = static_cast<int>(races::found.size());
  races::found.clear();
  return count;
}

#define CALLS(bytes)                                                                                                   \
  void __tsan_read##bytes(void* at) { races::accessed(at, bytes, false, __builtin_return_address(0)); }                \
  void __tsan_write##bytes(void* at) { races::accessed(at, bytes, true, __builtin_return_address(0)); }                \
  void __tsan_unaligned_read##bytes(void* at) { races::accessed(at, bytes, false, __builtin_return_address(0)); }      \
  void __tsan_unaligned_write##bytes(void* at) { races::accessed(at, bytes, true, __builtin_return_address(0)); }
CALLS(1)
CALLS(2)
CALLS(4)
CALLS(8)
CALLS(16)

void __tsan_read_range(void* at, unsigned long bytes) { races::accessed(at, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* at, unsigned long bytes) { races::accessed(at, bytes, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
int __tsan_atomic32_fetch_add(volatile int* at, int x, int) { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_load(const volatile int* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
long __tsan_atomic64_load(const volatile long* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
void __tsan_atomic64_store(volatile long* at, long x, int) { __atomic_store_n(at, x, __ATOMIC_SEQ_CST); }
unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
}

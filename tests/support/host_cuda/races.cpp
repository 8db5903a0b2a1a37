// See races.h. This file is built without the sanitizer.

#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

namespace races {

namespace {

constexpr int kReports = 20;

struct Place {  // two bytes
  int writer = -1, written = 0;
  void *by = nullptr, *read_by = nullptr;
  int reads[kWarps] = {};
};

struct Region {
  uintptr_t begin, end;
  std::vector<Place> places;
};

Clock clocks[kWarps];
std::vector<Region> regions;
int copiers, quiet;
bool copies_release;
std::map<std::pair<void*, void*>, int> found;

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "%s\n", what);
  abort();
}

void report(const char* kind, void* first, void* second) {
  if (found[{first, second}]++ || static_cast<int>(found.size()) > kReports) return;
  Dl_info info{};
  dladdr(second, &info);
  auto base = reinterpret_cast<uintptr_t>(info.dli_fbase);
  fprintf(stderr, "%s: %#lx and %#lx\n", kind, reinterpret_cast<uintptr_t>(first) - base,
          reinterpret_cast<uintptr_t>(second) - base);
}

// An access of this warp; a write is `writer`'s, at its time `now`.
void access(const void* at, int bytes, bool write, void* by, int writer, int now) {
  auto from = reinterpret_cast<uintptr_t>(at);
  for (Region& region : regions) {
    if (from < region.begin || from >= region.end) continue;
    const Clock& clock = clocks[me()];
    for (uintptr_t i = (from - region.begin) / 2; i <= (from + bytes - 1 - region.begin) / 2; i++) {
      Place& place = region.places[i];
      if (place.writer >= 0 && place.written > clock.seen[place.writer])
        report(write ? "written twice" : "read after a write", place.by, by);
      if (!write) {
        place.reads[me()] = clock.seen[me()], place.read_by = by;
        continue;
      }
      for (int warp = 0; warp < kWarps; warp++)
        if (warp != me() && place.reads[warp] > clock.seen[warp]) report("written after a read", place.read_by, by);
      place.writer = writer, place.written = now, place.by = by;
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
void Order::pass_to(Order& to) {
  to.open.join(open);
  if (copies_release) to.arrive();
}

void Copier::write(const void* to, int bytes, Order& order) {
  if (number < 0) number = kWarps + copiers++;
  require(number < kWarps + kCopiers, "too many barriers");
  access(to, bytes, true, __builtin_return_address(0), number, ++time);
  order.open.seen[number] = std::max(order.open.seen[number], time);
}

Quiet::Quiet() { quiet++; }
Quiet::~Quiet() { quiet--; }

void begin(int warps) {
  require(warps <= kWarps, "too many warps");
  for (int i = 0; i < kWarps; i++) clocks[i] = {}, clocks[i].seen[i] = 1;
  regions.clear();
  copiers = 0;
}
void watch(const void* memory, long bytes) {
  auto from = reinterpret_cast<uintptr_t>(memory);
  regions.push_back({from, from + bytes, std::vector<Place>(bytes / 2 + 1)});
}
void read(const void* from, int bytes) { accessed(from, bytes, false, __builtin_return_address(0)); }
void written(const void* to, int bytes) { accessed(to, bytes, true, __builtin_return_address(0)); }

}  // namespace races

extern "C" {

// Whether an arrival at the end of a thread's copies releases what else it has done or seen. PTX does not say so.
void races_copies_release(int release) { races::copies_release = release; }

int races_found() { return static_cast<int>(races::found.size()); }

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

// Small programs of which each barrier orders what they access, or does not: what races.h has to tell apart.

#include "sm90_host.h"

namespace {

struct Shared {
  sm90::Barrier barrier, sent;
  alignas(16) int words[128];
};

Shared& shared() { return *reinterpret_cast<Shared*>(sm90::tiles_memory()); }
alignas(16) int global[128];
volatile int sink;

int lane() { return threadIdx.x % 32; }
bool is_first() { return threadIdx.x < 32; }
bool is_block(int number) { return sm90::mine == &sm90::memories[number]; }

void set_up(int arrivals, int bytes = 0) {
  if (threadIdx.x == 0) {
    sm90::init(&shared().barrier, arrivals);
    sm90::init(&shared().sent, 1);
    if (bytes) sm90::expect(&shared().sent, bytes);
  }
  __syncthreads();
}

// The first warp writes, the second one reads; `order` stands between them, or before both.
void write_and_read(bool ordered, const std::function<void()>& order) {
  set_up(1);
  if (!ordered) order();
  if (is_first()) shared().words[lane()] = lane();
  if (ordered) order();
  if (!is_first()) sink = shared().words[lane()];
}

void by_mbarrier(bool ordered) {
  write_and_read(ordered, [] {
    if (!is_first()) return sm90::wait(&shared().barrier, 0);
    __syncwarp();
    sm90::arrive_warp(&shared().barrier, lane());
  });
}
void by_named_barrier(bool ordered) {
  write_and_read(ordered, [] { sm90::sync_threads(3, 64); });
}
void by_syncthreads(bool ordered) {
  write_and_read(ordered, [] { __syncthreads(); });
}

void copy_16_bytes() { sm90::copy_async_small<16>(sm90::shared_address(&shared().words[lane() * 4]), &global[lane() * 4]); }

void by_waiting_for_copies(bool ordered) {
  set_up(1);
  if (is_first()) copy_16_bytes();
  if (is_first() && ordered) sm90::wait_copies();
  __syncthreads();
  if (!is_first()) sink = shared().words[lane()];
}

// Copies' arrivals order the copies, and no other store.
void by_copies_arrivals(bool ordered) {
  set_up(32);
  if (is_first()) {
    copy_16_bytes();
    if (!ordered) sm90::wait_copies(), shared().words[lane() * 4] = lane();
    sm90::arrive_after_copies(&shared().barrier);
  } else {
    sm90::wait(&shared().barrier, 0);
    sink = shared().words[lane() * 4];
  }
}

void by_bulk_copy(bool ordered) {
  set_up(1, 512);
  if (threadIdx.x == 0) sm90::copy_bytes(shared().words, global, 512, &shared().sent);
  if (is_first()) return;
  if (ordered) sm90::wait(&shared().sent, 0);
  sink = shared().words[lane()];
  sm90::wait(&shared().sent, 0);
}

void send_to(int block) {
  uint32_t to = sm90::address_of(&shared().words[lane() * 2], block), barrier = sm90::address_of(&shared().sent, block);
  sm90::send(to, float2{1, 2}, barrier);
}

void by_waiting_for_sent(bool ordered) {
  set_up(1, is_block(1) ? 256 : 0);
  sm90::release_in_cluster();
  sm90::wait_cluster();
  if (is_block(0) && is_first()) send_to(1);
  if (is_block(0)) return;
  if (ordered) sm90::wait_for_sent(&shared().sent, 0);
  sink = shared().words[lane()];
  sm90::wait_for_sent(&shared().sent, 0);
}

// What another thread block overwrites has been read before.
void by_cluster_barrier(bool ordered) {
  set_up(1, is_block(1) ? 256 : 0);
  if (is_block(1)) sink = shared().words[lane()];
  ordered ? sm90::release_in_cluster() : sm90::arrive_in_cluster();
  sm90::wait_cluster();
  if (is_block(0) && is_first()) send_to(1);
  if (is_block(1)) sm90::wait_for_sent(&shared().sent, 0);
}

void by_atomic_additions(bool ordered) {
  set_up(1);
  ordered ? atomicAdd(&shared().words[0], 1) : shared().words[0]++;
}

void (*all[])(bool) = {by_mbarrier,        by_named_barrier, by_syncthreads,      by_waiting_for_copies,
                       by_copies_arrivals, by_bulk_copy,     by_waiting_for_sent, by_cluster_barrier,
                       by_atomic_additions};

}  // namespace

extern "C" int programs() { return std::size(all); }

extern "C" void run_program(int number, bool ordered, unsigned seed) {
  bool cluster = all[number] == by_waiting_for_sent || all[number] == by_cluster_barrier;
  sm90::readable.clear();
  sm90::allow(global, sizeof global);
  sm90::run(cluster ? 2 : 1, 64, sizeof(Shared) + 2048, [=] { all[number](ordered); }, [](int) {}, seed, cluster);
}

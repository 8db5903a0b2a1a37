// What sm90.cuh has, on the host, as late as it may happen: a copy lands when somebody waits for it, and the bytes of its
// place are 0xFF until then; sums of products are there when somebody waits for them. Operands must stay as they are from
// a product's start to its end. What is read of global memory, but not by ordinary loads, must be in one of the ranges
// that the test allows.

#pragma once

#include "cuda.h"
#include "cuda_bf16.h"

#include <cmath>
#include <deque>
#include <unordered_map>

#define SM90_DEVICE
#define __grid_constant__

struct alignas(16) float4 {
  float x, y, z, w;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __log2f(float x) { return log2f(x); }

namespace sm90 {

using Barrier = uint64_t;

using host::require;

// --- memory -----------------------------------------------------------------------------------------------------

struct Copy {
  uint8_t* to;
  const uint8_t* from;  // null: the value, or zeros
  int bytes;
  uint64_t value = 0;
  bool landed = false;

  void land() {
    races::Quiet quiet;
    if (!landed) from ? memcpy(to, from, bytes) : bytes == 8 ? memcpy(to, &value, 8) : memset(to, 0, bytes);
    landed = true;
  }
};
using Copies = std::vector<std::shared_ptr<Copy>>;

struct State {
  int arrivals = 0, missing = 0, bytes = 0, phase = 0;
  races::Order order;
  races::Copier copier;
  Copies copies;              // that count bytes
  std::vector<Copies> later;  // of threads that arrive once these have landed
};

// A product of this thread's warpgroup: what writes the thread's sums, its operands, and what both were at its start.
struct Product {
  std::function<void(const Product&)> write;
  std::function<std::vector<float>()> operands;  // as they are now
  float* sums;
  std::vector<float> before, at_start;  // the sums and the operands then
};

struct Memory {
  size_t bytes;  // from the first tile on
  std::vector<uint64_t> arena;
  std::unordered_map<const Barrier*, State> barriers;
  std::unordered_map<int, host::Meeting> named;
  std::vector<std::deque<std::vector<Product>>> products;  // of each thread: groups, the last one open
  std::vector<Copies> copies;                              // of each thread, not waited for
  std::vector<std::pair<races::Copier, races::Order>> copiers;  // of each warp, and what it has copied
  std::vector<bool> may_multiply;                          // of each thread, since it has waited for products

  uint8_t* tiles() {
    uint8_t* begin = reinterpret_cast<uint8_t*>(arena.data());
    return begin + (1024 - reinterpret_cast<uintptr_t>(begin) % 1024) % 1024;
  }
};

inline std::vector<Memory> memories;  // of the thread blocks that run together
inline Memory* mine;                  // of the one that has its turn
inline bool in_cluster;               // their kernel was launched in clusters
inline host::Crossing cluster;
inline std::vector<std::pair<const uint8_t*, const uint8_t*>> readable;

inline void allow(const void* begin, int64_t bytes) {
  auto from = static_cast<const uint8_t*>(begin);
  if (begin) readable.push_back({from, from + bytes});
}
inline void require_readable(const void* at, int bytes) {
  auto from = static_cast<const uint8_t*>(at);
  for (auto [begin, end] : readable)
    if (from >= begin && from + bytes <= end) return require((from - begin) % bytes == 0, "a read that is not aligned");
  require(false, "a read from outside what may be read");
}

// Runs a program in all threads of some thread blocks, or of a cluster; `enter` says which one is current.
inline void run(int blocks, int threads, size_t shared_bytes, std::function<void()> program,
                std::function<void(int)> enter, unsigned seed = 0, bool are_cluster = false) {
  in_cluster = are_cluster;
  memories = std::vector<Memory>(blocks);
  races::begin(blocks * threads / 32);
  for (Memory& memory : memories) {
    memory.bytes = shared_bytes - 1024;
    memory.arena.assign(shared_bytes / 8 + 1, 0x5A5A5A5A5A5A5A5A);  // a copy's 0xFF is another, so it is noticed
    memory.products.assign(threads, {{}});
    memory.copies.resize(threads);
    memory.copiers.resize(threads / 32);
    races::watch(memory.tiles(), memory.bytes);
    memory.may_multiply.resize(threads);
  }
  cluster.reset(blocks * threads);
  host::run_together(blocks, threads, program, [&](int block) {
    mine = &memories[block];
    enter(block);
  }, seed);
  for (Memory& memory : memories)
    for (const auto& [barrier, state] : memory.barriers)
      require(state.copies.empty() && state.bytes == 0, "bytes that nobody has waited for");
}

inline uint8_t* tiles_memory() { return mine->tiles(); }
inline uint8_t* aligned_memory() { return mine->tiles(); }
// As on the GPU, an address in a cluster has the thread block's rank in its highest byte.
inline uint32_t with_rank(uint32_t address, size_t rank) { return (address & 0xFFFFFF) | static_cast<uint32_t>(rank) << 24; }
inline uint32_t shared_address(const void* x) {
  auto address = static_cast<uint32_t>(static_cast<const uint8_t*>(x) - tiles_memory()) + 1024;
  return with_rank(address, in_cluster ? mine - memories.data() : 0);
}
// The place of so many bytes, of this thread block or of another.
inline uint8_t* at_address(uint32_t address, int bytes = 16, Memory& memory = *mine) {
  address &= 0xFFFFFF;
  require(address >= 1024 && address + bytes - 1024 <= memory.bytes && address % bytes == 0, "no place of shared memory");
  return memory.tiles() + address - 1024;
}

inline void store(uint32_t to, uint4 x) {
  races::written(at_address(to), 16);
  races::Quiet quiet;
  memcpy(at_address(to), &x, 16);
}

inline uint4 load(uint32_t from) {
  races::read(at_address(from), 16);
  races::Quiet quiet;
  uint4 x;
  memcpy(&x, at_address(from), 16);
  return x;
}

// Each lane writes row l % 8 of matrix l / 8, at the address that it gives.
inline void store_matrices(uint32_t to, const uint32_t (&x)[4]) {
  uint32_t row[4];
  for (int i = 0; i < 4; i++) {
    const auto& words = host::meet_warp(x[i]);
    for (int j = 0; j < 4 && host::lane() / 8 == i; j++) row[j] = static_cast<uint32_t>(words[host::lane() % 8 * 4 + j]);
  }
  races::written(at_address(to), 16);
  races::Quiet quiet;
  memcpy(at_address(to), row, 16);
}

// Each lane gives the address of row l % 8 of matrix l / 8, and gets numbers 2 (l % 4) and the next of row l / 4 of each.
inline void load_matrices(uint32_t (&x)[4], uint32_t from) {
  const auto& addresses = host::meet_warp(from);
  for (int i = 0; i < 4; i++) {
    const uint8_t* at = at_address(addresses[i * 8 + host::lane() / 4]) + host::lane() % 4 * 4;
    races::read(at, 4);
    races::Quiet quiet;
    memcpy(&x[i], at, 4);
  }
}

// --- numbers ----------------------------------------------------------------------------------------------------

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
inline uint32_t bits_of_bfloat16(float x) {
  uint32_t bits = bits_as<uint32_t>(x);
  return std::isnan(x) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t rounded(float2 x) { return bits_of_bfloat16(x.x) | bits_of_bfloat16(x.y) << 16; }
inline uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  return rounded({bfloat16(x & 0xFFFF) * bfloat16(y & 0xFFFF), bfloat16(x >> 16) * bfloat16(y >> 16)});
}
inline uint32_t larger_pairs(uint32_t x, uint32_t y) {
  return std::max(x & 0xFFFF, y & 0xFFFF) | std::max(x >> 16, y >> 16) << 16;
}
inline void scale_pair(uint32_t& x, uint32_t scale) { x = multiply_pairs(x, scale); }

inline float e5m2(uint8_t byte) { return static_cast<float>(bits_as<_Float16>(static_cast<uint16_t>(byte << 8))); }
inline float decoded_e4m3(uint8_t byte) {
  int exponent = byte >> 3 & 15, mantissa = byte & 7;
  float x = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return (byte & 0x7F) == 0x7F ? NAN : byte & 0x80 ? -x : x;
}
inline float e4m3(uint8_t byte) {
  static const auto numbers = [] {
    std::array<float, 256> all;
    for (int i = 0; i < 256; i++) all[i] = decoded_e4m3(i);
    return all;
  }();
  return numbers[byte];
}
inline void two_halves(uint32_t& low, uint32_t& high, uint32_t fp8) {
  uint32_t x[4];
  for (int i = 0; i < 4; i++) x[i] = bits_as<uint16_t>(static_cast<_Float16>(e4m3(fp8 >> 8 * i & 0xFF)));
  low = x[0] | x[1] << 16, high = x[2] | x[3] << 16;
}
inline float2 two_floats(uint32_t halves) {
  auto float_of = [](uint16_t bits) { return static_cast<float>(bits_as<_Float16>(bits)); };
  return {float_of(halves & 0xFFFF), float_of(halves >> 16)};
}
inline uint32_t rounded_to_halves(float2 x) {
  uint32_t low = bits_as<uint16_t>(static_cast<_Float16>(x.x)), high = bits_as<uint16_t>(static_cast<_Float16>(x.y));
  return low | high << 16;
}
inline float rectified(float x) { return x <= 0 ? 0 : x; }
inline float exp2_approx(float x) {
  float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}

// --- barriers ---------------------------------------------------------------------------------------------------

#ifdef EVERY_LANE_ARRIVES
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

inline State& state_of(Memory& memory, const Barrier* barrier) {
  auto found = memory.barriers.find(barrier);
  require(found != memory.barriers.end(), "a barrier that is not initialised");
  return found->second;
}
inline void init(Barrier* barrier, int arrivals) {
  mine->barriers[barrier] = State{arrivals, arrivals};
}
inline void fence_barriers() {}
inline void wait_for_launch_ahead() {}
inline void let_next_launch_begin() {}
inline void fence_matrix_reads() {}

inline void complete(State& state) {
  if (state.missing || state.bytes) return;
  state.phase++;
  state.order.end();
  state.missing = state.arrivals;
  host::news++;
}
inline void arrive(Barrier* barrier) {
  State& state = state_of(*mine, barrier);
  require(state.missing > 0, "more arrivals than a barrier has");
  state.missing--;
  state.order.arrive();
  complete(state);
}
inline void arrive_warp(Barrier* barrier, int lane) {
  if (kArrivalsOfWarp == 32 || lane == 0) arrive(barrier);
}
inline void expect(Barrier* barrier, int bytes) {
  state_of(*mine, barrier).bytes += bytes;
  arrive(barrier);
}
inline void wait(Barrier* barrier, int parity) {
  State& state = state_of(*mine, barrier);
  while (state.phase % 2 == parity) {
    if (state.missing && state.missing <= static_cast<int>(state.later.size())) {
      require(state.missing == static_cast<int>(state.later.size()), "more arrivals than a barrier has");
      for (Copies& copies : state.later)
        for (auto& copy : copies) copy->land();
      state.later.clear();
      state.missing = 0;
      complete(state);
    } else if (state.missing == 0 && !state.copies.empty()) {
      for (auto& copy : state.copies) copy->land(), state.bytes -= copy->bytes;
      state.copies.clear();
      complete(state);
    } else {
      host::give_way();
    }
  }
  state.order.wait(parity);
}
inline void sync_threads(int barrier, int threads) {
  host::Meeting& meeting = mine->named[barrier];
  int round = meeting.round;
  meeting.order.arrive();
  if (++meeting.arrived == threads) meeting.arrived = 0, meeting.round++, host::news++, meeting.order.end();
  while (meeting.round == round) host::give_way();
  meeting.order.wait(round);
}

template <int kRegisters>
void grow_registers() {}
template <int kRegisters>
void shrink_registers() {}

// --- copies -----------------------------------------------------------------------------------------------------

// From null it copies zeros.
inline std::shared_ptr<Copy> begun(uint8_t* to, const void* from, int bytes, races::Copier& copier, races::Order& order) {
  copier.write(to, bytes, order);
  races::Quiet quiet;
  if (from) require_readable(from, std::min(bytes, 16));
  require(shared_address(to) % std::min(bytes, 16) == 0, "a copy to a place that is not aligned");
  memset(to, 0xFF, bytes);
  return std::make_shared<Copy>(Copy{to, static_cast<const uint8_t*>(from), bytes});
}
inline void copy_bytes(void* to, const void* from, int bytes, Barrier* barrier) {
  require(bytes % 16 == 0, "a copy of no multiple of 16 bytes");
  require_readable(static_cast<const uint8_t*>(from) + bytes - 16, 16);
  State& state = state_of(*mine, barrier);
  state.copies.push_back(begun(static_cast<uint8_t*>(to), from, bytes, state.copier, state.order));
}
inline void copy_bytes_once(void* to, const void* from, int bytes, Barrier* barrier) {
  copy_bytes(to, from, bytes, barrier);
}
inline void begin_copy(uint8_t* to, const void* from, int bytes) {
  auto& [copier, order] = mine->copiers[threadIdx.x / 32];
  mine->copies[threadIdx.x].push_back(begun(to, from, bytes, copier, order));
}
inline void copy_async(uint32_t to, const void* from, bool read) { begin_copy(at_address(to), read ? from : nullptr, 16); }
template <int kBytes>
void copy_async_small(uint32_t to, const void* from) {
  require(from, "a copy from nowhere");
  begin_copy(at_address(to, kBytes), from, kBytes);
}
inline void wait_copies() {
  for (auto& copy : mine->copies[threadIdx.x]) copy->land();
  mine->copies[threadIdx.x].clear();
  mine->copiers[threadIdx.x / 32].second.see();
}
inline void arrive_after_copies(Barrier* barrier) {
  State& state = state_of(*mine, barrier);
  mine->copiers[threadIdx.x / 32].second.pass_to(state.order);
  state.later.push_back(mine->copies[threadIdx.x]);
  std::erase_if(mine->copies[threadIdx.x], [](const auto& copy) { return copy->landed; });
}
inline void prefetch(const void*) {}
inline uint4 load_once(const void* from) {
  require_readable(from, 16);
  return *static_cast<const uint4*>(from);
}

// A box's lines of 128 bytes, one behind the other, with their chunks of 16 bytes permuted as the address says; zeros
// for what is outside the tensor.
inline void copy_box(void* to, const CUtensorMap& map, std::array<int, 5> at, Barrier* barrier) {
  require(shared_address(to) % 1024 == 0 && map.box[0] == 128, "a box whose place is not aligned");
  int count = 1;
  for (int axis = 1; axis < map.axes; axis++) count *= map.box[axis];
  for (int line = 0; line < count; line++) {
    const uint8_t* from = map.data;
    bool inside = true;
    for (int axis = 1, rest = line; axis < map.axes; rest /= map.box[axis++]) {
      int64_t index = at[axis] + rest % map.box[axis];
      inside &= index >= 0 && index < map.sizes[axis];
      from += index * map.strides[axis];
    }
    for (int chunk = 0; chunk < 8; chunk++) {
      uint8_t* place = static_cast<uint8_t*>(to) + line * 128 + (chunk ^ line % 8) * 16;
      State& state = state_of(*mine, barrier);
      state.copies.push_back(begun(place, inside ? from + chunk * 16 : nullptr, 16, state.copier, state.order));
    }
  }
}
inline void copy_box(void* to, const CUtensorMap& map, int line, int page, Barrier* barrier) {
  require(map.axes == 3, "a tensor of three axes is expected");
  copy_box(to, map, {0, line, page}, barrier);
}
inline void copy_box(void* to, const CUtensorMap& map, int row, Barrier* barrier) {
  require(map.axes == 5, "a tensor of five axes is expected");
  copy_box(to, map, {0, 0, 0, 0, row}, barrier);
}

// --- matrix products --------------------------------------------------------------------------------------------

constexpr int kTileBytes = 8192;

inline uint64_t by_rows(uint32_t address) {
  return uint64_t{address >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
inline uint64_t by_columns(uint32_t address) {
  return uint64_t{address >> 4} | uint64_t{kTileBytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
inline uint32_t without_rank(uint32_t address) { return with_rank(address, 0); }
inline uint64_t advance(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }

// What a matrix in shared memory has: of its `line`-th row (or column) the byte `byte`, of two of them for bfloat16; by
// columns, the numbers of a line are rows apart.
struct Matrix {
  uint32_t start, first_stride, second_stride;
  explicit Matrix(uint64_t bits)
      : start((bits & 0x3FFF) << 4), first_stride((bits >> 16 & 0x3FFF) << 4), second_stride((bits >> 32 & 0x3FFF) << 4) {}
  const uint8_t* at(uint32_t address) const { return at_address(address ^ (address >> 7 & 7) << 4, 1); }
  const uint8_t* of_row(int line, int byte) const { return at(start + line / 8 * second_stride + line % 8 * 128 + byte); }
  float bfloat16_of(bool by_columns, int line, int k) const {
    uint32_t columns = start + line / 64 * first_stride + line % 64 * 2 + k / 8 * second_stride + k % 8 * 128;
    const uint8_t* from = by_columns ? at(columns) : of_row(line, k * 2);
    return bfloat16(from[0] | from[1] << 8);
  }
};

// A lane has, of every 8 columns, columns 2 (l % 4) and the next of rows l / 4 and l / 4 + 8 of its warp's 16.
inline int row_of(int i) { return host::lane() / 4 + i % 4 / 2 * 8; }
inline int column_of(int i) { return i / 4 * 8 + host::lane() % 4 * 2 + i % 2; }

// All of a warp's lanes execute these together.
inline void begin_products() {
  host::meet_warp(0);
  mine->may_multiply[threadIdx.x] = true;
}
inline void commit_products() { mine->products[threadIdx.x].emplace_back(); }
template <int kLeft>
void wait_products() {
  auto& groups = mine->products[threadIdx.x];
  for (; groups.size() > kLeft + 1; groups.pop_front())
    for (const Product& product : groups.front()) {
      std::vector<float> operands = product.operands();
      bool same = !memcmp(operands.data(), product.at_start.data(), operands.size() * 4);
      require(same, "an operand changes while its product is under way");
      std::copy(product.before.begin(), product.before.end(), product.sums);
      product.write(product);
    }
  host::meet_warp(0);
  mine->may_multiply[threadIdx.x] = false;
}

// The sums are NaN until they are waited for.
template <int kSums>
void begin_product(float (&sums)[kSums], bool add, std::function<std::vector<float>()> operands,
                   std::function<void(const Product&)> write) {
  require(mine->may_multiply[threadIdx.x], "a product before begin_products");
  Product product{std::move(write), operands, sums, {}, operands()};
  auto& groups = mine->products[threadIdx.x];
  bool pending = false;
  for (const auto& group : groups)
    for (const Product& other : group) pending |= other.sums == sums;
  if (!pending) {
    if (add) product.before.assign(sums, sums + kSums);
    std::fill(sums, sums + kSums, NAN);
  }
  groups.back().push_back(std::move(product));
}

// += (64 x 16) · (16 x 2 kSums) of bfloat16; = where `add` is false. A lane's operands: 16 numbers of two rows of the
// first matrix, and of every column that it has of the second.
template <int kSums>
void multiply_shared(float (&sums)[kSums], uint64_t a, bool a_by_columns, uint64_t b, bool b_by_columns, bool add) {
  auto operands = [=] {
    Matrix first(a), second(b);
    std::vector<float> all;
    for (int i = 0; i < 4; i += 2)
      for (int k = 0; k < 16; k++)
        all.push_back(first.bfloat16_of(a_by_columns, threadIdx.x / 32 % 4 * 16 + row_of(i), k));
    for (int i = 0; i < kSums; i++)
      for (int k = 0; i % 4 < 2 && k < 16; k++) all.push_back(second.bfloat16_of(b_by_columns, column_of(i), k));
    return all;
  };
  begin_product(sums, add, operands, [=](const Product& product) {
    const float *rows = product.at_start.data(), *column = rows + 32;
    for (int i = 0; i < kSums; i++) {
      if (i % 4 > 1) continue;
      float sum[2] = {add ? product.sums[i] : 0, add ? product.sums[i + 2] : 0};
      for (int k = 0; k < 16; k++) sum[0] += rows[k] * column[k], sum[1] += rows[16 + k] * column[k];
      product.sums[i] = sum[0], product.sums[i + 2] = sum[1];
      column += 16;
    }
  });
}
inline void add_in_global(float* to, float4 x) {
  require(reinterpret_cast<uintptr_t>(to) % 16 == 0, "misaligned");
  to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
}
template <bool kByColumns, int kSums>
void multiply_by_columns(float (&d)[kSums], uint64_t a, uint64_t b, bool add) {
  multiply_shared(d, a, kByColumns, b, true, add);
}
template <bool kByColumns, int kSums>
void multiply(float (&d)[kSums], uint64_t a, uint64_t b, bool add) {
  multiply_shared(d, a, kByColumns, b, false, add);
}

// += (64 x 8 kPer) · (8 kPer x 2 kSums), the first matrix in the registers of the warps, kPer numbers in each: four of FP8
// or two of bfloat16. A lane's operands: its registers, as bits, and all numbers of every column that it has of the second
// matrix.
template <int kPer, int kSums>
void multiply_from_registers(float (*number)(const uint8_t*), float (&sums)[kSums], const uint32_t (&registers)[4],
                             uint64_t matrix, bool add) {
  constexpr int kBytes = 4 / kPer, kDepth = 8 * kPer;
  const uint32_t* words = registers;
  auto operands = [=] {
    Matrix second(matrix);
    std::vector<float> all;
    for (int word = 0; word < 4; word++) all.push_back(__int_as_float(words[word]));
    for (int i = 0; i < kSums; i++)
      for (int k = 0; i % 4 < 2 && k < kDepth; k++) all.push_back(number(second.of_row(column_of(i), k * kBytes)));
    return all;
  };
  begin_product(sums, add, operands, [=](const Product& product) {
    float rows[16][kDepth];
    for (int word = 0; word < 4; word++) {
      const auto& all = host::meet_warp(words[word]);
      for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < kPer; i++)
          rows[lane / 4 + word % 2 * 8][word / 2 * 4 * kPer + lane % 4 * kPer + i] =
              number(reinterpret_cast<const uint8_t*>(&all[lane]) + i * kBytes);
    }
    const float* column = product.at_start.data() + 4;
    for (int i = 0; i < kSums; i++) {
      if (i % 4 > 1) continue;
      float sum[2] = {add ? product.sums[i] : 0, add ? product.sums[i + 2] : 0};
      for (int k = 0; k < kDepth; k++)
        sum[0] += rows[row_of(i)][k] * column[k], sum[1] += rows[row_of(i + 2)][k] * column[k];
      product.sums[i] = sum[0], product.sums[i + 2] = sum[1];
      column += kDepth;
    }
  });
}
template <int kSums>
void multiply_e5m2(float (&sums)[kSums], const uint32_t (&operand)[4], uint64_t matrix, bool add) {
  multiply_from_registers<4>([](const uint8_t* at) { return e5m2(*at); }, sums, operand, matrix, add);
}
template <int kSums>
void multiply(float (&sums)[kSums], const uint32_t (&operand)[4], uint64_t matrix, bool add) {
  multiply_from_registers<4>([](const uint8_t* at) { return e4m3(*at); }, sums, operand, matrix, add);
}
template <int kSums>
void multiply_bfloat16(float (&sums)[kSums], const uint32_t (&operand)[4], uint64_t matrix, bool add) {
  auto number = [](const uint8_t* at) { return bfloat16(at[0] | at[1] << 8); };
  multiply_from_registers<2>(number, sums, operand, matrix, add);
}

inline void multiply_in_warp(float* sums, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float first[16][16], second[8][16];
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  for (int word = 0; word < 6; word++) {
    const auto& all = host::meet_warp(words[word]);
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
    for (int k = 0; k < 16; k++) sums[i] += first[row_of(i)][k] * second[column_of(i)][k];
}

// --- clusters ---------------------------------------------------------------------------------------------------

inline void arrive_in_cluster() { cluster.arrive(false); }
inline void release_in_cluster() { cluster.arrive(); }
inline void wait_cluster() { cluster.wait(); }
inline void wait_for_sent(Barrier* barrier, int parity) { wait(barrier, parity); }

inline uint32_t address_of(const void* here, int rank) { return with_rank(shared_address(here), rank); }

inline void send(uint32_t to, float2 x, uint32_t barrier) {
  require(in_cluster && to >> 24 == barrier >> 24 && (to >> 24) < memories.size(), "sent to no thread block");
  require(cluster.round > 0 && cluster.rounds[host::Crossing::me()] < 0, "sent before all thread blocks have begun");
  Memory& there = memories[to >> 24];
  auto place = [&](uint32_t address) { return at_address(address, 8, there); };
  State& state = state_of(there, reinterpret_cast<Barrier*>(place(barrier)));
  state.copier.write(place(to), 8, state.order);
  races::Quiet quiet;
  auto copy = std::make_shared<Copy>(Copy{place(to), nullptr, 8, bits_as<uint64_t>(x)});
  memset(copy->to, 0xFF, 8);
  state.copies.push_back(copy);
}
inline void send(uint32_t to, uint4 x, uint32_t barrier) {
  require(to % 16 == 0, "misaligned");
  send(to, bits_as<float2>(uint64_t{x.y} << 32 | x.x), barrier);
  send(to + 8, bits_as<float2>(uint64_t{x.w} << 32 | x.z), barrier);
}

}  // namespace sm90

inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) { return sm90::permute(x, y, selector & 0x7777); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return bits_as<__nv_bfloat162>(sm90::rounded({x, y})); }
template <typename T>
T __ldg(const T* from) {
  sm90::require_readable(from, sizeof(T));
  return *from;
}

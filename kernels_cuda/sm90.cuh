// Hopper's instructions as functions: shared-memory barriers, asynchronous copies, warpgroup matrix products.

#pragma once

#ifndef SM90_DEVICE  // tests define it, and what stands for all of this on the host
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* x) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(x));
}

// A block's dynamic shared memory from the first multiple of 1024 bytes on, where tiles begin.
__device__ __forceinline__ uint8_t* tiles_memory() {
  extern __shared__ uint8_t memory[];
  return memory + (1024 - shared_address(memory) % 1024) % 1024;
}

// The same without a gap before it, so that its addresses are constants.
__device__ __forceinline__ uint8_t* aligned_memory() {
  extern __shared__ __align__(1024) uint8_t aligned[];
  return aligned;
}

// --- numbers ----------------------------------------------------------------------------------------------------

// Four of the eight bytes of x and y: each of the selector's four low nibbles names one, of x up to 3.
__device__ __forceinline__ uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(selector));
  return bytes;
}

// The products of two pairs of bfloat16 numbers.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  uint32_t products;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(x), "r"(y));
#else  // plus -0
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(x), "r"(y), "r"(0x80008000));
#endif
  return products;
}

// The larger ones of two pairs of unsigned 16-bit numbers.
__device__ __forceinline__ uint32_t larger_pairs(uint32_t x, uint32_t y) { return __vmaxu2(x, y); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The next four are volatile, so they stay in the order in which they are written. A caller does each for several
// numbers, which hides its latency.

// Four e4m3 numbers, in float16.
__device__ __forceinline__ void two_halves(uint32_t& low, uint32_t& high, uint32_t fp8) {
  asm volatile(
      "{\n.reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(fp8));
}

__device__ __forceinline__ float2 two_floats(uint32_t halves) {
  float2 x;
  asm volatile(
      "{\n.reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.f32.f16 %0, a;\n"
      "cvt.f32.f16 %1, b;\n}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(halves));
  return x;
}

// A pair of bfloat16 numbers, the first one in the low half.
__device__ __forceinline__ uint32_t rounded(float2 x) {
  uint32_t pair;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x.y), "f"(x.x));
  return pair;
}

// The float16 numbers nearest to two values, the first one in the low half.
__device__ __forceinline__ uint32_t rounded_to_halves(float2 x) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x.y), "f"(x.x));
  return pair;
}

// Multiplies two pairs of bfloat16 numbers, in place. `multiply_pairs` does the same, and may be moved.
__device__ __forceinline__ void scale_pair(uint32_t& x, uint32_t scale) {
  asm volatile("mul.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(scale));
}

// The larger of x and 0; a NaN stays one.
__device__ __forceinline__ float rectified(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

// --- barriers ---------------------------------------------------------------------------------------------------

using Barrier = uint64_t;  // in shared memory

__device__ __forceinline__ void init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One lane arrives for its warp, and for all that the warp has written. racecheck sees the order only of the lanes that
// arrive (docs/internals/kernels-checked.md), so for it every lane arrives.
#ifdef EVERY_LANE_ARRIVES
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif

__device__ __forceinline__ void arrive_warp(Barrier* barrier, int lane) {
  if (kArrivalsOfWarp == 32 || lane == 0) arrive(barrier);
}

// Waits for the end of the barrier's phase of this parity. The phase before the first has parity 1 and counts as ended.
__device__ __forceinline__ void wait(Barrier* barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Synchronises `threads` threads of a block. Barrier 0 is that of __syncthreads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Stands between ordinary writes to shared memory, which this thread made or has seen, and the matrix products that it
// starts and that read them. It waits for all memory operations that its warp has in flight. So consumers execute it,
// not producers, which have loads in flight.
__device__ __forceinline__ void fence_matrix_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- copies -----------------------------------------------------------------------------------------------------

// Adds to four numbers in global memory, which begin at a multiple of 16 bytes, in any order with other threads. The L2
// gives them up last, for they are added to again.
__device__ __forceinline__ void add_in_global(float* to, float4 x) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy)
               : "memory");
}

// Copies 16 bytes, or writes as many zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool read) {
  int bytes = read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Copies 4, 8 or 16 bytes.
template <int kBytes>
__device__ __forceinline__ void copy_async_small(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}

// Copies a multiple of 16 bytes between multiples of 16, and counts them at a barrier.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, Barrier* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// As `copy_bytes`, of what nobody reads again: the L2 gives it up first.
__device__ __forceinline__ void copy_bytes_once(void* to, const void* from, int bytes, Barrier* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Copy a box of a tensor of 3 or 5 axes, as its map says, and count its bytes at a barrier. The box begins with the axes'
// first elements, but on the last axes at `line` and `page`, or at `row`.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int line, int page, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(shared_address(to)), "l"(&map), "r"(0), "r"(line), "r"(page), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int row, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %2, %2, %2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// This thread arrives once all copies that it has started are done.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Prefetches the 128 bytes around this byte into the L2 (measured). The bulk prefetch takes one address of a warp at a
// time, so many addresses would go one after the other.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Loads 16 bytes that no thread has written and none of this multiprocessor reads again; the L2 fetches those beside them.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

__device__ __forceinline__ void store(uint32_t to, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ uint4 load(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// Stores four 8 x 8 matrices of 16-bit values. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// Four 8 x 8 matrices of 16-bit values. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- matrix products --------------------------------------------------------------------------------------------
// Matrices lie in tiles of 64 rows of 128 bytes, 8 KB, whose 16-byte chunks are permuted within their row: chunk c of
// row r stands at c ^ (r % 8). 64 columns of bfloat16 are a tile, the next 64 the next tile.

constexpr int kTileBytes = 8192;

// A matrix whose rows are summed over (K-major); the second stride counts groups of 8 rows.
__device__ __forceinline__ uint64_t by_rows(uint32_t address) {
  return uint64_t{address >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// A matrix whose columns are summed over (MN-major): the first stride goes to the next 64 columns, the second to the
// next 8 rows.
__device__ __forceinline__ uint64_t by_columns(uint32_t address) {
  return uint64_t{address >> 4} | uint64_t{kTileBytes >> 4} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// In a cluster the address of a thread block's own memory has its rank in bits 24 and up. That changes the first stride,
// of which `by_rows` makes no use, nor `by_columns` for 64 columns; for more the address has to be without the rank.
__device__ __forceinline__ uint32_t without_rank(uint32_t address) { return address & 0xffffff; }

__device__ __forceinline__ uint64_t advance(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all products of this warpgroup but those of its last `kLeft` groups.
template <int kLeft>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// A warpgroup's accumulators: lane l of warp w has, of every 8 columns, columns 2 (l % 4) and the next of the rows
// 16 w + l / 4 (first two values) and 16 w + l / 4 + 8 (last two).

// The accumulators of a product, as its operands and in its text.
#define FLOATS_8_FROM(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FLOATS_8(d) FLOATS_8_FROM(d, 0)
#define FLOATS_16(d) FLOATS_8(d), FLOATS_8_FROM(d, 8)
#define FLOATS_24(d) FLOATS_16(d), FLOATS_8_FROM(d, 16)
#define FLOATS_32(d) FLOATS_24(d), FLOATS_8_FROM(d, 24)
#define FLOATS_40(d) FLOATS_32(d), FLOATS_8_FROM(d, 32)
#define FLOATS_48(d) FLOATS_40(d), FLOATS_8_FROM(d, 40)
#define FLOATS_56(d) FLOATS_48(d), FLOATS_8_FROM(d, 48)
#define FLOATS_64(d) FLOATS_56(d), FLOATS_8_FROM(d, 56)
#define FLOATS_72(d) FLOATS_64(d), FLOATS_8_FROM(d, 64)
#define FLOATS_80(d) FLOATS_72(d), FLOATS_8_FROM(d, 72)
#define FLOATS_88(d) FLOATS_80(d), FLOATS_8_FROM(d, 80)
#define FLOATS_96(d) FLOATS_88(d), FLOATS_8_FROM(d, 88)
#define FLOATS_104(d) FLOATS_96(d), FLOATS_8_FROM(d, 96)
#define FLOATS_112(d) FLOATS_104(d), FLOATS_8_FROM(d, 104)
#define FLOATS_120(d) FLOATS_112(d), FLOATS_8_FROM(d, 112)
#define FLOATS_128(d) FLOATS_120(d), FLOATS_8_FROM(d, 120)
#define PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PLACES_16 PLACES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_24 PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PLACES_32 PLACES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_40 PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PLACES_48 PLACES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES_56 PLACES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PLACES_64 PLACES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_72 PLACES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PLACES_80 PLACES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PLACES_88 PLACES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PLACES_96 PLACES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PLACES_104 PLACES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define PLACES_112 PLACES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define PLACES_120 PLACES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define PLACES_128 PLACES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// 64 x N += (64 x 16) · (16 x N) of bfloat16, both matrices in shared memory; = instead of += where `add` is false. The
// first is by rows or else by columns and then of 64 columns, the second by rows, or by columns where BY_COLUMNS is "1".
#define MULTIPLY_SHARED(name, sums, N, A, B, ADD, A_BY_COLUMNS, BY_COLUMNS)                                    \
  template <bool kByColumns>                                                                                   \
  __device__ __forceinline__ void name(float (&d)[sums], uint64_t a, uint64_t b, bool add) {                   \
    asm volatile(                                                                                              \
        "{\n.reg .pred p;\n"                                                                                   \
        "setp.ne.b32 p, " ADD ", 0;\n"                                                                         \
        "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" PLACES_##sums                              \
        "}, " A ", " B ", p, 1, 1, " A_BY_COLUMNS ", " BY_COLUMNS ";\n}"                                       \
        : FLOATS_##sums(d)                                                                                     \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kByColumns)));                      \
  }

MULTIPLY_SHARED(multiply, 8, "16", "%8", "%9", "%10", "%11", "0")
MULTIPLY_SHARED(multiply, 16, "32", "%16", "%17", "%18", "%19", "0")
MULTIPLY_SHARED(multiply, 32, "64", "%32", "%33", "%34", "%35", "0")
MULTIPLY_SHARED(multiply_by_columns, 32, "64", "%32", "%33", "%34", "%35", "1")
MULTIPLY_SHARED(multiply_by_columns, 64, "128", "%64", "%65", "%66", "%67", "1")

// 64 x N += (64 x 32) · (32 x N) of 8-bit numbers, the first matrix in registers, the second by rows; = where `add` is
// false.
#define MULTIPLY_REGISTERS(name, sums, N, TYPES, A, B, ADD)                                                    \
  __device__ __forceinline__ void name(float (&d)[sums], const uint32_t (&a)[4], uint64_t b, bool add) {       \
    asm volatile(                                                                                              \
        "{\n.reg .pred p;\n"                                                                                   \
        "setp.ne.b32 p, " ADD ", 0;\n"                                                                         \
        "wgmma.mma_async.sync.aligned.m64n" N "k32.f32." TYPES " {" PLACES_##sums                              \
        "}, {" A "}, " B ", p, 1, 1;\n}"                                                                       \
        : FLOATS_##sums(d)                                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                     \
  }

MULTIPLY_REGISTERS(multiply, 32, "64", "e4m3.e4m3", "%32, %33, %34, %35", "%36", "%37")
MULTIPLY_REGISTERS(multiply, 64, "128", "e4m3.e4m3", "%64, %65, %66, %67", "%68", "%69")
MULTIPLY_REGISTERS(multiply_e5m2, 8, "16", "e5m2.e5m2", "%8, %9, %10, %11", "%12", "%13")
MULTIPLY_REGISTERS(multiply_e5m2, 16, "32", "e5m2.e5m2", "%16, %17, %18, %19", "%20", "%21")
MULTIPLY_REGISTERS(multiply_e5m2, 32, "64", "e5m2.e5m2", "%32, %33, %34, %35", "%36", "%37")

// 64 x N += (64 x 16) · (16 x N) of bfloat16, the first matrix in registers, the second by rows; = where `add` is false.
#define MULTIPLY_REGISTERS_BFLOAT16(sums, N, A, B, ADD)                                                         \
  __device__ __forceinline__ void multiply_bfloat16(float (&d)[sums], const uint32_t (&a)[4], uint64_t b, bool add) { \
    asm volatile(                                                                                              \
        "{\n.reg .pred p;\n"                                                                                   \
        "setp.ne.b32 p, " ADD ", 0;\n"                                                                         \
        "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" PLACES_##sums                              \
        "}, {" A "}, " B ", p, 1, 1, 0;\n}"                                                                    \
        : FLOATS_##sums(d)                                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                     \
  }

MULTIPLY_REGISTERS_BFLOAT16(8, "16", "%8, %9, %10, %11", "%12", "%13")
MULTIPLY_REGISTERS_BFLOAT16(16, "32", "%16, %17, %18, %19", "%20", "%21")
MULTIPLY_REGISTERS_BFLOAT16(24, "48", "%24, %25, %26, %27", "%28", "%29")
MULTIPLY_REGISTERS_BFLOAT16(32, "64", "%32, %33, %34, %35", "%36", "%37")
MULTIPLY_REGISTERS_BFLOAT16(40, "80", "%40, %41, %42, %43", "%44", "%45")
MULTIPLY_REGISTERS_BFLOAT16(48, "96", "%48, %49, %50, %51", "%52", "%53")
MULTIPLY_REGISTERS_BFLOAT16(56, "112", "%56, %57, %58, %59", "%60", "%61")
MULTIPLY_REGISTERS_BFLOAT16(64, "128", "%64, %65, %66, %67", "%68", "%69")
MULTIPLY_REGISTERS_BFLOAT16(72, "144", "%72, %73, %74, %75", "%76", "%77")
MULTIPLY_REGISTERS_BFLOAT16(80, "160", "%80, %81, %82, %83", "%84", "%85")
MULTIPLY_REGISTERS_BFLOAT16(88, "176", "%88, %89, %90, %91", "%92", "%93")
MULTIPLY_REGISTERS_BFLOAT16(96, "192", "%96, %97, %98, %99", "%100", "%101")
MULTIPLY_REGISTERS_BFLOAT16(104, "208", "%104, %105, %106, %107", "%108", "%109")
MULTIPLY_REGISTERS_BFLOAT16(112, "224", "%112, %113, %114, %115", "%116", "%117")
MULTIPLY_REGISTERS_BFLOAT16(120, "240", "%120, %121, %122, %123", "%124", "%125")
MULTIPLY_REGISTERS_BFLOAT16(128, "256", "%128, %129, %130, %131", "%132", "%133")

// 16 x 8 += (16 x 16) · (16 x 8) of bfloat16 numbers in the registers of one warp. Lane l has of the first matrix
// columns 2 (l % 4) and the next of rows l / 4 and l / 4 + 8, then the same 8 columns further; of the second the same
// rows of column l / 4; of the sums what it has of a warpgroup's.
__device__ __forceinline__ void multiply_in_warp(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#undef MULTIPLY_SHARED
#undef MULTIPLY_REGISTERS
#undef MULTIPLY_REGISTERS_BFLOAT16
#undef FLOATS_8_FROM
#undef FLOATS_8
#undef FLOATS_16
#undef FLOATS_24
#undef FLOATS_32
#undef FLOATS_40
#undef FLOATS_48
#undef FLOATS_56
#undef FLOATS_64
#undef FLOATS_72
#undef FLOATS_80
#undef FLOATS_88
#undef FLOATS_96
#undef FLOATS_104
#undef FLOATS_112
#undef FLOATS_120
#undef FLOATS_128
#undef PLACES_8
#undef PLACES_16
#undef PLACES_24
#undef PLACES_32
#undef PLACES_40
#undef PLACES_48
#undef PLACES_56
#undef PLACES_64
#undef PLACES_72
#undef PLACES_80
#undef PLACES_88
#undef PLACES_96
#undef PLACES_104
#undef PLACES_112
#undef PLACES_120
#undef PLACES_128

// --- launches ---------------------------------------------------------------------------------------------------

// A launch that may begin before the one ahead of it has ended (programmatic stream serialization) waits here until that
// has ended and its memory is visible. In other launches this does nothing.
__device__ __forceinline__ void wait_for_launch_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The launch behind this one may begin, if it is such a launch, once all thread blocks have come here.
__device__ __forceinline__ void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

// --- clusters ---------------------------------------------------------------------------------------------------

// All threads of a cluster arrive, and then wait for the others. Relaxed is enough: `fence_barriers` has released the
// barriers, all that others must see by then; what blocks send lands where nothing else lies, counted at a barrier.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// The same for threads behind which other blocks may write into this one's shared memory: they are done with it.
__device__ __forceinline__ void release_in_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// As `wait`, for data that other blocks of the cluster have sent.
__device__ __forceinline__ void wait_for_sent(Barrier* barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Makes initialised barriers visible; to be called before the thread arrives at the cluster's barrier.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives at a barrier, whose phase then also waits for so many bytes.
__device__ __forceinline__ void expect(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// The address, in another thread block of the cluster, of what this block has at `mine`.
__device__ __forceinline__ uint32_t address_of(const void* mine, int rank) {
  uint32_t at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  return at;
}

// Stores into another block's shared memory and counts the bytes at a barrier of that block.
__device__ __forceinline__ void send(uint32_t to, float2 x, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t to, uint4 x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
      : "memory");
}

}  // namespace sm90

#endif

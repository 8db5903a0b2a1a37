"""Moving rows between global memory, tiled shared memory and wgmma's registers, 64 rows at a time.

Shared-memory arrays are bfloat16 in tiles of 8 x 64, 1,024 bytes each, swizzled by 128 bytes: in row r of a tile the
16-byte chunk c is at place c xor (r mod 8). Tiles are stored one row of tiles after the other.

A warpgroup copies a row with eight threads, 16 bytes a thread: thread t owns chunk t mod 8 of the rows t // 8 + 16 i,
i < 4. In wgmma's fragments warp w holds the rows 16 w … 16 w + 15. A lane holds the rows lane // 4 and lane // 4 + 8 of
these, and of every eight columns the two from 2 (lane mod 4) on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from jax_sparse_mla.attention.hopper.prefill import ptx

ROWS = 64  # of a wgmma: a block of keys, or the heads of a work item
TILE_COLUMNS = 64
TILE_BYTES = 1024
ROWS_PER_THREAD = 4
_ROW_STEP = 16  # between the rows of one thread

LOG2_E, LN_2 = math.log2(math.e), math.log(2)
LEAST = -1e30  # the first reference: finite, so that exp2(−inf − reference) is 0
SLACK = 8.0  # how far above the reference a score may be, in powers of two

TILED = (plgpu.TilingTransform((8, TILE_COLUMNS)), plgpu.SwizzleTransform(128))
REF = plgpu.RefType()
TILES = plgpu.RefType(TILED)
FRAGMENT = plgpu.Layout.WGMMA
SPLAT = plgpu.Layout.WG_SPLAT
BY_ROW = FRAGMENT.reduce(1)  # a number for each row of a fragment
BY_COLUMN = FRAGMENT.reduce(0)


def inline(*arg_types, returns=None):
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=returns)


def scalar(x: fa.FragmentedArray) -> ir.Value:
    return x.registers.item()


def splat(value: ir.Value, is_signed: bool | None) -> fa.FragmentedArray:
    """A number as an inlined function returns it."""
    return fa.FragmentedArray.splat(value, (), is_signed=is_signed)


# --- the sizes of a call -------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The numbers of a call that a kernel takes as data.

    XLA's programs have them as constants. A launch without XLA (`launch/mosaic.py`) passes 256 times the number where
    the kernel has a pointer: one compilation then serves every call, and neither memory nor a copy is needed.
    """

    tokens: jax.Array
    heads: jax.Array
    q_heads: jax.Array  # from one token of q to the next: q may have more heads than these
    keys: jax.Array  # rows of kv
    columns: jax.Array  # of indices
    stride: jax.Array  # entries from one row of indices to the next
    blocks: jax.Array  # of threads
    scale: jax.Array  # float32: of scores in base 2
    unit: jax.Array  # float32: by which max_logits and lse in base 2 are multiplied
    empty: jax.Array  # float32: lse of a token without keys

    @classmethod
    def known(cls, q, kv, indices, softmax_scale: float, blocks: int) -> Sizes:
        """Those of the arrays' shapes."""
        (tokens, heads, _), columns = q.shape, indices.shape[1]
        integers = tokens, heads, heads, kv.shape[0], columns, columns, blocks
        return cls(*map(jnp.int32, integers), *map(jnp.float32, (softmax_scale * LOG2_E, LN_2, -math.inf)))

    @classmethod
    def passed(cls, refs) -> Sizes:
        return cls(*(_passed(ref, jnp.int32) for ref in refs[:7]), *(_passed(ref, jnp.float32) for ref in refs[7:]))


def _passed(ref, dtype) -> jax.Array:
    @inline(REF, returns=plgpu.ShapeDtypeStruct((), dtype, SPLAT))
    def emit(ctx, ref):
        bits = arith.trunci(ptx.i32_type(), arith.shrui(ptx.global_address(ref), ptx.i64(8)))
        if dtype == jnp.int32:
            return splat(bits, is_signed=True)
        return splat(arith.bitcast(ir.F32Type.get(), bits), is_signed=None)

    return emit(ref)


def row_stride(columns: int) -> int:
    """Bytes from one row of tiles to the next."""
    return columns // TILE_COLUMNS * TILE_BYTES


# --- rows from global to shared memory -----------------------------------------------------------------------------


def _thread_row_and_chunk() -> tuple[ir.Value, ir.Value]:
    thread = ptx.thread_in_warpgroup()
    return arith.shrui(thread, ptx.i32(3)), arith.andi(thread, ptx.i32(7))


def thread_rows() -> list[ir.Value]:
    """The rows whose chunks the calling thread copies."""
    first, _ = _thread_row_and_chunk()
    return [arith.addi(first, ptx.i32(_ROW_STEP * i)) for i in range(ROWS_PER_THREAD)]


def tile_address(ref: ir.Value, columns: int) -> ir.Value:
    """Where the calling thread's chunk of its first row goes."""
    offset = _tile_offset(columns)
    return arith.addi(ptx.shared_address(ref), offset)


def tile_address_at(address: ir.Value, columns: int) -> ir.Value:
    """`tile_address` by the array's address in the shared window."""
    return arith.addi(address, _tile_offset(columns))


def _tile_offset(columns: int) -> ir.Value:
    row, chunk = _thread_row_and_chunk()
    row_in_tile = arith.andi(row, ptx.i32(7))
    offset = arith.muli(arith.shrui(row, ptx.i32(3)), ptx.i32(row_stride(columns)))
    offset = arith.addi(offset, arith.muli(row_in_tile, ptx.i32(128)))
    return arith.addi(offset, arith.muli(arith.xori(row_in_tile, chunk), ptx.i32(16)))


def source_address(ref: ir.Value, row: ir.Value) -> ir.Value:
    """The address of the calling thread's first chunk in a row (int64) of a row-major array; row 0 if negative."""
    columns = ir.MemRefType(ref.type).shape[-1]
    _, chunk = _thread_row_and_chunk()
    row = arith.maxsi(row, ptx.i64(0))
    # In this order the sum of the row is one multiply-add. LLVM would make the chunk's a bitwise or.
    first = arith.addi(ptx.global_address(ref), ptx.extend(arith.muli(chunk, ptx.i32(16))))
    return arith.addi(first, arith.muli(row, ptx.i64(2 * columns)))


def copy_rows(
    target: ir.Value,
    columns: int,
    tiles: Iterable[int],
    rows: Sequence[ir.Value],
    sources: Sequence[ir.Value],
    first_source_tile: int = 0,
) -> None:
    """Starts the copies of these tiles of the calling thread's rows. A negative row becomes zeros and is not read."""
    for i, (row, source) in enumerate(zip(rows, sources)):
        exists = arith.cmpi(arith.CmpIPredicate.sge, row, ptx.i32(0))
        nbytes = arith.select(exists, ptx.i32(16), ptx.i32(0))
        for tile in tiles:
            offset = i * _ROW_STEP // 8 * row_stride(columns) + tile * TILE_BYTES
            ptx.copy_16(target, offset, source, (first_source_tile + tile) * 2 * TILE_COLUMNS, nbytes)


def load_index(address: ir.Value, column: ir.Value, limit: ir.Value, num_keys: ir.Value) -> ir.Value:
    """The entry of a column: −1 past the limit, or if it names no key."""
    inside = arith.cmpi(arith.CmpIPredicate.slt, column, limit)
    entry = scf.IfOp(inside, [ptx.i32_type()], has_else=True)
    with ir.InsertionPoint(entry.then_block):
        row = ptx.load_at(address, ptx.i32_type())
        exists = arith.cmpi(arith.CmpIPredicate.ult, row, num_keys)  # unsigned: negative rows are large
        scf.yield_([arith.select(exists, row, ptx.i32(-1))])
    with ir.InsertionPoint(entry.else_block):
        scf.yield_([ptx.i32(-1)])
    return entry.result


def row_numbers(indices_ref, sizes: Sizes, t, first_column, limit, *, blocks: int) -> jax.Array:
    """The rows of kv that the calling thread copies for so many blocks of keys; −1 where there is no key."""
    layout = per_thread_layout(blocks * ROWS_PER_THREAD)

    @inline(REF, *[SPLAT] * 5, returns=plgpu.ShapeDtypeStruct(layout.args[0], jnp.int32, layout))
    def emit(ctx, indices, keys, stride, t, first_column, limit):
        own_row, _ = _thread_row_and_chunk()
        column = arith.addi(scalar(first_column), own_row)
        number = arith.addi(arith.muli(ptx.extend(scalar(t)), ptx.extend(scalar(stride))), ptx.extend(column))
        address = ptx.element(ptx.global_address(indices), number)
        rows = []
        for step in (ROWS * block + _ROW_STEP * i for block in range(blocks) for i in range(ROWS_PER_THREAD)):
            place = arith.addi(address, ptx.i64(4 * step)), arith.addi(column, ptx.i32(step))
            rows.append(load_index(*place, scalar(limit), scalar(keys)))
        return per_thread(rows)

    return emit(indices_ref, sizes.keys, sizes.stride, t, first_column, limit)


def columns_scanned(length_ref, sizes: Sizes, t) -> jax.Array:
    """How many leading columns of a query token's row count."""
    if length_ref is None:
        return sizes.columns

    @inline(REF, SPLAT, returns=plgpu.ShapeDtypeStruct((), jnp.int32, SPLAT))
    def emit(ctx, lengths, t):
        length = ptx.load_4_unless_absent(lengths, ptx.extend(scalar(t)), ptx.i32(2**31 - 1))
        return splat(length, is_signed=True)

    return jnp.minimum(emit(length_ref, t), sizes.columns)


def per_thread(values: Sequence[ir.Value]) -> fa.FragmentedArray:
    """The calling thread's int32 values as an array that a loop can carry."""
    one = ir.VectorType.get((1,), ptx.i32_type())
    registers = np.array([vector.broadcast(one, value) for value in values], dtype=object)
    return fa.FragmentedArray(_registers=registers, _layout=per_thread_layout(len(values)).to_mgpu(), _is_signed=True)


def per_thread_floats(values: Sequence[ir.Value]) -> fa.FragmentedArray:
    """`per_thread` of float32 values."""
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.array([vector.broadcast(one, value) for value in values], dtype=object)
    return fa.FragmentedArray(_registers=registers, _layout=per_thread_layout(len(values)).to_mgpu(), _is_signed=None)


def per_thread_layout(count: int):
    return plgpu.Layout.WG_STRIDED((count * ptx.WARPGROUP,), 1)


def from_per_thread(x: fa.FragmentedArray) -> list[ir.Value]:
    return [llvm.extractelement(register, ptx.i32(0)) for register in x.registers.flat]


# --- fragments -----------------------------------------------------------------------------------------------------


def fragment(values: Sequence[ir.Value], shape: tuple[int, int]) -> fa.FragmentedArray:
    """An array of the scalars in wgmma's registers, in their order."""
    pair_type = ir.VectorType.get((2,), values[0].type)
    registers = np.empty(fa.WGMMA_LAYOUT.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        pair = llvm.UndefOp(pair_type).result
        for j in range(2):
            pair = llvm.insertelement(pair, values[2 * i + j], ptx.i32(j))
        registers.flat[i] = pair
    return fa.FragmentedArray(_registers=registers, _layout=fa.WGMMA_LAYOUT, _is_signed=None)


def fragment_values(x: fa.FragmentedArray) -> list[ir.Value]:
    return [llvm.extractelement(register, ptx.i32(j)) for register in x.registers.flat for j in range(2)]


def value_row(i: int) -> int:
    """To which of the thread's two rows scalar i of a fragment belongs."""
    return i // 2 % 2


def row_values(x: fa.FragmentedArray) -> list[ir.Value]:
    """The numbers of the thread's two rows in an array with one number for each row."""
    return [llvm.extractelement(register, ptx.i32(0)) for register in x.registers.flat]


def fragment_words(x: fa.FragmentedArray) -> list[ir.Value]:
    """bfloat16 pairs as 32-bit registers."""
    one = ir.VectorType.get((1,), ptx.i32_type())
    return [llvm.extractelement(vector.bitcast(one, register), ptx.i32(0)) for register in x.registers.flat]


def fragment_rows() -> tuple[ir.Value, ir.Value]:
    """The two rows of which the calling thread holds a part."""
    thread = ptx.thread_in_warpgroup()
    warp, lane = arith.shrui(thread, ptx.i32(5)), arith.andi(thread, ptx.i32(31))
    row = arith.addi(arith.muli(warp, ptx.i32(16)), arith.shrui(lane, ptx.i32(2)))
    return row, arith.addi(row, ptx.i32(8))


def store_columns(
    out: ir.Value, x: fa.FragmentedArray, heads: ir.Value, t: ir.Value, first_head: ir.Value, first_column: int
) -> None:
    """Stores a bfloat16 fragment to `out[t, first_head:, first_column:]`, except heads that `out` does not have.

    Four lanes hold eight columns of a row, four bytes each. They exchange words so that each writes 16 bytes.
    """
    *_, columns = ir.MemRefType(out.type).shape
    lane = arith.andi(ptx.thread_in_warpgroup(), ptx.i32(3))
    words = np.array(fragment_words(x), dtype=object).reshape(-1, 2)  # [eight columns, row]
    base = arith.addi(ptx.global_address(out), ptx.extend(arith.muli(lane, ptx.i32(16))))
    for row, row_words in zip(fragment_rows(), words.T):
        head = arith.addi(first_head, row)
        number = ptx.number(t, heads, head)
        address = arith.addi(base, arith.muli(number, ptx.i64(2 * columns)))
        quads = [transposed(row_words[i : i + 4], lane) for i in range(0, len(row_words), 4)]
        with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.slt, head, heads)):
            for i, quad in enumerate(quads):
                ptx.store_16(address, 2 * first_column + 64 * i, quad)


def transposed(words: Sequence[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """Word i of lane j becomes word j of lane i, among four neighbouring lanes."""
    words = list(words)
    for distance in (1, 2):
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, ptx.i32(distance)), ptx.i32(0))
        for low in (i for i in range(4) if not i & distance):
            high = low + distance
            sent = arith.select(upper, words[low], words[high])
            taken = mgpu_utils.shfl_bfly(sent, distance)
            words[low], words[high] = (arith.select(upper, taken, words[low]), arith.select(upper, words[high], taken))
    return words


def store_by_row(out: ir.Value, x: fa.FragmentedArray, heads: ir.Value, t: ir.Value, first_head: ir.Value) -> None:
    """Stores one number for each row to `out[t, first_head:]`, except heads that `out` does not have."""
    lane = arith.andi(ptx.thread_in_warpgroup(), ptx.i32(3))
    writes = arith.cmpi(arith.CmpIPredicate.eq, lane, ptx.i32(0))
    for row, value in zip(fragment_rows(), row_values(x)):
        head = arith.addi(first_head, row)
        exists = arith.cmpi(arith.CmpIPredicate.slt, head, heads)
        with mgpu_utils.when(arith.andi(writes, exists)):
            ptx.store_4(value, out, ptx.number(t, heads, head))


def load_by_row(ref: ir.Value, heads: ir.Value, first_head: ir.Value) -> fa.FragmentedArray:
    """The sinks of `first_head` and the heads after it."""
    layout = fa.WGMMA_LAYOUT.reduce([1])
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.empty(layout.registers_shape((ROWS,)), dtype=object)
    for i, row in enumerate(fragment_rows()):
        registers.flat[i] = vector.broadcast(one, load_sink(ref, heads, arith.addi(first_head, row)))
    return fa.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def load_sink(sinks: ir.Value, heads: ir.Value, head: ir.Value) -> ir.Value:
    """A head's sink: the last one's of a head that is not there, −inf without sinks."""
    head = arith.minsi(head, arith.subi(heads, ptx.i32(1)))
    return ptx.load_4_unless_absent(sinks, ptx.extend(head), arith.constant(ir.F32Type.get(), -math.inf))

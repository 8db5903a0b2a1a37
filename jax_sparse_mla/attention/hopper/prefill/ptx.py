"""PTX instructions that Pallas lacks: counted barriers, copies by row, fences, wgmma.

Every function emits code at the current MLIR insertion point, inside a function decorated by `plgpu.inline_mgpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

WARPGROUP = 128  # threads


def i32_type() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i32(value: int) -> ir.Value:
    return arith.constant(i32_type(), value)


def i64(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(64), value)


def index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)


def extend(value: ir.Value) -> ir.Value:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def number(t: ir.Value, heads: ir.Value, head: ir.Value) -> ir.Value:
    """Of a token's head among all tokens' heads, as int64."""
    return arith.addi(arith.muli(extend(t), extend(heads)), extend(head))


def asm(text: str, constraints: str, *operands: ir.Value, result: ir.Type | None = None) -> ir.Value:
    """One volatile statement. The memory clobber keeps LLVM from moving loads and stores across it."""
    result = ir.Type.parse("!llvm.void") if result is None else result
    constraints = ",".join(part for part in (constraints, "~{memory}") if part)
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=True, asm_dialect=0)


def thread_in_warpgroup() -> ir.Value:
    return arith.andi(mgpu_utils.thread_idx(), i32(WARPGROUP - 1))


def any_lane(condition: ir.Value) -> ir.Value:
    """Whether the condition holds in any thread of the warp."""
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    answer = asm(text, "=r,r", arith.extui(i32_type(), condition), result=i32_type())
    return arith.cmpi(arith.CmpIPredicate.ne, answer, i32(0))


def shared_address(ref: ir.Value) -> ir.Value:
    """The address of a shared-memory reference in the shared window, as int32."""
    return llvm.ptrtoint(i32_type(), mgpu_utils.memref_ptr(ref))


def global_address(ref: ir.Value) -> ir.Value:
    """The address of a reference in global memory. Mosaic says that arrays begin at multiples of 256 bytes.

    XLA's do, a tensor of torch may begin anywhere in a buffer: the statement hides from LLVM what Mosaic says.
    """
    i64_type = ir.IntegerType.get_signless(64)
    address = llvm.ptrtoint(i64_type, mgpu_utils.memref_ptr(ref))
    return llvm.inline_asm(i64_type, [address], "mov.b64 $0, $1;", "=l,l", has_side_effects=False, asm_dialect=0)


def load_at(address: ir.Value, result: ir.Type) -> ir.Value:
    """What is at an address (int64) in global memory."""
    return llvm.load(result, llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address))


def load_4_unless_absent(ref: ir.Value, number: ir.Value, absent: ir.Value) -> ir.Value:
    """Number `number` (int64) of an array of 4 bytes each, or `absent` of an array whose address is 0."""
    address = global_address(ref)
    there = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, address, i64(0)), [absent.type], has_else=True)
    with ir.InsertionPoint(there.then_block):
        scf.yield_([load_at(element(address, number), absent.type)])
    with ir.InsertionPoint(there.else_block):
        scf.yield_([absent])
    return there.result


def store_4(value: ir.Value, ref: ir.Value, number: ir.Value) -> None:
    llvm.store(value, llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), element(global_address(ref), number)))


def element(address: ir.Value, number: ir.Value) -> ir.Value:
    """The address of number `number` (int64) of an array of 4 bytes each."""
    return arith.addi(address, arith.muli(number, i64(4)))


# --- mbarriers, eight bytes each in shared memory ------------------------------------------------------------------


def barriers_init(ref: ir.Value, counts: list[int]) -> None:
    """One thread initialises the barriers; all threads of the block then synchronise."""
    base = shared_address(ref)
    first = arith.cmpi(arith.CmpIPredicate.eq, mgpu_utils.thread_idx(), i32(0))
    with mgpu_utils.when(first):
        for i, count in enumerate(counts):
            asm(f"mbarrier.init.shared.b64 [$0 + {8 * i}], {count};", "r", base)
        asm("fence.mbarrier_init.release.cluster;", "")
    asm("barrier.sync 0;", "")


def previous(phase: ir.Value) -> ir.Value:
    """The phase before this one. A barrier's phases count from 0; phase −1 is complete from the start."""
    return arith.subi(phase, i32(1))


def barrier_wait(ref: ir.Value, index: int, phase: ir.Value) -> None:
    """Waits until this phase has completed; it is the current phase or the one before."""
    parity = arith.andi(phase, i32(1))
    loop = (
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [$0 + %d], $1; "
        "@done bra GO; bra WAIT; GO: }"
    )
    asm(loop % (8 * index), "r,r", shared_address(ref), parity)


def barrier_wait_at(address: ir.Value, phase: ir.Value) -> None:
    """`barrier_wait` by a barrier's address in the shared window."""
    loop = "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared.b64 done, [$0], $1; @done bra GO; bra WAIT; GO: }"
    asm(loop, "r,r", address, arith.andi(phase, i32(1)))


def barrier_arrive(ref: ir.Value, index: int) -> None:
    asm(f"mbarrier.arrive.shared.b64 _, [$0 + {8 * index}];", "r", shared_address(ref))


def barrier_arrive_at(address: ir.Value) -> None:
    asm("mbarrier.arrive.shared.b64 _, [$0];", "r", address)


def barrier_arrive_by_warp(address: ir.Value) -> None:
    """One thread of each warp arrives."""
    lane = arith.andi(mgpu_utils.thread_idx(), i32(31))
    text = "{ .reg .pred first; setp.eq.b32 first, $1, 0; @first mbarrier.arrive.shared.b64 _, [$0]; }"
    asm(text, "r,r", address, lane)


def barrier_arrive_after_copies(ref: ir.Value, index: int) -> None:
    """The calling thread arrives when all copies that it has issued have arrived; it does not wait for them."""
    asm(f"cp.async.mbarrier.arrive.noinc.shared.b64 [$0 + {8 * index}];", "r", shared_address(ref))


def barrier_arrive_after_copies_at(address: ir.Value) -> None:
    asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", "r", address)


def warpgroup_sync(number: ir.Value) -> None:
    """All threads of a warpgroup wait for each other; `number` is a named barrier that nobody else uses."""
    asm(f"barrier.sync $0, {WARPGROUP};", "r", number)


def warpgroup_any(number: ir.Value, condition: ir.Value) -> ir.Value:
    """`warpgroup_sync` that tells whether the condition holds in any thread."""
    text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; barrier.red.or.pred p, $2, {WARPGROUP}, p; selp.b32 $0, 1, 0, p; }}"
    answer = asm(text, "=r,r,r", arith.extui(i32_type(), condition), number, result=i32_type())
    return arith.cmpi(arith.CmpIPredicate.ne, answer, i32(0))


# --- memory --------------------------------------------------------------------------------------------------------


def fence_async_proxy() -> None:
    """Orders writes to shared memory, by ordinary stores and by cp.async, before later reads by wgmma."""
    asm("fence.proxy.async.shared::cta;", "")


def copy_16(target: ir.Value, offset: int, source: ir.Value, source_offset: int, nbytes: ir.Value) -> None:
    """Copies 16 bytes from global to shared memory, past the L1. `nbytes` (0 or 16) are read, the rest are zero."""
    text = f"cp.async.cg.shared.global.L2::256B [$0 + {offset}], [$1 + {source_offset}], 16, $2;"
    asm(text, "r,l,r", target, source, nbytes)


def store_16(address: ir.Value, offset: int, words: Sequence[ir.Value]) -> None:
    """Stores four 32-bit words to global memory."""
    asm(f"st.global.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};", "l,r,r,r,r", address, *words)


def store_transposed(address: ir.Value, words: Sequence[ir.Value]) -> None:
    """Stores matrices of 8 x 8, one word (two columns of a row) a thread each, by column, 16 bytes a column.

    Lane 8 i + j has the address of column j of matrix i.
    """
    places = ", ".join(f"${i + 1}" for i in range(len(words)))
    text = f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [$0], {{{places}}};"
    asm(text, ",".join("r" * (len(words) + 1)), address, *words)


# --- registers -----------------------------------------------------------------------------------------------------


def _pure(text: str, constraints: str, *operands: ir.Value, result: ir.Type) -> ir.Value:
    """A statement without effects, which LLVM may move."""
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=False, asm_dialect=0)


def exp2(x: ir.Value) -> ir.Value:
    return _pure("ex2.approx.ftz.f32 $0, $1;", "=f,f", x, result=ir.F32Type.get())


def log2(x: ir.Value) -> ir.Value:
    return _pure("lg2.approx.ftz.f32 $0, $1;", "=f,f", x, result=ir.F32Type.get())


def bfloat16_pair(low: ir.Value, high: ir.Value) -> ir.Value:
    """Two float32 values, rounded, as one word."""
    return _pure("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", low, high, result=i32_type())


def transposed_matrix(word: ir.Value) -> ir.Value:
    """A matrix of 8 x 8, one word (two columns of a row) a thread, becomes its transpose."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", word, result=i32_type())


# --- wgmma ---------------------------------------------------------------------------------------------------------

_SWIZZLE_128 = 1 << 62


def wgmma_descriptor(ref: ir.Value, leading: int, stride: int) -> ir.Value:
    """The descriptor of bfloat16 tiles of 8 x 64, swizzled by 128 bytes; `leading` and `stride` (PTX) in bytes."""
    address = arith.andi(arith.shrui(shared_address(ref), i32(4)), i32(0x3FFF))
    wide = arith.extui(ir.IntegerType.get_signless(64), address)
    return arith.ori(wide, i64(_SWIZZLE_128 | (stride >> 4) << 32 | (leading >> 4) << 16))


def wgmma(
    acc: Sequence[ir.Value],
    a: ir.Value | Sequence[ir.Value],
    b: ir.Value,
    *,
    a_offset: int = 0,
    b_offset: int = 0,
    transpose_b: bool = False,
    accumulate: bool = True,
) -> list[ir.Value]:
    """Starts acc + a @ b, or a @ b alone, of one 64 x n x 16 instruction; it is in flight until `wgmma_wait`.

    The offsets are added inside the statement. Otherwise LLVM would hoist one sum for each instruction out of the loop,
    and there are not enough registers for them.

    Args:
      acc: float32 scalars, n / 2 of them.
      a: a descriptor, or the four registers of a fragment, which have no offset.
      b: a descriptor.
      a_offset, b_offset: bytes.
      transpose_b: b's columns are contiguous, not its rows.
    """
    from_shared = isinstance(a, ir.Value)
    operands = [a] if from_shared else list(a)
    places = [f"${i}" for i in range(2 * len(acc) + len(operands) + 1)]
    results, (*a_places, b_place) = places[: len(acc)], places[2 * len(acc) :]
    text = (
        "{ .reg .pred keep; .reg .b64 da, db; "
        f"setp.ne.b32 keep, {int(accumulate)}, 0; "
        f"add.s64 db, {b_place}, {b_offset >> 4}; "
        + (f"add.s64 da, {a_places[0]}, {a_offset >> 4}; " if from_shared else "")
        + f"wgmma.mma_async.sync.aligned.m64n{2 * len(acc)}k16.f32.bf16.bf16 {{{', '.join(results)}}}, "
        + ("da" if from_shared else f"{{{', '.join(a_places)}}}")
        + ", db, keep, 1, 1, "
        + ("0, " if from_shared else "")
        + f"{int(transpose_b)}; }}"
    )
    return _through(text, acc, [*operands, b], ["l" if from_shared else "r"] * len(operands) + ["l"])


class Operand(NamedTuple):
    """A matrix in shared memory: the low word of its descriptor, the high word, and whether wgmma transposes it."""

    low: ir.Value
    high: int
    transposed: bool

    @classmethod
    def at(cls, address: ir.Value, leading: int, stride: int, transposed: bool = False) -> Operand:
        """As `wgmma_descriptor`, of an address in the shared window."""
        low = arith.ori(arith.andi(arith.shrui(address, i32(4)), i32(0x3FFF)), i32((leading >> 4) << 16))
        return cls(low, _SWIZZLE_128 >> 32 | stride >> 4, transposed)


def wgmma_shared(
    acc: Sequence[ir.Value] | None, a: Operand, b: Operand, *, n: int, a_offset: int, b_offset: int
) -> list[ir.Value]:
    """As `wgmma`, both operands from shared memory at addresses that change, whose high words are constants.

    Args:
      acc: float32 scalars, n / 2 of them; None: the product alone.
      n: columns of b.
      a_offset, b_offset: bytes.
    """
    accumulate = acc is not None
    acc = acc if accumulate else [llvm.UndefOp(ir.F32Type.get()).result] * (n // 2)
    results = ", ".join(f"${i}" for i in range(len(acc)))
    text = (
        "{ .reg .pred keep; .reg .b32 la, lb; .reg .b64 da, db; "
        f"setp.ne.b32 keep, {int(accumulate)}, 0; "
        f"add.u32 la, ${2 * len(acc)}, {a_offset >> 4}; mov.b64 da, {{la, {a.high}}}; "
        f"add.u32 lb, ${2 * len(acc) + 1}, {b_offset >> 4}; mov.b64 db, {{lb, {b.high}}}; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{results}}}, da, db, keep, 1, 1, "
        f"{int(a.transposed)}, {int(b.transposed)}; }}"
    )
    return _through(text, acc, [a.low, b.low], ["r", "r"])


def _through(text: str, acc: Sequence[ir.Value], operands: Sequence[ir.Value] = (), constraints: Sequence[str] = ()):
    """Emits a statement that changes the float32 scalars `acc`, its operands $0 to $n−1, in place."""
    f32 = ir.F32Type.get()
    parts = [*["=f"] * len(acc), *map(str, range(len(acc))), *constraints]
    struct = asm(text, ",".join(parts), *acc, *operands, result=llvm.StructType.get_literal([f32] * len(acc)))
    return [llvm.extractvalue(f32, struct, [i]) for i in range(len(acc))]


def wgmma_fence() -> None:
    asm("wgmma.fence.sync.aligned;", "")


def wgmma_commit() -> None:
    asm("wgmma.commit_group.sync.aligned;", "")


def wgmma_wait(acc: Sequence[ir.Value], groups: int) -> list[ir.Value]:
    """Waits until at most `groups` committed groups are in flight. `acc` passes through, so no use comes before."""
    return _through(f"wgmma.wait_group.sync.aligned {groups};", acc)

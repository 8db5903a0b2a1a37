"""Compiles the kernels of context parallel decode for the compute capabilities given, without a GPU; prints facts."""

import jax.numpy as jnp
from compile_triton import Array, Recorder, facts, in_ptx

from jax_sparse_mla.attention.exchange import _words
from jax_sparse_mla.attention.triton import exchange as context_parallel
from jax_sparse_mla.indices import triton_ownership


def cases(capability):
    """(name, kernel, pointer types, constants with num_warps) of every kernel, as launched."""
    record = Recorder(capability)

    def ints(*shape):
        return Array(shape, "int32")

    lists = (64, 2**20, True), (16, 2**31 - 1, True)
    tables = ints(64, 128), ints(64), ints(64, 512), ints(64)
    triton_ownership.pack(record, ints(), *tables, size=2, lists=lists)
    triton_ownership.pack(record, ints(), ints(64, 128), ints(64, 8320), size=3, lists=[(256, 9, False)] * 2)
    triton_ownership.pack(record, ints(), ints(64, 2048), size=8, lists=[(64, 2**20, False)])
    for dtype, rows, heads, parts in (("bfloat16", 64, 64, 2), ("float32", 7, 6, 3)):
        out, lse = Array((rows, 1, heads, 512), dtype), Array((rows, 1, heads))
        words = parts, _words(rows * heads // parts, 512, jnp.dtype(dtype))
        context_parallel.send(record, out, lse, words=words)
        shape = rows, 1, heads // parts, 512
        context_parallel.merge_received(record, ints(*words), shape=shape, dtype=dtype)
        context_parallel.merge_received(record, ints(*words), Array(shape[2:3]), shape=shape, dtype=dtype)
    return [(f"{name} {i}", *rest) for i, (name, *rest) in enumerate(record.cases)]


if __name__ == "__main__":
    facts(cases, wide_store=in_ptx("st.global.v4"), wide_load=in_ptx(".v4"))

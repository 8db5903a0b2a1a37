"""The Triton kernels as JAX functions, through jax-triton: custom calls inside XLA programs, on XLA's stream.

Arguments are checked by the public functions that dispatch here (`jax_sparse_mla.kv_cache`, `.indices`); sizes are
not zero. The custom calls can be part of a command buffer (a CUDA graph). Buffers are updated in place where
XLA may alias them: donated, or an intermediate of the program; otherwise XLA copies first.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import triton

from jax_sparse_mla.kernels.triton import indices as index_kernels
from jax_sparse_mla.kernels.triton import kv_cache as kv_kernels
from jax_sparse_mla.kernels.triton import sanitise as sanitise_kernels
from jax_sparse_mla.xla.triton_call import triton_call


@functools.cache
def compute_capability() -> int:
    """Of the first GPU, as Triton numbers it: 90 for 9.0."""
    major, minor = jax.devices("gpu")[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


def _call(*args, **kwargs):
    return triton_call(*args, compute_capability=compute_capability(), **kwargs)


def write_kv(data: jax.Array, slots: jax.Array, kv: jax.Array, *, layout, page_size: int) -> jax.Array:
    """uint8 `[num_pages, page_bytes]` with the rows written."""
    n, options = slots.shape[0], kv_kernels.WRITE_OPTIONS
    return _call(
        slots,
        kv,
        data,
        n,
        data.shape[0],
        kernel=kv_kernels.write_kv_kernel,
        out_shape=jax.ShapeDtypeStruct(data.shape, data.dtype),
        input_output_aliases={2: 0},
        grid=(triton.cdiv(n, options["TOKENS"]),),
        name="write_kv",
        **kv_kernels.layout_constants(layout, page_size),
        MIN_SCALE_EXPONENT=layout.min_scale_exponent,
        HARDWARE_CASTS=compute_capability() >= 89,
        **options,
    )


def gather_kv(data: jax.Array, slots: jax.Array, *, layout, page_size: int, out_rows: int | None = None) -> jax.Array:
    """bfloat16 `[out_rows, qk_dim]`, by default of as many rows as slots; rows past the slots' are left undefined."""
    rows = slots.shape[0] if out_rows is None else out_rows
    out = jax.ShapeDtypeStruct((rows, layout.qk_dim), jnp.bfloat16)
    return _gather(kv_kernels.gather_kv_kernel, (slots, data), data, out, 0, layout, page_size)


def gather_kv_into(
    workspace: jax.Array, data: jax.Array, slots: jax.Array, *, start: int, layout, page_size: int
) -> jax.Array:
    """The workspace, bfloat16 `[rows, qk_dim]`, with rows `start ... start + n - 1` gathered into it."""
    return _gather(
        kv_kernels.gather_kv_into_kernel,
        (slots, data, workspace),
        data,
        jax.ShapeDtypeStruct(workspace.shape, workspace.dtype),
        start,
        layout,
        page_size,
        input_output_aliases={2: 0},
    )


def _gather(kernel, arrays, data, out_shape, start, layout, page_size, **aliases):
    n, options = arrays[0].shape[0], kv_kernels.GATHER_OPTIONS
    return _call(
        *arrays,
        n,
        data.shape[0],
        start,
        kernel=kernel,
        out_shape=out_shape,
        grid=(triton.cdiv(n, options["TOKENS"]),),
        name="gather_kv",
        **kv_kernels.layout_constants(layout, page_size),
        HARDWARE_CASTS=compute_capability() >= 89,
        **options,
        **aliases,
    )


def split_pages(
    data: jax.Array, slots: jax.Array, out: jax.Array, *, layout, page_size: int, out_page_size: int
) -> jax.Array:
    """`out`, uint8 `[num_pages * ratio, its page_bytes]`, with the pages that `slots` touch copied into it."""
    n, num_pages = slots.size, data.shape[0]
    options = kv_kernels.TOUCHED_OPTIONS
    seen, pages = _call(
        slots.reshape(-1),
        n,
        num_pages,
        kernel=kv_kernels.touched_pages_kernel,
        out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_pages + 1, min(n, num_pages))],
        zeroed_outputs=(0,),
        grid=(triton.cdiv(n, options["BLOCK"]),),
        name="touched_pages",
        PAGE_SIZE=page_size,
        **options,
    )
    return _call(
        data,
        pages,
        seen,
        out,
        num_pages,
        kernel=kv_kernels.split_pages_kernel,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={3: 0},
        grid=(kv_kernels.SPLIT_PROGRAMS,),
        name="split_pages",
        **kv_kernels.split_constants(layout, page_size, out_page_size),
        **kv_kernels.SPLIT_OPTIONS,
    )


def sanitise(tables, sink, *, num_slots: list[int], widths: list[int], heads: int, least_sink: float):
    """One or two index tables, each `(indices, lengths or None)`, and a sink or None, as `sanitise_kernel` has them."""
    indices, lengths = zip(*tables)
    rows, absent = indices[0].shape[0], 2 - len(tables)
    widths, num_slots = [*widths, *[0] * absent], [*num_slots, *[0] * absent]
    indices, lengths = [*indices, *[indices[0]] * absent], [*lengths, *[None] * absent]
    # What is absent is neither read nor written, but has its place among the arguments.
    shapes = []
    for width, length in zip(widths, lengths):
        shapes += [(rows, width) if width else (1,), (1,) if length is None else (rows,)]
    *outputs, out_sink = _call(
        *(x for index, length in zip(indices, lengths) for x in (index, index if length is None else length)),
        indices[0] if sink is None else sink,
        rows,
        *num_slots,
        0 if sink is None else sink.shape[0],
        kernel=sanitise_kernels.sanitise_kernel,
        out_shape=[
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
            jax.ShapeDtypeStruct((heads,), jnp.float32),
        ],
        grid=sanitise_kernels.grid(rows, *widths),
        name="sanitise",
        TOPK=indices[0].shape[1],
        WIDTH=widths[0],
        HAS_LENGTHS=lengths[0] is not None,
        EXTRA_TOPK=indices[1].shape[1],
        EXTRA_WIDTH=widths[1],
        HAS_EXTRA_LENGTHS=lengths[1] is not None,
        HEADS=heads,
        HAS_SINK=sink is not None,
        LEAST_SINK=least_sink,
        ROWS_PER_LENGTH=1,
        **sanitise_kernels.OPTIONS,
    )
    pairs = zip(outputs[::2], outputs[1::2])
    safe = [(index, None if given is None else length) for (index, length), (_, given) in zip(pairs, tables)]
    return safe, None if sink is None else out_sink


def combine_swa_extra(swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows):
    """As `jax_sparse_mla.combine_swa_extra_indices`, `num_swa_rows` an int32 scalar."""
    n, swa_width, extra_width = *swa_indices.shape, extra_indices.shape[1]
    width = index_kernels.merged_width(swa_width + extra_width)
    return tuple(
        _call(
            swa_indices,
            swa_lengths,
            extra_indices,
            extra_lengths,
            num_swa_rows,
            n,
            kernel=index_kernels.combine_swa_extra_kernel,
            out_shape=_merged_shapes(n, width),
            grid=index_kernels.swa_extra_grid(n, width),
            name="combine_swa_extra",
            SWA_WIDTH=swa_width,
            EXTRA_WIDTH=extra_width,
            WIDTH=width,
            **index_kernels.SWA_EXTRA_OPTIONS,
        )
    )


def combine_topk_swa(topk_indices, query_pos, *requests, window: int, compress_ratio: int, topk: int):
    """As `jax_sparse_mla.combine_topk_swa_indices`; requests in its order, from query_start_loc on."""
    query_start_loc, seq_lens, gather_lens, compressed_base, swa_base = requests
    (n, stride), num_requests = topk_indices.shape, seq_lens.shape[0]
    width = index_kernels.merged_width(topk + window)
    return tuple(
        _call(
            topk_indices,
            query_start_loc,
            query_pos,
            seq_lens,
            gather_lens,
            compressed_base,
            swa_base,
            n,
            num_requests,
            kernel=index_kernels.combine_topk_swa_kernel,
            out_shape=_merged_shapes(n, width),
            grid=index_kernels.topk_swa_grid(n),
            name="combine_topk_swa",
            TOPK_STRIDE=stride,
            TOPK=topk,
            WINDOW=window,
            RATIO=compress_ratio,
            WIDTH=width,
            SEARCH_STEPS=num_requests.bit_length(),
            **index_kernels.TOPK_SWA_OPTIONS,
        )
    )


def _merged_shapes(n: int, width: int):
    return [jax.ShapeDtypeStruct((n, width), jnp.int32), jax.ShapeDtypeStruct((n,), jnp.int32)]

"""Our SM90 kernels on torch tensors, the same that XLA's programs have.

Decode's library plans a call once; `launcher.c` then reads the tensors' addresses and has it launch the kernel. Prefill
is a Pallas kernel, compiled once for all calls (`jax_sparse_mla/launch/mosaic.py`), which `launcher.c` launches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.hopper.decode_plan import NO_CACHE, cache_numbers, decode_format, decode_plan
from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.attention.index_table import V_DIM, TableShape
from jax_sparse_mla.launch import build
from sparse_mla_torch.attention import route
from sparse_mla_torch.attention.backends import heads_apart
from sparse_mla_torch.attention.call_cache import Results
from sparse_mla_torch.launch import launcher, mosaic
from sparse_mla_torch.operations.checks import are_aligned

WRITES_INTO = True
PREFILL_APART = ("q", "indices")
_NUM_TENSORS = 11
_NO_TABLE = [0, 0, 0, *NO_CACHE]


def decode_obstacle(options, layout, tables, tensors, device) -> str | None:
    """Why the kernel cannot take these tensors; None if it can."""
    if not are_aligned(tensors) or any(table.page_bytes % 16 for table in tables):
        return "its kernel reads 16 bytes at a time: tensors and pages must begin at multiples of 16 bytes"
    return None


def _numbers(table: TableShape) -> list[int]:
    """The kernel's Shape of a table."""
    cache = cache_numbers(table.layout, table.num_slots, table.page_size, table.page_bytes)
    return [table.topk, table.stride or table.topk, table.rows_per_length, *cache]


def decode(options, q, layout, tables, has_sink) -> Callable[..., Results]:
    """As `decode.prepare`'s `run`, at one shape."""
    batch, q_len, heads, _ = q.shape
    kernel_format = decode_format(x.layout for x in tables)
    plan = decode_plan(
        batch * q_len,
        heads,
        tuple(table.topk for table in tables),
        has_lengths=any(table.rows_per_length for table in tables),
        sm_count=route.device_info(q.device).sm_count,
        kernel_format=kernel_format,
        batch_invariant=options.batch_invariant,
    )
    numbers = [*map(_numbers, tables), _NO_TABLE]
    library, shape = build.module(*BACKENDS["hopper"].binaries["decode"]), (batch, q_len, heads)
    plan_bytes = library.sparse_decode_plan(
        *(batch * q_len, heads, kernel_format, numbers[0], numbers[1]),
        *(options.softmax_scale, options.empty_lse, plan.tile, plan.groups, plan.cuts, q.get_device()),
    )
    launch = launcher.planned(library.sparse_decode_run(), plan_bytes, _NUM_TENSORS)
    scratch_bytes = plan.scratch_bytes

    def run(q, *arguments):
        *tables, attn_sink, _, into = arguments
        q = q.contiguous()
        out, lse = into or (None, None)
        if out is None:
            out = q.new_empty((*shape, V_DIM))
        if lse is None:
            lse = q.new_empty(shape, dtype=torch.float32)
        # From torch's pool, which a graph that captures the call keeps.
        scratch = q.new_empty(scratch_bytes, dtype=torch.uint8) if scratch_bytes else None
        launch(q, *tables, attn_sink, out, lse, scratch)
        return out, lse.transpose(1, 2)

    return run


def prefill_obstacle(q, kv, indices, lengths, attn_sink) -> str | None:
    """Why the kernel cannot take these tensors; None if it can."""
    if not are_aligned((q, kv)):
        return "its kernel reads 16 bytes at a time: q and kv must begin at multiples of 16 bytes"
    if q.shape[1] and prefill_function(q.shape[1], q.shape[2], q.get_device()) is None:
        return "its kernel cannot be compiled here: a warning says why"
    return None


def prefill_function(heads: int, qk_dim: int, device: int) -> mosaic.Function | None:
    """Prefill's kernel for so many heads, compiled if need be; None, with a warning why, where it cannot be."""
    return mosaic.load(alone.library(alone.name_of(heads, qk_dim)), device)


def prefill(options, q, table, has_sink) -> Callable[..., Results]:
    """As `prefill.prepare`'s `run`, at one shape."""
    tokens, heads, qk_dim = q.shape
    function, items = prefill_function(heads, qk_dim, q.get_device()), alone.work_items(tokens, heads, qk_dim)
    blocks = min(items, route.device_info(q.device).sm_count)
    sizes = alone.sizes(
        *(tokens, heads, heads_apart(q) or heads, table.num_slots, table.topk, table.stride or table.topk, blocks),
        softmax_scale=options.softmax_scale,
        log2=options.log2,
        empty_lse=options.empty_lse,
    )
    launch = mosaic.direct(function, blocks, [*[None] * 5, *sizes, *[None] * 3])
    shape, statistic = (tokens, heads, V_DIM), (tokens, heads)

    def run(q, kv, indices, lengths, attn_sink, into):
        out, max_logits, lse = into or (None, None, None)
        if out is None:
            out = q.new_empty(shape)
        if max_logits is None:
            max_logits = q.new_empty(statistic, dtype=torch.float32)
        if lse is None:
            lse = q.new_empty(statistic, dtype=torch.float32)
        launch(q, kv, indices, lengths, attn_sink, out, max_logits, lse)
        return out, max_logits, lse

    return run

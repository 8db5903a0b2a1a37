"""Sparse MLA prefill for SM90 with few heads, in Pallas Mosaic GPU; docs/internals/kernels-prefill.md explains it.

Scores and output are computed transposed, Sᵀ = K Qᵀ and Oᵀ = Vᵀ Pᵀ. Keys, or columns of V, are then the 64 rows of a
wgmma and the heads its 8, 16 or 32 columns, so no head is padded to 64.

A thread block has two teams of two warpgroups, a consumer and its producer. A team takes work items by itself; an item
is one query token with all its heads. So one team's products run while the other waits for keys or computes weights. A
team's keys come in blocks of 64, in slices of 64 columns, through a ring of slots. A block's tail of 64 columns, which
keys of d 576 have and which is no part of V, comes first.

Weights are exp2(score − reference), with one reference for each head, as in `kernel.py`. A block in which no score is
more than 8 above the reference needs no maximum over its keys: each thread has sums and maxima of its own keys, and
they are put together at the item's end.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_sparse_mla.attention.hopper.prefill.few_heads.consumer import consume
from jax_sparse_mla.attention.hopper.prefill.few_heads.producer import produce
from jax_sparse_mla.attention.hopper.prefill.few_heads.team import (
    BLOCK,
    MOST_HEADS,
    TEAMS,
    Item,
    Shape,
    Shared,
    init_barriers,
    scratch,
)
from jax_sparse_mla.attention.hopper.prefill.kernel import launched
from jax_sparse_mla.attention.hopper.prefill.tiles import Sizes, columns_scanned


def _for_each_item(work, team, length_ref, sizes: Sizes) -> None:
    """Deals the items in turn."""
    this, step = lax.axis_index("block") + team * sizes.blocks, TEAMS * sizes.blocks

    def one(number, first_block):
        t = this + number * step
        limit = columns_scanned(length_ref, sizes, t)
        # A token without keys has one block that is all masked, so that both warpgroups pass every barrier.
        end_block = first_block + jnp.maximum(lax.div(limit + (BLOCK - 1), jnp.int32(BLOCK)), 1)
        work(team, Item(number, t, limit, first_block, end_block))
        return end_block

    count = lax.div(sizes.tokens - this + (step - 1), step)
    lax.fori_loop(0, count, one, jnp.int32(0))


def _shape(heads: int, qk_dim: int) -> Shape:
    return Shape(next(n for n in (8, 16, MOST_HEADS) if n >= heads), qk_dim)


def serves(heads: int, qk_dim: int) -> bool:
    """Whether the kernel has room for so many heads: up to 32 of d 512, up to 16 of d 576."""
    return heads <= MOST_HEADS and _shape(heads, qk_dim).fits


def sparse_prefill_few_heads(q, kv, indices, topk_length, attn_sink, *, softmax_scale: float, sm_count: int, sizes=()):
    """`kernel.sparse_prefill` for as few heads as this kernel `serves`."""
    tokens, heads, qk_dim = q.shape
    shape = _shape(heads, qk_dim)
    blocks = min(sm_count, tokens)

    def work(inputs, sizes, results, memory):
        q_ref, kv_ref, indices_ref, length_ref, sink_ref = inputs
        out_refs, shared = (*results, sink_ref), Shared(*memory)
        each = functools.partial(_for_each_item, length_ref=length_ref, sizes=sizes)
        init_barriers(shape, shared)
        role = lax.axis_index("role")

        @pl.when(role < TEAMS)
        def _consumer():
            plgpu.set_max_registers(shape.consumer_registers, action="increase")
            each(functools.partial(consume, shape, out_refs, sizes, shared), role)

        @pl.when(role >= TEAMS)
        def _producer():
            plgpu.set_max_registers(shape.producer_registers, action="decrease")
            each(functools.partial(produce, shape, q_ref, kv_ref, indices_ref, sizes, shared), role - TEAMS)

    arrays = q, kv, indices, topk_length, attn_sink
    return launched(work, arrays, softmax_scale, sizes, scratch(shape), blocks, warpgroups=2 * TEAMS)

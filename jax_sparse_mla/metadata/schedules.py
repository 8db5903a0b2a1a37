"""Kernel schedules: how FlashMLA's decode and DeepGEMM's indexer share the work of a batch among the SMs.

The kernels' own planners keep the batch in shared memory, which limits its size. Here neither has a limit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.indices.lookup import INT_MAX, exclusive_cumsum, take_or_minus_one
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import launching

_BLOCK_TOKENS = 64  # keys that a FlashMLA block covers
_OVERHEAD_BLOCKS = 5  # the cost of starting on a request, in blocks
_MOST_PARTS = 1024  # partitions that the kernel can schedule, more than any device has multiprocessors


def _blocks(tokens):
    return -(-tokens // _BLOCK_TOKENS)


def flashmla_schedule(
    topk_length: jax.Array | None,
    *,
    batch: int,
    topk: int,
    extra_topk: int = 0,
    extra_topk_length: jax.Array | None = None,
    num_sm_parts: int,
) -> tuple[jax.Array, jax.Array]:
    """FlashMLA's split-KV schedule of a sparse decode, as its own scheduling kernel computes it.

    Row b scans `s = max(topk_length, 1)` keys, or, with an extra cache, `s = ceil64(s) + extra_topk_length`,
    in `ceil(s / 64)` blocks. Starting on a request costs 5 blocks more, so each partition gets a budget of
    `ceil(Σ(blocks + 5) / num_sm_parts) + 5`. It starts where the partition before it stopped, takes whole requests
    while `rest + 5` fits, then takes `budget − 5` blocks of the next request if that is positive.

    Args:
      topk_length: int32 `[batch]`, clipped to `[0, topk]`; None means all of `topk`.
      batch: requests, at least 1 (static).
      topk: index columns (static).
      extra_topk: index columns of the extra cache; 0 where there is none (static).
      extra_topk_length: int32 `[batch]`, clipped to `[0, extra_topk]`; None means all of `extra_topk`.
      num_sm_parts: partitions, at least 1 (static).

    Returns:
      `(tile_scheduler_metadata, num_splits)`. int32 `[num_sm_parts, 8]`, a row per partition: begin_req,
      end_req (inclusive), begin_block, end_block (exclusive), begin_split, whether the first and whether the
      last request is split, 0. An idle partition has begin_req = batch. int32 `[batch + 1]`: exclusive sums
      of how many parts each request is split into.

    Raises:
      TypeError: a length that is not int32, a static argument that is not an int.
      ValueError: lengths that are not `[batch]`, a static argument out of range, `extra_topk_length` without
        `extra_topk`, a batch whose blocks cannot be counted in int32.
    """
    check = ArgumentChecks("flashmla_schedule")
    batch = check.static_int("batch", batch, minimum=1)
    num_sm_parts = check.static_int("num_sm_parts", num_sm_parts, minimum=1)
    topk = check.static_int("topk", topk, minimum=0)
    extra_topk = check.static_int("extra_topk", extra_topk, minimum=0)
    topk_length = check.optional("topk_length", topk_length, (batch,), INT32)
    extra_topk_length = check.optional("extra_topk_length", extra_topk_length, (batch,), INT32)
    if extra_topk_length is not None and not extra_topk:
        raise check.fail("extra_topk_length needs extra_topk, the columns of the extra cache's indices, got 0")
    most_keys = _blocks(max(topk, 1)) * _BLOCK_TOKENS + extra_topk
    # One row more than the batch has leaves room for the overhead that the budget adds.
    if max(most_keys, (batch + 1) * (_blocks(most_keys) + _OVERHEAD_BLOCKS)) > INT_MAX:
        raise check.fail(f"{batch} rows (batch) of {topk} + {extra_topk} keys (topk, extra_topk) do not fit int32")
    if topk_length is None:
        topk_length = jnp.full((batch,), topk, jnp.int32)
    if extra_topk_length is None:
        extra_topk_length = jnp.full((batch,), extra_topk, jnp.int32) if extra_topk else topk_length
    return _flashmla_schedule(topk_length, extra_topk_length, topk, extra_topk, num_sm_parts)


@functools.partial(jax.jit, static_argnames=("topk", "extra_topk", "num_sm_parts"))
def _flashmla_schedule(topk_length, extra_topk_length, topk, extra_topk, num_sm_parts):
    static = {"topk": topk, "extra_topk": extra_topk, "num_sm_parts": num_sm_parts}
    plain = functools.partial(flashmla_schedule_reference, **static)

    if num_sm_parts > _MOST_PARTS:
        return plain(topk_length, extra_topk_length)
    kernel = launching("metadata.triton.schedules.flashmla", **static)
    return dispatch(kernel, plain, topk_length, extra_topk_length)


def flashmla_schedule_reference(topk_length, extra_topk_length, topk, extra_topk, num_sm_parts):
    """`flashmla_schedule` in plain JAX; where extra_topk is 0 the second length is not read."""
    return _walk_partitions(_row_blocks(topk_length, extra_topk_length, topk, extra_topk), num_sm_parts)


def _row_blocks(topk_length, extra_topk_length, topk, extra_topk):
    keys = jnp.maximum(jnp.clip(topk_length, 0, topk), 1)
    if extra_topk:
        keys = _blocks(keys) * _BLOCK_TOKENS + jnp.clip(extra_topk_length, 0, extra_topk)
    return _blocks(keys)


def _walk_partitions(blocks, num_sm_parts):
    # The requests' costs on one line: request r covers [starts[r], starts[r + 1]), its overhead at the end.
    starts = exclusive_cumsum(blocks + _OVERHEAD_BLOCKS)
    total = starts[-1]
    budget = -(-total // num_sm_parts) + _OVERHEAD_BLOCKS

    def walk(state, _):
        request, block, split = state
        position = starts[request] + block
        reach = position + jnp.minimum(budget, total - position)
        # The partition takes the requests that end within reach, and of the next one what fits with its overhead.
        # The budget exceeds the overhead, so a partition that ends in the request where it began has always cut it.
        next_request = jnp.searchsorted(starts, reach, side="right", method="scan_unrolled").astype(jnp.int32) - 1
        next_block = jnp.maximum(reach - starts[next_request] - _OVERHEAD_BLOCKS, 0)
        cuts_before = jnp.where(next_request == request, split, 0)
        state = (next_request, next_block, cuts_before + (next_block > 0).astype(jnp.int32))
        return state, state

    zero = jnp.int32(0)
    _, ends = jax.lax.scan(walk, (zero, zero, zero), length=num_sm_parts)
    begin_req, begin_block, begin_split = (jnp.concatenate([zero[None], x[:-1]]) for x in ends)
    next_req, next_block, _ = ends

    cut = next_block > 0
    end_req = jnp.where(cut, next_req, next_req - 1)
    end_block = jnp.where(cut, next_block, blocks[end_req])
    one_request = begin_req == end_req
    first_split = (begin_block > 0) | (one_request & cut)
    last_split = cut | (one_request & (begin_block > 0))
    columns = (begin_req, end_req, begin_block, end_block, begin_split, first_split, last_split)
    tiles = jnp.stack([*(x.astype(jnp.int32) for x in columns), jnp.zeros_like(begin_req)], axis=1)

    cuts = jnp.zeros((blocks.shape[0] + 1,), jnp.int32).at[next_req + 1].add(cut.astype(jnp.int32), mode="drop")
    return tiles, jnp.arange(cuts.shape[0], dtype=jnp.int32) + jnp.cumsum(cuts, dtype=jnp.int32)


def paged_mqa_schedule(context_lens: jax.Array, *, num_sms: int, split_kv: int = 256) -> jax.Array:
    """DeepGEMM's schedule of the paged indexer logits: where each SM starts.

    The contexts are cut into splits of `split_kv` keys. The splits of all rows form one sequence, of which every SM
    gets an equal run; the remainder goes to the last SMs, as in SGLang's planner.

    Args:
      context_lens: int32 `[B]`, keys of each query row; negative means 0.
      num_sms: SMs, at least 1 (static).
      split_kv: keys per split, at least 1 (static).

    Returns:
      int32 `[num_sms + 1, 2]`: (query row, split of that row) where SM i starts; SM i ends where SM i + 1
      starts. The end of the work is (B, 0). Splits past INT_MAX in all are not scheduled.

    Raises:
      TypeError: lengths that are not int32, a static argument that is not an int.
      ValueError: lengths that are not `[B]`, a static argument below 1.
    """
    check = ArgumentChecks("paged_mqa_schedule")
    context_lens = check("context_lens", context_lens, (None,), INT32)
    num_sms = check.static_int("num_sms", num_sms, minimum=1)
    split_kv = check.static_int("split_kv", split_kv, minimum=1)
    return _paged_mqa_schedule(context_lens, num_sms, split_kv)


@functools.partial(jax.jit, static_argnames=("num_sms", "split_kv"))
def _paged_mqa_schedule(context_lens, num_sms, split_kv):
    static = {"num_sms": num_sms, "split_kv": split_kv}
    plain = functools.partial(paged_mqa_schedule_reference, **static)
    if context_lens.shape[0] == 0 or num_sms > _MOST_PARTS:
        return plain(context_lens)
    return dispatch(launching("metadata.triton.schedules.paged_mqa", **static), plain, context_lens)


def paged_mqa_schedule_reference(context_lens, num_sms, split_kv):
    """`paged_mqa_schedule` in plain JAX."""
    context_lens = jnp.maximum(context_lens, 0)
    splits = context_lens // split_kv + (context_lens % split_kv > 0)
    starts = exclusive_cumsum(splits)
    total = starts[-1]

    sm = jnp.arange(num_sms + 1, dtype=jnp.int32)
    first_with_one_more = num_sms - total % num_sms
    target = sm * (total // num_sms) + jnp.maximum(sm - first_with_one_more, 0)
    row = jnp.searchsorted(starts[1:], target, side="right", method="scan_unrolled").astype(jnp.int32)
    split = jnp.where(row < context_lens.shape[0], target - take_or_minus_one(starts, row), 0)
    return jnp.stack([row, split], axis=1)

"""Steps of a multi-step speculative (EAGLE) draft, as decode batches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.indices.lookup import INT_MAX
from jax_sparse_mla.metadata.batch import ForwardBatch, ForwardMode


def draft_step_batch(
    batch: ForwardBatch,
    step: int | jax.Array,
    num_steps: int,
    *,
    topk: int = 1,
    shift_seq_lens: bool = True,
) -> ForwardBatch:
    """The decode batch of one step of a multi-step draft.

    The draft's `out_cache_loc` `[B * topk * num_steps]` is viewed as `[B, topk, num_steps]`, as SGLang's
    EAGLE worker allocates it, and sliced at `step`. With topk > 1 each request becomes topk neighbouring
    rows. `max_seq_len` is a bucket and stays, so all steps of a draft share one compilation.

    Args:
      batch: the whole draft as a DECODE batch of B requests; `seq_lens` are the committed tokens, 0 for a
        padding request.
      step: which step, 0 … num_steps - 1: an int, or an int32 scalar that may be traced. A traced step
        outside the range gives a batch of padding requests only.
      num_steps: steps of the draft, at least 1 (static).
      topk: branches per request, at least 1 (static).
      shift_seq_lens: whether a step attends to the draft tokens before it and its own: lengths advance by
        `step + 1`. False leaves the committed lengths, as SGLang's sparse backends do. Static.

    Returns:
      A DECODE batch of `B * topk` requests with `out_cache_loc` `[B * topk]`. Padding requests keep length 0.

    Raises:
      TypeError: a batch of another type, an array that is not int32, a static argument of another type.
      ValueError: a batch that is not a DECODE batch, whose `out_cache_loc` is not `B * topk * num_steps`
        long, or an int step out of range.
    """
    check = ArgumentChecks("draft_step_batch")
    if not isinstance(batch, ForwardBatch):
        raise TypeError(f"{check.function}: batch must be a ForwardBatch, got {type(batch).__name__}")
    if batch.mode is not ForwardMode.DECODE:
        raise check.fail(f"batch.mode must be DECODE, got {batch.mode}")
    num_steps = check.static_int("num_steps", num_steps, minimum=1)
    topk = check.static_int("topk", topk, minimum=1)
    if not isinstance(shift_seq_lens, bool):
        raise TypeError(f"{check.function}: shift_seq_lens must be a bool, got {type(shift_seq_lens).__name__}")
    seq_lens = check("batch.seq_lens", batch.seq_lens, ("B",), INT32)
    req_pool_indices = check("batch.req_pool_indices", batch.req_pool_indices, ("B",), INT32)
    out_cache_loc = check("batch.out_cache_loc", batch.out_cache_loc, (None,), INT32)
    requests = seq_lens.shape[0]
    if out_cache_loc.shape[0] != requests * topk * num_steps:
        raise check.fail(
            f"batch.out_cache_loc must have B * topk * num_steps = {requests} * {topk} * {num_steps} = "
            f"{requests * topk * num_steps} entries, got {out_cache_loc.shape[0]} "
            f"(topk={topk}, num_steps={num_steps})"
        )
    step = _check_step_index(check, step, num_steps)
    req_pool_indices, seq_lens, out_cache_loc = _slice_step(
        req_pool_indices, seq_lens, out_cache_loc, step, num_steps, topk, shift_seq_lens
    )
    return dataclasses.replace(
        batch,
        req_pool_indices=req_pool_indices,
        seq_lens=seq_lens,
        out_cache_loc=out_cache_loc,
        extend_lens=None,
        num_draft_tokens=None,
    )


def _check_step_index(check: ArgumentChecks, step: int | jax.Array, num_steps: int) -> jax.Array:
    if hasattr(step, "shape") and not isinstance(step, np.generic):
        return check("step", step, (), INT32)
    step = check.static_int("step", step, minimum=0)
    if step >= num_steps:
        raise check.fail(f"step must be < num_steps={num_steps}, got {step}")
    return jnp.int32(step)


# The step is an array, so that an un-jitted caller compiles once for all steps.
@functools.partial(jax.jit, static_argnames=("num_steps", "topk", "shift_seq_lens"))
def _slice_step(req_pool_indices, seq_lens, out_cache_loc, step, num_steps, topk, shift_seq_lens):
    in_range = (step >= 0) & (step < num_steps)
    step = jnp.where(in_range, step, 0)
    live = in_range & (seq_lens > 0)
    if shift_seq_lens:
        advance = step + 1
        seq_lens = jnp.minimum(seq_lens, INT_MAX - advance) + advance
    seq_lens = jnp.where(live, seq_lens, 0)
    slots = jax.lax.dynamic_index_in_dim(out_cache_loc.reshape(-1, num_steps), step, axis=1, keepdims=False)
    return (
        jnp.repeat(req_pool_indices, topk, total_repeat_length=req_pool_indices.shape[0] * topk),
        jnp.repeat(seq_lens, topk, total_repeat_length=seq_lens.shape[0] * topk),
        jnp.where(in_range, slots, -1),
    )

"""Prefill of a chunk from paged caches: gather and dequantise what the chunk needs, merge the indices, attend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.attention.api import sparse_mla_prefill, static_scale
from jax_sparse_mla.attention.context_parallel import gather_shared_kv
from jax_sparse_mla.indices import combine_topk_swa_indices
from jax_sparse_mla.indices.ownership import AxisName
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache.paged import check_first_cache, check_second_cache
from jax_sparse_mla.kv_cache.rows import gather_kv_as_workspace, gather_kv_into
from jax_sparse_mla.metadata.prefill_plan import PrefillPlan


def sparse_mla_extend(
    q: jax.Array,
    plan: PrefillPlan,
    swa_cache: PagedKV,
    compressed_cache: PagedKV | None,
    topk_positions: jax.Array | None,
    *,
    softmax_scale: float,
    attn_sink: jax.Array | None = None,
    workspace: jax.Array | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One layer's attention in a V4 prefill chunk (EXTEND), through a bf16 workspace.

    The rows that the chunk can see are gathered from both caches into one workspace, `[compressed | window]`, the
    top-k and window indices of each query are merged into one table over it, and `sparse_mla_prefill` attends.

    Args:
      q: bfloat16 `[T, heads, qk_dim]`, the chunk's queries, requests in order; rows past the last one are padding.
      plan: `build_prefill_plan` of the layer's compress ratio, shared by all its layers.
      swa_cache: the sliding-window cache, this chunk's rows already written.
      compressed_cache: the compressed cache, this chunk's rows already written, of a layout that may stand beside
        swa_cache's as in `sparse_mla_decode`; None where the ratio is 0.
      topk_positions: int32 `[T, ≥ plan.topk]`, the compressed positions that the indexer chose, local to the
        request, −1 padded, where `plan.selected`. None attends to every complete entry (ratio 128) or none (ratio 0).
      softmax_scale: what q·k is multiplied by (a static number).
      attn_sink: float32 `[heads]`.
      workspace: bfloat16 `[≥ plan.workspace_rows, qk_dim]`, a buffer to gather into; its rows past the plan's are left
        alone and never read. Best left out under `jit`: the compiler then gives the layers of a program one buffer in
        turn, which nothing zeroes, whereas an argument that more than one call gathers into is copied for each.
      backend, batch_invariant: as in `sparse_mla_prefill`.

    Returns:
      out `[T, heads, v_dim]` and lse float32 `[T, heads]`; padding rows give 0 and −inf. Entries that did not fit
      the plan's capacities (`plan.overflow`) are left out of the softmax.

    Raises:
      TypeError, ValueError: wrong dtypes or shapes, a cache that the plan's ratio needs and is missing, or the
        reverse.
    """
    caches = swa_cache, compressed_cache
    options = {"backend": backend, "batch_invariant": batch_invariant}
    return extend(q, plan, *caches, topk_positions, softmax_scale, attn_sink, workspace, **options)


def extend(
    q: jax.Array,
    plan: PrefillPlan,
    swa_cache: PagedKV,
    compressed_cache: PagedKV | None,
    topk_positions: jax.Array | None,
    softmax_scale: float,
    attn_sink: jax.Array | None,
    workspace: jax.Array | None = None,
    pages_axis: AxisName | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """As `sparse_mla_extend`. `pages_axis` is the mesh axis over which the pages of compressed_cache are cut, as in
    `context_parallel_decode`, under `jax.shard_map`: its rows come from all devices, and the workspace is whole on
    each (static)."""
    check = ArgumentChecks("sparse_mla_extend")
    if not isinstance(plan, PrefillPlan):
        raise TypeError(f"{check.function}: plan must be a PrefillPlan, got {type(plan).__name__}")
    caches = ("swa_cache", "compressed_cache")
    check_first_cache(check, caches, swa_cache)
    layout = swa_cache.layout
    q = check("q", q, ("T", "heads", layout.qk_dim), FLOATS)
    _check_plan(check, plan)
    softmax_scale = static_scale(check, softmax_scale)
    attn_sink = check.optional("attn_sink", attn_sink, ("heads",), FLOAT32)
    workspace = check.optional("workspace", workspace, ("workspace rows", layout.qk_dim), (jnp.bfloat16,))
    if workspace is not None and pages_axis is not None:
        raise check.fail("workspace must be None with pages_axis: the rows of other devices do not come into a buffer")
    if workspace is not None and workspace.shape[0] < plan.workspace_rows:
        raise check.fail(f"workspace must have at least {plan.workspace_rows} rows, got {workspace.shape[0]}")
    if (compressed_cache is None) != (plan.compress_ratio == 0):
        argument = "None" if compressed_cache is None else "a cache"
        raise check.fail(f"compressed_cache must be None exactly when the plan's ratio is 0; got {argument}, "
                         f"ratio {plan.compress_ratio}")  # fmt: skip
    if compressed_cache is not None:
        check_second_cache(check, caches, swa_cache, compressed_cache)
    if topk_positions is None:
        if plan.selected:
            raise check.fail(f"topk_positions must be given for ratio {plan.compress_ratio}, got None")
        # Every complete entry: the merge keeps those before each query's own position.
        topk_positions = jnp.broadcast_to(jnp.arange(plan.topk, dtype=jnp.int32), (q.shape[0], plan.topk))
    topk_positions = check("topk_positions", topk_positions, ("T", "topk"), INT32)
    if topk_positions.shape[1] < plan.topk:
        raise check.fail(f"topk_positions must have at least {plan.topk} columns, got {topk_positions.shape[1]}")

    workspace, slots = _fill_workspace(plan, swa_cache, compressed_cache, workspace, pages_axis)
    indices, lengths = combine_topk_swa_indices(
        topk_positions,
        plan.query_start_loc,
        plan.query_pos,
        plan.seq_lens,
        plan.gather_lens,
        plan.compressed_base,
        plan.swa_base,
        window=plan.window,
        compress_ratio=max(plan.compress_ratio, 1),
        topk=plan.topk,
    )
    # A row whose slot is missing (it did not fit, or has no slot) was gathered as zeros: not a key.
    reachable = (indices >= 0) & (indices < plan.workspace_rows)
    present = jnp.where(reachable, slots[jnp.where(reachable, indices, 0)] >= 0, False)
    out, _, lse = sparse_mla_prefill(
        q,
        workspace,
        jnp.where(present, indices, -1),
        softmax_scale=softmax_scale,
        topk_length=lengths,
        attn_sink=attn_sink,
        **options,
    )
    return out, lse


def _check_plan(check: ArgumentChecks, plan: PrefillPlan) -> None:
    """Refuses a plan of other rows than `T`, and one whose arrays do not fit each other."""
    check("plan.query_pos", plan.query_pos, ("T",), INT32)
    for name in ("compressed_slots", "swa_slots"):
        check(f"plan.{name}", getattr(plan, name), (None,), INT32)
    for name in ("seq_lens", "gather_lens", "compressed_base", "swa_base"):
        check(f"plan.{name}", getattr(plan, name), ("B",), INT32)
    check("plan.query_start_loc", plan.query_start_loc, (check.dims["B"] + 1,), INT32)


def _fill_workspace(
    plan: PrefillPlan,
    swa_cache: PagedKV,
    compressed_cache: PagedKV | None,
    workspace: jax.Array | None,
    pages_axis: AxisName | None,
) -> tuple[jax.Array, jax.Array]:
    """The workspace with the plan's rows gathered into it, and the slot of each of those rows (−1: no key)."""
    caches = ((compressed_cache, plan.compressed_slots), (swa_cache, plan.swa_slots))
    # Each region is gathered whole, a missing slot as a row of zeros: no row is left as the memory was.
    regions = [(cache, slots) for cache, slots in caches if cache is not None and slots.size]
    start, present = 0, []
    for cache, slots in regions:
        num_slots = cache.num_slots
        if pages_axis is not None and cache is compressed_cache:
            num_slots *= lax.axis_size(pages_axis)
            workspace = gather_shared_kv(cache, slots, pages_axis)
            workspace = jnp.pad(workspace, ((0, plan.workspace_rows - slots.shape[0]), (0, 0)))
        elif workspace is None:
            workspace = gather_kv_as_workspace(cache, slots, plan.workspace_rows)
        else:
            workspace = gather_kv_into(workspace, start, cache, slots)
        start += slots.shape[0]
        present.append(jnp.where((slots >= 0) & (slots < num_slots), slots, -1))
    return workspace, jnp.concatenate(present)

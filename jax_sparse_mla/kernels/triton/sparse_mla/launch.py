"""The launches of sparse MLA attention: the kernel and, where programs share a row's keys, the combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_sparse_mla.kernels.launch import Device, Launch, Output
from jax_sparse_mla.kernels.triton.sparse_mla import plan as planning
from jax_sparse_mla.kernels.triton.sparse_mla.kernel import combine_kernel, sparse_mla_kernel
from jax_sparse_mla.kernels.triton.sparse_mla.plan import LaunchPlan, Scope
from jax_sparse_mla.kv_cache.layout import KVLayout

_LOG2_E = 1.4426950408889634


def launches(
    layout: KVLayout,
    rows: int,
    heads: int,
    scopes: Sequence[Scope],
    softmax_scale: float,
    has_sink: bool,
    device: Device,
    *,
    max_logits: bool = False,
    may_split: bool = True,
    empty_is_inf: bool = False,
    plan: LaunchPlan | None = None,
) -> tuple[Launch, Launch | None]:
    """The kernel's launch, and the combine's where the keys of a row are split.

    The first takes `inputs` and writes out, lse and max_logits. If there is a second, it takes that out and lse and the
    sink, and writes out and lse.

    Args:
      layout: of the cached rows (`workspace_layout` for prefill).
      rows, heads: query rows and heads, at least 1.
      scopes: one or two.
      softmax_scale: what q·k is multiplied by.
      has_sink: whether the call has an attention sink.
      device: what runs it.
      max_logits: whether they are written.
      may_split: False computes each row by one program, in the same order whatever the batch; max_logits needs it.
      empty_is_inf: see `launch_plan`.
      plan: a plan of this shape; made here by default.
    """
    # What is absent has the first cache's pages: the kernel divides by its page size.
    first, second = (*scopes, scopes[0]._replace(topk=0, rows_per_length=0, num_slots=0))[:2]
    if plan is None:
        plan = planning.launch_plan(
            layout,
            rows=rows,
            num_heads=heads,
            topk=first.topk,
            extra_topk=second.topk,
            has_sink=has_sink,
            capability=device.compute_capability,
            sm_count=device.sm_count,
            may_split=may_split,
            empty_is_inf=empty_is_inf,
        )
    lse = Output((rows, heads), "float32")
    results = some = Output((rows, heads, planning.V_DIM), "bfloat16"), lse
    splits = plan.num_splits
    if splits > 1:
        some = Output((splits, rows, heads, planning.V_DIM), "float32"), Output((splits, rows, heads), "float32")
    constants = plan.constexprs | planning.page_constants(first, second)
    constants |= {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    facts = [x for scope in (first, second) for x in (scope.rows_per_length, scope.topk, scope.num_slots)]
    scalars = (softmax_scale * _LOG2_E, heads, *facts)
    outputs = (*some, lse if max_logits else None)
    attend = Launch(sparse_mla_kernel, "sparse_mla", plan.grid, scalars, outputs, constants)
    if splits == 1:
        return attend, None
    constants, scalars = plan.combine_constexprs, (heads, splits)
    return attend, Launch(combine_kernel, "sparse_mla_combine", plan.combine_grid, scalars, results, constants)


def inputs(q: Any, tables: Sequence[tuple[Any, Any, Any]], sink: Any) -> list[Any]:
    """The kernel's inputs; tables are one or two `(cache, indices, lengths or None)`, the sink may be None.

    What is absent is not read, but has a pointer all the same.
    """
    arrays = [q]
    for cache, indices, lengths in (*tables, tables[0])[:2]:
        arrays += (cache, indices, indices if lengths is None else lengths)
    return [*arrays, q if sink is None else sink]

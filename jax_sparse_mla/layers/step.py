"""The metadata and plans that all layers of a step of V4 or V4.1 share, built once."""

from __future__ import annotations

import dataclasses
import functools
import operator

import jax

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.machine import override_of, plan_here
from jax_sparse_mla.attention.route import GATHERED_FROM_ROWS
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.layers import checks as layer_checks
from jax_sparse_mla.metadata import (
    ForwardBatch,
    ForwardMode,
    PrefillPlan,
    RequestTables,
    V4Metadata,
    build_prefill_plan,
    build_v4_metadata,
)
from jax_sparse_mla.metadata.rows import bucket
from jax_sparse_mla.models import ModelSpec


@pytree_dataclass
class V4Step:
    """The metadata that all V4 layers of a step share, and by compress ratio the plans of a gathered prefill; no plans
    where the layers attend to the paged caches."""

    metadata: V4Metadata
    plans: dict[int, PrefillPlan]

    @property
    def overflow(self) -> jax.Array:
        """bool scalar: a bucket was too small for the step; what did not fit is left out of the attention."""
        return functools.reduce(operator.or_, [plan.overflow for plan in self.plans.values()], self.metadata.overflow)


def prepare_v4_step(
    spec: ModelSpec,
    batch: ForwardBatch,
    tables: RequestTables,
    *,
    gathered: bool | None = None,
    gathered_tokens: int | None = None,
) -> V4Step:
    """Builds once what `v4_layer` and `v41_layer` need in every layer of a step.

    Args:
      spec: the model (static).
      batch, tables: the step.
      gathered: whether an EXTEND step gathers a bf16 workspace (True) or attends to the paged caches, as the other
        modes do (False); by default the `kernel` of its plan says so, by the number of rows (static).
      gathered_tokens: tokens of all requests together whose compressed entries the workspace holds; by default the
        bucket for every request (static).

    Raises:
      TypeError, ValueError: see `build_v4_metadata` and `build_prefill_plan`; a backend that the environment names and
        that cannot serve the step.
    """
    metadata = build_v4_metadata(spec, batch, tables)
    layer_checks.check_tables("prepare_v4_step", tables)
    metadata = with_pool_sizes(metadata, tables)
    (rows,), (num_requests,) = batch.out_cache_loc.shape, batch.seq_lens.shape
    if gathered is None:
        gathered = batch.mode is ForwardMode.EXTEND and gathers(spec, rows)
    if not gathered:
        return V4Step(metadata=metadata, plans={})
    if gathered_tokens is None:
        gathered_tokens = num_requests * bucket(batch, tables)
    plans = {
        ratio: build_prefill_plan(
            spec,
            batch,
            tables,
            compress_ratio=ratio,
            swa_capacity=rows + num_requests * (spec.window - 1),
            compressed_capacity=gathered_tokens // ratio if ratio else 0,
        )
        for ratio in spec.compress_ratios
    }
    return V4Step(metadata=metadata, plans=plans)


def with_pool_sizes(metadata: V4Metadata, tables: RequestTables) -> V4Metadata:
    """The metadata, which now knows how many tokens and requests the pool has: layers check their caches against it."""
    tokens, requests = tables.full_to_swa.shape[0] - 1, tables.req_to_token.shape[0]
    compressed = {
        ratio: dataclasses.replace(part, pool_tokens=tokens, pool_requests=requests)
        for ratio, part in metadata.compressed.items()
    }
    return dataclasses.replace(metadata, compressed=compressed)


def gathers(spec: ModelSpec, rows: int) -> bool:
    """Whether an EXTEND step of so many rows gathers a bf16 workspace: the `kernel` of its plan is "sparse_prefill".

    Other modes attend to the paged caches: their rows have no context in common.
    """
    if rows >= GATHERED_FROM_ROWS and not override_of("decode"):  # whoever serves: no kernel is loaded to know it
        return True
    columns = (spec.window or 0) + spec.index_width
    call = Call(
        *("decode", spec.kv_layout, rows, spec.num_heads, DeviceInfo.current(), columns),
        chunk=True,
        extra_layout=spec.compressed_layout,
    )
    return plan_here(call).kernel == "sparse_prefill"

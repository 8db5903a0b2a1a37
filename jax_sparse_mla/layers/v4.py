"""A V4 layer's attention in one step."""

from __future__ import annotations

import jax
from jax import lax

from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.indices.ownership import AxisName
from jax_sparse_mla.layers import checks as layer_checks
from jax_sparse_mla.layers.layer import windowed_layer
from jax_sparse_mla.layers.state import LayerOptions, LayerStep, V4LayerCache, V4LayerParams, V4Rows
from jax_sparse_mla.metadata import ForwardBatch, PrefillPlan, V4Metadata
from jax_sparse_mla.models import ModelSpec


def v4_layer(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    batch: ForwardBatch,
    metadata: V4Metadata,
    plan: PrefillPlan | None,
    *,
    spec: ModelSpec,
    ratio: int,
    index_scores: jax.Array | None = None,
    selected: jax.Array | None = None,
    pages_axis: AxisName | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, V4LayerCache, jax.Array | None]:
    """One V4 layer's attention.

    Args:
      cache: the layer's caches; donate them.
      rows: the projected rows of this step, padded like the batch.
      params: the layer's parameters.
      batch, metadata: the step's, shared by all layers; `metadata = build_v4_metadata(spec, batch, tables)`.
      plan: `V4Step.plans` of this ratio, for an EXTEND step that gathers a workspace; None attends to the paged caches
        directly, in any mode.
      spec: the model. ratio: the layer's compress ratio.
      index_scores: float32 `[T, capacity]`, selects by these instead of the indexer's scores (for comparisons).
      selected: int32 `[T, index_topk]`, positions that a layer of ratio 4 attends to instead of selecting, as another
        run returned them (replay); those that a row does not see count as −1.
      pages_axis: the mesh axis whose devices share the pages of compressed entries and index keys, under
        `jax.shard_map`, as in `context_parallel_decode`; a request's page i lies on device `i % n`, and tables are the
        same everywhere. Windows and states are whole on every device; queries and out are of the device's own heads
        (static).
      backend: of the attention, as in `sparse_mla_decode` and `sparse_mla_prefill`.
      batch_invariant: a row's result does not depend, to the bit, on the other rows of the step or on how many there
        are, as in `sparse_mla_decode` (static). A step of more than 128 rows takes longer: its logits are computed 128
        rows at a time. The result may depend on whether there is a plan.

    Returns:
      out `[T, heads, 512]` (rope not yet taken back), the updated cache, and, where the layer selects
      (ratio 4), the selected compressed positions int32 `[T, index_topk]`, −1 padded (else None).

    Raises:
      TypeError, ValueError: what this ratio's layers need is missing, or caches have shapes that cannot be right for
        the model, for each other or for the batch's requests; and what the functions called here raise.
    """
    check, kind, step = ArgumentChecks("v4_layer"), spec.kind(ratio), LayerStep(batch, metadata, plan)
    devices = 1 if pages_axis is None else lax.axis_size(pages_axis)
    layer_checks.check_v4_layer(check, cache, rows, params, step, spec=spec, kind=kind, devices=devices)
    layer_checks.check_replayed(check, "selected", selected, index_scores, rows, spec=spec, kind=kind)
    options = LayerOptions(index_scores, backend, batch_invariant, selected, pages_axis)
    out, cache, selection = windowed_layer(cache, rows, params, step, spec=spec, kind=kind, options=options)
    return out, cache, None if selection is None else selection.positions

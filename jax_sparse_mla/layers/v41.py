"""A DeepSeek-V4.1 layer's attention in one step.

Few layers compress. A KV source has a compressor, a compressed cache, and index keys made of the same rows; an index
source selects among them. The other layers have a window alone: they read the cache of the latest KV source, and attend
to what the latest index source has selected.
"""

from __future__ import annotations

import jax

from jax_sparse_mla.layers import checks as layer_checks
from jax_sparse_mla.layers.layer import windowed_layer
from jax_sparse_mla.layers.state import LayerOptions, LayerStep, V4LayerCache, V4LayerParams, V4Rows, V41Selection
from jax_sparse_mla.metadata import ForwardBatch, PrefillPlan, V4Metadata
from jax_sparse_mla.models import V41Layer, V41Spec


def v41_layer(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    batch: ForwardBatch,
    metadata: V4Metadata,
    plan: PrefillPlan | None,
    *,
    spec: V41Spec,
    layer: V41Layer,
    source: V4LayerCache | None = None,
    selected: V41Selection | None = None,
    replayed: jax.Array | None = None,
    backend: str | None = None,
) -> tuple[jax.Array, V4LayerCache, V41Selection | None]:
    """One V4.1 layer's attention.

    Args:
      cache: the layer's caches, of `V4LayerCache.zeros(spec, layer.ratio, …)` in a KV source and
        `V4LayerCache.zeros(spec, 0, …)` in another layer; donate them.
      rows: the projected rows of this step, padded like the batch.
      params: the layer's parameters; `compressor` and `index_keys` in a KV source.
      batch, metadata: the step's, of `prepare_v4_step`, shared by all layers.
      plan: `V4Step.plans` of this ratio, for an EXTEND step that gathers a workspace; None attends to the paged caches.
      spec: the model. layer: its layer, of `models.v41_layers` (static).
      source: what this step's `v41_layer` of layer `layer.kv_source` returned as its caches; None in a KV source and in
        a layer of ratio 0.
      selected: what the layer before returned; None before the first index source.
      replayed: int32 `[T, index_topk]`, positions that an index source attends to instead of selecting; see `v4_layer`.
        The source of candidate blocks then publishes none: replay the layers that score them, too.
      backend: of the attention, as in `sparse_mla_decode` and `sparse_mla_prefill`.

    Returns:
      out `[T, heads, 512]` (rope not yet taken back), the updated cache, and what the next layer takes as `selected`.

    Raises:
      TypeError, ValueError: what this layer needs is missing, what it does not have is given, or caches have shapes
        that cannot be right for the model, for each other or for the batch's requests; and what the functions called
        here raise.
    """
    step = LayerStep(batch, metadata, plan)
    kind = layer_checks.check_v41_layer(
        cache, rows, params, step, spec=spec, layer=layer, source=source, selected=selected, replayed=replayed
    )
    return windowed_layer(
        cache,
        rows,
        params,
        step,
        spec=spec,
        kind=kind,
        source=source,
        selection=selected,
        options=LayerOptions(backend=backend, replayed=replayed),
    )

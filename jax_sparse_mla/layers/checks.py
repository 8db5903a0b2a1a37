"""Checks of a layer's arguments at trace time: caches that cannot be right would give wrong results and no error.

A V4 layer's arrays may be torch's: only their shapes and dtypes are read.

All of it is geometry. A layer's caches share the numbering of the pool's slots: entry `slot // ratio` of the compressed
cache and of the index keys belongs to the pool's `slot`, so the two hold equally many, and the pages of the index keys
are the page table's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.compressor.state import CompressorState, compressor_window
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache.pool import LayerPool
from jax_sparse_mla.layers.state import LayerStep
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.models import LayerKind, ModelSpec, V41Layer, V41Spec


def check_tables(function: str, tables: RequestTables) -> None:
    """Refuses a `full_to_swa` without its last −1 where the host has its values; `debug` tells of the others."""
    check = ArgumentChecks(function)
    full_to_swa, table = tables.full_to_swa, check("tables.full_to_swa", tables.full_to_swa, (None,), INT32)
    expected = "tables.full_to_swa must be [pool + 1], the pool's slots and -1 behind them"
    if not table.size:
        raise check.fail(f"{expected}, got no entry")
    if isinstance(full_to_swa, jax.core.Tracer):
        return
    if isinstance(full_to_swa, jax.Array) and any(device.platform != "cpu" for device in full_to_swa.devices()):
        return  # reading it would wait for the GPU
    with jax.ensure_compile_time_eval():
        last = int(np.asarray(full_to_swa[-1]))
    if last != -1:
        raise check.fail(f"{expected}, got {last} as the last of {table.size} entries: append -1")


def check_v4_layer(
    check: ArgumentChecks,
    cache: Any,
    rows: Any,
    params: Any,
    step: LayerStep,
    *,
    spec: ModelSpec,
    kind: LayerKind,
    source: Any = None,
    layer: V41Layer | None = None,
    devices: int = 1,
) -> None:
    """Refuses what a layer with a window cannot serve; the arguments of `v4_layer` and `v41_layer` under their names.

    `check` is of the public function. `layer` is one of V4.1, in which a part that it does not have must be None.
    `devices` share the pages of compressed entries.

    Raises:
      TypeError: a cache, parameters or rows that this kind needs are missing.
      ValueError: a ratio that the step has no metadata of, a plan of another ratio, or shapes that cannot be right.
    """
    ratio, metadata = kind.ratio, step.metadata
    if layer is None and kind.index_keys == "entries":
        raise check.fail(f"ratio must be V4's, got {ratio}: V4.1's layers are v41_layer's")
    if ratio != 0 and ratio not in metadata.compressed:
        ratios = ", ".join(map(str, sorted({0, *metadata.compressed})))
        raise check.fail(f"ratio must be one that metadata was built for ({ratios}), got {ratio}")
    if step.plan is not None and (of := step.plan.compress_ratio) != ratio:
        raise check.fail(f"plan must be of the layer's ratio {ratio}, got one of ratio {of}: V4Step.plans[{ratio}]")
    own_keys, compresses_keys = kind.selected and kind.owns_kv, kind.owns_kv and kind.index_keys == "compressor"
    name = "a layer" if layer is None else "a KV source" if kind.owns_kv else "a layer that is no KV source"
    where, made_ratio = f"{name} of compress ratio {ratio}", ratio if kind.owns_kv else 0
    for part, value, needed, expected in (
        ("cache.swa", cache.swa, True, PagedKV),
        ("cache.compressed", cache.compressed, kind.owns_kv, PagedKV),
        ("cache.state", cache.state, kind.gated, CompressorState),
        ("cache.index_k", cache.index_k, own_keys, "given"),
        ("cache.index_state", cache.index_state, compresses_keys, CompressorState),
        ("rows.compressed_kv", rows.compressed_kv, kind.owns_kv, "given"),
        ("rows.compressed_score", rows.compressed_score, kind.gated, "given"),
        ("rows.index", rows.index, kind.selects == "own", "given"),
        ("params.compressor", params.compressor, kind.owns_kv, "given"),
        ("params.index_compressor", params.index_compressor, compresses_keys, "given"),
        ("params.index_keys", params.index_keys, own_keys and not compresses_keys, "given"),
        ("source", source, ratio > 0 and not kind.owns_kv, "given"),
    ):
        if needed:
            _need(check, part, value, expected, f" in {where}", f"V4LayerCache.zeros(spec, {made_ratio}, ...)")
        elif layer is not None and value is not None:
            without = " without an indexer" * (part == "rows.index")
            raise check.fail(f"{part} must be None in {where}{without}, got {type(value).__name__}")
    _check_one_layer(check, "cache", cache)
    _check_one_layer(check, "params", params, itself=True)
    if ratio == 0:
        return
    holder, read = ("cache", cache) if kind.owns_kv else ("source", source)
    for part in ("compressed", "index_k") if kind.selected else ():
        expected = f"given: the caches of KV source {layer and layer.kv_source}"
        _need(check, f"{holder}.{part}", getattr(read, part), expected)
    _check_one_layer(check, holder, read)
    if kind.selected:
        _check_index_k(check, holder, read.index_k, "compressed", read.compressed, spec=spec, tokens=ratio)
    pool = metadata.compressed[ratio]
    if (tokens := read.compressed.num_slots * ratio * devices) < (pool.pool_tokens or 0):
        raise check.fail(
            f"{holder}.compressed must have an entry for every {ratio} tokens of the pool, got "
            f"{read.compressed.num_pages} pages of {read.compressed.page_size}, for {tokens} tokens, where the pool "
            f"has {pool.pool_tokens} (full_to_swa): make it with the pool's number of pages"
        )
    window = compressor_window(ratio, kind.overlap)
    for part in ("state",) * kind.gated + ("index_state",) * compresses_keys:
        _check_state(check, f"cache.{part}", getattr(cache, part), step.batch, window, pool.pool_requests)


def check_v41_layer(
    cache: Any,
    rows: Any,
    params: Any,
    step: LayerStep,
    *,
    spec: V41Spec,
    layer: V41Layer,
    source: Any,
    selected: Any,
    replayed: Any,
) -> LayerKind:
    """Refuses what `v41_layer` cannot serve; its arguments under its names. Returns the layer's kind.

    Raises:
      TypeError, ValueError: as `check_v4_layer`; what the layer does not have is given; `selected` is missing.
    """
    for name, value, type_ in (("layer", layer, V41Layer), ("spec", spec, V41Spec)):
        if not isinstance(value, type_):
            raise TypeError(f"v41_layer: {name} must be a {type_.__name__}, got {type(value).__name__}")
    check, kind = ArgumentChecks("v41_layer"), layer.kind(spec.kind(layer.ratio))
    if kind.candidates == "publishes" and min(spec.candidate_blocks, spec.candidate_block_size) < 1:
        raise check.fail(
            f"spec must have candidate blocks for layer {layer.index}, which publishes them, got candidate_blocks "
            f"{spec.candidate_blocks} and candidate_block_size {spec.candidate_block_size}"
        )
    check_v4_layer(check, cache, rows, params, step, spec=spec, kind=kind, source=source, layer=layer)
    among, follows = kind.candidates == "among", kind.selects == "shared"
    if (follows or among) and selected is None:
        raise TypeError("v41_layer: selected must be given: what the layer before returned, got None")
    if among and replayed is None and selected.blocks is None:
        raise TypeError(f"v41_layer: selected.blocks must be given in layer {layer.index}, which scores them, got None")
    if follows:
        check("selected.positions", selected.positions, (rows.q.shape[0], spec.index_topk), INT32)
    check_replayed(check, "replayed", replayed, None, rows, spec=spec, kind=kind)
    return kind


def check_replayed(
    check: ArgumentChecks, name: str, selected: Any, index_scores: Any, rows: Any, *, spec: ModelSpec, kind: LayerKind
) -> None:
    """Refuses positions for a layer that selects none, beside scores, or of another shape."""
    if selected is None:
        return
    if kind.selects != "own":
        raise check.fail(f"{name} must be None in a layer that does not select for itself, of ratio {kind.ratio}")
    if index_scores is not None:
        raise check.fail(f"{name} must be None with index_scores")
    check(name, selected, (rows.q.shape[0], spec.index_topk), INT32)


def _need(
    check: ArgumentChecks, part: str, value: Any, expected: type | str, where: str = "", made_by: str = ""
) -> None:
    """Refuses a part that is missing, or not of the expected type."""
    of_type = isinstance(expected, type)
    if value is None or (of_type and not isinstance(value, expected)):
        remedy = f"; {made_by} makes it" if made_by and part.startswith("cache.") else ""
        said = f"a {expected.__name__}" if of_type else expected
        raise TypeError(f"{check.function}: {part} must be {said}{where}, got {type(value).__name__}{remedy}")


def _check_state(
    check: ArgumentChecks,
    name: str,
    state: CompressorState,
    batch: ForwardBatch,
    window: int,
    pool_requests: int | None = None,
) -> None:
    """A state has a row for each request that the pool has room for, or at least for each of the batch's.

    A row keeps the window of every token that may come next: of a speculative step all drafts but the first token may
    be rejected, and have then replaced the oldest tokens of the row.
    """
    requests, of = batch.req_pool_indices.shape[0], "request of the batch"
    if pool_requests is not None:  # `req_pool_indices` names a row of both, which may be the last one
        requests, of = pool_requests, "row of req_to_token"
    if state.max_requests < requests:
        raise check.fail(
            f"{name} must have a row for each {of}, {requests} in all, got {state.max_requests}: make it with "
            "max_requests, the rows of req_to_token"
        )
    drafts = batch.num_draft_tokens if batch.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1
    if (ring := state.kv.shape[1]) < (needed := window + drafts - 1):
        raise check.fail(
            f"{name} must keep {needed} tokens of each request in a step of {drafts} tokens each, of which "
            f"{drafts - 1} may be rejected, got room for {ring}: make it with max_draft_tokens={drafts}"
        )


def check_v32_layer(
    cache: Any, rows: Any, batch: ForwardBatch, index_scores: Any, selected: Any, index_ape: Any, *, spec: ModelSpec
) -> None:
    """Refuses what `v32_layer` cannot serve; its arguments under its names.

    Raises:
      TypeError: a cache is missing, or what pools need. ValueError: shapes that cannot be right, rows and caches of
        which one has an indexer's part and the other has not, a layer that selects nothing and takes no selection.
    """
    check, pool, indexed = ArgumentChecks("v32_layer"), spec.kind().pool, rows.index_k is not None
    pools, scores = indexed and pool > 1, indexed and index_scores is None and selected is None
    for part, value, needed, expected in (
        ("cache.kv", cache.kv, True, PagedKV),
        ("cache.index_k", cache.index_k, indexed, "uint8 [num_pages, 8448]"),
        ("rows.index_q", rows.index_q, scores, "given with rows.index_k, or else index_scores or selected"),
        ("rows.index_weights", rows.index_weights, scores, "given with rows.index_k, or else index_scores or selected"),
        ("rows.index_score", rows.index_score, pools, f"given with pools of {pool} tokens"),
        ("index_ape", index_ape, pools, f"given with pools of {pool} tokens"),
        ("cache.index_state", cache.index_state, pools, CompressorState),
    ):
        if needed:
            _need(check, part, value, expected, made_by="V32LayerCache.zeros(spec, ...)")
    if indexed != cache.has_index_k:
        raise check.fail(
            "rows and cache must both be of a layer with an indexer or both of one without, got "
            f"rows {'with' if indexed else 'without'} index_k and a cache {'with' if cache.has_index_k else 'without'}"
        )
    if selected is not None:
        if index_scores is not None:
            raise check.fail("selected must be None with index_scores")
        check("selected", selected, (rows.q.shape[0], spec.index_width), INT32)
    elif index_scores is None and not indexed:
        raise check.fail(
            "selected must be given in a layer without an indexer of its own: the positions that v32_layer returned "
            "for the last layer with one"
        )
    if not cache.indexed:
        _check_one_layer(check, "cache", cache)
    else:
        cache.kv.check_view(check, "cache.kv", cache.kv.data.shape[0])
        view = cache.layer(cache.kv.layer_index)
        for part in ("index_k", "index_state"):
            expected, got = (getattr(getattr(x, part), "layer_index", None) for x in (view, cache))
            if got != expected:
                raise check.fail(
                    f"cache must be the view of one layer, cache.layer(i), got {part}'s {got} for {expected}"
                )
    if indexed:
        if pool > 1:
            _check_state(check, "cache.index_state", cache.index_state, batch, pool)
        _check_index_k(check, "cache", cache.index_k, "kv", cache.kv, spec=spec, tokens=pool)


def _check_one_layer(check: ArgumentChecks, name: str, tree: Any, *, itself: bool = False) -> None:
    """All fields are of the same layer: an array of keys alone would be shared by all layers of the others.

    `itself` says that the dataclass is a view too, whose arrays are its own.
    """
    fields = [field.name for field in dataclasses.fields(tree) if not field.metadata.get("static")]
    fields = {f"{name}.{field}": getattr(tree, field) for field in fields}
    parts = {field: x for field, x in fields.items() if isinstance(x, LayerPool)} | ({name: tree} if itself else {})
    views = {}
    for field, value in parts.items():
        value.check_view(check, field, jax.tree.leaves(value)[0].shape[0])
        index = value.layer_index
        views[field] = value.num_layers, id(index) if isinstance(index, jax.Array) else index
    if not itself:  # arrays that are no pools
        views |= {field: (1, None) for field, x in fields.items() if x is not None and field not in parts}
    if len(set(views.values())) > 1:
        raise check.fail(
            f"{name} must be the view of one layer, {name}.layer(i), got (num_layers, layer_index) {views}"
        )


def _check_index_k(
    check: ArgumentChecks, holder: str, index_k: Any, part: str, beside: PagedKV, *, spec: ModelSpec, tokens: int
) -> None:
    """index_k has pages of keys of `tokens` tokens in the model's format, as many as the cache beside it can hold."""
    name, format, entries = f"{holder}.index_k", spec.index_format, spec.page_size // tokens
    stored, data = (index_k.format, index_k.data) if isinstance(index_k, IndexKeys) else (IndexFormat.FP8, index_k)
    if stored != format:
        raise check.fail(f"{name} must be of {format!r}, by which its layer quantises queries, got {stored!r}")
    shape, dtype = getattr(data, "shape", ()), str(getattr(data, "dtype", type(data)))
    if dtype.removeprefix("torch.") != "uint8":
        raise TypeError(f"{check.function}: {name} must be uint8, got {dtype}")
    if len(shape) != 2:
        raise check.fail(f"{name} must be [num_pages, page_bytes], got {list(shape)}")
    if shape[1] != entries * format.key_bytes:
        raise check.fail(
            f"{name} must have pages of {entries} keys of {format.key_bytes} bytes, {entries * format.key_bytes} in "
            f"all, got {shape[1]} bytes (of {shape[1] / format.key_bytes:g} keys)"
        )
    pages = index_k.num_pages if isinstance(index_k, IndexKeys) else shape[0]
    if pages * entries * (tokens if part == "kv" else 1) != beside.num_slots:
        unit = f"{tokens} tokens" if tokens > 1 else "token"
        raise check.fail(
            f"{name} must have a key for every {unit} that {holder}.{part} has room for, got {pages} pages of "
            f"{entries} keys and {beside.num_pages} pages of {beside.page_size}: make both with the pool's pages"
        )

"""What a layer refuses at trace time: caches that cannot be right, which would give wrong results and no error.

A V4 layer's arrays may be torch's: only their shapes and dtypes are read.

All of it is geometry. A layer's caches share the numbering of the pool's slots: entry `slot // ratio` of the compressed
cache and of the index keys belongs to the pool's `slot`, so the two hold equally many, and the pages of the index keys
are the page table's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_sparse_mla.argument_checks import INT32, ArgumentChecks
from jax_sparse_mla.compressor.state import CompressorState, compressor_window
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache.pool import LayerPool
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, PrefillPlan, RequestTables, V4Metadata
from jax_sparse_mla.models import INDEXED_RATIO, V41_RATIOS, ModelSpec, V41Layer, V41Spec


def check_tables(function: str, tables: RequestTables) -> None:
    """Refuses a `full_to_swa` without its last −1 where the host has its values; `debug` tells of the others."""
    check = ArgumentChecks(function)
    full_to_swa = check("tables.full_to_swa", tables.full_to_swa, (None,), INT32)
    wanted = "tables.full_to_swa must be [pool + 1], the pool's slots and -1 behind them"
    if not full_to_swa.size:
        raise check.fail(f"{wanted}, got no entry")
    given = tables.full_to_swa
    if isinstance(given, jax.core.Tracer):
        return
    if isinstance(given, jax.Array) and any(device.platform != "cpu" for device in given.devices()):
        return  # reading it would wait for the GPU
    with jax.ensure_compile_time_eval():
        last = int(np.asarray(tables.full_to_swa[-1]))
    if last != -1:
        raise check.fail(f"{wanted}, got {last} as the last of {full_to_swa.size} entries: append -1")


def check_v4_layer(
    cache: Any,
    rows: Any,
    params: Any,
    batch: ForwardBatch,
    metadata: V4Metadata,
    plan: PrefillPlan | None,
    *,
    spec: ModelSpec,
    ratio: int,
) -> None:
    """Refuses what `v4_layer` cannot serve; its arguments, of `layers`, under its names.

    Raises:
      TypeError: a cache, parameters or rows that this ratio needs are missing.
      ValueError: a ratio that the step has no metadata of, a plan of another ratio, or shapes that cannot be right.
    """
    check, need = _needs("v4_layer", metadata, plan, ratio, f"a layer of compress ratio {ratio}", ratio)
    if ratio in V41_RATIOS:
        raise check.fail(f"ratio must be V4's, got {ratio}: V4.1's layers are v41_layer's")
    need("cache.swa", cache.swa, PagedKV)
    _check_one_layer(check, "cache", cache)
    _check_one_layer(check, "params", params, itself=True)
    if ratio == 0:
        return
    need("cache.compressed", cache.compressed, PagedKV)
    need("cache.state", cache.state, CompressorState)
    need("rows.compressed_kv", rows.compressed_kv)
    need("rows.compressed_score", rows.compressed_score)
    need("params.compressor", params.compressor)
    states = {"cache.state": cache.state}
    if ratio == INDEXED_RATIO:
        need("cache.index_k", cache.index_k)
        need("cache.index_state", cache.index_state, CompressorState)
        need("rows.index", rows.index)
        need("params.index_compressor", params.index_compressor)
        states["cache.index_state"] = cache.index_state
        entries = spec.page_size // ratio
        _check_index_k(check, cache.index_k, "cache.compressed", cache.compressed, entries, f"{ratio} tokens")
    _check_compressed(check, cache.compressed, states, batch, metadata, ratio)


def _needs(
    function: str, metadata: V4Metadata, plan: PrefillPlan | None, ratio: int, layer: str, cache_ratio: int
) -> tuple[ArgumentChecks, Callable[..., None]]:
    """Refuses a step of other ratios. Returns `need(name, value, kind=None)`, which refuses what is missing."""
    check = ArgumentChecks(function)
    if ratio != 0 and ratio not in metadata.compressed:
        ratios = ", ".join(map(str, sorted({0, *metadata.compressed})))
        raise check.fail(f"ratio must be one that metadata was built for ({ratios}), got {ratio}")
    if plan is not None and plan.compress_ratio != ratio:
        raise check.fail(
            f"plan must be of the layer's ratio {ratio}, got one of ratio {plan.compress_ratio}: V4Step.plans[{ratio}]"
        )

    def need(name: str, value: Any, kind: type | None = None) -> None:
        if value is None or (kind is not None and not isinstance(value, kind)):
            wanted = kind.__name__ if kind is not None else "given"
            remedy = f"; V4LayerCache.zeros(spec, {cache_ratio}, ...) makes it" if name.startswith("cache.") else ""
            raise TypeError(
                f"{function}: {name} must be {'a ' if kind else ''}{wanted} in {layer}, got "
                f"{type(value).__name__}{remedy}"
            )

    return check, need


def _check_compressed(
    check: ArgumentChecks,
    compressed: PagedKV,
    states: dict[str, CompressorState],
    batch: ForwardBatch,
    metadata: V4Metadata,
    ratio: int,
    name: str = "cache",
) -> None:
    """The compressed cache has an entry for each group of the pool's tokens, and states a row for each request."""
    pool_tokens = metadata.compressed[ratio].pool_tokens
    if (tokens := compressed.num_slots * ratio) < (pool_tokens or 0):
        raise check.fail(
            f"{name}.compressed must have an entry for every {ratio} tokens of the pool, got "
            f"{compressed.num_pages} pages of {compressed.page_size}, for {tokens} tokens, where the pool "
            f"has {pool_tokens} (full_to_swa): make it with the pool's number of pages"
        )
    window = compressor_window(ratio)
    _check_states(check, states, batch, window, metadata.compressed[ratio].pool_requests)


def _check_states(
    check: ArgumentChecks,
    states: dict[str, CompressorState],
    batch: ForwardBatch,
    window: int,
    pool_requests: int | None = None,
) -> None:
    """States have a row for each request that the pool has room for, or at least for each of the batch's.

    A row keeps the window of every token that may come next: of a speculative step all drafts but the first token may
    be rejected, and have then replaced the oldest tokens of the row.
    """
    wanted, of = batch.req_pool_indices.shape[0], "request of the batch"
    if pool_requests is not None:  # `req_pool_indices` names a row of both, which may be the last one
        wanted, of = pool_requests, "row of req_to_token"
    for name, state in states.items():
        if state.max_requests < wanted:
            raise check.fail(
                f"{name} must have a row for each {of}, {wanted} in all, got {state.max_requests}: make it with "
                "max_requests, the rows of req_to_token"
            )
        drafts = batch.num_draft_tokens if batch.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) else 1
        if (ring := state.kv.shape[1]) < (needed := window + drafts - 1):
            raise check.fail(
                f"{name} must keep {needed} tokens of each request in a step of {drafts} tokens each, of which "
                f"{drafts - 1} may be rejected, got room for {ring}: make it with max_draft_tokens={drafts}"
            )


def check_v41_layer(
    cache: Any,
    rows: Any,
    params: Any,
    batch: ForwardBatch,
    metadata: V4Metadata,
    plan: PrefillPlan | None,
    *,
    spec: V41Spec,
    layer: V41Layer,
    source: Any,
    selected: Any,
) -> None:
    """Refuses what `v41_layer` cannot serve; its arguments under its names.

    Raises:
      TypeError: what this layer needs is missing. ValueError: what it does not have is given, a plan of another ratio,
        or shapes that cannot be right.
    """
    if not isinstance(layer, V41Layer):
        raise TypeError(f"v41_layer: layer must be a V41Layer, one of models.v41_layers, got {type(layer).__name__}")
    if not isinstance(spec, V41Spec):
        raise TypeError(f"v41_layer: spec must be a V41Spec, got {type(spec).__name__}")
    ratio, kind = layer.ratio, "a KV source" if layer.is_kv_source else "a layer that is no KV source"
    where = f"{kind} of compress ratio {ratio}"
    check, need = _needs("v41_layer", metadata, plan, ratio, where, ratio if layer.is_kv_source else 0)
    if layer.publishes and min(spec.candidate_blocks, spec.candidate_block_size) < 1:
        raise check.fail(
            f"spec must have candidate blocks for layer {layer.index}, which publishes them, got candidate_blocks "
            f"{spec.candidate_blocks} and candidate_block_size {spec.candidate_block_size}"
        )
    owns, gated = layer.is_kv_source, layer.is_kv_source and ratio > 1
    reads, follows = ratio > 0 and not layer.is_kv_source, ratio > 0 and not layer.is_index_source
    for name, value, wanted, type_ in (
        ("cache.swa", cache.swa, True, PagedKV),
        ("cache.compressed", cache.compressed, owns, PagedKV),
        ("cache.state", cache.state, gated, CompressorState),
        ("cache.index_k", cache.index_k, owns, None),
        ("rows.compressed_kv", rows.compressed_kv, owns, None),
        ("rows.compressed_score", rows.compressed_score, gated, None),
        ("rows.index", rows.index, layer.is_index_source, None),
        ("params.compressor", params.compressor, owns, None),
        ("params.index_keys", params.index_keys, owns, None),
        ("source", source, reads, None),
    ):
        if wanted:
            need(name, value, type_)
        elif value is not None:
            without = " without an indexer" * (name == "rows.index")
            raise check.fail(f"{name} must be None in {where}{without}, got {type(value).__name__}")
    if (follows or layer.among_candidates) and selected is None:
        raise TypeError("v41_layer: selected must be given: what the layer before returned, got None")
    if layer.among_candidates and selected.blocks is None:
        raise TypeError(f"v41_layer: selected.blocks must be given in layer {layer.index}, which scores them, got None")
    if follows:
        check("selected.positions", selected.positions, (rows.q.shape[0], spec.index_topk), INT32)
    _check_one_layer(check, "cache", cache)
    _check_one_layer(check, "params", params, itself=True)
    if ratio == 0:
        return
    name, read = ("cache", cache) if owns else ("source", source)
    for part, value in (("compressed", read.compressed), ("index_k", read.index_k)):
        if value is None:
            raise TypeError(
                f"v41_layer: {name}.{part} must be given: the caches of KV source {layer.kv_source}, got None"
            )
    _check_one_layer(check, name, read)
    entries, unit = spec.page_size // ratio, f"{ratio} tokens"
    _check_index_k(
        check,
        read.index_k,
        f"{name}.compressed",
        read.compressed,
        entries,
        unit,
        cache=name,
        format=spec.index_format,
    )
    states = {"cache.state": cache.state} if gated else {}
    _check_compressed(check, read.compressed, states, batch, metadata, ratio, name)


def check_v32_layer(
    cache: Any,
    rows: Any,
    batch: ForwardBatch,
    index_scores: Any,
    selected: Any,
    index_ape: Any,
    *,
    spec: ModelSpec,
) -> None:
    """Refuses what `v32_layer` cannot serve; its arguments under its names.

    Raises:
      TypeError: a cache is missing, or what pools need. ValueError: shapes that cannot be right, rows and caches of
        which one has an indexer's part and the other has not, a layer that selects nothing and takes no selection.
    """
    check = ArgumentChecks("v32_layer")
    indexed = rows.index_k is not None
    for name, kind in (("kv", PagedKV), *([("index_k", None)] if indexed else [])):
        value = getattr(cache, name)
        if value is None or (kind and not isinstance(value, kind)):
            wanted = "a PagedKV" if kind else "uint8 [num_pages, 8448]"
            raise TypeError(
                f"v32_layer: cache.{name} must be {wanted}, got {type(value).__name__}; V32LayerCache.zeros(spec, ...) "
                "makes it"
            )
    if indexed != cache.has_index_k:
        raise check.fail(
            "rows and cache must both be of a layer with an indexer or both of one without, got "
            f"rows {'with' if indexed else 'without'} index_k and a cache {'with' if cache.has_index_k else 'without'}"
        )
    for name in ("index_q", "index_weights") if indexed and index_scores is None else ():
        if getattr(rows, name) is None:
            raise TypeError(f"v32_layer: rows.{name} must be given with rows.index_k, or else index_scores; got None")
    if selected is not None:
        if indexed or index_scores is not None:
            other = "rows of a layer that selects for itself" if indexed else "index_scores"
            raise check.fail(f"selected must be None with {other}")
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
        for name in ("index_k", "index_state"):
            own, given = (getattr(getattr(x, name), "layer_index", None) for x in (view, cache))
            if given != own:
                raise check.fail(f"cache must be the view of one layer, cache.layer(i), got {name}'s {given} for {own}")
    if indexed and spec.index_pool > 1:
        for name, value in (("rows.index_score", rows.index_score), ("index_ape", index_ape)):
            if value is None:
                raise TypeError(f"v32_layer: {name} must be given with pools of {spec.index_pool} tokens, got None")
        if not isinstance(cache.index_state, CompressorState):
            raise TypeError(
                f"v32_layer: cache.index_state must be a CompressorState, got {type(cache.index_state).__name__}; "
                "V32LayerCache.zeros(spec, ...) makes it"
            )
        _check_states(check, {"cache.index_state": cache.index_state}, batch, spec.index_pool)
    if indexed:
        keys, unit = spec.page_size // spec.index_pool, "token" if spec.index_pool == 1 else "pool"
        _check_index_k(check, cache.index_k, "cache.kv", cache.kv, keys, unit, tokens=spec.index_pool)


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
        views[field] = value.num_layers, value.layer_index
    if not itself:  # arrays that are no pools
        views |= {field: (1, None) for field, x in fields.items() if x is not None and field not in parts}
    if len(set(views.values())) > 1:
        raise check.fail(
            f"{name} must be the view of one layer, {name}.layer(i), got (num_layers, layer_index) {views}"
        )


def _check_index_k(
    check: ArgumentChecks,
    index_k: Any,
    name: str,
    beside: PagedKV,
    entries: int,
    unit: str,
    *,
    cache: str = "cache",
    tokens: int = 1,
    format: IndexFormat = IndexFormat.FP8,
) -> None:
    """index_k has pages of `entries` keys of this format, and a key for every `tokens` slots of the cache beside it."""
    data, given = (index_k.data, index_k.format) if isinstance(index_k, IndexKeys) else (index_k, IndexFormat.FP8)
    if given != format:
        raise check.fail(f"{cache}.index_k must be of {format!r}, by which its layer quantises queries, got {given!r}")
    shape, dtype = getattr(data, "shape", ()), str(getattr(data, "dtype", type(data)))
    if dtype.removeprefix("torch.") != "uint8":
        raise TypeError(f"{check.function}: {cache}.index_k must be uint8, got {dtype}")
    if len(shape) != 2:
        raise check.fail(f"{cache}.index_k must be [num_pages, page_bytes], got {list(shape)}")
    pages, width = index_k.num_pages if isinstance(index_k, IndexKeys) else shape[0], shape[1]
    if width != entries * format.key_bytes:
        raise check.fail(
            f"{cache}.index_k must have pages of {entries} keys of {format.key_bytes} bytes, "
            f"{entries * format.key_bytes} in all, got {width} bytes (of {width / format.key_bytes:g} keys)"
        )
    if pages * entries * tokens != beside.num_slots:
        raise check.fail(
            f"{cache}.index_k must have a key for every {unit} that {name} has room for, got {pages} pages of "
            f"{entries} keys and {beside.num_pages} pages of {beside.page_size}: make both with the pool's number of "
            "pages"
        )

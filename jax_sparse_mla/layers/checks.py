"""What a layer refuses at trace time: caches that cannot be right, which would give wrong results and no error.

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

from jax_sparse_mla._checks import INT32, ArgumentChecks
from jax_sparse_mla.compressor import CompressorState
from jax_sparse_mla.indexer import INDEX_K_BYTES, IndexKeys
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache.pool import LayerPool
from jax_sparse_mla.metadata import ForwardBatch, PrefillPlan, RequestTables, V4Metadata
from jax_sparse_mla.models import INDEXED_RATIO, ModelSpec


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
    check = ArgumentChecks("v4_layer")
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
            remedy = f"; V4LayerCache.zeros(spec, {ratio}, ...) makes it" if name.startswith("cache.") else ""
            raise TypeError(
                f"v4_layer: {name} must be {'a ' if kind else ''}{wanted} in a layer of compress ratio {ratio}, got "
                f"{type(value).__name__}{remedy}"
            )

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
    pool_tokens = metadata.compressed[ratio].pool_tokens
    if (tokens := cache.compressed.num_slots * ratio) < (pool_tokens or 0):
        raise check.fail(
            f"cache.compressed must have an entry for every {ratio} tokens of the pool, got "
            f"{cache.compressed.num_pages} pages of {cache.compressed.page_size}, for {tokens} tokens, where the pool "
            f"has {pool_tokens} (full_to_swa): make it with the pool's number of pages"
        )
    num_requests = batch.req_pool_indices.shape[0]
    for name, state in states.items():
        if state.max_requests < num_requests:
            raise check.fail(
                f"{name} must have a row for each of the batch's {num_requests} requests, got {state.max_requests}: "
                "make it with max_requests, the rows of req_to_token"
            )


def check_v32_layer(
    cache: Any, rows: Any, index_scores: Any, selected: Any, index_ape: Any, *, spec: ModelSpec
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
        own = getattr(cache.layer(cache.kv.layer_index).index_k, "layer_index", None)
        if (given := getattr(cache.index_k, "layer_index", None)) != own:
            raise check.fail(f"cache must be the view of one layer, cache.layer(i), got index_k's {given} for {own}")
    if indexed and spec.index_pool > 1:
        for name, value in (("rows.index_score", rows.index_score), ("index_ape", index_ape)):
            if value is None:
                raise TypeError(f"v32_layer: {name} must be given with pools of {spec.index_pool} tokens, got None")
        if not isinstance(cache.index_state, CompressorState):
            raise TypeError(
                f"v32_layer: cache.index_state must be a CompressorState, got {type(cache.index_state).__name__}; "
                "V32LayerCache.zeros(spec, ...) makes it"
            )
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
    check: ArgumentChecks, index_k: Any, name: str, cache: PagedKV, entries: int, unit: str, *, tokens: int = 1
) -> None:
    """index_k has pages of `entries` keys, and a key for every `tokens` slots of the cache beside it."""
    data = index_k.data if isinstance(index_k, IndexKeys) else index_k
    shape, dtype = getattr(data, "shape", ()), str(getattr(data, "dtype", type(data)))
    if dtype.removeprefix("torch.") != "uint8":
        raise TypeError(f"{check.function}: cache.index_k must be uint8, got {dtype}")
    if len(shape) != 2:
        raise check.fail(f"cache.index_k must be [num_pages, page_bytes], got {list(shape)}")
    pages, width = index_k.num_pages if isinstance(index_k, IndexKeys) else shape[0], shape[1]
    if width != entries * INDEX_K_BYTES:
        raise check.fail(
            f"cache.index_k must have pages of {entries} keys of {INDEX_K_BYTES} bytes, {entries * INDEX_K_BYTES} in "
            f"all, got {width} bytes (of {width / INDEX_K_BYTES:g} keys)"
        )
    if pages * entries * tokens != cache.num_slots:
        raise check.fail(
            f"cache.index_k and {name} must both have an entry for every {unit} of the pool, got {pages} pages of "
            f"{entries} keys and {cache.num_pages} pages of {cache.page_size}: make both with the pool's number of "
            "pages"
        )

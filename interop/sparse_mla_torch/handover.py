"""Writes a request's cached state to a file, so that another process continues the request from there.

Disaggregated prefill and decode need this. `export_request` and `import_request` serve the engine of
`jax_sparse_mla.serving`. `read_cache` and `write_cache` serve the caches of one layer in any engine, as torch tensors
(written in place) or JAX arrays; a layer's view (`layer(i)`) of arrays of several layers, too.

The file is one safetensors file, version 2. Its metadata are `format` ("sparse_mla_handover"), `version` ("2") and
`request`, JSON of

    model          the model's type: "deepseek_v4", "deepseek_v32", "glm_moe_dsa"
    kv_layout      how K rows lie in a page: the name of a KVLayout
    page_size      tokens of a page, P
    window         tokens of the sliding window, or null
    layer_ratios   compress ratio of each layer; 0 for all of V3.2
    prompt_tokens  how many of the tokens are the prompt
    computed       how many tokens are cached, C
    temperature, top_p, seed, eos_token_ids, forced        what the request asks for: see `Sampling` and `Request`

Its tensors are listed below. A request has `n = ⌈C / P⌉` pages, and `w` is the number of its last pages that the window
of the next token touches. `entries` is P divided by the layer's ratio. `ring` is the last `min(C, 8)` tokens for ratio
4 and `min(C, ratio)` for others, oldest first.

    tokens                              int32 [tokens], prompt and output; the last one is not cached yet
    layers.I.kv.data                    uint8 [n, page bytes of the layout]                     V3.2
    layers.I.index_k                    uint8 [n, P * 132], 128 float8_e4m3fn, 4 of scale       V3.2, with an indexer
    layers.I.swa.data                   uint8 [w, page bytes of the layout]                     V4
    layers.I.compressed.data            uint8 [n, page bytes of the layout at `entries`]        V4, ratio > 0
    layers.I.state.kv, .state.score     float32 [ring, channels]                                V4, ratio > 0
    layers.I.index_k                    uint8 [n, entries * 132]                                V4, ratio 4
    layers.I.index_state.kv, .score     float32 [ring, channels]                                V4, ratio 4

Pages are in the order of positions, whichever pages the engine had. The last page is zero behind the request's tokens,
so that no other request's rows leave the process. Drafts need nothing more: rejected drafts are not cached tokens, and
engines with and without drafts import each other's files. Weights are not compared: the importing engine must have the
same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import torch
from safetensors.torch import save_file

from jax_sparse_mla.indexer.logits import INDEX_DIM, INDEX_K_BYTES
from jax_sparse_mla.kv_cache.pool import LayerPool
from jax_sparse_mla.layers import V4LayerCache, V32LayerCache
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import Request, Sampling
from sparse_mla_torch.bridge import to_torch

FORMAT, VERSION = "sparse_mla_handover", "2"


_LISTS = ("eos_token_ids", "forced")  # of a request


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a request's state lies in the caches of an engine; pages are numpy integers.

    Attributes:
      computed: tokens that are cached, at least 1.
      page_size: tokens of a page.
      pages: `[⌈computed / page_size⌉]`, pages of the full pool, in the order of positions.
      swa_pages: `[w]`, pages of the sliding-window pool that hold the last w of these; none without a window.
      row: the request's row of the compressor states.
    """

    computed: int
    page_size: int
    pages: np.ndarray
    swa_pages: np.ndarray
    row: int


def first_window_page(computed: int, page_size: int, window: int) -> int:
    """The first page of a request that is in the window of a query at position `computed`."""
    return max(0, computed + 1 - window) // page_size


def read_cache(cache: V4LayerCache | V32LayerCache, place: Place) -> dict[str, torch.Tensor]:
    """A request's part of a layer's caches, under the file's names without the layer, as new tensors on the CPU."""
    parts = {}
    for name, x in _leaves(cache).items():
        x = to_torch(x) if isinstance(x, jax.Array) else x
        index = tuple(torch.as_tensor(i, device=x.device) for i in _rows_of(name, cache, place))
        parts[name] = x[index].cpu()
        if not _is_state(name):
            _clear_unused(name, parts[name], cache, place)
    return parts


def write_cache(
    cache: V4LayerCache | V32LayerCache, place: Place, parts: dict[str, torch.Tensor]
) -> V4LayerCache | V32LayerCache:
    """Writes a request's part to its place in a layer's caches: torch tensors in place, JAX arrays donated.

    Raises:
      ValueError: `parts` has other names, dtypes or shapes than `read_cache` gives at this place.
    """
    layer_cache = _without_others(cache)
    check_parts(cache, place, parts)
    written = []
    for name, x in _leaves(cache).items():
        index = _rows_of(name, cache, place)
        if isinstance(x, jax.Array):
            x = _put(x, index, jax.device_put(parts[name].numpy(), x.sharding))
        else:
            x[tuple(torch.as_tensor(i, device=x.device) for i in index)] = parts[name].to(x.device)
        written.append(x)
    updated = jax.tree.unflatten(jax.tree.structure(layer_cache), written)
    return updated if layer_cache is cache else dataclasses.replace(cache, kv=updated.kv)


def check_parts(
    cache: V4LayerCache | V32LayerCache, place: Place, parts: dict[str, torch.Tensor], prefix: str = ""
) -> None:
    """Refuses parts that `write_cache` does not take; messages put `prefix` before the names.

    Raises:
      ValueError: a tensor is missing, unknown, or of another dtype or shape.
    """
    leaves = _leaves(cache)
    if missing := sorted(leaves.keys() - parts.keys()):
        raise ValueError(f"hand-over: {prefix}{missing[0]} is missing")
    if unknown := sorted(parts.keys() - leaves.keys()):
        raise ValueError(f"hand-over: {prefix}{unknown[0]} is no cache of this layer: {', '.join(leaves)}")
    for name, x in leaves.items():
        index = _rows_of(name, cache, place)
        expected = str(x.dtype).removeprefix("torch."), [len(index[-1]), *x.shape[len(index) :]]
        actual = str(parts[name].dtype).removeprefix("torch."), list(parts[name].shape)
        if actual != expected:
            wanted, got = (f"{dtype} {shape}" for dtype, shape in (expected, actual))
            raise ValueError(f"hand-over: {prefix}{name} must be {wanted}, got {got}")


def export_request(engine: Engine, request: Request, path: str | os.PathLike) -> None:
    """Writes a request that the engine is serving to a file. The file appears whole or not at all.

    Call it between steps, as `Engine.run`'s `on_step` does. The engine continues the request as before.

    Raises:
      ValueError: the request is not being served, or nothing of it is cached yet; it has parameters of a hook on logits
        (`adjust`); a model without a file format.
    """
    _check_engine("export_request", engine)
    engine.wait()  # all tokens but the last are cached, and the host must know which one that is
    if request.row is None or not request.computed:
        raise ValueError("export_request: the request must be in service, with tokens cached")
    if request.adjust:
        raise ValueError("export_request: the file has no place for what a request's adjust has counted")
    place = _place(engine, request)
    tensors = {"tokens": torch.tensor(request.tokens, dtype=torch.int32)}
    for i in range(len(engine.model.ratios)):
        parts = read_cache(engine.layer_cache(i), place)
        tensors |= {f"layers.{i}.{name}": x.contiguous() for name, x in parts.items()}
    description = {**_cache_description(engine), "prompt_tokens": len(request.prompt), "computed": request.computed}
    description |= {**dataclasses.asdict(request.sampling), **{name: getattr(request, name) for name in _LISTS}}
    path = Path(path)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        text = json.dumps(description, default=float)  # numpy's numbers, too
        save_file(tensors, partial, {"format": FORMAT, "version": VERSION, "request": text})
        os.replace(partial, path)


def import_request(engine: Engine, path: str | os.PathLike, max_new_tokens: int) -> Request:
    """Takes a request from a file into the engine's caches; `Engine.run` then goes on with it.

    Its sampling and its end tokens are the file's. Its `on_token` is not: set one.

    Args:
      engine: has the same model and cache format, and a free row; page order, batch and drafts may differ.
      path: a file of `export_request`.
      max_new_tokens: all output tokens, those of the file included.

    Raises:
      OSError: there is no such file.
      ValueError: not a hand-over file of this version; another model or cache format; a tensor that is missing,
        unknown, or of another dtype or shape; token counts that contradict each other; a request longer than the
        engine's; no sampling or end tokens, or none that a request takes. Nothing has changed then.
      RuntimeError: the engine has no free row.
    """
    _check_engine("import_request", engine)
    description, tensors = _read_file(path)
    for name, here in _cache_description(engine).items():
        if (there := description.get(name)) != here:
            raise ValueError(f"import_request: {name} is {there} in {path}, and {here} here")
    request = _new_request(engine, description, tensors.pop("tokens", None), max_new_tokens)
    parts = [{} for _ in engine.model.ratios]
    for name, x in tensors.items():
        layer, _, field = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers.") or layer not in map(str, range(len(parts))):
            raise ValueError(f"import_request: {path} has an unknown tensor {name}")
        parts[int(layer)][field] = x
    pool = engine.scheduler.pool
    request.row = pool.open()
    try:
        for start in range(0, request.computed, page_size := engine.spec.page_size):
            # A page at a time: those behind the window give back their window pages.
            pool.extend(request.row, start, min(start + page_size, request.computed))
        pool.trim(request.row, request.computed)
        place = _place(engine, request)
        for i, part in enumerate(parts):
            check_parts(engine.layer_cache(i), place, part, f"layers.{i}.")
        for i, part in enumerate(parts):  # JAX's caches are donated: the engine must hold the new ones
            engine.set_layer_cache(i, write_cache(engine.layer_cache(i), place, part))
    except BaseException:
        pool.close(request.row)
        raise
    return request


def _check_engine(function: str, engine: Engine) -> None:
    if engine.options.context_parallel > 1:
        raise ValueError(f"{function}: no device has all pages of a request, which context_parallel shares among them")
    if engine.spec.kind().pool > 1:
        states = f"the states of pools and linear attention, which {engine.spec.name} carries"
        raise ValueError(f"{function}: the file has no place for {states}")


def _cache_description(engine: Engine) -> dict[str, Any]:
    """The properties that two engines must share."""
    cache, spec = engine.layer_cache(0), engine.spec
    return {
        "model": spec.name,
        "kv_layout": (cache.swa if spec.windowed else cache.kv).layout.name,
        "page_size": spec.page_size,
        "window": spec.window,
        "layer_ratios": list(engine.model.ratios),
    }


def _read_file(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name, known in (("format", FORMAT), ("version", VERSION)):
                if metadata.get(name) != known:
                    raise ValueError(f"import_request: {path} has {name} {metadata.get(name)}, not {known}")
            description = _parse(path, metadata.get("request", "null"))
            return description, {name: file.get_tensor(name) for name in sorted(file.keys())}
    except safetensors.SafetensorError as error:
        raise ValueError(f"import_request: {path} is no whole safetensors file: {error}") from error


def _parse(path: str | os.PathLike, text: str) -> dict[str, Any]:
    """The description of a file's request: numbers, strings, and lists of them."""
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets within brackets, a thousand deep
        raise ValueError(f"import_request: {path} has metadata that is no JSON of a request: {error}") from None
    if not isinstance(description, dict):
        raise ValueError(f"import_request: {path} does not say what it holds (metadata request: {text[:80]})")
    for name, value in description.items():
        if any(isinstance(x, (list, dict)) for x in (value if isinstance(value, list) else [value])):
            raise ValueError(f"import_request: {path} has metadata of lists within lists, or of objects: {name[:80]}")
    return description


def _new_request(
    engine: Engine, description: dict[str, Any], tokens: torch.Tensor | None, max_new_tokens: int
) -> Request:
    """The request of a file; validates its counts against each other and against the engine."""
    if tokens is None or tokens.dtype != torch.int32 or tokens.ndim != 1:
        raise ValueError("import_request: tokens must be int32 [tokens]")
    total, prompt, computed = len(tokens), description.get("prompt_tokens"), description.get("computed")
    if not isinstance(prompt, int) or not isinstance(computed, int) or not 1 <= prompt <= total:
        raise ValueError(f"import_request: prompt_tokens must be 1 … {total}, got {prompt}")
    # In prefill nothing is generated yet; afterwards all tokens but the last are cached.
    if not (1 <= computed < prompt == total or computed == total - 1 >= prompt):
        raise ValueError(f"import_request: computed {computed} of {total} tokens does not follow on {prompt} of prompt")
    if not total - prompt < max_new_tokens <= engine.options.max_len - prompt:
        raise ValueError(
            f"import_request: max_new_tokens must exceed the {total - prompt} that are there and, with {prompt} of "
            f"prompt, stay within max_len {engine.options.max_len}; got {max_new_tokens}"
        )
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < engine.scheduler.vocab_size:
        raise ValueError(f"import_request: tokens out of the model's vocabulary of {engine.scheduler.vocab_size}")
    tokens = tokens.tolist()
    output = tokens[prompt:]
    try:
        asked = {name: description[name] for name in _LISTS}
        sampling = Sampling(**{field.name: description[field.name] for field in dataclasses.fields(Sampling)})
        request = Request(tokens[:prompt], max_new_tokens, output, sampling=sampling, **asked)
        if not all(0 <= token < engine.scheduler.vocab_size for token in request.forced or ()):
            raise ValueError(f"forced tokens out of the model's vocabulary of {engine.scheduler.vocab_size}")
    except KeyError as error:
        raise ValueError(f"import_request: the file does not say the request's {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"import_request: the file's request is none: {error}") from None
    if request.finished:
        raise ValueError("import_request: the request has ended with one of its end tokens")
    request.margins, request.computed = [math.nan] * len(output), computed
    return request


def _place(engine: Engine, request: Request) -> Place:
    pool, page_size = engine.scheduler.pool, engine.spec.page_size
    slots = pool.req_to_token[request.row, : request.computed : page_size].astype(np.int64)
    swa_slots = np.zeros(0, np.int64)
    if engine.spec.windowed:
        first = first_window_page(request.computed, page_size, engine.spec.window)
        swa_slots = pool.full_to_swa[slots[first:]].astype(np.int64)
    return Place(request.computed, page_size, slots // page_size, swa_slots // page_size, request.row)


# Which part of which array is the request's.


def _without_others(cache: V4LayerCache | V32LayerCache) -> V4LayerCache | V32LayerCache:
    """The cache without the index keys of other layers, which a layer that has none carries along."""
    if isinstance(cache, V32LayerCache) and cache.index_k is not None and not cache.has_index_k:
        return dataclasses.replace(cache, index_k=None)
    return cache


def _leaves(cache: V4LayerCache | V32LayerCache) -> dict[str, Any]:
    cache = _without_others(cache)
    pools = [x for x in vars(cache).values() if isinstance(x, LayerPool)]
    if any(pool.num_layers > 1 and pool.layer_index is None for pool in pools):
        raise ValueError(
            "handover: cache must hold one layer, got arrays of several layers: "
            "take `layer(i)`, or make the caches with num_layers=1"
        )
    names = {jax.tree_util.keystr(path)[1:]: x for path, x in jax.tree_util.tree_leaves_with_path(cache)}
    return {name.replace("index_k.data", "index_k"): x for name, x in names.items()}


def _is_state(name: str) -> bool:
    return name.partition(".")[0].endswith("state")


def _rows_of(name: str, cache: V4LayerCache | V32LayerCache, place: Place) -> tuple[np.ndarray, ...]:
    """The index of a request's part in an array: its pages, or its row and the ring places of its last tokens. In an
    array of several layers those of the view's layer."""
    pool, first = getattr(cache, name.partition(".")[0]), 0
    if isinstance(pool, LayerPool):
        first = (pool.layer_index or 0) * (_leaves(cache)[name].shape[0] // pool.num_layers)
    if not _is_state(name):
        return (first + (place.swa_pages if name.startswith("swa.") else place.pages),)
    halves = cache.state.kv.shape[-1] // cache.compressed.layout.qk_dim  # 2 where windows overlap
    window = halves * (place.page_size // cache.compressed.page_size)
    ring = _leaves(cache)[name].shape[1]
    last = np.arange(max(0, place.computed - window), place.computed)
    return np.full(len(last), first + place.row), last % ring


def _clear_unused(name: str, pages: torch.Tensor, cache: V4LayerCache | V32LayerCache, place: Place) -> None:
    """Zeroes a request's pages behind its last token or entry: rows, and the scales behind the rows."""
    if name == "index_k":
        entries, row_bytes, scale_bytes = pages.shape[1] // INDEX_K_BYTES, INDEX_DIM, INDEX_K_BYTES - INDEX_DIM
    else:
        paged = getattr(cache, name.partition(".")[0])
        entries, row_bytes, scale_bytes = paged.page_size, paged.layout.data_bytes, paged.layout.footer_scale_bytes
    if not len(pages):  # the window starts with the next token
        return
    used = place.computed // (place.page_size // entries) - (len(place.pages) - 1) * entries
    pages[-1, used * row_bytes : entries * row_bytes] = 0
    pages[-1, entries * row_bytes + used * scale_bytes :] = 0


@functools.partial(jax.jit, donate_argnums=0)
def _put(x: jax.Array, index: tuple[jax.Array, ...], rows: jax.Array) -> jax.Array:
    return x.at[index].set(rows)

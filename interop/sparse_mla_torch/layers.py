"""A V4 or V3.2 layer's attention in one decode step on torch tensors: `jax_sparse_mla.layers`, by the same kernels.

A step of a server, with caches and tables that are torch's own:

    with torch.cuda.graph(graph):  # after the same calls have run once, which compiles
        step = prepare_v4_step(spec, batch, tables)  # once a step, for all layers
        for cache, params, ratio in layers:
            ...  # the layer's projections make `rows`
            out = v4_layer(cache, rows, params, batch, step.metadata, spec=spec, ratio=ratio)

Batch, tables, caches, rows and parameters are the dataclasses of `jax_sparse_mla`, of torch tensors. Caches are updated
in place. Everything runs on torch's current stream, nothing waits for the host or is copied to it, no JAX backend is
started: a CUDA graph captures the step, and a replay reads lengths, tables and rows again. What a step allocates is the
graph's. V3.2's step is `operations.metadata.build_v32_metadata` once, then `v32_layer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import torch

from jax_sparse_mla.argument_checks import BF16, FLOAT32, FLOATS, UINT8, ArgumentChecks
from jax_sparse_mla.attention.route import Plan
from jax_sparse_mla.compressor.state import row_halves
from jax_sparse_mla.indexer.logits import INDEX_DIM, IndexKeys, sylvester
from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.layers import CompressorParams, V4LayerCache, V4LayerParams, V4Rows, V4Step, V32LayerCache, V32Rows
from jax_sparse_mla.layers.checks import check_v4_layer, check_v32_layer
from jax_sparse_mla.layers.state import LayerStep
from jax_sparse_mla.layers.step import with_pool_sizes
from jax_sparse_mla.layers.write import Step, kernel_obstacle, rows_each, step_of, write_by_kernel
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables, V4Metadata, V32Metadata
from jax_sparse_mla.models import LayerKind, ModelSpec
from sparse_mla_torch.attention import decode
from sparse_mla_torch.attention.call_cache import Schedule
from sparse_mla_torch.attention.pages import pages_of
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks
from sparse_mla_torch.operations.indexer import index_topk, quantize_index_q, write_index_k
from sparse_mla_torch.operations.kv_cache import write_kv
from sparse_mla_torch.operations.metadata import build_v4_metadata

Cache = TypeVar("Cache", V4LayerCache, V32LayerCache)


def torch_cache(shapes: Cache, device: torch.device | str) -> Cache:
    """Empty caches of torch's memory, of the shapes that `jax.eval_shape` gives."""
    return jax.tree.map(lambda x: torch.zeros(x.shape, dtype=getattr(torch, x.dtype.name), device=device), shapes)


def v4_layer_cache(spec: ModelSpec, ratio: int, *, device: torch.device | str, **sizes: int) -> V4LayerCache:
    """Empty caches of torch's memory; arguments as of `V4LayerCache.zeros`.

    An engine that has its own pools puts their tensors into a `V4LayerCache` itself.
    """
    return torch_cache(jax.eval_shape(functools.partial(V4LayerCache.zeros, spec, ratio, **sizes)), device)


def prepare_v4_step(spec: ModelSpec, batch: ForwardBatch, tables: RequestTables) -> V4Step:
    """Builds once what `v4_layer` needs in every layer of a step: `metadata`, and no plans.

    Raises:
      TypeError, ValueError: see `sparse_mla_torch.operations.metadata.build_v4_metadata`.
    """
    with torch.cuda.device_of(batch.seq_lens):
        metadata = build_v4_metadata(spec, batch, tables)
    return V4Step(metadata=with_pool_sizes(metadata, tables), plans={})


def v4_layer(
    cache: V4LayerCache,
    rows: V4Rows,
    params: V4LayerParams,
    batch: ForwardBatch,
    metadata: V4Metadata,
    *,
    spec: ModelSpec,
    ratio: int,
    batch_invariant: bool = False,
    selected: torch.Tensor | None = None,
    return_selected: bool = False,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
    """One V4 layer's attention, of a step whose requests have a row each, or drafts; the caches are updated in place.

    Args:
      cache: the layer's caches, or their view `cache.layer(i)`.
      rows: the projected rows of this step, contiguous, padded like the batch; q bfloat16.
      params: the layer's parameters, or their view `params.layer(i)`.
      batch, metadata: the step's, shared by all layers, `metadata` of `prepare_v4_step`.
      spec: the model. ratio: the layer's compress ratio.
      batch_invariant: as in `jax_sparse_mla.layers.v4_layer`.
      selected: int32 `[T, index_topk]`, positions that a layer of ratio 4 attends to instead of selecting, as there.
      return_selected: whether to return the positions as well: what the layer has attended to, None where it does not
        select. They take a product more than the slots that a step needs.
      on_plan: called with the plan of the attention: which backend, and why.

    Returns:
      out bfloat16 `[T, heads, 512]`, rope not yet taken back; with `return_selected` `(out, positions)`.

    Raises:
      TypeError: what this ratio needs is missing, or a tensor of another dtype.
      ValueError: a tensor of another shape, not contiguous or on another device; a step that the layer's kernel does
        not write, or several rows of a request without room in the compressors' states (`max_draft_tokens`).
    """
    kind, of_layer = spec.kind(ratio), LayerStep(batch, metadata)
    check_v4_layer(ArgumentChecks("v4_layer"), cache, rows, params, of_layer, spec=spec, kind=kind)
    if selected is not None and kind.selects != "own":
        raise ValueError(f"v4_layer: selected must be None in a layer of ratio {ratio}, which does not select")
    cache, params, step = cache.alone(), params.alone(), step_of(of_layer, kind)
    _check_tensors(cache, rows, params, step, spec=spec, kind=kind)
    if why := kernel_obstacle(cache, rows, params, step, kind=kind, rows_each=rows_each(of_layer)):
        raise ValueError(f"v4_layer: the kernel that writes a layer's caches does not serve this step: {why}")
    device = rows.q.device
    with torch.cuda.device_of(rows.q):
        written = write_by_kernel(executor(device), _signs(device), cache, rows, params, step, kind=kind)
        extra = None, None, None
        if ratio:
            part = metadata.compressed[ratio]
            slots = part.page_indices
            if kind.selected:
                keys = written.index_q, written.index_weights, _pages(cache.index_k), metadata.page_table, part.lengths
                given = selected, return_selected
                slots, selected = _selected(*keys, *given, spec, spec.page_size // ratio, batch_invariant)
            extra = _rows_of(cache.compressed), slots[:, None], part.topk_lengths
        window = _rows_of(cache.swa), metadata.swa_page_indices[:, None], metadata.swa_topk_lengths
        tensors = rows.q[:, None], *window, *extra, written.attn_sink
        out = _attend("v4_layer", spec, on_plan, batch_invariant, *tensors)
        return (out, selected) if return_selected else out


def v32_layer(
    cache: V32LayerCache,
    rows: V32Rows,
    batch: ForwardBatch,
    metadata: V32Metadata,
    *,
    spec: ModelSpec,
    slots: torch.Tensor | None = None,
    batch_invariant: bool = False,
    selected: torch.Tensor | None = None,
    return_selected: bool = False,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> tuple[torch.Tensor, ...]:
    """One V3.2 or GLM-5 layer's attention in a DECODE step; the caches are updated in place.

    Args:
      cache, rows, batch, spec, batch_invariant, on_plan: as in `v4_layer`.
      metadata: of `sparse_mla_torch.operations.metadata.build_v32_metadata`.
      slots: int32 `[T, index_topk]`, what the last layer with an indexer returned; for a layer without one only.
      selected, return_selected: as in `v4_layer`; for a layer with an indexer only.

    Returns:
      out bfloat16 `[T, heads, 512]`, in the latent space; the slots that it attended to; with `return_selected` their
      positions, too.

    Raises:
      TypeError: what the layer needs is missing, or a tensor of another dtype.
      ValueError: a step that is not DECODE, a model with pools of index keys, a layer with both an indexer and `slots`
        or with neither; a tensor of another shape, not contiguous or on another device.
    """
    check, q = TensorChecks("v32_layer", rows.q), rows.q
    pool = spec.kind().pool
    if batch.mode is not ForwardMode.DECODE or pool > 1:
        raise check.fail(
            f"serves DECODE steps of models whose tokens have an index key each, got {batch.mode.name} and "
            f"pools of {pool}: jax_sparse_mla.layers.v32_layer serves the others"
        )
    if (rows.index_k is None) != (slots is not None):
        raise check.fail(f"needs rows of an indexer or slots, got {'neither' if slots is None else 'both'}")
    if slots is not None and (return_selected or selected is not None):
        raise check.fail("selected and return_selected are of layers with an indexer, got slots")
    # Checks the caches too; that slots are given it knows as `index_scores`.
    check_v32_layer(cache, rows, batch, slots, None, None, spec=spec)
    cache = cache.alone()
    num_rows = len(check("rows.q", q, (None, None, spec.qk_dim), BF16))
    with torch.cuda.device_of(q):
        write_kv(cache.kv, metadata.out_cache_loc, rows.kv)
        if slots is None:
            keys, lengths = _pages(cache.index_k), metadata.seqlens_expanded
            heads = check("rows.index_q", rows.index_q, (num_rows, None, INDEX_DIM), FLOATS).shape[1]
            check("rows.index_weights", rows.index_weights, (num_rows, heads), FLOAT32)
            write_index_k(keys, metadata.out_cache_loc, rows.index_k)
            index_q, scale = quantize_index_q(rows.index_q)
            keys = index_q, rows.index_weights * scale, keys, metadata.page_table, lengths
            given = selected, return_selected
            slots, selected = _selected(*keys, *given, spec, spec.page_size, batch_invariant)
        check("slots", slots, (num_rows, spec.index_topk))
        tensors = q[:, None], _rows_of(cache.kv), slots[:, None], metadata.topk_lengths, None, None, None, None
        out = _attend("v32_layer", spec, on_plan, batch_invariant, *tensors)
        return (out, slots, selected) if return_selected else (out, slots)


def _selected(
    q,
    weights,
    keys,
    page_table,
    lengths,
    selected: torch.Tensor | None,
    return_selected: bool,
    spec: ModelSpec,
    page_size: int,
    batch_invariant: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slots of the entries that the indexer selects, or of the given positions; no logit past a row's length is
    made. With the positions, where they are wanted or given; those that a row does not see are −1."""
    arguments = q, weights, keys, page_table, lengths, spec.index_topk
    if selected is not None:
        TensorChecks("selected", q)("selected", selected, (len(q), spec.index_topk))
        seen = (selected >= 0) & (selected < lengths[:, None])
        selected = torch.where(seen, selected, -1)
    elif return_selected:
        offset = torch.zeros_like(lengths)
        options = {"topk_indices_offset": offset, "batch_invariant": batch_invariant}
        selected = index_topk(*arguments, method=TopkTransform.RAGGED, **options)
    else:
        options = {"kv_page_table": page_table, "page_size": page_size, "batch_invariant": batch_invariant}
        return index_topk(*arguments, method=TopkTransform.PAGED, **options), None
    held = selected.clamp(0, page_table.shape[1] * page_size - 1)
    page = page_table.gather(1, (held // page_size).long())
    slots = torch.where((selected == held) & (page >= 0), page * page_size + held % page_size, -1)
    return slots.to(torch.int32), selected


def _attend(
    function: str,
    spec: ModelSpec,
    on_plan: Callable[[Plan], None],
    batch_invariant: bool,
    *tensors: torch.Tensor | None,
) -> torch.Tensor:
    """out `[T, heads, 512]`, of the tensors that `decode.prepare` takes, one query of each row."""
    options = decode.Options(function, spec.softmax_scale, -float("inf"), batch_invariant=batch_invariant)
    prepared = decode.prepare(options, *tensors)
    on_plan(prepared.plan)
    out, _ = prepared.run(*tensors, Schedule(), None)
    return out[:, 0]


@functools.cache
def _signs(device: torch.device) -> torch.Tensor:
    """Sylvester's matrix, as the kernel takes it."""
    return torch.from_numpy(sylvester(INDEX_DIM)).to(device, torch.bfloat16)


def _rows_of(cache: PagedKV) -> torch.Tensor:
    """The cache in FlashMLA's shape."""
    return pages_of(cache.data, cache.layout, cache.page_size)


def _pages(index_k: torch.Tensor | IndexKeys) -> torch.Tensor:
    return index_k.data if isinstance(index_k, IndexKeys) else index_k


def _check_tensors(
    cache: V4LayerCache, rows: V4Rows, params: V4LayerParams, step: Step, *, spec: ModelSpec, kind: LayerKind
) -> None:
    """Refuses what the kernel cannot read; the functions that follow it check what they take themselves."""
    check = TensorChecks("v4_layer", rows.q)

    def check_pages(name: str, cache: PagedKV) -> None:
        check(f"{name}.data", cache.data, (None, cache.layout.page_bytes(cache.page_size)), UINT8)

    def check_compressor(prefix: str, params: CompressorParams, kv, score, state, head_dim: int) -> None:
        width = head_dim * row_halves(kind.ratio, kind.overlap)
        check(f"rows.{prefix}kv", kv, (num_rows, width), FLOATS)
        check(f"rows.{prefix}score", score, (num_rows, width), FLOATS)
        name = "index_" if prefix == "index." else ""
        check(f"params.{name}compressor.ape", params.ape, (kind.ratio, width), FLOAT32)
        check(f"params.{name}compressor.norm_weight", params.norm_weight, (head_dim,), FLOATS)
        check(f"params.{name}compressor.inv_freq", params.inv_freq, (spec.rope_dim // 2,), FLOAT32)
        check(f"cache.{name}state.kv", state.kv, (None, None, width), FLOAT32)
        check(f"cache.{name}state.score", state.score, tuple(state.kv.shape), FLOAT32)

    num_rows, heads, dim = check("rows.q", rows.q, (None, None, spec.qk_dim), BF16).shape
    check("rows.kv", rows.kv, (num_rows, dim), FLOATS)
    check("params.attn_sink", params.attn_sink, (heads,), FLOAT32)
    check_pages("cache.swa", cache.swa)
    for name, x in step._asdict().items():
        check.optional(f"the step's {name}", x, (None if name == "query_start_loc" else num_rows,))
    if not kind.owns_kv:
        return
    check_pages("cache.compressed", cache.compressed)
    compressed = rows.compressed_kv, rows.compressed_score, cache.state
    check_compressor("compressed_", params.compressor, *compressed, spec.qk_dim)
    if kind.index_keys != "compressor":
        return
    index = rows.index
    check_compressor("index.", params.index_compressor, index.kv, index.score, cache.index_state, spec.index_dim)
    index_heads = check("rows.index.q", index.q, (num_rows, None, INDEX_DIM), FLOATS).shape[1]
    check("rows.index.weights", index.weights, (num_rows, index_heads), FLOAT32)
    check("cache.index_k", _pages(cache.index_k), (None, None), UINT8)

"""Compares a run of either engine with transformers on the same inputs: each layer's attention, and the tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_sparse_mla.models import INDEXED_RATIO, ModelSpec
from jax_sparse_mla.serving.comparison import layer_kind
from jax_sparse_mla.serving.engine import Engine as JaxEngine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import GATHERED
from sparse_mla_torch.hf.engine import Engine, TracedStep
from sparse_mla_torch.hf.layers import V4Layer, V32Layer

MIN_COSINE = {"fp8": 0.999, "bf16": 0.9999}
# The bound of a single row: one wrong row in a thousand hardly changes the cosine of the whole layer.
MIN_ROW_COSINE = {"fp8": 0.99, "bf16": 0.999}
MIN_OVERLAP = 0.97


@dataclasses.dataclass
class LayerReport:
    """One row of the table.

    Attributes:
      layer, kind: the layer's index, and what it attends to.
      cosine: over all outputs of the layer: ours, computed with eager's selected entries, and eager's.
      worst_row: the lowest cosine of a single row.
      overlap: the mean share of eager's selected entries that our own selection also has, over the rows whose selection
        drops entries; None if there are no such rows.
      dropping_rows: the number of these rows.
    """

    layer: int
    kind: str
    cosine: float
    worst_row: float
    overlap: float | None
    dropping_rows: int

    def passes(self, cache: str) -> bool:
        """Whether the layer is as close to eager as this kind of cache ("fp8" or "bf16") allows."""
        close = self.cosine >= MIN_COSINE[cache] and self.worst_row >= MIN_ROW_COSINE[cache]
        return close and (self.overlap is None or self.overlap >= MIN_OVERLAP)


class TorchRun:
    """What the comparison needs of a torch engine that has traced a run."""

    def __init__(self, engine: Engine):
        self.engine, self.layers, self.model = engine, engine.layers, engine.model

    def again(self, index: int) -> Callable[[TracedStep, np.ndarray | None], torch.Tensor]:
        """A function that runs a layer again, step by step, over caches of its own: of a traced step and index scores
        `[rows, columns]` (None: the indexer's), it returns the attention's output `[n, hidden]`."""
        cache = self.engine.new_cache(index)

        def run(traced: TracedStep, scores: np.ndarray | None) -> torch.Tensor:
            nonlocal cache
            embeddings = _position_embeddings(self.model, self.engine.is_v4, traced.hidden(index), traced.positions)
            scores = None if scores is None else jnp.asarray(scores)
            hidden = traced.hidden(index)[None]
            out, cache, _ = self.layers[index](cache, hidden, embeddings, traced.step, index_scores=scores)
            return out[0]

        return run


class JaxRun:
    """As `TorchRun`, of a JAX engine and the transformers model that has its weights."""

    def __init__(self, engine: JaxEngine, model: torch.nn.Module):
        self.engine, self.model = engine, model
        layer_type = V4Layer if engine.spec.window is not None else V32Layer
        modules = [layer.self_attn for layer in model.model.layers]
        self.layers = [layer_type(module, engine.spec, ratio) for module, ratio in zip(modules, engine.model.ratios)]

    def again(self, index: int) -> Callable[[Any, np.ndarray | None], torch.Tensor]:
        """As `TorchRun.again`."""
        engine, caches = self.engine, self.engine.new_caches()
        attention = _attention(engine.model, index, engine.prefill_backend == GATHERED, engine.options.backend)

        def run(traced, scores: np.ndarray | None) -> torch.Tensor:
            nonlocal caches
            (num_rows,) = traced.batch.out_cache_loc.shape
            positions = np.zeros(num_rows, np.int32)
            positions[: len(traced.positions)] = traced.positions
            x = traced.layers[index][0]
            out, caches = attention(
                engine.params, caches, traced.batch, traced.tables, x, positions, index_scores=scores
            )
            return torch.from_numpy(np.array(out[: len(traced.positions)].astype(np.float32))).to(_device(self.model))

        return run


@functools.cache
def _attention(model: Model, layer: int, gathered: bool, backend: str | None):
    return jax.jit(
        functools.partial(model.attention, layers=(layer,), gathered=gathered, backend=backend), donate_argnums=1
    )


def compare_layers(run: TorchRun | JaxRun, requests: list[Request]) -> list[LayerReport]:
    """Runs each layer again, with fresh caches and the same steps (chunks, batches, padding and slots), but with the
    entries that eager selects on the same inputs, and compares the outputs with eager's.

    The run must be plain decoding, since drafts run the first layer only and rejected tokens are in no sequence.
    """
    return [compare_layer(run, index, requests) for index in range(len(run.layers))]


@torch.no_grad()
def compare_layer(run: TorchRun | JaxRun, index: int, requests: list[Request]) -> LayerReport:
    """As `compare_layers`, for one layer."""
    engine, layer = run.engine, run.layers[index]
    expected, selected = {}, {}
    for request in requests:
        key, shared = id(request), ()
        if layer.shares:  # what eager's last layer with an indexer selects on its own inputs
            owner = max(i for i in range(index) if not run.layers[i].shares)
            shared = (run.layers[owner].eager(_hidden(run, owner, key), run.model)[1],)
        out, chosen = layer.eager(_hidden(run, index, key), run.model, *shared)
        expected[key], selected[key] = out[0], chosen

    again = run.again(index)
    ours_all, eager_all, overlaps = [], [], []
    for traced in engine.trace:
        scores = None
        if layer.has_indexer:
            chosen = _rows_of(traced, selected)
            visible = (traced.positions + 1) // max(layer.ratio, 1)
            overlaps += _overlaps(traced.selected(index), chosen, visible)
            scores = _as_scores(traced, chosen, engine.spec)
        ours_all.append(again(traced, scores).double())
        eager_all.append(torch.stack([expected[r][p] for r, p in zip(traced.requests, traced.positions)]).double())
    ours, eager = torch.cat(ours_all), torch.cat(eager_all)
    cosines = torch.nn.functional.cosine_similarity(ours, eager, dim=-1)
    return LayerReport(
        layer=index,
        kind=layer_kind(engine.spec, layer.ratio) + (", shared" if layer.shares else ""),
        cosine=float(torch.nn.functional.cosine_similarity(ours.flatten(), eager.flatten(), dim=0)),
        worst_row=float(cosines.min()),
        overlap=float(np.mean(overlaps)) if overlaps else None,
        dropping_rows=len(overlaps),
    )


def count_agreeing_tokens(model: torch.nn.Module, requests: list[Request]) -> tuple[int, int]:
    """`(agreeing, total)`: the generated tokens that transformers also chooses after the same tokens, and all."""
    agree = total = 0
    for request in requests:
        tokens = torch.tensor(request.tokens[:-1], device=_device(model))[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(request.prompt) - 1 :]
        agree += int((logits.float().argmax(-1).cpu() == torch.tensor(request.output)).sum())
        total += len(request.output)
    return agree, total


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _hidden(run: TorchRun | JaxRun, index: int, key: int) -> torch.Tensor:
    """`[1, n, hidden]`, a layer's input rows of one request."""
    steps = [(traced.hidden(index), np.flatnonzero(traced.requests == key)) for traced in run.engine.trace]
    return torch.cat([_as_torch(rows, run.model)[own] for rows, own in steps])[None]


def _as_torch(rows: torch.Tensor | np.ndarray, model: torch.nn.Module) -> torch.Tensor:
    """Rows in the model's dtype, on its device."""
    if isinstance(rows, torch.Tensor):
        return rows
    return torch.from_numpy(np.array(rows)).to(_device(model), model.dtype)


def _rows_of(traced, selected: dict) -> list[np.ndarray]:
    """The entries that eager selects at each real row of a step."""
    chosen = (selected[r][p] for r, p in zip(traced.requests, traced.positions))
    return [row[row >= 0] for row in chosen]


def _overlaps(positions: np.ndarray, chosen: list[np.ndarray], visible: np.ndarray) -> list[float]:
    """The share of eager's entries that our selection has, for each row that sees more entries than are selected."""
    return [
        len(np.intersect1d(ours, eager)) / len(eager)
        for ours, eager, entries in zip(positions, chosen, visible)
        if entries > positions.shape[1]
    ]


def _as_scores(traced, chosen: list[np.ndarray], spec: ModelSpec) -> np.ndarray:
    """Index scores for which our selection is exactly these entries."""
    batch, (_, width) = traced.batch, traced.tables.req_to_token.shape
    pages = -(-min(batch.max_seq_len, width) // spec.page_size)
    entries = spec.page_size // (INDEXED_RATIO if spec.window is not None else 1)
    scores = np.zeros((batch.out_cache_loc.shape[0], pages * entries), np.float32)
    for row, of_row in enumerate(chosen):
        scores[row, of_row] = 1
    return scores


def _position_embeddings(model: torch.nn.Module, is_v4: bool, hidden: torch.Tensor, positions: np.ndarray):
    position_ids = torch.from_numpy(positions).to(hidden.device)[None]
    rotary = model.model.rotary_emb
    if not is_v4:
        return rotary(hidden[None], position_ids=position_ids)
    return {kind: rotary(hidden[None], position_ids=position_ids, layer_type=kind) for kind in ("main", "compress")}

"""Compares a run of either engine with transformers on the same inputs: each layer's attention, and the tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_sparse_mla.models import INDEXED_RATIO, ModelSpec
from jax_sparse_mla.serving.comparison import layer_kind
from jax_sparse_mla.serving.engine import Engine as JaxEngine
from jax_sparse_mla.serving.engine import TracedStep as JaxTracedStep
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import GATHERED
from sparse_mla_torch.cpu_matmul import quick_products
from sparse_mla_torch.hf.eager import eager_in_blocks
from sparse_mla_torch.hf.engine import Engine, TracedStep
from sparse_mla_torch.hf.glm53 import Glm53Layer, decoder_layers
from sparse_mla_torch.hf.layers import V4Layer, V32Layer

MIN_COSINE = {"fp8": 0.999, "bf16": 0.9999}
# The bound of a single row: one wrong row in a thousand hardly changes the cosine of the whole layer.
MIN_ROW_COSINE = {"fp8": 0.99, "bf16": 0.999}
MIN_OVERLAP = 0.97

# The thread in which transformers runs, so that XLA compiles meanwhile: one after the other, since `eager` replaces
# functions of its classes.
TRANSFORMERS = ThreadPoolExecutor(1, "transformers")


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

    def again(self, layers: Sequence[int]) -> Replay:
        """A function that runs layers again, step by step, over caches of their own: of a traced step and for each of
        them index scores `[rows, columns]` (None: the indexer's), it returns their attention's outputs `[n, hidden]`.
        """
        caches = {index: self.engine.new_cache(index) for index in layers}

        def run(traced: TracedStep, scores: Sequence[np.ndarray | None]) -> list[torch.Tensor]:
            outputs = []
            for index, given in zip(layers, scores, strict=True):
                hidden = traced.hidden(index)
                embeddings = _position_embeddings(self.model, self.engine.is_v4, hidden, traced.positions)
                given = None if given is None else jnp.asarray(given)
                out, caches[index], _ = self.layers[index](
                    caches[index], hidden[None], embeddings, traced.step, index_scores=given
                )
                outputs.append(out[0])
            return outputs

        return run


class JaxRun:
    """As `TorchRun`, of a JAX engine and the transformers model that has its weights."""

    def __init__(self, engine: JaxEngine, model: torch.nn.Module):
        self.engine, self.model = engine, model
        spec = engine.spec
        layer_type = V4Layer if spec.window is not None else Glm53Layer if spec.index_pool > 1 else V32Layer
        modules = [layer.self_attn for layer in decoder_layers(model)]
        self.layers = [layer_type(module, spec, ratio) for module, ratio in zip(modules, engine.model.ratios)]

    def again(self, layers: Sequence[int]) -> Replay:
        """As `TorchRun.again`; the layers are one program for each shape of a step, compiled here."""
        engine = self.engine
        attend = functools.partial(
            _attend,
            model=engine.model,
            layers=tuple(layers),
            gathered=engine.prefill_backend == GATHERED,
            backend=engine.options.backend,
        )
        attend = jax.jit(attend, donate_argnums=1)
        caches, programs = engine.new_caches(), {}

        def arguments(traced: JaxTracedStep, scores: Sequence[np.ndarray | None]) -> tuple:
            positions = np.zeros(_num_rows(traced), np.int32)
            positions[: len(traced.positions)] = traced.positions
            rows = [traced.layers[index][0] for index in layers]
            return traced.batch, traced.tables, rows, positions, list(scores)

        for traced in engine.trace:
            if (key := _shape(traced)) not in programs:
                scores = [_no_scores(traced, engine.spec) if self.layers[i].has_indexer else None for i in layers]
                programs[key] = attend.lower(engine.params, caches, *arguments(traced, scores)).compile()

        def run(traced: JaxTracedStep, scores: Sequence[np.ndarray | None]) -> list[torch.Tensor]:
            nonlocal caches
            outputs, caches = programs[_shape(traced)](engine.params, caches, *arguments(traced, scores))
            return [_as_torch(np.asarray(out)[: len(traced.positions)], self.model, torch.float32) for out in outputs]

        return run


Replay: TypeAlias = Callable[[Any, Sequence[np.ndarray | None]], list[torch.Tensor]]


def _attend(params, caches, batch, tables, rows, positions, scores, *, model, layers, gathered, backend):
    """Each layer's attention on its own rows: their outputs, and the caches."""
    outputs = []
    for index, x, given in zip(layers, rows, scores, strict=True):
        options = {"layers": (index,), "gathered": gathered, "backend": backend, "index_scores": given}
        out, caches = model.attention(params, caches, batch, tables, x, positions, **options)
        outputs.append(out)
    return outputs, caches


def _num_rows(traced: TracedStep | JaxTracedStep) -> int:
    return traced.batch.out_cache_loc.shape[0]


def _shape(traced: JaxTracedStep) -> tuple:
    """What selects the program of a step."""
    return traced.batch.mode, _num_rows(traced), traced.batch.seq_lens.shape, traced.batch.max_seq_len


@dataclasses.dataclass
class EagerLayer:
    """A layer by transformers: by request (`id`), its output `[tokens, hidden]` and the entries that it selects."""

    out: dict[int, torch.Tensor]
    selected: dict[int, np.ndarray | None]


@quick_products()
def compare_layers(
    run: TorchRun | JaxRun, requests: list[Request], layers: Sequence[int] | None = None
) -> list[LayerReport]:
    """Runs layers (all by default) again, with fresh caches and the same steps (chunks, batches, padding and slots),
    but with the entries that eager selects on the same inputs, and compares the outputs with eager's.

    The run must be plain decoding, since drafts run the first layer only and rejected tokens are in no sequence.
    """
    layers = range(len(run.layers)) if layers is None else layers
    done: dict[int, EagerLayer] = {}
    eager = [TRANSFORMERS.submit(_run_eager, run, index, requests, done) for index in layers]
    again = run.again(layers)
    eager = [layer.result() for layer in eager]
    ours = [[] for _ in layers]
    with torch.no_grad():
        for traced in run.engine.trace:
            scores = [
                _as_scores(traced, _rows_of(traced, of_eager.selected), run.engine.spec)
                if run.layers[index].has_indexer
                else None
                for index, of_eager in zip(layers, eager)
            ]
            for outputs, out in zip(ours, again(traced, scores), strict=True):
                outputs.append(out)
        return [_report(run, *of_layer) for of_layer in zip(layers, ours, eager)]


@quick_products()
@eager_in_blocks()
@torch.no_grad()
def _run_eager(run: TorchRun | JaxRun, index: int, requests: list[Request], done: dict[int, EagerLayer]) -> EagerLayer:
    """A layer by transformers, kept in `done`; one that shares takes what the last layer with an indexer selects on its
    own rows."""
    if index in done:
        return done[index]
    layer, shared = run.layers[index], {}
    if layer.shares:
        owner = max(i for i in range(index) if not run.layers[i].shares)
        shared = _run_eager(run, owner, requests, done).selected
    rows = [_as_torch(traced.hidden(index), run.model, run.model.dtype) for traced in run.engine.trace]
    expected, selected = {}, {}
    for request in requests:
        key = id(request)
        hidden = torch.cat([x[np.flatnonzero(traced.requests == key)] for x, traced in zip(rows, run.engine.trace)])
        out, selected[key] = layer.eager(hidden[None], run.model, shared.get(key))
        expected[key] = out[0]
    done[index] = EagerLayer(expected, selected)
    return done[index]


def _report(run: TorchRun | JaxRun, index: int, ours: list[torch.Tensor], eager: EagerLayer) -> LayerReport:
    """Of a layer's outputs `[n, hidden]`, step by step."""
    layer, trace, overlaps = run.layers[index], run.engine.trace, []
    if layer.has_indexer:
        for traced in trace:
            visible = (traced.positions + 1) // max(layer.ratio, 1)
            overlaps += _overlaps(traced.selected(index), _rows_of(traced, eager.selected), visible)
    rows = [eager.out[r][p] for traced in trace for r, p in zip(traced.requests, traced.positions)]
    ours, expected = torch.cat(ours).double(), torch.stack(rows).double()
    cosines = torch.nn.functional.cosine_similarity(ours, expected, dim=-1)
    return LayerReport(
        layer=index,
        kind=_kind(run, layer),
        cosine=float(torch.nn.functional.cosine_similarity(ours.flatten(), expected.flatten(), dim=0)),
        worst_row=float(cosines.min()),
        overlap=float(np.mean(overlaps)) if overlaps else None,
        dropping_rows=len(overlaps),
    )


def _kind(run: TorchRun | JaxRun, layer: V4Layer | V32Layer | Glm53Layer) -> str:
    """What a layer attends to, in words."""
    if run.engine.spec.window is None and not layer.has_indexer:
        return "linear attention"
    return layer_kind(run.engine.spec, layer.ratio) + (", shared" if layer.shares else "")


@quick_products()
@eager_in_blocks()
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


def _as_torch(rows: torch.Tensor | np.ndarray, model: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Rows on the model's device; a tensor is there, and has its dtype."""
    if isinstance(rows, torch.Tensor):
        return rows
    return torch.from_numpy(rows.astype(np.float32)).to(_device(model), dtype)


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
    scores = _no_scores(traced, spec)
    for row, of_row in enumerate(chosen):
        scores[row, of_row // spec.index_pool] = 1
    return scores


def _no_scores(traced, spec: ModelSpec) -> np.ndarray:
    """Zeros, as index scores of a step."""
    _, width = traced.tables.req_to_token.shape
    pages = -(-min(traced.batch.max_seq_len, width) // spec.page_size)
    entries = spec.page_size // (INDEXED_RATIO if spec.window is not None else spec.index_pool)
    return np.zeros((_num_rows(traced), pages * entries), np.float32)


def _position_embeddings(model: torch.nn.Module, is_v4: bool, hidden: torch.Tensor, positions: np.ndarray):
    position_ids = torch.from_numpy(positions).to(hidden.device)[None]
    rotary = model.model.rotary_emb
    if not is_v4:
        return rotary(hidden[None], position_ids=position_ids)
    return {kind: rotary(hidden[None], position_ids=position_ids, layer_type=kind) for kind in ("main", "compress")}

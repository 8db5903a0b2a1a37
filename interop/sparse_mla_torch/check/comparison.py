"""Compares a run of the JAX engine with transformers on the same inputs: each layer's attention, and the tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import torch

from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving.comparison import layer_kind
from jax_sparse_mla.serving.decoder import StepInputs
from jax_sparse_mla.serving.engine import Engine, TracedStep
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import GATHERED
from sparse_mla_torch.check.eager import eager_in_blocks
from sparse_mla_torch.check.layers import Layer, layers_of
from sparse_mla_torch.cpu_matmul import quick_products

MIN_COSINE = {"fp8": 0.999, "bf16": 0.9999}
# The bound of a single row: one wrong row in a thousand hardly changes the cosine of the whole layer.
MIN_ROW_COSINE = {"fp8": 0.99, "bf16": 0.999}
MIN_OVERLAP = 0.97

# The thread in which transformers runs, so that XLA compiles meanwhile. A single one: both `eager_in_blocks` and
# `selected_indices` replace functions of transformers.
TRANSFORMERS = ThreadPoolExecutor(1, "transformers")


@dataclasses.dataclass
class LayerReport:
    """One row of the table."""

    layer: int
    kind: str  # what it attends to, in words
    cosine: float  # over all outputs of the layer: ours, computed with eager's selected entries, and eager's
    worst_row: float  # the lowest cosine of a single row
    # The mean share of eager's selected entries that our own selection has too, over the rows whose selection drops
    # entries, and how many these are; None without any.
    overlap: float | None
    dropping_rows: int

    def passes(self, cache: str) -> bool:
        """Whether the layer is as close to eager as this kind of cache ("fp8" or "bf16") allows."""
        close = self.cosine >= MIN_COSINE[cache] and self.worst_row >= MIN_ROW_COSINE[cache]
        return close and (self.overlap is None or self.overlap >= MIN_OVERLAP)


@dataclasses.dataclass
class EagerRun:
    """A layer run by transformers: by request (`id`), its output `[tokens, hidden]` and the entries that it selects."""

    outputs: dict[int, torch.Tensor]
    selected: dict[int, np.ndarray | None]


@quick_products()
def compare_layers(
    engine: Engine, model: torch.nn.Module, requests: list[Request], indices: Sequence[int] | None = None
) -> list[LayerReport]:
    """Runs layers again, with fresh caches and the same steps (chunks, batches, padding and slots), but with the
    entries that eager selects on the same inputs, and compares the outputs with eager's.

    Args:
      engine: has traced a run of plain decoding; in speculative decoding rejected tokens are in no sequence.
      requests: the requests of that run.
      indices: of the layers; all by default.
    """
    layers, trace = layers_of(model, engine.spec), engine.trace
    indices = range(len(layers)) if indices is None else indices
    finished: dict[int, EagerRun] = {}
    futures = [TRANSFORMERS.submit(_run_eager, model, layers, index, trace, requests, finished) for index in indices]
    replay = _compile_replay(engine, layers, indices)
    eager_runs = [future.result() for future in futures]
    outputs: list[list[torch.Tensor]] = [[] for _ in indices]
    for traced in trace:
        scores = [
            _scores_for(_rows_of(traced, eager.selected), traced, engine.spec) if layers[index].has_indexer else None
            for index, eager in zip(indices, eager_runs)
        ]
        for steps, output in zip(outputs, replay(traced, scores), strict=True):
            steps.append(output)
    return [
        _report(engine, index, layers[index], torch.cat(steps), eager)
        for index, steps, eager in zip(indices, outputs, eager_runs)
    ]


def _compile_replay(engine: Engine, layers: Sequence[Layer], indices: Sequence[int]) -> Callable:
    """Compiles one program for each shape of a traced step, over new caches.

    The result runs layers on a traced step, with each one's index scores `[rows, columns]` (None: the indexer's own),
    and returns their outputs, float32 `[n, hidden]`.
    """

    def attend(params, caches, batch, tables, rows, positions, scores):
        inputs = StepInputs(
            batch=batch,
            tables=tables,
            positions=positions,
            gathered=engine.prefill_backend == GATHERED,
            backend=engine.options.backend,
        )
        outputs = []
        for index, x, index_scores in zip(indices, rows, scores, strict=True):
            step = functools.partial(engine.model.attention, layers=(index,), index_scores=index_scores)
            output, caches = step(params, caches, inputs, x)
            outputs.append(output)
        return outputs, caches

    jitted = jax.jit(attend, donate_argnums=1)
    caches, programs = engine.new_caches(), {}

    def program(traced: TracedStep) -> tuple:
        return traced.batch.mode, _num_rows(traced), traced.batch.seq_lens.shape, traced.batch.max_seq_len

    def arguments(traced: TracedStep, scores: Sequence[np.ndarray | None]) -> tuple:
        positions = np.zeros(_num_rows(traced), np.int32)
        positions[: len(traced.positions)] = traced.positions
        rows = [traced.layers[index][0] for index in indices]
        return traced.batch, traced.tables, rows, positions, list(scores)

    for traced in engine.trace:
        if (key := program(traced)) not in programs:
            scores = [_scores_for([], traced, engine.spec) if layers[index].has_indexer else None for index in indices]
            programs[key] = jitted.lower(engine.params, caches, *arguments(traced, scores)).compile()

    def replay(traced: TracedStep, scores: Sequence[np.ndarray | None]) -> list[torch.Tensor]:
        nonlocal caches
        outputs, caches = programs[program(traced)](engine.params, caches, *arguments(traced, scores))
        count = len(traced.positions)
        return [torch.from_numpy(np.asarray(output)[:count].astype(np.float32)) for output in outputs]

    return replay


def _num_rows(traced: TracedStep) -> int:
    """The rows of a step, padding included."""
    return traced.batch.out_cache_loc.shape[0]


@quick_products()
@eager_in_blocks()
@torch.no_grad()
def _run_eager(
    model: torch.nn.Module,
    layers: list[Layer],
    index: int,
    trace: list[TracedStep],
    requests: list[Request],
    finished: dict[int, EagerRun],
) -> EagerRun:
    """Runs a layer by transformers, and keeps the result in `finished`. A layer that shares takes what the last layer
    with an indexer selects on that layer's own rows."""
    if index in finished:
        return finished[index]
    layer, shared = layers[index], {}
    if layer.shares:
        indexed = max(i for i in range(index) if not layers[i].shares)
        shared = _run_eager(model, layers, indexed, trace, requests, finished).selected
    device = model.device
    rows = [torch.from_numpy(traced.hidden(index)).to(device, model.dtype) for traced in trace]
    outputs, selected = {}, {}
    for request in requests:
        key = id(request)
        hidden = torch.cat([x[np.flatnonzero(traced.requests == key)] for x, traced in zip(rows, trace)])
        output, selected[key] = layer.eager(hidden[None], shared.get(key))
        outputs[key] = output[0].cpu()
    finished[index] = EagerRun(outputs, selected)
    return finished[index]


def _report(engine: Engine, index: int, layer: Layer, output: torch.Tensor, eager: EagerRun) -> LayerReport:
    """The report of a layer's output `[rows of all steps, hidden]`."""
    overlaps = []
    if layer.has_indexer:
        for traced in engine.trace:
            visible = (traced.positions + 1) // max(layer.ratio, 1)
            overlaps += _overlaps(traced.selected(index), _rows_of(traced, eager.selected), visible)
    rows = [eager.outputs[r][p] for traced in engine.trace for r, p in zip(traced.requests, traced.positions)]
    output, expected = output.double(), torch.stack(rows).double()
    cosines = torch.nn.functional.cosine_similarity(output, expected, dim=-1)
    return LayerReport(
        layer=index,
        kind=_kind(engine.spec, layer),
        cosine=float(torch.nn.functional.cosine_similarity(output.flatten(), expected.flatten(), dim=0)),
        worst_row=float(cosines.min()),
        overlap=float(np.mean(overlaps)) if overlaps else None,
        dropping_rows=len(overlaps),
    )


def _kind(spec: ModelSpec, layer: Layer) -> str:
    """The kind of entries that a layer attends to, in words."""
    if not spec.windowed and not layer.has_indexer:
        return "linear attention"
    return layer_kind(spec, layer.ratio) + (", shared" if layer.shares else "")


@quick_products()
@eager_in_blocks()
def count_agreeing_tokens(model: torch.nn.Module, requests: list[Request]) -> tuple[int, int]:
    """`(agreeing, total)`: the generated tokens that transformers also chooses after the same tokens, and all."""
    agree = total = 0
    for request in requests:
        tokens = torch.tensor(request.tokens[:-1], device=model.device)[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(request.prompt) - 1 :]
        agree += int((logits.float().argmax(-1).cpu() == torch.tensor(request.output)).sum())
        total += len(request.output)
    return agree, total


def _rows_of(traced: TracedStep, selected: dict[int, np.ndarray]) -> list[np.ndarray]:
    """The entries that eager selects at each real row of a step."""
    rows = (selected[request][position] for request, position in zip(traced.requests, traced.positions))
    return [row[row >= 0] for row in rows]


def _overlaps(positions: np.ndarray, expected: list[np.ndarray], visible: np.ndarray) -> list[float]:
    """The share of eager's entries that our selection has, for each row that sees more entries than are selected."""
    return [
        len(np.intersect1d(ours, eager)) / len(eager)
        for ours, eager, entries in zip(positions, expected, visible)
        if entries > positions.shape[1]
    ]


def _scores_for(entries: list[np.ndarray], traced: TracedStep, spec: ModelSpec) -> np.ndarray:
    """Index scores of a step for which our selection is exactly these entries of each row."""
    _, width = traced.tables.req_to_token.shape
    pages = -(-min(traced.batch.max_seq_len, width) // spec.page_size)
    tokens = next(kind.ratio or kind.pool for kind in spec.kinds if kind.selects == "own")  # of an index key
    page_entries = spec.page_size // tokens
    scores = np.zeros((_num_rows(traced), pages * page_entries), np.float32)
    for row, selected in enumerate(entries):
        scores[row, selected // spec.kind().pool] = 1
    return scores

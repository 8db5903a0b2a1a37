"""Compares a run of the JAX engine with transformers on the same inputs: each layer's attention, and the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jax_sparse_mla.models import LayerKind, ModelSpec
from jax_sparse_mla.serving.comparison import layer_kind
from jax_sparse_mla.serving.engine import Engine, TracedStep
from jax_sparse_mla.serving.replay import Replay
from jax_sparse_mla.serving.request import Request

MIN_COSINE = {"fp8": 0.999, "bf16": 0.9999}
# The bound of a single row: one wrong row in a thousand hardly changes the cosine of the whole layer.
MIN_ROW_COSINE = {"fp8": 0.99, "bf16": 0.999}
MIN_OVERLAP = 0.97

# The thread that asks transformers, one thing after the other, while XLA compiles.
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

    outputs: dict[int, np.ndarray]
    selected: dict[int, np.ndarray | None]


def run_layers(
    engine: Engine, eager: Any, requests: list[Request], indices: Sequence[int] | None = None
) -> dict[int, Future[EagerRun]]:
    """Begins to run layers by transformers on the inputs that the engine's layers had.

    Args:
      engine: has traced a run of plain decoding; in speculative decoding rejected tokens are in no sequence.
      eager: a `sparse_mla_torch.eager.model.Eager`, or one in a process of its own.
      requests: the requests of that run.
      indices: of the layers; all by default.
    """
    finished: dict[int, EagerRun] = {}
    indices = range(len(engine.spec.layers)) if indices is None else indices
    return {index: TRANSFORMERS.submit(_run_eager, engine, eager, index, requests, finished) for index in indices}


def compare_layers(engine: Engine, runs: dict[int, Future[EagerRun]]) -> list[LayerReport]:
    """Runs layers again, with fresh caches and the same steps (chunks, batches, padding and slots), but with the
    entries that eager selects on the same inputs, and compares the outputs with eager's."""
    kinds, replay = engine.spec.layers, Replay(engine, runs)
    finished = {index: run.result() for index, run in runs.items()}
    outputs: dict[int, list[np.ndarray]] = {index: [] for index in runs}
    for traced in engine.trace:
        entries = {i: _rows_of(traced, run.selected) for i, run in finished.items() if kinds[i].selected}
        for index, output in replay(traced, entries).items():
            outputs[index].append(output)
    return [_report(engine, index, np.concatenate(outputs[index]), run) for index, run in finished.items()]


def _run_eager(
    engine: Engine, eager: Any, index: int, requests: list[Request], finished: dict[int, EagerRun]
) -> EagerRun:
    """Runs a layer by transformers, and keeps the result in `finished`. A layer that shares takes what the last layer
    with an indexer selects on that layer's own rows."""
    if index in finished:
        return finished[index]
    kinds, keys, shared = engine.spec.layers, [id(request) for request in requests], {}
    if kinds[index].selects == "shared":
        indexed = max(i for i in range(index) if kinds[i].selects != "shared")
        shared = _run_eager(engine, eager, indexed, requests, finished).selected
    rows = [(traced.hidden(index), traced.requests) for traced in engine.trace]
    hidden = [np.concatenate([x[of == key] for x, of in rows]) for key in keys]
    results = eager.attend(index, hidden, [shared.get(key) for key in keys])
    outputs, selected = zip(*results)
    finished[index] = EagerRun(dict(zip(keys, outputs)), dict(zip(keys, selected)))
    return finished[index]


def _report(engine: Engine, index: int, output: np.ndarray, eager: EagerRun) -> LayerReport:
    """The report of a layer's output `[rows of all steps, hidden]`."""
    overlaps, kind = [], engine.spec.layers[index]
    if kind.selected:
        for traced in engine.trace:
            visible = (traced.positions + 1) // max(kind.ratio, 1)
            overlaps += _overlaps(traced.selected(index), _rows_of(traced, eager.selected), visible)
    rows = [eager.outputs[r][p] for traced in engine.trace for r, p in zip(traced.requests, traced.positions)]
    output, expected = output.astype(np.float64), np.stack(rows).astype(np.float64)
    return LayerReport(
        layer=index,
        kind=_kind(engine.spec, kind),
        cosine=float(_cosines(output.ravel(), expected.ravel())),
        worst_row=float(_cosines(output, expected).min()),
        overlap=float(np.mean(overlaps)) if overlaps else None,
        dropping_rows=len(overlaps),
    )


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of rows; 0 where one is all zeros."""
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / np.maximum(lengths, 1e-16)


def _kind(spec: ModelSpec, kind: LayerKind) -> str:
    """The kind of entries that a layer attends to, in words."""
    if not spec.windowed and not kind.selected:
        return "linear attention"
    return layer_kind(spec, kind.ratio) + (", shared" if kind.selects == "shared" else "")


def count_agreeing_tokens(eager: Any, requests: list[Request]) -> tuple[int, int]:
    """`(agreeing, total)`: the generated tokens that transformers also chooses after the same tokens, and all."""
    agreeing = sum(eager.agreeing(len(request.prompt), request.tokens) for request in requests)
    return agreeing, sum(len(request.output) for request in requests)


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

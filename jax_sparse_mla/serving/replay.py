"""The attention of steps that an engine has traced, run again with given selections, for comparisons."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving import kept_programs
from jax_sparse_mla.serving.decoder import StepInputs
from jax_sparse_mla.serving.engine import Engine, TracedStep, options_without_search
from jax_sparse_mla.serving.scheduler import GATHERED
from jax_sparse_mla.serving.step import empty_caches


class Replay:
    """Runs layers on traced steps again, over new caches, in the order of the trace.

    It has a program for each shape of step, which is kept on disk as the engine's are.

    Args:
      engine: has traced a run.
      layers: the indices of the layers that run.
    """

    def __init__(self, engine: Engine, layers: Iterable[int]):
        self._engine, self._layers = engine, tuple(layers)
        self._caches, self._programs = empty_caches(engine.model, engine.options, engine.scheduler.pool), {}
        for traced in engine.trace:
            if (key := _shape(traced)) not in self._programs:
                self._programs[key] = self._compile(traced)

    def __call__(self, traced: TracedStep, entries: Mapping[int, Sequence[np.ndarray]]) -> dict[int, np.ndarray]:
        """The layers' outputs, float32 `[n, hidden]`.

        Args:
          entries: by layer, the entries that each of the step's rows is to select; of a layer that selects.
        """
        scores = [self._scores(traced, entries[i]) if self._selects(i) else None for i in self._layers]
        program, count = self._programs[_shape(traced)], len(traced.positions)
        outputs, self._caches = program(self._engine.params, self._caches, *self._arguments(traced, scores))
        return {i: np.asarray(output)[:count].astype(np.float32) for i, output in zip(self._layers, outputs)}

    def _compile(self, traced: TracedStep) -> Any:
        engine, devices = self._engine, jax.local_devices()[:1]
        scores = [self._scores(traced, []) if self._selects(i) else None for i in self._layers]
        arguments = engine.params, self._caches, *self._arguments(traced, scores)
        static = engine.model, self._layers, engine.prefill_backend == GATHERED, engine.options.backend
        made_from = "replay", static, *kept_programs.signature(arguments)
        jitted = jax.jit(functools.partial(_attend, *static), donate_argnums=1)
        return kept_programs.obtain(made_from, devices, lambda: jitted.lower(*arguments), options_without_search())[0]

    def _arguments(self, traced: TracedStep, scores: Sequence[np.ndarray | None]) -> tuple:
        positions = np.zeros(_num_rows(traced), np.int32)
        positions[: len(traced.positions)] = traced.positions
        rows = [traced.layers[i][0] for i in self._layers]
        return traced.batch, traced.tables, rows, positions, list(scores)

    def _selects(self, layer: int) -> bool:
        return self._engine.spec.layers[layer].selected

    def _scores(self, traced: TracedStep, entries: Sequence[np.ndarray]) -> np.ndarray:
        """Index scores of a step for which our selection is exactly these entries of each row."""
        spec: ModelSpec = self._engine.spec
        _, width = traced.tables.req_to_token.shape
        pages = -(-min(traced.batch.max_seq_len, width) // spec.page_size)
        tokens = next(kind.ratio or kind.pool for kind in spec.kinds if kind.selects == "own")  # of an index key
        scores = np.zeros((_num_rows(traced), pages * (spec.page_size // tokens)), np.float32)
        for row, selected in enumerate(entries):
            scores[row, selected // spec.kind().pool] = 1
        return scores


def _attend(model, layers, gathered, backend, params, caches, batch, tables, rows, positions, scores):
    """The attention of layers on a step's rows, with each one's index scores (None: the indexer's own)."""
    inputs = StepInputs(batch=batch, tables=tables, positions=positions, gathered=gathered, backend=backend)
    outputs = []
    for index, x, index_scores in zip(layers, rows, scores, strict=True):
        output, caches = model.attention(params, caches, inputs, x, layers=(index,), index_scores=index_scores)
        outputs.append(output)
    return outputs, caches


def _shape(traced: TracedStep) -> tuple:
    return traced.batch.mode, _num_rows(traced), traced.batch.seq_lens.shape, traced.batch.max_seq_len


def _num_rows(traced: TracedStep) -> int:
    """The rows of a step, padding included."""
    return traced.batch.out_cache_loc.shape[0]

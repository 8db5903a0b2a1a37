"""Compares a run with others on the same inputs: each layer with transformers' eager attention, and the model's logits
with those of other attention backends."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import torch

from sparse_mla_torch.hf.engine import Engine, EngineOptions, Request

MIN_COSINE = {"fp8": 0.999, "bf16": 0.9999}
# The bound of a single row: one wrong row in a thousand hardly changes the cosine of the whole layer.
MIN_ROW_COSINE = {"fp8": 0.99, "bf16": 0.999}
MIN_OVERLAP = 0.97
# The largest difference between backends, as a share of the largest logit. They round differently, and where two
# entries of the indexer or two experts tie, rounding chooses between them. Attention outputs that differ in their last
# bit only change the presets' logits by up to 0.02 of the largest.
MAX_LOGIT_DIFFERENCE = 1 / 16


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


def compare_layers(engine: Engine, requests: list[Request]) -> list[LayerReport]:
    """Runs each layer again, with fresh caches and the same steps (chunks, batches, padding and slots), but with the
    entries that eager selects on the same inputs, and compares the outputs with eager's.

    The run must be plain decoding, since drafts run the first layer only and rejected tokens are in no sequence.
    """
    return [compare_layer(engine, index, requests) for index in range(len(engine.layers))]


@torch.no_grad()
def compare_layer(engine: Engine, index: int, requests: list[Request]) -> LayerReport:
    """As `compare_layers`, for one layer."""
    layer = engine.layers[index]
    expected, selected = {}, {}
    for request in requests:
        key = id(request)
        hidden = torch.cat([t.hidden[index][_rows_of_request(t, key)] for t in engine.trace])
        out, chosen = layer.eager(hidden[None], engine.model)
        expected[key], selected[key] = out[0], chosen

    cache = engine.new_cache(index)
    ours_all, eager_all, overlaps = [], [], []
    for traced in engine.trace:
        step = traced.step
        scores = None
        if layer.has_indexer:
            chosen = _rows_of(step, selected)
            visible = (step.positions + 1) // max(layer.ratio, 1)
            overlaps += _overlaps(traced.positions[index], chosen, visible)
            scores = _as_scores(step, chosen, _num_columns(engine, step))
        out, cache, _ = layer(
            cache, traced.hidden[index][None], _position_embeddings(engine, traced, index), step, index_scores=scores
        )
        ours_all.append(out[0].double())
        eager_all.append(torch.stack([expected[r][p] for r, p in zip(step.requests, step.positions)]).double())
    ours, eager = torch.cat(ours_all), torch.cat(eager_all)
    cosines = torch.nn.functional.cosine_similarity(ours, eager, dim=-1)
    return LayerReport(
        layer=index,
        kind=layer_kind(engine, layer.ratio),
        cosine=float(torch.nn.functional.cosine_similarity(ours.flatten(), eager.flatten(), dim=0)),
        worst_row=float(cosines.min()),
        overlap=float(np.mean(overlaps)) if overlaps else None,
        dropping_rows=len(overlaps),
    )


def count_agreeing_tokens(engine: Engine, requests: list[Request]) -> tuple[int, int]:
    """`(agreeing, total)`: the generated tokens that transformers also chooses after the same tokens, and all."""
    agree = total = 0
    for request in requests:
        tokens = torch.tensor(request.tokens[:-1], device=engine.device)[None]
        with torch.no_grad():
            logits = engine.model(input_ids=tokens, use_cache=False).logits[0, len(request.prompt) - 1 :]
        agree += int((logits.float().argmax(-1).cpu() == torch.tensor(request.output)).sum())
        total += len(request.output)
    return agree, total


def replay_logits(engine: Engine, requests: list[Request]) -> torch.Tensor:
    """Serves the same tokens again by plain decoding; returns the logits before each, float32 `[tokens, vocab]`.

    Args:
      engine: either engine, which traces.
      requests: as they were served.
    """
    replays = [Request(r.prompt, len(r.output), forced=tuple(r.output)) for r in requests]
    chosen: dict[int, list[torch.Tensor]] = {id(replay): [] for replay in replays}

    engine.run(replays)
    for traced in engine.trace:
        logits, last = traced.chosen_logits(), traced.last_rows()
        for request, row in zip(last, logits):
            chosen[request].append(row)
    return torch.stack([row for replay in replays for row in chosen[id(replay)]])


@dataclasses.dataclass
class BackendReport:
    """How a backend's logits compare with those of the engine's own choice, after the same tokens.

    Attributes:
      backend: its name.
      difference: the largest difference of a logit, as a share of the largest logit.
      agreeing, total: the tokens that both choose, and all tokens.
    """

    backend: str
    difference: float
    agreeing: int
    total: int

    @property
    def passes(self) -> bool:
        return self.difference <= MAX_LOGIT_DIFFERENCE


def compare_backends(
    model: torch.nn.Module, options: EngineOptions, requests: list[Request], backends: list[str]
) -> list[BackendReport]:
    """Serves the tokens of requests that were served with each backend, in the same steps over caches of its own.

    Args:
      model, options: those of the engine; the others are compared with its backend, or the router's choice.
      requests: the requests that the engine has served.
      backends: the names of the others.

    Raises:
      ValueError: a backend that cannot serve a call.
    """

    def logits_of(backend: str | None) -> torch.Tensor:
        return replay_logits(Engine(model, dataclasses.replace(options, backend=backend, trace=False)), requests)

    expected, reports = logits_of(options.backend), []
    for name in backends:
        logits = logits_of(name)
        difference = (logits - expected).abs().max() / expected.abs().max()
        agreeing = int((logits.argmax(-1) == expected.argmax(-1)).sum())
        reports.append(BackendReport(name, float(difference), agreeing, len(logits)))
    return reports


def layer_kind(engine: Engine, ratio: int) -> str:
    """A few words for what a layer of this compress ratio attends to."""
    if not engine.is_v4:
        return f"top-{engine.spec.index_topk}"
    return {0: "window", 4: f"window + C4 top-{engine.spec.index_topk}"}.get(ratio, f"window + C{ratio}")


def _rows_of_request(traced, key: int) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(traced.step.requests == key)).to(traced.hidden[0].device)


def _rows_of(step, selected: dict) -> list[np.ndarray]:
    """The entries that eager selects at each real row of a step."""
    chosen = (selected[r][p] for r, p in zip(step.requests, step.positions))
    return [row[row >= 0] for row in chosen]


def _overlaps(positions: np.ndarray, chosen: list[np.ndarray], visible: np.ndarray) -> list[float]:
    """The share of eager's entries that our selection has, for each row that sees more entries than are selected."""
    return [
        len(np.intersect1d(ours, eager)) / len(eager)
        for ours, eager, entries in zip(positions, chosen, visible)
        if entries > positions.shape[1]
    ]


def _as_scores(step, chosen: list[np.ndarray], columns: int):
    """Index scores for which our selection is exactly these entries."""
    scores = np.zeros((step.num_rows, columns), np.float32)
    for row, entries in enumerate(chosen):
        scores[row, entries] = 1
    return jnp.asarray(scores)


def _num_columns(engine: Engine, step) -> int:
    page_entries = engine.spec.page_size // (4 if engine.is_v4 else 1)
    return step.metadata.page_table.shape[1] * page_entries


def _position_embeddings(engine: Engine, traced, index: int):
    hidden = traced.hidden[index][None]
    position_ids = torch.from_numpy(traced.step.positions).to(engine.device)[None]
    rotary = engine.model.model.rotary_emb
    if not engine.is_v4:
        return rotary(hidden, position_ids=position_ids)
    return {kind: rotary(hidden, position_ids=position_ids, layer_type=kind) for kind in ("main", "compress")}

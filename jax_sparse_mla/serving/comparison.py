"""Compares the logits of attention backends after the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving.request import Request

# The largest difference between backends, as a share of the largest logit. They round differently, and where two
# entries of the indexer or two experts tie, rounding chooses between them. Attention outputs that differ in their last
# bit only change the presets' logits by up to 0.02 of the largest.
MAX_LOGIT_DIFFERENCE = 1 / 16


@dataclasses.dataclass
class BackendReport:
    """How a backend's logits compare with those of the engine's own choice, after the same tokens."""

    backend: str
    difference: float  # the largest difference of a logit, as a share of the largest logit
    agreeing: int  # tokens that both choose
    total: int

    @property
    def passes(self) -> bool:
        return self.difference <= MAX_LOGIT_DIFFERENCE


def compare_backends(engine: Any, requests: list[Request], backends: list[str]) -> list[BackendReport]:
    """Serves the tokens of requests that the engine has served again by each backend, over caches of its own.

    All are compared with the engine's backend, or the router's choice; one that cannot serve a call raises ValueError.
    """
    expected, reports = replay_logits(engine, engine.options.backend, requests), []
    for name in backends:
        logits = replay_logits(engine, name, requests)
        difference = np.abs(logits - expected).max() / np.abs(expected).max()
        agreeing = int((logits.argmax(-1) == expected.argmax(-1)).sum())
        reports.append(BackendReport(name, float(difference), agreeing, len(logits)))
    return reports


def replay_logits(engine: Any, backend: str | None, requests: list[Request]) -> np.ndarray:
    """Serves the same tokens again by plain decoding; returns the logits before each, float32 `[tokens, vocab]`."""
    replays = [Request(r.prompt, len(r.output), forced=tuple(r.output)) for r in requests]
    chosen: dict[int, list[np.ndarray]] = {id(replay): [] for replay in replays}
    other = engine.with_options(backend=backend, trace=True, speculative_steps=0)
    other.run(replays)
    for traced in other.trace:
        for key, logits in traced.chosen():
            chosen[key].append(logits)
    return np.stack([row for replay in replays for row in chosen[id(replay)]])


def layer_kind(spec: ModelSpec, ratio: int) -> str:
    """A few words for what a layer of this compress ratio attends to."""
    kind = spec.kind(ratio)
    top = f"top-{spec.index_topk}" + f" in pools of {kind.pool}" * (kind.pool > 1)
    if kind.window is None:
        return top
    return "window" if kind.selects == "none" else f"window + C{ratio}" + f" {top}" * kind.selected

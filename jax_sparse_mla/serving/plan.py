"""A step that the scheduler has planned, and one that has run."""

from __future__ import annotations

import dataclasses
import operator

import jax
import numpy as np

from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.serving.pages import RequestPool
from jax_sparse_mla.serving.request import Request


@dataclasses.dataclass
class StepPlan:
    """A step: `counts[i]` positions of `requests[i]`, from `starts[i]` on."""

    mode: ForwardMode  # EXTEND, DECODE or TARGET_VERIFY
    requests: list[Request]  # n, in the order of the batch
    rows: np.ndarray  # int32 `[n]`, as starts and counts
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray  # int32 `[tokens]`; −1 where the host has not read the token. Drafts of TARGET_VERIFY are 0
    samples: np.ndarray  # bool `[n]`, whether the request's last row chooses a token
    max_seq_len: int  # the bucket
    mapped: np.ndarray  # int32 `[m, 4]`, pages that tables on a device lack; see `RequestPool.take_changes`
    # (from, to) rows of carried states to copy before and after the step.
    restored: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    kept: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    replays: bool = False  # whether all rows attend to positions that are known; else none does
    # The engine's measurements: compiling before the step; the host's clock at its start, and when its tokens arrived.
    compile_seconds: float = 0.0
    started: float = 0.0
    arrived: float = 0.0

    @property
    def parts(self) -> tuple[StepPlan]:
        """That of each share of a mesh; here there is one."""
        return (self,)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def returns_selected(self) -> bool:
        """Whether the host takes what a row attends to."""
        return not self.replays and any(request.return_selected for request in self.requests)

    @property
    def reads_from_start(self) -> bool:
        """Whether its rows are those of one prompt from its start."""
        return self.mode is ForwardMode.EXTEND and len(self.requests) == 1 and self.starts[0] == 0

    @property
    def drafts(self) -> int:
        """Draft tokens of each request, which TARGET_VERIFY verifies; 0 in the other modes."""
        return int(self.counts[0]) - 1 if self.mode is ForwardMode.TARGET_VERIFY else 0

    @property
    def known_counts(self) -> np.ndarray:
        """int32 `[n]`: of each request the positions whose tokens can stay. A round of drafts may go past the last one
        that a request replays."""
        if not (self.replays and self.drafts):
            return self.counts
        ends = np.array([request.attended for request in self.requests], np.int32)
        return np.minimum(self.counts, ends - self.starts)

    def replayed(self, num_rows: int) -> np.ndarray:
        """int32 `[layers that select, num_rows, k]`, what the rows attend to; −1 in those of padding, and in those
        behind `known_counts`."""
        parts = [r.selected[:, n : n + count] for r, n, count in zip(self.requests, self.starts, self.counts)]
        ends = *self.counts[:-1], num_rows - int(self.counts[:-1].sum())  # of the last with the padding
        padded = [np.pad(x, ((0, 0), (0, end - x.shape[1]), (0, 0)), constant_values=-1) for x, end in zip(parts, ends)]
        return np.concatenate(padded, axis=1)

    def follows(self, before: StepPlan) -> bool:
        """Whether it decodes the requests of `before`, each a token further that the host has not read, and no more."""
        return (
            self.mode is before.mode is ForwardMode.DECODE
            and not len(self.mapped)
            and len(self.requests) == len(before.requests)
            and all(map(operator.is_, self.requests, before.requests))
            and bool((self.tokens < 0).all() and (self.starts == before.starts + 1).all())
        )

    def positions(self) -> np.ndarray:
        """int32 `[tokens]`."""
        ends = np.cumsum(self.counts)
        return np.arange(ends[-1], dtype=np.int32) + np.repeat(self.starts - (ends - self.counts), self.counts)

    def forward_batch(self, pool: RequestPool, *, num_rows: int, num_requests: int) -> ForwardBatch:
        """The step in numpy arrays, padded to `num_rows` and `num_requests`."""

        def padded(values: np.ndarray, size: int) -> np.ndarray:
            return np.pad(values, (0, size - len(values)))

        verify, extend = self.mode is ForwardMode.TARGET_VERIFY, self.mode is ForwardMode.EXTEND
        slots = pool.req_to_token[np.repeat(self.rows, self.counts), self.positions()]
        return ForwardBatch(
            mode=self.mode,
            max_seq_len=self.max_seq_len,
            req_pool_indices=padded(self.rows, num_requests),
            seq_lens=padded(self.starts if verify else self.starts + self.counts, num_requests),
            out_cache_loc=padded(slots, num_rows),
            extend_lens=padded(self.counts, num_requests) if extend else None,
            num_draft_tokens=self.drafts + 1 if verify else None,
        )


@dataclasses.dataclass
class TracedStep:
    """A step that ran, for comparisons."""

    plan: StepPlan
    batch: ForwardBatch
    tables: RequestTables  # as they were then
    requests: np.ndarray  # `[n]`, `id(request)` of each real row
    positions: np.ndarray  # int32 `[n]`
    # Each layer's attention input `[T, hidden]`, and the selected positions int32 `[T, k]` or None.
    layers: list[tuple[jax.Array, jax.Array | None]] = dataclasses.field(default_factory=list)
    logits: jax.Array | None = None  # float32 `[requests · (drafts + 1), vocab]`, from which tokens were chosen

    def hidden(self, layer: int) -> np.ndarray:
        """float32 `[n, hidden]`."""
        return np.asarray(self.layers[layer][0])[: len(self.positions)].astype(np.float32)

    def selected(self, layer: int) -> np.ndarray | None:
        """int32 `[n, k]`, in a layer that selects."""
        selected = self.layers[layer][1]
        return None if selected is None else np.asarray(selected)[: len(self.positions)]

    def chosen(self) -> list[tuple[int, np.ndarray]]:
        """`id(request)` and logits float32 `[vocab]` of each token that a step of plain decoding chose."""
        return [
            (id(request), row)
            for request, row, samples in zip(self.plan.requests, np.asarray(self.logits), self.plan.samples)
            if samples
        ]

"""Speculative decoding in the small engine: the model's own first layer drafts, the whole model verifies.

A round takes every request 1 … K + 1 tokens further. K draft steps of one token each run the first layer, the final
norm and the head; V4-Flash's first layer attends to the sliding window only, a V3.2 layer to its own top-k. One
TARGET_VERIFY step then runs the whole model over the last token and the K drafts, and keeps the drafts that the model
itself chooses. The first layer's K rows depend on the tokens only, so drafts need no cache of their own: they write the
same rows that the verify step writes.

Rejected tokens need no clean-up in a cache. Rows behind a request's length are never read, and the next round writes
them again. This holds for the compressors' rings too, since they keep K + 1 tokens more than their window. Only pages
that hold nothing but rejected tokens are given back.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from jax_sparse_mla import ForwardBatch, ForwardMode, draft_step_batch
from jax_sparse_mla.serving.scheduler import StepPlan
from jax_sparse_mla.serving.speculative import DraftOracle
from sparse_mla_torch.hf.engine import Engine, choose
from sparse_mla_torch.hf.layers import Step


class SpeculativeDecoder:
    """Drafts and verifies, as the `advance` of `Engine.run`.

    Args:
      engine: its `speculative_steps` are at least `steps`.
      steps: draft tokens of a round, K.
      oracle: replaces drafts.

    Attributes:
      accepted: how many rounds of a request kept 0 … K drafts. In the round that ends a request only the drafts that it
        still needed count.

    Raises:
      ValueError: fewer steps than one or more than the engine's.
    """

    def __init__(self, engine: Engine, steps: int, oracle: DraftOracle | None = None):
        if not 1 <= steps <= engine.options.speculative_steps:
            raise ValueError(f"steps must be 1 … {engine.options.speculative_steps}, the engine's, got {steps}")
        self.engine, self.steps, self.oracle = engine, steps, oracle
        self.accepted = collections.Counter({count: 0 for count in range(steps + 1)})

    def advance(self) -> Step | None:
        """Runs the scheduler's next step while any prompt is unread, else a round; returns the (verify) step, or None
        where all requests have been cancelled."""
        engine = self.engine
        plan = engine.scheduler.plan(drafts=self.steps)
        if plan is None:
            return None
        if plan.mode is not ForwardMode.TARGET_VERIFY:
            return engine.run_plan(plan)
        batch = engine.new_batch(plan)
        drafts = self._draft(batch, plan)
        step = engine.new_step(batch, plan)
        tokens = [token for r, draft in zip(plan.requests, drafts) for token in (r.tokens[-1], *draft)]
        logits = engine.forward(step, tokens, list(range(len(tokens))))
        chosen = [choose(rows) for rows in logits.split(self.steps + 1)]
        self._accept(plan, drafts, chosen)
        return step

    def _draft(self, verify: ForwardBatch, plan: StepPlan) -> list[list[int]]:
        """Drafts K tokens for each request; their K rows go to the slots that the verify step has for them."""
        slots = verify.out_cache_loc.reshape(-1, self.steps + 1)[:, : self.steps]
        batch = dataclasses.replace(
            verify, mode=ForwardMode.DECODE, out_cache_loc=slots.reshape(-1), num_draft_tokens=None
        )
        drafts = [[r.tokens[-1]] for r in plan.requests]
        with _first_layer_only(self.engine.model):
            for i in range(self.steps):
                step = self.engine.new_step(draft_step_batch(batch, i, self.steps), plan, plan.starts + i)
                logits = self.engine.forward(step, [draft[-1] for draft in drafts], list(range(len(drafts))))
                for request, draft, token in zip(plan.requests, drafts, logits.float().argmax(-1).tolist()):
                    proposed = self.oracle.propose(request, i) if self.oracle else -1
                    draft.append(token if proposed < 0 else proposed)
        return [draft[1:] for draft in drafts]

    def _accept(self, plan: StepPlan, drafts: list[list[int]], chosen: list[list[tuple[int, float]]]) -> None:
        """Takes the drafts that the model chooses too, and the token after them; chosen are (token, margin)."""
        before = [len(request.output) for request in plan.requests]
        kept = []
        for draft, choices in zip(drafts, chosen):
            count = 0
            while count < self.steps and draft[count] == choices[count][0]:
                count += 1
            kept.append(choices[: count + 1])
        tokens, margins = ([[pair[i] for pair in choices] for choices in kept] for i in (0, 1))
        self.engine.scheduler.complete(plan, tokens, margins)
        for request, start in zip(plan.requests, before):
            self.accepted[len(request.output) - start - 1] += 1


@contextlib.contextmanager
def _first_layer_only(model: torch.nn.Module) -> Iterator[None]:
    layers = model.model.layers
    model.model.layers = layers[:1]
    try:
        yield
    finally:
        model.model.layers = layers

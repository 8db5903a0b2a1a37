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

import numpy as np
import torch

from jax_sparse_mla import ForwardBatch, ForwardMode, draft_step_batch
from sparse_mla_torch.hf.engine import Engine, Request
from sparse_mla_torch.hf.layers import Step

# A share of the best logit. A verify step has other shapes than a plain step: torch's matrix products take other tiles,
# attention other splits or another kernel, and so they round differently. bfloat16 resolves 1/128 of a value at worst,
# and where two entries of the indexer or two experts tie, rounding chooses between them. The top-k's order is no part
# of it: it is the same in every step.
MAX_MARGIN = 1 / 16


class DraftOracle:
    """Proposes, with a probability, the token that plain decoding chose; random weights accept hardly any other.

    After a near-tie at which a request has left plain decoding, the oracle's proposals are wrong drafts like any other.

    Args:
      plain: requests that plain decoding has served; a request is found by its prompt.
      probability: that the oracle proposes, for each draft token.
      seed: of the random draws.
    """

    def __init__(self, plain: list[Request], probability: float, seed: int):
        self._outputs = {tuple(r.prompt): r.output for r in sorted(plain, key=lambda r: len(r.output))}
        self._probability, self._rng = probability, np.random.default_rng(seed)

    def propose(self, request: Request, ahead: int, draft: int) -> int:
        """The token of plain decoding after `ahead` drafts, or `draft`."""
        tokens, index = self._outputs.get(tuple(request.prompt), ()), len(request.output) + ahead
        knows = self._rng.random() < self._probability and index < len(tokens)
        return tokens[index] if knows else draft


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

    def advance(self, running: list[Request]) -> Step:
        """Runs the engine's next step while any prompt is unread, else a round; returns the (verify) step."""
        if any(request.in_prefill for request in running):
            return self.engine.advance(running)
        served = [(r, range(r.computed, r.computed + self.steps + 1)) for r in running]
        batch = self.engine.new_batch(ForwardMode.TARGET_VERIFY, served)
        drafts = self._draft(batch, running)
        step = self.engine.new_step(batch, served)
        tokens = [token for r, draft in zip(running, drafts) for token in (r.tokens[-1], *draft)]
        logits = self.engine.forward(step, tokens, list(range(len(tokens))))
        for request, draft, rows in zip(running, drafts, logits.split(self.steps + 1)):
            self._accept(request, draft, rows)
        return step

    def _draft(self, verify: ForwardBatch, running: list[Request]) -> list[list[int]]:
        """Drafts K tokens for each request; their K rows go to the slots that the verify step has for them."""
        slots = verify.out_cache_loc.reshape(-1, self.steps + 1)[:, : self.steps]
        batch = dataclasses.replace(
            verify, mode=ForwardMode.DECODE, out_cache_loc=slots.reshape(-1), num_draft_tokens=None
        )
        drafts = [[r.tokens[-1]] for r in running]
        with _first_layer_only(self.engine.model):
            for i in range(self.steps):
                served = [(r, range(r.computed + i, r.computed + i + 1)) for r in running]
                step = self.engine.new_step(draft_step_batch(batch, i, self.steps), served)
                logits = self.engine.forward(step, [draft[-1] for draft in drafts], list(range(len(drafts))))
                for request, draft, token in zip(running, drafts, logits.float().argmax(-1).tolist()):
                    draft.append(self.oracle.propose(request, i, token) if self.oracle else token)
        return [draft[1:] for draft in drafts]

    def _accept(self, request: Request, draft: list[int], logits: torch.Tensor) -> None:
        """Appends the drafts that the model chooses too, and the token after them; logits `[K + 1, vocab]`."""
        count = 0
        request.choose(logits[0])
        while count < self.steps and draft[count] == request.output[-1] and not request.finished:
            count += 1
            request.choose(logits[count])
        self.accepted[count] += 1
        request.computed += count + 1
        self.engine.pool.truncate(request.row, request.computed)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A token where plain decoding chooses another after the same tokens; `margin` is the larger of both choices'
    margins (`Request.margins`)."""

    request: int
    index: int
    margin: float


def compare_with_plain(engine: Engine, requests: list[Request], plain: list[Request]) -> list[Difference]:
    """The tokens of the requests that differ from plain decoding.

    Behind a differing token the two texts cannot be compared. So plain decoding starts again there, and every token is
    compared with plain decoding's choice after the same tokens.

    Args:
      engine: runs plain decoding again where needed.
      requests: the requests, served by speculative decoding.
      plain: the same requests, served by plain decoding.
    """
    differences, pending = [], [(i, 0, other) for i, other in enumerate(plain)]
    while pending:
        again = []
        for i, start, other in pending:
            request = requests[i]
            pairs = zip(request.output[start:], other.output, strict=True)
            at = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            if at is None:
                continue
            index = start + at
            differences.append(Difference(i, index, max(request.margins[index], other.margins[at])))
            if rest := len(request.output) - index - 1:
                again.append((i, index + 1, Request(request.prompt + request.output[: index + 1], rest)))
        if again:
            engine.run([other for _, _, other in again])
        pending = again
    return sorted(differences, key=lambda d: (d.request, d.index))


@contextlib.contextmanager
def _first_layer_only(model: torch.nn.Module) -> Iterator[None]:
    layers = model.model.layers
    model.model.layers = layers[:1]
    try:
        yield
    finally:
        model.model.layers = layers

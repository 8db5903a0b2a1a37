"""Speculative decoding in the small engine: the model's own first layer drafts, the whole model verifies.

A round takes every request 1 … K + 1 tokens further. K draft steps of one token each run the first layer, the final
norm and the head: V4-Flash's first layer attends to the sliding window only; a V3.2 layer to its own top-k. One
TARGET_VERIFY step then runs the whole model over the last token and the K drafts, and the drafts that it would have
chosen itself are kept. The first layer's K rows depend on the tokens alone, so drafts need no cache of their own: they
write the very rows that the verify step writes.

Rejected tokens leave nothing to undo in a cache: what lies behind a request's length is never read, and the next
round writes it anew, the compressors' rings included, which keep K + 1 tokens more than their window. Only pages that
hold nothing but rejected tokens are given back.
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

# Of the best logit. Steps of other sizes round differently: bfloat16 resolves 1/128 of a value at worst, and where two
# entries of the indexer or two experts tie, rounding chooses between them.
MAX_MARGIN = 1 / 16


class DraftOracle:
    """Proposes, with a probability, the token that plain decoding chose: random weights accept almost nothing else.

    Where a request has left plain decoding at a near-tie, the oracle's proposals are like any other wrong draft.

    Args:
      plain: requests that plain decoding has served; another request is known by its prompt.
      probability: of a proposal, for each draft token.
      seed: of the draws.
    """

    def __init__(self, plain: list[Request], probability: float, seed: int):
        self._outputs = {tuple(r.prompt): r.output for r in sorted(plain, key=lambda r: len(r.output))}
        self._probability, self._rng = probability, np.random.default_rng(seed)

    def propose(self, request: Request, ahead: int, draft: int) -> int:
        """The true token after `ahead` drafts, or else `draft`."""
        tokens, index = self._outputs.get(tuple(request.prompt), ()), len(request.output) + ahead
        knows = self._rng.random() < self._probability and index < len(tokens)
        return tokens[index] if knows else draft


class SpeculativeDecoder:
    """Drafts and verifies, as the `advance` of `Engine.run`.

    Args:
      engine: with room for as many `speculative_steps`.
      steps: draft tokens of a round, K.
      oracle: replaces drafts.

    Attributes:
      accepted: how many times a request's round kept 0 … K drafts; of the round that ends a request, those it had
        use for.

    Raises:
      ValueError: fewer steps than one or more than the engine's.
    """

    def __init__(self, engine: Engine, steps: int, oracle: DraftOracle | None = None):
        if not 1 <= steps <= engine.options.speculative_steps:
            raise ValueError(f"steps must be 1 … {engine.options.speculative_steps}, the engine's, got {steps}")
        self.engine, self.steps, self.oracle = engine, steps, oracle
        self.accepted = collections.Counter({count: 0 for count in range(steps + 1)})

    def advance(self, running: list[Request]) -> Step:
        """The next step: the engine's while any prompt is unread, else a round; returns its verify step."""
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
        """K tokens for each request, each step's K rows in the slots that the verify step has for them."""
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
    """A token that plain decoding chooses otherwise after the same tokens; margin: the larger of the two choices'
    (`Request.margins`)."""

    request: int
    index: int
    margin: float


def compare_with_plain(engine: Engine, requests: list[Request], plain: list[Request]) -> list[Difference]:
    """Where the requests' tokens are not plain decoding's.

    Two texts that differ in one token have nothing to compare after it: plain decoding then starts again behind the
    differing token, so that every token is compared with plain decoding's choice after the same tokens.

    Args:
      engine: runs plain decoding again where needed.
      requests: as speculative decoding has served them.
      plain: the same requests, as plain decoding has served them.
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

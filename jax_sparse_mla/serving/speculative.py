"""Speculative decoding beside the engine: drafts from an oracle, and the comparison with plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jax_sparse_mla.serving.request import Request

# A share of the best logit. A verify step has other shapes than a plain step: matrix products take other tiles,
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

    def propose(self, request: Request, ahead: int) -> int:
        """The token of plain decoding after `ahead` drafts, or −1 for the model's own draft."""
        tokens, index = self._outputs.get(tuple(request.prompt), ()), len(request.output) + ahead
        knows = self._rng.random() < self._probability and index < len(tokens)
        return tokens[index] if knows else -1


@dataclasses.dataclass(frozen=True)
class Difference:
    """A token where plain decoding chooses another after the same tokens; `margin` is the larger of both choices'
    margins (`Request.margins`)."""

    request: int
    index: int
    margin: float


def compare_with_plain(
    serve: Callable[[list[Request]], None], requests: list[Request], plain: list[Request]
) -> list[Difference]:
    """The tokens of the requests that differ from plain decoding.

    Behind a differing token the two texts cannot be compared. So plain decoding starts again there, and every token is
    compared with plain decoding's choice after the same tokens.

    Args:
      serve: serves requests by plain decoding, again where needed.
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
            if remaining := len(request.output) - index - 1:
                tail = Request(request.prompt + request.output[: index + 1], remaining, sampling=request.sampling)
                again.append((i, index + 1, tail))
        if again:
            serve([other for _, _, other in again])
        pending = again
    return sorted(differences, key=lambda d: (d.request, d.index))

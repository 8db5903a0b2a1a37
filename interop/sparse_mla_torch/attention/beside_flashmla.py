"""Calls that FlashMLA's bare kernel does faster than ours: serving engines, which have it, keep them.

They follow from one table, `beside_flashmla.json`, which `python -m benchmarks beside_flashmla` measures: for families
of calls, by heads, rows of `[query rows, FlashMLA's microseconds, ours]`.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

from jax_sparse_mla.attention.backend import BACKENDS, Call

TABLE = Path(__file__).with_suffix(".json")
# A call is FlashMLA's if it takes less than this share of our time.
_SOONER = 0.98


class Family(NamedTuple):
    """Measured calls that differ in heads and rows.

    Attributes:
      phase, layout, columns, extra_page_size: as a `Call` has them; columns of both tables together.
      ratios: by heads, FlashMLA's time over ours at each number of rows, in ascending order.
    """

    phase: str
    layout: str
    columns: int
    extra_page_size: int | None
    ratios: dict[int, tuple[tuple[int, float], ...]]

    def distance(self, call: Call) -> tuple[float, float]:
        """How far a call's pages and columns are, in powers of two."""
        pages = math.log2(call.extra_page_size / self.extra_page_size) if self.extra_page_size else 0.0
        return abs(pages), abs(math.log2(call.topk / self.columns))

    def ratio(self, call: Call) -> float | None:
        """Interpolated between the rows that were measured; FlashMLA pads heads, so the next larger number speaks."""
        heads = min((heads for heads in self.ratios if heads >= call.num_heads), default=None)
        if heads is None:
            return None
        measured = self.ratios[heads]
        rows = min(max(call.num_q_tokens, measured[0][0]), measured[-1][0])
        after = next(i for i, (count, _) in enumerate(measured) if count >= rows)
        (low, first), (high, last) = measured[max(after - 1, 0)], measured[after]
        share = math.log(rows / low) / math.log(high / low) if high > low else 1.0
        return first ** (1 - share) * last**share


@functools.cache
def families() -> tuple[Family, ...]:
    """The table's, whose rows that were measured more than once count by the least ratio."""
    read = []
    for family in json.loads(TABLE.read_text())["families"]:
        ratios = {}
        for heads, times in family["times"].items():
            of_rows = {}
            for rows, theirs, ours in times:
                of_rows[rows] = min(theirs / ours, of_rows.get(rows, math.inf))
            ratios[int(heads)] = tuple(sorted(of_rows.items()))
        read.append(Family(*(family[name] for name in Family._fields[:4]), ratios))
    return tuple(read)


def measured_ratio(call: Call) -> float | None:
    """FlashMLA's time over ours, by the nearest family; None where none has as many heads or, for decode, more than
    half and less than twice the call's columns. Prefill of few rows is mostly a launch, of any number of columns."""
    if not call.topk:
        return None
    same = [
        family
        for family in families()
        if (family.phase, family.layout) == (call.phase, call.layout.name)
        and (family.extra_page_size is None) == (call.extra_page_size is None)
    ]
    nearest = min(same, key=lambda family: family.distance(call), default=None)
    if nearest is None or (call.phase == "decode" and nearest.distance(call)[1] >= 1):
        return None
    return nearest.ratio(call)


def why_flashmla_alone(call: Call, backend: str) -> str | None:
    """Why FlashMLA's bare kernel is faster than `backend` for this call, or None. Pure, but for the table's file.

    For a caller that has FlashMLA's functions of its own, as serving engines do: it runs them without our sanitiser and
    without copies.
    """
    if BACKENDS["flashmla"].cannot(call):
        return None
    if backend == "flashmla":
        return "FlashMLA's kernel would serve it, behind our sanitiser"
    if backend != "hopper":
        return f"FlashMLA's {call.phase} takes less time than {backend}'s, but for some calls of few rows"
    ratio = measured_ratio(call)
    if ratio is None or ratio >= _SOONER:
        return None
    return (
        f"FlashMLA's {call.phase} takes {ratio:.2f} of our time for {call.num_q_tokens} rows of {call.num_heads} heads"
    )

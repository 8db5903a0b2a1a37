"""Calls that FlashMLA's bare kernel does faster than ours: serving engines, which have it, keep them."""

from __future__ import annotations

from typing import NamedTuple

from jax_sparse_mla.attention.backend import BACKENDS, Call
from jax_sparse_mla.kv_cache.layout import KVLayout

_ANY = 1 << 31  # more than any number of index columns


class _Sooner(NamedTuple):
    """Decode calls that FlashMLA's kernel by itself does sooner than `hopper`. A range has its last number too."""

    layout: KVLayout
    heads: tuple[int, int]
    topk: tuple[int, int]  # index columns of both tables together
    rows: tuple[int, int]
    share: str  # of our time
    extra_page_size: tuple[int, int] = (0, _ANY)

    def has(self, call: Call) -> bool:
        sizes = call.num_heads, call.topk or 0, call.num_q_tokens, call.extra_page_size or 0
        ranges = self.heads, self.topk, self.rows, self.extra_page_size
        return call.layout == self.layout and all(low <= size <= high for size, (low, high) in zip(sizes, ranges))


# Measured on an H200 (docs/reference/routing.md). V4's calls of 1,152 columns are those of C128 layers, whose
# compressed entries stand in pages of 2, and of V4-Pro's C4 layers, with pages of 64.
_PAGES_OF_C128 = (1, 2)
_FLASHMLA_SOONER = (
    _Sooner(KVLayout.V32_FP8, (65, 128), (1153, _ANY), (2, 15), "0.9 to 1.0"),
    _Sooner(KVLayout.V4_FP8, (65, 128), (641, _ANY), (9, 31), "0.95", _PAGES_OF_C128),
    _Sooner(KVLayout.V4_FP8, (65, 128), (641, _ANY), (34, 127), "0.94", _PAGES_OF_C128),
    _Sooner(KVLayout.V4_FP8, (65, 128), (0, 128), (17, 127), "0.8 to 0.9"),
    _Sooner(KVLayout.V4_FP8, (64, 64), (0, 128), (34, 127), "0.98"),
)


def why_flashmla_alone(call: Call, backend: str) -> str | None:
    """Why FlashMLA's bare kernel is faster than `backend` for this call, or None. Pure.

    For a caller that has FlashMLA's functions of its own, as serving engines do: it runs them without our sanitiser and
    without copies. Measured on an H200 (docs/reference/routing.md).
    """
    if BACKENDS["flashmla"].cannot(call):
        return None
    if backend == "flashmla":
        return "FlashMLA's kernel would serve it, behind our sanitiser"
    if backend != "hopper":
        return f"FlashMLA's {call.phase} takes less time than {backend}'s, but for some calls of few rows"
    if call.phase == "prefill":
        return None
    sooner = next((sooner for sooner in _FLASHMLA_SOONER if sooner.has(call)), None)
    return sooner and f"FlashMLA's kernel takes {sooner.share} of our time for few rows of {call.num_heads} heads"

"""Prefix reuse: full pages that a request has filled serve later requests which begin with the same tokens.

A page is known by the digest of all tokens up to its end, so equal digests mean equal contents. What continues a
prefix of R tokens needs, besides its pages:

* V3.2: nothing. Any number of full pages can be reused.
* V4: the window's keys of the last 127 tokens in every layer, and the ratio-4 compressors' last group (an entry of
  ratio 4 also takes the group before its own; the groups of ratio 128 end at a page's end). These cannot be computed
  again from the last tokens alone: a layer's keys depend on the window of the layer below, so L layers would need L
  windows of tokens. So they are kept, at *reuse points*: the window page of the prefix's last page stays, and the
  carried states are copied to a row of their own. A state is that of the position where a step ends; the scheduler
  therefore ends a chunk at the last full page of each prompt, and where a prompt leaves what others have read.

A prefix ends at least one token before the prompt does: the last token must be computed, for its logits.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from jax_sparse_mla.serving.pages import RequestPool


@dataclasses.dataclass(frozen=True)
class Match:
    """The prefix of a prompt that others have read."""

    pages: list[int]  # pages that can be reused, in order
    state: int | None  # the row of carried states that belongs to them; None without one, or where nothing is reused
    known: int  # tokens in full pages that others have filled; more than those of `pages` where no reuse point is


class PrefixCache:
    """Pages of a pool by the digests of their tokens; those that nobody uses stay idle until the pool needs them.

    Args:
      state_rows: rows of carried states for reuse points. A model without a window needs none.

    Raises:
      ValueError: a window larger than a page.
    """

    def __init__(self, pool: RequestPool, state_rows: Sequence[int] = ()):
        if pool.window is not None and pool.window - 1 > pool.page_size:
            raise ValueError(f"prefix reuse needs a window within a page of {pool.page_size}, got {pool.window}")
        self._pool, self._has_window = pool, pool.window is not None
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}  # of the pages above
        self._points: collections.OrderedDict[bytes, int] = collections.OrderedDict()  # digest → row of states
        self._free_states = list(state_rows)
        pool.pages.on_evict = self._forget
        pool.reclaim_window = self._drop_oldest_point

    def match(self, digests: Sequence[bytes]) -> Match:
        """The longest prefix that can be reused, and the longest that others have filled."""
        pages: list[int] = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
        known, state = len(pages) * self._pool.page_size, None
        if self._has_window:
            while pages and digests[len(pages) - 1] not in self._points:
                pages.pop()
            if pages:
                state = self._points[digests[len(pages) - 1]]
                self._points.move_to_end(digests[len(pages) - 1])
        return Match(pages, state, known)

    def add(self, digest: bytes, page: int) -> None:
        """Makes a full page of a request known. If another page has these tokens, a page at a reuse point stays, since
        the point is bound to it, and otherwise the newer one does."""
        known = self._pages.get(digest)
        if known == page or (known is not None and digest in self._points):
            return
        if known is not None:
            self._forget(known)
            self._pool.pages.drop(known)
        self._pages[digest], self._digests[page] = page, digest
        self._pool.pages.keep(page)

    def add_point(self, digest: bytes, page: int) -> int | None:
        """Makes a reuse point at the end of a page that is known, in use, and in its request's window; returns the row
        of states to copy the request's to, or None where the point is there already or cannot be."""
        if not self._has_window or digest in self._points or self._pages.get(digest) != page:
            return None
        if not self._free_states and not self._drop_oldest_point():
            return None
        self._points[digest] = row = self._free_states.pop()
        self._pool.enter_window(page)
        return row

    def clear(self) -> None:
        """Forgets everything; idle pages become free."""
        self.forget(list(self._digests))

    def forget(self, pages: Sequence[int]) -> None:
        """Makes pages unknown; those that nobody uses become free."""
        for page in pages:
            if page in self._digests:
                self._forget(page)
                self._pool.pages.drop(page)

    def _forget(self, page: int) -> None:
        digest = self._digests.pop(page)
        if digest in self._points:
            self._drop_point(digest)
        del self._pages[digest]

    def _drop_oldest_point(self) -> bool:
        if not self._points:
            return False
        self._drop_point(next(iter(self._points)))
        return True

    def _drop_point(self, digest: bytes) -> None:
        self._free_states.append(self._points.pop(digest))
        self._pool.leave_window(self._pages[digest])


def page_digests(tokens: Sequence[int], page_size: int) -> list[bytes]:
    """A digest for each full page, of all tokens up to its end."""
    data, digests, digest = np.asarray(tokens, "<i4"), [], b""
    for start in range(0, len(data) - page_size + 1, page_size):
        digest = hashlib.sha256(digest + data[start : start + page_size].tobytes()).digest()
        digests.append(digest)
    return digests

"""The page allocators and request tables of a small serving engine, on the host."""

from __future__ import annotations

import numpy as np


class PagePool:
    """Free pages of one cache; page 0 is never given out (padding rows write to slot 0)."""

    def __init__(self, num_pages: int, rng: np.random.Generator):
        # Shuffled, as in an engine that has run for a while, so that slots are not positions.
        self.free = list(rng.permutation(np.arange(1, num_pages)))

    def take(self) -> int:
        if not self.free:
            raise RuntimeError("no free page left: fewer requests at once, or a larger pool")
        return int(self.free.pop())

    def give_back(self, page: int) -> None:
        self.free.append(page)


class RequestPool:
    """The request tables of an engine with `max_requests` requests of up to `max_len` tokens.

    Attributes:
      req_to_token: int32 `[max_requests, max_len]`, full-pool slots; −1 where unmapped.
      full_to_swa: int32 `[pool + 1]`, sliding-window slots; −1 where unmapped, and in the last entry.
    """

    def __init__(self, *, max_requests: int, max_len: int, page_size: int, window: int | None, seed: int):
        rng = np.random.default_rng(seed)
        self.page_size, self.window = page_size, window
        pages_per_request = -(-max_len // page_size)
        self.num_pages = 1 + max_requests * pages_per_request
        self.req_to_token = np.full((max_requests, pages_per_request * page_size), -1, np.int32)
        self.full_to_swa = np.full(self.num_pages * page_size + 1, -1, np.int32)
        self.full_to_swa[0] = 0  # padding rows write to slot 0 of either pool
        self._pages = PagePool(self.num_pages, rng)
        self._free_rows = list(range(max_requests))
        self.num_swa_pages = self.num_pages  # enough for a whole prompt in one chunk
        self._swa_pages = PagePool(self.num_swa_pages, rng)

    def open(self) -> int:
        """A row for a new request."""
        if not self._free_rows:
            raise RuntimeError("no free row left: fewer requests at once, or a larger pool")
        return self._free_rows.pop()

    def close(self, row: int) -> None:
        """Gives back the row and all pages of a request."""
        self.truncate(row, 0)
        self._free_rows.append(row)

    def truncate(self, row: int, length: int) -> None:
        """Gives back the pages that hold none of a request's first `length` positions."""
        first_page = -(-length // self.page_size) * self.page_size
        for start in range(first_page, self.req_to_token.shape[1], self.page_size):
            first = self.req_to_token[row, start]
            if first >= 0:
                self._release_window_page(int(first))
                self._pages.give_back(int(first) // self.page_size)
        self.req_to_token[row, first_page:] = -1

    def extend(self, row: int, old_len: int, new_len: int) -> np.ndarray:
        """Maps positions `old_len … new_len − 1` and returns their slots; pages behind the window are given back."""
        if new_len > self.req_to_token.shape[1]:
            raise RuntimeError(f"a request of {new_len} tokens exceeds the pool's {self.req_to_token.shape[1]}")
        offsets = np.arange(self.page_size, dtype=np.int32)
        for start in range(-(-old_len // self.page_size) * self.page_size, new_len, self.page_size):
            slots = self._pages.take() * self.page_size + offsets
            self.req_to_token[row, start : start + self.page_size] = slots
            if self.window is not None:
                self.full_to_swa[slots] = self._swa_pages.take() * self.page_size + offsets
        if self.window is not None:
            # The oldest query of this step sees back to old_len + 1 − window; whole pages before that are not needed.
            for start in range(0, max(0, old_len + 1 - self.window) - self.page_size + 1, self.page_size):
                self._release_window_page(int(self.req_to_token[row, start]))
        return self.req_to_token[row, old_len:new_len].copy()

    def _release_window_page(self, first_slot: int) -> None:
        mapped = self.full_to_swa[first_slot]
        if self.window is not None and mapped >= 0:
            self._swa_pages.give_back(int(mapped) // self.page_size)
            self.full_to_swa[first_slot : first_slot + self.page_size] = -1

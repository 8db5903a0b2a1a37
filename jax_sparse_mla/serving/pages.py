"""Pages and request tables, on the host.

`PagePool` counts who uses each page. `RequestPool` has the tables of the requests being served: which page holds which
of their positions, and which of the sliding window's pages. Pages may be shared: see `prefix.PrefixCache`.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable

import numpy as np

from jax_sparse_mla.serving.memory import NotEnoughMemory, check_host_memory


class OutOfPages(RuntimeError):
    """No page is left. Nothing has changed."""


class PagePool:
    """The pages of one kind, with counts of their users; page 0 is never given out (padding rows write to slot 0).

    A page that nobody uses is free, or idle: kept for what it holds until a page is needed. The idle page that has
    waited longest is taken first.

    Where several devices share the pages, page p lies on device `p % devices`, and whoever takes pages for a request
    takes its page i of device `i % devices`: then each device has its turn of every request.

    Attributes:
      on_evict: called with an idle page before it is given out for something else.
    """

    def __init__(self, num_pages: int, rng: np.random.Generator, devices: int = 1):
        # Shuffled, as in an engine that has run for a while, so that slots are not positions.
        order = rng.permutation(np.arange(1, num_pages))
        self._free = [order[order % devices == device].tolist() for device in range(devices)]
        self._idle: list[collections.OrderedDict[int, None]] = [collections.OrderedDict() for _ in range(devices)]
        self.on_evict: Callable[[int], None] = lambda page: None
        self._users = [0] * num_pages
        self._kept: set[int] = set()

    @property
    def free(self) -> list[int]:
        """Page numbers."""
        return [page for pages in self._free for page in pages]

    @property
    def idle(self) -> list[int]:
        """Page numbers, of each device the first one to be taken first."""
        return [page for pages in self._idle for page in pages]

    def is_idle(self, page: int) -> bool:
        return page in self._idle[page % len(self._idle)]

    @property
    def available(self) -> int:
        """How many pages a request can have, whichever device its first one is to be of."""
        return len(self._free) * min(map(self._available, range(len(self._free))))

    def has(self, first: int, count: int) -> bool:
        """Whether `take` can give out pages `first … first + count − 1` of a request."""
        devices = len(self._free)
        return all(-(-(count - i) // devices) <= self._available((first + i) % devices) for i in range(devices))

    def _available(self, device: int) -> int:
        return len(self._free[device]) + len(self._idle[device])

    def take(self, index: int = 0) -> int:
        """Page `index` of a request, for one user; `OutOfPages` where all of its device are in use."""
        device = index % len(self._free)
        free, idle = self._free[device], self._idle[device]
        if free:
            page = free.pop()
        elif idle:
            page = next(iter(idle))
            self.on_evict(page)
            idle.pop(page, None)
            self._kept.discard(page)
        else:
            raise OutOfPages("no free page left: fewer requests at once, or a larger pool")
        self._users[page] = 1
        return page

    def share(self, page: int) -> None:
        """One user more, of a page in use or idle."""
        self._idle[page % len(self._idle)].pop(page, None)
        self._users[page] += 1

    def give_back(self, page: int) -> bool:
        """One user less; returns whether nobody uses the page any more."""
        self._users[page] -= 1
        if self._users[page]:
            return False
        device = page % len(self._free)
        if page in self._kept:
            self._idle[device][page] = None
        else:
            self._free[device].append(page)
        return True

    def keep(self, page: int) -> None:
        """Makes a page that is in use idle instead of free when nobody uses it."""
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Undoes `keep`."""
        self._kept.discard(page)
        device = page % len(self._free)
        if page in self._idle[device]:
            del self._idle[device][page]
            self._free[device].append(page)


class RequestPool:
    """The request tables of an engine with `max_requests` requests of up to `max_len` tokens.

    Args:
      max_requests, max_len: sizes of the tables.
      page_size, window: tokens of a page and of the sliding window, None for a model without one.
      seed: of the page order.
      num_pages: pages of the full pool, page 0 included; by default enough for every request.
      num_swa_pages: of the window's pool; by default as many.
      devices: that share the pages of the full pool, a divisor of their number; see `PagePool`.

    Raises:
      ValueError: the host's memory is too small for them.

    Attributes:
      req_to_token: int32 `[max_requests, max_len]`, full-pool slots; −1 where unmapped.
      full_to_swa: int32 `[pool + 1]`, sliding-window slots; −1 where unmapped, and in the last entry.
      pages, swa_pages: the two pools.
      trims_from: for each row the length from which `trim` has something to give back.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_len: int,
        page_size: int,
        window: int | None,
        seed: int,
        num_pages: int | None = None,
        num_swa_pages: int | None = None,
        devices: int = 1,
    ):
        rng = np.random.default_rng(seed)
        self.page_size, self.window, self.devices = page_size, window, devices
        pages_per_request = -(-max_len // page_size)
        self.num_pages = num_pages or devices + max_requests * self.turns(pages_per_request)
        self.num_swa_pages = num_swa_pages or self.num_pages  # enough for a whole prompt in one chunk
        slots = page_size * max(max_requests * pages_per_request, self.num_pages, self.num_swa_pages)
        tables = f"tables for {max_requests} requests of up to {max_len} tokens"
        check_host_memory(f"{tables} need", 8 * slots + 128 * (self.num_pages + self.num_swa_pages))
        if slots >= 2**31:
            raise NotEnoughMemory(f"{tables} have {slots} slots, more than an int32 counts")
        self.req_to_token = np.full((max_requests, pages_per_request * page_size), -1, np.int32)
        self.full_to_swa = np.full(self.num_pages * page_size + 1, -1, np.int32)
        self.full_to_swa[0] = 0  # padding rows write to slot 0 of either pool
        self.pages = PagePool(self.num_pages, rng, devices)
        self.swa_pages = PagePool(self.num_swa_pages, rng)
        self._offsets = np.arange(page_size, dtype=np.int32)
        self._free_rows = list(range(max_requests))
        self._pages_of: list[list[int]] = [[] for _ in range(max_requests)]
        # Pages before this one of a request are behind its window.
        self._first_in_window = [0] * max_requests
        self.trims_from = [sys.maxsize if window is None else 0] * max_requests
        self._swa_page: list[int] = [0] * self.num_pages  # of each page of the full pool; 0 where it has none
        self._changes: list[tuple[int, int, int]] = []  # (row, index, page)
        # Gives up a kept window page that nobody reads now; False if there is none.
        self.reclaim_window: Callable[[], bool] = lambda: False

    @property
    def most_pages(self) -> int:
        """Pages of the longest request that the full pool has room for, alone."""
        return self.num_pages - self.devices

    def turns(self, count: int) -> int:
        """Pages, rounded up to as many of each device: what so many of a request may take of `PagePool.available`."""
        return -(-count // self.devices) * self.devices

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def pages_of(self, row: int) -> list[int]:
        """A request's pages, in the order of positions."""
        return self._pages_of[row]

    def open(self) -> int:
        """A row for a new request."""
        if not self._free_rows:
            raise RuntimeError("no free row left: fewer requests at once, or a larger pool")
        return self._free_rows.pop()

    def close(self, row: int) -> None:
        """Gives back the row and all pages of a request."""
        self.truncate(row, 0)
        self._begin_window(row, 0)
        self._free_rows.append(row)

    def truncate(self, row: int, length: int) -> None:
        """Gives back the pages that hold none of a request's first `length` positions."""
        pages, keep = self._pages_of[row], -(-length // self.page_size)
        if len(pages) <= keep:
            return
        while len(pages) > keep:  # the last one first, so that a kept prefix loses its end before its beginning
            page = pages.pop()
            if self.window is not None and len(pages) >= self._first_in_window[row]:
                self.leave_window(page)
            self.pages.give_back(page)
        self.req_to_token[row, keep * self.page_size :] = -1

    def extend(self, row: int, old_len: int, new_len: int) -> np.ndarray:
        """Maps positions `old_len … new_len − 1` and returns their slots; pages behind the window are given back.

        Raises:
          OutOfPages: too few are left.
          RuntimeError: the table has no room for so many tokens.
        """
        if new_len > self.req_to_token.shape[1]:
            raise RuntimeError(f"a request of {new_len} tokens exceeds the pool's {self.req_to_token.shape[1]}")
        self.trim(row, old_len)
        pages = self._pages_of[row]
        missing = -(-new_len // self.page_size) - len(pages)
        if missing > 0:
            while self.window is not None and missing > self.swa_pages.available and self.reclaim_window():
                pass
            has = self.pages.has(len(pages), missing)
            if not has or (self.window is not None and missing > self.swa_pages.available):
                raise OutOfPages(f"{missing} pages are needed, {self.pages.available} are free: fewer requests at "
                                 "once, or a larger pool")  # fmt: skip
            for index in range(len(pages), len(pages) + missing):
                page = self.pages.take(index)
                if self.window is not None:
                    self._swa_page[page] = swa = self.swa_pages.take()
                    self._map_window(page, swa)
                self._append(row, page)
        return self.req_to_token[row, old_len:new_len].copy()

    def trim(self, row: int, length: int) -> None:
        """Gives back the window's pages that no query from position `length` on sees."""
        if self.window is None:
            return
        first = min(max(0, length + 1 - self.window) // self.page_size, len(self._pages_of[row]))
        for index in range(self._first_in_window[row], first):
            self.leave_window(self._pages_of[row][index])
        self._begin_window(row, max(self._first_in_window[row], first))

    def _begin_window(self, row: int, first: int) -> None:
        self._first_in_window[row] = first
        if self.window is not None:
            self.trims_from[row] = (first + 1) * self.page_size + self.window - 1

    def adopt(self, row: int, pages: list[int]) -> None:
        """Begins an open request with pages that others have filled; the window ends with them."""
        length = len(pages) * self.page_size
        self._begin_window(row, max(0, length + 1 - self.window) // self.page_size if self.window else 0)
        for index, page in enumerate(pages):
            self.pages.share(page)
            if self.window is not None and index >= self._first_in_window[row]:
                self.enter_window(page)
            self._append(row, page)

    def enter_window(self, page: int) -> None:
        """One user more of a page's window keys, which must be there."""
        self.swa_pages.share(self._swa_page[page])

    def leave_window(self, page: int) -> None:
        """One user less of a page's window keys."""
        if self.swa_pages.give_back(self._swa_page[page]):
            self._swa_page[page] = 0
            self._map_window(page, None)

    def swa_page(self, page: int) -> int:
        """The window's page of a page of the full pool; 0 where it has none."""
        return self._swa_page[page]

    def take_changes(self) -> np.ndarray:
        """Pages mapped since the last call: int32 `[n, 4]` of (row, index of the page in the request, page, window page
        or 0), for tables on a device, which never reads unmapped ones.

        Pages that have been unmapped since are left out, so that no entry is named twice: a device writes them in any
        order.
        """
        changes, self._changes = self._changes, []
        latest = [
            (row, index, page, self._swa_page[page])
            for row, index, page in dict.fromkeys(changes)
            if self._pages_of[row][index : index + 1] == [page]
        ]
        return np.array(latest, np.int32).reshape(-1, 4)

    def _append(self, row: int, page: int) -> None:
        index, start = len(self._pages_of[row]), len(self._pages_of[row]) * self.page_size
        self._pages_of[row].append(page)
        self.req_to_token[row, start : start + self.page_size] = page * self.page_size + self._offsets
        self._changes.append((row, index, page))

    def _map_window(self, page: int, swa_page: int | None) -> None:
        slots = slice(page * self.page_size, (page + 1) * self.page_size)
        self.full_to_swa[slots] = -1 if swa_page is None else swa_page * self.page_size + self._offsets

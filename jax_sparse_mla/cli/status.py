"""What a command is doing, and for how long."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator


class Status:
    """What the command is doing, on standard error: one line that is drawn anew on a terminal, plain lines elsewhere.

    Attributes:
      on: whether it prints; off while text is streamed to the same terminal.
    """

    QUICK, EVERY = 1.0, 10.0  # seconds: quicker work has no line; between two plain lines of a bar

    def __init__(self):
        self.on, self._on_terminal = True, sys.stderr.isatty()
        self._works: list[threading.Event] = []  # each ends one; the line shows the latest
        self._last = 0.0

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Shows work that takes long, with the time that it has taken; `activity.show` of the command."""
        start, done = time.perf_counter(), threading.Event()

        def tick() -> None:
            if not done.wait(self.QUICK) and not self._on_terminal:
                self.line(f"{what} …")
            while self._on_terminal and not done.wait(0.25):
                if self._works[-1:] == [done]:
                    self._draw(f"{what} … {time.perf_counter() - start:.0f} s")

        self._works.append(done)
        (ticking := threading.Thread(target=tick, daemon=True)).start()
        try:
            yield
        finally:
            self._works.remove(done)
            done.set()
            ticking.join()
            if (seconds := time.perf_counter() - start) > self.QUICK:
                self.line(f"{what}: {seconds:.1f} s")

    def bar(self, done: int, total: int) -> None:
        """A bar of tokens; an empty one, of none, clears the line."""
        filled, count = 24 * done // max(total, 1), f"{done} of {total} tokens"
        if self._on_terminal:
            self._draw(f"{'█' * filled}{'░' * (24 - filled)} {count}" if total else "")
        elif total and time.perf_counter() - self._last > self.EVERY:
            self.line(count)

    def line(self, text: str) -> None:
        """A line that stays."""
        self._draw(text, end="\n")
        self._last = time.perf_counter()

    def _draw(self, text: str, end: str = "") -> None:
        if self.on:
            print(f"\r\x1b[K{text}" if self._on_terminal else text, end=end, file=sys.stderr, flush=True)

"""The output of `generate` while it works: what it does and for how long, text as it comes, true times and speeds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving.request import Request

STEPS = {ForwardMode.EXTEND: "prefill", ForwardMode.DECODE: "decode", ForwardMode.TARGET_VERIFY: "verify"}


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


class Progress:
    """Shows how far a run is, and times it; an engine's `on_step`.

    A step takes from its start, or the arrival of the tokens before its own, until its own arrive. Nothing is compiled
    meanwhile (`Engine.step`), so that compiling is a time apart.
    """

    def __init__(self, status: Status, requests: list[Request], verbose: bool = False):
        self._status, self._verbose = status, verbose
        # On one terminal, streamed text and the bar would overwrite each other.
        status.on = not (any(r.on_token for r in requests) and sys.stdout.isatty() and sys.stderr.isatty())
        self._start = self._arrived = time.perf_counter()
        self._last, self._first = self._start, None  # when the latest token came; the first, and compiling before it
        self._total = sum(len(r.prompt) + r.max_new_tokens for r in requests)
        self._prompts, self._read, self._new, self._compiled = sum(len(r.prompt) for r in requests), 0, 0, 0.0
        # By mode, tokens and seconds of the steps whose program had run before.
        self._warm = {mode: [0, 0.0] for mode in STEPS}

    def __call__(self, step: Any, requests: list[Request]) -> None:
        new = sum(len(r.output) for r in requests) - self._new
        tokens, seconds = new, step.arrived - max(step.started, self._arrived)
        if step.mode is ForwardMode.EXTEND:
            tokens = step.num_tokens
            self._read += tokens
        self._arrived, self._new = step.arrived, self._new + new
        self._compiled += step.compile_seconds
        if new:
            self._last = step.arrived
            self._first = self._first or (step.arrived, self._compiled)
        if tokens and not step.compile_seconds:
            self._warm[step.mode][0] += tokens
            self._warm[step.mode][1] += seconds
        if jax.process_index() == 0:
            if self._verbose:
                self._status.line(f"{STEPS[step.mode]:10} {tokens} tokens, {seconds:.3f} s")
            self._status.bar(min(self._read, self._prompts) + self._new, self._total)

    def print_summary(self) -> None:
        self._status.on = True
        self._status.bar(0, 0)
        if self._first is None:  # every request was cancelled
            return
        first, compiled = self._first
        print(f"prompts    {self._prompts} tokens; the first new token came after {first - self._start:.2f} s, "
              f"{compiled:.2f} s of them compiling")  # fmt: skip
        seconds = self._last - self._start - self._compiled
        print(f"speed      {self._new} new tokens in {seconds:.2f} s, prompts included: {self._new / seconds:.1f} "
              f"tokens/s; compiling took {self._compiled:.2f} s more")  # fmt: skip
        speeds = [f"{STEPS[mode]} {n / spent:.1f} tokens/s" for mode, (n, spent) in self._warm.items() if n]
        if speeds:
            print(f"           once compiled: {', '.join(speeds)}")


class Stream:
    """A request's `on_token`: prints its text as it is generated."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._printed = tokenizer, 0

    def __call__(self, request: Request, token: int) -> None:
        text = self._tokenizer.decode(request.output)
        if not request.finished:  # the last characters may still become others
            text = text.rstrip("�")
        print(text[self._printed :], end="\n" if request.finished else "", flush=True)
        self._printed = len(text)

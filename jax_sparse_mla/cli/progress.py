"""The output of `generate` while it serves: progress, text as it comes, speed."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax

from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving.request import Request


class Progress:
    """Prints the progress of a run, and its tokens per second with and without compilation; an engine's `on_step`."""

    WIDTH = 24

    def __init__(self, engine: Any, requests: list[Request]):
        self._engine = engine
        self._prints = jax.process_index() == 0
        self._total = sum(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
        self._start = self._last = time.perf_counter()
        self._compiled = engine.compile_seconds
        self._first: float | None = None  # when the first token was there
        self._seen: set[tuple] = set()
        # By mode, tokens and seconds of the steps whose bucket had run before and was compiled.
        self._warm = {mode: [0, 0.0] for mode in ForwardMode}
        self._read = self._count = 0

    def __call__(self, step: Any, requests: list[Request]) -> None:
        now, compiled = time.perf_counter(), self._engine.compile_seconds
        self._read += step.num_tokens if step.mode is ForwardMode.EXTEND else 0
        count = self._read + sum(max(0, len(r.output) - 1) for r in requests)
        tokens, seconds = count - self._count, now - self._last - (compiled - self._compiled)
        self._last, self._count, self._compiled = now, count, compiled
        if self._first is None and any(r.output for r in requests):
            self._first = now
        bucket = (step.mode, step.max_seq_len)
        if bucket in self._seen:
            self._warm[step.mode][0] += tokens
            self._warm[step.mode][1] += seconds
        self._seen.add(bucket)
        if not self._prints:
            return
        if sys.stderr.isatty():
            filled = round(self.WIDTH * count / max(self._total, 1))
            bar = "█" * filled + "░" * (self.WIDTH - filled)
            end = "\n" if count >= self._total else "\r"
            print(f"{bar} {count}/{self._total} tokens, {step.mode.value}   ", end=end, file=sys.stderr, flush=True)
        elif step.mode is ForwardMode.EXTEND or count == self._total:
            print(f"{step.mode.value:10} {count}/{self._total} tokens, {seconds:.2f} s", file=sys.stderr)

    def print_summary(self) -> None:
        seconds = self._last - self._start
        print(f"speed      {self._count / seconds:.1f} tokens/s in all ({seconds:.1f} s with compilation), the first "
              f"token after {(self._first or self._last) - self._start:.2f} s")  # fmt: skip
        for mode, (tokens, warm_seconds) in self._warm.items():
            if tokens:
                print(f"           {mode.value}: {tokens / warm_seconds:.1f} tokens/s once compiled")


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

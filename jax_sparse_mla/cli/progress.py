"""The output of `generate` while it works: text as it comes, true times and speeds."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax

from jax_sparse_mla.cli.status import Status
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving.request import Request

STEPS = {ForwardMode.EXTEND: "prefill", ForwardMode.DECODE: "decode", ForwardMode.TARGET_VERIFY: "verify"}


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

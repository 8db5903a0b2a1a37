"""Continuous batching, without a framework: which requests a step serves, which positions, in which bucket.

An engine repeats: `plan()` a step, run it, and `complete()` it with the tokens that it chose. A step may be planned
before those before it have been completed: their tokens are then still on the device, and −1 stands for them.

Prompts are read in chunks. Where some requests have prompt left and others decode, steps of both kinds take turns.
Where pages run out, new requests wait, and running ones are preempted, the latest first: their pages are given back,
and their tokens are read again once there is room.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from jax_sparse_mla.layers import gathers
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving.options import GATHERED, PAGED, EngineOptions
from jax_sparse_mla.serving.pages import OutOfPages, RequestPool
from jax_sparse_mla.serving.plan import StepPlan
from jax_sparse_mla.serving.prefix import Match, PrefixCache, page_digests
from jax_sparse_mla.serving.request import ABORTED, CANCELLED, FAILED, LENGTH, STOP, Logprob, Request

# The smallest width of a step's page tables, in tokens, but for `smallest_bucket`; wider ones are powers of two.
SMALLEST_BUCKET = 4096

# `Request.error` of a request whose step made logits that are not finite.
NOT_FINITE = "the model's logits are not finite: a weight or a cached key is NaN or too large"

log = logging.getLogger(__name__)

T = TypeVar("T")
OfEach = Sequence[Sequence[T]]  # of each request of a step, and each of its tokens


def _next_tokens(request: Request, count: int) -> list[int]:
    """A request's next tokens."""
    if request.unread and request.computed >= len(request.prompt):  # the last one is on its way
        taken = len(request.output) + request.unread
        return [request.forced[taken - 1] if taken <= len(request.forced) else -1]
    return request.tokens_at(request.computed, count)


@dataclasses.dataclass
class Counters:
    """Counts of events since the scheduler was made."""

    finished: int = 0  # requests
    cancelled: int = 0  # requests
    failed: int = 0  # requests that ended with a `Request.error`
    queued: int = 0  # requests that had a row but no pages when they could have begun
    preempted: int = 0  # times that a running request gave its pages back
    reused: int = 0  # prompt tokens that were not computed, because others had read them


class Scheduler:
    """Plans the steps of an engine.

    Args:
      spec, options: the model's, the engine's.
      vocab_size: tokens of requests are below it.
      reuse: whether the engine copies carried states, as `EngineOptions.reuse_points` needs.
      selecting: how many layers select, whose positions requests may ask for or give; 0 where they may not.

    Attributes:
      pool: the request tables. waiting, running: requests, in order. counters: what happened.
    """

    def __init__(
        self, spec: ModelSpec, options: EngineOptions, vocab_size: int, *, reuse: bool = False, selecting: int = 0
    ):
        self.spec, self.options, self.vocab_size, self.reuse = spec, options, vocab_size, reuse
        self.selecting = selecting
        self.counters = Counters()
        self.pool = self._new_pool()
        self._narrowest = smallest_bucket(spec)
        # Tokens that a prompt has, and that a request may come to; of all since there was none.
        self._longest_prompt = self._widest = 0
        self._served: dict[Request, None] = {}  # those whose end has not been told, in order
        self._raised: BaseException | None = None  # by a callback
        self._begin()

    @property
    def shares(self) -> tuple[Scheduler]:
        """Those of a mesh; here there is one."""
        return (self,)

    def _new_pool(self) -> RequestPool:
        spec, options = self.spec, self.options
        return RequestPool(
            max_requests=options.max_batch,
            max_len=options.max_len + options.speculative_steps,  # a request's last drafts may pass its end
            page_size=spec.page_size,
            window=spec.window,
            seed=options.seed,
            num_pages=options.num_pages,
            num_swa_pages=self._window_pages() if spec.windowed else None,
            devices=options.context_parallel,
        )

    def _begin(self) -> None:
        """Serves no requests, with a pool that has none."""
        spec, options = self.spec, self.options
        # Rows of carried states behind those of the requests.
        rows = range(options.max_batch, options.max_batch + options.reuse_points) if spec.windowed else ()
        self.prefixes = PrefixCache(self.pool, rows) if self.reuse and options.reuse_points else None
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        self._unread_steps = 0
        self._read_last = False  # whether the latest step read prompts
        self._replayed: dict[ForwardMode, bool] = {}  # whether the latest step of a mode replayed
        self._restored: list[tuple[int, int]] = []
        self._held_back: Request | None = None  # which has been counted as queued

    def _window_pages(self) -> int:
        """Enough for every step: the window and a page of each request, the chunk that one step adds, reuse points."""
        options, page, window = self.options, self.spec.page_size, self.spec.window
        of_request = -(-(window - 1) // page) + 2 + -(-options.speculative_steps // page)
        return 2 + options.max_batch * of_request + -(-options.chunk_size // page) + options.reuse_points

    # Requests come and go.

    def check(self, request: Request, name: str = "the request") -> None:
        """Refuses what cannot be served.

        Raises:
          ValueError: a request that is empty, not new, longer than `max_len` or than the pool, or has tokens that the
            model does not know; the message begins with `name`.
        """
        prompt, new = request.prompt, request.max_new_tokens
        if request.submitted:
            raise ValueError(f"{name} has been submitted before: make a Request for each time that it is served")
        if request.error is not None or (request.row is None and (request.output or request.computed)):
            raise ValueError(f"{name} has been served before")
        if not prompt or new < 1:
            raise ValueError(f"{name} must have at least one token and ask for one, got {len(prompt)} and {new}")
        if len(prompt) + new > self.options.max_len:
            raise ValueError(
                f"{name} has {len(prompt)} tokens and asks for {new}: more than max_len {self.options.max_len}"
            )
        needed = self._pages_for(len(prompt) + new + self.options.speculative_steps)
        if needed > self.pool.most_pages:
            raise ValueError(f"{name} needs {needed} pages: more than the pool's {self.pool.most_pages}")
        tokens = (*prompt, *request.forced) if request.forced else prompt
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ValueError(f"{name} has tokens out of the model's vocabulary of {self.vocab_size}")
        if request.asks_more:
            self._check_asked(request, name)
        if request.return_selected or request.replay is not None:
            self._check_selected(request, name)

    def _check_asked(self, request: Request, name: str) -> None:
        hook = self.options.logits_hook
        if self.options.batch_invariant:
            raise ValueError(f"{name} has top_logprobs or adjust, which an engine with batch_invariant does not serve")
        if (wanted := 0 if hook is None else hook.size) != (got := len(request.adjust)) and got:
            raise ValueError(f"{name} has {got} parameters in adjust: the engine's logits_hook takes {wanted}")
        if request.adjust and request.row is not None:
            raise ValueError(f"{name} has adjust, and what an imported request has generated is not counted")

    def _check_selected(self, request: Request, name: str) -> None:
        given = "return_selected" if request.replay is None else "replay"
        if not self.selecting:
            raise ValueError(f"{name} has {given}, and this engine's layers return no selected positions")
        if request.row is not None:
            raise ValueError(f"{name} has {given}, and what an imported request has attended to is not known")
        if request.replay is not None:
            layers, _, width = request.replay.shape
            if (layers, width) != (self.selecting, self.spec.index_width):
                wanted = f"[{self.selecting}, tokens, {self.spec.index_width}]"
                raise ValueError(f"{name} has a replay of shape {list(request.replay.shape)}: it must be {wanted}")

    def submit(self, request: Request) -> None:
        """Takes a new request, or one that is in the tables already (a hand-over); raises what `check` raises."""
        self.check(request)
        if request.row is not None and self._pages_for(request.computed) > len(self.pool.pages_of(request.row)):
            raise ValueError("the request's pages are not kept any more: import it again")
        # The last token is not read; the last drafts may pass it.
        whole = len(request.prompt) + request.max_new_tokens - 1 + self.options.speculative_steps
        longest, widest = (0, 0) if self.idle else (self._longest_prompt, self._widest)
        self._longest_prompt, self._widest = max(longest, len(request.prompt)), max(widest, whole)
        request.submitted, request.ended = True, None
        if request.row is None:
            self.waiting.append(request)
        else:
            self.running.append(request)
        self._served[request] = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running)

    def abort(self) -> None:
        """Drops all requests and gives everything back.

        Prefixes are forgotten: a step that was planned and did not run has not written its pages.
        """
        for request in (*self.running, *self.waiting):
            request.submitted = False
        for request in list(self.running):
            self._close(request)
        self.waiting.clear()
        if self.prefixes:
            self.prefixes.clear()
        self._unread_steps = 0
        self._end_all(ABORTED)

    def reset(self, error: str) -> None:
        """Drops all requests, in whatever state an exception has left the tables: these begin anew.

        Each request that is not finished has `error` then. It may be called again if it was interrupted.
        """
        self._raised = None
        for request in dict.fromkeys((*self.running, *self.waiting, *self._served)):
            if not request.finished:
                request.error = error
                self.counters.failed += 1
            for of_tokens in (request.margins, request.logprobs):
                del of_tokens[len(request.output) :]  # of a token that was just coming
            request.submitted, request.row, request.unread, request.digests = False, None, 0, None
        vars(self.pool).update(vars(self._new_pool()))  # the same object, for whoever holds it
        self._begin()
        self._end_all(FAILED)

    def raised(self) -> BaseException | None:
        """The first that a callback has raised since the last call."""
        raised, self._raised = self._raised, None
        return raised

    def _end_all(self, how: str) -> None:
        for request in list(self._served):
            self._end(request, how)

    def _end(self, request: Request, how: str = LENGTH) -> None:
        """Tells the end of a request: so, unless it has finished otherwise."""
        if request.error is not None:
            how = FAILED
        elif request.cancelled:
            how = CANCELLED
        elif request.finished:
            how = LENGTH if len(request.output) >= request.max_new_tokens else STOP
            how = STOP if request.output[-1] in request.eos_token_ids else how
        try:
            request.end(how)
        except BaseException as error:
            self._raised = self._raised or error
        self._served.pop(request, None)

    # Steps.

    def plan(self, drafts: int = 0) -> StepPlan | None:
        """The next step; None if there is nothing to run until a step that runs is completed, or a request comes.

        Steps that read prompts and steps that decode take turns where there are both. A step that would decode becomes
        a TARGET_VERIFY step of so many drafts for each request.
        """
        self._drop_cancelled()
        self._trim()
        self._admit()
        while True:
            running = len(self.running)
            mode, wanted = self._wanted(drafts)
            if served := self._with_pages(wanted):
                return self._new_plan(mode, served)
            if self._unread_steps or self.idle:
                return None
            if len(self.running) == running:  # else those that it would have served are preempted: serve others
                raise RuntimeError("the scheduler has requests, but no step for them")

    def _wanted(self, drafts: int) -> tuple[ForwardMode, list[tuple[Request, int]]]:
        """The mode of the next step, and so many positions of each request.

        After a step that read prompts, those that can decode do so: a prompt, and prompts without end, hold nobody up
        for longer than a chunk.
        """
        mode, count = (ForwardMode.TARGET_VERIFY, drafts + 1) if drafts else (ForwardMode.DECODE, 1)
        ready = [r for r in self.running if not r.in_prefill and len(r.output) + r.unread < r.max_new_tokens]
        prefill = [r for r in self.running if r.in_prefill]
        if prefill and not (ready and self._read_last):
            return ForwardMode.EXTEND, self._chunks(self._alike(ForwardMode.EXTEND, prefill))
        return mode, [(request, count) for request in self._alike(mode, ready)]

    def _alike(self, mode: ForwardMode, requests: list[Request]) -> list[Request]:
        """Those that replay or those that select, which take turns in the steps of a mode where there are both."""
        replays = {request.replays for request in requests}
        turn = not self._replayed.get(mode, False) if len(replays) > 1 else True in replays
        return [request for request in requests if request.replays == turn]

    def complete(
        self, plan: StepPlan, tokens: OfEach[int], margins: OfEach[float], logprobs: OfEach[Logprob] | None = None
    ) -> list[Request]:
        """Takes the tokens that a step chose, in the order in which steps were planned.

        Args:
          plan: the step.
          tokens, margins: for each of its requests the tokens that it chose, none where it only read. In TARGET_VERIFY
            these are the accepted drafts and the token behind them.
          logprobs: as these, where the step has them.

        Returns the requests that the step finished; their rows and pages are free again.

        A NaN margin says that the token's logits are not finite: it ends the request with an error.

        Raises:
          BaseException: the first that a callback raised, once all tokens are taken; where it was an `on_token`, its
            request is cancelled.
        """
        finished = self.take(plan, tokens, margins, logprobs)
        if (raised := self.raised()) is not None:
            raise raised
        return finished

    def take(
        self,
        plan: StepPlan,
        tokens: OfEach[int],
        margins: OfEach[float],
        logprobs: OfEach[Logprob] | None = None,
        selected: np.ndarray | None = None,
    ) -> list[Request]:
        """As `complete`, but keeps what a callback raised for `raised`. What it raises has left tables unfinished.

        selected: of TARGET_VERIFY, int32 `[layers that select, rows, k]`, what its rows attended to.
        """
        self._unread_steps = max(0, self._unread_steps - 1)  # a callback of another share may have dropped all
        verify, finished = plan.mode is ForwardMode.TARGET_VERIFY, []
        for i, request in enumerate(plan.requests):
            if not plan.samples[i]:
                continue
            request.unread -= 1
            if request.row is None:  # it ended while this step ran
                continue
            start = len(request.output)
            for j, (token, margin) in enumerate(zip(tokens[i], margins[i])):
                if math.isnan(margin):
                    self._fail(request)
                    break
                request.take(token, margin, logprobs and logprobs[i][j])
                if selected is not None and request.return_selected:  # of rejected drafts nobody asks
                    row = i * (plan.drafts + 1) + j
                    request.attend(selected[:, row : row + 1].copy())
                try:
                    request.tell()
                except BaseException as error:
                    request.cancel()
                    self._raised = self._raised or error
                # A forced token in place of a draft: the tokens behind it were chosen after the draft.
                if request.row is None or request.finished or request.output[-1] != token:
                    break
            if request.row is None:  # the callback dropped all requests
                continue
            if verify:
                request.computed = int(plan.starts[i]) + len(request.output) - start
                self.pool.truncate(request.row, request.computed)
            if request.finished:
                finished.append(request)
                self._close(request)
                if request.error is None:
                    self.counters.cancelled += request.cancelled
                    self.counters.finished += not request.cancelled
                self._end(request)
        return finished

    def _fail(self, request: Request) -> None:
        """Ends a request whose logits are not finite; nobody shall reuse what it has cached."""
        request.error = NOT_FINITE
        self.counters.failed += 1
        log.error("a request of %d tokens ends: %s", len(request.tokens), NOT_FINITE)
        if self.prefixes:
            self.prefixes.forget(self.pool.pages_of(request.row))

    def _trim(self) -> None:
        for request in self.running:
            if request.computed >= self.pool.trims_from[request.row]:
                self.pool.trim(request.row, request.computed)

    def _drop_cancelled(self) -> None:
        running, waiting = ([r for r in requests if r.cancelled] for requests in (self.running, self.waiting))
        for request in running:
            self._close(request)
        for request in waiting:
            self.waiting.remove(request)
        self.counters.cancelled += len(running) + len(waiting)
        for request in running + waiting:  # a callback may drop all requests
            self._end(request)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.options.max_batch and self.pool.free_rows:
            request = self.waiting[0]
            # Requests in prefill will take pages for the tokens that they have not read.
            turns = self.pool.turns
            reserved = sum(turns(self._missing_pages(r)) for r in self.running if r.in_prefill)
            length = len(request.prompt) + len(request.output)
            match, alone = None, request.return_selected or request.replay is not None
            if self.prefixes and not alone:  # what others have selected is not known, or not what it replays
                if request.digests is None:  # less its last token, which must be computed
                    # What it has generated is read again where a step must count it.
                    known = request.prompt if request.adjust else request.tokens
                    request.digests = page_digests(known[:-1], self.spec.page_size)
                match = self.prefixes.match(request.digests)
            needed = turns(self._pages_for(length + 1) - (len(match.pages) if match else 0))
            if request.reread:  # a page more for each that runs: else it would soon be preempted again
                needed += turns(1) * len(self.running)
            # Idle pages that the request reuses are no longer available to it.
            reused = turns(sum(map(self.pool.pages.is_idle, match.pages))) if match else 0
            if self.running and reserved + needed + reused > self.pool.pages.available:
                if self._held_back is not request:
                    self._held_back = request
                    self.counters.queued += 1
                    log.info("out of pages: a request of %d tokens waits, %d run", length, len(self.running))
                return
            request.row = self.pool.open()
            request.computed, request.cuts = 0, ()
            if match:
                self._adopt(request, match)
            self.running.append(request)  # before it leaves the other: an interrupt must find it
            self.waiting.popleft()

    def _adopt(self, request: Request, match: Match) -> None:
        page = self.spec.page_size
        self.pool.adopt(request.row, match.pages)
        request.computed = len(match.pages) * page
        self.counters.reused += request.computed
        if match.state is not None:
            self._restored.append((match.state, request.row))
        if self.spec.windowed:
            ends = match.known, len(request.digests) * page
            request.cuts = tuple(end for end in ends if end > request.computed)

    def _chunks(self, prefill: list[Request]) -> list[tuple[Request, int]]:
        wanted, budget = [], self.options.chunk_size
        for request in prefill[:1] if self.options.batch_invariant else prefill:
            end = min((cut for cut in request.cuts if cut > request.computed), default=request.prefill_len)
            end = min(end, request.attended) if request.replays else end
            count = min(end - request.computed, budget)
            if count:
                wanted.append((request, count))
                budget -= count
        return wanted

    def _with_pages(self, wanted: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Maps the positions; preempts where pages run out. Empty if that must wait for steps that run."""
        served, page = [], self.spec.page_size
        for request, count in wanted:
            if request.row is None:  # preempted for one before it
                continue
            computed = request.computed
            while request.row is not None and computed + count > len(self.pool.pages_of(request.row)) * page:
                try:
                    self.pool.extend(request.row, computed, computed + count)
                except OutOfPages:
                    if self._unread_steps:  # what a step chose must be known before it is read again
                        return []
                    victim = self.running[-1]
                    served = [(r, n) for r, n in served if r is not victim]
                    self._preempt(victim)
            if request.row is not None:
                served.append((request, count))
        return served

    def _preempt(self, request: Request) -> None:
        self.waiting.appendleft(request)
        self._close(request)
        request.computed, request.reread = 0, len(request.tokens)
        self.counters.preempted += 1
        log.warning("out of pages: a request of %d tokens is preempted, %d run",
                    len(request.tokens), len(self.running))  # fmt: skip

    def _new_plan(self, mode: ForwardMode, served: list[tuple[Request, int]]) -> StepPlan:
        requests = [request for request, _ in served]
        rows = np.array([request.row for request in requests], np.int32)
        starts = np.array([request.computed for request in requests], np.int32)
        counts = np.array([count for _, count in served], np.int32)
        tokens, samples, kept, replays = [], [], [], requests[0].replays
        for request, count in served:
            if mode is ForwardMode.TARGET_VERIFY:
                tokens += _next_tokens(request, 1) + [0] * (count - 1)
            else:
                tokens += _next_tokens(request, count)
                request.computed += count
            if mode is ForwardMode.EXTEND:
                kept += self._remember(request)
            samples.append(mode is not ForwardMode.EXTEND or not request.in_prefill)
            request.unread += samples[-1]
        restored, self._restored = self._restored, []
        self._unread_steps += 1
        self._read_last, self._replayed[mode] = mode is ForwardMode.EXTEND, replays
        return StepPlan(
            mode=mode,
            requests=requests,
            rows=rows,
            starts=starts,
            counts=counts,
            tokens=np.array(tokens, np.int32),
            samples=np.array(samples),
            max_seq_len=self._bucket(mode, int((starts + counts).max())),
            mapped=self.pool.take_changes(),
            restored=restored,
            kept=kept,
            replays=replays,
        )

    def _remember(self, request: Request) -> list[tuple[int, int]]:
        """Makes the pages known that the planned chunk fills; returns the states to keep after it."""
        if self.prefixes is None:
            return []
        digests, page = request.digests or [], self.spec.page_size
        filled = min(request.computed // page, len(digests))
        pages = self.pool.pages_of(request.row)
        for digest, number in zip(digests[:filled], pages):
            self.prefixes.add(digest, number)
        if request.computed not in request.cuts:
            return []
        state = self.prefixes.add_point(digests[filled - 1], pages[filled - 1])
        return [] if state is None else [(request.row, state)]

    def _close(self, request: Request) -> None:
        self.running.remove(request)
        self._restored = [(state, row) for state, row in self._restored if row != request.row]
        request.digests = None
        self.pool.close(request.row)
        request.row = None

    def _pages_for(self, length: int) -> int:
        return -(-length // self.spec.page_size)

    def _missing_pages(self, request: Request) -> int:
        return max(0, self._pages_for(request.prefill_len + 1) - len(self.pool.pages_of(request.row)))

    def _bucket(self, mode: ForwardMode, max_len: int) -> int:
        """The table width for `max_len` tokens: a power of two, so that few widths compile."""
        if self.options.batch_invariant:
            return self.pool.req_to_token.shape[1]
        # By what requests may come to in such steps, so that their growth compiles nothing.
        most = self._longest_prompt if mode is ForwardMode.EXTEND else self._widest
        least = self._narrowest if most <= self._narrowest else SMALLEST_BUCKET
        return min(max(least, power_of_two(max_len)), self.pool.req_to_token.shape[1])


def smallest_bucket(spec: ModelSpec) -> int:
    """The smallest width of a step's page tables, in tokens: where an indexer selects all of them, layers compute no
    logits and no top-k."""
    tokens = min((spec.index_topk * max(kind.ratio, 1) for kind in spec.kinds if kind.selects == "own"), default=0)
    return min(tokens, SMALLEST_BUCKET) if 1024 <= tokens == power_of_two(tokens) else SMALLEST_BUCKET


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def check_all(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Refuses requests that cannot be served together.

    Raises:
      ValueError: see `Scheduler.check`, whose message begins with "request" and its number; or one is named twice.
    """
    first: dict[int, int] = {}
    for i, request in enumerate(requests):
        scheduler.check(request, f"request {i}")
        if (before := first.setdefault(id(request), i)) != i:
            raise ValueError(f"request {i} is request {before} again: make a Request for each time that it is served")


def prefill_backend(spec: ModelSpec, options: EngineOptions) -> str:
    """The prefill backend of the options, or what the plan of a chunk says."""
    return options.prefill_backend or (GATHERED if gathers(spec, options.chunk_size) else PAGED)

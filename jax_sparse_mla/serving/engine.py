"""Serves requests with a model in JAX: a step is one program, and the host reads its tokens while the next
ones run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_sparse_mla import activity
from jax_sparse_mla.attention.machine import override_of
from jax_sparse_mla.metadata import ForwardMode, RequestTables
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving import kept_programs
from jax_sparse_mla.serving import step as steps
from jax_sparse_mla.serving.deepseek_v32 import attends_expanded
from jax_sparse_mla.serving.dspark import BlockDraft
from jax_sparse_mla.serving.memory import check_memory, device_memory, size_of
from jax_sparse_mla.serving.model import Model, Params
from jax_sparse_mla.serving.native import begin_to_load
from jax_sparse_mla.serving.plan import TracedStep
from jax_sparse_mla.serving.request import CallbackError, Logprob, Request
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import (
    GATHERED,
    EngineOptions,
    Scheduler,
    StepPlan,
    check_all,
    power_of_two,
    prefill_backend,
)
from jax_sparse_mla.serving.step import Program, Result, State

# Steps that are started before the tokens of one are read. With one, a GPU waits whenever the host is late by as little
# as a step takes; a request that ends by a token of its own has so many steps more, whose results are dropped.
STEPS_AHEAD = 2
# The rows of the smallest program that reads prompts; larger ones are powers of two, and `chunk_size`.
SMALLEST_CHUNK = 16

DROPPED = "a step of the engine was interrupted or failed, and all of its requests were dropped"

_copy_states = jax.jit(steps.copy_states, donate_argnums=0)
_map_pages = jax.jit(steps.map_pages, donate_argnums=0, static_argnums=2)


class Engine:
    """Serves requests on one device.

    `submit` and `step` are for a server's loop, `run` serves a list. They are not thread-safe: a server calls them from
    one thread. An exception within a step, KeyboardInterrupt included, drops all requests; the engine can go on with
    others then. What a request's callback raises is none: `step` raises `request.CallbackError` from it.

    Args:
      model, params, options: the served model; see `EngineOptions`.

    Raises:
      ValueError: drafts or reuse of prefixes for a model whose layers carry states (`Model.is_recurrent`);
        `batch_invariant` for one with pools of index keys; `context_parallel` without a mesh; more caches than the
        device has room for.

    Attributes:
      scheduler: the requests, their pages, and counters of what happened.
      drafts: draft tokens of a round, at most `options.speculative_steps`; 0 decodes plainly. It may be set between
        steps. A draft layer or drafter does not read what is decoded plainly: fewer drafts may be accepted afterwards.
      propose: replaces drafts.
      accepted: how many rounds of a request kept 0 … `drafts` drafts. In the round that ends a request only the drafts
        that it still needed count.
      ahead: whether a thread compiles the program of decoding beside that of its prompts; not over a mesh. The thread
        does not know settings of JAX that a `with` statement has made.
      prefill_backend: the backend of prefill steps, one of PREFILL_BACKENDS.
      routes: `{program: (phase, backend)}`, the attention that each program calls, read from the program.
      compile_seconds: spent on compiling programs, or on loading them.
      trace: with `options.trace`, the steps of the latest `run`.
    """

    mesh: Mesh | None = None

    def __init__(self, model: Model, params: Params, options: EngineOptions):
        is_recurrent = getattr(model, "is_recurrent", False)  # models of other projects may not say it
        for name in ("speculative_steps", "reuse_points"):
            if is_recurrent and (value := getattr(options, name)):
                raise ValueError(
                    f"{name} must be 0 for {model.spec.name}, got {value}: its linear attention carries a state for "
                    "each request that cannot go back to an earlier token"
                )
        if self.mesh is None and (devices := options.context_parallel) > 1:
            raise ValueError(f"context_parallel must be 1 for an engine of one device, got {devices}: it needs a mesh")
        gathers = prefill_backend(model.spec, options) == GATHERED
        begin_to_load(model.spec if gathers else None)
        self.model, self.options = model, options
        self.spec: ModelSpec = model.spec
        if options.batch_invariant and self.spec.kind().pool > 1:
            raise ValueError(f"batch_invariant serves no pools of index keys, which {self.spec.name} has")
        self.scheduler = self._new_scheduler()
        self.drafts, self.propose = options.speculative_steps, None
        self.ahead, self._coming = False, {}
        self.accepted: collections.Counter[int] = collections.Counter()
        self.prefill_backend = prefill_backend(self.spec, options)
        self.routes: dict[Program, frozenset[tuple[str, str]]] = {}
        self.trace: list[TracedStep] = []
        self.compile_seconds = 0.0
        self.state, self.params = self._place(params)
        # A step that runs, and on the device its result, and the positions that it attends to.
        self._unread: collections.deque[tuple[StepPlan, Program, jax.Array, jax.Array | None]] = collections.deque()
        self._programs: dict[tuple, tuple[Program, Any]] = {}
        # The step before, and on the device the array of one that follows it.
        self._latest: tuple[Program, StepPlan, jax.Array | None] | None = None
        self._held: StepPlan | None = None  # waits for its program
        self._in_step = self._in_abort = False  # also after an exception has left one in its middle

    @property
    def drafts(self) -> int:
        return self._drafts

    @drafts.setter
    def drafts(self, count: int) -> None:
        if not 0 <= count <= self.options.speculative_steps:
            raise ValueError(f"drafts must be from 0 to {self.options.speculative_steps}, got {count}")
        self._drafts = count

    @property
    def drafter(self) -> str:
        """The maker of drafts, in words."""
        draft = self.state.draft
        return "first layer" if draft is None else "block drafter" if isinstance(draft, BlockDraft) else "draft layer"

    def layer_cache(self, layer: int) -> Any:
        """The view of one layer's caches."""
        return self.model.layer_cache(self.state.caches, layer)

    def set_layer_cache(self, layer: int, cache: Any) -> None:
        """Puts what `layer_cache` gave back, updated."""
        caches = self.model.with_layer_cache(self.state.caches, layer, cache)
        self.state = dataclasses.replace(self.state, caches=caches)

    def wait(self) -> None:
        """Reads the tokens of all steps that run."""
        self._refuse_within("wait", Engine._whole)
        while self._unread:
            self._whole(self._read)
            self._raise_of_callbacks()

    def with_options(self, **changes: Any) -> Engine:
        """An engine of the same model with other options."""
        return Engine(self.model, self.params, dataclasses.replace(self.options, **changes))

    def _new_scheduler(self) -> Scheduler:
        options = self.options
        selecting = len(getattr(self.model, "selecting_layers", ()))  # models of other projects may not say it
        return Scheduler(self.spec, options, self.model.vocab_size, reuse=options.reuse_points > 0, selecting=selecting)

    def _place(self, params: Params) -> tuple[State, Params]:
        """A new state and the parameters, committed to the device, as what a step returns is.

        A CPU's compiler takes seconds for each layer: there a program loops over layers of the same kinds, if the copy
        of their weights fits. Models of other projects may not loop.
        """
        needed = size_of((params, jax.eval_shape(self._new_state, params)))
        check_memory("weights and caches need", needed)
        device = jax.local_devices()[0]
        loops = device.platform == "cpu" and hasattr(self.model, "looped")
        if loops and needed + size_of(params) <= device_memory():
            params = self.model.looped(params)
        return jax.device_put((self._new_state(params), params), device)

    def _new_state(self, params: Params) -> State:
        return steps.empty_state(self.model, params, self.options, self.scheduler.pool)

    # Requests.

    def submit(self, request: Request) -> None:
        """Takes a request, which steps serve; raises what `Scheduler.check` raises. A callback may call it."""
        self._mend()
        self.scheduler.submit(request)

    def run(
        self, requests: Iterable[Request], on_step: Callable[[StepPlan, list[Request]], None] = lambda *_: None
    ) -> None:
        """Serves new requests to their end; their outputs are filled in.

        `on_step` is called with each step when its tokens have been read, and all requests.

        Raises:
          ValueError: one cannot be served. None has been served then.
          RuntimeError: it was called from a callback.
        """
        self._refuse_within("run", Engine._whole, Engine.run)
        self._mend()
        requests = list(requests)
        check_all(self.scheduler, requests)
        self.trace = []
        try:
            for request in requests:
                self.scheduler.submit(request)
            while not self.idle:
                if (plan := self.step()) is not None:
                    on_step(plan, requests)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Drops all requests; their outputs stay as far as they were read. A callback may call it."""
        self._mend()
        self._in_abort = True
        self._unread.clear()
        self._latest = self._held = None
        self.scheduler.abort()
        self._in_abort = False

    def step(self) -> StepPlan | None:
        """Starts the next step, and reads the tokens of the one that is `STEPS_AHEAD` before it.

        A step whose program must be compiled first waits until the tokens of those that run have been read: nobody
        waits for a token that is there, and a step's time holds no compilation.

        Returns the step whose tokens were read, None if none was.

        What callbacks raise comes from here when all tokens of the step have been taken: the first as the cause of a
        CallbackError, or as it is where it is no Exception. The request of an `on_token` is cancelled then, and all
        others go on. Any other exception, an interrupt at any place or a step that fails on the device, drops
        all requests and says so in their `error`. Their pages are free then, and the engine serves others.

        Raises:
          RuntimeError: it was called from an `on_token`.
        """
        if self._in_step:
            self._refuse_within("step", Engine._whole)
        self._mend()
        plan = self._whole(self._step)
        self._raise_of_callbacks()
        return plan

    def _raise_of_callbacks(self) -> None:
        if isinstance(raised := self.scheduler.raised(), Exception):
            raise CallbackError(f"a request's callback raised {type(raised).__name__}: {raised}") from raised
        if raised is not None:
            raise raised

    def _whole(self, part: Callable[[], StepPlan | None]) -> StepPlan | None:
        """Runs a part of a step. Where it is left in its middle, nothing of it is kept."""
        try:
            self._in_step = True
            result = part()
            if self._in_abort:  # which a callback began
                self._recover()
            self._in_step = False
        except BaseException:
            self._recover()
            raise
        return result

    def _refuse_within(self, name: str, *callers: Callable) -> None:
        if self._is_within(sys._getframe(2), *callers):
            raise RuntimeError(f"Engine.{name} was called from a callback of the same engine: call it between steps")

    def _is_within(self, frame: FrameType | None, *methods: Callable) -> bool:
        """Whether one of the methods has called the frame. An exception may have left any flag as it was."""
        codes = [method.__code__ for method in methods]
        while frame is not None and not (frame.f_code in codes and frame.f_locals["self"] is self):
            frame = frame.f_back
        return frame is not None

    def _mend(self) -> None:
        """Drops what an exception has left in the middle of a step or of an abort."""
        if (self._in_step or self._in_abort) and not self._is_within(sys._getframe(1), Engine._whole):
            self._recover()

    def _recover(self) -> None:
        """Drops all requests, whatever state they and the tables are in; may itself be interrupted and begun again."""
        self._in_step = True
        self._unread.clear()
        self._latest = self._held = None
        self.scheduler.reset(DROPPED)
        if not _is_sound(self.state):
            self.state = None  # not beside the new one
            self.state, self.params = self._place(self.params)
        self._in_step = self._in_abort = False

    def _step(self) -> StepPlan | None:
        """Returns the step that was read."""
        # It has decoded plainly until now, or the host must know how many drafts were accepted.
        if self._unread and (self.drafts or self._unread[-1][0].drafts):
            return self._read()
        plan, self._held = self._held or self._plan(), None
        if plan is not None:
            key = self._bucket(plan)
            if self._unread and key not in self._programs:
                self._held = plan
                return self._read()
            self._start(plan, key)
        # Where it drafts, the next round begins where this one ends: the host must know first.
        running = STEPS_AHEAD if plan is not None and not (self.drafts or plan.drafts) else 0
        return self._read() if len(self._unread) > running else None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and not self._unread and self._held is None

    # Steps.

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(drafts=self.drafts)
        if plan is not None and self.options.trace:  # by the tables as they are now; its start adds what it computes
            self.trace.append(self._traced(plan))
        return plan

    def _start(self, plan: StepPlan, key: tuple) -> None:
        if plan.restored:
            self.copy_states(plan.restored)
        if key not in self._programs:
            start = time.perf_counter()
            kind = "prefill" if plan.mode is ForwardMode.EXTEND else plan.mode.value
            with activity.show(f"compiling {kind} steps of {key[2]} rows"):
                coming = self._coming.pop(key, None)
                self._programs[key] = coming.result() if coming else self._compile(*key, then=self._decoding(plan))
            plan.compile_seconds = time.perf_counter() - start
            self.compile_seconds += plan.compile_seconds
        program, call = self._programs[key]
        if len(plan.mapped) > program.num_changes:
            self._map_ahead(plan, program.num_changes)
        with jax.transfer_guard("allow"):  # `device_put` of the array would cost the host as much as the call
            if (packed := self._counted_on(program, plan)) is None:
                packed = self._pack(program, plan)
            plan.started = time.perf_counter()
            replayed = [self._replayed(program, plan)] if plan.replays else []
            self.state, result, following, layers, logits, selected = call(self.params, self.state, packed, *replayed)
            result.copy_to_host_async()
            if selected is not None:
                selected.copy_to_host_async()
        self._latest = program, plan, following
        self._unread.append((plan, program, result, selected))
        if plan.kept:
            self.copy_states(plan.kept)
        if self.options.trace:
            self.trace[-1].layers, self.trace[-1].logits = layers, logits

    def _counted_on(self, program: Program, plan: StepPlan) -> jax.Array | None:
        """The step's array where the device has it already: a copy to it costs the host some 50 us."""
        latest_program, latest, following = self._latest or (None, None, None)
        return following if program is latest_program and plan.follows(latest) else None

    def _pack(self, program: Program, plan: StepPlan | None) -> np.ndarray:
        """The host's array for a step; without a plan all is padding."""
        return steps.pack(program, plan, self.options.max_batch, self._proposals(plan))

    def _replayed(self, program: Program, plan: StepPlan | None) -> Any:
        """int32 `[layers that select, rows, k]`, what a step's rows attend to; without a plan its shape."""
        if plan is None:
            return jax.ShapeDtypeStruct((self.scheduler.selecting, program.num_rows, self.spec.index_width), np.int32)
        return plan.replayed(program.num_rows)

    def _traced(self, plan: StepPlan) -> TracedStep:
        pool, (_, num_requests, num_rows, *_) = self.scheduler.pool, self._bucket(plan)
        full_to_swa = None if not self.spec.windowed else pool.full_to_swa.copy()
        return TracedStep(
            plan=plan,
            batch=plan.forward_batch(pool, num_rows=num_rows, num_requests=num_requests),
            tables=RequestTables(req_to_token=pool.req_to_token.copy(), full_to_swa=full_to_swa),
            requests=np.repeat([id(request) for request in plan.requests], plan.counts),
            positions=plan.positions(),
        )

    def _read(self) -> StepPlan:
        """Waits for the oldest step that runs, takes its tokens, and returns it."""
        plan, program, packed, selected = self._unread.popleft()
        with jax.transfer_guard("allow"):
            packed = np.asarray(packed)
            if selected is not None:
                selected = np.asarray(selected)
        verified = {"selected": selected} if selected is not None and plan.mode is ForwardMode.TARGET_VERIFY else {}
        if selected is not None and not verified:
            for part, rows in zip(plan.parts, np.split(selected, len(plan.parts), axis=1)):
                if part:
                    _take_selected(part, rows)
        result = self._unpack(program, plan, packed)
        plan.arrived = time.perf_counter()
        if result.overflow:
            raise RuntimeError(f"a step of {plan.mode} overflowed its bucket of {program.max_seq_len} tokens")
        before = [len(request.output) for request in plan.requests]
        ends = (result.accepted + 1).tolist()
        tokens = [row[:end] for row, end in zip(result.tokens.tolist(), ends)]
        margins = [row[:end] for row, end in zip(result.margins.tolist(), ends)]
        logprobs = None if result.logprobs is None else _logprobs(plan, result, ends)
        self.scheduler.take(plan, tokens, margins, logprobs, **verified)
        if plan.mode is ForwardMode.TARGET_VERIFY:
            kept = (len(request.output) - start - 1 for request, start in zip(plan.requests, before))
            self.accepted.update(count for count in kept if count >= 0)
        return plan

    def _unpack(self, program: Program, plan: StepPlan, packed: np.ndarray) -> Result:
        return steps.unpack_result(program, packed)

    def _proposals(self, plan: StepPlan | None) -> np.ndarray | None:
        if self.propose is None or plan is None or plan.mode is not ForwardMode.TARGET_VERIFY:
            return None
        return np.array([[self.propose(r, i) for i in range(plan.drafts)] for r in plan.requests], np.int32)

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        caches = self.state.caches
        for pair in pairs:  # one at a time: their number would select a compilation
            caches = _copy_states(caches, jax.device_put(np.array([pair], np.int32)))
        self.state = dataclasses.replace(self.state, caches=caches)

    def _map_ahead(self, plan: StepPlan, room: int) -> None:
        """Maps pages of a step that its array has no room for."""
        rows = self.options.max_batch
        of_shares = [steps.changes_ahead(part, room, rows) if part else () for part in plan.parts]
        for changes in itertools.zip_longest(*of_shares, fillvalue=steps.no_changes(steps.PAGES_AHEAD, rows)):
            self.map_pages(*changes)

    def map_pages(self, *of_shares: np.ndarray) -> None:
        """Maps pages before a step: int32 `[PAGES_AHEAD, 4]` of each share, padded with rows past the last."""
        tables = _map_pages(self.state.tables, jax.device_put(*of_shares), self.spec.page_size)
        self.state = dataclasses.replace(self.state, tables=tables)

    # Programs.

    def compile(self, keys: Iterable[tuple], threads: int = 1) -> None:
        """Compiles programs before a step needs them, in so many threads; each by its key, see `_bucket`."""
        keys = [key for key in keys if key not in self._programs]
        with ThreadPoolExecutor(threads) as compilers:
            self._programs.update(zip(keys, compilers.map(lambda key: self._compile(*key), keys)))

    def _bucket(self, plan: StepPlan) -> tuple:
        """(mode, requests, rows, max_seq_len, changes, choice, replays, return_selected, expanded) of its program."""
        options = self.options
        drawn = [request.sampling.top_p for request in plan.requests if request.sampling.temperature > 0]
        choice = Choice.GREEDY if not drawn else Choice.DRAW if min(drawn) >= 1 else Choice.TOP_P
        choice = Choice.ALL if any(request.asks_more for request in plan.requests) else choice
        choice = Choice.TOP_P if options.batch_invariant else choice  # who else is served selects no program
        if plan.mode is ForwardMode.EXTEND:
            least = options.chunk_size if options.batch_invariant else SMALLEST_CHUNK
            size = min(max(least, power_of_two(plan.num_tokens)), options.chunk_size)
        else:
            least = options.max_batch if options.batch_invariant else 1
            size = min(max(least, power_of_two(len(plan.requests))), options.max_batch)
        sizes = plan.mode, size, plan.drafts, plan.max_seq_len
        expanded = plan.reads_from_start and self.expands(size, plan.max_seq_len)
        asked = {"replays": plan.replays, "returns_selected": plan.returns_selected}
        return self.key(*sizes, choice, **asked, expanded=expanded)

    def expands(self, rows: int, max_seq_len: int) -> bool:
        """Whether a chunk of so many rows attends over expanded heads where it may: the rows are those of one prompt
        from its start."""
        options = self.options
        chosen = options.backend or options.prefill_backend or override_of("prefill")  # by the user
        if chosen or options.batch_invariant or options.context_parallel > 1:
            return False
        return attends_expanded(self.model.config, rows, max_seq_len)

    def key(
        self,
        mode: ForwardMode,
        size: int,
        drafts: int,
        max_seq_len: int,
        choice: Choice,
        *,
        replays: bool = False,
        returns_selected: bool = False,
        expanded: bool = False,
    ) -> tuple:
        """As `_bucket`, of steps with so many rows of a chunk, or requests that decode with so many drafts each."""
        page, requests = self.spec.page_size, self.options.max_batch if mode is ForwardMode.EXTEND else size
        if mode is ForwardMode.EXTEND:
            rows, changes = size, requests + -(-size // page)
        else:
            rows, changes = requests * (drafts + 1), requests * (1 + -(-drafts // page))
        return mode, requests, rows, max_seq_len, changes, choice, replays, returns_selected, expanded and not replays

    def _decoding(self, plan: StepPlan) -> tuple | None:
        """As `_bucket`, of the step that decodes a chunk's requests, if that is to be compiled ahead."""
        if not self.ahead or self.mesh is not None or plan.mode is not ForwardMode.EXTEND:
            return None
        mode = ForwardMode.TARGET_VERIFY if self.drafts else ForwardMode.DECODE
        counts = np.full(len(plan.requests), self.drafts + 1)
        ends = plan.starts + plan.counts
        replays = any(request.attended > end for request, end in zip(plan.requests, ends))
        step = dataclasses.replace(plan, mode=mode, counts=counts, mapped=plan.mapped[:0], replays=replays)
        key = self._bucket(step)
        return None if key in self._programs or key in self._coming else key

    def _program(
        self,
        mode: ForwardMode,
        requests: int,
        rows: int,
        width: int,
        changes: int,
        choice: Choice,
        replays: bool,
        return_selected: bool,
        expanded: bool,
    ) -> tuple[Program, tuple[Any, ...]]:
        """The program of a bucket, and the arguments that it is traced for."""
        program = Program(
            model=self.model,
            mode=mode,
            num_requests=requests,
            num_rows=rows,
            max_seq_len=width,
            num_changes=changes,
            drafts=rows // requests - 1 if mode is ForwardMode.TARGET_VERIFY else 0,
            draft_layer=self.state.draft is not None and mode is not ForwardMode.DECODE,
            choice=choice,
            hook=self.options.logits_hook if choice is Choice.ALL else None,
            gathered=self.prefill_backend == GATHERED,
            expanded=expanded,
            backend=self.options.backend,
            batch_invariant=self.options.batch_invariant,
            context_parallel=self.options.context_parallel,
            trace=self.options.trace,
            logits=self.options.trace,
            replays=replays,
            return_selected=return_selected,
        )
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
        arguments = self.params, state, self._pack(program, None)
        return program, (*arguments, self._replayed(program, None)) if replays else arguments

    def _compile(self, *bucket: Any, then: tuple | None = None) -> tuple[Program, Any]:
        """The bucket's program, compiled. `then`: another bucket, whose program is traced while XLA compiles this one,
        and compiled in a thread."""
        program, arguments = self._program(*bucket)
        key = program, self.mesh, *kept_programs.signature(arguments)
        if key not in _executables:
            devices = jax.local_devices()[:1] if self.mesh is None else self.mesh.devices.flatten().tolist()
            options = options_without_search() if program.mode is ForwardMode.EXTEND else {}

            def lower() -> jax.stages.Lowered:
                lowered = self._jitted(program).lower(*arguments)
                if then is not None:
                    self._coming[then] = _compilers.submit(self._compile, *then)
                return lowered

            _executables[key] = kept_programs.obtain(key, devices, lower, options)
        call, self.routes[program] = _executables[key]
        return program, call

    def _jitted(self, program: Program) -> Any:
        return jax.jit(functools.partial(steps.run_step, program), donate_argnums=1)


def _logprobs(plan: StepPlan, result: Result, ends: list[int]) -> list[list[Logprob]]:
    """Those of the tokens that a step's requests take, where they ask for them."""
    asked = [request.top_logprobs is not None for request in plan.requests]
    return [[result.logprobs_of(i, j) if asked[i] else None for j in range(ends[i])] for i in range(len(asked))]


def _take_selected(plan: StepPlan, selected: np.ndarray) -> None:
    """Gives the requests that ask for it what their rows have attended to, of int32 `[layers, rows, k]`."""
    ends = np.cumsum(plan.counts)
    for request, start, end in zip(plan.requests, ends - plan.counts, ends):
        if request.return_selected and request.row is not None:  # else it ended while this step ran
            request.attend(selected[:, start:end].copy())


def options_without_search() -> dict[str, int | bool]:
    """XLA's options for programs that are compiled without its search among kernels of matrix products, by running
    them, unless XLA_FLAGS has a level of it. Those of prefill are: it takes a third of their compilation, and cuBLAS's
    first choice is as fast for many rows (the first token of 8,192 of V4-Flash's slice in bfloat16 on an H200: 198.4 ms
    without, 198.8 with). XLA does not choose the tiles of its own kernels then: of weights as stored 441 ms, and 66
    by cuBLAS's."""
    searches = "xla_gpu_autotune_level" in os.environ.get("XLA_FLAGS", "") or jax.default_backend() != "gpu"
    return {} if searches else {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def _is_sound(state: State | None) -> bool:
    """Whether the state is there: a step that failed, or did not give it back, has taken it along."""
    try:
        jax.block_until_ready(state)
    except Exception:
        return False
    return state is not None


_compilers = ThreadPoolExecutor(1, "compile")
# Compiled programs, and what attends in them; engines of the same shapes share them.
_executables: dict[tuple, tuple[Any, frozenset[tuple[str, str]]]] = {}

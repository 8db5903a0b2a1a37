"""Serves requests with a model in JAX: each step is one program, and the host reads its tokens while the next one runs."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jax_sparse_mla.attention.api import calls_of
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving.model import Model, Params
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import GATHERED, PAGED, EngineOptions, Scheduler, StepPlan
from jax_sparse_mla.serving.step import Program, Result, copy_states, new_state, pack, run_step, unpack_result

# Proposes drafts in the model's place: (request, how many drafts are before it) → a token, or −1 for the model's own.
Propose = Callable[[Request, int], int]

_copy_states = jax.jit(copy_states, donate_argnums=0)


@dataclasses.dataclass
class TracedStep:
    """A step that ran, for comparisons.

    Attributes:
      plan: the step.
      requests, positions: of its real rows: `id(request)` and int32 `[n]`.
      layers: of each layer the attention's input `[T, hidden]`, and the selected positions int32 `[T, k]` or None.
      logits: float32 `[requests · (drafts + 1), vocab]`.
    """

    plan: StepPlan
    requests: np.ndarray
    positions: np.ndarray
    layers: list[tuple[jax.Array, jax.Array | None]]
    logits: jax.Array


class Engine:
    """Serves requests on one device.

    `submit` and `step` are for a server's loop, `run` serves a list. They are not thread-safe: a server calls them from
    one thread.

    Args:
      model, params: what is served.
      options: see `EngineOptions`.

    Attributes:
      scheduler: the requests, their pages, and counters of what happened.
      drafts: draft tokens of a round, at most `options.speculative_steps`; 0 decodes plainly.
      propose: replaces drafts.
      accepted: how many rounds of a request kept 0 … `drafts` drafts. In the round that ends a request only the drafts
        that it still needed count.
      prefill_backend: what prefill steps attend to, one of PREFILL_BACKENDS.
      routes: `{program: (phase, backend)}`, the attention that each program calls, read from the program.
      trace: with `options.trace`, the steps of the latest `run`.
    """

    def __init__(self, model: Model, params: Params, options: EngineOptions = EngineOptions()):
        self.model, self.options = model, options
        self.spec: ModelSpec = model.spec
        self.scheduler = Scheduler(self.spec, options, model.vocab_size, reuse=options.reuse_points > 0)
        self.drafts, self.propose = options.speculative_steps, None
        self.accepted: collections.Counter[int] = collections.Counter()
        self.prefill_backend = options.prefill_backend or chosen_prefill(self.spec, options)
        self.routes: dict[Program, frozenset[tuple[str, str]]] = {}
        self.trace: list[TracedStep] = []
        pool, window = self.scheduler.pool, self.spec.window is not None
        state_rows = options.max_batch + (options.reuse_points if window else 0)
        state = new_state(
            model.new_caches(
                num_pages=pool.num_pages,
                num_swa_pages=pool.num_swa_pages,
                max_requests=state_rows,
                max_draft_tokens=options.speculative_steps + 1 if options.speculative_steps else 0,
                bf16=options.bf16_cache,
            ),
            max_requests=options.max_batch,
            max_len=pool.req_to_token.shape[1],
            num_pages=pool.num_pages,
            page_size=self.spec.page_size,
            window=window,
        )
        # Committed to the device, as what a step returns is.
        self.state, self.params = jax.device_put((state, params), jax.devices()[0])
        self._unread: collections.deque[tuple[StepPlan, Program, jax.Array]] = collections.deque()
        self._programs: dict[tuple, tuple[Program, Any]] = {}

    # Requests.

    def submit(self, request: Request) -> None:
        """Takes a request; steps serve it.

        Raises:
          ValueError: it cannot be served, see `Scheduler.check`.
        """
        self.scheduler.submit(request)

    def run(
        self, requests: Iterable[Request], on_step: Callable[[StepPlan, list[Request]], None] = lambda *_: None
    ) -> None:
        """Serves requests to their end; their outputs are filled in.

        Args:
          requests: new requests.
          on_step: called after each step with the plan whose tokens have been read last, and all requests.

        Raises:
          ValueError: one cannot be served. None has been served then.
        """
        requests = list(requests)
        for i, request in enumerate(requests):
            self.scheduler.check(request, f"request {i}")
        self.trace = []
        try:
            for request in requests:
                self.scheduler.submit(request)
            while (plan := self.step()) is not None:
                on_step(plan, requests)
        except BaseException:
            self._unread.clear()
            self.scheduler.abort()
            raise

    def step(self) -> StepPlan | None:
        """Starts the next step and reads the tokens of the one before; returns the latest plan that it started or read,
        None if there was nothing to do."""
        plan = self.scheduler.plan(drafts=self.drafts)
        if plan is not None:
            self._start(plan)
        # Where it drafts, the next round begins where this one ends: the host must know first.
        while self._unread and (plan is None or len(self._unread) > (0 if self.drafts else 1)):
            read = self._read()
            if plan is None:
                return read
        return plan

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and not self._unread

    # Steps.

    def _start(self, plan: StepPlan) -> None:
        if plan.restored:
            self._copy_states(plan.restored)
        key = self._bucket(plan)
        if key not in self._programs:
            self._programs[key] = self._compile(*key)
        program, call = self._programs[key]
        packed = pack(program, plan, self.options.max_batch, self._proposals(plan))
        self.state, result, layers, logits = call(self.params, self.state, packed)
        result.copy_to_host_async()
        self._unread.append((plan, program, result))
        if plan.kept:
            self._copy_states(plan.kept)
        if self.options.trace:
            ids = np.repeat([id(request) for request in plan.requests], plan.counts)
            self.trace.append(TracedStep(plan, ids, plan.positions(), layers, logits))

    def _read(self) -> StepPlan:
        """Waits for the oldest step that runs, and takes its tokens."""
        plan, program, packed = self._unread.popleft()
        result = unpack_result(program, np.asarray(packed))
        if result.overflow:
            raise RuntimeError(f"a step of {plan.mode} overflowed its bucket of {program.max_seq_len} tokens")
        if plan.mode is not ForwardMode.TARGET_VERIFY:
            tokens, margins = result.tokens.tolist(), result.margins.tolist()
            self.scheduler.complete(plan, tokens, margins)
        else:
            self._accept(plan, result)
        return plan

    def _accept(self, plan: StepPlan, result: Result) -> None:
        before = [len(request.output) for request in plan.requests]
        ends = (result.accepted + 1).tolist()
        tokens = [row[:end] for row, end in zip(result.tokens.tolist(), ends)]
        margins = [row[:end] for row, end in zip(result.margins.tolist(), ends)]
        self.scheduler.complete(plan, tokens, margins)
        for request, start in zip(plan.requests, before):
            self.accepted[len(request.output) - start - 1] += 1

    def _proposals(self, plan: StepPlan) -> np.ndarray | None:
        if self.propose is None or plan.mode is not ForwardMode.TARGET_VERIFY:
            return None
        return np.array([[self.propose(r, i) for i in range(self.drafts)] for r in plan.requests], np.int32)

    def _copy_states(self, pairs: list[tuple[int, int]]) -> None:
        caches = self.state.caches
        for pair in pairs:  # one at a time: their number would select a compilation
            caches = _copy_states(caches, np.array([pair], np.int32))
        self.state = dataclasses.replace(self.state, caches=caches)

    # Programs.

    def _bucket(self, plan: StepPlan) -> tuple:
        """(mode, requests, rows, max_seq_len, changes, whether tokens are drawn) of a step's program."""
        options, page = self.options, self.spec.page_size
        draws = any(request.sampling.temperature > 0 for request in plan.requests)
        if plan.mode is ForwardMode.EXTEND:
            requests, rows = options.max_batch, options.chunk_size
            changes = requests + -(-rows // page)
        else:
            requests = min(power_of_two(len(plan.requests)), options.max_batch)
            rows = requests * (self.drafts + 1 if plan.mode is ForwardMode.TARGET_VERIFY else 1)
            changes = requests * (1 + -(-self.drafts // page))
        if len(plan.mapped) > changes:  # a long prefix that is reused
            changes = power_of_two(len(plan.mapped))
        return plan.mode, requests, rows, plan.max_seq_len, changes, draws

    def _compile(self, mode: ForwardMode, requests: int, rows: int, width: int, changes: int, draws: bool):
        program = Program(
            model=self.model,
            mode=mode,
            num_requests=requests,
            num_rows=rows,
            max_seq_len=width,
            num_changes=changes,
            drafts=self.drafts if mode is ForwardMode.TARGET_VERIFY else 0,
            draws=draws,
            gathered=self.prefill_backend == GATHERED,
            backend=self.options.backend,
            trace=self.options.trace,
            logits=self.options.trace,
        )
        size = sum(int(np.prod(shape)) for shape in program.fields().values())
        arguments = self.params, self.state, np.zeros(size, np.int32)
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if (program, tree, shapes) not in _executables:
            lowered = _jitted(program).lower(*arguments)
            _executables[program, tree, shapes] = lowered.compile(), calls_of(lowered)
        call, self.routes[program] = _executables[program, tree, shapes]
        return program, call


# Compiled programs, and what attends in them; engines of the same shapes share them.
_executables: dict[tuple, tuple[Any, frozenset[tuple[str, str]]]] = {}


@functools.cache
def _jitted(program: Program):
    return jax.jit(functools.partial(run_step, program), donate_argnums=1)


def power_of_two(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def chosen_prefill(spec: ModelSpec, options: EngineOptions) -> str:
    """What prefill steps attend to by the plan of their size."""
    from jax_sparse_mla.layers import gathers

    return GATHERED if gathers(spec, options.chunk_size) else PAGED

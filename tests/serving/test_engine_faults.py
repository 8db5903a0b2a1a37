"""What the engine promises where something goes wrong, or where JAX is told to be strict: docs/reliability.md."""

import collections
import dataclasses
import random
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from counting_model import POISON, Summing, expected

import jax_sparse_mla.serving
from jax_sparse_mla import ForwardMode
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions, Scheduler

# A pool that just holds one of the longest requests and a little more: some wait, some are preempted.
OPTIONS = EngineOptions(chunk_size=8, max_batch=3, max_len=40, num_pages=16, reuse_points=2, speculative_steps=2)
TEXT = [7 * i % 50 for i in range(30)]
SIZES = [(21, 9), (3, 8), (26, 8), (14, 1), (30, 7)]


@pytest.fixture(scope="module")
def the_engine():
    engine = Engine(Summing(), (), OPTIONS)
    for drafts in (2, 0):  # what is compiled here is compiled for all tests
        engine.drafts = drafts
        for count in (1, 2, 3):
            engine.run(Request([token], 5) for token in range(count))
    serve_all(engine)
    return engine


@pytest.fixture
def engine(the_engine):
    the_engine.drafts, the_engine.propose = 0, None
    the_engine.scheduler.prefixes.clear()
    return the_engine


def new_requests(**fields):
    return [Request(TEXT[:length], new, **fields) for length, new in SIZES]


def right(request):
    return request.output == expected(request.prompt, request.max_new_tokens)


def serve_all(engine):
    requests = new_requests()
    engine.run(requests)
    assert all(map(right, requests)) and everything_is_free(engine)


def everything_is_free(engine):
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    scheduler.prefixes.clear()
    full = len(pool.pages.free) == pool.num_pages - 1 and len(pool.swa_pages.free) == pool.num_swa_pages - 1
    return engine.idle and full and pool.free_rows == engine.options.max_batch


class Interrupts:
    """Counts the lines that run in `jax_sparse_mla.serving`, or in one function of it, and raises KeyboardInterrupt at
    one of them."""

    folder = str(Path(jax_sparse_mla.serving.__file__).parent)

    def __init__(self, at=None, function=None):
        self.at, self.function, self.lines = at, function, 0

    def __enter__(self):
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, event, argument):
        is_counted = self.function is None or frame.f_code is self.function.__code__
        return self.line if is_counted and frame.f_code.co_filename.startswith(self.folder) else None

    def line(self, frame, event, argument):
        self.lines += event == "line"
        if self.lines == self.at:
            self.at = None
            raise KeyboardInterrupt
        return self.line


def served_by_steps(engine, requests):
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("serve", [served_by_steps, Engine.run])
def test_an_interrupt_at_any_line_leaves_an_engine_that_serves(engine, serve, drafts):
    """The requests go on rightly, or say that they were dropped; no page is lost; others get their tokens."""
    engine.drafts, rng, outcomes = drafts, random.Random(drafts), collections.Counter()
    with Interrupts() as counted:
        serve(engine, new_requests())
    engine.scheduler.prefixes.clear()  # the next run is as long as the one that was counted
    for _ in range(50):
        requests = new_requests()
        with pytest.raises(KeyboardInterrupt), Interrupts(rng.randint(1, counted.lines * 9 // 10)):
            serve(engine, requests)
        submitted = [request for request in requests if request.submitted]
        while not engine.idle:
            engine.step()
        for request in requests:
            assert request.output == expected(request.prompt, len(request.output))
            assert len(request.margins) == len(request.output)
        if serve is served_by_steps:  # the one that was just being submitted is not served, or is
            assert all(request.finished for request in submitted[:-1])
        outcomes["dropped"] += any(request.error is not None for request in requests)
        outcomes["went on"] += all(map(right, requests))
        assert everything_is_free(engine)
        serve_all(engine)
    assert outcomes["dropped"] > 25


@pytest.mark.parametrize(
    "function",
    [
        Request.take,
        Scheduler._admit,
        Scheduler._preempt,
        Scheduler._close,
        Scheduler.take,
        Engine._start,
        Engine._whole,
    ],
)
def test_an_interrupt_where_a_request_changes_hands(engine, function):
    """At each line that runs there: no request gets lost, each is served or says that it was not."""
    at, interrupted = 0, True
    while interrupted and at < 60:
        at, interrupted, requests = at + 1, False, new_requests()
        for request in requests:
            engine.submit(request)
        try:
            with Interrupts(at, function):
                while not engine.idle:
                    engine.step()
        except KeyboardInterrupt:
            interrupted = True
        while not engine.idle:
            engine.step()
        # Where its `on_token` would have been called, an interrupt counts as what that one raised.
        assert all(right(request) or request.error is not None or request.cancelled for request in requests)
        assert all(len(request.margins) == len(request.output) for request in requests)
        assert everything_is_free(engine)
    assert at > 2


def test_an_interrupt_while_the_engine_mends_itself(engine):
    with Interrupts() as counted:
        engine._recover()
    for at in range(1, counted.lines + 1):
        requests = new_requests()
        for request in requests:
            engine.submit(request)
        engine.step()
        engine._in_step = True  # as an exception leaves it
        with pytest.raises(KeyboardInterrupt), Interrupts(at):
            engine._recover()
        assert engine.step() is None and everything_is_free(engine)
        assert all(request.error is not None for request in requests)
        serve_all(engine)


@pytest.mark.parametrize("name", ["_counted_on", "_unpack"])
def test_caches_that_a_failed_step_took_along_are_made_anew(engine, monkeypatch, name):
    def fails(*_):
        for leaf in jax.tree.leaves(engine.state):
            leaf.delete()
        raise RuntimeError("the device says no")

    request = Request(TEXT, 4)
    engine.submit(request)
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device says no"):
        patch.setattr(engine, name, fails)
        while True:
            engine.step()
    assert "interrupted or failed" in request.error and request.finished
    with pytest.raises(ValueError, match="has been served before"):
        engine.submit(request)
    serve_all(engine)


@pytest.mark.parametrize("name", ["run", "step", "wait"])
def test_a_callback_does_not_serve(engine, name):
    """It would have run steps within a step. What it may do: submit, cancel, abort."""
    calls = {"run": lambda: engine.run([Request([1], 2)]), "step": engine.step, "wait": engine.wait}
    asked, other = Request(TEXT[:5], 4, on_token=lambda *_: calls[name]()), Request(TEXT[:7], 6)
    for request in (asked, other):
        engine.submit(request)
    with pytest.raises(RuntimeError, match=rf"Engine\.{name} was called from a callback of the same engine"):
        while True:
            engine.step()
    while not engine.idle:
        engine.step()
    assert asked.cancelled and right(other) and everything_is_free(engine)


def test_on_step_does_not_run_the_engine(engine):
    with pytest.raises(RuntimeError, match=r"Engine\.run was called from a callback"):
        engine.run(new_requests(), lambda *_: engine.run([Request([1], 2)]))
    assert everything_is_free(engine)
    follow_up = Request([5], 3)
    engine.run([Request([1], 1, on_token=lambda *_: engine.submit(follow_up))])
    assert right(follow_up)


@pytest.mark.parametrize("drafts", [0, 2])
def test_logits_that_are_not_finite_end_their_request_alone(engine, drafts, caplog):
    """And nobody reuses its pages, which others begin with."""
    engine.drafts, failed = drafts, engine.scheduler.counters.failed
    poisoned = [Request([*TEXT[:12], POISON, *TEXT[:3]], 5), Request([POISON], 5, forced=(1, 2))]
    others = new_requests()
    engine.run([*others[:2], *poisoned, *others[2:]])
    assert all("logits are not finite" in request.error and request.finished for request in poisoned)
    assert [request.output for request in poisoned] == [[], []] and all(map(right, others))
    assert engine.scheduler.counters.failed == failed + 2 and "logits are not finite" in caplog.text
    serve_all(engine)


def test_a_key_that_was_spoilt_is_not_reused(engine):
    request = Request(TEXT, 4)
    engine.submit(request)
    while not request.output:
        engine.step()
    slot = int(engine.scheduler.pool.req_to_token[request.row, 0])
    engine.state = dataclasses.replace(engine.state, caches=engine.state.caches.at[slot].set(jnp.nan))
    while not engine.idle:
        engine.step()
    assert "logits are not finite" in request.error
    again = Request(TEXT, 4)
    engine.run([again])
    assert right(again) and everything_is_free(engine)


def test_a_short_prompt_is_read_in_a_small_program():
    engine = Engine(Summing(), (), EngineOptions(chunk_size=70, max_batch=2, max_len=200))
    for length in (1, 16, 17, 64, 65, 69, 150):
        request = Request([i % 60 for i in range(length)], 1)
        engine.run([request])
        assert right(request)
    rows = [program.num_rows for program in engine.routes if program.mode is ForwardMode.EXTEND]
    assert sorted(rows) == [16, 32, 64, 70]


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_warm_engine_copies_nothing_that_it_does_not_name(engine, drafts):
    engine.drafts = drafts
    with jax.transfer_guard("disallow"):
        serve_all(engine)


def test_ranks_need_not_be_promoted_by_the_caller():
    with jax.numpy_rank_promotion("raise"):
        engine = Engine(Summing(), (), EngineOptions(chunk_size=4, max_batch=1, max_len=20, speculative_steps=1))
        for engine.drafts in (0, 1):
            request = Request(TEXT[:9], 4)
            engine.run([request])
            assert right(request)


def test_so_many_drafts_are_refused():
    with pytest.raises(ValueError, match="speculative_steps must be at most 32, got 33"):
        EngineOptions(speculative_steps=33)
    assert EngineOptions(speculative_steps=32).speculative_steps == 32


def test_batch_invariant_takes_no_option_that_reads_again():
    for name, value in (("num_pages", 30), ("reuse_points", 1)):
        with pytest.raises(ValueError, match=f"{name} must be .* with batch_invariant, got {value}"):
            EngineOptions(batch_invariant=True, **{name: value})

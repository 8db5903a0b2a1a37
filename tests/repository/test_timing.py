"""How the benchmarks' timer reads the profiler, which may lose an operation or a mark."""

from __future__ import annotations

import contextlib
import types

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from benchmarks import timing

REPEATS = 5


def events(lost: tuple[int, ...] = ()) -> list[types.SimpleNamespace]:
    """Of each call a flush, a mark, two kernels of 10 and 20 us with 5 us between them, and a mark, without those lost;
    then what waits for the GPU."""
    names = [("flush", 300), ("cosh", 1), ("first", 10), ("second", 20), ("cosh", 1)] * REPEATS + [("flush", 300)]
    found, now = [], 0
    for number, (name, us) in enumerate(names):
        times = {"start_ns": lambda at=now: at, "duration_ns": lambda us=us: us * 1000}
        event = types.SimpleNamespace(name=lambda name=name: name, device_type=lambda: "DeviceType.CUDA", **times)
        found += [] if number in lost else [event]
        now += us * 1000 + 5000
    return found


@pytest.fixture
def timer(monkeypatch):
    """`timer(profiles)`: the timer, and how many of these the profiler has shown."""

    def make(profiles):
        shown = iter(profiles)

        @contextlib.contextmanager
        def profile(**_):
            results = types.SimpleNamespace(events=lambda: next(shown))
            yield types.SimpleNamespace(profiler=types.SimpleNamespace(kineto_results=results))

        monkeypatch.setattr(timing, "profile", profile)
        made = timing.Timer.__new__(timing.Timer)  # without its buffers, which are a GPU's
        made.repeats, made.flush, made.operations, made.busy = REPEATS, timing.READ, [], []
        made._once = made._wait = lambda *_: None
        return made, shown

    return make


RUN = timing.Run(lambda: None, "torch")


def test_calls_of_two_frameworks_take_no_turns(timer):
    """A torch call began on its own stream while JAX's was still running, and both times were wrong."""
    made, _ = timer([events()])
    with pytest.raises(ValueError, match="of one framework, got jax and torch"):
        made.in_turn([RUN, RUN._replace(framework="jax")])


def test_a_call_lasts_from_its_first_operation_to_the_end_of_its_last(timer):
    made, _ = timer([events()])
    assert made(RUN) == 35 and made.busy == [30]
    assert [(o.name, o.start, o.duration) for o in made.operations] == [("first", 0, 10), ("second", 15, 20)]


MARKS = [number for number in range(5 * REPEATS) if number % 5 in (1, 4)]


@pytest.mark.parametrize("lost", [(mark,) for mark in MARKS] + [(2, 3), (22, 23)], ids=str)
def test_what_the_profiler_lost_is_profiled_again(lost, timer):
    made, shown = timer([events(lost), events(), []])
    assert made(RUN) == 35 and next(shown) == []
    made, shown = timer([events(lost)] * timing.ATTEMPTS)
    with pytest.raises(RuntimeError, match="the profiler saw"):
        made(RUN)
    assert next(shown, None) is None

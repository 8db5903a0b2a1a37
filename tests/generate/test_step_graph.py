"""Decode steps from a graph: buckets, buffers, fall-back and self-check; on a GPU, captured in CUDA graphs.

Without a GPU a replay runs the same step again over the static buffers, and the kernels run in Triton's interpreter.
"""

import dataclasses
import functools
import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import triton_device  # noqa: F401  (repairs Triton's interpreter)
from hf_models import DEVICE, OPTIONS, poison, random_tokens, small_model
from sparse_mla_torch.hf.engine import Engine, Request, why_not_torch
from sparse_mla_torch.hf.graph import CHECKED_REPLAYS, StepGraph, cuda_capture

from jax_sparse_mla import ForwardMode

COMPILING = "OPTIMISED"  # see conftest.py
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of NaN in the interpreter
]


def run_again(run):
    """A capture without a GPU."""
    result = run().clone()
    return lambda: result.copy_(run()), result


class Toy:
    """A step `[2, rows] → [rows, 3]`; calls: the inputs and widths that it saw."""

    def __init__(self):
        self.calls = []

    def __call__(self, inputs, width):
        self.calls.append((inputs.tolist(), width))
        first, second = inputs.float()
        return torch.stack([first + 1, second + width, first * second], dim=1)


def toy_graph(step, *, max_rows=6, capture=run_again):
    return StepGraph(step, max_rows=max_rows, device=torch.device("cpu"), capture=capture)


def inputs_of(*columns):
    return np.array(columns, np.int32).T


def test_inputs_are_padded_to_powers_of_two_and_results_cut():
    step = Toy()
    graph = toy_graph(step)
    wide, narrow = inputs_of((1, 2), (3, 4), (5, 6)), inputs_of((7, 8))
    assert graph(wide, 10).tolist() == [[2, 12, 2], [4, 14, 12], [6, 16, 30]]
    assert all(call == ([[1, 3, 5, 0], [2, 4, 6, 0]], 10) for call in step.calls)
    graph(wide, 10)
    # Smaller again: nothing of the larger step stays in the buffer.
    assert graph(inputs_of((9, 9), (8, 8), (7, 7)), 10).tolist() == [[10, 19, 81], [9, 18, 64], [8, 17, 49]]
    assert graph(narrow, 10).tolist() == [[8, 18, 56]]
    assert graph(np.ones((2, 5), np.int32), 20).shape == (5, 3)
    assert graph(np.ones((2, 6), np.int32), 20).shape == (6, 3)
    assert graph.buckets == [(1, 10), (4, 10), (6, 20)] and graph.reason is None


def test_replays_follow_once_they_were_compared():
    step = Toy()
    graph = toy_graph(step)
    counts = []
    for i in range(CHECKED_REPLAYS + 2):
        before = len(step.calls)
        assert graph(inputs_of((i, i)), 5).tolist() == [[i + 1, i + 5, i * i]]
        counts.append(len(step.calls) - before)
    # Eager, capture, replay; eager and replay; replays alone.
    assert counts == [3, *[2] * (CHECKED_REPLAYS - 1), 1, 1]
    assert (graph.steps, graph.replays) == (CHECKED_REPLAYS + 2, 2)


def test_a_step_that_cannot_be_captured_stays_eager(caplog):
    def refuse(run):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for …")

    step = Toy()
    graph = toy_graph(step, capture=refuse)
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            assert graph(inputs_of((i, 1), (1, 1)), 7)[0].tolist() == [i + 1, 8, i]
    assert len(step.calls) == 3 and graph.replays == 0
    assert "cannot be captured: CUDA error: operation not permitted" in graph.reason and "\n" not in graph.reason
    assert [r.message for r in caplog.records] == [f"decode steps are eager: {graph.reason}"]


@pytest.mark.parametrize("wrong", ["other", "nothing", "frozen"])
def test_replays_that_differ_from_eager_steps_are_given_up(wrong):
    """Other logits, none at all, and those of the inputs that were captured."""

    def capture(run):
        result = run().clone()
        kept = result.clone()
        frozen = lambda: result.copy_(kept)  # noqa: E731
        return {"other": lambda: result.copy_(2 * run()), "nothing": lambda: None, "frozen": frozen}[wrong], result

    step = Toy()
    graph = toy_graph(step, capture=capture)
    for i in range(1, 5):
        assert graph(inputs_of((i, i)), 3).tolist() == [[i + 1, i + 3, i * i]]  # always the eager step's
    assert "differ from an eager step's" in graph.reason and graph.replays == 0


def test_another_bucket_s_failure_ends_all_replays():
    refused = []

    def capture(run):
        if refused:
            raise RuntimeError("no more")
        return run_again(run)

    step = Toy()
    graph = toy_graph(step, capture=capture)
    for _ in range(CHECKED_REPLAYS + 1):
        graph(inputs_of((1, 1)), 3)
    assert graph.replays == 1
    refused.append(True)
    graph(inputs_of((1, 1), (2, 2)), 3)
    before = len(step.calls)
    assert graph(inputs_of((4, 5)), 3).tolist() == [[5, 8, 20]]
    assert graph.replays == 1 and len(step.calls) == before + 1


def test_why_decode_steps_go_through_jax():
    """By options alone: a GPU is not asked."""
    cuda, plain = torch.device("cuda", 0), dataclasses.replace(OPTIONS, trace=False)
    assert why_not_torch(torch.device("cpu"), plain) == "CUDA graphs need a GPU"
    for change, why in (({"trace": True}, "--no-check"), ({"speculative_steps": 2}, "drafts"),
                        ({"backend": "triton"}, "backend triton")):  # fmt: skip
        assert why in why_not_torch(cuda, dataclasses.replace(plain, **change))
    assert why_not_torch(cuda, plain) is None


# Engines. Requests come and go: batches of one to three rows, in another order; the second is longer than a window.

SHAPES = ((21, 7), (140, 4), (3, 9), (66, 5))


def new_requests():
    return [Request(random_tokens(length, seed), new) for seed, (length, new) in enumerate(SHAPES)]


def logits_of(engine):
    """Serves `new_requests`; returns them and the logits before each token, `[new tokens, vocab]` of each."""
    requests, steps, run_plan = new_requests(), [], engine.run_plan
    complete = engine.scheduler.complete
    seen = {id(request): [] for request in requests}

    def completing(plan, *arguments):
        logits = steps.pop()
        for request, row, samples in zip(plan.requests, logits, plan.samples):
            if samples:
                seen[id(request)].append(row.float().cpu())
        return complete(plan, *arguments)

    def recording(plan):
        for name in ("_decode", "_run_through_jax"):
            function = vars(type(engine))[name]

            def call(plan, function=function):
                if (found := function(engine, plan)) is not None:
                    steps.append(found[1].clone())
                return found

            vars(engine)[name] = call
        return run_plan(plan)

    engine.scheduler.complete, engine.run_plan = completing, recording
    modes = []
    engine.run(requests, lambda step, _: modes.append((step.mode, step.num_tokens)))
    assert all(len(seen[id(r)]) == len(r.output) == r.max_new_tokens for r in requests)
    return requests, [torch.stack(seen[id(request)]) for request in requests], modes


def engine_of(name, **changes):
    options = {"trace": False, "max_batch": 3, "max_len": 256, **changes}
    capture = options.pop("capture", None)
    engine = Engine(small_model(name), dataclasses.replace(OPTIONS, **options), capture=capture)
    poison(engine)
    return engine


@functools.cache
def through_jax(name, bf16):
    """Traced, as an engine on a GPU must be to decode through JAX."""
    return logits_of(engine_of(name, bf16_cache=bf16, trace=True))


@pytest.mark.no_gpu
@pytest.mark.parametrize(("name", "bf16"), [("v4", True), ("v32", False), ("glm5", True)])
def test_decode_steps_in_torch_give_jax_s_logits(name, bf16):
    """Through JAX's prefill, over torch's caches, and static buffers of other sizes than the steps."""
    engine = engine_of(name, bf16_cache=bf16, capture=run_again)
    requests, logits, modes = logits_of(engine)
    expected_requests, expected, _ = through_jax(name, bf16)
    assert {count for mode, count in modes if mode is ForwardMode.DECODE} == {1, 2, 3}
    assert [rows for rows, _ in engine.graph.buckets] == [1, 2, 3]
    assert engine.graph.reason is None and engine.graph.replays > 2
    assert engine.decode_steps.startswith("one CUDA graph a step: ")
    for request, rows, other, wanted in zip(requests, logits, expected_requests, expected):
        for i, (row, want) in enumerate(zip(rows, wanted)):
            torch.testing.assert_close(row, want, rtol=0, atol=0.03)
            if request.output[i] != other.output[i]:
                break  # a near-tie; what follows are other tokens

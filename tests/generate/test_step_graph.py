"""Decode steps from a graph: buckets, buffers, fall-back and self-check; on a GPU, captured in CUDA graphs.

Without a GPU a replay runs the same step again over the static buffers, and the kernels run in Triton's interpreter.
"""

import dataclasses
import logging
import re
from unittest import mock

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

import triton_device  # noqa: F401  (repairs Triton's interpreter)
from hf_models import DEVICE, OPTIONS, poison, random_model, random_tokens, small_model, small_v4_config
from sparse_mla_torch.hf import engine as engine_module
from sparse_mla_torch.hf.engine import Engine, Request, choose, why_not_torch
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
        for capture in (None, run_again):
            assert why in why_not_torch(cuda, dataclasses.replace(plain, **change), capture)
    assert why_not_torch(cuda, plain) is None
    assert why_not_torch(torch.device("cpu"), plain, run_again) is None


# Engines. Requests come and go, in batches of one to three rows, whose bucket has four.

SHAPES = ((21, 7), (140, 4), (3, 9))


def new_requests(shapes=SHAPES):
    return [Request(random_tokens(length, seed), new) for seed, (length, new) in enumerate(shapes)]


@dataclasses.dataclass
class Served:
    """Requests that an engine served, the logits before each of their tokens, and the rows of its decode steps."""

    engine: Engine
    requests: list[Request]
    logits: list[torch.Tensor]
    rows: list[int]


def serve(engine, requests):
    logits = {id(request): [] for request in requests}
    rows, run_plan = [], engine.run_plan

    def recording(plan):
        with mock.patch.object(engine_module, "choose", lambda x: seen.append(x.float().cpu()) or choose(x)):
            seen = []
            step = run_plan(plan)
        for request, row, samples in zip(plan.requests, *seen, plan.samples):
            if samples:
                logits[id(request)].append(row)
        return step

    with mock.patch.object(engine, "run_plan", recording):
        engine.run(requests, lambda step, _: rows.append(step.num_tokens) if step.mode is ForwardMode.DECODE else None)
    assert all(len(logits[id(r)]) == len(r.output) == r.max_new_tokens for r in requests)
    return Served(engine, requests, [torch.stack(logits[id(r)]) for r in requests], rows)


def engine_of(model, *, capture=None, **changes):
    options = dataclasses.replace(OPTIONS, **{"trace": False, "max_batch": 4, "max_len": 256, **changes})
    engine = Engine(model, options, capture=capture)
    poison(engine)
    return engine


def assert_close(served, expected, atol):
    """Logits, up to the first near-tie of a request: the tokens behind it are others."""
    for request, rows, other, wanted in zip(served.requests, served.logits, expected.requests, expected.logits):
        for i, (row, want) in enumerate(zip(rows, wanted)):
            torch.testing.assert_close(row, want, rtol=0, atol=atol)
            if request.output[i] != other.output[i]:
                best, second = want.topk(2).values
                assert best - second < 2 * atol
                break


@pytest.mark.long
@pytest.mark.no_gpu
@pytest.mark.parametrize(("name", "bf16"), [("v4", True), ("v32", False), ("glm5", True)])
def test_decode_steps_in_torch_give_jax_s_logits(name, bf16):
    """Behind JAX's prefill, over torch's caches, from buffers with rows of padding."""
    served = serve(engine_of(small_model(name), bf16_cache=bf16, capture=run_again), new_requests())
    through_jax = serve(engine_of(small_model(name), bf16_cache=bf16), new_requests())
    assert served.rows == through_jax.rows and set(served.rows) == {1, 2, 3}
    graph = served.engine.graph
    assert graph.reason is None and [rows for rows, _ in graph.buckets] == [1, 2, 4]
    assert graph.steps == len(served.rows) and graph.replays == graph.steps - CHECKED_REPLAYS * 3 > 0
    assert served.engine.decode_steps.startswith(f"one CUDA graph a step: {graph.replays} of {graph.steps} replayed, 3")
    assert through_jax.engine.decode_steps == "through JAX: CUDA graphs need a GPU"
    assert_close(served, through_jax, 0.03)


@pytest.mark.long
@pytest.mark.no_gpu
def test_what_torch_does_not_serve_goes_through_jax(monkeypatch, caplog):
    """With all that the caches hold: the next step is JAX's, of the same requests."""
    engine = engine_of(small_model("v32"), capture=run_again)
    calls, torch_step = [], engine.graph._step

    def refuse(inputs, width):
        calls.append(inputs)
        if len(calls) > 4:
            raise ValueError("a kernel was not written for this")
        return torch_step(inputs, width)

    engine.graph._step = refuse
    served = serve(engine, new_requests())
    expected = serve(engine_of(small_model("v32")), new_requests())
    assert engine.graph is None and engine.decode_steps == "through JAX: ValueError: a kernel was not written for this"
    assert "go through JAX: ValueError: a kernel was not written" in caplog.text
    assert_close(served, expected, 0.03)


# On a GPU. More requests than are served at once; one leaves a sliding-window page behind.

ON_GPU = ((21, 30), (140, 12), (3, 40), (250, 25), (66, 9), (9, 33))


def never(run):
    raise RuntimeError("not captured")


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["v4", "v32", "glm5"])
def test_replays_equal_eager_steps(name, bf16):
    """To the bit, logits and tokens; the requests of a second run use other pages."""
    sizes = {"bf16_cache": bf16, "max_len": 320}
    engines = engine_of(small_model(name), **sizes), engine_of(small_model(name), capture=never, **sizes)
    for _ in range(2):
        captured, eager = (serve(engine, new_requests(ON_GPU)) for engine in engines)
        assert captured.rows == eager.rows
        for a, b, x, y in zip(captured.requests, eager.requests, captured.logits, eager.logits):
            assert a.output == b.output and torch.equal(x, y)
    graph = engines[0].graph
    assert graph.reason is None and [rows for rows, _ in graph.buckets] == [1, 2, 4]
    assert graph.replays >= graph.steps - 3 * CHECKED_REPLAYS and "not captured" in engines[1].graph.reason
    modes = {(mode, phase) for (mode, *_), calls in engines[0].routes.items() for phase, _ in calls}
    assert (ForwardMode.DECODE, "decode") in modes


@pytest.mark.gpu
def test_replays_give_jax_s_logits():
    """V4's: in the small V3.2 model the last bit decides between experts and keys."""
    captured = serve(engine_of(small_model("v4")), new_requests())
    through_jax = serve(engine_of(small_model("v4"), trace=True), new_requests())
    assert captured.engine.graph.replays and through_jax.engine.graph is None
    assert_close(captured, through_jax, 0.03)


@pytest.mark.gpu
def test_experts_that_wait_for_the_gpu_are_not_captured():
    """transformers' loop over the experts that were hit; the engine serves on, and so do others."""
    model = random_model(small_v4_config(), seed=0).to(DEVICE)
    model.set_experts_implementation("eager")
    served = serve(engine_of(model), new_requests())
    assert "the step cannot be captured: " in served.engine.graph.reason and not served.engine.graph.replays
    again = serve(engine_of(small_model("v4")), new_requests())
    assert again.engine.graph.reason is None and again.engine.graph.replays
    assert_close(again, served, 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["waits", "breaks", "raises"])
def test_a_capture_that_fails_leaves_torch_as_it_was(how):
    x, current = torch.arange(3.0, device=DEVICE), torch.cuda.current_stream()

    def fail():
        y = 2 * x
        if how == "waits":
            y.sum().item()
        elif torch.cuda.is_current_stream_capturing():
            if how == "raises":
                raise RuntimeError("of its own accord")
            torch.cuda.current_stream().synchronize()  # a capture does not survive it
        return y

    fail()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of its own accord" if how == "raises" else "synchroniz|captur"):
            cuda_capture(fail)
        assert torch.cuda.current_stream() == current and not torch.cuda.is_current_stream_capturing()
        assert torch.rand(4, device=DEVICE).max() < 1  # the generator is not within a capture
    replay, result = cuda_capture(lambda: 3 * x)
    x.fill_(2)
    replay()
    assert result.tolist() == [6, 6, 6] and jax.numpy.ones(3).sum() == 3


@pytest.mark.gpu
def test_generate_says_how_decode_steps_ran(capsys):
    from jax_sparse_mla.cli import main

    args = ["generate", "--engine", "torch", "--preset", "v4", "--requests", "2", "--max-new-tokens", "12"]
    for more, line in (
        ([], r"through JAX: a run that is to be checked"),
        (["--no-check"], r"one CUDA graph a step: [1-9]"),
    ):
        assert main([*args, *more]) == 0
        assert re.search(rf"^decode     {line}", capsys.readouterr().out, re.M)

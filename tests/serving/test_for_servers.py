"""What a server needs of the engine: how requests end, log-probabilities, a hook on logits, a warm start."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting_model import NEVER_MADE, POISON, VOCABULARY, Smooth, Summing, expected

from jax_sparse_mla.serving.adjust import Adjust
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.memory import NotEnoughMemory, free_memory, size_of
from jax_sparse_mla.serving.mesh import MeshEngine, new_mesh
from jax_sparse_mla.serving.request import CallbackError, Request, Sampling
from jax_sparse_mla.serving.sampling import Adjusting
from jax_sparse_mla.serving.scheduler import EngineOptions, Scheduler
from jax_sparse_mla.serving.start import all_programs, sized, warm_up
from jax_sparse_mla.serving.step import empty_state

HOOK = Adjust(biases=4)
OPTIONS = EngineOptions(chunk_size=16, max_batch=2, max_len=40, speculative_steps=2, logits_hook=HOOK)
TEXT = [7 * i % 50 for i in range(30)]


@pytest.fixture(scope="module")
def engine():
    return Engine(Smooth(), (), OPTIONS)


def logits_of(tokens):
    """float32 `[vocab]` of `Smooth` behind these tokens."""
    hidden = sum((token + 1) * (at % 7 + 1) for at, token in enumerate(tokens))
    likely = 3 * (np.arange(VOCABULARY) == hidden % NEVER_MADE)
    return (likely + np.sin(hidden + np.arange(VOCABULARY))).astype(np.float32)


def run(engine, *requests):
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return requests


# How requests end.


@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.long)])
def test_every_end_is_told_once_with_its_reason(engine, drafts):
    engine.drafts, ends = drafts, []
    stop = expected(TEXT[:5], 9)[3]

    def request(length, new, **fields):
        return Request(TEXT[:length], new, on_end=lambda r: ends.append((r, r.ended, len(r.output))), **fields)

    by_stop, by_length = request(5, 9, eos_token_ids=(stop,)), request(6, 3)
    both = request(5, 4, eos_token_ids=(stop,))  # the last token that it may have is an end token
    poisoned = Request([POISON], 5, on_end=lambda r: ends.append((r, r.ended, 0)))
    cancelled, waiting = request(7, 9, on_token=lambda r, _: r.cancel()), request(8, 9)
    waiting.cancel()
    run(engine, by_stop, by_length, both, poisoned, cancelled, waiting)
    reasons = {by_stop: "stop", by_length: "length", both: "stop", poisoned: "failed"}
    reasons |= {cancelled: "cancelled", waiting: "cancelled"}
    assert {r: how for r, how, _ in ends} == reasons and len(ends) == len(reasons)
    assert all(len(r.output) == count for r, _, count in ends)  # all its tokens were there


def test_an_abort_and_a_failed_step_are_told(engine, monkeypatch):
    engine.drafts, ends = 0, []
    requests = [Request(TEXT[:5], 9, on_end=lambda r: ends.append(r.ended)) for _ in range(3)]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.abort()
    assert ends == ["aborted"] * 3
    again = [Request(TEXT[:5], 9, on_end=lambda r: ends.append(r.ended)) for _ in range(3)]
    for request in again:
        engine.submit(request)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device says no") as raised:
        patch.setattr(engine, "_unpack", lambda *_: (_ for _ in ()).throw(RuntimeError("the device says no")))
        while True:
            engine.step()
    assert not isinstance(raised.value, CallbackError) and ends[3:] == ["failed"] * 3


@pytest.mark.parametrize("where", ["on_token", "on_end", "on_end of a cancelled one"])
def test_what_a_callback_raises_is_no_fault_of_the_device(engine, where):
    def fails(*_):
        raise OSError("the client has gone")

    engine.drafts, other = 0, Request(TEXT[:7], 5)
    one = Request(TEXT[:5], 3, **{where.split()[0]: fails})
    for request in (one, other):
        engine.submit(request)
    if "cancelled" in where:
        one.cancel()
    with pytest.raises(CallbackError, match="OSError: the client has gone") as raised:
        while not engine.idle:
            engine.step()
    assert isinstance(raised.value.__cause__, OSError)
    while not engine.idle:
        engine.step()
    assert other.ended == "length" and other.output == expected(TEXT[:7], 5)
    assert one.ended == ("length" if where == "on_end" else "cancelled")


def test_a_callback_at_the_end_drops_all_others(engine):
    engine.drafts, ends = 0, []
    requests = [Request(TEXT[:3], 9, on_end=lambda r: (ends.append(r.ended), engine.abort())) for _ in range(4)]
    requests[0].cancel()
    run(engine, *requests)
    assert ends == ["cancelled"] + ["aborted"] * 3 and engine.idle


# Log-probabilities and the hook.


@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.long)])
def test_logprobs_are_those_of_the_models_logits(engine, drafts):
    engine.drafts = drafts
    greedy = Request(TEXT[:5], 6, top_logprobs=3)
    drawn = Request(TEXT[:9], 6, top_logprobs=0, sampling=Sampling(temperature=2.0, seed=3))
    plain = Request(TEXT[:4], 4)
    run(engine, greedy, drawn, plain)
    assert plain.logprobs == [] and plain.output == expected(TEXT[:4], 4)
    for request, count in ((greedy, 3), (drawn, 0)):
        assert len(request.logprobs) == 6
        for at, (token, logprob) in enumerate(zip(request.output, request.logprobs)):
            logits = logits_of(request.prompt + request.output[:at])
            every = logits - np.log(np.exp(logits.astype(np.float64)).sum())
            assert logprob.value == pytest.approx(every[token], abs=1e-4)
            best = np.argsort(-logits)[:count]
            assert [t for t, _ in logprob.top] == best.tolist()
            np.testing.assert_allclose([value for _, value in logprob.top], every[best], atol=1e-4)


@pytest.mark.long
def test_logprobs_need_no_hook():
    engine = Engine(Smooth(), (), dataclasses.replace(OPTIONS, logits_hook=None, speculative_steps=0))
    (request,) = run(engine, Request(TEXT[:5], 3, top_logprobs=1))
    assert [logprob.top[0][0] for logprob in request.logprobs] == request.output
    with pytest.raises(ValueError, match="the engine's logits_hook takes 0"):
        engine.submit(Request([1], 1, adjust=(1.0,)))


def chosen_by_hand(prompt, count, presence, frequency, bias):
    tokens = list(prompt)
    for _ in range(count):
        logits, output = logits_of(tokens), tokens[len(prompt) :]
        for token in range(VOCABULARY):
            logits[token] -= presence * (token in output) + frequency * output.count(token)
        for token, value in bias.items():
            logits[token] += value
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("drafts", [0, pytest.param(2, marks=pytest.mark.long)])
def test_penalties_count_the_output_alone(engine, drafts):
    """Beside others, in rows that others have had before, and after a preemption, whose tokens are read again."""
    engine.drafts = drafts
    asked = {"presence_penalty": 1.5, "frequency_penalty": 0.7}, {"logit_bias": {3: 2.8, 50: 2.9, 9: -4.0}}
    known = []
    for fields in (asked[0], asked[1], asked[0] | asked[1]):
        request = Request(TEXT[:6], 12, adjust=HOOK.parameters(**fields))
        values = fields.get("presence_penalty", 0), fields.get("frequency_penalty", 0), fields.get("logit_bias", {})
        known.append((request, chosen_by_hand(TEXT[:6], 12, *values)))
    plain = Request(TEXT[:6], 12)
    run(engine, *(request for request, _ in known), plain)
    assert [request.output for request, _ in known] == [output for _, output in known]
    assert len({tuple(output) for _, output in known}) == 3 and plain.output == chosen_by_hand(TEXT[:6], 12, 0, 0, {})


@pytest.mark.long
def test_penalties_outlive_a_preemption_and_reused_prefixes():
    options = dataclasses.replace(OPTIONS, num_pages=13, max_batch=3, reuse_points=3, speculative_steps=0)
    engine = Engine(Smooth(), (), options)
    adjust = HOOK.parameters(frequency_penalty=1.1)
    requests = run(engine, *(Request(TEXT[:9], 20, adjust=adjust) for _ in range(3)))
    counters = engine.scheduler.counters
    assert counters.preempted and counters.reused
    assert all(request.output == chosen_by_hand(TEXT[:9], 20, 0, 1.1, {}) for request in requests)


def adjusted(logits, temperature=1.0, **fields):
    parameters = HOOK.parameters(**fields) or (0.0,) * HOOK.size
    given = Adjusting(
        parameters=jnp.asarray([parameters]),
        counts=jnp.zeros((1, len(logits)), jnp.int32),
        temperature=jnp.asarray([temperature], jnp.float32),
    )
    return np.asarray(HOOK(jnp.asarray([logits], jnp.float32), given))[0]


def test_top_k_and_min_p_leave_what_they_say():
    logits = np.random.default_rng(0).normal(size=40).astype(np.float32) * 3
    np.testing.assert_array_equal(adjusted(logits), logits)
    order = np.argsort(-logits)
    for k in (1, 3, 40, 100):
        assert set(np.flatnonzero(np.isfinite(adjusted(logits, top_k=k)))) == set(order[:k].tolist())
    for temperature in (0.5, 2.0):
        probabilities = np.exp((logits - logits.max()) / temperature)
        kept = np.isfinite(adjusted(logits, temperature, min_p=0.1))
        np.testing.assert_array_equal(kept, probabilities >= 0.1)


def test_draws_keep_to_top_k(engine):
    engine.drafts = 0
    requests = [
        Request(TEXT[:6], 3, sampling=Sampling(temperature=50.0, seed=seed), adjust=HOOK.parameters(top_k=2))
        for seed in range(20)
    ]
    run(engine, *requests)
    best = set(np.argsort(-logits_of(TEXT[:6]))[:2].tolist())
    assert {request.output[0] for request in requests} == best


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -1}, "top_k must be"),
        ({"min_p": 1.5}, "min_p must be"),
        ({"presence_penalty": 2.5}, "presence_penalty must be"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be"),
        ({"logit_bias": dict.fromkeys(range(5), 1.0)}, "at most 4 tokens"),
        ({"logit_bias": {1: 101}}, "values from -100 to 100"),
    ],
)
def test_parameters_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        HOOK.parameters(**fields)


def test_what_an_engine_cannot_choose_is_refused(engine):
    with pytest.raises(ValueError, match="top_logprobs must be from 0 to 20, got 21"):
        Request([1], 1, top_logprobs=21)
    with pytest.raises(ValueError, match="has 3 parameters in adjust: the engine's logits_hook takes 12"):
        engine.submit(Request([1], 1, adjust=(1, 2, 3)))
    invariant = EngineOptions(batch_invariant=True, max_len=40, chunk_size=16)
    with pytest.raises(ValueError, match="batch_invariant does not serve"):
        Engine(Summing(), (), invariant).submit(Request([1], 1, top_logprobs=1))


# The start.


def test_a_prefix_of_more_pages_than_a_step_maps_is_reused():
    engine = Engine(Summing(), (), EngineOptions(chunk_size=16, max_batch=1, max_len=300, reuse_points=2))
    long = [i % 40 for i in range(290)]
    for at in range(3):
        (request,) = run(engine, Request([*long, at, 5], 3))
        assert request.output == expected(request.prompt, 3)
    assert engine.scheduler.counters.reused >= 2 * 288 - 8 and len(engine._programs) == 2


@pytest.mark.long
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_warm_engine_compiles_nothing_more(drafts):
    rows, batch = (20, 3) if drafts else (16, 2)
    options = EngineOptions(
        chunk_size=rows, max_batch=batch, max_len=300, speculative_steps=drafts, reuse_points=2, logits_hook=HOOK
    )
    engine = Engine(Smooth(), (), options)
    count = warm_up(engine, threads=2)
    assert count == 4 * (5 if drafts else 3) == len(set(all_programs(engine))) and len(engine.routes) == count
    known, compiled = set(engine._programs), []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    long = [i % 40 for i in range(250)]  # more pages than a step maps at once
    kinds = [{}, {"sampling": Sampling(1.0)}, {"sampling": Sampling(1.0, 0.5)}, {"top_logprobs": 1}]
    for kind in kinds:
        same = [Request(long, 4, **kind) for _ in range(3)]
        run(engine, *same, *(Request(TEXT[:length], 5, **kind) for length in (1, 16, 17, 30)))
        run(engine, Request([*long, 5, 6], 3, **kind))
        assert kind != {} or all(request.output == expected(long, 4) for request in same)
    assert set(engine._programs) == known and engine.scheduler.counters.reused
    assert not [event for event in compiled if "backend_compile" in event]


def test_the_pool_takes_what_is_free(monkeypatch):
    model, options = Summing(), EngineOptions(chunk_size=8, max_batch=16, max_len=400, logits_hook=HOOK)
    assert sized(model, (), options) is options  # all fits
    whole = size_of(Engine(model, (), options).state)
    for share in (0.8, 0.6):
        fewer = sized(model, (), options, share, whole)
        assert (
            size_of(Engine(model, (), fewer).state)
            <= share * whole
            < size_of(Engine(model, (), dataclasses.replace(fewer, num_pages=fewer.num_pages + 2)).state)
        )
    # Of the last one's share: two devices have room for more pages, tables whole on each.
    shared = sized(model, (), dataclasses.replace(options, context_parallel=2), share, whole)
    pool = Scheduler(model.spec, shared, model.vocab_size).pool
    assert shared.num_pages > 1.2 * fewer.num_pages and pool.devices == 2
    assert size_of(jax.eval_shape(lambda: empty_state(model, (), shared, pool))) <= share * whole
    with pytest.raises(NotEnoughMemory, match="caches for one request of 400 tokens and states for 16 need"):
        sized(model, (), options, free=1000)
    given = dataclasses.replace(options, num_pages=7)
    assert sized(model, (), given, free=1000) is given
    assert free_memory() > 0


@pytest.mark.long
@pytest.mark.cpu
def test_a_mesh_does_the_same():
    """Ends, log-probabilities, penalties, and a prefix of more pages than a step maps."""
    options = EngineOptions(chunk_size=20, max_batch=2, max_len=300, reuse_points=2, logits_hook=HOOK)
    engine = MeshEngine(Smooth(), (), options, new_mesh(1, 1))
    warm_up(engine, threads=2)
    known, ends = set(engine._programs), []
    asked = Request(TEXT[:6], 12, adjust=HOOK.parameters(frequency_penalty=1.1), top_logprobs=1)
    long = [Request([i % 40 for i in range(250)], 4, on_end=lambda r: ends.append(r.ended)) for _ in range(3)]
    run(engine, asked, *long)
    run(engine, again := Request(long[0].prompt, 4))
    assert asked.output == chosen_by_hand(TEXT[:6], 12, 0, 1.1, {}) and len(asked.logprobs) == 12
    assert ends == ["length"] * 3 and again.output == expected(long[0].prompt, 4)
    assert set(engine._programs) == known and engine.scheduler.counters.reused

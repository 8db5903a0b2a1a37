"""The JAX engine over a model of two layers: what a request gets hangs on nobody else, and nothing moves or leaks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_model import ToyModel

from jax_sparse_mla import ForwardMode
from jax_sparse_mla.serving import engine as engine_module
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import EngineOptions

MODEL = ToyModel()
# One engine for all tests, since each program takes seconds to compile: its pool just holds the requests below.
OPTIONS = EngineOptions(chunk_size=256, max_batch=2, max_len=800, num_pages=6, reuse_points=3, speculative_steps=3)
# (tokens of the prompt, tokens to make): joining, leaving, waiting for a place, several in a chunk, one over two pages.
SIZES = [(300, 6), (40, 12), (520, 4), (7, 9), (130, 5), (64, 3)]


@pytest.fixture(scope="module", autouse=True)
def no_near_ties():
    """A kernel that splits a row's keys by what else is in the batch rounds its sums otherwise, and so does a product
    of more rows on a GPU: with the reference and in float32 the difference is too small for another token."""
    precision = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")
        patch.setattr(engine_module, "SMALLEST_CHUNK", OPTIONS.chunk_size)  # one program for prompts
        yield
    jax.config.update("jax_default_matmul_precision", precision)


@pytest.fixture(scope="module")
def the_engine():
    return Engine(MODEL, MODEL.init_params(0, jnp.float32), OPTIONS)


@pytest.fixture
def engine(the_engine):
    """Decodes plainly, and knows no prefix."""
    the_engine.drafts, the_engine.propose = 0, None
    the_engine.scheduler.prefixes.clear()
    return the_engine


def new_requests(sizes=SIZES, **fields):
    rng = np.random.default_rng(0)
    return [Request(rng.integers(0, MODEL.vocab_size, n).tolist(), new, **fields) for n, new in sizes]


def serve(engine, requests):
    engine.run(requests)
    return [request.output for request in requests]


@pytest.fixture(scope="module")
def expected(the_engine):
    """The tokens of each request alone, before any prefix is known."""
    outputs, the_engine.drafts = [], 0
    for request in new_requests():
        outputs += serve(the_engine, [request])
        the_engine.scheduler.prefixes.clear()
    # What is made hangs on what was read, and changes from token to token: a wrong key would show.
    assert len(set(map(tuple, outputs))) == len(SIZES) and all(len(set(tokens)) > 2 for tokens in outputs)
    return outputs


def everything_is_free(engine):
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    pages = len(pool.pages.free) + len(pool.pages.idle)
    return scheduler.idle and pages == pool.num_pages - 1 and pool.free_rows == engine.options.max_batch


@pytest.mark.long
def test_most_steps_take_no_array_from_the_host(engine, expected, monkeypatch):
    """What the device expects of the next step is what the host would say: both count on in the same way."""
    counted_on, kept = engine._counted_on, []

    def seen(program, plan):
        on_device = counted_on(program, plan)
        kept.append(on_device is not None)
        if on_device is not None:
            np.testing.assert_array_equal(np.asarray(on_device), engine._pack(program, plan))
        return on_device

    monkeypatch.setattr(engine, "_counted_on", seen)
    requests = new_requests([(250, 20), (250, 17)])  # their sixth tokens lie in the next page
    engine.run(requests)
    # The host speaks for the chunks, for the tokens after them, for the pages, and when one request is left.
    assert kept[-1] and kept.count(False) <= 7 < kept.count(True)


def test_a_batch_serves_each_request_as_if_it_were_alone(engine, expected):
    leaves = jax.tree.leaves(engine.state)
    before = [leaf.unsafe_buffer_pointer() for leaf in leaves]
    seen = []
    requests = new_requests()
    engine.run(requests, lambda plan, _: seen.append((plan.mode, len(plan.requests))))
    assert [request.output for request in requests] == expected
    assert (ForwardMode.DECODE, 2) in seen and (ForwardMode.DECODE, 1) in seen
    assert all(request.margins and min(request.margins) >= 0 for request in requests)
    if jax.default_backend() == "cpu":  # the caches never moved
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.state)] == before
    assert everything_is_free(engine)
    # One program for chunks; two for decode steps, of one and of two requests.
    modes = [program.mode for program in engine.routes if program.choice is Choice.GREEDY]
    assert modes.count(ForwardMode.EXTEND) == 1 and modes.count(ForwardMode.DECODE) == 2


@pytest.mark.long
def test_reused_prefixes_change_no_token(engine, expected):
    """Whole prompts again, and prompts that leave a known one within its second page: a model with a window has a
    reuse point there only after one request has left it there."""
    serve(engine, new_requests())
    before = engine.scheduler.counters.reused
    assert serve(engine, new_requests()) == expected
    assert engine.scheduler.counters.reused == before + 256 + 512
    tails = [[7, 8, 9] * 20, [1, 2] * 30, [5] * 50]
    texts = [new_requests()[2].prompt[:400] + tail for tail in tails]
    engine.scheduler.prefixes.clear()
    alone = []
    for text in texts:
        alone += serve(engine, [Request(text, 4)])
        engine.scheduler.prefixes.clear()
    before = engine.scheduler.counters.reused
    serve(engine, new_requests()[2:3])
    assert [serve(engine, [Request(text, 4)])[0] for text in texts] == alone
    assert engine.scheduler.counters.reused == before + 256 + 256  # not the first, which made the point
    assert everything_is_free(engine)


def test_states_are_kept_after_the_step_that_makes_them(engine):
    """And put back before the step that reads them: a request's state stands in a row of its own at a page's end."""
    points, page = engine.scheduler.prefixes._points, engine.spec.page_size

    def state(row):
        part = engine.state.caches[1].state
        return np.stack([np.asarray(x[row]) for x in (part.kv, part.score)])

    first, second = (Request([*new_requests()[0].prompt[: page + 1], token], 1) for token in (1, 2))
    engine.submit(first)
    engine.step()  # a page, at whose end there is a point
    (point,) = points.values()
    kept, row = state(point), first.row
    np.testing.assert_array_equal(kept, state(row))
    engine.step()  # two tokens, at whose end the state is another
    assert kept.any() and (state(row) != kept).any()
    while not engine.idle:
        engine.step()
    engine.submit(second)
    engine.step()
    last = slice(-4, None)  # of the page, in a ring of 8 tokens, which the step wrote 0 and 1 of
    np.testing.assert_array_equal(state(second.row)[:, last], kept[:, last])
    np.testing.assert_array_equal(state(point), kept)
    engine.abort()


@pytest.mark.long
def test_requests_that_end_early(engine, expected):
    """By a token of theirs, by a callback that cancels; others get what they get anyway."""
    requests = new_requests()
    requests[1].eos_token_ids = (expected[1][4], 999)
    requests[3].on_token = lambda request, token: request.cancel() if len(request.output) == 3 else None
    requests[5].cancel()
    serve(engine, requests)
    ends = expected[1].index(expected[1][4]) + 1
    assert requests[1].output == expected[1][:ends] and requests[3].output == expected[3][:3]
    assert requests[5].output == []
    assert [requests[i].output for i in (0, 2, 4)] == [expected[i] for i in (0, 2, 4)]
    assert everything_is_free(engine)


@pytest.mark.long
def test_everything_is_given_back_when_a_run_raises(engine, expected):
    def on_step(plan, _):
        if plan.mode is ForwardMode.DECODE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.run(new_requests(), on_step)
    assert everything_is_free(engine)
    assert serve(engine, new_requests()) == expected
    with pytest.raises(ValueError, match="request 1 has tokens out of the model's vocabulary of 256"):
        engine.run([Request([1], 1), Request([256], 1)])
    assert everything_is_free(engine)


def test_a_request_is_served_once(engine, expected):
    """Where one was taken twice its tokens were wrong, or no later step ran."""
    message = "the request has been submitted before: make a Request for each time"
    first, second, third = new_requests()[3:]
    engine.submit(first)
    engine.step()
    with pytest.raises(ValueError, match="request 1 is request 0 again: make a Request for each time"):
        engine.run([second, second])  # which those that are served must not notice
    with pytest.raises(ValueError, match=message):
        engine.submit(first)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.submit(first)
    engine.run([second, third])
    assert [first.output, second.output, third.output] == expected[3:]
    with pytest.raises(ValueError, match="request 0 has been submitted before"):
        engine.run([first])


def test_sequences_of_integers_are_tokens(engine, expected):
    for kind in (tuple, np.array, range):
        request = new_requests()[3]
        prompt = range(5, 9) if kind is range else kind(request.prompt)
        request = Request(prompt, np.int64(3), eos_token_ids=np.array([300]), forced=(np.int32(1),))
        assert (type(request.prompt), request.prompt) == (list, [int(token) for token in prompt])
        engine.run([request])
        assert request.output[0] == 1 and len(request.output) == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": [1.5]}, r"Request: prompt must be a sequence of integers, got list: \[1.5\]"),
        ({"prompt": 3}, "Request: prompt must be a sequence of integers, got int: 3"),
        ({"prompt": "text"}, "Request: prompt must be a sequence of integers, got str: 'text'"),
        ({"max_new_tokens": 2.0}, "Request: max_new_tokens must be an integer, got 2.0"),
        ({"eos_token_ids": 7}, "Request: eos_token_ids must be a sequence of integers, got int: 7"),
        ({"forced": (None,)}, "Request: forced must be a sequence of integers, got tuple"),
        ({"sampling": None}, "Request: sampling must be a Sampling, got NoneType"),
    ],
)
def test_requests_that_no_step_could_serve(changes, message):
    """Within the engine they would fail in a step, for all requests."""
    with pytest.raises(TypeError, match=message):
        Request(**{"prompt": [1], "max_new_tokens": 1} | changes)


def test_a_seed_that_is_no_integer():
    with pytest.raises(TypeError, match=r"Sampling: seed must be an integer, got 0.5"):
        Sampling(seed=0.5)


def test_forced_tokens_are_of_the_vocabulary(engine):
    with pytest.raises(ValueError, match="request 0 has tokens out of the model's vocabulary of 256"):
        engine.run([Request([1], 2, forced=(256,))])


@pytest.mark.parametrize("pages", [-3, 0, 1])
def test_a_pool_without_pages(pages):
    with pytest.raises(ValueError, match=f"num_pages must be at least 2, got {pages}"):
        EngineOptions(num_pages=pages)
    with pytest.raises(TypeError, match=r"chunk_size must be an integer, got 2\.5"):
        EngineOptions(chunk_size=2.5)


@pytest.mark.parametrize("phase", ["_start", "_unpack"])
def test_everything_is_given_back_when_a_step_fails(engine, monkeypatch, phase):
    def fails(*_):
        raise RuntimeError("the device says no")

    engine.submit(new_requests()[0])
    engine.step()
    monkeypatch.setattr(engine, phase, fails)
    with pytest.raises(RuntimeError, match="the device says no"):
        while True:
            engine.step()
    assert everything_is_free(engine) and engine.idle


def test_a_bucket_that_overflows_ends_all_requests(engine, monkeypatch):
    unpack = engine._unpack
    monkeypatch.setattr(engine, "_unpack", lambda *step: dataclasses.replace(unpack(*step), overflow=True))
    engine.submit(new_requests()[0])
    with pytest.raises(RuntimeError, match="overflowed its bucket"):
        while True:
            engine.step()
    assert everything_is_free(engine) and engine.idle


def test_steps_run_ahead_of_the_tokens_that_are_read(engine, expected):
    """A request that ends by a token of its own has two steps more, which nobody reads."""
    prompt, tokens = new_requests()[1].prompt, expected[1]
    request = Request(prompt, 12, eos_token_ids=(tokens[4],))
    started = []
    start = engine._start
    engine._start = lambda plan, key: (started.append(plan), start(plan, key))
    try:
        engine.submit(request)
        assert engine.step() is None and engine.step() is None and not request.output
        assert engine.step() is started[0] and request.output == tokens[:1]
        while not engine.idle:
            engine.step()
    finally:
        del engine._start
    ends = tokens.index(tokens[4]) + 1
    assert request.output == tokens[:ends] and len(started) == ends + 2 and everything_is_free(engine)


def test_forced_tokens_are_taken(engine, expected):
    """As comparisons replay them: what follows is chosen after them."""
    prompt, first = new_requests()[1].prompt, expected[1]
    other = [(token + 1) % 256 for token in first[:3]]
    forced = Request(prompt, 6, forced=tuple(other))
    alone = Request(prompt + other, 3)
    serve(engine, [forced])
    serve(engine, [alone])
    assert forced.output == other + alone.output


def test_forced_tokens_in_place_of_drafts(engine, expected):
    """The model chose the drafts, so their keys were kept, and the request goes on from other tokens. There are two of
    it, which end together, so that no program for one request is compiled."""
    prompt, first = new_requests()[1].prompt, expected[1]
    forced = [(token + 1) % 256 for token in first[:3]]
    chosen = serve(engine, [Request(prompt + forced[:n], 3) for n in range(3)])
    alone = Request(prompt + forced, 3)
    serve(engine, [alone])
    engine.scheduler.prefixes.clear()
    engine.drafts, requests = 3, [Request(prompt, 6, forced=tuple(forced)) for _ in range(2)]
    engine.propose = lambda request, i: chosen[len(request.output)][i] if len(request.output) < 3 else -1
    assert serve(engine, requests) == [forced + alone.output] * 2 and everything_is_free(engine)


@pytest.mark.parametrize("count", [-1, OPTIONS.speculative_steps + 1])
def test_drafts_are_at_most_speculative_steps(engine, count):
    with pytest.raises(ValueError, match=f"drafts must be from 0 to {OPTIONS.speculative_steps}, got {count}"):
        engine.drafts = count
    assert engine.drafts == 0


# Indices of SIZES: one chunk, the first two decode together until the first one ends, and the third waits for a place.
DROPPED = (4, 3, 5)


@pytest.mark.parametrize(("drafts", "end"), [(0, 2), (3, SIZES[DROPPED[0]][1])])
def test_a_callback_drops_all_requests(engine, expected, drafts, end):
    """In the middle of a request, and at its last token."""
    wanted = [expected[i] for i in DROPPED]
    engine.drafts, requests = drafts, [new_requests()[i] for i in DROPPED]
    requests[0].on_token = lambda request, token: engine.abort() if len(request.output) == end else None
    serve(engine, requests)
    assert everything_is_free(engine) and requests[0].output == wanted[0][:end]
    for request, tokens in zip(requests, wanted, strict=True):
        assert request.output == tokens[: len(request.output)]
    engine.drafts = 0
    assert serve(engine, [new_requests()[i] for i in DROPPED]) == wanted


@pytest.mark.long
def test_a_small_pool_preempts_and_changes_no_token(engine):
    """Two requests of three pages, and five pages in all."""
    sizes, preempted = [(505, 20), (500, 20), (30, 4)], engine.scheduler.counters.preempted
    together = serve(engine, new_requests(sizes))
    assert engine.scheduler.counters.preempted > preempted
    assert everything_is_free(engine)
    for request, output in zip(new_requests(sizes), together):
        engine.scheduler.prefixes.clear()
        assert serve(engine, [request]) == [output]


@pytest.mark.long
def test_drafts_change_no_token(engine, expected):
    """The model's own, and those of an oracle that is right for 0, 1, 2 or 3 drafts in turn; prefixes are reused."""
    engine.drafts = 3
    assert serve(engine, new_requests()[:3]) == expected[:3]
    outputs = {tuple(request.prompt): output for request, output in zip(new_requests(), expected)}
    rounds = {}

    def propose(request, ahead):
        rounds[id(request)] = rounds.get(id(request), 0) + (ahead == 0)
        output, index = outputs[tuple(request.prompt)], len(request.output) + ahead
        right = output[index] if index < len(output) else 0
        return right if ahead < rounds[id(request)] % 4 else (right + 1) % 256

    engine.propose = propose
    engine.accepted.clear()
    assert serve(engine, new_requests()) == expected
    assert set(engine.accepted) == {0, 1, 2, 3}
    # Each request's first token comes from its prefill.
    assert sum((count + 1) * times for count, times in engine.accepted.items()) == sum(new - 1 for _, new in SIZES)
    assert everything_is_free(engine)


@pytest.mark.long
def test_drawn_tokens_hang_on_seed_and_position_only(engine):
    def drawn(seed):
        return new_requests(SIZES[1:2], sampling=Sampling(temperature=30.0, seed=seed))[0]

    alone = [serve(engine, [drawn(seed)])[0] for seed in (1, 2)]
    (greedy,) = serve(engine, new_requests(SIZES[1:2]))
    assert alone[0] != alone[1] and greedy not in alone
    assert serve(engine, [drawn(2), drawn(1)]) == alone[::-1]
    # Beside one that draws nothing.
    assert serve(engine, [new_requests(SIZES[1:2])[0], drawn(2)]) == [greedy, alone[1]]

"""The positions that a request attended to, given out and taken in: a replayed run equals the first to the bit."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla import DEEPSEEK_V32, ForwardMode
from jax_sparse_mla.serving import Model
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.mesh import Schedulers
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions, Scheduler
from jax_sparse_mla.serving.speculative import DraftOracle

SMALL = dict(hidden_size=64, num_attention_heads=4, index_n_heads=4, index_topk=16, q_lora_rank=32)
SMALL |= dict(moe_intermediate_size=32, num_key_value_heads=4)
C4, C128, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
# Each with the layers that select. V4 and V3.2 loop over two layers of a kind on a CPU.
MODELS = {
    "v32": (CONFIGS["v32"] | SMALL | dict(intermediate_size=64, num_hidden_layers=3), (0, 1, 2)),
    "v4": (
        CONFIGS["v4"]
        | SMALL
        | dict(
            layer_types=[WINDOW, C128, C4, C128, C4], num_hidden_layers=5, mlp_layer_types=["moe"] * 5, o_lora_rank=16
        ),
        (2, 4),
    ),
    "glm5": (CONFIGS["glm5"] | SMALL | dict(intermediate_size=64), (0, 3)),
    "glm53": (
        CONFIGS["glm53"]["text_config"]
        | SMALL
        | dict(model_type="glm5_next_text", linear_head_dim=32, num_hidden_layers=2, intermediate_size=64)
        | dict(layer_types=["linear_attention", "indexed_attention"], mlp_layer_types=["dense", "sparse"]),
        (1,),
    ),
}
OPTIONS = EngineOptions(chunk_size=32, max_batch=2, max_len=256, trace=True)
LENGTHS, NEW = (100, 40), 6


def engine_of(name, draft_layer=False, **changes):
    model = Model.from_config(MODELS[name][0])
    assert model.selecting_layers == MODELS[name][1]
    params = model.init_params(seed=0, dtype=jnp.bfloat16, draft_layer=draft_layer)
    return Engine(model, params, dataclasses.replace(OPTIONS, **changes))


def new_requests(lengths=LENGTHS, new=NEW, **fields):
    """Fields that are lists have one value for each request."""
    rng = np.random.default_rng(0)
    each = [{name: x[i] if isinstance(x, list) else x for name, x in fields.items()} for i in range(len(lengths))]
    return [Request(rng.integers(0, 256, length).tolist(), new, **own) for length, own in zip(lengths, each)]


def serve(engine, requests):
    """The logits that each request's tokens were chosen from."""
    engine.run(requests)
    logits = {id(request): [] for request in requests}
    for step in engine.trace:
        for request, row in step.chosen():
            logits[request].append(row)
    return [np.stack(logits[id(request)]) for request in requests]


def altered(selected, layer, at):
    """Positions in which a layer attends to others at one token."""
    selected = selected.copy()
    row = selected[layer, at]
    kept = row[row >= 0]
    row[: len(kept)] = np.sort((kept + 1) % (kept.max() + 1))
    row[: len(kept) // 2] = 0
    return selected


def all_selected(requests):
    return [request.selected for request in requests]


@pytest.fixture(scope="module", params=MODELS)
def first(request):
    """An engine, the requests of a run that returns what it attends to, and their logits."""
    engine, known = engine_of(request.param), []
    requests = new_requests(
        return_selected=True, on_token=lambda r, _: known.append(r.attended == len(r.prompt) + len(r.output) - 1)
    )
    logits = serve(engine, requests)
    assert len(known) == NEW * len(LENGTHS) and all(known)  # a callback finds those of the token's own row, too
    return engine, requests, logits


@pytest.mark.always("v32")
def test_what_is_returned(first):
    """What each row's layers selected, by position in the request, whichever step served it."""
    engine, requests, _ = first
    layers, width = engine.model.selecting_layers, engine.spec.index_width
    seen = {id(request): 0 for request in requests}
    for request in requests:
        assert request.selected.shape == (len(layers), len(request.tokens) - 1, width)
        assert request.selected.dtype == np.int32
    for step in engine.trace:
        for (i, layer), request in itertools.product(enumerate(layers), requests):
            of_request = step.requests == id(request)
            np.testing.assert_array_equal(
                step.selected(layer)[of_request], request.selected[i][step.positions[of_request]]
            )
            seen[id(request)] += of_request.sum()
    assert all(seen[id(r)] == len(layers) * r.attended for r in requests)
    entries = requests[0].attended // (4 if engine.spec.windowed else 1)
    last = requests[0].selected[:, -1]  # it sees more entries than are selected, and none of the future
    assert (last.max(-1) < entries).all() and (np.sum(last >= 0, axis=-1) >= 16).all()


@pytest.mark.always("v32")
def test_a_replayed_run_equals_the_first_to_the_bit(first):
    """In an engine whose pages stand in another order."""
    engine, requests, logits = first
    other = engine.with_options(seed=1)
    assert other.scheduler.pool.pages.free != engine.scheduler.pool.pages.free
    again = new_requests(replay=all_selected(requests))
    for got, want in zip(serve(other, again), logits, strict=True):
        np.testing.assert_array_equal(got, want)
    assert [r.output for r in again] == [r.output for r in requests]
    assert all(program.replays and not program.return_selected for program in other.routes)


@pytest.mark.always("v32")
def test_other_positions_give_other_logits(first):
    """From the token on at which they differ, in whichever layer they do."""
    engine, requests, _ = first
    at = requests[0].attended - 3  # is read by a decode step
    for layer in range(len(engine.model.selecting_layers)):
        replay = altered(requests[0].selected, layer, at)
        (got,) = serve(engine, new_requests(LENGTHS[:1], replay=[replay], forced=tuple(requests[0].output)))
        (same,) = serve(
            engine, new_requests(LENGTHS[:1], replay=all_selected(requests)[:1], forced=tuple(requests[0].output))
        )
        np.testing.assert_array_equal(got[:3], same[:3])
        assert (got[3] != same[3]).any()


@pytest.mark.always("v32")
def test_positions_that_a_row_does_not_see_count_as_none(first):
    """No row of another request, or of nobody, is read."""
    engine, requests, logits = first
    hostile = [np.where(x < 0, np.int32(2**31 - 1), x) for x in all_selected(requests)]
    hostile = [np.where((x > 1000) & (np.arange(x.shape[2]) % 2 == 0), np.int32(-7), x) for x in hostile]
    again = new_requests(replay=hostile)
    for got, want in zip(serve(engine, again), logits, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.always("v32")
def test_the_first_tokens_are_replayed_and_the_others_select(first):
    """Others that replay nothing, and return nothing, are served beside them."""
    engine, requests, _ = first
    replay = [None, requests[1].selected[:, :30]]
    again = new_requests(return_selected=[False, True], replay=replay)
    serve(engine, again)
    assert again[0].selected is None and again[1].selected.shape == requests[1].selected.shape
    np.testing.assert_array_equal(again[1].selected[:, :30], requests[1].selected[:, :30])
    plans = [step.plan for step in engine.trace]
    assert {plan.replays for plan in plans} == {True, False}
    assert [plan.counts.tolist() for plan in plans if plan.replays] == [[30]]


@pytest.mark.always("v32")
def test_nobody_pays_who_does_not_ask(first):
    engine, requests, _ = first
    plain, unread = engine.with_options(), []
    start = plain._start
    plain._start = lambda plan, key: (start(plan, key), unread.append(plain._unread[-1][-1]))
    again = new_requests()
    serve(plain, again)
    assert [r.output for r in again] == [r.output for r in requests] and again[0].selected is None
    assert not any(program.replays or program.return_selected for program in plain.routes)
    assert unread and unread == [None] * len(unread)  # nothing more to wait for


def test_a_preempted_request_replays_what_it_has_attended_to():
    """Else what is read again in chunks might select otherwise than what is returned for it."""
    engine = engine_of("v32", num_pages=6, trace=False)
    plans, requests = [], new_requests((120, 120), 60, return_selected=True)
    engine.run(requests, lambda plan, _: plans.append(plan))
    assert engine.scheduler.counters.preempted
    again = [plan for plan in plans if plan.replays]
    assert again and sum(plan.num_tokens for plan in again) > 120
    assert all(request.selected.shape[1] == len(request.tokens) - 1 for request in requests)
    alone = new_requests((120, 120), 60, return_selected=True)
    for request in alone:
        engine.run([request])
    np.testing.assert_array_equal(alone[0].selected[:, :120], requests[0].selected[:, :120])


def test_no_prefix_is_reused_and_none_is_left():
    engine = engine_of("v32", reuse_points=1)
    plain = new_requests((130,))
    engine.run(plain)
    returned = new_requests((130,), return_selected=True)
    engine.run(returned)
    assert engine.scheduler.counters.reused == 0 and returned[0].selected.shape[1] == 130 + NEW - 1
    engine.scheduler.prefixes.clear()
    engine.run(new_requests((130,), replay=all_selected(returned)))
    engine.run(new_requests((130,)))
    assert engine.scheduler.counters.reused == 0
    engine.run(new_requests((130,)))
    assert engine.scheduler.counters.reused == 128


@pytest.mark.always("v32")
@pytest.mark.parametrize("name", ["v32", "v4", "glm5"])
def test_drafts_return_what_the_kept_rows_selected(name):
    """To the bit what the verifying step selected at each token that stays, and nothing of rejected drafts; a run that
    attends to it chooses the same tokens."""
    plain, known, new = engine_of(name), [], 14
    expected = new_requests(new=new)
    plain.run(expected)
    engine = engine_of(name, speculative_steps=2)
    engine.propose = DraftOracle(expected, 0.7, seed=1).propose
    requests = new_requests(
        new=new,
        return_selected=[True, True],
        on_token=lambda r, _: known.append(r.attended == len(r.prompt) + len(r.output) - 1),
    )
    engine.run(requests)
    assert len(known) == new * len(LENGTHS) and all(known)
    assert any(engine.accepted[n] for n in (0, 1)) and any(engine.accepted[n] for n in (1, 2)), engine.accepted
    layers, compared = engine.model.selecting_layers, 0
    for request in requests:
        assert request.selected.shape == (len(layers), len(request.tokens) - 1, engine.spec.index_width)
        latest = {}  # of each position the last step that had it: drafts that were rejected came before
        for step in engine.trace:
            for row in np.flatnonzero(step.requests == id(request)):
                latest[int(step.positions[row])] = step, row
        for at in range(request.attended):
            step, row = latest[at]
            for i, layer in enumerate(layers):
                np.testing.assert_array_equal(request.selected[i, at], step.selected(layer)[row])
                compared += step.plan.mode is ForwardMode.TARGET_VERIFY
    assert compared >= len(layers) * len(LENGTHS) * (new - 1)
    again = new_requests(new=new, replay=all_selected(requests))
    for request, wanted in zip(again, requests):
        request.forced = tuple(wanted.output)
    plain.run(again)
    margins = [(m, w) for r, wanted in zip(again, requests) for m, w in zip(r.margins, wanted.margins, strict=True)]
    assert len(margins) == new * len(LENGTHS) and not np.isnan(margins).any()


def drafting_run(engine, requests, expected):
    """Serves requests with the drafts of an oracle; the logits of each one's kept rows."""
    engine.propose = DraftOracle(expected, 0.7, seed=1).propose
    logits, before = {id(request): [] for request in requests}, {}

    def keep(plan, _):
        step = next(step for step in engine.trace if step.plan is plan)
        rows = np.asarray(step.logits).reshape(len(step.batch.seq_lens), plan.drafts + 1, -1)
        for request, own in zip(plan.requests, rows):
            kept = len(request.output) - before.get(id(request), 0)
            logits[id(request)] += list(own[:kept])
            before[id(request)] = len(request.output)

    engine.run(requests, keep)
    return [np.stack(logits[id(request)]) for request in requests]


@pytest.mark.always("v32")
@pytest.mark.parametrize("name", ["v32", "v4", "glm5", "v32 with a draft layer"])
def test_a_replayed_run_with_drafts_equals_the_first_to_the_bit(name):
    """Its verifying steps attend to what is given, whatever was drafted, and its drafts are those of the first run."""
    name, *layer = name.split(" with ")
    plain, new = engine_of(name), 14
    expected = new_requests(new=new)
    plain.run(expected)
    engine = engine_of(name, draft_layer=bool(layer), speculative_steps=2)
    requests = new_requests(new=new, return_selected=True)
    logits, accepted = drafting_run(engine, requests, expected), engine.accepted
    assert accepted[0] and accepted[1] + accepted[2], accepted
    other = engine.with_options(seed=1)
    again = new_requests(new=new, replay=all_selected(requests))
    for got, want in zip(drafting_run(other, again, expected), logits, strict=True):
        assert len(got) == new
        np.testing.assert_array_equal(got, want)
    assert [r.output for r in again] == [r.output for r in requests] and other.accepted == accepted
    assert all(program.replays for program in other.routes)
    # Other positions of a token that a verifying step reads change the logits from there on.
    for layer, place in itertools.product(range(len(engine.model.selecting_layers)), (0, 5)):
        replay = altered(requests[0].selected, layer, len(requests[0].prompt) + place)
        given = (new_requests(LENGTHS[:1], new, replay=[x]) for x in (replay, requests[0].selected))
        changed, same = (drafting_run(other, x, expected)[0] for x in given)
        np.testing.assert_array_equal(changed[: place + 1], same[: place + 1])
        assert (changed[place + 1] != same[place + 1]).any()


@pytest.mark.always("v32")
@pytest.mark.parametrize("name", ["v32", "v4"])
def test_a_round_of_drafts_keeps_no_token_behind_the_last_that_is_replayed(name):
    """Those behind it select: every row attends to what is given, or to what its step has selected."""
    plain, new, given = engine_of(name), 14, 6
    expected = new_requests(LENGTHS[:1], new, return_selected=True)
    plain.run(expected)
    length = len(expected[0].prompt) + given
    replay = np.where(np.arange(length)[:, None] >= length - given, np.int32(-1), expected[0].selected[:, :length])
    replay[:, length - given :, 0] = np.arange(given)  # none would be selected
    expected = new_requests(LENGTHS[:1], new, replay=[replay])
    plain.run(expected)
    engine = engine_of(name, speculative_steps=3)
    engine.propose = DraftOracle(expected, 1, seed=1).propose
    (request,), plans = new_requests(LENGTHS[:1], new, return_selected=True, replay=[replay]), []
    engine.run([request], lambda plan, _: plans.append(plan))
    np.testing.assert_array_equal(request.selected[:, :length], replay)
    assert request.selected.shape[1] == len(request.tokens) - 1
    rounds = [(plan.replays, int(plan.starts[0]) - len(request.prompt)) for plan in plans if plan.drafts]
    replayed, selecting = ([start for replays, start in rounds if replays is own] for own in (True, False))
    assert max(replayed) < given - 1 and min(selecting) == given, rounds  # the last one drafted past the known ones
    for step in engine.trace:
        for at, row in zip(step.positions, range(len(step.positions))):
            for i, layer in enumerate(engine.model.selecting_layers):
                if step.plan.replays and at < length:
                    np.testing.assert_array_equal(step.selected(layer)[row], replay[i, at])
    assert (request.selected[:, length:] >= 0).sum() > 8 * request.selected[:, length:].shape[1]


def test_what_is_refused():
    options = EngineOptions(max_batch=2, max_len=64)
    scheduler = Scheduler(DEEPSEEK_V32, options, 256, selecting=3)
    width = DEEPSEEK_V32.index_topk
    good = np.zeros((3, 5, width), np.int32)
    scheduler.check(Request([1], 2, replay=good, return_selected=True))
    for shape in ((2, 5, width), (3, 5, width - 1)):
        with pytest.raises(ValueError, match=rf"request 0 has a replay of shape .*: it must be \[3, tokens, {width}\]"):
            scheduler.check(Request([1], 2, replay=np.zeros(shape, np.int32)), "request 0")
    for replay in (good[0], good.astype(np.int64), good.tolist()):
        with pytest.raises(TypeError, match=r"Request: replay must be int32 \[layers that select, tokens, k\]"):
            Request([1], 2, replay=replay)
    none = Scheduler(DEEPSEEK_V32, options, 256)
    for fields in ({"return_selected": True}, {"replay": good}):
        name = next(iter(fields))
        with pytest.raises(ValueError, match=f"has {name}, and this engine's layers return no selected positions"):
            none.check(Request([1], 2, **fields))
        with pytest.raises(ValueError, match=f"has {name}, and what an imported request has attended to"):
            scheduler.check(Request([1], 2, row=0, computed=1, **fields))
        with pytest.raises(ValueError, match=f"has {name}, and this engine's layers return no selected positions"):
            Schedulers([none]).submit(Request([1], 2, **fields))


@pytest.mark.parametrize("prompts", [(10, 10, 10, 10), (10, 10, 10, 200)])
def test_a_step_replays_all_of_its_rows_or_none(prompts):
    """And those that replay and those that do not take turns, also beside a long prompt: nobody waits for others."""
    scheduler = Scheduler(DEEPSEEK_V32, EngineOptions(max_batch=4, max_len=256, chunk_size=8), 256, selecting=1)
    given = np.zeros((1, 64, DEEPSEEK_V32.index_topk), np.int32)
    requests = [Request([1] * length, 20, replay=given if i in (0, 1) else None) for i, length in enumerate(prompts)]
    for request in requests:
        scheduler.submit(request)
    served = []
    while (plan := scheduler.plan()) is not None:
        assert {request.replay is not None for request in plan.requests} == {plan.replays}
        served.append((plan.mode is ForwardMode.DECODE, {id(request) for request in plan.requests}))
        scheduler.complete(plan, [[1] if s else [] for s in plan.samples], [[1.0] if s else [] for s in plan.samples])
    assert all(len(request.output) == 20 for request in requests)
    for request in requests:
        at = [i for i, (decodes, those) in enumerate(served) if decodes and id(request) in those]
        assert max(b - a for a, b in itertools.pairwise(at)) <= 4  # a step of the other kind, and chunks between


def test_kinds_of_steps_take_turns_over_shares():
    """A step of all shares has one mode, and replays or selects; no share waits for more than a step of each kind."""
    options = EngineOptions(max_batch=4, max_len=512, chunk_size=8)
    schedulers = Schedulers([Scheduler(DEEPSEEK_V32, options, 256, selecting=1) for _ in range(3)])
    given = np.zeros((1, 400, DEEPSEEK_V32.index_topk), np.int32)
    # Of each share one request: that replays a long prompt, that reads one, and that decodes by replay.
    requests = [Request([1] * 300, 8, replay=given), Request([1] * 300, 8), Request([1] * 4, 60, replay=given)]
    for request in requests:
        schedulers.submit(request)
    served, kinds = [], set()
    while (plan := schedulers.plan()) is not None:
        parts = [part for part in plan.parts if part]
        kinds.add((plan.mode, plan.replays))
        assert {(part.mode, part.replays) for part in parts} == {(plan.mode, plan.replays)}
        served.append({id(request) for part in parts for request in part.requests})
        tokens = [[1] if sampled else [] for sampled in plan.samples]
        schedulers.complete(plan, tokens, [[1.0] * len(row) for row in tokens])
    assert len(kinds) == 4 and all(len(request.output) == request.max_new_tokens for request in requests)
    for request in requests:
        at = [i for i, those in enumerate(served) if id(request) in those]
        assert max(b - a for a, b in itertools.pairwise(at)) <= len(kinds), at

"""A prompt no longer than what is selected attends over expanded heads: the same tokens, logits within rounding."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla import DeviceInfo
from jax_sparse_mla.device import pretend
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving import Model, deepseek_v32
from jax_sparse_mla.serving.comparison import MAX_LOGIT_DIFFERENCE
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.mesh import MeshEngine
from jax_sparse_mla.serving.plan import StepPlan
from jax_sparse_mla.serving.presets import CONFIGS, V32_SLICE
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.shapes_alone import ShapesAlone
from jax_sparse_mla.serving.start import all_programs

H200 = DeviceInfo("cuda", (9, 0), 132, 232_448)
SMALL = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, index_n_heads=4, index_topk=1024)
SMALL |= dict(q_lora_rank=32, moe_intermediate_size=32, intermediate_size=64)
# GLM-5's heads are as wide for values as for keys, and some of its layers share a selection.
MODELS = {"v32": CONFIGS["v32"] | SMALL, "glm5": CONFIGS["glm5"] | SMALL | dict(qk_nope_head_dim=192, v_head_dim=256)}
OPTIONS = EngineOptions(chunk_size=256, max_batch=2, max_len=1024, trace=True)


@pytest.fixture
def as_on_an_h200(monkeypatch):
    """The rule of an H200, for as few rows as a test has."""
    rule = deepseek_v32.attends_expanded

    def rule_there(*arguments):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DeviceInfo, "current", lambda: H200)
            return rule(*arguments)

    monkeypatch.setattr("jax_sparse_mla.serving.engine.attends_expanded", rule_there)
    monkeypatch.setattr(deepseek_v32, "EXPANDED_FROM_ROWS", 16)


def engine_of(name, **changes):
    model = Model.from_config(MODELS[name])
    return Engine(model, model.init_params(seed=0, dtype=jnp.bfloat16), dataclasses.replace(OPTIONS, **changes))


def new_requests(*lengths, new=4, **fields):
    rng = np.random.default_rng(0)
    return [Request(rng.integers(0, 256, length).tolist(), new, **fields) for length in lengths]


def served(engine, *lengths, **fields):
    """Requests of a run, the logits of their tokens, and the engine's programs of chunks that are new."""
    requests, before, logits = new_requests(*lengths, **fields), set(engine.routes), []
    engine.run(requests)
    for step in engine.trace:
        logits += [np.asarray(row, np.float32) for _, row in step.chosen()]
    programs = [program for program in engine.routes if program not in before and program.mode is ForwardMode.EXTEND]
    return requests, np.stack(logits), programs


@pytest.mark.always("v32")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_logits_and_selection_are_those_of_the_latent_space(request, name):
    """Decoding reads what the chunk has written; rows that pad the chunk are in neither."""
    engine = engine_of(name)
    plain, logits, programs = served(engine, 200, return_selected=True)
    assert [program.expanded for program in programs] == [False]
    request.getfixturevalue("as_on_an_h200")
    engine = engine_of(name)  # with nothing in its caches
    again, others, programs = served(engine, 200, return_selected=True)
    assert [program.expanded for program in programs] == [True]
    assert engine.routes[programs[0]] == {("prefill", "expanded")}
    assert again[0].output == plain[0].output
    assert np.array_equal(again[0].selected, plain[0].selected)
    assert set(again[0].selected[0, 199]) - {-1} == set(range(200))
    assert 0 < np.abs(others - logits).max() <= MAX_LOGIT_DIFFERENCE * np.abs(logits).max()


def test_attention_to_all_is_float64_s():
    """At V3.2's true widths, of few heads; what pads the chunk is not read, whatever it is."""
    config = Model.from_config(V32_SLICE | dict(num_attention_heads=2, num_hidden_layers=1)).config
    heads, tokens, count, rng = 2, 96, 70, np.random.default_rng(0)

    def random(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16)

    q, stored = random(tokens, heads, 192, scale=3.0), random(tokens, 576)
    q, stored = q.at[count:].set(jnp.nan), stored.at[count:].set(0)
    up = {name: random(heads, 128, 512, scale=512**-0.5) for name in ("k_up", "v_up")}
    weights = deepseek_v32.LatentWeights(in_proj=None, q_b=None, o_proj=None, **up)
    got = jax.jit(deepseek_v32.attend_to_all, static_argnums=0)(config, weights, q, stored, jnp.int32(count))
    assert got.shape == (tokens, heads, 128) and got.dtype == jnp.bfloat16

    q, stored, k_up, v_up = (np.asarray(x, np.float64) for x in (q[:count], stored[:count], up["k_up"], up["v_up"]))
    latent, rope = stored[:, :512], stored[:, 512:]
    scores = np.einsum("thd,hdl,sl->hts", q[..., :128], k_up, latent) + np.einsum("thr,sr->hts", q[..., 128:], rope)
    scores = np.where(np.tri(count, dtype=bool), scores * config.spec.softmax_scale, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    want = np.einsum("hts,sl,hvl->thv", shares, latent, v_up)
    got = np.asarray(got[:count], np.float64)
    cosines = (got * want).sum(-1) / np.linalg.norm(got, axis=-1) / np.linalg.norm(want, axis=-1)
    assert cosines.min() > 0.9999 and np.abs(got - want).max() < 0.02 * np.abs(want).max()


def plan_of(engine, starts, counts, mode=ForwardMode.EXTEND, width=1024, **fields):
    n, (starts, counts) = len(starts), np.array([starts, counts], np.int32)
    return StepPlan(
        mode=mode,
        requests=new_requests(*[4] * n),
        rows=np.arange(n, dtype=np.int32),
        starts=starts,
        counts=counts,
        tokens=np.zeros(counts.sum(), np.int32),
        samples=np.ones(n, bool),
        max_seq_len=width,
        mapped=np.zeros((0, 4), np.int32),
        **fields,
    )


def test_which_steps_attend_over_expanded_heads(as_on_an_h200, monkeypatch):
    engine = ShapesAlone(MODELS["v32"], OPTIONS)

    def expanded(*arguments, **fields):
        return engine._bucket(plan_of(engine, *arguments, **fields))[-1]

    assert expanded([0], [200])
    assert not expanded([1], [200]) and not expanded([0, 0], [100, 100])  # a rest of a prompt; two of them
    assert not expanded([0], [200], width=2048) and not expanded([0], [200], replays=True)
    assert not expanded([0], [1], ForwardMode.DECODE)
    keys = list(all_programs(engine))
    chunks = [key for key in keys if key[0] is ForwardMode.EXTEND and key[5] is Choice.GREEDY]
    assert sorted(key[-1] for key in chunks) == [False] * 5 + [True] * 5 and len(set(keys)) == len(keys)
    for changes in ({"backend": "reference"}, {"prefill_backend": "flashmla_kv"}, {"batch_invariant": True}):
        engine.options = dataclasses.replace(OPTIONS, **changes)
        assert not expanded([0], [200]), changes
    engine.options = OPTIONS
    assert expanded([0], [200])
    monkeypatch.setenv("JAX_SPARSE_MLA_PREFILL_BACKEND", "reference")
    assert not expanded([0], [200])


def test_shares_of_a_mesh_attend_alike(as_on_an_h200):
    """One program serves a step of all of them."""
    engine = object.__new__(MeshEngine)
    engine.__dict__ |= ShapesAlone(MODELS["v32"], OPTIONS).__dict__
    alone, rest = plan_of(engine, [0], [200]), plan_of(engine, [1], [100])

    def bucket(*parts):
        return engine._bucket(SimpleNamespace(parts=parts))

    assert bucket(alone, None)[-1] and bucket(alone, alone)[-1]
    assert bucket(alone, rest) == bucket(rest, alone) == (*bucket(alone, None)[:-1], False)


def test_what_the_rule_takes():
    """V3.2's and GLM-5's released heads, of rows that select everything, on SM90 alone."""
    config = Model.from_config(V32_SLICE).config

    def rule(rows=512, width=2048, device=H200, **changes):
        with pretend(device):
            return deepseek_v32.attends_expanded(dataclasses.replace(config, **changes), rows, width)

    assert rule() and rule(nope_dim=192, v_dim=256)
    assert not rule(rows=511) and not rule(width=4096) and not rule(v_dim=256) and not rule(nope_dim=256)
    assert not rule(device=DeviceInfo("cpu")) and not rule(device=DeviceInfo("cuda", (10, 0), 148, 232_448))
    with pretend(H200):
        for other in ("v4", "glm53"):
            assert not deepseek_v32.attends_expanded(Model.from_config(CONFIGS[other]).config, 512, 512)

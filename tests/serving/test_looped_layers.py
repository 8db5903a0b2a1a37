"""A program that loops over layers of the same kinds: what one that has them one after the other computes, as many
operations whatever the number of layers, and no copy of a cache."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.serving_steps import Steps, run

from jax_sparse_mla import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.serving import Model, StepInputs
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.params import LoopedLayers, Run, runs_of
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.scheduler import EngineOptions

CHUNK, BATCH = 144, 3
SMALL = {"hidden_size": 64, "moe_intermediate_size": 64, "q_lora_rank": 32, "index_n_heads": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4}


def small_model(name: str, repetitions: int = 2) -> Model:
    """V4: a window, then C128 and C4 by turns. V3.2: a dense layer, then experts. GLM-5.3: two layers of linear
    attention between others. All layers of GLM-5 but one in three take another's selection."""
    config = CONFIGS[name] | (SMALL if name != "glm53" else {})
    if name == "v4":
        c4, c128 = "compressed_sparse_attention", "heavily_compressed_attention"
        types = ["sliding_attention", *[c128, c4] * repetitions]
        config |= {"layer_types": types, "num_hidden_layers": len(types), "mlp_layer_types": ["moe"] * len(types)}
        config |= {"index_topk": 16}
    elif name == "v32":
        config |= {"num_hidden_layers": 1 + repetitions, "index_topk": 64}
    return Model.from_config(config)


def looped_shapes(model: Model):
    return jax.eval_shape(lambda: model.looped(model.init_params(0)))


RUNS = {
    "v4": (Run(0), Run(1, 2, 2)),
    "v32": (Run(0), Run(1, 1, 2)),
    "glm53": (Run(0), Run(1, 1, 2), Run(3)),
}


@pytest.mark.parametrize(
    "kinds, runs",
    [
        ("aabcdcdcd", (Run(0, 1, 2), Run(2), Run(3, 2, 3))),  # V4-Flash's order
        ("abab", (Run(0, 2, 2),)),
        ("abacab", tuple(map(Run, range(6)))),
        ("aaabaaab", (Run(0, 4, 2),)),
        ("", ()),
    ],
)
def test_runs(kinds, runs):
    assert runs_of(kinds) == runs


@pytest.mark.always("v32")
@pytest.mark.parametrize("name", RUNS)
def test_loops_compute_what_layers_one_after_the_other_do(name):
    """Logits, caches, and each layer's input and selection, of two chunks and two decode steps (quickly: of chunks)."""
    model = small_model(name)
    params = model.init_params(0, jnp.float32)
    looped = model.looped(params)
    requests = [np.random.default_rng(0).integers(0, 256, count).tolist() for count in (2 * CHUNK - 40, 40)]
    results = []
    for parameters in (params, looped):
        steps = Steps(model, parameters, num_requests=2)
        served = [
            steps(ForwardMode.EXTEND, {0: (0, requests[0][:CHUNK])}, CHUNK),
            steps(ForwardMode.EXTEND, {0: (CHUNK, requests[0][CHUNK:]), 1: (0, requests[1])}, CHUNK),
        ]
        for i in range(0 if name == "v32" else 2):
            tokens = {row: (len(request) + i, [7 * i + row]) for row, request in enumerate(requests)}
            served.append(steps(ForwardMode.DECODE, tokens, 2))
        results.append((served, jax.tree.map(np.asarray, steps.caches)))
    (expected, expected_caches), (got, caches) = results
    for (logits, trace), (got_logits, got_trace) in zip(expected, got, strict=True):
        np.testing.assert_allclose(got_logits, logits, rtol=0, atol=1e-3 * np.abs(logits).max())
        assert len(got_trace) == model.num_layers
        for (x, selected), (got_x, got_selected) in zip(trace, got_trace, strict=True):
            np.testing.assert_allclose(*(x.astype(np.float32) for x in (got_x, x)), rtol=0, atol=1e-3 * np.abs(x).max())
            np.testing.assert_array_equal(got_selected, selected)
    jax.tree.map(np.testing.assert_array_equal, caches, expected_caches)


def lowered(name: str, repetitions: int, num_pages: int):
    """A decode step of a looped model, whose arguments take no memory."""
    model = small_model(name, repetitions)
    sizes = {"num_pages": num_pages, "num_swa_pages": num_pages, "max_requests": BATCH}
    params = looped_shapes(model)
    caches = jax.eval_shape(lambda: model.new_caches(**sizes))
    ones = jnp.ones(BATCH, jnp.int32)
    batch = ForwardBatch(
        mode=ForwardMode.DECODE, max_seq_len=512, req_pool_indices=ones, seq_lens=ones, out_cache_loc=ones
    )
    full_to_swa = jnp.append(jnp.arange(num_pages * model.spec.page_size), -1) if model.spec.window else None
    tables = RequestTables(req_to_token=jnp.zeros((BATCH, 512), jnp.int32), full_to_swa=full_to_swa)
    inputs = StepInputs(batch=batch, tables=tables, tokens=ones, positions=ones)
    return run.lower(model, params, caches, inputs), caches


@pytest.mark.parametrize("name", ["v4", "v32"])
def test_more_layers_are_no_more_operations(name):
    few, many = (lowered(name, repetitions, 8)[0].as_text() for repetitions in (2, 5))
    assert "stablehlo.while" in few
    assert len(re.findall(r"stablehlo\.\w+", few)) == len(re.findall(r"stablehlo\.\w+", many))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU's programs loop")
def test_no_cache_is_copied():
    """The memory of a step beside its arguments is that of one layer: a copied cache, and a weight that is widened for
    all layers at once, would take as much again for each."""
    temp = []
    for repetitions in (2, 5):
        step, caches = lowered("v32", repetitions, 20000)
        memory = step.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
        temp.append(memory.temp_size_in_bytes)
    assert temp[1] < temp[0] + 2**16 and temp[0] < 2**28, temp


def test_what_is_looped():
    """An engine on a CPU loops, where layers of the same kinds follow each other and none takes another's selection."""
    for name in ("v32", "glm5", "v4"):
        model = Model.from_config(CONFIGS[name])
        assert isinstance(looped_shapes(model).layers, list)
    for name, runs in RUNS.items():
        model = small_model(name)
        assert looped_shapes(model).layers.runs == runs
    model = small_model("v32")
    params = model.init_params(0)
    looped = model.looped(params)
    assert model.looped(looped) is looped
    last = jax.jit(looped.layers.at, static_argnums=(0, 1))(RUNS["v32"][1], 0, 1)
    for got, expected in ((last, params.layers[2]), *zip(map(looped.layers.__getitem__, range(3)), params.layers)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    engine = Engine(model, params, EngineOptions(max_batch=1, max_len=512))
    assert isinstance(engine.params.layers, LoopedLayers) == (jax.default_backend() == "cpu")

"""Quantised weights: what they stand for against torch's casts, products against float64 of the same stored weights,
joins and cuts, and an engine's tokens."""

import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support.hf_models import named_arrays, random_model, small_v4_config
from support.released_checkpoints import (
    FP4_CONFIG,
    FP8_CONFIG,
    from_fp4,
    quantised,
    released_v4,
    to_fp4,
    to_fp8,
    without_quantised,
    write,
)
from support.serving_models import torch_model

from jax_sparse_mla.serving import Model, load
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.layers import linear, matmul
from jax_sparse_mla.serving.moe import experts
from jax_sparse_mla.serving.params import LoopedLayers, Packed, Run, joined
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.quantised import JoinedRows, Quantised, WeightFormat, join_rows, multiplied_out
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.tensors import _random_quantised

pytestmark = pytest.mark.cpu
E8M0, BF16 = ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16


def random(*shape, seed=0, scale=0.1):
    return (scale * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def fp8(rows, columns, *, scales=E8M0, seed=0):
    """A weight and what torch makes of the same bytes: e4m3 numbers times their blocks' scales, in bfloat16. Blocks
    beside each other have different scales."""
    blocks = -(-rows // 128), -(-columns // 128)
    sizes = np.kron(2.0 ** (np.arange(np.prod(blocks)) % 5).reshape(blocks), np.ones((128, 128)))
    values, scale = to_fp8(random(rows, columns, seed=seed) * sizes[:rows, :columns], scales)
    if scales is np.float32:
        scale = scale * np.random.default_rng(seed).uniform(0.6, 1, scale.shape).astype(np.float32)
    numbers = torch.tensor(values.view(np.uint8)).view(torch.float8_e4m3fn).float()
    wide = torch.tensor(scale.astype(np.float32)).repeat_interleave(128, 0).repeat_interleave(128, 1)
    wide = (numbers * wide[:rows, :columns]).bfloat16().float().numpy()
    stored = scale.view(np.uint8) if scales is E8M0 else scale
    return Quantised.stored(WeightFormat.FP8, values.view(np.uint8), stored, BF16), wide


def fp4(*shape, seed=0):
    """Experts or one matrix, and the numbers of its bytes."""
    matrices = random(*shape, seed=seed).reshape(-1, *shape[-2:])
    packed, scales = map(np.stack, zip(*map(to_fp4, matrices)))
    wide = np.stack([from_fp4(*x) for x in zip(packed, scales)]).reshape(shape)
    packed, scales = (x.view(np.uint8).reshape(*shape[:-1], -1) for x in (packed, scales))
    return Quantised.stored(WeightFormat.FP4, packed, scales, BF16), wide


@pytest.mark.parametrize("shape", [(256, 384), (200, 192), (64, 128)])
def test_products_of_stored_weights(shape):
    """Those of the multiplied-out weights to the bit, and float64's of the same numbers within bfloat16's rounding."""
    x = jnp.asarray(random(9, shape[1], scale=1), jnp.bfloat16)
    for weight, wide in (fp8(*shape), fp8(*shape, scales=np.float32), fp4(*shape)):
        assert weight.shape == shape and weight.dtype == BF16
        np.testing.assert_array_equal(multiplied_out(weight).astype(np.float32), wide)
        got = jax.jit(linear)(x, weight)
        np.testing.assert_array_equal(got, jax.jit(linear)(x, jnp.asarray(wide, jnp.bfloat16)))
        exact = np.asarray(x, np.float64) @ wide.astype(np.float64).T
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8, atol=1e-5 * np.abs(exact).max())


def test_experts_read_stored_weights():
    """Few rows, each with its experts' weights, and many, sorted: to the bit as from bfloat16."""
    both = fp4(8, 128, 64, seed=1), fp4(8, 64, 64, seed=2)
    (gate_up, wide_up), (down, wide_down) = [(w, jnp.asarray(wide, jnp.bfloat16)) for w, wide in both]
    run = jax.jit(experts, static_argnums=5)
    for rows in (2, 30):
        x = jnp.asarray(random(rows, 64, scale=1), jnp.bfloat16)
        chosen = jnp.asarray(np.stack([np.random.default_rng(i).permutation(9)[:3] for i in range(rows)]), jnp.int32)
        weights = jnp.asarray(random(rows, 3))
        got, wanted = (run(x, chosen, weights, *pair, 1.0) for pair in ((gate_up, down), (wide_up, wide_down)))
        np.testing.assert_array_equal(got, wanted)
        assert np.abs(np.asarray(got)).max() > 1e-3


def test_joined_and_cut():
    """One behind the other, of other blocks' heights and other kinds; parts; what devices can share."""
    weights = [fp8(256, 192, seed=1), fp8(64, 192, seed=2), fp8(200, 192, seed=3)]
    whole, wide = join_rows([w for w, _ in weights]), np.concatenate([wide for _, wide in weights])
    assert isinstance(whole, Quantised) and whole.rows == 8
    np.testing.assert_array_equal(multiplied_out(whole).astype(np.float32), wide)
    whole = weights[0][0]
    for start, stop in ((0, 128), (128, 256), (64, 192), (5, 250)):
        part = whole.part(start, stop)
        np.testing.assert_array_equal(multiplied_out(part).astype(np.float32), weights[0][1][start:stop])
    assert [whole.divides(0, n) for n in (2, 4)] == [True, False] and not whole.divides(1, 2)
    assert fp8(128, 256)[0].divides(1, 2) and fp4(64, 64)[0].divides(1, 2) and not fp4(64, 32)[0].divides(1, 2)
    plain = jnp.asarray(random(40, 192), jnp.bfloat16)
    mixed = join_rows([whole, weights[1][0], plain, plain])
    assert isinstance(mixed, JoinedRows) and [x.shape[0] for x in mixed.parts] == [320, 80]
    x = jnp.asarray(random(3, 192), jnp.bfloat16)
    expected = np.concatenate(
        [matmul(x, multiplied_out(part)) for part in (whole, weights[1][0], plain, plain)], axis=1
    )
    np.testing.assert_allclose(matmul(x, mixed), expected, rtol=1e-6, atol=1e-6)
    assert join_rows([plain, plain]).shape == (80, 192)


def test_a_quantised_weight_is_kept_like_an_array():
    """In one array with others, stacked for a loop over layers, donated, and named in a kept program."""
    one, other = fp8(64, 128, scales=np.float32)[0], fp4(64, 128)[0]
    tree = {"a": one, "b": other, "c": jnp.arange(3.0)}
    back = jax.jit(lambda packed: packed.tree())(Packed.of(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    second = fp8(64, 128, scales=np.float32, seed=1)[0]
    weights = LoopedLayers(runs=(Run(0, 1, 2),), weights=[[jax.tree.map(joined, one, second)]])
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda x, i: x.at(x.runs[0], 0, i))(weights, 0), one)
    structure = jax.tree.structure(tree)
    assert pickle.loads(pickle.dumps(structure)) == structure and " at 0x" not in repr(structure)
    copy = jax.tree.map(jnp.copy, one)
    out = jax.jit(lambda x: jax.tree.map(lambda part: part[::-1], x), donate_argnums=0)(copy)
    assert all(x.is_deleted() for x in jax.tree.leaves(copy)) and out.shape == one.shape


def test_layers_of_other_formats_are_in_no_loop():
    """A checkpoint may have layers in FP8 beside others in bfloat16, or with scales of another dtype."""
    only = dict(num_hidden_layers=4, layer_types=["sliding_attention"] * 4, mlp_layer_types=["moe"] * 4)
    model = Model.from_config(CONFIGS["v4"] | only)
    params = model.init_params(0, as_stored=True)
    first, second, third, fourth = params.layers
    fourth = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.uint8 else x, fourth)
    params = dataclasses.replace(params, layers=[first, second, without_quantised(third), fourth])
    looped = model.looped(params).layers
    assert looped.runs == (Run(0, 1, 2), Run(2), Run(3))
    for i, layer in enumerate(params.layers):
        jax.tree.map(np.testing.assert_array_equal, looped[i], layer)


@pytest.mark.parametrize(
    "name, layers",
    [("v4", 1), pytest.param("v4", 3, marks=pytest.mark.long), pytest.param("v32", 2, marks=pytest.mark.long)],
)
def test_an_engine_gives_the_tokens_of_the_multiplied_out_weights(name, layers, tmp_path):
    """Greedy, from a folder with released names and formats; the parameters are kept on the device as stored."""
    only = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    one = layers == 1
    module = random_model(small_v4_config(**only), seed=0) if one else torch_model(name, torch.bfloat16)
    _, stored = quantised(named_arrays(module), E8M0 if name == "v4" else np.float32, fp4_experts=name == "v4")
    keys = json.loads(module.config.to_json_string()) | (FP4_CONFIG if name == "v4" else FP8_CONFIG)
    folder = write(tmp_path / name, keys, released_v4(stored) if name == "v4" else stored)
    served = []
    for as_stored in (True, False):
        model, params = load(folder, as_stored=as_stored)
        engine = Engine(model, params, EngineOptions(max_batch=1, max_len=64, chunk_size=16))
        requests = [Request(np.random.default_rng(n).integers(0, 256, n).tolist(), 6) for n in (40, 7)]
        engine.run(requests)
        served.append([request.output for request in requests])
        names = {x.dtype.name for x in jax.tree.leaves(engine.params)}
        assert ("uint8" in names) == as_stored
    assert served[0] == served[1] and len(served[0][0]) == 6


def test_random_parameters_as_released():
    """FP4 experts and FP8 of about unit gain."""
    model = Model.from_config(CONFIGS["v4"])
    params = jax.eval_shape(lambda: model.init_params(0, as_stored=True))
    mlp = params.layers[0].mlp
    assert (mlp.down.format, mlp.shared_down.format) == (WeightFormat.FP4, WeightFormat.FP8)
    wide = jax.eval_shape(lambda: model.init_params(0))
    found = jax.eval_shape(without_quantised, params)
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, wide)
    for form in WeightFormat:
        weight = multiplied_out(_random_quantised(jnp.uint32(1), "a_proj.weight", (64, 256), np.dtype(BF16), form))
        assert 0.65 < float(jnp.std(weight.astype(jnp.float32))) * 16 < 1.5, form

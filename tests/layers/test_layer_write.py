"""When a layer's writes are one kernel, and that its results stand where those of the plain functions stand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import LAYERS, MIDDLE, V4, all_layers, make_step, make_world, stacked, step_function

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.launch import triton_call
from jax_sparse_mla.launch.describe import Device
from jax_sparse_mla.layers import write

pytest.importorskip("triton")
pytest.importorskip("tvm_ffi")

DECODE, EXTEND, VERIFY = mla.ForwardMode.DECODE, mla.ForwardMode.EXTEND, mla.ForwardMode.TARGET_VERIFY
WORK = [(0, 7, 1), (1, 3, 1)]
ratios = pytest.mark.parametrize("ratio", [0, 4, 128])


@pytest.fixture
def dispatched(monkeypatch):
    """The pairs of results, by the kernel and by plain code, of every call that a kernel serves; as shapes."""
    found = []

    def dispatch(kernel, plain, *arguments):
        assert all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))  # under jit
        found.append([jax.eval_shape(function, *arguments) for function in (kernel, plain)])
        return plain(*arguments)

    monkeypatch.setattr(write, "dispatch", dispatch)
    monkeypatch.setattr(write, "executor", lambda: triton_call.Executor(Device((9, 0), 132)))
    monkeypatch.setattr(triton_call, "own_launcher", lambda: True)
    write._write.clear_cache()
    yield found
    write._write.clear_cache()


def trace(world, cache=None, params=None, *, mode=DECODE, work=WORK, num_rows=2):
    """Traces a layer's step; as `v4_layer` is called, inside a program."""
    batch, rows, _ = make_step(world, mode, work, num_rows=num_rows)
    arguments = cache or world.empty_cache(), rows, params or world.params, batch, world.tables
    step_function.cache_clear()
    return jax.eval_shape(step_function(world.ratio, False), *arguments)


@ratios
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_kernel_s_results_are_those_of_the_plain_functions(dispatched, ratio, pooled, bf16):
    world = make_world(ratio)
    cache, params = world.empty_cache(bf16=bf16), world.params
    if pooled and not bf16:
        cache, params = all_layers(world).layer(MIDDLE), stacked(params).layer(LAYERS - 1)
    trace(world, cache, params)
    ((kernel, plain),) = dispatched
    assert jax.tree.structure(kernel) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(kernel), jax.tree.leaves(plain), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_index_weights_take_the_scale_of_their_queries():
    """Each of another size: a scale left out, or another query's, would leave the order of the heads wrong."""
    world = make_world(4)
    batch, rows, _ = make_step(world, DECODE, WORK, num_rows=2)
    size = 10.0 ** np.arange(rows.index.weights.size).reshape(rows.index.weights.shape)
    index = dataclasses.replace(rows.index, q=(rows.index.q * size[..., None]).astype(jnp.bfloat16))
    rows = dataclasses.replace(rows, index=index)
    step = write.step_of((batch, mla.build_v4_metadata(V4, batch, world.tables), None), V4.kind(4))

    @jax.jit  # without what the caches take
    def queries_and_weights(*arguments):
        return write.write_layer_reference(*arguments, kind=V4.kind(4))[2:4]

    queries, weights = queries_and_weights(world.empty_cache(), rows, world.params, step)
    scales = np.asarray(weights / index.weights)
    queries = np.asarray(queries, np.float32) * (scales / size)[..., None]
    wanted = np.asarray(index.q, np.float32) / size[..., None] @ np.asarray(write.sylvester(128)) * 128**-0.5
    np.testing.assert_allclose(queries, wanted, atol=0.03 * np.abs(wanted).max())


def test_without_jit(dispatched):
    world = make_world(128)
    batch, rows, _ = make_step(world, DECODE, WORK, num_rows=2)
    metadata = mla.build_v4_metadata(V4, batch, world.tables)
    layers.v4_layer(world.empty_cache(), rows, world.params, batch, metadata, None, spec=V4, ratio=128)
    assert len(dispatched) == 1


@pytest.mark.parametrize("ratio", [4, 128])
def test_rows_that_replace_what_others_read(dispatched, ratio):
    """A ring with room for n rows more than its window serves steps of n + 1 rows a request."""
    world = make_world(ratio)
    batch, rows, _ = make_step(world, DECODE, WORK, num_rows=2)
    batch = dataclasses.replace(batch, mode=VERIFY, num_draft_tokens=3, out_cache_loc=jnp.zeros(6, jnp.int32))
    rows = jax.tree.map(lambda x: jnp.concatenate([x] * 3), rows)
    step_function.cache_clear()
    cache = world.empty_cache(max_draft_tokens=2)
    jax.eval_shape(step_function(ratio, False), cache, rows, world.params, batch, world.tables)
    assert len(dispatched) == 1
    dispatched.clear()
    trace(world, mode=EXTEND, work=[(0, 7, 3), (1, 3, 3)], num_rows=6)
    assert not dispatched


def test_compressors_that_are_not_alike(dispatched):
    """One kernel's numbers are those of both: states of other requests, and rope on fewer values, are served apart."""
    world = make_world(4)
    cache = world.empty_cache()
    more = jax.tree.map(lambda x: jnp.concatenate([x, x]), cache.index_state)
    trace(world, dataclasses.replace(cache, index_state=more))
    index = world.params.index_compressor
    fewer = dataclasses.replace(index, inv_freq=index.inv_freq[:4])
    trace(world, cache, dataclasses.replace(world.params, index_compressor=fewer))
    assert not dispatched
    trace(world, cache)
    assert dispatched


def test_the_sink_s_gradient(dispatched):
    world = make_world(0)
    batch, rows, _ = make_step(world, DECODE, WORK, num_rows=2)
    metadata = mla.build_v4_metadata(V4, batch, world.tables)

    def total(sink):
        params = dataclasses.replace(world.params, attn_sink=sink)
        arguments = world.empty_cache(), rows, params, batch, metadata, None
        out, *_ = layers.v4_layer(*arguments, spec=V4, ratio=0, backend="reference")
        return out.astype(jnp.float32).sum()

    cut = write.dispatch

    def without_gradient(kernel, plain, *arguments):
        return cut(kernel, plain, *jax.lax.stop_gradient(arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "dispatch", without_gradient)
        assert np.abs(np.asarray(jax.grad(total)(world.params.attn_sink))).max() > 0

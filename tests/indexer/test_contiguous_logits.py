"""`contiguous_index_logits`: the logits of keys in one piece, and their gradient, beside float64 autodiff."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from index_gradient import TOLERANCE, arguments, check, windows

import jax_sparse_mla as mla
from jax_sparse_mla.indexer import contiguous, contiguous_index_logits, hadamard_transform, quantize_index_q


@functools.partial(jax.jit, static_argnames="fp8")
def gradients(q, weights, keys, row_starts, lengths, g, *, fp8=False):
    logits, pull = jax.vjp(
        lambda *moving: contiguous_index_logits(*moving, row_starts, lengths, fp8=fp8), q, weights, keys
    )
    return logits, pull(g)


@pytest.fixture(params=[(32 << 20, 1024), (4 * 3 * 2 * 7, 7), (1, 1)], ids=["one_block", "blocks", "one_by_one"])
def blocks(request, monkeypatch):
    """Seven columns and a few rows at a time: the last block of either is one that begins earlier."""
    for name, value in zip(("CHUNK_BYTES", "MAX_COLUMNS"), request.param):
        monkeypatch.setattr(contiguous, name, value)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_causal_sequence(blocks, dtype):
    rng = np.random.default_rng(0)
    given = arguments(rng, 11, 3, 16, dtype)
    check(given, gradients(*given), TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@example(0, 9, 3, 20, [(5, 3), (0, 2**31 - 1), (-(2**31), 2**31 - 1), (2**31 - 1, 2**31 - 1), (-4, 6)])
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 5, 9]),  # each shape is a program
    st.sampled_from([1, 3]),
    st.sampled_from([1, 20, 33]),
    st.lists(st.tuples(windows, windows), min_size=1),
)
def test_of_any_windows(seed, rows, heads, columns, given):
    """Packed sequences, windows with nothing in them, and such that are partly or not at all inside."""
    starts, lengths = np.resize(np.array(given, np.int64), (rows, 2)).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contiguous, "CHUNK_BYTES", 4 * heads * 8 * 2)
        patch.setattr(contiguous, "MAX_COLUMNS", 8)
        of_windows = arguments(np.random.default_rng(seed), rows, heads, columns, "float32", starts, lengths)
        check(of_windows, gradients(*of_windows), 2e-6)


def test_what_no_row_sees_may_be_nan():
    """Keys behind the sequence, and gradients of logits of −inf."""
    rng = np.random.default_rng(1)
    q, weights, keys, starts, lengths, g = arguments(rng, 6, 2, 12, "float32", lengths=np.arange(6) + 2)
    want_logits, want = gradients(q, weights, keys, starts, lengths, g)
    unseen = np.arange(12) >= np.asarray(lengths)[:, None]
    logits, found = gradients(q, weights, keys.at[7:].set(jnp.nan), starts, lengths, jnp.where(unseen, jnp.nan, g))
    np.testing.assert_array_equal(logits, want_logits)
    for x, wanted in zip(found, want, strict=True):
        np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("rows, heads, columns", [(0, 2, 3), (3, 0, 3), (3, 2, 0)])
def test_nothing_to_score(rows, heads, columns):
    given = arguments(np.random.default_rng(0), rows, heads, columns, "float32", lengths=np.full(rows, 2))
    logits, found = gradients(*given)
    np.testing.assert_array_equal(logits, np.where(np.arange(columns) < 2, 0, -np.inf) * np.ones((rows, 1)))
    assert [x.shape for x in found] == [x.shape for x in given[:3]] and not any(np.any(x) for x in found)


def test_fp8_scores_as_serving_does_and_passes_the_gradient_through():
    """The keys that `index_logits` reads of a cache; the gradient is that of the dequantised queries and keys."""
    rng = np.random.default_rng(2)
    q, weights, keys, starts, lengths, g = arguments(rng, 20, 4, 32, "float32")
    q, keys = hadamard_transform(q), hadamard_transform(keys)
    logits, found = gradients(q, weights, keys, starts, lengths, g, fp8=True)
    cache = mla.write_index_k(jnp.zeros((2, 16 * 132), jnp.uint8), jnp.arange(32), keys)
    values, scale = quantize_index_q(q)
    pages = jnp.broadcast_to(jnp.arange(2), (20, 2))
    np.testing.assert_allclose(
        logits, mla.index_logits(values, weights * scale, cache, pages, lengths), rtol=1e-5, atol=1e-5
    )
    plain, _ = gradients(q, weights, keys, starts, lengths, g)
    assert np.abs(np.where(np.isneginf(plain), 0, logits - plain)).max() > 1e-2  # it rounds

    check((q, weights, keys, starts, lengths, g), (logits, found), 2e-6, fp8=True)


def test_a_batch_and_a_shard():
    """Under `vmap`, and under `shard_map`, where the gradient of keys that all devices have is summed."""
    rng = np.random.default_rng(3)
    q, weights, keys, starts, lengths, g = (
        jnp.stack(x) for x in zip(*(arguments(rng, 4, 2, 6, "float32") for _ in "ab"))
    )
    logits, found = jax.vmap(gradients)(q, weights, keys, starts, lengths, g)
    for i in range(2):
        want, expected = gradients(q[i], weights[i], keys[i], starts[i], lengths[i], g[i])
        for x, wanted in zip((logits, *found), (want, *expected), strict=True):
            np.testing.assert_allclose(x[i], wanted, rtol=1e-5, atol=1e-5)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))
    spec, whole = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()

    def loss(q, weights, keys):
        logits = contiguous_index_logits(q, weights, keys, starts[0], lengths[0])
        return jax.lax.psum(jnp.sum(jnp.where(jnp.isneginf(logits), 0, logits) * g[0]), "rows")

    cut = jax.shard_map(loss, mesh=mesh, in_specs=(spec, spec, whole), out_specs=whole)
    for x, wanted in zip(jax.grad(cut, (0, 1, 2))(q[0], weights[0], keys[0]), expected_of(found, 0), strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-5)


def expected_of(found, i):
    return [x[i] for x in found]


def test_the_memory_of_a_long_sequence():
    """4,096 rows of 65,536 keys and 64 heads, whose scores would be 64 GiB and whose logits are 1 GiB. Compiled, not
    run: beside arguments and results there are the blocks, and the gradients in float32."""
    rows, heads, columns = 4096, 64, 65536
    given = [
        jax.ShapeDtypeStruct((rows, heads, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        jax.ShapeDtypeStruct((columns, 128), jnp.bfloat16),
        *(jax.ShapeDtypeStruct((rows,), jnp.int32),) * 2,
    ]
    forward = jax.jit(contiguous_index_logits).lower(*given).compile().memory_analysis()
    assert forward.temp_size_in_bytes < 8 * contiguous.CHUNK_BYTES
    g = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    backward = jax.jit(lambda *given: gradients(*given)[1]).lower(*given, g).compile().memory_analysis()
    in_float32 = 4 * (rows * heads * 128 + columns * 128)
    assert backward.temp_size_in_bytes < 2 * in_float32 + 8 * contiguous.CHUNK_BYTES


def test_what_is_refused():
    q, weights, keys, starts, lengths, _ = arguments(np.random.default_rng(0), 3, 2, 5, "float32")
    for wrong, error, message in (
        ((q.astype(jnp.float8_e4m3fn), weights, keys, starts, lengths), TypeError, "q must be"),
        ((q, weights, keys.astype(jnp.bfloat16), starts, lengths), TypeError, "keys must be float32"),
        ((q, weights, keys[:, :64], starts, lengths), ValueError, "keys must have shape"),
        ((q, weights[:2], keys, starts, lengths), ValueError, "weights must have shape"),
        ((q, weights, keys, starts[:2], lengths), ValueError, "row_starts must have shape"),
    ):
        with pytest.raises(error, match=f"contiguous_index_logits: {message}"):
            contiguous_index_logits(*wrong)
    with pytest.raises(TypeError, match="fp8 must be a static bool, got int"):
        contiguous_index_logits(q, weights, keys, starts, lengths, fp8=1)

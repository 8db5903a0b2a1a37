"""Rows are mapped in chunks of one size, so a function of a row is compiled once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla._chunks import map_rows
from jax_sparse_mla.attention import reference
from jax_sparse_mla.compressor import api as compressor


@pytest.mark.long
@given(count=st.integers(0, 70), at_most=st.integers(0, 90))
@settings(max_examples=40, deadline=None)
def test_each_row_is_mapped_once(count, at_most):
    rows = {"x": jnp.arange(count * 3.0).reshape(count, 3), "index": jnp.arange(count)}
    found = map_rows(lambda row: (row["x"].sum(), row["index"] * 2), rows, at_most)
    expected = (np.arange(count * 3.0).reshape(count, 3).sum(1), np.arange(count) * 2)
    chex.assert_trees_all_close(jax.tree.map(np.asarray, found), expected)


def lines_with(operation, function, *args):
    return [line for line in str(jax.make_jaxpr(function)(*args)).splitlines() if f" {operation}" in line]


@pytest.mark.parametrize(
    ("count", "at_most", "size"),
    [(64, 15, 13), (64, 16, 16), (64, 100, 64), (29, 7, 6), (26, 7, 7), (5, 0, 1), (3, 2, 2)],
)
def test_no_chunk_is_larger_and_none_is_a_rest(count, at_most, size):
    (line,) = lines_with("sin ", lambda rows: map_rows(jax.lax.sin, rows, at_most), jnp.zeros(count))
    assert f"f32[{size}]" in line


def test_a_gradient_counts_each_row_once():
    x = jnp.arange(29.0)
    found = jax.grad(lambda x: map_rows(jax.lax.sin, x, 7).sum())(x)
    np.testing.assert_allclose(found, jnp.cos(x), rtol=1e-6)


def test_the_reference_and_the_compressor_have_one_copy_of_a_row_s_work(monkeypatch):
    columns, heads, dim, count = 24, 4, 512, 11
    monkeypatch.setattr(reference, "CHUNK_BYTES", 3 * columns * (6 * dim + 16 * heads) + 100)
    arguments = jnp.zeros((count, heads, dim)), jnp.zeros((64, dim)), jnp.zeros((count, columns), jnp.int32), None, None
    products = lines_with(
        "dot_general", lambda *args: reference.prefill.__wrapped__(*args, softmax_scale=0.3), *arguments
    )
    assert len(products) == 2  # scores, values

    ratio, head_dim, tokens = 4, 16, 44
    monkeypatch.setattr(compressor, "CHUNK_BYTES", 3 * 4 * 4 * 2 * ratio * head_dim)

    def compress(kv, score):
        state = compressor.CompressorState.zeros(1, ratio=ratio, head_dim=head_dim)
        positions, requests = jnp.arange(tokens, dtype=jnp.int32), jnp.zeros(tokens, jnp.int32)
        start, parameters = (
            jnp.asarray([0, tokens]),
            (jnp.zeros((ratio, 2 * head_dim)), jnp.ones(head_dim), jnp.ones(4)),
        )
        step = kv, score, positions, requests, start, *parameters
        static = {"ratio": ratio, "norm_eps": 1e-6, "num_entries": tokens // ratio}
        arrays = compressor.CompressorArrays(state.kv, state.score, *step)
        return compressor.compress_kv_reference(arrays, **static)

    rows = jnp.zeros((tokens, 2 * head_dim))
    assert len(lines_with("rsqrt", compress, rows, rows)) == 1

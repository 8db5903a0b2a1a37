"""Rows are mapped in chunks of one size wherever a divisor allows it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla._chunks import map_rows


@given(count=st.integers(0, 70), at_most=st.integers(0, 90))
@settings(max_examples=40, deadline=None)
def test_each_row_is_mapped_once(count, at_most):
    rows = {"x": jnp.arange(count * 3.0).reshape(count, 3), "index": jnp.arange(count)}
    found = map_rows(lambda row: (row["x"].sum(), row["index"] * 2), rows, at_most)
    expected = (np.arange(count * 3.0).reshape(count, 3).sum(1), np.arange(count) * 2)
    chex.assert_trees_all_close(jax.tree.map(np.asarray, found), expected)


@pytest.mark.parametrize(
    ("count", "at_most", "size", "bodies"),
    [(64, 15, 8, 1), (64, 16, 16, 1), (64, 100, 64, 1), (30, 7, 6, 1), (29, 7, 7, 2), (26, 7, 7, 2), (5, 0, 1, 1)],
)
def test_a_divisor_leaves_no_rest(count, at_most, size, bodies):
    def function(row):
        return jax.lax.sin(row)

    text = str(jax.make_jaxpr(lambda rows: map_rows(function, rows, at_most))(jnp.zeros(count)))
    sizes = [line for line in text.splitlines() if " sin " in line]
    assert len(sizes) == bodies and f"f32[{size}]" in sizes[0], text

"""merge_attention and apply_attn_sink: parts of the keys, merged, give what all keys give."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import BF16, assert_close_flashmla, attend
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.attention import apply_attn_sink, merge_attention, sparse_mla_prefill

ROWS, HEADS, KEYS, DIM, SCALE = 5, 3, 24, 64, 0.3


def attention_parts(seed: int, k: int, gain: float = 1.0):
    """Float64 attention of ROWS queries over k random disjoint parts of their keys, and over all of them.

    Row 0 has no keys at all; parts of other rows may be empty too.
    """
    rng = np.random.default_rng(seed)
    q = gain * rng.standard_normal((ROWS, HEADS, DIM))
    keys = rng.standard_normal((KEYS, DIM))
    part_of = rng.integers(0, k, (ROWS, KEYS))
    present = rng.random((ROWS, KEYS)) < rng.choice([0.1, 0.9], (ROWS, 1))
    present[0], present[1] = False, True
    parts = [
        [attend(q[row], keys[present[row] & (part_of[row] == i)], SCALE, None) for row in range(ROWS)] for i in range(k)
    ]
    whole = [attend(q[row], keys[present[row]], SCALE, None) for row in range(ROWS)]

    def outs_and_lses(results):
        return np.stack([x[0] for x in results]), np.stack([x[2] for x in results])

    outs, lses = zip(*(outs_and_lses(part) for part in parts))
    return np.stack(outs), np.stack(lses), *outs_and_lses(whole)


def float32(*arrays):
    return [jax.device_put(np.asarray(x, np.float32)) for x in arrays]


merge = jax.jit(merge_attention)  # without jit every slice and stack of the parts is a program of its own


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), k=st.sampled_from((1, 2, 3, 7)), gain=st.sampled_from((1.0, 100.0)))
def test_the_parts_merge_to_the_whole(seed, k, gain):
    outs, lses, whole_out, whole_lse = attention_parts(seed, k, gain)
    out, lse = merge(*float32(outs, lses))
    chex.assert_type([out, lse], jnp.float32)
    np.testing.assert_allclose(lse, whole_lse, rtol=2e-6, atol=2e-6)
    # An lse of n has an absolute error of n · 2⁻²⁴, which its weight takes over as a relative one.
    np.testing.assert_allclose(out, whole_out, rtol=1e-5, atol=1e-5 * gain)
    assert not np.any(out[0]) and np.all(np.isneginf(lse[0]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sequences_and_stacks_are_the_same(dtype):
    """But for the last bits: these are several compiled programs, and XLA contracts the sums of each in its own way."""
    outs, lses, _, _ = attention_parts(0, 3)
    outs, lses = jnp.asarray(outs, dtype), jnp.asarray(lses, jnp.float32)
    stacked = merge_attention(outs, lses)
    assert stacked[0].dtype == dtype and stacked[1].dtype == jnp.float32
    tolerance = float(jnp.finfo(dtype).eps)
    for merged in (
        merge_attention(list(outs), list(lses)),
        merge_attention(tuple(outs), tuple(lses)),
        merge_attention(list(outs), lses),
        merge_attention(np.asarray(outs), np.asarray(lses)),
        jax.jit(merge_attention)(outs, lses),
        jax.jit(merge_attention)(list(outs), list(lses)),
    ):
        chex.assert_trees_all_equal_dtypes(merged, stacked)
        # Terms of a sum are below 4, and what is left of it may be far less.
        chex.assert_trees_all_close(float32(*merged), float32(*stacked), rtol=tolerance, atol=1e-6)


def test_bfloat16_parts_are_summed_in_float32():
    """What bfloat16 parts lose is their own rounding and the result's, nothing in between."""
    outs, lses, whole_out, whole_lse = attention_parts(1, 7)
    out, lse = merge(jnp.asarray(outs, jnp.bfloat16), jnp.asarray(lses, jnp.float32))
    assert_close_flashmla(lse, whole_lse, "decode.lse")
    weights = np.exp(lses - np.where(np.isneginf(whole_lse), 0, whole_lse))[..., None]
    exact = (np.asarray(outs.astype(BF16), np.float64) * weights).sum(axis=0)
    np.testing.assert_array_less(np.abs(np.asarray(out, np.float64) - exact), 2**-8 * np.abs(exact) + 1e-7)
    np.testing.assert_allclose(np.asarray(out, np.float64), whole_out, atol=0.02)


def test_any_leading_dimensions():
    outs, lses, _, _ = attention_parts(2, 3)
    outs, lses = float32(outs, lses)
    expected_out, expected_lse = merge(outs, lses)
    out, lse = merge(outs[:, :4].reshape(3, 2, 2, HEADS, DIM), lses[:, :4].reshape(3, 2, 2, HEADS))
    chex.assert_trees_all_close(
        (out.reshape(4, HEADS, DIM), lse.reshape(4, HEADS)), (expected_out[:4], expected_lse[:4])
    )
    out, lse = merge(outs[:, 1], lses[:, 1])
    chex.assert_trees_all_close((out, lse), (expected_out[1], expected_lse[1]))
    out, lse = merge(outs[:, :0], lses[:, :0])
    chex.assert_shape([out, lse], [(0, HEADS, DIM), (0, HEADS)])


def test_far_apart_lses():
    """No overflow, no NaN: the larger part takes it all."""
    outs = jnp.stack([jnp.full((2, 4), 1.0), jnp.full((2, 4), 2.0)])
    lses = jnp.array([[3e38, -3e38], [-3e38, 1e30]], jnp.float32)
    out, lse = merge(outs, lses)
    np.testing.assert_array_equal(out[:, 0], [1.0, 2.0])
    np.testing.assert_array_equal(lse, np.array([3e38, 1e30], np.float32))


def test_gradients():
    """Finite, zero where a part has no keys, and those of the plain formula where every part has some."""
    outs, lses, _, _ = attention_parts(5, 3)
    outs, lses = float32(outs, lses)
    rng = np.random.default_rng(0)
    w_out, w_lse = float32(rng.standard_normal((ROWS, HEADS, DIM)), rng.standard_normal((ROWS, HEADS)))

    def loss(outs, lses):
        out, lse = merge(outs, lses)
        return jnp.sum(w_out[: len(out)] * out) + jnp.sum(w_lse[: len(lse)] * jnp.where(jnp.isneginf(lse), 0, lse))

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    by_outs, by_lses = gradients(outs, lses)
    chex.assert_tree_all_finite((by_outs, by_lses))
    empty = np.isneginf(lses)
    assert empty.any() and not np.any(by_outs[empty]) and not np.any(by_lses[empty])

    def plain(outs, lses):
        lse = jnp.log(jnp.sum(jnp.exp(lses), axis=0))
        out = jnp.sum(outs * jnp.exp(lses - lse)[..., None], axis=0)
        return jnp.sum(w_out[: len(out)] * out) + jnp.sum(w_lse[: len(lse)] * lse)

    full = outs[:, 1:2], lses[:, 1:2]  # row 1 has every key
    assert np.all(np.isfinite(full[1]))
    expected = jax.jit(jax.grad(plain, (0, 1)))(*full)
    chex.assert_trees_all_close(gradients(*full), expected, rtol=1e-4, atol=1e-5)


# --- with the attention functions ---


def prefill_inputs(seed: int):
    rng = np.random.default_rng(seed)
    q, kv = float32(rng.standard_normal((ROWS, HEADS, DIM)), rng.standard_normal((KEYS, DIM)))
    indices = rng.integers(-3, KEYS + 3, (ROWS, 32)).astype(np.int32)
    indices[0] = -1
    return q, kv, jnp.asarray(indices)


SINK = np.array([np.inf, -np.inf, 0.7], np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_sink_after_the_merge_is_the_sink_in_the_call(dtype):
    q, kv, indices = prefill_inputs(7)
    q = q.astype(dtype)
    out, _, lse = sparse_mla_prefill(q, kv, indices, softmax_scale=SCALE)
    arguments = {"softmax_scale": SCALE, "attn_sink": jnp.asarray(SINK)}
    expected, _, _ = sparse_mla_prefill(q, kv, indices, **arguments)
    actual = apply_attn_sink(out, lse, jnp.asarray(SINK))
    assert actual.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=tolerance)
    assert not np.any(actual[:, 0]) and not np.any(actual[0])
    chex.assert_trees_all_equal(actual[:, 1], out[:, 1])


def test_the_sink_formula():
    """`out · exp(lse) / (exp(lse) + exp(sink))`, also where exp overflows; rows without a key are 0."""
    lse = np.array([[0.0, -5.0, 3.0], [100.0, -200.0, 3e38], [-np.inf, -np.inf, -np.inf]], np.float32)
    sink = np.array([1.5, -300.0, 200.0], np.float32)
    out = np.ones((3, 3, 4), np.float32)
    actual = np.asarray(apply_attn_sink(jnp.asarray(out), jnp.asarray(lse), jnp.asarray(sink)))
    share = 1 / (1 + np.exp(np.minimum(sink.astype(np.float64) - lse.astype(np.float64)[:2], 700)))
    np.testing.assert_allclose(actual[:2], share[..., None] * out[:2], rtol=1e-5, atol=1e-37)
    np.testing.assert_array_equal(actual[2], 0)
    for infinite, expected in ((np.inf, 0), (-np.inf, 1)):
        result = apply_attn_sink(jnp.asarray(out), jnp.asarray(lse), jnp.full((3,), infinite, jnp.float32))
        np.testing.assert_array_equal(result[:2], expected * out[:2])


def test_sink_gradients_are_finite():
    lse = np.array([[0.5, 1.0, -np.inf], [-np.inf, 2.0, 0.1]], np.float32)
    out = np.ones((2, 3, 4), np.float32)
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(apply_attn_sink(*a)), (0, 1, 2)))
    for sink in (SINK, -SINK, np.array([np.inf, -1e30, 1e30], np.float32)):
        found = gradients(out, lse, sink)
        chex.assert_tree_all_finite(found)
        assert not np.any(np.asarray(found[2])[np.isinf(sink)])
    sink = np.array([0.3, -0.2, 0.1], np.float32)
    _, _, by_sink = gradients(out, lse, sink)
    share = 1 / (1 + np.exp(sink - lse))
    np.testing.assert_allclose(by_sink, -4 * np.sum(np.where(np.isinf(lse), 0, share * (1 - share)), 0), rtol=1e-5)


# --- bad input ---

OUT, LSE = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    "outs, lses, error, name",
    [
        (OUT[:0, None], LSE[:0, None], ValueError, "outs and lses"),
        (np.stack([OUT] * 2), [LSE] * 3, ValueError, "outs and lses"),
        ([OUT], [LSE.astype(BF16)], TypeError, r"lses\[0\]"),
    ],
)
def test_bad_merge_input(outs, lses, error, name):
    """`tests/contract/test_bad_input.py` has the rest."""
    with pytest.raises(error, match=f"^merge_attention: {name}"):
        merge_attention(outs, lses)


def test_bad_sink_input():
    for lse, sink, name in ((LSE.astype(BF16), LSE[0], "lse"), (LSE, LSE[0].astype(BF16), "attn_sink")):
        with pytest.raises(TypeError, match=f"^apply_attn_sink: {name} "):
            apply_attn_sink(OUT, lse, sink)


def test_what_an_absent_part_holds_does_not_matter():
    """A kernel may leave the rows of a part without keys unwritten."""
    here, lost = jnp.full((2, 3, 4), 2.0), jnp.full((2, 3, 4), jnp.nan)
    present, absent = jnp.zeros((2, 3)), jnp.full((2, 3), -jnp.inf)
    out, lse = merge([here, lost], [present, absent])
    np.testing.assert_array_equal(out, here)
    np.testing.assert_array_equal(lse, present)
    np.testing.assert_array_equal(merge_attention([lost, lost], [absent, absent])[0], 0)
    np.testing.assert_array_equal(apply_attn_sink(lost, absent, jnp.zeros(3)), 0)

"""The choice of tokens on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla.serving.sampling import SamplingArrays, greedy, sample

VOCABULARY = 12
LOGITS = np.random.default_rng(0).normal(size=VOCABULARY).astype(np.float32) * 2
draw = jax.jit(sample)


def arrays(rows, temperature, top_p=1.0, seed=0):
    return SamplingArrays(
        temperature=jnp.full(rows, temperature, jnp.float32),
        top_p=jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), (rows,)),
        seed=jnp.broadcast_to(jnp.asarray(seed, jnp.int32), (rows,)),
    )


def test_greedy_takes_the_lower_of_equals_and_tells_margins():
    logits = jnp.asarray([[4.0, 1.0, 5.0], [-2.0, -1.0, -2.0], [7.0, 7.0, 0.0]])
    tokens, margins, finite = greedy(logits)
    assert tokens.tolist() == [2, 1, 0] and margins.tolist() == pytest.approx([0.2, 1.0, 0.0])
    assert finite.all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_greedy_finds_what_is_not_finite(odd):
    """Anywhere in a row, and in no other row."""
    rows = np.random.default_rng(0).normal(size=(9, 3000)).astype(np.float32)
    rows[[0, 4, 8], [0, 1234, 2999]] = odd
    tokens, _, finite = jax.jit(greedy)(rows)
    assert finite.tolist() == [i not in (0, 4, 8) for i in range(9)]
    assert (tokens[1:4] == rows[1:4].argmax(-1)).all() and ((tokens >= 0) & (tokens < 3000)).all()
    assert (jax.jit(greedy)(np.full((2, 7), np.nan, np.float32))[0] < 7).all()


@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.05])
def test_draws_have_the_probabilities_of_the_softmax(top_p):
    """20,000 draws against numpy's own cut; four standard deviations."""
    rows, temperature = 20000, 1.5
    tokens, *_ = draw(jnp.tile(LOGITS, (rows, 1)), jnp.arange(rows), arrays(rows, temperature, top_p))
    expected = np.exp(LOGITS / temperature - np.max(LOGITS / temperature))
    expected /= expected.sum()
    order = np.argsort(-expected)
    kept = order[: np.searchsorted(np.cumsum(expected[order]), top_p) + 1]
    cut = np.zeros(VOCABULARY)
    cut[kept] = expected[kept] / expected[kept].sum()
    counts = np.bincount(np.asarray(tokens), minlength=VOCABULARY) / rows
    assert (counts[cut == 0] == 0).all()
    np.testing.assert_allclose(counts, cut, atol=4 * 0.5 / rows**0.5)


@pytest.mark.cpu  # whose softmax of these is exact
def test_tokens_that_reach_top_p_exactly_are_enough():
    logits = jnp.tile(jnp.log(jnp.asarray([0.125, 0.5, 0.125, 0.25])), (64, 1))
    for top_p, kept in ((0.5, {1}), (0.75, {1, 3}), (0.76, {0, 1, 2, 3})):
        assert set(draw(logits, jnp.arange(64), arrays(64, 1.0, top_p))[0].tolist()) == kept


def test_a_draw_depends_on_its_seed_and_position_alone():
    """Not on its place in the batch, nor on the others' parameters."""
    rows = 64
    logits, positions = jnp.tile(LOGITS, (rows, 1)), jnp.arange(rows)
    first, *_ = draw(logits, positions, arrays(rows, 2.0, seed=5))
    order = np.random.default_rng(1).permutation(rows)
    params = arrays(rows, 2.0, seed=np.where(order % 2, 5, 9))
    other, *_ = draw(logits, positions[order], params)
    same = order % 2 == 1
    assert (np.asarray(other)[same] == np.asarray(first)[order[same]]).all()
    assert (np.asarray(other)[~same] != np.asarray(first)[order[~same]]).any()
    assert len(set(np.asarray(first).tolist())) > 4


def test_the_whole_vocabulary_needs_no_sort():
    """The same tokens as beside a request whose top_p cuts."""
    logits, positions = jnp.tile(LOGITS, (64, 1)), jnp.arange(64)
    params = arrays(64, 1.5, top_p=np.where(np.arange(64) % 2, 0.3, 1.0).astype(np.float32))
    cut, *_ = draw(logits, positions, params)
    uncut, *_ = jax.jit(lambda *given: sample(*given, cut=False))(logits, positions, params)
    assert (cut == uncut)[::2].all() and (cut != uncut)[1::2].any()


def test_a_temperature_of_zero_is_greedy():
    params = SamplingArrays(
        temperature=jnp.asarray([0.0, 5.0] * 8), top_p=jnp.ones(16), seed=jnp.arange(16, dtype=jnp.int32)
    )
    tokens, *_ = draw(jnp.tile(LOGITS, (16, 1)), jnp.arange(16), params)
    assert (tokens[::2] == LOGITS.argmax()).all() and (tokens[1::2] != LOGITS.argmax()).any()

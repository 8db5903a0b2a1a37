"""Decode context parallel: the ownership rule against a loop over tokens, and the global top-k against one device's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.indices import Ownership, local_candidates, select_candidates, topk_positions

ROWS, COLUMNS, TOPK = 5, 96, 7


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5), interleave=st.integers(1, 9), length=st.integers(-3, 120))
def test_ranks_take_turns(size, interleave, length):
    """Every token is somewhere once, in its order and without gaps."""
    rule, tokens = Ownership(size, interleave), [[] for _ in range(size)]
    for position in range(max(0, length)):
        tokens[position // interleave % size].append(position)
    every = np.arange(max(0, length))
    for rank, own in enumerate(tokens):
        assert int(rule.local_lengths(jnp.int32(length), rank)) == len(own)
        np.testing.assert_array_equal(rule.position(np.arange(len(own)), rank), own)
        np.testing.assert_array_equal(rule.local(np.asarray(own, int)), np.arange(len(own)))
        np.testing.assert_array_equal(rule.owner(every) == rank, np.isin(every, own))


def test_turns_have_a_token():
    with pytest.raises(ValueError, match="Ownership: interleave must be >= 1, got 0"):
        Ownership(2, 0)


def test_index_lists_are_packed():
    rng = np.random.default_rng(0)
    rule = Ownership(3, 2)
    lists, lengths = rng.integers(-4, 50, (2, 4, 11)), rng.integers(-1, 13, (2, 4))
    total = 0
    for rank in range(3):
        found, counts = rule.pack(jnp.asarray(lists, jnp.int32), rank, jnp.asarray(lengths, jnp.int32))
        total += np.asarray(counts)
        for row, length, own, count in zip(
            lists.reshape(8, -1), lengths.flat, np.asarray(found).reshape(8, -1), np.asarray(counts).flat
        ):
            expected = [p // 6 * 2 + p % 2 for p in row[: max(0, length)] if p >= 0 and p // 2 % 3 == rank]
            assert own.tolist() == expected + [-1] * (11 - len(expected)) and count == len(expected)
    counted = (np.arange(11) < lengths[..., None]) & (lists >= 0)
    np.testing.assert_array_equal(total, counted.sum(-1))


@jax.jit
def of_one(logits, lengths):
    return topk_positions(logits, lengths, TOPK)


@partial(jax.jit, static_argnums=(2, 3))
def of_all(ranks, lengths, topk, rule):
    """The same of the logits that each rank keeps."""
    offered = [local_candidates(own, lengths, topk, rule, rank) for rank, own in enumerate(ranks)]
    keys, positions = (jnp.stack(part) for part in zip(*offered))
    return select_candidates(keys, positions, lengths, topk)


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from([(1, 1), (2, 1), (3, 4), (4, 8), (5, 7)]),
    values=st.sampled_from(["normal", "few", "zeros", "hostile"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_global_topk_is_one_device_s(case, values, seed):
    """To the bit: ties go to the lower position, the zeros are equal, NaN is below every number. Rows with fewer
    positions than are chosen, ranks with none, and rows that are longer than the logits."""
    rng, rule = np.random.default_rng(seed), Ownership(*case)
    logits = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    if values == "few":
        logits = rng.integers(-1, 2, logits.shape).astype(np.float32)
    elif values == "zeros":
        logits = np.where(rng.random(logits.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
    elif values == "hostile":
        logits = rng.choice(np.array([np.nan, -np.inf, np.inf, 1e-45, -1e-45, 0.0], np.float32), logits.shape)
    lengths = np.array([rng.integers(8, COLUMNS), rng.integers(0, 8), -5, COLUMNS, rng.integers(0, COLUMNS)], np.int32)
    # What a rank keeps, padded with what must not be read.
    own_columns = -(-COLUMNS // (rule.size * rule.interleave)) * rule.interleave
    ranks = []
    for rank in range(rule.size):
        own = np.full((ROWS, own_columns), np.inf, np.float32)
        kept = logits[:, rule.owner(np.arange(COLUMNS)) == rank]
        own[:, : kept.shape[1]] = kept
        ranks.append(own)
    np.testing.assert_array_equal(of_all(ranks, lengths, TOPK, rule), of_one(logits, lengths))


def test_columns_that_no_rank_has_are_never_given():
    found = of_all([np.ones((1, 5), np.float32)] * 2, np.full(1, 40, np.int32), 12, Ownership(2, 1))
    assert found.tolist() == [[*range(10), -1, -1]]

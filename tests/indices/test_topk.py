"""Top-k positions and their transforms against a sort in plain Python."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topk_oracle import INF, INT_MAX, INT_MIN, NAN, assert_positions, brute_positions, draw_ints, draw_logits

from jax_sparse_mla.indices import TopkTransform, topk_positions, topk_transform

SEEDS = st.integers(0, 2**32 - 1)
EXAMPLES = settings(max_examples=50, deadline=None)
SHAPES = [(7, 50, 8), (7, 50, 1), (3, 5, 8), (2, 0, 4), (0, 9, 4), (4, 130, 64)]


def programs(*variants):
    """Strategy: (shape, variant), the first shape with each variant and the others with one: each is compiled."""
    pairs = itertools.product(SHAPES[:1], variants), zip(SHAPES[1:], itertools.cycle(variants))
    return st.sampled_from([*itertools.chain(*pairs)])


class TestPositions:
    @EXAMPLES
    @given(
        seed=SEEDS,
        kind=st.sampled_from(["few values", "normal"]),
        # The logits' dtype, and whether rows have starts.
        program=programs((np.float32, True), (jnp.bfloat16, False), (np.float32, False), (jnp.bfloat16, True)),
    )
    def test_brute_force(self, seed, kind, program):
        rng = np.random.default_rng(seed)
        (rows, columns, topk), (dtype, ragged) = program
        logits = draw_logits(rng, rows, columns, kind, dtype)
        lengths = draw_ints(rng, rows, 0, columns + 9)
        starts = draw_ints(rng, rows, -3, columns + 2) if ragged else None
        got = topk_positions(logits, lengths, topk, starts)
        assert_positions(got, brute_positions(logits, lengths, topk, starts), topk)

    def test_short_rows_do_not_read_their_logits(self):
        lengths = jnp.array([0, 1, 3, 4, -1, INT_MIN], jnp.int32)
        want = [[-1] * 4, [0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3], [-1] * 4, [-1] * 4]
        for columns in (0, 2, 9):
            logits = jnp.full((6, columns), NAN)
            assert topk_positions(logits, lengths, 4).tolist() == want
            starts = jnp.array([INT_MAX, INT_MIN, 5, -1, 0, 3], jnp.int32)
            assert topk_positions(logits, lengths, 4, starts).tolist() == want

    @pytest.mark.parametrize(
        ("row", "want"),
        [
            ([1, 2, 2, 2, 0], [1, 2]),  # a tie goes to the lower position
            ([-1, 0.0, -0.0, 0.0, -1], [1, 2]),
            ([-1, -0.0, 0.0, 0.0, -1], [1, 2]),
            ([-0.0, 1e-42, -1e-42, 0.0, -1], [0, 1]),
            ([NAN, -INF, NAN, NAN, -INF], [1, 4]),  # −inf is a value
            ([NAN, NAN, NAN, -NAN, NAN], [0, 1]),  # NaN only where nothing else is left
            ([NAN, INF, -NAN, 3e38, NAN], [1, 3]),
            ([0, 1, 2, 3, 4], [3, 4]),  # ascending positions, not descending logits
        ],
    )
    def test_order(self, row, want):
        got = topk_positions(jnp.array([row], jnp.float32), jnp.array([5], jnp.int32), 2)
        assert got[0].tolist() == want

    def test_minus_infinity_beats_what_is_outside_the_window(self):
        logits = np.full((1, 10), INF, np.float32)
        logits[0, 3:8] = [-INF, NAN, -INF, NAN, -INF]
        got = topk_positions(logits, jnp.array([5], jnp.int32), 4, jnp.array([3], jnp.int32))
        assert got[0].tolist() == [0, 1, 2, 4]

    def test_columns_that_the_logits_do_not_have(self):
        """A window over the edge gives the columns that exist, and −1 for the rest."""
        logits = jnp.arange(6.0)[None]
        for start, length, want in [(4, 9, [0, 1]), (-2, 5, [2, 3, 4]), (6, 9, []), (INT_MIN, INT_MAX, [])]:
            got = topk_positions(logits, jnp.array([length], jnp.int32), 4, jnp.array([start], jnp.int32))
            assert got[0].tolist() == want + [-1] * (4 - len(want))
        got = topk_positions(logits, jnp.array([INT_MAX], jnp.int32), 4, jnp.array([2], jnp.int32))
        assert got[0].tolist() == [0, 1, 2, 3]


def brute_slot(position, page_table, request, page_size):
    if position < 0 or not 0 <= request < page_table.shape[0] or position // page_size >= page_table.shape[1]:
        return -1
    page = int(page_table[request, position // page_size])
    slot = page * page_size + position % page_size
    return slot if page >= 0 and slot <= INT_MAX else -1


class TestTransform:
    @EXAMPLES
    @given(
        seed=SEEDS,
        # The page size, whether rows name their requests, and whether they have starts.
        program=programs((64, True, True), (3, False, True), (1, True, False), (64, False, False), (3, True, True)),
    )
    def test_paged(self, seed, program):
        rng = np.random.default_rng(seed)
        (rows, columns, topk), (page_size, by_request, ragged_logits) = program
        logits = draw_logits(rng, rows, columns, "few values")
        lengths = draw_ints(rng, rows, 0, columns + 9)
        starts = draw_ints(rng, rows, -3, 20) if ragged_logits else None
        requests = 3 if by_request else rows
        page_table = rng.choice([0, 1, 5, 900, -1, -7, INT_MIN, INT_MAX, INT_MAX // page_size], (requests, 9))
        page_table = page_table.astype(np.int32)
        row_to_request = draw_ints(rng, rows, -1, 4) if by_request else None
        got = topk_transform(
            logits,
            lengths,
            topk,
            method=TopkTransform.PAGED,
            page_table=page_table,
            page_size=page_size,
            row_to_request=row_to_request,
            row_starts=starts,
        )
        chex.assert_shape(got, (rows, topk))
        chex.assert_type(got, jnp.int32)
        for i, positions in enumerate(brute_positions(logits, lengths, topk, starts)):
            request = i if row_to_request is None else int(row_to_request[i])
            slots = [brute_slot(p, page_table, request, page_size) for p in positions]
            assert got[i].tolist() == slots + [-1] * (topk - len(slots))  # holes in their places

    @EXAMPLES
    @given(seed=SEEDS, program=programs(True, False))
    def test_ragged(self, seed, program):
        rng = np.random.default_rng(seed)
        (rows, columns, topk), ragged_logits = program
        logits = draw_logits(rng, rows, columns, "few values")
        lengths = draw_ints(rng, rows, 0, columns + 9)
        starts = draw_ints(rng, rows, -3, 20) if ragged_logits else None
        offset = rng.choice([0, 1, 77, INT_MAX, INT_MAX - 3, -1, INT_MIN], rows).astype(np.int32)
        got = topk_transform(
            logits,
            lengths,
            topk,
            method=TopkTransform.RAGGED,
            topk_indices_offset=offset,
            row_starts=starts,
        )
        for i, positions in enumerate(brute_positions(logits, lengths, topk, starts)):
            sums = [p + int(offset[i]) if offset[i] >= 0 and p + int(offset[i]) <= INT_MAX else -1 for p in positions]
            assert got[i].tolist() == sums + [-1] * (topk - len(sums))

    def test_under_jit_and_with_the_other_methods_arguments(self):
        """One call site serves both methods: what the method does not use is ignored."""
        logits, lengths = jnp.array([[3.0, 1.0, 2.0, 0.0]]), jnp.array([4], jnp.int32)
        table, offset = jnp.array([[8, 3]], jnp.int32), jnp.array([100], jnp.int32)

        def call(method):
            return jax.jit(
                lambda *x: topk_transform(
                    x[0], x[1], 2, method=method, page_table=x[2], page_size=2, topk_indices_offset=x[3]
                )
            )(logits, lengths, table, offset)

        assert call(TopkTransform.PAGED)[0].tolist() == [16, 6]
        assert call(TopkTransform.RAGGED)[0].tolist() == [100, 102]

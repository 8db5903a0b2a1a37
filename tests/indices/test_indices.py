"""Look-ups, window slots and merged index lists against brute-force loops in Python's integers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.indices import (
    combine_swa_extra_indices,
    combine_topk_swa_indices,
    swa_gather_plan,
    swa_slots,
)
from jax_sparse_mla.indices.lookup import (
    add_or_minus_one,
    exclusive_cumsum,
    page_slot_or_minus_one,
    take_2d_or_minus_one,
    take_or_minus_one,
)

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
HOSTILE = [INT_MIN, INT_MIN + 1, -129, -7, -1, INT_MAX - 1, INT_MAX]
SEEDS = st.integers(0, 2**32 - 1)
EXAMPLES = settings(max_examples=40, deadline=None)


# Compiled as a whole, as callers have them: operation by operation they are many programs.
take = jax.jit(take_or_minus_one)
take_2d = jax.jit(take_2d_or_minus_one)
page_slot = jax.jit(page_slot_or_minus_one, static_argnums=3)
cumsum = jax.jit(exclusive_cumsum)
traced_combine_swa_extra = jax.jit(combine_swa_extra_indices)
combine_topk_swa = jax.jit(combine_topk_swa_indices, static_argnames=("window", "compress_ratio", "topk"))


def draw(rng, shape, low, high, hostile=0.15):
    """Integers in [low, high), some of them hostile."""
    values = rng.integers(low, max(high, low + 1), shape)
    return np.where(rng.random(shape) < hostile, rng.choice(HOSTILE, shape), values).astype(np.int32)


def tables(rng, requests, max_len, pool, hostile=0.15):
    """req_to_token and full_to_swa, with slots that are out of range, unmapped or hostile."""
    full_to_swa = draw(rng, (pool + 1,), 0, pool, hostile)
    full_to_swa[-1] = -1
    return draw(rng, (requests, max_len), 0, pool + 3, hostile), full_to_swa


def at(table, *index):
    """The rule of every look-up: −1 outside the table and for negative entries."""
    if any(not 0 <= int(i) < n for i, n in zip(index, table.shape, strict=True)):
        return -1
    return max(int(table[tuple(index)]), -1)


def plus(index, base):
    """Sums of indices: −1 where one is negative or the sum does not fit."""
    total = int(index) + int(base)
    return total if index >= 0 and base >= 0 and total <= INT_MAX else -1


class TestLookup:
    @EXAMPLES
    @given(seed=SEEDS, shape=st.sampled_from([(0, 0), (0, 5), (1, 1), (13, 0), (13, 5)]))
    def test_take(self, seed, shape):
        rng, (size, pages) = np.random.default_rng(seed), shape
        line, table = draw(rng, (size,), -3, 100), draw(rng, (size, pages), -3, 100)
        row, column = draw(rng, (4, 1), -2, size + 2, 0.3), draw(rng, (1, 6), -2, pages + 2, 0.3)
        got = take(line, row)
        assert got.tolist() == [[at(line, r) for r in x] for x in row]
        got = take_2d(table, row, column)
        assert got.tolist() == [[at(table, r, c) for c in column[0]] for r in row[:, 0]]
        chex.assert_type(got, jnp.int32)

    @EXAMPLES
    @given(seed=SEEDS, page_size=st.sampled_from([1, 3, 64, 2**20]))
    def test_page_slot(self, seed, page_size):
        rng = np.random.default_rng(seed)
        # Pages around the last one that still fits int32, besides small and hostile ones.
        table = rng.choice([0, 1, 7, -1, INT_MIN, INT_MAX, INT_MAX // page_size], (3, 4)).astype(np.int32)
        row, position = draw(rng, (5, 1), -1, 4), draw(rng, (5, 8), -3, 5 * page_size, 0.2)
        got = page_slot(table, row, position, page_size)

        def slot(r, p):
            page = at(table, r, int(p) // page_size)
            value = page * page_size + int(p) % page_size
            return value if p >= 0 and page >= 0 and value <= INT_MAX else -1

        assert got.tolist() == [[slot(r[0], p) for p in ps] for r, ps in zip(row, position, strict=True)]

    def test_add_never_wraps(self):
        values = [*HOSTILE, 0, 1, 5, INT_MAX // 2, INT_MAX // 2 + 1]
        got = add_or_minus_one(jnp.array(values, jnp.int32)[:, None], jnp.array(values, jnp.int32)[None, :])
        assert got.tolist() == [[plus(a, b) for b in values] for a in values]

    @pytest.mark.parametrize(
        "counts", [[], [4], [0, 3, 0, 5], [INT_MAX, 0, INT_MAX, 7], [INT_MAX // 2] * 9, [1, INT_MAX - 1, 1]]
    )
    def test_exclusive_cumsum_saturates(self, counts):
        want = [min(sum(counts[:i]), INT_MAX) for i in range(len(counts) + 1)]
        assert cumsum(np.array(counts, np.int32)).tolist() == want


def brute_swa_slots(positions, req_rows, req_to_token, full_to_swa, window):
    """Column k: the sliding-window slot of position pos − k."""
    out = []
    for pos, row in zip(positions.tolist(), req_rows.tolist(), strict=True):
        window_positions = [pos - k if pos >= 0 else -1 for k in range(window)]
        out.append([at(full_to_swa, at(req_to_token, row, p)) for p in window_positions])
    return out


class TestSwaSlots:
    @EXAMPLES
    @given(seed=SEEDS, shape=st.sampled_from([(0, 4), (1, 1), (7, 4), (7, 33)]))
    def test_brute_force(self, seed, shape):
        rng = np.random.default_rng(seed)
        rows, window = shape
        req_to_token, full_to_swa = tables(rng, 3, 20, 40)
        positions, req_rows = draw(rng, (rows,), -1, 24), draw(rng, (rows,), -1, 4)
        got = swa_slots(positions, req_rows, req_to_token, full_to_swa, window=window)
        chex.assert_shape(got, (rows, window))
        chex.assert_type(got, jnp.int32)
        assert got.tolist() == brute_swa_slots(positions, req_rows, req_to_token, full_to_swa, window)

    def test_newest_first_and_minus_one_past_the_start(self):
        req_to_token = jnp.arange(8, dtype=jnp.int32).reshape(1, 8)
        full_to_swa = jnp.array([10, 11, 12, 13, 14, 15, 16, 17, -1], jnp.int32)
        got = swa_slots(jnp.array([5, 1, -1], jnp.int32), jnp.zeros(3, jnp.int32), req_to_token, full_to_swa, window=4)
        assert got.tolist() == [[15, 14, 13, 12], [11, 10, -1, -1], [-1] * 4]

    def test_lowest_position_does_not_wrap_into_the_table(self):
        """INT_MIN − 127 wraps to a large positive position in int32: no column may be read."""
        got = swa_slots(
            jnp.array([INT_MIN, INT_MAX], jnp.int32),
            jnp.zeros(2, jnp.int32),
            jnp.zeros((1, 4), jnp.int32),
            jnp.array([7, -1], jnp.int32),
            window=128,
        )
        assert (np.asarray(got) == -1).all()

    @pytest.mark.parametrize(
        ("error", "name", "change"),
        [
            (TypeError, "positions", {"positions": jnp.zeros(2)}),
            (ValueError, "req_rows", {"req_rows": jnp.zeros(3, jnp.int32)}),
            (ValueError, "req_to_token", {"req_to_token": jnp.zeros(3, jnp.int32)}),
            (TypeError, "full_to_swa", {"full_to_swa": None}),
            (ValueError, "window", {"window": 0}),
            (TypeError, "window", {"window": 2.0}),
        ],
    )
    def test_bad_arguments_are_named(self, error, name, change):
        zeros = jnp.zeros(2, jnp.int32)
        arguments = {
            "positions": zeros,
            "req_rows": zeros,
            "req_to_token": zeros[None],
            "full_to_swa": zeros,
            "window": 4,
        }
        with pytest.raises(error, match=f"swa_slots: {name}"):
            swa_slots(**(arguments | change))


def brute_gather_plan(seq_lens, extend_lens, req_rows, req_to_token, full_to_swa, window, capacity):
    slots, first_pos, gather_lens, offsets = [], [], [], [0]
    for seq, extend, row in zip(seq_lens.tolist(), extend_lens.tolist(), req_rows.tolist(), strict=True):
        seq = max(seq, 0)
        gather = max(min(seq, extend + window - 1), 0)
        first_pos.append(seq - gather)
        gather_lens.append(gather)
        offsets.append(min(offsets[-1] + gather, INT_MAX))
        room = max(capacity - len(slots), 0)
        slots += [
            at(full_to_swa, at(req_to_token, row, p)) for p in range(seq - gather, seq - gather + min(gather, room))
        ]
    return slots + [-1] * (capacity - len(slots)), first_pos, gather_lens, offsets


class TestSwaGatherPlan:
    @EXAMPLES
    @given(
        seed=SEEDS,
        shape=st.sampled_from([(0, 3, 5), (1, 1, 4), (4, 3, 64), (6, 8, 40), (6, 8, 0)]),
        hostile=st.sampled_from([0, 0.3]),
    )
    def test_brute_force(self, seed, shape, hostile):
        rng = np.random.default_rng(seed)
        batch, window, capacity = shape
        req_to_token, full_to_swa = tables(rng, 3, 20, 40)
        seq_lens, extend_lens = draw(rng, (batch,), 0, 22, hostile), draw(rng, (batch,), 0, 9, hostile)
        req_rows = draw(rng, (batch,), 0, 3, hostile)
        arguments = (seq_lens, extend_lens, req_rows, req_to_token, full_to_swa)
        got = swa_gather_plan(*arguments, window=window, capacity=capacity)
        chex.assert_shape(got, [(capacity,), (batch,), (batch,), (batch + 1,)])
        chex.assert_type(got, [jnp.int32] * 4)
        for name, x, want in zip(
            ("slots", "first_pos", "gather_lens", "offsets"),
            got,
            brute_gather_plan(*arguments, window, capacity),
            strict=True,
        ):
            assert x.tolist() == want, name

    def test_overflow_shows_in_the_offsets(self):
        """The offsets are the true totals, whatever fits, and do not wrap."""
        lens = jnp.array([30, 30], jnp.int32)
        table, swa = jnp.zeros((1, 64), jnp.int32), jnp.array([3, -1], jnp.int32)
        rows = jnp.zeros(2, jnp.int32)
        slots, _, _, offsets = swa_gather_plan(lens, lens, rows, table, swa, window=8, capacity=40)
        assert offsets.tolist() == [0, 30, 60]
        assert slots.tolist() == [3] * 40
        huge = jnp.full((2,), INT_MAX, jnp.int32)
        assert swa_gather_plan(huge, huge, rows, table, swa, window=8, capacity=4)[3].tolist() == [
            0,
            INT_MAX,
            INT_MAX,
        ]

    def test_requests_may_come_in_any_order_and_padding_changes_nothing(self):
        rng = np.random.default_rng(5)
        req_to_token, full_to_swa = tables(rng, 4, 20, 40, hostile=0)
        seq, extend = np.array([9, 20, 4, 13], np.int32), np.array([2, 7, 4, 1], np.int32)
        rows = np.arange(4, dtype=np.int32)

        def segments(order):
            order = np.asarray(order)
            live = order >= 0
            slots, _, _, offsets = swa_gather_plan(
                np.where(live, seq[order], 0),
                np.where(live, extend[order], 0),
                np.where(live, rows[order], -7),
                req_to_token,
                full_to_swa,
                window=6,
                capacity=64,
            )
            parts = np.split(np.asarray(slots), np.asarray(offsets)[1:])
            assert (parts.pop() == -1).all()
            return {int(b): part.tolist() for b, part in zip(order, parts, strict=True) if b >= 0}

        assert segments([0, 1, 2, 3]) == segments([3, 1, 0, 2]) == segments([-1, 2, -1, 1, 0, 3, -1])

    def test_compiles_once_per_bucket(self):
        traces = []

        @jax.jit
        def plan(seq_lens, extend_lens):
            traces.append(1)
            return swa_gather_plan(seq_lens, extend_lens, rows, table, swa, window=4, capacity=16)

        rows, table = jnp.arange(2, dtype=jnp.int32), jnp.arange(20, dtype=jnp.int32).reshape(2, 10)
        swa = jnp.arange(21, dtype=jnp.int32).at[20].set(-1)
        for seq, extend in [([3, 0], [1, 0]), ([10, 7], [2, 7])]:
            arguments = (np.array(seq), np.array(extend), np.arange(2), np.asarray(table), np.asarray(swa))
            got = plan(jnp.array(seq, jnp.int32), jnp.array(extend, jnp.int32))
            assert [x.tolist() for x in got] == list(brute_gather_plan(*arguments, 4, 16))
        assert len(traces) == 1

    @pytest.mark.parametrize(
        ("error", "name", "change"),
        [
            (TypeError, "seq_lens", {"seq_lens": jnp.zeros(2, jnp.uint8)}),
            (ValueError, "extend_lens", {"extend_lens": jnp.zeros(3, jnp.int32)}),
            (ValueError, "req_rows", {"req_rows": jnp.zeros((2, 1), jnp.int32)}),
            (ValueError, "window", {"window": 0}),
            (ValueError, "capacity", {"capacity": -1}),
        ],
    )
    def test_bad_arguments_are_named(self, error, name, change):
        zeros = jnp.zeros(2, jnp.int32)
        arguments = dict(seq_lens=zeros, extend_lens=zeros, req_rows=zeros, req_to_token=zeros[None], full_to_swa=zeros)
        with pytest.raises(error, match=f"swa_gather_plan: {name}"):
            swa_gather_plan(**(arguments | {"window": 4, "capacity": 8} | change))


def ceil128(n):
    return (n + 127) // 128 * 128


def brute_swa_extra(swa, swa_lens, extra, extra_lens, num_swa_rows):
    width, rows, lengths = ceil128(swa.shape[1] + extra.shape[1]), [], []
    for s, sl, e, el in zip(swa.tolist(), swa_lens.tolist(), extra.tolist(), extra_lens.tolist(), strict=True):
        sl, el = min(max(sl, 0), len(s)), min(max(el, 0), len(e))
        row = [x if 0 <= x < num_swa_rows else -1 for x in s[:sl]] + [plus(x, num_swa_rows) for x in e[:el]]
        rows.append(row + [-1] * (width - len(row)))
        lengths.append(sl + el)
    return rows, lengths


class TestCombineSwaExtra:
    @EXAMPLES
    @given(
        seed=SEEDS,
        shape=st.sampled_from([(1, 1, 1), (5, 128, 64), (5, 7, 122), (4, 0, 9), (4, 9, 0), (3, 0, 0), (0, 4, 4)]),
        num_swa_rows=st.sampled_from([0, 1, 50, INT_MAX - 20, INT_MAX]),
        traced=st.booleans(),
    )
    def test_brute_force(self, seed, shape, num_swa_rows, traced):
        rng = np.random.default_rng(seed)
        rows, swa_width, extra_width = shape
        swa, extra = draw(rng, (rows, swa_width), -2, 60), draw(rng, (rows, extra_width), -2, 60)
        swa_lens, extra_lens = draw(rng, (rows,), 0, swa_width + 3), draw(rng, (rows,), 0, extra_width + 3)
        call = traced_combine_swa_extra if traced else combine_swa_extra_indices
        indices, lengths = call(swa, swa_lens, extra, extra_lens, num_swa_rows)
        want = brute_swa_extra(swa, swa_lens, extra, extra_lens, num_swa_rows)
        chex.assert_shape([indices, lengths], [(rows, ceil128(swa_width + extra_width)), (rows,)])
        chex.assert_type([indices, lengths], jnp.int32)
        assert indices.tolist() == want[0]
        assert lengths.tolist() == want[1]

    def test_a_hole_never_becomes_a_row(self):
        """−1 + num_swa_rows would be the last sliding-window row, and INT_MAX + 1 wraps to a negative one."""
        indices, lengths = combine_swa_extra_indices(
            jnp.array([[3, -1, 10]], jnp.int32),
            jnp.array([3], jnp.int32),
            jnp.array([[-1, 0, INT_MAX]], jnp.int32),
            jnp.array([3], jnp.int32),
            jnp.int32(10),
        )
        assert indices[0, :7].tolist() == [3, -1, -1, -1, 10, -1, -1]
        assert lengths.tolist() == [6]

    def test_a_negative_row_count_that_is_data_leaves_nothing_valid(self):
        ones = jnp.ones((1, 2), jnp.int32)
        indices, lengths = combine_swa_extra_indices(ones, ones[:, 0] * 2, ones, ones[:, 0] * 2, jnp.int32(-1))
        assert (np.asarray(indices) == -1).all()
        assert lengths.tolist() == [4]

    @pytest.mark.parametrize(
        ("error", "name", "change"),
        [
            (TypeError, "swa_indices", {"swa_indices": jnp.zeros((2, 3))}),
            (ValueError, "swa_lengths", {"swa_lengths": jnp.zeros(3, jnp.int32)}),
            (ValueError, "extra_indices", {"extra_indices": jnp.zeros((3, 3), jnp.int32)}),
            (ValueError, "extra_lengths", {"extra_lengths": jnp.zeros((2, 1), jnp.int32)}),
            (ValueError, "num_swa_rows", {"num_swa_rows": -1}),
            (ValueError, "num_swa_rows", {"num_swa_rows": 2**31}),
            (TypeError, "num_swa_rows", {"num_swa_rows": 2.0}),
            (TypeError, "num_swa_rows", {"num_swa_rows": True}),
            (ValueError, "num_swa_rows", {"num_swa_rows": jnp.zeros(2, jnp.int32)}),
        ],
    )
    def test_bad_arguments_are_named(self, error, name, change):
        wide, flat = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
        arguments = dict(swa_indices=wide, swa_lengths=flat, extra_indices=wide, extra_lengths=flat, num_swa_rows=4)
        with pytest.raises(error, match=f"combine_swa_extra_indices: {name}"):
            combine_swa_extra_indices(**(arguments | change))


def brute_topk_swa(topk_indices, qsl, query_pos, seq_lens, gather_lens, c_base, s_base, window, ratio, topk):
    """The rule of each row, written literally, in integers that do not wrap."""
    width, rows, lengths = ceil128(topk + window), [], []
    starts = [int(x) - int(qsl[0]) for x in qsl]
    for i, (row, pos) in enumerate(zip(topk_indices.tolist(), query_pos.tolist(), strict=True)):
        requests = [r for r in range(len(seq_lens)) if starts[r] <= i]
        if i >= starts[-1] or not requests or pos < 0 or seq_lens[requests[-1]] <= 0:
            rows.append([-1] * width)
            lengths.append(0)
            continue
        r = requests[-1]
        seq, gather = int(seq_lens[r]), int(gather_lens[r])
        topk_len, swa_len = min((pos + 1) // ratio, topk), min(pos + 1, window)
        out = [plus(e, c_base[r]) if 0 <= e < seq // ratio else -1 for e in row[:topk_len]]
        for j in range(swa_len):
            rel = pos - swa_len + 1 - (seq - gather) + j
            out.append(plus(rel, s_base[r]) if 0 <= rel < gather else -1)
        rows.append(out + [-1] * (width - len(out)))
        lengths.append(len(out))
    return rows, lengths


def chunk(rng, batch, rows, columns, ratio, hostile):
    """A prefill chunk of `batch` requests, some without rows, `rows` in all with padding behind."""
    extend = rng.integers(0, 6, batch) * (rng.random(batch) < 0.7)
    while extend.sum() > rows:
        extend[rng.integers(batch)] = 0
    seq = extend + rng.integers(0, 40, batch) * (extend > 0)
    window = 7
    gather = np.minimum(seq, extend + window - 1)
    qsl = np.concatenate([[0], np.cumsum(extend)])
    pos = np.full(rows, -1)
    pos[: qsl[-1]] = np.concatenate([np.arange(s - e, s) for s, e in zip(seq, extend, strict=True)] or [[]])
    compressed = seq // ratio
    c_base = np.concatenate([[0], np.cumsum(compressed)])
    s_base = c_base[-1] + np.concatenate([[0], np.cumsum(gather)])[:-1]
    if hostile:
        pos = pos + rng.integers(0, 3, rows)  # some at or past the end of their request
    arrays = [
        draw(rng, (rows, columns), -1, 40 // ratio + 2, hostile),
        qsl + rng.integers(0, 1000),  # a slice of a longer query_start_loc
        pos,
        seq,
        gather,
        c_base[:-1],
        s_base,
    ]
    for i in (2, 3, 4, 5, 6):
        arrays[i] = np.where(rng.random(arrays[i].shape) < hostile, rng.choice(HOSTILE, arrays[i].shape), arrays[i])
    return [x.astype(np.int32) for x in arrays], int(c_base[-1] + gather.sum())


class TestCombineTopkSwa:
    @EXAMPLES
    @given(
        seed=SEEDS,
        # Requests, rows, columns; the compress ratio and topk.
        shape=st.sampled_from(
            [
                (3, 16, 6, 1, 0),
                (3, 16, 6, 4, 6),
                (3, 16, 6, 4, 3),
                (1, 5, 0, 4, 0),
                (5, 16, 125, 1, 121),
                (5, 16, 125, 4, 6),
                (0, 3, 2, 1, 2),
            ]
        ),
        hostile=st.sampled_from([0, 0.2]),
    )
    def test_brute_force(self, seed, shape, hostile):
        batch, rows, columns, ratio, topk = shape
        arrays, _ = chunk(np.random.default_rng(seed), batch, rows, columns, ratio, hostile)
        static = dict(window=7, compress_ratio=ratio, topk=topk)
        indices, lengths = combine_topk_swa(*arrays, **static)
        want = brute_topk_swa(*arrays, 7, ratio, topk)
        chex.assert_shape([indices, lengths], [(rows, ceil128(topk + 7)), (rows,)])
        chex.assert_type([indices, lengths], jnp.int32)
        assert lengths.tolist() == want[1]
        assert indices.tolist() == want[0]

    @EXAMPLES
    @given(seed=SEEDS)
    def test_no_row_reads_another_request_and_no_window_entry_is_missing(self, seed):
        """On a consistent chunk every entry lies in its request's regions, and the window has no hole."""
        arrays, workspace = chunk(np.random.default_rng(seed), 3, 16, 6, 4, 0)
        _, qsl, pos, seq, gather, c_base, s_base = arrays
        indices, lengths = map(np.asarray, combine_topk_swa(*arrays, window=7, compress_ratio=4, topk=6))
        owner = np.full(workspace, -1)
        for r in range(3):
            owner[c_base[r] : c_base[r] + seq[r] // 4] = r
            owner[s_base[r] : s_base[r] + gather[r]] = r
        request_of = np.repeat(np.arange(3), np.diff(qsl))
        for i, r in enumerate(request_of):
            entries = indices[i][indices[i] >= 0]
            assert (owner[entries] == r).all()
            window = min(pos[i] + 1, 7)
            assert (indices[i, lengths[i] - window : lengths[i]] >= s_base[r]).all()
        assert (indices[len(request_of) :] == -1).all()
        assert not lengths[len(request_of) :].any()

    def test_by_hand(self):
        """One request of 10 tokens, 3 of them new, 5 gathered; then an empty one, then one of 2 tokens."""
        indices, lengths = combine_topk_swa_indices(
            jnp.array([[1, 0, 9], [0, -1, 1], [1, 0, -1], [0, 0, 0], [0, 0, 0], [0, 0, 0]], jnp.int32),
            jnp.array([100, 103, 103, 105], jnp.int32),
            jnp.array([7, 8, 9, 0, 1, 0], jnp.int32),
            jnp.array([10, 5, 2], jnp.int32),
            jnp.array([5, 0, 2], jnp.int32),
            jnp.array([20, 99, 30], jnp.int32),
            jnp.array([40, 99, 50], jnp.int32),
            window=3,
            compress_ratio=4,
            topk=3,
        )
        assert indices.shape == (6, 128)
        assert lengths.tolist() == [5, 5, 5, 1, 2, 0]
        assert indices[:, :6].tolist() == [
            [21, 20, 40, 41, 42, -1],
            [20, -1, 41, 42, 43, -1],
            [21, 20, 42, 43, 44, -1],
            [50, -1, -1, -1, -1, -1],
            [50, 51, -1, -1, -1, -1],
            [-1] * 6,
        ]

    def test_the_highest_position_does_not_wrap(self):
        one = jnp.ones(1, jnp.int32)
        indices, lengths = combine_topk_swa_indices(
            jnp.array([[0, 1]], jnp.int32),
            jnp.array([0, 1], jnp.int32),
            jnp.array([INT_MAX], jnp.int32),
            one * INT_MAX,
            one * 4,
            one * (INT_MAX - 1),
            one * (INT_MAX - 2),
            window=4,
            compress_ratio=1,
            topk=2,
        )
        # Entry 1 is the last compressed row that fits int32, and the window's second token the last that
        # does; its fourth is position INT_MAX itself, one past the last token.
        assert lengths.tolist() == [6]
        assert indices[0, :7].tolist() == [INT_MAX - 1, INT_MAX, INT_MAX - 1, INT_MAX, -1, -1, -1]

    def test_padding_rows_and_jit(self):
        """Whatever stands in the rows behind the last request, the real rows are the same."""
        rng = np.random.default_rng(3)
        arrays, _ = chunk(rng, 3, 16, 6, 4, 0)
        real = int(arrays[1][-1] - arrays[1][0])
        assert 0 < real < 16
        poisoned = [x.copy() for x in arrays]
        poisoned[0][real:] = 0
        poisoned[2][real:] = 3
        call = jax.jit(lambda *x: combine_topk_swa_indices(*x, window=7, compress_ratio=4, topk=6))
        chex.assert_trees_all_equal(
            combine_topk_swa_indices(*arrays, window=7, compress_ratio=4, topk=6), call(*poisoned)
        )

    @pytest.mark.parametrize(
        ("error", "name", "change"),
        [
            (TypeError, "topk_indices", {"topk_indices": jnp.zeros((2, 3), jnp.uint32)}),
            (ValueError, "topk_indices .*topk=4.* 3", {"topk": 4}),
            (ValueError, "query_start_loc", {"query_start_loc": jnp.zeros(2, jnp.int32)}),
            (ValueError, "query_pos", {"query_pos": jnp.zeros(3, jnp.int32)}),
            (ValueError, "gather_lens", {"gather_lens": jnp.zeros(1, jnp.int32)}),
            (ValueError, "compressed_base", {"compressed_base": jnp.zeros(3, jnp.int32)}),
            (TypeError, "swa_base", {"swa_base": jnp.zeros(2)}),
            (ValueError, "window", {"window": 0}),
            (ValueError, "compress_ratio", {"compress_ratio": 0}),
            (ValueError, "topk", {"topk": -1}),
        ],
    )
    def test_bad_arguments_are_named(self, error, name, change):
        two = jnp.zeros(2, jnp.int32)
        arguments = dict(
            topk_indices=jnp.zeros((2, 3), jnp.int32),
            query_start_loc=jnp.zeros(3, jnp.int32),
            query_pos=two,
            seq_lens=two,
            gather_lens=two,
            compressed_base=two,
            swa_base=two,
            window=4,
            compress_ratio=4,
            topk=3,
        )
        with pytest.raises(error, match=f"combine_topk_swa_indices: {name}"):
            combine_topk_swa_indices(**(arguments | change))

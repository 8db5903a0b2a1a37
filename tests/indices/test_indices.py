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
        num_swa_rows=st.sampled_from([-1, 0, 1, 50, INT_MAX - 20, INT_MAX]),  # a negative one only as data
        traced=st.booleans(),
    )
    def test_brute_force(self, seed, shape, num_swa_rows, traced):
        rng = np.random.default_rng(seed)
        rows, swa_width, extra_width = shape
        swa, extra = draw(rng, (rows, swa_width), -2, 60), draw(rng, (rows, extra_width), -2, 60)
        swa_lens, extra_lens = draw(rng, (rows,), 0, swa_width + 3), draw(rng, (rows,), 0, extra_width + 3)
        call = traced_combine_swa_extra if traced or num_swa_rows < 0 else combine_swa_extra_indices
        indices, lengths = call(swa, swa_lens, extra, extra_lens, num_swa_rows)
        want = brute_swa_extra(swa, swa_lens, extra, extra_lens, num_swa_rows)
        chex.assert_shape([indices, lengths], [(rows, ceil128(swa_width + extra_width)), (rows,)])
        chex.assert_type([indices, lengths], jnp.int32)
        assert indices.tolist() == want[0]
        assert lengths.tolist() == want[1]


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

"""The kernel schedules against plain sequential walks."""

import bisect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.metadata.schedules import flashmla_schedule, paged_mqa_schedule

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def flashmla_walk(topk_length, extra_length, topk, extra_topk, parts):
    """FlashMLA's scheduler, one request at a time, from its description. Idle partitions are None."""
    blocks = []
    for length, extra in zip(topk_length, extra_length, strict=True):
        keys = max(min(max(length, 0), topk), 1)
        if extra_topk:
            keys = (keys + 63) // 64 * 64 + min(max(extra, 0), extra_topk)
        blocks.append((keys - 1) // 64 + 1)
    payload = (sum(blocks) + 5 * len(blocks) + parts - 1) // parts + 5

    partitions, pieces = [], [1] * len(blocks)
    request, done = 0, 0  # done: blocks of `request` that earlier partitions took
    for _ in range(parts):
        if request == len(blocks):
            partitions.append(None)
            continue
        budget, taken = payload, []  # taken: (request, first block, last block + 1)
        begin_split = pieces[request] - 1
        while request < len(blocks):
            rest = blocks[request] - done
            if rest + 5 <= budget:
                taken.append((request, done, blocks[request]))
                budget -= rest + 5
                request, done = request + 1, 0
                continue
            if budget > 5:
                taken.append((request, done, done + budget - 5))
                done += budget - 5
                pieces[request] += 1
            break
        whole = [first == 0 and end == blocks[r] for r, first, end in taken]
        (first_req, begin_block, _), (last_req, _, end_block) = taken[0], taken[-1]
        partitions.append(
            (first_req, last_req, begin_block, end_block, begin_split, int(not whole[0]), int(not whole[-1]))
        )
    assert request == len(blocks)
    return partitions, np.concatenate([[0], np.cumsum(pieces)])


def assert_flashmla(topk_length, extra_length, *, topk, extra_topk, parts, got=None):
    """`None` lengths mean all columns, for the library and for the walk."""
    batch = len(topk_length if topk_length is not None else extra_length)
    as_array = lambda x: None if x is None else jnp.asarray(x, jnp.int32)  # noqa: E731
    tiles, num_splits = got or flashmla_schedule(
        as_array(topk_length),
        batch=batch,
        topk=topk,
        extra_topk=extra_topk,
        extra_topk_length=as_array(extra_length) if extra_topk else None,
        num_sm_parts=parts,
    )
    chex.assert_shape([tiles, num_splits], [(parts, 8), (batch + 1,)])
    chex.assert_type([tiles, num_splits], jnp.int32)
    want, want_splits = flashmla_walk(
        [topk] * batch if topk_length is None else topk_length,
        [extra_topk] * batch if extra_length is None else extra_length,
        topk,
        extra_topk,
        parts,
    )
    tiles = np.asarray(tiles)
    for tile, partition in zip(tiles, want, strict=True):
        if partition is None:
            assert tile[0] == batch
            assert tile[1] < tile[0]  # a loop from begin_req to end_req does nothing
        else:
            assert tuple(tile[:7]) == partition
    assert not tiles[:, 7].any()
    np.testing.assert_array_equal(num_splits, want_splits)
    return tiles, num_splits


# (batch, partitions, columns of both tables): each is a program to compile.
SHAPES = [
    (1, 1, 2048, 0),
    (1, 132, 128, 512),
    (2, 33, 100, 1000),
    (5, 66, 64, 1),
    (74, 66, 2048, 0),
    (321, 132, 128, 512),
]
LENGTHS = {
    "any": lambda rng, n, topk: rng.integers(-3, topk + 70, n),
    "short": lambda rng, n, topk: rng.integers(0, 3, n),
    "one long": lambda rng, n, topk: np.where(np.arange(n) == rng.integers(n), topk, 1),
    "hostile": lambda rng, n, topk: rng.choice([INT_MIN, -7, 0, 1, 63, 64, 65, INT_MAX], n),
    "full": lambda rng, n, topk: np.full(n, topk),
}


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    main=st.sampled_from(sorted(LENGTHS)),
    extra=st.sampled_from(sorted(LENGTHS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_flashmla_schedule_is_the_sequential_walk(shape, main, extra, seed):
    batch, parts, topk, extra_topk = shape
    rng = np.random.default_rng(seed)
    assert_flashmla(
        LENGTHS[main](rng, batch, topk).tolist(),
        LENGTHS[extra](rng, batch, max(extra_topk, 1)).tolist(),
        topk=topk,
        extra_topk=extra_topk,
        parts=parts,
    )


def test_flashmla_schedule_of_the_largest_batch():
    rng = np.random.default_rng(0)
    main, extra = rng.integers(0, 129, 65_536).tolist(), rng.integers(0, 1025, 65_536).tolist()
    assert_flashmla(main, extra, topk=128, extra_topk=1024, parts=132)


@pytest.mark.parametrize(("main", "extra"), [(None, [7, 600, 0, 64, 1]), ([7, 600, 0, 64, 1], None)])
def test_flashmla_none_means_all_columns(main, extra):
    assert_flashmla(main, extra, topk=640, extra_topk=512, parts=66)


def test_flashmla_both_lengths_none():
    got = flashmla_schedule(None, batch=5, topk=2048, num_sm_parts=66)
    assert_flashmla([2048] * 5, [0] * 5, topk=2048, extra_topk=0, parts=66, got=got)


def test_a_batch_of_more_blocks_than_int32_counts_is_refused():
    with pytest.raises(ValueError, match=r"flashmla_schedule: .*batch"):
        flashmla_schedule(None, batch=65_536, topk=2**22, num_sm_parts=4)


def mqa_walk(context_lens, num_sms, split_kv):
    """Every split of every row in a list; SM i starts at its i-th share, the last SMs have one more."""
    work = [(row, split) for row, length in enumerate(context_lens) for split in range(-(-max(length, 0) // split_kv))]
    share, more = divmod(len(work), num_sms)
    starts = [0]
    for sm in range(num_sms):
        starts.append(starts[-1] + share + (sm >= num_sms - more))
    return [work[s] if s < len(work) else (len(context_lens), 0) for s in starts]


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from([(1, 1, 256), (3, 132, 128), (70, 132, 256), (70, 1, 128)]),
    top=st.sampled_from([2, 700, 40_000]),
    seed=st.integers(0, 2**32 - 1),
)
def test_paged_mqa_schedule_is_brute_force(shape, top, seed):
    batch, num_sms, split_kv = shape
    lens = np.random.default_rng(seed).integers(-5, top, batch)
    got = paged_mqa_schedule(jnp.asarray(lens, jnp.int32), num_sms=num_sms, split_kv=split_kv)
    chex.assert_shape(got, (num_sms + 1, 2))
    chex.assert_type(got, jnp.int32)
    assert [tuple(x) for x in got.tolist()] == mqa_walk(lens.tolist(), num_sms, split_kv)


def test_paged_mqa_schedule_of_the_largest_batch_and_of_none():
    lens = np.random.default_rng(1).integers(0, 3000, 65_536)
    got = paged_mqa_schedule(jnp.asarray(lens, jnp.int32), num_sms=132)
    assert [tuple(x) for x in got.tolist()] == mqa_walk(lens.tolist(), 132, 256)
    assert paged_mqa_schedule(jnp.zeros((0,), jnp.int32), num_sms=3).tolist() == [[0, 0]] * 4
    assert paged_mqa_schedule(jnp.zeros((4,), jnp.int32), num_sms=2).tolist() == [[4, 0]] * 3
    assert paged_mqa_schedule(jnp.array([INT_MIN, -1], jnp.int32), num_sms=2).tolist() == [[2, 0]] * 3


@pytest.mark.parametrize("split_kv", [256, 1])
def test_paged_mqa_schedule_does_not_wrap(split_kv):
    """More splits than int32 counts: the walk stays inside the batch and never goes back."""
    lens = jnp.full((1000,), INT_MAX, jnp.int32)
    got = np.asarray(jax.jit(lambda x: paged_mqa_schedule(x, num_sms=132, split_kv=split_kv))(lens))
    most = -(-INT_MAX // split_kv)
    # Python's integers: the exact schedule of the first INT_MAX splits.
    prefix = [min(most * (i + 1), INT_MAX) for i in range(1000)]
    share, more = divmod(INT_MAX, 132)
    for sm, (row, split) in enumerate(got.tolist()):
        target = sm * share + max(sm - (132 - more), 0)
        want = bisect.bisect_right(prefix, target)
        assert (row, split) == ((want, target - want * most) if want < 1000 else (1000, 0))

"""Candidate blocks, against loops and torch's top-k over the formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla.indexer import candidates
from jax_sparse_mla.indexer.candidates import candidate_blocks, index_topk_and_blocks, index_topk_in_blocks
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys, index_logits, write_index_k
from jax_sparse_mla.indices import topk_positions

ROWS, PAGES, PAGE_SIZE, TABLE, TOPK, KEPT = 9, 8, 16, 6, 20, 4
COLUMNS = TABLE * PAGE_SIZE


def blocks_by_hand(logits, length, kept, size):
    """Python's sort is stable: ties go to the lower block."""
    logits = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    starts = range(0, length, size)
    scores = [max(logits[i : min(i + size, length)]) for i in starts]
    order = sorted(range(len(scores)), key=lambda b: (b != len(scores) - 1, -scores[b]))
    chosen = sorted(order[:kept])
    return chosen + [-1] * (kept - len(chosen))


@pytest.mark.parametrize("columns, size", [(96, 8), (93, 8), (96, 5)])
def test_candidate_blocks(columns, size):
    rng = np.random.default_rng(columns + size)
    logits = np.round(rng.standard_normal((64, columns)), 1).astype(np.float32)  # many ties
    logits[rng.random(logits.shape) < 0.05] = np.nan
    logits[3], logits[4, :] = -np.inf, np.inf
    lengths = rng.integers(0, columns + 1, 64).astype(np.int32)
    lengths[:6] = 0, 1, columns, 50, 90, -7
    want = [blocks_by_hand(row, max(int(n), 0), KEPT, size) for row, n in zip(logits, lengths)]
    got = candidate_blocks(jnp.asarray(logits), lengths, KEPT, block_size=size)
    np.testing.assert_array_equal(got, want)
    assert want[4][-1] == 89 // size  # pinned among blocks of infinities
    lengths[0] = columns + 1000  # clipped
    np.testing.assert_array_equal(
        candidate_blocks(jnp.asarray(logits), lengths, KEPT, block_size=size)[0],
        blocks_by_hand(logits[0], columns, KEPT, size),
    )


def test_blocks_are_those_of_torch():
    """The published form: block maxima, the newest at infinity, torch.topk; no ties."""
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).permutation(32 * 96).reshape(32, 96).astype(np.float32)
    lengths = np.random.default_rng(1).integers(40, 97, 32).astype(np.int32)
    scores = torch.from_numpy(logits).masked_fill(torch.arange(96) >= torch.from_numpy(lengths)[:, None], -torch.inf)
    scores = scores.unflatten(-1, (-1, 8)).amax(-1)
    scores = scores.masked_fill(torch.arange(12) == (torch.from_numpy(lengths)[:, None] - 1) // 8, torch.inf)
    want = scores.topk(KEPT, dim=-1).indices.sort(dim=-1).values
    np.testing.assert_array_equal(candidate_blocks(jnp.asarray(logits), lengths, KEPT), want.numpy())


@pytest.fixture(scope="module")
def served():
    """q, weights, cache, page table, lengths: FP4 keys in scattered pages of the second of two layers."""
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((PAGES * PAGE_SIZE, 128)).astype(np.float32)
    cache = IndexKeys.zeros(PAGES, PAGE_SIZE, num_layers=2, format=IndexFormat.FP4).layer(1)
    cache = write_index_k(cache, np.arange(PAGES * PAGE_SIZE, dtype=np.int32), jnp.asarray(keys))
    q = jnp.asarray(rng.standard_normal((ROWS, 3, 128)), jnp.bfloat16)
    weights = rng.standard_normal((ROWS, 3)).astype(np.float32)
    table = np.stack([rng.permutation(PAGES)[:TABLE] for _ in range(ROWS)]).astype(np.int32)
    table[2, 1] = -1  # no page: its logits are -inf
    lengths = np.array([96, 95, 70, 0, 1, 7, 33, 64, 21], np.int32)
    return q, weights, cache, table, lengths


@pytest.mark.parametrize("scratch", [1 << 20, 4 * COLUMNS * 4])
def test_the_source_publishes_what_one_array_of_logits_says(served, scratch, monkeypatch):
    monkeypatch.setattr(candidates, "SCRATCH_BYTES", scratch)  # all rows at once, and four at a time
    logits, lengths = index_logits(*served), served[-1]
    positions, blocks = index_topk_and_blocks(*served, TOPK, KEPT)
    np.testing.assert_array_equal(positions, topk_positions(logits, lengths, TOPK))
    np.testing.assert_array_equal(blocks, candidate_blocks(logits, lengths, KEPT))


@pytest.mark.parametrize("scratch", [1 << 20, 4 * KEPT * 8 * 2])
def test_later_sources_select_among_the_blocks_alone(served, scratch, monkeypatch):
    """Other queries than the source's; the oracle sorts the logits of the blocks' positions."""
    monkeypatch.setattr(candidates, "SCRATCH_BYTES", scratch)
    q, weights, cache, table, lengths = served
    blocks = np.asarray(index_topk_and_blocks(*served, TOPK, KEPT)[1])
    other = q[::-1], weights[::-1], cache, table, lengths
    got = np.asarray(index_topk_in_blocks(*other, TOPK, blocks))
    logits = np.asarray(index_logits(*other))
    outside = 0
    for row in range(ROWS):
        allowed = [p for b in blocks[row] if b >= 0 for p in range(8 * b, min(8 * b + 8, lengths[row]))]
        chosen = sorted(sorted(allowed, key=lambda p: -logits[row, p])[:TOPK])
        np.testing.assert_array_equal(got[row], chosen + [-1] * (TOPK - len(chosen)))
        outside += len(set(np.asarray(topk_positions(logits, lengths, TOPK))[row]) - set(allowed) - {-1})
    assert outside > 5  # a top-k of all would have been another


def test_hostile_blocks_select_nothing(served):
    blocks = np.full((ROWS, KEPT), -1, np.int32)
    blocks[0] = -(2**31), 2**31 - 1, COLUMNS // 8, -7
    got = np.asarray(index_topk_in_blocks(*served, TOPK, blocks))
    assert (got == -1).all()


def test_blocks_that_do_not_exist_are_skipped(served):
    """Wherever they stand: no other block comes in their place, and none of the others is lost."""
    blocks = np.full((ROWS, KEPT), -1, np.int32)
    blocks[:, :2] = 1, 2
    expected = np.asarray(index_topk_in_blocks(*served, TOPK, blocks))
    assert (expected >= 0).any()
    for holes in ((-1, 1, 2**31 - 1, 2), (-7, -1, 1, 2), (COLUMNS // 8, 1, 2, -(2**31))):
        blocks[:, :4] = holes
        np.testing.assert_array_equal(index_topk_in_blocks(*served, TOPK, blocks), expected)


def test_what_is_refused(served):
    blocks = np.zeros((ROWS, KEPT), np.int32)
    with pytest.raises(
        ValueError, match="index_topk_in_blocks: block_size must divide the page size of index_cache, 16"
    ):
        index_topk_in_blocks(*served, TOPK, blocks, block_size=5)
    with pytest.raises(ValueError, match=r"index_topk_in_blocks: blocks must have shape \[rows=9, n\]"):
        index_topk_in_blocks(*served, TOPK, blocks[:4])
    with pytest.raises(TypeError, match="index_topk_in_blocks: blocks must be int32"):
        index_topk_in_blocks(*served, TOPK, None)
    with pytest.raises(ValueError, match="index_topk_and_blocks: topk_blocks must be >= 1, got 0"):
        index_topk_and_blocks(*served, TOPK, 0)
    with pytest.raises(ValueError, match="candidate_blocks: lengths must have shape"):
        candidate_blocks(jnp.zeros((2, 8)), np.zeros(3, np.int32), 1)

"""The Triton kernels of V4.1's candidate blocks against the plain functions and float64.

Without a GPU they run in Triton's interpreter. On a GPU the same tests launch them for real, and those marked `gpu` go
through JAX's dispatch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ml_dtypes
from sparse_mla_torch.launch.executor import executor
from test_triton_fp4_logits import WAYS, keys_of, queries
from test_triton_indexer import HOSTILE, PROPERTY, assert_logits, logits_of_keys, plain_write, slots_of
from triton_device import DEVICE, poisoned_memory, tensor

from jax_sparse_mla.indexer import candidates, triton, triton_candidates
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys, gather_index_k, write_index_k

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities and NaN in the interpreter
]

EXECUTE = executor(torch.device(DEVICE))


def hostile_lengths(rng, rows: int, capacity: int) -> np.ndarray:
    lengths = rng.integers(0, capacity + 1, rows).astype(np.int32)
    known = np.array([0, 1, capacity, capacity - 1, capacity + 1, *HOSTILE], np.int32)
    lengths[rng.random(rows) < 0.4] = rng.choice(known)
    return lengths


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from([(96, 8), (93, 8), (96, 5), (7, 8), (4200, 8)]), st.booleans())
def test_block_scores(seed, shape, bfloat16):
    """Nothing is written behind a row's newest block, and what stands behind its length is not looked at."""
    rng, (columns, size), rows = np.random.default_rng(seed), shape, 7
    logits = rng.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16 if bfloat16 else np.float32)
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[1], logits[2] = np.inf, -np.inf
    lengths = hostile_lengths(rng, rows, columns)
    clipped = np.clip(lengths, 0, columns)
    wanted = np.array(candidates.block_scores(jnp.asarray(logits), jnp.asarray(clipped), block_size=size))
    logits[np.arange(columns) >= clipped[:, None]] = np.inf
    with poisoned_memory():
        scores = triton_candidates.block_scores(EXECUTE, tensor(logits), tensor(lengths), block_size=size)
    wanted[np.arange(wanted.shape[1]) >= -(-clipped // size)[:, None]] = 77
    np.testing.assert_array_equal(scores.cpu().numpy(), wanted)


# Blocks of a row, pages of its table, block size, page size.
RUN_SHAPES = [(6, 5, 8, 16), (33, 9, 8, 64), (1, 2, 4, 4), (17, 3, 3, 9)]


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from(RUN_SHAPES), st.booleans())
def test_candidate_runs(seed, shape, hostile):
    """Whatever the blocks are: holes among them, and numbers in disorder or given twice, as the plain function has."""
    rng, (n, width, size, page_size), rows, num_pages = np.random.default_rng(seed), shape, 6, 11
    of_table = width * page_size // size
    blocks = rng.integers(0, of_table, (rows, n)).astype(np.int32)
    if not hostile:
        blocks.sort(axis=1)
    holes = np.array([*HOSTILE, of_table], np.int32)
    blocks[rng.random(blocks.shape) < 0.3] = rng.choice(holes)
    table = rng.integers(0, num_pages, (rows, width)).astype(np.int32)
    table[rng.random(table.shape) < 0.2] = rng.choice(np.array([*HOSTILE, num_pages], np.int32))
    lengths = hostile_lengths(rng, rows, width * page_size)
    sizes = {"block_size": size, "page_size": page_size, "num_pages": num_pages}
    arrays = blocks, table, lengths
    with poisoned_memory():
        found = triton_candidates.candidate_runs(EXECUTE, *map(tensor, arrays), **sizes)
    wanted = candidates.candidate_runs_reference(*map(jnp.asarray, arrays), **sizes)
    for got, want in zip(found, wanted):
        np.testing.assert_array_equal(got.cpu().numpy(), np.asarray(want))


def runs_case(rng, rows, heads, runs, run, page_size, *, fp4=True, exponents=(-8, 8), wild_q=False):
    """q, weights, cache, table of runs, lengths: NaN wherever no row may look; and all keys in float64."""
    num_pages = 5
    num_runs = num_pages * page_size // run
    table = rng.integers(0, num_runs, (rows, runs)).astype(np.int32)
    table[rng.random(table.shape) < 0.15] = rng.choice(np.array([*HOSTILE, num_runs], np.int32))
    lengths = hostile_lengths(rng, rows, runs * run)
    slots, valid = slots_of(table, lengths, num_runs, run)
    every = np.arange(num_pages * page_size, dtype=np.int32)
    slots = np.where(np.isin(every, slots[valid]), every, -1)
    keys = rng.standard_normal((len(every), 4, 32)) * np.exp2(rng.integers(*exponents, (len(every), 4, 1)))
    keys = keys.reshape(-1, 128).astype(np.float32)
    weights = rng.standard_normal((rows, heads)).astype(np.float32)
    cache = np.full((num_pages, page_size * (68 if fp4 else 132)), 0xFF, np.uint8)
    if fp4:
        cache = np.array(write_index_k(keys_of(cache), slots, keys).data)
        values, scales = gather_index_k(keys_of(cache), every)
        stored = np.asarray(values).astype(np.float64) * np.repeat(np.asarray(scales).astype(np.float64), 32, axis=1)
        return (queries(rng, rows, heads, wild_q), weights, cache, table, lengths), stored, num_runs
    cache = np.array(plain_write(cache, slots, keys))
    values, scales = gather_index_k(cache, every)
    stored = np.asarray(values).astype(np.float64) * np.asarray(scales).astype(np.float64)[:, None]
    q = (8 * rng.standard_normal((rows, heads, 128))).astype(ml_dtypes.float8_e4m3fn)
    return (q, weights, cache, table, lengths), stored, num_runs


@PROPERTY
@given(
    st.integers(0, 10**6),
    st.sampled_from([(3, 4, 40, 8, 64), (2, 33, 5, 64, 128), (2, 2, 9, 5, 35), (2, 3, 6, 32, 64), (1, 2, 3, 128, 256)]),
    st.sampled_from([*WAYS, None]),
    st.booleans(),
)
def test_logits_of_runs(seed, shape, way, tiles):
    """Of FP4 keys, by FP8 products and not, and of FP8 keys (None); by both kernels."""
    case, keys, num_runs = runs_case(np.random.default_rng(seed), *shape, fp4=way is not None, **(way or {}))
    out = torch.full((len(case[0]), shape[2] * shape[3]), float("nan"), device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        if tiles:
            patch.setattr(triton, "PREFILL_ROWS", 1)
            patch.setitem(triton.FP4_PREFILL_OPTIONS, "COLUMNS", 64)
        triton.index_logits(EXECUTE, *map(tensor, case), fp4=way is not None, run=shape[3], out=out)
    q, weights, _, table, lengths = case
    assert_logits(out, *logits_of_keys(q, weights, keys, range(num_runs), table, lengths))


# --- through JAX, on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 64, 300])
def test_jax_selects_as_the_plain_function(rows, monkeypatch):
    """Positions of numbers whose products and sums are exact in any order, ties among them; blocks too."""
    rng, pages, page_size, table_width = np.random.default_rng(rows), 40, 64, 20
    data = rng.integers(0, 256, (pages, page_size * 68), dtype=np.uint8)
    data[:, page_size * 64 :] = 127 + rng.integers(-1, 2, (pages, page_size * 4))
    keys = IndexKeys(data=jnp.asarray(data), format=IndexFormat.FP4)
    q = jnp.asarray(rng.choice(np.array([-1, 0, 0.5, 1, 1.5]), (rows, 32, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.integers(-4, 5, (rows, 32)), jnp.float32)
    table = jnp.asarray(rng.integers(0, pages, (rows, table_width)), jnp.int32)
    lengths = jnp.asarray(hostile_lengths(rng, rows, table_width * page_size))
    case = q, weights, keys, table, lengths

    def select():
        jax.clear_caches()
        positions, blocks = candidates.index_topk_and_blocks(*case, 100, 50)
        among = candidates.index_topk_in_blocks(q[::-1], weights, keys, table, lengths, 100, blocks)
        return positions, blocks, among

    found = select()
    text = jax.jit(candidates.index_topk_in_blocks, static_argnums=5).lower(*case, 100, found[1]).as_text()
    assert "jax_sparse_mla.candidate_runs" in text and "jax_sparse_mla.index_logits" in text
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")
    for got, want in zip(found, select()):
        np.testing.assert_array_equal(got, want)

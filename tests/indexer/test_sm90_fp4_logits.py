"""The logits of FP4 index keys on SM90 (`kernels_cuda/index_logits/fp4.cuh`).

The same cases run on a GPU and on the host: `support/logits_on_host.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from logits_on_host import logits_function, logits_on_host
from test_triton_fp4_logits import WAYS, WRITERS, exact_logits, logits_case, queries
from test_triton_indexer import HOSTILE, assert_logits
from triton_device import ON_GPU

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys, index_logits
from jax_sparse_mla.indexer.route import FP4_MOST_ROWS
from jax_sparse_mla.launch import build

pytestmark = pytest.mark.torch

# Rows, heads, pages, page size: heads of each specialisation and between, odd numbers of tiles, more steps than stages.
SHAPES = [(3, 4, 3, 64), (5, 64, 2, 128), (7, 32, 5, 64), (2, 17, 3, 192), (1, 33, 37, 64), (40, 16, 1, 64)]


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    return logits_function(IndexFormat.FP4, tmp_path_factory)


@pytest.mark.always(4)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits(shape, way, logits):
    case = logits_case(np.random.default_rng(21), *shape, **way)
    assert_logits(logits(case), *exact_logits(*case))


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="is compiled for the host")
def test_the_build_for_racecheck_gives_the_same_logits(tmp_path_factory):
    case = logits_case(np.random.default_rng(23), *SHAPES[0])
    assert_logits(logits_on_host(IndexFormat.FP4, tmp_path_factory, "EVERY_LANE_ARRIVES")(case), *exact_logits(*case))


@settings(max_examples=40 if ON_GPU else 6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.sampled_from(WRITERS), st.booleans(), st.sampled_from(WAYS))
def test_any_case(logits, seed, shape, writer, shared, way):
    case = logits_case(np.random.default_rng(seed), *shape, writer=writer, shared=shared, **way)
    assert_logits(logits(case), *exact_logits(*case))


@pytest.mark.parametrize("heads", [4, 32, 64])
@pytest.mark.parametrize("page_size", [64, 128])
def test_products_and_sums_of_small_numbers_are_exact(page_size, heads, logits):
    """Every number of every key meets its number of the query, and every head its weight."""
    rng = np.random.default_rng(22)
    q = rng.choice(np.array([-1, 0, 0.5, 1, 1.5]), (4, heads, 128)).astype(ml_dtypes.bfloat16)
    weights = rng.integers(-4, 5, (4, heads)).astype(np.float32)
    cache = rng.integers(0, 256, (384 // page_size, page_size * 68), dtype=np.uint8)
    cache[:, page_size * 64 :] = 127 + rng.integers(-1, 2, (384 // page_size, page_size * 4))
    table = np.tile(rng.permutation(384 // page_size).astype(np.int32), (4, 1))
    case = q, weights, cache, table, np.array([384, 200, 64, 1], np.int32)
    np.testing.assert_array_equal(logits(case), exact_logits(*case)[0].astype(np.float32))


@pytest.mark.always("-13", "13")
@pytest.mark.parametrize("exponent", [-13, -12, 0, 12, 13])
def test_each_number_with_each_scale_is_multiplied_exactly(exponent, logits):
    """A query of one number, so that a logit is one product; a key for each number of each dimension."""
    cache = np.zeros((32, 64 * 68), np.uint8)
    values = cache[:, : 64 * 64].reshape(32, 64, 64)
    cache[:, 64 * 64 :] = 127 + exponent
    codes = np.arange(16, dtype=np.uint8)
    dims = np.arange(128)
    for dim in dims:  # keys 16 dim … 16 dim + 15
        keys = dim * 16 + codes
        values[keys // 64, keys % 64, dim // 2] = codes << 4 if dim % 2 else codes
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([magnitudes, -magnitudes]) * 2.0**exponent
    q = np.zeros((2, 4, 128), ml_dtypes.bfloat16)
    q[0, 1], q[1, 2] = 1, -1
    weights = np.array([[7, 3, 7, 7], [7, 7, 5, 7]], np.float32)
    table = np.tile(np.arange(32, dtype=np.int32), (2, 1))
    got = logits((q, weights, cache, table, np.array([2048, 2048], np.int32)))
    want = np.stack([3 * np.maximum(numbers, 0), 5 * np.maximum(-numbers, 0)])
    np.testing.assert_array_equal(got.reshape(2, 128, 16), np.broadcast_to(want[:, None], (2, 128, 16)))


@pytest.mark.always(1)
@pytest.mark.parametrize("far", [0, 200, 383], ids="key {}".format)
def test_one_key_that_e5m2_does_not_hold(far, logits):
    """It is scored by bfloat16 products; so is one whose scale is NaN, which no other key becomes."""
    rng = np.random.default_rng(23)
    q, weights = queries(rng, 4, 4, False), rng.standard_normal((4, 4)).astype(np.float32)
    cache = rng.integers(0, 256, (6, 64 * 68), dtype=np.uint8)
    cache[:, 64 * 64 :] = 127 + rng.integers(-13, 14, (6, 64 * 4))
    table = np.tile(rng.permutation(6).astype(np.int32), (4, 1))
    lengths = np.array([384, far + 1, far, 77], np.int32)
    before = logits((q, weights, cache, table, lengths))
    for scale in (113, 141, 0, 1, 230, 255):  # next to what is held on both sides, further away, and NaN
        cache[table[0, far // 64], 64 * 64 + far % 64 * 4 + 1] = scale
        case = q, weights, cache, table, lengths
        got, (want, magnitude) = logits(case), exact_logits(*case)
        others = np.arange(384) // 16 != far // 16  # a warp's keys
        np.testing.assert_array_equal(got[:, others], before[:, others])
        if scale == 255:
            assert np.isnan(got[:2, far]).all() and np.isneginf(got[2:, far]).sum() == 1 + (far >= 77)
            want, got = np.delete(want, far, 1), np.delete(got, far, 1)
            magnitude = np.delete(magnitude, far, 1)
        assert_logits(got, want, magnitude)


def test_weights_and_queries_of_any_magnitude(logits):
    """Heads that differ by powers of two within and beyond what a weight takes back, NaN and infinite weights."""
    rng = np.random.default_rng(24)
    q, weights, cache, table, lengths = logits_case(rng, 6, 8, 3, 64)
    lengths[:] = 192
    shifts = np.array([0, 30, -30, 39, -39, 0])[:, None, None]
    q = (q.astype(np.float32) * np.exp2(shifts)).astype(ml_dtypes.bfloat16)
    case = q, (weights * np.exp2(-shifts[..., 0])).astype(np.float32), cache, table, lengths
    assert_logits(logits(case), *exact_logits(*case))
    case[1][2, 3], case[1][3, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        got, (want, _) = logits(case), exact_logits(*case)
    np.testing.assert_array_equal(np.isnan(got[2]), ~np.isneginf(want[2]))
    np.testing.assert_array_equal(np.isfinite(got[[0, 1, 4, 5]]), np.isfinite(want[[0, 1, 4, 5]]))
    np.testing.assert_array_equal(np.isnan(got[3]), np.isnan(want[3]))


@pytest.mark.parametrize("heads", [4, 16, 33])
def test_keys_beyond_bfloat16(heads, logits):
    """Their logits are infinite, whatever stands in the place of heads that there are not."""
    q, weights, cache, table, lengths = logits_case(np.random.default_rng(29), 3, heads, 3, 64)
    q, weights = np.ones_like(q), np.ones_like(weights)
    cache[:, : 64 * 64], cache[:, 64 * 64 :], lengths[:] = 0x77, 254, 192  # 6 * 2^127
    table[:] = np.arange(3)
    np.testing.assert_array_equal(logits((q, weights, cache, table, lengths)), np.inf)


@pytest.mark.parametrize(("query", "weight"), [(40, 110), (-40, -100)])
def test_weights_that_leave_float32_with_their_power_of_two(query, weight, logits):
    q, weights, cache, table, lengths = logits_case(np.random.default_rng(30), 3, 8, 3, 64)
    lengths[:] = 192
    q = np.full_like(q, 2.0**query)
    weights = np.full_like(weights, 2.0**weight)
    cache[:, 64 * 64 :] = 127
    if weight > 0:
        cache[:, : 64 * 64] = 0  # the logits of other keys are infinite
    case = q, weights, cache, table, lengths
    assert_logits(logits(case), *exact_logits(*case))


def test_the_source_has_room_for_what_it_serves():
    source = (build.folder() / "index_logits" / "fp4.cuh").read_text()
    assert f"kMostRows = {FP4_MOST_ROWS};" in source


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_query_that_is_no_number_stays_in_its_row(number, logits):
    case = logits_case(np.random.default_rng(25), 4, 4, 3, 64)
    before = logits(case)
    case[0][1, 2, 77] = number
    with np.errstate(invalid="ignore"):
        got, (want, _) = logits(case), exact_logits(*case)
    np.testing.assert_array_equal(got[[0, 2, 3]], before[[0, 2, 3]])
    np.testing.assert_array_equal(np.isfinite(got[1]), np.isfinite(want[1]))
    assert not np.isfinite(got[1]).all()


def test_lengths_near_every_boundary(logits):
    near = np.array([0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 320, 319, 321, -1, *HOSTILE], np.int32)
    rng = np.random.default_rng(26)
    q, weights, cache, _, _ = logits_case(rng, len(near), 4, 5, 64)
    cache[:, 64 * 64 :] = 127
    table = rng.integers(0, 11, (len(near), 5)).astype(np.int32)
    for lengths in (near, near[::-1].copy(), np.zeros_like(near)):
        case = q, weights, cache, table, lengths
        assert_logits(logits(case), *exact_logits(*case))


def test_what_nobody_reads_is_not_filled(logits):
    case = logits_case(np.random.default_rng(27), 12, 32, 9, 64)
    filled, sparse, lengths = logits(case), logits(case, fill=False), case[4]
    written = np.arange(9 * 64) < -(-np.clip(lengths, 0, 9 * 64) // 128)[:, None] * 128
    np.testing.assert_array_equal(sparse[written], filled[written])
    assert np.isnan(sparse[~written]).all() and np.isneginf(filled[~written]).all()


@pytest.mark.parametrize("page_size", [64, 128])
def test_pages_beyond_two_gib(page_size, logits):
    """Byte offsets are 64-bit numbers. Of the pool's bytes only the few that are read are ever touched."""
    num_pages, used = (2**32 + 2**22) // (page_size * 68), 3
    q, weights, cache, _, _ = logits_case(np.random.default_rng(31), 2, 4, used, page_size)
    cache = cache[:used]
    cache[:, page_size * 64 :] = 127
    pool = np.empty((num_pages, page_size * 68), np.uint8)
    places = np.array([num_pages - 1, num_pages // 2 + 1, num_pages // 4 * 3], np.int32)
    pool[places] = cache
    lengths = np.array([used * page_size, used * page_size - 70], np.int32)
    got = logits((q, weights, pool, np.tile(places, (2, 1)), lengths))
    table = np.tile(np.arange(used, dtype=np.int32), (2, 1))
    assert_logits(got, *exact_logits(q, weights, cache, table, lengths))


@pytest.mark.skipif(ON_GPU, reason="chooses the number of thread blocks")
def test_a_row_s_bits_do_not_depend_on_the_share_of_a_block(logits):
    case = logits_case(np.random.default_rng(28), 9, 16, 5, 64)
    first = logits(case, blocks=1)
    for blocks in (2, 7, 40):
        np.testing.assert_array_equal(logits(case, blocks=blocks).view(np.int32), first.view(np.int32))


@pytest.mark.gpu
def test_a_row_s_bits_do_not_depend_on_the_others(logits):
    case = logits_case(np.random.default_rng(29), 200, 32, 9, 64, shared=True)
    together = logits(case)
    for rows in (slice(0, 1), slice(3, 17), slice(100, 200), slice(None, None, -1)):
        some = [np.ascontiguousarray(x[rows]) if i != 2 else x for i, x in enumerate(case)]
        np.testing.assert_array_equal(logits(some).view(np.int32), together[rows].view(np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_layer_of_a_pool_through_jax(way, logits):
    case = logits_case(np.random.default_rng(30), 11, 32, 7, 64, **way)
    q, weights, cache, table, lengths = case
    poison = np.full_like(cache, 0xFF)
    pool = IndexKeys(data=jnp.asarray(np.concatenate([poison, cache, poison])), num_layers=3, format=IndexFormat.FP4)
    arguments = jnp.asarray(q), jnp.asarray(weights), pool.layer(1), jnp.asarray(table), jnp.asarray(lengths)
    assert "jax_sparse_mla.index_logits_fp4" in jax.jit(index_logits).lower(*arguments).as_text()
    np.testing.assert_array_equal(np.asarray(index_logits(*arguments)), logits(case))

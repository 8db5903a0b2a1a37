"""Index keys of DeepSeek-V4.1: FP4 pages of 68 bytes a key, and each engine's scales, against numpy in float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys, gather_index_k, index_logits, quantize_index_q, write_index_k

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by code; bit 3 is the sign
PAGES, PAGE_SIZE, N = 4, 24, 64
FLOORS = {"sglang": 1e-4, "vllm": 2.0**-126}  # of amax / 6
FP4 = {engine: IndexFormat.FP4.written_by(engine) for engine in FLOORS}


def fp4_of(keys, floor, *, keeps_zeros_sign):
    """Codes `[n, 128]` and scale bytes `[n, 4]` of finite keys."""
    groups = keys.astype(np.float64).reshape(-1, 4, 32)
    fraction, exponent = np.frexp(np.maximum(np.abs(groups).max(-1) / 6, floor))
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)  # the smallest power of two that is not less
    magnitude = np.abs(groups) / np.exp2(exponent)[..., None]
    away = np.abs(magnitude[..., None] - E2M1)
    nearest = away == away.min(-1, keepdims=True)
    even = np.arange(8) % 2 == 0
    codes = np.where(nearest.sum(-1) > 1, (nearest & even).argmax(-1), nearest.argmax(-1))
    codes |= np.where(np.signbit(groups) & (keeps_zeros_sign | (codes > 0)), 8, 0)
    return codes.reshape(-1, 128), (exponent + 127).astype(np.uint8)


def values_of(codes, scales):
    values = np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])
    return values * np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=-1)


def some_keys():
    """bfloat16 rows of all magnitudes, and what rounds to a tie or stands at a scale's edge."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((N, 128)) * np.exp2(rng.integers(-20, 8, (N, 1)))
    keys[0] = 0
    keys[1] = -0.0
    keys[2, :8], keys[2, 8:16] = 6 * 0.125, np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25]) * 0.125
    keys[3, 0], keys[3, 32], keys[3, 64:] = 6.03125, 1e-5, 0  # a scale of 2, the floor, zeros
    keys[4] = 1e-30
    keys[5, 5], keys[5, 33] = 3e38, -2.9e38
    return keys.astype(BF16)


def empty(format, num_layers=1):
    return IndexKeys.zeros(PAGES, PAGE_SIZE, num_layers=num_layers, format=format)


def bytes_at(data, slot, width, scale_width):
    page, offset = divmod(int(slot), PAGE_SIZE)
    at = PAGE_SIZE * width + offset * scale_width
    return data[page, offset * width : (offset + 1) * width], data[page, at : at + scale_width]


@pytest.mark.parametrize("engine", FLOORS)
def test_bytes_of_fp4_keys(engine):
    keys, slots = some_keys(), np.random.default_rng(1).permutation(PAGES * PAGE_SIZE)[:N].astype(np.int32)
    slots[7:10] = -1, PAGES * PAGE_SIZE, -(2**31)
    data = np.asarray(write_index_k(empty(FP4[engine], 2).layer(1), slots, jnp.asarray(keys)).data)
    assert data.shape == (2 * PAGES, PAGE_SIZE * 68) and not data[:PAGES].any()
    data = data[PAGES:]
    clipped = np.clip(keys.astype(np.float64), -6 * 2.0**125, 6 * 2.0**125)
    codes, scales = fp4_of(clipped, FLOORS[engine], keeps_zeros_sign=engine == "vllm")
    written = 0
    for i, slot in enumerate(slots):
        if 0 <= slot < PAGES * PAGE_SIZE:
            values, scale = bytes_at(data, slot, 64, 4)
            np.testing.assert_array_equal(values & 15, codes[i, 0::2])
            np.testing.assert_array_equal(values >> 4, codes[i, 1::2])
            np.testing.assert_array_equal(scale, scales[i])
            written += (values != 0).sum() + (scale != 0).sum()
    assert written == (data != 0).sum()  # nothing beside them
    assert (codes[1] == (8 if engine == "vllm" else 0)).all() and scales[0, 0] == (1 if engine == "vllm" else 114)


def test_the_engines_agree_above_the_floor():
    """Zeros aside: byte comparison fails below it, and readers agree."""
    keys, slots = some_keys()[8:], np.arange(N - 8, dtype=np.int32)

    def read_back(format):
        values, scales = gather_index_k(write_index_k(empty(format), slots, jnp.asarray(keys)), slots)
        return np.asarray(values, np.float64).reshape(-1, 4, 32) * np.asarray(scales, np.float64)[..., None]

    sglang, vllm = (read_back(format) for format in FP4.values())
    large = np.abs(keys.astype(np.float64)).reshape(-1, 4, 32).max(-1) > 6 * 2.0**-14
    assert large.sum() > 100 and (sglang[~large] != vllm[~large]).any()
    np.testing.assert_array_equal(sglang[large], vllm[large])


@pytest.mark.parametrize("q_dtype", [BF16, np.float32])
def test_logits_of_fp4_keys(q_dtype):
    rng = np.random.default_rng(2)
    rows, heads, table_pages = 3, 2, 3
    keys = some_keys() * (np.abs(some_keys()) < 1e30)
    slots = np.arange(N, dtype=np.int32)
    cache = write_index_k(empty(IndexFormat.FP4), slots, jnp.asarray(keys))
    q = rng.standard_normal((rows, heads, 128)).astype(q_dtype)
    weights = rng.standard_normal((rows, heads)).astype(np.float32)
    table = np.array([[0, 1, 2], [2, -1, 0], [1, PAGES, 3]], np.int32)
    lengths = np.array([64, 55, 17], np.int32)
    got = np.asarray(index_logits(jnp.asarray(q), weights, cache, table, lengths))
    stored = np.zeros((PAGES * PAGE_SIZE, 128))
    stored[:N] = values_of(*fp4_of(keys, 1e-4, keeps_zeros_sign=False))
    assert got.shape == (rows, table_pages * PAGE_SIZE)
    for row in range(rows):
        for column in range(table_pages * PAGE_SIZE):
            page, offset = table[row, column // PAGE_SIZE], column % PAGE_SIZE
            if column >= lengths[row] or not 0 <= page < PAGES:
                assert got[row, column] == -np.inf
                continue
            products = q[row].astype(np.float64) @ stored[page * PAGE_SIZE + offset]
            terms = np.maximum(products, 0) * weights[row]
            magnitude = np.abs(q[row].astype(np.float64)) @ np.abs(stored[page * PAGE_SIZE + offset])
            assert abs(got[row, column] - terms.sum()) <= 1e-6 * (magnitude * np.abs(weights[row])).sum()


def test_queries_of_fp4_keys():
    """The floor of queries is 6 · 2^−126 with either engine's keys, and their scale stays with them."""
    keys = some_keys()
    keys[5] = 1
    q, scale = quantize_index_q(jnp.asarray(keys.reshape(N // 2, 2, 128)), format=IndexFormat.FP4)
    assert q.dtype == BF16 and (np.asarray(scale) == 1).all() and scale.shape == (N // 2, 2)
    want = values_of(*fp4_of(keys, 2.0**-126, keeps_zeros_sign=True))
    np.testing.assert_array_equal(np.asarray(q).reshape(N, 128).astype(np.float64), want)


def test_a_nan_makes_its_group_nan():
    keys = np.ones((2, 128), np.float32)
    keys[0, 40], keys[1, 3] = np.nan, np.inf
    cache = write_index_k(empty(IndexFormat.FP4), np.arange(2, dtype=np.int32), jnp.asarray(keys))
    values, scales = (np.asarray(x, np.float64) for x in gather_index_k(cache, np.array([0, 1, -1], np.int32)))
    np.testing.assert_array_equal(np.isnan(scales), [[0, 1, 0, 0], [0] * 4, [0] * 4])
    assert (values[0, 32:64] == 0).all() and (values[0, :32] * scales[0, 0] == 1).all()
    assert values[1, 3] * scales[1, 0] == 6 * 2.0**125 and not values[2].any() and not scales[2].any()
    q = jnp.ones((1, 1, 128), jnp.bfloat16)
    logits = np.asarray(index_logits(q, jnp.ones((1, 1)), cache, np.zeros((1, 1), np.int32), np.array([2], np.int32)))
    assert np.isnan(logits[0, 0]) and np.isfinite(logits[0, 1])


def test_vllm_rounds_fp8_scales_up_to_powers_of_two():
    keys, slots = some_keys(), np.arange(N, dtype=np.int32)
    format = IndexFormat.FP8.written_by("vllm")
    cache = write_index_k(empty(format), slots, jnp.asarray(keys))
    rows = keys.astype(np.float64)
    fraction, exponent = np.frexp(np.maximum(np.abs(rows).max(-1), 1e-4) / 448)
    scale = np.exp2(np.where(fraction == 0.5, exponent - 1, exponent))
    codes = np.clip(rows / scale[:, None], -448, 448).astype(np.float32).astype(E4M3)
    for i, slot in enumerate(slots):
        values, scales = bytes_at(np.asarray(cache.data), slot, 128, 4)
        np.testing.assert_array_equal(values, codes[i].view(np.uint8))
        np.testing.assert_array_equal(scales.view(np.float32), np.float32(scale[i]))
    q, q_scale = quantize_index_q(jnp.asarray(keys[:, None]), format=format)
    np.testing.assert_array_equal(np.asarray(q)[:, 0].view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(q_scale)[:, 0], np.float32(scale))


def test_what_is_refused():
    assert (IndexFormat.FP4.key_bytes, IndexFormat.FP8.key_bytes) == (68, 132)
    assert repr(FP4["vllm"]) == "IndexFormat.FP4.written_by('vllm')" and FP4["sglang"] == IndexFormat.FP4
    with pytest.raises(ValueError, match="written_by: engine of FP4 index keys must be 'sglang' or 'vllm', got 'trt'"):
        IndexFormat.FP4.written_by("trt")
    with pytest.raises(TypeError, match=r"IndexKeys\.zeros: format must be an IndexFormat, got str"):
        IndexKeys.zeros(1, 64, format="FP4")
    with pytest.raises(TypeError, match="quantize_index_q: format must be an IndexFormat, got str"):
        quantize_index_q(jnp.ones((1, 1, 128)), format="FP4")
    with pytest.raises(ValueError, match=r"quantize_index_q: q must have shape \[..., 128\] with FP4 keys"):
        quantize_index_q(jnp.ones((1, 1, 64)), format=IndexFormat.FP4)
    odd = IndexKeys(data=jnp.zeros((1, 132), jnp.uint8), format=IndexFormat.FP4)
    with pytest.raises(ValueError, match="write_index_k: index_cache must have pages of page_size \\* 68 bytes"):
        write_index_k(odd, jnp.zeros(1, jnp.int32), jnp.ones((1, 128)))

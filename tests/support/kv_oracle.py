"""The oracles of the KV cache tests: casts of ml_dtypes, exact fractions, byte positions written out as numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings

from jax_sparse_mla.kv_cache import (
    KVLayout,
    PagedKV,
)

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
V32, V4, V32_BF16, V4_BF16 = KVLayout.V32_FP8, KVLayout.V4_FP8, KVLayout.V32_BF16, KVLayout.V4_BF16
LAYOUTS = (V32, V4, V32_BF16, V4_BF16)
PAGE_SIZES = (256, 64, 2, 61, 1)
HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
BF16_MAX = float(ml_dtypes.finfo(BF16).max)
CLIP = 240 * 2.0**120  # the fp8 part: e4m3 would round what is beyond 248 * 2^120 up to 2^128
MAYBE_JIT = pytest.mark.parametrize("maybe_jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
PROPERTY = settings(max_examples=25, deadline=None)


def to_bf16(rows: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16 by ml_dtypes, finite values clipped."""
    rounded = rows.astype(BF16)
    limit = np.copysign(np.float32(BF16_MAX), rows.astype(np.float32)).astype(BF16)
    return np.where(np.isinf(rounded) & np.isfinite(rows), limit, rounded)


def ceil_log2(value: Fraction) -> int:
    exponent = math.frexp(float(value))[1]
    while Fraction(2) ** exponent >= value:
        exponent -= 1
    return exponent + 1


def v4_exponent(group: np.ndarray) -> int:
    amax = max(float(np.abs(group.astype(np.float32)).max()), float(np.float32(1e-4)))
    return ceil_log2(Fraction(amax) / 448)


def v32_exponent(group: np.ndarray) -> int:
    amax = float(np.abs(group.astype(np.float32)).max())
    return ceil_log2(max(Fraction(amax) / 448, Fraction(float(np.float32(1e-4)))))


def quantised_part(row: np.ndarray, dim: int) -> np.ndarray:
    return np.clip(row[:dim].astype(np.float32), -CLIP, CLIP).astype(np.float32)


def e4m3(group: np.ndarray, exponent: int) -> np.ndarray:
    scaled = np.clip(np.ldexp(group.astype(np.float64), -exponent), -448, 448)
    return scaled.astype(np.float32).astype(E4M3)  # exact before the last cast: at most 24 significant bits


def token_bytes(layout: KVLayout, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the row's bytes, its footer bytes) of a bfloat16 row, literally as the formats say."""
    if layout is V4:
        x = quantised_part(row, 448)
        exponents = [v4_exponent(x[g : g + 64]) for g in range(0, 448, 64)]
        values = np.concatenate([e4m3(x[64 * g : 64 * g + 64], e) for g, e in enumerate(exponents)])
        footer = np.array([e + 127 for e in exponents], np.uint8)
        return np.concatenate([values.view(np.uint8), row[448:].view(np.uint8)]), footer
    if layout is V32:
        x = quantised_part(row, 512)
        exponents = [v32_exponent(x[g : g + 128]) for g in range(0, 512, 128)]
        values = np.concatenate([e4m3(x[128 * g : 128 * g + 128], e) for g, e in enumerate(exponents)])
        scales = np.array([2.0**e for e in exponents], "<f4")
        parts = [values.view(np.uint8), scales.view(np.uint8), row[512:].view(np.uint8)]
        return np.concatenate(parts), np.zeros(0, np.uint8)
    return row.view(np.uint8), np.zeros(0, np.uint8)


def write_by_hand(data: np.ndarray, layout: KVLayout, page_size: int, slots, rows: np.ndarray) -> np.ndarray:
    data = data.copy()
    row_bytes = {V4: 576, V32: 656, V32_BF16: 1152, V4_BF16: 1024}[layout]
    for slot, row in zip(slots, to_bf16(rows)):
        if not 0 <= slot < data.shape[0] * page_size:
            continue
        page, offset = divmod(int(slot), page_size)
        body, footer = token_bytes(layout, row)
        assert len(body) == row_bytes
        data[page, offset * row_bytes : (offset + 1) * row_bytes] = body
        start = page_size * 576 + offset * 8
        data[page, start : start + len(footer)] = footer
    return data


def mixed_rows(n: int, dim: int, seed: int) -> np.ndarray:
    """float32 rows of every kind: normal, tiny, huge, zero, mixed magnitudes, powers of two."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, dim)).astype(np.float32)
    kinds = [1.0, 1e-30, 1e30, 0.0, 1e-5, 3e-2, 448.0]
    rows *= np.array([kinds[i % len(kinds)] for i in range(n)], np.float32)[:, None]
    rows[5::7] *= np.exp2(rng.integers(-20, 20, rows[5::7].shape)).astype(np.float32)
    return rows


def filled(layout: KVLayout, num_pages: int, page_size: int, seed: int | None = None) -> PagedKV:
    """A cache of random bytes, or of 0xFF (NaN everywhere) without a seed."""
    shape = (num_pages, layout.page_bytes(page_size))
    data = np.full(shape, 0xFF, np.uint8)
    if seed is not None:
        data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return PagedKV(data=jax.device_put(data), layout=layout, page_size=page_size)


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint16)


def assert_same_bf16(actual, expected) -> None:
    """Bit for bit; a NaN only has to be one."""
    chex.assert_type(actual, jnp.bfloat16)
    nan = np.isnan(np.asarray(expected, np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(actual, np.float32)), nan)
    np.testing.assert_array_equal(bits(actual)[~nan], bits(expected)[~nan])

"""kv_cache: writing in place, caches beyond 2 GiB, and the page split."""

from __future__ import annotations

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_oracle import (
    HOSTILE,
    LAYOUTS,
    MAYBE_JIT,
    PROPERTY,
    V4,
    V4_BF16,
    V32,
    V32_BF16,
    bits,
    filled,
)

from jax_sparse_mla.kv_cache import (
    KVLayout,
    PagedKV,
    dequantize_kv,
    gather_kv,
    split_pages,
    write_kv,
)

# --- in place, and never flat ---------------------------------------------------------------------


def compiled_text(function, *args, donate) -> str:
    return jax.jit(function, donate_argnums=donate).lower(*args).compile().as_text()


def assert_in_place(text: str, data_shape: tuple[int, int], aliased: int) -> None:
    shape = f"u8[{data_shape[0]},{data_shape[1]}]"
    assert shape in text
    copies = [line.strip() for line in text.splitlines() if re.search(re.escape(shape) + r"\S* copy(-start)?\(", line)]
    assert not copies, copies
    header = text.splitlines()[0]
    assert "input_output_alias" in header
    assert len(re.findall(r"\{\d*\}: \(\d+, \{\}", header)) == aliased, header


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_donated_write_has_no_copy(layout):
    cache = PagedKV.zeros(layout, 5, 64)
    slots, rows = jnp.arange(8, dtype=jnp.int32), jnp.ones((8, layout.qk_dim), jnp.bfloat16)
    assert_in_place(compiled_text(write_kv, cache, slots, rows, donate=0), cache.data.shape, 1)
    # The check can fail: the same program without donation does copy.
    with pytest.raises(AssertionError):
        assert_in_place(compiled_text(write_kv, cache, slots, rows, donate=()), cache.data.shape, 1)


def test_donated_write_read_write_read_of_one_cache_has_no_copy():
    def step(cache, slots, rows):
        cache = write_kv(cache, slots, rows)
        rows = gather_kv(cache, slots) + 1
        cache = write_kv(cache, slots + 8, rows)
        return cache, gather_kv(cache, slots + 8)

    cache = PagedKV.zeros(V4, 5, 64)
    slots, rows = jnp.arange(8, dtype=jnp.int32), jnp.ones((8, 512), jnp.bfloat16)
    assert_in_place(compiled_text(step, cache, slots, rows, donate=0), cache.data.shape, 1)


def test_donated_split_into_out_has_no_copy():
    def split(out, cache, slots):
        return split_pages(cache, 64, slots=slots, out=out)

    out, cache = PagedKV.zeros(V4, 12, 64), PagedKV.zeros(V4, 3, 256)
    text = compiled_text(split, out, cache, jnp.arange(8, dtype=jnp.int32), donate=0)
    assert_in_place(text, out.data.shape, 1)


def test_without_donation_the_callers_cache_is_intact():
    cache = filled(V4, 2, 4, seed=0)
    before = np.asarray(cache.data).copy()
    new = write_kv(cache, jnp.zeros(1, jnp.int32), jnp.ones((1, 512), jnp.bfloat16))
    assert (np.asarray(new.data) != before).any()
    np.testing.assert_array_equal(np.asarray(cache.data), before)


def big_cache(num_pages: int, layout: KVLayout, page_size: int) -> PagedKV:
    data = jax.ShapeDtypeStruct((num_pages, layout.page_bytes(page_size)), jnp.uint8)
    return PagedKV(data=data, layout=layout, page_size=page_size)


BIG_CALLS = {
    "write_kv": lambda c, slots, rows: write_kv(c, slots, rows),
    "gather_kv": lambda c, slots, rows: gather_kv(c, slots),
    "dequantize_kv": lambda c, slots, rows: dequantize_kv(c),
    "split_pages": lambda c, slots, rows: split_pages(c, 64),
    "split_pages slots": lambda c, slots, rows: split_pages(c, 64, slots=slots),
}


@pytest.mark.parametrize("call", BIG_CALLS)
def test_big_cache_is_never_flat(call):
    """Compiled for a cache of 3 GB (never allocated): no array but the two-dimensional ones has its size."""
    cache = big_cache(20_000, V4, 256)
    assert math.prod(cache.data.shape) > 2**31
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16)
    lowered = jax.jit(BIG_CALLS[call]).lower(cache, slots, rows)
    for text, pattern in [
        (lowered.as_text(), r"tensor<(\d+)x(?:ui8|ui16|i32|f32|bf16|f8E4M3FN)>"),
        (lowered.compile().as_text(), r"\b(?:u8|u16|s32|f32|bf16|f8e4m3fn)\[(\d+)\]"),
    ]:
        sizes = [int(n) for n in re.findall(pattern, text)]
        assert max(sizes, default=0) <= 20_001  # about one entry per page at most


def test_more_slots_than_int32():
    cache = big_cache(10_000_000, V4, 256)
    assert cache.num_slots > 2**31
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16)
    chex.assert_equal_shape([jax.eval_shape(write_kv, cache, slots, rows).data, cache.data])
    chex.assert_shape(jax.eval_shape(gather_kv, cache, slots), (8, 512))


# --- split_pages ----------------------------------------------------------------------------------


def split_by_hand(data, layout, old, new, pages=None, out=None):
    ratio = old // new
    row = {V4: 576, V32: 656, V32_BF16: 1152, V4_BF16: 1024}[layout]
    foot = 8 if layout is V4 else 0
    width = {V4: -(-new * 584 // 576) * 576}.get(layout, new * row)
    result = np.zeros((len(data) * ratio, width), np.uint8) if out is None else out.copy()
    for p in range(len(data)) if pages is None else pages:
        for o in range(old):
            small, j = p * ratio + o // new, o % new
            result[small, j * row : j * row + row] = data[p, o * row : o * row + row]
            start = new * row + j * foot
            result[small, start : start + foot] = data[p, old * row + o * foot :][:foot]
    return result


@pytest.mark.always(2)
@MAYBE_JIT
@pytest.mark.parametrize("layout", [V4, V32, V4_BF16], ids=repr)
@pytest.mark.parametrize("old, new", [(256, 64), (64, 2), (6, 3), (8, 8), (4, 1)])
def test_split_pages_bytes(maybe_jit, layout, old, new):
    cache = filled(layout, 3, old, seed=0)
    data = np.asarray(cache.data)
    small = maybe_jit(lambda c: split_pages(c, new))(cache)
    assert (small.layout, small.page_size, small.num_pages) == (layout, new, 3 * old // new)
    np.testing.assert_array_equal(np.asarray(small.data), split_by_hand(data, layout, old, new))
    slots = jnp.asarray([*range(0, 3 * old, 5), *HOSTILE, 3 * old], jnp.int32)
    np.testing.assert_array_equal(bits(gather_kv(small, slots)), bits(gather_kv(cache, slots)))


@MAYBE_JIT
@pytest.mark.parametrize("layout", [V4, V32], ids=repr)
@pytest.mark.parametrize("with_out", [False, True])
def test_split_pages_copies_only_touched_pages(maybe_jit, layout, with_out):
    cache, out = filled(layout, 5, 8, seed=0), filled(layout, 20, 2, seed=1) if with_out else None
    split = maybe_jit(lambda c, s, o: split_pages(c, 2, slots=s, out=o))
    for slots, pages in [
        ([9, 15, 8, -1, 33, 39], [1, 4]),
        ([*HOSTILE, 40, 41], []),
        ([0, 8, 16, 24, 32, 7], [0, 1, 2, 3, 4]),
    ]:
        small = split(cache, jnp.asarray(slots, jnp.int32), out)
        out_data = None if out is None else np.asarray(out.data)
        expected = split_by_hand(np.asarray(cache.data), layout, 8, 2, pages, out_data)
        np.testing.assert_array_equal(np.asarray(small.data), expected)
        assert (small.layout, small.page_size) == (layout, 2)


@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(3,), (16,), (2, 3, 4), (0,), ()]))
@PROPERTY
def test_split_pages_any_slots(seed, shape):
    """Fewer and more slots than pages, duplicates, holes, any shape."""
    rng = np.random.default_rng(seed)
    cache, out = filled(V4, 6, 4, seed=0), filled(V4, 12, 2, seed=1)
    slots = rng.integers(-3, 27, shape).astype(np.int32)
    pages = sorted({int(s) // 4 for s in slots.ravel() if 0 <= s < 24})
    small = split_pages(cache, 2, slots=jax.device_put(slots), out=out)
    expected = split_by_hand(np.asarray(cache.data), V4, 4, 2, pages, np.asarray(out.data))
    np.testing.assert_array_equal(np.asarray(small.data), expected)


def test_split_pages_into_out_keeps_its_padding():
    cache, out = filled(V4, 2, 4, seed=0), filled(V4, 4, 2, seed=1)
    small = split_pages(cache, 2, out=out)
    expected = split_by_hand(np.asarray(cache.data), V4, 4, 2, None, np.asarray(out.data))
    np.testing.assert_array_equal(np.asarray(small.data), expected)
    np.testing.assert_array_equal(np.asarray(small.data)[:, 2 * 584 :], np.asarray(out.data)[:, 2 * 584 :])

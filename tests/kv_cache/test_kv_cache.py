"""kv_cache: the bytes of the layouts, the quantising writer and the gather.

The oracles are ml_dtypes' and torch's casts, exact fractions, and byte positions written out as numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_oracle import (
    BF16,
    BF16_MAX,
    CLIP,
    E4M3,
    HOSTILE,
    LAYOUTS,
    MAYBE_JIT,
    PAGE_SIZES,
    PROPERTY,
    V4,
    V4_BF16,
    V32,
    V32_BF16,
    assert_same_bf16,
    bits,
    ceil_log2,
    e4m3,
    filled,
    mixed_rows,
    to_bf16,
    v4_exponent,
    write_by_hand,
)

from jax_sparse_mla.indexer.keys import quantize_fp8
from jax_sparse_mla.kv_cache import (
    KVLayout,
    PagedKV,
    dequantize_kv,
    gather_kv,
    quantize_ue8m0,
    split_pages,
    write_kv,
)
from jax_sparse_mla.kv_cache import rows as rows_module
from jax_sparse_mla.kv_cache import split as split_module
from jax_sparse_mla.kv_cache.quantize import bfloat16_bits, power_of_two, scale_exponent

COMPILING = "PLAIN"  # see conftest.py: by the older emitters a product of float32 numbers is rounded otherwise

# --- the scale arithmetic -------------------------------------------------------------------------


def with_neighbours(x: np.ndarray) -> np.ndarray:
    below, above = np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))
    return np.concatenate([x, below, above])


def test_scale_exponent_next_to_every_power_of_two():
    powers = np.ldexp(np.float32(448), np.arange(-100, 120)).astype(np.float32)
    powers = np.concatenate([powers, np.ldexp(np.float32(1), np.arange(-80, 128)).astype(np.float32)])
    amax = np.append(with_neighbours(powers), np.finfo(np.float32).max).astype(np.float32)
    expected = [max(ceil_log2(Fraction(float(a)) / 448), -126) for a in amax]
    np.testing.assert_array_equal(scale_exponent(jax.device_put(amax.view(np.int32)), -126), expected)


def test_power_of_two_is_exact():
    exponents = np.arange(-126, 128, dtype=np.int32)
    np.testing.assert_array_equal(power_of_two(jax.device_put(exponents)), np.ldexp(np.float32(1), exponents))


@given(st.integers(0, 2**32 - 1))
@PROPERTY
def test_bfloat16_bits_is_the_cast(seed):
    x = np.random.default_rng(seed).integers(0, 2**32, 4096, dtype=np.uint32)
    x[:1024] = (x[:1024] & 0xFFFF0000) | 0x8000  # ties
    with np.errstate(invalid="ignore"):
        expected = x.view(np.float32).astype(BF16)
    actual = np.asarray(bfloat16_bits(jax.device_put(x.view(np.int32))))
    assert actual.min() >= 0 and actual.max() <= 0xFFFF
    assert_same_bf16(jax.device_put(actual.astype(np.uint16).view(BF16)), expected)


# --- quantize_ue8m0 -------------------------------------------------------------------------------


@MAYBE_JIT
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group", [32, 64])
def test_quantize_ue8m0_follows_the_rule(maybe_jit, dtype, group):
    x = mixed_rows(14, 128, 0).astype(dtype).reshape(2, 7, 128)
    values, scales = maybe_jit(functools.partial(quantize_ue8m0, group=group))(jax.device_put(x))
    chex.assert_shape((values, scales), [(2, 7, 128), (2, 7, 128 // group)])
    chex.assert_type((values, scales), [jnp.float8_e4m3fn, jnp.uint8])
    groups = x.reshape(-1, group)
    exponents = [v4_exponent(g) for g in groups]
    np.testing.assert_array_equal(np.asarray(scales).reshape(-1), np.array(exponents) + 127)
    expected = np.stack([e4m3(g, e) for g, e in zip(groups, exponents)])
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8).reshape(-1, group), expected.view(np.uint8))


@pytest.mark.parametrize("quantise", [functools.partial(quantize_ue8m0, group=64), quantize_fp8])
def test_a_program_that_reads_fp8_values_back_has_them_rounded(quantise):
    x = jax.device_put(mixed_rows(14, 128, 0))
    values = jax.jit(lambda x: quantise(x)[0].astype(jnp.float32))(x)
    np.testing.assert_array_equal(values, np.asarray(quantise(x)[0]).astype(np.float32))


def test_quantize_ue8m0_zero_groups():
    values, scales = quantize_ue8m0(jnp.zeros((3, 128), jnp.bfloat16), 64)
    np.testing.assert_array_equal(np.asarray(scales), np.full((3, 2), 105))
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), 0)
    values, scales = quantize_ue8m0(jnp.zeros((0, 128), jnp.bfloat16), 64)
    chex.assert_shape((values, scales), [(0, 128), (0, 2)])


@pytest.mark.torch
def test_quantize_ue8m0_is_torchs_at_powers_of_two():
    torch = pytest.importorskip("torch")
    amax = with_neighbours(np.ldexp(np.float32(448), np.arange(-30, 120)).astype(np.float32))
    amax = np.append(amax, with_neighbours(np.float32([1e-4])))
    amax = np.append(amax, np.float32([np.finfo(np.float32).max, 0])).astype(np.float32)
    x = np.random.default_rng(0).uniform(-1, 1, (len(amax), 64)).astype(np.float32) * amax[:, None]
    x[:, 17] = amax * np.where(np.arange(len(amax)) % 2, 1, -1)
    values, scales = quantize_ue8m0(jax.device_put(x), 64)
    torch_values, torch_scales = torch_ue8m0(torch, torch.from_numpy(x))
    np.testing.assert_array_equal(np.asarray(scales)[:, 0], torch_scales.numpy())
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), torch_values.view(torch.uint8).numpy())


def torch_ue8m0(torch, groups):
    """[n, group] float32 -> (e4m3 values, scale bytes [n]): s rounded up to torch's own float8_e8m0fnu."""
    s = groups.abs().amax(-1).clamp(min=1e-4) / 448
    nearest = s.to(torch.float8_e8m0fnu)  # torch rounds to nearest
    byte = nearest.view(torch.uint8) + (nearest.float() < s).to(torch.uint8)
    scale = byte.view(torch.float8_e8m0fnu).float()
    return (groups / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), byte


# --- write_kv -------------------------------------------------------------------------------------


@pytest.mark.always(4)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_write_kv_bytes(layout, page_size):
    """Every byte of the cache: rows, scales, the untouched eighth scale byte, padding, other slots."""
    num_pages = 3
    cache = filled(layout, num_pages, page_size, seed=page_size)
    total = num_pages * page_size
    rng = np.random.default_rng(1)
    slots = np.full(16, -1, np.int32)
    picked = rng.permutation(total)[:11]
    slots[: len(picked)] = picked
    slots[12:] = [total, -7, -(2**31), 2**31 - 1]
    slots = rng.permutation(slots)
    for dtype in (jnp.float32, jnp.bfloat16):
        rows = mixed_rows(16, layout.qk_dim, 2).astype(dtype)
        new = write_kv(cache, jax.device_put(slots), jax.device_put(rows))
        assert (new.layout, new.page_size) == (layout, page_size)
        chex.assert_type(new.data, jnp.uint8)
        expected = write_by_hand(np.asarray(cache.data), layout, page_size, slots, rows)
        np.testing.assert_array_equal(np.asarray(new.data), expected)


@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from([x.name for x in LAYOUTS]))
@PROPERTY
def test_write_kv_any_bits(seed, name):
    """Any finite float32, subnormal ones included: the oracle's bytes, and only finite values come back."""
    layout = getattr(KVLayout, name)
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 2**32, (8, layout.qk_dim), dtype=np.uint32)
    raw = np.where((raw >> 23) & 0xFF == 0xFF, raw & 0x807FFFFF, raw)  # infinities and NaN become subnormal
    rows = np.where(rng.random((8, 1)) < 0.5, raw, raw & 0x80FFFFFF).view(np.float32)
    assert np.isfinite(rows).all()
    slots = rng.permutation(16).astype(np.int32)[:8]
    cache = write_kv(filled(layout, 2, 8), jax.device_put(slots), jax.device_put(rows))
    expected = write_by_hand(np.full(cache.data.shape, 0xFF, np.uint8), layout, 8, slots, rows)
    np.testing.assert_array_equal(np.asarray(cache.data), expected)
    assert np.isfinite(np.asarray(gather_kv(cache, jax.device_put(slots)), np.float32)).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_write_kv_extremes(layout):
    """Largest numbers stay finite, zeros stay clean, infinities and NaN stay in their row."""
    rows = np.zeros((6, layout.qk_dim), np.float32)
    rows[0] = np.finfo(np.float32).max
    rows[1] = -np.finfo(np.float32).max
    rows[2] = BF16_MAX
    rows[3, ::64] = np.inf
    rows[4, ::64] = np.nan
    cache = write_kv(filled(layout, 1, 8), jnp.arange(6, dtype=jnp.int32), jax.device_put(rows))
    got = np.asarray(gather_kv(cache, jnp.arange(6, dtype=jnp.int32)), np.float32)
    fp8 = layout.fp8_dim
    assert (got[0, fp8:] == BF16_MAX).all() and (got[1, fp8:] == -BF16_MAX).all()
    assert (got[0, :fp8] == CLIP).all() and np.isfinite(got[:3]).all()
    np.testing.assert_array_equal(got[0], got[2])
    np.testing.assert_array_equal(got[0], -got[1])
    assert np.isinf(got[3, fp8::64]).all() and (got[3, :fp8:64] == CLIP).all()
    assert np.isnan(got[4, ::64]).all()
    assert not got[5].any()


@pytest.mark.torch
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_v4_bytes_are_torchs(page_size):
    torch = pytest.importorskip("torch")
    rows = mixed_rows(14, 512, 3)
    rows[0, 5], rows[1, 64:128], rows[7, 3] = np.finfo(np.float32).max, 0, 448
    kv = torch.from_numpy(rows).to(torch.bfloat16)
    kv = kv.clamp(torch.finfo(torch.bfloat16).min, torch.finfo(torch.bfloat16).max)
    values, scales = torch_ue8m0(torch, kv[:, :448].float().reshape(-1, 64).clamp(-CLIP, CLIP))
    body = torch.cat([values.view(torch.uint8).reshape(14, 448), kv[:, 448:].contiguous().view(torch.uint8)], 1)
    cache = PagedKV.zeros(V4, -(-14 // page_size), page_size)
    data = np.asarray(write_kv(cache, jnp.arange(14, dtype=jnp.int32), jax.device_put(rows)).data)
    for slot in range(14):
        page, offset = divmod(slot, page_size)
        np.testing.assert_array_equal(data[page, offset * 576 : offset * 576 + 576], body[slot].numpy())
        footer = data[page, page_size * 576 + offset * 8 :][:8]
        np.testing.assert_array_equal(footer[:7], scales.reshape(14, 7)[slot].numpy())
        assert footer[7] == 0


@pytest.mark.torch
def test_v32_bytes_are_torchs():
    torch = pytest.importorskip("torch")
    rows = mixed_rows(14, 576, 4)
    rows[0, 5], rows[1, 128:256], rows[7, 3] = np.finfo(np.float32).max, 0, 448
    kv = torch.from_numpy(rows).to(torch.bfloat16)
    kv = kv.clamp(torch.finfo(torch.bfloat16).min, torch.finfo(torch.bfloat16).max)
    groups = kv[:, :512].double().reshape(-1, 128).clamp(-CLIP, CLIP)
    scale = (groups.abs().amax(-1) / 448).clamp(min=1e-4).log2().ceil().exp2()[:, None]
    values = (groups / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    data = np.asarray(
        write_kv(PagedKV.zeros(V32, 1, 14), jnp.arange(14, dtype=jnp.int32), jax.device_put(rows)).data
    ).reshape(14, 656)
    np.testing.assert_array_equal(data[:, :512], values.view(torch.uint8).reshape(14, 512).numpy())
    np.testing.assert_array_equal(data[:, 512:528].copy().view(np.float32), scale.float().reshape(14, 4).numpy())
    np.testing.assert_array_equal(data[:, 528:], kv[:, 512:].contiguous().view(torch.uint8).numpy())
    assert np.float32(data[1, 516:520].copy().view(np.float32)[0]) == 2.0**-13


def test_write_kv_duplicates_come_from_their_rows():
    """Which row wins is not defined; that other slots keep their bytes is."""
    cache = filled(V32_BF16, 1, 4, seed=0)
    rows = np.stack([np.full(576, v, np.float32) for v in (1.0, 2.0, 3.0)])
    new = write_kv(cache, jnp.asarray([2, 0, 2], jnp.int32), jax.device_put(rows))
    got = np.asarray(gather_kv(new, jnp.arange(4, dtype=jnp.int32)), np.float32)
    assert set(np.unique(got[2])) <= {1.0, 3.0} and (got[0] == 2).all()
    old = np.asarray(cache.data).reshape(4, -1)
    np.testing.assert_array_equal(np.asarray(new.data).reshape(4, -1)[[1, 3]], old[[1, 3]])


def test_no_rows_and_no_pages():
    none = jnp.zeros(0, jnp.int32)
    for layout in LAYOUTS:
        cache = filled(layout, 2, 4, seed=0)
        new = write_kv(cache, none, jnp.zeros((0, layout.qk_dim), jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(new.data), np.asarray(cache.data))
        chex.assert_shape(gather_kv(cache, none), (0, layout.qk_dim))
        empty = PagedKV(data=jnp.zeros((0, layout.page_bytes(4)), jnp.uint8), layout=layout, page_size=4)
        slots = jnp.asarray([0, -1, 5], jnp.int32)
        assert write_kv(empty, slots, jnp.ones((3, layout.qk_dim), jnp.float32)).data.shape == empty.data.shape
        assert not np.asarray(gather_kv(empty, slots), np.float32).any()
        chex.assert_shape(dequantize_kv(empty), (0, layout.qk_dim))
        chex.assert_shape(split_pages(empty, 2, slots=slots).data, (0, layout.page_bytes(2)))


# --- gather_kv and dequantize_kv ------------------------------------------------------------------


def test_gather_v4_every_value_and_scale():
    """All 256 e4m3 codes times all 256 scale bytes: subnormal scales and products, infinities and NaN."""
    data = np.zeros((1, 149760), np.uint8)
    codes = np.arange(256, dtype=np.uint8)
    rows = data[:, : 256 * 576].reshape(256, 576)
    rows[:, :256] = codes
    rows[:, 256:448] = codes[:192]
    data[0, 147456 : 147456 + 2048] = np.repeat(codes, 8)
    cache = PagedKV(data=jax.device_put(data), layout=V4, page_size=256)
    got = gather_kv(cache, jnp.arange(256, dtype=jnp.int32))
    scales = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert scales[0] == 2.0**-127 and np.isnan(scales[255])
    with np.errstate(over="ignore"):
        expected = (codes.view(E4M3).astype(np.float32)[None] * scales[:, None]).astype(BF16)
    assert_same_bf16(got[:, :256], expected)
    assert_same_bf16(got[:, 256:448], expected[:, :192])
    assert not bits(got[:, 448:]).any()


def test_gather_v32_scales_need_not_be_powers_of_two():
    """SGLang's writer stores amax / 448 as it is: the product is rounded to float32, then to bfloat16."""
    rng = np.random.default_rng(0)
    cache = filled(V32, 2, 64, seed=1)
    data = np.asarray(cache.data).copy().reshape(128, 656)
    scales = np.exp(rng.uniform(-20, 20, (128, 4))).astype(np.float32)
    data[:, 512:528] = scales.view(np.uint8)
    cache = dataclasses.replace(cache, data=jax.device_put(data.reshape(2, -1)))
    slots = rng.permutation(128).astype(np.int32)
    got = gather_kv(cache, jax.device_put(slots))
    values = data[:, :512].copy().view(E4M3).astype(np.float32).reshape(128, 4, 128)
    expected = (values * scales[..., None]).astype(BF16).reshape(128, 512)[slots]
    assert_same_bf16(got[:, :512], expected)
    rope = data[slots, 528:].copy().view(np.uint16)
    np.testing.assert_array_equal(bits(got[:, 512:]), rope)  # NaN payloads too


@pytest.mark.always(6)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_gather_is_dequantize(layout, page_size):
    """Random bytes: both readers agree bit for bit, the bf16 part is copied, and holes are zero."""
    cache = filled(layout, 2, page_size, seed=2)
    everything = jax.jit(dequantize_kv)(cache)
    chex.assert_shape(everything, (2 * page_size, layout.qk_dim))
    chex.assert_type(everything, jnp.bfloat16)
    slots = np.random.default_rng(3).integers(0, 2 * page_size, 20).astype(np.int32)
    slots[3:7] = HOSTILE
    slots[7] = 2 * page_size
    rows = jax.jit(gather_kv)(cache, jax.device_put(slots))
    got = bits(rows)
    chex.assert_shape(got, (20, layout.qk_dim))
    for i, slot in enumerate(slots):
        if 3 <= i <= 7:
            assert not got[i].any()
            continue
        assert_same_bf16(rows[i], everything[slot])
        page, offset = divmod(int(slot), page_size)
        width = {V4: 576, V32: 656, V32_BF16: 1152, V4_BF16: 1024}[layout]
        row = np.asarray(cache.data)[page, offset * width : offset * width + width]
        tail = row[-128:] if layout in (V4, V32) else row
        np.testing.assert_array_equal(got[i, -len(tail) // 2 :], tail.copy().view(np.uint16))


@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(["V4_FP8", "V32_FP8"]),
    magnitude=st.sampled_from([1e-7, 1e-3, 1.0, 50.0, 1e6, 1e30]),
    holes=st.floats(0, 1),
)
@PROPERTY
def test_round_trip(seed, name, magnitude, holes):
    """Half a step of e4m3 away at most; and what was read once reads the same when written again."""
    layout = getattr(KVLayout, name)
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((16, layout.qk_dim)) * magnitude).astype(np.float32)
    slots = rng.permutation(24).astype(np.int32)[:16]
    slots = np.where(rng.random(16) < holes, np.int32(HOSTILE[seed % 4]), slots)
    cache = write_kv(filled(layout, 3, 8), jax.device_put(slots), jax.device_put(rows))
    read = gather_kv(cache, jax.device_put(slots))
    got, expected = np.asarray(read, np.float64), to_bf16(rows).astype(np.float64)
    hole = (slots < 0) | (slots >= 24)
    assert not got[hole].any()
    fp8 = layout.fp8_dim
    np.testing.assert_array_equal(got[~hole, fp8:], expected[~hole, fp8:])
    x, y = expected[~hole, :fp8], got[~hole, :fp8]
    floor = 2.0 ** (-22 if layout is V4 else -13)
    groups = np.abs(x).reshape(len(x), layout.num_groups, layout.group).max(-1)
    # Half of the smallest e4m3 number, times a scale of less than 2 amax / 448.
    step = np.maximum(2 * groups / 448, floor) * 2.0**-10
    step = np.repeat(step, layout.group, axis=1)
    assert (np.abs(x - y) <= np.maximum(np.abs(x) * 2.0**-4, step)).all()
    again = gather_kv(write_kv(cache, jax.device_put(slots), read), jax.device_put(slots))
    np.testing.assert_array_equal(bits(again), bits(read))


@pytest.mark.parametrize("layout", [V4, KVLayout("made up", nope_dim=64, rope_dim=12, v_dim=76)], ids=lambda x: x.name)
def test_kernels_take_the_layouts_that_they_were_written_for(layout, monkeypatch):
    """The kernels' tiles would miss the last 12 of 76 values, and the last 4 bytes of their row, without a word."""
    taken = []

    def dispatch(kernel, plain, *args, rule=None):
        taken.append(plain)
        return plain(*args)

    for module in (rows_module, split_module):
        monkeypatch.setattr(module, "dispatch", dispatch)
    # Shapes that no other test has: `dispatch` is called where a function is traced.
    slots, kv = jnp.arange(23, dtype=jnp.int32), jnp.ones((23, layout.qk_dim), jnp.bfloat16)
    cache = write_kv(PagedKV.zeros(layout, 3, 24), slots, kv)
    small = split_pages(cache, 12, slots=slots)
    np.testing.assert_array_equal(np.asarray(gather_kv(small, slots), np.float32), np.ones((23, layout.qk_dim)))
    assert len(taken) == (3 if layout == V4 else 0)


def test_new_scales_are_float32_in_any_mode():
    with jax.enable_x64(True):
        cache = PagedKV.zeros(KVLayout.NOPE_FP8_TENSOR, 2, 64)
    assert cache.scale.dtype == jnp.float32

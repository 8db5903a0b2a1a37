"""The layouts of V4.1 and of rows without rope: every byte against constructions in torch, made from the formulas.

FlashMLA's and SGLang's quantisers round `max(amax / 448, 1e-4)` up to a power of two, vLLM's `max(amax, 1e-4) / 448`.
FP4's scale is `clip(amax / 6, 2^-9, 448)` in e4m3. Where the bytes stand is `layout_oracle.py`'s.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_oracle import BF16, CLIP, HOSTILE, assert_same_bf16, bits
from layout_oracle import E2M1, RECORDS, TENSOR_SCALE, page_bytes, place, put_token, tokens_of, values_of

from jax_sparse_mla.kv_cache import KVLayout, PagedKV, dequantize_kv, gather_kv, split_pages, write_kv
from jax_sparse_mla.kv_cache.layout import KERNEL_LAYOUTS, bf16_layout
from jax_sparse_mla.kv_cache.paged import paged
from jax_sparse_mla.kv_cache.quantize import bits_to_float32, divide, encode_rows

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
LAYOUTS = pytest.mark.parametrize("name", RECORDS)
# Whose bytes a writer may be asked for; None is the layout's own rule.
WRITERS = {
    "V41_FP8": (None, "flashmla", "sglang", "vllm"),
    "V41_FP8_SPLIT": (None, "vllm"),
    "V41_FP4": (None, "vllm"),  # one rule
    "V41_FP4_SPLIT": (None,),
    "NOPE_FP8": (None, "flashmla", "sglang"),
    "NOPE_BF16": (None,),
    "NOPE_FP8_TENSOR": (None,),
}
ROWS, PAGE, PAGES = 24, 8, 4
PROPERTY = settings(max_examples=8, deadline=None)

encode = jax.jit(encode_rows, static_argnums=0)


def cache_of(name: str, data: np.ndarray, page_size: int = PAGE, writer: str | None = None) -> PagedKV:
    layout = getattr(KVLayout, name)
    facts = {"layout": layout if writer is None else layout.written_by(writer), "page_size": page_size}
    return paged(jax.device_put(data), jnp.full(1, TENSOR_SCALE) if name == "NOPE_FP8_TENSOR" else None, **facts)


def poisoned(name: str, pages: int = PAGES, page_size: int = PAGE) -> np.ndarray:
    return np.full((pages, page_bytes(name, page_size)), 0xFF, np.uint8)


# --- the oracle -----------------------------------------------------------------------------------


def power_of_two(amax, quantizer: str | None):
    """float64 scales of float64 `amax`, which the division by 448 rounds far less than a bfloat16's last place."""
    least = amax.clamp(min=1e-4) / 448 if quantizer == "vllm" else (amax / 448).clamp(min=1e-4)
    return least.log2().ceil().exp2()


def normal_or_zero(x):
    return torch.where(x.abs() < 2.0**-126, torch.zeros_like(x).copysign(x), x)


def e2m1_codes(x):
    """The nearest number's code; of two as near the even one. Ties are exact in float64."""
    away = (x.abs().clamp(max=6)[..., None] - torch.from_numpy(E2M1)).abs()
    nearest = away == away.amin(-1, keepdim=True)
    evens_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    code = evens_first[nearest[..., evens_first].int().argmax(-1)]
    return code | (torch.signbit(x).long() << 3)


def tokens_in_torch(name: str, rows, quantizer: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of values and scales, `[n, …]`, of bfloat16 rows of finite numbers."""
    kind, none = RECORDS[name].scales, np.zeros((len(rows), 0), np.uint8)
    if kind == "none":
        return rows.view(torch.uint8).numpy(), none
    x = rows.double().clamp(-CLIP, CLIP)
    if kind == "tensor":
        quotients = (x.float() / torch.tensor(TENSOR_SCALE)).clamp(-448, 448)
        return quotients.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), none
    groups = x.view(len(rows), {"ue8m0": 16, "float32": 4, "e4m3": 32}[kind], -1)
    amax = groups.abs().amax(-1)
    if kind == "e4m3":
        scales = (amax / 6).clamp(2.0**-9, 448).float().to(torch.float8_e4m3fn)
        codes = e2m1_codes(groups / scales.double()[..., None]).view(len(rows), 256, 2)
        return (codes[..., 0] | (codes[..., 1] << 4)).to(torch.uint8).numpy(), scales.view(torch.uint8).numpy()
    if kind == "float32" and quantizer == "sglang":  # any scale; what is no normal number is 0, and a zero's codes are
        scales, inverse = normal_or_zero(amax.float() / 448), torch.zeros(amax.shape)
        inverse[scales > 0] = 1 / scales[scales > 0]
        values = (normal_or_zero(groups.float()) * inverse[..., None]).clamp(-448, 448)
    else:
        scales = power_of_two(amax, quantizer)
        values = (groups / scales[..., None]).float()
        scales = scales.to(torch.float8_e8m0fnu) if kind == "ue8m0" else scales.float()
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8).reshape(len(rows), 512)
    return codes.numpy(), scales.view(torch.uint8).numpy().reshape(len(rows), -1)


def hostile_rows(seed: int, n: int = ROWS) -> np.ndarray:
    """float32 `[n, 512]` of finite numbers: normal, tiny, subnormal, huge, zeros of both signs, ties, any bits."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, 512)).astype(np.float32)
    rows *= np.exp2(rng.integers(-20, 12, (n, 1))).astype(np.float32)
    rows[1::8] = np.where(rng.random(rows[1::8].shape) < 0.5, np.float32(-0.0), np.float32(0.0))
    rows[2::8] *= np.float32(1e-30)
    rows[3::8] = np.sign(rows[3::8]) * np.float32(3.4e38) * rng.random(rows[3::8].shape, np.float32)
    rows[4::8] = rng.choice(np.arange(-28, 29).astype(np.float32) / 4, rows[4::8].shape)  # ties of e2m1
    rows[5::8] *= np.exp2(rng.integers(-24, 24, rows[5::8].shape)).astype(np.float32)
    rows[6::8] = np.exp2(rng.integers(-24, 9, rows[6::8].shape)).astype(np.float32) * 1.75
    raw = rng.integers(0, 2**32, rows[7::8].shape, dtype=np.uint32)
    rows[7::8] = np.where((raw >> 23) & 0xFF == 0xFF, raw & 0x807FFFFF, raw).view(np.float32)
    return rows


def as_torch(rows: np.ndarray):
    """Rounded to bfloat16; finite numbers stay finite."""
    limit = torch.finfo(torch.bfloat16)
    return torch.from_numpy(rows).to(torch.bfloat16).clamp(limit.min, limit.max)


# --- what a layout is -----------------------------------------------------------------------------


def test_the_formats_numbers():
    """Bytes of a token and of pages of 64, 128 and 256 tokens, as engines allocate them."""
    pages = {528: [33_792, 67_584, 135_168], 288: [18_432, 36_864, 73_728]}
    for name, record in RECORDS.items():
        layout = getattr(KVLayout, name)
        bytes_per_token = record.value_bytes + record.scale_bytes
        assert (layout.name, layout.bytes_per_token) == (name, bytes_per_token)
        assert (layout.qk_dim, layout.v_dim, layout.rope_dim) == (512, 512, 64 if name.startswith("V41") else 0)
        found = [layout.page_bytes(p) for p in (64, 128, 256)]
        assert found == pages.get(bytes_per_token, [p * bytes_per_token for p in (64, 128, 256)])
        assert [layout.page_bytes(p) for p in (1, 2, 61)] == [page_bytes(name, p) for p in (1, 2, 61)]
        assert bf16_layout(layout) == (KVLayout.V4_BF16 if layout.rope_dim else KVLayout.NOPE_BF16)
        if record.scale_bytes:
            start, stride = layout.scale_place(64)
            assert [start, start + stride] == [place(name, 64, offset)[1] for offset in (0, 1)]
        assert layout in KERNEL_LAYOUTS
    assert KVLayout.V41_FP8_SPLIT.page_bytes(61) == 32_256  # 61 · 528 = 32,208, padded to a multiple of 512


def test_v41_s_compressed_cache_is_half_of_v4_s():
    assert 1 - KVLayout.V41_FP4.bytes_per_token / KVLayout.V4_FP8.bytes_per_token > 0.506
    split = KVLayout.V41_FP4_SPLIT.page_bytes(256), KVLayout.V4_FP8.page_bytes(256)
    assert 1 - split[0] / split[1] > 0.507


# --- the writer -----------------------------------------------------------------------------------


@pytest.mark.always(2)
@LAYOUTS
@PROPERTY
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_every_byte_is_torch_s(name, seed, dtype):
    """Also of the bytes that are not to be written: other slots and padding; and what is read back."""
    rows = hostile_rows(seed)
    rng = np.random.default_rng(seed)
    slots = rng.permutation(PAGE * PAGES)[:ROWS].astype(np.int32)
    slots[rng.integers(0, ROWS, 3)] = rng.choice([*HOSTILE, PAGE * PAGES], 3)
    kv = as_torch(rows)
    given_rows = jax.device_put(rows if dtype == "float32" else kv.view(torch.int16).numpy().view(BF16))
    for quantizer in WRITERS[name]:
        expected = poisoned(name)
        for slot, values, scales in zip(slots, *tokens_in_torch(name, kv, quantizer)):
            if 0 <= slot < PAGE * PAGES:
                put_token(expected, name, PAGE, slot, values, scales)
        cache = cache_of(name, poisoned(name), writer=quantizer)
        cache = write_kv(cache, jax.device_put(slots), given_rows)
        np.testing.assert_array_equal(np.asarray(cache.data), expected)
        read = gather_kv(cache, jax.device_put(slots))
        assert np.isfinite(np.asarray(read, np.float32)).all()
        valid = (slots >= 0) & (slots < PAGE * PAGES)
        stored = values_of(name, *tokens_of(name, PAGE, expected))[slots[valid]]
        # XLA's products on a CPU are no subnormal numbers, nor the least normal one where they are rounded up to it;
        # those of writers' own powers of two never are.
        normal = (np.abs(stored) > 2.0**-126) | (stored == 0) | (quantizer != "sglang")
        np.testing.assert_array_equal(np.asarray(read, np.float64)[valid][normal], stored[normal])
        assert not bits(read)[~valid].any()


def test_engines_floors_differ_for_small_rows_only():
    """Up to an amax of 448 · 2^-14 (0.0273), above which both round up to 2^-13 or more; FP4 has one rule."""
    slots, small = jnp.arange(2, dtype=jnp.int32), np.full((2, 512), 448 * 2.0**-14, np.float32)
    for name in ("V41_FP8", "V41_FP8_SPLIT"):
        for rows, same in ((small, False), (small * 1.01, True)):
            data = [
                np.asarray(write_kv(cache_of(name, poisoned(name), writer=writer), slots, rows).data)
                for writer in ("flashmla", "sglang", "vllm")
            ]
            np.testing.assert_array_equal(data[0], data[1])
            assert (data[0] == data[2]).all() == same
    zeros = write_kv(cache_of("V41_FP8", poisoned("V41_FP8")), slots, 0 * small)
    assert set(np.asarray(zeros.data)[0, 512:528]) == {114}
    zeros = write_kv(cache_of("V41_FP8", poisoned("V41_FP8"), writer="vllm"), slots, 0 * small)
    assert set(np.asarray(zeros.data)[0, 512:528]) == {105}


@LAYOUTS
def test_a_nan_spoils_its_own_row_and_no_other(name):
    rows = hostile_rows(0)[:8]
    rows[2, 77], rows[5, -1] = np.nan, -np.nan
    rows[6, ::7] = np.inf
    slots = jnp.arange(8, dtype=jnp.int32)
    cache = write_kv(cache_of(name, poisoned(name)), slots, jax.device_put(rows))
    read = np.asarray(gather_kv(cache, slots), np.float32)
    spoilt = np.isnan(read)
    assert spoilt[2, 77] and spoilt[5, -1]
    group = 16 if "FP4" in name else 1  # e2m1 has no NaN: the scale has it
    assert spoilt[2].sum() == spoilt[5].sum() == group
    assert not spoilt[[0, 1, 3, 4, 6, 7]].any()
    rows[[2, 5]] = 0
    clean = write_kv(cache_of(name, poisoned(name)), slots, jax.device_put(rows))
    np.testing.assert_array_equal(np.delete(read, [2, 5], 0), np.delete(gather_kv(clean, slots), [2, 5], 0))
    if RECORDS[name].scales in ("ue8m0", "float32"):
        assert (read[6, ::7] == CLIP).all()


def test_fp4_saturates_and_keeps_what_was_rounded_to_it():
    """6 · 448 is the largest number; rows that FP4 holds are written again without a change."""
    slots = jnp.arange(ROWS, dtype=jnp.int32)
    rows = hostile_rows(3)
    cache = write_kv(cache_of("V41_FP4", poisoned("V41_FP4")), slots, jax.device_put(rows))
    read = gather_kv(cache, slots)
    assert np.abs(np.asarray(read, np.float32)).max() == 6 * 448
    again = write_kv(cache_of("V41_FP4", poisoned("V41_FP4")), slots, read)
    np.testing.assert_array_equal(np.asarray(gather_kv(again, slots), np.float32), np.asarray(read, np.float32))


def test_several_layers_have_a_scale_each():
    cache = PagedKV.zeros(KVLayout.NOPE_FP8_TENSOR, 2, PAGE, num_layers=3)
    assert cache.data.shape == (6, PAGE * 512) and np.asarray(cache.scale).tolist() == [1, 1, 1]
    cache = dataclasses.replace(cache, scale=jnp.asarray([0.5, 2.0, 0.25], jnp.float32))
    slots, rows = jnp.arange(4, dtype=jnp.int32), np.tile(np.float32([3.0, 100.0, -448.0, 1e6]), (4, 128))
    limits = np.float32([448 * 0.5, 448 * 2, 448 * 0.25])
    for layer in range(3):
        cache = jax.jit(write_kv)(cache.layer(layer), slots, rows)
    for layer in range(3):
        read = np.asarray(gather_kv(cache.layer(layer), slots), np.float32)
        np.testing.assert_array_equal(read[:, 3], limits[layer])
        np.testing.assert_array_equal(read[:, 2], -min(448.0, limits[layer]))
        small = split_pages(cache.layer(layer), 2, slots=slots)
        np.testing.assert_array_equal(np.asarray(gather_kv(small, slots), np.float32), read)
        np.testing.assert_array_equal(np.asarray(dequantize_kv(cache.layer(layer)), np.float32)[:4], read)


# --- the reader -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["V41_FP8", "V41_FP8_SPLIT", "V41_FP4", "V41_FP4_SPLIT"])
def test_every_code_times_every_scale(name):
    """256 tokens, one for each scale byte: subnormal scales and products, infinities and NaN."""
    record, data = RECORDS[name], np.zeros((4, page_bytes(name, 64)), np.uint8)
    values = np.resize(np.arange(256, dtype=np.uint8), record.value_bytes)
    for slot in range(256):
        put_token(data, name, 64, slot, values, np.full(record.scale_bytes, slot, np.uint8))
    read = gather_kv(cache_of(name, data, 64), jnp.arange(256, dtype=jnp.int32))
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    if record.scales == "ue8m0":
        codes = torch.from_numpy(values).view(torch.float8_e4m3fn).float()
        expected = codes * scales.view(torch.float8_e8m0fnu).float()
    else:
        nibbles = torch.from_numpy(np.stack([values & 15, values >> 4], -1).reshape(512).astype(np.int64))
        codes = torch.from_numpy(E2M1)[nibbles & 7].float() * (1 - 2 * (nibbles >> 3))
        expected = codes * scales.view(torch.float8_e4m3fn).float()
    expected = expected.to(torch.bfloat16).view(torch.int16).numpy().view(BF16)
    magnitude = bits(expected) & 0x7FFF
    assert_same_bf16(jnp.where(magnitude == 0, jnp.abs(read), read), np.where(magnitude == 0, 0, expected).astype(BF16))


@pytest.mark.always(1)
@LAYOUTS
def test_pages_of_every_size(name):
    """What is written at one page size is there after a split; all readers agree; padding stays as it was."""
    rows = hostile_rows(5)
    for page_size, small in ((256, 2), (61, 1)):
        pages = 2
        slots = np.random.default_rng(page_size).permutation(pages * page_size)[:ROWS].astype(np.int32)
        slots[0] = pages * page_size - 1
        slots = np.unique(slots)[:20]
        cache = write_kv(cache_of(name, poisoned(name, pages, page_size), page_size), slots, rows[: len(slots)])
        expected = poisoned(name, pages, page_size)
        for slot, values, scales in zip(slots, *tokens_in_torch(name, as_torch(rows[: len(slots)]), None)):
            put_token(expected, name, page_size, slot, values, scales)
        np.testing.assert_array_equal(np.asarray(cache.data), expected)
        read = gather_kv(cache, jnp.asarray(slots))
        assert_same_bf16(dequantize_kv(cache)[slots], read)
        for pieces in (split_pages(cache, small), split_pages(cache, small, slots=jnp.asarray(slots))):
            assert pieces.data.shape[1] == page_bytes(name, small)
            assert_same_bf16(gather_kv(pieces, jnp.asarray(slots)), read)


# --- quantisers -----------------------------------------------------------------------------------


def test_fp4_scales_of_every_bfloat16_amax():
    """`amax · (1 / 6)` rounds to the e4m3 number that the quotient rounds to, of all 32,640 finite magnitudes."""
    magnitudes = np.arange(0x7F80, dtype=np.uint16).view(BF16)
    x = np.zeros((len(magnitudes), 16), BF16)
    x[:, 5] = -magnitudes
    packed, scales = np.split(encode(KVLayout.V41_FP4, jnp.asarray(x.reshape(-1, 512)))[0], [256], axis=1)
    expected = (torch.from_numpy(magnitudes.astype(np.float64)) / 6).clamp(2.0**-9, 448)
    expected = expected.float().to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(scales.reshape(-1), expected.view(torch.uint8).numpy())
    quotient = torch.from_numpy(-magnitudes.astype(np.float64)) / expected.double()
    np.testing.assert_array_equal(packed.reshape(-1, 8)[:, 2] >> 4, e2m1_codes(quotient).numpy())


def test_quotients_are_rounded_to_nearest():
    """As numpy rounds them: any normal numbers, 1 / x, x / 448, results that are no normal numbers, and no operands."""
    rng = np.random.default_rng(0)
    above, below = rng.integers(0x00800000, 0x7F800000, (2, 200_000), dtype=np.int32)
    above[:50_000] = 0x3F800000  # 1
    below[50_000:100_000] = 0x43E00000  # 448
    above[100_000:101_000] = below[100_000:101_000]
    above[-4:], below[-4:] = (0, 0x7F800000, 0x7FC00000, 1), 0x3F800000
    with np.errstate(over="ignore", under="ignore"):
        expected = above.view(np.float32) / below.view(np.float32)
    expected[expected < 2.0**-126], expected[-3] = 0, np.nan
    np.testing.assert_array_equal(jax.jit(lambda a, b: bits_to_float32(divide(a, b)))(above, below), expected)


def test_the_ties_of_e2m1_go_to_the_even_code():
    x = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    values = np.concatenate([x, -x]).astype(BF16)  # an amax of 6: the scale is 1
    row = np.asarray(encode(KVLayout.V41_FP4, jnp.asarray(np.tile(values, (1, 32))))[0])[0]
    codes = np.stack([row[:8] & 15, row[:8] >> 4], -1).reshape(-1)
    assert row[256] == 0x38  # e4m3's 1
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]


def test_a_writer_is_not_another_layout():
    """Programs tell the writers apart, readers do not."""
    own, vllm = KVLayout.V41_FP8, KVLayout.V41_FP8.written_by("vllm")
    assert own.written_by("flashmla") is not vllm and own.written_by("flashmla") == own.written_by("sglang") == own
    assert vllm != own and vllm.read_as == own and vllm.beside == own.beside
    assert repr(vllm) == "KVLayout.V41_FP8.written_by('vllm')"
    assert KVLayout.V4_FP8.written_by("vllm") == KVLayout.V4_FP8
    slots, rows = jnp.arange(4, dtype=jnp.int32), hostile_rows(1)[:4]
    cache = write_kv(cache_of("V41_FP8", poisoned("V41_FP8"), writer="vllm"), slots, rows)
    out = split_pages(cache, 2, out=PagedKV.zeros(own, 4 * PAGES, 2))
    np.testing.assert_array_equal(gather_kv(cache, slots), gather_kv(out, slots))


# --- what is refused ------------------------------------------------------------------------------


def test_refusals_name_the_argument():
    slots, kv = jnp.arange(2, dtype=jnp.int32), jnp.zeros((2, 512), jnp.bfloat16)
    cache = cache_of("NOPE_FP8", poisoned("NOPE_FP8"))
    for name, engine, known in (("NOPE_FP8", "vllm", "'flashmla' or 'sglang'"), ("V4_BF16", "sglang", "nobody")):
        with pytest.raises(ValueError, match=f"written_by: engine of {name} must be {known}, got '{engine}'"):
            getattr(KVLayout, name).written_by(engine)
    scaled = paged(cache.data, jnp.ones(1), layout=cache.layout, page_size=PAGE)
    with pytest.raises(ValueError, match=r"cache\.scale was given, but NOPE_FP8 keeps its scales in its pages"):
        gather_kv(scaled, slots)
    tensor = PagedKV.zeros(KVLayout.NOPE_FP8_TENSOR, 1, 8)
    with pytest.raises(TypeError, match=r"gather_kv: cache\.scale must be float32 \[1\], got None"):
        gather_kv(dataclasses.replace(tensor, scale=None), slots)
    with pytest.raises(ValueError, match=r"write_kv: cache\.scale must have shape \[1\], got \[2\]"):
        write_kv(dataclasses.replace(tensor, scale=jnp.ones(2)), slots, kv)

"""The Triton kernels over cache bytes and index lists, bit by bit against the plain JAX functions.

Without a GPU they run in Triton's interpreter through the torch launchers, and are compiled for the architectures
that they serve. On a GPU the same tests launch them for real, and those marked `gpu` go through JAX's dispatch.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_facts import ARCHITECTURES, LEAST_SHARED_MEMORY, compiled_facts
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_mla_torch.operations import indices as torch_indices
from sparse_mla_torch.operations import kv_cache as torch_kv
from torch_graphs import capture
from triton_device import DEVICE, poisoned_memory, tensor

from jax_sparse_mla.indices import combine_swa_extra_indices, combine_topk_swa_indices
from jax_sparse_mla.indices.merge import combine_swa_extra_reference, combine_topk_swa_reference
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv, split_pages, write_kv
from jax_sparse_mla.kv_cache.rows import (
    gather_kv_into,
    gather_rows_reference,
    write_rows_reference,
)
from jax_sparse_mla.kv_cache.split import split_touched_reference

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities in the interpreter
]

V32, V4, V32_BF16, V4_BF16 = KVLayout.V32_FP8, KVLayout.V4_FP8, KVLayout.V32_BF16, KVLayout.V4_BF16
LAYOUTS = pytest.mark.parametrize("layout", (V32, V4, V32_BF16, V4_BF16), ids=repr)
PAGE_SIZES = (256, 64, 2, 61, 1)
HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
PROPERTY = settings(max_examples=12, deadline=None)


# --- data -----------------------------------------------------------------------------------------


def rows_of_every_kind(n: int, dim: int, seed: int) -> np.ndarray:
    """float32: normal, tiny, subnormal, huge (beyond bfloat16 too), zero, infinite, mixed within a group."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, dim)).astype(np.float32)
    rows *= np.exp2(rng.integers(-40, 40, (n, 1))).astype(np.float32)
    rows[1::9] = 0.0
    rows[2::9] *= np.float32(1e-30)
    rows[3::9] = np.sign(rows[3::9]) * np.float32(3.4e38)
    rows[4::9, ::5] = -np.inf
    rows[5::9] *= np.exp2(rng.integers(-20, 20, rows[5::9].shape)).astype(np.float32)
    rows[6::9] = np.exp2(rng.integers(-12, 9, rows[6::9].shape)).astype(np.float32) * 1.75
    return rows


def random_pages(layout: KVLayout, num_pages: int, page_size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_pages, layout.page_bytes(page_size)), dtype=np.uint8)


def some_slots(n: int, num_slots: int, seed: int) -> np.ndarray:
    """Distinct slots, some of them replaced by hostile ones; the last slot is among them."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(max(num_slots, n))[:n].astype(np.int32)
    bad = np.concatenate([np.array(HOSTILE, np.int32), [num_slots]])
    slots[rng.random(n) < 0.2] = rng.choice(bad)
    slots[slots == num_slots - 1] = -1
    slots[n // 2] = num_slots - 1
    return slots


def torch_cache(data: np.ndarray, layout: KVLayout, page_size: int) -> PagedKV:
    return PagedKV(data=tensor(data), layout=layout, page_size=page_size)


def jax_cache(data: np.ndarray, layout: KVLayout, page_size: int) -> PagedKV:
    return PagedKV(data=jax.device_put(data), layout=layout, page_size=page_size)


def numpy_of(x) -> np.ndarray:
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def bf16_bits(x) -> np.ndarray:
    if isinstance(x, torch.Tensor):
        return x.view(torch.int16).cpu().numpy().view(np.uint16)
    return np.asarray(x).view(np.uint16)


def assert_same_bf16(actual, expected) -> None:
    """Bit for bit; a NaN only has to be one."""
    actual, expected = bf16_bits(actual), bf16_bits(expected)
    assert actual.shape == expected.shape
    both_nan = ((actual & 0x7FFF) > 0x7F80) & ((expected & 0x7FFF) > 0x7F80)
    np.testing.assert_array_equal(np.where(both_nan, 0, actual), np.where(both_nan, 0, expected))


plain_write = jax.jit(write_rows_reference)
plain_gather = jax.jit(gather_rows_reference)
plain_swa_extra = jax.jit(combine_swa_extra_reference)
plain_topk_swa = jax.jit(combine_topk_swa_reference, static_argnames=("window", "compress_ratio", "topk"))


@functools.partial(jax.jit, static_argnames="page_size")
def plain_split(data, cache, page_size, slots):
    return split_touched_reference(data, cache, page_size, slots)


# --- cache bytes ----------------------------------------------------------------------------------


@pytest.mark.always(2)
@LAYOUTS
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_write_equals_plain_jax_byte_by_byte(layout, page_size):
    num_pages, n = 1 + 70 // page_size, 35
    data = random_pages(layout, num_pages, page_size, seed=page_size)
    slots = some_slots(n, num_pages * page_size, seed=1)
    rows = rows_of_every_kind(n, layout.qk_dim, seed=2)
    for kv in (tensor(rows), tensor(rows).to(torch.bfloat16)):
        cache = torch_cache(data, layout, page_size)
        assert torch_kv.write_kv(cache, tensor(slots), kv) is cache
        jax_kv = jax.device_put(rows)
        if kv.dtype == torch.bfloat16:
            jax_kv = jax.lax.bitcast_convert_type(jax.device_put(bf16_bits(kv)), jnp.bfloat16)
        expected = plain_write(jax_cache(data, layout, page_size), jax.device_put(slots), jax_kv)
        np.testing.assert_array_equal(numpy_of(cache.data), np.asarray(expected.data))


@pytest.mark.parametrize("layout", (V4, V32), ids=repr)
def test_every_rounding_of_the_fp8_part(layout):
    """Values between all neighbouring e4m3 numbers, and at the midpoints: a group holds 448, so its scale is 1."""
    # 2^8 * 1.75 = 448 in front; then multiples of 2^-11 up to 2^-5 and a fine sweep of the larger ones, of either sign.
    small = np.arange(0, 64, dtype=np.float32) * np.float32(2.0**-11)
    large = np.exp2(np.arange(-6, 9, dtype=np.float32))[:, None] * (1 + np.arange(64, dtype=np.float32) / 64)
    values = np.concatenate([small, large[large <= 448].ravel()])
    values = np.concatenate([values, -values])
    per_row = layout.num_groups * (layout.group - 1)
    values = np.resize(values, (-(-len(values) // per_row), layout.num_groups, layout.group - 1))
    groups = np.concatenate([np.full((*values.shape[:2], 1), 448, np.float32), values], axis=-1)
    rows = np.zeros((len(groups), layout.qk_dim), np.float32)
    rows[:, : layout.fp8_dim] = groups.reshape(len(groups), -1)
    data, slots = random_pages(layout, 2, 64, seed=3), np.arange(len(rows), dtype=np.int32)
    cache = torch_kv.write_kv(torch_cache(data, layout, 64), tensor(slots), tensor(rows))
    expected = plain_write(jax_cache(data, layout, 64), jax.device_put(slots), jax.device_put(rows))
    np.testing.assert_array_equal(numpy_of(cache.data), np.asarray(expected.data))


@LAYOUTS
def test_a_nan_stays_one_and_harms_no_other_row(layout):
    rows = rows_of_every_kind(9, layout.qk_dim, seed=4)
    rows[7, 3], rows[8, -1] = np.nan, -np.nan
    slots = np.arange(9, dtype=np.int32)
    data = random_pages(layout, 1, 64, seed=5)
    cache = torch_kv.write_kv(torch_cache(data, layout, 64), tensor(slots), tensor(rows))
    expected = plain_write(jax_cache(data, layout, 64), jax.device_put(slots), jax.device_put(rows))
    read = torch_kv.gather_kv(cache, tensor(slots))
    assert read[7, 3].isnan() and read[8, -1].isnan() and not read[:7].isnan().any()
    assert_same_bf16(read, plain_gather(expected, jax.device_put(slots)))


@pytest.mark.always(6)
@LAYOUTS
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_gather_equals_plain_jax_bit_by_bit(layout, page_size):
    num_pages, n = 1 + 70 // page_size, 45
    slots = np.resize(some_slots(35, num_pages * page_size, seed=6), n)  # some twice
    if layout is V32:  # the scales of random bytes would be any float32; the writer's are powers of two
        kv = rows_of_every_kind(num_pages * page_size, layout.qk_dim, seed=7)
        data = plain_write(
            PagedKV.zeros(layout, num_pages, page_size), jnp.arange(len(kv), dtype=jnp.int32), jax.device_put(kv)
        ).data
    else:
        data = random_pages(layout, num_pages, page_size, seed=8)  # every e4m3 byte, NaN too, with every scale byte
    out = torch.full((n, layout.qk_dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    read = torch_kv.gather_kv(torch_cache(data, layout, page_size), tensor(slots), out=out)
    assert read is out
    expected = plain_gather(jax_cache(data, layout, page_size), jax.device_put(slots))
    assert_same_bf16(read, expected)
    invalid = (slots < 0) | (slots >= num_pages * page_size)
    assert invalid.any() and not bf16_bits(read)[invalid].any()


def test_gather_multiplies_every_e4m3_number_with_every_scale_byte():
    """Scale byte 0 is 2^-127, 255 is NaN; products are rounded to bfloat16, subnormal ones too."""
    data = np.zeros((37, V4.page_bytes(1)), np.uint8)
    data[:, :448] = np.resize(np.arange(256, dtype=np.uint8), 448)  # 7 groups see 4 quarters of the numbers
    data[:, 576:583] = np.resize(np.arange(256, dtype=np.uint8), (37, 7))
    slots = np.arange(37, dtype=np.int32)
    for shift in range(4):  # so that each group sees all of them
        data[:, :448] += np.uint8(64 * (shift > 0))
        read = torch_kv.gather_kv(torch_cache(data, V4, 1), tensor(slots))
        bytes_, scales = data[:, :448].reshape(37, 7, 64), data[:, 576:583]
        values = tensor(bytes_).view(torch.float8_e4m3fn).cpu().to(torch.float64)
        products = values * torch.exp2(torch.from_numpy(scales.astype(np.float64)) - 127)[..., None]
        products[torch.from_numpy(scales == 255)] = float("nan")
        expected = products.reshape(37, 448).to(torch.float32).to(torch.bfloat16)
        assert_same_bf16(read[:, :448], expected)


@pytest.mark.parametrize("layout", (V4, V32_BF16), ids=repr)
def test_gathers_fill_one_workspace(layout):
    first, second = (torch_cache(random_pages(layout, 2, 64, seed=s), layout, 64) for s in (9, 10))
    slots = [tensor(some_slots(n, 128, seed=11)) for n in (13, 8)]
    workspace = torch.full((30, layout.qk_dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    torch_kv.gather_kv(first, slots[0], out=workspace, out_start=2)
    torch_kv.gather_kv(second, slots[1], out=workspace, out_start=15)
    assert_same_bf16(workspace[2:15], torch_kv.gather_kv(first, slots[0]))
    assert_same_bf16(workspace[15:23], torch_kv.gather_kv(second, slots[1]))
    assert workspace[:2].isnan().all() and workspace[23:].isnan().all()


@pytest.mark.always(5)
@LAYOUTS
@pytest.mark.parametrize(("page_size", "small"), [(256, 64), (64, 64), (6, 3), (4, 1)])
def test_split_copies_the_touched_pages_and_no_other_byte(layout, page_size, small):
    data = random_pages(layout, 5, page_size, seed=12)
    num_slots, ratio = 5 * page_size, page_size // small
    out_data = np.random.default_rng(13).integers(0, 256, (5 * ratio, layout.page_bytes(small)), dtype=np.uint8)
    slots = np.array([[page_size, page_size + 1, *HOSTILE], [num_slots - 1, num_slots, *[page_size] * 4]], np.int32)
    expected = plain_split(jax.device_put(out_data), jax_cache(data, layout, page_size), small, jax.device_put(slots))
    out = torch_cache(out_data, layout, small)
    with poisoned_memory():
        assert torch_kv.split_pages(torch_cache(data, layout, page_size), out, tensor(slots)) is out
    np.testing.assert_array_equal(numpy_of(out.data), np.asarray(expected))
    moved = np.flatnonzero((numpy_of(out.data) != out_data).any(axis=1)) // ratio
    assert set(moved) == {1, 4}


@pytest.mark.parametrize("padding", [-64, 0, 8])
def test_pages_may_stand_apart_or_without_their_padding(padding):
    cache = torch_cache(np.zeros((3, V4.page_bytes(64)), np.uint8), V4, 64)
    page_bytes, tokens = V4.page_bytes(64), 64 * V4.bytes_per_token
    room = torch.zeros(3 * (page_bytes + padding), dtype=torch.uint8, device=DEVICE)
    apart = PagedKV(data=room.as_strided((3, tokens), (page_bytes + padding, 1)), layout=V4, page_size=64)
    slots, rows = tensor(np.array([0, 191, 64, -1, 192], np.int32)), tensor(rows_of_every_kind(5, 512, 3))
    for some in (cache, apart):
        torch_kv.write_kv(some, slots, rows)
    assert torch.equal(apart.data, cache.data[:, :tokens]) and not cache.data[:, tokens:].any()
    gathered = [torch_kv.gather_kv(some, slots) for some in (cache, apart)]
    assert torch.equal(*(x.view(torch.int16) for x in gathered))
    with pytest.raises(ValueError, match="pages at multiples of 8 bytes"):
        odd = torch.zeros((3, tokens + 1), dtype=torch.uint8, device=DEVICE)
        torch_kv.gather_kv(PagedKV(data=odd[:, :tokens], layout=V4, page_size=64), slots)


def test_bad_tensors_are_refused_by_name():
    cache, slots = torch_cache(random_pages(V4, 2, 64, seed=14), V4, 64), tensor(np.arange(4, dtype=np.int32))
    kv = torch.zeros((4, 512), dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(TypeError, match="write_kv: slots"):
        torch_kv.write_kv(cache, slots.to(torch.int64), kv)
    with pytest.raises(ValueError, match="write_kv: kv"):
        torch_kv.write_kv(cache, slots, kv[:, :448])
    with pytest.raises(ValueError, match="kv must be contiguous"):
        torch_kv.write_kv(cache, slots, torch.zeros((512, 4), dtype=torch.bfloat16, device=DEVICE).T)
    with pytest.raises(ValueError, match=r"cache\.data"):
        torch_kv.gather_kv(PagedKV(data=cache.data, layout=V4, page_size=128), slots)
    with pytest.raises(ValueError, match="out has 4 rows, too few for 4 from out_start=1"):
        torch_kv.gather_kv(cache, slots, out=kv, out_start=1)
    with pytest.raises(ValueError, match="a page size that divides 64"):
        torch_kv.split_pages(cache, torch_cache(random_pages(V4, 1, 128, seed=1), V4, 128), slots)


# --- index merges ---------------------------------------------------------------------------------


def hostile_ints(rng, shape, high) -> np.ndarray:
    values = rng.integers(-2, high, shape).astype(np.int32)
    bad = rng.random(shape) < 0.1
    values[bad] = rng.choice(np.array([*HOSTILE, high], np.int32), int(bad.sum()))
    return values


def swa_extra_case(seed, n, swa_width, extra_width):
    rng = np.random.default_rng(seed)
    return (
        hostile_ints(rng, (n, swa_width), 200),
        hostile_ints(rng, (n,), swa_width + 2),
        hostile_ints(rng, (n, extra_width), 1000),
        hostile_ints(rng, (n,), extra_width + 2),
        np.array(rng.choice([150, 2**31 - 400, 0, -5]), np.int32),
    )


BASES = (0, 17, 5000, 2**31 - 40, 2**31 - 4, -1, -(2**31))  # sums with the large ones do not fit int32


def topk_swa_case(seed, n, columns, requests):
    rng = np.random.default_rng(seed)
    seq_lens = rng.choice(np.array([0, 1, 7, 130, 2000, 2**31 - 1], np.int32), requests)
    lens = rng.multinomial(rng.integers(0, n + 1), np.full(requests, 1 / requests))
    starts = (np.concatenate([[0], np.cumsum(lens)]) + rng.integers(0, 3)).astype(np.int32)
    owner = np.repeat(np.arange(requests), lens)
    pos = hostile_ints(rng, (n,), 50)
    pos[: len(owner)] = np.maximum(seq_lens[owner] - 1 - rng.integers(0, 9, len(owner)), -1)
    pos[rng.random(n) < 0.05] = 2**31 - 1
    return (
        hostile_ints(rng, (n, columns), 500),
        starts,
        pos,
        seq_lens,
        np.minimum(seq_lens, hostile_ints(rng, (requests,), 400)),
        rng.choice(np.array(BASES, np.int32), requests),
        rng.choice(np.array(BASES, np.int32), requests),
    )


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from([(19, 128, 512), (5, 128, 127), (8, 3, 6), (9, 0, 130)]))
def test_combine_swa_extra_equals_plain_jax(seed, shape):
    args = swa_extra_case(seed, *shape)
    out = torch_indices.combine_swa_extra_indices(*map(tensor, args))
    for actual, expected in zip(out, plain_swa_extra(*args)):
        np.testing.assert_array_equal(numpy_of(actual), np.asarray(expected))


@PROPERTY
@given(
    st.integers(0, 10**6),
    st.sampled_from([(19, 512, 4, 128, 4, 512), (21, 130, 9, 128, 128, 67), (8, 5, 1, 3, 1, 0), (9, 9, 64, 20, 4, 9)]),
)
def test_combine_topk_swa_equals_plain_jax(seed, shape):
    n, columns, requests, window, ratio, topk = shape
    static = {"window": window, "compress_ratio": ratio, "topk": topk}
    args = topk_swa_case(seed, n, columns, requests)
    width = -(-(topk + window) // 128) * 128
    out = (
        torch.full((n, width), 77, dtype=torch.int32, device=DEVICE),
        torch.full((n,), 77, dtype=torch.int32, device=DEVICE),
    )
    torch_indices.combine_topk_swa_indices(*map(tensor, args), **static, out=out)
    topk_indices, starts, pos, *rest = map(jnp.asarray, args)
    expected = plain_topk_swa(topk_indices, pos, (starts, *rest), **static)
    for actual, want in zip(out, expected):
        np.testing.assert_array_equal(numpy_of(actual), np.asarray(want))


def test_merges_refuse_bad_tensors_by_name():
    args = [tensor(x) for x in swa_extra_case(0, 4, 8, 8)]
    with pytest.raises(TypeError, match="combine_swa_extra_indices: extra_lengths must be"):
        torch_indices.combine_swa_extra_indices(*args[:3], args[3].to(torch.int64), args[4])
    args = [tensor(x) for x in topk_swa_case(0, 4, 8, 2)]
    with pytest.raises(ValueError, match="at least topk=9 columns, got 8"):
        torch_indices.combine_topk_swa_indices(*args, window=4, compress_ratio=4, topk=9)
    with pytest.raises(ValueError, match="query_start_loc"):
        torch_indices.combine_topk_swa_indices(args[0], args[1][1:], *args[2:], window=4, compress_ratio=4, topk=8)


# --- compilation and dispatch ---------------------------------------------------------------------


@pytest.mark.long
@ARCHITECTURES
def test_kernels_compile_for_every_architecture_without_a_gpu(capabilities, tmp_path):
    facts = compiled_facts("kv", tmp_path, capabilities)
    for fact in facts:
        assert fact["shared"] <= LEAST_SHARED_MEMORY, fact
        assert fact["wide_store"] or fact["kernel"] == "touched", fact
        # SM80 has no e4m3 type; the others round with their own instruction.
        fp8 = fact["kernel"].split()[0] in ("write", "gather")
        assert fact["e4m3"] == (fp8 and fact["capability"] >= 89), fact


@pytest.mark.gpu
@LAYOUTS
def test_jax_runs_the_kernels_bit_by_bit(layout):
    data, n = random_pages(layout, 6, 64, seed=20), 100
    if layout is V32:
        data = np.asarray(PagedKV.zeros(layout, 6, 64).data)
    cache, slots = jax_cache(data, layout, 64), jax.device_put(some_slots(n, 384, seed=21))
    for dtype in (jnp.float32, jnp.bfloat16):
        kv = jax.device_put(rows_of_every_kind(n, layout.qk_dim, seed=22)).astype(dtype)
        lowered = jax.jit(write_kv).lower(cache, slots, kv)
        assert "jax_sparse_mla.write_kv_kernel" in lowered.as_text()
        assert "conditional" not in lowered.compile().as_text()  # the platform is chosen at compilation
        written, expected = write_kv(cache, slots, kv), plain_write(cache, slots, kv)
        np.testing.assert_array_equal(np.asarray(written.data), np.asarray(expected.data))
        np.testing.assert_array_equal(np.asarray(cache.data), data)  # not donated: untouched
        assert_same_bf16(gather_kv(written, slots), plain_gather(written, slots))
    batched = slots.reshape(4, 25)
    want = plain_gather(written, slots).reshape(4, 25, -1)
    assert_same_bf16(jax.vmap(lambda s: gather_kv(written, s))(batched), want)
    assert_same_bf16(jax.lax.map(lambda s: gather_kv(written, s), batched), want)
    workspace = jnp.full((120, layout.qk_dim), jnp.nan, jnp.bfloat16)
    filled = jax.jit(gather_kv_into, static_argnums=1)(workspace, 7, written, slots)
    assert_same_bf16(filled, workspace.at[7:107].set(plain_gather(written, slots)))


@pytest.mark.gpu
def test_jax_gradients_pass_the_kernels_by():
    cache, slots = PagedKV.zeros(V4, 2, 64), jnp.arange(4, dtype=jnp.int32)

    def loss(kv):
        return gather_kv(write_kv(cache, slots, kv), slots).astype(jnp.float32).sum() + kv.sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(loss)(jnp.ones((4, 512)))), 1.0)


@pytest.mark.gpu
@LAYOUTS
def test_jax_splits_pages_with_the_kernels(layout):
    data = random_pages(layout, 9, 256, seed=23)
    out_data = random_pages(layout, 36, 64, seed=24)
    slots = jax.device_put(np.array([[300, 301, -1], [2303, 2304, 700]], np.int32))
    cache, out = jax_cache(data, layout, 256), jax_cache(out_data, layout, 64)
    expected = plain_split(jax.device_put(out_data), cache, 64, slots)
    split = split_pages(cache, 64, slots=slots, out=out)
    np.testing.assert_array_equal(np.asarray(split.data), np.asarray(expected))


@pytest.mark.gpu
def test_jax_merges_with_the_kernels():
    for seed in range(5):
        args = [jax.device_put(x) for x in swa_extra_case(seed, 300, 128, 512)]
        for actual, want in zip(combine_swa_extra_indices(*args), plain_swa_extra(*args)):
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(want))
        static = {"window": 128, "compress_ratio": 4, "topk": 512}
        args = [jax.device_put(x) for x in topk_swa_case(seed, 300, 640, 5)]
        want = plain_topk_swa(args[0], args[2], (args[1], *args[3:]), **static)
        for actual, expected in zip(combine_topk_swa_indices(*args, **static), want):
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


@pytest.mark.gpu
def test_jax_writes_a_donated_cache_in_place():
    cache, slots = PagedKV.zeros(V4, 64, 256), jnp.arange(10, dtype=jnp.int32)
    kv = jnp.ones((10, 512), jnp.bfloat16)
    jax.block_until_ready(cache)
    pointer = cache.data.unsafe_buffer_pointer()
    written = jax.jit(write_kv, donate_argnums=0)(cache, slots, kv)
    assert written.data.unsafe_buffer_pointer() == pointer and cache.data.is_deleted()
    workspace = jnp.zeros((40, 512), jnp.bfloat16)
    jax.block_until_ready(workspace)
    pointer = workspace.unsafe_buffer_pointer()
    filled = jax.jit(gather_kv_into, donate_argnums=0, static_argnums=1)(workspace, 3, written, slots)
    assert filled.unsafe_buffer_pointer() == pointer
    out = PagedKV.zeros(V4, 256, 64)
    jax.block_until_ready(out)
    pointer = out.data.unsafe_buffer_pointer()
    split = jax.jit(lambda c, s, o: split_pages(c, 64, slots=s, out=o), donate_argnums=2)(written, slots, out)
    assert split.data.unsafe_buffer_pointer() == pointer


@pytest.mark.gpu
@pytest.mark.parametrize("face", ["jax", "torch"])
def test_the_last_slots_of_a_5_gib_cache(face):
    num_pages, page_size, n = 36_000, 256, 9  # 5.4e9 bytes
    num_slots = num_pages * page_size
    slots = np.array(
        [num_slots - 1, num_slots - 256, num_slots - 257, 0, 14_340 * 256, -1, num_slots, 5, 300], np.int32
    )
    kv = rows_of_every_kind(n, 512, seed=25)
    small = np.array([255, 0, 511, 256, 512, -1, -1, 261, 600], np.int32)  # the same rows in a small cache
    want = plain_gather(plain_write(PagedKV.zeros(V4, 3, page_size), small, jax.device_put(kv)), small)
    if face == "jax":
        cache = PagedKV.zeros(V4, num_pages, page_size)
        cache = jax.jit(write_kv, donate_argnums=0)(cache, jax.device_put(slots), jax.device_put(kv))
        read = gather_kv(cache, jax.device_put(slots))
        touched = np.flatnonzero(np.asarray(cache.data.any(axis=1)))
        out = split_pages(cache, 64, slots=jax.device_put(slots[:2]))
        last = gather_kv(out, jax.device_put(slots[:2]))
    else:
        zeros = torch.zeros((num_pages, V4.page_bytes(page_size)), dtype=torch.uint8, device=DEVICE)
        cache = torch_kv.write_kv(PagedKV(data=zeros, layout=V4, page_size=page_size), tensor(slots), tensor(kv))
        read = torch_kv.gather_kv(cache, tensor(slots))
        touched = np.flatnonzero(numpy_of(zeros.view(torch.int64).ne(0).any(dim=1)))
        split = torch.zeros((4 * num_pages, V4.page_bytes(64)), dtype=torch.uint8, device=DEVICE)
        out = torch_kv.split_pages(cache, PagedKV(data=split, layout=V4, page_size=64), tensor(slots[:2]))
        last = torch_kv.gather_kv(out, tensor(slots[:2]))
    assert_same_bf16(read, want)
    assert_same_bf16(last, want[:2])
    assert list(touched) == [0, 1, 14_340, num_pages - 2, num_pages - 1]


@pytest.mark.gpu
def test_torch_captures_the_kernels_in_a_cuda_graph():
    cache = torch_cache(random_pages(V4, 4, 64, seed=26), V4, 64)
    split = torch_cache(random_pages(V4, 16, 16, seed=27), V4, 16)
    slots, kv = tensor(np.arange(5, dtype=np.int32)), torch.zeros((5, 512), dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty_like(kv)

    def step():
        torch_kv.write_kv(cache, slots, kv)
        torch_kv.gather_kv(cache, slots, out=out)
        torch_kv.split_pages(cache, split, slots)

    step()  # compiles
    graph, _ = capture(step)
    kv.fill_(2.0)
    slots += 70
    graph.replay()
    assert (out == 2.0).all()
    assert (torch_kv.gather_kv(split, slots) == 2.0).all()


def test_a_layout_that_the_kernels_were_not_written_for_is_refused():
    made_up = dataclasses.replace(KVLayout.V4_BF16, name="made up")
    cache = PagedKV(data=torch.zeros(2, made_up.page_bytes(64), dtype=torch.uint8), layout=made_up, page_size=64)
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"gather_kv: cache\.layout must be one of .*, got .*made.up"):
        torch_kv.gather_kv(cache, slots)

"""The Triton kernels over the bytes of V4.1's rows and rows without rope, bit by bit against plain JAX.

Without a GPU they run in Triton's interpreter through the torch launchers. `test_triton_kv.py` has the older layouts.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from layout_oracle import RECORDS, TENSOR_SCALE
from sparse_mla_torch.operations import kv_cache as torch_kv
from triton_device import DEVICE, tensor

from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv, split_pages, write_kv
from jax_sparse_mla.kv_cache.paged import paged
from jax_sparse_mla.kv_cache.rows import gather_rows_reference, write_rows_reference

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities in the interpreter
]

LAYOUTS = pytest.mark.parametrize("name", RECORDS)
HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
PAGES, ROWS = 3, 19

plain_write = jax.jit(write_rows_reference)
plain_gather = jax.jit(gather_rows_reference)


def rows_of_every_kind(seed: int) -> np.ndarray:
    """float32 `[ROWS, 512]`: normal, tiny, huge, zeros of both signs, infinite, ties of e2m1, mixed in a group."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((ROWS, 512)).astype(np.float32)
    rows *= np.exp2(rng.integers(-30, 14, (ROWS, 1))).astype(np.float32)
    rows[1::8] = rng.choice(np.float32([0.0, -0.0]), rows[1::8].shape)
    rows[2::8] *= np.float32(1e-30)
    rows[3::8] = np.sign(rows[3::8]) * np.float32(3.4e38)
    rows[4::8, ::5] = -np.inf
    rows[5::8] *= np.exp2(rng.integers(-20, 20, rows[5::8].shape)).astype(np.float32)
    rows[6::8] = rng.choice(np.arange(-28, 29).astype(np.float32) / 4, rows[6::8].shape)
    return rows


def some_slots(num_slots: int, seed: int) -> np.ndarray:
    slots = np.random.default_rng(seed).permutation(num_slots)[:ROWS].astype(np.int32)
    slots[1:6] = (*HOSTILE, num_slots)
    return slots


def caches(name: str, page_size: int, seed: int) -> tuple[PagedKV, PagedKV]:
    """The same random bytes for JAX and torch."""
    layout, tensor = getattr(KVLayout, name), name == "NOPE_FP8_TENSOR"
    data = np.random.default_rng(seed).integers(0, 256, (PAGES, layout.page_bytes(page_size)), dtype=np.uint8)
    if RECORDS[name].scales == "float32":  # those of random bytes would be any float32
        data = np.zeros_like(data)
    facts = {"layout": layout, "page_size": page_size}
    torch_data = torch.from_numpy(data.copy()).to(DEVICE)
    scales = (
        (jnp.full(1, TENSOR_SCALE), torch.full((1,), float(TENSOR_SCALE), device=DEVICE)) if tensor else (None, None)
    )
    return tuple(paged(x, s, **facts) for x, s in zip((jax.device_put(data), torch_data), scales))


def assert_same_bf16(actual: torch.Tensor, expected: jax.Array) -> None:
    """Bit for bit; a NaN only has to be one."""
    actual, expected = actual.view(torch.int16).cpu().numpy(), np.asarray(expected).view(np.int16)
    nan = (actual & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(nan, (expected & 0x7FFF) > 0x7F80)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])


@pytest.mark.always(2)
@LAYOUTS
def test_the_kernels_equal_plain_jax(name):
    """Written, gathered and split: every byte and every bit, for either dtype and each engine's rule."""
    page_size = 61 if RECORDS[name].split else 10
    ours, theirs = caches(name, page_size, seed=1)
    slots, rows = some_slots(PAGES * page_size, seed=2), rows_of_every_kind(seed=3)
    bf16 = tensor(rows).to(torch.bfloat16)
    jax_bf16 = jax.lax.bitcast_convert_type(jax.device_put(bf16.view(torch.int16).cpu().numpy()), jnp.bfloat16)
    layouts = (ours.layout.written_by("vllm"), ours.layout) if name.startswith("V41_FP8") else (ours.layout,)
    for layout, kv, torch_rows in ((x, *pair) for x in layouts for pair in ((rows, tensor(rows)), (jax_bf16, bf16))):
        ours, theirs = (dataclasses.replace(cache, layout=layout) for cache in (ours, theirs))
        expected = plain_write(ours, slots, kv)
        assert torch_kv.write_kv(theirs, tensor(slots), torch_rows) is theirs
        np.testing.assert_array_equal(theirs.data.cpu().numpy(), np.asarray(expected.data))
    read = torch_kv.gather_kv(theirs, tensor(slots))
    assert_same_bf16(read, plain_gather(expected, slots))
    everything = np.arange(PAGES * page_size, dtype=np.int32)  # bytes that no writer made, too
    assert_same_bf16(torch_kv.gather_kv(theirs, tensor(everything)), plain_gather(expected, everything))
    rows[7::8, 40] = np.nan
    torch_kv.write_kv(theirs, tensor(slots), tensor(rows))
    expected = plain_write(expected, slots, rows)
    assert_same_bf16(torch_kv.gather_kv(theirs, tensor(slots)), plain_gather(expected, slots))
    pieces = split_pages(dataclasses.replace(ours, data=jax.device_put(theirs.data.cpu().numpy())), 1)
    out = paged(tensor(np.zeros_like(pieces.data)), theirs.scale, layout=ours.layout, page_size=1)
    torch_kv.split_pages(theirs, out, tensor(everything))
    tokens = ours.layout.bytes_per_token
    np.testing.assert_array_equal(out.data.cpu().numpy()[:, :tokens], np.asarray(pieces.data)[:, :tokens])


def test_what_the_writer_cannot_make_is_refused():
    _, cache = caches("NOPE_FP8", 10, seed=1)
    slots, kv = tensor(np.zeros(1, np.int32)), torch.zeros((1, 512), device=DEVICE)
    with pytest.raises(ValueError, match=r"write_kv: cache\.layout is .*NOPE_FP8.*'sglang'.*, which jax_sparse_mla"):
        torch_kv.write_kv(dataclasses.replace(cache, layout=cache.layout.written_by("sglang")), slots, kv)
    _, cache = caches("NOPE_FP8_TENSOR", 10, seed=1)
    with pytest.raises(TypeError, match=r"gather_kv: cache\.scale"):
        torch_kv.gather_kv(PagedKV(data=cache.data, layout=cache.layout, page_size=10), slots)


@pytest.mark.gpu
@LAYOUTS
def test_jax_runs_the_kernels(name):
    cache, _ = caches(name, 64, seed=4)
    slots, kv = jax.device_put(some_slots(192, seed=5)), jax.device_put(rows_of_every_kind(seed=6))
    assert "jax_sparse_mla.write_kv_kernel" in jax.jit(write_kv).lower(cache, slots, kv).as_text()
    written, expected = write_kv(cache, slots, kv), plain_write(cache, slots, kv)
    np.testing.assert_array_equal(np.asarray(written.data), np.asarray(expected.data))
    read, wanted = (np.asarray(x).view(np.int16) for x in (gather_kv(written, slots), plain_gather(expected, slots)))
    nan = (wanted & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(read[~nan], wanted[~nan])
    assert ((read[nan] & 0x7FFF) > 0x7F80).all()

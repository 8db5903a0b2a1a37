"""Layouts that share their bytes per token, on torch tensors: `kv_layout` names them, and whose record does serves."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import H200, check_decode, run_decode, small_decode
from layout_oracle import RECORDS

from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv, write_kv
from jax_sparse_mla.launch import build

torch = pytest.importorskip("torch")
from hopper_stub import library
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import decode, pages, route
from sparse_mla_torch.bridge import to_jax, to_torch

OPS = torch.ops.jax_sparse_mla
NAMED = [name for name in RECORDS if name != "NOPE_FP8_TENSOR"]
PAIRS = [("V41_FP8", "V41_FP8"), ("V41_FP8", "V41_FP4"), ("V41_FP8_SPLIT", "V41_FP4_SPLIT")]
PAIRS += [("NOPE_FP8", "NOPE_FP8"), ("NOPE_BF16", "NOPE_BF16")]
pytestmark = pytest.mark.torch


def tensor(x: np.ndarray | None):
    if x is None:
        return None
    return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) if x.dtype.itemsize == 2 else torch.tensor(x)


def view_of(host) -> torch.Tensor:
    layout = getattr(KVLayout, host.layout)
    return pages.pages_of(torch.from_numpy(host.data.copy()), layout, host.page_size)


def tensors_of(case, device: str = "cpu") -> tuple:
    """In the order of `decode.prepare`."""
    tables = (view_of(case.cache), *map(tensor, (case.indices, case.topk_length)))
    extra = (view_of(case.extra_cache), *map(tensor, (case.extra_indices, case.extra_topk_length)))
    tensors = tensor(case.q), *tables, *extra, tensor(case.attn_sink)
    return tuple(x if x is None else x.to(device) for x in tensors)


def a_case(layout: str, extra: str):
    return small_decode(layout=layout, extra_layout=extra, extra=(16, 2), page_size=16)


@pytest.mark.always(2)
@pytest.mark.parametrize("layout, extra", PAIRS)
def test_decode_by_name(layout, extra):
    """As close to the oracle as JAX's call, on the same device; on a CPU it is the same computation."""
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    case = a_case(layout, extra)
    q, cache, indices, lengths, *more = tensors_of(case, device)
    arguments = (q, cache, indices, case.softmax_scale, lengths, *more)
    out, lse = OPS.sparse_mla_decode(*arguments, kv_layout=layout)
    check_decode(case, (to_jax(out), to_jax(lse)))
    none = (q, cache, indices[..., :0], case.softmax_scale, None, *more)  # the extra cache alone
    case.indices, case.topk_length = case.indices[..., :0], None
    check_decode(case, tuple(map(to_jax, OPS.sparse_mla_decode(*none, kv_layout=layout))))
    if device == "cpu":
        for a, b in zip(OPS.sparse_mla_decode(*none, kv_layout=layout), run_decode(case)):
            torch.testing.assert_close(a, to_torch(b), rtol=0, atol=0)


def far_apart(view: torch.Tensor, gap: int) -> torch.Tensor:
    """The cache with so many more bytes of 0xFF behind each page."""
    pages, page_bytes = view.shape[0], view.stride(0)
    data = torch.full((pages, page_bytes + gap), 0xFF, dtype=torch.uint8, device=view.device)
    data[:, :page_bytes] = view.as_strided((pages, page_bytes), (page_bytes, 1))
    return data.as_strided(view.shape, (page_bytes + gap, *view.stride()[1:]))


@pytest.mark.always(5)
@pytest.mark.parametrize("layout, extra", [*PAIRS[:3], ("V4_BF16",) * 2, ("V32_BF16",) * 2])
@pytest.mark.parametrize("backend, gap", [("triton", 8), ("hopper", 16)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of NaN in the interpreter
def test_a_kernel_reads_both_caches(backend, gap, layout, extra, monkeypatch):
    """As torch's call plans and launches it; on a CPU in Triton's interpreter, or of `hopper` what it is handed."""
    pytest.importorskip("triton")
    from triton_device import DEVICE, ON_GPU

    monkeypatch.setenv("JAX_SPARSE_MLA_DECODE_BACKEND", backend)
    if ON_GPU and (why := route.missing(backend, "decode", route.device_info(torch.device("cuda")))):
        pytest.skip(why)
    if not ON_GPU:
        monkeypatch.setattr(build, "module", lambda kernel, arch: library())
        monkeypatch.setattr(route, "device_info", lambda device: H200)
        monkeypatch.setattr(route, "missing", lambda *_: None)
    options = decode.Options("decode", None, -math.inf, kv_layout=layout)
    for seed, shape in enumerate(({"batch": 1, "q_len": 1}, {"batch": 2, "q_len": 3, "lengths": "batch"})):
        shape |= {"topk": 40, "extra": (40, 2), "page_size": 16}
        case = small_decode(seed, layout=layout, extra_layout=extra, **shape)
        q, cache, indices, lengths, extra_cache, *more = tensors_of(case, DEVICE)
        for tables in ((indices, lengths), (indices[..., :0], None)):
            tensors = q, far_apart(cache, gap), *tables, far_apart(extra_cache, gap), *more
            prepared = decode._new(options, *tensors)
            assert prepared.plan.backend == backend
            out, lse = prepared.run(*tensors, None, None)
            check_decode(case, (to_jax(out), to_jax(lse.transpose(1, 2))))
            case = dataclasses.replace(case, indices=case.indices[..., :0], topk_length=None)


@pytest.mark.always(2)
@pytest.mark.parametrize("name", NAMED)
def test_caches_are_written_and_gathered_by_name(name):
    layout, rng = getattr(KVLayout, name), np.random.default_rng(0)
    data = rng.integers(0, 256, (3, layout.page_bytes(8)), dtype=np.uint8)
    kv, slots = rng.standard_normal((5, 512)).astype(np.float32) / 100, np.array([3, 23, -1, 8, 24], np.int32)
    quantizer = "vllm" if name == "V41_FP8" else None
    written = layout if quantizer is None else layout.written_by(quantizer)
    expected = write_kv(PagedKV(data=jnp.asarray(data), layout=written, page_size=8), slots, kv)
    view = pages.pages_of(torch.from_numpy(data), layout, 8)
    OPS.write_kv(view, tensor(slots), tensor(kv), kv_layout=name, quantizer=quantizer)
    tokens = 8 * layout.bytes_per_token
    np.testing.assert_array_equal(data[:, :tokens], np.asarray(expected.data)[:, :tokens])
    read = OPS.gather_kv(view, tensor(slots), kv_layout=name)
    np.testing.assert_array_equal(read.float().numpy(), np.asarray(gather_kv(expected, slots), np.float32))
    small = pages.pages_of(torch.zeros((12, layout.page_bytes(2)), dtype=torch.uint8), layout, 2)
    OPS.split_pages(view, small, kv_layout=name)
    valid = tensor(np.array([3, 23, 8], np.int32))
    assert torch.equal(OPS.gather_kv(small, valid, kv_layout=name), read[[0, 1, 3]])


def read_by(backend: str) -> set[str]:
    return {layout.name for layout in BACKENDS[backend].layouts["decode"]}


@pytest.mark.parametrize(
    "backend, layout, extra",
    [(x, *pair) for x in ("hopper", "flashmla", "triton") for pair in PAIRS if not set(pair) <= read_by(x)],
)
def test_a_kernel_refuses_by_name_what_it_was_not_written_for(backend, layout, extra, monkeypatch):
    """On an H200, with all packages there; without a name the reference serves."""
    tensors = tensors_of(a_case(layout, extra))
    options = decode.Options("decode", 0.1, math.inf, kv_layout=layout)
    monkeypatch.setattr(route, "device_info", lambda device: H200)
    monkeypatch.setattr(route, "missing", lambda *_: None)
    monkeypatch.setattr(build, "module", lambda kernel, arch: library())  # which comes first
    plan = decode._new(options, *tensors).plan
    assert plan.backend != backend and backend in plan.rejected
    monkeypatch.setenv("JAX_SPARSE_MLA_DECODE_BACKEND", backend)
    refused = extra if layout in read_by(backend) else layout
    with pytest.raises(ValueError, match=f"'{backend}' cannot serve this decode call: .*got {refused} "):
        decode._new(options, *tensors)


def test_bytes_that_are_those_of_several_must_be_named():
    q, cache, indices, _, extra, extra_indices, *_ = tensors_of(a_case("V41_FP8", "V41_FP4"))
    first = (q, cache, indices, 0.1)
    names = "'V41_FP8' or 'V41_FP8_SPLIT' or 'NOPE_FP8'"
    with pytest.raises(ValueError, match=rf"k_cache must be .*, bytes one of 656, .*: name it as kv_layout, {names}"):
        OPS.sparse_mla_decode(*first)
    with pytest.raises(ValueError, match=r"kv_layout must be one of .*V41_FP8, .* got 'V41'"):
        OPS.sparse_mla_decode(*first, kv_layout="V41")
    with pytest.raises(ValueError, match=r"kv_layout must be one of .*, got 'NOPE_FP8_TENSOR'"):
        OPS.write_kv(cache[..., :512], indices[0, 0], q[0, 0], kv_layout="NOPE_FP8_TENSOR")  # its scale is elsewhere
    with pytest.raises(ValueError, match="k_cache has 528 bytes a token, kv_layout V41_FP4 288"):
        OPS.gather_kv(cache, indices[0, 0], kv_layout="V41_FP4")
    with pytest.raises(ValueError, match="k_cache has layout V41_FP4, which can be extra_k_cache's alone"):
        OPS.sparse_mla_decode(q, extra, extra_indices, 0.1, kv_layout="V41_FP4")
    extras = {"extra_k_cache": extra, "extra_indices": extra_indices}
    with pytest.raises(ValueError, match=r"extra_k_cache must be .*: name it as kv_layout, 'V41_FP4'"):
        OPS.sparse_mla_decode(*first, **extras, kv_layout="NOPE_FP8")
    four = torch.zeros(2, 4, 1, 584, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"V41_FP8 goes with .* cache of V41_FP8, .* got .* cache of V4_FP8"):
        OPS.sparse_mla_decode(*first, extra_k_cache=four, extra_indices=extra_indices, kv_layout="V41_FP8")


def test_flash_mla_s_module_refuses_them():
    """Its `kv_format` "V41" is two orders of bytes, by FlashMLA's version."""
    q, cache, indices, *_ = tensors_of(a_case("V41_FP8", "V41_FP4"))
    metadata, splits = flash_mla.get_mla_metadata()
    call = (q, cache, None, None, 512, metadata, splits)
    with pytest.raises(ValueError, match=r"k_cache must be .*, bytes one of 656, 584, .*got"):
        flash_mla.flash_mla_with_kvcache(*call, indices=indices)
    for kv_format in ("V41", "V32_NO_ROPE"):
        with pytest.raises(ValueError, match=f"kv_format '{kv_format}' is not what k_cache's 528 bytes per token are"):
            flash_mla.flash_mla_with_kvcache(*call, indices=indices, kv_format=kv_format)

"""Prefill from torch by Pallas kernels, without a GPU: what the driver is handed, and what serves where it cannot."""

from __future__ import annotations

import ctypes
import math
import struct
import warnings

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_mla_torch.attention import call_cache, prefill, route
from sparse_mla_torch.launch import launcher
from sparse_mla_torch.launch import mosaic as launching

from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch import compile_cache, mosaic

pytestmark = pytest.mark.torch
H200 = DeviceInfo("cuda", (9, 0), 132, 232_448)
UINT = ctypes.c_uint
POINTERS = ctypes.POINTER(ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[UINT] * 7, ctypes.c_void_p, POINTERS, ctypes.c_void_p)
# As Mosaic orders the parameters: by where the kernel first uses them.
ORDER = (*range(5, 14), 3, 4, 14, 15, 16, 0, 2, 1)
COMPILED = mosaic.Compiled(b"\x7fELF code", "kernel", 384, 218_112, ORDER)


class Driver:
    """cuLaunchKernel keeps what it is handed."""

    def __init__(self):
        self.launches = []
        self.function = LAUNCH(self.launch)

    def launch(self, function, *rest):
        *sizes, _stream, parameters, _ = rest
        values = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(len(ORDER))]
        self.launches.append((function, sizes, dict(zip(ORDER, values))))
        return 0


@pytest.fixture(scope="module")
def driver():
    driver, module = Driver(), launcher.module()
    if module is None:
        pytest.skip("needs torch's DLPack functions and a C compiler")
    address = ctypes.cast(driver.function, ctypes.c_void_p).value
    exchange = torch.Tensor.__dlpack_c_exchange_api__
    module.bind(exchange, torch.Tensor, torch.nn.Parameter, address, 0, 0)
    yield driver
    module.bind(exchange, torch.Tensor, torch.nn.Parameter, *launcher.driver_functions())


@pytest.fixture
def on_hopper(monkeypatch):
    """CPU tensors are taken for an H200's, and the kernels for compiled."""
    monkeypatch.setattr(route, "device_info", lambda device: H200)
    monkeypatch.setattr(route, "missing", lambda name, phase, device: {"flashmla": "not installed"}.get(name))
    monkeypatch.setattr(launching, "load", lambda library, device: launching.Function(77, COMPILED, 0))
    for name in ("JAX_SPARSE_MLA_BACKEND", "JAX_SPARSE_MLA_PREFILL_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    call_cache.forget()
    yield
    call_cache.forget()


def tensors(rows, heads, qk_dim=512, keys=9, topk=3, lengths=True, sink=True):
    return (
        torch.zeros(rows, heads, qk_dim, dtype=torch.bfloat16),
        torch.zeros(keys, 1, qk_dim, dtype=torch.bfloat16),
        torch.zeros(rows, 1, topk, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32)[1:] if lengths else None,  # begins at any multiple of 4 bytes
        torch.zeros(heads + 1)[1:] if sink else None,
    )


def prepared(arguments, scale=0.5, empty=math.inf, log2=False):
    return prefill._new(("prefill", scale, empty, log2), *arguments)


def number(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 400),
    heads=st.integers(1, 200),
    qk_dim=st.sampled_from((512, 576)),
    keys=st.integers(1, 50),
    topk=st.integers(1, 40),
    lengths=st.booleans(),
    sink=st.booleans(),
    log2=st.booleans(),
)
def test_every_call_is_one_kernel_that_takes_its_sizes_as_data(
    driver, rows, heads, qk_dim, keys, topk, lengths, sink, log2
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "device_info", lambda device: H200)
        patch.setattr(route, "missing", lambda name, phase, device: None)
        loaded = []
        patch.setattr(
            launching,
            "load",
            lambda library, device: loaded.append(library.name) or launching.Function(77, COMPILED, 0),
        )
        arguments = tensors(rows, heads, qk_dim, keys, topk, lengths, sink)
        call = prepared(arguments, log2=log2)
        assert call.plan.backend == "hopper" and call.writes_into
        driver.launches.clear()
        results = call.run(*arguments, None)
    ((function, sizes, values),) = driver.launches
    few = heads <= (32 if qk_dim == 512 else 16)
    blocks = min(132, rows if few else rows * -(-heads // 64))
    assert (function, sizes) == (77, [blocks, 1, 1, 384, 1, 1, 218_112])
    addresses = [0 if x is None else x.data_ptr() for x in (*arguments, *results)]
    numbers = [rows, heads, keys, topk, topk, blocks]
    numbers += map(number, (0.5 * math.log2(math.e), 1.0 if log2 else math.log(2), math.inf))
    assert [values[i] for i in range(len(ORDER))] == [*addresses[:5], *(256 * n for n in numbers), *addresses[5:]]
    assert [x.shape for x in results] == [(rows, heads, 512), (rows, heads), (rows, heads)]
    assert set(loaded) == {alone.library(alone.name_of(heads, qk_dim)).name}


def test_it_writes_where_it_is_told(driver, on_hopper):
    arguments = tensors(3, 64)
    out = torch.empty(3, 64, 512, dtype=torch.bfloat16), torch.empty(3, 64), None
    driver.launches.clear()
    results = prepared(arguments).run(*arguments, out)
    assert results[0] is out[0] and results[1] is out[1]
    (launch,) = driver.launches
    assert [launch[2][i] for i in (14, 15, 16)] == [x.data_ptr() for x in results]


def test_what_is_not_aligned_or_not_compiled_is_anothers(on_hopper, monkeypatch):
    q, *others = tensors(3, 64)
    shifted = torch.zeros(q.numel() + 4, dtype=q.dtype)[4:].view(q.shape)
    plan = prepared((shifted, *others)).plan
    assert plan.backend == "triton" and "16 bytes" in plan.rejected["hopper"]
    monkeypatch.setattr(launching, "load", lambda library, device: None)
    plan = prepared((q, *others)).plan
    assert plan.backend == "triton" and "cannot be compiled here" in plan.rejected["hopper"]


def test_a_kernel_that_does_not_compile_is_warned_of_once(monkeypatch):
    def failing(library, opener):
        raise RuntimeError("JAX's CUDA plugin is not installed")

    monkeypatch.setattr(compile_cache, "load", failing)
    launching.load.cache_clear()
    launching._compiled.cache_clear()
    with pytest.warns(UserWarning, match="prefill-8x512 cannot be used: JAX's CUDA plugin is not installed"):
        assert launching.load(alone.library("8x512"), 0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launching.load(alone.library("8x512"), 0) is None
    launching.load.cache_clear()

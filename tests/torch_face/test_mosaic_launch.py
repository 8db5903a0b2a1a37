"""Prefill from torch by Pallas kernels, without a GPU: what the driver is handed, and what serves where it cannot."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import struct
import threading
import types
import warnings

import jax
import pytest

torch = pytest.importorskip("torch")

import sparse_mla_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_mla_torch.attention import call_cache, prefill, route
from sparse_mla_torch.launch import launcher
from sparse_mla_torch.launch import mosaic as launching

from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.hopper.prefill import alone, tiles
from jax_sparse_mla.attention.hopper.prefill.few_heads.kernel import serves
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.launch import build, compile_cache, mosaic

pytestmark = pytest.mark.torch
H200 = DeviceInfo("cuda", (9, 0), 132, 232_448)
UINT = ctypes.c_uint
POINTERS = ctypes.POINTER(ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[UINT] * 7, ctypes.c_void_p, POINTERS, ctypes.c_void_p)
# As Mosaic orders the parameters: by where the kernel first uses them.
ORDER = (*range(5, 15), 3, 4, 15, 16, 17, 0, 2, 1)
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


def sizes_of(arguments, blocks, log2=False):
    """The numbers of a call in the kernels' order."""
    q, kv, indices, *_ = arguments
    return tiles.Sizes(
        **{"tokens": len(q), "heads": q.shape[1], "q_heads": q.stride(0) // q.shape[2], "keys": len(kv)},
        **{"columns": indices.shape[2], "stride": indices.stride(0), "blocks": blocks},
        **{"scale": number(0.5 * math.log2(math.e)), "unit": number(1.0 if log2 else math.log(2))},
        empty=number(math.inf),
    )


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
    numbers = sizes_of(arguments, blocks, log2)
    assert [values[i] for i in range(len(ORDER))] == [*addresses[:5], *(256 * n for n in numbers), *addresses[5:]]
    assert [x.shape for x in results] == [(rows, heads, 512), (rows, heads), (rows, heads)]
    assert set(loaded) == {alone.library(alone.name_of(heads, qk_dim)).name}


def test_tokens_that_stand_apart_are_not_copied(driver, on_hopper):
    """Heads that the engine pads, and rows of indices in a wider table; heads or columns that stand apart are."""
    q, kv, indices, lengths, sink = tensors(5, 64, topk=7)
    given = {"q": q[:, :8], "kv": kv, "indices": indices[..., :3], "lengths": lengths, "sink": sink[:8]}
    for name, x in (("q", q[:, ::8]), ("indices", indices[..., ::2]), (None, None)):
        arguments = [*(given | ({name: x} if name else {})).values()]
        driver.launches.clear()
        prepared(arguments).run(*arguments, None)
        ((_, _, values),) = driver.launches
        assert [values[i] == x.data_ptr() for i, x in enumerate(arguments)] == [each != name for each in given]
    numbers = sizes_of(arguments, blocks=5)
    assert (numbers.q_heads, numbers.stride) == (64, 7)
    assert [values[i] for i in range(5, 15)] == [256 * n for n in numbers]


@pytest.mark.parametrize("qk_dim", [512, 576])
def test_a_kernel_serves_the_heads_that_it_has_room_for(qk_dim):
    for heads in range(1, 200):
        most, dim = alone.KERNELS[alone.name_of(heads, qk_dim)]
        assert dim == qk_dim and (most is not None) == serves(heads, qk_dim) and heads <= (most or heads)
        smaller = [m for m, d in alone.KERNELS.values() if d == dim and m is not None and heads <= m < (most or 999)]
        assert not smaller


@pytest.mark.parametrize("name", ["8x512", "any-x576"])
def test_it_lowers_without_a_gpu_and_takes_its_sizes_as_data(name):
    function, shapes = alone.prefill(name)
    assert len(shapes) == 5 + len(tiles.Sizes._fields)
    assert mosaic._lowered(function, shapes)[1] == len(ORDER)


def test_the_file_of_a_kernel(tmp_path):
    path = tmp_path / "kernel.so"
    mosaic.write(path, COMPILED)
    assert mosaic.read(path) == COMPILED
    whole = path.read_bytes()
    for broken in (b"", whole[:-1], whole[1:], whole[20:], b"\x7fELF", whole[-29:]):
        path.write_bytes(broken)
        with pytest.raises(RuntimeError, match="holds no kernel"):
            mosaic.read(path)


def test_the_length_of_an_elf_file():
    """The last table ends it: of sections, or of segments."""
    for segments, sections in (((64, 56, 2), (1000, 64, 5)), ((2000, 56, 3), (1000, 64, 5))):
        header = struct.pack("<32xQQ6x4H2x", segments[0], sections[0], *segments[1:], *sections[1:])
        image = ctypes.create_string_buffer(header, 64)
        expected = max(at + size * count for at, size, count in (segments, sections))
        assert mosaic._elf_bytes(ctypes.addressof(image)) == expected


@pytest.fixture
def loads(monkeypatch, on_hopper):
    """What `warm_up` loads on an H200."""
    loaded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(launching, "load", lambda library, device: loaded.append((library.name, device)))
    return loaded


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ([(8, 512), (5, 512), (128, 576)], ["prefill-8x512", "prefill-8x512", "prefill-any-x576"]),
        ([], sorted(f"prefill-{name}" for name in alone.KERNELS)),
    ],
)
def test_warming_up_loads_the_kernels_of_a_model(loads, shapes, names):
    sparse_mla_torch.warm_up(*shapes)
    assert sorted(loads) == [(name, 3) for name in names]
    loads.clear()
    sparse_mla_torch.warm_up((64, 512), device=torch.device("cuda:1"))
    assert loads == [("prefill-any-x512", 1)]


def test_kernels_are_compiled_side_by_side(loads, monkeypatch):
    both = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(launching, "load", lambda library, device: both.wait())
    sparse_mla_torch.warm_up((8, 512), (64, 512))
    assert not both.broken


@pytest.mark.parametrize("other", ["no GPU", "SM80", "Triton is named"])
def test_there_is_nothing_to_warm_up_for_others(loads, monkeypatch, other):
    if other == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif other == "SM80":
        monkeypatch.setattr(route, "device_info", lambda device: DeviceInfo("cuda", (8, 0), 108, 166_912))
    else:
        monkeypatch.setenv("JAX_SPARSE_MLA_PREFILL_BACKEND", "triton")
    sparse_mla_torch.warm_up()
    assert loads == []


@pytest.mark.parametrize(
    ("version", "plugin", "carried", "why"),
    [
        ((0, 10, 2), True, False, "jax 0.11.1 or later"),
        ((0, 11, 1), False, False, "CUDA plugin is not installed"),
        ((0, 11, 1), True, False, None),
        ((0, 10, 2), False, True, None),
    ],
)
def test_what_a_launch_from_torch_takes(monkeypatch, tmp_path, version, plugin, carried, why):
    """JAX's programs compile prefill by themselves, and a wheel may carry it."""
    (tmp_path / ("xla_cuda13" if plugin else "other")).mkdir()
    found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(compile_cache, "is_carried", lambda library: carried)
    said = alone.unready("prefill", "torch")
    assert said == why if why is None else why in said
    assert alone.unready("prefill", "jax") is alone.unready("decode", "torch") is None


def test_a_wheel_carries_the_kernels():
    assert {f"prefill-{name}" for name in alone.KERNELS} <= {library.name for library in build.libraries()}


@pytest.mark.parametrize(
    ("device", "absent", "expected"),
    [
        (H200, (), "hopper"),
        (H200, ("hopper",), "flashmla"),
        (H200, ("hopper", "flashmla"), "triton"),
        (H200, ("hopper", "flashmla", "triton"), "reference"),
        (DeviceInfo("cuda", (8, 0), 108, 166_912), (), "triton"),
        (DeviceInfo("cuda", (10, 0), 148, 232_448), (), "flashmla"),
        (DeviceInfo("cpu"), (), "reference"),
    ],
)
@pytest.mark.parametrize(("heads", "topk"), [(8, 640), (128, 2048)])
def test_the_route_of_prefill(monkeypatch, device, absent, expected, heads, topk):
    for name in ("JAX_SPARSE_MLA_BACKEND", "JAX_SPARSE_MLA_PREFILL_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(route, "missing", lambda name, phase, device: "absent" if name in absent else None)
    call = Call("prefill", KVLayout.V4_BF16, 4096, heads, device, topk)
    plan = route.plan(call)
    assert plan.backend == expected and all("absent" in plan.rejected[name] for name in absent)
    flashmlas = expected != "hopper" and device.compute_capability in ((9, 0), (10, 0))  # an engine's own
    with pytest.raises(route.FasterAlone) if flashmlas else contextlib.nullcontext():
        assert route.plan(call, beside_flashmla=True).backend == expected
    if absent:
        monkeypatch.setenv("JAX_SPARSE_MLA_PREFILL_BACKEND", "hopper")
        with pytest.raises(ValueError, match="absent"):
            route.plan(call)


def test_it_writes_where_it_is_told(driver, on_hopper):
    arguments = tensors(3, 64)
    out = torch.empty(3, 64, 512, dtype=torch.bfloat16), torch.empty(3, 64), None
    driver.launches.clear()
    results = prepared(arguments).run(*arguments, out)
    assert results[0] is out[0] and results[1] is out[1]
    (launch,) = driver.launches
    assert [launch[2][i] for i in (15, 16, 17)] == [x.data_ptr() for x in results]


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

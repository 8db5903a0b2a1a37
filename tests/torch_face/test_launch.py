"""`DirectLaunch` and `launcher.c` without a GPU: what the driver is handed, and when Triton's own launch is taken."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import struct
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = triton.language

from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_mla_torch.attention import call_cache
from sparse_mla_torch.launch import executor as launching
from sparse_mla_torch.launch import launcher
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from jax_sparse_mla import packages
from jax_sparse_mla.launch import triton_versions
from jax_sparse_mla.launch.describe import Launch, Output

pytestmark = pytest.mark.torch
UINT = ctypes.c_uint
POINTERS = ctypes.POINTER(ctypes.c_void_p)
LAUNCH_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[UINT] * 7, ctypes.c_void_p, POINTERS, ctypes.c_void_p)
STREAM_IS_CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
CONTEXT_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
SIZES = (8, 8, 4, 8, 8, 8)  # of the parameters that `Kernel` has when compiled


class Kernel:
    """Two tensors, two scalars, two results, one constant. What it compiles to takes all but what is None or 1."""

    arg_names = ("x", "y", "n", "scale", "out", "absent", "BLOCK")

    def __init__(self):
        self.own, self.compiled = (
            [],
            types.SimpleNamespace(
                metadata=types.SimpleNamespace(num_warps=4, num_ctas=1, shared=1000, global_scratch_size=0),
                src=types.SimpleNamespace(signature=dict(x="*i32", y="*i32", n="constexpr", scale="fp32", out="*i32")),
                function=77,
            ),
        )
        self.compiled.src.signature |= {"absent": "constexpr", "BLOCK": "constexpr"}

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.own.append((grid, args, constants))
            return self.compiled

        return launch


class Driver:
    """cuLaunchKernel keeps what it is handed, and answers `status`; cuStreamIsCapturing writes `capturing`."""

    def __init__(self):
        self.launches, self.status, self.capturing, self.sizes = [], 0, 0, SIZES
        context = CONTEXT_DEVICE(lambda device: 201)
        self.functions = LAUNCH_KERNEL(self.launch), STREAM_IS_CAPTURING(self.is_capturing), context

    def is_capturing(self, stream, answer):
        answer[0] = self.capturing
        return int(self.capturing > 1)

    def launch(self, function, *rest):
        *sizes, stream, parameters, extra = rest
        values = [bytes((ctypes.c_char * n).from_address(parameters[i])) for i, n in enumerate(self.sizes)]
        self.launches.append((function, sizes, stream, values, extra))
        return self.status


@pytest.fixture(scope="module")
def module():
    if launcher.module() is None:
        pytest.skip("launcher.c is not built here")
    return launcher.module()


@pytest.fixture
def driver(module):
    driver = Driver()
    tensors = (torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter)
    module.bind(*tensors, *(ctypes.cast(f, ctypes.c_void_p).value for f in driver.functions))
    yield driver
    module.bind(*tensors, *launcher.driver_functions())


def tensors(count: int, offset: int = 0):
    """Aligned to 64 bytes, and then moved by so many elements."""
    return [torch.zeros(64, dtype=torch.int32)[offset:] for _ in range(count)]


def address(x: torch.Tensor) -> bytes:
    return struct.pack("P", x.data_ptr())


def make(kernel, grid=(5, 2)):
    return launching.DirectLaunch(Launch(kernel, "kernel", grid, (1, 0.5), (), {"BLOCK": 64, "num_warps": 4}))


def test_the_second_launch_is_direct(driver):
    kernel = Kernel()
    launch = make(kernel)
    x, y, out = tensors(3)
    launch((x, y), (out, None))
    constants = {"BLOCK": 64, "num_warps": 4, "enable_fp_fusion": True}
    assert kernel.own == [((5, 2), (x, y, 1, 0.5, out, None), constants)] and not driver.launches
    other, *_ = tensors(1)
    launch((other, torch.nn.Parameter(y, requires_grad=False)), (out, None))
    (function, sizes, stream, values, extra) = driver.launches.pop()
    assert (function, sizes, stream, extra) == (77, [5, 2, 1, 128, 1, 1, 1000], None, None)
    # The last two are Triton's own.
    assert values == [address(other), address(y), struct.pack("f", 0.5), address(out), bytes(8), bytes(8)]
    assert len(kernel.own) == 1


def test_triton_has_its_cache_folder_where_jax_triton_was_imported_by_another_package(monkeypatch):
    class Compiling(Kernel):
        def __getitem__(self, grid):
            assert "TRITON_CACHE_DIR" not in os.environ
            return super().__getitem__(grid)

    x, y, out = tensors(3)
    kernel = Compiling()
    launch = Launch(kernel, "kernel", (5, 2), (1, 0.5), (Output((64,), "int32"), None), {"BLOCK": 64})
    monkeypatch.setitem(sys.modules, "jax_triton", types.ModuleType("jax_triton"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    make(kernel)((x, y), (out, None))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    launching.executor(x.device)(launch, (x, y), (out, None))
    assert len(kernel.own) == 2


def test_unaligned_tensors_are_tritons(driver):
    kernel = Kernel()
    launch = make(kernel)
    aligned, moved = tensors(3), tensors(3, offset=1)
    for x, y, out in (moved, aligned, moved, aligned):
        launch((x, y), (out, None))
    assert len(kernel.own) == 3 and len(driver.launches) == 1


@pytest.mark.parametrize(
    "special, value",
    [
        ("global_scratch_size", 1),
        ("profile_scratch_size", 1),
        ("launch_cooperative_grid", True),
        ("launch_pdl", True),
        ("instrumentation_mode", "gsan"),
        ("num_ctas", 2),
    ],
)
def test_what_asks_for_more_is_tritons(driver, special, value):
    kernel = Kernel()
    setattr(kernel.compiled.metadata, special, value)
    launch = make(kernel)
    for x, y, out in (tensors(3), tensors(3)):
        launch((x, y), (out, None))
    assert len(kernel.own) == 2 and not driver.launches


def test_other_versions_are_launched_by_triton(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    packages.warn_once.cache_clear()
    kernel = Kernel()
    launch = make(kernel)
    with pytest.warns(UserWarning, match=r"triton 9\.0\.0 is none .* some 20 µs of the host more a call"):
        launch((x := tensors(1)[0], x), (x, None))
    launch((x, x), (x, None))
    assert len(kernel.own) == 2


# --- what the installed Triton compiles ---------------------------------------------------------------------------


def scaled(x, absent, n, far, one, scale, out, last, SIZE: tl.constexpr, IS_THERE: tl.constexpr):
    if IS_THERE:
        tl.store(last, tl.load(absent))
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) * scale + n + far + one)


class TritonDriver:
    """Stands in for Triton's own, which needs a GPU: it loads nothing, and counts what Triton launches itself."""

    def __init__(self):
        self.launches, self.utils = 0, self

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

    def load_binary(self, name, image, shared, device):
        return object(), 77, 0, 0, 1024

    def unload_module(self, module):
        pass

    def launcher_cls(self, source, metadata):
        def launch(*args):
            self.launches += 1

        return launch


@pytest.mark.no_gpu
def test_what_the_installed_triton_compiles(driver, monkeypatch, tmp_path):
    """Its binder, signature and metadata; the parameters are those that the kernel's PTX declares."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    own, compiled = TritonDriver(), []
    monkeypatch.setattr(triton.runtime.driver, "_active", own)
    kernel = JITFunction(scaled)  # as `triton.jit` makes it without the interpreter
    run = kernel.run
    kernel.run = lambda *args, **options: compiled.append(run(*args, **options)) or compiled[-1]
    constants = {"SIZE": 64, "IS_THERE": False, "num_warps": 2}
    launch = launching.DirectLaunch(Launch(kernel, "scaled", (5, 2), (5, 2**40, 1, 0.5), (), constants))
    x, out = torch.zeros(64), torch.zeros(64)
    launch((x, None), (out, None))
    (entry,) = re.findall(r"\.entry\s+\w+\((.*?)\)", compiled[0].asm["ptx"], re.DOTALL)
    driver.sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", entry)]
    assert len(driver.sizes) == 5 + triton_versions.SCRATCH
    launch((x, None), (out, None))
    function, sizes, *_, values, extra = driver.launches.pop()
    assert own.launches == 1 and (function, sizes, extra) == (77, [5, 2, 1, 64, 1, 1, 0], None)
    numbers = struct.pack("i", 5), struct.pack("q", 2**40), struct.pack("f", 0.5)
    assert values == [address(x), *numbers, address(out), bytes(8), bytes(8)]
    # Since 3.8 Triton unloads a kernel that it lets go of.
    kept = weakref.ref(compiled.pop())
    kernel.device_caches.clear()
    gc.collect()
    assert kept() is not None
    del launch
    gc.collect()
    assert kept() is None


def test_failures(driver, module):
    kernel = Kernel()
    launch = make(kernel)
    x, y, out = tensors(3)
    launch((x, y), (out, None))
    driver.status = 201  # this thread has no context: Triton gives it one
    launch((x, y), (out, None))
    assert len(kernel.own) == 2
    driver.status = 719
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        launch((x, y), (out, None))
    with pytest.raises(TypeError, match="launch: 4 tensors, got 1"):
        module.launch(launch._compiled, x)
    for parameters, error in (
        (("a",), TypeError),
        ((bytes(9),), ValueError),
        ((0,) * 49, ValueError),
        ((1,), ValueError),
    ):
        with pytest.raises(error, match=r"kernel|bytes"):
            module.kernel(None, 1, 1, 1, 1, 32, 0, 16, 1, parameters)
    for function in (module.launch, module.launch_again):
        with pytest.raises(TypeError, match="must be a kernel"):
            function(None, x)
        with pytest.raises(TypeError, match="must be a kernel"):
            function()
    with pytest.raises(TypeError, match="must be tensors"):
        module.keep(launch._compiled, (x, 1))
    with pytest.raises(ValueError, match="at most 8 results"):
        module.keep(launch._compiled, (x,) * 9)
    assert not module.launch(launch._compiled, x, 1) and not module.launch(launch._compiled, *[x] * 49)


def test_launches_go_again_where_they_went(driver):
    launch = make(Kernel())
    x, y, out, other = tensors(4)
    assert launch.keep((out, None)) is None  # nothing is compiled
    launch((x, y), (out, None))
    results = (out, None)
    again = launch.keep(results)
    assert again(y, x) is results
    assert driver.launches.pop()[3][:4] == [address(y), address(x), struct.pack("f", 0.5), address(out)]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(again, x, y).result() is None  # another thread's results are elsewhere
        mine = (other, None)
        pool.submit(launch.keep, mine).result()
        assert pool.submit(again, x, y).result() is mine and again(x, y) is results
    driver.launches.clear()
    for driver.capturing in (1, 2):  # 2: the driver cannot tell
        assert again(x, y) is None
    driver.capturing = 0
    assert again(x[1:], y) is None and again(x, "y") is None and not driver.launches
    driver.status = 201
    assert again(x, y) is None
    driver.status = 719
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        again(x, y)
    driver.status = 0
    for _ in range(63):  # one more than there is room for: all are forgotten but the last
        launch.keep((x, None))
    assert again(x, y)[0] is x


def test_kept_results_are_let_go(driver):
    launch = make(Kernel())
    x, y, out = tensors(3)
    launch((x, y), (out, None))
    results = (out, None)
    before = sys.getrefcount(results)
    again = launch.keep(results)
    again(x, y)
    assert sys.getrefcount(results) == before + 1
    del launch, again
    assert sys.getrefcount(results) == before


# --- what a library planned ---------------------------------------------------------------------------------------


class Library:
    """Keeps the addresses and the stream that its `run` is handed, and answers `status`."""

    def __init__(self):
        self.runs, self.status = [], 0
        self.function = launcher._RUN(self.run)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def run(self, planned, addresses, stream):
        self.runs.append((planned, addresses[:3], stream))
        return self.status


class Mine(torch.Tensor):
    """Whose memory launcher.c does not read."""


@pytest.mark.parametrize("by", ["launcher.c", "ctypes", "a subclass"])
def test_what_a_library_planned(by, request, monkeypatch):
    if by == "ctypes":
        monkeypatch.setattr(launcher, "module", lambda: None)
    else:
        request.getfixturevalue("driver")
    library = Library()
    launch = launcher.planned(library.address, b"a plan", 3)
    # Any address will do: what a kernel needs is for the library's caller to see to.
    x, y = tensors(1, offset=1)[0], torch.zeros(8, dtype=torch.float8_e4m3fn)
    launch(x.as_subclass(Mine) if by == "a subclass" else x, None, y)
    assert library.runs == [(b"a plan", [x.data_ptr(), 0, y.data_ptr()], None)]
    library.status = 719
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        launch(x, None, y)
    library.status = 201  # unlike Triton's, a library gives the thread a context itself
    with pytest.raises(RuntimeError, match="CUDA error 201"):
        launch(x, None, y)


def test_a_plan_is_kept_as_long_as_it_can_be_launched(module):
    plan = bytes(bytearray(b"another plan"))
    before = sys.getrefcount(plan)
    kept = module.planned(1, plan, 2)
    assert sys.getrefcount(plan) == before + 1
    del kept
    assert sys.getrefcount(plan) == before
    with pytest.raises(ValueError, match="at most"):
        module.planned(1, plan, 1000)


# --- what a call is known by --------------------------------------------------------------------------------------

DTYPES = (torch.uint8, torch.int8, torch.bool, torch.int32, torch.bfloat16, torch.float8_e4m3fn)


@st.composite
def some_tensor(draw):
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    rank = draw(st.integers(0, 3))
    shape = [draw(st.integers(0, 3)) for _ in range(rank)]
    strides = [draw(st.sampled_from((1, 3, 8))) for _ in range(rank)]
    storage = torch.zeros(256, dtype=draw(st.sampled_from(DTYPES)))
    return storage.as_strided(shape, strides, draw(st.sampled_from((0, 1, 16))))


@settings(max_examples=200, deadline=None)
@given(pairs=st.lists(st.tuples(some_tensor(), some_tensor(), st.booleans()), min_size=1, max_size=3))
def test_calls_are_told_apart_as_python_does(module, pairs):
    one = [x for x, *_ in pairs]
    other = [x if same else y for x, y, same in pairs]
    in_python = [call_cache._signature_in_python(xs) for xs in (one, other)]
    assert (in_python[0] == in_python[1]) == (module.signature(*one) == module.signature(*other))


def test_each_fact_tells_calls_apart(module):
    storage = torch.zeros(256, dtype=torch.int32)
    x = storage.as_strided((2, 3), (3, 1))
    others = [
        x.view(torch.float32),
        storage.as_strided((3, 2), (3, 1)),
        storage.as_strided((2, 3), (6, 1)),
        storage.as_strided((2, 3, 1), (3, 1, 1)),
        *(storage.as_strided((2, 3), (3, 1), offset) for offset in (1, 4)),
    ]
    for signature in (module.signature, lambda *tensors: call_cache._signature_in_python(tensors)):
        alone = [signature(x), signature(x, x), signature(x, None), signature(None, x)]
        known = [*alone, *(signature(y, None) for y in others)]
        assert len(set(known)) == len(known)
        assert signature(storage.as_strided((2, 3), (3, 1), call_cache.ALIGNMENT // 4), None) == signature(x, None)


def test_what_host_does_not_read(module):
    x = torch.zeros(3)
    assert module.signature(x, 1) is None and module.signature("x") is None and module.signature(x.to_sparse()) is None
    assert module.signature(torch.Tensor.as_subclass(x, type("Mine", (torch.Tensor,), {}))) is None
    assert module.signature(*[torch.zeros([1] * 30)] * 5) is None
    assert (
        module.signature(torch.nn.Parameter(x)) == module.signature(x) == module.signature(x.clone().requires_grad_())
    )
    assert call_cache._signature_in_python((x, "x")) is None


def test_what_host_does_not_read_is_prepared_all_the_same(module, monkeypatch):
    made = []

    def new(options, *tensors):
        made.append(options)
        return object()

    monkeypatch.setattr(call_cache, "calls", {})
    monkeypatch.setattr(call_cache, "signature", module.signature)
    mine = torch.zeros(3).as_subclass(type("Mine", (torch.Tensor,), {}))
    for x in (torch.zeros(3), mine):
        assert call_cache.add(("a",), (x,), new) is call_cache.add(("a",), (x,), new)
    assert len(made) == 2 and call_cache.add(("b",), (x,), new) and len(made) == 3
    call_cache.add(("a",), (1,), new), call_cache.add(("a",), (1,), new)  # `new` would raise
    assert len(made) == 5 and len(call_cache.calls) == 3

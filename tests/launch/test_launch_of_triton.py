"""Triton kernels launched by `kernel_launch.h`, on XLA's CPU buffers and a driver of the test's own."""

import ctypes
import struct
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tvm_ffi")
triton = pytest.importorskip("triton")
tl = triton.language

from triton.runtime.jit import JITFunction

from jax_sparse_mla import packages
from jax_sparse_mla.launch import triton_call, triton_launch
from jax_sparse_mla.launch.describe import Device, Launch, Output

pytestmark = pytest.mark.cpu
SOURCE = Path(__file__).parents[1] / "support" / "host_cuda" / "driver.c"


@JITFunction  # as `triton.jit` makes it without the interpreter
def kernel(
    report_in, absent, x, n, far, scale, report, unwritten, sums, last, SIZE: tl.constexpr, IS_THERE: tl.constexpr
):
    if IS_THERE:
        tl.store(unwritten, tl.load(absent))
    i = tl.arange(0, SIZE)
    tl.store(sums + i, tl.load(x + i) * scale + n + far)


@pytest.fixture(scope="session")  # a process keeps the launches of its first driver
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", SOURCE, "-o", path], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def launched(driver, monkeypatch):
    """Runs a launch on CPU buffers; its result says how the kernel was launched."""
    monkeypatch.setattr(triton_launch, "DRIVER", driver._name)
    triton_call.own_launcher.cache_clear()
    assert triton_call.own_launcher()
    ctypes.c_int.in_dll(driver, "parameters").value = 8
    status = ctypes.c_int.in_dll(driver, "status")
    execute = triton_call.Executor(Device((9, 0), 132))

    def run(x, n=5, far=2**40, size=16, fail=0):
        status.value = fail
        outputs = Output((32,), "int32", alias=0), None, Output((size,), "float32", zeroed=True), None
        constants = {"SIZE": size, "IS_THERE": False, "num_warps": 2}
        launch = Launch(kernel, "a launch", (3, 2), (n, far, 0.5), outputs, constants)
        report = jnp.full((32,), 7, jnp.int32)
        step = jax.jit(lambda report, x: execute(launch, (report, None, x)), donate_argnums=0)
        report, unwritten, sums, last = step(report, x)
        assert unwritten is None and last is None
        return np.asarray(report).view(np.int64), np.asarray(sums)

    yield run
    status.value = 0


def test_a_launch_as_the_driver_gets_it(driver, launched):
    report, sums = launched(jnp.ones(16))
    driver.kernel.restype = ctypes.c_char_p
    assert driver.kernel() == b"kernel" and not sums.any()  # zeroed, and nothing ran
    assert report[:5].tolist() == [3, 2, 1, 64, 0]
    x, n, far, scale, report_at, sums_at, *scratch = report[5:13].tolist()
    assert (n, far, scale) == (5, 2**40, struct.unpack("<q", struct.pack("<fi", 0.5, 0))[0])
    assert len({0, x, report_at, sums_at}) == 4 and scratch == [0, 0]


def test_numbers_are_no_part_of_the_program(driver, launched):
    """Layers differ in a number: Triton compiles once, and the GPU has one copy of the machine code."""
    launched(jnp.ones(16))
    loads = ctypes.c_int.in_dll(driver, "loads")
    before, loaded = triton_launch.compile_kernel.cache_info().misses, loads.value
    assert launched(jnp.ones(16), n=6)[0][6] == 6 and launched(jnp.ones(16), n=16)[0][6] == 16
    assert triton_launch.compile_kernel.cache_info().misses == before and loads.value == loaded
    launched(jnp.ones(32), size=32)
    assert triton_launch.compile_kernel.cache_info().misses == before + 1 and loads.value == loaded + 1


def test_an_unknown_triton_is_left_to_jax_triton_with_a_warning(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    triton_call.own_launcher.cache_clear()
    packages.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"triton 9\.0\.0 is none .* jax-triton launches, slower"):
        assert not triton_call.own_launcher()
    triton_call.own_launcher.cache_clear()


def test_triton_has_its_cache_folder_where_jax_triton_was_imported_by_another_package(launched, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jax_triton", types.ModuleType("jax_triton"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    launched(jnp.ones(128), size=128)
    assert list((tmp_path / ".triton" / "cache").iterdir())


def test_a_failing_launch_is_an_xla_error(launched):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cuLaunchKernel: CUDA_ERROR_OF_A_TEST \(700\)"):
        launched(jnp.ones(16), n=8, fail=700)


def test_a_driver_that_is_not_there(launched, monkeypatch):
    monkeypatch.setattr(triton_launch, "DRIVER", "libnone.so.9")
    with pytest.raises(RuntimeError, match=r"no CUDA driver: libnone\.so\.9"):
        launched(jnp.ones(16), n=9)


@pytest.mark.skipif(sys.version_info >= (3, 11, 8), reason="this Python parses in several threads")
def test_an_old_python_compiles_one_kernel_at_a_time(monkeypatch):
    """Two threads that parse at once fail there, now and then (python/cpython#106905)."""
    inside, most = [], []

    def compiles(*_, **__):
        inside.append(None)
        time.sleep(0.02)
        most.append(len(inside))
        inside.pop()
        raise RuntimeError("compiles nothing")

    monkeypatch.setattr(triton, "compile", compiles)
    asked = [(kernel, (), (("SIZE", size),), (), (9, 0)) for size in (3, 5)]
    with ThreadPoolExecutor(2) as threads:
        errors = [future.exception() for future in [threads.submit(triton_launch.compile_kernel, *x) for x in asked]]
    assert list(map(str, errors)) == ["compiles nothing"] * 2 and most == [1, 1]

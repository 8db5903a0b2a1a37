"""Triton's kernels that the package carries: found by what they are made from, and by nothing else."""

import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("tvm_ffi")
tl = triton.language

import jax
from triton.runtime.jit import JITFunction

from jax_sparse_mla import device, packages
from jax_sparse_mla.launch import build, triton_carried, triton_launch
from jax_sparse_mla.launch.dispatch import use_triton
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving import engine, presets, shapes_alone
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import EngineOptions

pytestmark = pytest.mark.cpu


@JITFunction  # as `triton.jit` makes it without the interpreter
def called(x):
    return x + 1


@JITFunction
def kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), called(SIZE))


@JITFunction
def another(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), called(SIZE) + 1)


ASKED = {
    "kernel": kernel,
    "types": (("x", "*i32"),),
    "constants": (("SIZE", 32),),
    "options": (("num_warps", 2),),
    "capability": (9, 0),
}


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    """An empty folder of binaries; nothing is remembered of another one."""
    monkeypatch.setattr(build, "folder", lambda: tmp_path)
    monkeypatch.delenv("JAX_SPARSE_MLA_BACKEND", raising=False)
    for cached in (packages.warn_once, triton_launch.compile_kernel):
        cached.cache_clear()
    yield tmp_path
    triton_launch.compile_kernel.cache_clear()


@pytest.fixture
def carried():
    """A kernel that is in the package: its file, and what Triton made. The process has forgotten it."""
    path = triton_carried.write([tuple(ASKED.values())])
    made = triton_launch.compile_kernel(*ASKED.values())
    triton_launch.compile_kernel.cache_clear()
    return path, made


def test_a_carried_kernel_needs_no_compiler(carried, monkeypatch):
    path, made = carried
    assert made.image.startswith(b"\x7fELF") and (made.name, made.threads) == ("kernel", 64)
    assert triton_carried.counts() == {triton.__version__: 1}
    monkeypatch.setattr(triton, "compile", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setenv("PATH", "")
    assert triton_launch.compile_kernel(*ASKED.values()) == made
    assert triton_carried.write([tuple(ASKED.values())]) == path  # what has not changed is taken over


def test_the_build_takes_nothing_over(carried, monkeypatch):
    """How this package has a kernel compiled is no part of its name."""
    path, _ = carried
    monkeypatch.setattr(shapes_alone, "trace_served", lambda: triton_launch.compile_kernel(*ASKED.values()))
    monkeypatch.setattr(triton_launch, "begun", {tuple(ASKED.values())})
    compiled, compile = [], triton.compile
    monkeypatch.setattr(triton, "compile", lambda *args, **options: compiled.append(1) or compile(*args, **options))
    assert build._triton_kernels() == path and compiled and triton_carried.counts() == {triton.__version__: 1}


OTHERS = {
    "kernel": another,
    "types": (("x", "*fp32"),),
    "constants": (("SIZE", 64),),
    "options": (("num_warps", 4),),
    "capability": (10, 0),
}


@pytest.mark.parametrize("changed", OTHERS)
def test_what_is_made_from_something_else_is_not_found(carried, changed):
    assert triton_carried.load(*(ASKED | {changed: OTHERS[changed]}).values()) is None
    assert triton_carried.load(*ASKED.values())


def test_nor_is_one_of_another_called_function_triton_or_setting(carried, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "hash", None)  # Triton's digest, computed anew
        patch.setattr(called, "hash", "of another source")
        assert triton_carried.load(*ASKED.values()) is None
    with monkeypatch.context() as patch:
        patch.setenv("DISABLE_LLVM_OPT", "1")
        assert triton_carried.load(*ASKED.values()) is None
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "9.0.0")
        assert triton_carried.load(*ASKED.values()) is None
    assert triton_carried.load(*ASKED.values())


@pytest.mark.parametrize("damage", ["a byte", "cut short"])
def test_a_damaged_file_is_left_aside_with_a_warning(carried, damage):
    path, made = carried
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (held,) = archive.infolist()
    data[30 + len(held.filename) + held.compress_size // 2] ^= 1
    path.write_bytes(data if damage == "a byte" else data[: len(data) // 2])
    triton_carried._opened.cache_clear()
    with pytest.warns(UserWarning, match=r"triton-.*\.zip is damaged \(.+\): Triton compiles"):
        assert triton_launch.compile_kernel(*ASKED.values()) == made


def test_without_a_file_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert triton_carried.load(*ASKED.values()) is None and triton_carried.counts() == {}


def test_the_kernels_of_a_program_as_on_an_h200(monkeypatch):
    """They are asked for where there is no GPU; without our binaries Triton's serve all of a step. Nothing compiles."""
    monkeypatch.setattr(triton_launch, "begun", set())
    monkeypatch.setattr(triton_launch._threads, "submit", lambda *_: None)
    monkeypatch.setattr(build, "module", lambda *_: None)
    monkeypatch.setattr(engine, "begin_to_load", lambda _: None)
    options = EngineOptions(max_batch=2)
    with device.pretend(shapes_alone.H200):
        assert use_triton()
        made = shapes_alone.ShapesAlone(presets.CONFIGS["v32"], options)
        keys = made.greedy(ForwardMode.DECODE)
        assert [(rows, choice) for _, _, rows, _, _, choice, *_ in keys] == 2 * [(1, Choice.GREEDY), (2, Choice.GREEDY)]
        made.trace_program(keys[-1])
    assert use_triton() == (jax.default_backend() == "gpu")
    names = {kernel.__name__ for kernel, *_ in triton_launch.begun}
    assert {"write_kv_kernel", "topk_select_kernel", "sparse_mla_kernel"} <= names
    assert {capability for *_, capability in triton_launch.begun} == {(9, 0)}


def test_what_is_traced_for_another_device_stays_there():
    """A function that is jitted for all is traced anew outside, and other threads do not see the device."""
    seen, here = [], device.DeviceInfo.current()
    jitted = jax.jit(lambda x: (seen.append(device.DeviceInfo.current()), x)[1])
    with device.pretend(shapes_alone.H200), ThreadPoolExecutor(1) as thread:
        jitted.trace(1.0)
        assert thread.submit(device.DeviceInfo.current).result() == here
    jitted.trace(1.0)
    assert seen == [shapes_alone.H200, here]
    with pytest.raises(KeyError), device.pretend(shapes_alone.H200):
        raise KeyError
    assert device.DeviceInfo.current() == here

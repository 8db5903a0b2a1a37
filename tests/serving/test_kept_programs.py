"""Compiled steps that are kept on disk: what names them, and that another process runs them as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_model import ToyModel

from jax_sparse_mla import ForwardMode
from jax_sparse_mla.serving import engine, kept_programs, native
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions

pytestmark = pytest.mark.cpu

# Doubles by a call of TVM FFI's own function, and solves by LAPACK, in a process that has traced neither.
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from jax_sparse_mla.serving import kept_programs
import kept_calls

path, devices = Path(sys.argv[1]), jax.devices()[:1]
x = jnp.arange(4, dtype=jnp.float32)
if (step := kept_programs.load(path, devices)) is None:
    lowered = jax.jit(kept_calls.doubled).lower(x)
    step = kept_programs.compile(path, lowered)
    print("compiled")
np.testing.assert_array_equal(step[0](x), [0, 2, 4, 6])
"""
CALLS = """
import jax
from jax_sparse_mla.launch import tvm

def module():
    def function(x, out):
        out[...] = 2 * x
    import tvm_stub
    return tvm_stub.module(function=function)()

def doubled(x):
    result = jax.ShapeDtypeStruct((4,), x.dtype)
    result = tvm.call(module, "function", (tvm.Buffer(0), tvm.Buffer(1)), [result], x)[0]
    return jax.scipy.linalg.solve_triangular(jax.numpy.eye(4), result, lower=True)
"""


@pytest.fixture
def folder(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def path_of(*made_from):
    return kept_programs.path_of(made_from, jax.devices()[:1])


def test_another_process_calls_what_the_program_calls(tmp_path):
    pytest.importorskip("tvm_ffi")
    (tmp_path / "kept_calls.py").write_text(CALLS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "step")]
    printed = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [each.returncode for each in printed] == [0, 0], printed
    assert [each.stdout for each in printed] == ["compiled\n", ""]


@pytest.mark.parametrize("content", [b"", b"no program"], ids=["cut short", "of another kind"])
def test_what_does_not_load_is_compiled_anew(folder, content):
    path = path_of("a step")
    path.write_bytes(content)
    assert kept_programs.load(path, jax.devices()[:1]) is None


def test_what_others_can_write_is_not_loaded(folder):
    path, lowered = path_of("a step"), jax.jit(jnp.sin).lower(1.0)
    kept_programs.compile(path, lowered)
    call, routes = kept_programs.load(path, jax.devices()[:1])
    np.testing.assert_allclose(call(1.0), np.sin(1.0), rtol=1e-6)
    assert routes == frozenset()
    path.chmod(0o666)
    assert kept_programs.load(path, jax.devices()[:1]) is None


def test_what_jax_has_loaded_is_not_kept_on_a_cpu(folder, monkeypatch):
    """It would load, and fail where it is called: "Function … not found"."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        path, kept = path_of("a step"), []
        for _ in range(2):
            lowered = jax.jit(lambda x: jnp.sin(x @ x).sum(0) * 2).lower(jnp.ones((9, 9)))
            call, _ = kept_programs.compile(path, lowered)
            np.testing.assert_allclose(call(jnp.ones((9, 9))), 18 * np.sin(9), rtol=1e-5)
            kept.append(path.is_file())
            path.unlink(missing_ok=True)
        assert kept == [True, jax.default_backend() != "cpu"]
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def test_all_that_a_program_depends_on_names_it(folder, monkeypatch, tmp_path):
    names = [path_of("a step"), path_of("another")]
    with jax.default_matmul_precision("highest"):
        names.append(path_of("a step"))
    for name in ("XLA_FLAGS", "JAX_SPARSE_MLA_BACKEND"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "another")
            names.append(path_of("a step"))
    for name in ("_sources", "_versions", "expected"):  # what stands in files, is installed, and can be loaded
        with monkeypatch.context() as patch:
            patch.setattr(kept_programs, name, lambda: "another")
            names.append(path_of("a step"))
    assert len(set(names)) == len(names) == 8 and path_of("a step") == names[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_program_does_not_wait_for_what_is_built_for_others(folder, monkeypatch, fails):
    """It is kept when all is there, as its name tells what was to come; not where that failed."""
    go_on = threading.Event()
    part = native._Part(None, lambda: go_on.wait(60) and (None if fails else "a module"), unusable=lambda: None)
    monkeypatch.setattr(native, "_parts", lambda: [part])
    monkeypatch.setattr(native, "_threads", [])
    monkeypatch.setattr(native.compile_cache, "available", lambda library: True)
    native.begin_to_load()
    path, lowered = path_of("a step"), jax.jit(jnp.cos).lower(1.0)
    assert native.expected() == [True] and native.building()
    kept_programs.compile(path, lowered)
    assert not path.is_file()
    go_on.set()
    step = kept_programs.load(path, jax.devices()[:1])
    assert native.usable() == [not fails] and (step is None) == fails and path.is_file() != fails


def test_nothing_is_kept_without_a_folder_or_a_name(folder):
    assert path_of(object()) is None, "its address is another one in each process"
    jax.config.update("jax_compilation_cache_dir", "")
    assert path_of("a step") is None
    lowered = jax.jit(jnp.sin).lower(1.0)
    assert kept_programs.compile(None, lowered)[0](0.0) == 0


def test_an_engine_serves_by_kept_programs_as_by_its_own(folder, monkeypatch):
    model, options = ToyModel(), EngineOptions(chunk_size=16, max_batch=1, max_len=64)
    params, outputs = model.init_params(0), []
    for _ in range(2):
        monkeypatch.setattr(engine, "_executables", {})
        made = engine.Engine(model, params, options)
        made.run([request := Request(list(range(20)), 4)])
        outputs.append((request.output, sorted(made.routes.values(), key=str)))
        monkeypatch.setattr(engine.Engine, "_jitted", lambda *args: pytest.fail("traced again"))
    assert outputs[0] == outputs[1]


def test_decoding_is_compiled_beside_the_prompts_program(monkeypatch):
    """By another thread, the program that is needed, once; tokens are the same."""
    model, options = ToyModel(), EngineOptions(chunk_size=16, max_batch=2, max_len=64)
    params, outputs, compiled = model.init_params(0), [], []
    compile_one = engine.Engine._compile

    def compiles(self, mode, *bucket, **then):
        compiled.append((mode, threading.current_thread() is threading.main_thread()))
        return compile_one(self, mode, *bucket, **then)

    monkeypatch.setattr(engine.Engine, "_compile", compiles)
    for ahead in (True, False):
        monkeypatch.setattr(engine, "_executables", {})
        made = engine.Engine(model, params, options)
        made.ahead = ahead
        made.run([request := Request(list(range(20)), 4)])
        outputs.append(request.output)
        assert sorted(compiled, key=str) == [(ForwardMode.DECODE, not ahead), (ForwardMode.EXTEND, True)]
        compiled.clear()
    assert outputs[0] == outputs[1]

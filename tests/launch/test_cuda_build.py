"""Where the CUDA kernels' binaries come from: the package, the user's cache, nvcc, or nowhere, with the reason."""

import dataclasses

import pytest
import sparse_mla_torch.launch

from jax_sparse_mla import packages
from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.launch import build as cuda_build
from jax_sparse_mla.launch import compile_cache

tvm_ffi = pytest.importorskip("tvm_ffi")

NVCC = """
while [ "$1" != -o ]; do shift || exit 1; done
echo compiled > "$2"
"""


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A package with one kernel, a user's cache, and no compiler yet; a library is any file that says "compiled"."""

    def load_module(path):
        with open(path) as file:
            text = file.read()
        if text != "compiled\n":
            raise RuntimeError(f"Failed to load {path}")
        return path

    folder = tmp_path / "package" / "kernels_cuda"
    (folder / "some").mkdir(parents=True)
    (folder / "some" / "some.cu").write_text("// a kernel\n")
    (folder / "some" / "some.cuh").write_text("// what it includes\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(cuda_build, "_PACKAGE", folder.parent)
    monkeypatch.setattr(tvm_ffi, "load_module", load_module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(compile_cache.shutil, "which", lambda name: None)
    packages.warn_once.cache_clear()
    return folder


def add_compiler(monkeypatch, tmp_path, text: str = NVCC) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{text}")
    nvcc.chmod(0o700)
    monkeypatch.setattr(compile_cache.shutil, "which", lambda name: str(nvcc))


def module(name: str = "some", arch: str = "90a"):
    return cuda_build.module.__wrapped__(name, arch)


def test_it_is_compiled_once_into_the_cache(kernels, monkeypatch, tmp_path):
    add_compiler(monkeypatch, tmp_path)
    path = compile_cache.Path(module())
    assert path.parent == tmp_path / "cache" / "jax_sparse_mla" and path.name.startswith("some-sm90a-")
    assert list(path.parent.iterdir()) == [path], "what the compiler left is gone"
    monkeypatch.setattr(compile_cache.shutil, "which", lambda name: None)
    assert compile_cache.Path(module()) == path


def test_another_source_architecture_or_machine_is_another_binary(kernels, monkeypatch):
    def name(arch):
        return compile_cache.carried_path(cuda_build.library("some", arch)).name

    names = {name("90a"), name("100")}
    monkeypatch.setattr(compile_cache.platform, "machine", lambda: "another")
    names.add(name("90a"))
    (kernels / "some" / "some.cuh").write_text("// something else\n")
    names.add(name("90a"))
    (kernels / "shared.cuh").write_text("// what all include\n")
    names.add(name("90a"))
    assert len(names) == 5


@pytest.mark.parametrize("reason", ["nvcc is not on the PATH", "unsupported architecture"])
def test_without_a_binary_a_warning_says_why(kernels, monkeypatch, tmp_path, reason):
    if reason == "unsupported architecture":
        add_compiler(monkeypatch, tmp_path, "echo unsupported architecture >&2\nexit 1\n")
    with pytest.warns(UserWarning, match=f"(?s)the CUDA kernel some cannot be used: .*{reason}"):
        assert module() is None
    assert not list(tmp_path.glob("cache/*/*"))


def test_the_command_puts_all_that_a_wheel_carries_into_the_package(kernels, monkeypatch, tmp_path, capsys):
    """What XLA and torch call the kernels through too: with a wheel's binaries no compiler is needed."""
    add_compiler(monkeypatch, tmp_path)
    monkeypatch.setattr(cuda_build, "KERNELS", {"some": ("80", "90a")})
    (kernels.parent / "launch").mkdir()
    for name in ("tvm_bind.cc", "kernel_launch.h", "xla_call.h"):
        (kernels.parent / "launch" / name).touch()
    launcher = dataclasses.replace(sparse_mla_torch.launch.LIBRARY, includes=list, carried=kernels)
    monkeypatch.setattr(sparse_mla_torch.launch, "LIBRARY", launcher)
    prefill = dataclasses.replace(launcher, name="prefill", compiler="mosaic")
    monkeypatch.setattr(alone, "libraries", lambda: [prefill])
    monkeypatch.setattr(cuda_build.mosaic, "why_not", lambda: "JAX is old")
    monkeypatch.setattr(cuda_build, "_triton_kernels", lambda: "Triton's kernels")  # test_triton_carried.py
    monkeypatch.setattr("sys.argv", ["build"])
    (kernels / "some-sm80-of-before.so").touch()
    cuda_build.main()
    made = sorted(path.name for path in kernels.glob("*.so"))
    kinds = [name.partition("-x")[0].partition("-a")[0] for name in made]
    assert kinds == ["launcher", "some-sm80", "some-sm90a", "tvm_bind"]
    *printed, prefill, last = capsys.readouterr().out.splitlines()
    assert sorted(printed) == [str(kernels / name) for name in made] and last == "Triton's kernels"
    assert prefill == "prefill is left out: JAX is old"
    monkeypatch.setattr(compile_cache.shutil, "which", lambda name: None)
    assert compile_cache.Path(module()).parent == kernels

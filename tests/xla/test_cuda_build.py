"""Where the CUDA kernels' binaries come from: the package, the user's cache, nvcc, or nowhere, with the reason."""

import stat

import pytest

from jax_sparse_mla.kernels import build as cuda_build

pytest.importorskip("tvm_ffi")

NVCC = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """A package with one kernel, a user's cache, and no compiler yet."""
    folder = tmp_path / "package" / "kernels_cuda"
    (folder / "some").mkdir(parents=True)
    (folder / "some" / "some.cu").write_text("// a kernel\n")
    (folder / "some" / "some.cuh").write_text("// what it includes\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(cuda_build, "_PACKAGE", folder.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(cuda_build.shutil, "which", lambda name: None)
    return folder


def add_compiler(monkeypatch, tmp_path, text: str = NVCC) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(text)
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(cuda_build.shutil, "which", lambda name: str(nvcc))


def no_home(self):
    raise RuntimeError("Could not determine home directory.")


def test_it_is_compiled_once_into_the_cache(kernels, monkeypatch, tmp_path):
    add_compiler(monkeypatch, tmp_path)
    path = cuda_build._binary("some", "90a")
    assert path.parent == tmp_path / "cache" / "jax_sparse_mla" and path.read_text() == "compiled\n"
    assert list(path.parent.iterdir()) == [path], "what the compiler left is gone"
    add_compiler(monkeypatch, tmp_path, "#!/bin/sh\nexit 1\n")
    assert cuda_build._binary("some", "90a") == path


def test_one_that_the_package_carries_needs_no_compiler_and_no_home(kernels, monkeypatch):
    carried = kernels / cuda_build._file_name("some", "90a")
    carried.touch()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cuda_build.Path, "expanduser", no_home)
    assert cuda_build._binary("some", "90a") == carried


def test_another_source_architecture_or_machine_is_another_binary(kernels, monkeypatch):
    names = {cuda_build._file_name("some", "90a"), cuda_build._file_name("some", "100")}
    monkeypatch.setattr(cuda_build.platform, "machine", lambda: "another")
    names.add(cuda_build._file_name("some", "90a"))
    (kernels / "some" / "some.cuh").write_text("// something else\n")
    names.add(cuda_build._file_name("some", "90a"))
    assert len(names) == 4


@pytest.mark.parametrize("obstacle", ["nothing", "a compiler that fails", "no home"])
def test_without_a_binary_a_warning_says_why(kernels, monkeypatch, tmp_path, obstacle):
    reason = "nvcc is not on the PATH"
    if obstacle == "a compiler that fails":
        add_compiler(monkeypatch, tmp_path, "#!/bin/sh\necho unsupported architecture >&2\nexit 1\n")
        reason = "unsupported architecture"
    if obstacle == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(cuda_build.Path, "expanduser", no_home)
        reason = "home directory"
    with pytest.warns(UserWarning, match=f"the CUDA kernel some cannot be used: .*{reason}"):
        assert cuda_build.module.__wrapped__("some", "90a") is None
    assert not list(tmp_path.glob("cache/*/*"))


def test_a_binary_that_cannot_be_loaded_is_refused(kernels):
    (kernels / cuda_build._file_name("some", "90a")).write_text("no ELF")
    with pytest.warns(UserWarning, match="some cannot be used"):
        assert cuda_build.module.__wrapped__("some", "90a") is None

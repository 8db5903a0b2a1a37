"""What is built of the project, with and without binaries: tags and contents of wheel and sdist, what is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from jax_sparse_mla.launch import build, compile_cache

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "interop", "jax_sparse_mla", "kernels_cuda", "tests")
FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "mkdocs.yml", "pyproject.toml", "setup.py")
OTHER = "topk-sm90-x86_64-000000000000.so"
TRITON = "triton-9.9.0.zip"
WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
SDIST = WHEEL.replace("build_wheel", "build_sdist")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout without what was built in it."""
    folder = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "*.zip", "__pycache__", "out")
        )
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def python(code, *args, executable=sys.executable, **options):
    done = subprocess.run([executable, "-c", code, *map(str, args)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def built(code, tree, folder):
    """The one file that the code builds of the tree."""
    python(code, folder, cwd=tree)
    (path,) = folder.iterdir()
    return path


def without_compilers(tmp_path, **more):
    """The environment of a machine with no compiler and no cache yet."""
    names = dict(PATH=str(tmp_path / "nothing"), XDG_CACHE_HOME=str(tmp_path / "cache"), JAX_PLATFORMS="cpu")
    left_out = ("CC", "CXX", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in left_out} | names | more


def test_without_binaries_a_wheel_is_for_any_machine(tree, tmp_path):
    wheel = built(WHEEL, tree, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so") or name.startswith(("tests", "docs", "benchmarks"))]


def test_with_binaries_it_is_for_this_one_and_says_which_are_used(tree, tmp_path):
    """Binaries count by their names, so files of text will do. What is of other sources is named and not loaded."""
    carried = {compile_cache.carried_path(library).name for library in build.libraries()}
    for name in (*carried, OTHER):
        (tree / "kernels_cuda" / name).write_text("no library")
    with zipfile.ZipFile(tree / "kernels_cuda" / TRITON, "w") as archive:
        archive.writestr("a kernel", "no machine code")
    try:
        wheel, sdist = (built(code, tree, tmp_path / name) for name, code in (("wheel", WHEEL), ("sdist", SDIST)))
    finally:
        for path in (*tree.glob("kernels_cuda/*.so"), tree / "kernels_cuda" / TRITON):
            path.unlink()
    assert "-cp311-abi3-linux_" in wheel.name
    with tarfile.open(sdist) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert {"tests/conftest.py", "docs/guides/install.md", "examples/jax_decode.py", "benchmarks/results.json"} <= held
    assert {"interop/sparse_mla_torch/launch/launcher.c", "kernels_cuda/sm90.cuh", "setup.py", "mkdocs.yml"} <= held
    assert not [name for name in held if name.endswith((".so", ".zip", ".pyc"))]

    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = """
import importlib.metadata, json, sys
from pathlib import Path
import jax_sparse_mla
assert "jax_sparse_mla.launch.build" not in sys.modules, "python -m jax_sparse_mla.launch.build would warn of it"
from jax_sparse_mla.cli import main
from jax_sparse_mla.launch import build, compile_cache
main(["doctor"])
loaded = [compile_cache.load(library, str) for library in build.libraries()]
try:
    refused = compile_cache.load(build.library("topk", "89"), str)
except RuntimeError as error:
    refused = str(error)
print(json.dumps([loaded, refused, dict(importlib.metadata.metadata("jax-sparse-mla"))]))
"""
    out = python(code, cwd=tmp_path, env=without_compilers(tmp_path, PYTHONPATH=str(tmp_path / "installed")))
    loaded, refused, metadata = json.loads(out.splitlines()[-1])
    folder = tmp_path / "installed" / "jax_sparse_mla" / "kernels_cuda"
    assert set(loaded) == {str(folder / name) for name in carried}
    assert "topk-sm89 has to be compiled, and nvcc is not on the PATH" in refused
    (line,) = [line for line in out.splitlines() if line.startswith("binaries   carried: ")]
    assert set(line.removeprefix("binaries   carried: ").split(", ")) == {library.name for library in build.libraries()}
    assert f"for another machine: {OTHER}\n" in out
    assert "binaries   Triton's kernels carried: 1 of triton 9.9.0 (not used)\n" in out
    assert metadata["Version"] and metadata["Classifier"] and metadata["Requires-Python"] == ">=3.11"


LOADS = """
import sys, warnings
warnings.simplefilter("error")
from jax_sparse_mla.launch import build, tvm
assert build.folder().is_relative_to(sys.prefix), build.folder()
assert build.carried()[0] and build.module("topk", "90") and tvm.binder()
"""


@pytest.mark.long
def test_an_installed_wheel_needs_no_compiler(tree, tmp_path):
    """One kernel stands for all: with nvcc's binary, XLA's side and torch's launcher, nothing is compiled any more."""
    pytest.importorskip("torch")
    pytest.importorskip("tvm_ffi")
    if compile_cache.find_compiler("nvcc") is None:
        pytest.skip("needs nvcc")
    code = "from jax_sparse_mla.launch import build; build.KERNELS = {'topk': ('90',)}; "
    code += "from jax_sparse_mla.serving import shapes_alone; shapes_alone.served = lambda: (); build.main()"
    paths = os.pathsep.join(map(str, (tree, tree / "interop")))
    python(code, cwd=tree, env=os.environ | {"PYTHONPATH": paths})
    wheel = built(WHEEL, tree, tmp_path / "dist")
    venv.create(tmp_path / "venv", with_pip=True)
    executable = tmp_path / "venv" / "bin" / "python"
    subprocess.run([executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    site = Path(python("import sysconfig; print(sysconfig.get_path('purelib'))", executable=executable).strip())
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    torch_too = LOADS + "from sparse_mla_torch.launch import launcher; assert launcher.module()\n"
    python(torch_too, executable=executable, cwd=tmp_path, env=without_compilers(tmp_path))
    assert not (tmp_path / "cache").exists(), "something was compiled"

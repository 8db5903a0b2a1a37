"""Optional packages: absence is quiet, and what is there and does not import is said, once, with its error."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_sparse_mla import packages
from jax_sparse_mla.backend import Need


@pytest.fixture(autouse=True)
def asked_anew():
    packages.why_not.cache_clear()
    packages.warn_once.cache_clear()
    yield
    packages.why_not.cache_clear()


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Puts a package of this text on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return put


def test_an_absent_package_is_quiet(recwarn):
    assert not packages.is_found("no_such_package") and packages.why_not("no_such_package")
    assert packages.why_not("no_such_package") == "no_such_package is not installed"
    assert not recwarn.list


def test_one_that_imports_is_quiet(recwarn, package):
    package("a_good_package", "")
    assert packages.why_not("a_good_package") is None and not recwarn.list


@pytest.mark.parametrize(
    "text, error",
    [
        ("raise OSError('libsome.so: undefined symbol')", "OSError: libsome.so: undefined symbol"),
        ("import what_it_needs_and_is_not_there", "ModuleNotFoundError: No module named"),
        ("raise RuntimeError('built for CUDA 12')", "RuntimeError: built for CUDA 12"),
    ],
)
def test_one_that_does_not_import_is_said_once(package, text, error):
    package("a_broken_package", text)
    with pytest.warns(UserWarning, match=f"a_broken_package does not import: {error}.*mend or remove it") as warned:
        for _ in range(3):
            assert error in packages.why_not("a_broken_package")
    assert len(warned) == 1


@pytest.mark.parametrize("before", [None, "", "/somewhere"])
def test_an_import_leaves_triton_s_cache_where_it_was(package, monkeypatch, before):
    """jax-triton empties the variable: torch's launches would cache in the working directory."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    package("empties_it", "import os; os.environ['TRITON_CACHE_DIR'] = ''")
    assert packages.why_not("empties_it") is None and os.environ.get("TRITON_CACHE_DIR") == (before or None)


@pytest.mark.parametrize("name", ["tvm_ffi", "triton", "flashinfer", "torch"])
def test_what_a_backend_needs(package, name):
    """Its record says why it cannot be used; the distribution where nothing is installed."""
    package(name, "raise ImportError('another version')")
    need = Need(("its-distribution",), (name,))
    with pytest.warns(UserWarning, match=rf"\b{name} does not import: ImportError: another version"):
        assert need.missing() == f"{name} does not import: ImportError: another version"
    assert Need(("its-distribution",), ("no_such_package",)).missing() == "its-distribution is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert need.missing()


def test_once_for_threads():
    """One computes, others wait for it; other arguments do not wait, and an error is no value."""
    calls, together = [], threading.Barrier(2, timeout=10)

    @packages.once
    def square(x):
        calls.append(x)
        if x < 0:
            raise ValueError("below 0")
        together.wait()
        return x * x

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(square, [3, 3, 4, 4])) == [9, 9, 16, 16]
    assert sorted(calls) == [3, 4]
    for _ in range(2):
        with pytest.raises(ValueError, match="below 0"):
            square(-1)
    assert calls.count(-1) == 2

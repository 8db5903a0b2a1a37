"""The wheel's tag: that of the machine where the package holds binaries, "any" without; pyproject.toml has the rest."""

from pathlib import Path

from setuptools import Distribution, setup

BINARIES = any(Path(__file__).with_name("kernels_cuda").glob("*.so"))


class WithBinaries(Distribution):
    def has_ext_modules(self) -> bool:
        return BINARIES


# abi3: torch's launcher is an extension module of Python's limited API; the other binaries do not know Python.
setup(distclass=WithBinaries, options={"bdist_wheel": {"py_limited_api": "cp311"}} if BINARIES else {})

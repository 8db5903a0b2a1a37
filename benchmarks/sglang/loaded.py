"""SGLang's server code imported on a GPU, with refusing stand-ins for the packages that are not installed.

SGLang imports far more than its attention needs. What is absent may be imported here, and is listed; whatever calls it
raises `Missing`, so that nothing is computed by a stand-in.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types

# Packages that SGLang's modules import and its FlashMLA attention on SM90 does not call.
MAY_BE_ABSENT = ("sgl_kernel", "IPython", "torchaudio", "soundfile", "timm", "gguf", "kernels")
PLUGIN_LOG = "sglang.jax_sparse_mla"


class Missing(Exception):
    """Something of a package that is not installed was called."""


class _StandIn(type):
    """A class of an absent package: it may be named, subclassed and used as a decorator while modules are imported."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args, **kwargs):
        if cls.__module__ == __name__ and not _importing():
            raise Missing(f"{cls.__qualname__} is of a package that is not installed here")
        return super().__call__()


def stand_in(name: str) -> type:
    return _StandIn(name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": _called(name)})


def _called(name: str):
    def call(self, *args, **kwargs):
        if not _importing():
            raise Missing(f"{name} is of a package that is not installed here")
        return args[0] if len(args) == 1 and callable(args[0]) else self

    return call


def _importing() -> bool:
    """Whether a module's own code is what calls."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, stand_in(f"{self.__name__}.{name}"))
        return getattr(self, name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked after every other finder."""

    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages
        self.imported: set[str] = set()

    def find_spec(self, name, path, target=None):
        package = name.partition(".")[0]
        if package not in self.packages:
            return None
        self.imported.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


class _Said(logging.Handler):
    """What our plugin says in SGLang's log."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class SGLang:
    """SGLang with its plugins loaded, as its server's processes do it.

    Attributes:
      stand_ins: packages that are not installed and were imported.
      said: the lines that our plugin has logged.
    """

    def __init__(self):
        absent = Absent(tuple(name for name in MAY_BE_ABSENT if not _installed(name)))
        os.environ["SGLANG_DSA_FUSE_TOPK"] = "0"  # the kit gives positions, and not slots
        sys.meta_path.append(absent)
        self._absent, self._said = absent, _Said()
        logging.getLogger(PLUGIN_LOG).addHandler(self._said)
        logging.getLogger(PLUGIN_LOG).setLevel(logging.INFO)
        importlib.import_module("sglang")  # where a package is missing, its name is the error: the plugin logs its own
        from sparse_mla_torch.plugins import sglang as plugin

        plugin.register()  # as SGLang does by its entry point, which a checkout that is not installed has not
        importlib.import_module("sglang.srt.plugins").load_plugins()

    @property
    def stand_ins(self) -> list[str]:
        return sorted(self._absent.imported)

    @property
    def said(self) -> list[str]:
        return list(self._said.lines)


def _installed(name: str) -> bool:
    """Whether there is such a package; a folder of a few of its files is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None

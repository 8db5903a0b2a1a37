"""Stand-ins for packages that are not installed: they may be imported, and whatever calls into one raises `Missing`.

So nothing is computed by a stand-in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


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
    """Asked after every other finder.

    Attributes:
      packages: those that may be absent, or modules of a package that is there.
      imported: those of them that were imported and are absent.
    """

    def __init__(self, packages: tuple[str, ...]):
        self.packages = packages
        self.imported: set[str] = set()

    def find_spec(self, name, path, target=None):
        package = next((package for package in self.packages if f"{name}.".startswith(f"{package}.")), None)
        if package is None:
            return None
        self.imported.add(package)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass

"""A function that is called with a module of an engine's as soon as the engine imports it, and not before."""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[ModuleType], None], log: logging.Logger) -> None:
    """Calls `then` with the module when it is imported, or now if it is there; what it raises is only logged."""
    if name in sys.modules:
        _call(then, sys.modules[name], log)
    elif not any(isinstance(finder, _Watcher) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, then, log))


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds one module as the others would, and has its loader call a function once it has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None], log: logging.Logger):
        self.name, self._then, self._log = name, then, log
        self._asks = False  # the other finders

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.name or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if module.__name__ != self.name:  # of a loader that several modules share
                    return
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _call(self._then, module, self._log)

            spec.loader.exec_module = exec_module
        return spec


def _call(then: Callable[[ModuleType], None], module: ModuleType, log: logging.Logger) -> None:
    try:
        then(module)
    except Exception as error:  # whatever it is, the engine goes on without us
        log.warning("jax-sparse-mla leaves %s as it is: %s: %s", module.__name__, type(error).__name__, error)

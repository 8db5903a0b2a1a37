"""How a plugin gets into an engine: by functions that log what they raise, so that the engine goes on without us."""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def or_leave(engine: str, register: Callable[[], str | None], log: logging.Logger) -> None:
    """Calls `register`, and logs why nothing was registered: what it returns or raises."""
    try:
        why = register()
    except Exception as error:  # whatever it is, the engine goes on with its own kernels
        why = f"{type(error).__name__}: {error}"
    if why:
        log.warning("jax-sparse-mla leaves %s as it is: %s", engine, why)


def when_imported(name: str, then: Callable[[ModuleType], None], log: logging.Logger) -> None:
    """Calls `then` with the module as soon as the engine imports it, or now if it is there; logs what it raises."""
    if name in sys.modules:
        or_leave(name, lambda: then(sys.modules[name]), log)
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
                or_leave(self.name, lambda: self._then(module), self._log)

            spec.loader.exec_module = exec_module
        return spec

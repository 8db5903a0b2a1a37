"""What the tests of both engines' plugins share."""

from __future__ import annotations

import logging
import sys
import types

import pytest
from sparse_mla_torch.attention import call_cache
from sparse_mla_torch.plugins import calls as served
from sparse_mla_torch.plugins import sglang as sglang_plugin


@pytest.fixture
def fresh(monkeypatch):
    """Nothing was served, said or registered yet."""
    for name in ("counts", "_said", "_off"):
        monkeypatch.setattr(served, name, type(getattr(served, name))())
    monkeypatch.setattr(served, "log", logging.getLogger("plugins"))
    monkeypatch.setattr(sglang_plugin, "_registered", [])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # who waits for a module waits there
    monkeypatch.delenv("JAX_SPARSE_MLA_PLUGIN_STRICT", raising=False)
    call_cache.forget()
    yield
    call_cache.forget()


def put(monkeypatch, **modules: dict) -> None:
    """Modules of these names and contents; `__` in a name is a dot."""
    for name, contents in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__path__ = []
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def refuse(error):
    def ours():
        raise error

    return ours

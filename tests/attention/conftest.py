"""No backend is asked for by the environment."""

from __future__ import annotations

import pytest
from attention_calls import OVERRIDES


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)

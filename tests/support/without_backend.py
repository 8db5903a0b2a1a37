"""A backend that refuses every call, for as long as a test looks at what serves without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any
from unittest import mock

import pytest


@contextlib.contextmanager
def without(backends: MutableMapping[str, Any], name: str) -> Iterator[None]:
    """The record of a name refuses; it keeps its place, by which records are preferred.

    A record that is deleted and put back stands last, where it is taken for the one that serves every call.
    """
    refusing = mock.Mock(wraps=backends[name])
    refusing.name, refusing.cannot = name, lambda call: ["a test does without it"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends, name, refusing)
        yield

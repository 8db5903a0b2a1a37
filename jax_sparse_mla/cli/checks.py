"""The check of what `generate` generates: against another implementation, which an entry point names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol

CHECKS = "jax_sparse_mla.check"  # the group of entry points under which a check is installed


class CheckResult(NamedTuple):
    """Whether a check passed, and lines that say so: in short, and layer by layer."""

    passed: bool
    summary: list[str]
    table: list[str]


class Check(Protocol):
    """A check against another implementation of the same model, which begins when it is made, to run beside the engine.

    One of the two loads is called, in a thread, before it compares.
    """

    def load_checkpoint(self, folder: str) -> None:
        """Loads the other implementation's model of a checkpoint."""

    def load_arrays(self, model: Any, config: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Makes it from a config and the arrays of which a `serving.Model` is made."""

    def compare(self, engine: Any, requests: list[Any]) -> CheckResult:
        """Compares the latest traced run of an engine with it."""

    def close(self) -> None:
        """Ends it, whatever it does."""


def begin_check() -> Check:
    """The installed check; an ImportError says that there is none, or what it needs is missing or too old."""
    checks = list(entry_points(group=CHECKS))
    if not checks:
        raise ImportError(f'no entry point {CHECKS} is installed: install "jax-sparse-mla[hf]" again')
    return checks[0].load()()

"""An engine's call of FlashMLA, served by ours or, where ours refuses or fails or would be slower, by the engine's own.

`JAX_SPARSE_MLA_PLUGIN_STRICT=1` raises what ours raises, except for calls that FlashMLA does sooner.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch

from sparse_mla_torch.attention import prefill
from sparse_mla_torch.flash_mla import FasterAlone

T = TypeVar("T")

log = logging.getLogger("sparse_mla_torch.plugins")

# How often each function was served by "ours", by "theirs" because that is faster, or was "refused" or "failed".
counts: Counter[tuple[str, str]] = Counter()
_said: set[tuple[str, str]] = set()
_off: set[str] = set()  # functions in which ours has failed


def log_under(engine: str) -> None:
    """Logs where the engine shows it, below its own name."""
    global log
    log = logging.getLogger(f"{engine}.jax_sparse_mla")


def ours_or_theirs(function: str, ours: Callable[[], T], theirs: Callable[[], T]) -> T:
    """The result of `ours()`, or of `theirs()` with one line in the log for each reason.

    Where ours fails, by another error than its refusal of an argument, it is not asked again: a kernel that does not
    compile, or a driver that it does not suit, would fail in each layer.
    """
    if function in _off:
        return theirs()
    try:
        result = ours()
    except FasterAlone as reason:
        _say(function, "theirs", reason, logging.INFO)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if os.environ.get("JAX_SPARSE_MLA_PLUGIN_STRICT") == "1":
            raise
        refused = isinstance(error, (TypeError, ValueError))
        if not refused:
            _off.add(function)
        _say(function, "refused" if refused else "failed", error, logging.WARNING)
    else:
        counts[function, "ours"] += 1
        if (function, "ours") not in _said:
            _said.add((function, "ours"))
            log.info("jax-sparse-mla serves %s", function)
        return result
    return theirs()


def warm_up(heads: int, head_dim: int) -> None:
    """Compiles what the prefill of a rank's heads launches, while the engine loads its model."""
    try:
        prefill.warm_up((heads, head_dim))
    except Exception as error:  # the call will say what it is
        log.warning("jax-sparse-mla did not prepare prefill: %s: %s", type(error).__name__, error)


def _say(function: str, what: str, reason: Exception, level: int) -> None:
    counts[function, what] += 1
    key = function, re.sub(r"\d+", "n", str(reason))  # one line whatever the sizes
    if key not in _said:
        _said.add(key)
        ended = ", and ours is not asked again in this process" if what == "failed" else ""
        log.log(level, "jax-sparse-mla leaves %s to the engine%s: %s", function, ended, f"{reason}")

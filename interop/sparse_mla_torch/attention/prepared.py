"""Calls prepared once: checked, routed and planned for their shapes, strides, dtypes and options, then remembered.

What is left of a call is a lookup and its launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from jax_sparse_mla.attention.route import Plan

# Calls of new shapes forget the others when there are so many: a long-lived process does not grow.
_MAX_CALLS = 4096

Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Schedule:
    """A split-KV schedule as the decode operator keeps it: None until its first call has filled it."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


class Prepared(NamedTuple):
    """A call that was checked and routed.

    Attributes:
      run: takes the call's tensors; see `decode.prepare` and `prefill.prepare`.
      plan: which backend, and why.
      writes_into: whether `run` writes into results that it is given.
      shape: of a decode call, `decode.Shape`.
    """

    run: Callable[..., Results]
    plan: Plan
    writes_into: bool
    shape: tuple | None = None


_calls: dict[tuple, Prepared] = {}


def facts(x: torch.Tensor | None) -> tuple | None:
    """What a call depends on of one of its tensors."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


def lookup(key: tuple, prepare: Callable[..., Prepared], arguments: tuple) -> Prepared:
    """What was prepared for this key, or `prepare(*arguments)`."""
    prepared = _calls.get(key)
    if prepared is None:
        prepared = prepare(*arguments)
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = prepared
    return prepared


def forget() -> None:
    """Drops what was prepared: the environment's overrides are read again."""
    _calls.clear()


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, copied if its elements do not follow each other; None stays None."""
    return None if x is None else x.contiguous()

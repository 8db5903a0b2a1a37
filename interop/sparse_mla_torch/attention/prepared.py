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


calls: dict[tuple | None, Prepared] = {}


def remember(key: tuple | None, prepared: Prepared) -> Prepared:
    """Puts it among `calls`, unless there was nothing to know it by."""
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    if key is not None:
        calls[key] = prepared
    return prepared


def forget() -> None:
    """Drops what was prepared: the environment's overrides are read again."""
    calls.clear()


def dense_facts(x: torch.Tensor) -> tuple:
    """What a call depends on of a tensor that is copied unless it is contiguous."""
    return x.shape, x.is_contiguous(), x.dtype, x.get_device()


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, copied if its elements do not follow each other; None stays None."""
    return None if x is None else x.contiguous()

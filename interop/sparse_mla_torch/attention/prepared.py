"""Calls prepared once: checked, routed and planned for their shapes, strides, dtypes and options, then remembered.

What is left of a call is a lookup and its launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

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
      run: takes the call's tensors and what it writes into; see `decode.prepare` and `prefill.prepare`.
      plan: which backend, and why.
      writes_into: whether `run` writes into results that it is given.
      shape: of a decode call, `decode.Shape`.
    """

    run: Callable[..., Results]
    plan: Plan
    writes_into: bool
    shape: tuple | None = None


calls: dict[tuple | None, Prepared] = {}
_facts: Callable[..., Hashable | None] | None = None  # of `host.c`, once there are CUDA tensors


def key(options: tuple, *tensors: Any) -> tuple | None:
    """What a call depends on: its options, and of each tensor dtype, device, shape, strides and alignment.

    None if there is something that is no tensor; the checks say what.
    """
    global _facts
    if _facts is None and isinstance(tensors[0], torch.Tensor) and tensors[0].is_cuda:
        _facts = _facts_of_host()
    facts = None if _facts is None else _facts(*tensors)
    try:
        return options, facts or tuple([None if x is None else _facts_of(x) for x in tensors])
    except AttributeError:
        return None


def _facts_of(x: torch.Tensor) -> tuple:
    return x.dtype, x.get_device(), x.shape, x.stride(), x.data_ptr() & 15


def _facts_of_host() -> Callable[..., bytes | None]:
    from sparse_mla_torch.kernels import host

    module = host.module()
    return module.facts if module else lambda *tensors: None


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


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, copied if its elements do not follow each other; None stays None."""
    return None if x is None else x.contiguous()

"""Calls prepared once: checked, routed and planned for their shapes, strides, dtypes and options, then remembered.

What is left of a call is a lookup and its launches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from jax_sparse_mla.attention.route import Plan

# When there are so many calls, the next new one drops them all: a long-lived process does not grow.
_MAX_CALLS = 4096
# Bytes. No kernel asks for more; FlashMLA's prefill on SM100 asks for it of the indices. launcher.c has it too.
ALIGNMENT = 32

Results = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Schedule:
    """A split-KV schedule as the decode operator keeps it: None until its first call has filled it."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


class Prepared(NamedTuple):
    """A call that was checked and routed."""

    run: Callable[..., Results]  # of the call's tensors and what it writes into: `decode.prepare`, `prefill.prepare`
    plan: Plan | None  # None for a call that is left to FlashMLA
    writes_into: bool  # whether `run` writes into results that it is given
    shape: Any = None  # of a decode call, `decode.Shape`


calls: dict[tuple, Prepared] = {}


def signature(*tensors: Any) -> Hashable | None:
    """Dtype, device, shape, strides and alignment of a call's tensors; None if `add` must find out.

    Once there are CUDA tensors, `launcher.c`'s function takes the place of this one. It answers where they are on the
    current device.
    """
    return None


def find(options: tuple, tensors: tuple) -> Prepared | None:
    """A call that was prepared with these options for tensors of this `signature` on the current device."""
    return calls.get((options, signature(*tensors)))


def add(options: tuple, tensors: tuple, new: Callable[..., Prepared]) -> Prepared:
    """A call that `find` does not know: made by `new`, which checks it, and remembered."""
    global signature
    if signature is _unknown and isinstance(tensors[0], torch.Tensor) and tensors[0].is_cuda:
        from sparse_mla_torch.launch import launcher

        module = launcher.module()
        signature = module.signature if module else lambda *tensors: None
    known = signature(*tensors) or _signature_in_python(tensors)
    call = calls.get((options, known)) if known else None
    if call is None:
        call = new(options, *tensors)
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        if known:
            calls[options, known] = call
    return call


_unknown = signature


def _signature_in_python(tensors: tuple) -> tuple | None:
    """None for what is no tensor: the checks say what is wrong."""
    try:
        return tuple(
            x if x is None else (x.dtype, x.get_device(), x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
            for x in tensors
        )
    except AttributeError:
        return None


def forget() -> None:
    """Drops what was prepared: the environment's overrides are read again."""
    calls.clear()


def filled(out: tuple[int, ...], *statistics: tuple[tuple[int, ...], float]) -> Callable[..., Results]:
    """`run` of a call without a query or a key: zeros of shape `out`, and float32 statistics of a shape and a value."""

    def run(q, *arguments):
        return q.new_zeros(out), *(q.new_full(shape, value, dtype=torch.float32) for shape, value in statistics)

    return run


def left_to_flashmla(reason: Exception) -> Prepared:
    """A call that is not served, since the caller's own FlashMLA does it sooner: `run` raises the reason."""

    def run(*arguments):
        raise type(reason)(*reason.args)

    return Prepared(run, None, False)


def on_contiguous(run: Callable[..., Results], tensors: tuple[torch.Tensor | None, ...]) -> Callable[..., Results]:
    """`run`, with copies of those of its first arguments that, like the tensors here, are not contiguous."""
    copied = [i for i, x in enumerate(tensors) if x is not None and not x.is_contiguous()]

    def copying(*arguments):
        return run(*(x.contiguous() if i in copied else x for i, x in enumerate(arguments)))

    return copying if copied else run

"""Rotary embedding and norms in few launches, with transformers' roundings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotary_table(cos: Tensor, sin: Tensor) -> Tensor:
    """What each number of a pair gives to each number of the turned pair: `[..., pairs, 2, 2]` of `[..., pairs]`."""
    return torch.stack((cos, sin, -sin, cos), -1).unflatten(-1, (2, 2))


def turn(x: Tensor, table: Tensor, *, halves: tuple[bool, bool], out: Tensor | None = None) -> Tensor:
    """x `[..., rope]`, turned by a table that broadcasts with its pairs; in x's dtype.

    A number is the sum of two products, each of them rounded to the table's dtype (or x's, if that has more bits), as
    in transformers.

    Args:
      halves: whether the numbers of a pair stand half the width apart, else side by side; in x, and in the result.
      out: takes the result; it may be x.
    """
    products = _pairs(x, halves[0])[..., None] * table
    first, second = products.unbind(-2)
    if out is None:
        turned = (first + second).to(x.dtype)
        return (turned.transpose(-1, -2) if halves[1] else turned).flatten(-2)
    torch.add(first, second, out=_pairs(out, halves[1]))
    return out


def _pairs(x: Tensor, halves: bool) -> Tensor:
    """x as `[..., pairs, 2]`."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else x.unflatten(-1, (-1, 2))


def normed(norm: nn.Module, plain: type[nn.Module], x: Tensor, out: Tensor | None = None) -> Tensor:
    """`norm(x)`, into `out` if it is given.

    Args:
      plain: transformers' class of the norm, whose forward this function knows. Another class, a forward of the
        module's own and hooks are called.
    """
    changed = type(norm) is not plain or "forward" in vars(norm) or norm._forward_hooks or norm._forward_pre_hooks
    if changed or torch.is_grad_enabled():
        result = norm(x)
        return result if out is None else out.copy_(result)
    if norm.weight.dtype == x.dtype:  # the quotient is rounded before the weight multiplies it
        return torch.mul(norm.weight, F.rms_norm(x, x.shape[-1:], None, norm.variance_epsilon), out=out)
    result = F.rms_norm(x.to(norm.weight.dtype), x.shape[-1:], norm.weight, norm.variance_epsilon)
    return result.to(x.dtype) if out is None else out.copy_(result)

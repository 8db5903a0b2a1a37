"""Rows that a layer's cache holds, in memory with room for more: a step writes its own rows and copies no others.

transformers' cache concatenates, which copies all rows in every step. Here its tensors are views of a longer buffer.
Rows that were given out are never written again, so whoever holds a cache's tensors holds what they were: a buffer goes
on only if the cache still has the very tensors that were put there, and rows are copied into a new one otherwise (a
cache that was cropped, reordered, copied or filled by others).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicIndexedLayer, DynamicLayer

_STEP = 256  # capacities are multiples of it
_ROOM = 8  # an eighth of the rows, for more


class _Kept(NamedTuple):
    buffer: Tensor  # [batch, capacity, width]
    parts: tuple[Tensor, ...]  # the cache's tensors, views of the buffer


# By a cache's layer: by name, what it holds.
_KEPT: weakref.WeakKeyDictionary[Any, dict[str, _Kept]] = weakref.WeakKeyDictionary()


def layer_of(cache: Cache | None, index: int) -> Any | None:
    """The layer of a cache whose rows can be kept here; None: the cache's own functions have to be called."""
    if cache is None or cache.offloading or torch.is_grad_enabled() or len(cache.layers) <= index:
        return None
    layer = cache.layers[index]
    return layer if type(layer) in (DynamicLayer, DynamicIndexedLayer) else None


def room(layer: Any | None, name: str, parts: Sequence[Tensor], shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """A buffer `[batch, capacity, width]` that holds a cache's rows and has room for a call's.

    Args:
      layer: of `layer_of`; None: nothing is kept.
      parts: the cache's tensors, `[batch, …, rows, width of the part]`; none where there are no rows yet.
      shape: the batch, the call's rows, and the width.
      like: gives dtype and device.
    """
    (batch, new, width), rows = shape, parts[0].shape[-2] if parts else 0
    kept = _KEPT.get(layer, {}).get(name) if layer is not None and parts else None
    if kept is not None and len(kept.parts) == len(parts) and all(a is b for a, b in zip(kept.parts, parts)):
        frozen = kept.buffer.is_inference() and not torch.is_inference_mode_enabled()
        if rows + new <= kept.buffer.shape[1] and not frozen:
            return kept.buffer
    more = rows + new if layer is None else (rows + new) * (_ROOM + 1) // _ROOM
    buffer = like.new_empty(batch, -(-more // _STEP) * _STEP, width)
    first = 0
    for part in parts:
        buffer[:, :rows, first : first + part.shape[-1]] = part.reshape(batch, rows, -1)
        first += part.shape[-1]
    return buffer


def keep(layer: Any, name: str, buffer: Tensor, parts: tuple[Tensor, ...]) -> None:
    """Remembers that these tensors, which the cache takes now, are views of a buffer of `room`."""
    _KEPT.setdefault(layer, {})[name] = _Kept(buffer, parts)

"""FlashMLA's sanitiser on torch tensors, on the current stream: what its decode kernel does not check itself."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from jax_sparse_mla.attention.flashmla import LEAST_SINK
from jax_sparse_mla.kernels_triton import sanitise as kernels
from sparse_mla_torch.kernels.launch import Launch

# Results of a call that together are no larger go where those of the call before went: five allocations take longer
# than the launch. A larger call keeps the device busy for longer than that.
_WORKSPACE_BYTES = 1 << 20
_MAX_WORKSPACES = 64

Results = tuple[torch.Tensor | None, ...]
Place = tuple[int, int, int]  # device, stream, thread


class Table(NamedTuple):
    """An index table's static facts.

    Attributes:
      topk: its columns.
      width: columns of the result, at least topk.
      num_slots: of its cache.
      has_lengths: whether a length comes with each `rows_per_length` rows.
      keeps_lengths: whether the kernel that reads the result takes lengths.
    """

    topk: int
    width: int
    num_slots: int
    has_lengths: bool
    keeps_lengths: bool = True


class Sanitiser:
    """One launch for one or two tables of `rows` rows and a sink of `heads` heads (0: none) padded to `padded`."""

    def __init__(self, rows: int, rows_per_length: int, tables: list[Table], heads: int, padded: int):
        first, second = self._tables = (*tables, Table(1, 0, 0, False))[:2]
        self._padded = padded if heads else 0
        self._small = 4 * (rows * (first.width + second.width + 2) + padded + 32) <= _WORKSPACE_BYTES
        self._places: dict[Place, Results] = {}
        self._launch = Launch(
            kernels.sanitise_kernel,
            kernels.grid(rows, first.width, second.width),
            (rows, first.num_slots, second.num_slots, heads),
            {
                "TOPK": first.topk,
                "WIDTH": first.width,
                "HAS_LENGTHS": first.has_lengths,
                "EXTRA_TOPK": second.topk,
                "EXTRA_WIDTH": second.width,
                "HAS_EXTRA_LENGTHS": second.has_lengths,
                "HEADS": padded,
                "HAS_SINK": heads > 0,
                "LEAST_SINK": LEAST_SINK,
                "ROWS_PER_LENGTH": rows_per_length,
                **kernels.OPTIONS,
            },
        )

    def __call__(
        self,
        indices: torch.Tensor,
        lengths: torch.Tensor | None,
        extra_indices: torch.Tensor | None = None,
        extra_lengths: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
    ) -> Results:
        """The same made safe; all contiguous, indices int32 `[..., topk]`.

        The results last until the next call on this stream by this thread.
        """
        given = (indices, lengths, extra_indices, extra_lengths, sink)
        results = self._results(given)
        self._launch(given, results)
        return results

    def _results(self, given: Results) -> Results:
        """Where the safe ones go; None where nothing does.

        On one stream, the kernels of one thread's call have read them before those of its next call write them. A
        captured graph is replayed on any stream: it has its own.
        """
        device = given[0].get_device()
        if not self._small or device < 0 or torch.cuda.is_current_stream_capturing():
            return self._carve(given, given[0].new_empty)
        place = (device, torch._C._cuda_getCurrentRawStream(device), threading.get_ident())
        results = self._places.get(place)
        if results is None:
            rest = [_workspace(place)]

            def take(shape, dtype=torch.int32):
                size = math.prod(shape)
                taken, rest[0] = rest[0][:size], rest[0][-(-size // 4) * 4 :]  # 16 bytes
                return taken.view(dtype).view(shape)

            if len(self._places) >= _MAX_WORKSPACES:
                self._places.clear()
            results = self._places[place] = self._carve(given, take)
        return results

    def _carve(self, given: Results, empty: Callable[..., torch.Tensor]) -> Results:
        indices, lengths, extra_indices, extra_lengths, _ = given
        results = []
        for table, x, n in zip(self._tables, (indices, extra_indices), (lengths, extra_lengths)):
            results.append(None if x is None else empty((*x.shape[:-1], table.width)))
            results.append(empty(n.shape) if table.has_lengths and table.keeps_lengths else None)
        results.append(empty((self._padded,), dtype=torch.float32) if self._padded else None)
        return tuple(results)


_workspaces: dict[Place, torch.Tensor] = {}


def _workspace(place: Place) -> torch.Tensor:
    """int32, of one thread on one stream; the allocator lets no other stream have a dropped one."""
    if place not in _workspaces:
        if len(_workspaces) >= _MAX_WORKSPACES:
            _workspaces.clear()
        _workspaces[place] = torch.empty(_WORKSPACE_BYTES // 4, dtype=torch.int32, device=f"cuda:{place[0]}")
    return _workspaces[place]

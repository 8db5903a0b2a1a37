"""Makes indices, lengths and sinks safe for FlashMLA's kernels, which do not check them, on torch tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from jax_sparse_mla.attention.backends.flashmla import LEAST_SINK
from jax_sparse_mla.attention.triton import sanitise as kernels
from jax_sparse_mla.attention.triton.sanitise import Table
from sparse_mla_torch.launch.executor import DirectLaunch

# Results that take no more bytes together are written where those of the call before were, because five allocations
# take longer than the launch. A larger call keeps the device busy for longer than that.
_WORKSPACE_BYTES = 1 << 20
_MAX_WORKSPACES = 64

Results = tuple[torch.Tensor | None, ...]


class Sanitiser:
    """One launch for one or two tables of `rows` rows and a sink of `heads` heads (0: none) padded to `padded`.

    With `keeps_memory` small results go to memory that is kept from call to call; else each call allocates its own.
    """

    def __init__(
        self, rows: int, rows_per_length: int, tables: list[Table], heads: int, padded: int, keeps_memory: bool
    ):
        self._tables = (*tables, kernels.ABSENT)[:2]
        self._padded = padded if heads else 0
        widths = [table.width for table in self._tables if table.rewritten]
        fits = 4 * (rows * (sum(widths) + 2) + padded + 32) <= _WORKSPACE_BYTES
        self._keeps_memory = keeps_memory and fits
        self.again: Callable[..., Results | None] = _never
        launch = kernels.sanitise(
            *(rows, tables), heads=heads, padded_heads=padded, least_sink=LEAST_SINK, rows_per_length=rows_per_length
        )
        self._launch = DirectLaunch(launch)

    def __call__(self, *tensors: torch.Tensor | None) -> Results:
        """`(indices, lengths, extra_indices, extra_lengths, sink)` made safe; None for indices that are not rewritten.

        All are contiguous, indices int32 `[..., topk]`. The results last until the next call on this stream by this
        thread. `again` takes the same and is quicker, but answers None where it knows no results from before.
        """
        return self.again(*tensors) or self._first(tensors)

    def _first(self, tensors: Results) -> Results:
        indices = tensors[0]
        # A captured graph is replayed on any stream: what it writes is its own.
        keeps = self._keeps_memory and indices.is_cuda and not torch.cuda.is_current_stream_capturing()
        results = self._carve(tensors, _Carver(_workspace(indices.get_device())) if keeps else indices.new_empty)
        self._launch(tensors, results)
        if keeps:
            self.again = self._launch.keep(results) or _never
        return results

    def _carve(self, tensors: Results, empty: Callable[..., torch.Tensor]) -> Results:
        indices, lengths, extra_indices, extra_lengths, _ = tensors
        results = []
        for table, x, n in zip(self._tables, (indices, extra_indices), (lengths, extra_lengths)):
            results.append(empty((*x.shape[:-1], table.width)) if x is not None and table.rewritten else None)
            results.append(empty(n.shape) if table.has_lengths and table.keeps_lengths else None)
        results.append(empty((self._padded,), dtype=torch.float32) if self._padded else None)
        return tuple(results)


def _never(*tensors: torch.Tensor | None) -> None:
    return None


class _Carver:
    """Tensors one behind the other in a workspace."""

    def __init__(self, workspace: torch.Tensor):
        self._free = workspace

    def __call__(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        size = math.prod(shape)
        taken, self._free = self._free[:size], self._free[-(-size // 4) * 4 :]  # 16 bytes
        return taken.view(dtype).view(shape)


_workspaces: dict[tuple[int, int, int], torch.Tensor] = {}


def _workspace(device: int) -> torch.Tensor:
    """int32, of this thread on the current stream; the allocator lets no other stream have a dropped one.

    On one stream, the kernels of one thread's call have read it before those of its next call write it.
    """
    key = (device, torch._C._cuda_getCurrentRawStream(device), threading.get_ident())
    workspace = _workspaces.get(key)
    if workspace is None:
        workspace = torch.empty(_WORKSPACE_BYTES // 4, dtype=torch.int32, device=f"cuda:{device}")
        if len(_workspaces) >= _MAX_WORKSPACES:
            _workspaces.clear()  # also another thread's, which has its own hold on it
        _workspaces[key] = workspace
    return workspace

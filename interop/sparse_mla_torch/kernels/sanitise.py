"""FlashMLA's sanitiser on torch tensors, on the current stream: what its decode kernel does not check itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jax_sparse_mla.attention.flashmla import LEAST_SINK
from jax_sparse_mla.kernels_triton import sanitise as kernels
from sparse_mla_torch.kernels.launch import Launch


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
        self._tables, self._heads, self._padded = tables, heads, padded
        first, second = (*tables, Table(1, 0, 0, False))[:2]
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
        self, given: list[tuple[torch.Tensor, torch.Tensor | None]], sink: torch.Tensor | None
    ) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], torch.Tensor | None]:
        """Tables `(indices [..., topk], lengths)` and the sink, made safe; indices int32 and contiguous."""
        inputs, outputs, safe = [], [], []
        for table, (indices, lengths) in zip(self._tables, given):
            if table.width == table.topk:
                out = torch.empty_like(indices)
            else:
                out = indices.new_empty((*indices.shape[:-1], table.width))
            kept = torch.empty_like(lengths) if table.has_lengths and table.keeps_lengths else None
            inputs += (indices, lengths if table.has_lengths else indices)
            outputs += (out, kept)
            safe.append((out, kept))
        if len(given) == 1:  # what is absent is not touched, but has its place among the arguments
            inputs += inputs[:2]
            outputs += (None, None)
        out_sink = None
        if self._heads:
            out_sink = torch.empty_like(sink) if self._padded == self._heads else sink.new_empty(self._padded)
        inputs.append(sink if self._heads else inputs[0])
        outputs.append(out_sink)
        self._launch(inputs, outputs)
        return safe, out_sink

"""Our SM90 decode kernel on torch tensors, through the binary that XLA calls too."""

from __future__ import annotations

import torch
import tvm_ffi

from jax_sparse_mla.kernels import build
from jax_sparse_mla.kernels.sm90.decode_plan import decode_plan
from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope

_PART_DTYPES = (torch.float32, torch.float32, torch.int32)


class Decode:
    """The kernel's launch at one shape."""

    def __init__(
        self,
        rows: int,
        heads: int,
        scopes: tuple[Scope, ...],
        softmax_scale: float,
        device: torch.device,
        sm_count: int,
        *,
        empty_lse: float,
        batch_invariant: bool,
    ):
        plan = decode_plan(
            rows,
            heads,
            tuple(scope.topk for scope in scopes),
            has_lengths=any(scope.rows_per_length for scope in scopes),
            sm_count=sm_count,
            batch_invariant=batch_invariant,
        )
        pages = [x for scope in scopes for x in (scope.num_slots, scope.page_size, scope.page_bytes)]
        self._numbers = (*[*pages, 0, 1, 0][:6], softmax_scale, empty_lse, plan.tile, plan.groups, plan.cuts)
        self._parts = [(s, d) for s, d in zip(plan.part_shapes, _PART_DTYPES)]
        self._device = device
        self._function = build.sparse_decode_module().sparse_decode

    def __call__(
        self,
        q: torch.Tensor,
        tables: list[tuple[torch.Tensor | None, ...]],
        attn_sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Tables are (cache, indices, lengths), one for each scope; all but the caches contiguous."""
        # Bytes, whatever they are said to be: not every exchange of tensors knows FP8.
        tables = [(cache.view(torch.uint8), *rest) for cache, *rest in tables]
        first, second = [*tables, (None, None, None)][:2]
        # The scratch comes from torch's pool, which a graph that captures the call keeps.
        parts = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._parts]
        parts += [None] * (3 - len(parts))
        with tvm_ffi.use_torch_stream():
            self._function(q, *first, *second, attn_sink, *self._numbers, out, lse, *parts)

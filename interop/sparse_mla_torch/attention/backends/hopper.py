"""Our SM90 decode kernel on torch tensors, through the binary that XLA calls too."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jax_sparse_mla.kernels import build
from jax_sparse_mla.kernels.sm90.decode_plan import decode_plan
from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope
from sparse_mla_torch.attention import route
from sparse_mla_torch.attention.backends import into_results
from sparse_mla_torch.attention.call_cache import Results

WRITES_INTO = True
_PART_DTYPES = (torch.float32, torch.float32, torch.int32)


def decode_obstacle(options, layout, scopes, tensors, device) -> str | None:
    """Why the kernel cannot take these tensors; None if it can."""
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in tensors)
    if not aligned or any(scope.page_bytes % 16 for scope in scopes):
        return "its kernel reads 16 bytes at a time: tensors and pages must begin at multiples of 16 bytes"
    return None


def decode(options, q, layout, scopes, has_sink) -> Callable[..., Results]:
    """As `decode.prepare`'s `run`, at one shape."""
    batch, q_len, heads, _ = q.shape
    attend = Decode(
        batch * q_len,
        heads,
        tuple(scopes),
        options.softmax_scale,
        q.device,
        route.device_info(q.device).sm_count,
        empty_lse=options.empty_lse,
        batch_invariant=options.batch_invariant,
    )
    return into_results(attend, len(scopes), (batch, q_len, heads))


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
        import tvm_ffi

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
        self._on_torchs_stream = tvm_ffi.use_torch_stream
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
        with self._on_torchs_stream():
            self._function(q, *first, *second, attn_sink, *self._numbers, out, lse, *parts)

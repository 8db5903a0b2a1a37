"""Our SM90 decode kernel on torch tensors, through the binary that XLA calls too."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jax_sparse_mla.kernels import build
from jax_sparse_mla.kernels.sm90.decode_plan import decode_plan
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
    import tvm_ffi

    batch, q_len, heads, _ = q.shape
    plan = decode_plan(
        batch * q_len,
        heads,
        tuple(scope.topk for scope in scopes),
        has_lengths=any(scope.rows_per_length for scope in scopes),
        sm_count=route.device_info(q.device).sm_count,
        batch_invariant=options.batch_invariant,
    )
    pages = [x for scope in scopes for x in (scope.num_slots, scope.page_size, scope.page_bytes)]
    numbers = (*[*pages, 0, 1, 0][:6], options.softmax_scale, options.empty_lse, plan.tile, plan.groups, plan.cuts)
    some_parts, device = list(zip(plan.part_shapes, _PART_DTYPES)), q.device
    on_torchs_stream, function = tvm_ffi.use_torch_stream, build.sparse_decode_module().sparse_decode

    def attend(q, tables, attn_sink, out, lse):
        # As bytes, because not every exchange of tensors knows FP8.
        tables = [(cache.view(torch.uint8), *rest) for cache, *rest in tables]
        first, second = [*tables, (None, None, None)][:2]
        # The scratch comes from torch's pool, which a graph that captures the call keeps.
        parts = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in some_parts]
        parts += [None] * (3 - len(parts))
        with on_torchs_stream():
            function(q, *first, *second, attn_sink, *numbers, out, lse, *parts)

    return into_results(attend, len(scopes), (batch, q_len, heads))

"""Our Triton kernel on torch tensors: both phases, any layout that it reads, any head count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from jax_sparse_mla.attention.index_table import V_DIM
from jax_sparse_mla.attention.triton import launch as kernels
from jax_sparse_mla.kv_cache.layout import workspace_layout
from jax_sparse_mla.launch.describe import Launch
from sparse_mla_torch.attention.backends import in_base_2
from sparse_mla_torch.attention.call_cache import Results
from sparse_mla_torch.launch.executor import DirectLaunch, launch_device

WRITES_INTO = True
PREFILL_APART = ("indices",)


class Attention:
    """The launches of one call shape on one device, see `kernels.launches`: `attend(q, tables, attn_sink, out, lse)`.

    It allocates the split buffers and nothing else, and neither synchronises nor copies to the host: a CUDA graph
    captures it. Under TRITON_INTERPRET=1 (set before triton is imported) it also runs on CPU tensors, slowly.
    """

    def __init__(self, attend: Launch, combine: Launch | None):
        self._attend = DirectLaunch(attend)
        self._combine = None if combine is None else DirectLaunch(combine)
        self._part_shapes = [x.shape for x in attend.outputs[:2]]

    def __call__(
        self,
        q: torch.Tensor,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
        attn_sink: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        max_logits: torch.Tensor | None = None,
    ) -> None:
        """Tables are `(cache, indices, lengths)`; all tensors contiguous but for the cache's padding behind a page."""
        inputs = kernels.inputs(q, tables, attn_sink)
        if self._combine is None:
            self._attend(inputs, (out, lse, max_logits))
            return
        part_out, part_lse = (q.new_empty(shape, dtype=torch.float32) for shape in self._part_shapes)
        self._attend(inputs, (part_out, part_lse, None))
        self._combine((part_out, part_lse, inputs[-1]), (out, lse))


def decode(options, q, layout, tables, has_sink) -> Callable[..., Results]:
    """As `decode.prepare`'s `run`, at one shape."""
    batch, q_len, heads, _ = q.shape
    shape = kernels.CallShape(layout, batch * q_len, heads, tuple(tables), options.softmax_scale, has_sink)
    launches = kernels.launches(
        shape, launch_device(q.device), empty_is_inf=options.empty_lse > 0, may_split=not options.batch_invariant
    )
    attend = Attention(*launches)

    def run(q, *arguments):
        *call_tables, attn_sink, _, into = arguments
        q = q.contiguous()
        out, lse = into or (None, None)
        if out is None:
            out = q.new_empty((batch, q_len, heads, V_DIM))
        if lse is None:
            lse = q.new_empty((batch, q_len, heads), dtype=torch.float32)
        attend(q, (call_tables[:3], call_tables[3:])[: len(tables)], attn_sink, out, lse)
        return out, lse.transpose(1, 2)

    return run


def prefill(options, q, table, has_sink) -> Callable[..., Results]:
    """As `prefill.prepare`'s `run`, at one shape."""
    q_len, heads, qk_dim = q.shape
    shape = kernels.CallShape(workspace_layout(qk_dim), q_len, heads, (table,), options.softmax_scale, has_sink)
    launches = kernels.launches(
        shape, launch_device(q.device), empty_is_inf=options.empty_lse > 0, max_logits=True, may_split=False
    )
    attend = Attention(*launches)

    def run(q, kv, indices, lengths, attn_sink, into):
        out, *statistics = into or (None, None, None)
        if out is None:
            out = q.new_empty((q_len, heads, V_DIM))
        max_logits, lse = (q.new_empty((q_len, heads), dtype=torch.float32) if x is None else x for x in statistics)
        attend(q, [(kv, indices, lengths)], attn_sink, out, lse, max_logits)
        return in_base_2((out, max_logits, lse)) if options.log2 else (out, max_logits, lse)

    return run

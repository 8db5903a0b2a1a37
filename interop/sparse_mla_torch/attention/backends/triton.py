"""The Triton kernel of `jax_sparse_mla` on torch tensors, launched on torch's current stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jax_sparse_mla.kernels.triton.sparse_mla import launch as kernels
from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope
from jax_sparse_mla.kv_cache.layout import KVLayout
from sparse_mla_torch.kernels.launch import DirectLaunch, device_facts


class Attention:
    """The launches of one call shape on one device, see `kernels.launches`: `attend(q, tables, attn_sink, out, lse)`.

    It allocates the split buffers and nothing else, and neither synchronises nor copies to the host: a CUDA graph
    captures it. Under TRITON_INTERPRET=1 (set before triton is imported) it also runs on CPU tensors, slowly.
    """

    def __init__(
        self,
        layout: KVLayout,
        rows: int,
        heads: int,
        scopes: tuple[Scope, ...],
        softmax_scale: float,
        has_sink: bool,
        device: torch.device,
        **options,
    ):
        facts = device_facts(device)
        attend, combine = kernels.launches(layout, rows, heads, scopes, softmax_scale, has_sink, facts, **options)
        self._attend = DirectLaunch(attend)
        self._combine = None if combine is None else DirectLaunch(combine)
        self._some_shapes = [x.shape for x in attend.outputs[:2]]

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
        some_out, some_lse = (q.new_empty(shape, dtype=torch.float32) for shape in self._some_shapes)
        self._attend(inputs, (some_out, some_lse, None))
        self._combine((some_out, some_lse, inputs[-1]), (out, lse))

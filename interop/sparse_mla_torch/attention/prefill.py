"""Prefill over a bf16 workspace on torch tensors, in FlashMLA's shapes, by the kernel that suits the call.

On CUDA that is FlashMLA's operator or our Triton kernel, on torch's current stream, with no JAX in between; CPU tensors
go to the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from jax_sparse_mla.argument_checks import BF16, FLOAT32
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.index_table import V_DIM, TableShape
from jax_sparse_mla.kv_cache.layout import workspace_layout
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.attention.call_cache import Prepared, filled, left_to_flashmla, on_contiguous
from sparse_mla_torch.operations.checks import TensorChecks, check_scale


class Options(NamedTuple):
    """As `decode.Options`; `log2`: max_logits and lse in base 2."""

    function: str
    softmax_scale: float
    empty_lse: float
    log2: bool = False
    assume_valid_indices: bool = False
    beside_flashmla: bool = False
    keeps_memory: bool = True


def prepare(options: tuple, *tensors: torch.Tensor | None) -> Prepared:
    """A call of these shapes; all tensors on one device, the current one.

    Args:
      options: the fields of `Options`.
      tensors: q, kv, indices, lengths and attn_sink, as `flash_mla.flash_mla_sparse_fwd` takes them.

    Returns:
      `run(*tensors, into)`, `into` None or `(out, max_logits, lse)` to write into, contiguous; it returns out
      `[q_len, heads, 512]`, max_logits and lse `[q_len, heads]`.
    """
    return call_cache.find(options, tensors) or call_cache.add(options, tensors, _new)


def _new(options: tuple, *tensors: torch.Tensor | None) -> Prepared:
    options = Options(*options)
    q, kv, indices, lengths, attn_sink = tensors
    check = TensorChecks(options.function, q)
    options = options._replace(softmax_scale=check_scale(options.function, options.softmax_scale))
    q_len, heads, qk_dim = check.strided("q", q, (None,) * 3, BF16).shape
    if qk_dim not in (512, 576):
        raise check.fail(f"q must have rows of 512 or 576 values, got {qk_dim}")
    kv_len = len(check.strided("kv", kv, (None, 1, qk_dim), BF16))
    topk = check.strided("indices", indices, (q_len, 1, None)).shape[-1]
    if lengths is not None:
        check.strided("topk_length", lengths, (q_len,))
    if attn_sink is not None:
        check.strided("attn_sink", attn_sink, (heads,), FLOAT32)
    device = route.device_info(q.device)
    call = Call("prefill", workspace_layout(qk_dim), q_len, max(heads, 1), device, topk)
    try:
        plan = route.plan(call, *tensors, beside_flashmla=options.beside_flashmla)
    except route.FasterAlone as reason:
        return left_to_flashmla(reason)
    backend = route.backend_module(plan.backend)
    empty = 0 in (q_len, heads, topk, kv_len)
    table = TableShape(topk, int(lengths is not None), kv_len)
    if empty:
        run = filled((q_len, heads, V_DIM), ((q_len, heads), -torch.inf), ((q_len, heads), options.empty_lse))
    else:
        run = backend.prefill(options, q, table, attn_sink is not None)
    return Prepared(on_contiguous(run, tensors), plan, backend.WRITES_INTO and not empty)

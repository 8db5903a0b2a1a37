"""Prefill over a bf16 workspace on torch tensors, in FlashMLA's shapes, by the kernel that suits the call.

On CUDA that is a kernel of ours or FlashMLA's operator, on torch's current stream, with no JAX in between; CPU tensors
go to the reference.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from jax_sparse_mla.argument_checks import BF16, FLOAT32, FLOATS
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.attention.index_table import V_DIM, TableShape
from jax_sparse_mla.attention.machine import override_of
from jax_sparse_mla.kv_cache.layout import workspace_layout
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.attention.backends import heads_apart
from sparse_mla_torch.attention.call_cache import Prepared, filled, left_to_flashmla, on_contiguous
from sparse_mla_torch.attention.decode import row_stride
from sparse_mla_torch.launch import launcher
from sparse_mla_torch.operations.checks import TensorChecks, check_scale

_TENSORS = ("q", "kv", "indices", "lengths", "attn_sink")


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
    floats = BF16 if q.is_cuda else FLOATS  # the reference computes in float32 too
    q_len, heads, qk_dim = check.strided("q", q, (None,) * 3, floats).shape
    if qk_dim not in (512, 576):
        raise check.fail(f"q must have rows of 512 or 576 values, got {qk_dim}")
    kv_len = len(check.strided("kv", kv, (None, 1, qk_dim), floats))
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
    table = TableShape(topk, int(lengths is not None), kv_len, stride=row_stride(indices))
    if empty:
        run = filled((q_len, heads, V_DIM), ((q_len, heads), -torch.inf), ((q_len, heads), options.empty_lse))
    else:
        run = backend.prefill(options, q, table, attn_sink is not None)
    taken = {"q": heads_apart(q) > 0, "indices": table.stride > 0}
    copied = [None if taken.get(name) and name in backend.PREFILL_APART else x for name, x in zip(_TENSORS, tensors)]
    return Prepared(on_contiguous(run, copied), plan, backend.WRITES_INTO and not empty)


def attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    empty_lse: float = -math.inf,
) -> call_cache.Results:
    """`ops.sparse_mla_prefill` itself, without torch's dispatch of an operator and without a gradient."""
    options = Options("sparse_mla_prefill", softmax_scale, empty_lse, keeps_memory=False)
    tensors = (q, kv.unsqueeze(1), indices.unsqueeze(1), topk_length, attn_sink)
    with torch.cuda.device_of(q):
        return prepare(options, *tensors).run(*tensors, None)


def is_hopper_s(device: torch.device) -> bool:
    """Whether our SM90 kernels prefill on a device."""
    able = "hopper" not in route.unable_for("prefill", route.device_info(device))
    return able and override_of("prefill") in (None, "hopper")


def warm_up(*shapes: tuple[int, int], device: torch.device | None = None) -> None:
    """Compiles and loads what prefill of these shapes launches, so that no later call does.

    A serving engine calls it before requests come. On SM90 seven kernels serve every call, whatever its rows, keys and
    columns: for up to 8, 16, 32 or any number of heads with keys of 512 values, and for up to 8, 16 or any number with
    576. Each takes seconds of a core, once on a machine (several are compiled side by side), and then milliseconds in
    a process. Triton, which serves other GPUs, compiles at the first call of new shapes: nothing is done for it.

    Args:
      shapes: `(heads, head_dim)` of the queries of a rank: head_dim 576 for DeepSeek-V3.2 and GLM-5, 512 for V4; heads
        also as a caller pads them. Without any, all seven kernels.
      device: with its index; the current one by default.
    """
    if not torch.cuda.is_available():
        return
    index = torch.cuda.current_device() if device is None else torch.device(device).index
    if not is_hopper_s(torch.device("cuda", index)):
        return
    shapes = shapes or tuple((most or 64, qk_dim) for most, qk_dim in alone.KERNELS.values())
    function = route.backend_module("hopper").prefill_function
    with ThreadPoolExecutor(len(shapes)) as threads:
        list(threads.map(lambda shape: function(*shape, index), shapes))
    launcher.module()

"""The gradient of prefill on torch tensors, by the kernels and formulas of `jax_sparse_mla.attention.gradient`.

On CUDA they run on torch's current stream, with no JAX in between. CPU tensors go to the reference, which JAX
differentiates, as does every call where the environment names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import torch
from torch import Tensor

from jax_sparse_mla.attention import gradient
from jax_sparse_mla.attention.backend import GRADIENT_BACKENDS, GradientArrays, GradientCall
from jax_sparse_mla.attention.gradient import Arrays
from jax_sparse_mla.attention.machine import override_of
from jax_sparse_mla.backend import first_able
from jax_sparse_mla.launch import build
from sparse_mla_torch.attention import route
from sparse_mla_torch.bridge import call
from sparse_mla_torch.operations.checks import are_aligned

_by_reference = jax.jit(gradient.by_reference, static_argnames="softmax_scale")


def gradients(arrays: Arrays, softmax_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq, dkv and dsink (None without a sink) of tensors on one device, the current one; new memory.

    An lse of either infinity is that of a row without a key.
    """
    arrays = Arrays(*map(_dense, arrays))
    q, kv, indices, _, attn_sink, *_ = arrays
    if 0 in (q.numel(), kv.numel(), indices.numel()):
        return torch.zeros_like(q), torch.zeros_like(kv), None if attn_sink is None else torch.zeros_like(attn_sink)
    if not q.is_cuda or override_of("prefill") == "reference":
        found = call(_by_reference, arrays, softmax_scale=softmax_scale)
        return tuple(None if x is None else x.clone() for x in found)  # JAX's memory is not to be written to
    return by_kernel(arrays, softmax_scale, deterministic)


def by_kernel(arrays: Arrays, softmax_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `gradients`, by the first kernel of `GRADIENT_BACKENDS` that can."""
    from jax_sparse_mla.attention.triton import backward as kernels
    from sparse_mla_torch.launch.executor import executor

    q, kv, indices, lengths, attn_sink, out, lse, g_out, g_lse = arrays
    execute = executor(q.device)
    factor, offset, of_sink = kernels.statistics(execute, attn_sink, out, lse, g_out, g_lse)
    scales = key_scales(q, kv, g_out, offset, softmax_scale) if deterministic else None
    of_kernel = GradientArrays(q, kv, indices, lengths, g_out, lse, factor, offset, scales)
    name = _kernel(GradientCall(route.device_info(q.device), q.shape[-1], deterministic))
    backward = {"hopper": _on_sm90, "triton": kernels.backward}[name]
    dq, dkv = backward(execute, of_kernel, softmax_scale=softmax_scale)
    if deterministic:
        dkv = dkv.view(torch.int64) / scales[:, None].double()
    return dq, dkv.to(kv.dtype), None if of_sink is None else of_sink.sum(0)


@functools.cache
def _kernel(call: GradientCall) -> str:
    return first_able(GRADIENT_BACKENDS, call, "gradient", "torch").name


def _on_sm90(execute: Callable, arrays: GradientArrays, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """dq, and dkv in bfloat16, by `kernels_cuda/sparse_backward/`; `hopper/backward.py` says how its columns stand."""
    import tvm_ffi

    q, kv, *_ = arrays
    dq, sums, dkv = torch.empty_like(q), torch.empty_like(kv, dtype=torch.float32), torch.empty_like(kv)
    library = build.module(*GRADIENT_BACKENDS["hopper"].binaries["gradient"])
    with tvm_ffi.use_torch_stream():
        library.sparse_backward(*arrays[:-1], softmax_scale, dq, sums)
    dkv.view(-1, 2, 4, 2).copy_(sums.view(-1, 4, 2, 2).transpose(1, 2))
    return dq, dkv


def key_scales(q: Tensor, kv: Tensor, g_out: Tensor, offset: Tensor, softmax_scale: float) -> Tensor:
    """`key_scales` of `jax_sparse_mla.attention.gradient`."""
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    rows, heads, _ = q.shape
    value, longest = norm(kv[:, : g_out.shape[-1]], dim=-1), norm(g_out, dim=-1).amax()
    largest, furthest, query = (norm(x, ord=torch.inf) for x in (g_out, offset, q))
    most = 2.0 * rows * heads * (abs(softmax_scale) * (longest * value + furthest) * query + largest)
    _, exponent = torch.frexp(most)
    exponent = torch.where(torch.isfinite(most), exponent, gradient.LARGEST_EXPONENT)
    exponent = (gradient.FIXED_POINT_BITS - exponent).clamp(-126, 126).int()
    scales = ((exponent + 127) << 23).view(torch.float32)  # a power on a GPU is not exact
    return torch.where(torch.isfinite(longest + largest + furthest + query), scales, torch.nan)


def _dense(x: Tensor | None) -> Tensor | None:
    """The tensor as kernels read it: contiguous, at a multiple of 16 bytes."""
    if x is None:
        return None
    x = x.detach().contiguous()
    return x if are_aligned([x]) else x.clone()

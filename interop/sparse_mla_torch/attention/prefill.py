"""Prefill over a bf16 workspace on torch tensors, in FlashMLA's shapes, by the kernel that suits the call.

On CUDA that is FlashMLA's operator or our Triton kernel, on torch's current stream, with no JAX in between; CPU tensors
go to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope, workspace_layout
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.attention.call_cache import Prepared, Results, contiguous
from sparse_mla_torch.kernels.checks import BF16, FLOAT32, check_scale, check_strided

V_DIM = 512
_LOG2_E = 1.4426950408889634


class Options(NamedTuple):
    """As `decode.Options`; `log2`: max_logits and lse in base 2."""

    function: str
    softmax_scale: float
    empty_lse: float
    log2: bool = False
    assume_valid_indices: bool = False
    keeps_memory: bool = True


def prepare(
    options: tuple,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
) -> Prepared:
    """A call of these shapes; all tensors on one device, the current one.

    Args:
      options: the fields of `Options`.
      q: bfloat16 `[q_len, heads, qk_dim]`, qk_dim 512 or 576.
      kv: bfloat16 `[kv_len, 1, qk_dim]`.
      indices: int32 `[q_len, 1, topk]`.
      lengths: int32 `[q_len]`.
      attn_sink: float32 `[heads]`.

    Returns:
      `run(q, kv, indices, lengths, attn_sink, into)`, `into` None or `(out, max_logits, lse)` to write into,
      contiguous; it returns out `[q_len, heads, 512]`, max_logits and lse `[q_len, heads]`.
    """
    tensors = (q, kv, indices, lengths, attn_sink)
    return call_cache.find(options, tensors) or call_cache.add(options, tensors, _new)


def _new(options: tuple, *tensors: torch.Tensor | None) -> Prepared:
    options = Options(*options)
    function, (q, kv, indices, lengths, attn_sink) = options.function, tensors
    options = options._replace(softmax_scale=check_scale(function, options.softmax_scale))
    q_len, heads, qk_dim = check_strided(function, "q", q, (None,) * 3, q, BF16)
    if qk_dim not in (512, 576):
        raise ValueError(f"{function}: q must have rows of 512 or 576 values, got {qk_dim}")
    kv_len = check_strided(function, "kv", kv, (None, 1, qk_dim), q, BF16)[0]
    topk = check_strided(function, "indices", indices, (q_len, 1, None), q)[-1]
    if lengths is not None:
        check_strided(function, "topk_length", lengths, (q_len,), q)
    if attn_sink is not None:
        check_strided(function, "attn_sink", attn_sink, (heads,), q, FLOAT32)
    layout = workspace_layout(qk_dim)
    device = route.device_info(q.device)
    against = {}
    if device.platform == "cuda":
        from sparse_mla_torch.attention.backends import flashmla

        why = flashmla.prefill_obstacle(q, kv, indices)
        against = {"hopper": "its prefill is JAX's alone"} | ({"flashmla": why} if why else {})
    override = route.override_of("prefill")
    plan = route.plan_call(
        "prefill",
        layout,
        rows=q_len,
        heads=max(heads, 1),
        topk=topk,
        device=device,
        installed=route.candidates(q.device.type, override),
        against=against,
        override=override,
    )
    make = {"reference": _reference, "triton": _triton, "flashmla": _flashmla}[plan.backend]
    if 0 in (q_len, heads, topk, kv_len):
        make = _nothing
    run = make(options, q, Scope(topk, int(lengths is not None), kv_len), attn_sink is not None)
    if make is not _nothing and not all(x is None or x.is_contiguous() for x in tensors):
        run = _on_contiguous(run)
    return Prepared(run, plan, make is _triton)


def _on_contiguous(run: Callable[..., Results]) -> Callable[..., Results]:
    """`run` on copies of the tensors that are not."""

    def copying(*tensors_and_into):
        *tensors, into = tensors_and_into
        return run(*map(contiguous, tensors), into)

    return copying


def _nothing(options, q, scope, has_sink) -> Callable[..., Results]:
    q_len, heads, _ = q.shape

    def run(q, *tensors):
        max_logits = q.new_full((q_len, heads), -torch.inf, dtype=torch.float32)
        return q.new_zeros((q_len, heads, V_DIM)), max_logits, torch.full_like(max_logits, options.empty_lse)

    return run


def _triton(options, q, scope, has_sink) -> Callable[..., Results]:
    from sparse_mla_torch.attention.backends.triton import Attention

    q_len, heads, qk_dim = q.shape
    attend = Attention(
        *(workspace_layout(qk_dim), q_len, heads, (scope,)),
        options.softmax_scale,
        has_sink,
        q.device,
        empty_is_inf=options.empty_lse > 0,
        may_split=False,
    )

    def run(q, kv, indices, lengths, attn_sink, into):
        if into is None:
            out = q.new_empty((q_len, heads, V_DIM))
            into = (out, *(q.new_empty((q_len, heads), dtype=torch.float32) for _ in range(2)))
        out, max_logits, lse = into
        attend(q, [(kv, indices, lengths)], attn_sink, out, lse, max_logits)
        return _in_base_2(into) if options.log2 else into

    return run


def _flashmla(options, q, scope, has_sink) -> Callable[..., Results]:
    from sparse_mla_torch.attention.backends import flashmla

    attend = flashmla.prefill(
        *(q.shape[0], q.shape[1], scope, options.softmax_scale, has_sink, options.assume_valid_indices),
        *(options.log2, options.keeps_memory, route.device_info(q.device)),
    )
    if options.empty_lse > 0:
        return attend

    def run(*tensors):
        out, max_logits, lse = attend(*tensors)
        return out, max_logits, lse.masked_fill(torch.isposinf(lse), options.empty_lse)

    return run


def _reference(options, q, scope, has_sink) -> Callable[..., Results]:
    from jax_sparse_mla import sparse_mla_prefill
    from sparse_mla_torch.bridge import call

    def run(q, kv, indices, lengths, attn_sink, into):
        arguments = {"kv": kv[:, 0], "indices": indices[:, 0], "topk_length": lengths, "attn_sink": attn_sink}
        arguments = {name: x if x is None else x.detach().contiguous() for name, x in arguments.items()}
        results = call(
            sparse_mla_prefill,
            q.detach().contiguous(),
            **arguments,
            softmax_scale=options.softmax_scale,
            backend="reference",
        )
        out, max_logits, lse = (x.clone() for x in results)  # JAX's memory is not to be written to
        lse.masked_fill_(torch.isneginf(lse), options.empty_lse)
        return _in_base_2((out, max_logits, lse)) if options.log2 else (out, max_logits, lse)

    return run


def _in_base_2(results: Results) -> Results:
    out, max_logits, lse = results
    return out, max_logits.mul_(_LOG2_E), lse.mul_(_LOG2_E)

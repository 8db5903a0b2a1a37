"""Custom operators for `torch.compile` and `torch.export`: `torch.ops.jax_sparse_mla.*`.

Each is the function of its name in `jax_sparse_mla`, with its conventions (lse −inf on a row without a key), and has a
fake implementation, so graphs that contain it are traced without a device. `write_kv` and `split_pages` declare the
argument that they write. `sparse_mla_prefill` differentiates, the others do not. CUDA tensors go to the kernels, on the
current stream; CPU tensors to the JAX functions.

Caches have FlashMLA's shape, uint8, int8 or float8_e4m3fn `[pages, page_size, 1, bytes_per_token]`. The last size
selects the layout (656: V3.2, 584: V4; 1152 and 1024 in bfloat16), or `kv_layout` names it, such as "V41_FP8": 528 and
288 bytes are those of several.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import Tensor

import jax_sparse_mla
from jax_sparse_mla import attention
from jax_sparse_mla.attention.index_table import V_DIM
from jax_sparse_mla.indices.merge import merged_width
from jax_sparse_mla.kv_cache import PagedKV
from sparse_mla_torch.attention import decode, gradient, pages, prefill
from sparse_mla_torch.attention.call_cache import Schedule
from sparse_mla_torch.bridge import call
from sparse_mla_torch.operations.checks import TensorChecks


def _operator(fake: Callable[..., Any], mutates: tuple[str, ...] = ()) -> Callable:
    """Registers a function as the operator of its name; `fake` gives the shapes of its results."""

    def register(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"jax_sparse_mla::{function.__name__}", function, mutates_args=mutates)
        operator.register_fake(fake)
        return operator

    return register


def _float32(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _fake_decode(q, *args, **kwargs):
    return q.new_empty((*q.shape[:3], V_DIM)), _float32(q, q.shape[:3])


@_operator(_fake_decode)
def sparse_mla_decode(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    batch_invariant: bool = False,
    assume_valid_indices: bool = False,
    empty_lse_is_inf: bool = False,
    kv_layout: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`jax_sparse_mla.sparse_mla_decode`: out `[batch, q_len, heads, 512]`, lse float32 `[batch, q_len, heads]`.

    `batch_invariant` and `assume_valid_indices` as in `flash_mla.flash_mla_with_kvcache`; `empty_lse_is_inf` takes
    FlashMLA's lse of a row without a key. `kv_layout` names the layout of k_cache; the extra cache then has the same
    one, or the one of its bytes that goes beside it.
    """
    empty_lse = math.inf if empty_lse_is_inf else -math.inf
    options = decode.Options(
        *("sparse_mla_decode", softmax_scale, empty_lse, batch_invariant, assume_valid_indices),
        keeps_memory=False,
        kv_layout=kv_layout,
    )
    tensors = (q, k_cache, indices, topk_length, extra_k_cache, extra_indices, extra_topk_length, attn_sink)
    with torch.cuda.device_of(q):
        out, lse = decode.prepare(options, *tensors).run(*tensors, Schedule(), None)
    return out, lse.transpose(1, 2).contiguous()


def _fake_prefill(q, *args, **kwargs):
    return q.new_empty((*q.shape[:2], V_DIM)), _float32(q, q.shape[:2]), _float32(q, q.shape[:2])


@_operator(_fake_prefill)
def sparse_mla_prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    empty_lse_is_inf: bool = False,
    deterministic_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`jax_sparse_mla.sparse_mla_prefill`: kv `[kv_len, qk_dim]`, indices `[q_len, topk]`.

    `torch.autograd` differentiates out and lse in q, kv and attn_sink, once; max_logits are statistics. With
    `deterministic_gradient`, or under `torch.use_deterministic_algorithms`, the gradient in kv repeats to the bit.
    """
    empty_lse = math.inf if empty_lse_is_inf else -math.inf
    return prefill.attend(q, kv, indices, softmax_scale, topk_length, attn_sink, empty_lse)


def _fake_gradients(q, kv, indices, topk_length, attn_sink, *args, **kwargs):
    return q.new_empty(q.shape), kv.new_empty(kv.shape), _float32(q, (0,) if attn_sink is None else attn_sink.shape)


@_operator(_fake_gradients)
def _sparse_mla_prefill_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    g_out: Tensor,
    g_lse: Tensor,
    softmax_scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, kv and the sink (empty without one); an operator, so that a compiled graph has it whole."""
    with torch.cuda.device_of(q):
        arrays = gradient.Arrays(q, kv, indices, topk_length, attn_sink, out, lse, g_out, g_lse)
        dq, dkv, dsink = gradient.gradients(arrays, softmax_scale, deterministic)
    return dq, dkv, q.new_empty(0, dtype=torch.float32) if dsink is None else dsink


def _save(ctx, inputs, output) -> None:
    q, kv, indices, ctx.softmax_scale, topk_length, attn_sink, _, ctx.deterministic = inputs
    out, max_logits, lse = output
    ctx.has_sink = attn_sink is not None
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(q, kv, indices, topk_length, attn_sink, out, lse)


def _pull(ctx, g_out: Tensor, _, g_lse: Tensor) -> tuple:
    deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    saved = *ctx.saved_tensors, g_out, g_lse
    dq, dkv, dsink = _sparse_mla_prefill_backward(*saved, ctx.softmax_scale, deterministic)
    return dq, dkv, None, None, None, dsink if ctx.has_sink else None, None, None


sparse_mla_prefill.register_autograd(_pull, setup_context=_save)


@_operator(lambda q, kv, indices, *args, **kwargs: _float32(q, indices.shape))
def sparse_mla_prefill_probabilities(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    softmax_scale: float,
    topk_length: Tensor | None = None,
) -> Tensor:
    """`jax_sparse_mla.attention.sparse_mla_prefill_probabilities`, the teacher of an indexer; it has no gradient."""
    tensors = (None if x is None else x.detach().contiguous() for x in (q, kv, indices, lse, topk_length))
    q, kv, indices, lse, topk_length = tensors
    options = {"softmax_scale": softmax_scale, "topk_length": topk_length}
    if not q.is_cuda:
        return call(attention.sparse_mla_prefill_probabilities, q, kv, indices, lse, **options).clone()
    with torch.cuda.device_of(q):
        from sparse_mla_torch.operations import probabilities

        return probabilities.sparse_mla_prefill_probabilities(q, kv, indices, lse, **options)


sparse_mla_prefill_probabilities.register_autograd(
    lambda ctx, grad: (None,) * 6, setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output)
)


@_operator(lambda *args, **kwargs: None, mutates=("k_cache",))
def write_kv(
    k_cache: Tensor, slots: Tensor, kv: Tensor, kv_layout: str | None = None, quantizer: str | None = None
) -> None:
    """`jax_sparse_mla.write_kv`, in place; `quantizer` is the engine of `KVLayout.written_by`."""
    cache = _paged("write_kv", k_cache, kv_layout)
    if quantizer is not None:
        cache = dataclasses.replace(cache, layout=cache.layout.written_by(quantizer))
    _store(k_cache, _run("kv_cache", "write_kv", k_cache.device, cache, slots, kv))


def _fake_gather(k_cache, slots, kv_layout=None):
    layout = pages.LAYOUTS[int(k_cache.shape[-1])] if kv_layout is None else pages.NAMED_LAYOUTS[kv_layout]
    return k_cache.new_empty((slots.shape[0], layout.qk_dim), dtype=torch.bfloat16)


@_operator(_fake_gather)
def gather_kv(k_cache: Tensor, slots: Tensor, kv_layout: str | None = None) -> Tensor:
    """`jax_sparse_mla.gather_kv`: bfloat16 `[n, qk_dim]`, zeros for an invalid slot."""
    return _run("kv_cache", "gather_kv", k_cache.device, _paged("gather_kv", k_cache, kv_layout), slots)


@_operator(lambda *args, **kwargs: None, mutates=("out",))
def split_pages(k_cache: Tensor, out: Tensor, slots: Tensor | None = None, kv_layout: str | None = None) -> None:
    """`jax_sparse_mla.split_pages`, into `out`, in place: `[pages · r, page_size / r, 1, bytes_per_token]`.

    Slots are int32 of any shape: the pages that they touch are copied; None: all pages.
    """
    if slots is None:
        slots = torch.arange(0, k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1]).to(k_cache.device, torch.int32)
    cache, split = (_paged("split_pages", x, kv_layout) for x in (k_cache, out))
    if k_cache.is_cuda:
        _run("kv_cache", "split_pages", k_cache.device, cache, split, slots)
    else:
        _store(out, call(jax_sparse_mla.split_pages, cache, split.page_size, slots=slots.contiguous(), out=split))


@_operator(lambda outs, lses: (outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])))
def merge_attention(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """`jax_sparse_mla.merge_attention` of stacked parts: `[parts, ..., heads, v_dim]` and `[parts, ..., heads]`."""
    return _run("merge", "merge_attention", outs.device, outs, lses)


@_operator(lambda out, lse, attn_sink: out.new_empty(out.shape))
def apply_attn_sink(out: Tensor, lse: Tensor, attn_sink: Tensor) -> Tensor:
    """`jax_sparse_mla.apply_attn_sink`."""
    return _run("merge", "apply_attn_sink", out.device, out, lse, attn_sink)


def _fake_merged(like: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    return like.new_empty((like.shape[0], merged_width(columns))), like.new_empty(like.shape[:1])


@_operator(lambda swa, swa_lengths, extra, *lengths: _fake_merged(swa, swa.shape[1] + extra.shape[1]))
def combine_swa_extra_indices(
    swa_indices: Tensor, swa_lengths: Tensor, extra_indices: Tensor, extra_lengths: Tensor, num_swa_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """`jax_sparse_mla.combine_swa_extra_indices`; `num_swa_rows` is an int32 tensor of no dimension."""
    tensors = swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows
    return _run("indices", "combine_swa_extra_indices", swa_indices.device, *tensors)


def _fake_topk_swa(topk_indices, *requests_and_sizes, **names):
    window, _, topk = requests_and_sizes[-3:] if not names else (names["window"], 0, names["topk"])
    return _fake_merged(topk_indices, topk + window)


@_operator(_fake_topk_swa)
def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    query_pos: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    compressed_base: Tensor,
    swa_base: Tensor,
    window: int,
    compress_ratio: int,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """`jax_sparse_mla.combine_topk_swa_indices`."""
    tensors = topk_indices, query_start_loc, query_pos, seq_lens, gather_lens, compressed_base, swa_base
    return _run(
        *("indices", "combine_topk_swa_indices", topk_indices.device, *tensors),
        window=window,
        compress_ratio=compress_ratio,
        topk=topk,
    )


def _paged(function: str, k_cache: Tensor, kv_layout: str | None) -> PagedKV:
    """A cache as `_run` takes it: the same memory, each page a row of bytes.

    For JAX, on a CPU, it is a copy if its pages are not dense and padded as the layout says.
    """
    check = TensorChecks(function, k_cache)
    num_pages, page_size, _, width = check.strided("k_cache", k_cache, (None, None, 1, None), pages.CACHE_DTYPES).shape
    if kv_layout is None and width not in pages.LAYOUTS:
        raise check.fail(f"k_cache must have {', '.join(map(str, pages.LAYOUTS))} bytes, got {width}, or a kv_layout")
    layout = pages.layout_of(function, "k_cache", k_cache, kv_layout)
    if not k_cache.is_cuda:
        return PagedKV(data=pages.page_rows(k_cache, layout), layout=layout, page_size=page_size)
    if not pages.has_dense_pages(k_cache):
        raise check.fail(f"k_cache's pages must each be dense, got strides {list(k_cache.stride())}")
    rows = k_cache.view(torch.uint8).as_strided((num_pages, page_size * width), (k_cache.stride(0), 1))
    return PagedKV(data=rows, layout=layout, page_size=page_size)


def _store(k_cache: Tensor, written: PagedKV) -> None:
    """Puts JAX's result into the cache; a kernel has written it in place."""
    if not k_cache.is_cuda:
        k_cache.view(torch.uint8).copy_(pages.pages_of(written.data, written.layout, written.page_size))


def _run(module: str, name: str, device: torch.device, *arguments: Tensor | PagedKV, **options: int) -> Any:
    """Calls the function of this name: in a module of `operations` on CUDA, in `jax_sparse_mla` elsewhere."""
    arguments = [x.contiguous() if isinstance(x, Tensor) else x for x in arguments]
    if device.type != "cuda":
        # Copies, because the results are JAX's memory, which must not be written to.
        return jax.tree.map(torch.clone, call(getattr(jax_sparse_mla, name), *arguments, **options))
    operations = importlib.import_module(f"sparse_mla_torch.operations.{module}")
    with torch.cuda.device(device):
        return getattr(operations, name)(*arguments, **options)

"""Custom operators for `torch.compile` and `torch.export`: `torch.ops.jax_sparse_mla.*`.

Each has a fake implementation, so graphs that contain it are traced without a device. `write_kv` and `split_pages`
declare the argument that they write. None has a gradient.

Caches have FlashMLA's shape, uint8, int8 or float8_e4m3fn `[pages, page_size, 1, bytes_per_token]`. The last size
selects the layout (656: V3.2, 584: V4; 1152 and 1024 in bfloat16), or `kv_layout` names it: 528 and 288 bytes are
those of several. Conventions are those of `jax_sparse_mla` (lse −inf
on a row without a key). CUDA tensors go to the kernels, on the current stream; CPU tensors to the JAX functions of the
same names.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import torch

import jax_sparse_mla
from jax_sparse_mla.attention.index_table import V_DIM
from jax_sparse_mla.indices.merge import merged_width
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from sparse_mla_torch.attention import decode, prefill
from sparse_mla_torch.attention.call_cache import Schedule
from sparse_mla_torch.bridge import call
from sparse_mla_torch.operations.checks import check_strided


@torch.library.custom_op("jax_sparse_mla::sparse_mla_decode", mutates_args=())
def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    batch_invariant: bool = False,
    assume_valid_indices: bool = False,
    empty_lse_is_inf: bool = False,
    kv_layout: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.sparse_mla_decode`: out `[batch, q_len, heads, 512]`, lse float32 `[batch, q_len, heads]`.

    `batch_invariant` and `assume_valid_indices` as in `flash_mla.flash_mla_with_kvcache`; `empty_lse_is_inf` takes
    FlashMLA's lse of a row without a key. `kv_layout` names the layout of k_cache, such as "V41_FP8"; the extra cache
    then has the same one, or the one of its bytes that goes beside it.
    """
    empty_lse = float("inf") if empty_lse_is_inf else -float("inf")
    more = {"keeps_memory": False, "kv_layout": kv_layout}
    options = decode.Options(
        "sparse_mla_decode", softmax_scale, empty_lse, batch_invariant, assume_valid_indices, **more
    )
    tensors = (q, k_cache, indices, topk_length, extra_k_cache, extra_indices, extra_topk_length, attn_sink)
    with torch.cuda.device_of(q):
        out, lse = decode.prepare(options, *tensors).run(*tensors, Schedule(), None)
    return out, lse.transpose(1, 2).contiguous()


@sparse_mla_decode.register_fake
def _(q, k_cache, indices, softmax_scale, *args, **kwargs):
    return q.new_empty((*q.shape[:3], V_DIM)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("jax_sparse_mla::sparse_mla_prefill", mutates_args=())
def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    empty_lse_is_inf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.sparse_mla_prefill`: kv `[kv_len, qk_dim]`, indices `[q_len, topk]`."""
    empty_lse = float("inf") if empty_lse_is_inf else -float("inf")
    options = prefill.Options("sparse_mla_prefill", softmax_scale, empty_lse, keeps_memory=False)
    tensors = (q, kv.unsqueeze(1), indices.unsqueeze(1), topk_length, attn_sink)
    with torch.cuda.device_of(q):
        return prefill.prepare(options, *tensors).run(*tensors, None)


@sparse_mla_prefill.register_fake
def _(q, kv, indices, softmax_scale, *args, **kwargs):
    max_logits, lse = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    return q.new_empty((*q.shape[:2], V_DIM)), max_logits, lse


@torch.library.custom_op("jax_sparse_mla::write_kv", mutates_args=("k_cache",))
def write_kv(
    k_cache: torch.Tensor,
    slots: torch.Tensor,
    kv: torch.Tensor,
    kv_layout: str | None = None,
    quantizer: str | None = None,
) -> None:
    """As `jax_sparse_mla.write_kv`, in place; `quantizer` is the engine of `KVLayout.written_by`."""
    if not k_cache.is_cuda:
        cache = _written_by(quantizer, _host_cache("write_kv", k_cache, kv_layout))
        data = call(jax_sparse_mla.write_kv, cache, slots.contiguous(), kv.contiguous()).data
        k_cache.view(torch.uint8).copy_(decode.pages_of(data, cache.layout, cache.page_size))
        return
    from sparse_mla_torch.operations import kv_cache as kernels

    with torch.cuda.device_of(k_cache):
        cache = _written_by(quantizer, _device_cache("write_kv", k_cache, kv_layout))
        kernels.write_kv(cache, slots.contiguous(), kv.contiguous())


write_kv.register_fake(lambda *arguments, **options: None)


@torch.library.custom_op("jax_sparse_mla::gather_kv", mutates_args=())
def gather_kv(k_cache: torch.Tensor, slots: torch.Tensor, kv_layout: str | None = None) -> torch.Tensor:
    """As `jax_sparse_mla.gather_kv`: bfloat16 `[n, qk_dim]`, zeros for an invalid slot."""
    if not k_cache.is_cuda:
        return call(jax_sparse_mla.gather_kv, _host_cache("gather_kv", k_cache, kv_layout), slots.contiguous()).clone()
    from sparse_mla_torch.operations import kv_cache as kernels

    with torch.cuda.device_of(k_cache):
        return kernels.gather_kv(_device_cache("gather_kv", k_cache, kv_layout), slots.contiguous())


@gather_kv.register_fake
def _(k_cache, slots, kv_layout=None):
    layout = decode.LAYOUTS[int(k_cache.shape[-1])] if kv_layout is None else decode.NAMED_LAYOUTS[kv_layout]
    return k_cache.new_empty((slots.shape[0], layout.qk_dim), dtype=torch.bfloat16)


@torch.library.custom_op("jax_sparse_mla::split_pages", mutates_args=("out",))
def split_pages(
    k_cache: torch.Tensor, out: torch.Tensor, slots: torch.Tensor | None = None, kv_layout: str | None = None
) -> None:
    """As `jax_sparse_mla.split_pages`, into `out`, in place: `[pages · r, page_size / r, 1, bytes_per_token]`.

    Slots are int32 of any shape: the pages that they touch are copied; None: all pages.
    """
    if slots is None:
        slots = torch.arange(0, k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1]).to(k_cache.device, torch.int32)
    slots = slots.contiguous()
    if not k_cache.is_cuda:
        cache, split = (_host_cache("split_pages", x, kv_layout) for x in (k_cache, out))
        data = call(jax_sparse_mla.split_pages, cache, split.page_size, slots=slots, out=split).data
        out.view(torch.uint8).copy_(decode.pages_of(data, split.layout, split.page_size))
        return
    from sparse_mla_torch.operations import kv_cache as kernels

    with torch.cuda.device_of(k_cache):
        cache, split = (_device_cache("split_pages", x, kv_layout) for x in (k_cache, out))
        kernels.split_pages(cache, split, slots)


split_pages.register_fake(lambda *arguments, **options: None)


@torch.library.custom_op("jax_sparse_mla::merge_attention", mutates_args=())
def merge_attention(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.merge_attention`, of stacked parts: `[parts, ..., heads, v_dim]` and `[parts, ..., heads]`."""
    return _run("merge", "merge_attention", outs, lses)


@merge_attention.register_fake
def _(outs, lses):
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


@torch.library.custom_op("jax_sparse_mla::apply_attn_sink", mutates_args=())
def apply_attn_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """As `jax_sparse_mla.apply_attn_sink`."""
    return _run("merge", "apply_attn_sink", out, lse, attn_sink)


@apply_attn_sink.register_fake
def _(out, lse, attn_sink):
    return out.new_empty(out.shape)


@torch.library.custom_op("jax_sparse_mla::combine_swa_extra_indices", mutates_args=())
def combine_swa_extra_indices(
    swa_indices: torch.Tensor,
    swa_lengths: torch.Tensor,
    extra_indices: torch.Tensor,
    extra_lengths: torch.Tensor,
    num_swa_rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.combine_swa_extra_indices`; `num_swa_rows` is an int32 tensor of no dimension."""
    tensors = (swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows)
    return _run("indices", "combine_swa_extra_indices", *tensors)


@combine_swa_extra_indices.register_fake
def _(swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows):
    return _merged(swa_indices, merged_width(swa_indices.shape[1] + extra_indices.shape[1]))


@torch.library.custom_op("jax_sparse_mla::combine_topk_swa_indices", mutates_args=())
def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_pos: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    compressed_base: torch.Tensor,
    swa_base: torch.Tensor,
    window: int,
    compress_ratio: int,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `jax_sparse_mla.combine_topk_swa_indices`."""
    tensors = (topk_indices, query_start_loc, query_pos, seq_lens, gather_lens, compressed_base, swa_base)
    options = {"window": window, "compress_ratio": compress_ratio, "topk": topk}
    return _run("indices", "combine_topk_swa_indices", *tensors, **options)


@combine_topk_swa_indices.register_fake
def _(topk_indices, *requests_and_options, **names):
    window, _, topk = requests_and_options[-3:] if not names else (names["window"], 0, names["topk"])
    return _merged(topk_indices, merged_width(topk + window))


def _layout(function: str, k_cache: torch.Tensor, kv_layout: str | None) -> KVLayout:
    width = check_strided(function, "k_cache", k_cache, (None, None, 1, None), k_cache, decode.CACHE_DTYPES)[-1]
    if kv_layout is None and width not in decode.LAYOUTS:
        raise ValueError(
            f"{function}: k_cache must have {', '.join(map(str, decode.LAYOUTS))} bytes, got {width}, or a kv_layout"
        )
    return decode.layout_of(function, "k_cache", k_cache, kv_layout)


def _written_by(engine: str | None, cache: PagedKV) -> PagedKV:
    return cache if engine is None else dataclasses.replace(cache, layout=cache.layout.written_by(engine))


def _host_cache(function: str, k_cache: torch.Tensor, kv_layout: str | None) -> PagedKV:
    """The cache for JAX: a copy if its pages are not dense and padded as the layout says."""
    layout = _layout(function, k_cache, kv_layout)
    return PagedKV(data=decode.page_rows(k_cache, layout), layout=layout, page_size=k_cache.shape[1])


def _device_cache(function: str, k_cache: torch.Tensor, kv_layout: str | None) -> PagedKV:
    """The same memory, each page a row of bytes."""
    layout, (pages, page_size, _, width) = _layout(function, k_cache, kv_layout), k_cache.shape
    rows = k_cache.view(torch.uint8).as_strided((pages, page_size * width), (k_cache.stride(0), 1))
    if not decode.has_dense_pages(k_cache):
        raise ValueError(f"{function}: k_cache's pages must each be dense, got strides {list(k_cache.stride())}")
    return PagedKV(data=rows, layout=layout, page_size=page_size)


def _run(module: str, name: str, *tensors: torch.Tensor, **options: int) -> Any:
    """The function of this name: in a module of the kernels for CUDA tensors, of `jax_sparse_mla` for others."""
    tensors = [x.contiguous() for x in tensors]
    if not tensors[0].is_cuda:
        # Copies, because the results are JAX's memory, which must not be written to.
        return jax.tree.map(torch.clone, call(getattr(jax_sparse_mla, name), *tensors, **options))
    kernels = importlib.import_module(f"sparse_mla_torch.operations.{module}")
    with torch.cuda.device_of(tensors[0]):
        return getattr(kernels, name)(*tensors, **options)


def _merged(like: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return like.new_empty((like.shape[0], width)), like.new_empty(like.shape[:1])

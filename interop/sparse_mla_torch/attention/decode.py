"""Decode from paged caches on torch tensors, in FlashMLA's shapes, by the kernel that suits the call.

On CUDA that is our SM90 kernel, FlashMLA's operator or our Triton kernel, on torch's current stream, with no JAX in
between; CPU tensors go to the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from jax_sparse_mla.argument_checks import BF16, FLOAT32
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.index_table import V_DIM, TableShape
from jax_sparse_mla.kv_cache.layout import KVLayout
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.attention.call_cache import Prepared, Results, filled, left_to_flashmla, on_contiguous
from sparse_mla_torch.attention.pages import CACHE_DTYPES, has_dense_pages, layout_of
from sparse_mla_torch.operations.checks import TensorChecks, check_scale


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shapes that a split-KV schedule depends on, under FlashMLA's names."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool
    topk: int | None
    extra_page_block_size: int | None
    extra_topk: int | None
    enable_batch_invariant: bool


class Options(NamedTuple):
    """The options of a decode call; see `flash_mla.flash_mla_with_kvcache`."""

    function: str  # named by errors
    softmax_scale: float | None  # None: qk_dim^-0.5
    empty_lse: float  # of a row without a valid key, +inf (FlashMLA) or −inf
    batch_invariant: bool = False
    assume_valid_indices: bool = False
    beside_flashmla: bool = False  # the caller has FlashMLA's functions, and leaves to them what they do sooner
    keeps_memory: bool = True  # False in a compiled graph, which owns the memory that the call allocates
    kv_layout: str | None = None  # of `pages.NAMED_LAYOUTS`; None: that of `pages.LAYOUTS` with k_cache's bytes


def prepare(options: tuple, *tensors: torch.Tensor | None) -> Prepared:
    """A call of these shapes; all tensors on one device, the current one.

    Args:
      options: the fields of `Options`.
      tensors: q, k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths and attn_sink, as
        `flash_mla.flash_mla_with_kvcache` takes them. Pages may be any multiple of 8 bytes apart. Indices are copied if
        rows are not dense or not evenly apart.

    Returns:
      `run(*tensors, schedule, into)` takes a `call_cache.Schedule` or what has its fields, and None or `(out, lse)` to
      write into, contiguous `[batch, q_len, heads, …]`; it returns out `[batch, q_len, heads, 512]` and lse
      `[batch, heads, q_len]`, a view.
    """
    return call_cache.find(options, tensors) or call_cache.add(options, tensors, _new)


def _new(options: tuple, *tensors: torch.Tensor | None) -> Prepared:
    options = Options(*options)
    tables = _check(options, tensors)
    main, extra = tables[0], tables[1] if len(tables) > 1 else None
    layout, extra_layout = main.layout, tables[-1].layout
    scale = layout.qk_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    options = options._replace(softmax_scale=check_scale(options.function, scale))
    q, k_cache, indices, _, extra_k_cache, extra_indices, _, attn_sink = tensors
    batch, q_len, heads, _ = q.shape
    device = route.device_info(q.device)
    kept = [table for table in tables if table.topk and table.num_slots]
    topk = sum(table.topk for table in kept)
    if kept and extra_layout != layout:
        kept = list(tables)  # an extra layout cannot stand alone
    call = Call(
        *("decode", layout, batch * q_len, max(heads, 1), device, topk),
        batch_invariant=options.batch_invariant,
        extra_layout=extra_layout,
        extra_page_size=extra and extra.page_size,
    )
    addressed = q, k_cache, indices, extra_k_cache, extra_indices
    try:
        plan = route.plan(call, options, layout, kept, addressed, device, beside_flashmla=options.beside_flashmla)
    except route.FasterAlone as reason:
        return left_to_flashmla(reason)
    backend = route.backend_module(plan.backend)
    empty = not q.numel() or not kept
    if empty:
        run = filled((batch, q_len, heads, V_DIM), ((batch, heads, q_len), options.empty_lse))
    else:
        run = backend.decode(options, q, layout, kept, attn_sink is not None)
        run = run if len(kept) == len(tables) else _without_empty_tables(run, tables.index(kept[0]))
    shape = Shape(
        b=batch,
        s_q=q_len,
        h_q=heads,
        page_block_size=main.page_size,
        h_k=1,
        causal=False,
        is_fp8_kvcache=True,
        topk=main.topk,
        extra_page_block_size=extra and extra.page_size,
        extra_topk=extra and extra.topk,
        enable_batch_invariant=bool(options.batch_invariant),
    )
    # Any queries and caches will do, and rows of indices that are evenly apart.
    any_strides = {0, 1, 4, *(i for i, table in zip((2, 5), tables) if table.stride)}
    run = on_contiguous(run, tuple(None if i in any_strides else x for i, x in enumerate(tensors)))
    lengths = [i for i in (3, 6) if q_len == 1 and tensors[i] is not None and tensors[i].dim() == 2]
    run = _by_request(run, lengths) if lengths else run
    return Prepared(run, plan, backend.WRITES_INTO and not empty, shape)


def _check(options: Options, tensors: Sequence[torch.Tensor | None]) -> tuple[TableShape, ...]:
    """The shapes of the call's one or two tables; raises where the call cannot be served."""
    function = options.function
    q, k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink = tensors
    check = TensorChecks(function, q)
    *shape, heads, qk_dim = check.strided("q", q, (None,) * 4, BF16).shape
    check.strided("k_cache", k_cache, (None, None, 1, None), CACHE_DTYPES)
    layout = extra_layout = layout_of(function, "k_cache", k_cache, options.kv_layout)
    if layout.extra_only:
        raise check.fail(f"k_cache has layout {layout.name}, which can be extra_k_cache's alone")
    tables = [_check_table(check, "", layout, k_cache, indices, lengths, shape)]
    if extra_k_cache is not None:
        check.strided("extra_k_cache", extra_k_cache, (None, None, 1, None), CACHE_DTYPES)
        width = extra_k_cache.shape[-1]
        extra_layout = next((x for x in layout.beside if x.bytes_per_token == width), None)
        extra_layout = extra_layout or layout_of(function, "extra_k_cache", extra_k_cache, None)
        tables.append(_check_table(check, "extra_", extra_layout, extra_k_cache, extra_indices, extra_lengths, shape))
    elif extra_indices is not None or extra_lengths is not None:
        raise check.fail("extra indices or lengths were given without an extra cache")
    if extra_layout not in layout.beside or layout.qk_dim != qk_dim:
        beside = ", ".join(x.name for x in layout.beside)
        wanted, got = f"queries of {layout.qk_dim} values", f"queries of {qk_dim} values"
        if extra_k_cache is not None:
            wanted, got = f"{wanted} and an extra cache of {beside}", f"{got} and an extra cache of {extra_layout.name}"
        raise check.fail(f"a cache of {layout.name} goes with {wanted}, got {got}")
    if attn_sink is not None:
        check.strided("attn_sink", attn_sink, (heads,), FLOAT32)
    return tuple(tables)


def _check_table(
    check: TensorChecks, prefix: str, layout: KVLayout, k_cache, indices, lengths, shape: list[int]
) -> TableShape:
    """The shape of a cache and its index table, for queries `[*shape, heads, qk_dim]`."""
    name = f"{prefix}k_cache"
    pages, page_size, _, width = k_cache.shape
    if page_size < 1:
        raise check.fail(f"{name} must have a page_size of 1 or more, got shape {list(k_cache.shape)}")
    page_bytes = k_cache.stride(0) if pages > 1 else layout.page_bytes(page_size)
    if not has_dense_pages(k_cache) or page_bytes < page_size * width or page_bytes % 8 or k_cache.data_ptr() % 8:
        raise check.fail(
            f"{name}'s pages must each be dense, begin at multiples of 8 bytes and not overlap, got "
            f"strides {list(k_cache.stride())} for shape {list(k_cache.shape)}"
        )
    table = f"{prefix}indices" + "_in_kvcache" * (prefix == "extra_" and check.function == "flash_mla_with_kvcache")
    topk = check.strided(table, indices, (*shape, None)).shape[-1]
    rows_per_length = 0
    if lengths is not None:
        per_request = isinstance(lengths, torch.Tensor) and lengths.dim() == 1
        check.strided(f"{prefix}topk_length", lengths, shape[:1] if per_request else shape)
        rows_per_length = shape[1] if per_request else 1
    slots = pages * page_size
    return TableShape(topk, rows_per_length, slots, page_size, page_bytes, stride=row_stride(indices), layout=layout)


def row_stride(indices: torch.Tensor) -> int:
    """Entries from one row of `[batch, q_len, topk]` to the next; 0 where that differs, or a row is not dense."""
    (batch, q_len, topk), (of_batch, of_token, of_column) = indices.shape, indices.stride()
    if of_column != 1 and topk > 1:
        return 0
    if q_len == 1:
        return of_batch if batch > 1 else topk
    return of_token if batch == 1 or of_batch == q_len * of_token else 0


def _without_empty_tables(run: Callable[..., Results], kept: int) -> Callable[..., Results]:
    """`run` of the one table that has a column and a slot, the main (0) or the extra one (1)."""

    def alone(q, *arguments):
        tables, (attn_sink, schedule, into) = arguments[:6], arguments[6:]
        return run(q, *tables[3 * kept : 3 * kept + 3], None, None, None, attn_sink, schedule, into)

    return alone


def _by_request(run: Callable[..., Results], lengths: list[int]) -> Callable[..., Results]:
    """`run` of lengths `[batch]`, which are those of one token a request."""

    def squeezed(*arguments):
        return run(*(x[:, 0] if i in lengths else x for i, x in enumerate(arguments)))

    return squeezed

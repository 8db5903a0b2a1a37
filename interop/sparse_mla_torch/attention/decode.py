"""Decode from paged caches on torch tensors, in FlashMLA's shapes, by the kernel that suits the call.

On CUDA that is our SM90 kernel, FlashMLA's operator or our Triton kernel, on torch's current stream, with no JAX in
between; CPU tensors go to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope
from jax_sparse_mla.kv_cache.layout import KVLayout
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.attention.call_cache import Prepared, Results, contiguous
from sparse_mla_torch.kernels.checks import BF16, FLOAT32, check_scale, check_strided

V_DIM = 512
LAYOUTS = {
    layout.bytes_per_token: layout
    for layout in (KVLayout.V32_FP8, KVLayout.V4_FP8, KVLayout.V32_BF16, KVLayout.V4_BF16)
}
CACHE_DTYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


class Shape(NamedTuple):
    """What a split-KV schedule depends on."""

    batch: int
    q_len: int
    heads: int
    page_size: int
    topk: int
    extra_page_size: int | None
    extra_topk: int | None
    batch_invariant: bool


class Options(NamedTuple):
    """What else a decode call depends on; see `flash_mla.flash_mla_with_kvcache`.

    Attributes:
      function: named by errors.
      softmax_scale: None: qk_dim^-0.5.
      empty_lse: of a row without a valid key, +inf (FlashMLA) or −inf.
      keeps_memory: False if the call must let go of all that it allocates, since a compiled graph may give it memory
        that is the graph's.
    """

    function: str
    softmax_scale: float | None
    empty_lse: float
    batch_invariant: bool = False
    assume_valid_indices: bool = False
    keeps_memory: bool = True


def prepare(
    options: tuple,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_lengths: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
) -> Prepared:
    """A call of these shapes; all tensors on one device, the current one.

    Args:
      options: the fields of `Options`.
      q: bfloat16 `[batch, q_len, heads, qk_dim]`.
      k_cache, extra_k_cache: uint8, int8 or float8_e4m3fn `[pages, page_size, 1, bytes_per_token]`, the bytes of a page
        in a row; pages may be any multiple of 8 bytes apart.
      indices, extra_indices: int32 `[batch, q_len, topk]`.
      lengths, extra_lengths: int32 `[batch]` or `[batch, q_len]`.
      attn_sink: float32 `[heads]`.

    Returns:
      `run(q, …, attn_sink, schedule, into)` takes the tensors in this order, a `call_cache.Schedule` or what has its
      fields, and None or `(out, lse)` to write into, contiguous `[batch, q_len, heads, …]`; it returns out
      `[batch, q_len, heads, 512]` and lse `[batch, heads, q_len]`, a view.
    """
    tensors = (q, k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink)
    return call_cache.find(options, tensors) or call_cache.add(options, tensors, _new)


def _new(options: tuple, *tensors: torch.Tensor | None) -> Prepared:
    options = Options(*options)
    layout, scopes = _check(options.function, *tensors)
    scale = layout.qk_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    options = options._replace(softmax_scale=check_scale(options.function, scale))
    q, k_cache, indices, _, extra_k_cache, extra_indices, _, attn_sink = tensors
    batch, q_len, heads, _ = q.shape
    against = _against(options, layout, scopes, q, k_cache, indices, extra_k_cache, extra_indices)
    override = route.override_of("decode")
    plan = route.plan_call(
        "decode",
        layout,
        rows=batch * q_len,
        heads=max(heads, 1),
        topk=sum(scope.topk for scope in scopes),
        device=route.device_info(q.device),
        installed=route.candidates(q.device.type, override),
        against=against,
        override=override,
    )
    make = {"reference": _reference, "triton": _triton, "flashmla": _flashmla, "hopper": _hopper}[plan.backend]
    if 0 in (batch, q_len, heads) or not any(map(_names_something, scopes)):
        make = _nothing
    shape = Shape(
        *(batch, q_len, heads, scopes[0].page_size, scopes[0].topk),
        *((None, None) if len(scopes) == 1 else (scopes[1].page_size, scopes[1].topk)),
        bool(options.batch_invariant),
    )
    run = make(options, q, layout, scopes, attn_sink is not None)
    if any(x is not None and not x.is_contiguous() for x in tensors[2:4] + tensors[5:]):
        run = _on_contiguous(run)
    return Prepared(run, plan, make in (_triton, _hopper), shape)


def _check(function, q, k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink):
    """The caches' layout and the tables' facts; raises what the call cannot be served for."""
    *shape, heads, qk_dim = check_strided(function, "q", q, (None,) * 4, q, BF16)
    tables = [_check_table(function, "", k_cache, indices, lengths, shape, q)]
    if extra_k_cache is not None:
        tables.append(_check_table(function, "extra_", extra_k_cache, extra_indices, extra_lengths, shape, q))
    elif extra_indices is not None or extra_lengths is not None:
        raise ValueError(f"{function}: extra indices or lengths were given without an extra cache")
    layouts, scopes = zip(*tables)
    if any(layout != layouts[0] or layout.qk_dim != qk_dim for layout in layouts):
        raise ValueError(
            f"{function}: caches of {' and '.join(str(x.bytes_per_token) for x in layouts)} bytes per token do not go "
            f"with queries of {qk_dim} values: 656 (bfloat16: 1152) go with 576, 584 (bfloat16: 1024) with 512"
        )
    if attn_sink is not None:
        check_strided(function, "attn_sink", attn_sink, (heads,), q, FLOAT32)
    return layouts[0], scopes


def _check_table(function, prefix, k_cache, indices, lengths, shape, like) -> tuple[KVLayout, Scope]:
    name = f"{prefix}k_cache"
    pages, page_size, _, width = check_strided(function, name, k_cache, (None, None, 1, None), like, CACHE_DTYPES)
    if width not in LAYOUTS or page_size < 1:
        raise ValueError(
            f"{function}: {name} must be [pages, page_size, 1, bytes], bytes one of {', '.join(map(str, LAYOUTS))}, "
            f"got {list(k_cache.shape)}"
        )
    page_bytes = k_cache.stride(0) if pages > 1 else LAYOUTS[width].page_bytes(page_size)
    dense = k_cache.stride(3) == 1 and (page_size == 1 or k_cache.stride(1) == width)
    if not dense or page_bytes < page_size * width or page_bytes % 8 or k_cache.data_ptr() % 8:
        raise ValueError(
            f"{function}: {name}'s pages must each be dense, begin at multiples of 8 bytes and not overlap, got "
            f"strides {list(k_cache.stride())} for shape {list(k_cache.shape)}"
        )
    topk = check_strided(function, f"{prefix}indices", indices, (*shape, None), like)[-1]
    shared = 0
    if lengths is not None:
        per_request = isinstance(lengths, torch.Tensor) and lengths.dim() == 1
        expected = shape[:1] if per_request else shape
        check_strided(function, f"{prefix}topk_length", lengths, tuple(expected), like)
        shared = shape[1] if per_request else 1
    return LAYOUTS[width], Scope(topk, shared, pages * page_size, page_size, page_bytes)


def _against(options, layout, scopes, q, *others) -> dict[str, str]:
    """Why backends cannot take the call, beyond what `plan_attention` knows."""
    device = route.device_info(q.device)
    if device.platform != "cuda":
        return {}  # it says so
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in (q, *others))
    reasons = {"hopper": _hopper_obstacle(scopes, aligned)}
    if options.batch_invariant:
        reasons["flashmla"] = "its split of a row's keys depends on the batch"
    else:
        from sparse_mla_torch.attention.backends import flashmla

        reasons["flashmla"] = flashmla.decode_obstacle(layout, q.shape[1], q.shape[2], scopes, aligned, device)
    return {name: why for name, why in reasons.items() if why}


def _hopper_obstacle(scopes: tuple[Scope, ...], aligned: bool) -> str | None:
    if not aligned or any(scope.page_bytes % 16 for scope in scopes):
        return "its kernel reads 16 bytes at a time: tensors and pages must begin at multiples of 16 bytes"
    return None


def _names_something(scope: Scope) -> bool:
    return scope.topk > 0 and scope.num_slots > 0


def _nothing(options, q, layout, scopes, has_sink) -> Callable[..., Results]:
    batch, q_len, heads, _ = q.shape

    def run(q, *tensors):
        lse = q.new_full((batch, heads, q_len), options.empty_lse, dtype=torch.float32)
        return q.new_zeros((batch, q_len, heads, V_DIM)), lse

    return run


def _triton(options, q, layout, scopes, has_sink) -> Callable[..., Results]:
    from sparse_mla_torch.attention.backends.triton import Attention

    batch, q_len, heads, _ = q.shape
    attend = Attention(
        layout,
        batch * q_len,
        heads,
        tuple(filter(_names_something, scopes)),
        options.softmax_scale,
        has_sink,
        q.device,
        empty_is_inf=options.empty_lse > 0,
        may_split=not options.batch_invariant,
    )
    return _into_results(attend, scopes, (batch, q_len, heads))


def _hopper(options, q, layout, scopes, has_sink) -> Callable[..., Results]:
    from sparse_mla_torch.attention.backends.hopper import Decode

    batch, q_len, heads, _ = q.shape
    attend = Decode(
        batch * q_len,
        heads,
        tuple(filter(_names_something, scopes)),
        options.softmax_scale,
        q.device,
        route.device_info(q.device).sm_count,
        empty_lse=options.empty_lse,
        batch_invariant=options.batch_invariant,
    )
    return _into_results(attend, scopes, (batch, q_len, heads))


def _into_results(attend: Callable, scopes: tuple[Scope, ...], shape: tuple[int, int, int]) -> Callable[..., Results]:
    """What writes into given tensors, `(q, tables, attn_sink, out, lse)`, as a call that may also allocate them."""
    named = [i for i, scope in enumerate(scopes) if _names_something(scope)]

    def run(q, k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink, schedule, into):
        q = q.contiguous()
        both = ((k_cache, indices, lengths), (extra_k_cache, extra_indices, extra_lengths))
        given = [both[i] for i in named]
        if into is None:
            into = q.new_empty((*shape, V_DIM)), q.new_empty(shape, dtype=torch.float32)
        attend(q, given, attn_sink, *into)
        return into[0], into[1].transpose(1, 2)

    return run


def _on_contiguous(run: Callable[..., Results]) -> Callable[..., Results]:
    """`run` on copies of the tensors that are not; the queries and caches it takes as they are."""

    def copying(q, k_cache, indices, lengths, extra_k_cache, *rest):
        *small, schedule, into = rest
        return run(
            *(q, k_cache, contiguous(indices), contiguous(lengths), extra_k_cache),
            *(contiguous(x) for x in small),
            *(schedule, into),
        )

    return copying


def _flashmla(options, q, layout, scopes, has_sink) -> Callable[..., Results]:
    from sparse_mla_torch.attention.backends import flashmla

    batch, q_len, heads, _ = q.shape
    attend = flashmla.decode(
        *(layout, batch, q_len, heads, scopes, options.softmax_scale),
        has_sink,
        options.assume_valid_indices,
        options.keeps_memory,
        route.device_info(q.device),
    )
    # Its copies of the queries want pieces of 16 bytes: 8 values.
    strides_fit = q.stride(3) == 1 and all(stride % 8 == 0 for stride in q.stride()[:3])

    if strides_fit and options.empty_lse > 0:
        return attend

    def run(q, *rest):
        out, lse = attend(q if strides_fit else q.contiguous(), *rest)
        if options.empty_lse < 0:
            lse = lse.masked_fill(torch.isposinf(lse), options.empty_lse)
        return out, lse

    return run


def _reference(options, q, layout, scopes, has_sink) -> Callable[..., Results]:
    from jax_sparse_mla import sparse_mla_decode
    from jax_sparse_mla.kv_cache import PagedKV
    from sparse_mla_torch.bridge import call

    def cache_of(k_cache, scope):
        if k_cache is None:
            return None
        return PagedKV(data=page_rows(k_cache, layout), layout=layout, page_size=scope.page_size)

    def run(q, k_cache, indices, lengths, extra_k_cache, extra_indices, extra_lengths, attn_sink, schedule, into):
        arguments = {"topk_length": lengths, "attn_sink": attn_sink}
        arguments |= {"extra_indices": extra_indices, "extra_topk_length": extra_lengths}
        arguments = {name: x if x is None else x.detach().contiguous() for name, x in arguments.items()}
        out, lse = call(
            sparse_mla_decode,
            q.detach().contiguous(),
            cache_of(k_cache, scopes[0]),
            indices.contiguous(),
            extra_cache=cache_of(extra_k_cache, scopes[-1]),
            softmax_scale=options.softmax_scale,
            backend="reference",
            **arguments,
        )
        lse = lse.masked_fill(torch.isneginf(lse), options.empty_lse).transpose(1, 2)
        return out.clone(), lse  # JAX's memory is not to be written to

    return run


def page_rows(k_cache: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """uint8 `[pages, page_bytes]` of a cache in FlashMLA's shape; a copy where its padding is another."""
    pages, page_size, _, width = k_cache.shape
    page_bytes = layout.page_bytes(page_size)
    k_cache = k_cache.view(torch.uint8)
    stored = k_cache.untyped_storage().nbytes() - k_cache.storage_offset()
    if (pages < 2 or k_cache.stride(0) == page_bytes) and pages * page_bytes <= stored:
        return k_cache.as_strided((pages, page_bytes), (page_bytes, 1))
    rows = k_cache.new_zeros((pages, page_bytes))
    rows[:, : page_size * width] = k_cache.reshape(pages, page_size * width)
    return rows


def pages_of(data: torch.Tensor, layout: KVLayout, page_size: int) -> torch.Tensor:
    """FlashMLA's view `[pages, page_size, 1, bytes_per_token]` of a cache `[pages, page_bytes]`."""
    width = layout.bytes_per_token
    return data.as_strided((data.shape[0], page_size, 1, width), (data.stride(0), width, width, 1))

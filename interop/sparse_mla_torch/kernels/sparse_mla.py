"""Sparse MLA attention on torch tensors: the Triton kernel of `jax_sparse_mla`, launched on torch's current stream.

Same meaning as `jax_sparse_mla.sparse_mla_decode` and `sparse_mla_prefill`; no JAX array, no host synchronisation, and
with `out=` no allocation but the split buffers, so a CUDA graph captures it. Under TRITON_INTERPRET=1 (set before
triton is imported) it also runs on CPU tensors, slowly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from jax_sparse_mla.kernels.triton.sparse_mla import plan as planning
from jax_sparse_mla.kernels.triton.sparse_mla.kernel import combine_kernel, sparse_mla_kernel
from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope
from jax_sparse_mla.kv_cache.layout import KVLayout
from sparse_mla_torch.kernels.checks import BF16, FLOAT32, UINT8, check_tensor
from sparse_mla_torch.kernels.launch import Launch

_LOG2_E = 1.4426950408889634
# What a launch without a GPU (the interpreter) is planned for.
_INTERPRETED = ((8, 0), 4)


@dataclasses.dataclass(frozen=True)
class TorchPagedKV:
    """A paged cache that torch owns: uint8 `[num_pages, page_bytes]`, as `jax_sparse_mla.PagedKV`."""

    data: torch.Tensor
    layout: KVLayout
    page_size: int

    @property
    def num_slots(self) -> int:
        return self.data.shape[0] * self.page_size


def sparse_mla_decode(
    q: torch.Tensor,
    cache: TorchPagedKV,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    extra_cache: TorchPagedKV | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    plan: planning.LaunchPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the cached rows that its indices name, from one or two paged caches.

    Args:
      q: bfloat16 `[batch, q_len, heads, qk_dim]`.
      cache, extra_cache: paged caches of one layout.
      indices, extra_indices: int32 `[batch, q_len, topk]` slots; < 0 or ≥ the cache's slots is skipped.
      softmax_scale: what q·k is multiplied by.
      topk_length, extra_topk_length: int32 `[batch]` or `[batch, q_len]`, leading columns scanned; None scans all.
      attn_sink: float32 `[heads]`, in the denominator only.
      out: `(out, lse)` to write into; allocated by default.
      plan: a launch of this shape; made here by default.

    Returns:
      out bfloat16 `[batch, q_len, heads, 512]`, 0 where no key is valid; lse float32 `[batch, q_len, heads]`, natural
      log without the sink, −inf where no key is valid.

    Raises:
      TypeError, ValueError: dtypes, shapes or strides that the kernel does not take.
    """
    name = "sparse_mla_decode"
    batch, q_len, heads, _ = check_tensor(name, "q", q, (None, None, None, cache.layout.qk_dim), q, BF16)
    planning.check_layout(name, cache.layout)
    tables = [_table(name, "", cache, indices, topk_length, (batch, q_len), q)]
    if extra_cache is None:
        if extra_indices is not None or extra_topk_length is not None:
            raise ValueError(f"{name}: extra_indices or extra_topk_length was given without extra_cache")
    else:
        if extra_cache.layout != cache.layout:
            raise ValueError(f"{name}: extra_cache must have cache's layout {cache.layout}, got {extra_cache.layout}")
        tables.append(_table(name, "extra_", extra_cache, extra_indices, extra_topk_length, (batch, q_len), q))
    if attn_sink is not None:
        check_tensor(name, "attn_sink", attn_sink, (heads,), q, FLOAT32)
    if out is None:
        out = (q.new_empty((batch, q_len, heads, planning.V_DIM)), _empty(q, (batch, q_len, heads)))
    check_tensor(name, "out[0]", out[0], (batch, q_len, heads, planning.V_DIM), q, BF16)
    check_tensor(name, "out[1]", out[1], (batch, q_len, heads), q, FLOAT32)
    _attend(q, tables, attn_sink, softmax_scale, cache.layout, batch * q_len, (*out, None), plan)
    return out


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    plan: planning.LaunchPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query over the rows of a contiguous workspace that its indices name.

    Args:
      q: bfloat16 `[q_len, heads, qk_dim]`, qk_dim 512 or 576.
      kv: bfloat16 `[kv_len, qk_dim]`; V is its first 512 values.
      indices: int32 `[q_len, topk]` rows of `kv`; < 0 or ≥ kv_len is skipped.
      softmax_scale: what q·k is multiplied by.
      topk_length: int32 `[q_len]`, leading columns scanned; None scans all.
      attn_sink: float32 `[heads]`, in the denominator only.
      out: `(out, max_logits, lse)` to write into; allocated by default.
      plan: a launch of this shape; made here by default.

    Returns:
      out bfloat16 `[q_len, heads, 512]`; max_logits and lse float32 `[q_len, heads]`, natural, −inf where no key is
      valid.

    Raises:
      TypeError, ValueError: dtypes, shapes or strides that the kernel does not take.
    """
    name = "sparse_mla_prefill"
    q_len, heads, qk_dim = check_tensor(name, "q", q, (None, None, None), q, BF16)
    layout = planning.workspace_layout(qk_dim)
    planning.check_layout(name, layout)
    kv_len, _ = check_tensor(name, "kv", kv, (None, qk_dim), q, BF16)
    _, topk = check_tensor(name, "indices", indices, (q_len, None), q)
    if topk_length is not None:
        check_tensor(name, "topk_length", topk_length, (q_len,), q)
    if attn_sink is not None:
        check_tensor(name, "attn_sink", attn_sink, (heads,), q, FLOAT32)
    if out is None:
        out = (q.new_empty((q_len, heads, planning.V_DIM)), _empty(q, (q_len, heads)), _empty(q, (q_len, heads)))
    check_tensor(name, "out[0]", out[0], (q_len, heads, planning.V_DIM), q, BF16)
    check_tensor(name, "out[1]", out[1], (q_len, heads), q, FLOAT32)
    check_tensor(name, "out[2]", out[2], (q_len, heads), q, FLOAT32)
    tables = [(kv, indices, topk_length, Scope(topk, int(topk_length is not None), kv_len))]
    _attend(q, tables, attn_sink, softmax_scale, layout, q_len, (out[0], out[2], out[1]), plan, may_split=False)
    return out


class Attention:
    """The launches of one call shape on one device; `attention` remembers them.

    Args:
      layout: of the cached rows (`workspace_layout` for prefill).
      rows, heads: query rows and heads, at least 1.
      scopes: one or two.
      softmax_scale: what q·k is multiplied by.
      has_sink: whether the call has an attention sink.
      device: of all tensors.
      empty_is_inf: see `launch_plan`.
      may_split: False computes each row by one program, in the same order whatever the batch; max_logits needs it.
      plan: a launch of this shape; made here by default.
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
        *,
        empty_is_inf: bool = False,
        may_split: bool = True,
        plan: planning.LaunchPlan | None = None,
    ):
        # What is absent has the first cache's pages: the kernel divides by its page size.
        first, second = (*scopes, scopes[0]._replace(topk=0, rows_per_length=0, num_slots=0))[:2]
        if plan is None:
            capability, sm_count = device_facts(device)
            plan = planning.launch_plan(
                layout,
                rows=rows,
                num_heads=heads,
                topk=first.topk,
                extra_topk=second.topk,
                has_sink=has_sink,
                capability=capability,
                sm_count=sm_count,
                may_split=may_split,
                empty_is_inf=empty_is_inf,
            )
        lengths = [(scope.rows_per_length, scope.topk, scope.num_slots) for scope in (first, second)]
        options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
        self._main = Launch(
            sparse_mla_kernel,
            plan.grid,
            (softmax_scale * _LOG2_E, heads, *lengths[0], *lengths[1]),
            plan.constexprs | _pages("", first) | _pages("EXTRA_", second) | options,
        )
        self._partial = None
        if plan.num_splits > 1:
            self._partial = (plan.num_splits, rows, heads)
            self._combine = Launch(combine_kernel, plan.combine_grid, (heads, plan.num_splits), plan.combine_constexprs)

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
        inputs = [q]
        for cache, indices, lengths in (*tables, tables[0])[:2]:  # what is absent is not read
            inputs += (cache, indices, indices if lengths is None else lengths)
        sink = q if attn_sink is None else attn_sink
        inputs.append(sink)
        if self._partial is None:
            self._main(inputs, (out, lse, max_logits))
            return
        some_out = q.new_empty((*self._partial, planning.V_DIM), dtype=torch.float32)
        some_lse = q.new_empty(self._partial, dtype=torch.float32)
        self._main(inputs, (some_out, some_lse, None))
        self._combine((some_out, some_lse, sink), (out, lse))


attention = functools.lru_cache(maxsize=1024)(Attention)


def _pages(prefix: str, scope: Scope) -> dict[str, int]:
    return {f"{prefix}PAGE_SIZE": scope.page_size, f"{prefix}PAGE_BYTES": scope.page_bytes}


def _attend(q, tables, attn_sink, softmax_scale, layout, rows, results, plan, may_split=True) -> None:
    """Tables are `(cache, indices, lengths, scope)`, results `(out, lse, max_logits)`."""
    heads = q.shape[-2]
    if rows == 0 or heads == 0:
        return
    scopes = tuple(scope for *_, scope in tables)
    arguments = (layout, rows, heads, scopes, float(softmax_scale), attn_sink is not None, q.device)
    make = attention if plan is None else functools.partial(Attention, plan=plan)
    make(*arguments, may_split=may_split)(q, [table[:3] for table in tables], attn_sink, *results)


def _table(name, prefix, cache, indices, lengths, shape, q) -> tuple:
    """One cache's tensors and facts."""
    page_bytes = cache.layout.page_bytes(cache.page_size)
    check_tensor(name, f"{prefix}cache.data", cache.data, (None, page_bytes), q, UINT8)
    topk = check_tensor(name, f"{prefix}indices", indices, (*shape, None), q)[-1]
    shared = 0
    if lengths is not None:
        per_request = lengths.dim() == 1
        check_tensor(name, f"{prefix}topk_length", lengths, shape[:1] if per_request else shape, q)
        shared = shape[1] if per_request else 1
    return cache.data, indices, lengths, Scope(topk, shared, cache.num_slots, cache.page_size, page_bytes)


def _empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32)


@functools.cache
def device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and multiprocessors."""
    if device.type != "cuda":
        return _INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count

"""The two attention functions of a layer: check the arguments, decide the route, call the kernel.

The route is decided while tracing, for this machine's GPU. Lowering decides which runs: the kernel on CUDA, the
reference elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.index_table import IndexTable
from jax_sparse_mla.attention.machine import override_of, plan_here
from jax_sparse_mla.attention.serve import Service, serve
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache.layout import workspace_layout
from jax_sparse_mla.kv_cache.paged import check_first_cache, check_second_cache
from jax_sparse_mla.launch.transforms import varying_like


def sparse_mla_decode(
    q: jax.Array,
    cache: PagedKV,
    indices: jax.Array,
    *,
    softmax_scale: float,
    topk_length: jax.Array | None = None,
    extra_cache: PagedKV | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    assume_valid_indices: bool = False,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query over the cached rows that its indices name, from one or two paged caches.

    The softmax runs over the union of both caches' valid entries; `attention/reference.py` has the formula. Under
    `shard_map` heads (q and attn_sink) and batch rows (q, indices, lengths) shard without a collective; caches
    sharded by pages are what `context_parallel_decode` is for. Over explicit mesh axes the call shards itself,
    by the rows and heads of q; under plain `jit` the partitioner cuts both (docs/internals/sharding.md). Decode kernels
    have no gradient: differentiate with `backend="reference"`.

    Args:
      q: bfloat16 `[batch, q_len, heads, qk_dim]`; the reference also takes float32.
      cache: the paged cache of the first index table (V4: the sliding window; V3.2: the only one).
      indices: int32 `[batch, q_len, topk]` slots of `cache`; < 0 or ≥ `cache.num_slots` is skipped, a duplicate
        counts twice.
      softmax_scale: what q·k is multiplied by (a static number).
      topk_length: int32 `[batch]` or `[batch, q_len]`, how many leading columns are scanned; None scans all.
      extra_cache: a second cache (V4: the compressed one) of the same layout or, beside V4.1's FP8, of the FP4 one in
        the same order of bytes; with `extra_indices` int32 `[batch, q_len, extra_topk]` and `extra_topk_length` as
        above.
      attn_sink: float32 `[heads]`, a logit per head in the denominator only; not scaled.
      assume_valid_indices: a promise (static) that every entry within a length is −1 or a slot, every one beyond it
        −1, every length from 0 to the columns, and no finite sink below −2e38: spares FlashMLA, which checks nothing,
        a pass over the tables.
      backend: a backend's name; by default the router decides, or the environment variables
        JAX_SPARSE_MLA_DECODE_BACKEND and JAX_SPARSE_MLA_BACKEND, read at trace time.
      batch_invariant: a row's result does not depend, to the bit, on the other rows of the call or on how many there
        are (static). No row's keys are split between programs; backends that cannot do so do not serve. A device's
        backend stays the same for any number of rows. Plain JAX keeps this on a CPU; for a GPU XLA promises no bits.

    Returns:
      out `[batch, q_len, heads, v_dim]` in q's dtype, 0 where no key is valid, whatever the sink; lse float32
      `[batch, q_len, heads]`, natural log, without the sink, −inf where no key is valid.

    Raises:
      TypeError: a wrong dtype. ValueError: wrong or mismatched shapes, an extra argument without `extra_cache`, or a
        backend that cannot serve the call.
    """
    check = ArgumentChecks("sparse_mla_decode")
    caches = ("cache", "extra_cache")
    check_first_cache(check, caches, cache)
    layout = cache.layout
    q = check("q", q, ("batch", "q_len", "heads", layout.qk_dim), FLOATS)
    indices = check("indices", indices, ("batch", "q_len", "topk"), INT32)
    tables = [IndexTable(cache, indices, row_lengths(check, "topk_length", topk_length))]
    if extra_cache is None:
        for name, value in (("extra_indices", extra_indices), ("extra_topk_length", extra_topk_length)):
            if value is not None:
                raise check.fail(f"{name} was given without extra_cache")
    else:
        check_second_cache(check, caches, cache, extra_cache)
        extra_indices = check("extra_indices", extra_indices, ("batch", "q_len", "extra_topk"), INT32)
        lengths = row_lengths(check, "extra_topk_length", extra_topk_length)
        tables.append(IndexTable(extra_cache, extra_indices, lengths))
    attn_sink = check.optional("attn_sink", attn_sink, ("heads",), FLOAT32)
    softmax_scale, batch_invariant = static_scale(check, softmax_scale), bool(batch_invariant)

    # A table without columns or a cache without slots has nothing to read.
    tables = [table for table in tables if table.indices.shape[-1] and table.cache.num_slots]
    batch, q_len, heads, _ = q.shape
    columns = sum(table.indices.shape[-1] for table in tables)
    call = Call(
        *("decode", layout, batch * q_len, max(heads, 1), DeviceInfo.current(), columns, q.dtype.name),
        batch_invariant=batch_invariant,
        extra_layout=None if extra_cache is None else extra_cache.layout,
    )
    service = Service(
        *("decode", *_backend(check, call, backend), softmax_scale, batch_invariant),
        assume_valid_indices=bool(assume_valid_indices),
    )
    if q.size == 0 or not tables:
        return _nothing(q, layout.v_dim)
    return serve(check, service, (q, tuple(tables), attn_sink))


def sparse_mla_prefill(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    softmax_scale: float,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    backend: str | None = None,
    batch_invariant: bool = False,
    deterministic_gradient: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of each query over the rows of a contiguous workspace that its indices name.

    Any topk and any head count; rows of q shard under `shard_map` as in `sparse_mla_decode`. Differentiable in q, kv
    and attn_sink, in reverse mode, by out and lse; of a kernel max_logits are statistics without a gradient.

    Args:
      q: bfloat16 `[q_len, heads, qk_dim]`; the reference also takes float32.
      kv: bfloat16 `[kv_len, qk_dim]`; the reference also takes float32. V is its first `min(qk_dim, 512)` values.
      indices: int32 `[q_len, topk]` rows of `kv`; < 0 or ≥ kv_len is skipped, a duplicate counts twice.
      softmax_scale: what q·k is multiplied by (a static number).
      topk_length: int32 `[q_len]`, how many leading columns are scanned; None scans all.
      attn_sink: float32 `[heads]`, a logit per head in the denominator only; not scaled.
      backend: as in `sparse_mla_decode`, with JAX_SPARSE_MLA_PREFILL_BACKEND.
      batch_invariant: as in `sparse_mla_decode`.
      deterministic_gradient: a kernel's gradient by kv repeats to the bit (static). It sums integers of 64 bits, which
        takes twice the memory of float32 sums. Gradients by q and the sink always repeat.

    Returns:
      out `[q_len, heads, v_dim]` in q's dtype, 0 where no key is valid; max_logits float32 `[q_len, heads]`, the
      largest scaled score, and lse float32 `[q_len, heads]`, natural log without the sink, both −inf where no key
      is valid.

    Raises:
      TypeError: a wrong dtype. ValueError: wrong or mismatched shapes, or a backend that cannot serve the call.
    """
    check = ArgumentChecks("sparse_mla_prefill")
    q = check("q", q, ("q_len", "heads", "qk_dim"), FLOATS)
    kv = check("kv", kv, ("kv_len", "qk_dim"), FLOATS)
    indices = check("indices", indices, ("q_len", "topk"), INT32)
    topk_length = check.optional("topk_length", topk_length, ("q_len",), INT32)
    attn_sink = check.optional("attn_sink", attn_sink, ("heads",), FLOAT32)
    softmax_scale, batch_invariant = static_scale(check, softmax_scale), bool(batch_invariant)
    q_len, heads, qk_dim = q.shape
    layout = workspace_layout(qk_dim)
    dtype = "float32" if np.float32 in (q.dtype, kv.dtype) else q.dtype.name
    call = Call(
        *("prefill", layout, q_len, max(heads, 1), DeviceInfo.current(), indices.shape[1], dtype),
        batch_invariant=batch_invariant,
    )
    service = Service(
        *("prefill", *_backend(check, call, backend), softmax_scale, batch_invariant),
        deterministic_gradient=bool(deterministic_gradient),
    )
    if 0 in (q.size, kv.size, indices.size):
        out, lse = _nothing(q, layout.v_dim)
        return out, lse, lse
    return serve(check, service, (q, kv, indices, topk_length, attn_sink))


def row_lengths(check: ArgumentChecks, name: str, lengths: jax.Array | None) -> jax.Array | None:
    """int32 lengths `[batch]` or `[batch, q_len]`, as `[batch, q_len]`."""
    if lengths is None:
        return None
    shape = check.dims["batch"], check.dims["q_len"]
    if check.rank(name, lengths) == 1:
        lengths = check(name, lengths, shape[:1], INT32)[:, None]
    else:
        lengths = check(name, lengths, shape, INT32)
    return jnp.broadcast_to(lengths, shape)


def _nothing(q: jax.Array, v_dim: int) -> tuple[jax.Array, jax.Array]:
    """out and lse of a call in which no row has a key."""
    out, lse = jnp.zeros((*q.shape[:-1], v_dim), q.dtype), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
    return varying_like(out, q), varying_like(lse, q)


def _backend(check: ArgumentChecks, call: Call, named: str | None) -> tuple[str, bool]:
    """The backend that serves the call here, and whether it was asked for by name; errors name the function."""
    try:
        plan = plan_here(call, backend=named)
    except ValueError as error:
        raise check.fail(str(error)) from None
    return plan.backend, bool(named or override_of(call.phase))


def static_scale(check: ArgumentChecks, softmax_scale: Any) -> float:
    """Refuses what is not a finite Python or numpy number: the scale selects a compilation."""
    number = (int, float, np.integer, np.floating)
    if not isinstance(softmax_scale, number) or isinstance(softmax_scale, bool):
        raise TypeError(
            f"{check.function}: softmax_scale must be a static number (under jit, close over it), got "
            f"{type(softmax_scale).__name__}"
        )
    if not math.isfinite(softmax_scale):
        raise check.fail(f"softmax_scale must be finite, got {softmax_scale}")
    return float(softmax_scale)

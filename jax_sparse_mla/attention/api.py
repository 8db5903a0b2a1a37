"""The two attention functions of a layer: check the arguments, decide the route, call the kernel.

The route is decided while tracing, for this machine's GPU; which of its two ends a program takes is settled when it is
lowered: for CUDA the routed kernel, for any other platform the reference.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_sparse_mla import dispatch
from jax_sparse_mla._checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.attention.backends import flashinfer, flashmla, hopper
from jax_sparse_mla.attention.route import PHASES, DeviceInfo, plan_attention
from jax_sparse_mla.attention.schedule import (
    DecodeSchedule,
    DecodeShape,
    check_schedule,
    decode_schedule,
    per_row_lengths,
)
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from jax_sparse_mla.kv_cache.paged import check_cache
from jax_sparse_mla.models import ModelSpec

__all__ = ["calls_of", "decode_schedule", "installed_backends", "sparse_mla_decode", "sparse_mla_prefill"]

# V is the first 512 values of a row in every layout: all of a V4 row, a V3.2 row without its rope part.
_MAX_V_DIM = 512

# What every kernel is built for, in bfloat16; the reference takes any row and float32.
_KERNEL_QK_DIMS = (512, 576)

# The backends of this version: one module a kernel family, with the two signatures of `reference`.
_ADAPTERS = {
    "reference": "jax_sparse_mla.attention.reference",
    "triton": "jax_sparse_mla.attention.backends.triton",
    "flashmla": "jax_sparse_mla.attention.backends.flashmla",
    "flashinfer": "jax_sparse_mla.attention.backends.flashinfer",
    "hopper": "jax_sparse_mla.attention.backends.hopper",
}


# Those whose kernel has a batching rule; under `vmap` the reference stands in for the others.
_BATCHING = {("prefill", "hopper")}

# What the parts of a program that attend are named after: this, the phase, a dot, the backend.
_SCOPE = "sparse_mla_"


class _Route(NamedTuple):
    """Which adapter serves a call's phase, and whether the caller or the environment asked for it by name."""

    phase: str
    backend: str
    named: bool


def installed_backends() -> frozenset[str]:
    """Names of the backends that this version has, whose packages are there and whose platform JAX runs on."""
    names = {"reference"}
    if dispatch.available():
        names.add("triton")
    if jax.default_backend() == "gpu" and flashmla.available():
        names.add("flashmla")
    if jax.default_backend() == "gpu" and flashinfer.available():
        names.add("flashinfer")
    if jax.default_backend() == "gpu" and (hopper.serves("prefill") or hopper.serves("decode")):
        names.add("hopper")
    return frozenset(names)


def installed_for(phase: str) -> frozenset[str]:
    """Those that can serve this phase here: `hopper`'s two kernels need different things."""
    names = installed_backends()
    return names - {"hopper"} if "hopper" in names and not hopper.serves(phase) else names


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
    schedule: DecodeSchedule | None = None,
    assume_valid_indices: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query over the cached rows that its indices name, from one or two paged caches.

    The softmax runs over the union of both caches' valid entries; `attention/reference.py` has the formula. Under
    `shard_map` heads (q and attn_sink) and batch rows (q, indices, lengths) shard without a collective; caches
    sharded by rows give partial results that `merge_attention` joins. Kernels have no gradient: differentiate with
    `backend="reference"`.

    Args:
      q: bfloat16 `[batch, q_len, heads, qk_dim]`; the reference also takes float32.
      cache: the paged cache of the first index table (V4: the sliding window; V3.2: the only one).
      indices: int32 `[batch, q_len, topk]` slots of `cache`; < 0 or ≥ `cache.num_slots` is skipped, a duplicate
        counts twice.
      softmax_scale: what q·k is multiplied by (a static number).
      topk_length: int32 `[batch]` or `[batch, q_len]`, how many leading columns are scanned; None scans all.
      extra_cache: a second cache of the same layout (V4: the compressed one), with `extra_indices` int32
        `[batch, q_len, extra_topk]` and `extra_topk_length` as above.
      attn_sink: float32 `[heads]`, a logit per head in the denominator only; not scaled.
      schedule: what `decode_schedule` built for these lengths; None builds it inside where a kernel needs one.
      assume_valid_indices: a promise (static) that every entry within a length is −1 or a slot, every one beyond it
        −1, every length from 0 to the columns, and no finite sink below −2e38: spares FlashMLA, which checks nothing,
        a pass over the tables.
      backend: a backend's name; by default the router decides, or the environment variables
        JAX_SPARSE_MLA_DECODE_BACKEND and JAX_SPARSE_MLA_BACKEND, read at trace time.

    Returns:
      out `[batch, q_len, heads, v_dim]` in q's dtype, 0 where no key is valid, whatever the sink; lse float32
      `[batch, q_len, heads]`, natural log, without the sink, −inf where no key is valid.

    Raises:
      TypeError: a wrong dtype. ValueError: wrong or mismatched shapes, an extra argument without `extra_cache`, a
        schedule of another shape, or a backend that cannot serve the call.
    """
    check = ArgumentChecks("sparse_mla_decode")
    check_cache(check, "cache", cache)
    layout = cache.layout
    q = check("q", q, ("batch", "q_len", "heads", layout.qk_dim), FLOATS)
    indices = check("indices", indices, ("batch", "q_len", "topk"), INT32)
    if extra_cache is None:
        for name, value in (("extra_indices", extra_indices), ("extra_topk_length", extra_topk_length)):
            if value is not None:
                raise check.fail(f"{name} was given without extra_cache")
        extra_topk = 0
    else:
        check_cache(check, "extra_cache", extra_cache)
        if extra_cache.layout != layout:
            raise check.fail(f"extra_cache must have cache's layout {layout}, got {extra_cache.layout}")
        extra_indices = check("extra_indices", extra_indices, ("batch", "q_len", "extra_topk"), INT32)
        extra_topk = extra_indices.shape[-1]
    dims = check.dims
    shape = DecodeShape(dims["batch"], dims["q_len"], dims["heads"], dims["topk"], extra_topk)
    lengths = per_row_lengths(check, "topk_length", topk_length, shape)
    extra_lengths = per_row_lengths(check, "extra_topk_length", extra_topk_length, shape)
    attn_sink = check.optional("attn_sink", attn_sink, ("heads",), FLOAT32)
    check_schedule(check, schedule, shape)

    static = {"softmax_scale": static_scale(check, softmax_scale), "assume_valid_indices": bool(assume_valid_indices)}
    rows, columns = shape.batch * shape.q_len, shape.topk + shape.extra_topk
    route = _route("decode", check, layout, rows, shape.num_heads, columns, q.dtype, backend)
    extra = (extra_cache, extra_indices, extra_lengths)
    return _serve(route, (q, cache, indices, lengths, *extra, attn_sink, schedule), **static)


def sparse_mla_prefill(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    *,
    softmax_scale: float,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    schedule: Any = None,
    assume_valid_indices: bool = False,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of each query over the rows of a contiguous workspace that its indices name.

    Any topk and any head count; rows of q shard under `shard_map` as in `sparse_mla_decode`.

    Args:
      q: bfloat16 `[q_len, heads, qk_dim]`; the reference also takes float32.
      kv: bfloat16 `[kv_len, qk_dim]`; the reference also takes float32. V is its first `min(qk_dim, 512)` values.
      indices: int32 `[q_len, topk]` rows of `kv`; < 0 or ≥ kv_len is skipped, a duplicate counts twice.
      softmax_scale: what q·k is multiplied by (a static number).
      topk_length: int32 `[q_len]`, how many leading columns are scanned; None scans all.
      attn_sink: float32 `[heads]`, a logit per head in the denominator only; not scaled.
      schedule, assume_valid_indices: taken for symmetry with `sparse_mla_decode`; no prefill kernel needs them.
      backend: as in `sparse_mla_decode`, with JAX_SPARSE_MLA_PREFILL_BACKEND.

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
    if schedule is not None and not isinstance(schedule, DecodeSchedule):
        raise TypeError(f"{check.function}: schedule must come from decode_schedule, got {type(schedule).__name__}")
    q_len, topk, qk_dim = check.dims["q_len"], check.dims["topk"], check.dims["qk_dim"]
    v_dim = min(qk_dim, _MAX_V_DIM)
    layout = KVLayout("workspace", nope_dim=qk_dim - 64, rope_dim=64, v_dim=v_dim)
    dtype = np.float32 if np.float32 in (q.dtype, kv.dtype) else q.dtype
    scale = static_scale(check, softmax_scale)
    route = _route("prefill", check, layout, q_len, check.dims["heads"], topk, dtype, backend)
    return _serve(route, (q, kv, indices, topk_length, attn_sink, schedule), softmax_scale=scale, v_dim=v_dim)


def _route(
    phase: str,
    check: ArgumentChecks,
    layout: KVLayout,
    rows: int,
    num_heads: int,
    topk: int,
    dtype: Any,
    backend: str | None,
) -> _Route:
    """What serves the call on this machine's GPU, decided by `plan_attention` from the call's own shapes."""
    spec = ModelSpec(
        name=f"the {phase} call",
        num_heads=max(num_heads, 1),
        qk_dim=layout.qk_dim,
        v_dim=layout.v_dim,
        nope_dim=layout.nope_dim,
        rope_dim=layout.rope_dim,
        softmax_scale=1.0,
        kv_layout=layout,
        page_size=1,
        index_topk=topk,
        index_heads=0,
        index_dim=0,
    )
    override = (
        backend or os.environ.get(f"JAX_SPARSE_MLA_{phase.upper()}_BACKEND") or os.environ.get("JAX_SPARSE_MLA_BACKEND")
    )
    only_the_reference = None
    if np.dtype(dtype) == np.float32:
        only_the_reference = "float32 inputs"
    elif layout.qk_dim not in _KERNEL_QK_DIMS:
        only_the_reference = f"rows of {layout.qk_dim} values"
    try:
        plan = plan_attention(
            phase,
            spec,
            num_q_tokens=rows,
            device=DeviceInfo.current(),
            installed={"reference"} if only_the_reference else installed_for(phase),
            kv_dtype="fp8" if layout.fp8_dim else "bf16",
            num_heads=max(num_heads, 1),
            topk=topk,
            override=override or None,
        )
    except ValueError as error:
        note = f" ({only_the_reference} are served by the reference only)" if only_the_reference else ""
        raise check.fail(f"{error}{note}") from None
    return _Route(phase, plan.backend, named=bool(override))


def _serve(route: _Route, arguments: tuple, **static: Any) -> tuple[jax.Array, ...]:
    """Calls the adapter, under `jit`: only there is the platform known that the program is lowered for."""
    leaves, tree = jax.tree.flatten(arguments)
    return _serve_leaves(*leaves, route=route, tree=tree, static=tuple(static.items()))


@partial(jax.jit, static_argnames=("route", "tree", "static"))
def _serve_leaves(*leaves: jax.Array, route: _Route, tree: Any, static: tuple) -> tuple[jax.Array, ...]:
    def function(backend: str):
        call = getattr(importlib.import_module(_ADAPTERS[backend]), route.phase)

        def named(*leaves):
            with jax.named_scope(f"{_SCOPE}{route.phase}.{backend}"):  # `calls_of` and profilers find it
                return call(*tree.unflatten(leaves), **dict(static))

        named.__name__ = f"{_SCOPE}{route.phase}"  # errors name it
        return named

    plain = function("reference")
    if route.backend == "reference":
        return plain(*leaves)
    kernel = function(route.backend)
    if route.named:  # it runs or fails; it is not replaced in silence
        return dispatch.varying(kernel, plain, *leaves)
    return dispatch.on_cuda(kernel, plain, *leaves, kernel_batches=(route.phase, route.backend) in _BATCHING)


def calls_of(program: jax.stages.Lowered) -> frozenset[tuple[str, str]]:
    """The attention calls of a lowered program, as (phase, backend): what it runs, whatever was planned.

    >>> calls_of(jax.jit(step).lower(*args))
    frozenset({('decode', 'triton')})
    """
    scopes = rf"{_SCOPE}({'|'.join(PHASES)})\.({'|'.join(_ADAPTERS)})\b"
    return frozenset(re.findall(scopes, program.as_text(debug_info=True)))


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

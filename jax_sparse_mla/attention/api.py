"""The two attention functions of a layer: check the arguments, decide the route, call the kernel.

The route is decided while tracing, for this machine's GPU. Which of its two ends a program takes is settled when the
program is lowered: for CUDA the routed kernel, for any other platform the reference.
"""

from __future__ import annotations

import math
import os
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import sharding
from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.attention.backend import BACKENDS, PHASES, Call, IndexTable
from jax_sparse_mla.attention.gradient import differentiable
from jax_sparse_mla.attention.route import Plan, plan_call
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.kv_cache.layout import KVLayout, workspace_layout
from jax_sparse_mla.kv_cache.paged import check_first_cache, check_second_cache
from jax_sparse_mla.launch import dispatch

__all__ = ["calls_of", "installed_backends", "installed_for", "plan_here", "sparse_mla_decode", "sparse_mla_prefill"]

# The parts of a program that attend are named: this prefix, the phase, a dot, the backend.
_SCOPE = "sparse_mla_"


class _Route(NamedTuple):
    """How a call is served.

    Attributes:
      phase, backend: what is called.
      named: whether the caller or the environment asked for the backend by name.
      deterministic_gradient: whether the gradient repeats to the bit.
    """

    phase: str
    backend: str
    named: bool
    deterministic_gradient: bool = False


def missing_for(phase: str) -> dict[str, str]:
    """The backends that cannot serve this phase in this process, whatever the call, and why."""
    device = DeviceInfo.current()
    missing = {}
    for name, backend in BACKENDS.items():
        why = backend.wrong_device(device)  # asked first: what follows may build a kernel
        if why is None and device.platform == "cuda" and jax.default_backend() != "gpu":
            why = None if backend.devices is None else "JAX has no GPU here"
        if why := why or backend.missing(phase, "jax"):
            missing[name] = why
    return missing


def installed_for(phase: str) -> frozenset[str]:
    """Names of the backends that can serve this phase here, for some call."""
    return frozenset(BACKENDS) - missing_for(phase).keys()


def installed_backends() -> frozenset[str]:
    """Names of the backends that can serve a phase here: their packages are there and the device is one of theirs."""
    return frozenset().union(*map(installed_for, PHASES))


def plan_here(
    phase: str,
    layout: KVLayout,
    *,
    rows: int,
    heads: int,
    topk: int,
    dtype: Any = jnp.bfloat16,
    chunk: bool = False,
    backend: str | None = None,
    batch_invariant: bool = False,
    extra_layout: KVLayout | None = None,
) -> Plan:
    """The plan of a call on this machine's GPU; the environment's overrides are read.

    Args:
      phase, layout, topk, chunk, batch_invariant, extra_layout: as those of `Call`.
      rows, heads: query rows, and heads on this rank.
      dtype: of the queries.
      backend: the name of the backend that must serve the call; by default JAX_SPARSE_MLA_DECODE_BACKEND or
        …_PREFILL_BACKEND, then JAX_SPARSE_MLA_BACKEND, then the router's choice.

    Raises:
      ValueError: the named backend is unknown or cannot serve the call, with the reason.
    """
    facts = DeviceInfo.current(), topk, np.dtype(dtype).name, chunk, batch_invariant, extra_layout
    call = Call(phase, layout, rows, max(heads, 1), *facts)
    return plan_call(call, unable=missing_for(phase), override=backend or override_of(phase))


def override_of(phase: str) -> str | None:
    """The backend that the environment names for a phase."""
    names = (f"JAX_SPARSE_MLA_{phase.upper()}_BACKEND", "JAX_SPARSE_MLA_BACKEND")
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


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
    by the rows and heads of q; under plain `jit` the partitioner cuts both (docs/*/sharding.md). Decode kernels have
    no gradient: differentiate with `backend="reference"`.

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
    static = {"softmax_scale": static_scale(check, softmax_scale), "assume_valid_indices": bool(assume_valid_indices)}
    static |= {"batch_invariant": True} if batch_invariant else {}

    # A table without columns or a cache without slots has nothing to read.
    tables = [table for table in tables if table.indices.shape[-1] and table.cache.num_slots]
    batch, q_len, heads, _ = q.shape
    columns = sum(table.indices.shape[-1] for table in tables)
    extra_layout = None if extra_cache is None else extra_cache.layout
    facts = {"rows": batch * q_len, "heads": heads, "topk": columns, "dtype": q.dtype, "extra_layout": extra_layout}
    route = _route(check, "decode", layout, backend=backend, batch_invariant=batch_invariant, **facts)
    if q.size == 0 or not tables:
        return _nothing(q, layout.v_dim)
    return _serve(check, route, (q, tuple(tables), attn_sink), **static)


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
    scale = static_scale(check, softmax_scale)
    q_len, heads, qk_dim = q.shape
    layout = workspace_layout(qk_dim)
    dtype = np.float32 if np.float32 in (q.dtype, kv.dtype) else q.dtype
    facts = {"rows": q_len, "heads": heads, "topk": indices.shape[1], "dtype": dtype}
    route = _route(check, "prefill", layout, backend=backend, batch_invariant=batch_invariant, **facts)
    route = route._replace(deterministic_gradient=bool(deterministic_gradient))
    if 0 in (q.size, kv.size, indices.size):
        out, lse = _nothing(q, layout.v_dim)
        return out, lse, lse
    static = {"softmax_scale": scale} | ({"batch_invariant": True} if batch_invariant else {})
    return _serve(check, route, (q, kv, indices, topk_length, attn_sink), **static)


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

    def empty(q):
        return jnp.zeros((*q.shape[:-1], v_dim), q.dtype), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)

    def varying(q):  # as q does, over the mesh axes of a `shard_map`
        return q, q

    return dispatch.varying(empty, varying, jax.lax.stop_gradient(q))  # the gradient is 0


def _route(
    check: ArgumentChecks, phase: str, layout: KVLayout, *, backend: str | None, batch_invariant: bool, **facts: Any
) -> _Route:
    """What serves the call on this machine's GPU, by `plan_here`; errors name the function."""
    facts["batch_invariant"] = bool(batch_invariant)
    try:
        plan = plan_here(phase, layout, **facts, backend=backend)
    except ValueError as error:
        raise check.fail(str(error)) from None
    return _Route(phase, plan.backend, named=bool(backend or override_of(phase)))


def _serve(check: ArgumentChecks, route: _Route, arguments: tuple, **static: Any) -> tuple[jax.Array, ...]:
    """Calls the adapter, under `jit`: only there is the platform known that the program is lowered for."""
    facts = {"route": route, "static": tuple(static.items())}
    if not sharding.is_sharded(arguments):
        return _serve_traced(*arguments, **facts)
    if route.phase == "decode":
        names = ("cache", "extra_cache")
        sharding.refuse_sharded(check, **{name: table.cache for name, table in zip(names, arguments[1])})
    else:
        sharding.refuse_sharded(check, kv=arguments[1])
    return sharding.on_own_shares(_serve_traced, _SHARES[route.phase](*arguments), arguments, **facts)


def _decode_shares(q: jax.Array, tables: tuple[IndexTable, ...], attn_sink: jax.Array | None) -> sharding.PartitionRule:
    """Rows and heads may be cut; every device reads the whole cache."""
    rows, of_q = P("batch", "q_len"), P("batch", "q_len", "heads")
    tables = tuple(IndexTable(P(), rows, None if table.lengths is None else rows) for table in tables)
    return sharding.PartitionRule((of_q, tables, None if attn_sink is None else P("heads")), (of_q, of_q))


def _prefill_shares(
    q: jax.Array, kv: jax.Array, indices: jax.Array, lengths: jax.Array | None, attn_sink: jax.Array | None
) -> sharding.PartitionRule:
    """As `_decode_shares`; every device reads the whole workspace."""
    optional = None if lengths is None else P("rows"), None if attn_sink is None else P("heads")
    return sharding.PartitionRule((P("rows", "heads"), P(), P("rows"), *optional), (P("rows", "heads"),) * 3)


_SHARES = {"decode": _decode_shares, "prefill": _prefill_shares}


@partial(jax.jit, static_argnames=("route", "static"))
def _serve_traced(*arguments: Any, route: _Route, static: tuple) -> tuple[jax.Array, ...]:
    shares = _SHARES[route.phase](*arguments)

    def function(backend: str):
        call = partial(BACKENDS[backend].function(route.phase), **dict(static))

        def named(*arguments):
            with jax.named_scope(f"{_SCOPE}{route.phase}.{backend}"):  # `calls_of` and profilers find it
                return dispatch.shared(call, shares)(*arguments)

        named.__name__ = f"{_SCOPE}{route.phase}"  # errors name it
        return named

    plain = function("reference")
    if route.backend == "reference":
        return plain(*arguments)
    kernel = function(route.backend)
    record = BACKENDS[route.backend]
    if route.named:  # it runs or fails; it is not replaced in silence
        serve = partial(dispatch.varying, kernel, plain)
    else:
        serve = partial(dispatch.on_cuda, kernel, plain, kernel_batches=route.phase in record.batches)
    if route.phase in record.gradients:
        facts = {"softmax_scale": dict(static)["softmax_scale"], "deterministic": route.deterministic_gradient}
        serve = differentiable(serve, name=kernel.__name__, **facts)
    return serve(*arguments)


def calls_of(program: jax.stages.Lowered) -> frozenset[tuple[str, str]]:
    """The attention calls of a lowered program, as (phase, backend): what it runs, whatever was planned.

    >>> calls_of(jax.jit(step).lower(*args))
    frozenset({('decode', 'triton')})
    """
    scopes = rf"{_SCOPE}({'|'.join(PHASES)})\.({'|'.join(BACKENDS)})\b"
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

"""A V4-Flash prefill chunk by both routes: attention over the paged caches, or gathered into a bf16 workspace.

One layer of ratio 4 and a request of 32,768 tokens, of which the chunk is the end. The gathered route's time includes
the gathers and the merge of the indices; the plan is built once a chunk, for all layers, and is not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Case, Run, Spec, kernel_backends, operation
from jax_sparse_mla import (
    DEEPSEEK_V4_FLASH,
    ForwardBatch,
    ForwardMode,
    RequestTables,
    build_prefill_plan,
    sparse_mla_decode,
    sparse_mla_extend,
)
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv

SPEC, LAYOUT, RATIO, PAGE = DEEPSEEK_V4_FLASH, KVLayout.V4_FP8, 4, 256
TOKENS = 32_768
ROWS = (64, 256, 1024, 4096, 8192)


def specs() -> Iterator[Spec]:
    for rows in ROWS:
        yield Spec(f"extend V4 Flash, {rows} rows", functools.partial(_case, rows=rows))


def _case(rng: np.random.Generator, rows: int) -> Case:
    swa_cache, compressed_cache = _cache(rng, TOKENS + PAGE, PAGE), _cache(rng, (TOKENS + PAGE) // RATIO, PAGE // RATIO)
    key = jax.random.key(int(rng.integers(2**31)))
    q = jax.random.normal(key, (rows, SPEC.num_heads, SPEC.qk_dim), jnp.bfloat16)
    sink = jnp.zeros((SPEC.num_heads,), jnp.float32)
    first = TOKENS - rows
    chosen = rng.integers(0, first // RATIO, (rows, SPEC.index_topk), dtype=np.int32)
    # A request's tokens lie behind the dummy page in their order, in both caches.
    window = first + np.arange(rows, dtype=np.int32)[:, None] - np.arange(SPEC.window, dtype=np.int32) + PAGE
    topk, window = jnp.asarray(chosen), jnp.asarray(window)
    plan = _plan(rows)

    def paged(q, swa_cache, compressed_cache, window, slots, *, backend):
        return sparse_mla_decode(
            q[:, None],
            swa_cache,
            window[:, None],
            extra_cache=compressed_cache,
            extra_indices=slots[:, None],
            softmax_scale=SPEC.softmax_scale,
            attn_sink=sink,
            backend=backend,
        )

    def gathered(q, plan, swa_cache, compressed_cache, topk, *, backend):
        return sparse_mla_extend(
            q,
            plan,
            swa_cache,
            compressed_cache,
            topk,
            softmax_scale=SPEC.softmax_scale,
            attn_sink=sink,
            backend=backend,
        )

    runs = {}
    for phase, name, function, arguments in (
        ("decode", "paged", paged, (q, swa_cache, compressed_cache, window, topk + PAGE // RATIO)),
        ("prefill", "gathered", gathered, (q, plan, swa_cache, compressed_cache, topk)),
    ):
        for backend in kernel_backends(phase):
            jitted = jax.jit(functools.partial(function, backend=backend))
            runs[f"{backend} {name}"] = Run(functools.partial(jitted, *arguments), "jax")
    keys = rows * (SPEC.window + SPEC.index_topk)
    return Case(
        ours=runs,
        peers={},
        bytes=2 * rows * SPEC.num_heads * 1024
        + (TOKENS // RATIO + rows + SPEC.window) * LAYOUT.bytes_per_token
        + 4 * keys,
        flop=2 * SPEC.num_heads * keys * (SPEC.qk_dim + SPEC.v_dim),
    )


def _plan(rows: int):
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        max_seq_len=TOKENS,
        req_pool_indices=jnp.zeros((1,), jnp.int32),
        seq_lens=jnp.full((1,), TOKENS, jnp.int32),
        out_cache_loc=jnp.zeros((rows,), jnp.int32),
        extend_lens=jnp.full((1,), rows, jnp.int32),
    )
    slots = jnp.arange(PAGE, PAGE + TOKENS, dtype=jnp.int32)
    full_to_swa = jnp.arange(PAGE + TOKENS + 1, dtype=jnp.int32).at[-1].set(-1)
    tables = RequestTables(req_to_token=slots[None], full_to_swa=full_to_swa)
    capacities = {"swa_capacity": rows + SPEC.window, "compressed_capacity": TOKENS // RATIO}
    return build_prefill_plan(SPEC, batch, tables, compress_ratio=RATIO, **capacities)


def _cache(rng: np.random.Generator, slots: int, page_size: int) -> PagedKV:
    rows = jax.random.normal(jax.random.key(int(rng.integers(2**31))), (slots, LAYOUT.qk_dim), jnp.bfloat16)
    empty = PagedKV.zeros(LAYOUT, slots // page_size, page_size)
    return jax.jit(write_kv, donate_argnums=0)(empty, jnp.arange(slots, dtype=jnp.int32), rows)


main = operation("extend", __doc__, specs)

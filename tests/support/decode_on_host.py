"""The SM90 decode kernels compiled for the host: as a function of a case of `attention_oracle`, and as a program that
judges a library.

    python decode_on_host.py LIBRARY            # compares every format and kernel with float64
    python decode_on_host.py LIBRARY "wide cluster"    # runs one of `PLANS`, with V3.2's rows or, if short, V4's

The threads of all thread blocks of a launch, or of a cluster, take turns; `host_cuda/sm90_host.h` says what happens
when. A process ends where threads wait for each other for ever, where an operand changes while its product is under
way, and where a copy or `__ldg` reads memory that is none of the call's.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
from attention_oracle import DecodeCase, HostCache, assert_close_flashmla, decode_case, decode_oracle
from host_build import GUARD, aligned, poisoned

from jax_sparse_mla.attention.hopper.decode_plan import (
    ALWAYS,
    AS_LENGTHS_SAY,
    IN_CLUSTERS,
    IN_WINDOW,
    NEVER,
    NO_CACHE,
    SCRATCH_OF_BLOCK,
    V_DIM,
    DecodePlan,
    cache_numbers,
    decode_format,
)
from jax_sparse_mla.kv_cache import KVLayout

# Layouts of the two caches: every format of the kernels.
CACHES = [
    ("V4_FP8", "V4_FP8"),
    ("V32_FP8", "V32_FP8"),
    ("V41_FP8", "V41_FP8"),
    ("V41_FP8_SPLIT", "V41_FP4_SPLIT"),
    ("V41_FP8", "V41_FP4"),
    ("V4_BF16", "V4_BF16"),
    ("V32_BF16", "V32_BF16"),
]


def case_of(layout: str, extra_layout: str, seed: int, **setting) -> DecodeCase:
    """Five to seven blocks of keys a row, holes, duplicates, hostile slots and lengths; see `decode_case`."""
    base = {"heads": 5, "topk": 200, "page_size": 61, "batch": 3, "q_len": 1, "extra": (130, 2), "rows": "mixed"}
    base |= {"lengths": "row", "extra_lengths": "row", "sink": True, "scale_power": 0.5, "hot": False}
    layouts = {"layout": layout, "extra_layout": extra_layout}
    return decode_case(np.random.default_rng(seed), "on the host", base | layouts | setting)


def many(groups: int, *, lengths: bool = True, cut: bool = True) -> DecodePlan:
    """The persistent kernel, whose thread blocks form so many groups."""
    return DecodePlan(64, groups, (AS_LENGTHS_SAY if lengths else ALWAYS) if cut else NEVER, 0)


def few(tile: int, parts: int) -> DecodePlan:
    """The cluster kernel, with so many heads and thread blocks of a cluster."""
    return DecodePlan(tile, parts, NEVER, 0)


def wide(parts: int) -> DecodePlan:
    """The wide cluster kernel, with so many thread blocks of a cluster."""
    return DecodePlan(64, parts, IN_CLUSTERS, 0)


WINDOW = DecodePlan(64, 1, IN_WINDOW, 0)  # the window kernel
WINDOW_LAYOUTS = ["V4_FP8", "V41_FP8", "V41_FP8_SPLIT", "V4_BF16"]


def window_case(layout: str, seed: int, **setting) -> DecodeCase:
    """At most 128 columns of one cache."""
    return case_of(layout, layout, seed, **{"extra": None, "topk": 128} | setting)


# A launch of each kind, and the case that it runs.
PLANS = {
    "persistent, by lengths": (many(2), {"heads": 33, "topk": 130, "extra": (70, 2)}),
    "persistent, two tiles": (many(2), {"heads": 70, "batch": 2}),
    "persistent, cut": (many(3, lengths=False), {"batch": 1, "lengths": "none", "extra_lengths": "none"}),
    "cluster of 16 heads": (few(16, 2), {"heads": 17, "batch": 1, "lengths": "none"}),
    "cluster of 32 heads": (few(32, 3), {"heads": 33, "batch": 1}),
    "wide cluster": (wide(3), {"heads": 33, "batch": 1}),  # no row shares anything with another
    "window": (WINDOW, {"heads": 33, "batch": 1, "extra": None, "topk": 128}),
}


def case_and_plan(layouts: tuple[str, str], name: str):
    plan, setting = PLANS[name]
    return case_of(*layouts, CACHES.index(layouts), **setting), plan


def run_on_host(function: Callable, case: DecodeCase, plan: DecodePlan, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """out float32 `[batch, q_len, heads, 512]` and lse, by the kernel that the plan names. Outputs and scratch memory
    are poisoned. Warps have their turns in an order of `seed`, by 0 one after the other."""
    batch, q_len, heads, _ = case.q.shape
    rows = batch * q_len
    tables = [(case.cache, case.indices, case.topk_length)]
    if case.extra_cache is not None:
        tables.append((case.extra_cache, case.extra_indices, case.extra_topk_length))
    kernel_format = decode_format(getattr(KVLayout, cache.layout) for cache, *_ in tables)
    tables = [*tables, (None, None, None)][:2]
    blocks = plan.groups * -(-heads // 64)
    of_results = ((rows, heads, V_DIM), ml_dtypes.bfloat16), ((rows, heads), np.float32)
    scratch = (blocks * SCRATCH_OF_BLOCK,), np.uint8
    results, guards = zip(*(poisoned(*result) for result in (*of_results, scratch)))
    given = [case.q, *(x for cache, *rest in tables for x in (cache and cache.data, *rest)), case.attn_sink]
    tensors = [*(None if x is None else aligned(x) for x in given), *results]
    shapes = (ctypes.c_int64 * 18)(*(x for table in tables for x in _shape(*table, rows)))
    addresses = (ctypes.c_void_p * 11)(*(None if x is None else x.ctypes.data for x in tensors))
    sizes = (ctypes.c_int64 * 11)(*(0 if x is None else x.nbytes for x in tensors))
    numbers = ctypes.c_double(case.softmax_scale), ctypes.c_double(-math.inf)
    how = plan.tile, plan.groups, plan.cuts
    function(rows, heads, kernel_format, shapes, *numbers, *how, addresses, sizes, ctypes.c_uint(seed))
    assert all((guard == GUARD).all() for guard in guards), "something was written behind a result"
    out, lse, _ = results
    return out.astype(np.float32).reshape(batch, q_len, heads, V_DIM), lse.reshape(batch, q_len, heads)


def check_on_host(function: Callable, case: DecodeCase, plan: DecodePlan, seed: int = 0) -> None:
    """Compares what the kernel makes with float64."""
    out, lse = run_on_host(function, case, plan, seed)
    expected_out, expected_lse = decode_oracle(case)
    assert_close_flashmla(lse, expected_lse, "decode.lse")
    assert_close_flashmla(out, expected_out, "decode.out")
    assert not np.any(out[np.isneginf(expected_lse)])


def _shape(cache: HostCache | None, indices: np.ndarray | None, lengths: np.ndarray | None, rows: int) -> tuple:
    """The numbers of call.cuh's Shape."""
    if cache is None:
        return 0, 0, 0, *NO_CACHE
    numbers = cache_numbers(getattr(KVLayout, cache.layout), len(cache.rows), cache.page_size, cache.data.shape[1])
    return indices.shape[-1], indices.shape[-1], 0 if lengths is None else rows // lengths.size, *numbers


def main(library: str, plan: str | None = None) -> None:
    function = ctypes.CDLL(library).sparse_decode_on_host
    if plan is not None:
        case, how = case_and_plan((("V4_FP8" if plan == "window" else "V32_FP8"),) * 2, plan)
        run_on_host(function, case, how)
        return
    for layouts in CACHES:
        for seed in range(3):
            check_on_host(function, case_of(*layouts, seed, heads=(5, 33, 64)[seed], hot=seed > 0), many(2), seed)
            case = case_of(*layouts, seed, batch=1, lengths="none", extra_lengths="none")
            check_on_host(function, case, many(5, lengths=False), seed)
            check_on_host(function, case_of(*layouts, seed, batch=1, lengths="none"), few(16, 2), seed)
            check_on_host(function, case_of(*layouts, seed, heads=(5, 33, 64)[seed], batch=1), wide(2 + seed), seed)
    for seed, layout in enumerate(WINDOW_LAYOUTS):
        check_on_host(function, window_case(layout, seed, hot=seed % 2 == 0), WINDOW, seed)


if __name__ == "__main__":
    main(*sys.argv[1:])

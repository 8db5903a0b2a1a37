"""How the attention tests call the package: cases to arguments, results against the oracle."""

from __future__ import annotations

import dataclasses
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import (
    HostCache,
    assert_close_flashmla,
    decode_case,
    decode_oracle,
    prefill_case,
    prefill_oracle,
    unpack_cache,
)
from layout_oracle import RECORDS, TENSOR_SCALE, put_token

from jax_sparse_mla.attention import DeviceInfo, machine, plan_attention, sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.hopper import decode_plan
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from jax_sparse_mla.kv_cache.paged import paged
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH

H200 = DeviceInfo("cuda", (9, 0), 132, 232_448)
# 528 bytes of FP8: no kernel was written for it, and one that tells layouts by their sizes would misread it.
MADE_UP = dataclasses.replace(
    KVLayout.V4_FP8, name="made up", fp8_dim=512, group=128, inline_scale_bytes=16, footer_scale_bytes=0, page_align=1
)
OVERRIDES = tuple(f"JAX_SPARSE_MLA_{phase}BACKEND" for phase in ("", "DECODE_", "PREFILL_"))


def pretend_installed(monkeypatch, *names: str) -> None:
    """Of the backends these are usable from JAX, and the reference; on any device."""
    absent = {name: "not installed" for name in BACKENDS if name not in (*names, "reference")}
    monkeypatch.setattr(machine, "missing_for", lambda phase: dict(absent))


def pretend_h200(monkeypatch, *names: str) -> None:
    """An H200 on which these backends and the reference are usable from JAX, and nothing is asked for by name."""
    pretend_installed(monkeypatch, *names)
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: H200))
    for name in OVERRIDES:
        monkeypatch.delenv(name, raising=False)


def skip_unless_able(backend: str, phase: str, rows: int, heads: int, topk: int, kv_dtype: str = "fp8") -> None:
    """Skips, with the router's reason, what this backend cannot serve on this device."""
    try:
        plan_attention(
            phase,
            DEEPSEEK_V4_FLASH,
            num_q_tokens=rows,
            device=DeviceInfo.current(),
            installed={backend},
            kv_dtype=kv_dtype,
            num_heads=heads,
            topk=topk,
            override=backend,
        )
    except ValueError as reason:
        pytest.skip(str(reason))


def plan_of_many(*args, **options) -> decode_plan.DecodePlan:
    """`decode_plan`'s, were there no clusters."""
    with mock.patch.object(decode_plan, "_time_in_clusters", lambda *shape: decode_plan.NO_CLUSTERS):
        return decode_plan.decode_plan(*args, **options)


def by_decode_kernel(
    cluster: tuple[int, int] | None, monkeypatch, *, window: bool = False
) -> list[decode_plan.DecodePlan]:
    """Makes `hopper` launch a cluster kernel, with so many heads and thread blocks of a cluster, or the persistent one;
    with `window`, the window kernel. Returns the plans, as they are made."""
    made, plan = [], decode_plan.DecodePlan
    fastest = (0.0, *cluster) if cluster else decode_plan.NO_CLUSTERS
    monkeypatch.setattr(decode_plan, "_time_in_clusters", lambda *shape: fastest)
    monkeypatch.setattr(decode_plan, "_in_one_wave", lambda *shape: window)
    monkeypatch.setattr(decode_plan, "DecodePlan", lambda *fields: made.append(plan(*fields)) or made[-1])
    return made


def device_cache(host: HostCache | None) -> PagedKV | None:
    if host is None:
        return None
    layout = getattr(KVLayout, host.layout)
    scale = jnp.full(1, TENSOR_SCALE) if layout.has_tensor_scale else None
    return paged(device_array(host.data), scale, layout=layout, page_size=host.page_size)


def device_array(x: np.ndarray | None) -> jax.Array | None:
    """A copy: on a CPU `device_put` may share what tests change later. `jnp.asarray` compiles for every shape."""
    return None if x is None else jax.device_put(x.copy())


def decode_arguments(case) -> dict:
    caches = {"cache": device_cache(case.cache), "extra_cache": device_cache(case.extra_cache)}
    names = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length", "attn_sink")
    arrays = {name: device_array(getattr(case, name)) for name in names}
    return caches | arrays | {"softmax_scale": case.softmax_scale}


def prefill_arguments(case) -> dict:
    names = ("q", "kv", "indices", "topk_length", "attn_sink")
    arrays = {name: device_array(getattr(case, name)) for name in names}
    return arrays | {"softmax_scale": case.softmax_scale}


def run_decode(case, backend: str = "reference", **kwargs):
    batch, q_len, heads, _ = case.q.shape
    kv_dtype = "bf16" if case.cache.layout.endswith("BF16") else "fp8"
    skip_unless_able(backend, "decode", batch * q_len, heads, case.indices.shape[-1], kv_dtype)
    return sparse_mla_decode(**decode_arguments(case) | kwargs, backend=backend)


def run_prefill(case, backend: str = "reference", **kwargs):
    skip_unless_able(backend, "prefill", case.q.shape[0], case.q.shape[1], case.indices.shape[-1])
    return sparse_mla_prefill(**prefill_arguments(case) | kwargs, backend=backend)


def check_decode(case, result) -> None:
    out, lse = result
    expected_out, expected_lse = decode_oracle(case)
    chex.assert_type([out, lse], [jnp.bfloat16, jnp.float32])
    assert_close_flashmla(lse, expected_lse, "decode.lse")
    assert_close_flashmla(out, expected_out, "decode.out")
    assert not np.any(np.asarray(out, np.float32)[np.isneginf(expected_lse)])


def check_prefill(case, result) -> None:
    out, max_logits, lse = result
    expected_out, expected_max, expected_lse = prefill_oracle(case)
    chex.assert_type([out, max_logits, lse], [jnp.bfloat16, jnp.float32, jnp.float32])
    assert_close_flashmla(max_logits, expected_max, "prefill.max_logits")
    assert_close_flashmla(lse, expected_lse, "prefill.lse")
    assert_close_flashmla(out, expected_out, "prefill.out")
    assert not np.any(np.asarray(out, np.float32)[np.isneginf(expected_lse)])


def assert_same(actual, expected) -> None:
    """The same bits, for calls that differ only in what must not matter."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_agree(actual, expected, kind: str) -> None:
    """Against another call's results, by FlashMLA's tolerances: kernels may sum in another order."""
    names = ("out", "lse") if kind == "decode" else ("out", "max_logits", "lse")
    for name, a, b in zip(names, actual, expected, strict=True):
        assert_close_flashmla(a, np.asarray(b).astype(np.float64), f"{kind}.{name}")


def check_last_slots_of_5_gib(layout: str, backend: str) -> None:
    """Decode from the end of a cache past what 32 bits address gives the bits of the small cache."""
    case = small_decode(layout=layout, lengths="none")
    arguments = decode_arguments(case)
    page, expected = arguments["cache"], sparse_mla_decode(**arguments, backend=backend)
    count, page_bytes = page.data.shape
    total = -(-(5 << 30) // page_bytes)
    put = jax.jit(lambda big, last: big.at[total - count :].set(last), donate_argnums=0)
    big = put(jnp.zeros((total, page_bytes), jnp.uint8), page.data)
    exists = (case.indices >= 0) & (case.indices < len(case.cache.rows))
    moved = np.where(exists, case.indices.astype(np.int64) + (total - count) * page.page_size, -1)
    arguments |= {"cache": dataclasses.replace(page, data=big), "indices": jnp.asarray(moved.astype(np.int32))}
    assert_same(sparse_mla_decode(**arguments, backend=backend), expected)


def small_decode(seed: int = 0, **setting):
    base = {"layout": "V4_FP8", "heads": 4, "topk": 16, "page_size": 64, "batch": 3, "q_len": 2, "extra": None}
    base |= {"lengths": "row", "extra_lengths": "row", "sink": True, "scale_power": 0.5, "hot": False}
    return decode_case(np.random.default_rng(seed), "small", base | {"rows": "mixed"} | setting)


def small_prefill(seed: int = 0, **setting):
    base = {"dim": 512, "heads": 4, "sizes": (40, 16), "q_len": 6, "lengths": True, "sink": True, "scale": 0.1}
    return prefill_case(np.random.default_rng(seed), "small", base | {"hot": False, "rows": "mixed"} | setting)


def with_unused_bytes(host: HostCache, byte: int) -> HostCache:
    """The cache with its poison (0xFF all over the unused slots) replaced by another byte."""
    data = host.data.copy()
    unused = np.isnan(host.rows).all(axis=1)
    assert unused.any()
    for slot in np.flatnonzero(unused):
        page, offset = divmod(int(slot), host.page_size)
        if host.layout in RECORDS:
            record = RECORDS[host.layout]
            values, scales = (np.full(n, byte, np.uint8) for n in (record.value_bytes, record.scale_bytes))
            put_token(data, host.layout, host.page_size, slot, values, scales)
        elif host.layout == "V4_FP8":
            data[page, offset * 576 : (offset + 1) * 576] = byte
            data[page, host.page_size * 576 + offset * 8 :][:8] = byte
        else:
            row = data.shape[1] // host.page_size
            data[page, offset * row : (offset + 1) * row] = byte
    return HostCache(host.layout, host.page_size, data, unpack_cache(host.layout, host.page_size, data))

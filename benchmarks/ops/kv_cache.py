"""Bytes of paged KV caches: `gather_kv`, `write_kv`, `split_pages`.

Peers: SGLang's gather and its store, called from torch; plain XLA for the split, which nobody else has in this shape.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch.operations import kv_cache as torch_kv

from benchmarks import peers
from benchmarks.harness import Case, Run, Spec, in_place, operation
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv, split_pages, write_kv
from jax_sparse_mla.kv_cache.split import split_touched_reference

V4 = KVLayout.V4_FP8
PAGE_SIZE = 256
POOL_PAGES = 2048  # 524,288 slots, 307 MB: far more than the L2 holds
# A row of the cache that is read or written (the eighth scale byte stays), one in bfloat16, and its slot.
READ_BYTES, WRITTEN_BYTES, ROW_BYTES, SLOT_BYTES = 584, 583, 1024, 4


def specs() -> Iterator[Spec]:
    for n, kind in ((8_192, "pages"), (32_768, "pages"), (131_072, "pages"), (131_072, "random")):
        yield Spec(f"gather_kv V4 {n} {kind}", functools.partial(_gather, n=n, kind=kind))
    for kind in ("pages", "random"):
        yield Spec(f"write_kv V4 65536 {kind}", functools.partial(_write, n=65_536, kind=kind))
    yield Spec("split_pages 128 of 2048", _split)


def _pool(rng: np.random.Generator) -> np.ndarray:
    """Random pages. No scale is so small that a product is denormal: SGLang flushes those to 0."""
    return rng.integers(64, 120, (POOL_PAGES, V4.page_bytes(PAGE_SIZE)), dtype=np.uint8)


def _gather(rng: np.random.Generator, n: int, kind: str) -> Case:
    pool, slots = _pool(rng), _slots(rng, n, kind)
    torch_cache, torch_slots = _torch_cache(pool), torch.from_numpy(slots).cuda()
    out, their_out = (torch.empty((n, V4.qk_dim), dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def sglang():
        gather = peers.find("sglang gather").dequantize_k_cache_paged_dsv4
        return gather(torch_cache.data, torch_slots, PAGE_SIZE, out=their_out[:, None])[:, 0]

    ours = Run(functools.partial(jax.jit(gather_kv), _jax_cache(pool), jnp.asarray(slots)), "jax")
    return Case(
        ours={"jax": ours, "torch": Run(lambda: torch_kv.gather_kv(torch_cache, torch_slots, out=out), "torch")},
        peers={"sglang": Run(sglang, "torch")},
        bytes=n * (READ_BYTES + ROW_BYTES + SLOT_BYTES),
        checks={"sglang": lambda: _unequal(ours.call(), sglang(), most=0.0)},
    )


def _write(rng: np.random.Generator, n: int, kind: str) -> Case:
    pool, slots = _pool(rng), _slots(rng, n, kind)
    torch_cache, their_cache, torch_slots = _torch_cache(pool), _torch_cache(pool), torch.from_numpy(slots).cuda()
    kv = rng.standard_normal((n, V4.qk_dim)).astype(np.float32)
    torch_rows = torch.from_numpy(kv).to("cuda", torch.bfloat16)
    ours = in_place(write_kv, _jax_cache(pool), jnp.asarray(slots), jnp.asarray(kv, jnp.bfloat16))

    def sglang():
        store = peers.find("sglang store").fused_store_cache
        store(torch_rows, their_cache.data, torch_slots, page_size=PAGE_SIZE, type="flashmla")
        return their_cache.data

    return Case(
        ours={"jax": ours, "torch": Run(lambda: torch_kv.write_kv(torch_cache, torch_slots, torch_rows), "torch")},
        peers={"sglang": Run(sglang, "torch")},
        bytes=n * (ROW_BYTES + WRITTEN_BYTES + SLOT_BYTES),
        checks={"sglang": lambda: _unequal(ours.call().data, sglang(), most=1e-4)},
    )


def _split(rng: np.random.Generator) -> Case:
    """The windows of 64 requests: 128 neighbouring slots each, in two pages of their own."""
    pool = _pool(rng)
    starts = rng.permutation(POOL_PAGES // 2)[:64, None] * 2 * PAGE_SIZE + 200
    slots = (starts + np.arange(128)).astype(np.int32)
    jax_slots, torch_slots = jnp.asarray(slots), torch.from_numpy(slots).cuda()
    shape = (POOL_PAGES * 4, V4.page_bytes(64))
    jax_cache, torch_cache = _jax_cache(pool), _torch_cache(pool)
    out = PagedKV(data=torch.zeros(shape, dtype=torch.uint8, device="cuda"), layout=V4, page_size=64)

    def small() -> PagedKV:
        return PagedKV(data=jnp.zeros(shape, jnp.uint8), layout=V4, page_size=64)

    def plain(out, cache, slots):
        return dataclasses.replace(out, data=split_touched_reference(out.data, cache, 64, slots))

    return Case(
        ours={
            "jax": in_place(lambda o, c, s: split_pages(c, 64, slots=s, out=o), small(), jax_cache, jax_slots),
            "torch": Run(lambda: torch_kv.split_pages(torch_cache, out, torch_slots), "torch"),
        },
        peers={"xla": in_place(plain, small(), jax_cache, jax_slots)},
        bytes=128 * 2 * PAGE_SIZE * V4.bytes_per_token,
    )


def _unequal(ours: jax.Array, theirs: torch.Tensor, most: float) -> float:
    """The share of elements that differ. SGLang quantises by other instructions: a few bytes are off by one place."""
    share = (torch.from_dlpack(jax.block_until_ready(ours)) != theirs).float().mean().item()
    assert share <= most, f"{share:.2%} differ"
    return share


def _jax_cache(pool: np.ndarray) -> PagedKV:
    return PagedKV(data=jnp.asarray(pool), layout=V4, page_size=PAGE_SIZE)


def _torch_cache(pool: np.ndarray) -> PagedKV:
    return PagedKV(data=torch.from_numpy(pool).cuda(), layout=V4, page_size=PAGE_SIZE)


def _slots(rng: np.random.Generator, n: int, kind: str) -> np.ndarray:
    """ "pages": whole pages in random order, as a request's tokens lie; "random": every token somewhere else."""
    if kind == "random":
        return rng.permutation(POOL_PAGES * PAGE_SIZE)[:n].astype(np.int32)
    pages = rng.permutation(POOL_PAGES)[: n // PAGE_SIZE]
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1).astype(np.int32)


main = operation("kv_cache", __doc__, specs)

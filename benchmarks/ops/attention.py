"""Sparse MLA attention at production shapes: our backends from jitted JAX, the Triton kernel also from torch.

The peer is FlashMLA called from torch (sgl-flash-mla), padded to 64 heads where there are fewer. Keys are random rows
of a cache far larger than the L2, but for prefill, whose workspaces have the sizes that FlashMLA's own table has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch import flash_mla as drop_in
from sparse_mla_torch import to_torch

from benchmarks import peers
from benchmarks.timing import Case, Run, kernel_backends
from jax_sparse_mla import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv

V4, V32 = KVLayout.V4_FP8, KVLayout.V32_FP8
SLOTS = 131_072  # of each cache: 77 MB and more


@dataclasses.dataclass(frozen=True)
class Decode:
    """One paged decode call; `random_lengths` draws the extra lengths uniformly, as SGLang's C128 layers have them."""

    model: str
    layout: KVLayout
    heads: int
    batch: int
    q_len: int
    topk: int
    extra_topk: int = 0
    extra_page: int = 64
    random_lengths: bool = False

    @property
    def scale(self) -> float:
        return self.layout.qk_dim**-0.5

    @property
    def name(self) -> str:
        return f"decode {self.model}, {self.heads} heads, {self.batch} x {self.q_len}"


@dataclasses.dataclass(frozen=True)
class Prefill:
    model: str
    heads: int
    qk_dim: int
    topk: int
    kv_len: int
    q_len: int = 4096

    @property
    def name(self) -> str:
        return f"prefill {self.model}, {self.heads} heads, kv {self.kv_len}"


DECODES = [
    *(Decode("V4 Flash", V4, 64, b, 1, 128, 512) for b in (1, 8, 64, 256)),
    *(Decode("V4 Flash", V4, 64, b, 2, 128, 512) for b in (64, 128)),
    Decode("V4 Flash C128", V4, 64, 64, 2, 128, 1024, extra_page=2, random_lengths=True),
    *(Decode("V4 Pro", V4, 128, b, 1, 128, 1024) for b in (1, 64, 256)),
    *(Decode("V3.2", V32, 128, b, 1, 2048) for b in (1, 64)),
    *(Decode("V4 sharded", V4, 16, b, 1, 128, 512) for b in (1, 64)),
]
PREFILLS = [
    Prefill("V4 Flash", 64, 512, 512, 8_192),
    Prefill("V4 Flash", 64, 512, 512, 65_536),
    Prefill("V4 Pro", 128, 512, 1024, 65_536),
    Prefill("V3.2", 128, 576, 2048, 8_192),
    Prefill("V3.2", 128, 576, 2048, 65_536),
    *(Prefill("V4 sharded", heads, 512, 512, kv_len) for heads in (16, 32) for kv_len in (8_192, 65_536)),
    *(Prefill("V3.2 sharded", heads, 576, 2048, 8_192) for heads in (16, 32)),
]


def cases(rng: np.random.Generator) -> Iterator[Case]:
    for shape in DECODES:
        yield _decode(rng, shape)
    for shape in PREFILLS:
        yield _prefill(rng, shape)


def decode_arrays(rng: np.random.Generator, shape: Decode) -> dict:
    """The arguments of `sparse_mla_decode` that are arrays."""
    layout, rows = shape.layout, (shape.batch, shape.q_len)
    arrays = {
        "q": _normal(rng, (*rows, shape.heads, layout.qk_dim)),
        "cache": _cache(rng, layout, 256 if shape.extra_topk else 64),
        "indices": _indices(rng, (*rows, shape.topk), SLOTS),
    }
    if shape.extra_topk:
        arrays |= {
            "extra_cache": _cache(rng, layout, shape.extra_page),
            "extra_indices": _indices(rng, (*rows, shape.extra_topk), SLOTS),
            "attn_sink": _normal(rng, (shape.heads,), jnp.float32),
        }
    if shape.random_lengths:
        arrays["extra_topk_length"] = _indices(rng, rows, shape.extra_topk + 1)
    return arrays


def _decode(rng: np.random.Generator, shape: Decode) -> Case:
    layout, rows = shape.layout, (shape.batch, shape.q_len)
    arrays = decode_arrays(rng, shape)
    lengths = arrays.get("extra_topk_length", np.full(rows, shape.extra_topk))
    keys = math.prod(rows) * shape.topk + int(lengths.sum())
    on_torch = {name: _torch(x) for name, x in arrays.items()}
    ours = _on_triton(lambda: _decode_call(drop_in, on_torch, shape.scale))
    theirs = _flashmla(lambda wheel: _decode_call(wheel, on_torch, shape.scale, heads=64))
    return Case(
        shape.name,
        ours=_jitted("decode", sparse_mla_decode, arrays, shape.scale) | {"torch": ours},
        peers={"flash_mla": theirs},
        checks={"flash_mla": lambda: _difference(ours, theirs)},
        bytes=keys * (layout.bytes_per_token + 4) + math.prod(rows) * shape.heads * 2 * (layout.qk_dim + 512),
        flop=2 * shape.heads * keys * (layout.qk_dim + 512),
    )


def prefill_arrays(rng: np.random.Generator, shape: Prefill) -> dict:
    """The arguments of `sparse_mla_prefill` that are arrays."""
    return {
        "q": _normal(rng, (shape.q_len, shape.heads, shape.qk_dim), scale=0.1),
        "kv": _normal(rng, (shape.kv_len, shape.qk_dim), scale=0.1),
        "indices": _indices(rng, (shape.q_len, shape.topk), shape.kv_len),
        "attn_sink": _normal(rng, (shape.heads,), jnp.float32),
    }


def _prefill(rng: np.random.Generator, shape: Prefill) -> Case:
    arrays = prefill_arrays(rng, shape)
    on_torch = {name: _torch(x) for name, x in arrays.items()}
    keys = shape.q_len * shape.topk
    ours = _on_triton(lambda: _prefill_call(drop_in, on_torch))
    theirs = _flashmla(lambda wheel: _prefill_call(wheel, on_torch, heads=64))
    return Case(
        shape.name,
        ours=_jitted("prefill", sparse_mla_prefill, arrays, 0.5) | {"torch": ours},
        peers={"flash_mla": theirs},
        checks={"flash_mla": lambda: _difference(ours, theirs)},
        bytes=2 * shape.kv_len * shape.qk_dim + 4 * keys + 2 * shape.q_len * shape.heads * (shape.qk_dim + 512),
        flop=2 * shape.heads * keys * (shape.qk_dim + 512),
    )


def _jitted(phase: str, function: Callable, arrays: dict, scale: float) -> dict[str, Run]:
    """A run for each backend with a kernel."""
    runs = {}
    for backend in kernel_backends(phase):
        jitted = jax.jit(lambda arrays, backend=backend: function(**arrays, softmax_scale=scale, backend=backend))
        runs[backend] = Run(functools.partial(jitted, arrays), "jax")
    return runs


def _on_triton(make: Callable[[], Callable]) -> Run:
    """The drop-in's call with Triton's kernels; the environment is read when the first call is prepared."""
    made = functools.cache(make)

    def call():
        with mock.patch.dict(os.environ, {"JAX_SPARSE_MLA_BACKEND": "triton"}):
            return made()()

    return Run(call, "torch")


def _flashmla(make: Callable[[object], Callable]) -> Run:
    made = functools.cache(lambda: make(peers.find("flash_mla")))
    return Run(lambda: made()(), "torch")


def _difference(ours: Run, theirs: Run) -> float:
    """Of the outputs, norm over norm; both round to bfloat16."""
    wanted, found = ours.call()[0].float(), theirs.call()[0].float()
    share = ((found[..., : wanted.shape[-2], :] - wanted).norm() / wanted.norm()).item()
    assert share < 0.01, f"the outputs differ by {share:.2%}"
    return share


def _decode_call(package, arrays: dict, scale: float, heads: int = 1) -> Callable:
    """Of FlashMLA or the drop-in, which has its functions; padded to a multiple of `heads`."""
    q, sink = _padded(arrays["q"], arrays.get("attn_sink"), heads)
    indices = arrays["indices"]
    extra_indices, extra_lengths = arrays.get("extra_indices"), arrays.get("extra_topk_length")
    if extra_lengths is not None and q.shape[1] > 1:  # it knows one length a request: every row is one
        q, indices, extra_indices = (x.reshape(-1, 1, *x.shape[2:]) for x in (q, indices, extra_indices))
        extra_lengths = extra_lengths.reshape(-1)
    return functools.partial(
        package.flash_mla_with_kvcache,
        *(q, _pages(arrays["cache"]), None, None, 512, package.get_mla_metadata()[0]),
        softmax_scale=scale,
        indices=indices,
        is_fp8_kvcache=True,
        attn_sink=sink,
        extra_k_cache=_pages(arrays.get("extra_cache")),
        extra_indices_in_kvcache=extra_indices,
        extra_topk_length=extra_lengths,
        use_legacy=True,
    )


def _prefill_call(package, arrays: dict, heads: int = 1) -> Callable:
    """As `_decode_call`."""
    q, sink = _padded(arrays["q"], arrays["attn_sink"], heads)
    given = q, arrays["kv"][:, None], arrays["indices"][:, None], 0.5
    return functools.partial(package.flash_mla_sparse_fwd, *given, attn_sink=sink, use_legacy=True)


def _padded(q: torch.Tensor, sink: torch.Tensor | None, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Query heads and sinks, padded to a multiple of `heads`."""
    if more := -q.shape[-2] % heads:
        q = torch.nn.functional.pad(q, (0, 0, 0, more))
        sink = None if sink is None else torch.nn.functional.pad(sink, (0, more))
    return q, sink


def _pages(cache: PagedKV | None) -> torch.Tensor | None:
    """The view that FlashMLA takes: `[pages, page_size, 1, bytes per token]`, the page's padding in the stride."""
    if cache is None:
        return None
    pages, page_bytes = cache.data.shape
    width = cache.layout.bytes_per_token
    return cache.data.as_strided((pages, cache.page_size, 1, width), (page_bytes, width, width, 1))


def _normal(rng: np.random.Generator, shape, dtype=jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(int(rng.integers(2**31))), shape, dtype)


def _indices(rng: np.random.Generator, shape, slots: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, slots, shape, dtype=np.int32))


def _cache(rng: np.random.Generator, layout: KVLayout, page_size: int) -> PagedKV:
    empty = PagedKV.zeros(layout, SLOTS // page_size, page_size)
    rows = _normal(rng, (SLOTS, layout.qk_dim), scale=0.1)
    return jax.jit(write_kv, donate_argnums=0)(empty, jnp.arange(SLOTS, dtype=jnp.int32), rows)


def _torch(x: jax.Array | PagedKV) -> torch.Tensor | PagedKV:
    """The same memory."""
    return dataclasses.replace(x, data=to_torch(x.data)) if isinstance(x, PagedKV) else to_torch(x)

"""Sparse MLA attention at production shapes: our backends from jitted JAX, the Triton kernel also from torch.

Peers: FlashMLA's own calls (sgl-flash-mla), and at one row the reference, which is plain XLA. Keys are random rows of
a cache far larger than the L2, but for prefill, whose workspaces have the sizes that FlashMLA's own table has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch import to_torch
from sparse_mla_torch.attention.backends.triton import Attention

from benchmarks.timing import Case, Run, peer
from jax_sparse_mla import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.api import installed_backends
from jax_sparse_mla.kernels.triton.sparse_mla.plan import Scope
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv
from jax_sparse_mla.kv_cache.layout import workspace_layout

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
    Prefill("V3.2", 128, 576, 2048, 65_536),
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
    layout, rows, scale = shape.layout, (shape.batch, shape.q_len), shape.scale
    arrays = decode_arrays(rng, shape)
    lengths = arrays.get("extra_topk_length", np.full(rows, shape.extra_topk))
    keys = math.prod(rows) * shape.topk + int(lengths.sum())
    ours = _jitted(functools.partial(sparse_mla_decode, softmax_scale=scale), arrays)
    on_torch = {name: _torch(x) for name, x in arrays.items()}
    call = _triton_decode(on_torch, scale)
    peers = _flashmla_decode(on_torch, scale)
    if shape.batch == 1:
        peers |= _jitted(functools.partial(sparse_mla_decode, softmax_scale=scale), arrays, ["reference"])
    return Case(
        shape.name,
        ours=ours | {"torch": Run(call, "torch")},
        peers=peers,
        bytes=keys * (layout.bytes_per_token + 4) + math.prod(rows) * shape.heads * 2 * (layout.qk_dim + 512),
        flop=2 * shape.heads * keys * (layout.qk_dim + 512),
    )


def _prefill(rng: np.random.Generator, shape: Prefill) -> Case:
    arrays = {
        "q": _normal(rng, (shape.q_len, shape.heads, shape.qk_dim), scale=0.1),
        "kv": _normal(rng, (shape.kv_len, shape.qk_dim), scale=0.1),
        "indices": _indices(rng, (shape.q_len, shape.topk), shape.kv_len),
        "attn_sink": _normal(rng, (shape.heads,), jnp.float32),
    }
    ours = _jitted(functools.partial(sparse_mla_prefill, softmax_scale=0.5), arrays)
    on_torch = {name: _torch(x) for name, x in arrays.items()}
    call = _triton_prefill(**on_torch)
    keys = shape.q_len * shape.topk
    return Case(
        shape.name,
        ours=ours | {"torch": Run(call, "torch")},
        peers=_flashmla_prefill(**on_torch),
        bytes=2 * shape.kv_len * shape.qk_dim + 4 * keys + 2 * shape.q_len * shape.heads * (shape.qk_dim + 512),
        flop=2 * shape.heads * keys * (shape.qk_dim + 512),
    )


def _jitted(function, arrays: dict, backends=None) -> dict[str, Run]:
    """A run for each backend, by default for all that are installed and not plain XLA."""
    runs = {}
    for backend in sorted(installed_backends() - {"reference"}) if backends is None else backends:
        jitted = jax.jit(lambda arrays, backend=backend: function(**arrays, backend=backend))
        runs["xla" if backend == "reference" else backend] = Run(functools.partial(jitted, arrays), "jax")
    return runs


def _triton_decode(arrays: dict, scale: float) -> Callable[[], None]:
    """The Triton kernel's launch from torch, into results that stay."""
    q, tables, scopes = arrays["q"], [], []
    *rows, heads, _ = q.shape
    for prefix in ("", "extra_"):
        if (cache := arrays.get(f"{prefix}cache")) is not None:
            indices, lengths = arrays[f"{prefix}indices"], arrays.get(f"{prefix}topk_length")
            pages = cache.num_slots, cache.page_size, cache.layout.page_bytes(cache.page_size)
            tables.append((cache.data, indices, lengths))
            scopes.append(Scope(indices.shape[-1], int(lengths is not None), *pages))
    sink = arrays.get("attn_sink")
    shape = arrays["cache"].layout, math.prod(rows), heads, scopes, scale, sink is not None
    results = q.new_empty((*rows, heads, 512)), torch.empty((*rows, heads), device="cuda")
    return functools.partial(Attention(*shape, q.device), q, tables, sink, *results)


def _triton_prefill(q, kv, indices, attn_sink) -> Callable[[], None]:
    """As `_triton_decode`."""
    rows, heads, width = q.shape
    scope = Scope(indices.shape[-1], 0, kv.shape[0])
    attend = Attention(workspace_layout(width), rows, heads, [scope], 0.5, True, q.device, may_split=False)
    stats = [torch.empty((rows, heads), device="cuda") for _ in range(2)]
    return functools.partial(attend, q, [(kv, indices, None)], attn_sink, q.new_empty((rows, heads, 512)), *stats)


def _flashmla_decode(arrays: dict, scale: float) -> dict[str, Run]:
    """FlashMLA's own call; it keeps the schedule that its first call computes."""
    q, indices = arrays["q"], arrays["indices"]
    flash_mla = peer("flash_mla")
    if flash_mla is None or q.shape[2] not in (64, 128):
        return {}
    extra_lengths = arrays.get("extra_topk_length")
    if extra_lengths is not None and q.shape[1] > 1:  # it knows one length a request: every row is one
        q, indices, arrays = _rows_as_requests(q), _rows_as_requests(indices), dict(arrays)
        arrays["extra_indices"] = _rows_as_requests(arrays["extra_indices"])
        extra_lengths = extra_lengths.reshape(-1)
    call = functools.partial(
        flash_mla.flash_mla_with_kvcache,
        *(q, _vendor_cache(arrays["cache"]), None, None, 512, flash_mla.get_mla_metadata()[0]),
        softmax_scale=scale,
        indices=indices,
        is_fp8_kvcache=True,
        attn_sink=arrays.get("attn_sink"),
        extra_k_cache=_vendor_cache(arrays.get("extra_cache")),
        extra_indices_in_kvcache=arrays.get("extra_indices"),
        extra_topk_length=extra_lengths,
        use_legacy=True,
    )
    return {"flash_mla": Run(call, "torch")}


def _rows_as_requests(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 1, *x.shape[2:])


def _flashmla_prefill(q, kv, indices, attn_sink) -> dict[str, Run]:
    flash_mla = peer("flash_mla")
    if flash_mla is None:
        return {}
    arguments = (q, kv[:, None], indices[:, None], 0.5)
    call = functools.partial(flash_mla.flash_mla_sparse_fwd, *arguments, attn_sink=attn_sink, use_legacy=True)
    return {"flash_mla": Run(call, "torch")}


def _vendor_cache(cache: PagedKV | None) -> torch.Tensor | None:
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

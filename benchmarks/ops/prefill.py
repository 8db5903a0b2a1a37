"""Prefill at production shapes: our backends from jitted JAX, our SM90 and Triton kernels also from torch.

The peer is FlashMLA called from torch (sgl-flash-mla), padded to 64 heads where there are fewer. Workspaces have the
sizes that FlashMLA's own table has.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch import flash_mla as drop_in
from sparse_mla_torch import to_torch
from sparse_mla_torch.attention import call_cache

from benchmarks import peers
from benchmarks.harness import Case, Run, Spec, kernel_backends, operation
from jax_sparse_mla import sparse_mla_prefill

Q_LEN = 4096


@dataclasses.dataclass(frozen=True)
class Prefill:
    model: str
    heads: int
    qk_dim: int
    topk: int
    kv_len: int

    @property
    def name(self) -> str:
        return f"prefill {self.model}, {self.heads} heads, kv {self.kv_len}"


PREFILLS = [
    Prefill("V4 Flash", 64, 512, 512, 8_192),
    Prefill("V4 Flash", 64, 512, 512, 65_536),
    Prefill("V4 Pro", 128, 512, 1024, 65_536),
    Prefill("V3.2", 128, 576, 2048, 8_192),
    Prefill("V3.2", 128, 576, 2048, 65_536),
    *(Prefill("V4 sharded", heads, 512, 512, kv_len) for heads in (8, 16, 32) for kv_len in (8_192, 65_536)),
    *(Prefill("V3.2 sharded", heads, 576, 2048, 8_192) for heads in (8, 16, 32)),
]


def specs() -> Iterator[Spec]:
    for shape in PREFILLS:
        yield Spec(shape.name, functools.partial(_prefill, shape=shape))


def prefill_arrays(rng: np.random.Generator, shape: Prefill) -> dict:
    """The arguments of `sparse_mla_prefill` that are arrays."""
    return {
        "q": _normal(rng, (Q_LEN, shape.heads, shape.qk_dim), scale=0.1),
        "kv": _normal(rng, (shape.kv_len, shape.qk_dim), scale=0.1),
        "indices": jnp.asarray(rng.integers(0, shape.kv_len, (Q_LEN, shape.topk), np.int32)),
        "attn_sink": _normal(rng, (shape.heads,), jnp.float32),
    }


def _prefill(rng: np.random.Generator, shape: Prefill) -> Case:
    arrays = prefill_arrays(rng, shape)
    on_torch = {name: to_torch(x) for name, x in arrays.items()}
    keys = Q_LEN * shape.topk
    from_torch = {
        f"torch {name}": _from_torch(name, lambda: called(drop_in, on_torch)) for name in ("hopper", "triton")
    }
    theirs = _flashmla(lambda wheel: called(wheel, on_torch, heads=64))
    return Case(
        ours=_jitted(arrays) | from_torch,
        peers={"flash_mla": theirs},
        checks={"flash_mla": lambda: _difference(from_torch["torch hopper"], theirs)},
        bytes=2 * shape.kv_len * shape.qk_dim + 4 * keys + 2 * Q_LEN * shape.heads * (shape.qk_dim + 512),
        flop=2 * shape.heads * keys * (shape.qk_dim + 512),
    )


def _jitted(arrays: dict) -> dict[str, Run]:
    """A run for each backend with a kernel."""
    runs = {}
    for backend in kernel_backends("prefill"):
        jitted = jax.jit(
            lambda arrays, backend=backend: sparse_mla_prefill(**arrays, softmax_scale=0.5, backend=backend)
        )
        runs[backend] = Run(functools.partial(jitted, arrays), "jax")
    return runs


def _from_torch(backend: str, make: Callable[[], Callable]) -> Run:
    """The drop-in's call by a backend; what another has prepared for these shapes is dropped."""
    made = functools.cache(make)

    def call():
        with mock.patch.dict(os.environ, {"JAX_SPARSE_MLA_BACKEND": backend}):
            call_cache.forget()
            return made()()

    return Run(call, "torch")


def _flashmla(make: Callable[[object], Callable]) -> Run:
    made = functools.cache(lambda: make(peers.find("flash_mla")))
    return Run(lambda: made()(), "torch")


def _difference(ours: Run, theirs: Run) -> float:
    """The difference of the outputs, norm over norm; both round to bfloat16."""
    wanted, actual = ours.call()[0].float(), theirs.call()[0].float()
    share = ((actual[..., : wanted.shape[-2], :] - wanted).norm() / wanted.norm()).item()
    assert share < 0.01, f"the outputs differ by {share:.2%}"
    return share


def called(package, arrays: dict, heads: int = 1) -> Callable:
    """A call of FlashMLA or of the drop-in, which has its functions; padded to a multiple of `heads`."""
    q, sink = arrays["q"], arrays["attn_sink"]
    if more := -q.shape[-2] % heads:
        q, sink = torch.nn.functional.pad(q, (0, 0, 0, more)), torch.nn.functional.pad(sink, (0, more))
    arguments = q, arrays["kv"][:, None], arrays["indices"][:, None], 0.5
    return functools.partial(package.flash_mla_sparse_fwd, *arguments, attn_sink=sink, use_legacy=True)


def _normal(rng: np.random.Generator, shape, dtype=jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return scale * jax.random.normal(jax.random.key(int(rng.integers(2**31))), shape, dtype)


main = operation("prefill", __doc__, specs)

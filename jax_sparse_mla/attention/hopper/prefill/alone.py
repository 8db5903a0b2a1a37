"""The prefill kernels for launches without XLA: seven of them serve every call. Imports no Pallas."""

from __future__ import annotations

import functools
import math
import struct
from pathlib import Path

from jax_sparse_mla.launch import compile_cache, mosaic

# By name: the heads that a kernel has room for (None: any number), and values of a key.
KERNELS = {
    "8x512": (8, 512),
    "16x512": (16, 512),
    "32x512": (32, 512),
    "any-x512": (None, 512),
    "8x576": (8, 576),
    "16x576": (16, 576),
    "any-x576": (None, 576),
}
_NOMINAL = 1 << 16  # tokens and blocks of a trace. Compilers know the number of blocks: no GPU takes more of them.


def name_of(heads: int, qk_dim: int) -> str:
    """The kernel for so many heads, the one that XLA's programs have."""
    return next(name for name, (most, dim) in KERNELS.items() if dim == qk_dim and (most is None or heads <= most))


def work_items(tokens: int, heads: int, qk_dim: int) -> int:
    """How many thread blocks have something to do."""
    few = KERNELS[name_of(heads, qk_dim)][0] is not None
    return tokens if few else tokens * -(-heads // 64)


def sizes(*integers: int, softmax_scale: float, log2: bool, empty_lse: float) -> list[int]:
    """The kernels' `Sizes` from its integers on, `tokens` to `blocks`, floats by their bits."""
    floats = softmax_scale * math.log2(math.e), 1.0 if log2 else math.log(2), empty_lse
    return [*integers, *(int.from_bytes(struct.pack("<f", x), "little") for x in floats)]


@functools.cache
def library(name: str) -> compile_cache.Library:
    folder = Path(__file__).parent
    sources = [path for path in sorted(folder.rglob("*.py")) if path != Path(__file__)]
    return mosaic.library(f"{__name__}:prefill", name, (Path(__file__), *sources))


def libraries() -> list[compile_cache.Library]:
    return [library(name) for name in KERNELS]


def unready(phase: str, framework: str) -> str | None:
    """Why a launch without XLA cannot be compiled here; None if it can, or if a wheel carries it."""
    if (phase, framework) != ("prefill", "torch") or all(compile_cache.is_carried(each) for each in libraries()):
        return None
    return mosaic.why_not()


def prefill(name: str):
    """The function of a kernel and the shapes of its arrays; `tiles.Sizes` has what else it takes."""
    import jax
    import jax.numpy as jnp

    from jax_sparse_mla.attention.hopper.prefill.few_heads.kernel import sparse_prefill_few_heads
    from jax_sparse_mla.attention.hopper.prefill.kernel import sparse_prefill
    from jax_sparse_mla.attention.hopper.prefill.tiles import Sizes

    most, qk_dim = KERNELS[name]
    heads = most or 64
    shapes = {
        "q": ((_NOMINAL, heads, qk_dim), jnp.bfloat16),
        "kv": ((_NOMINAL, qk_dim), jnp.bfloat16),
        "indices": ((_NOMINAL, 64), jnp.int32),
        "topk_length": ((_NOMINAL,), jnp.int32),
        "attn_sink": ((heads,), jnp.float32),
        "sizes": [((1,), jnp.int32)] * len(Sizes._fields),
    }
    sizes = [jax.ShapeDtypeStruct(*each) for each in shapes.pop("sizes")]
    kernel = sparse_prefill_few_heads if most else sparse_prefill

    def function(q, kv, indices, topk_length, attn_sink, *sizes):
        options = {"softmax_scale": 1.0, "sm_count": _NOMINAL, "sizes": sizes}
        return kernel(q, kv, indices, topk_length, attn_sink, **options)

    return function, (*(jax.ShapeDtypeStruct(*each) for each in shapes.values()), *sizes)

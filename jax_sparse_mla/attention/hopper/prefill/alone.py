"""The prefill kernels, compiled once for all calls: seven of them serve every call. Imports no Pallas.

torch launches them without XLA. XLA's programs have them where the process has begun to load them, as a serving engine
does (`serving/native.py`): they are compiled beside nvcc, once on a machine, or carried by a wheel, where XLA would
compile one for each shape in each program, one after the other.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from pathlib import Path

from jax_sparse_mla.launch import compile_cache, mosaic
from jax_sparse_mla.packages import once, warn_once

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
_begun: set[str] = set()  # those that XLA's programs have
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


def begin(heads: int, qk_dim: int) -> None:
    """XLA's programs have the kernel for so many heads from now on; `loaded` waits for it."""
    if any(qk_dim == dim for _, dim in KERNELS.values()):
        _begun.add(name_of(heads, qk_dim))


def begun() -> list[str]:
    return sorted(_begun)


@once
def loaded(name: str) -> mosaic.Compiled | None:
    """A kernel, compiled if need be; None, with a warning why, where it cannot be: XLA compiles it then."""
    try:
        return compile_cache.load(library(name), mosaic.read)
    except RuntimeError as error:
        warn_once(f"XLA compiles the prefill kernel anew in every program: {error}")
        return None


def kernel_for_xla(heads: int, qk_dim: int) -> mosaic.Compiled | None:
    """The kernel that a program has by `launch`; None where XLA is to compile it."""
    from jax_sparse_mla.launch.triton_call import own_launcher

    name = name_of(heads, qk_dim)
    return loaded(name) if name in _begun and own_launcher() else None


def launch(kernel: mosaic.Compiled, q, kv, indices, topk_length, attn_sink, *, softmax_scale: float, sm_count: int):
    """As `kernel.sparse_prefill`, in the program that is being traced."""
    import jax
    import jax.numpy as jnp

    from jax_sparse_mla.attention.index_table import V_DIM
    from jax_sparse_mla.launch import triton_launch

    (tokens, heads, qk_dim), columns, arrays = q.shape, indices.shape[1], (q, kv, indices, topk_length, attn_sink)
    blocks = min(sm_count, work_items(tokens, heads, qk_dim))
    integers = tokens, heads, heads, kv.shape[0], columns, columns, blocks
    numbers = sizes(*integers, softmax_scale=softmax_scale, log2=False, empty_lse=-math.inf)
    statistic = jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    results = jax.ShapeDtypeStruct((tokens, heads, V_DIM), jnp.bfloat16), statistic, statistic
    operands = [x for x in arrays if x is not None]
    buffers = iter(range(len(operands) + len(results)))
    given = [(-1, 0) if x is None else (next(buffers), 0) for x in arrays]
    given += [*((-1, 256 * number) for number in numbers), *((i, 0) for i in buffers)]
    parameters = [x for i in kernel.parameters for x in given[i]]
    digest = hashlib.sha256(kernel.image).hexdigest()
    compiled = triton_launch.Compiled(kernel.image, digest, kernel.name, kernel.threads, kernel.shared_bytes)
    return tuple(triton_launch.launch_compiled(compiled, (blocks, 1, 1), parameters, operands, results))


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

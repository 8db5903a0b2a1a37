"""Triton kernels: one source each, launched inside XLA programs, and by torch on its own stream.

Nothing here imports triton until a kernel is wanted, so the package imports without it. `dispatch` is how a JAX
function takes a kernel: where the program is lowered for CUDA the kernel runs, everywhere else, and under `vmap`,
the plain JAX code that defines the result.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from jax_sparse_mla._packages import why_not

__all__ = ["available", "dispatch", "on_cuda", "use_triton", "varying"]


def use_triton() -> bool:
    """Whether programs traced now may take Triton kernels.

    True with an NVIDIA GPU as JAX's default backend, triton and what launches it importable, unless the environment
    says `JAX_SPARSE_MLA_BACKEND=reference`.
    """
    return os.environ.get("JAX_SPARSE_MLA_BACKEND") != "reference" and available()


def available() -> bool:
    """Whether JAX's default backend is an NVIDIA GPU, and triton and what launches it are importable."""
    return unready() is None


@functools.cache
def unready(phase: str = "", framework: str = "jax") -> str | None:
    """Why Triton kernels cannot be launched from JAX here, None if they can; from torch nothing is left to ask.

    A package that is installed and does not import is warned of: plain code serves, many times slower.
    """
    if framework != "jax":
        return None
    if jax.default_backend() != "gpu" or "NVIDIA" not in jax.devices()[0].device_kind.upper():
        return "JAX's default backend is no NVIDIA GPU"
    from jax_sparse_mla.xla.triton_call import own_launcher

    return why_not("triton") or (None if own_launcher() else why_not("jax_triton"))


def dispatch(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)` where the program is lowered for CUDA; `plain(*args)` elsewhere and under `vmap`.

    Args:
      kernel: launches through `xla.triton_call.Executor`, which has no batching rule.
      plain: the same function in plain JAX.
      args: arrays, or pytrees of them; what else the two need, they close over. Nothing is differentiated through
        either: the results are bytes, indices, or rows of bytes.
    """
    if not use_triton():
        return plain(*args)
    return on_cuda(kernel, plain, *jax.lax.stop_gradient(args))


def on_cuda(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any, kernel_batches: bool = False) -> Any:
    """`dispatch` of a kernel of any kind, which the caller knows to be usable; under `jit`.

    A kernel that batches serves under `vmap` as well. Differentiated, it raises NotImplementedError, which names
    `kernel.__name__`.
    """

    @jax.custom_batching.custom_vmap
    def guarded(*args):
        return varying(kernel, plain, *args)

    @guarded.def_vmap
    def batched(axis_size, in_batched, *batched_args):
        function = functools.partial(varying, kernel, plain) if kernel_batches else plain
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        out = jax.vmap(function, in_axes=axes, axis_size=axis_size)(*batched_args)
        return out, jax.tree.map(lambda _: True, out)

    return jax.lax.platform_dependent(*args, cuda=guarded, default=plain)


def varying(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)`, its results varying over the mesh axes of a `shard_map` that `plain(*args)` vary over.

    A custom call's results count as the same on all devices. Differentiated, it raises NotImplementedError.
    """
    shapes = jax.eval_shape(plain, *args)  # first: it names what is wrong with the arguments
    return jax.tree.map(_varying_like, _without_gradient(kernel)(*args), shapes)


def _without_gradient(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which says what to do where one differentiates through it: a gradient needs a kernel of its own."""
    called = jax.custom_jvp(kernel)

    @called.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            f'{kernel.__name__}: its kernels have no gradient; differentiate with backend="reference"'
        )

    return called


def _varying_like(x: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    wanted = shape.manual_axis_type.varying if shape.manual_axis_type else frozenset()
    axes = tuple(sorted(wanted - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, axes, to="varying") if axes else x

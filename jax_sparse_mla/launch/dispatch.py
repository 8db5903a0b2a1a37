"""Triton kernels inside XLA programs, and the plain JAX code that stands in for them.

Nothing here imports triton until a kernel is wanted, so the package imports without it. `dispatch` is how a JAX
function takes a kernel: where the program is lowered for CUDA the kernel runs, everywhere else, and under `vmap`,
the plain JAX code that defines the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from jax_sparse_mla import sharding
from jax_sparse_mla.device import has_gpu
from jax_sparse_mla.launch.transforms import KernelCall, shared
from jax_sparse_mla.packages import why_not


def use_triton() -> bool:
    """Whether programs traced now may take Triton kernels.

    True with an NVIDIA GPU as JAX's default backend, triton and what launches it importable, unless the environment
    says `JAX_SPARSE_MLA_BACKEND=reference`.
    """
    return os.environ.get("JAX_SPARSE_MLA_BACKEND") != "reference" and available()


def available() -> bool:
    """Whether JAX's default backend is an NVIDIA GPU, and triton and what launches it are importable."""
    return unready() is None


def unready(phase: str = "", framework: str = "jax") -> str | None:
    """Why Triton kernels cannot be launched from JAX here, None if they can; from torch nothing is left to ask.

    A package that is installed and does not import is warned of: plain code serves, many times slower.
    """
    if framework != "jax":
        return None
    if not has_gpu():
        return "JAX's default backend is no NVIDIA GPU"
    from jax_sparse_mla.launch.triton_call import own_launcher

    return why_not("triton") or (None if own_launcher() else why_not("jax_triton"))


def dispatch(
    kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any, rule: sharding.PartitionRule | None = None
) -> Any:
    """`kernel(*args)` where the program is lowered for CUDA; `plain(*args)` elsewhere and under `vmap`.

    Args:
      kernel: launches through `launch.triton_call.Executor`, which has no batching rule.
      plain: the same function in plain JAX.
      args: arrays, or pytrees of them; what else the two need, they close over. Nothing is differentiated through
        either: the results are bytes, indices, or rows of bytes.
      rule: which dimensions may be cut where several devices share the arrays; None leaves it to the partitioner,
        to which a kernel is opaque: each device gets all of its arguments.
    """
    plain = plain if rule is None else shared(plain, rule)
    if not use_triton():
        return plain(*args)
    return KernelCall(kernel, plain, rule=rule)(*jax.lax.stop_gradient(args))

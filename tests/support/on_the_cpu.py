"""Plain JAX functions of integers and of comparisons, as oracles: compiled for the CPU, whatever is under test.

For a GPU, XLA needs seconds to compile each shape of a sort or a scan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np


def on_the_cpu(function: Callable, **options) -> Callable:
    """`jax.jit(function, **options)`, for arguments on any device; its results are on the CPU."""
    jitted = jax.jit(function, **options)

    @functools.wraps(function)
    def run(*args, **kwargs):
        args, kwargs = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, (args, kwargs))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jitted(*args, **kwargs)

    return run

"""What the host pays per argument and per recorded kernel when XLA launches a program.

    python -m benchmarks.arguments

Times programs of few and many donated arrays and of few and many kernels, each a few microseconds of GPU time, from
the call until it returns. Writes arguments.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.record import environment, results_folder, write_json

SIZES = [(1, 1), (1, 100), (1, 480), (100, 1), (480, 1), (480, 480)]  # kernels, arrays
CALLS = 50


def chain(kernels: int) -> Callable:
    """Passes all arrays on, the first through so many kernels that do not fuse."""

    def step(first: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
        for i in range(kernels):
            first = jax.lax.optimization_barrier(jnp.roll(first, 1) + i)
        return first, *others

    return step


def enqueue_us(kernels: int, arrays: int) -> float:
    """Median microseconds until a call returns; every array is donated, so that it keeps its address."""
    step = jax.jit(chain(kernels), donate_argnums=tuple(range(arrays)))
    held = tuple(jnp.zeros(1024) + i for i in range(arrays))
    times = []
    for _ in range(CALLS + 5):
        start = time.perf_counter()
        held = step(*held)
        times.append(time.perf_counter() - start)
        jax.block_until_ready(held)
    return statistics.median(times[5:]) * 1e6


def main() -> None:
    rows = []
    for kernels, arrays in SIZES:
        rows.append({"kernels": kernels, "arrays": arrays, "enqueue_us": round(enqueue_us(kernels, arrays))})
        print(f"{kernels:4} kernels, {arrays:4} arrays: {rows[-1]['enqueue_us']:6} us", flush=True)
    write_json(results_folder() / "arguments.json", environment() | {"rows": rows})


if __name__ == "__main__":
    main()

"""A decode step of DeepSeek-V4-Flash's attention on several GPUs, each with requests of its own.

    python -m benchmarks.two_gpus [--cases 1x8192,8x8192,64x8192,64x131072] [--layers 43]

A case is REQUESTSxCONTEXT, requests of one device. The step of `benchmarks.step` runs on one device, then under
`jax.shard_map` on all of them: every device has the caches, tables and rows of its own requests. Before it is timed,
its output and every byte of its caches are compared with those of one device for the same requests, and its program is
searched for collectives. Weak scaling is the wall time on one device over the wall time on all. Writes two_gpus.json
to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.record import earlier, environment, results_folder, write_json
from benchmarks.stack import V4_FLASH_RATIOS, Stack, decode_step, fill
from benchmarks.step import ROOM, STEPS

CASES = "1x8192,8x8192,64x8192,64x131072"
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
AXIS = "requests"


def own_arrays(stack: Stack, device: jax.Device, seed: int) -> tuple[Any, Any]:
    """What a device has of its requests: the state that a step donates, and `(rows, tables)`."""
    with jax.default_device(device):
        start = jnp.full(stack.batch, stack.max_len - ROOM, jnp.int32)
        state = fill(stack, stack.empty_caches()), start, stack.empty_out(stack.batch)
        return jax.device_put((state, (stack.rows(stack.batch, seed), stack.tables(seed))), device)


def joined(mesh: Mesh, trees: Sequence[Any]) -> Any:
    """The devices' arrays as arrays over the mesh, one device's behind the other's."""

    def join(*shards):
        shape = len(shards) * shards[0].shape[0], *shards[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P(AXIS)), shards)

    return jax.tree.map(join, *trees)


def sharded_step(stack: Stack, mesh: Mesh):
    """`(state, rows, params, tables) -> state` on every device by itself; every device has the parameters."""
    of_requests = P(AXIS)
    step = jax.shard_map(
        functools.partial(decode_step, stack),
        mesh=mesh,
        in_specs=(of_requests, of_requests, P(), of_requests),
        out_specs=of_requests,
    )
    return jax.jit(step, donate_argnums=0, keep_unused=True)


def timed(call, state: Any, inputs: Sequence[Any], repeats: int) -> tuple[Any, float]:
    """The state after all steps, and the median seconds of a step in runs of STEPS."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(STEPS):
            state = call(state, *inputs)
        state = jax.block_until_ready(state)
        seconds.append((time.perf_counter() - started) / STEPS)
    return state, statistics.median(seconds)


@jax.jit
def fingerprint(x: jax.Array) -> jax.Array:
    """uint32 that hangs on every bit and its place: caches of many GB are compared where they lie."""
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
    weights = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words.reshape(-1).astype(jnp.uint32) * weights, dtype=jnp.uint32)


def compare(state: Any, alone: Sequence[Any]) -> None:
    """Raises unless every device has what one device has for its requests; `alone` are the fingerprints of those."""
    for array, *wanted in zip(jax.tree.leaves(state), *map(jax.tree.leaves, alone), strict=True):
        for shard, want in zip(array.addressable_shards, wanted, strict=True):
            if int(fingerprint(shard.data)) != want:
                raise ValueError(f"{shard.device}: an array {shard.data.shape} is not what one device has")


def case(stack: Stack, devices: Sequence[jax.Device], repeats: int) -> dict:
    """Compares and times one case."""
    mesh = Mesh(np.array(devices), (AXIS,))
    params = stack.params()
    call = stack.decode()
    alone, one_device = [], 0.0
    for seed, device in enumerate(devices):  # one after the other: the other devices rest
        state, (rows, tables) = own_arrays(stack, device, seed)
        inputs = rows, jax.device_put(params, device), tables
        state = jax.block_until_ready(call(state, *inputs))
        alone.append(jax.tree.map(lambda x: int(fingerprint(x)), state))
        if seed == 0:
            _, one_device = timed(call, state, inputs, repeats)
        del state

    own = [own_arrays(stack, device, seed) for seed, device in enumerate(devices)]
    state = joined(mesh, [of_device for of_device, _ in own])
    rows, tables = joined(mesh, [of_device for _, of_device in own])
    del own
    inputs = rows, jax.device_put(params, NamedSharding(mesh, P())), tables
    sharded = sharded_step(stack, mesh).lower(state, *inputs).compile()
    found = [name for name in COLLECTIVES if re.search(rf"\b{name}", sharded.as_text())]
    state = jax.block_until_ready(sharded(state, *inputs))
    compare(state, alone)
    _, together = timed(sharded, state, inputs, repeats)
    return {
        "devices": len(devices),
        "one_device_us": one_device * 1e6,
        "all_devices_us": together * 1e6,
        "weak_scaling": one_device / together,
        "collectives": found,
        "equal_to_the_bit": True,  # `compare` raised otherwise
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--layers", type=int, default=len(V4_FLASH_RATIOS), help="only the first layers")
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    if len(jax.devices()) < 2:
        raise SystemExit(f"two or more devices are needed, JAX has {len(jax.devices())} here")
    results = earlier("two_gpus.json").get("step_over_requests", {})
    for name in arguments.cases.split(","):
        batch, context = map(int, name.split("x"))
        stack = Stack(batch=batch, max_len=context, ratios=V4_FLASH_RATIOS[: arguments.layers])
        results[name] = result = case(stack, jax.devices(), arguments.repeats)
        print(
            f"{name:12} one device {result['one_device_us']:8.0f} us, {result['devices']} devices "
            f"{result['all_devices_us']:8.0f} us, weak scaling {result['weak_scaling']:.2f}, "
            f"collectives: {', '.join(result['collectives']) or 'none'}",
            flush=True,
        )
        write_json(results_folder() / "two_gpus.json", environment() | {"step_over_requests": results})


if __name__ == "__main__":
    main()

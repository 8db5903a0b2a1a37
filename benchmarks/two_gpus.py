"""A decode step of DeepSeek-V4-Flash's attention on several GPUs, each with requests of its own.

    python -m benchmarks.two_gpus [--cases 1x8192,8x8192,64x8192,1x131072,8x131072,64x131072] [--layers 43]
    python -m benchmarks.two_gpus --processes [--cases 1x8192,8x8192,8x131072]     # a process for each GPU

A case is REQUESTSxCONTEXT, requests of one device. The step of `benchmarks.step` runs on one device, then under
`jax.shard_map` on all of them: every device has the caches, tables and rows of its own requests. Before it is timed,
its output and every byte of its caches are compared with those that one device has for the same requests, and its
program is searched for collectives. Weak scaling is the wall time on one device over the wall time on all. The same
thread also starts each device's own program in turn ("apart"). The time in which each GPU works is CUPTI's, of other
steps behind those that are timed. Its profile gives the kernels whose times differ most between the two programs.
Writes two_gpus.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import multiprocessing
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.record import section, write_section
from benchmarks.stack import V4_FLASH_RATIOS, Stack, decode_step, fill
from benchmarks.step import ROOM, STEPS
from jax_sparse_mla.serving.bench import busy, gpu_work

CASES = "1x8192,8x8192,64x8192,1x131072,8x131072,64x131072"
PROFILED = 8  # steps
SHOWN = 8  # kernels
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
AXIS = "requests"
COORDINATOR = "127.0.0.1:9876"


def own_arrays(stack: Stack, device: jax.Device | None, seed: int) -> tuple[Any, Any]:
    """What a device has of its requests: the state that a step donates, and `(rows, tables)`."""
    with jax.default_device(device):
        start = jnp.full(stack.batch, stack.max_len - ROOM, jnp.int32)
        state = fill(stack, stack.empty_caches()), start, stack.empty_out(stack.batch)
        return jax.device_put((state, (stack.rows(stack.batch, seed), stack.tables(seed))), device)


def joined(mesh: Mesh, trees: Sequence[Any]) -> Any:
    """The arrays of this process's devices as arrays over the mesh, one device's behind the other's."""

    def join(*shards):
        shape = mesh.size * shards[0].shape[0], *shards[0].shape[1:]
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


class Programs(NamedTuple):
    """Of a case, compiled: the step on each device of this process by itself, and on all."""

    alone: dict[jax.Device, Any]
    together: Any


def compile_case(stack: Stack, mesh: Mesh) -> Programs:
    def placed(tree, sharding, times=1):
        def place(x):
            shape = (times * x.shape[0], *x.shape[1:]) if times > 1 else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

        return jax.tree.map(place, tree)

    state, (rows, tables) = jax.eval_shape(functools.partial(own_arrays, stack, None, 0))
    params = jax.eval_shape(stack.params)
    step, alone = stack.decode(), {}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # each is lowered here, while others are compiled
        for device in own_devices(mesh):
            arguments = placed((state, rows, params, tables), SingleDeviceSharding(device))
            alone[device] = pool.submit(step.lower(*arguments).compile)
        state, rows, tables = placed((state, rows, tables), NamedSharding(mesh, P(AXIS)), mesh.size)
        params = placed(params, NamedSharding(mesh, P()))
        together = pool.submit(sharded_step(stack, mesh).lower(state, rows, params, tables).compile)
        return Programs({device: x.result() for device, x in alone.items()}, together.result())


def own_devices(mesh: Mesh) -> list[jax.Device]:
    """Those of this process."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


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


class Kernel(NamedTuple):
    """Microseconds and launches of a step, of all kernels of a name."""

    us: float = 0.0
    launches: float = 0.0


def gpu_times(call, state: Any, inputs: Sequence[Any]) -> tuple[Any, list[float], dict[str, Kernel]]:
    """The state after PROFILED steps, the microseconds of a step that each GPU works, and the first one's kernels."""

    def run():
        nonlocal state
        for _ in range(PROFILED):
            state = call(state, *inputs)
        jax.block_until_ready(state)

    work = gpu_work(run)
    return state, [busy([span for span, _ in each]) / PROFILED / 1e3 for each in work], kernels(work[0])


def kernels(work: Sequence[tuple[tuple[int, int], str]]) -> dict[str, Kernel]:
    """Of one GPU's work in PROFILED steps, by name without the number that XLA gives it in a program."""
    spans = collections.defaultdict(list)
    for (begin, end), name in work:
        spans[re.sub(r"_\d+$", "", name)].append(end - begin)
    return {name: Kernel(sum(each) / PROFILED / 1e3, len(each) / PROFILED) for name, each in spans.items()}


def differences(one: dict[str, Kernel], other: dict[str, Kernel]) -> dict[str, list[Kernel]]:
    """The SHOWN kernels whose times differ most, in the one program and in the other."""
    pairs = {name: [one.get(name, Kernel()), other.get(name, Kernel())] for name in one | other}
    return dict(sorted(pairs.items(), key=lambda item: -abs(item[1][0].us - item[1][1].us))[:SHOWN])


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


def case(stack: Stack, programs: Programs, mesh: Mesh, repeats: int) -> dict:
    """Compares and times one case."""
    devices, own = mesh.devices.tolist(), own_devices(mesh)
    params = stack.params()
    alone = []
    for device in own:
        state, (rows, tables) = own_arrays(stack, device, devices.index(device))
        call, inputs = programs.alone[device], (rows, jax.device_put(params, device), tables)
        state = jax.block_until_ready(call(state, *inputs))
        alone.append(jax.tree.map(lambda x: int(fingerprint(x)), state))
        if device is own[0]:
            state, one_device = timed(call, state, inputs, repeats)
            state, gpu_alone, kernels_alone = gpu_times(call, state, inputs)
        del state

    arrays = [own_arrays(stack, device, devices.index(device)) for device in own]
    own_params = [jax.device_put(params, device) for device in own]

    def of_each(states, inputs):
        return [programs.alone[device](state, *its) for device, state, its in zip(own, states, inputs)]

    states = [state for state, _ in arrays]
    each = [(rows, given, tables) for (_, (rows, tables)), given in zip(arrays, own_params)]
    states, apart = timed(of_each, jax.block_until_ready(of_each(states, each)), (each,), repeats)
    del arrays, states, each

    arrays = [own_arrays(stack, device, devices.index(device)) for device in own]
    state = joined(mesh, [of_device for of_device, _ in arrays])
    rows, tables = joined(mesh, [of_device for _, of_device in arrays])
    del arrays
    inputs, sharded = (rows, on_all(mesh, params), tables), programs.together
    found = [name for name in COLLECTIVES if re.search(rf"\b{name}", sharded.as_text())]
    state = jax.block_until_ready(sharded(state, *inputs))
    compare(state, alone)
    state, together = timed(sharded, state, inputs, repeats)
    state, gpu_together, kernels_together = gpu_times(sharded, state, inputs)
    return {
        "devices": len(devices),
        "processes": jax.process_count(),
        "one_device_us": one_device * 1e6,
        "all_devices_us": together * 1e6,
        "weak_scaling": one_device / together,
        "apart_us": apart * 1e6,
        "apart_weak_scaling": one_device / apart,
        "one_device_gpu_us": gpu_alone[0],
        "all_devices_gpu_us": gpu_together,
        "kernels_alone_and_together": differences(kernels_alone, kernels_together),
        "collectives": found,
        "equal_to_the_bit": True,  # `compare` raised otherwise
    }


def gpus() -> int:
    """How many this machine has; JAX may not be asked before its processes know of each other."""
    return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())


def on_all(mesh: Mesh, tree: Any) -> Any:
    """The same arrays whole on every device of the mesh."""
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), lambda index: np.asarray(x)[index]),
        tree,
    )


def in_this_process(name: str, layers: int, repeats: int, wait: Callable[[], None] = lambda: None) -> dict:
    """Compiles a case, waits, and measures it."""
    if len(jax.devices()) < 2:
        raise SystemExit(f"two or more devices are needed, JAX has {len(jax.devices())} here")
    batch, context = map(int, name.split("x"))
    stack = Stack(batch=batch, max_len=context, ratios=V4_FLASH_RATIOS[:layers])
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    programs = compile_case(stack, mesh)
    wait()
    return case(stack, programs, mesh, repeats)


def work(name: str, layers: int, repeats: int, channel: Connection) -> None:
    """One case in a process of its own, which says when it has compiled and measures when it is told to."""

    def wait():
        channel.send("compiled")
        channel.recv()

    channel.send(in_this_process(name, layers, repeats, wait))


class Worker:
    """A process of its own that runs `target(*arguments, channel)`; the first argument says which it is."""

    def __init__(self, target: Callable, *arguments: object):
        self.name = arguments[0]
        spawn = multiprocessing.get_context("spawn")
        self.channel, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that one that dies is noticed

    def answer(self) -> Any:
        try:
            return self.channel.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"two_gpus: {self.name} ended with exit code {self.process.exitcode}") from None


def results_of(names: Sequence[str], layers: int, repeats: int) -> Iterator[dict]:
    """All cases are traced and compiled at once, in a process each, and then measured one after the other."""
    workers = [Worker(work, name, layers, repeats) for name in names]
    for worker in workers:
        worker.answer()
    for worker in workers:
        worker.channel.send("measure")
        yield worker.answer()
        worker.process.join()  # its memory is the next one's


def work_of_one(number: int, names: Sequence[str], layers: int, repeats: int, channel: Connection) -> None:
    """All cases, in the process of one of the GPUs."""
    jax.distributed.initialize(COORDINATOR, gpus(), number, local_device_ids=[number])
    for name in names:
        channel.send(in_this_process(name, layers, repeats))


def results_of_processes(names: Sequence[str], layers: int, repeats: int) -> Iterator[dict]:
    """One case after the other, in a process for each GPU; what the first of them measures."""
    workers = [Worker(work_of_one, number, names, layers, repeats) for number in range(gpus())]
    for _ in names:
        first, *_ = [worker.answer() for worker in workers]
        yield first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--layers", type=int, default=len(V4_FLASH_RATIOS), help="only the first layers")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--processes", action="store_true", help="one for each GPU")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the cases' processes share the GPUs
    names, title, measured = arguments.cases.split(","), "step_over_requests", results_of
    if arguments.processes:
        title, measured = title + "_by_processes", results_of_processes
    found = measured(names, arguments.layers, arguments.repeats)
    results = section("two_gpus.json", title)
    for name, result in zip(names, found):
        results[name] = result
        print(
            f"{name:12} one device {result['one_device_us']:8.0f} us (GPU {result['one_device_gpu_us']:.0f}), "
            f"{result['devices']} devices {result['all_devices_us']:8.0f} us "
            f"(GPU {', '.join(f'{us:.0f}' for us in result['all_devices_gpu_us'])}), "
            f"weak scaling {result['weak_scaling']:.3f}, apart {result['apart_weak_scaling']:.3f}, "
            f"collectives: {', '.join(result['collectives']) or 'none'}",
            flush=True,
        )
        for kernel, (one, other) in result["kernels_alone_and_together"].items():
            counts = f"{one.launches:g} and {other.launches:g} times"
            print(f"    {one.us:8.1f} and {other.us:8.1f} us, {counts}: {kernel[:70]}", flush=True)
        write_section("two_gpus.json", title, results)


if __name__ == "__main__":
    main()

"""Several GPUs against one: a decode step over requests, context parallel decode, and the engine over a mesh.

    python -m benchmarks several_gpus step [--cases 1x8192,8x8192] [--processes]
    python -m benchmarks several_gpus context [--layers c4,c128,v32] [--contexts 131072,1048576] [--rows 64]
    python -m benchmarks several_gpus serving [--preset v4-flash-slice] [--dtype bfloat16] [--layouts 2x1,1x2]

step: a case is REQUESTSxCONTEXT, requests of one device. The step of `benchmarks.step` runs on one device, then under
`jax.shard_map` on all, each with the caches, tables and rows of its own requests. Before it is timed, its output and
every byte of its caches are compared with those that one device has for the same requests, and its program is searched
for collectives. Weak scaling is the wall time on one device over that on all. --processes: one for each GPU.

context: a layer's attention over pages that lie on all devices; wall time of a program of 10 layers, over 10. Outputs
are compared with one device's before. one: sparse_mla_decode on one device, which has all pages. own keys: attention of
each device to its own slots with all heads, no exchange. all-to-all: context_parallel_decode. gathered: own keys, whole
outputs gathered on every device and merged there, which is what the exchange replaces.

serving: a layout is SHARESxDEVICES, shares of the requests and devices that share heads and experts. Each request is
compared with that of one device up to its first other token; the margin there says how close the two best logits were.
In float32 only the order of sums differs: nothing is timed, and "nudged" is one device with every weight moved to the
next number. In bfloat16 the requests are then served twice with drawn tokens, and the second time is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness import attempt, busy_by_gpu, gpu_names, parser, run_cases, show, status, write
from benchmarks.stack import RANDOM_PAGES, V4_FLASH_RATIOS, Stack, decode_step, fill, random_pages
from benchmarks.step import ROOM, STEPS
from jax_sparse_mla import DEEPSEEK_V4_FLASH, DEEPSEEK_V32, ModelSpec, PagedKV
from jax_sparse_mla.attention import apply_attn_sink, context_parallel_decode, merge_attention, sparse_mla_decode
from jax_sparse_mla.attention.context_parallel import own_tables
from jax_sparse_mla.attention.index_table import IndexTable
from jax_sparse_mla.serving import Model
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.mesh import MeshEngine, init_cut_params, new_mesh
from jax_sparse_mla.serving.presets import BENCH_CONFIGS
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
COORDINATOR = "127.0.0.1:9876"
PROFILED = 8  # steps
CALLS = 10  # layers of a program
# How far outputs may be apart: a part is rounded to bfloat16 before it is merged, and the result after it.
TOLERANCE = 2**-6


def collectives(compiled) -> list[str]:
    return [name for name in COLLECTIVES if re.search(rf" {name}(-start)?\(", compiled.as_text())]


# --- a step over requests --------------------------------------------------------------------------


def arrays_of(stack: Stack, device: jax.Device | None, seed: int) -> tuple[Any, Any]:
    """A device's arrays for its requests: the state that a step donates, and `(rows, tables)`."""
    with jax.default_device(device):
        start = jnp.full(stack.batch, stack.max_len - ROOM, jnp.int32)
        state = fill(stack.empty_caches()), start, stack.empty_out(stack.batch)
        return jax.device_put((state, (stack.rows(stack.batch, seed), stack.tables(seed))), device)


def joined(mesh: Mesh, trees: Sequence[Any]) -> Any:
    """The arrays of this process's devices as arrays over the mesh, one device's behind the other's."""

    def join(*shards):
        shape = mesh.size * shards[0].shape[0], *shards[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, P("requests")), shards)

    return jax.tree.map(join, *trees)


def sharded_step(stack: Stack, mesh: Mesh):
    """`(state, rows, params, tables) -> state` on every device by itself; every device has the parameters."""
    of_requests = P("requests")
    step = jax.shard_map(
        functools.partial(decode_step, stack),
        mesh=mesh,
        in_specs=(of_requests, of_requests, P(), of_requests),
        out_specs=of_requests,
    )
    return jax.jit(step, donate_argnums=0, keep_unused=True)


def timed_steps(call, state: Any, inputs: Sequence[Any], repeats: int) -> tuple[Any, float]:
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


def check_equal(state: Any, alone: Sequence[Any]) -> None:
    """Raises unless every device has what one device has for its requests; `alone` are the fingerprints of those."""
    for array, *wanted in zip(jax.tree.leaves(state), *map(jax.tree.leaves, alone), strict=True):
        for shard, want in zip(array.addressable_shards, wanted, strict=True):
            if int(fingerprint(shard.data)) != want:
                raise ValueError(f"{shard.device}: an array {shard.data.shape} is not what one device has")


def on_all(mesh: Mesh, tree: Any) -> Any:
    """The same arrays whole on every device of the mesh."""
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, NamedSharding(mesh, P()), lambda index: np.asarray(x)[index]),
        tree,
    )


def gpu_times(call, state: Any, inputs: Sequence[Any]) -> tuple[Any, list[float]]:
    """The state after PROFILED steps, and the microseconds of a step that each GPU works."""

    def run():
        nonlocal state
        for _ in range(PROFILED):
            state = call(state, *inputs)
        jax.block_until_ready(state)

    times = [time / PROFILED / 1e3 for time in busy_by_gpu(run)]
    return state, times


def step_case(name: str, layers: int, repeats: int) -> dict:
    """Compares and times one case."""
    batch, context = map(int, name.split("x"))
    stack = Stack(batch=batch, max_len=context, ratios=V4_FLASH_RATIOS[:layers])
    mesh = Mesh(np.array(jax.devices()), ("requests",))
    devices, params, alone = mesh.devices.tolist(), stack.params(), []
    local = [device for device in devices if device.process_index == jax.process_index()]
    for device in local:
        state, (rows, tables) = arrays_of(stack, device, devices.index(device))
        inputs = rows, jax.device_put(params, device), tables
        call = stack.decode().lower(state, *inputs).compile()
        state = jax.block_until_ready(call(state, *inputs))
        alone.append(jax.tree.map(lambda x: int(fingerprint(x)), state))
        if device is local[0]:
            state, one_device = timed_steps(call, state, inputs, repeats)
            state, gpu_alone = gpu_times(call, state, inputs)
        del state
    arrays = [arrays_of(stack, device, devices.index(device)) for device in local]
    state = joined(mesh, [state for state, _ in arrays])
    rows, tables = joined(mesh, [inputs for _, inputs in arrays])
    del arrays
    inputs = rows, on_all(mesh, params), tables
    call = sharded_step(stack, mesh).lower(state, *inputs).compile()
    state = jax.block_until_ready(call(state, *inputs))
    check_equal(state, alone)
    state, together = timed_steps(call, state, inputs, repeats)
    state, gpu_together = gpu_times(call, state, inputs)
    return {
        "devices": len(devices),
        "processes": jax.process_count(),
        "one_device_us": one_device * 1e6,
        "all_devices_us": together * 1e6,
        "weak_scaling": one_device / together,
        "one_device_gpu_us": gpu_alone[0],
        "all_devices_gpu_us": gpu_together,
        "collectives": collectives(call),
        "equal_to_the_bit": True,  # `check_equal` raised otherwise
    }


def run_step(args) -> int:
    if args.processes and args.process_id is None:
        command = [sys.executable, "-m", "benchmarks", "several_gpus", *sys.argv[1:], "--process-id"]
        running = [subprocess.Popen([*command, str(number)]) for number in range(len(gpu_names()))]
        return max(process.wait() for process in running)
    if args.processes:
        number = args.process_id
        jax.distributed.initialize(COORDINATOR, len(gpu_names()), number, local_device_ids=[number])
    rows = []
    for name in args.cases.split(","):
        rows.append({"case": name, **attempt(lambda name=name: step_case(name, args.layers_of_step, args.repeats))})
        if not args.process_id:
            show(rows[-1])
            write("several_gpus_step" + "_by_processes" * args.processes, rows)
        if args.processes and "failed" in rows[-1]:
            break  # the other processes may wait for this one
    return status(rows)


# --- context parallel decode -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """A kind of layer: the compress ratio (None: V3.2), and the selected keys of a row (None: all)."""

    spec: ModelSpec
    ratio: int | None
    topk: int | None

    @property
    def selects(self) -> bool:
        return self.topk is not None


LAYERS = {
    "c4": Layer(DEEPSEEK_V4_FLASH, 4, DEEPSEEK_V4_FLASH.index_topk),
    "c128": Layer(DEEPSEEK_V4_FLASH, 128, None),
    "v32": Layer(DEEPSEEK_V32, None, DEEPSEEK_V32.index_topk),
}


def tables(layer: Layer, rows: int, context: int, n: int) -> tuple[int, np.ndarray, int, np.ndarray | None]:
    """Pages and slots int32 `[rows, 1, columns]` of the first cache, and of the compressed one.

    A request's pages go to the devices in turn; which of a device's pages it has is random.
    """
    rng, spec = np.random.default_rng(0), layer.spec

    def pages_of(count):  # [rows, count], and how many pages there are
        count = -(-count // n) * n
        groups = rng.permutation(rows * count // n).reshape(rows, -1)
        return (groups[:, :, None] * n + np.arange(n)).reshape(rows, -1), rows * count

    def slots(page, entries, size):
        slot = np.take_along_axis(page, entries // size, axis=1) * size + entries % size
        return slot.astype(np.int32)[:, None]

    def chosen(count):
        if not layer.selects:
            return np.broadcast_to(np.arange(count), (rows, count))
        return rng.integers(0, count, (rows, min(layer.topk, count)))

    if layer.ratio is None:
        page, total = pages_of(context // spec.page_size)
        return total, slots(page, chosen(context), spec.page_size), 0, None
    page, total = pages_of(3)
    window = np.arange(spec.window) + rng.integers(0, 2 * spec.page_size - spec.window, (rows, 1))
    full, full_total = pages_of(context // spec.page_size)
    extra = slots(full, chosen(context // layer.ratio), spec.page_size // layer.ratio)
    return total, slots(page, window, spec.page_size), full_total, extra


def pool(spec: ModelSpec, pages: int, page_size: int, n: int, device: int | jax.Array) -> PagedKV:
    """A device's share of the pages, all of them where n is 1."""
    share = jnp.arange(pages // n, dtype=jnp.int32) * n + device
    data = random_pages(spec.kv_layout, page_size)[share % RANDOM_PAGES]
    return PagedKV(data=data, layout=spec.kv_layout, page_size=page_size)


def gathered(q, cache, indices, *, extra_cache=None, extra_indices=None, attn_sink=None, softmax_scale):
    """Whole outputs of every device's keys, gathered and merged."""
    extra = {} if extra_cache is None else {"extra_cache": extra_cache, "extra_indices": extra_indices}
    out, lse = own_keys(q, cache, indices, softmax_scale=softmax_scale, **extra)
    out, lse = merge_attention(lax.all_gather(out, "pages"), lax.all_gather(lse, "pages"))
    return (out if attn_sink is None else apply_attn_sink(out, lse, attn_sink)), lse


def own_keys(q, cache, indices, *, extra_cache=None, extra_indices=None, attn_sink=None, softmax_scale):
    """`context_parallel_decode` without its exchange: parts of all heads, as many as there are devices."""
    del attn_sink
    tables = [IndexTable(cache, indices, None)]
    if extra_cache is not None:
        tables.append(IndexTable(extra_cache, extra_indices, None))
    (indices, lengths), *second = own_tables(tables, "pages")
    extra = {}
    for extra_indices, extra_lengths in second:
        extra = {"extra_cache": extra_cache, "extra_indices": extra_indices, "extra_topk_length": extra_lengths}
    options = {"softmax_scale": softmax_scale, "topk_length": lengths, "assume_valid_indices": True}
    return sparse_mla_decode(q, cache, indices, **options, **extra)


def chain(attend, layer: Layer):
    """CALLS layers, each of which can begin when the one below it is done; (out, lse) of the last, as of any.

    A layer takes a value of the output below it: an optimization barrier alone would let XLA merge all calls to one. A
    selection is a layer's own, and its slots take that value. The window and all entries of C128 are the same in all
    layers, so there the queries do.
    """

    def program(q, caches, indices, sink):
        (cache, *extra_cache), (slots, *extra_slots) = caches, indices
        out = None
        for _ in range(CALLS):
            if out is not None:
                zero = jnp.isnan(out[0][0, 0, 0, 0])
                if not layer.selects:
                    q = q + zero.astype(q.dtype)
                elif extra_slots:
                    extra_slots = [extra_slots[0] + zero.astype(jnp.int32)]
                else:
                    slots = slots + zero.astype(jnp.int32)
            extra = {"extra_cache": extra_cache[0], "extra_indices": extra_slots[0]} if extra_cache else {}
            out = attend(q, cache, slots, attn_sink=sink, softmax_scale=layer.spec.softmax_scale, **extra)
        return out

    return program


def timed_layer(call, arguments: Sequence[Any]) -> float:
    """Median microseconds of a layer, in runs of five programs."""
    jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(5):
            out = call(*arguments)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - started) / 5)
    return statistics.median(seconds) * 1e6


def check_close(name: str, results: tuple, wanted: tuple) -> None:
    out, lse = (np.asarray(x, np.float32)[: len(wanted[1])] for x in results)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-3, atol=1e-3, err_msg=name)
    scale = np.abs(wanted[0]).max()
    np.testing.assert_allclose(out / scale, wanted[0] / scale, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def context_case(layer: Layer, rows: int, context: int) -> dict:
    """Compares and times one case."""
    spec, devices = layer.spec, jax.devices()
    n = len(devices)
    pages, slots, extra_pages, extra_slots = tables(layer, rows, context, n)
    sizes = [(pages, spec.page_size)] + ([(extra_pages, spec.page_size // layer.ratio)] if extra_pages else [])
    indices = tuple(jnp.asarray(x) for x in (slots, extra_slots) if x is not None)
    q = jax.random.normal(jax.random.key(0), (rows, 1, spec.num_heads, spec.qk_dim), jnp.bfloat16)
    sink = jax.random.normal(jax.random.key(3), (spec.num_heads,)) if layer.ratio is not None else None

    def all_pages():
        return tuple(pool(spec, *size, 1, 0) for size in sizes)

    result: dict[str, Any] = {"devices": n, "rows": rows, "columns": sum(x.shape[-1] for x in indices)}
    arguments = jax.device_put((q, jax.jit(all_pages)(), indices, sink), devices[0])
    one = jax.jit(chain(sparse_mla_decode, layer))
    wanted = tuple(np.asarray(x, np.float32) for x in one(*arguments))
    result["one_us"] = timed_layer(one, arguments) / CALLS
    del arguments

    mesh = Mesh(np.array(devices), ("pages",))

    def a_share():
        return tuple(pool(spec, *size, n, lax.axis_index("pages")) for size in sizes)

    caches = jax.jit(jax.shard_map(a_share, mesh=mesh, in_specs=(), out_specs=P("pages")))()
    q, indices, sink = jax.device_put((q, indices, sink), NamedSharding(mesh, P()))
    decode = functools.partial(context_parallel_decode, axis_name="pages")
    ways = {
        # Each device's own output, one after the other: of parts, and of what is the same on all devices.
        "own_keys": (own_keys, P(), P("pages")),
        "all_to_all": (decode, P("pages"), P(None, None, "pages")),
        "gathered": (gathered, P(), P("pages")),
    }
    for name, (attend, of_sink, of_out) in ways.items():
        specs = {"in_specs": (P(), P("pages"), P(), of_sink), "out_specs": of_out}
        program = jax.jit(jax.shard_map(chain(attend, layer), mesh=mesh, **specs))
        call = program.lower(q, caches, indices, sink).compile()
        arguments = jax.device_put((q, caches, indices, sink), call.input_shardings[0])
        if name != "own_keys":
            check_close(name, call(*arguments), wanted)
        result[f"{name}_us"] = timed_layer(call, arguments) / CALLS
        result[f"{name}_collectives"] = collectives(call)
    each = rows * spec.num_heads * (2 * spec.v_dim + 4)
    result["all_to_all_sent_bytes"], result["gathered_sent_bytes"] = each * (n - 1) // n, each * (n - 1)
    result["speedup"] = result["one_us"] / result["all_to_all_us"]
    return result


def run_context(args) -> int:
    cases = [
        (f"{name} {context}", functools.partial(context_case, LAYERS[name], args.rows, int(context)))
        for name, context in itertools.product(args.layers.split(","), args.contexts.split(","))
    ]
    return status(run_cases("several_gpus_context", cases))


# --- the engine ------------------------------------------------------------------------------------


def served(engine: Engine, prompts: list[list[int]], new: int, drawn: bool) -> tuple[list[Request], float, float]:
    """The requests, the seconds until all had their first token, and those from there to the end."""
    draws = [Sampling(temperature=1e6, seed=seed) if drawn else Sampling() for seed in range(len(prompts))]
    requests = [Request(prompt, new, sampling=how) for prompt, how in zip(prompts, draws)]
    first = []

    def on_step(_, requests):
        if not first and all(request.output for request in requests):
            first.append(time.perf_counter())

    started = time.perf_counter()
    engine.run(requests, on_step)
    return requests, first[0] - started, time.perf_counter() - first[0]


def differences(requests: list[Request], wanted: list[Request]) -> list[float]:
    """The margin at the first other token of each request that has one."""
    margins = []
    for request, alone in zip(requests, wanted):
        other = [i for i, (a, b) in enumerate(zip(request.output, alone.output)) if a != b]
        margins += [alone.margins[other[0]]] if other else []
    return margins


def nudged(params: Any) -> Any:
    """The parameters with each float32 weight moved to the number above or below it, at random."""
    rng = np.random.default_rng(1)

    def moved(weight):
        if weight.dtype != jnp.float32:
            return weight
        return jnp.nextafter(weight, jnp.asarray(rng.choice([-np.inf, np.inf], weight.shape), jnp.float32))

    return jax.tree.map(moved, params)


def measured(engine: Engine, prompts: list[list[int]], new: int) -> dict[str, float]:
    """The engine's speeds with drawn tokens, once their programs are compiled."""
    served(engine, prompts, new, drawn=True)
    _, prefill, decode = served(engine, prompts, new, drawn=True)
    tokens = sum(len(prompt) for prompt in prompts)
    return {"prefill_tokens_per_second": tokens / prefill, "decode_step_ms": decode / (new - 1) * 1e3}


def run_serving(args) -> int:
    count, devices = args.requests, jax.devices()
    layouts = args.layouts or f"{len(devices)}x1,1x{len(devices)}"
    model = Model.from_config(BENCH_CONFIGS[args.preset])
    dtype, timed = jnp.dtype(args.dtype), args.dtype == "bfloat16"
    prompts = np.random.default_rng(0).integers(0, model.vocab_size, (count, args.prompt)).tolist()
    chunk = min(1024, count * args.prompt)
    options = EngineOptions(max_batch=count, max_len=args.prompt + args.new, chunk_size=chunk)
    one: dict[str, Any] = {}  # the requests and speeds of one device, the first case

    def case(layout: str) -> dict:
        if layout in ("one", "nudged"):
            params = model.init_params(0, dtype)
            engine = Engine(model, params if layout == "one" else nudged(params), options)
            del params
        else:
            shape = tuple(map(int, layout.split("x")))
            mesh = new_mesh(*shape)
            share = dataclasses.replace(options, max_batch=-(-count // shape[0]))
            engine = MeshEngine(*init_cut_params(model, 0, mesh, dtype), share, mesh)
        requests, _, _ = served(engine, prompts, args.new, drawn=False)
        if layout == "one":
            one["requests"] = requests
        margins = differences(requests, one["requests"])
        backends = {f"{phase} {backend}" for route in engine.routes.values() for phase, backend in route}
        row = {"attention": sorted(backends), "requests_with_another_token": len(margins)}
        row["largest_margin_there"] = max(margins, default=0.0)
        if timed:
            row |= measured(engine, prompts, args.new)
            if layout == "one":
                one.update(row)
            row["prefill_speedup"] = row["prefill_tokens_per_second"] / one["prefill_tokens_per_second"]
            row["decode_speedup"] = one["decode_step_ms"] / row["decode_step_ms"]
        return row | {"compile_seconds": engine.compile_seconds}

    cases = ["one", *([] if timed else ["nudged"]), *layouts.split(",")]
    name = f"several_gpus_serving_{args.preset}_{args.dtype}"
    return status(run_cases(name, ((layout, functools.partial(case, layout)) for layout in cases)))


RUN = {"step": run_step, "context": run_context, "serving": run_serving}


def main() -> int:
    made = parser(__doc__, only=None)
    made.add_argument("what", choices=RUN)
    made.add_argument("--cases", default="1x8192,8x8192,64x8192,1x131072,8x131072,64x131072", help="step: its cases")
    made.add_argument("--layers-of-step", type=int, default=len(V4_FLASH_RATIOS), help="step: only the first layers")
    made.add_argument("--repeats", type=int, default=4, help="step: runs")
    made.add_argument("--processes", action="store_true", help="step: one for each GPU")
    made.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
    made.add_argument("--layers", default=",".join(LAYERS), help="context: kinds of layers")
    made.add_argument("--contexts", default="131072,1048576", help="context: tokens")
    made.add_argument("--rows", type=int, default=64, help="context: query rows")
    made.add_argument("--preset", default="v4-flash-slice", choices=BENCH_CONFIGS, help="serving: the model")
    made.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="serving: of the weights")
    made.add_argument("--layouts", help="serving: by default all devices over requests, then all over heads")
    made.add_argument("--requests", type=int, default=64, help="serving: requests")
    made.add_argument("--prompt", type=int, default=512, help="serving: tokens of a prompt")
    made.add_argument("--new", type=int, default=64, help="serving: tokens to make for each request")
    args = made.parse_args()
    if args.dry_run:
        contexts = [f"{layer} {context}" for layer in args.layers.split(",") for context in args.contexts.split(",")]
        layouts = (args.layouts or "all over requests,all over heads").split(",")
        print(*{"step": args.cases.split(","), "context": contexts, "serving": ["one", *layouts]}[args.what], sep="\n")
        return 0
    if args.what == "serving":
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")  # nobody shares the devices
        if args.dtype == "float32":  # not timed, and XLA takes minutes to choose the kernels of float32 products
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    if not args.processes and len(jax.devices()) < 2:
        raise SystemExit(f"two or more devices are needed, JAX has {len(jax.devices())} here")
    return RUN[args.what](args)

"""How fast the JAX engine serves a model: first token, time per token, tokens a second, and the attention's part.

    python -m benchmarks serving [--preset v4] [--requests 1,8,64] [--contexts 2048,8192]

The first token comes from a real prefill of one request. Decode steps start behind contexts that nobody read: requests
are opened at their length, and their cached rows are random. The true-size slice of V4-Flash (--preset v4-flash-slice),
51 GiB of weights, takes about 100 s a context on one H100; 131,072 tokens take 190 s.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks.harness import busy_by_gpu, parser, torch, write
from benchmarks.stack import fill
from jax_sparse_mla.cli.arguments import mesh_shape, natural, positive_int
from jax_sparse_mla.cli.setup import choose_device, keep_programs
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.serving import memory
from jax_sparse_mla.serving.decoder import StepInputs
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.mesh import REQUESTS, MeshEngine, init_cut_params, new_mesh, parameter_specs
from jax_sparse_mla.serving.model import Model, Params
from jax_sparse_mla.serving.options import default_chunk_size
from jax_sparse_mla.serving.presets import BENCH_CONFIGS
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.step import State

# (requests, contexts, timed tokens of each request) of a device: a CPU should be done in about two minutes.
GPU_CASES = [1, 8, 64], [2048, 8192, 131072], 128
CPU_CASES = [1, 4], [512, 2048], 16
# Decode steps before those that are timed, and behind them under a profiler.
WARM_UP, PROFILED = 4, 8
# A prefill is repeated so often, or until so many seconds have passed.
PREFILLS, PREFILL_SECONDS = 5, 3.0

NOTE = """\
first token: one request alone, its whole prompt read, once compiled (median). Decode: the requests are opened at their
context without reading it; their caches hold random rows, and their tokens are drawn, all equally likely. Per token:
the time from one token of a request to its next. Attention: all layers' attention alone with its projections, over the
step. GPU: the part of a step in which the GPU works, by CUPTI through torch; attention is by GPU time then."""

COLUMNS = {"requests": 8, "context": 8, "first token": 12, "tokens/s": 10, "per token: p50": 15, "p90": 9, "p99": 9}
COLUMNS |= {"attention": 10, "GPU": 9}


@dataclasses.dataclass(frozen=True)
class Served:
    """A model and its parameters on a device, or on a mesh of devices; the seed of all draws, bytes of the weights."""

    model: Model
    params: Params
    mesh: Mesh | None
    seed: int
    weight_bytes: int

    def new_engine(self, max_batch: int, max_len: int, chunk_size: int = 1024) -> Engine:
        """Raises NotEnoughMemory for caches that do not fit beside the weights, before they are made."""
        options = EngineOptions(max_batch=max_batch, max_len=max_len, chunk_size=chunk_size, seed=self.seed)
        engine, mesh = (Engine, ()) if self.mesh is None else (MeshEngine, (self.mesh,))
        return engine(self.model, self.params, options, *mesh)


def weight_bytes(model: Model, mesh: Mesh | None = None, as_stored: bool = False) -> int:
    """Bytes of the random parameters, or of each device's part of them; none are made."""
    params = jax.eval_shape(lambda: model.init_params(0, as_stored=as_stored))
    if mesh is None:
        return memory.size_of(params)

    def placed(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return memory.bytes_of_a_device(jax.tree.map(placed, params, parameter_specs(params, mesh)))


def fitting(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `run`; or its `problem`, where it does not fit the device."""
    try:
        return run()
    except memory.NotEnoughMemory as error:
        problem = str(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        problem = f"does not fit: {str(error).splitlines()[0]}"
    finally:
        gc.collect()  # an engine of the case before may be part of a cycle, and holds its caches
    return {"problem": problem}


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    return dict(zip(("p50", "p90", "p99"), (np.percentile(seconds, (50, 90, 99)) * 1e3).tolist()))


def first_token(served: Served, context: int, chunk_size: int) -> dict[str, Any]:
    """The time to the first token of one request that nobody shares the device with, once compiled."""
    engine = served.new_engine(max_batch=1, max_len=context + 1, chunk_size=min(chunk_size, context))
    prompt = np.random.default_rng(served.seed).integers(0, served.model.vocab_size, context).tolist()

    def seconds() -> float:
        start = time.perf_counter()
        engine.run([Request(prompt, 1)])
        return time.perf_counter() - start

    seconds()  # compiles
    times = [seconds()]
    while len(times) < PREFILLS and sum(times) < PREFILL_SECONDS:
        times.append(seconds())
    return {"first_token_ms": percentiles(times)}


def decode(served: Served, requests: int, context: int, new_tokens: int) -> dict[str, Any]:
    """The measurements of decode steps: see NOTE."""
    total = WARM_UP + new_tokens + PROFILED + 2  # the token before the first step, and one that is not read
    shares = 1 if served.mesh is None else served.mesh.shape[REQUESTS]
    engine = served.new_engine(max_batch=-(-requests // shares), max_len=context + total)
    open_unread(engine, requests, context, total, served.seed)

    def steps(count: int) -> list[float]:
        """The times at which the tokens of each step were read."""
        times = []
        for _ in range(count):
            engine.step()
            times.append(time.perf_counter())
        return times

    steps(WARM_UP)
    seconds = np.diff(steps(new_tokens + 1))
    engine.wait()
    step_ms, attention_ms, attention_gpu_ms, attend = float(seconds.mean()) * 1e3, None, None, None
    if served.mesh is None:
        attend = attention_steps(engine)
        attend(WARM_UP)
        start = time.perf_counter()
        attend(new_tokens)
        attention_ms = (time.perf_counter() - start) / new_tokens * 1e3
    # A profiler slows the host: it comes behind what is timed there.
    step_gpu_ms = gpu_ms(lambda: (steps(PROFILED), engine.wait()), PROFILED)
    if attend is not None:
        attention_gpu_ms = gpu_ms(lambda: attend(PROFILED), PROFILED)
    by_gpu = attention_gpu_ms and step_gpu_ms
    part, step = (attention_gpu_ms, step_gpu_ms) if by_gpu else (attention_ms, step_ms)
    return {
        "tokens_per_s": requests / step_ms * 1e3,
        "token_ms": percentiles(seconds),
        "step_ms": step_ms,
        "step_gpu_ms": step_gpu_ms,
        "attention_ms": attention_ms,
        "attention_gpu_ms": attention_gpu_ms,
        "attention_share": part / step if part else None,
    }


def open_unread(engine: Engine, count: int, context: int, new_tokens: int, seed: int) -> None:
    """Opens requests at their length without reading a prompt: their pages are mapped, what they cached is random.

    Their tokens are drawn, all equally likely. Random weights soon make the same most likely token for all requests,
    and then the same few experts would serve them.
    """
    rng = np.random.default_rng(seed)
    shares = engine.scheduler.shares
    prompt = [0] * context  # never read
    for index, token in enumerate(rng.integers(0, engine.model.vocab_size, count).tolist()):
        scheduler = shares[index % len(shares)]
        sampling = Sampling(temperature=1e6, seed=seed + index)
        request = Request(prompt, new_tokens, output=[token], sampling=sampling, row=scheduler.pool.open())
        for start in range(0, context, size := scheduler.pool.page_size):  # a window gives back what it leaves
            scheduler.pool.extend(request.row, start, min(start + size, context))
        request.computed = context
        scheduler.submit(request)
    for scheduler in shares:
        scheduler.pool.take_changes()  # the tables go to the device whole
    tables = RequestTables(
        req_to_token=np.concatenate([x.pool.req_to_token for x in shares]),
        full_to_swa=np.concatenate([x.pool.full_to_swa for x in shares]) if engine.spec.window is not None else None,
    )
    engine.state = State(
        caches=fill(engine.state.caches),
        tables=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), tables, engine.state.tables),
        last_tokens=engine.state.last_tokens,
    )


def attention_steps(engine: Engine) -> Callable[[int], None]:
    """Runs so many steps of all layers' attention alone, from each layer's input to its output, and waits for them.

    They attend from the last position of each open request, over its caches and by its tables.
    """
    model, requests = engine.model, engine.scheduler.running
    width = max(program.max_seq_len for program in engine.routes)
    rows = jnp.array([request.row for request in requests], jnp.int32)
    positions = jnp.array([request.computed - 1 for request in requests], jnp.int32)
    x = jax.random.normal(jax.random.key(3), (len(requests), model.config.hidden_size), jnp.bfloat16)

    def step(params: Params, state: State, x: jax.Array) -> tuple[State, jax.Array]:
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            max_seq_len=width,
            req_pool_indices=rows,
            seq_lens=positions + 1,
            out_cache_loc=state.tables.req_to_token[rows, positions],
        )
        layers = range(model.num_layers)
        inputs = StepInputs(batch=batch, tables=state.tables, positions=positions)
        out, caches = model.attention(params, state.caches, inputs, x, layers=layers)
        return dataclasses.replace(state, caches=caches), out

    jitted = jax.jit(step, donate_argnums=1)

    def attend(count: int) -> None:
        out = x
        for _ in range(count):
            engine.state, out = jitted(engine.params, engine.state, x)
        jax.block_until_ready(out)

    return attend


def gpu_ms(run: Callable[[], Any], steps: int) -> float | None:
    """Milliseconds a step in which the busiest GPU works while `run()` runs `steps`, which must wait for them.

    None without torch, or without a GPU.
    """
    if jax.default_backend() != "gpu" or torch is None:
        return None
    return max((time / steps / 1e6 for time in busy_by_gpu(run)), default=None)


def line(row: dict[str, Any]) -> str:
    """A row of the table; a dash where nothing was measured, and why."""

    def number(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    token, share = row.get("token_ms", {}), row.get("attention_share")
    values = (
        str(row["requests"]),
        str(row["context"]),
        number(row.get("first_token_ms", {}).get("p50"), 2),
        number(row.get("tokens_per_s"), 1),
        *(number(token.get(name), 3) for name in ("p50", "p90", "p99")),
        "–" if share is None else f"{share:.0%}",
        number(row.get("step_gpu_ms"), 3),
    )
    cells = " ".join(f"{value:>{width}}" for value, width in zip(values, COLUMNS.values()))
    return cells + (f"  {row['problem']}" if "problem" in row else "")


def integers(text: str) -> list[int]:
    """An argparse type: numbers between commas."""
    return [positive_int(number) for number in text.split(",")]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--preset", choices=tuple(BENCH_CONFIGS), default="v4", help="its weights are random")
    made.add_argument("--requests", type=integers, metavar="N,…", help="served at once")
    made.add_argument("--contexts", type=integers, metavar="TOKENS,…", help="of each request")
    made.add_argument("--new-tokens", type=positive_int, metavar="N", help="timed, of each request")
    made.add_argument(
        "--chunk-size", type=positive_int, metavar="TOKENS", help="of a prefill step; default: as `generate`"
    )
    made.add_argument("--as-stored", action="store_true", help="weights in FP4 and FP8, as in released checkpoints")
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where JAX has it")
    made.add_argument("--mesh", type=mesh_shape, metavar="SHARESxDEVICES", help="as of `jax-sparse-mla generate`")
    made.add_argument("--seed", type=natural, default=0, help="of the weights, the tokens and the page order")
    args = made.parse_args()
    requests, contexts, new_tokens = CPU_CASES if args.device == "cpu" else GPU_CASES
    if not args.dry_run:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # nobody shares the device
        try:
            device = choose_device(args.device)
        except ValueError as error:
            made.error(str(error))
        if jax.default_backend() == "cpu":
            requests, contexts, new_tokens = CPU_CASES
    pairs = itertools.product(args.contexts or contexts, args.requests or requests)
    cases = {f"{count}x{context}": (count, context) for context, count in pairs}
    cases = {name: case for name, case in cases.items() if name.startswith(tuple(args.only))}
    if args.dry_run:
        print(*cases, sep="\n")
        return 0
    new_tokens, mesh = args.new_tokens or new_tokens, None
    model = Model.from_config(BENCH_CONFIGS[args.preset])
    args.chunk_size = args.chunk_size or default_chunk_size(model.config, max(args.contexts or contexts))
    try:
        if args.mesh is not None:
            mesh = new_mesh(*args.mesh)
            device = f"{mesh.size} x {device}, mesh {args.mesh[0]}x{args.mesh[1]}"
        weights = weight_bytes(model, mesh, args.as_stored)
        memory.check_memory(f"the weights of preset {args.preset} need", weights)
    except ValueError as error:
        made.error(str(error))
    keep_programs()
    print(f"{device}, {memory.device_memory() / 2**30:.1f} GiB; preset {args.preset}: {model.num_layers} layers, "
          f"{weights / 2**30:.2f} GiB of random weights on a device; {new_tokens} tokens of each request")  # fmt: skip
    if mesh is None:
        params = model.init_params(args.seed, as_stored=args.as_stored)
    else:
        model, params = init_cut_params(model, args.seed, mesh, as_stored=args.as_stored)
    served = Served(model, params, mesh, args.seed, weights)
    first = functools.cache(lambda context: fitting(lambda: first_token(served, context, args.chunk_size)))
    rows = []
    print(" ".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    for name, (count, context) in cases.items():
        row = {"case": name, "requests": count, "context": context} | first(context)
        row |= fitting(functools.partial(decode, served, count, context, new_tokens))
        rows.append(row)
        print(line(row), flush=True)
        write(f"serving_{args.preset}", rows, new_tokens=new_tokens, chunk_size=args.chunk_size, mesh=args.mesh)
    print(f"\n{NOTE}")
    return 0

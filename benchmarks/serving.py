"""How fast the JAX engine serves a model: first token, time per token, tokens a second, and the attention's part.

    python -m benchmarks serving [--preset v4] [--requests 1,8,64] [--contexts 2048,8192] [--json FILE]

The first token comes from a real prefill of one request. Decode steps start behind contexts that nobody read: requests
are opened at their length, and their cached rows are random. The true-size slice of V4-Flash (--preset v4-flash-slice),
51 GiB of weights, takes about 100 s a context on one H100; 131,072 tokens take 190 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks.harness import busy, gpu_work
from jax_sparse_mla.cli.arguments import mesh_shape, natural, positive_int
from jax_sparse_mla.cli.generate import keep_programs
from jax_sparse_mla.cli.setup import choose_device
from jax_sparse_mla.compressor.state import CompressorState
from jax_sparse_mla.indexer.logits import INDEX_DIM, INDEX_K_BYTES, IndexKeys, write_index_k
from jax_sparse_mla.kv_cache import PagedKV, write_kv
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.serving import memory
from jax_sparse_mla.serving.decoder import StepInputs
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.kda import KDAState
from jax_sparse_mla.serving.mesh import REQUESTS, MeshEngine, init_cut_params, new_mesh, parameter_specs
from jax_sparse_mla.serving.model import Model, Params
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
# Random pages that are repeated through a cache.
RANDOM_PAGES = 64

NOTE = """\
first token: one request alone, its whole prompt read, once compiled (median). Decode: the requests are opened at their
context without reading it; their caches hold random rows, and their tokens are drawn, all equally likely. Per token:
the time from one token of a request to its next. Attention: all layers' attention alone with its projections, over the
step. GPU: the part of a step in which the GPU works, by CUPTI through torch; attention is by GPU time then."""

COLUMNS = {"requests": 8, "context": 8, "first token": 12, "tokens/s": 10, "per token: p50": 15, "p90": 9, "p99": 9}
COLUMNS |= {"attention": 10, "GPU": 9}


@dataclasses.dataclass(frozen=True)
class Served:
    """A model and its parameters on a device, or on a mesh of devices; and the seed of what is drawn."""

    model: Model
    params: Params
    mesh: Mesh | None
    seed: int

    def new_engine(self, **options: Any) -> Engine:
        arguments = self.model, self.params, EngineOptions(seed=self.seed, **options)
        return Engine(*arguments) if self.mesh is None else MeshEngine(*arguments, self.mesh)


def weight_bytes(model: Model, mesh: Mesh | None = None) -> int:
    """Bytes of the random parameters, or of each device's part of them; none are made."""
    params = jax.eval_shape(lambda: model.init_params(0))
    if mesh is None:
        return memory.size_of(params)

    def placed(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return memory.bytes_of_a_device(jax.tree.map(placed, params, parameter_specs(params, mesh)))


def fitting(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `run`; or its `problem`, where it does not fit the device."""
    try:
        return run()
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
    part, whole = (attention_gpu_ms, step_gpu_ms) if attention_gpu_ms and step_gpu_ms else (attention_ms, step_ms)
    return {
        "tokens_per_s": requests / step_ms * 1e3,
        "token_ms": percentiles(seconds),
        "step_ms": step_ms,
        "step_gpu_ms": step_gpu_ms,
        "attention_ms": attention_ms,
        "attention_gpu_ms": attention_gpu_ms,
        "attention_share": part / whole if part else None,
    }


def open_unread(engine: Engine, count: int, context: int, new_tokens: int, seed: int) -> None:
    """Opens requests at their length without reading a prompt: their pages are mapped, what they cached is random.

    Their tokens are drawn, all equally likely. Random weights soon make the same most likely token for all requests,
    and then the same few experts would serve them.
    """
    rng = np.random.default_rng(seed)
    shares = getattr(engine.scheduler, "shares", [engine.scheduler])  # those of a mesh
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
        caches=random_caches(engine.state.caches),
        tables=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), tables, engine.state.tables),
        last_tokens=engine.state.last_tokens,
    )


def random_caches(caches: Any) -> Any:
    """Caches with quantised random rows in all pages, the same few pages over and over; takes a model's donated ones.

    States that requests carry stay as they are. The pages of all layers are the same ones.
    """

    def is_part(part: Any) -> bool:
        return isinstance(part, (PagedKV, IndexKeys, CompressorState, KDAState))

    def filled(part: Any) -> Any:
        if isinstance(part, (CompressorState, KDAState)):
            return part
        if isinstance(part, PagedKV):
            return dataclasses.replace(part, data=fill(part.data, random_kv(part.layout, part.page_size)))
        if isinstance(part, IndexKeys):
            return dataclasses.replace(part, data=filled(part.data))
        return fill(part, random_index_keys(part.shape[1]))

    return jax.tree.map(filled, caches, is_leaf=is_part)


# Their shapes hang on no cache's size, so few programs make the pages of all cases.
@functools.partial(jax.jit, static_argnums=(0, 1))
def random_kv(layout: KVLayout, page_size: int) -> jax.Array:
    empty = PagedKV.zeros(layout, RANDOM_PAGES, page_size)
    rows = jax.random.normal(jax.random.key(1), (empty.num_slots, layout.qk_dim), jnp.bfloat16)
    return write_kv(empty, jnp.arange(empty.num_slots, dtype=jnp.int32), rows).data


@functools.partial(jax.jit, static_argnums=0)
def random_index_keys(page_bytes: int) -> jax.Array:
    empty = jnp.zeros((RANDOM_PAGES, page_bytes), jnp.uint8)
    keys = jax.random.normal(jax.random.key(2), (empty.size // INDEX_K_BYTES, INDEX_DIM), jnp.bfloat16)
    return write_index_k(empty, jnp.arange(len(keys), dtype=jnp.int32), keys)


def fill(pages: jax.Array, source: jax.Array) -> jax.Array:
    """The pages of `source` over and over, in the memory of `pages`."""
    return _fill(pages.sharding)(pages, source)


@functools.cache
def _fill(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def repeated(pages: jax.Array, source: jax.Array) -> jax.Array:
        return source[jnp.arange(pages.shape[0], dtype=jnp.int32) % source.shape[0]]

    return jax.jit(repeated, donate_argnums=0, out_shardings=sharding)


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
    """Milliseconds a step in which the busiest GPU does something while `run()` runs `steps`, which must wait for them.

    None without torch, or without a GPU.
    """
    if jax.default_backend() != "gpu" or importlib.util.find_spec("torch") is None:
        return None
    times = [busy([span for span, _ in operations]) / steps / 1e6 for operations in gpu_work(run)]
    return max(times, default=None)


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=tuple(BENCH_CONFIGS), default="v4", help="its weights are random")
    parser.add_argument("--requests", type=integers, metavar="N,…", help="served at once")
    parser.add_argument("--contexts", type=integers, metavar="TOKENS,…", help="of each request")
    parser.add_argument("--new-tokens", type=positive_int, metavar="N", help="timed, of each request")
    parser.add_argument("--chunk-size", type=positive_int, default=1024, metavar="TOKENS", help="of a prefill step")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where JAX has it")
    parser.add_argument("--mesh", type=mesh_shape, metavar="SHARESxDEVICES", help="as of `jax-sparse-mla generate`")
    parser.add_argument("--seed", type=natural, default=0, help="of the weights, the tokens and the page order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # nobody shares the device
    model, mesh = Model.from_config(BENCH_CONFIGS[args.preset]), None
    try:
        device = choose_device(args.device)
        if args.mesh is not None:
            mesh = new_mesh(*args.mesh)
            device = f"{mesh.size} x {device}, mesh {args.mesh[0]}x{args.mesh[1]}"
        weights = weight_bytes(model, mesh)
        memory.check_memory(f"the weights of preset {args.preset} need", weights)
    except ValueError as error:
        parser.error(str(error))
    keep_programs()
    requests, contexts, new_tokens = CPU_CASES if jax.default_backend() == "cpu" else GPU_CASES
    new_tokens = args.new_tokens or new_tokens
    measured: dict[str, Any] = {
        "device": device,
        "jax": jax.__version__,
        "preset": args.preset,
        "seed": args.seed,
        "weight_bytes_of_a_device": weights,
        "new_tokens": new_tokens,
        "chunk_size": args.chunk_size,
        "note": NOTE.replace("\n", " "),
        "rows": [],
    }
    print(f"device     {device}, {memory.device_memory() / 2**30:.1f} GiB, jax {jax.__version__}")
    print(f"model      preset {args.preset}, seed {args.seed} (random weights, {weights / 2**30:.2f} GiB on a device): "
          f"{model.num_layers} layers, {model.spec.num_heads} heads")  # fmt: skip
    if mesh is None:
        params = model.init_params(args.seed)
    else:
        model, params = init_cut_params(model, args.seed, mesh)
    served = Served(model, params, mesh, args.seed)
    print(f"decode     {new_tokens} tokens of each request; prefill in chunks of {args.chunk_size} rows")
    print("times in milliseconds\n")
    print(" ".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    for context in args.contexts or contexts:
        first = fitting(functools.partial(first_token, served, context, args.chunk_size))
        for count in args.requests or requests:
            row = {"requests": count, "context": context} | first
            row |= fitting(functools.partial(decode, served, count, context, new_tokens))
            measured["rows"].append(row)
            print(line(row), flush=True)
            if args.json is not None:  # after each row: a long run that is stopped keeps what it has
                args.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(f"\n{NOTE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

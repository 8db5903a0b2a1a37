"""The engine over all devices against the engine on one: prefill and decode speed, and where tokens differ.

    python -m benchmarks.serving_mesh [--preset v4-flash-slice] [--layouts 2x1,1x2] [--requests 64] [--prompt 512]
    python -m benchmarks.serving_mesh --preset v4 --dtype float32

A layout is SHARESxDEVICES: shares of the requests, and devices that share heads and experts. Each engine serves the
requests greedily, and a request is compared with that of one device up to its first other token; the margin there says
how close the two best logits were. Weights are random. In float32 only the order of sums differs between layouts, so
that tokens are compared and nothing is timed; bfloat16 also rounds what lies between the layers. What a difference of
one rounding does by itself is shown by a row "nudged": one device, with every weight moved to the float32 number above
or below.

In bfloat16 an engine then serves the requests twice with drawn tokens, all equally likely, since random weights soon
choose the same token, and so the same few experts, for all requests; the second time is measured, with compiled
programs. Prefill ends when the last request has its first token. Writes a section of two_gpus.json, in $OUT or
benchmarks/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import write_section
from jax_sparse_mla.serving import Model
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.mesh import MeshEngine, init_cut_params, new_mesh
from jax_sparse_mla.serving.presets import BENCH_CONFIGS
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions


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


def differences(found: list[Request], wanted: list[Request]) -> list[float]:
    """Of each request that has another token, the margin of the first one."""
    margins = []
    for ours, theirs in zip(found, wanted):
        other = [i for i, (a, b) in enumerate(zip(ours.output, theirs.output)) if a != b]
        margins += [theirs.margins[other[0]]] if other else []
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


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")  # nobody shares the devices
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v4-flash-slice", choices=BENCH_CONFIGS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights")
    parser.add_argument("--layouts", help="by default all devices over requests, then all over heads")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to make for each request")
    arguments = parser.parse_args()
    if arguments.dtype == "float32":  # not timed, and XLA takes minutes to choose the kernels of float32 products
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    count, devices = arguments.requests, jax.devices()
    layouts = arguments.layouts or f"{len(devices)}x1,1x{len(devices)}"
    model = Model.from_config(BENCH_CONFIGS[arguments.preset])
    dtype, timed = jnp.dtype(arguments.dtype), arguments.dtype == "bfloat16"
    name = f"serving {arguments.preset} {arguments.dtype}, {count} x {arguments.prompt}"
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.vocab_size, (count, arguments.prompt)).tolist()
    chunk = min(1024, count * arguments.prompt)
    options = EngineOptions(max_batch=count, max_len=arguments.prompt + arguments.new, chunk_size=chunk)
    results, wanted = {}, None
    for layout in ["one", *([] if timed else ["nudged"]), *layouts.split(",")]:
        if layout in ("one", "nudged"):
            params = model.init_params(0, dtype)
            engine = Engine(model, params if layout == "one" else nudged(params), options)
            del params
        else:
            shape = tuple(map(int, layout.split("x")))
            mesh = new_mesh(*shape)
            share = dataclasses.replace(options, max_batch=-(-count // shape[0]))
            engine = MeshEngine(*init_cut_params(model, 0, mesh, dtype), share, mesh)
        found, _, _ = served(engine, prompts, arguments.new, drawn=False)
        wanted = wanted or found
        margins = differences(found, wanted)
        results[layout] = own = {
            "attention": sorted({f"{phase} {backend}" for route in engine.routes.values() for phase, backend in route}),
            "requests_with_another_token": len(margins),
            "largest_margin_there": max(margins, default=0.0),
        }
        if timed:
            own |= measured(engine, prompts, arguments.new)
            one = results["one"]
            own["prefill_speedup"] = own["prefill_tokens_per_second"] / one["prefill_tokens_per_second"]
            own["decode_speedup"] = one["decode_step_ms"] / own["decode_step_ms"]
        own["compile_seconds"] = engine.compile_seconds
        print(f"{layout:6} {own}", flush=True)
        write_section("two_gpus.json", name, results)
        del engine
        gc.collect()  # an engine may be part of a cycle, and holds its caches


if __name__ == "__main__":
    main()

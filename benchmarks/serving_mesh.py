"""The engine over all devices against the engine on one: tokens per second, and where tokens differ.

    python -m benchmarks.serving_mesh [--preset v4] [--layouts 2x1,1x2] [--requests 64] [--prompt 200] [--new 64]

A layout is SHARESxDEVICES: shares of the requests, and devices that share heads and experts. Each engine serves the
requests twice, and the second time is measured, with compiled programs. A request is compared with that of one device
up to its first other token; the margin there says how close the two best logits were (README's rounding). Random
weights in bfloat16. Writes serving_mesh.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.record import environment, results_folder, write_json
from jax_sparse_mla.serving import Model
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.mesh import HEADS, REQUESTS, MeshEngine, cut_model
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions


def served(engine: Engine, prompts: list[list[int]], new: int) -> tuple[list[Request], float]:
    """The requests and the seconds that they took."""
    requests = [Request(prompt, new) for prompt in prompts]
    started = time.perf_counter()
    engine.run(requests)
    return requests, time.perf_counter() - started


def differences(found: list[Request], wanted: list[Request]) -> list[float]:
    """Of each request that has another token, the margin of the first one."""
    margins = []
    for ours, theirs in zip(found, wanted):
        other = [i for i, (a, b) in enumerate(zip(ours.output, theirs.output)) if a != b]
        margins += [theirs.margins[other[0]]] if other else []
    return margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="v4", choices=CONFIGS)
    parser.add_argument("--layouts", help="by default all devices over requests, then all over heads")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to make for each request")
    arguments = parser.parse_args()
    count, devices = arguments.requests, jax.devices()
    layouts = arguments.layouts or f"{len(devices)}x1,1x{len(devices)}"
    model = Model.from_config(CONFIGS[arguments.preset])
    params = model.init_params(seed=0)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.vocab_size, (count, arguments.prompt)).tolist()
    chunk = min(1024, count * arguments.prompt)
    options = EngineOptions(max_batch=count, max_len=arguments.prompt + arguments.new, chunk_size=chunk)
    results, wanted = {}, None
    for layout in ["one", *layouts.split(",")]:
        if layout == "one":
            engine = Engine(model, params, options)
        else:
            shape = tuple(map(int, layout.split("x")))
            mesh = Mesh(np.array(devices).reshape(shape), (REQUESTS, HEADS))
            share = dataclasses.replace(options, max_batch=-(-count // shape[0]))
            engine = MeshEngine(*cut_model(model, params, mesh), share, mesh)
        found, _ = served(engine, prompts, arguments.new)
        wanted = wanted or found
        _, seconds = served(engine, prompts, arguments.new)
        margins = differences(found, wanted)
        results[layout] = {
            "tokens_per_second": count * arguments.new / seconds,
            "compile_seconds": engine.compile_seconds,
            "attention": sorted({f"{phase} {backend}" for route in engine.routes.values() for phase, backend in route}),
            "requests_with_another_token": len(margins),
            "largest_margin_there": max(margins, default=0.0),
        }
        print(f"{layout:5} {results[layout]}", flush=True)
        write_json(results_folder() / "serving_mesh.json", environment() | {"layouts": results})


if __name__ == "__main__":
    main()

"""The library's kernels within the whole model's decode step, against the same kernels in the step benchmark.

    python -m benchmarks.attention_part [--requests 1 8 64] [--context 8192]

The model is the true-size slice of V4-Flash (51 GiB of weights), served by the JAX engine; the step benchmark
(`benchmarks.step`) runs the attention of the same four layers without projections and experts. Both decode towards the
same length. Prints µs a step of each of the library's kernels and writes attention_part.json to $OUT or
benchmarks/results; the exit code is 1 where a kernel runs on one side alone.
"""

from __future__ import annotations

import argparse
import collections
import gc
import re
import sys

from benchmarks.record import environment, results_folder, write_json
from benchmarks.stack import Stack, fill
from benchmarks.step import ROOM, Operation, Program, Steps, busy_time, decode_start, device_operations
from jax_sparse_mla.serving.bench import open_unread
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.presets import BENCH_CONFIGS
from jax_sparse_mla.serving.scheduler import EngineOptions

WARM_UP, STEPS = 8, 24
# The library's kernels of a decode step; XLA's own and those of projections and experts have other names.
OURS = re.compile(
    r"sparse_decode|topk_|index_logits|v4_layer|v4_metadata|write_kv|index_q|index_k|entries_kernel|carry_kernel"
)


def by_name(operations: list[Operation], steps: int) -> dict[str, float]:
    """µs a step of each of the library's kernels, by its name."""
    total = collections.Counter()
    for operation in operations:
        if OURS.search(operation.name):
            total[operation.name] += (operation.end - operation.start) / steps / 1e3
    return dict(total)


def of_the_step_benchmark(ratios: tuple[int, ...], requests: int, context: int) -> dict[str, float]:
    """µs a step of the library's kernels where little but attention runs."""
    program = Program(Stack(ratios=ratios, batch=requests, max_len=context), "decode", requests).lower().compile()
    steps = Steps(program, fill(program.stack, program.stack.empty_caches()))
    steps.start(decode_start(program.stack, staggered=False))
    steps(WARM_UP)
    return by_name(device_operations(lambda: steps(STEPS)), STEPS)


def of_the_model(model: Model, params, requests: int, context: int) -> tuple[dict[str, float], float]:
    """µs of the library's kernels in the model's decode step, and of the whole step on the GPU."""
    engine = Engine(model, params, EngineOptions(max_batch=requests, max_len=context))
    open_unread(engine, requests, context - ROOM, WARM_UP + STEPS + 2, seed=0)

    def run(count: int) -> None:
        for _ in range(count):
            engine.step()
        engine.wait()

    run(WARM_UP)
    operations = device_operations(lambda: run(STEPS))
    return by_name(operations, STEPS), busy_time(operations) / STEPS / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    model = Model.from_config(BENCH_CONFIGS["v4-flash-slice"])
    content, status = environment() | {"context": arguments.context, "rows": []}, 0
    benchmark = {n: of_the_step_benchmark(model.ratios, n, arguments.context) for n in arguments.requests}
    params = model.init_params(0)
    for requests, alone in benchmark.items():
        gc.collect()
        served, step = of_the_model(model, params, requests, arguments.context)
        kernels = {
            name: {"step_benchmark_us": alone.get(name), "model_us": served.get(name)}
            for name in sorted(alone | served, key=lambda name: -served.get(name, 0.0))
        }
        row = {"requests": requests, "step_benchmark_us": sum(alone.values()), "model_us": sum(served.values())}
        content["rows"].append(row | {"model_step_us": step, "kernels": kernels})
        write_json(results_folder() / "attention_part.json", content)
        print(
            f"{requests} requests, µs: {row['step_benchmark_us']:.1f} in the step benchmark, {row['model_us']:.1f} in"
        )
        print(f"    the model, whose step takes the GPU {step:.1f}")
        for name, times in kernels.items():
            print("   ", *(f"{'–' if us is None else f'{us:.1f}':>8}" for us in times.values()), name[:100])
        if one_sided := sorted(alone.keys() ^ served.keys()):
            status = 1
            print(f"    on one side alone: {', '.join(one_sided)}")
    return status


if __name__ == "__main__":
    sys.exit(main())

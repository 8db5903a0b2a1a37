"""The library's kernels within the whole model's decode step, against the same kernels in the step benchmark.

    python -m benchmarks.attention_part [--requests 1 8 64] [--context 8192]

The model is the true-size slice of V4-Flash (51 GiB of weights), served by the JAX engine; the step benchmark
(`benchmarks.step`) runs the attention of the same four layers without projections and experts. Both decode towards the
same length. A kernel is the library's if the step benchmark runs it and XLA did not generate it. Prints µs a step of
each kernel and writes attention_part.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import collections
import gc

from benchmarks.record import environment, results_folder, write_json
from benchmarks.stack import Stack, fill
from benchmarks.step import ROOM, Operation, Program, Steps, busy_time, decode_start, device_operations
from jax_sparse_mla.serving.bench import open_unread
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.presets import BENCH_CONFIGS
from jax_sparse_mla.serving.scheduler import EngineOptions

WARM_UP, STEPS = 8, 24


def by_name(operations: list[Operation], steps: int) -> dict[str, float]:
    """µs a step of each kernel, by its name."""
    total = collections.Counter()
    for operation in operations:
        total[operation.name] += (operation.end - operation.start) / steps / 1e3
    return dict(total)


def of_the_step_benchmark(ratios: tuple[int, ...], requests: int, context: int) -> dict[str, float]:
    """µs a step of the library's kernels where nothing but attention runs."""
    program = Program(Stack(ratios=ratios, batch=requests, max_len=context), "decode", requests).lower().compile()
    steps = Steps(program, fill(program.stack, program.stack.empty_caches()))
    steps.start(decode_start(program.stack, staggered=False))
    steps(WARM_UP)
    operations = device_operations(lambda: steps(STEPS))
    generated = program.operation_names()
    return by_name([o for o in operations if o.name not in generated and not o.name.startswith("Mem")], STEPS)


def of_the_model(model: Model, params, requests: int, context: int) -> tuple[dict[str, float], float]:
    """µs a step of every kernel of the model's decode step, and of the GPU in all."""
    engine = Engine(model, params, EngineOptions(max_batch=requests, max_len=context))
    open_unread(engine, requests, context - ROOM, WARM_UP + STEPS + 2, seed=0)

    def run(count: int) -> None:
        for _ in range(count):
            engine.step()
        engine.wait()

    run(WARM_UP)
    operations = device_operations(lambda: run(STEPS))
    return by_name(operations, STEPS), busy_time(operations) / STEPS / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    model = Model.from_config(BENCH_CONFIGS["v4-flash-slice"])
    content = environment() | {"context": arguments.context, "rows": []}
    alone = {n: of_the_step_benchmark(model.ratios, n, arguments.context) for n in arguments.requests}
    params = model.init_params(0)
    for requests in arguments.requests:
        gc.collect()
        served, step = of_the_model(model, params, requests, arguments.context)
        kernels = {
            name: {"step_benchmark_us": us, "model_us": served.get(name)} for name, us in alone[requests].items()
        }
        shared = [name for name in alone[requests] if name in served]
        totals = [sum(of[name] for name in shared) for of in (alone[requests], served)]
        row = {"requests": requests, "step_benchmark_us": totals[0], "model_us": totals[1], "model_step_us": step}
        content["rows"].append(row | {"kernels": kernels})
        write_json(results_folder() / "attention_part.json", content)
        print(
            f"{requests} requests: {totals[0]:.1f} us alone, {totals[1]:.1f} in the model, of a step of {step:.1f} us"
        )
        for name, us in sorted(alone[requests].items(), key=lambda item: -item[1]):
            print(f"    {us:8.1f} {served.get(name, float('nan')):8.1f}  {name[:110]}")


if __name__ == "__main__":
    main()

"""A server in a few lines: requests come and go while others are served, and share what they have in common.

The engine of `jax_sparse_mla.serving` does the work: continuous batching, chunked prefill, paged caches, reuse of
prefixes, one donated program a step. serving.md tells what each part is for. `--model` serves a checkpoint folder;
by default a small random model does.
"""

import argparse
import time

import numpy as np

from jax_sparse_mla.serving import Model, load
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions

# (tokens of the prompt that all share, tokens of its own, tokens to make, step of arrival)
ARRIVALS = [(300, 20, 6, 0), (0, 40, 12, 0), (300, 33, 4, 3), (0, 7, 9, 6), (300, 50, 5, 8), (0, 64, 3, 9)]


def some_requests(vocab_size):
    rng = np.random.default_rng(0)
    common = rng.integers(0, vocab_size, 300).tolist()
    return [
        (Request(common[:shared] + rng.integers(0, vocab_size, own).tolist(), new, sampling=Sampling(seed=i)), arrival)
        for i, (shared, own, new, arrival) in enumerate(ARRIVALS)
    ]


def serve(engine, arriving):
    """The loop of a server; a real one would take requests from a queue that its network threads fill."""
    arriving, number = sorted(arriving, key=lambda item: item[1]), 0
    while arriving or not engine.idle:
        while arriving and arriving[0][1] <= number:
            engine.submit(arriving.pop(0)[0])
        read = engine.step()  # starts a step, and reads the tokens of an earlier one
        if read is not None:
            print(f"step {number}: {read.mode.name} {read.num_tokens} tokens of {len(read.requests)} requests")
        number += 1


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint folder of DeepSeek-V3.2 or V4, or GLM-5")
    folder = parser.parse_args(argv).model
    start = time.perf_counter()
    if folder:
        model, params = load(folder)
    else:
        model = Model.from_config(CONFIGS["v4"])
        params = model.init_params(seed=0)
    engine = Engine(model, params, EngineOptions(max_batch=2, max_len=1024, chunk_size=256, reuse_points=4))
    arriving = some_requests(model.vocab_size)
    serve(engine, arriving)
    for request, _ in arriving:
        print(f"{len(request.prompt)} tokens read, {len(request.output)} generated: {request.output}")
    seconds = f"{time.perf_counter() - start:.1f} s in all, {engine.compile_seconds:.1f} s of them compiling"
    print(f"{len(engine.routes)} programs; {seconds}; {engine.scheduler.counters}")
    return engine, [request for request, _ in arriving]


if __name__ == "__main__":
    main()

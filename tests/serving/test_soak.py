"""A long run: 1,000 requests of random lengths, arrivals and cancellations. Not among the tests that README runs:

    python -m pytest -m soak tests/serving/test_soak.py

`SOAK_REQUESTS` takes another number of requests.
"""

import gc
import os
import resource

import jax
import numpy as np
import pytest
from toy_model import ToyModel

from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions

COMPILING = "OPTIMISED"  # see conftest.py
pytestmark = pytest.mark.soak
MODEL = ToyModel()
COUNT = int(os.environ.get("SOAK_REQUESTS", 1000))
# Pages for one of the longest requests and a little more: requests queue and are preempted, prefixes are evicted.
OPTIONS = EngineOptions(
    chunk_size=128, max_batch=4, max_len=640, num_pages=6, reuse_points=3, speculative_steps=2, seed=1
)
TEXTS, LONGEST, NEW = 5, 600, 24


def arrivals(rng):
    """(request, step at which it comes, step at which it is cancelled or None); the prompts begin alike."""
    texts = [rng.integers(0, MODEL.vocab_size, LONGEST) for _ in range(TEXTS)]
    found, step = [], 0
    for _ in range(COUNT):
        short, middle, long = rng.integers(1, 60), rng.integers(60, 300), rng.integers(256, LONGEST)
        full = rng.choice([250, 505])  # a page ends within the output
        length = int(rng.choice([short, middle, long, full], p=[0.4, 0.2, 0.2, 0.2]))
        prompt = texts[rng.integers(TEXTS)][:length].copy()
        prompt[max(1, length - int(rng.integers(0, 40))) :] += 1  # its own end, for most
        sampling = Sampling(temperature=5.0, seed=int(rng.integers(3))) if rng.random() < 0.2 else Sampling()
        request = Request((prompt % MODEL.vocab_size).tolist(), int(rng.integers(1, NEW + 1)), sampling=sampling)
        if rng.random() < 0.2:
            request.eos_token_ids = tuple(range(0, MODEL.vocab_size, 16))
        step += int(rng.geometric(0.4))
        found.append((request, step, step + int(rng.integers(0, 30)) if rng.random() < 0.1 else None))
    return found


def alone(engine, request):
    """What a request gets when it is served by itself, without drafts and prefixes, as far as it got."""
    engine.scheduler.prefixes.clear()
    again = Request(request.prompt, request.max_new_tokens, sampling=request.sampling)
    again.eos_token_ids = request.eos_token_ids
    engine.drafts = 0
    engine.run([again])
    return again.output


def test_soak(monkeypatch, capsys):
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")  # equal to the bit, however steps are put together
    rng = np.random.default_rng(0)
    engine = Engine(MODEL, MODEL.init_params(0), OPTIONS)
    coming, number, memory, waiting = arrivals(rng), 0, [], []
    everyone = list(coming)
    while coming or not engine.idle:
        while coming and coming[0][1] <= number:
            engine.submit(coming[0][0])
            waiting.append(coming.pop(0))
        for request, _, end in waiting:
            if end is not None and end <= number:
                request.cancel()
        waiting = [item for item in waiting if not item[0].finished]
        if number % 40 == 0:  # some stretches with drafts, some without
            engine.drafts = OPTIONS.speculative_steps * ((number // 40) % 2)
        engine.step()
        number += 1
        if number % 200 == 0:
            gc.collect()
            arrays = sum(x.nbytes for x in jax.live_arrays())
            memory.append((arrays, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    counters, pool = engine.scheduler.counters, engine.scheduler.pool
    with capsys.disabled():
        print(f"\n{number} steps, {counters}, accepted {dict(engine.accepted)}")
        print(f"live arrays {memory[len(memory) // 4][0]} → {memory[-1][0]} bytes, "
              f"most resident {memory[len(memory) // 4][1]} → {memory[-1][1]} KiB")  # fmt: skip
    assert counters.finished + counters.cancelled == COUNT
    assert sum(engine.accepted.values()) > 0
    if COUNT >= 300:
        assert min(counters.cancelled, counters.preempted, counters.queued, counters.reused) > 0
    # No page is lost, and memory is flat once all programs are compiled.
    engine.scheduler.prefixes.clear()
    assert sorted(pool.pages.free) == list(range(1, pool.num_pages)) and pool.free_rows == OPTIONS.max_batch
    assert sorted(pool.swa_pages.free) == list(range(1, pool.num_swa_pages))
    settled = memory[len(memory) // 2 :]
    assert max(x for x, _ in settled) <= 1.01 * settled[0][0]
    assert settled[-1][1] <= 1.05 * settled[0][1]

    known = {}
    for request, _, _ in everyone:
        key = tuple(request.prompt), request.sampling, request.eos_token_ids, request.max_new_tokens
        expected = known[key] if key in known else known.setdefault(key, alone(engine, request))
        assert request.output == (expected[: len(request.output)] if request.cancelled else expected)

"""The server for long: 1,000 requests through HTTP, its thread's work a step, and the command as a process."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
from served import Running, new_engine, prompt_of, right

from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.start import warm_up

pytestmark = pytest.mark.long
COUNT = int(os.environ.get("SOAK_REQUESTS", 1000))


async def ask(client, gate, rng, number):
    """Whether a request of a random kind got the text that it should; None where it was cut off."""
    prompt, count = prompt_of(number % 97, int(rng.integers(1, 60))), int(rng.integers(1, 60))
    kind, text = rng.random(), right(prompt, count)
    fields = {"model": "summing", "prompt": prompt, "max_tokens": count}
    async with gate:
        if kind < 0.15:
            stop = text[len(text) // 2 :][:2]
            answer = await client.completions.create(**fields, stop=stop)
            return answer.choices[0].text == text[: text.index(stop)]
        if kind < 0.3:  # draws of a seed are the same, alone and beside others
            drawn = {"temperature": 3.0, "seed": number, "logit_bias": {"63": -100}}  # whose key is NaN
            first, second = [await client.completions.create(**fields, **drawn) for _ in range(2)]
            return first.choices[0].text == second.choices[0].text and len(first.choices[0].text) == count
        if kind < 0.4:
            answer = await client.completions.create(**fields, logprobs=2)
            return answer.choices[0].text == text and len(answer.choices[0].logprobs.tokens) == count
        if kind < 0.55:
            return (await client.completions.create(**fields)).choices[0].text == text
        stream, got = await client.completions.create(**fields, stream=True), ""
        async for chunk in stream:
            got += chunk.choices[0].text
            if kind > 0.85 and len(got) > count // 2:
                await stream.close()
                return None
        return got == text


def test_a_thousand_requests(capsys):
    """With drafts, few pages, reused prefixes and clients that go: every text is right, no page is lost."""
    engine = new_engine(num_pages=90, max_len=160, speculative_steps=2, seed=1)
    warm_up(engine)  # no client waits for a compiler
    rng, arrays = np.random.default_rng(0), []

    async def part(running, numbers):
        async with running.client(openai.AsyncOpenAI) as client:
            gate = asyncio.Semaphore(48)
            return await asyncio.gather(*(ask(client, gate, rng, number) for number in numbers))

    with Running(engine) as running:
        outcomes, start = [], time.perf_counter()
        for begin in range(0, COUNT, 200):
            outcomes += asyncio.run(part(running, range(begin, min(begin + 200, COUNT))))
            assert running.everything_is_free()
            gc.collect()
            arrays.append(sum(x.nbytes for x in jax.live_arrays()))
        seconds = time.perf_counter() - start
        counters = engine.scheduler.counters
    with capsys.disabled():
        kinds = {kind: outcomes.count(kind) for kind in (True, None)}
        print(f"\n{COUNT} requests in {seconds:.0f} s, {kinds}, {counters}, live arrays {arrays}")
    assert len(outcomes) == COUNT and False not in outcomes
    assert counters.preempted and counters.reused and counters.cancelled and not counters.failed
    assert arrays[-1] <= arrays[0] * 1.01


def test_the_thread_does_little_more_than_the_engine(capsys):
    """Processor time of the engine's thread a step of 64 streams, beside that of the engine alone."""
    new = 300
    engine = new_engine(max_batch=64, num_pages=None, max_len=400, reuse_points=0)

    def timed(object_, name):
        """Lists the processor time of each call."""
        method, times = getattr(object_, name), []

        def call(*args):
            start = time.thread_time()
            result = method(*args)
            times.append(time.thread_time() - start)
            return result

        setattr(object_, name, call)
        return times

    def run():
        engine.run([Request(list(prompt_of(number).encode()), new) for number in range(64)])

    run()
    steps = timed(engine, "step")
    run()
    alone = np.median(steps)
    steps.clear()

    async def one(client, number):
        fields = {"model": "summing", "prompt": prompt_of(number), "max_tokens": new}
        stream = await client.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them(running):
        async with running.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    with Running(engine) as running:
        tells = timed(running.api.runner, "_tell")
        texts = asyncio.run(all_of_them(running))
    assert texts == [right(prompt_of(number), new) for number in range(64)]
    served, tell = np.median(steps), np.median(tells)
    with capsys.disabled():
        print(f"\na step: {alone * 1e3:.3f} ms alone, {served * 1e3:.3f} served and {tell * 1e3:.3f} ms to tell of it")
    assert served + tell - alone < 0.5e-3


def test_the_command(tmp_path):
    """The preset's text is the one that `generate` prints; SIGTERM ends the process with status 0."""
    key = tmp_path / "key"
    key.write_text("secret\n")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    code = "import sys; from jax_sparse_mla.cli import main; sys.exit(main(sys.argv[1:]))"
    sizes = ["--preset", "v32", "--max-batch", "1"]
    text = "Once upon a time"
    made = subprocess.run(
        [sys.executable, "-c", code, "generate", *sizes, "--prompt", text, "--no-check", "--stream"],
        capture_output=True,
        env=environment,
        timeout=300,
    )
    generated = made.stdout.decode()
    options = ["--port", "0", "--max-len", "300", "--api-key-file", str(key)]
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, "serve", *sizes, *options], stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            lines = iter(process.stdout.readline, b"")
            url = next(found[1] for line in lines if (found := re.search(rb"serving .* at (http\S+)", line))).decode()
            client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=300)
            fields = {"model": "v32", "prompt": text, "temperature": 0}
            stream = client.completions.create(**fields, max_tokens=16, stream=True)
            answer = "".join(chunk.choices[0].text for chunk in stream)
            assert answer and f"{answer}\n" in generated
            chat = client.chat.completions.create(
                model="v32", messages=[{"role": "user", "content": "1"}], max_completion_tokens=3
            )
            assert chat.usage.completion_tokens == 3
            running = client.completions.create(**fields, max_tokens=60, stream=True)
            next(running)
            process.send_signal(signal.SIGTERM)  # what runs is finished
            assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length"
            assert process.wait(60) == 0
        finally:
            process.kill()

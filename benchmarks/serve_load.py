"""Load on a server of OpenAI's protocol: requests arrive at a rate, at random; first tokens and what follows are timed.

    python -m benchmarks serve_load --rate 1 2 4                 # starts `jax-sparse-mla serve --preset v4 --warmup`
    python -m benchmarks serve_load --url http://HOST:PORT/v1    # takes one that runs, of any make

Arrivals are a Poisson process. Prompts are random text, which no other request begins with; each asks for the same
number of tokens at temperature 0, as a stream. A text that its model ends sooner counts as it is. Times are the
client's, which shares the machine with a server that it starts: give it cores of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np

from benchmarks.harness import parser, write

LONGEST = 600.0  # seconds of a request
WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "they", "be", "at", "one", "from"]
COLUMNS = {"rate": 7, "done": 6, "refused": 8, "failed": 7, "requests/s": 11, "tokens/s": 10}
COLUMNS |= {"first token: p50": 17, "p90": 9, "p99": 9, "between tokens: p50": 20, "p90 ": 9, "p99 ": 9}


@dataclasses.dataclass
class Outcome:
    """What became of a request: its status, its arrival, and the times at which its tokens came."""

    status: int | str
    arrived: float
    times: list[float] = dataclasses.field(default_factory=list)


async def ask(url: str, key: str, body: bytes) -> Outcome:
    """One request over a connection of its own, as a stream."""
    parts, outcome = urlsplit(url), Outcome("no answer", time.perf_counter())
    try:
        async with asyncio.timeout(LONGEST):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                head = (
                    f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {key}\r\n"
                )
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + body)
                outcome.status = int((await reader.readline()).split()[1])
                async for line in reader:  # sizes of chunks stand between
                    if line.startswith(b'data: {"error"'):
                        outcome.status = "error"
                    elif line.startswith(b"data: {") and b'"choices":[]' not in line:
                        outcome.times.append(time.perf_counter())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        outcome.status = type(error).__name__
    return outcome


async def load(url: str, key: str, model: str, rate: float, count: int, prompt: int, new: int, seed: int):
    """The outcomes of requests that arrive at `rate` a second."""
    rng, tasks = np.random.default_rng(seed), []
    due = time.perf_counter() + np.cumsum(rng.exponential(1 / rate, count))
    for number, at in enumerate(due):
        text = f"{seed}.{number} " + " ".join(rng.choice(WORDS, prompt))
        body = {"model": model, "prompt": text[:prompt], "max_tokens": new, "temperature": 0, "stream": True}
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(url, key, json.dumps(body).encode())))
    return await asyncio.gather(*tasks)


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 in milliseconds."""
    values = np.percentile(seconds, (50, 90, 99)) * 1e3 if len(seconds) else [None] * 3
    return dict(zip(("p50", "p90", "p99"), map(lambda x: x if x is None else float(x), values)))


def summary(rate: float, outcomes: Sequence[Outcome]) -> dict:
    done = [outcome for outcome in outcomes if outcome.status == 200 and outcome.times]
    last = max((outcome.times[-1] for outcome in done), default=0.0)
    seconds = last - min((outcome.arrived for outcome in outcomes), default=0.0)
    refused = sum(outcome.status in (429, 503) for outcome in outcomes)
    between = [gap for outcome in done for gap in np.diff(outcome.times)]
    return {
        "case": f"rate{rate:g}",
        "rate": rate,
        "done": len(done),
        "refused": refused,
        "failed": len(outcomes) - len(done) - refused,
        "requests_per_s": len(done) / seconds if done else 0.0,
        "chunks_per_s": sum(len(outcome.times) for outcome in done) / seconds if done else 0.0,
        "first_token_ms": percentiles([outcome.times[0] - outcome.arrived for outcome in done]),
        "between_tokens_ms": percentiles(between),
    }


def line(row: dict) -> str:
    times = [*row["first_token_ms"].values(), *row["between_tokens_ms"].values()]
    values = [f"{row['rate']:g}", row["done"], row["refused"], row["failed"]]
    values += [f"{row['requests_per_s']:.2f}", f"{row['chunks_per_s']:.1f}"]
    values += ["–" if value is None else f"{value:.1f}" for value in times]
    return " ".join(f"{value:>{width}}" for value, width in zip(values, COLUMNS.values()))


def started(args) -> tuple[subprocess.Popen, str]:
    """A server of this project, warm, and its address."""
    code = "import sys; from jax_sparse_mla.cli import main; sys.exit(main(sys.argv[1:]))"
    lengths = ["--max-len", str(args.prompt + args.new_tokens), "--max-batch", str(args.max_batch)]
    source = ["--model", args.model] if args.model else ["--preset", args.preset]
    command = [sys.executable, "-u", "-c", code, "serve", "--port", "0", "--warmup", *source, *lengths, *args.serve]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for text in process.stdout:
        print(text, end="", flush=True)
        if found := re.search(r"serving .* at (http\S+)", text):
            return process, found[1]
    raise SystemExit(f"the server ended with status {process.wait()}")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--url", help="of a server that runs, its /v1 included; else one is started")
    made.add_argument("--model", metavar="DIR", help="a checkpoint for the server that is started")
    made.add_argument("--preset", default="v4", help="or a preset (default: %(default)s)")
    made.add_argument("--max-batch", type=int, default=8, metavar="N", help="of the server that is started")
    made.add_argument("--serve", nargs="*", default=[], metavar="WORD", help="more of its words, e.g. chunk-size=256")
    made.add_argument("--rate", type=float, nargs="+", default=[1.0], metavar="R", help="arrivals a second")
    made.add_argument("--requests", type=int, default=50, metavar="N", help="of each rate")
    made.add_argument("--prompt", type=int, default=256, metavar="N", help="characters of a prompt, bytes of a preset")
    made.add_argument("--new-tokens", type=int, default=32, metavar="N")
    made.add_argument("--seed", type=int, default=0)
    args = made.parse_args()
    args.serve = [f"--{word}" for word in args.serve]
    rates = [rate for rate in args.rate if f"rate{rate:g}".startswith(tuple(args.only))]
    if args.dry_run:
        print(*(f"rate{rate:g}" for rate in rates), sep="\n")
        return 0
    process, url = (None, args.url.rstrip("/")) if args.url else started(args)
    key = os.environ.get("JAX_SPARSE_MLA_API_KEY", "none")
    try:
        models = urllib.request.Request(f"{url}/models", headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(models) as answer:
            model = json.load(answer)["data"][0]["id"]
        print(" ".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
        rows = []
        for rate in rates:
            run = load(url, key, model, rate, args.requests, args.prompt, args.new_tokens, args.seed)
            rows.append(summary(rate, asyncio.run(run)))
            print(line(rows[-1]), flush=True)
            write(
                "serve_load", rows, model=model, prompt=args.prompt, new_tokens=args.new_tokens, requests=args.requests
            )
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    print("\nmilliseconds; a token is an event of the stream, of which one may hold several")
    return int(any(row["failed"] for row in rows))

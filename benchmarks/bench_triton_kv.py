"""The Triton kernels over cache bytes and index lists beside the plain XLA programs, in one process on one GPU.

    python -m benchmarks.bench_triton_kv [--sweep] [--repeats 15]

A time is from the start of a call's first device operation to the end of its last, as CUPTI (torch's profiler) sees
them; the median over the repeats; before each of them the L2 is emptied by reading 512 MiB. TB/s counts the bytes that
must move: each input read once, each output written once. The share is of a device copy of 1 GiB, bytes read and
written. Prints a table and writes JSON to $OUT or benchmarks/results; $COMMIT names the commit where there is no git.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch.kernels import indices as torch_indices
from sparse_mla_torch.kernels import kv_cache as torch_kv
from torch.profiler import ProfilerActivity, profile

from jax_sparse_mla.indices import combine_swa_extra_indices, combine_topk_swa_indices
from jax_sparse_mla.indices.merge import combine_swa_extra_reference, combine_topk_swa_reference
from jax_sparse_mla.kernels_triton import indices as index_kernels
from jax_sparse_mla.kernels_triton import kv_cache as kv_kernels
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv, split_pages, write_kv
from jax_sparse_mla.kv_cache.rows import gather_rows_reference, write_rows_reference
from jax_sparse_mla.kv_cache.split import split_touched_reference

V4 = KVLayout.V4_FP8
PAGE_SIZE = 256
POOL_PAGES = 2048  # 524,288 slots, 307 MB: far more than the L2 holds
FLUSH_BYTES = 512 << 20
TOKEN_TILES = [dict(TOKENS=t, num_warps=w) for t, w in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4))]
ROW_TILES = [dict(ROWS=r, num_warps=w) for r in (1, 2, 4, 8) for w in (1, 2, 4) if r >= w]


@dataclasses.dataclass
class Case:
    """One operation at one size: callables that launch it once; bytes that it must move."""

    name: str
    bytes: int
    variants: dict[str, Callable[[], object]]
    sweep: tuple[dict, list[dict]] | None = None  # the options to vary for the torch launch, and their values


class Timer:
    """Times calls by CUPTI, from the first device operation to the end of the last.

    Flush, marker, call and marker follow each other on one framework's stream without a wait for the host, so the
    GPU neither idles nor slows its clocks before the call.
    """

    def __init__(self, repeats: int):
        self.repeats = repeats
        self.torch_flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.torch_mark = torch.zeros(3, device="cuda")
        self.jax_flush = jax.jit(lambda x: x.sum())
        self.jax_buffer = jnp.ones(FLUSH_BYTES // 4)
        self.jax_mark = jax.jit(jnp.cosh)
        self.jax_marked = jnp.zeros(3)
        self.last_events: list = []

    def __call__(self, call: Callable[[], object], framework: str = "torch") -> float:
        """The median in microseconds; the device operations of the last call stay in `last_events`."""
        for _ in range(3):
            self._once(call, framework)
        self._wait()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(self.repeats):
                self._once(call, framework)
            self._wait()
        events = prof.profiler.kineto_results.events()
        events = sorted((e for e in events if "CUDA" in str(e.device_type())), key=lambda e: e.start_ns())
        spans, inside = [], False
        for event in events:
            if "cosh" in event.name():
                inside = not inside
                if inside:
                    spans.append([])
            elif inside:
                spans[-1].append((event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
        if len(spans) != self.repeats or inside or not all(spans):
            raise RuntimeError(f"the profiler saw {len(spans)} calls of {self.repeats}")
        self.last_events = [
            (name[:90], (start - spans[-1][0][1]) / 1e3, (end - start) / 1e3) for name, start, end in spans[-1]
        ]
        return statistics.median((max(end for *_, end in s) - s[0][1]) / 1e3 for s in spans)

    def _once(self, call, framework):
        if framework == "torch":
            for _ in range(3):
                self.torch_flush.sum()
            self.torch_mark.cosh_()
            call()
            self.torch_mark.cosh_()
        else:
            for _ in range(3):
                self.jax_flush(self.jax_buffer)
            self.jax_mark(self.jax_marked)
            out = call()
            self.jax_mark(self.jax_marked)
            del out

    def _wait(self):
        jax.block_until_ready(self.jax_flush(self.jax_buffer))
        torch.cuda.synchronize()


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def in_place(function: Callable, cache: PagedKV, *args) -> Callable[[], object]:
    """A call of `function(cache, *args)` with the cache donated: each call takes what the last one returned."""
    jitted = jax.jit(function, donate_argnums=0)
    state = [cache]

    def call():
        state[0] = jitted(state[0], *args)
        return state[0]

    return call


def some_slots(rng: np.random.Generator, n: int, kind: str) -> np.ndarray:
    """ "pages": whole pages in random order, as a request's tokens lie; "random": every token somewhere else."""
    if kind == "random":
        return rng.permutation(POOL_PAGES * PAGE_SIZE)[:n].astype(np.int32)
    pages = rng.permutation(POOL_PAGES)[: n // PAGE_SIZE]
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1).astype(np.int32)


def cache_cases(rng: np.random.Generator) -> list[Case]:
    pool = rng.integers(0, 120, (POOL_PAGES, V4.page_bytes(PAGE_SIZE)), dtype=np.uint8)
    ours = PagedKV(data=tensor(pool), layout=V4, page_size=PAGE_SIZE)

    def fresh():
        return PagedKV(data=jnp.asarray(pool), layout=V4, page_size=PAGE_SIZE)

    cache = fresh()
    cases = []
    plain_gather, jax_gather = jax.jit(gather_rows_reference), jax.jit(gather_kv)
    for n, kind in ((8_192, "pages"), (32_768, "pages"), (131_072, "pages"), (131_072, "random")):
        slots = some_slots(rng, n, kind)
        jax_slots, torch_slots = jnp.asarray(slots), tensor(slots)
        out = torch.empty((n, 512), dtype=torch.bfloat16, device="cuda")
        variants = {
            "xla": lambda s=jax_slots: plain_gather(cache, s),
            "jax": lambda s=jax_slots: jax_gather(cache, s),
            "torch": lambda s=torch_slots, o=out: torch_kv.gather_kv(ours, s, out=o),
        }
        sweep = (kv_kernels.GATHER_OPTIONS, TOKEN_TILES)
        cases.append(Case(f"gather_kv V4 {n} {kind}", n * (584 + 1024 + 4), variants, sweep))

    n = 65_536
    kv = rng.standard_normal((n, 512)).astype(np.float32)
    jax_kv, torch_kv_rows = jnp.asarray(kv, jnp.bfloat16), tensor(kv).to(torch.bfloat16)
    for kind in ("pages", "random"):
        slots = some_slots(rng, n, kind)
        jax_slots, torch_slots = jnp.asarray(slots), tensor(slots)
        variants = {
            "xla": in_place(write_rows_reference, fresh(), jax_slots, jax_kv),
            "jax": in_place(write_kv, fresh(), jax_slots, jax_kv),
            "torch": lambda s=torch_slots: torch_kv.write_kv(ours, s, torch_kv_rows),
        }
        sweep = (kv_kernels.WRITE_OPTIONS, TOKEN_TILES)
        cases.append(Case(f"write_kv V4 {n} {kind}", n * (1024 + 583 + 4), variants, sweep))

    # The windows of 64 requests: 128 neighbouring slots each, in two pages of their own.
    starts = rng.permutation(POOL_PAGES // 2)[:64, None] * 2 * PAGE_SIZE + 200
    slots = (starts + np.arange(128)).astype(np.int32)
    small_shape = (POOL_PAGES * 4, V4.page_bytes(64))
    out = PagedKV(data=torch.zeros(small_shape, dtype=torch.uint8, device="cuda"), layout=V4, page_size=64)
    scratch = torch_kv.SplitScratch.allocate(POOL_PAGES, slots.size, "cuda")
    jax_slots, torch_slots = jnp.asarray(slots), tensor(slots)

    def small():
        return PagedKV(data=jnp.zeros(small_shape, jnp.uint8), layout=V4, page_size=64)

    def plain_split(out, cache, slots):
        return dataclasses.replace(out, data=split_touched_reference(out.data, cache, 64, slots))

    variants = {
        "xla": in_place(plain_split, small(), cache, jax_slots),
        "jax": in_place(lambda o, c, s: split_pages(c, 64, slots=s, out=o), small(), cache, jax_slots),
        "torch": lambda: torch_kv.split_pages(ours, out, torch_slots, scratch=scratch),
    }
    cases.append(Case("split_pages 128 of 2048", 128 * 2 * 256 * 584, variants))
    return cases


def merge_cases(rng: np.random.Generator) -> list[Case]:
    cases = []
    for n, topk in ((16_384, 512), (32_768, 1_024)):
        width, requests = topk + 128, 8
        per_request = n // requests
        seq_lens = np.full(requests, 65_536, np.int32)
        pos = np.tile(65_536 - per_request + np.arange(per_request), requests).astype(np.int32)
        args = (
            rng.integers(0, 16_384, (n, topk), dtype=np.int32),
            (np.arange(requests + 1) * per_request).astype(np.int32),
            pos,
            seq_lens,
            np.full(requests, per_request + 127, np.int32),
            (np.arange(requests) * 16_384).astype(np.int32),
            (np.arange(requests) * (per_request + 127) + 131_072).astype(np.int32),
        )
        static = {"window": 128, "compress_ratio": 4, "topk": topk}
        jax_args, torch_args = [jnp.asarray(x) for x in args], [tensor(x) for x in args]
        out = torch.empty((n, width), dtype=torch.int32, device="cuda"), torch.empty_like(torch_args[2])

        def plain_topk(a, starts, pos, *rest, static=static):
            return combine_topk_swa_reference(a, pos, (starts, *rest), **static)

        plain_topk = jax.jit(plain_topk)
        jax_topk = jax.jit(lambda *a, static=static: combine_topk_swa_indices(*a, **static))
        variants = {
            "xla": lambda f=plain_topk, a=jax_args: f(*a),
            "jax": lambda f=jax_topk, a=jax_args: f(*a),
            "torch": lambda a=torch_args, o=out, s=static: torch_indices.combine_topk_swa_indices(*a, **s, out=o),
        }
        cases.append(
            Case(
                f"combine_topk_swa {n} x {topk}",
                n * 4 * (topk + width + 2),
                variants,
                (index_kernels.TOPK_SWA_OPTIONS, ROW_TILES),
            )
        )

        args = (
            rng.integers(0, 65_536, (n, 128), dtype=np.int32),
            np.full(n, 128, np.int32),
            rng.integers(0, 65_536, (n, topk), dtype=np.int32),
            np.full(n, topk, np.int32),
            np.array(65_536, np.int32),
        )
        jax_args, torch_args = [jnp.asarray(x) for x in args], [tensor(x) for x in args]
        plain_extra, jax_extra = jax.jit(combine_swa_extra_reference), jax.jit(combine_swa_extra_indices)
        variants = {
            "xla": lambda f=plain_extra, a=jax_args: f(*a),
            "jax": lambda f=jax_extra, a=jax_args: f(*a),
            "torch": lambda a=torch_args, o=out: torch_indices.combine_swa_extra_indices(*a, out=o),
        }
        cases.append(Case(f"combine_swa_extra {n} x {topk}", n * 4 * (128 + topk + width + 3), variants))
    return cases


def copy_rates(timer: Timer) -> dict[int, float]:
    """TB/s of a device copy by bytes moved (read and written), from 16 MB to 2 GiB."""
    rates = {}
    for moved in (16_000_000, 64_000_000, 256_000_000, 2 << 30):
        source = torch.randint(0, 2**31 - 1, (moved // 8,), dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        rates[moved] = moved / timer(lambda s=source, t=target: t.copy_(s)) / 1e6
    return rates


def environment() -> dict:
    def output(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    names = ("jax", "jaxlib", "jax-triton", "triton", "torch")
    return {
        "device": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "commit": os.environ.get("COMMIT") or output("git", "describe", "--always", "--dirty"),
        "command": " ".join(sys.orig_argv),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also time other tile sizes (torch launches)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()

    timer, rng = Timer(args.repeats), np.random.default_rng(0)
    copies = copy_rates(timer)
    ceiling = copies[max(copies)]
    print("copy TB/s by bytes moved: " + "  ".join(f"{b / 1e6:.0f} MB {r:.2f}" for b, r in copies.items()))
    rows, sweeps = [], []
    for case in cache_cases(rng) + merge_cases(rng):
        if args.only not in case.name:
            continue
        times, operations = {}, {}
        for name, call in case.variants.items():
            times[name] = timer(call, "torch" if name == "torch" else "jax")
            operations[name] = timer.last_events
        rates = {name: case.bytes / us / 1e6 for name, us in times.items()}
        rows.append({"case": case.name, "bytes": case.bytes, "us": times, "tb_per_s": rates, "operations": operations})
        if args.sweep and case.sweep:
            options, values = case.sweep
            before = dict(options)
            for value in values:
                options.update(value)
                us = timer(case.variants["torch"])
                sweeps.append({"case": case.name, "options": value, "us": us})
            options.update(before)
    print(f"{'case':34} {'xla us':>8} {'jax us':>8} {'torch us':>8} {'jax TB/s':>8} {'of copy':>8} {'xla/jax':>8}")
    for row in rows:
        us, rate = row["us"], row["tb_per_s"]["jax"]
        print(
            f"{row['case']:34} {us['xla']:8.1f} {us['jax']:8.1f} {us['torch']:8.1f} {rate:8.2f} "
            f"{rate / ceiling:8.0%} {us['xla'] / us['jax']:8.1f}"
        )
    for name in dict.fromkeys(s["case"] for s in sweeps):
        best = sorted((s for s in sweeps if s["case"] == name), key=lambda s: s["us"])
        print(name, *(f"{tuple(s['options'].values())}:{s['us']:.1f}" for s in best[:6]), "worst", best[-1]["us"])
    result = environment() | {"copy_tb_per_s": copies, "rows": rows, "sweeps": sweeps}
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench_triton_kv.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

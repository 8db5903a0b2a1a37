"""Our SM90 decode kernels beside FlashMLA's on the rows of FlashMLA's own table and on single tokens.

    python -m benchmarks.hopper_decode [--only "V4 Flash" ...]

Both are called from torch, ours through the drop-in with `hopper` named, and timed by CUPTI, in one process: what a
call does on the GPU, from its first kernel's start to its last one's end. On a machine with several GPUs each has a
process with cases of its own. Each case is timed with the L2 emptied in three ways (`timing.FLUSHES`); the row has the
way in which ours does worst beside FlashMLA, and all three under `flushed`. Errors are those of all rows against
float64, norm over norm. Writes hopper_decode.json to $OUT or benchmarks/results. Needs sgl-flash-mla.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.record import environment, gpu_names, results_folder, write_json
from benchmarks.timing import FLUSHES, Run, Timer
from jax_sparse_mla.kv_cache.layout import KVLayout

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "interop")]

from flashmla_cases import DecodeShape, TableShape, decode_table  # noqa: E402
from sparse_mla_torch import flash_mla as ours  # noqa: E402

from benchmarks import case_data  # noqa: E402

SLOTS = 1 << 20  # of each cache: ten times the L2
LONG_ROW = 16384  # index columns
FP8_NAN = 0x7F
PRODUCTION, ONE_TOKEN, LONG = "production", "one token", "long rows"
BATCHES = 1, 2, 4, 8, 16, 32, 64, 256  # of one token


class Case(NamedTuple):
    """A row of FlashMLA's table, or the same with one token; lengths are drawn uniformly."""

    shape: DecodeShape

    @property
    def layout(self) -> KVLayout:
        return getattr(KVLayout, self.shape.layout)

    @property
    def is_v4(self) -> bool:
        return self.layout is KVLayout.V4_FP8

    @property
    def table(self) -> str:
        if self.shape.q_len == 1:
            return ONE_TOKEN
        return LONG if self.shape.cache.topk == LONG_ROW else PRODUCTION

    @property
    def model(self) -> str:
        if not self.is_v4:
            return "V3.2"
        if (extra := self.shape.extra) is None:
            return "V4" if self.shape.cache.topk == LONG_ROW else "V4 window"
        return "V4 C128" if extra.lengths else {512: "V4 Flash", 1024: "V4 Pro"}[extra.topk]

    @property
    def name(self) -> str:
        long = f", topk {LONG_ROW}" if self.table == LONG else ""
        return f"{self.model}, {self.shape.heads} heads, {self.shape.batch} x {self.shape.q_len}{long}"


def cases() -> Iterator[Case]:
    table = [shape for shape in decode_table() if shape.table == "performance"]
    of_model = {Case(shape).model: shape for shape in reversed(table)}

    of_model["V4 window"] = dataclasses.replace(of_model["V4 Flash"], extra=None)
    for model in ("V4 Flash", "V4 Pro", "V4 C128", "V4 window", "V3.2"):
        # Ranks of a tensor-parallel model have few heads.
        for heads in (128, 64, 32, 16, 8) if model in ("V4 Flash", "V3.2") else (128, 64):
            for batch in BATCHES:
                yield Case(dataclasses.replace(of_model[model], heads=heads, batch=batch, q_len=1))
    yield from map(Case, table)


class Cache(NamedTuple):
    """A cache of random bytes, as FlashMLA takes it: `[pages, page_size, 1, bytes of a token]`."""

    pages: torch.Tensor
    layout: KVLayout

    @classmethod
    def random(cls, layout: KVLayout, page_size: int, generator: torch.Generator) -> Cache:
        def draw(low, high, *shape):
            return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

        pages, width, page_bytes = SLOTS // page_size, layout.bytes_per_token, layout.page_bytes(page_size)
        data = torch.zeros((pages, page_bytes), dtype=torch.uint8, device="cuda")
        cache = cls(data.as_strided((pages, page_size, 1, width), (page_bytes, width, width, 1)), layout)
        values, rope, scales = cache._parts()
        values.copy_(draw(0, 256, *values.shape))
        values -= ((values & FP8_NAN) == FP8_NAN).to(torch.uint8)
        rope.copy_(torch.randn(*rope.shape[:2], 64, device="cuda", generator=generator).bfloat16().view(torch.uint8))
        if layout.footer_scale_bytes:
            scales.copy_(draw(116, 121, *scales.shape))
        else:
            exponents = torch.randint(-11, -7, (pages, page_size, 4), device="cuda", generator=generator)
            scales.copy_(torch.exp2(exponents.float()).view(torch.uint8))
        return cache

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bytes of FP8 values, of the rope part and of scales, each `[pages, page_size, bytes]`."""
        layout, (pages, page_size, *_) = self.layout, self.pages.shape
        data = self.pages.as_strided((pages, self.pages.stride(0)), (self.pages.stride(0), 1))
        body, inline = page_size * layout.data_bytes, layout.fp8_dim + layout.inline_scale_bytes
        rows = data[:, :body].view(pages, page_size, layout.data_bytes)
        scales = rows[..., layout.fp8_dim : inline]
        if footer := layout.footer_scale_bytes:
            scales = data[:, body : body + page_size * footer].view(pages, page_size, footer)
        return rows[..., : layout.fp8_dim], rows[..., inline:], scales

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Float64 `[slots, qk_dim]`."""
        layout, at = self.layout, (slots // self.pages.shape[1], slots % self.pages.shape[1])
        values, rope, scales = (part[at].contiguous() for part in self._parts())
        if layout.footer_scale_bytes:
            factors = torch.exp2(scales[:, : layout.num_groups].double() - 127)
        else:
            factors = scales.view(torch.float32).double()
        values = values.view(torch.float8_e4m3fn).double() * factors.repeat_interleave(layout.group, 1)
        return torch.cat([values, rope.view(torch.bfloat16).double()], 1)


class Problem:
    """A case's tensors, and how it is called."""

    def __init__(self, case: Case, caches: dict[tuple[KVLayout, int], Cache]):
        self.shape, shape, layout = case.shape, case.shape, case.layout
        generator = torch.Generator(device="cuda").manual_seed(0)
        rows = (shape.batch, shape.q_len)

        def table(scope: TableShape) -> tuple[Cache, torch.Tensor]:
            key = (layout, scope.page_size)
            if key not in caches:
                caches[key] = Cache.random(*key, torch.Generator(device="cuda").manual_seed(scope.page_size))
            indices = torch.randint(SLOTS, (*rows, scope.topk), dtype=torch.int32, device="cuda", generator=generator)
            return caches[key], indices

        self.scale = layout.qk_dim**-0.5 / 2
        self.q = torch.randn((*rows, shape.heads, layout.qk_dim), device="cuda", generator=generator).bfloat16()
        self.tables = [table(scope) for scope in (shape.cache, shape.extra) if scope is not None]
        self.lengths = self.sink = None
        if shape.extra is not None and shape.extra.lengths:
            most = shape.extra.topk + 1
            self.lengths = torch.randint(most, (shape.batch,), dtype=torch.int32, device="cuda", generator=generator)
        if case.is_v4:
            self.sink = torch.randn(shape.heads, device="cuda", generator=generator)

    def call(self, package, heads: int, **options) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Of a package with FlashMLA's functions, padded to as many heads."""
        q, sink, more = self.q, self.sink, heads - self.shape.heads
        if more:
            q = torch.nn.functional.pad(q, (0, 0, 0, more))
            sink = None if sink is None else torch.nn.functional.pad(sink, (0, more))
        arguments = {"attn_sink": sink, "indices": self.tables[0][1]}
        if len(self.tables) > 1:
            arguments |= {"extra_k_cache": self.tables[1][0].pages, "extra_indices_in_kvcache": self.tables[1][1]}
            arguments |= {"extra_topk_length": self.lengths}
        schedule, pages = package.get_mla_metadata()[0], self.tables[0][0].pages
        fixed = dict(softmax_scale=self.scale, is_fp8_kvcache=True, **arguments, **options)
        return lambda: package.flash_mla_with_kvcache(q, pages, None, None, 512, schedule, **fixed)

    def error(self, out: torch.Tensor) -> float:
        """Of all rows together."""
        call = case_data.Call(self.q, [], self.scale, self.sink)
        q, out = self.q.flatten(0, 1), out[..., : self.shape.heads, :].flatten(0, 1)
        slots = [indices.flatten(0, 1).long() for _, indices in self.tables]
        valid = [torch.ones_like(x, dtype=torch.bool) for x in slots]
        if self.lengths is not None:
            lengths = self.lengths.repeat_interleave(self.shape.q_len)
            valid[1] = torch.arange(slots[1].shape[1], device=q.device) < lengths[:, None]
        valid, count = torch.cat(valid, 1), max(1, case_data.CHUNK // (sum(x.shape[1] for x in slots) * q.shape[-1]))
        wrong = whole = 0.0
        for some in torch.arange(len(q), device=q.device).split(count):
            keys = [
                cache.rows(x[some].flatten()).view(len(some), x.shape[1], -1)
                for (cache, _), x in zip(self.tables, slots)
            ]
            wanted, *_ = case_data.attend(q[some].double(), torch.cat(keys, 1), valid[some], call)
            wrong += (out[some].double() - wanted).square().sum().item()
            whole += wanted.square().sum().item()
        return math.sqrt(wrong / whole)


def start_at(gpus: multiprocessing.Queue) -> None:
    """Begins a worker process, which has a GPU of its own."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpus.get(), "JAX_SPARSE_MLA_DECODE_BACKEND": "hopper"}


@functools.cache
def of_this_process() -> tuple[list[Timer], dict]:
    """Timers, and caches of random bytes by layout and page size."""
    return [Timer(7, flush) for flush in FLUSHES], {}


def measure(case: Case) -> dict:
    import flash_mla as wheel

    timers, caches = of_this_process()
    problem, heads = Problem(case, caches), case.shape.heads
    calls = problem.call(wheel, -(-heads // 64) * 64, use_legacy=True), problem.call(ours, heads)
    runs = [Run(call, "torch") for call in calls]
    flushed = {timer.flush: [round(us, 1) for us in timer.in_turn(runs)] for timer in timers}
    worst = min(flushed, key=lambda way: flushed[way][0] / flushed[way][1])
    errors = [problem.error(call()[0]) for call in calls]
    row = {"case": case.name, "table": case.table, "flash_mla_us": flushed[worst][0], "ours_us": flushed[worst][1]}
    row |= {"ratio": round(flushed[worst][0] / flushed[worst][1], 2), "flush": worst, "flushed": flushed}
    return row | {"flash_mla_error": float(f"{errors[0]:.3g}"), "error": float(f"{errors[1]:.3g}")}


def _one_token(heads: int, most: int) -> Callable[[Case], bool]:
    """Of V4 Flash, with up to so many requests."""
    return lambda case: (
        (case.table, case.model, case.shape.heads) == (ONE_TOKEN, "V4 Flash", heads) and case.shape.batch <= most
    )


GROUPS = {
    "production rows, long ones among them": lambda case: case.table != ONE_TOKEN,
    "V4, 64 heads, 2 tokens (Flash and C128)": lambda case: (case.table, case.shape.heads) == (PRODUCTION, 64),
    "V4 Flash, 64 heads, 1 token, batch 1, 4, 16": _one_token(64, 16),
    "V4 Flash, 16 heads (FlashMLA padded to 64), 1 token, batch 1, 4, 16": _one_token(16, 16),
    "the same, batch 1 to 256": _one_token(16, 256),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    args = parser.parse_args()
    chosen, rows = [case for case in cases() if case.name.startswith(tuple(args.only))], []
    spawn, gpus = multiprocessing.get_context("spawn"), gpu_names()
    if not gpus:
        raise SystemExit("hopper_decode needs a GPU with compute capability 9.0, nvidia-smi lists none here")
    names = spawn.Queue()
    for name in gpus:
        names.put(name)
    with ProcessPoolExecutor(len(gpus), spawn, start_at, (names,)) as pool:
        for row in pool.map(measure, chosen):
            rows.append(row)
            print(
                "  ".join(f"{key} {value}" if key != "case" else f"{value:36}" for key, value in row.items()),
                flush=True,
            )
    ratios = {case: row["flash_mla_us"] / row["ours_us"] for case, row in zip(chosen, rows)}
    means = {}
    for name, belongs in GROUPS.items():
        if found := [ratio for case, ratio in ratios.items() if belongs(case)]:
            means[name] = math.exp(statistics.mean(map(math.log, found)))
    if production := [ratio for case, ratio in ratios.items() if case.table == PRODUCTION]:
        means["least of the production rows"] = min(production)
    print(means)
    ratio = "FlashMLA's time over ours"
    write_json(
        results_folder() / "hopper_decode.json",
        environment() | {"op": "hopper_decode", "ratio": ratio, "geometric_means": means, "rows": rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

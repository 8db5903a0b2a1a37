"""Our SM90 decode kernels beside FlashMLA's on the rows of FlashMLA's own table and on single tokens.

    python -m benchmarks.hopper_decode [--only "V4 Flash" ...]

Both are called from torch, ours through the drop-in with `hopper` named, and timed by CUPTI with the L2 flushed, in one
process: what a call does on the GPU, from its first kernel's start to its last one's end. Errors are those of four rows
against float64, norm over norm. Writes hopper_decode.json to $OUT or benchmarks/results. Needs sgl-flash-mla.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.record import environment, results_folder, write_json
from benchmarks.timing import Run, Timer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "interop"))

from sparse_mla_torch import flash_mla as ours

SLOTS = 1 << 20  # of each cache: ten times the L2
FP8_NAN = 0x7F
PRODUCTION, ONE_TOKEN, LONG = "production", "one token", "long rows"


class Case(NamedTuple):
    table: str
    model: str
    heads: int
    batch: int
    q_len: int
    topk: int
    extra_topk: int = 0
    has_lengths: bool = False  # of the extra columns, drawn uniformly
    extra_page: int = 64

    @property
    def is_v4(self) -> bool:
        return self.extra_topk > 0 or (self.table == LONG and self.model.startswith("V4"))

    @property
    def name(self) -> str:
        long = f", topk {self.topk}" if self.table == LONG else ""
        return f"{self.model}, {self.heads} heads, {self.batch} x {self.q_len}{long}"


def cases() -> Iterator[Case]:
    def flash(table, batch, q_len, heads=64):
        return Case(table, "V4 Flash", heads, batch, q_len, 128, 512)

    def v32(table, batch, q_len, heads=128):
        return Case(table, "V3.2", heads, batch, q_len, 2048)

    def pro(table, batch, q_len):
        return Case(table, "V4 Pro", 128, batch, q_len, 128, 1024)

    for heads in (64, 32, 16):
        yield from (flash(ONE_TOKEN, batch, 1, heads) for batch in (1, 4, 16, 64, 256))
    for batch in (1, 16, 64, 256):
        yield pro(ONE_TOKEN, batch, 1)
        yield v32(ONE_TOKEN, batch, 1)
        yield v32(ONE_TOKEN, batch, 1, heads=64)
    for batch in (2, 64, 74, 128, 148, 256):
        yield flash(PRODUCTION, batch, 2)
        yield pro(PRODUCTION, batch, 2)
        for heads in (64, 128):
            yield Case(PRODUCTION, "V4 C128", heads, batch, 2, 128, 1024, has_lengths=True, extra_page=2)
        if batch <= 128:
            yield v32(PRODUCTION, batch, 2)
    for heads in (64, 128):
        yield Case(LONG, "V4", heads, 148, 2, 16384)
        yield Case(LONG, "V3.2", heads, 148, 2, 16384)


class Cache(NamedTuple):
    """A cache of random bytes, as FlashMLA takes it: `[pages, page_size, 1, bytes of a token]`."""

    pages: torch.Tensor
    is_v4: bool

    @classmethod
    def random(cls, is_v4: bool, page_size: int, generator: torch.Generator) -> Cache:
        def draw(low, high, *shape):
            return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

        pages, width = SLOTS // page_size, 584 if is_v4 else 656
        page_bytes = -(-page_size * width // 576) * 576 if is_v4 else page_size * width
        data = torch.zeros((pages, page_bytes), dtype=torch.uint8, device="cuda")
        cache = cls(data.as_strided((pages, page_size, 1, width), (page_bytes, width, width, 1)), is_v4)
        values, rope, scales = cache._parts()
        values.copy_(draw(0, 256, *values.shape))
        values -= ((values & FP8_NAN) == FP8_NAN).to(torch.uint8)
        rope.copy_(torch.randn(*rope.shape[:2], 64, device="cuda", generator=generator).bfloat16().view(torch.uint8))
        if is_v4:
            scales.copy_(draw(116, 121, *scales.shape))
        else:
            exponents = torch.randint(-11, -7, (pages, page_size, 4), device="cuda", generator=generator)
            scales.copy_(torch.exp2(exponents.float()).view(torch.uint8))
        return cache

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bytes of FP8 values, of the rope part and of scales, each `[pages, page_size, bytes]`."""
        pages, page_size, _, width = self.pages.shape
        data = self.pages.as_strided((pages, self.pages.stride(0)), (self.pages.stride(0), 1))
        if not self.is_v4:
            rows = data[:, : page_size * width].view(pages, page_size, width)
            return rows[..., :512], rows[..., 528:], rows[..., 512:528]
        rows = data[:, : page_size * 576].view(pages, page_size, 576)
        scales = data[:, page_size * 576 : page_size * 584].view(pages, page_size, 8)
        return rows[..., :448], rows[..., 448:], scales

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Float64 `[slots, qk_dim]`."""
        at = (slots // self.pages.shape[1], slots % self.pages.shape[1])
        values, rope, scales = (part[at].contiguous() for part in self._parts())
        if self.is_v4:
            factors = torch.exp2(scales[:, :7].double() - 127).repeat_interleave(64, 1)
        else:
            factors = scales.view(torch.float32).double().repeat_interleave(128, 1)
        return torch.cat([values.view(torch.float8_e4m3fn).double() * factors, rope.view(torch.bfloat16).double()], 1)


class Problem:
    """A case's tensors, and how it is called."""

    def __init__(self, case: Case, caches: dict[tuple[bool, int], Cache]):
        self.case, self.dim = case, 512 if case.is_v4 else 576
        generator = torch.Generator(device="cuda").manual_seed(0)
        rows = (case.batch, case.q_len)

        def table(topk: int, page_size: int) -> tuple[Cache, torch.Tensor]:
            key = (case.is_v4, page_size)
            if key not in caches:
                caches[key] = Cache.random(*key, torch.Generator(device="cuda").manual_seed(page_size))
            indices = torch.randint(SLOTS, (*rows, topk), dtype=torch.int32, device="cuda", generator=generator)
            return caches[key], indices

        self.q = torch.randn((*rows, case.heads, self.dim), device="cuda", generator=generator).bfloat16()
        self.tables = [table(case.topk, 256 if case.extra_topk else 64)]
        self.lengths = self.sink = None
        if case.extra_topk:
            self.tables.append(table(case.extra_topk, case.extra_page))
        if case.has_lengths:
            shape = (case.batch,)
            self.lengths = torch.randint(
                case.extra_topk + 1, shape, dtype=torch.int32, device="cuda", generator=generator
            )
        if case.is_v4:
            self.sink = torch.randn(case.heads, device="cuda", generator=generator)

    def call(self, package, heads: int, **options) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Of a package with FlashMLA's functions, padded to as many heads."""
        q, sink, more = self.q, self.sink, heads - self.case.heads
        if more:
            q = torch.nn.functional.pad(q, (0, 0, 0, more))
            sink = None if sink is None else torch.nn.functional.pad(sink, (0, more))
        arguments = {"attn_sink": sink, "indices": self.tables[0][1]}
        if len(self.tables) > 1:
            arguments |= {"extra_k_cache": self.tables[1][0].pages, "extra_indices_in_kvcache": self.tables[1][1]}
            arguments |= {"extra_topk_length": self.lengths}
        schedule, pages = package.get_mla_metadata()[0], self.tables[0][0].pages
        fixed = dict(softmax_scale=self.dim**-0.5 / 2, is_fp8_kvcache=True, **arguments, **options)
        return lambda: package.flash_mla_with_kvcache(q, pages, None, None, 512, schedule, **fixed)

    def error(self, out: torch.Tensor) -> float:
        """Of the worst of four rows."""
        count, worst = self.case.batch * self.case.q_len, 0.0
        for row in sorted({0, count // 3, count // 2, count - 1}):
            at = divmod(row, self.case.q_len)
            slots = [indices[at].long() for _, indices in self.tables]
            if self.lengths is not None:
                slots[1] = slots[1][: int(self.lengths[at[0]])]
            keys = torch.cat([cache.rows(x) for (cache, _), x in zip(self.tables, slots)])
            scores = self.q[at].double() @ keys.T * self.dim**-0.5 / 2
            total = scores.logsumexp(1)
            wanted = torch.exp(scores - total[:, None]) @ keys[:, :512]
            if self.sink is not None:
                wanted /= 1 + torch.exp(self.sink.double() - total)[:, None]
            got = out[at][: self.case.heads].double()
            worst = max(worst, ((got - wanted).norm() / wanted.norm()).item())
        return worst


def measure(case: Case, caches: dict, timer: Timer, wheel) -> dict:
    problem = Problem(case, caches)
    calls = problem.call(wheel, -(-case.heads // 64) * 64, use_legacy=True), problem.call(ours, case.heads)
    times = [timer(Run(call, "torch")) for call in calls]
    errors = [problem.error(call()[0]) for call in calls]
    row = {"case": case.name, "table": case.table, "flash_mla_us": round(times[0], 1), "ours_us": round(times[1], 1)}
    row |= {"ratio": round(times[0] / times[1], 2)}
    return row | {"flash_mla_error": float(f"{errors[0]:.3g}"), "error": float(f"{errors[1]:.3g}")}


GROUPS = {
    "production rows, long ones among them": lambda case: case.table != ONE_TOKEN,
    "V4, 64 heads, 2 tokens (Flash and C128)": lambda case: (case.table, case.heads) == (PRODUCTION, 64),
    "V4 Flash, 64 heads, 1 token, batch 1, 4, 16": lambda case: (
        (case.table, case.model, case.heads) == (ONE_TOKEN, "V4 Flash", 64) and case.batch <= 16
    ),
    "V4 Flash, 16 heads (FlashMLA padded to 64), 1 token, batch 1, 4, 16": lambda case: (
        (case.model, case.heads) == ("V4 Flash", 16) and case.batch <= 16
    ),
    "the same, batch 1 to 256": lambda case: (case.model, case.heads) == ("V4 Flash", 16),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    args = parser.parse_args()
    os.environ["JAX_SPARSE_MLA_DECODE_BACKEND"] = "hopper"
    import flash_mla as wheel

    timer, caches, rows, ratios = Timer(repeats=9), {}, [], {}
    for case in cases():
        if not case.name.startswith(tuple(args.only)):
            continue
        rows.append(measure(case, caches, timer, wheel))
        ratios[case] = rows[-1]["flash_mla_us"] / rows[-1]["ours_us"]
        print(
            "  ".join(f"{key} {value}" if key != "case" else f"{value:36}" for key, value in rows[-1].items()),
            flush=True,
        )
    means = {}
    for name, belongs in GROUPS.items():
        if chosen := [ratio for case, ratio in ratios.items() if belongs(case)]:
            means[name] = round(math.exp(statistics.mean(map(math.log, chosen))), 3)
    if production := [ratio for case, ratio in ratios.items() if case.table == PRODUCTION]:
        means["least of the production rows"] = round(min(production), 3)
    print(means)
    ratio = "FlashMLA's time over ours"
    write_json(
        results_folder() / "hopper_decode.json",
        environment() | {"op": "hopper_decode", "ratio": ratio, "geometric_means": means, "rows": rows},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

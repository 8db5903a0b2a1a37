"""Decode from bfloat16 rows by `hopper`, beside the FP8 rows of the same numbers.

    python -m benchmarks.bf16_decode [--only "V4 Flash" ...]

Both caches hold the same random rows, one quantised by our writer; a call reads random slots of each, one token a
request. Called from torch and timed by CUPTI with the L2 flushed, in one process. Each row has the floor of its bytes
(keys, indices, queries and output at the rate of a copy, measured first) and of its products (at 4,096 FLOP a clock),
the microseconds from the bfloat16 rows and the floor's share of them, those of FlashAttention 3 from the same rows in
pages of one token, those of `hopper` and of FlashMLA from the FP8 rows, and the error of four rows against float64,
norm over norm. FlashMLA has its heads padded to 64. FlashAttention takes one cache, whose rows have rope behind their
values: V3.2's. Without sgl-flash-mla or sglang-kernel theirs are left out, and the record says why. Writes
bf16_decode.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import peers
from benchmarks.record import ROOT, environment, results_folder, write_json
from benchmarks.timing import Run, Timer, copy_rate
from jax_sparse_mla.kv_cache.layout import KVLayout

sys.path.insert(0, str(ROOT / "interop"))

from sparse_mla_torch import ops
from sparse_mla_torch.attention import decode
from sparse_mla_torch.attention.pages import pages_of

SLOTS, PAGE_SIZE = 1 << 20, 64  # of each cache: many times the L2
FLOPS_A_CLOCK, CLOCK = 4096, 1.75e9  # of a multiprocessor
FP8 = {KVLayout.V4_BF16: KVLayout.V4_FP8, KVLayout.V32_BF16: KVLayout.V32_FP8}


class Case(NamedTuple):
    layout: KVLayout
    heads: int
    rows: int
    columns: tuple[int, ...]

    @property
    def name(self) -> str:
        model = "V4 Flash" if len(self.columns) > 1 else "V3.2"
        return f"{model}, {self.heads} heads, {self.rows} x {' + '.join(map(str, self.columns))}"

    def floors(self, copy: float) -> tuple[float, float]:
        """Microseconds that the bytes, at `copy` TB/s, and the products take at least."""
        columns, dim = sum(self.columns), self.layout.qk_dim
        of_row = columns * (self.layout.bytes_per_token + 4) + self.heads * 2 * (dim + 512)
        flops = 2 * self.rows * self.heads * columns * (dim + 512)
        sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        return self.rows * of_row / copy / 1e6, flops / (FLOPS_A_CLOCK * CLOCK * sm_count) * 1e6


def _of(layout: KVLayout, columns: tuple[int, ...], heads: int, *rows: int) -> list[Case]:
    return [Case(layout, heads, n, columns) for n in rows]


CASES = [
    *_of(KVLayout.V4_BF16, (128, 512), 64, 1, 16, 64, 256, 1024),
    *_of(KVLayout.V4_BF16, (128, 512), 16, 256),
    *_of(KVLayout.V32_BF16, (2048,), 128, 1, 64, 256),
    *_of(KVLayout.V32_BF16, (2048,), 64, 64),
    *_of(KVLayout.V32_BF16, (2048,), 16, 64),
]


class Cache(NamedTuple):
    """Rows of one layout and their numbers in bfloat16."""

    pages: torch.Tensor
    layout: KVLayout

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        return ops.gather_kv(self.pages, slots).double()


def caches_of(layout: KVLayout, seed: int) -> dict[KVLayout, Cache]:
    """The same rows in bfloat16 and in FP8."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    found = {}
    for each in (layout, FP8[layout]):
        data = torch.zeros((SLOTS // PAGE_SIZE, each.page_bytes(PAGE_SIZE)), dtype=torch.uint8, device="cuda")
        found[each] = Cache(pages_of(data, each, PAGE_SIZE), each)
    for begin in range(0, SLOTS, 1 << 16):
        slots = torch.arange(begin, begin + (1 << 16), dtype=torch.int32, device="cuda")
        rows = torch.randn((len(slots), layout.qk_dim), device="cuda", generator=generator).bfloat16()
        for cache in found.values():
            ops.write_kv(cache.pages, slots, rows)
    return found


class Problem:
    """A case's tensors, and how it is called."""

    def __init__(self, case: Case, caches: list[dict[KVLayout, Cache]]):
        self.case, self.caches = case, caches[: len(case.columns)]
        generator = torch.Generator(device="cuda").manual_seed(0)
        shape = (case.rows, 1)
        self.scale = case.layout.qk_dim**-0.5 / 2
        self.q = torch.randn((*shape, case.heads, case.layout.qk_dim), device="cuda", generator=generator).bfloat16()
        self.indices = [
            torch.randint(SLOTS, (*shape, n), dtype=torch.int32, device="cuda", generator=generator)
            for n in case.columns
        ]

    def ours(self, layout: KVLayout) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        tables = [(of[layout].pages, indices, None) for of, indices in zip(self.caches, self.indices)]
        first, second = [*tables, (None, None, None)][:2]
        tensors = (self.q, *first, *second, None)
        run = decode._new(decode.Options("bf16_decode", self.scale, -math.inf), *tensors).run
        return lambda: run(*tensors, None, None)

    def flash_mla(self) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        wheel = peers.find("flash_mla")
        pages = [of[FP8[self.case.layout]].pages for of in self.caches]
        q = torch.nn.functional.pad(self.q, (0, 0, 0, -self.case.heads % 64))
        given = {"softmax_scale": self.scale, "is_fp8_kvcache": True, "indices": self.indices[0], "use_legacy": True}
        if len(pages) > 1:
            given |= {"extra_k_cache": pages[1], "extra_indices_in_kvcache": self.indices[1]}
        schedule = wheel.get_mla_metadata()[0]
        return lambda: wheel.flash_mla_with_kvcache(q, pages[0], None, None, 512, schedule, **given)

    def fa3(self) -> Callable[[], torch.Tensor]:
        wheel, (columns,) = peers.find("fa3"), self.case.columns
        rows = self.caches[0][self.case.layout].pages.flatten(0, 1).view(torch.bfloat16)[:, None]  # a page each
        given = {
            "q": self.q[..., 512:],
            "k_cache": rows[..., 512:],
            "v_cache": rows[..., :512],
            "qv": self.q[..., :512],
            "page_table": self.indices[0][:, 0],
            "cache_seqlens": torch.full((self.case.rows,), columns, dtype=torch.int32, device="cuda"),
        }
        return lambda: wheel.flash_attn_with_kvcache(**given, softmax_scale=self.scale, causal=True)

    def error(self, out: torch.Tensor) -> float:
        """Of the worst of four rows."""
        worst = 0.0
        for row in sorted({0, self.case.rows // 3, self.case.rows // 2, self.case.rows - 1}):
            rows = [of[self.case.layout].rows(indices[row, 0]) for of, indices in zip(self.caches, self.indices)]
            keys = torch.cat(rows)
            wanted = torch.softmax(self.q[row, 0].double() @ keys.T * self.scale, -1) @ keys[:, :512]
            worst = max(worst, ((out[row, 0].double() - wanted).norm() / wanted.norm()).item())
        return worst


def measure(
    case: Case, caches: list[dict[KVLayout, Cache]], timer: Timer, copy: float, missing: dict[str, str]
) -> dict:
    """A row; `copy` in TB/s; what of the peers cannot be measured goes into `missing`, with the reason."""
    problem = Problem(case, caches)
    ours, of_fp8 = problem.ours(case.layout), problem.ours(FP8[case.layout])
    of_bytes, of_products = case.floors(copy)
    row = {"case": case.name, "bytes_us": round(of_bytes, 1), "products_us": round(of_products, 1)}
    error, time = problem.error(ours()[0]), timer(Run(ours, "torch"))
    row |= {"us": round(time, 1), "share_of_floor": round(max(of_bytes, of_products) / time, 3)}
    row |= {"of_fp8_us": round(timer(Run(of_fp8, "torch")), 1)}
    theirs = {"flash_mla_of_fp8": problem.flash_mla} | ({"fa3": problem.fa3} if len(case.columns) == 1 else {})
    for name, prepare in theirs.items():
        try:
            call = prepare()
        except peers.NotMeasured as reason:
            missing[name] = str(reason)
            continue
        if name == "fa3":
            row |= {"fa3_error": float(f"{problem.error(call()):.3g}")}
        row |= {f"{name}_us": round(timer(Run(call, "torch")), 1)}
    return row | {"error": float(f"{error:.3g}")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    args = parser.parse_args()
    os.environ["JAX_SPARSE_MLA_DECODE_BACKEND"] = "hopper"
    timer, rows, caches, layout, missing = Timer(repeats=15), [], [], None, {}
    copy = copy_rate(timer)
    for case in CASES:
        if not case.name.startswith(tuple(args.only)):
            continue
        if case.layout != layout:
            caches.clear()
            layout = case.layout
        while len(caches) < len(case.columns):
            caches.append(caches_of(layout, seed=len(caches)))
        rows.append(measure(case, caches, timer, copy, missing))
        print(rows[-1], flush=True)
    found = {"op": "bf16_decode", "copy": round(copy, 3), "not_measured": missing, "rows": rows}
    write_json(results_folder() / "bf16_decode.json", environment() | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

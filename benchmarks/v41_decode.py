"""Decode from V4.1's rows beside V4's at the same shapes, by `hopper`.

    python -m benchmarks.v41_decode [--requests 1 16 64 256] [--heads 64]

Two tokens a request, 128 + 512 index columns, caches of random bytes ten times the L2 with pages of 64 slots, called
from torch and timed by CUPTI with the L2 flushed. Each row has the microseconds of each pair of layouts, V4's over the
pair's, and the difference from Triton's result on the same tensors, norm over norm. Writes v41_decode.json to $OUT or
benchmarks/results.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable

import torch

from benchmarks.record import ROOT, environment, results_folder, write_json
from benchmarks.timing import Run, Timer
from jax_sparse_mla.kv_cache.layout import KVLayout

sys.path.insert(0, str(ROOT / "interop"))

from sparse_mla_torch.attention import decode
from sparse_mla_torch.attention.pages import pages_of

SLOTS, PAGE_SIZE, TOKENS = 1 << 20, 64, 2
COLUMNS = (128, 512)
PAIRS = (
    (KVLayout.V4_FP8, KVLayout.V4_FP8),
    (KVLayout.V41_FP8, KVLayout.V41_FP8),
    (KVLayout.V41_FP8_SPLIT, KVLayout.V41_FP8_SPLIT),
    (KVLayout.V41_FP8, KVLayout.V41_FP4),
    (KVLayout.V41_FP8_SPLIT, KVLayout.V41_FP4_SPLIT),
)
E4M3_NAN = 0x7F
# Bytes of a format's scales, the last one excluded: 2^-11 to 2^-7, and e4m3 from 2^-6 to 2^-4.
SCALES = {"ue8m0": (116, 121), "e4m3": (0x08, 0x19)}


def cache_of(layout: KVLayout) -> torch.Tensor:
    """Random rows, as the operators take them."""
    pages, page_bytes = SLOTS // PAGE_SIZE, layout.page_bytes(PAGE_SIZE)
    data = torch.randint(256, (pages, page_bytes), dtype=torch.uint8, device="cuda")

    def part(start: int, stride: int, width: int) -> torch.Tensor:
        return data.as_strided((pages, PAGE_SIZE, width), (page_bytes, stride, 1), start)

    values = part(0, layout.data_bytes, layout.quantised_bytes)
    if layout.fp8_dim:
        values -= ((values & E4M3_NAN) == E4M3_NAN).to(torch.uint8)
    scales = part(*layout.scale_place(PAGE_SIZE), layout.scale_bytes)
    scales.copy_(torch.randint(*SCALES[layout.scales], scales.shape, dtype=torch.uint8, device="cuda"))
    if plain := layout.qk_dim - layout.quantised_dim:
        rope = torch.randn(pages, PAGE_SIZE, plain, device="cuda").bfloat16().view(torch.uint8)
        part(layout.quantised_bytes, layout.data_bytes, 2 * plain).copy_(rope)
    return pages_of(data, layout, PAGE_SIZE)


def calls(pair: tuple[KVLayout, KVLayout], caches: dict, q: torch.Tensor, indices: list) -> dict[str, Callable]:
    """The call by each backend."""
    sink = torch.zeros(q.shape[2], device="cuda")
    tensors = (q, caches[pair[0]], indices[0], None, caches[pair[1]], indices[1], None, sink)
    options = decode.Options("v41_decode", q.shape[-1] ** -0.5 / 2, -math.inf, kv_layout=pair[0].name)
    found = {}
    for backend in ("hopper", "triton"):
        os.environ["JAX_SPARSE_MLA_DECODE_BACKEND"] = backend
        run = decode._new(options, *tensors).run
        found[backend] = lambda run=run: run(*tensors, None, None)
    return found


def measure(requests: int, heads: int, caches: dict, timer: Timer) -> list[dict]:
    torch.manual_seed(0)
    q = torch.randn(requests, TOKENS, heads, 512, device="cuda").bfloat16()
    indices = [torch.randint(SLOTS, (requests, TOKENS, n), dtype=torch.int32, device="cuda") for n in COLUMNS]
    rows = []
    for pair in PAIRS:
        by = calls(pair, caches, q, indices)
        ours, theirs = (by[name]()[0].double() for name in ("hopper", "triton"))
        times = {name: timer(Run(call, "torch")) for name, call in by.items()}
        row = {"heads": heads, "requests": requests, "layouts": [layout.name for layout in pair]}
        row |= {"hopper_us": round(times["hopper"], 1), "triton_us": round(times["triton"], 1)}
        rows.append(row | {"difference": float(f"{(ours - theirs).norm() / theirs.norm():.2g}")})
        rows[-1]["v4_over_it"] = round(rows[0]["hopper_us"] / rows[-1]["hopper_us"], 3)
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--heads", nargs="*", type=int, default=[64])
    args = parser.parse_args()
    caches = {layout: cache_of(layout) for pair in PAIRS for layout in pair}
    timer, rows = Timer(repeats=15), []
    for heads in args.heads:
        for requests in args.requests:
            rows += measure(requests, heads, caches, timer)
    write_json(results_folder() / "v41_decode.json", environment() | {"op": "v41_decode", "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

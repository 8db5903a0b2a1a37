"""What limits our kernels: hardware counters of one launch each, read by Nsight Compute.

    python -m benchmarks.counters [--only "decode" ...] [--ncu /path/to/ncu]

Each case has a process of its own, in which ncu looks at one call after two others, with the caches empty and the
clocks as they are. A row has, for each kernel of the call, the metrics of ncu's sections `SECTIONS`: how busy DRAM, L2,
shared memory and each pipeline were, and what the warps waited for. Writes counters.json to $OUT or benchmarks/results.
Needs a GPU with compute capability 9.0, torch, and a user who may read its counters.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.record import ROOT, environment, results_folder, write_json

sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "interop")]

SECTIONS = "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats"
SHOWN = "Duration", "DRAM Throughput", "L2 Cache Throughput", "L1/TEX Cache Throughput", "Issue Slots Busy"
WARM_UP = 2
TIMEOUT = 180  # seconds for a case, its compilation included


def decode_of_fp8(name: str) -> Callable[[], object]:
    """A case of `benchmarks.hopper_decode`."""
    from benchmarks import hopper_decode

    case = next(case for case in hopper_decode.cases() if case.name == name)
    problem = hopper_decode.Problem(case, {})
    return problem.call(hopper_decode.ours, case.shape.heads)


def decode_of_bf16(name: str) -> Callable[[], object]:
    """A case of `benchmarks.bf16_decode`."""
    from benchmarks import bf16_decode

    case = next(case for case in bf16_decode.CASES if case.name == name)
    caches = [bf16_decode.caches_of(case.layout, seed) for seed in range(len(case.columns))]
    return bf16_decode.Problem(case, caches).ours(case.layout)


def decode_of_v41(first: str, second: str) -> Callable[[], object]:
    """256 requests of two tokens with 64 heads, as in `benchmarks.v41_decode`."""
    from benchmarks import v41_decode
    from jax_sparse_mla.kv_cache.layout import KVLayout

    pair = getattr(KVLayout, first), getattr(KVLayout, second)
    q = torch.randn(256, v41_decode.TOKENS, 64, 512, device="cuda").bfloat16()
    indices = [
        torch.randint(v41_decode.SLOTS, (*q.shape[:2], n), dtype=torch.int32, device="cuda") for n in v41_decode.COLUMNS
    ]
    return v41_decode.calls(pair, {layout: v41_decode.cache_of(layout) for layout in pair}, q, indices)["hopper"]


def prefill(name: str) -> Callable[[], object]:
    """A case of `benchmarks.ops.attention`, from JAX."""
    import jax
    import numpy as np

    from benchmarks.ops import attention
    from jax_sparse_mla import sparse_mla_prefill

    shape = next(shape for shape in attention.PREFILLS if shape.name == name)
    arrays = attention.prefill_arrays(np.random.default_rng(0), shape)
    call = jax.jit(lambda arrays: sparse_mla_prefill(**arrays, softmax_scale=0.5, backend="hopper"))
    return lambda: jax.block_until_ready(call(arrays))


def index_logits(rows: int, keys: int, heads: int, *, fp4: bool) -> Callable[[], object]:
    """Decode: each row reads pages of its own, all of them full."""
    from sparse_mla_torch.operations import indexer

    from jax_sparse_mla.indexer.keys import IndexFormat

    format, page_size = IndexFormat.FP4 if fp4 else IndexFormat.FP8, 64
    pages = rows * keys // page_size
    cache = torch.randint(256, (pages, page_size * format.key_bytes), dtype=torch.uint8, device="cuda")
    scales = cache[:, page_size * format.value_bytes :]
    if fp4:
        scales.random_(119, 136)
    else:
        cache &= 0x77  # no NaN
        scales.view(torch.float32).fill_(1.0)
    q = torch.randint(-1, 2, (rows, heads, 128), device="cuda").to(torch.bfloat16 if fp4 else torch.float8_e4m3fn)
    weights = torch.rand(rows, heads, device="cuda")
    table = torch.randperm(pages, dtype=torch.int32, device="cuda").view(rows, -1)
    lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
    return lambda: indexer.index_logits(q, weights, cache, table, lengths, format=format)


CASES: dict[str, Callable[[], Callable[[], object]]] = {
    **{
        f"decode, FP8: {name}": lambda name=name: decode_of_fp8(name)
        for name in (
            "V4 Flash, 64 heads, 1 x 1",
            "V4 Flash, 64 heads, 16 x 1",
            "V4 Flash, 64 heads, 256 x 1",
            "V4 Pro, 128 heads, 64 x 1",
            "V4 C128, 128 heads, 16 x 1",
            "V4 window, 128 heads, 32 x 1",
            "V3.2, 128 heads, 4 x 1",
            "V3.2, 128 heads, 64 x 1",
        )
    },
    **{
        f"decode, bfloat16: {name}": lambda name=name: decode_of_bf16(name)
        for name in (
            "V4 Flash, 64 heads, 256 x 128 + 512",
            "V4 Flash, 64 heads, 1024 x 128 + 512",
            "V3.2, 128 heads, 64 x 2048",
        )
    },
    **{
        name: lambda name=name: prefill(name)
        for name in (
            "prefill V4 Flash, 64 heads, kv 8192",
            "prefill V4 Flash, 64 heads, kv 65536",
            "prefill V4 Pro, 128 heads, kv 65536",
        )
    },
    **{
        f"decode, V4.1: {first} + {second}": lambda pair=(first, second): decode_of_v41(*pair)
        for first, second in (("V41_FP8", "V41_FP8"), ("V41_FP8", "V41_FP4"))
    },
    "index logits, FP4: 64 x 131072, 32 heads": lambda: index_logits(64, 131_072, 32, fp4=True),
    "index logits, FP4: 64 x 131072, 64 heads": lambda: index_logits(64, 131_072, 64, fp4=True),
    "index logits, FP8: 64 x 131072, 64 heads": lambda: index_logits(64, 131_072, 64, fp4=False),
}


def launch(name: str) -> None:
    """What ncu runs: it looks at the last call only."""
    os.environ["JAX_SPARSE_MLA_DECODE_BACKEND"] = "hopper"
    call = CASES[name]()
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def metrics(lines: Iterable[str]) -> list[dict]:
    """Of ncu's table in CSV, `{"kernel": name, "metrics": {"metric [unit]": number}}` for each launch."""
    table, found = list(lines), {}
    start = next((i for i, line in enumerate(table) if line.startswith('"ID"')), len(table))
    for row in csv.DictReader(table[start:]):
        kernel = found.setdefault(row["ID"], {"kernel": row["Kernel Name"][:120], "metrics": {}})
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # a rule's row, or a metric that is a word
            continue
        unit = f" [{row['Metric Unit']}]" if row["Metric Unit"] else ""
        kernel["metrics"][row["Metric Name"] + unit] = value
    return list(found.values())


def counted(name: str, ncu: str) -> dict:
    """A row; what went wrong where nothing was counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ncu.csv")
        sections = [word for section in SECTIONS for word in ("--section", section)]
        command = [ncu, "--profile-from-start", "off", "--clock-control", "none", *sections, "--print-details", "all"]
        command += ["--csv", "--log-file", str(path), sys.executable, "-m", "benchmarks.counters", "--launch", name]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"case": name, "failed": f"{type(error).__name__}: {error}"[:300]}
        said = path.read_text() if path.exists() else ""
    kernels = metrics(said.splitlines())
    if done.returncode or not kernels:
        return {"case": name, "failed": (done.stderr + said)[-300:]}
    return {"case": name, "kernels": kernels}


def _shown(row: dict) -> str:
    if "failed" in row:
        return f"{row['case']}: {row['failed']}"
    lines = [row["case"]]
    for kernel in row["kernels"]:
        of_kernel = [f"{key} {value:g}" for key, value in kernel["metrics"].items() if key.startswith(SHOWN)]
        lines.append(f"    {kernel['kernel'][:60]}: {', '.join(of_kernel)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    parser.add_argument("--ncu", default="ncu")
    parser.add_argument("--launch", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        launch(args.launch)
        return 0
    rows = []
    for name in CASES:
        if not name.startswith(tuple(args.only)):
            continue
        rows.append(counted(name, args.ncu))
        print(_shown(rows[-1]), flush=True)
        write_json(results_folder() / "counters.json", environment() | {"op": "counters", "rows": rows})
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

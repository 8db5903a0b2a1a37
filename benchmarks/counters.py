"""The limits of our kernels: hardware counters of one launch each, read by Nsight Compute.

    python -m benchmarks counters [--only "decode" ...] [--ncu /path/to/ncu]

Each case has a process of its own, in which ncu looks at one call after two others, with the caches empty and the
clocks as they are. A row has, for each kernel of the call, the metrics of ncu's sections `SECTIONS`: how busy DRAM, L2,
shared memory and each pipeline were, and what the warps waited for. Needs a GPU with compute capability 9.0, and a user
who may read its counters.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks import decode
from benchmarks.harness import ROOT, described, parser, status, write

SECTIONS = "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats"
SHOWN = "Duration", "DRAM Throughput", "L2 Cache Throughput", "L1/TEX Cache Throughput", "Issue Slots Busy"
WARM_UP = 2
TIMEOUT = 180  # seconds for a case, its compilation included


def prefill_of(name: str) -> Callable[[], object]:
    """A case of `benchmarks.ops.prefill`, from JAX."""
    import jax
    import numpy as np

    from benchmarks.ops import prefill
    from jax_sparse_mla import sparse_mla_prefill

    shape = next(shape for shape in prefill.PREFILLS if shape.name == name)
    arrays = prefill.prefill_arrays(np.random.default_rng(0), shape)
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


FP8 = "V4 Flash, 64 heads, 1 x 1", "V4 Flash, 64 heads, 16 x 1", "V4 Flash, 64 heads, 256 x 1"
FP8 += "V4 Pro, 128 heads, 64 x 1", "V4 C128, 128 heads, 16 x 1", "V4 window, 128 heads, 32 x 1"
FP8 += "V3.2, 128 heads, 4 x 1", "V3.2, 128 heads, 64 x 1"
BF16 = "V4 Flash, 64 heads, 256 x 128 + 512", "V4 Flash, 64 heads, 1024 x 128 + 512"
BF16 += ("V3.2, 128 heads, 64 x 2048",)
V41 = "V41_FP8 + V41_FP8, 64 heads, 256 x 2", "V41_FP8 + V41_FP4, 64 heads, 256 x 2"
DECODES = {"FP8": FP8, "bfloat16": BF16, "V4.1": V41}
PREFILLS = ("prefill V4 Flash, 64 heads, kv 8192", "prefill V4 Flash, 64 heads, kv 65536")
PREFILLS += ("prefill V4 Pro, 128 heads, kv 65536",)
CASES: dict[str, Callable[[], Callable[[], object]]] = {
    **{f"decode, {of}: {x}": lambda x=x: decode.our_call(x) for of, names in DECODES.items() for x in names},
    **{name: lambda name=name: prefill_of(name) for name in PREFILLS},
    "index logits, FP4: 64 x 131072, 32 heads": lambda: index_logits(64, 131_072, 32, fp4=True),
    "index logits, FP4: 64 x 131072, 64 heads": lambda: index_logits(64, 131_072, 64, fp4=True),
    "index logits, FP8: 64 x 131072, 64 heads": lambda: index_logits(64, 131_072, 64, fp4=False),
}


def launch(name: str) -> None:
    """Calls a case, for ncu, which looks at the last call only."""
    call = CASES[name]()
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def metrics(lines: Iterable[str]) -> list[dict]:
    """`{"kernel": name, "metrics": {"metric [unit]": number}}` for each launch in ncu's table, which is CSV."""
    table, launches = list(lines), {}
    start = next((i for i, line in enumerate(table) if line.startswith('"ID"')), len(table))
    for row in csv.DictReader(table[start:]):
        kernel = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"][:120], "metrics": {}})
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # a rule's row, or a metric that is a word
            continue
        unit = f" [{row['Metric Unit']}]" if row["Metric Unit"] else ""
        kernel["metrics"][row["Metric Name"] + unit] = value
    return list(launches.values())


def counted(name: str, ncu: str) -> dict:
    """A row; what went wrong where nothing was counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ncu.csv")
        sections = [word for section in SECTIONS for word in ("--section", section)]
        command = [ncu, "--profile-from-start", "off", "--clock-control", "none", *sections, "--print-details", "all"]
        command += ["--csv", "--log-file", str(path), sys.executable, "-m", "benchmarks", "counters", "--launch", name]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"case": name, "failed": described(error)}
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
    made = parser(__doc__)
    made.add_argument("--ncu", default="ncu")
    made.add_argument("--launch", choices=CASES, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.launch:
        launch(args.launch)
        return 0
    names, rows = [name for name in CASES if name.startswith(tuple(args.only))], []
    if args.dry_run:
        print(*names, sep="\n")
        return 0
    for name in names:
        rows.append(counted(name, args.ncu))
        print(_shown(rows[-1]), flush=True)
        write("counters", rows)
    return status(rows)

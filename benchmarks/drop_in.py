"""The host's time of a drop-in call beside FlashMLA's own, and the memory that many calls leave behind.

    python -m benchmarks.drop_in [--calls 10000]

prints, in microseconds per call that is only enqueued, FlashMLA called directly, and the drop-in's difference from it:
over FlashMLA's operator with and without the sanitiser, over our SM90 and Triton kernels, and over what the router
picks; and of a CUDA graph of 16 such calls, microseconds of the device per call. Needs an NVIDIA GPU and sgl-flash-mla;
it fails if a JAX backend was initialised or if `--calls` calls leave more memory behind than there was.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.record import environment, results_folder, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "interop"))

from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import call_cache

BATCH = 16  # calls in a row: few, so that none waits for the device
ROUNDS = 101
LEAK_MIB = 8


class Decode(NamedTuple):
    name: str
    heads: int
    batch: int
    topk: int
    extra_topk: int = 0
    lengths: bool = False


DECODES = [
    Decode("V4 Flash b1", 64, 1, 128, 512),
    Decode("V4 Flash b1 lengths", 64, 1, 128, 512, lengths=True),
    Decode("V4 Flash b64 lengths", 64, 64, 128, 512, lengths=True),
    Decode("V4 Pro b64", 128, 64, 128, 1024),
    Decode("V3.2 b1", 128, 1, 2048),
    Decode("V3.2 b64", 128, 64, 2048),
]
PREFILLS = [
    ("V4 Flash prefill", 64, 512, 512, False),
    ("V4 Flash prefill lengths", 64, 512, 512, True),
    ("V3.2 prefill", 128, 576, 2048, False),
]


def decode_arguments(case: Decode) -> dict:
    dim, width = (512, 584) if case.extra_topk else (576, 656)

    def table(topk: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        cache = torch.zeros((64, page_size, 1, width), dtype=torch.uint8, device="cuda")
        indices = torch.randint(64 * page_size, (case.batch, 1, topk), dtype=torch.int32, device="cuda")
        lengths = torch.full((case.batch,), topk, dtype=torch.int32, device="cuda") if case.lengths else None
        return cache, indices, lengths

    names = ("k_cache", "indices", "topk_length")
    arguments = {"q": torch.randn(case.batch, 1, case.heads, dim, device="cuda").bfloat16(), "head_dim_v": 512}
    arguments |= dict.fromkeys(("block_table", "cache_seqlens")) | dict(zip(names, table(case.topk, 64)))
    if case.extra_topk:
        names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
        arguments |= dict(zip(names, table(case.extra_topk, 64)))
        arguments["attn_sink"] = torch.randn(case.heads, device="cuda")
    return arguments | {"is_fp8_kvcache": True, "use_legacy": True}


def prefill_arguments(heads: int, dim: int, topk: int, has_lengths: bool) -> dict:
    q = torch.randn(64, heads, dim, device="cuda").bfloat16()
    kv = torch.randn(4096, 1, dim, device="cuda").bfloat16()
    indices = torch.randint(4096, (64, 1, topk), dtype=torch.int32, device="cuda")
    lengths = torch.full((64,), topk, dtype=torch.int32, device="cuda") if has_lengths else None
    return {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.1, "topk_length": lengths}


def enqueue(call: Callable[[], object]) -> float:
    """Microseconds of the host per call."""
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    spent = (time.perf_counter() - start) / BATCH * 1e6
    torch.cuda.synchronize()
    return spent


def beside(direct: Callable[[], object], ours: Callable[[], object], backend: str) -> tuple[float, float]:
    """Microseconds of the first, and what the second takes beyond it, of the backend named ("": the router's choice).

    They take turns: the median of their differences is free of the clock's drift.
    """
    os.environ["JAX_SPARSE_MLA_BACKEND"] = backend
    call_cache.forget()
    pairs = [(enqueue(direct), enqueue(ours)) for _ in range(ROUNDS + 3)][3:]
    return statistics.median(x for x, _ in pairs), statistics.median(y - x for x, y in pairs)


def in_a_graph(call: Callable[[], object]) -> float:
    """Microseconds of the device per call of a replay, in a graph of `BATCH` calls; the least of many replays."""
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(BATCH):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / BATCH)
    return min(times)


VARIANTS = [("flashmla", {}), ("flashmla", {"assume_valid_indices": True}), ("hopper", {}), ("triton", {}), ("", {})]


def rows(wheel) -> Iterator[dict]:
    for case in DECODES:
        arguments = decode_arguments(case)
        theirs = {"tile_scheduler_metadata": wheel.get_mla_metadata()[0]} | arguments
        yield measure(case.name, wheel.flash_mla_with_kvcache, theirs, flash_mla.flash_mla_with_kvcache, arguments)
    for name, *shape in PREFILLS:
        arguments = prefill_arguments(*shape) | {"use_legacy": True}
        yield measure(name, wheel.flash_mla_sparse_fwd, arguments, flash_mla.flash_mla_sparse_fwd, arguments)


def measure(name: str, peer: Callable, peer_arguments: dict, function: Callable, arguments: dict) -> dict:
    """One line: the direct call's time, and what each variant takes beyond it."""
    row, graphs = {"case": name}, {"direct": round(in_a_graph(functools.partial(peer, **peer_arguments)), 2)}
    for backend, options in VARIANTS:
        schedule = {}
        if "tile_scheduler_metadata" not in peer_arguments:
            if backend == "hopper":
                continue  # torch calls its decode alone
        else:
            schedule = {"tile_scheduler_metadata": flash_mla.get_mla_metadata()[0]}
        ours = functools.partial(function, **arguments, **options, **schedule)
        direct, beyond = beside(functools.partial(peer, **peer_arguments), ours, backend)
        label = f"{backend or 'routed'}{' valid' if options else ''}"
        row |= {"direct": round(direct, 2), label: round(beyond, 2)}
        graphs[label] = round(in_a_graph(ours), 2)
    row["in a graph"] = graphs
    print("  ".join(f"{key} {value}" if key != "case" else f"{value:22}" for key, value in row.items()), flush=True)
    return row


def resident_mib() -> float:
    """What the process holds now: its peak would hide a leak below what it held before."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def leaked(calls: int, backend: str) -> dict[str, float]:
    """MiB that so many calls leave behind, of torch's memory and of the process's."""
    arguments = decode_arguments(DECODES[1])
    os.environ["JAX_SPARSE_MLA_BACKEND"] = backend
    call_cache.forget()

    def some(count: int) -> tuple[float, float]:
        for _ in range(count):
            fresh = flash_mla.get_mla_metadata()[0]
            flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=fresh)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() / 2**20, resident_mib()

    before, after = some(max(calls // 10, 1)), some(calls)
    return {"torch": after[0] - before[0], "process": after[1] - before[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    args = parser.parse_args()

    import flash_mla as wheel

    print("us of the host per call: FlashMLA directly, and what the drop-in takes beyond it")
    table, memory = list(rows(wheel)), leaked(args.calls, "flashmla")
    print(f"{args.calls} calls leave {memory['torch']:.1f} MiB of torch, {memory['process']:.1f} MiB of the process")
    from jax._src import xla_bridge

    write_json(results_folder() / "drop_in.json", environment() | {"rows": table, "leaked_mib": memory})
    return int(max(memory.values()) > LEAK_MIB or bool(xla_bridge._backends))


if __name__ == "__main__":
    sys.exit(main())

"""The host's time of a drop-in call beside FlashMLA's own, and the memory that many calls leave behind.

    python -m benchmarks drop_in [--calls 10000]

A row has microseconds per call that is only enqueued: FlashMLA called directly, and the drop-in's difference from it,
over FlashMLA's operator with and without the sanitiser, over our SM90 and Triton kernels, and over what the router
picks; and of a CUDA graph of 16 such calls, microseconds of the device per call. Needs sgl-flash-mla. It fails if a JAX
backend was initialised or if `--calls` calls leave more memory behind than there was.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sparse_mla_torch import flash_mla
from sparse_mla_torch.attention import call_cache

from benchmarks import peers
from benchmarks.harness import NotMeasured, parser, run_cases, status, write

BATCH = 16  # calls in a row: few, so that none waits for the device
ROUNDS = 101
LEAK_MIB = 8
DECODES = {  # heads, batch, index columns of both caches, whether there are lengths
    "V4 Flash b1": (64, 1, 128, 512, False),
    "V4 Flash b1 lengths": (64, 1, 128, 512, True),
    "V4 Flash b64 lengths": (64, 64, 128, 512, True),
    "V4 Pro b64": (128, 64, 128, 1024, False),
    "V3.2 b1": (128, 1, 2048, 0, False),
    "V3.2 b64": (128, 64, 2048, 0, False),
}
PREFILLS = {  # heads, dimension, index columns, whether there are lengths
    "V4 Flash prefill": (64, 512, 512, False),
    "V4 Flash prefill lengths": (64, 512, 512, True),
    "V3.2 prefill": (128, 576, 2048, False),
}
VARIANTS = [("flashmla", {}), ("flashmla", {"assume_valid_indices": True}), ("hopper", {}), ("triton", {}), ("", {})]


def decode_arguments(heads: int, batch: int, topk: int, extra_topk: int, has_lengths: bool) -> dict:
    dim, width = (512, 584) if extra_topk else (576, 656)

    def table(topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        cache = torch.zeros((64, 64, 1, width), dtype=torch.uint8, device="cuda")
        indices = torch.randint(64 * 64, (batch, 1, topk), dtype=torch.int32, device="cuda")
        lengths = torch.full((batch,), topk, dtype=torch.int32, device="cuda") if has_lengths else None
        return cache, indices, lengths

    arguments = {"q": torch.randn(batch, 1, heads, dim, device="cuda").bfloat16(), "head_dim_v": 512}
    arguments |= {"block_table": None, "cache_seqlens": None, "is_fp8_kvcache": True, "use_legacy": True}
    arguments |= dict(zip(("k_cache", "indices", "topk_length"), table(topk)))
    if extra_topk:
        names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
        arguments |= dict(zip(names, table(extra_topk))) | {"attn_sink": torch.randn(heads, device="cuda")}
    return arguments


def prefill_arguments(heads: int, dim: int, topk: int, has_lengths: bool) -> dict:
    q = torch.randn(64, heads, dim, device="cuda").bfloat16()
    kv = torch.randn(4096, 1, dim, device="cuda").bfloat16()
    indices = torch.randint(4096, (64, 1, topk), dtype=torch.int32, device="cuda")
    lengths = torch.full((64,), topk, dtype=torch.int32, device="cuda") if has_lengths else None
    return {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.1, "topk_length": lengths, "use_legacy": True}


def enqueue(call: Callable[[], object]) -> float:
    """Microseconds of the host per call."""
    start = time.perf_counter()
    for _ in range(BATCH):
        call()
    spent = (time.perf_counter() - start) / BATCH * 1e6
    torch.cuda.synchronize()
    return spent


def beside(direct: Callable[[], object], ours: Callable[[], object], backend: str) -> tuple[float, float]:
    """Microseconds of the first, and what the second takes beyond it, by the backend named ("": the router's choice).

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
    return round(min(times), 2)


def measure(name: str, wheel) -> dict:
    """A row: the direct call's time, and what each variant takes beyond it."""
    decodes = name in DECODES
    arguments = decode_arguments(*DECODES[name]) if decodes else prefill_arguments(*PREFILLS[name])
    function = "flash_mla_with_kvcache" if decodes else "flash_mla_sparse_fwd"

    def call(package, **options) -> Callable[[], object]:
        schedule = {"tile_scheduler_metadata": package.get_mla_metadata()[0]} if decodes else {}
        return functools.partial(getattr(package, function), **arguments, **options, **schedule)

    row, graphs, direct = {}, {"direct": in_a_graph(call(wheel))}, call(wheel)
    for backend, options in VARIANTS:
        ours = call(flash_mla, **options)
        us, beyond = beside(direct, ours, backend)
        label = f"{backend or 'routed'}{' valid' if options else ''}"
        row |= {"direct": round(us, 2), label: round(beyond, 2)}
        graphs[label] = in_a_graph(ours)
    return row | {"in a graph": graphs}


def leaked(calls: int, backend: str) -> dict[str, float]:
    """MiB that so many calls leave behind, of torch's memory and of the process's, whose peak would hide them."""
    arguments = decode_arguments(*DECODES["V4 Flash b1 lengths"])
    os.environ["JAX_SPARSE_MLA_BACKEND"] = backend
    call_cache.forget()

    def held_after(count: int) -> tuple[float, float]:
        for _ in range(count):
            fresh = flash_mla.get_mla_metadata()[0]
            flash_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=fresh)
        torch.cuda.synchronize()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return torch.cuda.memory_allocated() / 2**20, pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    before, after = held_after(max(calls // 10, 1)), held_after(calls)
    return {"torch": after[0] - before[0], "process": after[1] - before[1]}


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--calls", type=int, default=10_000)
    args = made.parse_args()
    names = [name for name in (*DECODES, *PREFILLS) if name.startswith(tuple(args.only))]
    if args.dry_run:
        print(*names, sep="\n")
        return 0
    try:
        wheel = peers.find("flash_mla")
    except NotMeasured as reason:
        print(f"FlashMLA cannot be measured here: {reason}")
        write("drop_in", [], not_measured=str(reason))
        return 0
    rows = run_cases("drop_in", ((name, functools.partial(measure, name, wheel)) for name in names))
    memory = leaked(args.calls, "flashmla")
    print(f"{args.calls} calls leave {memory['torch']:.1f} MiB of torch, {memory['process']:.1f} MiB of the process")
    write("drop_in", rows, leaked_mib=memory)
    from jax._src import xla_bridge

    return int(status(rows) or max(memory.values()) > LEAK_MIB or bool(xla_bridge._backends))

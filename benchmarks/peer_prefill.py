"""Prefill of DeepSeek-V4-Flash's attention beside SGLang's own: one request in chunks, 43 layers, on one GPU.

    python -m benchmarks.peer_prefill --prepared FOLDER     # FOLDER of `benchmarks.peer_step --prepare`; needs an H200

SGLang's kernels are launched one after the other, since it has no CUDA graph for a prefill; the rest is as in
`benchmarks.peer_step`. The request's last chunk is compared with our reference before anything is timed. Per chunk:
wall time, the time in which the GPU is busy, operations, and its parts, ours and theirs. Prints tables and writes
peer_prefill.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import collections
import re
import statistics
import sys
import time
from pathlib import Path

import jax
import torch

from benchmarks import peers
from benchmarks.peer_step import load, measure_ours, not_measured
from benchmarks.record import environment, results_folder, write_json
from benchmarks.sglang.guards import check_chunk
from benchmarks.sglang.prefill import Chunk
from benchmarks.sglang.state import State
from benchmarks.stack import V4_FLASH_RATIOS, Stack
from benchmarks.step import Operation, device_operations, summary


def measure(chunk: Chunk, start: int, repeats: int) -> dict:
    """A chunk's times; `kinds` has the microseconds and the number of its kernels, those that take longest first."""

    def run() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        chunk(start)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    run()
    wall = statistics.median(run() for _ in range(repeats))
    operations = device_operations(run)
    return {"wall_us": wall * 1e6, **summary(operations, 1), "kinds": kinds(operations)}


def kinds(operations: list[Operation]) -> list[tuple[str, float, int]]:
    totals = collections.defaultdict(lambda: [0, 0])
    for operation in operations:
        totals[operation.name][0] += operation.end - operation.start
        totals[operation.name][1] += 1
    found = [(name[:120], ns / 1e3, count) for name, (ns, count) in totals.items()]
    return sorted(found, key=lambda kind: -kind[1])


# By what stands in the names of their kernels, the first that fits; what fits none is the rest.
PARTS = {
    "attention": "sparse_attn_fwd|mosaic_gpu",
    "index logits": "mqa_logits|index_logits|get_k_and_s",
    "top-k and tables": "topk|swa_token_ids|swa_page_indices|combine_",
    "index queries": "fused_q_indexer|index_q",
    "compressors, window and index keys": "compress|flash_c|write_c|fused_.*norm_rope|entries|carry|find_rows|write_",
    "keys for attention, in bfloat16": "dequantize|gather_",
    "additions between the layers": "CUDAFunctor_add<c10|add_fusion",
}


def parts(kinds: list[tuple[str, float, int]]) -> dict[str, float]:
    """Microseconds of a chunk's parts."""
    found = dict.fromkeys((*PARTS, "rest"), 0.0)
    for name, us, _ in kinds:
        kernel = name.partition(": jit(")[0]  # an operation of XLA's is followed by its path in the program
        found[next((part for part, names in PARTS.items() if re.search(names, kernel)), "rest")] += us
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="where SGLang's compiled modules lie")
    parser.add_argument("--prompt", default="16384/8192", help="PROMPT/CHUNK, whole chunks")
    parser.add_argument("--layers", type=int, default=len(V4_FLASH_RATIOS), help="only the first, at least 3")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--operations", type=int, default=16, help="list so many kinds of operations per chunk")
    arguments = parser.parse_args()
    prompt, rows = map(int, arguments.prompt.split("/"))
    if prompt % rows:
        parser.error("--prompt must be whole chunks")
    jax.config.update("jax_platforms", "cpu")
    try:
        missing = load(arguments.prepared)
    except peers.NotMeasured as reason:
        return not_measured("peer_prefill.json", reason)
    case = ["--decode", "", "--prefill", arguments.prompt, "--layers", str(arguments.layers), "--operations", "200"]
    ours = measure_ours(case)[f"prefill {prompt} in {rows}"]
    stack = Stack(ratios=V4_FLASH_RATIOS[: arguments.layers], batch=1, max_len=prompt, window_pages=prompt // 256)
    state = State(stack, num_rows=rows)
    chunk, starts = Chunk(state), range(0, prompt, rows)
    numbers = sorted({stack.ratios.index(ratio) for ratio in stack.ratios})
    for start in starts:
        seen = dict.fromkeys(numbers)
        chunk(start, seen)
    guards = check_chunk(state, seen, rows)
    print(f"prefill: {guards}", flush=True)
    del seen
    results = {"ours": {key: ours[key] for key in ("steps", "wall_us", "gpu_us", "gpu_busy", "operations", "kinds")}}
    for start in starts:
        found = results[f"SGLang, tokens {start} to {start + rows}"] = measure(chunk, start, arguments.repeats)
        for name, us, count in found["kinds"][: arguments.operations]:
            print(f"    {us:9.1f} us {count:5} x  {name}")
    theirs = [result for name, result in results.items() if name != "ours"]
    for name, result in results.items():
        print(f"{name:32} {result['wall_us']:12,.0f} us wall {result['gpu_us']:12,.0f} us busy")
        result["parts"] = parts(result["kinds"])
        print("    " + ", ".join(f"{part} {us:,.0f}" for part, us in result["parts"].items()))
    ratio = statistics.mean(result["wall_us"] for result in theirs) / results["ours"]["wall_us"]
    print(f"a chunk of SGLang's takes {ratio:.2f} of the time of ours")
    found = {"compiled_here": missing, "guards": guards._asdict(), "results": results}
    write_json(results_folder() / "peer_prefill.json", environment() | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prefill of DeepSeek-V4-Flash's attention beside SGLang's own: one request in chunks, 43 layers, on one GPU.

    python -m benchmarks prefill_chunk

SGLang's kernels are launched one after the other, since it has no CUDA graph for a prefill; the rest is as in
`python -m benchmarks step`. The request's last chunk is compared with our reference before anything is timed. Per
chunk: wall time, the time in which the GPU is busy, operations, and its parts, ours and theirs.
"""

from __future__ import annotations

import functools
import re
import statistics

import jax

from benchmarks.harness import NotMeasured, parser, write
from benchmarks.sglang.compare import load, measure_ours
from benchmarks.sglang.guards import check_chunk
from benchmarks.sglang.prefill import Chunk
from benchmarks.sglang.state import State
from benchmarks.stack import V4_FLASH_RATIOS, Stack
from benchmarks.step import TorchSteps, by_kind, measure

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
    of_parts = dict.fromkeys((*PARTS, "rest"), 0.0)
    for name, us, _ in kinds:
        kernel = name.partition(": jit(")[0]  # an operation of XLA's is followed by its path in the program
        of_parts[next((part for part, names in PARTS.items() if re.search(names, kernel)), "rest")] += us
    return of_parts


def main() -> int:
    made = parser(__doc__, only=None)
    made.add_argument("--prompt", default="16384/8192", help="PROMPT/CHUNK, whole chunks")
    made.add_argument("--layers", type=int, default=len(V4_FLASH_RATIOS), help="only the first, at least 3")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--operations", type=int, default=16, help="list so many kinds of operations per chunk")
    args = made.parse_args()
    prompt, length = map(int, args.prompt.split("/"))
    if prompt % length:
        made.error("--prompt must be whole chunks")
    if args.dry_run:
        print(f"prefill {prompt} in {length}, {args.layers} layers")
        return 0
    jax.config.update("jax_platforms", "cpu")
    case = ["--decode", "", "--prefill", args.prompt, "--layers", str(args.layers), "--operations", "200"]
    results = {"ours": measure_ours(case)[f"prefill {prompt} in {length}"]}
    guards, reason = None, None
    try:
        load()
        theirs, guards = measure_theirs(prompt, length, args)
        results |= theirs
    except NotMeasured as why:
        reason = str(why)
        print(f"SGLang's chunk cannot be measured here: {reason}")
    rows = []
    for name, result in results.items():
        row = {key: result[key] for key in ("wall_us", "gpu_us", "gpu_busy", "operations")}
        rows.append({"case": name, **row, "parts_us": parts(result["kinds"])})
        print(f"{name:32} {result['wall_us']:12,.0f} us wall {result['gpu_us']:12,.0f} us busy")
        print("    " + ", ".join(f"{part} {us:,.0f}" for part, us in rows[-1]["parts_us"].items()))
    if len(rows) > 1:
        ratio = statistics.mean(row["wall_us"] for row in rows[1:]) / rows[0]["wall_us"]
        print(f"a chunk of SGLang's takes {ratio:.2f} of the time of ours")
    write("prefill_chunk", rows, guards=guards, not_measured=reason)
    return 0


def measure_theirs(prompt: int, length: int, args) -> tuple[dict[str, dict], dict]:
    """SGLang's chunks, and the guards' report."""
    stack = Stack(ratios=V4_FLASH_RATIOS[: args.layers], batch=1, max_len=prompt, window_pages=prompt // 256)
    state = State(stack, num_rows=length)
    chunk, starts = Chunk(state), range(0, prompt, length)
    for start in starts:
        seen = dict.fromkeys(sorted({stack.ratios.index(ratio) for ratio in stack.ratios}))
        chunk(start, seen)
    guards = check_chunk(state, seen, length)
    print(f"prefill: {guards}", flush=True)
    del seen
    results = {}
    for start in starts:
        steps = TorchSteps(functools.partial(chunk, start), state.lens)
        result, operations = measure(steps, start, 1, args.repeats, rewind=False)
        kinds = [(kind.name[:120], kind.us, kind.count) for kind in by_kind(operations, 1, {})]
        results[f"SGLang, tokens {start} to {start + length}"] = result | {"kinds": kinds}
        for name, us, count in kinds[: args.operations]:
            print(f"    {us:9.1f} us {count:5.0f} x  {name}")
    return results, guards._asdict()

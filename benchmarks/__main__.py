"""Runs benchmarks: `python -m benchmarks OPERATION … [ARGUMENTS]`; without an operation, lists them.

Several operations run one after the other, each in a process of its own with the same arguments; the exit status is the
worst of theirs. Each prints a table and writes its rows as JSON to $OUT or benchmarks/out. `OPERATION --help` shows the
arguments, `OPERATION --dry-run` lists the cases and needs no GPU. `benchmarks/results.json` has the documents' rows.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

OPERATIONS = {  # the module, and what it measures
    "decode": ("decode", "decode from paged caches beside FlashMLA and FlashAttention 3"),
    "prefill": ("ops.prefill", "prefill beside FlashMLA"),
    "prefill_chunk": ("prefill_chunk", "a prefill chunk of all 43 layers beside SGLang's kernels"),
    "gradient": ("gradient", "the gradient of prefill beside cudnn-frontend and TileLang"),
    "topk": ("ops.topk", "top-k and page tables beside FlashInfer and SGLang"),
    "indexer": ("ops.indexer", "index logits, index keys, queries, compressors beside DeepGEMM, SGLang and XLA"),
    "kv_cache": ("ops.kv_cache", "gathers, writes and page split of KV caches beside SGLang and XLA"),
    "indices": ("ops.indices", "merges of index lists beside SGLang and XLA"),
    "metadata": ("ops.metadata", "a step's metadata and schedules beside DeepGEMM and XLA"),
    "extend": ("ops.extend", "a prefill chunk from paged caches and from a gathered workspace"),
    "step": ("step", "a decode step of all 43 layers beside SGLang's kernels"),
    "torch_step": ("torch_step", "the decode step from torch beside the one from JAX"),
    "beside_flashmla": ("beside_flashmla", "the table by which calls are left to FlashMLA in serving engines"),
    "drop_in": ("drop_in", "the host's time of a drop-in call beside FlashMLA's own"),
    "cases": ("cases", "FlashMLA's published test shapes against float64"),
    "flashmla_tests": ("flashmla_tests", "FlashMLA's own test files through the drop-in"),
    "counters": ("counters", "what limits our kernels, by Nsight Compute"),
    "memcheck": ("memcheck", "every kernel under compute-sanitizer"),
    "engines": ("engines", "attention layers of SGLang and vLLM with FlashMLA and with ours"),
    "several_gpus": ("several_gpus", "the step, context parallel decode and the engine over several GPUs"),
    "expert_products": (
        "ops.expert_products",
        "experts' products of FP4 and FP8 weights beside bfloat16 and libraries",
    ),
    "serving": ("serving", "the engine in JAX: first token, tokens per second, the attention's part"),
    "serve_load": ("serve_load", "a server under load: first token and time between tokens at a rate of arrivals"),
    "compile_time": ("compile_time", "compilation of the engine's programs by number of layers"),
    "maxtext": ("maxtext", "MaxText's models with dense attention and through this library"),
    "plots": ("plots", "draws docs/plots from results.json"),
}


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The operations that a command names, and the arguments behind them."""
    count = 0
    while words[count:] and words[count] in OPERATIONS:
        count += 1
        if words[count - 1] in ("engines", "several_gpus"):  # whose own first argument may have an operation's name
            break
    return words[:count], words[count:]


def run(name: str, arguments: list[str]) -> int:
    """The exit status of an operation."""
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    return importlib.import_module(f"benchmarks.{OPERATIONS[name][0]}").main() or 0


def main() -> int:
    names, arguments = split(sys.argv[1:])
    if not names:
        print(__doc__)
        print("\n".join(f"    {operation:14} {what}" for operation, (_, what) in OPERATIONS.items()))
        return int(arguments not in ([], ["-h"], ["--help"]))
    if len(names) == 1:
        return run(*names, arguments)
    commands = ([sys.executable, "-m", "benchmarks", name, *arguments] for name in names)
    return max(abs(subprocess.run(command).returncode) for command in commands)


if __name__ == "__main__":
    sys.exit(main())

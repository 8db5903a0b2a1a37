"""vLLM's attention layers of DeepSeek-V4 and V3.2 with its FlashMLA and with ours, on one GPU.

    python -m benchmarks.engines_vllm [--only TEXT]     # needs a Hopper GPU, and what docs/engines.md lists
    python -m benchmarks.engines_vllm --no-gpu          # ours with stand-ins on the CPU: no times, no record

vLLM's backends, metadata builders, index conversions, gathers and compiled operators are its own. Each side is a
process with the same seeds: `theirs` has the backend FLASHMLA_SPARSE, `ours` JAX_SPARSE_MLA. Rows have:

    error            of each side against attention in torch, float32, over the same cache rows as numbers
    apart            of the two sides' outputs; all are relative, root mean square
    served           how often our plugin served, or left or refused, a function that vLLM called in the first call
    *_us             a layer's attention by CUPTI, L2 flushed: `eager`, and `graph`, replayed from a CUDA graph where
                     the batch is a decode; busy_us leaves out what an eager call waits for the host, and host_us
                     is what it takes the host
    graph_error      the replayed output against the eager one

Compiled modules of vLLM that are not installed are listed under `stand_ins`; one that is called fails with its name.
The exit code is 1 where a row shows nothing or too large an error (`benchmarks.vllm.rows.problem`). Writes
engines_vllm.json to $OUT or benchmarks/results, beside the other rows that this very code left there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import engines
from benchmarks.record import version
from benchmarks.vllm.rows import problem

RECORD = "engines_vllm.json"
NOT_RUN = (
    "no server, scheduler, model or weights: metadata builders, backends and layers are made here, and their batches",
    "the indexer: positions are drawn, so that DeepGEMM's logits and vLLM's top-k run in no row",
    "vLLM's graph runner itself: a layer's call is captured by torch.cuda.CUDAGraph",
)


def run(side: str, folder: Path, arguments: list[str]) -> dict:
    return engines.run("benchmarks.vllm.layer_calls", side, folder / f"{side}.pt", ["--side", side, *arguments], {})


def main() -> int:
    about = {"vllm": version("vllm"), "not_run": NOT_RUN}
    return engines.main(__doc__.splitlines()[0], RECORD, run, problem, about)


if __name__ == "__main__":
    sys.exit(main())

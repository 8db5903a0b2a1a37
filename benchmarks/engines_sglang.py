"""SGLang's attention layer of DeepSeek-V4 and V3.2 with FlashMLA and with ours, by SGLang's own test kit, on one GPU.

    python -m benchmarks.engines_sglang [--part kit|graph|served] [--only TEXT]   # needs an H200, SGLang 0.5.23
    python -m benchmarks.engines_sglang --no-gpu              # what tests/engines runs on: stand-ins, no times

SGLang's backends, metadata, caches, Triton kernels and kernels compiled at run time are its own. Each side is a process
that makes the same inputs from the kit's seeds: `theirs` is SGLang alone, `ours` is SGLang with
JAX_SPARSE_MLA_SGLANG=1, which asks us first and may leave a call to FlashMLA. Rows have:

    error            of each side against the kit's dense attention in torch over rows that were not quantised
    apart            of the two sides' outputs; all three are relative, root mean square
    served           how often our plugin served, or left or refused, the function that the row's first call took
    *_us             one call of the layer's attention by CUPTI, L2 flushed: `eager`, and `graph`, replayed from a CUDA
                     graph where SGLang itself has one; busy_us leaves out what an eager call waits for the
                     host, and host_us is what it takes the host
    graph_error      the replayed output against the eager one

Rows that begin with "graph:" follow SGLang's graph runner: its metadata functions before and inside of the capture,
another batch put in, and a replay; their times are of metadata, projections and the layer together. Rows that begin
with "served" have sizes of serving. What was skipped, or failed, says why. Packages that SGLang imports and are not
installed are listed under `stand_ins`; a case that calls one fails with its name. The exit code is 1 where a row shows
nothing or too large an error (`kit.problem`). Writes engines_sglang.json to $OUT or benchmarks/results, beside the
other rows that this very code left there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import engines
from benchmarks.record import version
from benchmarks.sglang import kit

RECORD = "engines_sglang.json"
NOT_RUN = (
    "no server, scheduler, model or weights: the kit builds the attention backends, their caches and batches",
    "the indexer: the kit gives the selection, so that DeepGEMM's logits and SGLang's top-k run in no row",
    "SGLang's DecodeCudaGraphRunner itself: its order of calls is followed over torch.cuda.CUDAGraph",
)


def run(side: str, folder: Path, arguments: list[str]) -> dict:
    switches = {"JAX_SPARSE_MLA_SGLANG": str(int(side == "ours"))}
    return engines.run("benchmarks.sglang.layer_calls", side, folder / f"{side}.pt", arguments, switches)


def main() -> int:
    about = {"transformers": version("transformers"), "not_run": NOT_RUN}
    return engines.main(__doc__.splitlines()[0], RECORD, run, kit.problem, about, parts=kit.PARTS)


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's attention layers of DeepSeek-V4 and V3.2 with its FlashMLA and with ours, on one GPU.

    python -m benchmarks.engines_vllm [--only TEXT]     # needs a Hopper GPU, and what docs/engines.md lists
    python -m benchmarks.engines_vllm --no-gpu          # ours with stand-ins on the CPU: no times, no record

vLLM's backends, metadata builders, index conversions, gathers and compiled operators are its own. Each side is a
process with the same seeds: `theirs` has the backend FLASHMLA_SPARSE, `ours` JAX_SPARSE_MLA. Rows have:

    error            of each side against attention in torch, float32, over the same cache rows as numbers
    apart            of the two sides' outputs; all are relative, root mean square
    served           how often our plugin served, or left or refused, a function that vLLM called in the first call
    *_us             a layer's attention by CUPTI, L2 flushed: `eager`, and `graph`, replayed from a CUDA graph where
                     the batch is a decode; host_us is what an eager call takes the host
    graph_error      the replayed output against the eager one

Compiled modules of vLLM that are not installed are listed under `stand_ins`; one that is called fails with its name.
The exit code is 1 where a row shows nothing or too large an error (`problem`). Writes engines_vllm.json to $OUT or
benchmarks/results, beside the other rows that this very code left there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import engines
from benchmarks.record import earlier, environment, results_folder, version, write_json

RECORD = "engines_vllm.json"
ERROR = 0.004  # of a bfloat16 result: 0.0017 is measured
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
# How the cases begin that have few enough rows of 64 or 128 heads for the router to leave some to FlashMLA.
LEFT = ("V3.2", "V4, ratio 1, served 64x8192")
NOT_RUN = (
    "no server, scheduler, model or weights: metadata builders, backends and layers are made here, and their batches",
    "the indexer: positions are drawn, so that DeepGEMM's logits and vLLM's top-k run in no row",
    "vLLM's graph runner itself: a layer's call is captured by torch.cuda.CUDAGraph",
)


def problem(row: dict) -> str | None:
    """Why a row shows nothing, or something wrong; None if all is well."""
    for key in ("failed", "skipped"):
        if key in row:
            return f"{key}: {row[key]}"
    # Prefill is FlashMLA's, and decode may be where the router leaves it; ours must have been asked all the same.
    served = {tuple(key.split(" ")) for key in row["served"]}
    may_be = {(PREFILL, "ours"), (PREFILL, "theirs"), (DECODE, "ours")}
    may_be |= {(DECODE, "theirs")} if row["case"].startswith(LEFT) else set()
    wanted = PREFILL if row["case"].endswith("bf16") else DECODE  # vLLM's decode from bfloat16 rows is its prefill
    if not any(function == wanted for function, _ in served) or not served <= may_be:
        return f"ours did not serve it: {row['served']}"
    for key in ("error", "graph_error"):
        for side, error in row.get(key, {}).items():
            if not error <= ERROR:  # nor is NaN
                return f"{key} of {side} is {error}, above {ERROR}"
    return None if len(row.get("error", {})) == 2 else "a side has no error"


def run(side: str, folder: Path, arguments: list[str]) -> dict:
    return engines.run("benchmarks.vllm.layer_calls", side, folder / f"{side}.pt", ["--side", side, *arguments], {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="cases with this text in their names")
    parser.add_argument("--no-gpu", action="store_true", help="with the stand-ins of tests/engines; writes no record")
    arguments = parser.parse_args()
    passed = [word for text in arguments.only for word in ("--only", text)] + ["--no-gpu"] * arguments.no_gpu
    with tempfile.TemporaryDirectory() as folder:
        sides = ["ours"] if arguments.no_gpu else engines.SIDES  # FlashMLA has no kernel for a CPU
        found = {side: run(side, Path(folder), passed) if side in sides else engines.NOTHING for side in engines.SIDES}
    result = engines.rows(found["theirs"]["results"], found["ours"]["results"])
    print(engines.table(result))
    bad = [f"{side}: exit status {status}" for side in engines.SIDES if (status := found[side]["exit_status"])]
    if arguments.no_gpu:
        bad += [f"{row['case']}: {row['failed']}" for row in result if "failed" in row]
    else:
        bad += [f"{row['case']}: {why}" for row in result if (why := problem(row))]
        about = {"vllm": version("vllm"), "not_run": NOT_RUN, "stand_ins": found["ours"]["stand_ins"]}
        about |= {"exit_status": {side: found[side]["exit_status"] for side in engines.SIDES}}
        before = [row for row in earlier(RECORD).get("rows", []) if row["case"] not in {row["case"] for row in result}]
        write_json(results_folder() / RECORD, environment() | about | {"rows": before + result})
    print("\n".join(bad))
    return int(bool(bad) or not result)


if __name__ == "__main__":
    sys.exit(main())

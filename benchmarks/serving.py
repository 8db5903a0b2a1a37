"""`jax-sparse-mla bench` of the presets on this machine's GPU, as a record.

    python -m benchmarks.serving [--new-tokens 64] [--presets v4 v4-flash-slice] [--contexts 2048 8192 ...]

The small V4 model, at the prompt length of `generate` too, and the true-size slice of V4-Flash, 51 GiB of weights,
which takes about 100 s a context (131,072 tokens: 190). Each context is a process of its own. After each, writes
serving.json to $OUT or benchmarks/results, beside the runs of other contexts that stand there, of the same device and
versions. Each run has its own commit and digest of the code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import environment, latest, results_folder, write_json

CONTEXTS = {"v4": (2048, 2734, 8192, 131_072), "v4-flash-slice": (2048, 8192, 131_072)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--presets", nargs="*", choices=CONTEXTS, default=list(CONTEXTS))
    parser.add_argument("--contexts", nargs="*", type=int, help="of those above; all by default")
    args = parser.parse_args()
    chosen = [
        (preset, context)
        for preset in args.presets
        for context in CONTEXTS[preset]
        if not args.contexts or context in args.contexts
    ]
    here, before, failed = environment(), latest("serving.json"), 0
    same = all(before.get(name) == here[name] for name in ("device", "versions"))
    runs = {(run["preset"], run["context"]): run for run in before["runs"]} if same else {}
    call = [sys.executable, "-c", "import sys; from jax_sparse_mla.cli import main; sys.exit(main())", "bench"]
    for preset, context in chosen:
        arguments = ["--preset", preset, "--requests", "1,8,64", "--contexts", str(context)]
        arguments += ["--new-tokens", str(args.new_tokens)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "bench.json")
            code = subprocess.run([*call, *arguments, "--json", str(path)]).returncode
            if code:
                failed = code
                continue
            found = json.loads(path.read_text())
        own = {"commit": here["commit"], "code": here["code"], "context": context}
        runs[preset, context] = own | {"command": f"jax-sparse-mla bench {' '.join(arguments)}"} | found
        write_json(results_folder() / "serving.json", here | {"runs": list(runs.values())})
    return failed


if __name__ == "__main__":
    sys.exit(main())

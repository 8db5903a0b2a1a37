"""`jax-sparse-mla bench` of the presets on this machine's GPU, as a record.

    python -m benchmarks.serving [--new-tokens 64]

The small V4 model at the prompt length of `generate`, and the true-size slice of V4-Flash at 8,192 tokens; 51 GiB of
weights. Each is a process of its own. Writes serving.json to $OUT or benchmarks/results after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import environment, results_folder, write_json

RUNS = (
    ("--preset", "v4", "--requests", "1,8,64", "--contexts", "2734"),
    ("--preset", "v4-flash-slice", "--requests", "1,8,64", "--contexts", "8192"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    content, failed = environment() | {"runs": []}, 0
    call = [sys.executable, "-c", "import sys; from jax_sparse_mla.cli import main; sys.exit(main())", "bench"]
    for run in RUNS:
        arguments = [*run, "--new-tokens", str(args.new_tokens)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "bench.json")
            code = subprocess.run([*call, *arguments, "--json", str(path)]).returncode
            if code:
                failed = code
                continue
            found = json.loads(path.read_text())
        command = f"jax-sparse-mla bench {' '.join(arguments)}"
        content["runs"].append({"commit": content["commit"], "command": command} | found)
        write_json(results_folder() / "serving.json", content)
    return failed


if __name__ == "__main__":
    sys.exit(main())

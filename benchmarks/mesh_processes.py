"""`generate` over two devices, in one process and in a process for each; and what follows when one process is killed.

    python -m benchmarks.mesh_processes [--layouts 2x1,1x2] [--preset v4] [--device cuda]

A layout is SHARESxDEVICES as in `generate --mesh`. Each run checks its tokens against one device's; the tokens of two
processes are compared with those of one, too. Then one of two processes is killed while it decodes: the other must end
by itself with an error within the time-out, and both must serve again when they are started anew. Writes the sections
`generate` and `faults` of two_gpus.json, in $OUT or benchmarks/results; its exit status is 1 where something of this
does not hold. With `--device cpu` a process has one or two virtual CPU devices.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import section, write_section

LAYOUTS = "2x1,1x2"
DEVICES = 2
COMMAND = [sys.executable, "-u", "-c", "import sys; from jax_sparse_mla.cli import main; sys.exit(main())", "generate"]
TIMEOUT = 15  # seconds until a process that has died is noticed
LIMIT = 300  # seconds for a run, compilation included
# What jaxlib says of another process that has ended, the last such line; else the first line of an error.
REASONS = re.compile(r"task died|heartbeat|unhealthy|UNAVAILABLE"), re.compile(r"rror|fail")


class Process:
    """A run of `generate`, with what it says in a file.

    Args:
      arguments: of the command.
      devices: the numbers of its GPUs, or how many virtual CPU devices it has.
    """

    def __init__(self, arguments: Sequence[object], devices: Sequence[int], device: str):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        environment = dict(os.environ)
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        else:
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={len(devices)}"
        command = [*COMMAND, *map(str, arguments), "--device", device]
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stdout=self._file, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        file = self._file.fileno()
        # The process writes at the file's position, which a plain read would move.
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def wait(self, limit: float = LIMIT) -> int | None:
        """The exit status; None if it had to be killed."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def wait_for(self, text: str, limit: float = LIMIT) -> None:
        """Until it has said so, or has ended."""
        end = time.monotonic() + limit
        while text not in self.said and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)

    @property
    def tokens(self) -> list[str]:
        return re.findall(r"tokens \[(.*)\]", self.said)


def together(arguments: Sequence[object], device: str, **options: Any) -> list[Process]:
    """A process for each device."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = [*arguments, "--coordinator", f"127.0.0.1:{port}", "--num-processes", DEVICES]
    shared += ["--process-timeout", options.get("timeout", 60)]
    return [Process([*shared, "--process-id", i], [i], device) for i in range(DEVICES)]


def generated(layout: str, arguments: Sequence[object], device: str) -> dict:
    """Runs a layout in one process and in two."""
    arguments = [*arguments, "--mesh", layout]
    one = Process(arguments, range(DEVICES), device)
    status = one.wait()
    several = together(arguments, device)
    statuses = [process.wait() for process in several]
    result = {
        "one_process": status,
        "processes": statuses,
        "check": _line(one.said, "check"),
        "tokens": _line(one.said, "tokens  "),
        "check_of_processes": _line(several[0].said, "check"),
        "same_tokens": bool(one.tokens) and one.tokens == several[0].tokens,
    }
    result["holds"] = status == 0 and statuses == [0] * DEVICES and result["same_tokens"]
    if not result["holds"]:
        for process in (one, *several):
            print(process.said[-2000:], file=sys.stderr)
    return result


def killed(layout: str, arguments: Sequence[object], device: str, long: int, which: int) -> dict:
    """Kills one of two processes while they decode, and starts both again."""
    decoding = [*arguments, "--mesh", layout, "--no-check"]
    several = together([*decoding, "--max-new-tokens", long], device, timeout=TIMEOUT)
    several[0].wait_for("extend  ")
    time.sleep(3)
    running = all(process.process.poll() is None for process in several)
    several[which].process.kill()
    started = time.monotonic()
    survivor = several[1 - which]
    status = survivor.wait(4 * TIMEOUT)
    seconds = time.monotonic() - started
    again = [process.wait() for process in together(decoding, device)]
    result = {
        "killed": which,
        "both_were_running": running,
        "survivor": status,
        "seconds": round(seconds, 1),
        "said": reason(survivor.said),
        "started_again": again,
    }
    result["holds"] = running and status not in (0, None) and seconds <= 2 * TIMEOUT and again == [0] * DEVICES
    return result


def reason(text: str) -> str:
    """Of all that a process said, the line that says why it ended; frames of its stack do not."""
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("@")]
    died, errors = ([line for line in lines if wanted.search(line)] for wanted in REASONS)
    return (died[-1:] or errors[:1] or [""])[0][:400]


def _line(text: str, start: str) -> str:
    return next((line for line in text.splitlines() if line.startswith(start)), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--preset", default="v4")
    parser.add_argument("--prompt-file", type=Path, help="what to continue; the command's own text by default")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--new", type=int, default=8, help="tokens to make for each request")
    parser.add_argument("--long", type=int, default=20_000, help="tokens of the run in which a process is killed")
    parser.add_argument("--only", choices=("generate", "faults"), help="one of the two sections")
    parser.add_argument(
        "--killed", type=int, nargs="+", default=range(DEVICES), help="which processes, one after another"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    arguments = ["--preset", args.preset, "--requests", args.requests, "--max-new-tokens", args.new]
    arguments += ["--prompt-file", args.prompt_file] if args.prompt_file else []
    runs, faults = {}, section("two_gpus.json", "faults")
    for layout in [] if args.only == "faults" else args.layouts.split(","):
        runs[layout] = generated(layout, arguments, args.device)
        print(layout, runs[layout], flush=True)
        write_section("two_gpus.json", "generate", runs)
    for which in [] if args.only == "generate" else args.killed:
        name = f"{args.layouts.split(',')[-1]}, process {which}"
        faults[name] = killed(args.layouts.split(",")[-1], arguments, args.device, args.long, which)
        print(name, faults[name], flush=True)
        write_section("two_gpus.json", "faults", faults)
    return int(not all(result["holds"] for result in (*runs.values(), *faults.values())))


if __name__ == "__main__":
    sys.exit(main())

"""`generate` in several processes, which serve the same requests together: how they meet, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable

from jax_sparse_mla.cli.arguments import natural, positive_int
from jax_sparse_mla.cli.endings import REFUSED, one_line, report
from jax_sparse_mla.cli.rendezvous import NoMeeting, address, meet

FAILED = 1  # the exit status of a process that failed after all had met


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes", "with --mesh; all get the same other arguments")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--num-processes", type=positive_int, metavar="N")
    group.add_argument("--process-id", type=natural, metavar="I", help="of this process, 0 … N − 1; 0 prints the text")
    timeout = "how long to wait for the others to start, and until one that has died is noticed (default: 60)"
    group.add_argument("--process-timeout", type=positive_int, default=60, metavar="SECONDS", help=timeout)


def are_several(args: argparse.Namespace) -> bool:
    """Whether there are several processes; a ValueError names arguments that do not go together."""
    present = [getattr(args, name) is not None for name in ("coordinator", "num_processes", "process_id")]
    if not any(present):
        return False
    if not all(present):
        raise ValueError("--coordinator, --num-processes and --process-id go together")
    if args.mesh is None:
        raise ValueError("--coordinator needs --mesh: processes serve over one mesh")
    if args.process_id >= args.num_processes:
        raise ValueError(f"--process-id must be below --num-processes {args.num_processes}, got {args.process_id}")
    address(args.coordinator)
    return True


def run_as_one(args: argparse.Namespace, command: Callable[[], int]) -> int:
    """Runs a command as one of several processes, and ends the process.

    Process 0 prints. Another prints what it had to say to stderr, where its status is not 0. A process that fails ends
    at once instead of waiting for the others, which notice it within the time-out.

    Returns:
      2 if the processes do not meet, and a line says why: one does not come in time, the port is taken, two have one
      number. Else it does not return.
    """
    import jax
    from jax.experimental import multihost_utils

    sys.stdout.reconfigure(line_buffering=True)  # jaxlib ends a process at once, and what is buffered is lost
    print(
        f"jax-sparse-mla: process {args.process_id} waits {args.process_timeout} s for {args.num_processes} processes "
        f"to meet at {args.coordinator}",
        file=sys.stderr,
        flush=True,
    )
    try:
        meet(args.coordinator, args.num_processes, args.process_id, args.process_timeout)
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            initialization_timeout=args.process_timeout,
            heartbeat_timeout_seconds=args.process_timeout,
        )
    except (NoMeeting, RuntimeError, ValueError) as error:
        line = one_line(f"the processes do not meet at {args.coordinator}: {error}")
        print(f"jax-sparse-mla generate: {line}", file=sys.stderr)
        return REFUSED
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said if args.process_id else sys.stdout):
            status = command()
        if status != REFUSED:
            multihost_utils.sync_global_devices("served")
    except BaseException as error:
        status = report(error, "jax-sparse-mla generate", args.verbose)
        status = FAILED if status == REFUSED else status
        print(f"jax-sparse-mla: process {args.process_id} failed; the others will end too", file=sys.stderr)
    else:
        # Process 0 has the service that all are connected to; now and then jaxlib aborts where they leave it in order.
        time.sleep(0 if args.process_id else 1)
    if status and args.process_id:
        print(f"process {args.process_id}:\n{said.getvalue()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

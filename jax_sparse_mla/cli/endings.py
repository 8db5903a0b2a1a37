"""How the command ends: its exit status, and one line on standard error where something goes wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

# Exit statuses: nothing could be run, or a fault; and what a shell says of programs that these signals end.
REFUSED, INTERRUPTED, NOBODY_READS = 2, 130, 141
LONGEST_LINE = 2000  # characters; a file can have names of any length


def one_line(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …"


def report(error: BaseException, command: str, verbose: bool) -> int:
    """Prints one line for what a command raised, with `verbose` where it was raised too; returns the exit status."""
    if isinstance(error, BrokenPipeError):
        _drop(sys.stdout, sys.stderr)
        return NOBODY_READS
    if isinstance(error, KeyboardInterrupt):
        print(f"{command}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    if verbose:
        traceback.print_exception(error)
    where = "" if verbose else " (--verbose prints where)"
    print(f"{command}: {one_line(f'{type(error).__name__}: {error}')}{where}", file=sys.stderr, flush=True)
    return REFUSED


def status_of(run: Callable[[], int], command: str, verbose: bool) -> int:
    """The exit status of a command, whatever it raises; only argparse's own SystemExit passes."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a text may have characters that a terminal has not
    try:
        try:
            return run()
        finally:
            _flush()
    except SystemExit:
        raise
    except BaseException as error:  # among them panics of Rust, which are no Exception
        try:
            status = report(error, command, verbose)
        except OSError:  # nobody reads standard error, either
            _drop(sys.stdout, sys.stderr)
            status = NOBODY_READS
    if status == INTERRUPTED and threading.active_count() > 1:
        os._exit(status)  # else Python waits for the thread that loads a check's model
    return status


def _flush() -> None:
    try:
        print(end="", flush=True)
    except OSError:
        _drop(sys.stdout)  # else Python tries again when it ends, and says so
        raise


def _drop(*streams: Any) -> None:
    """Sends what is left to print nowhere."""
    for stream in streams:
        with contextlib.suppress(AttributeError, OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())

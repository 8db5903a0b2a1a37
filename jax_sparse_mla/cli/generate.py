"""`jax-sparse-mla generate`: a DeepSeek-V3.2, V4 or GLM-5 model generates text through this library."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from jax_sparse_mla import activity
from jax_sparse_mla.cli import processes
from jax_sparse_mla.cli.arguments import add_engine, backend_name, natural, positive_int, probability
from jax_sparse_mla.cli.checks import begin_check
from jax_sparse_mla.cli.endings import REFUSED, one_line
from jax_sparse_mla.cli.start import announce_ahead
from jax_sparse_mla.cli.status import Status
from jax_sparse_mla.serving.presets import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, source = parser.add_argument, parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="a transformers checkpoint: DeepSeek-V3.2, V4, GLM-5 or 5.3")
    preset = "a small random model with the true head dimensions (default: v4)"
    source.add_argument("--preset", choices=PRESETS, help=preset)
    add("--seed", type=natural, default=0, help="of the preset's weights, the page order and the draws")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="the text to continue; a long English text by default")
    text.add_argument("--prompt-file", type=Path, metavar="FILE")
    add("--max-new-tokens", type=positive_int, default=16, metavar="N")
    temperature = "draw tokens at this temperature (default: 0, none)"
    add("--temperature", type=float, default=0.0, metavar="T", help=temperature)
    add("--top-p", type=float, default=1.0, metavar="P", help="of the most likely tokens that sum to P")
    add("--stream", action="store_true", help="print the first request's text as it is generated")
    add("--requests", type=positive_int, default=1, metavar="N", help="serve N requests of different lengths at once")
    add_engine(parser)
    backends = "serve the same tokens with each of these backends too, and compare the logits"
    add("--compare-backends", type=backend_names, default=[], metavar="NAME,…", help=backends)
    oracle = "with --speculative-steps: propose plain decoding's own token with this probability"
    add("--draft-oracle", type=probability, default=0.0, metavar="P", help=oracle)
    no_check = (
        "skip the comparison with transformers' eager attention (with --mesh: with one device's tokens), and of "
        "speculative with plain decoding"
    )
    add("--no-check", action="store_true", help=no_check)
    shown = "a line for each step, request, layer and kernel, the text of untrained models, and a fault's traceback"
    add("--verbose", action="store_true", help=shown)
    processes.add_arguments(parser)


def backend_names(text: str) -> list[str]:
    """An argparse type: names of attention backends between commas."""
    return [backend_name(name) for name in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Generates, prints, compares; with several processes it ends the process.

    Returns:
      0 if every comparison passes (or none was asked for), 1 if one fails, 2 if there is nothing to run: no prompt,
      no such file, no such device, no model that this library serves, a backend that cannot serve it here, an oracle
      without drafts, no check or a package missing that it needs, too little memory; if the check cannot load its
      model; and `endings.status_of` for whatever is raised.
    """
    try:
        together = processes.are_several(args)
    except ValueError as error:
        return refused(args, error)
    args.status = Status()
    activity.show = args.status.working
    try:
        return processes.run_as_one(args, lambda: _status(args)) if together else _status(args)
    finally:
        activity.show = contextlib.nullcontext


def _status(args: argparse.Namespace) -> int:
    """As `run`. However it ends, the check's process has ended then."""
    with contextlib.ExitStack() as ending:
        check = None
        try:
            if args.mesh is None and not args.no_check:
                check = begin_check()  # first of all: its imports take seconds
                ending.callback(check.close)
            announce_ahead(args)
        except (ImportError, OSError) as error:
            return refused(args, error)
        with activity.show("importing JAX"):
            from jax_sparse_mla.cli import generation
        return generation.run(args, check)


def refused(args: argparse.Namespace, error: Exception) -> int:
    """Says why there is nothing to run; returns the exit status."""
    if isinstance(error, BrokenPipeError):
        raise error
    what = "this needs torch and transformers (the extra [hf]): " if isinstance(error, ImportError) else ""
    print(f"jax-sparse-mla generate: {one_line(f'{what}{error}')}", file=sys.stderr)
    if what and not args.no_check:
        print("--no-check goes without them", file=sys.stderr)
    return REFUSED

"""The command `jax-sparse-mla`: `generate` runs a model, `serve` serves one, `doctor` tells what would serve it."""

from __future__ import annotations

import argparse
import sys

from jax_sparse_mla import __version__
from jax_sparse_mla.cli.endings import status_of


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    return status_of(lambda: _run(argv), " ".join(["jax-sparse-mla", *argv[:1]]), "--verbose" in argv)


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="jax-sparse-mla", description="Sparse MLA for DeepSeek-V3.2 and V4 in JAX")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="print the device, the backends, and what would serve each model")
    generate = commands.add_parser("generate", help="generate text with a DeepSeek-V3.2 or V4 model")
    serve = commands.add_parser("serve", help="serve a model to clients of OpenAI's protocol")
    if argv[:1] == ["serve"]:
        from jax_sparse_mla.cli import serve as command

        command.add_arguments(serve)
        return command.run(parser.parse_args(argv))
    if argv[:1] == ["generate"]:
        from jax_sparse_mla.cli import generate as command

        command.add_arguments(generate)
        return command.run(parser.parse_args(argv))
    from jax_sparse_mla.cli import doctor as command

    command.add_arguments(doctor)
    return command.run(parser.parse_args(argv))

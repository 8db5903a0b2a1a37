"""Types of command-line arguments, and those of all commands that serve."""

from __future__ import annotations

import argparse
from typing import Any

from jax_sparse_mla.serving.options import MAX_DRAFTS, PREFILL_BACKENDS, EngineOptions


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds what an engine is made from, but for the model."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where JAX has it")
    batch = "requests served at once, with --mesh by each share (default: %(default)s)"
    add("--max-batch", type=positive_int, default=8, metavar="N", help=batch)
    chunk = "of a prefill step (default: so many that an expert has 128 rows on average, from 1,024 to 8,192)"
    add("--chunk-size", type=positive_int, metavar="TOKENS", help=chunk)
    stored = "multiply FP8 and FP4 weights out to the embedding's dtype (default: products read them as stored)"
    add("--multiply-out", action="store_true", help=stored)
    add("--kv-cache", choices=("bf16", "fp8"), default="fp8")
    prefill = "prefill from a gathered bf16 workspace, or from the paged cache (default: as the plan says)"
    add("--prefill-backend", choices=PREFILL_BACKENDS, help=prefill)
    backend = "of the attention, as `doctor --verbose` names them (default: the router's choice)"
    add("--backend", type=backend_name, metavar="NAME", help=backend)
    drafts = (
        "draft K tokens at a time with the checkpoint's draft layer or drafter or, without one, the model's first "
        f"layer, verify them in one step; at most {MAX_DRAFTS} (default: plain decoding)"
    )
    add("--speculative-steps", type=positive_int, metavar="K", help=drafts)
    mesh = (
        "over several devices: so many shares of the requests, heads and experts of each over so many devices. "
        "2x1: requests over two devices, 1x2: heads and experts over two"
    )
    add("--mesh", type=mesh_shape, metavar="SHARESxDEVICES", help=mesh)
    pages = "the devices of each share of --mesh share the pages of its KV cache too, for contexts that one cannot hold"
    add("--context-parallel", action="store_true", help=pages)


def options_of(args: argparse.Namespace, **others: Any) -> EngineOptions:
    """The options that arguments of `add_engine` and `--seed` ask for, and others."""
    return EngineOptions(
        bf16_cache=args.kv_cache == "bf16",
        prefill_backend=args.prefill_backend,
        chunk_size=args.chunk_size,
        seed=args.seed,
        speculative_steps=args.speculative_steps or 0,
        backend=args.backend,
        context_parallel=args.mesh[1] if args.context_parallel else 1,
        **others,
    )


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return _at_least(1, int(text))


def natural(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return _at_least(0, int(text))


def _at_least(least: int, value: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def backend_name(text: str) -> str:
    """An argparse type: the name of an attention backend."""
    from jax_sparse_mla.attention.backend import BACKENDS  # imports JAX

    if text not in BACKENDS:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(BACKENDS)}, got {text!r}")
    return text


def mesh_shape(text: str) -> tuple[int, int]:
    """An argparse type: two numbers with an x between them."""
    shares, x, devices = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"must be SHARESxDEVICES, for instance 2x1, got {text!r}")
    return positive_int(shares), positive_int(devices)


def probability(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be 0 … 1, got {value}")
    return value

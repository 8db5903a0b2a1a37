"""`jax-sparse-mla generate`: its arguments. The torch face, which does the work, is imported for this command only."""

from __future__ import annotations

import argparse
from pathlib import Path

from jax_sparse_mla.attention.route import BACKENDS
from jax_sparse_mla.cli.arguments import positive_int, probability


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments.

    Raises:
      ImportError: torch or transformers are missing, or too old.
    """
    from sparse_mla_torch.hf import presets
    from sparse_mla_torch.hf.comparison import MIN_COSINE
    from sparse_mla_torch.hf.engine import PREFILL_BACKENDS

    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="a transformers checkpoint of a DeepSeek-V3.2 or V4 model")
    source.add_argument(
        "--preset", choices=presets.PRESETS, help="a small random model with the true head dimensions (default: v4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the preset's weights and of the page order")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="the text to continue; a long English text by default")
    text.add_argument("--prompt-file", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch and JAX both have it")
    parser.add_argument("--max-new-tokens", type=positive_int, default=16, metavar="N")
    parser.add_argument(
        "--requests", type=positive_int, default=1, metavar="N", help="serve N requests of different lengths at once"
    )
    parser.add_argument("--max-batch", type=positive_int, default=8, metavar="N", help="requests served at once")
    parser.add_argument("--chunk-size", type=positive_int, default=1024, metavar="TOKENS", help="of a prefill step")
    parser.add_argument("--kv-cache", choices=sorted(MIN_COSINE), default="fp8")
    parser.add_argument(
        "--prefill-backend",
        choices=PREFILL_BACKENDS,
        help="prefill from a gathered bf16 workspace, or from the paged cache (default: as the plan says)",
    )
    parser.add_argument("--backend", choices=BACKENDS, help="of the attention (default: the router's choice)")
    parser.add_argument(
        "--compare-backends",
        type=backend_names,
        default=[],
        metavar="NAME,…",
        help="serve the same tokens with each of these backends too, and compare the logits",
    )
    parser.add_argument(
        "--speculative-steps",
        type=positive_int,
        metavar="K",
        help="draft K tokens at a time with the model's first layer, verify them in one step (default: plain decoding)",
    )
    parser.add_argument(
        "--draft-oracle",
        type=probability,
        default=0.0,
        metavar="P",
        help="with --speculative-steps: propose plain decoding's own token with this probability",
    )
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="skip the comparison with transformers' eager attention, and of speculative with plain decoding",
    )


def backend_names(text: str) -> list[str]:
    """An argparse type."""
    names = text.split(",")
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(BACKENDS)}, got {name!r}")
    return names


def run(args: argparse.Namespace) -> int:
    """The exit status; `sparse_mla_torch.hf.generate.run` has what each means."""
    from sparse_mla_torch.hf import generate

    return generate.run(args)

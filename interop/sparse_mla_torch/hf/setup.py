"""The torch engine of `jax-sparse-mla generate`; as `jax_sparse_mla.cli.setup.JaxSetup`."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable
from typing import Any

import jax
import torch

from jax_sparse_mla.serving.presets import DEFAULT_PRESET, ByteTokenizer, load_tokenizer
from jax_sparse_mla.serving.speculative import DraftOracle
from sparse_mla_torch.hf import presets
from sparse_mla_torch.hf.comparison import TorchRun
from sparse_mla_torch.hf.engine import Engine, EngineOptions, Request
from sparse_mla_torch.hf.speculative import SpeculativeDecoder


class TorchSetup:
    """A transformers model for the torch engine; attributes as `JaxSetup`."""

    def __init__(self, args: argparse.Namespace):
        device = _device(args.device)
        self.device = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        if args.model is not None:
            self.name, model = args.model, presets.load_checkpoint(args.model)
            self.tokenizer = load_tokenizer(args.model, model.config.get_text_config().vocab_size)
        else:
            preset = args.preset or DEFAULT_PRESET
            self.name = f"preset {preset}, seed {args.seed} (random weights)"
            model, self.tokenizer = presets.build_preset(preset, args.seed), ByteTokenizer()
        self.torch_model = model.to(device)
        eos = model.config.get_text_config().eos_token_id
        eos = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        self.eos_token_ids = () if isinstance(self.tokenizer, ByteTokenizer) else eos
        self._engine = Engine(self.torch_model, EngineOptions(max_len=2, max_batch=1))
        self.spec = self._engine.spec

    @property
    def ratios(self) -> tuple[int, ...]:
        return self._engine.ratios

    def new_engine(self, options: EngineOptions) -> Engine:
        return Engine(self.torch_model, options)

    def serve(
        self,
        engine: Engine,
        requests: list[Request],
        on_step: Callable[..., None] = lambda *_: None,
        drafts: int = 0,
        oracle: DraftOracle | None = None,
    ) -> collections.Counter[int]:
        decoder = SpeculativeDecoder(engine, drafts, oracle) if drafts else None
        engine.run(requests, on_step, decoder.advance if decoder else None)
        return decoder.accepted if decoder else collections.Counter()

    def calls(self, engine: Engine) -> list[tuple[Any, int, str, str]]:
        routes = sorted(engine.routes.items(), key=lambda route: route[0][1:])
        return [(mode, ratio, *call) for (mode, ratio, _), calls in routes for call in sorted(calls)]

    def traced_run(self, engine: Engine) -> TorchRun:
        return TorchRun(engine)


def _device(wanted: str | None) -> torch.device:
    """CUDA where torch and JAX both have it, else the CPU.

    Raises:
      ValueError: CUDA is wanted and one of them lacks it.
    """
    if wanted != "cpu" and torch.cuda.is_available() and jax.default_backend() == "gpu":
        return torch.device("cuda", 0)
    if wanted == "cuda":
        lacking = f"JAX {jax.__version__}" if torch.cuda.is_available() else f"torch {torch.__version__}"
        raise ValueError(f"--device cuda: {lacking} has no GPU here")
    jax.config.update("jax_platforms", "cpu")
    return torch.device("cpu")

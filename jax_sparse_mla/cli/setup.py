"""The engine of `generate`: its model, tokenizer and device."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving import presets
from jax_sparse_mla.serving.bench import bytes_of_a_device, check_memory, size_of
from jax_sparse_mla.serving.engine import Engine, EngineOptions
from jax_sparse_mla.serving.mesh import HEADS, REQUESTS, MeshEngine, cut_model, new_mesh
from jax_sparse_mla.serving.model import Model, load
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.speculative import DraftOracle


class JaxSetup:
    """A model for the JAX engine.

    Attributes:
      name: what is served, in words. device: in words.
      model, params: of the JAX engine.
      tokenizer: encodes and decodes. eos_token_ids: tokens that end a text; none for the tokenizer of bytes.

    Raises:
      OSError, ValueError: no such folder, device or model, or a tokenizer that cannot be loaded.
      ImportError: torch or transformers are missing, or too old, and the check needs them.
    """

    def __init__(self, args: argparse.Namespace):
        self.device = choose_device(args.device)
        if args.mesh is None and not args.no_check:
            importlib.import_module("sparse_mla_torch.hf")
        self._args = args
        self._loading: Future | None = None
        self._preset = args.preset or presets.DEFAULT_PRESET  # argparse's own would not conflict with --model
        if args.model is not None:
            self.name = args.model
            if not os.path.isdir(args.model):
                raise FileNotFoundError(f"no checkpoint folder {args.model}")
            self.model, self.params = load(args.model, draft_layer=bool(args.speculative_steps))
            self.tokenizer = presets.load_tokenizer(args.model, self.model.vocab_size)
        else:
            self.name = f"preset {self._preset}, seed {args.seed} (random weights)"
            self.model = Model.from_config(presets.CONFIGS[self._preset])
            self.params = self.model.from_named_arrays(self.model.random_arrays(args.seed))
            self.tokenizer = presets.ByteTokenizer()
        bytes_only = isinstance(self.tokenizer, presets.ByteTokenizer)
        self.eos_token_ids = () if bytes_only else self.model.eos_token_ids

    def load_torch_model(self) -> Any:
        """transformers' model with the same weights, for the check.

        A checkpoint's stays on the CPU: the JAX model may leave no room for it on the GPU.
        """
        from sparse_mla_torch.hf.presets import build_preset, load_checkpoint, on_device_of_jax

        if self._args.model is not None:
            return load_checkpoint(self._args.model)
        return on_device_of_jax(build_preset(self._preset, self._args.seed))

    @property
    def torch_model(self) -> Any:
        """What `load_torch_model` returns; it has run since the engine was made, and this waits for its end."""
        return self._loading.result()

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compress ratio of each layer."""
        return self.model.ratios

    def new_engine(self, options: EngineOptions) -> Engine:
        engine = Engine(self.model, self.params, options)
        if not self._args.no_check:  # its imports take as long as the first programs
            self._loading = ThreadPoolExecutor(1).submit(self.load_torch_model)
        return engine

    def serve(
        self,
        engine: Engine,
        requests: list[Request],
        on_step: Callable[..., None] = lambda *_: None,
        drafts: int = 0,
        oracle: DraftOracle | None = None,
    ) -> collections.Counter[int]:
        """Serves requests, by plain decoding without drafts; returns how many rounds of a request kept how many."""
        engine.drafts, engine.propose = drafts, oracle.propose if oracle else None
        engine.accepted = collections.Counter({count: 0 for count in range(drafts + 1)})
        engine.run(requests, on_step)
        return engine.accepted

    def calls(self, engine: Engine) -> list[tuple[Any, int, str, str]]:
        """What the programs that ran attend with: (mode, compress ratio, phase, backend)."""
        return [
            (program.mode, ratio, phase, backend)
            for program, calls in engine.routes.items()
            for phase, backend in sorted(calls)
            for ratio in sorted(set(self.ratios))
        ]

    def traced_run(self, engine: Engine) -> Any:
        """The engine's latest run, for the comparison with transformers."""
        from sparse_mla_torch.hf.comparison import JaxRun

        return JaxRun(engine, self.torch_model)


class MeshSetup(JaxSetup):
    """A model for the JAX engine over a mesh of devices; its check compares with one device, and needs no torch.

    Attributes:
      mesh: of all devices that serve. `spec` is that of one of them, with its heads.
      whole: the model and parameters of one device, for the check; None without one.

    Raises:
      OSError, ValueError: as `JaxSetup`; too few devices, or a model that they cannot share.
    """

    def __init__(self, args: argparse.Namespace):
        choose_device(args.device)
        self.mesh = new_mesh(*args.mesh)
        with jax.default_device(_host()):  # no device needs room for the whole model, but for the check
            super().__init__(args)
            self.whole = None if args.no_check else (self.model, self.params)
            self.model, self.params = cut_model(self.model, self.params, self.mesh)
        shares, devices = self.mesh.shape[REQUESTS], self.mesh.shape[HEADS]
        self.device += f", a mesh of {shares} shares of the requests and {devices} devices over heads and experts"
        if jax.process_count() > 1:
            self.device += f", in {jax.process_count()} processes"

    def new_engine(self, options: EngineOptions) -> Engine:
        engine = MeshEngine(self.model, self.params, options, self.mesh)
        if self.whole is not None:
            weights, caches = map(bytes_of_a_device, (engine.params, engine.state))
            check_memory(
                "the check on one device, which --no-check leaves out, needs",
                weights + 2 * caches + size_of(self.whole[1]),
            )
        return engine

    def new_engine_of_one_device(self, engine: Engine) -> Engine:
        """With the options of a share, but no drafts."""
        return Engine(*self.whole, dataclasses.replace(engine.options, speculative_steps=0))


def _host() -> jax.Device | None:
    """JAX's device for the host's memory; None where it was started without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def new_setup(args: argparse.Namespace) -> Any:
    """The setup of the engine that the arguments name.

    Raises:
      OSError, ValueError: no such folder, device or model, or a tokenizer that cannot be loaded.
      ImportError: torch or transformers are missing, or too old, and the arguments need them.
    """
    # torch's weights and JAX's caches may share one GPU's memory: JAX must not take most of it beforehand.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.engine == "jax":
        return JaxSetup(args) if args.mesh is None else MeshSetup(args)
    from sparse_mla_torch.hf.setup import TorchSetup

    return TorchSetup(args)


def choose_device(wanted: str | None) -> str:
    """Chooses JAX's device, and returns it in words; CUDA where JAX has it, else the CPU.

    Raises:
      ValueError: CUDA is wanted and JAX lacks it.
    """
    if wanted != "cpu" and jax.default_backend() == "gpu":
        return jax.devices()[0].device_kind
    if wanted == "cuda":
        raise ValueError(f"--device cuda: JAX {jax.__version__} has no GPU here")
    jax.config.update("jax_platforms", "cpu")
    return "CPU"

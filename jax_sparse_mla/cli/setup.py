"""The setup of `generate` and `serve`: a model, its tokenizer and device."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jax_sparse_mla.cli.checks import Check
from jax_sparse_mla.cli.start import announce
from jax_sparse_mla.launch.compile_cache import private_folder
from jax_sparse_mla.models import ModelSpec, text_config
from jax_sparse_mla.packages import why_not
from jax_sparse_mla.serving import presets
from jax_sparse_mla.serving.engine import Engine, EngineOptions
from jax_sparse_mla.serving.files import read_json
from jax_sparse_mla.serving.memory import bytes_of_a_device, check_host_memory, check_memory, host_device, size_of
from jax_sparse_mla.serving.mesh import MeshEngine, cut_model, load_cut, new_mesh
from jax_sparse_mla.serving.model import Model, generation_config, load
from jax_sparse_mla.serving.native import begin_to_load
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.speculative import DraftOracle


class Setup:
    """A model for one device.

    Attributes:
      model, params: what serves.
      eos_token_ids: tokens that end a text; none of a preset.
      check: the check, which loads its model meanwhile; None without one.

    Raises:
      OSError, ValueError: no such device or model.
    """

    def __init__(self, args: argparse.Namespace, check: Check | None):
        if (device := choose_device(args.device)) != args.announced:
            announce(args, device)
        _import_tvm_ffi()
        begin_to_load()
        self.check, self._loading = check, None
        if args.model is not None:
            self._load_check("load_checkpoint", args.model)
            options = {"draft_layer": bool(args.speculative_steps), "as_stored": not args.multiply_out}
            self.model, self.params = self._load(args.model, **options)
        else:
            config = presets.CONFIGS[args.preset or presets.DEFAULT_PRESET]
            self.model = Model.from_config(config)
            arrays = self.model.random_arrays(args.seed)
            self._load_check("load_arrays", self.model, config, arrays)
            self.params = self.model.from_named_arrays(arrays)
        self._folder = args.model
        self.eos_token_ids = () if args.model is None else self.model.eos_token_ids
        if args.model is not None and getattr(args, "temperature", None) == 0:
            self._print_sampling(args.model)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Raises ValueError for one that cannot be loaded."""
        if self._folder is None:
            return presets.ByteTokenizer()
        tokenizer = presets.load_tokenizer(self._folder, self.model.vocab_size)
        if isinstance(tokenizer, presets.ByteTokenizer):
            print(f"warning    {self._folder} has no tokenizer: text goes in and out as bytes")
        return tokenizer

    def _load(self, folder: str, **options: bool) -> tuple[Model, Any]:
        return load(folder, **options)

    def _print_sampling(self, folder: str) -> None:
        """Says which settings of a checkpoint's `generation_config.json` greedy decoding does not take."""
        settings = generation_config(folder)
        named = [f"{name} {settings[name]!r}" for name in ("temperature", "top_p", "top_k") if settings.get(name)]
        if named:
            print(f"sampling   greedy: generation_config.json's {', '.join(named)} must be given as options")

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def new_engine(self, options: EngineOptions) -> Engine:
        engine = Engine(self.model, self.params, options)
        engine.ahead = True
        return engine

    def _load_check(self, method: str, *arguments: Any) -> None:
        """Begins to load the check's model."""
        if self.check is not None:
            self._loading = ThreadPoolExecutor(1).submit(getattr(self.check, method), *arguments)

    def wait_for_check(self) -> None:
        """Waits until the check has loaded its model; raises what loading raises."""
        self._loading.result()

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


class MeshSetup(Setup):
    """A model over a mesh of devices. It is checked against one device, without torch.

    Attributes:
      mesh: the mesh of all devices that serve. `spec` is that of one of them, with its heads.
      whole: the model and parameters of one device, for the check; None with --no-check.

    Raises:
      OSError, ValueError: as `Setup`; too few devices, or a model that they cannot share.
    """

    def __init__(self, args: argparse.Namespace, check: Check | None):
        choose_device(args.device)
        self.mesh = new_mesh(*args.mesh)
        # No device needs room for the whole model, but for the check; nor does the host.
        self._in_parts = args.no_check and args.model is not None
        with jax.default_device(None if self._in_parts else host_device()):
            super().__init__(args, check)
            self.whole = None if args.no_check else (self.model, self.params)
            if not self._in_parts:
                self.model, self.params = cut_model(self.model, self.params, self.mesh)

    def _load(self, folder: str, **options: bool) -> tuple[Model, Any]:
        return load_cut(folder, self.mesh, **options) if self._in_parts else load(folder, **options)

    def new_engine(self, options: EngineOptions) -> Engine:
        engine = MeshEngine(self.model, self.params, options, self.mesh)
        if self.whole is not None:
            weights, caches = map(bytes_of_a_device, (engine.params, engine.state))
            needed = weights + (1 + options.context_parallel) * caches + size_of(self.whole[1])
            check_memory("the check on one device, which --no-check leaves out, needs", needed)
        return engine

    def new_engine_of_one_device(self, engine: Engine) -> Engine:
        """An engine of one device with the options of a share, but no drafts."""
        return Engine(*self.whole, dataclasses.replace(engine.options, speculative_steps=0, context_parallel=1))


def _import_tvm_ffi() -> None:
    """Imports tvm_ffi without torch, which it imports where it finds one: none of torch's tensors comes to it here."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None
        try:
            why_not("tvm_ffi")
        finally:
            del sys.modules["torch"]


def check_requests(args: argparse.Namespace, setup: Setup, prompt: list[int]) -> None:
    """Refuses what cannot be served with a ValueError, in words of the options, before its memory is asked for; and
    warns of a request that is longer than the checkpoint's model was made for."""
    if not prompt:
        raise ValueError("the prompt has no tokens")
    model, spec = setup.model, setup.spec
    if max(prompt) >= model.vocab_size:
        raise ValueError(
            f"the tokenizer of {args.model} gives the prompt token {max(prompt)}, the model has a vocabulary of "
            f"{model.vocab_size}"
        )
    requests = f"--requests {args.requests} with prompts of up to {len(prompt)} tokens need"
    check_host_memory(requests, args.requests * (8 * len(prompt) + 4000))
    sizes = 4 * (spec.num_heads * spec.qk_dim + model.config.hidden_size)  # bytes of a row's queries and states
    check_memory(f"steps of --chunk-size {args.chunk_size} tokens need at least", args.chunk_size * sizes)
    if args.model is None:
        return
    longest = len(prompt) + args.max_new_tokens
    most = text_config(read_json(Path(args.model), "config.json")).get("max_position_embeddings") or longest
    if longest > most:
        print(f"warning    the longest request has up to {longest} tokens, and max_position_embeddings of "
              f"{args.model} is {most}")  # fmt: skip


def new_setup(args: argparse.Namespace, check: Check | None) -> Setup:
    """The setup that the arguments ask for; raises what `Setup` and `MeshSetup` raise, and ValueError for
    --context-parallel without several devices in a share."""
    if args.context_parallel and (args.mesh is None or args.mesh[1] == 1):
        raise ValueError("--context-parallel needs a --mesh of several devices in a share, for instance 1x2")
    # torch's weights and JAX's caches may share one GPU's memory: JAX must not take most of it beforehand.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    keep_programs()
    return (Setup if args.mesh is None else MeshSetup)(args, check)


def choose_device(wanted: str | None) -> str:
    """Chooses JAX's device, and returns it in words: CUDA where JAX has it, else the CPU, unless CUDA is wanted."""
    if wanted != "cpu" and jax.default_backend() == "gpu":
        return jax.devices()[0].device_kind
    if wanted == "cuda":
        raise ValueError(f"--device cuda: JAX {jax.__version__} has no GPU here")
    jax.config.update("jax_platforms", "cpu")
    return "CPU"


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache, so that a second run starts at once; a folder that the environment
    or the process names is left as it is."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = private_folder() / "programs"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        print(f"jax-sparse-mla: compiled programs are not kept: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

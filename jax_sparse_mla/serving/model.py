"""A whole model as functions over its parameters: caches, one forward step, logits, loading."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.layers import V4LayerCache, V32LayerCache
from jax_sparse_mla.metadata import ForwardBatch, RequestTables
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving import checkpoint
from jax_sparse_mla.serving.config import Config, Glm53Config, read_config
from jax_sparse_mla.serving.kda import KDAState
from jax_sparse_mla.serving.layers import matmul

# Pytrees of arrays; what is in them is the model's own affair.
Params: TypeAlias = Any
Caches: TypeAlias = Any


@pytree_dataclass
class ForwardOutput:
    """What a step returns.

    Attributes:
      hidden: `[T, hidden]`, each row after the final norm: what `Model.logits` takes, of the rows that are wanted.
      caches: the updated caches.
      states: what a draft layer reads of each row: V4's streams `[T, n, hidden]`, the others' `hidden`.
      overflow: bool scalar, a bucket was too small for the step and attention left something out; None where nothing
        can overflow.
      trace: with `trace=True` for each layer the attention's input `[T, hidden]` and the positions that its indexer
        selected, int32 `[T, k]` with −1 padded, or None; else empty.
    """

    hidden: jax.Array
    caches: Caches
    states: jax.Array | None = None
    overflow: jax.Array | None = None
    trace: list[tuple[jax.Array, jax.Array | None]] = dataclasses.field(default_factory=list)


@pytree_dataclass
class Draft:
    """What a draft layer keeps between steps.

    Attributes:
      cache: of its attention. Its row of a position hangs on the token behind that position, too.
      states: `[requests, …]`, its own `ForwardOutput.states` of the position before each request's last token.
      tokens: int32 `[requests]`, the drafts that it made there: of the token behind the last one.
    """

    cache: Caches
    states: jax.Array
    tokens: jax.Array


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: hashable, a static argument of jitted functions. Its parameters and caches are pytrees of arrays."""

    config: Config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """The model of a `config.json` mapping, with transformers' keys or the released checkpoint's.

        Raises:
          ValueError: another model type, or a value that this implementation does not know; it names them.
        """
        return cls(read_config(config))

    @property
    def spec(self) -> ModelSpec:
        """The attention constants."""
        return self.config.spec

    @property
    def _module(self) -> Any:
        return checkpoint.MODULES[type(self.config)]

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compress ratio of each layer; zeros for V3.2 and GLM, which do not compress."""
        return self.config.ratios

    @property
    def is_recurrent(self) -> bool:
        """Whether layers carry a state for each request that cannot go back: no drafts, no reuse of prefixes."""
        return isinstance(self.config, Glm53Config) and any(self.config.linear)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        return self.config.eos_token_ids

    def init_params(self, seed: int, dtype: Any = jnp.bfloat16, *, draft_layer: bool = False) -> Params:
        """Random parameters from a seed, made on the device."""
        return checkpoint.init_params(self.config, seed, dtype, draft_layer=draft_layer)

    def random_arrays(self, seed: int) -> dict[str, np.ndarray]:
        """Random parameters of a small model from a seed, for `from_named_arrays`: bfloat16, made on the host."""
        return checkpoint.random_arrays(self.config, seed)

    def from_named_arrays(self, arrays: Mapping[str, Any]) -> Params:
        """The parameters of numpy arrays by name, as a state dict of transformers' or a checkpoint has them.

        Those of the draft layer are read too if they are there.

        Raises:
          ValueError: names that are missing or unknown, a wrong shape, or a dtype that is not read; it names them.
        """
        return checkpoint.from_named_arrays(self.config, arrays)

    def new_caches(
        self,
        *,
        num_pages: int,
        num_swa_pages: int,
        max_requests: int,
        max_draft_tokens: int = 0,
        bf16: bool = False,
    ) -> Caches:
        """Empty caches of all layers, a pytree that a step takes donated and returns; see `V4LayerCache.zeros`.

        V3.2 has no window and no state: it takes `num_pages` only. GLM-5.3 has states, and no window.
        """
        return self._module.new_caches(
            self.config,
            num_pages=num_pages,
            num_swa_pages=num_swa_pages,
            max_requests=max_requests,
            max_draft_tokens=max_draft_tokens,
            bf16=bf16,
        )

    def layer_cache(self, caches: Caches, layer: int) -> V4LayerCache | V32LayerCache | KDAState:
        """The view of one layer's caches."""
        return self._module.layer_cache(self.config, caches, layer)

    def with_layer_cache(self, caches: Caches, layer: int, cache: V4LayerCache | V32LayerCache | KDAState) -> Caches:
        """The caches with what `layer_cache` gave, updated."""
        return self._module.with_layer_cache(self.config, caches, layer, cache)

    def forward(
        self,
        params: Params,
        caches: Caches,
        batch: ForwardBatch,
        tables: RequestTables,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        layers: int | None = None,
        gathered: bool | None = None,
        backend: str | None = None,
        trace: bool = False,
    ) -> ForwardOutput:
        """One step of the whole model; jit it with the caches donated.

        Args:
          params, caches: the model's.
          batch, tables: the step, as `prepare_v4_step` and `build_v32_metadata` take it.
          tokens, positions: int32 `[T]`, padded like the batch (padding rows: token 0, position 0).
          layers: runs only the first so many layers, then the final norm: a draft of the model by itself (static).
          gathered: whether an EXTEND step gathers a bf16 workspace (True) or attends to the pages (False); None: the
            plan says (static).
          backend: of the attention; None is the router's choice (static).
          trace: keeps each layer's attention input and selection (static).

        Raises:
          ValueError: no such number of layers; and what the layers raise.
        """
        layers = self.num_layers if layers is None else layers
        if not 1 <= layers <= self.num_layers:
            raise ValueError(f"Model.forward: layers must be from 1 to {self.num_layers}, got {layers}")
        traced: list[tuple[jax.Array, jax.Array | None]] = []
        hidden, states, caches, overflow = self._module.forward(
            self.config,
            params,
            caches,
            batch,
            tables,
            tokens,
            positions,
            layers=layers,
            gathered=gathered,
            backend=backend,
            trace=lambda *seen: traced.append(seen) if trace else None,
        )
        return ForwardOutput(hidden=hidden, caches=caches, states=states, overflow=overflow, trace=traced)

    def new_draft(self, params: Params, *, max_requests: int, **sizes: Any) -> Draft | None:
        """What the draft layer begins with; None if the parameters have no draft layer.

        Args:
          params: the model's.
          max_requests: rows of the request tables.
          sizes: num_pages, num_swa_pages and bf16, as of `new_caches`.
        """
        if params.draft is None:
            return None
        cache, states = self._module.new_draft(self.config, params, max_requests=max_requests, **sizes)
        return Draft(cache=cache, states=states, tokens=jnp.zeros(max_requests, jnp.int32))

    def draft(
        self,
        params: Params,
        cache: Caches,
        batch: ForwardBatch,
        tables: RequestTables,
        tokens: jax.Array,
        positions: jax.Array,
        states: jax.Array,
        *,
        gathered: bool | None = None,
        backend: str | None = None,
    ) -> ForwardOutput:
        """One step of the draft layer, which predicts two tokens ahead (multi-token prediction, arXiv 2412.19437).

        Args:
          cache: `Draft.cache`.
          tokens: int32 `[T]`, the token *behind* each position: the model has chosen it from the position's row.
          states: `[T, …]`, `ForwardOutput.states` of the positions; of the draft layer itself, of the position before,
            where the model has not been there yet.
          params, batch, tables, positions, gathered, backend: as in `forward`.

        Returns:
          As `forward`: `logits` of `hidden` are those of the token behind `tokens`.
        """
        options = {"gathered": gathered, "backend": backend}
        hidden, states, cache, overflow = self._module.draft(
            self.config, params, cache, batch, tables, tokens, positions, states, **options
        )
        return ForwardOutput(hidden=hidden, caches=cache, states=states, overflow=overflow)

    def attention(
        self,
        params: Params,
        caches: Caches,
        batch: ForwardBatch,
        tables: RequestTables,
        x: jax.Array,
        positions: jax.Array,
        *,
        layers: Sequence[int],
        gathered: bool | None = None,
        backend: str | None = None,
        index_scores: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        """The attention of some layers alone, each on what the one before it returns: for comparisons and measurements.

        Args:
          x: `[T, hidden]`, the attention's input, as `ForwardOutput.trace` has it.
          layers: which, in order (static).
          index_scores: float32 `[T, columns]`, selects by these instead of the indexer's scores.
          params, caches, batch, tables, positions, gathered, backend: as in `forward`.

        Returns:
          Its output `[T, hidden]`, after the output projection, and the updated caches.
        """
        options = {"layers": layers, "gathered": gathered, "backend": backend, "index_scores": index_scores}
        return self._module.attention(self.config, params, caches, batch, tables, x, positions, **options)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """float32 `[n, vocab]` of `[n, hidden]` rows of `ForwardOutput.hidden`."""
        weights = params.embedding if params.unembedding is None else params.unembedding
        return matmul(hidden, weights)


def load(folder: str | os.PathLike[str], *, draft_layer: bool = True) -> tuple[Model, Params]:
    """The model and parameters of a checkpoint folder: `config.json` and safetensors.

    Args:
      folder: the checkpoint's.
      draft_layer: whether to read the draft layer too, if there is one; it is as large as a layer.

    Raises:
      FileNotFoundError: no such folder, or a file that is missing in it.
      ValueError: what `Model.from_config` raises; tensors that are missing, unknown or of a wrong shape, by name.
    """
    config, params = checkpoint.load_folder(folder, draft_layer=draft_layer)
    return Model(config), params

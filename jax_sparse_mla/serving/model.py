"""A whole model as functions over its parameters: caches, one forward step, logits, loading."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.layers import V4LayerCache, V32LayerCache
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving import checkpoint, dspark, files
from jax_sparse_mla.serving.architectures import MODULES, read_params
from jax_sparse_mla.serving.config import Config, eos_token_ids, read_config
from jax_sparse_mla.serving.decoder import (
    ATTENTION,
    CacheSizes,
    PreparedStep,
    StepInputs,
    Streams,
    after_attention,
    block_input,
    embed,
    last_rows,
    layer_params,
    logits,
)
from jax_sparse_mla.serving.dspark import BlockDraft
from jax_sparse_mla.serving.kda import KDAState
from jax_sparse_mla.serving.kept_programs import signature
from jax_sparse_mla.serving.params import BlockDraftParams, LayerParams, LoopedLayers, ModelParams, Run, joined, runs_of
from jax_sparse_mla.serving.tensors import random_host_arrays

# Pytrees of arrays: `ModelParams`, a dict of layers' caches, or those of another project's model.
Params: TypeAlias = Any
Caches: TypeAlias = Any


@pytree_dataclass
class ForwardOutput:
    """The results of a step.

    Attributes:
      hidden: `[T, hidden]`, each row after the final norm: what `Model.logits` takes, of the rows that are wanted.
      caches: the updated caches.
      states: what a draft layer reads of each row: V4's streams `[T, n, hidden]`, the others' `hidden`. What DSpark's
        drafter reads, `[T, targets * hidden]`: the mean of the streams behind each of its targets.
      overflow: bool scalar, a bucket was too small for the step and attention left something out; None where nothing
        can overflow.
      trace: with `trace=True` for each layer the attention's input `[T, hidden]` and the positions that its indexer
        selected, int32 `[T, k]` with −1 padded, or None; else empty.
      selected: with `return_selected=True` int32 `[layers that select, T, k]`, the positions that they attended to.
    """

    hidden: jax.Array
    caches: Caches
    states: jax.Array | None = None
    overflow: jax.Array | None = None
    trace: list[tuple[jax.Array, jax.Array | None]] = dataclasses.field(default_factory=list)
    selected: jax.Array | None = None


@pytree_dataclass
class Draft:
    """State of a draft layer between steps."""

    cache: Caches  # its attention's. A position's row there depends on the next position's token, too
    states: jax.Array  # `[requests, …]`, its `ForwardOutput.states` of the position before a request's last token
    tokens: jax.Array  # int32 `[requests]`, the drafts made of these states: each guesses the token after the last one


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
        return MODULES[type(self.config)]

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
    def selecting_layers(self) -> tuple[int, ...]:
        """The layers that select for themselves: the first axis of selected positions."""
        return self.config.selecting

    @property
    def is_recurrent(self) -> bool:
        """Whether layers carry a state for each request that cannot go back: no drafts, no reuse of prefixes."""
        return "linear" in self.config.pools

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        return self.config.eos_token_ids

    def init_params(
        self, seed: int, dtype: Any = jnp.bfloat16, *, draft_layer: bool = False, as_stored: bool = False
    ) -> Params:
        """Random parameters from a seed, made on the device; with `as_stored` quantised as a released checkpoint has
        them: FP8, and V4's routed experts FP4."""
        return checkpoint.init_params(self.config, seed, dtype, draft_layer=draft_layer, as_stored=as_stored)

    def random_arrays(self, seed: int) -> dict[str, np.ndarray]:
        """Random parameters of a small model from a seed, for `from_named_arrays`: bfloat16, made on the host."""
        read = functools.partial(read_params, self.config, draft_layer=False)
        return random_host_arrays(read, seed, self.config.moe.num_experts)

    def from_named_arrays(self, arrays: Mapping[str, Any], *, as_stored: bool = True) -> Params:
        """The parameters of numpy arrays by name, as a state dict of transformers' or a checkpoint has them.

        Those of the draft layer or drafter are read too if they are there. With `as_stored` weights that products read
        stay FP8 and FP4, as `load` has it.

        Raises:
          ValueError: names that are missing or unknown, a wrong shape, or a dtype that is not read; it names them.
        """
        return checkpoint.from_named_arrays(self.config, arrays, as_stored=as_stored)

    def new_caches(
        self, *, num_pages: int, num_swa_pages: int, max_requests: int, max_draft_tokens: int = 0, bf16: bool = False
    ) -> Caches:
        """Empty caches of all layers, a pytree that a step takes donated and returns; see `V4LayerCache.zeros`.

        V3.2 has no window and no state: it takes `num_pages` only. GLM-5.3 has states, and no window.
        """
        sizes = CacheSizes(
            num_pages=num_pages,
            num_swa_pages=num_swa_pages,
            max_requests=max_requests,
            max_draft_tokens=max_draft_tokens,
            bf16=bf16,
        )
        layers: dict[Any, list[int]] = {}
        for i, pool in enumerate(self.config.pools):
            layers.setdefault(pool, []).append(i)
        return {pool: self._module.new_cache(self.config, numbers, sizes) for pool, numbers in layers.items()}

    def layer_cache(self, caches: Caches, layer: int) -> V4LayerCache | V32LayerCache | KDAState:
        """The view of one layer's caches."""
        return caches[self.config.pools[layer]].layer(self.config.number_in_pool(layer))

    def with_layer_cache(self, caches: Caches, layer: int, cache: V4LayerCache | V32LayerCache | KDAState) -> Caches:
        """The caches with an updated `layer_cache`."""
        return caches | {self.config.pools[layer]: cache.whole()}

    def forward(
        self, params: ModelParams, caches: Caches, inputs: StepInputs, *, layers: int | None = None
    ) -> ForwardOutput:
        """One step of the whole model; jit it with the caches donated.

        Args:
          params, caches, inputs: the model's, and the step's.
          layers: runs only the first so many layers, then the final norm: a draft of the model by itself (static).

        Raises:
          ValueError: no such number of layers; and what the layers raise.
        """
        layers = self.num_layers if layers is None else layers
        if not 1 <= layers <= self.num_layers:
            raise ValueError(f"Model.forward: layers must be from 1 to {self.num_layers}, got {layers}")
        config, trace, targets, at_targets = self.config, [], self._targets(params), []
        step = self._module.prepare(config, caches.values(), inputs)
        streams, selected = embed(config, params, inputs.tokens), None
        looped = isinstance(params.layers, LoopedLayers) and layers == self.num_layers
        for run in params.layers.runs if looped else map(Run, range(layers)):
            repeat = functools.partial(self._repetition, params, step, run)
            if run.times == 1:
                (streams, caches, selected), traced = repeat((streams, caches, selected), 0)
                trace += traced
                if run.first in targets:
                    streams = Streams(rows := streams.joined())
                    at_targets.append(jnp.mean(rows.astype(jnp.float32), axis=1).astype(rows.dtype))
                continue
            (streams, caches, selected), traced = lax.scan(
                repeat, (streams, caches, None), jnp.arange(run.times, dtype=jnp.int32)
            )
            trace += [jax.tree.map(lambda x, n=n: x[n], of_layer) for n in range(run.times) for of_layer in traced]
        hidden, states = last_rows(config, params.head, streams)
        chosen = [trace[i][1] for i in config.selecting if inputs.return_selected and i < layers]
        return ForwardOutput(
            hidden=hidden,
            caches=caches,
            states=jnp.concatenate(at_targets, -1) if at_targets else states,
            overflow=step.shared.overflow,
            trace=trace if inputs.trace else [],
            selected=jnp.stack(chosen) if inputs.return_selected else None,
        )

    def _targets(self, params: ModelParams) -> tuple[int, ...]:
        """The layers whose output a drafter reads; none of them is in a loop."""
        return self.config.block_drafter.targets if isinstance(params.draft, BlockDraftParams) else ()

    def _repetition(self, params: ModelParams, step: PreparedStep, run: Run, carry: tuple, number: int | jax.Array):
        """The layers of one repetition of a run: streams, caches and selection after them, and their trace. A loop
        carries no selection: layers that take another's are in none."""
        (streams, caches, selected), trace = carry, []
        for j in range(run.period):
            layer, in_pool = layer_params(self.config, params, run, j, number)
            pool = self.config.pools[run.first + j]
            taken = self._taken(step.inputs.selected, run, j, number, selected)
            streams, cache, x, selected = self._run(layer, caches[pool].layer(in_pool), streams, step, taken)
            caches = caches | {pool: cache.whole()}
            if step.inputs.trace or step.inputs.return_selected:
                trace.append((x if step.inputs.trace else None, selected))
        return (streams, caches, selected if run.times == 1 else None), trace

    def _taken(
        self, replayed: jax.Array | None, run: Run, j: int, number: int | jax.Array, before: jax.Array | None
    ) -> jax.Array | None:
        """The positions that layer j of a run's repetition attends to: None where it selects, those of the layer before
        where it has no indexer."""
        selecting, like = self.config.selecting, run.first + j
        if like not in selecting:
            return before
        if replayed is None:
            return None
        each = sum(run.first <= i < run.first + run.period for i in selecting)
        return replayed[selecting.index(like) + number * each]

    def looped(self, params: ModelParams) -> ModelParams:
        """The parameters for a program that loops over layers of the same kinds, so that each kind is compiled once.

        The large weights of such layers are copied into the same arrays. Only plain JAX runs in such a loop: kernels
        take the place of a layer's cache as a constant.
        """
        config, layers, targets = self.config, range(self.num_layers), self._targets(params)
        if isinstance(params.layers, LoopedLayers) or not config.loops:
            return params
        # A checkpoint may have one layer in FP8 and the next one in bfloat16. What a drafter reads is in no loop.
        kinds = [(config.layer_kind(i), signature(params.layers[i]), i if i in targets else None) for i in layers]
        runs = runs_of(kinds)
        if all(run.times == 1 for run in runs):
            return params

        def stacked(run: Run, j: int) -> Any:
            arrays = [params.layers[i] for i in layers[run.first + j :: run.period][: run.times]]
            return arrays[0] if run.times == 1 else jax.tree.map(joined, *arrays)

        weights = [[stacked(run, j) for j in range(run.period)] for run in runs]
        return dataclasses.replace(params, layers=LoopedLayers(runs=runs, weights=weights))

    def _run(
        self, layer: LayerParams, cache: Caches, streams: Streams, step: PreparedStep, selected: jax.Array | None
    ) -> tuple[Streams, Caches, jax.Array, jax.Array | None]:
        """The streams after a layer, its cache, its attention's input, and its selection; `selected` is what it attends
        to, where it does not select."""
        config, weights, norms = self.config, layer.weights, layer.norms
        streams, x, mixing = block_input(config, weights, norms, streams, block=ATTENTION)
        out, cache, selected = self._module.attend(config, layer, cache, x, step, selected)
        streams = after_attention(config, weights, norms, streams, out, mixing, step.inputs.tokens)
        return streams, cache, x, selected

    def new_draft(
        self, params: ModelParams, *, max_requests: int, num_pages: int, num_swa_pages: int, bf16: bool
    ) -> Draft | BlockDraft | None:
        """The first state of a draft layer or drafter, of the sizes of `new_caches`; None where the parameters have no
        such."""
        if params.draft is None:
            return None
        config = self.config
        if isinstance(params.draft, BlockDraftParams):
            return dspark.new_state(config, max_requests, params.embedding.dtype)
        sizes = CacheSizes(num_pages=num_pages, num_swa_pages=num_swa_pages, max_requests=max_requests, bf16=bf16)
        of_streams = () if params.draft.head.fn is None else (config.streams.streams,)
        return Draft(
            cache=self._module.new_cache(config, [config.num_layers], sizes),
            states=jnp.zeros((max_requests, *of_streams, config.hidden_size), params.embedding.dtype),
            tokens=jnp.zeros(max_requests, jnp.int32),
        )

    def draft(self, params: ModelParams, cache: Caches, inputs: StepInputs, states: jax.Array) -> ForwardOutput:
        """One step of the draft layer, which predicts two tokens ahead (multi-token prediction, arXiv 2412.19437).

        Args:
          params, cache: the model's, and `Draft.cache`.
          inputs: the step's; its tokens are those *behind* each position: the model has chosen them from the
            positions' rows.
          states: `[T, …]`, `ForwardOutput.states` of the positions; of the draft layer itself, of the position before,
            where the model has not been there yet.

        Returns as `forward`: `logits` of `hidden` are those of the token behind `inputs.tokens`.
        """
        config, draft = self.config, params.draft
        step = self._module.prepare(config, [cache], inputs)
        streams = Streams(self._module.join_token(config, draft, params.embedding[inputs.tokens], states))
        streams, cache, *_ = self._run(draft.layer, cache, streams, step, None)
        hidden, states = last_rows(config, draft.head, streams)
        return ForwardOutput(hidden=hidden, caches=cache.whole(), states=states, overflow=step.shared.overflow)

    def propose(self, params: ModelParams, draft: BlockDraft, *step: jax.Array) -> jax.Array:
        """A drafter's drafts; `step` as `dspark.propose` takes it."""
        return dspark.propose(self.config, params, draft, *step)

    def keep(self, params: ModelParams, draft: BlockDraft, *step: jax.Array) -> BlockDraft:
        """A drafter's state after a step of the model; `step` as `dspark.keep` takes it."""
        return dspark.keep(self.config, params, draft, *step)

    def attention(
        self,
        params: ModelParams,
        caches: Caches,
        inputs: StepInputs,
        x: jax.Array,
        *,
        layers: Sequence[int],
        index_scores: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        """The attention of some layers alone, each on what the one before it returns: for comparisons and measurements.

        Args:
          params, caches, inputs: as in `forward`; tokens are not read.
          x: `[T, hidden]`, the attention's input, as `ForwardOutput.trace` has it.
          layers: which, in order (static).
          index_scores: float32 `[T, columns]`, selects by these instead of the indexer's scores.

        Returns:
          Its output `[T, hidden]`, after the output projection, and the updated caches.
        """
        config, selected = self.config, None
        step = self._module.prepare(config, caches.values(), inputs)
        step = dataclasses.replace(step, index_scores=index_scores)
        for i in layers:
            (layer, _), cache = layer_params(config, params, Run(i), 0), self.layer_cache(caches, i)
            taken = self._taken(None, Run(i), 0, 0, selected) if index_scores is None else None
            x, cache, selected = self._module.attend(config, layer, cache, x, step, taken)
            caches = self.with_layer_cache(caches, i, cache)
        return x, caches

    def logits(self, params: ModelParams, hidden: jax.Array) -> jax.Array:
        """float32 `[n, vocab]` of `[n, hidden]` rows of `ForwardOutput.hidden`."""
        return logits(params, hidden)


def load(folder: str | os.PathLike[str], *, draft_layer: bool = True, as_stored: bool = True) -> tuple[Model, Params]:
    """The model and parameters of a checkpoint folder: `config.json` and safetensors.

    A tensor is read from the file that the index names. `generation_config.json` decides the end tokens, if it has any.
    With `draft_layer` the draft layer is read too, if there is one, which is as large as a layer, or DSpark's drafter,
    which is as large as three. With `as_stored` the FP8 and FP4 weights that products read stay so
    (`serving.quantised`); else they are multiplied out to the embedding's dtype, and take two to four times the memory.

    Raises:
      FileNotFoundError: no such folder, or a file that is missing in it.
      ValueError: a broken file, by its name: no JSON object, no safetensors file, an index that names no file of the
        folder or one without the tensor, a link out of the folder (but for those of Hugging Face's cache), or what
        `Model.from_config` raises. Tensors that are missing, unknown, stored twice or of a wrong shape, by name.
    """
    config, arrays = read_folder(folder)
    with files.named(folder):
        options = {"draft_layer": draft_layer, "as_stored": as_stored}
        return Model(config), checkpoint.from_named_arrays(config, arrays, **options)


def read_folder(folder: str | os.PathLike[str]) -> tuple[Config, dict[str, Any]]:
    """The config of a checkpoint folder and its tensors by name, which are read when they are used.

    Raises what `load` raises of them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint folder {folder}")
    table = files.read_json(folder, "config.json")
    with files.named(folder / "config.json"):
        config = read_config(table)
    generation = generation_config(folder)
    if generation.get("eos_token_id") is not None:
        with files.named(folder / files.GENERATION_CONFIG):
            config = dataclasses.replace(config, eos_token_ids=eos_token_ids(generation["eos_token_id"]))
    return config, files.map_folder(folder)


def generation_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint's `generation_config.json`, empty if there is none; raises ValueError as `load`."""
    has_one = os.path.lexists(Path(folder, files.GENERATION_CONFIG))
    return files.read_json(Path(folder), files.GENERATION_CONFIG) if has_one else {}

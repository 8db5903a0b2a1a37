"""The attention constants of a model: head counts, dimensions, scale, cache layout, selection."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.models.config import reader
from jax_sparse_mla.models.kinds import LayerKind, kind_of_ratio

# By a config's model_type, the function of a family that makes its spec.
FAMILIES: dict[str, Callable[[Any], ModelSpec]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelSpec:
    """The attention constants of a model, hashable (it may be a static argument).

    Attributes:
      name: the model's name in messages.
      num_heads: query heads of the whole model (a tensor-parallel rank holds a share of them).
      qk_dim, v_dim: values of a K row and of a V row; V is the leading part of K.
      nope_dim, rope_dim: values of a K row without and with rotary embedding, in this order.
      softmax_scale: the factor of q·k.
      kv_layout: the byte layout of a cached row.
      page_size: tokens per page of the request's own cache (V4: the sliding-window cache).
      index_topk: entries that the indexer keeps per query.
      index_heads, index_dim: the indexer's heads and head dimension.
      window: tokens of the sliding window; None where the model has none.
      compress_ratios: the distinct compress ratios of the layers, ascending; 0 is a sliding-window layer.
      has_attn_sink: whether each head has an attention sink.
      layers: the kind of each layer in order, of a spec from a config. () leaves to `kind` what published models have,
        as the constants do. Windows and pools become the model's. Not compared: specs with the same `kinds` are equal,
        whatever the order of their layers.

    `index_pool`, `compressed_layout` and `index_format` are constants here, and fields of the classes below.
    """

    name: str
    num_heads: int
    qk_dim: int
    v_dim: int
    nope_dim: int
    rope_dim: int
    softmax_scale: float
    kv_layout: KVLayout
    page_size: int
    index_topk: int
    index_heads: int
    index_dim: int
    window: int | None = None
    compress_ratios: tuple[int, ...] = ()
    has_attn_sink: bool = False
    layers: tuple[LayerKind, ...] = dataclasses.field(default=(), repr=False)

    # Fields of `V41Spec`, and of `PooledModelSpec`, alone.
    compressed_layout = None
    fp4_rows = False
    index_format = IndexFormat.FP8
    index_pool = 1

    def __post_init__(self) -> None:
        # `dataclasses.replace` may have given the model another window, or other pools.
        layers = (replace(x, window=x.window and self.window) for x in self.layers)
        layers = tuple(replace(x, pool=self.index_pool) if x.selects == "own" else x for x in layers)
        object.__setattr__(self, "layers", layers)

    def __eq__(self, other: object) -> bool:
        return self._compared == other._compared if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared)

    @functools.cached_property
    def _compared(self) -> tuple:
        return *(getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "layers"), self.kinds

    @functools.cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """For each compress ratio the kind of its layers, as `kind` gives it."""
        return tuple(self._kind_of(ratio) for ratio in self.compress_ratios or (0,))

    def _kind_of(self, ratio: int) -> LayerKind:
        layers = [layer for layer in self.layers if layer.ratio == ratio]
        if not layers:
            return kind_of_ratio(ratio, window=self.window, pool=self.index_pool)
        return max(layers, key=lambda layer: (layer.owns_kv, layer.selects == "own"))

    def kind(self, ratio: int = 0) -> LayerKind:
        """The kind of the layers of this compress ratio; where there are several, of one that owns its cache and
        selects for itself, as a KV source of V4.1."""
        return next((kind for kind in self.kinds if kind.ratio == ratio), None) or self._kind_of(ratio)

    @property
    def windowed(self) -> bool:
        """Whether the layers have a sliding window: the caches, metadata and steps are V4's, and V3.2's without one."""
        return any(kind.window is not None for kind in self.kinds)

    @property
    def index_width(self) -> int:
        """Columns of a row's selection: `index_topk`, and with pools the tokens of an unfinished one."""
        return self.index_topk + self.index_pool - 1

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelSpec:
        """The spec of a Hugging Face config: a checkpoint's `config.json` as a mapping, or a transformers config.

        Args:
          config: `model_type` must be `deepseek_v32`, `deepseek_v4`, `deepseek_v41`, `glm_moe_dsa` (GLM-5, 5.1, 5.2) or
            `glm5_next` (GLM-5.3: a `PooledModelSpec` of its layers with sparse attention). Both the checkpoint's own
            keys (`compress_ratios`, `rope_scaling`) and transformers' (`layer_types`, `rope_parameters`) are read.
            Those of V4.1 and GLM-5.3 may stand in its `text_config`.

        Raises:
          ValueError: another model type, dimensions for which no cache layout exists, or, of V4.1, what is missing or
            unknown, by its name.
        """
        model_type = reader(config)("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise ValueError(
                "ModelSpec.from_hf_config: model_type must be 'deepseek_v32' or 'deepseek_v4' or 'glm_moe_dsa' or "
                f"'deepseek_v41' or 'glm5_next', got {model_type!r}"
            )
        return FAMILIES[model_type](config)


def reads(*model_types: str) -> Callable[[Callable[[Any], ModelSpec]], Callable[[Any], ModelSpec]]:
    """Marks a family's function, which makes the spec of a config of these model types."""

    def register(function):
        FAMILIES.update(dict.fromkeys(model_types, function))
        return function

    return register

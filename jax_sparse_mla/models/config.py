"""Readers of a Hugging Face config that the model families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax_sparse_mla.indexer.keys import INDEX_DIM
from jax_sparse_mla.kv_cache.layout import KVLayout


def text_config(config: Any) -> Any:
    """The part of a config that is the text model's: `text_config`, or all of it."""
    part = reader(config)("text_config")
    return config if part is None else part


def reader(config: Any) -> Callable[..., Any]:
    """`read(key, default=None)` of a mapping or of an object with attributes."""
    if isinstance(config, Mapping):
        return config.get
    return lambda key, default=None: getattr(config, key, default)


def layout_of(model: str, layouts: tuple[KVLayout, ...], qk_dim: int, rope_dim: int, v_dim: int) -> KVLayout:
    """The one of these byte layouts whose rows have these dimensions."""
    for layout in layouts:
        if (layout.qk_dim, layout.rope_dim, layout.v_dim) == (qk_dim, rope_dim, v_dim):
            return layout
    known = ", ".join(f"{x} ({x.nope_dim} + {x.rope_dim}, v {x.v_dim})" for x in layouts)
    raise ValueError(
        f"ModelSpec.from_hf_config: {model} with {qk_dim - rope_dim} + {rope_dim} K values and {v_dim} V values "
        f"has no cache layout; known: {known}"
    )


def is_int(value: Any) -> bool:
    """Whether it is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(name: str, value: Any) -> int:
    """The value, if it is an integer from 1 on."""
    if not is_int(value) or value < 1:
        raise ValueError(f"ModelSpec.from_hf_config: {name} must be a positive integer, got {value!r}")
    return value


def index_dim_of(value: Any) -> int:
    """The value, if index keys of this dimension can be stored."""
    if value != INDEX_DIM:
        raise ValueError(f"ModelSpec.from_hf_config: index_head_dim must be {INDEX_DIM}, got {value}")
    return value

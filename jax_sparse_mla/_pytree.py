"""Frozen dataclasses that are pytrees: arrays are leaves, fields marked `static()` are part of the tree's structure."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**kwargs: Any) -> Any:
    """A field that selects a compilation (page size, window, forward mode): hashable, never an array."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass registered as a pytree.

    JAX rebuilds such objects with placeholders for leaves, so `__post_init__` must not look at values:
    arguments are checked where they are used.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))

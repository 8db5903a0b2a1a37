"""What a model needs beyond its `ModelSpec`, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses

from jax_sparse_mla.models import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class V4Config:
    spec: ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class V32Config:
    spec: ModelSpec

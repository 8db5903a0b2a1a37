"""DeepSeek-V4 and V3.2 as plain JAX functions over parameter pytrees; `import jax_sparse_mla` does not import it.

The names are those of `model.py`, which is imported when one is first asked for: presets and options need no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_sparse_mla.serving.decoder import StepInputs
    from jax_sparse_mla.serving.model import Caches, ForwardOutput, Model, Params, load

__all__ = ["Caches", "ForwardOutput", "Model", "Params", "StepInputs", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.model"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

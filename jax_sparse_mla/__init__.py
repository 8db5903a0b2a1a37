"""Sparse multi-head latent attention (MLA) for DeepSeek-V3.2 and DeepSeek-V4, in JAX.

Importing the package imports neither JAX nor numpy, so that the command says what it does before it waits for them.
Its names are those of `_public.py`, which is imported when one is first asked for; its modules are attributes too.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_sparse_mla._public import *  # noqa: F403
    from jax_sparse_mla._public import __all__ as __all__

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # what Python itself looks for imports nothing
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    public = importlib.import_module(f"{__name__}._public")
    if name == "__all__":
        return public.__all__
    if name not in public.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(public, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module(f"{__name__}._public").__all__})

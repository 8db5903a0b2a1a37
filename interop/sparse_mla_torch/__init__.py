"""The PyTorch face of jax_sparse_mla: its kernels for torch tensors, which JAX and torch exchange without a copy.

`flash_mla` stands in for FlashMLA's module, and `warm_up` compiles what its prefill launches. `ops` has the same
kernels as operators for `torch.compile` (`torch.ops.jax_sparse_mla.*`); `operations` launches them into an engine's own
buffers. `bridge` exchanges tensors with JAX, `handover` hands requests from process to process, `transformers` makes
transformers' models attend sparsely, `plugins` makes vLLM and SGLang choose our kernels, and `check` compares a run of
`jax-sparse-mla generate` with transformers.

Importing the package imports neither torch nor JAX: engines load its plugins into every process. What is named here is
imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_mla_torch import flash_mla, ops, transformers
    from sparse_mla_torch.attention.prefill import warm_up
    from sparse_mla_torch.bridge import call, to_jax, to_torch

__all__ = ["call", "flash_mla", "ops", "to_jax", "to_torch", "transformers", "warm_up"]


def __getattr__(name: str) -> Any:
    if name in ("call", "to_jax", "to_torch"):
        return getattr(importlib.import_module("sparse_mla_torch.bridge"), name)
    if name == "warm_up":
        return importlib.import_module("sparse_mla_torch.attention.prefill").warm_up
    if name in ("flash_mla", "ops", "transformers"):
        return importlib.import_module(f"sparse_mla_torch.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

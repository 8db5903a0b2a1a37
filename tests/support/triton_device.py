"""Where the tests of Triton kernels run: on the GPU, or on CPU tensors in Triton's interpreter (see conftest).

Importing triton_attention_cases repairs what the interpreter (3.6) does to scalars and to bfloat16 numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import triton_attention_cases  # noqa: F401
from sparse_mla_torch.launch import executor as launches
from sparse_mla_torch.launch.executor import executor

ON_GPU = jax.default_backend() == "gpu"
DEVICE = "cuda" if ON_GPU else "cpu"

# Numbers that numpy has from ml_dtypes go to torch by their bits.
_BY_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.int16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
}


def tensor(x: np.ndarray) -> torch.Tensor:
    """A copy of the array on the device under test, in torch's memory: numpy's is less aligned."""
    if x.dtype in _BY_BITS:
        bits, dtype = _BY_BITS[x.dtype]
        return torch.tensor(np.array(x).view(bits), device=DEVICE).view(dtype)
    return torch.tensor(np.asarray(x), device=DEVICE)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[list[torch.Tensor]]:
    """What launches allocate within it holds other numbers than 0; gives these tensors, in their order."""
    made, empty = [], launches._empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "_empty", lambda *output: made.append(empty(*output).fill_(77)) or made[-1])
        yield made


class Interpreted:
    """XLA's executor, by torch's in Triton's interpreter: for JAX functions that call kernels, not traced."""

    def __init__(self):
        self._execute = executor(torch.device("cpu"))
        self.device = self._execute.device

    def __call__(self, launch, inputs):
        given = [x if x is None else tensor(np.asarray(x)) for x in inputs]
        return tuple(None if x is None else _array(x) for x in self._execute(launch, given))


def _array(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.float().numpy(), jnp.bfloat16) if x.dtype is torch.bfloat16 else jnp.asarray(x.numpy())

"""How a Triton kernel is launched, said once for XLA and torch.

Beside each kernel stands a function that describes its launches and hands them to an `Executor`: the one of
`jax_sparse_mla.launch.triton_call` for XLA programs, the one of `sparse_mla_torch.launch.executor` for torch tensors.
The arrays of both have a shape and a dtype, and a launch needs to know no more of them. Imports neither jax nor torch
nor triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Output(NamedTuple):
    """An array that a launch writes.

    Attributes:
      shape: its dimensions.
      dtype: such as "int32", "bfloat16" or "float8_e4m3fn".
      alias: which input has the same buffer; the kernel takes it twice, and writes to the output's parameter.
      zeroed: whether the kernel expects zeros in it.
    """

    shape: Sequence[int]
    dtype: str
    alias: int | None = None
    zeroed: bool = False


class Launch(NamedTuple):
    """One launch. The kernel's parameters are inputs, scalars, outputs and constants, in this order.

    Attributes:
      kernel: the `triton.jit` function.
      name: what profiles call it.
      grid: up to three numbers of programs.
      scalars: numbers, known when the program is traced.
      outputs: None where the kernel's parameter is None.
      constants: by name, with Triton's options (num_warps, num_stages, maxnreg). A parameter that is no `tl.constexpr`
        may be among them: it is a constant to XLA, and an argument to torch.
    """

    kernel: Any
    name: str
    grid: tuple[int, ...]
    scalars: tuple[float, ...]
    outputs: Sequence[Output | None]
    constants: dict[str, Any]


class Device(NamedTuple):
    """The GPU of a launch: its compute capability, such as (9, 0), and how many multiprocessors it has."""

    compute_capability: tuple[int, int]
    sm_count: int

    @property
    def hardware_fp8(self) -> bool:
        """Whether the GPU computes with e4m3 numbers. Where it does not, Triton has no pointers to them either."""
        return self.compute_capability >= (8, 9)


class Executor(Protocol):
    """Runs launches on the arrays of one framework."""

    device: Device

    def __call__(self, launch: Launch, inputs: Sequence[Any], out: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """The arrays that the launch writes, in the order of its outputs.

        Args:
          launch: what to run.
          inputs: arrays in the kernel's order, None for one that the kernel does not read. Numbers may stand among
            them, where a kernel takes arrays behind its scalars.
          out: torch only, tensors to write into; None for those to allocate.
        """


def dtype_of(x: Any) -> str:
    """The name of an array's dtype, as in `Output`."""
    return str(x.dtype).removeprefix("torch.")

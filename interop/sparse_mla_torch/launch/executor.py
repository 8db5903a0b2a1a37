"""Launches of Triton kernels on torch tensors, on the device's current stream.

`Executor` runs what the kernels' files describe. `kernel[grid](...)` binds, types and hashes every argument, some 20 µs
of the host for kernels such as these: too long before an attention of a few microseconds. There a `DirectLaunch` does
all that in a first call; the later ones hand addresses and constants to the driver (`launcher.c`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jax_sparse_mla.launch import triton_versions
from jax_sparse_mla.launch.describe import Device, Launch, Output
from jax_sparse_mla.packages import give_triton_a_cache
from sparse_mla_torch.launch import launcher

# How a kernel takes numbers, by Triton's names of their types.
_FORMATS = {"i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
# Bytes: Triton compiles one kernel for tensors at multiples of them, another for others.
_ALIGNMENT = 16
# The device that a launch without a GPU, by Triton's interpreter, is planned for.
_INTERPRETED = Device((8, 0), 4)


class Executor:
    """Launches described kernels, see `jax_sparse_mla.launch.describe.Executor`; `executor` remembers one a device.

    It allocates what is not given, and neither synchronises nor copies to the host: a CUDA graph captures it.
    """

    def __init__(self, device: torch.device):
        self.device, self._torch_device = launch_device(device), device

    def __call__(
        self,
        launch: Launch,
        inputs: Sequence[torch.Tensor | int | None],
        out: Sequence[torch.Tensor | None] | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        results = []
        for output, result in zip(launch.outputs, out or [None] * len(launch.outputs), strict=True):
            if output is not None and output.alias is not None:
                result = inputs[output.alias]
            elif output is not None and result is None:
                result = _empty(output, self._torch_device)
            if output is not None and output.zeroed:
                result.zero_()
            results.append(result)
        give_triton_a_cache()
        pointers = map(self._as_pointer, inputs), launch.scalars, map(self._as_pointer, results)
        launch.kernel[launch.grid](
            *(x for each in pointers for x in each), **launch.constants, **triton_versions.OPTIONS
        )
        return tuple(results)

    def _as_pointer(self, x: torch.Tensor | int | None) -> torch.Tensor | int | None:
        """Bytes instead of e4m3 numbers where the GPU does not compute with them: Triton has no pointers to those."""
        if self.device.hardware_fp8 or not isinstance(x, torch.Tensor) or x.dtype is not torch.float8_e4m3fn:
            return x
        return x.view(torch.uint8)


executor = functools.cache(Executor)


@functools.cache
def launch_device(device: torch.device) -> Device:
    """Torch's device as launches are planned for it."""
    if device.type != "cuda":
        return _INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count)


def allocate(outputs: Mapping[Any, Output], device: torch.device | str) -> dict[Any, torch.Tensor]:
    """Tensors for outputs, by the same names."""
    return {name: _empty(output, device) for name, output in outputs.items()}


def _empty(output: Output, device: torch.device | str) -> torch.Tensor:
    return torch.empty(tuple(output.shape), dtype=getattr(torch, output.dtype), device=device)


class DirectLaunch:
    """A launch on one device: `launch(inputs, outputs)` runs it on the device's current stream."""

    def __init__(self, launch: Launch):
        self._kernel, self._grid, self._scalars = launch.kernel, launch.grid, launch.scalars
        self._constants = launch.constants | triton_versions.OPTIONS
        self._compiled: Any = None  # for launcher.c, by tensors that begin at multiples of 16 bytes
        self._launcher: Any = None

    def __call__(self, inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None]) -> None:
        """Dtypes, and which are None, must be the same in every call; the current device must be theirs."""
        if self._compiled is not None and self._launcher.launch(self._compiled, *inputs, *outputs):
            return
        give_triton_a_cache()
        compiled = self._kernel[self._grid](*inputs, *self._scalars, *outputs, **self._constants)
        aligned = all(x is None or x.data_ptr() % _ALIGNMENT == 0 for x in (*inputs, *outputs))
        if self._compiled is None and aligned and compiled is not None and (module := launcher.for_triton()):
            self._launcher, self._compiled = module, self._known(module, compiled, len(inputs))

    def keep(self, outputs: tuple[torch.Tensor | None, ...]) -> Callable[..., Any] | None:
        """`again(*inputs)`: launches into these outputs when called on this thread and stream, and returns them.

        It returns None on other threads and streams, while a graph is captured, and for tensors that launcher.c does
        not take. There is no `again` before the first launch, or for a kernel that Triton launches.
        """
        if self._compiled is None:
            return None
        self._launcher.keep(self._compiled, outputs)
        return functools.partial(self._launcher.launch_again, self._compiled)

    def _known(self, module: Any, compiled: Any, num_inputs: int) -> Any | None:
        """The compiled kernel for `module.launch`; None if it takes more than addresses and numbers."""
        made = compiled.metadata
        tensors, parameters = self._parameters(compiled.src.signature, num_inputs)
        if triton_versions.takes_more(made) or 0 in self._grid or parameters is None:
            return None
        sizes = *(*self._grid, 1, 1)[:3], 32 * made.num_warps, made.shared
        return module.kernel(compiled, compiled.function, *sizes, _ALIGNMENT, tensors, parameters)

    def _parameters(self, types: dict[str, str], num_inputs: int) -> tuple[int, tuple[int | bytes, ...] | None]:
        """How many tensors there are; and of each that the compiled kernel takes the number, of scalars the bytes."""
        numbers = dict(zip(range(num_inputs, num_inputs + len(self._scalars)), self._scalars))
        parameters, tensors = [], 0
        for i, name in enumerate(name for name in self._kernel.arg_names if name not in self._constants):
            if i not in numbers:
                if types[name] != "constexpr":
                    parameters.append(tensors)
                tensors += 1
            elif types[name] in _FORMATS:
                parameters.append(struct.pack(_FORMATS[types[name]], numbers[i]))
            elif types[name] != "constexpr":  # a number that Triton made part of the program
                return tensors, None
        return tensors, (*parameters, *[bytes(8)] * triton_versions.SCRATCH)

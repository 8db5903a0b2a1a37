"""Launches of one Triton kernel at one shape, without what Triton does again at every call.

`kernel[grid](...)` binds, types and hashes every argument, some 20 µs of the host for kernels such as these. Here all
that is done in a first call; the later ones hand addresses and constants to the compiled kernel's launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

# Whose compiled kernels are launched directly: by other versions every launch is Triton's own.
_KNOWN_VERSIONS = ("3.6",)
# Triton compiles one kernel for addresses that are multiples of this, another for those that are not.
_ALIGNMENT = 16


class Launch:
    """A kernel at one shape on one device: `launch(inputs, outputs)` runs it on the device's current stream.

    Args:
      kernel: its parameters are tensors, then scalars, then tensors, then constants.
      grid: up to three numbers.
      scalars: numbers, the same in every call.
      constants: constants and options, by name.
    """

    def __init__(self, kernel: Any, grid: Sequence[int], scalars: Sequence[float], constants: dict[str, Any]):
        self._kernel, self._grid, self._scalars, self._constants = kernel, tuple(grid), tuple(scalars), constants
        self._direct: Callable[[list[int | None], list[int | None]], None] | None = None

    def __call__(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor | None]) -> None:
        """Dtypes, and which outputs are None, must be the same in every call; the current device must be theirs."""
        low, addresses, out_addresses = 0, [], []
        for x in inputs:
            address = x.data_ptr()
            low |= address
            addresses.append(address)
        for x in outputs:
            address = None if x is None else x.data_ptr()
            low |= address or 0
            out_addresses.append(address)
        aligned = low % _ALIGNMENT == 0
        if aligned and self._direct is not None:
            self._direct(addresses, out_addresses)
            return
        compiled = self._kernel[self._grid](*inputs, *self._scalars, *outputs, **self._constants)
        if aligned and compiled is not None and triton.__version__.startswith(_KNOWN_VERSIONS):
            self._direct = self._launcher(compiled)

    def _launcher(self, compiled: Any) -> Callable[[list[int | None], list[int | None]], None]:
        """How the compiled kernel is launched; None stands for the launch's metadata and for its two hooks."""
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
        device = triton.runtime.driver.active.get_current_device()
        current_stream = triton.runtime.driver.active.get_current_stream
        x, y, z = (*self._grid, 1, 1)[:3]
        scalars = self._scalars
        constants = [self._constants[name] for name in self._kernel.arg_names if name in self._constants]

        def direct(addresses, out_addresses):
            stream = current_stream(device)
            run(
                *(x, y, z, stream, function, packed, None, None, None),
                *addresses,
                *scalars,
                *out_addresses,
                *constants,
            )

        return direct

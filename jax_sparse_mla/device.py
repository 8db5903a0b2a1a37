"""A device as routing and launching know it. Plain data; JAX is asked by `DeviceInfo.current` and `has_gpu` alone."""

from __future__ import annotations

import contextlib
import dataclasses

import jax

# Opt-in shared memory of one block, bytes, by compute capability (CUDA C++ Programming Guide, technical
# specifications, less the 1 KiB that the system keeps): XLA does not report it. FlashMLA's record reads it.
_SHARED_MEMORY_OPTIN = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """A device as routing knows it.

    Attributes:
      platform: "cpu" or "cuda".
      compute_capability: such as (9, 0); None on a CPU.
      sm_count: streaming multiprocessors; 0 on a CPU.
      shared_memory_optin: bytes of shared memory that one block may ask for; 0 on a CPU.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 0
    shared_memory_optin: int = 0

    def __post_init__(self) -> None:
        if self.compute_capability is not None:  # JSON has lists
            object.__setattr__(self, "compute_capability", tuple(self.compute_capability))

    @classmethod
    def current(cls) -> DeviceInfo:
        """The first device of JAX's default backend."""
        if (pretended := _PRETENDED.value) is not None:
            return pretended
        device = jax.devices()[0]
        if device.platform not in ("gpu", "cuda"):
            return cls("cpu")
        major, minor = (int(part) for part in str(device.compute_capability).split("."))
        capability = (major, minor)
        return cls("cuda", capability, int(device.core_count), _SHARED_MEMORY_OPTIN.get(capability, 49_152))


_PRETENDED = jax.make_user_context(None)  # what is traced within it serves no program outside


def has_gpu() -> bool:
    """Whether JAX's default backend is an NVIDIA GPU."""
    if (pretended := _PRETENDED.value) is not None:
        return pretended.platform == "cuda"
    return jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind.upper()


def pretend(device: DeviceInfo) -> contextlib.AbstractContextManager[None]:
    """Within it this thread traces programs as if JAX had this device. They can be compiled for it and do not run."""
    return _PRETENDED(device)

"""The first lines of a command, device and model: they come before JAX is imported, which takes seconds."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os

from jax_sparse_mla.packages import has_cuda_plugin
from jax_sparse_mla.serving.presets import DEFAULT_PRESET


def announce_ahead(args: argparse.Namespace) -> None:
    """Announces the device that JAX will have; `setup.Setup` announces another, if it comes to another.

    Sets `args.announced` to that device, None where a GPU is asked for that is not found here.

    Raises:
      OSError: no such checkpoint folder.
    """
    if args.model is not None and not os.path.isdir(args.model):
        raise FileNotFoundError(f"no checkpoint folder {args.model}")
    device = _device_ahead(args.device)
    args.announced = None if args.device == "cuda" and device == "CPU" else device
    if args.announced:
        announce(args, args.announced)


def announce(args: argparse.Namespace, device: str) -> None:
    """Prints the device and the model."""
    if args.mesh is not None:
        device += ", a mesh of {} shares of the requests and {} devices over heads and experts".format(*args.mesh)
    if (processes := getattr(args, "num_processes", None) or 1) > 1:
        device += f", in {processes} processes"
    # A default of argparse would not conflict with --model.
    model = args.model or f"preset {args.preset or DEFAULT_PRESET}, seed {args.seed} (random weights)"
    print(f"device     {device}\nmodel      {model}", flush=True)


def _device_ahead(wanted: str | None) -> str:
    """The device that `setup.choose_device` will choose, in the same words, by what is installed and the driver."""
    platforms = os.environ.get("JAX_PLATFORMS", "").split(",")
    if wanted == "cpu" or not {"", "cuda", "gpu"} & set(platforms) or not has_cuda_plugin():
        return "CPU"
    return _first_gpu() or "CPU"


def _first_gpu() -> str | None:
    """The name of the first GPU that this process may see; None without one, or without a driver."""
    with contextlib.suppress(OSError, AttributeError):
        driver, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(256)
        # What JAX would do next: its own call finds the driver ready.
        if not (driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
                or driver.cuDeviceGetName(name, len(name), device)):  # fmt: skip
            return name.value.decode()
    return None

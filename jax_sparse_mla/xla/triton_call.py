"""Launches of Triton kernels inside XLA programs, in the form that XLA records into CUDA graphs (command buffers).

jax-triton 0.3 emits XLA's old kind of custom call, which a command buffer never holds: one such call between two
recorded ones cuts the graph in two. The launcher behind it is jaxlib's, which also registers it as a typed FFI handler
that says it may be recorded (Pallas' Triton kernels are launched by it). Here jax-triton compiles the kernel, and its
custom call is turned into one to that handler, under a name of ours: jaxlib's name has a stage that XLA runs before
every execution, of recorded calls too, and that looks the kernel up by its whole text. For a step of 43 layers it takes
the host longer than everything else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kernels.launch import Device, Launch, Output

FFI_TARGET = "jax_sparse_mla.triton_kernel_call"
_JAXLIB_TARGET = "triton_kernel_call_ffi"
_UNWRITTEN = Output((1,), "uint8")
_TYPED_FFI = 4  # the version of XLA's custom call API


class Executor:
    """Launches described kernels in the program that is being traced, see `kernels.launch.Executor`.

    An output with an alias is written in place where XLA may do so: donated, or an intermediate of the program;
    otherwise XLA copies first. No size is zero.
    """

    def __init__(self, device: Device):
        self.device = device

    def __call__(
        self, launch: Launch, inputs: Sequence[jax.Array | int | None], out: None = None
    ) -> tuple[jax.Array, ...]:
        # An input that is not read has a pointer all the same: the first one's.
        arguments = [self._as_pointer(inputs[0] if x is None else x) for x in inputs]
        arguments += [np.float32(x) if isinstance(x, float) else x for x in launch.scalars]
        # jax-triton gives outputs to parameters by their order: only the last ones can be None, and others that the
        # kernel does not write are a byte of scratch.
        last = max((i for i, output in enumerate(launch.outputs) if output is not None), default=-1)
        outputs = [_UNWRITTEN if output is None else output for output in launch.outputs[: last + 1]]
        absent = dict.fromkeys(launch.kernel.arg_names[len(arguments) + last + 1 :][: len(launch.outputs) - last - 1])
        results = triton_call(
            *arguments,
            kernel=launch.kernel,
            out_shape=[jax.ShapeDtypeStruct(tuple(x.shape), self._pointer_dtype(jnp.dtype(x.dtype))) for x in outputs],
            grid=launch.grid,
            name=launch.name,
            input_output_aliases={x.alias: i for i, x in enumerate(outputs) if x.alias is not None},
            zeroed_outputs=tuple(i for i, x in enumerate(outputs) if x.zeroed),
            compute_capability=10 * self.device.compute_capability[0] + self.device.compute_capability[1],
            **absent,
            **launch.constants,
        )
        results = [*results, *[None] * len(absent)]
        pairs = zip(results, launch.outputs, strict=True)
        return tuple(None if output is None else _as_dtype(x, output.dtype) for x, output in pairs)

    def _as_pointer(self, x: jax.Array | int) -> jax.Array | int:
        return x if isinstance(x, int) else _as_dtype(x, self._pointer_dtype(x.dtype))

    def _pointer_dtype(self, dtype: np.dtype) -> np.dtype:
        """Bytes instead of e4m3 numbers where the GPU does not compute with them: Triton has no pointers to those."""
        return dtype if self.device.hardware_fp8 or dtype != jnp.float8_e4m3fn else jnp.dtype(jnp.uint8)


def launching(name: str, **static: Any) -> Callable[..., Any]:
    """The function of this name in `kernels/triton/`, such as "kv_cache.write_kv", as one of arrays or pytrees of them.

    Its module, and triton with it, is imported when the function is called.
    """

    def launch(*arrays: Any) -> Any:
        module, function = name.rsplit(".", 1)
        kernels = importlib.import_module(f"jax_sparse_mla.kernels.triton.{module}")
        return getattr(kernels, function)(executor(), *jax.tree.leaves(arrays), **static)

    return launch


def executor() -> Executor:
    """Of the first device of JAX's default backend, a GPU."""
    info = DeviceInfo.current()
    return Executor(Device(info.compute_capability, info.sm_count))


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def triton_call(*args: Any, **kwargs: Any) -> Any:
    """`jax_triton.triton_call`, recordable."""
    _register_lowering()
    import jax_triton

    return jax_triton.triton_call(*args, custom_call_target_name=FFI_TARGET, **kwargs)


@functools.cache
def _register_lowering() -> None:
    """Registers the target and wraps jax-triton's lowering; calls with its own target are lowered as before."""
    from jax_triton import triton_lib
    from jaxlib import gpu_triton

    stages = gpu_triton._cuda_triton.registrations()[_JAXLIB_TARGET]
    jax.ffi.register_ffi_target(FFI_TARGET, without_initialize(stages), platform="CUDA")

    def lowering(ctx: Any, *args: Any, **params: Any) -> Sequence[ir.Value]:
        results = triton_lib.triton_kernel_call_lowering(triton_lib.get_cuda_backend, ctx, *args, **params)
        if params["custom_call_target_name"] == FFI_TARGET:
            as_typed_ffi(results[0].owner, params["name"])
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lowering, platform="cuda")


def without_initialize(stages: Any) -> Any:
    """jaxlib's handler without the stage that only kernels with autotuning need; a capsule has one stage, the call."""
    if not isinstance(stages, dict):
        return stages
    return {name: stage for name, stage in stages.items() if name != "initialize"}


def as_typed_ffi(call: ir.OpView | ir.Operation, name: str) -> None:
    """Turns a custom call of the old API, whose backend_config is the serialised kernel, into one of the typed API,
    with the attributes that jaxlib's handler reads."""
    attributes = call.operation.attributes
    opaque = attributes["backend_config"]
    attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32, call.context), _TYPED_FFI)
    attributes["backend_config"] = ir.DictAttr.get(
        {"name": ir.StringAttr.get(name, call.context), "opaque": opaque}, call.context
    )

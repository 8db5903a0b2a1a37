"""Launches of Triton kernels inside XLA programs, in the form that XLA records into CUDA graphs (command buffers).

`triton_launch` launches them. Where it cannot (no TVM FFI, or no C++ compiler and no binary in the package), jax-triton
compiles a kernel and jaxlib launches it. jax-triton 0.3 emits XLA's old kind of custom call, which a command buffer
never holds: one such call between two recorded ones cuts the graph in two. jaxlib registers its launcher as a typed FFI
handler too, which says that it may be recorded, and the custom call is turned into one to that handler.
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
from jax_sparse_mla.launch import triton_launch, triton_versions, tvm
from jax_sparse_mla.launch.describe import Device, Launch, Output
from jax_sparse_mla.packages import once, warn_once, why_not

FFI_TARGET = "triton_kernel_call_ffi"
_UNWRITTEN = jax.ShapeDtypeStruct((1,), jnp.uint8)
_TYPED_FFI = 4  # the version of XLA's custom call API


class Executor:
    """Launches described kernels in the program that is being traced, see `launch.describe.Executor`.

    An output with an alias is written in place where XLA may do so: donated, or an intermediate of the program;
    otherwise XLA copies first. No size is zero.
    """

    def __init__(self, device: Device):
        self.device = device

    def __call__(
        self, launch: Launch, inputs: Sequence[jax.Array | int | None], out: None = None
    ) -> tuple[jax.Array, ...]:
        inputs = [None if x is None else self._as_pointer(x) for x in inputs]
        scalars = [np.float32(x) if isinstance(x, float) else x for x in launch.scalars]
        outputs = [None if x is None else self._shape(x) for x in launch.outputs]
        aliases = {i: x.alias for i, x in enumerate(launch.outputs) if x is not None and x.alias is not None}
        zeroed = tuple(i for i, x in enumerate(launch.outputs) if x is not None and x.zeroed)
        launched = triton_launch.call if own_launcher() else _by_jax_triton
        results = launched(launch, [*inputs, *scalars], outputs, aliases, zeroed, self.device.compute_capability)
        pairs = zip(results, launch.outputs, strict=True)
        return tuple(None if output is None else _as_dtype(x, output.dtype) for x, output in pairs)

    def _shape(self, output: Output) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(output.shape), self._pointer_dtype(jnp.dtype(output.dtype)))

    def _as_pointer(self, x: jax.Array | int) -> jax.Array | int:
        return x if isinstance(x, int) else _as_dtype(x, self._pointer_dtype(x.dtype))

    def _pointer_dtype(self, dtype: np.dtype) -> np.dtype:
        """Bytes instead of e4m3 numbers where the GPU does not compute with them: Triton has no pointers to those."""
        return dtype if self.device.hardware_fp8 or dtype != jnp.float8_e4m3fn else jnp.dtype(jnp.uint8)


@once
def own_launcher() -> bool:
    """Whether `triton_launch` can launch: its packages are there, the Triton is a known one, and its C++."""
    if why_not("tvm_ffi") or not triton_versions.are_known("jax-triton launches, slower on the host"):
        return False
    try:
        tvm.binder()
    except RuntimeError as error:
        warn_once(f"jax-triton launches kernels, slower on the host: {error}")
        return False
    return True


def _by_jax_triton(launch: Launch, inputs, outputs, aliases, zeroed, capability) -> tuple[jax.Array | None, ...]:
    # An input that is not read has a pointer all the same: the first one's.
    inputs = [inputs[0] if x is None else x for x in inputs]
    # jax-triton gives outputs to parameters by their order: only the last ones can be None, and others that the kernel
    # does not write are a byte of scratch.
    last = max((i for i, x in enumerate(outputs) if x is not None), default=-1)
    made = [_UNWRITTEN if x is None else x for x in outputs[: last + 1]]
    absent = dict.fromkeys(launch.kernel.arg_names[len(inputs) + last + 1 :][: len(outputs) - last - 1])
    constants = {name: x for name, x in launch.constants.items() if name != "maxnreg"}  # jax-triton has no such option
    results = triton_call(
        *inputs,
        kernel=launch.kernel,
        out_shape=made,
        grid=launch.grid,
        name=launch.name,
        input_output_aliases={source: i for i, source in aliases.items()},
        zeroed_outputs=zeroed,
        compute_capability=10 * capability[0] + capability[1],
        **absent,
        **constants,
    )
    results = [*results, *[None] * len(absent)]
    return tuple(None if x is None else result for x, result in zip(outputs, results, strict=True))


def launching(name: str, **static: Any) -> Callable[..., Any]:
    """The launch of this name below `jax_sparse_mla`, such as "kv_cache.triton.write_kv", as a function of arrays or
    pytrees of them.

    Its module, and triton with it, is imported when the function is called.
    """

    def launch(*arrays: Any) -> Any:
        module, function = name.rsplit(".", 1)
        kernels = importlib.import_module(f"jax_sparse_mla.{module}")
        return getattr(kernels, function)(executor(), *jax.tree.leaves(arrays), **static)

    return launch


def executor() -> Executor:
    """The executor for the first device of JAX's default backend, a GPU."""
    info = DeviceInfo.current()
    return Executor(Device(info.compute_capability, info.sm_count))


def _as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def triton_call(*args: Any, **kwargs: Any) -> Any:
    """`jax_triton.triton_call`, recordable."""
    if why := why_not("jax_triton"):
        raise ImportError(f"triton_call: {why}")
    _register_lowering()
    import jax_triton

    return jax_triton.triton_call(*args, custom_call_target_name=FFI_TARGET, **kwargs)


@functools.cache
def _register_lowering() -> None:
    """Wraps jax-triton's lowering; calls with its own target are lowered as before."""
    from jax_triton import triton_lib

    def lowering(ctx: Any, *args: Any, **params: Any) -> Sequence[ir.Value]:
        results = triton_lib.triton_kernel_call_lowering(triton_lib.get_cuda_backend, ctx, *args, **params)
        if params["custom_call_target_name"] == FFI_TARGET:
            as_typed_ffi(results[0].owner, params["name"])
        return results

    mlir.register_lowering(triton_lib.triton_kernel_call_p, lowering, platform="cuda")


def as_typed_ffi(call: ir.OpView | ir.Operation, name: str) -> None:
    """Turns a custom call of the old API, whose backend_config is the serialised kernel, into one of the typed API,
    with the attributes that jaxlib's handler reads."""
    attributes = call.operation.attributes
    opaque = attributes["backend_config"]
    attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32, call.context), _TYPED_FFI)
    attributes["backend_config"] = ir.DictAttr.get(
        {"name": ir.StringAttr.get(name, call.context), "opaque": opaque}, call.context
    )

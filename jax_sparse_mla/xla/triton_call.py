"""jax-triton's call of a kernel, in the form that XLA records into CUDA graphs (its command buffers).

jax-triton 0.3 emits XLA's old kind of custom call, which a command buffer never holds: one such call between two
recorded ones cuts the graph in two. The launcher behind it is jaxlib's, which also registers it as a typed FFI handler
that says it may be recorded (Pallas' Triton kernels are launched by it). Here jax-triton compiles the kernel, and its
custom call is turned into one to that handler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

FFI_TARGET = "triton_kernel_call_ffi"
_TYPED_FFI = 4  # the version of XLA's custom call API


def triton_call(*args: Any, **kwargs: Any) -> Any:
    """`jax_triton.triton_call`, recordable."""
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

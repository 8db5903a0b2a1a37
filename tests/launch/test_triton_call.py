"""The custom call that launches a Triton kernel: typed, so that XLA can record it into a CUDA graph."""

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.interpreters import mlir

from jax_sparse_mla.launch.triton_call import FFI_TARGET, as_typed_ffi

SERIALISED = b"x\x9c\x00\xffany bytes"


def lowered(target: str) -> str:
    """A custom call as jax-triton emits it, aliased and all, then turned if it has our target."""
    primitive = jex.core.Primitive("kernel")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, y: [x, y])

    def lowering(ctx, *args):
        rule = jax.ffi.ffi_lowering(target, api_version=2, backend_config=SERIALISED, operand_output_aliases={0: 1})
        results = rule(ctx, *args)
        if target == FFI_TARGET:
            as_typed_ffi(results[0].owner, "a kernel")
        return results

    mlir.register_lowering(primitive, lowering, platform="cuda")
    x = jnp.zeros(3)
    program = jax.jit(lambda x, y: primitive.bind(x, y)).trace(x, x).lower(lowering_platforms=("cuda",))
    (line,) = [line for line in program.as_text().splitlines() if "custom_call" in line]
    return line


def test_the_call_becomes_a_typed_one():
    old, new = lowered("triton_kernel_call"), lowered(FFI_TARGET)
    assert "api_version = 2" in old and f"@{FFI_TARGET}" not in old
    assert f"@{FFI_TARGET}" in new and "api_version = 4" in new
    written = old.split("backend_config = ")[1].split('"')[1]
    assert f'backend_config = {{name = "a kernel", opaque = "{written}"}}' in new
    # Everything else is as it was: operands, aliases, types.
    for part in ("output_operand_aliases = [#stablehlo.output_operand_alias<", "-> (tensor<3xf32>, tensor<3xf32>)"):
        assert part in old and part in new

"""What a described launch becomes in an XLA program without TVM FFI: the arguments of jax-triton's call. Importing that
needs a GPU; `test_launch_of_triton` has what TVM FFI launches."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla.launch import triton_call
from jax_sparse_mla.launch.describe import Device, Launch, Output, dtype_of


@pytest.fixture(autouse=True)
def without_tvm_ffi(monkeypatch):
    monkeypatch.setattr(triton_call, "own_launcher", lambda: False)


KERNEL = types.SimpleNamespace(
    arg_names=("x", "absent_in", "cache_in", "n", "scale", "cache", "absent", "sums", "last", "BLOCK")
)
OUTPUTS = Output((2, 3), "uint8", alias=2), None, Output((4,), "float8_e4m3fn", zeroed=True), None


def call(monkeypatch, capability):
    """The executor's results, and what jax-triton was handed."""
    handed = {}

    def fake(*arguments, out_shape, **options):
        handed.update(arguments=arguments, out_shape=out_shape, **options)
        return [jnp.ones(x.shape, x.dtype) for x in out_shape]

    monkeypatch.setattr(triton_call, "triton_call", fake)
    x, cache = jnp.zeros((5,), jnp.float8_e4m3fn), jnp.zeros((2, 3), jnp.uint8)
    launch = Launch(KERNEL, "a launch", (7, 1), (9, 0.5), OUTPUTS, {"BLOCK": 64, "num_warps": 4})
    return triton_call.Executor(Device(capability, 132))(launch, (x, None, cache)), handed


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
def test_a_launch_becomes_one_call(monkeypatch, capability):
    (cache, absent, sums, last), handed = call(monkeypatch, capability)
    # Outputs go to parameters by their order: one in between is scratch, one behind the others is None by its name.
    assert absent is None and "absent" not in handed and handed["out_shape"][1].shape == (1,)
    assert last is None and handed["last"] is None
    assert (handed["name"], handed["grid"], handed["BLOCK"], handed["num_warps"]) == ("a launch", (7, 1), 64, 4)
    assert handed["input_output_aliases"] == {2: 0} and handed["zeroed_outputs"] == (2,)
    assert handed["compute_capability"] == 10 * capability[0] + capability[1]
    x, stand_in, given, n, scale = handed["arguments"]
    assert (stand_in.shape, stand_in.dtype, given.shape) == (x.shape, x.dtype, (2, 3))  # the first input's
    assert n == 9 and scale == np.float32(0.5) and scale.dtype == np.float32  # not float64
    # Below SM89 Triton has no pointers to e4m3 numbers: bytes go in and come out, e4m3 is what the caller sees.
    pointed_at = "float8_e4m3fn" if capability >= (8, 9) else "uint8"
    assert dtype_of(x) == pointed_at and handed["out_shape"][2].dtype == pointed_at
    assert (dtype_of(cache), dtype_of(sums)) == ("uint8", "float8_e4m3fn")


def test_numbers_may_stand_among_the_inputs(monkeypatch):
    """As the filter of the top-k takes them."""
    handed = []
    monkeypatch.setattr(triton_call, "triton_call", lambda *arguments, **options: handed.append(arguments) or [])
    x = jnp.zeros(3)
    launch = Launch(KERNEL, "a launch", (1,), (), (), {})
    assert triton_call.Executor(Device((9, 0), 132))(launch, (x, 4, x)) == ()
    ((first, number, last),) = handed
    assert first is x and number == 4 and last is x


def test_a_named_kernel_is_imported_when_it_is_called():
    function = triton_call.launching("nowhere.nothing", size=3)
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        function(jax.ShapeDtypeStruct((1,), jnp.int32))

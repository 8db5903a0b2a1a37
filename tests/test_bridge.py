"""The DLPack bridge: shared memory both ways, and its hazards refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sparse_mla_torch import call, to_jax, to_torch  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_memory_both_ways(dtype):
    tensor = torch.arange(128).reshape(8, 16).to(dtype)
    array = to_jax(tensor)
    assert array.shape == (8, 16) and array.dtype.name == str(dtype).removeprefix("torch.")
    if tensor.data_ptr() % 64 == 0:  # JAX copies what is less aligned
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = to_torch(array)
    assert back.data_ptr() == array.unsafe_buffer_pointer() and back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(dtype):
    assert to_torch(to_jax(torch.empty(0, 4, dtype=dtype))).shape == (0, 4)


def test_hazards_are_refused():
    with pytest.raises(TypeError, match=r"slots is torch.int64.*\.to\(torch.int32\)"):
        to_jax(torch.arange(4), "slots")
    with pytest.raises(TypeError, match="float64"):
        to_jax(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="contiguous"):
        to_jax(torch.zeros(4, 8).T)
    with pytest.raises(ValueError, match="detach"):
        to_jax(torch.zeros(4, requires_grad=True))
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        to_jax(np.zeros(4))


def test_call_converts_trees():
    def function(x, *, pair):
        return {"sum": x + pair[0], "rest": pair[1]}

    out = call(jax.jit(function), torch.ones(3), pair=(torch.ones(3), jnp.zeros(2)))
    assert torch.equal(out["sum"], torch.full((3,), 2.0)) and torch.equal(out["rest"], torch.zeros(2))

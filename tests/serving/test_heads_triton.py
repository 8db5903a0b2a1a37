"""The Triton kernel of norms and rotary embedding against plain JAX: in Triton's interpreter, or on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_mla_torch.launch.executor import executor
from triton_device import tensor

from jax_sparse_mla.serving import heads, heads_triton
from jax_sparse_mla.serving.heads import Part, normed_and_rotated

LATENTS = Part(0, 1, 384, 0, True), Part(384, 1, 128, 64, True)
HEADS = Part(0, 5, 512, 64, True), Part(2560, 9, 128, 64, False)


def given(rows, parts):
    keys = jax.random.split(jax.random.key(rows), 4)
    columns = max(part.offset + part.heads * part.dim for part in parts) + 24  # some that nothing reads
    x = (3 * jax.random.normal(keys[0], (rows, columns))).at[:, -24:].set(jnp.nan).astype(jnp.bfloat16)
    positions = jax.random.randint(keys[1], rows, 0, 1 << 20).at[0].set(0)
    inv_freq = 10_000.0 ** -(jnp.arange(32, dtype=jnp.float32) / 32)
    weights = [jax.random.normal(key, (part.dim,)) for key, part in zip(keys[2:], parts)] if parts is LATENTS else []
    return x, positions, inv_freq, *weights


def compare(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = (np.asarray(x, np.float32) for x in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=2**-7, atol=2**-8)
        assert np.mean(mine != theirs) < 0.01


@pytest.mark.torch
@pytest.mark.parametrize("rows, parts", [(1, LATENTS), (7, HEADS), (3, HEADS[:1])])
def test_parts(rows, parts):
    """Latents with a weight each, heads that fill no block, and heads that are rotated alone."""
    arrays = given(rows, parts)
    expected = normed_and_rotated(*arrays, parts=parts, eps=1e-6)
    tensors = [tensor(x) for x in arrays]
    found = heads_triton.normed_and_rotated(executor(tensors[0].device), *tensors, parts=parts, eps=1e-6)
    compare([x.float().cpu() for x in found], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 300])
def test_jax_runs_the_kernel(rows):
    arrays = given(rows, HEADS)

    def run(*arrays):
        return normed_and_rotated(*arrays, parts=HEADS, eps=1e-6)

    program = jax.jit(run).lower(*arrays)
    assert "normed_and_rotated_kernel" in program.as_text()
    found = program.compile()(*arrays)
    x, positions, inv_freq = jax.device_put(arrays, jax.devices("cpu")[0])
    # Compiled whole, plain JAX would drop casts to bfloat16.
    compare(found, [heads._part(x, positions, inv_freq, None, part, 1e-6) for part in HEADS])

"""The Triton kernel of the hyper-connections against plain JAX: in Triton's interpreter, or on a GPU."""

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_mla_torch.launch.executor import executor
from triton_device import tensor

from jax_sparse_mla.serving import hyper_connections_triton
from jax_sparse_mla.serving.config import HyperConnections
from jax_sparse_mla.serving.layers import doubly_stochastic, doubly_stochastic_reference


@pytest.mark.torch
def test_doubly_stochastic():
    """Rows of any number, and logits far apart; lines and columns end with a sum of about 1."""
    for rows, scale in ((1, 1), (45, 3), (33, 40)):
        logits = scale * np.random.default_rng(rows).standard_normal((rows, 4, 4)).astype(np.float32)
        static = {"iterations": 20, "eps": 1e-6}
        expected = np.asarray(doubly_stochastic_reference(logits, **static))
        given = tensor(logits)
        found = hyper_connections_triton.doubly_stochastic(executor(given.device), given, **static).cpu().numpy()
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-4)


@pytest.mark.gpu
def test_jax_runs_the_kernel():
    config = HyperConnections(streams=4, iterations=20, eps=1e-6)
    logits = jax.random.normal(jax.random.key(0), (77, 4, 4))
    step = jax.jit(doubly_stochastic, static_argnames="config").lower(logits, config=config)
    assert "doubly_stochastic_kernel" in step.as_text()
    expected = doubly_stochastic_reference(logits, iterations=20, eps=1e-6)
    np.testing.assert_allclose(step.compile()(logits), expected, rtol=2e-5, atol=1e-7)

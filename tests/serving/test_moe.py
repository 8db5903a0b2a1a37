"""Experts and routers against a loop over rows, and against transformers' routers."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from support.serving_models import jax_model, torch_model

from jax_sparse_mla.serving.config import MoE
from jax_sparse_mla.serving.moe import choose, experts


def test_experts_are_a_loop_over_rows():
    """Rows that read their own experts' weights, and more rows, sorted by expert; experts without a row."""
    rng = np.random.default_rng(0)
    gate_up, down = rng.standard_normal((8, 12, 16)), rng.standard_normal((8, 16, 6))
    for rows, k, limit in ((1, 2, None), (4, 2, 1.0), (9, 2, 1.0), (20, 1, None)):
        x, weights = rng.standard_normal((rows, 16)), rng.standard_normal((rows, k))
        chosen = np.stack([rng.permutation(7)[:k] for _ in range(rows)])
        expected = np.zeros((rows, 16))
        for row in range(rows):
            for expert, weight in zip(chosen[row], weights[row]):
                gate, up = np.split(gate_up[expert] @ x[row], 2)
                if limit is not None:
                    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                expected[row] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        arrays = (jnp.asarray(a, jnp.float32) for a in (weights, gate_up, down))
        found = jax.jit(experts, static_argnums=5)(jnp.asarray(x, jnp.float32), jnp.asarray(chosen), *arrays, limit)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_choice_is_transformers():
    """V3.2's choice within groups, and V4's without; the order of the chosen does not count."""
    for name in ("v4", "v32"):
        gate = torch_model(name, torch.float32).model.layers[1].mlp.gate
        config = jax_model(name, torch.float32)[0].config.moe
        x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            logits, _, expected = gate(x)
        score = torch.sigmoid(logits) if name == "v32" else torch.nn.functional.softplus(logits).sqrt()
        found = choose(jnp.asarray((score + gate.e_score_correction_bias).numpy()), config)
        np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(expected.numpy(), axis=1))
    assert isinstance(config, MoE) and (config.groups, config.top_groups) == (4, 2)

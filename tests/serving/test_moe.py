"""Experts and routers against a loop over rows, and against transformers' routers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import pretend_h200

torch = pytest.importorskip("torch")
from support.serving_models import jax_model, torch_model

from jax_sparse_mla.serving.config import MoE
from jax_sparse_mla.serving.moe import choose, experts


def test_experts_are_a_loop_over_rows():
    """Rows that read their own experts' weights, and more rows, sorted by expert; experts without a row."""
    rng, compiled = np.random.default_rng(0), jax.jit(experts, static_argnums=5)
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
        found = compiled(jnp.asarray(x, jnp.float32), jnp.asarray(chosen), *arrays, limit)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        if rows > 1:  # of two devices each has half of the experts
            weights, *halves = (
                jnp.asarray(a, jnp.float32) for a in (weights, *np.split(gate_up, 2), *np.split(down, 2))
            )
            x, chosen = jnp.asarray(x, jnp.float32), jnp.asarray(chosen)
            parts = [compiled(x, chosen - 4 * i, weights, halves[i], halves[2 + i], limit) for i in (0, 1)]
            np.testing.assert_allclose(sum(parts), expected, rtol=1e-4, atol=1e-4)


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


def many_experts(rows: int, k: int):
    """x, chosen, weights, gate_up, down of 32 experts in bfloat16, two of them chosen by nobody here."""
    rng = np.random.default_rng(rows)
    x, gate_up, down = (0.3 * rng.standard_normal(shape) for shape in ((rows, 128), (32, 256, 128), (32, 128, 128)))
    chosen = np.stack([rng.permutation(np.r_[0:9, 10:31, 32])[:k] for _ in range(rows)])  # 32: of another device
    arrays = (jnp.asarray(a, jnp.bfloat16) for a in (x, gate_up, down))
    return *arrays, jnp.asarray(chosen, jnp.int32), jnp.asarray(rng.standard_normal((rows, k)), jnp.float32)


def test_hopper_reads_the_weights_where_they_are(monkeypatch):
    """JAX's kernel takes both products; other shapes, types and devices are XLA's."""
    pretend_h200(monkeypatch)
    x, gate_up, down, chosen, weights = many_experts(40, 3)

    def kernels(*arrays) -> int:
        lowered = jax.jit(lambda *a: experts(*a, None)).trace(*arrays).lower(lowering_platforms=("cuda",))
        return lowered.as_text().count("stablehlo.custom_call @mosaic_gpu")

    assert kernels(x, chosen, weights, gate_up, down) == 2
    assert kernels(x[:11], chosen[:11], weights[:11], gate_up, down) == 2
    assert kernels(x[:10], chosen[:10], weights[:10], gate_up, down) == 0
    assert kernels(x.astype(jnp.float32), chosen, weights, gate_up.astype(jnp.float32), down.astype(jnp.float32)) == 0
    assert kernels(x, chosen, weights, gate_up[:8], down[:8]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows, k", [(11, 3), (40, 3), (700, 6)])
def test_many_experts_on_a_gpu(rows, k):
    x, gate_up, down, chosen, weights = many_experts(rows, k)
    found = jax.jit(experts, static_argnums=5)(x, chosen, weights, gate_up, down, 1.0)
    wide = (a.astype(jnp.float32) for a in (gate_up, down))
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = jax.device_put((x.astype(jnp.float32), chosen, weights, *wide), jax.devices("cpu")[0])
        expected = experts(*arrays, 1.0)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=0.02 * float(np.abs(expected).max()))

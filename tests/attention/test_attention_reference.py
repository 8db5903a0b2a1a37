"""What only the reference backend promises: float32, gradients, bounded memory."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from attention_calls import (
    assert_same,
    check_prefill,
    run_decode,
    run_prefill,
    small_decode,
    small_prefill,
)
from attention_oracle import BF16, decode_oracle, prefill_oracle

from jax_sparse_mla.attention import sparse_mla_prefill


def total(results, weights, array_module):
    """A weighted sum of the results, where they are not -inf."""
    finite = (array_module.where(array_module.isneginf(x), 0, x) for x in results)
    return sum((w * x).sum() for w, x in zip(weights, finite, strict=True))


def check_slopes(case, oracle, gradients: dict[str, np.ndarray], rng, step: float = 1e-5) -> None:
    """The gradients are the float64 oracle's slopes along random directions."""
    for name, gradient in gradients.items():
        x = getattr(case, name).astype(np.float64)
        for _ in range(3):
            direction = np.where(np.isfinite(x), rng.standard_normal(x.shape), 0)
            slope = (oracle(**{name: x + step * direction}) - oracle(**{name: x - step * direction})) / (2 * step)
            np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=2e-4, atol=2e-4)


class TestReference:
    """What only the reference promises: float32, gradients, memory."""

    def test_float32_decode(self):
        case = small_decode(seed=3, extra=(16, 2))
        case.q = np.random.default_rng(1).standard_normal(case.q.shape).astype(np.float32)
        out, lse = run_decode(case)
        chex.assert_type([out, lse], jnp.float32)
        expected_out, expected_lse = decode_oracle(case)
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-6)

    def test_float32_prefill(self):
        case = small_prefill(seed=3)
        rng = np.random.default_rng(1)
        case.q = rng.standard_normal(case.q.shape).astype(np.float32)
        case.kv = np.where(np.isnan(case.kv.astype(np.float32)), np.nan, rng.standard_normal(case.kv.shape))
        case.kv = case.kv.astype(np.float32)
        results = run_prefill(case)
        chex.assert_type(results, jnp.float32)
        for actual, expected in zip(results, prefill_oracle(case), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=5e-6)

    def test_the_output_has_the_dtype_of_the_queries(self):
        case = small_prefill()
        kv = jnp.asarray(case.kv).astype(jnp.float32)
        assert_same(run_prefill(case, kv=kv), run_prefill(case))
        assert run_prefill(case, kv=kv)[0].dtype == jnp.bfloat16
        assert run_prefill(case, q=jnp.asarray(case.q).astype(jnp.float32))[0].dtype == jnp.float32

    def test_narrow_rows(self):
        """Below 512 values, all of a row is V."""
        rng = np.random.default_rng(5)
        case = small_prefill(lengths=False)
        case.q, case.kv = rng.standard_normal((6, 4, 72)), rng.standard_normal((40, 72))
        case.q, case.kv = case.q.astype(BF16), case.kv.astype(BF16)
        out, _, _ = results = run_prefill(case)
        chex.assert_shape(out, (6, 4, 72))
        check_prefill(case, results)

    def test_prefill_gradients(self):
        """By q, kv and the sink: finite, and the slopes of the float64 oracle along random directions."""
        case = small_prefill(seed=2)
        rng = np.random.default_rng(6)
        case.q = rng.standard_normal(case.q.shape).astype(np.float32)
        case.kv = case.kv.astype(np.float32)
        case.attn_sink = np.array([np.inf, -np.inf, 0.5, 2.0], np.float32)
        case.indices[4], case.topk_length[4] = -1, 16  # a row with an index row but no key
        case.indices[1], case.topk_length[1] = np.arange(16) % 3 * 13, 16  # repeated keys
        case.topk_length[5] = 0
        unused = np.isnan(case.kv).any(axis=1)
        case.kv[[0, 13, 26]] = rng.standard_normal((3, 512)) / 10
        unused[[0, 13, 26]] = False
        weights = [rng.standard_normal(shape) for shape in [(6, 4, 512), (6, 4), (6, 4)]]

        def oracle(**changes) -> float:
            return total(prefill_oracle(dataclasses.replace(case, **changes)), weights, np)

        def loss(q, kv, sink):
            return total(run_prefill(case, q=q, kv=kv, attn_sink=sink), weights, jnp)

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(case.q, case.kv, case.attn_sink)
        np.testing.assert_allclose(value, oracle(), rtol=1e-5, atol=1e-5)
        chex.assert_tree_all_finite(gradients)
        by_q, by_kv, by_sink = (np.asarray(x, np.float64) for x in gradients)
        assert not np.any(by_q[4:]) and np.any(by_q[:4]) and not np.any(by_kv[unused])
        assert not np.any(by_sink[:2]) and np.all(by_sink[2:] != 0)
        check_slopes(case, oracle, {"q": by_q, "kv": by_kv, "attn_sink": by_sink}, rng)

    def test_decode_gradients(self):
        case = small_decode(seed=2, extra=(16, 2))
        rng = np.random.default_rng(7)
        case.q = rng.standard_normal(case.q.shape).astype(np.float32)
        case.attn_sink = np.array([np.inf, -np.inf, 0.5, 2.0], np.float32)
        case.topk_length[2], case.extra_topk_length[2] = 0, 0
        weights = [rng.standard_normal(shape) for shape in [(3, 2, 4, 512), (3, 2, 4)]]

        def oracle(**changes) -> float:
            return total(decode_oracle(dataclasses.replace(case, **changes)), weights, np)

        def loss(q, sink):
            return total(run_decode(case, q=q, attn_sink=sink), weights, jnp)

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(case.q, case.attn_sink)
        np.testing.assert_allclose(value, oracle(), rtol=1e-5, atol=1e-5)
        chex.assert_tree_all_finite(gradients)
        by_q, by_sink = (np.asarray(x, np.float64) for x in gradients)
        assert not np.any(by_q[2]) and np.any(by_q[0]) and not np.any(by_sink[:2])
        check_slopes(case, oracle, {"q": by_q, "attn_sink": by_sink}, rng)

    def test_scores_far_below_zero(self):
        """What is masked scores 0, here far above every key: neither results nor gradients may see it."""
        rng = np.random.default_rng(8)
        case = small_prefill(lengths=False)
        case.q = -np.abs(rng.standard_normal(case.q.shape)).astype(np.float32)
        case.kv = np.abs(rng.standard_normal(case.kv.shape)).astype(np.float32) * 40
        case.attn_sink = np.zeros(4, np.float32)
        out, max_logits, lse = results = run_prefill(case)
        for actual, expected in zip(results, prefill_oracle(case), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-30)
        assert np.max(max_logits) < -500 and np.any(np.isfinite(lse)) and not np.any(np.isnan(out))

        def loss(q, kv, sink):
            out, max_logits, lse = run_prefill(case, q=q, kv=kv, attn_sink=sink)
            return sum(jnp.sum(jnp.where(jnp.isneginf(x), 0, x)) for x in (out, max_logits, lse))

        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(case.q, case.kv, case.attn_sink)
        chex.assert_tree_all_finite(gradients)
        assert np.any(gradients[0])

    def test_a_long_prefill_fits_a_small_host(self):
        shapes = [((4096, 64, 576), jnp.bfloat16), ((8192, 576), jnp.bfloat16), ((4096, 512), jnp.int32)]
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        prefill = jax.jit(
            lambda q, kv, indices: sparse_mla_prefill(q, kv, indices, softmax_scale=0.1, backend="reference")
        )
        memory = prefill.lower(*arguments).compile().memory_analysis()
        assert 0 < memory.temp_size_in_bytes < 4 << 30

    def test_chunks_of_rows_join_without_a_seam(self, monkeypatch):
        """Rows go through in chunks; a last chunk that is not full gives the same."""
        from jax_sparse_mla.attention import reference

        case = small_prefill(q_len=7, sizes=(40, 24))
        monkeypatch.setattr(reference, "CHUNK_BYTES", 3 * 24 * (6 * 512 + 16 * 4) + 100)
        chunks = []
        lax_map = jax.lax.map
        monkeypatch.setattr(jax.lax, "map", lambda *a, **k: chunks.append(k["batch_size"]) or lax_map(*a, **k))
        check_prefill(case, run_prefill(case))
        assert chunks == [3]

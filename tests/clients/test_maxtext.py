"""MaxText's DeepSeek-V4 and V3.2 through this library, against MaxText's dense attention (docs/guides/maxtext.md)."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("maxtext", reason="MaxText is not installed: see docs/guides/maxtext.md")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "maxtext"))

import attention
import serving
import small

from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions

COMPILING = "PLAIN"  # see conftest.py
FLOAT32_ERROR = 1e-5  # of logits up to 5 and of whole gradients


@pytest.fixture
def by_kernels(monkeypatch):
    """Runs a function with the adapter, and counts the attentions that it takes."""
    calls, prefill = [], attention.mla.sparse_mla_prefill

    def counted(q, kv, indices, **options):
        calls.append((q.shape, kv.shape, indices.shape))
        return prefill(q, kv, indices, **options)

    def run(function):
        attention.install()
        try:
            return function(), calls
        finally:
            attention.uninstall()

    monkeypatch.setattr(attention.mla, "sparse_mla_prefill", counted)
    return run


@pytest.mark.parametrize("name", small.MODELS)
def test_logits_are_those_of_dense_attention(name, by_kernels):
    """Two sequences, each of two documents whose border is inside a compressed entry."""
    cfg = small.config(name, max_target_length=250, per_device_batch_size=2)
    model, mesh = small.build(cfg)
    data = small.tokens(cfg, 250, documents=2)
    function, weights = small.forward(model)

    def run():  # a function of its own is a program of its own
        return np.asarray(jax.jit(lambda *arguments: function(*arguments))(weights, data))

    with small.running(cfg, mesh):
        dense = run()
        ours, calls = by_kernels(run)
    error = np.abs(ours - dense).max()
    print(f"{name}: logits differ by {error:.1e} of {np.abs(dense).max():.2f}")
    assert len(calls) == cfg.num_decoder_layers
    assert error <= FLOAT32_ERROR
    # Queries, rows and indices of both sequences: of V4 the tokens, then an entry for each whole group of 4 or 128.
    heads, topk = cfg.num_query_heads, cfg.indexer_topk
    dim, sizes = {
        "v4": (512, [(250, 128), (250 + 62, topk + 128), (250 + 1, 1 + 128)]),
        "v32": (576, [(250, topk)]),
    }[name]
    assert set(calls) == {((500, heads, dim), (2 * rows, dim), (500, columns)) for rows, columns in sizes}


REQUESTS = [(300, 6), (7, 14), (129, 12), (400, 5)]  # tokens of the prompt, tokens to make


def test_requests_served_from_fp8_caches_get_dense_attention_s_tokens():
    """Three at a time, prompts in chunks; the last one begins as the first does, and reads none of that again."""
    cfg = small.config("v4", max_target_length=512)
    model, mesh = small.build(cfg)
    served, params = serving.served(cfg, model)
    words = np.random.default_rng(0).integers(0, cfg.vocab_size, 400).tolist()
    requests = [Request(words[:length], new) for length, new in REQUESTS]
    options = EngineOptions(max_batch=3, max_len=512, chunk_size=192, reuse_points=2)
    with small.running(cfg, mesh):
        engine = Engine(served, params, options)
        engine.run(requests)
        function, weights = small.forward(model)
        same, count, regret, spread = small.compare(jax.jit(function), weights, requests, 512)
    print(f"{same} of {count} tokens are dense attention's; logits of the others are {regret:.3f} below the largest")
    assert count == sum(new for _, new in REQUESTS)
    assert engine.scheduler.counters.reused == 256
    assert same >= 0.9 * count
    assert regret <= 0.1 <= 0.05 * spread  # what FP8 caches change; `spread` is from the largest logit to the mean
    with pytest.raises(ValueError, match="no speculative_steps"):
        served.forward(None, None, None, layers=1)


@pytest.mark.parametrize("name", small.MODELS)
def test_training_has_dense_attention_s_loss_and_gradients(name, by_kernels):
    """Documents packed, the indexer trained by its own loss."""
    layers = {"v4": {"base_num_decoder_layers": 3, "compress_ratios": [0, 4, 128]}, "v32": {}}[name]
    options = {"indexer_sparse_training": True, "indexer_loss_scaling_factor": 0.1, **layers}
    cfg = small.config(name, max_target_length=190, **options)
    model, mesh = small.build(cfg)
    data = small.tokens(cfg, 190, documents=2)
    step, weights = small.gradients(cfg, model)

    def run():
        loss, gradients = jax.jit(lambda *arguments: step(*arguments))(weights, data)
        return float(loss), small.named(gradients)

    with small.running(cfg, mesh):
        loss, dense = run()
        (our_loss, ours), calls = by_kernels(run)
    assert len(calls) >= cfg.num_decoder_layers
    error = small.difference(ours, dense)
    attended = {name: gradient for name, gradient in dense.items() if "attention" in name}
    error_attention = small.difference(ours, attended)
    print(f"{name}: loss {our_loss}, dense {loss}; gradients differ by {error:.1e}, attention's {error_attention:.1e}")
    assert our_loss == pytest.approx(loss, rel=1e-6)
    assert max(error, error_attention) <= FLOAT32_ERROR
    assert sum(np.linalg.norm(gradient) > 1e-6 for gradient in attended.values()) > len(attended) // 2

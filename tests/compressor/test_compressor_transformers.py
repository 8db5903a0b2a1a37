"""compress_kv and rope against transformers' DeepSeek-V4 compressors (CSA, HCA, and the one inside its indexer)."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from compressor_engine import Engine, Parameters

from jax_sparse_mla.rope import rope_interleaved

pytestmark = pytest.mark.torch

HIDDEN, Q_LORA, HEAD_DIM, ROPE_DIM, INDEX_DIM = 48, 24, 512, 64, 128


@pytest.fixture(scope="module")
def hf():
    """transformers' module and a config with V4's own head dimensions and YaRN."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        q_lora_rank=Q_LORA,
        head_dim=HEAD_DIM,
        qk_rope_head_dim=ROPE_DIM,
        index_head_dim=INDEX_DIM,
        index_n_heads=4,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    modeling_deepseek_v4.test_config, modeling_deepseek_v4.test_torch = config, torch
    return modeling_deepseek_v4


def random_module(torch, module, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale, shift = (0.3, 1.0) if "norm" in name else (1.0, 0.0)
        parameter.data = shift + scale * torch.randn(parameter.shape, generator=generator)
    return module.float().eval()


def hf_parameters(module, ratio, head_dim):
    p = Parameters(0, ratio, head_dim, 2)
    p.ape, p.norm_weight = module.position_bias.detach().numpy(), module.kv_norm.weight.detach().numpy()
    inv_freq = module.rotary_emb.compress_inv_freq.numpy()
    assert inv_freq.shape == (ROPE_DIM // 2,) and module.rotary_emb.compress_attention_scaling == 1.0
    p.inv_freq = inv_freq
    return p


def run_chunked(p, kv, score, chunk_sizes):
    """Three requests `[3, length, width]` in one batch; chunk_sizes: per step, tokens per request."""
    engine, done = Engine(p), np.zeros(3, int)
    for sizes in chunk_sizes:
        engine.step([(r, 5 - r, done[r], *(x[r, done[r] : done[r] + sizes[r]] for x in (kv, score))) for r in range(3)])
        done += sizes
    groups = kv.shape[1] // p.ratio
    return np.array([[engine.entries[r, group] for group in range(groups)] for r in range(3)])


def random_chunks(rng, length, largest):
    """Steps until all three requests have `length` tokens: sometimes one token, sometimes many."""
    left = np.full(3, length)
    while left.any():
        sizes = np.minimum(left, rng.choice([0, 1, largest // 3, largest], 3))
        yield sizes
        left -= sizes


@pytest.mark.parametrize("kind", ["csa", "hca", "indexer"])
def test_entries_equal_transformers(hf, kind):
    """Our chunks, transformers' one shot and transformers' incremental cache all agree."""
    torch, config = hf.test_torch, hf.test_config
    rng = np.random.default_rng(25)
    ratio, length = (128, 300) if kind == "hca" else (4, 42)
    module_class = {"csa": hf.DeepseekV4CSACompressor, "hca": hf.DeepseekV4HCACompressor}
    module = random_module(torch, module_class.get(kind, hf.DeepseekV4CSACompressor)(config), 26)
    hidden = torch.from_numpy(rng.normal(size=(3, length, HIDDEN)).astype(np.float32))
    q_residual = torch.from_numpy(rng.normal(size=(3, length, Q_LORA)).astype(np.float32))
    part = module.indexer if kind == "indexer" else module

    def incremental(chunks):
        cache_class = hf.DeepseekV4HCACache if kind == "hca" else hf.DeepseekV4CSACache
        cache = type("Cache", (), {"layers": [cache_class(config)]})()
        first = 0
        for size in chunks:
            steps = slice(first, first + size)
            positions = torch.arange(first, first + size)[None].expand(3, -1)
            module(hidden[:, steps], q_residual[:, steps], positions, cache, 0)
            first += size
        return cache.layers[0].compressed_kv["indexer" if kind == "indexer" else "compressor"].numpy()

    with torch.no_grad():
        want = incremental([length])
        in_pieces = incremental([1] * 7 + [ratio] + [length - 7 - ratio])
        kv, score = part.kv_proj(hidden).numpy(), part.gate_proj(hidden).numpy()
    head_dim = INDEX_DIM if kind == "indexer" else HEAD_DIM
    chex.assert_shape(want, (3, length // ratio, head_dim))
    np.testing.assert_allclose(in_pieces, want, rtol=1e-3, atol=1e-4)

    p = hf_parameters(part, ratio, head_dim)
    for sizes in ([[length // 2] * 3] * 2, list(random_chunks(rng, length, 20 if ratio == 4 else 180))):
        got = run_chunked(p, kv, score, sizes)
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("positions", [(0, 1, 4, 127), (65535, 1_000_000, 3, 70_000)], ids=["near", "far"])
def test_rope_equals_transformers(hf, positions):
    torch = hf.test_torch
    rng = np.random.default_rng(27)
    x = rng.normal(size=(4, 3, 96)).astype(np.float32)  # [T, heads, d]
    rotary = hf.DeepseekV4RotaryEmbedding(hf.test_config)
    where = torch.tensor(positions)[None]
    cos, sin = rotary(torch.zeros(1), position_ids=where, layer_type="compress")
    want = hf.apply_rotary_pos_emb(torch.from_numpy(x).transpose(0, 1)[None], cos, sin)[0].transpose(0, 1).numpy()
    inv_freq = jnp.asarray(rotary.compress_inv_freq.numpy())
    got = rope_interleaved(jnp.asarray(x), jnp.asarray(positions, jnp.int32)[:, None], inv_freq)
    np.testing.assert_allclose(got, want, atol=1e-5)

"""Small transformers models with the true head dimensions, and runs of them that several tests look at."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from sparse_mla_torch.eager.model import in_bfloat16
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.glm5_next import Glm5NextConfig, Glm5NextForConditionalGeneration
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from jax_sparse_mla.serving.engine import Engine, EngineOptions
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.pages import RequestPool
from jax_sparse_mla.serving.request import Request

# These models are too small for a second thread to help, and waiting for it costs much in parallel test runs.
torch.set_num_threads(1)

# The GPU where there is one.
DEVICE = torch.device("cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu")
_YARN = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}


def small_v4_config(**changes) -> DeepseekV4Config:
    """One layer of each kind; 16 of the C4 entries are selected."""
    fields = dict(vocab_size=256, hidden_size=64, moe_intermediate_size=64, num_attention_heads=4, q_lora_rank=32)
    fields |= dict(n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=32, index_n_heads=16)
    fields |= dict(index_topk=16, num_hidden_layers=3, mlp_layer_types=["moe"] * 3, attn_implementation="eager")
    fields["layer_types"] = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    fields["rope_parameters"] = {**_YARN, "factor": 16.0, "original_max_position_embeddings": 65536}
    return DeepseekV4Config(**fields | changes)


# What the small V3.2 and GLM-5 models share.
_LATENT = dict(vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, first_k_dense_replace=1)
_LATENT |= dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, n_routed_experts=4)
_LATENT |= dict(num_experts_per_tok=2, index_n_heads=16, index_topk=64, attn_implementation="eager")


def small_v32_config(**changes) -> DeepseekV32Config:
    """64 tokens are selected."""
    yarn = {**_YARN, "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
    fields = dict(
        num_hidden_layers=2, n_group=1, topk_group=1, rope_parameters={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    )
    return DeepseekV32Config(**{**_LATENT, **fields, **changes})


def small_glm5_config(**changes) -> GlmMoeDsaConfig:
    """The second of three layers shares the first one's selection; 64 tokens are selected."""
    fields = {
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    return GlmMoeDsaConfig(**{**_LATENT, **fields, **changes})


def small_glm53_config(**changes) -> Glm5NextConfig:
    """A sparse layer between two of linear attention, the first one dense; 64 tokens are selected, in pools of 4."""
    without_rope = {name: value for name, value in _LATENT.items() if name != "first_k_dense_replace"}
    text = without_rope | dict(index_kpool=4, linear_head_dim=32, linear_num_heads=2, pad_token_id=None)
    text |= dict(num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"])
    text["layer_types"] = ["linear_attention", "indexed_attention", "linear_attention"]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": 64}
    vision["projection_intermediate_size"] = 16
    parts = {"text_config": {**text, **changes}, "vision_config": vision}
    return Glm5NextConfig(**parts, initializer_range=0.02, attn_implementation="eager")


CONFIGS = {"v4": small_v4_config, "v32": small_v32_config, "glm5": small_glm5_config, "glm53": small_glm53_config}
_CLASSES = (DeepseekV4ForCausalLM, DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM, Glm5NextForConditionalGeneration)
CLASSES = {x.config_class.model_type: x for x in _CLASSES}


def as_preset(config) -> dict:
    """The config as `jax_sparse_mla.serving.presets.CONFIGS` has those of presets."""
    return config.to_diff_dict()


def random_model(config, seed: int):
    """A random model of this config in bfloat16, the same for the same seed.

    transformers sets sinks, position biases and norm weights to constants. Here they are random too, so that code which
    ignores one of them gives another result.
    """
    torch.manual_seed(seed)
    model = CLASSES[config.model_type](config)
    model.apply(model._init_weights)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("sinks", "position_bias", "compress_ape")):
                parameter.normal_()
            elif parameter_name.endswith("A_log"):
                parameter.normal_(std=0.5)
            elif "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.ndim == 2 and parameter_name.startswith(("model.layers", "model.language_model.layers")):
                # Unit gain, so that activations keep their size through a projection of this small width.
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return in_bfloat16(model)


def to_jax_model(model):
    """The same model in JAX, and copies of its parameters."""
    jax_model = Model.from_config(model.config.to_dict())
    return jax_model, jax_model.from_named_arrays(named_arrays(model))


@functools.cache
def small_model(name: str):
    return random_model(CONFIGS[name](), seed=0).to(DEVICE)


# One shape for nearly all tests, so that a program compiles once per cache kind and mode. Three requests, of which
# two are served at once: the longest is prefilled in several chunks, leaves its first sliding-window page behind,
# and has more entries than are selected; the shortest fits into the window and completes no C128 group.
OPTIONS = EngineOptions(prefill_backend="flashmla_sparse", chunk_size=112, max_batch=2, max_len=512, trace=True)
PROMPT_LENGTHS, NEW_TOKENS = (440, 131, 21), (5, 9, 6)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def new_requests() -> list[Request]:
    shapes = zip(PROMPT_LENGTHS, NEW_TOKENS)
    return [Request(random_tokens(length, seed), new) for seed, (length, new) in enumerate(shapes)]


@functools.cache
def small_jax_model(name: str):
    return to_jax_model(small_model(name))


def new_engine(name: str, **changes) -> Engine:
    return Engine(*small_jax_model(name), dataclasses.replace(OPTIONS, **changes))


@functools.cache
def served(name: str, bf16: bool) -> tuple[Engine, list[Request]]:
    """An engine with the shapes of OPTIONS, and the `new_requests` that it has served. Do not run it again."""
    engine, requests = new_engine(name, bf16_cache=bf16), new_requests()
    engine.run(requests)
    return engine, requests


def poison(engine: Engine) -> None:
    """Fills all caches and carried states with NaN bytes, as memory that others have used may be."""

    def poisoned(x):
        return jax.device_put(jnp.full_like(x, 255 if x.dtype == jnp.uint8 else jnp.nan), x.sharding)

    caches = jax.tree.map(poisoned, engine.state.caches)
    engine.state = dataclasses.replace(engine.state, caches=caches)


def snapshot(pool: RequestPool):
    """The free pages and rows, and the tables; equal before and after everything was given back."""
    return (
        sorted(map(int, pool.pages.free)),
        sorted(map(int, pool.swa_pages.free)),
        sorted(pool._free_rows),
        pool.req_to_token.tolist(),
        pool.full_to_swa.tolist(),
    )


def named_arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """A torch model's parameters and buffers as numpy arrays."""

    def array(x):
        if x.dtype == torch.bfloat16:
            return x.detach().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.detach().cpu().numpy()

    return {name: array(x) for name, x in module.state_dict().items()}


@torch.no_grad()
def torch_logits(module, tokens: list[int]) -> np.ndarray:
    """float32 `[tokens, vocab]`, transformers' own."""
    return module(torch.tensor([tokens])).logits[0].float().numpy()

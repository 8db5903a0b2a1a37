"""Models for `generate`, built in memory from a seed or loaded from a checkpoint, and a byte tokenizer."""

from __future__ import annotations

import os
from importlib import resources

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM

PRESETS = ("v4", "v32")


class ByteTokenizer:
    """Text as its UTF-8 bytes. A token that is no byte decodes to the replacement character."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


def default_prompt() -> str:
    """An English text long enough for 20 C128 entries, and for the C4 top-k to drop entries (one for every 4 bytes)."""
    return resources.files("sparse_mla_torch").joinpath("data/prompt.txt").read_text(encoding="utf-8")


def _v4_config() -> DeepseekV4Config:
    """True head dimensions, window, ratios and top-k; few layers, heads and channels."""
    return DeepseekV4Config(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=256,
        moe_intermediate_size=128,
        num_attention_heads=16,
        q_lora_rank=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        o_groups=4,
        o_lora_rank=64,
        index_n_heads=16,
        num_hidden_layers=4,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        mlp_layer_types=["moe"] * 4,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        attn_implementation="eager",
    )


def _v32_config() -> DeepseekV32Config:
    return DeepseekV32Config(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=128,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        index_n_heads=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        attn_implementation="eager",
    )


def build_preset(name: str, seed: int) -> PreTrainedModel:
    """A random model of preset "v4" or "v32" in bfloat16, the same for the same seed."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return random_model(_v4_config() if name == "v4" else _v32_config(), seed)


def random_model(config: DeepseekV4Config | DeepseekV32Config, seed: int) -> PreTrainedModel:
    """A random model of this config in bfloat16, the same for the same seed.

    transformers sets sinks, position biases and norm weights to constants. Here they are random too, so that code which
    ignores one of them gives another result.
    """
    torch.manual_seed(seed)
    model = (DeepseekV4ForCausalLM if config.model_type == "deepseek_v4" else DeepseekV32ForCausalLM)(config)
    model.apply(model._init_weights)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("sinks", "position_bias")):
                parameter.normal_()
            elif "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.ndim == 2 and parameter_name.startswith("model.layers"):
                # Unit gain, so that activations keep their size through a projection of this small width.
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    for parameter_name, parameter in model.named_parameters():
        if not any(part in parameter_name.split(".") for part in keep):
            parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def load_checkpoint(path: str):
    """The model of a checkpoint folder in bfloat16 with eager attention, and its tokenizer (bytes without one).

    Raises:
      OSError, ValueError: no such folder, no checkpoint in it, a model type that transformers does not know, or no
        tokenizer for a vocabulary smaller than that of bytes.
    """
    if not os.path.isdir(path):  # otherwise transformers would look for it on the Hub
        raise FileNotFoundError(f"no checkpoint folder {path}")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError):
        tokenizer = ByteTokenizer()
        if (vocabulary := model.config.vocab_size) < tokenizer.vocab_size:
            raise ValueError(f"{path} has no tokenizer, and a vocabulary too small for bytes: {vocabulary}") from None
    return model, tokenizer

"""Small random models with the true head dimensions, a slice of DeepSeek-V4-Flash, a tokenizer of bytes, and a text to
continue."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

VOCABULARY = 256

_YARN = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1}
# Sizes of all small models, and of those whose attention is V3.2's.
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 16,
}
_SMALL_LATENT = {**_SMALL, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}

# As `config.json` has them, with transformers' keys; its defaults hold for the others.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # True head dimensions, window, ratios and top-k; few layers, heads and channels.
    "v4": {
        "model_type": "deepseek_v4",
        **_SMALL,
        "num_attention_heads": 16,
        "o_groups": 4,
        "o_lora_rank": 64,
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["moe"] * 4,
        "rope_parameters": {**_YARN, "factor": 16.0, "original_max_position_embeddings": 65536},
    },
    "v32": {
        "model_type": "deepseek_v32",
        **_SMALL_LATENT,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {
            **_YARN,
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    # GLM-5.2's order of layers with an indexer and layers that share one, cut short.
    "glm5": {
        "model_type": "glm_moe_dsa",
        **_SMALL_LATENT,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "shared", "full"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # GLM-5.3-Flash's order of linear and sparse attention, cut short, and its pools. transformers' model has a vision
    # tower, which is as small as it can be and never runs.
    "glm53": {
        "model_type": "glm5_next",
        "text_config": {
            **_SMALL_LATENT,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_num_heads": 2,
            "index_kpool": 4,
            "pad_token_id": None,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 1,
            "intermediate_size": 16,
            "out_hidden_size": 256,
            "projection_intermediate_size": 16,
        },
    },
}
PRESETS = tuple(CONFIGS)
DEFAULT_PRESET = "v4"

# Four layers of DeepSeek-V4-Flash in their true size, with all experts: 51.1 GiB in bfloat16. They are of the kinds of
# the small model; the first chooses its experts by the token, as the first layers of the released model do.
V4_FLASH_SLICE: Mapping[str, Any] = {
    **CONFIGS["v4"],
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_topk": 512,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
}
# All of DeepSeek-V4-Flash: two window layers, then those of ratio 4 and of 128 by turns; three choose experts by token.
V4_FLASH: Mapping[str, Any] = {
    **V4_FLASH_SLICE,
    "num_hidden_layers": 43,
    "layer_types": ["sliding_attention"] * 2
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 20
    + ["compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
}
# Two layers of DeepSeek-V3.2 in their true size, one of them dense.
V32_SLICE: Mapping[str, Any] = {
    **CONFIGS["v32"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "index_n_heads": 64,
    "index_topk": 2048,
}
# The models that benchmarks/serving.py measures: the small ones, slices that are too large for most devices, and a
# model for several, with its weights as stored.
BENCH_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **CONFIGS,
    "v32-slice": V32_SLICE,
    "v4-flash-slice": V4_FLASH_SLICE,
    "v4-flash": V4_FLASH,
}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenizer_config.json", "vocab.json")


class ByteTokenizer:
    """Text as its UTF-8 bytes. A token that is no byte decodes to the replacement character."""

    vocab_size = VOCABULARY

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(t if 0 <= t < 256 else 0xFF for t in tokens).decode(errors="replace")  # 0xFF is not UTF-8


def default_prompt() -> str:
    """An English text long enough for 20 C128 entries, and for the C4 top-k to drop entries (one for every 4 bytes)."""
    return resources.files("jax_sparse_mla.serving").joinpath("data/prompt.txt").read_text(encoding="utf-8")


def load_tokenizer(folder: str, vocab_size: int):
    """The tokenizer of a checkpoint folder by transformers; bytes where the folder has none.

    Raises:
      ValueError: it has one, and transformers is missing or does not load it; or it has none, and the vocabulary is
        smaller than that of bytes.
    """
    from jax_sparse_mla.serving.files import path_in

    names = [name for name in TOKENIZER_FILES if os.path.lexists(Path(folder, name))]
    for name in names:
        path_in(Path(folder), name)  # refuses a link out of the folder
    if not names:
        if vocab_size < ByteTokenizer.vocab_size:
            raise ValueError(f"{folder} has no tokenizer, and a vocabulary too small for bytes: {vocab_size}")
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"the tokenizer of {folder} needs transformers: install the extra [hf] ({error})") from error
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # else it asks the user
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"transformers does not load the tokenizer of {folder}: {reason}") from error

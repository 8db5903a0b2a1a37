"""Configs: transformers' keys and the released ones, rotary frequencies, and what is refused by name."""

import json

import numpy as np
import pytest
from support.serving_models import config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

from jax_sparse_mla.serving.config import read_config

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


def keys(name, **changes):
    return json.loads(config(name).to_json_string()) | changes


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


def test_released_v4_keys():
    """The released config says the same in other words, and has a compress ratio for its draft layer too."""
    released = without(keys("v4"), "layer_types", "mlp_layer_types", "rope_parameters", "compress_rates")
    released |= {"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "rope_scaling": YARN}
    assert read_config(released) == read_config(keys("v4"))


def test_released_v32_keys():
    released = without(keys("v32"), "mlp_layer_types", "rope_parameters", "layer_types")
    yarn = keys("v32")["rope_parameters"]
    released |= {"rope_scaling": {"type": "yarn", **without(yarn, "rope_type", "rope_theta")}, "rope_theta": 10000}
    released |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert read_config(released) == read_config(keys("v32"))


def test_frequencies_are_transformers():
    def close(rope, inv_freq, magnitude):
        np.testing.assert_allclose(rope.inv_freq(), inv_freq.numpy(), rtol=3e-7)
        assert rope.magnitude == magnitude

    v4, ours = DeepseekV4RotaryEmbedding(config("v4")), read_config(keys("v4"))
    close(ours.window_rope, v4.main_inv_freq, v4.main_attention_scaling)
    close(ours.compress_rope, v4.compress_inv_freq, v4.compress_attention_scaling)
    for mscale in (1.0, 0.5):
        v32 = config("v32")
        v32.rope_parameters |= {"mscale": mscale}
        rotary = DeepseekV32RotaryEmbedding(v32)
        close(read_config(json.loads(v32.to_json_string())).rope, rotary.inv_freq, rotary.attention_scaling)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("v4", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("v4", {"scoring_func": "tanh"}, "scoring_func must be 'sqrtsoftplus' or 'softmax' or 'sigmoid', got 'tanh'"),
        ("v4", {"mlp_layer_types": ["moe", "dense", "moe"]}, "mlp_layer_types must be of .*, got 'dense'"),
        ("v4", {"mlp_layer_types": ["moe"]}, "mlp_layer_types must name 3 layers, got 1"),
        ("v4", {"compress_ratios": [0, 4, 8]}, r"must give 3 ratios of 0 or 4 or 128, got \[0, 4, 8\]"),
        ("v4", {"expert_dtype": "fp4"}, "expert_dtype must be None or 'fp8' or 'bf16', got 'fp4'"),
        ("v4", {"quantization_config": {"quant_method": "awq"}}, "quant_method must be 'fp8', got 'awq'"),
        ("v4", {"quantization_config": {"weight_block_size": [64, 64]}}, r"must be \[128, 128\], got \[64, 64\]"),
        ("v4", {"hidden_size": None}, "the config has no hidden_size"),
        ("v4", {"n_shared_experts": 2}, "n_shared_experts must be 1, got 2"),
        ("v32", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("v32", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
        ("v32", {"n_group": 3}, "n_group must divide n_routed_experts, got 3 and 8"),
        ("v32", {"rope_parameters": {"rope_type": "linear"}}, "rope_type must be 'default' or 'yarn', got 'linear'"),
        ("v32", {"model_type": "llama"}, "model_type must be 'deepseek_v32' or 'deepseek_v4', got 'llama'"),
    ],
)
def test_unknown_values_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        read_config(keys(name, **change))

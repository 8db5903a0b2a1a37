"""Configs: transformers' keys and the released ones, rotary frequencies, and what is refused by name."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
from support.hf_models import small_glm5_config
from support.serving_models import config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding

from jax_sparse_mla.models import indexed_layers
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


def test_released_glm5_keys():
    """GLM-5.2's: the schedule as frequency and offset, or as a pattern; other words for what else transformers says."""
    full = keys("glm5", num_hidden_layers=8, indexer_types=["full", "full", "full", *["shared"] * 3, "full", "shared"])
    full["mlp_layer_types"] = ["dense"] + ["sparse"] * 7
    wanted = read_config(full)
    assert wanted.indexed == (True, True, True, False, False, False, True, False) and wanted.index_interleaved
    assert not read_config(keys("v32")).index_interleaved and all(read_config(keys("v32")).indexed)
    released = without(full, "indexer_types", "mlp_layer_types", "rope_parameters", "layer_types")
    released |= {"rope_theta": 1000000, "indexer_rope_interleave": True, "rope_interleave": True, "head_dim": 192}
    released |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert read_config(released | {"index_topk_freq": 4, "index_skip_topk_offset": 3}) == wanted
    assert read_config(released | {"index_topk_pattern": "FFFSSSFS", "index_topk_freq": 2}) == wanted
    assert all(read_config(released | {"index_topk_freq": None}).indexed)


def test_released_glm53_keys():
    """The text model alone, or flat; what the released config says of its linear attention in one mapping."""
    whole = keys("glm53")
    text, wanted = whole["text_config"], read_config(whole)
    assert wanted.linear == wanted.dense == (True, False)
    assert (wanted.kda.heads, wanted.kda.head_dim, wanted.kda.kernel, wanted.kda.lower_bound) == (2, 32, 4, -5.0)
    assert (wanted.spec.index_pool, wanted.spec.index_width, wanted.streams.streams) == (4, 259, 4)
    assert read_config(text) == read_config({**text, "model_type": "glm5_next"}) == wanted
    released = without(text, *(name for name in text if name.startswith("linear_"))) | {"model_type": "glm5_next"}
    released["layer_types"] = ["linear_attention", "full_attention"]
    attention = {"num_heads": 2, "head_dim": 32, "short_conv_kernel_size": 4, "gate_lower_bound": None}
    assert read_config(released | {"linear_attn_config": attention}) == wanted
    unbounded = read_config(released | {"linear_attn_config": {**attention, "safe_gate": False}})
    assert unbounded.kda.lower_bound is None and unbounded.kda.heads == 2
    assert read_config(text | {"linear_lower_bound": None}).kda.lower_bound is None
    eos = read_config(whole | {"eos_token_id": [3, 5], "tie_word_embeddings": True})
    assert eos.eos_token_ids == (3, 5) and eos.tied and not wanted.tied


@pytest.mark.parametrize("name", ["v32", "glm5", "glm53"])
def test_a_missing_key_is_transformers_default_or_named(name):
    default = json.loads(type(config(name).get_text_config())().to_json_string())
    named = set()
    for key in without(default, "eos_token_id"):  # without it nothing ends a sequence
        try:
            assert read_config(without(default, key)) == read_config(default), key
        except ValueError as error:
            assert key in str(error)
            named.add(key)
    optional = {
        "n_group",
        "topk_group",
        "indexer_types",
        "v_head_dim",
        "qk_nope_head_dim",
        "rms_norm_eps",
        "index_n_heads",
        "index_kpool",
        "linear_num_heads",
        "linear_lower_bound",
        "layer_types",
        "swiglu_limit",
        "hc_mult",
    }
    assert "num_hidden_layers" in named and not optional & named


@pytest.mark.parametrize("name", ["v4", "v32", "glm5", "glm53"])
def test_null_is_as_a_missing_key(name):
    def read(config):
        try:
            return read_config(config)
        except ValueError as error:
            return str(error)

    text = json.loads(config(name).get_text_config().to_json_string())
    # null there is a decay without a bound, and false, as in transformers.
    for key in without(text, "linear_lower_bound", "norm_topk_prob"):
        assert read(text | {key: None}) == read(without(text, key)), key


@pytest.mark.parametrize("freq, offset", [(1, 2), (4, 3), (4, 2), (3, 0), (0, 2), (2, 5)])
def test_schedules_are_transformers(freq, offset):
    schedule = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    theirs = small_glm5_config(num_hidden_layers=13, indexer_types=None, **schedule).indexer_types
    read = {"model_type": "glm_moe_dsa", "num_hidden_layers": 13}
    if theirs[0] != "full":
        with pytest.raises(ValueError, match="index_topk_freq must begin with a layer that has an indexer"):
            indexed_layers(read | schedule)
        return
    assert indexed_layers(read | schedule) == tuple(kind == "full" for kind in theirs)


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
        ("v4", {"expert_dtype": "nvfp4"}, "expert_dtype must be None or 'fp4' or 'fp8' or 'bf16', got 'nvfp4'"),
        ("v4", {"quantization_config": {"expert_dtype": "int4"}}, "expert_dtype must be None or 'fp4' .*, got 'int4'"),
        ("v4", {"quantization_config": {"quant_method": "awq"}}, "quant_method must be 'fp8', got 'awq'"),
        ("v4", {"quantization_config": {"weight_block_size": [64, 64]}}, r"must be \[128, 128\], got \[64, 64\]"),
        ("v4", {"hidden_size": None}, "the config has no hidden_size"),
        ("v4", {"n_shared_experts": 2}, "n_shared_experts must be 1, got 2"),
        ("v4", {"head_dim": 0}, "has no cache layout"),
        ("v4", {"o_groups": 3}, r"o_groups must divide \d+ heads, got 3"),
        ("v4", {"rope_parameters": {"main": {}, "compress": {**YARN, "beta_fast": 1e-320}}}, "cannot be computed"),
        ("v32", {"rope_parameters": {**YARN, "mscale_all_dim": 1e300}}, "cannot be computed"),
        ("v32", {"rope_parameters": {**YARN, "mscale_all_dim": 1, "factor": None}}, "yarn rope parameters have no fac"),
        ("v32", {"max_position_embeddings": "long"}, "max_position_embeddings must be a positive integer, got 'long'"),
        ("v32", {"attention_bias": True}, "attention_bias must be False, got True"),
        ("v32", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
        ("v32", {"n_group": 3}, "n_group must divide n_routed_experts, got 3 and 8"),
        ("v32", {"n_group": 0}, "n_group must divide n_routed_experts, got 0 and 8"),
        ("v32", {"n_group": 2, "topk_group": 3}, "topk_group must be from 1 to 2, got 3"),
        ("v4", {"num_experts_per_tok": 99}, r"num_experts_per_tok must be from 1 to \d+, got 99"),
        ("v4", {"eos_token_id": "2"}, r"eos_token_id must be an integer or a list of them, got \('2',\)"),
        ("v4", {"rope_parameters": {"main": {}}}, "rope_parameters must have main and compress, got main alone"),
        (
            "v4",
            {"rope_parameters": {"compress": {}}},
            "rope_parameters must have main and compress, got compress alone",
        ),
        ("v32", {"rope_parameters": {"rope_type": "linear"}}, "rope_type must be 'default' or 'yarn', got 'linear'"),
        ("v32", {"model_type": "llama"}, "or 'glm_moe_dsa' or 'deepseek_v41' or 'glm5_next', got 'llama'"),
        (
            "v4",
            {
                "model_type": "deepseek_v41",
                "compress_ratios": [1] * 3,
                "kv_source_layer_ids": [0],
                "index_source_layer_ids": [0],
                "qk_rope_head_dim": 64,
            },
            "model_type 'deepseek_v41' is no whole model here",
        ),
        ("glm5", {"indexer_types": ["full", "half", "full"]}, "indexer_types must be of .*, got 'half'"),
        ("glm5", {"indexer_types": ["full"]}, r"indexer_types must name 3 layers, got \['full'\]"),
        ("glm5", {"indexer_types": ["shared", "full", "full"]}, "indexer_types must begin with a layer that has"),
        ("glm5", {"indexer_types": None, "index_topk_pattern": "FXF"}, "index_topk_pattern must be of .*, got 'X'"),
        ("glm5", {"indexer_types": None, "index_topk_freq": "4"}, "index_topk_freq must be an integer .*, got '4'"),
        ("glm5", {"indexer_rope_interleave": False}, "indexer_rope_interleave must be True, got False"),
        ("v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave must be False, got True"),
        (
            "v32",
            {"index_topk_freq": 4, "index_skip_topk_offset": 1},
            "index_topk_freq shares an indexer's entries, which only glm_moe_dsa does",
        ),
    ],
)
def test_unknown_values_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        read_config(keys(name, **change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer_types": ["linear_attention"] * 2}, "layer_types must have an indexed_attention layer"),
        ({"layer_types": ["linear_attention"]}, "layer_types must name 2 layers, got 1"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types must be of .*, got 'sliding_attention'"),
        (
            {"indexer_types": ["full", "shared"]},
            "indexer_types shares an indexer's entries, which only glm_moe",
        ),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail must be True, got False"),
        ({"n_group": 3}, "n_group must divide n_routed_experts, got 3 and 4"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"hidden_size": None}, "the config has no hidden_size"),
    ],
)
def test_unknown_values_of_glm53_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(keys("glm53")["text_config"] | change)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_the_experts_dtype_is_not_the_models(expert_dtype):
    """The tensors say what they are. transformers keeps the key beside those of the rest."""
    said = {"expert_dtype": expert_dtype}
    assert (
        read_config(keys("v4", **said)) == read_config(keys("v4", quantization_config=said)) == read_config(keys("v4"))
    )


def test_one_group_of_experts_needs_no_number_of_best_groups():
    """transformers' default is that of its own eight groups."""
    moe = read_config(without(keys("v32", n_group=1), "topk_group")).moe
    assert (moe.groups, moe.top_groups) == (1, 1)

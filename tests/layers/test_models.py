"""ModelSpec: the constants of design, and configs read as a checkpoint ships them and as transformers holds them."""

import types

import pytest

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.kv_cache import KVLayout
from jax_sparse_mla.models import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V32,
    ModelSpec,
    V41Layer,
    v4_layer_ratios,
    v41_layers,
)

# The attention keys of the checkpoints' own config.json.
V32_JSON = {
    "model_type": "deepseek_v32",
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
}
V4_JSON = {
    "model_type": "deepseek_v4",
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],  # the last is the draft layer's
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
}


# The text_config of DeepSeek-V4.1-Flash, with its three draft layers behind the 40 of the model.
V41_JSON = {
    "model_type": "deepseek_v41",
    "vision_config": {"num_hidden_layers": 24, "num_attention_heads": 16},
    "text_config": {
        "model_type": "deepseek_v41_text",
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "index_topk": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "q_head_norm": False,
    },
}


def v41_json(**changed):
    text = {k: v for k, v in (V41_JSON["text_config"] | changed).items() if v is not None}
    return {**V41_JSON, "text_config": text}


def test_checkpoint_configs_give_the_constants():
    import dataclasses

    assert dataclasses.replace(ModelSpec.from_hf_config(V32_JSON), name=DEEPSEEK_V32.name) == DEEPSEEK_V32
    assert dataclasses.replace(ModelSpec.from_hf_config(V4_JSON), name=DEEPSEEK_V4_FLASH.name) == DEEPSEEK_V4_FLASH


def test_transformers_configs():
    transformers = pytest.importorskip("transformers")
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    v32 = ModelSpec.from_hf_config(transformers.DeepseekV32Config(rope_parameters={"rope_theta": 10000.0, **yarn}))
    assert v32.softmax_scale == pytest.approx(DEEPSEEK_V32.softmax_scale)
    assert (v32.kv_layout, v32.index_topk, v32.num_heads) == (KVLayout.V32_FP8, 2048, 128)

    glm = ModelSpec.from_hf_config(transformers.GlmMoeDsaConfig())
    assert glm == ModelSpec.from_hf_config({"model_type": "glm_moe_dsa"})
    assert (glm.num_heads, glm.index_heads, glm.index_topk, glm.softmax_scale) == (64, 32, 2048, 256**-0.5)
    assert (glm.kv_layout, glm.qk_dim, glm.v_dim, glm.window) == (KVLayout.V32_FP8, 576, 512, None)

    glm53 = ModelSpec.from_hf_config(transformers.Glm5NextConfig(text_config={"index_kpool": 4}))
    assert glm53 == ModelSpec.from_hf_config({"model_type": "glm5_next", "index_kpool": 4})
    assert glm53 == ModelSpec.from_hf_config(transformers.Glm5NextTextConfig(index_kpool=4))
    assert ModelSpec.from_hf_config(transformers.Glm5NextConfig()).index_pool == 16
    assert (glm53.num_heads, glm53.index_heads, glm53.index_topk, glm53.softmax_scale) == (64, 32, 2048, 256**-0.5)
    assert (glm53.kv_layout, glm53.qk_dim, glm53.v_dim, glm53.rope_dim) == (KVLayout.NOPE_FP8, 512, 512, 0)
    assert (glm53.index_pool, glm53.page_size, glm53.index_width, glm.index_width) == (4, 256, 2051, 2048)

    assert ModelSpec.from_hf_config(transformers.DeepseekV32Config()).softmax_scale == 192**-0.5  # no yarn: no mscale
    config = transformers.DeepseekV4Config(num_hidden_layers=4, compress_ratios=[0, 4, 128, 4])
    v4 = ModelSpec.from_hf_config(config)
    assert v4_layer_ratios(config) == (0, 4, 128, 4)
    assert (v4.compress_ratios, v4.kv_layout, v4.rope_dim) == ((0, 4, 128), KVLayout.V4_FP8, 64)


def test_what_has_no_layout_is_refused():
    with pytest.raises(ValueError, match="model_type"):
        ModelSpec.from_hf_config({"model_type": "llama"})
    with pytest.raises(ValueError, match="no cache layout"):
        ModelSpec.from_hf_config({**V4_JSON, "head_dim": 256})
    for change, message in (
        ({"index_kpool": 1}, "index_kpool must be an integer from 2 on that divides index_topk, got 1 and 2048"),
        ({"index_topk": 0}, "index_topk must be a positive integer, got 0"),
        ({"index_head_dim": 64}, "index_head_dim must be 128, got 64"),
        ({"index_kpool": 3}, "index_kpool must be an integer from 2 on that divides index_topk, got 3 and 2048"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim must be 0 in glm5_next, got 64"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail must be True, got False"),
        ({"kv_lora_rank": 256}, "glm5_next with 256 . 0 K values and 256 V values has no cache layout"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelSpec.from_hf_config({"model_type": "glm5_next", **change})
    with pytest.raises(ValueError, match="compress_ratios or layer_types"):
        ModelSpec.from_hf_config({k: v for k, v in V4_JSON.items() if k != "compress_ratios"})


def test_v41_config():
    spec = ModelSpec.from_hf_config(V41_JSON)
    assert (spec.num_heads, spec.qk_dim, spec.v_dim, spec.nope_dim, spec.rope_dim) == (64, 512, 512, 448, 64)
    assert (spec.softmax_scale, spec.window, spec.compress_ratios) == (512**-0.5, 128, (0, 1, 2))
    assert (spec.index_heads, spec.index_topk, spec.has_attn_sink) == (32, 512, True)
    assert (spec.kv_layout, spec.compressed_layout) == (KVLayout.V41_FP8, KVLayout.V41_FP4)
    assert (spec.index_format, spec.candidate_blocks, spec.candidate_block_size) == (IndexFormat.FP4, 2048, 8)
    # As an engine that reads the config flat has it, and as an object.
    flat = {k: v for k, v in V41_JSON["text_config"].items() if k != "model_type"} | {"model_type": "deepseek_v41"}
    assert ModelSpec.from_hf_config(flat) == spec
    assert ModelSpec.from_hf_config(types.SimpleNamespace(**{**V41_JSON, "text_config": types.SimpleNamespace(**flat)}))
    assert ModelSpec.from_hf_config(V41_JSON["text_config"]) == spec

    layers = v41_layers(V41_JSON)
    assert len(layers) == 40 and layers[:2] == (V41Layer(index=0), V41Layer(index=1))
    assert [x.index for x in layers if x.is_kv_source] == [2, 8, 14, 20]
    assert [x.index for x in layers if x.is_index_source] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [layers[i].kv_source for i in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [layers[i].index_source for i in (2, 7, 23, 24, 27, 39)] == [2, 2, 20, 24, 24, 36]
    assert [x.index for x in layers if x.publishes] == [20]
    assert [x.index for x in layers if x.among_candidates] == [24, 28, 32, 36]
    plain = ModelSpec.from_hf_config(v41_json(candidate_source_layer_id=-1, candidate_topk_blocks=None))
    assert (plain.candidate_blocks, plain.candidate_block_size) == (0, 0)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"compress_ratios": None}, "v41_layers: compress_ratios must name 40 layers, got None"),
        ({"compress_ratios": [0, 1]}, "compress_ratios must name 40 layers"),
        ({"compress_ratios": [0] * 2 + [4] * 38}, "compress_ratios must be of 0, 1, 2, got 4"),
        ({"num_hidden_layers": None}, "the config has no num_hidden_layers"),
        ({"kv_source_layer_ids": None}, "the config has no kv_source_layer_ids"),
        ({"index_source_layer_ids": []}, "the config has no index_source_layer_ids"),
        ({"kv_source_layer_ids": [0, 2, 20]}, "kv_source_layer_ids must name layers that compress, got 0"),
        ({"index_source_layer_ids": [2, 20, 40]}, "index_source_layer_ids must name layers that compress, got 40"),
        ({"kv_source_layer_ids": [2, 9, 20]}, "kv_source_layer_ids must be of index_source_layer_ids.*got 9"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "kv_source_layer_ids must have a layer at or below 2"),
        (
            {"kv_source_layer_ids": [2]},
            "kv_source_layer_ids must be of their readers' ratio, got layer 20 of ratio 1 and 2",
        ),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id must be -1 or one of index_source_layer_ids"),
        ({"candidate_source_layer_id": 8}, "candidate_source_layer_id must be of the ratio of layer 20, 1, got 2"),
        ({"candidate_topk_blocks": None}, "the deepseek_v41 config has no candidate_topk_blocks"),
        ({"candidate_block_size": 7}, "candidate_block_size must be a divisor of 128, got 7"),
        ({"index_head_dim": 64}, "index_head_dim must be 128, got 64"),
        ({"index_topk": None}, "the deepseek_v41 config has no index_topk"),
        ({"index_topk": 0}, "index_topk must be a positive integer, got 0"),
        ({"candidate_topk_blocks": "x"}, "candidate_topk_blocks must be a positive integer, got 'x'"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers must be a positive integer, got '6'"),
        ({"compress_ratios": 5}, "compress_ratios must name 40 layers, got 5"),
        ({"kv_source_layer_ids": ["2", 8]}, r"kv_source_layer_ids must be a list of integers, got \['2', 8\]"),
        ({"head_dim": 256}, "no cache layout"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(x),
)
def test_unknown_v41_configs_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf_config(v41_json(**changed))


def test_layers_of_configs():
    """One kind a layer, in order; and what stands for a ratio where layers of it differ."""
    v4 = ModelSpec.from_hf_config(V4_JSON)
    assert [layer.ratio for layer in v4.layers] == V4_JSON["compress_ratios"][:6]
    assert [layer.selects for layer in v4.layers] == ["none", "none", "own", "all", "own", "all"]
    pro = ModelSpec.from_hf_config({**V4_JSON, "num_hidden_layers": 2, "compress_ratios": [128, 4, 0]})
    assert pro.kinds == DEEPSEEK_V4_FLASH.kinds and [layer.ratio for layer in pro.layers] == [128, 4]
    assert v4.kinds == DEEPSEEK_V4_FLASH.kinds and DEEPSEEK_V4_FLASH.layers == ()
    assert v4.kind(4).overlap and not v4.kind(128).overlap and v4.windowed

    v41 = ModelSpec.from_hf_config(V41_JSON)
    assert [i for i, layer in enumerate(v41.layers) if layer.owns_kv] == [2, 8, 14, 20]
    assert [i for i, layer in enumerate(v41.layers) if layer.selects == "own"] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [v41.layers[i].candidates for i in (8, 20, 24, 25)] == ["none", "publishes", "among", "none"]
    assert [(v41.kind(r).owns_kv, v41.kind(r).gated) for r in (0, 1, 2)] == [
        (False, False),
        (True, False),
        (True, True),
    ]

    shared = {"model_type": "glm_moe_dsa", "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
    glm = ModelSpec.from_hf_config(shared)
    assert [layer.selects for layer in glm.layers] == ["own", "shared", "own"] and not glm.windowed
    unknown = {**shared, "indexer_types": ["full", "odd", "full"]}  # `indexed_layers` refuses it
    assert ModelSpec.from_hf_config(unknown) == glm and ModelSpec.from_hf_config(unknown).layers == ()
    glm53 = ModelSpec.from_hf_config({"model_type": "glm5_next", "num_hidden_layers": 4})
    assert [layer.selects for layer in glm53.layers] == ["none", "none", "none", "own"]
    assert (glm53.kind().pool, glm53.kind().index_keys) == (16, "tokens")

"""Checkpoints: what transformers saves, released names and FP8 blocks, several files, state dicts, what is refused."""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.numpy import save_file
from support.draft_layers import named_draft, new_draft_layer
from support.hf_models import named_arrays
from support.released_checkpoints import FP4_CONFIG, FP8_CONFIG, quantised, released_v4, without_quantised, write
from support.serving_models import jax_model, torch_model

from jax_sparse_mla.serving import Model, load
from jax_sparse_mla.serving.checkpoint import from_named_arrays
from jax_sparse_mla.serving.presets import ByteTokenizer, load_tokenizer
from jax_sparse_mla.serving.quantised import JoinedRows, Quantised

MODELS = ("v4", "v32")


def weights_by_name(params):
    tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, Quantised | JoinedRows))[0]
    return {next(part.name for part in path[::-1] if hasattr(part, "name")): x for path, x in tree}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", [*MODELS, "glm53"])
def test_what_transformers_saves(name, tmp_path):
    """In one file and in several: the same parameters as the module's state dict."""
    module = torch_model(name, torch.bfloat16)
    model, params = jax_model(name, torch.bfloat16)
    for folder, size in ((tmp_path / "one", "1GB"), (tmp_path / "several", "200KB")):
        module.save_pretrained(folder, max_shard_size=size)
        loaded, loaded_params = load(folder)
        assert loaded == model and hash(loaded) == hash(model)
        same(loaded_params, params)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    dtypes = {x.dtype.name for x in jax.tree.leaves(params)}
    assert dtypes == ({"bfloat16", "float32", "int32"} if name == "v4" else {"bfloat16", "float32"})
    assert all(
        x.dtype == jnp.float32 for x in jax.tree.leaves(jax_model(name, torch.float32)[1]) if x.dtype != jnp.int32
    )


@pytest.mark.parametrize(
    "name, scale_dtype, fp4_experts",
    [
        ("v4", ml_dtypes.float8_e8m0fnu, False),
        ("v32", np.float32, False),
        ("v4", ml_dtypes.float8_e8m0fnu, True),
    ],
)
def test_released_checkpoint(name, scale_dtype, fp4_experts, tmp_path):
    """Released names, experts one by one, weights in FP8 blocks or FP4, a draft layer: the parameters of the same
    values."""
    module = torch_model(name, torch.bfloat16)
    draft = new_draft_layer(module.config).to(torch.bfloat16)
    plain, stored = quantised(named_arrays(module) | named_draft(draft), scale_dtype, fp4_experts=fp4_experts)
    # What a draft layer shares with the model, and a second one.
    for left_out in (
        ("mtp.0.head.weight", "mtp.0.embed.weight", "mtp.1.e_proj.weight")
        if name == "v4"
        else (
            f"{draft.prefix}embed_tokens.weight",
            f"{draft.prefix}shared_head.head.weight",
            f"model.layers.{module.config.num_hidden_layers + 1}.eh_proj.weight",
        )
    ):
        stored[left_out] = np.zeros((2, 2), np.int8)
    config = json.loads(module.config.to_json_string()) | (FP4_CONFIG if fp4_experts else FP8_CONFIG)
    if name == "v4":
        stored = released_v4(stored)
        assert {"embed.weight", "layers.0.attn.wq_a.scale", "layers.1.attn.indexer.compressor.wgate.weight"} <= set(
            stored
        )
        assert {"mtp.0.e_proj.scale", "mtp.0.attn.wq_a.scale", "mtp.0.hc_head_fn", "mtp.0.ffn.gate.bias"} <= set(stored)
        assert {"layers.1.ffn.experts.3.w2.scale", "layers.2.hc_attn_fn", "layers.1.attn.compressor.ape"} <= set(stored)
        experts = {x.dtype.name for n, x in stored.items() if ".experts." in n and n.endswith(".weight")}
        assert experts == {"int8" if fp4_experts else "float8_e4m3fn"}
    folder = write(tmp_path / name, config, stored)
    model, params = load(folder)
    wanted = from_named_arrays(model.config, plain)
    same(load(folder, as_stored=False)[1], wanted)
    same(without_quantised(params), wanted)
    # All that products read is held as in the file; V3.2's products of heads read other weights.
    down = [x for n, x in stored.items() if re.search(r"layers\.1\..*[^d]_?experts\.\d+\.(w2|down_proj)\.weight$", n)]
    np.testing.assert_array_equal(params.layers[1].mlp.down.values, [x.view(np.uint8) for x in down])
    held = {n for n, x in weights_by_name(params).items() if isinstance(x, Quantised | JoinedRows)}
    read = {"q_b", "gate_up", "down", "shared_gate_up", "shared_down", "in_proj", "projections"}
    assert held == read | ({"o_a", "o_b"} if name == "v4" else {"o_proj"})
    same(load(folder, draft_layer=False)[1], dataclasses.replace(params, draft=None))
    without = dataclasses.replace(wanted, draft=None)
    # A drafter of another form is none.
    del plain[draft.prefix + ("e_proj.weight" if name == "v4" else "eh_proj.weight")]
    same(from_named_arrays(model.config, plain | {f"{draft.prefix}main_proj.weight": np.zeros(2)}), without)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model.layers.0.mlp.shared_experts.up_proj.weight": None}, "missing: layers.0.mlp.shared_experts.up_proj.w"),
        ({"model.layers.1.self_attn.extra": np.zeros(3)}, "unknown: layers.1.self_attn.extra"),
        ({"model.norm.weight": np.zeros(3, np.float32)}, r"norm.weight must have shape \[64\], got \[3\]"),
        ({"lm_head.weight": np.zeros((256, 64), np.int8)}, "lm_head.weight must be of .*, got int8"),
        (
            {"lm_head.weight": np.zeros((256, 64), ml_dtypes.float8_e4m3fn)},
            r"needs .*scale_inv of shape \[2, 1\], got n",
        ),
        (
            {
                "lm_head.weight": np.zeros((256, 64), ml_dtypes.float8_e4m3fn),
                "lm_head.weight_scale_inv": np.ones((2, 1), np.uint8),
            },
            "lm_head.weight_scale_inv of FP8 must be of .*, float8_e8m0fnu, got uint8",
        ),
        ({"model.layers.0.mlp.gate.tid2eid": np.zeros((256, 2))}, "tid2eid must be an integer array, got float64"),
        ({"model.embed_tokens.weight": np.zeros((256, 64), np.float16)}, "must be bfloat16 or float32, got float16"),
    ],
)
def test_wrong_tensors_are_named(change, message):
    arrays = named_arrays(torch_model("v4", torch.bfloat16)) | change
    model, _ = jax_model("v4", torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        from_named_arrays(model.config, {name: x for name, x in arrays.items() if x is not None})


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint folder"):
        load(tmp_path / "none")
    (tmp_path / "config.json").write_text(torch_model("v4", torch.bfloat16).config.to_json_string())
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"lacks gone\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"a": np.zeros(8)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for length, message in ((len(whole) - 1, "is cut short: a"), (20, "no safetensors file")):
        (tmp_path / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_random_parameters(name):
    """The shapes and dtypes of a loaded model, unit gain, and other values for another seed and layer."""
    model, loaded = jax_model(name, torch.bfloat16)
    params, other = model.init_params(0), model.init_params(1)
    same(params, model.init_params(0))
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), params, loaded)
    weights = [np.asarray(x.attention.in_proj, np.float32) for x in params.layers] + [
        np.asarray(other.layers[0].in_proj, np.float32)
    ]
    rows = min(len(x) for x in weights)
    for i, x in enumerate(weights):
        assert abs(x.std() * x.shape[1] ** 0.5 - 1) < 0.02 and abs(x.mean()) < 0.01
        for y in weights[:i]:
            assert abs(np.corrcoef(x[:rows].ravel(), y[:rows].ravel())[0, 1]) < 0.03
    if name == "v4":
        table = np.asarray(params.layers[0].mlp.experts_of_token)
        assert (table[:, 0] != table[:, 1]).all() and len(np.unique(table)) == model.config.moe.num_experts


def test_model_is_what_the_config_says():
    model = Model.from_config(torch_model("v4", torch.bfloat16).config.to_dict())
    assert model == jax_model("v4", torch.bfloat16)[0]
    assert (model.vocab_size, model.num_layers, model.ratios, model.eos_token_ids) == (256, 3, (0, 4, 128), (1,))
    assert model.spec.index_topk == 96 and model.config.hashed == (True, False, False)


def test_a_tokenizer_that_is_there_is_not_replaced(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="has no tokenizer, and a vocabulary too small for bytes: 99"):
        load_tokenizer(tmp_path, 99)
    assert isinstance(load_tokenizer(tmp_path, 256), ByteTokenizer)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="transformers does not load the tokenizer of"):
        load_tokenizer(tmp_path, 256)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: install the extra \[hf\]"):
        load_tokenizer(tmp_path, 256)


def test_tokens_that_are_no_bytes_are_replaced():
    assert ByteTokenizer().decode([72, 300, 105, -1]) == "H\ufffdi\ufffd"

"""Files of a checkpoint: the index decides, nothing outside the folder is read, broken ones are named, end tokens."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
import safetensors
from safetensors.numpy import load_file, save_file
from support.hf_models import named_arrays
from support.serving_models import config, jax_model, torch_model

from jax_sparse_mla.cli import main
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving import load
from jax_sparse_mla.serving.checkpoint import from_named_arrays
from jax_sparse_mla.serving.config import read_config
from jax_sparse_mla.serving.files import INDEX, map_file, map_folder

CONFIG = json.loads(config("v32").to_json_string())


def shards(folder, weight_map, **tensors):
    """Files of one tensor `a` each, of the given values, and an index."""
    for name, value in tensors.items():
        save_file({"a": np.full(2, value)}, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_decides(tmp_path):
    shards(tmp_path, {"a": "an-overlay.safetensors"}, base=1.0)
    save_file({"a": np.full(2, 2.0)}, tmp_path / "an-overlay.safetensors")
    (tmp_path / "unnamed.safetensors").write_bytes(b"")
    assert map_folder(tmp_path)["a"].tolist() == [2, 2]
    shards(tmp_path, {"a": "base.safetensors"})
    assert map_folder(tmp_path)["a"].tolist() == [1, 1]
    shards(tmp_path, {"a": "base.safetensors", "b": "base.safetensors"})
    with pytest.raises(ValueError, match=rf"{INDEX}: b is not in base\.safetensors"):
        map_folder(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / "unnamed.safetensors").unlink()
    with pytest.raises(ValueError, match=r"base\.safetensors: a is in an-overlay\.safetensors too"):
        map_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "sub/x.safetensors", "{}/secret.safetensors", "..", "", "a\0"]
)
def test_an_index_names_files_of_its_folder(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": np.ones(2)}, tmp_path / "secret.safetensors")
    shards(folder, {"a": name.format(tmp_path)})
    with pytest.raises(ValueError, match=f"{INDEX}: weight_map must name files of the folder"):
        map_folder(folder)


@pytest.mark.parametrize(
    "name", ["model.safetensors", INDEX, "config.json", "generation_config.json", "tokenizer.json"]
)
def test_links_stay_in_the_folder(name, tmp_path):
    """Only the cache of Hugging Face has its files elsewhere: `blobs` beside `snapshots`."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/123", tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    jax_model("v32", torch.bfloat16)
    torch_model("v32", torch.bfloat16).save_pretrained(snapshot)
    shards_of = {key: "model.safetensors" for key in load_safe(snapshot / "model.safetensors")}
    (snapshot / INDEX).write_text(json.dumps({"weight_map": shards_of}))
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    load(snapshot)
    path = snapshot / name
    (blobs / name).rename(tmp_path / name) if path.is_symlink() else (tmp_path / name).write_text("{}")
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: a link that leads out of the folder"):
        load(snapshot)
        from jax_sparse_mla.serving.presets import load_tokenizer

        load_tokenizer(snapshot, 256)


def load_safe(path):
    with safetensors.safe_open(path, "numpy") as file:
        return list(file.keys())


DEEP = b"[" * 100_000
BROKEN = [
    *(("config.json", data) for data in (b"", b"[]", b"null", b"\xff\xfe{\0}\0", b'{"a": 1,\n x', DEEP, b"9" * 5000)),
    *(
        ("config.json", json.dumps(CONFIG | {"hidden_size": x}).encode())
        for x in ("64", [], True, -1, 2.5, float("nan"))
    ),
    *(
        ("config.json", json.dumps(CONFIG | {key: x}).encode())
        for key in ("layer_types", "text_config")
        for x in (3, "x")
    ),
    *(
        ("config.json", json.dumps(CONFIG | {key: 3}).encode())
        for key in ("model_type", "quantization_config", "rope_scaling")
    ),
    *(("generation_config.json", data) for data in (b"", b"[1]", b"null", b"{", b'{"eos_token_id": true}')),
    *(("generation_config.json", b'{"eos_token_id": %s}' % x) for x in (b"[[1]]", b'"1"', b"1.5", b"[null]", b"{}")),
    *((INDEX, data) for data in (b"version https://git-lfs.github.com/spec/v1\n", b"", b"{}", b"[]", b"null", DEEP)),
    *((INDEX, b'{"weight_map": %s}' % x) for x in (b"[]", b"null", b"{}", b'{"a": 1}', b'{"a": {}}', b'"x"')),
    (INDEX, b'{"weight_map": {"a": "x", "a": "y"}}'),
    *(("model.safetensors", x) for x in (b"", bytes(8), bytes(99), b"version https://git-lfs", b"\xff" * 99)),
    *(("model.safetensors", len(x).to_bytes(8, "little") + x) for x in (b"[]", b"{", b'{"a": 1}', DEEP, b"\xff\xff")),
]


@pytest.mark.parametrize("name, data", BROKEN)
def test_broken_files_are_named(name, data, tmp_path, capsys):
    """By `load`, and by the command in one line with status 2."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": np.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=str(tmp_path / name)):
        load(tmp_path)
    assert main(["generate", "--model", str(tmp_path), "--no-check", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and name in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "model.safetensors"])
def test_no_endless_text_is_read(name, tmp_path):
    """Files of a terabyte that take no room on the disk."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with open(tmp_path / name, "wb") as file:
        file.write((2**40 - 8).to_bytes(8, "little"))
        file.truncate(2**40)
    with pytest.raises(ValueError, match=rf"{name}: .*must have at most 100000000 bytes of JSON, got "):
        load(tmp_path)


def test_no_regular_file_is_read(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json: not a regular file"):
        load(tmp_path)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "f32", "float32", "int8", 3, None]),
        "shape": st.lists(st.integers(-1, 3), max_size=3)
        | st.sampled_from([None, 2, [2.0], ["2"], [2**70, 0], [1] * 40]),
        "data_offsets": st.lists(st.integers(-1, 16), min_size=1, max_size=3) | st.sampled_from([None, [0, 2**70]]),
    }
)
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.just(GOOD) | ENTRY, max_size=2), st.integers(0, 16))
def test_safetensors_reads_what_is_read(tmp_path_factory, header, size):
    path = tmp_path_factory.getbasetemp() / "one.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(size)))
    try:
        theirs = load_safe(path)
    except Exception:
        with pytest.raises(ValueError, match=r"one\.safetensors"):
            map_file(path)
        return
    if any(len(entry["shape"]) > 32 or max(entry["shape"], default=0) > 2**48 for entry in header.values()):
        return
    ours = map_file(path)
    assert sorted(ours) == sorted(theirs)
    if not any(entry["dtype"] == "BF16" for entry in header.values()):
        for name, array in load_file(path).items():
            np.testing.assert_array_equal(array.view(np.uint8), np.asarray(ours[name]).view(np.uint8))


@pytest.mark.parametrize(
    "generation, in_config, tokens",
    [
        ({"eos_token_id": [255, 42]}, None, (255, 42)),
        ({"eos_token_id": [255, 42]}, 255, (255, 42)),
        ({"eos_token_id": 42}, [1, 2], (42,)),
        ({"eos_token_id": None}, [1, 2], (1, 2)),
        ({}, 7, (7,)),
        (None, 7, (7,)),
    ],
)
def test_end_tokens(generation, in_config, tokens, tmp_path):
    torch_model("v32", torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("\ufeff" + json.dumps(CONFIG | {"eos_token_id": in_config}), encoding="utf-8")
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load(tmp_path)[0].eos_token_ids == tokens


def test_rope_scaling_goes_before_rope_parameters():
    """For the scale and the frequencies, as in transformers."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "mscale_all_dim": 1.0}
    both = CONFIG | {"rope_scaling": {**yarn, "rope_theta": 5000.0, "mscale": 1.0}}
    theirs = json.loads(type(config("v32"))(**both).to_json_string())
    assert "rope_scaling" not in theirs and theirs["rope_parameters"]["factor"] == 8
    assert read_config(both) == read_config(theirs) and read_config(both).rope.factor == 8
    assert ModelSpec.from_hf_config(both).softmax_scale == ModelSpec.from_hf_config(theirs).softmax_scale
    assert read_config(CONFIG | {"rope_scaling": {}}) == read_config(CONFIG)


def test_released_words():
    text = json.loads(config("glm53").to_json_string())["text_config"]
    released = text | {"layer_types": ["linear_attention", "deepseek_sparse_attention"]}
    assert read_config(released) == read_config(text)
    v4 = json.loads(config("v4").to_json_string())
    for limit in (0, -1.0):
        assert read_config(v4 | {"swiglu_limit": limit}).moe.limit is None
        assert read_config(text | {"swiglu_limit": limit}).moe.limit is None


def test_an_indexer_that_is_not_used_is_left_out():
    model, params = jax_model("glm5", torch.bfloat16)
    arrays = named_arrays(torch_model("glm5", torch.bfloat16))
    indexer = {name: x for name, x in arrays.items() if ".layers.0.self_attn.indexer." in name}
    unused = {name.replace(".0.", ".1.", 1): x for name, x in indexer.items()}
    assert indexer and not unused.keys() & arrays.keys()
    again = from_named_arrays(model.config, arrays | unused)
    assert torch.utils._pytree.tree_structure(again) == torch.utils._pytree.tree_structure(params)


def test_a_tensor_that_is_stored_twice_is_named():
    arrays = named_arrays(torch_model("v32", torch.bfloat16))
    with pytest.raises(ValueError, match=r"norm.weight is stored twice, once as norm\.weight"):
        from_named_arrays(
            jax_model("v32", torch.bfloat16)[0].config, arrays | {"norm.weight": arrays["model.norm.weight"]}
        )

"""`jax-sparse-mla generate` with the presets of DeepSeek and their true top-k, checked by transformers, once each."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import jax

from jax_sparse_mla.cli import main
from jax_sparse_mla.serving import presets

# A quarter of the heads, half of the channels and one layer of each kind, with the true head dimensions, window, ratios
# and top-k: two fifths of the whole preset's time.
NARROW = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "num_hidden_layers": 3,
    "layer_types": presets.CONFIGS["v4"]["layer_types"][:3],
    "mlp_layer_types": presets.CONFIGS["v4"]["mlp_layer_types"][:3],
}


@pytest.fixture(autouse=True)
def not_kept():
    """jaxlib 0.10.2 aborted or hung twice where it serialised the whole preset's programs for the compilation cache."""
    kept = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", kept)


def run(capsys, *args):
    """The exit status of `jax-sparse-mla generate *args --verbose`, and what it printed."""
    status = main(["generate", *args, "--verbose"])
    return status, capsys.readouterr().out


def long_prompt(folder):
    """Options: a prompt of 2,148 tokens, which two chunks hold."""
    (folder / "prompt.txt").write_text(presets.default_prompt()[:2148], encoding="utf-8")
    return ["--prompt-file", f"{folder}/prompt.txt", "--chunk-size", "1074"]


@pytest.mark.long
@pytest.mark.parametrize("changes", [pytest.param(NARROW, id="narrow"), pytest.param({}, id="whole")])
def test_v4_preset_end_to_end(capsys, tmp_path, monkeypatch, changes):
    """A hundred tokens more than those whose entries are all selected."""
    monkeypatch.setitem(presets.CONFIGS, "v4", {**presets.CONFIGS["v4"], **changes})
    status, out = run(capsys, *long_prompt(tmp_path), "--max-new-tokens", "4")
    assert status == 0 and out.endswith("check      passed\n")
    assert "V4_FP8" in out and "2148 prompt tokens" in out
    kinds = "window; window + C4 top-512; window + C128"
    for step in ("prefill", "decode"):
        assert re.search(rf"^ran +{step}: \w+, {step} \({re.escape(kinds)}\)$", out, re.M)
    dropping = re.findall(r"C4 top-512 +0\.999\d+ +0\.99\d+ +0\.9[89]\d+ +\(100\)", out)
    assert len(dropping) == presets.CONFIGS["v4"]["layer_types"].count("compressed_sparse_attention")


@pytest.mark.long
def test_glm53_preset_end_to_end(capsys, tmp_path):
    """A hundred tokens more than are selected, in pools that chunks cut."""
    args = ["--preset", "glm53", *long_prompt(tmp_path), "--max-new-tokens", "3"]
    status, out = run(capsys, *args)
    assert status == 0 and out.endswith("check      passed\n")
    assert "NOPE_FP8" in out and len(re.findall(r"^ +\d  linear attention ", out, re.M)) == 3
    assert len(re.findall(r"^ +3  top-2048 in pools of 4 .*\(99\)$", out, re.M)) == 1


@pytest.mark.long
def test_v32_preset_end_to_end(capsys, tmp_path):
    """A hundred tokens more than are selected."""
    args = ["--preset", "v32", *long_prompt(tmp_path), "--max-new-tokens", "3"]
    status, out = run(capsys, *args)
    assert status == 0 and out.endswith("check      passed\n")
    assert "V32_FP8" in out and len(re.findall(r"^ +\d  top-2048 .*\(102\)$", out, re.M)) == 2

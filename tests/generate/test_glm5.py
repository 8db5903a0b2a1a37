"""GLM-5, whose layers share selections: hand-over, and `generate --preset glm5`."""

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_models
from hf_models import new_engine, new_requests
from safetensors.torch import load_file
from sparse_mla_torch.handover import export_request, import_request

from jax_sparse_mla.cli import main
from jax_sparse_mla.serving import presets as texts

pytestmark = pytest.mark.torch


@pytest.mark.long
def test_a_request_goes_to_another_engine_and_back(tmp_path):
    """Its files are the same, without index keys of the layer that shares, and the tokens go on as they would have."""
    engine, files = new_engine("glm5", trace=False), [tmp_path / "there", tmp_path / "back"]
    (request, *_) = new_requests()

    def export(step, requests):
        if len(request.output) == 2 and not files[0].exists():
            export_request(engine, request, files[0])

    engine.run([request], export)
    other = new_engine("glm5", trace=False, seed=3)
    export_request(other, import_request(other, files[0], request.max_new_tokens), files[1])
    there, back = map(load_file, files)
    layers = {0: ("kv.data", "index_k"), 1: ("kv.data",), 2: ("kv.data", "index_k")}
    assert set(there) == {"tokens", *(f"layers.{i}.{name}" for i, names in layers.items() for name in names)}
    assert set(there) == set(back) and all(torch.equal(x, back[name]) for name, x in there.items())
    assert all(x.any() for x in there.values())
    again = import_request(engine, files[1], request.max_new_tokens)
    engine.run([again])
    assert again.output == request.output and len(again.output) > 3


@pytest.fixture
def small_preset(monkeypatch):
    monkeypatch.setitem(texts.CONFIGS, "glm5", hf_models.as_preset(hf_models.small_glm5_config()))
    text = texts.default_prompt()[:470]
    monkeypatch.setattr(texts, "default_prompt", lambda: text)


@pytest.mark.long
@pytest.mark.parametrize("drafts", [0, 2])
def test_generate(capsys, small_preset, drafts):
    """Plain decoding is compared with transformers, and drafts of the first layer with plain decoding."""
    sizes = ["--max-new-tokens", "4", "--chunk-size", "112"] + ["--speculative-steps", str(drafts)] * bool(drafts)
    status = main(["generate", "--preset", "glm5", *sizes, "--verbose"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert len(re.findall(r"^ +\d  top-64 +\d", out, re.M)) == 2 and re.search(r"^ +1  top-64, shared ", out, re.M)
    assert out.count("check      passed") == 1 + bool(drafts)

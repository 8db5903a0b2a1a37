"""GLM-5 in both engines: layers that share a selection, against transformers; `generate --preset glm5`; hand-over."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_models
from hf_models import DEVICE, new_engine, new_requests, random_tokens, served, small_model, to_jax_model
from safetensors.torch import load_file
from sparse_mla_torch.handover import export_request, import_request
from sparse_mla_torch.hf.comparison import TorchRun, compare_layers
from sparse_mla_torch.hf.replace import selected_indices

from jax_sparse_mla.cli import main
from jax_sparse_mla.serving import presets as texts
from jax_sparse_mla.serving.engine import Engine as JaxEngine

pytestmark = pytest.mark.torch


def test_the_oracle_is_what_transformers_runs():
    model, seen = small_model("glm5"), []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, out: seen.append((kwargs["hidden_states"], out[0])), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad(), selected_indices() as chosen:
        model(input_ids=torch.tensor([random_tokens(300)], device=DEVICE), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(chosen) == 2 and len(seen) == 3
    positions = None
    for layer, (hidden, expected) in zip(new_engine("glm5").layers, seen):
        before = positions
        with torch.no_grad():
            out, positions = layer.eager(hidden, model, *[before] * layer.shares)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        assert (positions is before) == layer.shares


@pytest.mark.long
def test_layers_match_eager():
    run = served("glm5", False)
    reports = compare_layers(TorchRun(run.engine), run.requests)
    assert [report.kind for report in reports] == ["top-64", "top-64, shared", "top-64"]
    for report in reports:
        assert report.passes("fp8") and report.dropping_rows > 300, report
    assert reports[1].overlap == reports[0].overlap != reports[2].overlap
    assert [run.engine.layer_cache(i).index_k is None for i in range(3)] == [False, True, False]
    for traced in run.engine.trace:
        np.testing.assert_array_equal(traced.selected(1), traced.selected(0))


@pytest.mark.long
def test_a_request_goes_from_torch_to_jax_and_back(tmp_path):
    """Its files are the same, without index keys of the layer that shares, and the tokens go on as they would have."""
    engine, files = new_engine("glm5", trace=False), [tmp_path / "torch", tmp_path / "jax"]
    (request, *_) = new_requests()

    def export(step, requests):
        if len(request.output) == 2:
            export_request(engine, request, files[0])

    engine.run([request], export)
    jax_engine = JaxEngine(*to_jax_model(small_model("glm5")), engine.options)
    export_request(jax_engine, import_request(jax_engine, files[0], request.max_new_tokens), files[1])
    of_torch, of_jax = map(load_file, files)
    layers = {0: ("kv.data", "index_k"), 1: ("kv.data",), 2: ("kv.data", "index_k")}
    assert set(of_torch) == {"tokens", *(f"layers.{i}.{name}" for i, names in layers.items() for name in names)}
    assert set(of_torch) == set(of_jax) and all(torch.equal(x, of_jax[name]) for name, x in of_torch.items())
    assert all(x.any() for x in of_torch.values())
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
    status = main(["generate", "--preset", "glm5", *sizes])
    out = capsys.readouterr().out
    assert status == 0, out
    assert len(re.findall(r"^ +\d  top-64 +\d", out, re.M)) == 2 and re.search(r"^ +1  top-64, shared ", out, re.M)
    assert out.count("check      passed") == 1 + bool(drafts)

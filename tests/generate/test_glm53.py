"""GLM-5.3: `generate --preset glm53` against transformers; states that requests carry; what they rule out."""

import re
import types

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_models
from hf_models import random_tokens, small_model, to_jax_model
from jax.sharding import Mesh
from sparse_mla_torch import handover
from sparse_mla_torch.check.comparison import count_agreeing_tokens
from sparse_mla_torch.eager.model import Eager
from support import serving_models
from support.serving_steps import Steps, prefill_and_decode

from jax_sparse_mla.cli import main
from jax_sparse_mla.serving import presets as texts
from jax_sparse_mla.serving.engine import Engine, EngineOptions
from jax_sparse_mla.serving.mesh import cut_model
from jax_sparse_mla.serving.request import Request

pytestmark = pytest.mark.torch


@pytest.mark.long
def test_float32_logits_are_transformers():
    """Prefill in parts that end within pools, and decode, of three requests; other models' are in tests/serving."""
    model, params = serving_models.jax_model("glm53", torch.float32)
    steps, requests = Steps(model, params, num_requests=3), serving_models.requests()
    logits = prefill_and_decode(steps, requests, serving_models.NEW, serving_models.CHUNK - 1)
    all_seen = serving_models.rows_that_see_all(model)
    serving_models.assert_float32_logits(logits, serving_models.expected("glm53", torch.float32), all_seen)


@pytest.mark.long
def test_generate(capsys, monkeypatch):
    """The second request takes the row of the first one's states. Prompts are read in parts that end within pools."""
    monkeypatch.setitem(texts.CONFIGS, "glm53", hf_models.as_preset(hf_models.small_glm53_config()))
    text = texts.default_prompt()[:300]
    monkeypatch.setattr(texts, "default_prompt", lambda: text)
    sizes = ["--requests", "2", "--max-batch", "1", "--chunk-size", "111", "--max-new-tokens", "3"]
    status = main(["generate", "--preset", "glm53", *sizes, "--verbose"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "NOPE_FP8, paged, 256 tokens a page" in out and out.count("check      passed") == 1
    assert re.findall(r"^ +\d  (\D+?) +0\.999\d+ +0\.99", out, re.M) == ["linear attention"] * 2
    assert re.search(r"^ +1  top-64 in pools of 4 +0\.99\d+ +0\.99\d+ +0\.9\d+ +\(3\d\d\)$", out, re.M), out
    agreeing, total = map(int, re.search(r"tokens +(\d+) of (\d+) are transformers'", out).groups())
    assert total == 6 and agreeing >= 5


def new_engine(**changes) -> Engine:
    sizes = {"max_batch": 2, "max_len": 512, "chunk_size": 112}
    return Engine(*to_jax_model(small_model("glm53")), EngineOptions(**sizes | changes))


@pytest.mark.long  # test_generate serves a row of states twice
def test_a_preempted_request_begins_anew():
    """Three pages for two requests that need two each: the later one is read again, into whichever row is free."""
    requests = [Request(random_tokens(250, seed), 12) for seed in range(3)]
    engine = new_engine(num_pages=4)
    engine.run(requests)
    assert engine.scheduler.counters.preempted > 0
    agreeing, total = count_agreeing_tokens(Eager(small_model("glm53")), requests)
    assert total == 36 and agreeing >= 27  # near-ties go either way: 29 on an H200


def test_what_carried_states_rule_out():
    model, params = to_jax_model(small_model("glm53"))
    assert (
        model.is_recurrent and model.new_draft(params, max_requests=1, num_pages=2, num_swa_pages=2, bf16=False) is None
    )
    for option in ("speculative_steps", "reuse_points"):
        with pytest.raises(ValueError, match=f"{option} must be 0 for glm5_next, got 2: its linear attention carries"):
            new_engine(**{option: 2})
    devices = types.SimpleNamespace(axis_names=("data", "model"), shape={"data": 1, "model": 2})
    with pytest.raises(ValueError, match="cut_model: 2 devices cannot share the heads of glm5_next"):
        cut_model(model, params, devices)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    assert cut_model(model, params, mesh)[0] is model
    engine = types.SimpleNamespace(spec=model.spec, options=EngineOptions())
    with pytest.raises(ValueError, match="export_request: the file has no place for the states of pools and linear"):
        handover.export_request(engine, None, "nowhere")
    with pytest.raises(ValueError, match="import_request: the file has no place for the states of pools and linear"):
        handover.import_request(engine, "nowhere", 1)

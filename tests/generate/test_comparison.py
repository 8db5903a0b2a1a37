"""The comparison with transformers: its oracle is what transformers runs, and it notices what is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import DEVICE, random_tokens, served, small_jax_model, small_model
from sparse_mla_torch.check.comparison import compare_layers, run_layers
from sparse_mla_torch.eager.layers import layers_of, selected_indices
from sparse_mla_torch.eager.model import Eager

from jax_sparse_mla import ForwardMode

pytestmark = pytest.mark.torch
KINDS = {
    "v4": ["window", "window + C4 top-16", "window + C128"],
    "v32": ["top-64"] * 2,
    "glm5": ["top-64", "top-64, shared", "top-64"],
}


@pytest.mark.parametrize("name", ["v4", "v32", "glm5"])
def test_the_oracle_is_what_transformers_runs(name):
    """`eager` on a layer's input is the very output that the unchanged model computes there."""
    model, seen = small_model(name), []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, out: seen.append((args[0] if args else kwargs["hidden_states"], out[0])),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    with torch.no_grad(), selected_indices(model) as indices:
        model(input_ids=torch.tensor([random_tokens(300)], device=DEVICE), use_cache=False)
    for hook in hooks:
        hook.remove()
    jax_model, _ = small_jax_model(name)
    layers, kinds, positions, indices = layers_of(model), jax_model.spec.layers, None, iter(indices)
    assert len(seen) == len(layers) == len(KINDS[name])
    for layer, kind, (hidden, expected) in zip(layers, kinds, seen):
        before = positions
        with torch.no_grad():
            out, positions = layer.eager(hidden, before if kind.selects == "shared" else None)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        if kind.selects == "shared":
            assert positions is before
        elif kind.selected:
            expected_positions = next(indices)[0].cpu().numpy()
            causal = (np.arange(300)[:, None] + 1) // max(kind.ratio, 1)
            assert np.array_equal(positions, np.where(expected_positions < causal, expected_positions, -1))
        else:
            assert positions is None


def as_close_as_bf16_is(report) -> bool:
    """A single row tells most: a parameter of the C128 compressor moves few of them."""
    return report.cosine >= 0.9999 and report.worst_row >= 0.9998


@pytest.mark.long
@pytest.mark.parametrize(("name", "bf16"), [("v4", True), ("v32", True), ("glm5", False)])
def test_layers_match_eager(name, bf16):
    """Chunked prefill and decode of a continuous batch, given eager's selection.

    FP8 caches of V4 and V3.2 are compared in test_cli.py, by the presets' own check.
    """
    engine, requests = served(name, bf16)
    modes = [traced.batch.mode for traced in engine.trace]
    assert modes.count(ForwardMode.EXTEND) >= 6 and modes.count(ForwardMode.DECODE) >= 8
    reports = compare_layers(engine, run_layers(engine, Eager(small_model(name)), requests))
    assert [report.kind for report in reports] == KINDS[name]
    for report in reports:
        assert report.passes("bf16" if bf16 else "fp8"), report
        assert not bf16 or as_close_as_bf16_is(report), report
        assert (report.overlap is None) == (name == "v4" and report.kind != "window + C4 top-16")
        assert report.overlap is None or report.dropping_rows > 300
    if name == "glm5":
        assert reports[1].overlap == reports[0].overlap != reports[2].overlap
        for traced in engine.trace:
            np.testing.assert_array_equal(traced.selected(1), traced.selected(0))


@pytest.mark.long
@pytest.mark.parametrize("field", ["attn_sink", "ape", "norm_weight", "inv_freq"])
def test_the_comparison_notices_a_wrong_parameter(field):
    """Each parameter that transformers does not apply itself, replaced by its neutral value in all layers."""
    engine, requests = served("v4", True)

    def neutral(path, x):
        name = jax.tree_util.keystr(path)
        if not name.startswith(".attention") or not name.endswith(field) or "index_compressor" in name:
            return x
        return jnp.full_like(x, -jnp.inf if field == "attn_sink" else 0)

    params = engine.params
    engine.params = jax.tree_util.tree_map_with_path(neutral, params)
    try:
        reports = compare_layers(engine, run_layers(engine, Eager(small_model("v4")), requests))
    finally:
        engine.params = params
    wrong = [report.kind for report in reports if not as_close_as_bf16_is(report)]
    assert wrong == (KINDS["v4"] if field == "attn_sink" else KINDS["v4"][1:])


def test_a_row_or_a_selection_that_is_far_off_fails_a_layer():
    from sparse_mla_torch.check.comparison import LayerReport

    good = LayerReport(0, "", cosine=0.9995, worst_row=0.995, overlap=0.98, dropping_rows=9)
    assert good.passes("fp8") and not good.passes("bf16")
    for change in ({"cosine": 0.998}, {"worst_row": 0.98}, {"overlap": 0.96}):
        assert not dataclasses.replace(good, **change).passes("fp8")
    assert dataclasses.replace(good, overlap=None).passes("fp8")

"""The whole models against transformers: chunked prefill and decode of requests of several lengths in one batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support.serving_models import (
    CHUNK,
    FLOAT32,
    NEW,
    assert_float32_logits,
    expected,
    jax_model,
    requests,
    row_differences,
    rows_that_see_all,
)
from support.serving_steps import Steps, prefill_and_decode

from jax_sparse_mla import ForwardMode
from jax_sparse_mla.layers import gathers

MODELS = ("v4", "v32", "glm5")
# As `serving_models.FLOAT32`, with FP8 caches; the median measured 0.05.
FP8 = 0.12


def new_steps(name, dtype=torch.float32, bf16=True):
    model, params = jax_model(name, dtype)
    return Steps(model, params, num_requests=3, bf16=bf16)


@pytest.mark.always("v4")
@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_are_transformers(name):
    steps = new_steps(name)
    logits, all_seen = prefill_and_decode(steps, requests(), NEW, CHUNK), rows_that_see_all(steps.model)
    assert_float32_logits(logits, expected(name, torch.float32), all_seen)


@pytest.mark.long
@pytest.mark.parametrize("name", [*MODELS, "glm53"])
def test_bfloat16_logits_with_fp8_caches(name):
    """Where float32's prefill attends to the pages this one gathers a workspace, and the other way round."""
    steps = new_steps(name, torch.bfloat16, bf16=False)
    gathered = not gathers(steps.model.spec, CHUNK)
    logits = prefill_and_decode(steps, requests(), NEW, CHUNK, gathered=gathered)
    for got, wanted in zip(logits, expected(name, torch.bfloat16), strict=True):
        rows = row_differences(got, wanted)
        assert np.median(rows) < FP8 and np.median(rows[-NEW:]) < 2 * FP8
        # A row that goes to another expert differs by more.
        assert np.sum(rows >= 3 * FP8) <= max(2, 0.05 * len(rows))


@pytest.mark.long
@pytest.mark.parametrize("name", ["v4", "v32", "glm53", "glm5"])
def test_every_parameter_counts(name):
    """A parameter that is set to zeros for the last chunk changes its logits by more than the tolerance; the program is
    the one above."""
    model, params = jax_model(name, torch.float32)
    chunks = 3 if name == "v4" else 2  # V4's second C128 entry: the first one is not rotated
    end = chunks * CHUNK
    tokens, wanted = requests()[0][:end], expected(name, torch.float32)[0][end - CHUNK : end]
    leaves, tree = jax.tree.flatten(params)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    steps = Steps(model, params, num_requests=3)
    for i in range(0, end - CHUNK, CHUNK):
        steps(ForwardMode.EXTEND, {0: (i, tokens[i : i + CHUNK])}, CHUNK)
    caches = steps.caches  # a step takes a copy

    def error(leaves):
        steps.params, steps.caches = tree.unflatten(leaves), jax.tree.map(jnp.copy, caches)
        out, _ = steps(ForwardMode.EXTEND, {0: (end - CHUNK, tokens[end - CHUNK :])}, CHUNK)
        return np.quantile(row_differences(out, wanted), 0.8)  # a bias of the router decides for few rows

    unchanged = error(leaves)
    assert unchanged < FLOAT32
    zeroed = {
        name: error([*leaves[:i], jnp.zeros_like(x), *leaves[i + 1 :]])
        for i, (name, x) in enumerate(zip(names, leaves))
        if x.size < 5000 and ".layers" not in name  # a product without its weight would not go unseen
    }
    # What only ranks entries decides nothing while all are selected.
    ranking = [name for name in zeroed if "index" in name]
    assert len(ranking) == {"v4": 3, "glm53": 2}.get(name, 1) and len(zeroed) > len(ranking) + 4
    assert [name for name, e in zeroed.items() if not e > 1.5 * unchanged and name not in ranking] == []


@pytest.mark.long
def test_trace_and_fewer_layers():
    """A trace has each layer's input and selection; a draft of fewer layers leaves the other layers' caches alone."""
    tokens, steps = requests()[1][:CHUNK], new_steps("v4")
    model, before = steps.model, jax.tree.map(np.asarray, steps.caches)
    out, trace = steps(ForwardMode.EXTEND, {0: (0, tokens)}, CHUNK, layers=1)
    assert [x.shape for x, _ in trace] == [(CHUNK, model.config.hidden_size)] and np.isfinite(out).all()
    after = jax.tree.map(np.asarray, steps.caches)
    assert (after[0].swa.data != before[0].swa.data).any()
    jax.tree.map(np.testing.assert_array_equal, (after[4], after[128]), (before[4], before[128]))
    with pytest.raises(ValueError, match="layers must be from 1 to 3, got 0"):
        steps(ForwardMode.EXTEND, {0: (0, tokens)}, CHUNK, layers=0)

    _, trace = steps(ForwardMode.EXTEND, {0: (0, tokens)}, CHUNK)
    assert len(trace) == model.num_layers == len(model.ratios)
    for ratio, (_, selected) in zip(model.ratios, trace):
        assert (selected is not None) == (ratio == 4)
        if selected is not None:  # all that there is: no more than top-k
            np.testing.assert_array_equal(np.sum(selected >= 0, axis=1), (np.arange(CHUNK) + 1) // 4)

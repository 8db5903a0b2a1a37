"""examples/tokamax/adapter.py against tokamax's own XLA implementations, with tokamax's own inputs."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tokamax", reason="tokamax is not installed: see docs/guides/maxtext.md")

from tokamax._src.ops.lightning_indexer import api as indexer_api
from tokamax._src.ops.lightning_indexer import test_base as indexer_inputs
from tokamax._src.ops.sparse_mla import api, test_base

PATH = Path(__file__).parents[2] / "examples" / "tokamax" / "adapter.py"
BFLOAT16_STEP = 2.0**-8


@pytest.fixture(scope="module")
def adapter():
    spec = importlib.util.spec_from_file_location("tokamax_adapter", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def attention_inputs(monkeypatch):
    """Its generator converts bfloat16 to float8, which needs float32 in between on a CPU."""
    quantize = test_base._quantize_lane_periodic
    monkeypatch.setattr(test_base, "_quantize_lane_periodic", lambda x: quantize(x.astype(jnp.float32)))

    def made(**sizes):
        inputs, count = test_base.make_inputs(batch_size=4, num_heads=8, **sizes)
        rng, inputs = np.random.default_rng(1), list(inputs)
        # Theirs are all positive, so that every key weighs about the same: signed ones show a wrong key.
        inputs[0] = jnp.asarray(rng.standard_normal(inputs[0].shape), jnp.bfloat16)
        inputs[8] = jnp.asarray(rng.standard_normal(inputs[8].shape) * inputs[9][..., None], jnp.bfloat16)
        return inputs, count

    return made


@pytest.mark.parametrize("sizes", [{"topk": 128}, {"topk": 256, "pad_tokens": True}])
def test_sparse_mla_equals_tokamax_xla(adapter, attention_inputs, sizes):
    inputs, count = attention_inputs(**sizes)
    by = {
        name: np.asarray(api.sparse_mla(*inputs, sm_scale=0.2, implementation=implementation), np.float32)[:count]
        for name, implementation in (("theirs", "xla"), ("ours", adapter.sparse_mla))
    }
    error, largest = np.abs(by["ours"] - by["theirs"]).max(), np.abs(by["theirs"]).max()
    print(f"{sizes}: largest difference {error:.5f} of {largest:.3f}")
    assert error <= 2 * BFLOAT16_STEP * largest  # each rounds its output to bfloat16, ours the attention's parts too


INDEXER_CASES = {
    "decode": ({"q_lens": [1] * 4, "seq_lens": [256, 384, 128, 512]}, {"k": 128}),
    "mixed": ({"q_lens": [1, 1, 17, 64], "seq_lens": [256, 384, 128, 512]}, {"k": 64}),
    "ratio 4": ({"q_lens": [1, 33, 64], "seq_lens": [1024, 384, 2000]}, {"k": 128, "compression_ratio": 4}),
    "sequence along lanes": ({"q_lens": [1, 8], "seq_lens": [300, 512]}, {"k": 128}),
}


@pytest.mark.parametrize("name", INDEXER_CASES)
def test_lightning_indexer_selects_what_tokamax_xla_selects(adapter, name):
    sizes, options = INDEXER_CASES[name]
    if name == "sequence along lanes":
        layout = indexer_inputs.KVLayout.SEQ_ALONG_LANE
        sizes, options = sizes | {"kv_layout": layout}, options | {"kv_layout": layout}
    inputs = indexer_inputs.make_test_inputs(**sizes)
    (theirs, their_scores), (ours, our_scores) = (
        indexer_api.lightning_indexer(**inputs, **options, return_scores=True, implementation=implementation)
        for implementation in ("xla", adapter.lightning_indexer)
    )
    theirs, ours = np.asarray(theirs), np.asarray(ours)
    assert ours.shape == theirs.shape
    same = [set(a[a >= 0]) == set(b[b >= 0]) for a, b in zip(ours, theirs)]
    error = np.abs(_sorted(our_scores) - _sorted(their_scores)).max()
    print(f"{name}: same set in {sum(same)} of {len(same)} rows, scores differ by {error:.2e}")
    assert all(same)
    # Their kernel orders the scores, ours the positions.
    np.testing.assert_allclose(_sorted(our_scores), _sorted(their_scores), rtol=1e-4, atol=1e-3)


def _sorted(bits):
    scores = np.asarray(jax.lax.bitcast_convert_type(bits, jnp.float32))
    return np.sort(np.where(np.isfinite(scores), scores, 0), -1)

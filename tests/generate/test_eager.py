"""transformers' eager attention in blocks of query rows gives what it gives as a whole."""

import copy
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import new_engine, random_tokens, small_model
from sparse_mla_torch.check import comparison
from sparse_mla_torch.eager import blocks
from sparse_mla_torch.eager.model import Eager
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jax_sparse_mla.serving.request import Request

pytestmark = pytest.mark.torch
LENGTH = 70


@pytest.fixture
def shapes(monkeypatch):
    """Blocks of 16 rows; the rows and keys of each call of transformers' function."""
    monkeypatch.setattr(blocks, "BLOCK", 16)
    seen = []

    def record(model):
        modeling = sys.modules[type(model).__module__]
        original = modeling.eager_attention_forward

        def forward(module, query, key, *args, **options):
            seen.append((query.shape[2], key.shape[2]))
            return original(module, query, key, *args, **options)

        monkeypatch.setattr(modeling, "eager_attention_forward", forward)
        return seen

    return record


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("v4", torch.bfloat16), ("v32", torch.bfloat16), *((name, torch.float32) for name in ("v4", "glm5", "glm53"))],
)
def test_blocks_give_the_logits_of_the_whole(preset, dtype, shapes):
    model = copy.deepcopy(small_model(preset)).cpu().to(dtype)
    tokens = torch.tensor([random_tokens(LENGTH, 0), random_tokens(LENGTH, 1)])
    seen = shapes(model)
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits
        assert all(rows == LENGTH for rows, _ in seen)
        before, seen[:] = list(seen), []
        with blocks.eager_in_blocks():
            in_blocks = model(input_ids=tokens, use_cache=False).logits
    assert len(seen) == len(before) * -(-LENGTH // 16)
    keys = sum(rows * keys for rows, keys in seen) / sum(rows * keys for rows, keys in before)
    assert keys < 0.65  # half of the keys are before a row, and a block has some more
    if preset == "v4":  # layer 0 attends to a window
        assert max(keys for _, keys in seen[: -(-LENGTH // 16)]) < 16 + model.config.sliding_window
    tolerance = 0 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(in_blocks, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [1, "all"])
def test_a_row_that_sees_nothing_is_left_to_the_whole(heads, shapes):
    model = copy.deepcopy(small_model("v32")).cpu().float()
    module, seen = model.model.layers[0].self_attn, shapes(model)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, module.num_heads, LENGTH, d, generator=random) for d in (24, 24, 16))
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, LENGTH, LENGTH), lowest).triu(1)
    if heads == "all":  # one head's row alone
        mask = mask.repeat(1, module.num_heads, 1, 1)
    mask[:, 0, 3] = lowest
    with blocks.eager_in_blocks():
        out, _ = ALL_ATTENTION_FUNCTIONS["eager"](module, q, k, v, mask, scaling=0.2)
        assert seen == [(LENGTH, LENGTH)]
        # A mask for all rows at once is not cut.
        ALL_ATTENTION_FUNCTIONS["eager"](module, q, k, v, torch.zeros(1, 1, 1, LENGTH), scaling=0.2)
    assert seen == [(LENGTH, LENGTH)] * 2
    torch.testing.assert_close(out[0, 3, 0], v[0, 0].mean(0))


def test_transformers_is_as_before_when_all_have_left():
    assert "eager" not in ALL_ATTENTION_FUNCTIONS
    with pytest.raises(KeyboardInterrupt), blocks.eager_in_blocks():
        with blocks.eager_in_blocks():
            pass
        assert ALL_ATTENTION_FUNCTIONS["eager"] is blocks._attend
        raise KeyboardInterrupt
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


@pytest.mark.long
@pytest.mark.cpu
def test_the_check_runs_in_blocks(shapes):
    model = copy.deepcopy(small_model("v4")).cpu()
    request = Request(random_tokens(LENGTH - 1, 0), 2)
    engine = new_engine("v4")
    engine.run([request])
    seen = shapes(model)
    comparison.count_agreeing_tokens(Eager(model), [request])
    by_tokens, seen[:] = list(seen), []
    comparison.compare_layers(engine, comparison.run_layers(engine, Eager(model), [request], [0]))
    for calls in (by_tokens, seen):
        assert calls and max(rows for rows, _ in calls) == 16

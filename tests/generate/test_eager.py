"""transformers' eager attention in blocks of query rows gives what it gives as a whole."""

import copy
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import random_tokens, small_model
from sparse_mla_torch.hf import eager
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytestmark = pytest.mark.torch
LENGTH = 70


@pytest.fixture
def shapes(monkeypatch):
    """Blocks of 16 rows; the rows and keys of each call of transformers' function."""
    monkeypatch.setattr(eager, "BLOCK", 16)
    seen = []

    def record(model):
        modeling = sys.modules[type(model).__module__]
        own = modeling.eager_attention_forward

        def forward(module, query, key, *args, **options):
            seen.append((query.shape[2], key.shape[2]))
            return own(module, query, key, *args, **options)

        monkeypatch.setattr(modeling, "eager_attention_forward", forward)
        return seen

    return record


@pytest.mark.parametrize("preset", ["v4", "v32", "glm5", "glm53"])
def test_blocks_give_the_logits_of_the_whole(preset, shapes):
    model = copy.deepcopy(small_model(preset)).cpu().float()
    tokens = torch.tensor(random_tokens(LENGTH, 0))[None]
    seen = shapes(model)
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits
        assert all(rows == LENGTH for rows, _ in seen)
        before = len(seen)
        with eager.eager_in_blocks():
            blocks = model(input_ids=tokens, use_cache=False).logits
    assert len(seen) == before + before * -(-LENGTH // 16)
    assert min(keys for _, keys in seen[before:]) < LENGTH / 2
    torch.testing.assert_close(blocks, whole, rtol=1e-4, atol=1e-4)


def test_a_row_that_sees_nothing_is_left_to_the_whole(shapes):
    model = copy.deepcopy(small_model("v32")).cpu().float()
    module, seen = model.model.layers[0].self_attn, shapes(model)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, module.num_heads, LENGTH, d, generator=random) for d in (24, 24, 16))
    mask = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)
    mask[:, :, 3] = torch.finfo(torch.float32).min
    with eager.eager_in_blocks():
        out, _ = ALL_ATTENTION_FUNCTIONS["eager"](module, q, k, v, mask, scaling=0.2)
    assert seen == [(LENGTH, LENGTH)]
    torch.testing.assert_close(out[0, 3], v[0].mean(1))


def test_transformers_is_as_before_afterwards():
    with eager.eager_in_blocks():
        with eager.eager_in_blocks():
            pass
        assert ALL_ATTENTION_FUNCTIONS["eager"] is eager._attend
    assert "eager" not in ALL_ATTENTION_FUNCTIONS

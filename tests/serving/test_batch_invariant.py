"""With `batch_invariant` a request gets the same tokens and logits, to the bit, alone and among others."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla.serving import Model
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions

SMALL = dict(hidden_size=64, num_attention_heads=4, index_n_heads=4, index_topk=16, q_lora_rank=32)
SMALL |= dict(moe_intermediate_size=32)
V4 = CONFIGS["v4"] | SMALL | dict(num_hidden_layers=2, mlp_layer_types=["moe"] * 2, o_lora_rank=16)
V4 |= dict(layer_types=["sliding_attention", "compressed_sparse_attention"])
V32 = CONFIGS["v32"] | SMALL | dict(intermediate_size=64, num_key_value_heads=4)
OPTIONS = EngineOptions(chunk_size=32, max_batch=4, max_len=128, trace=True, batch_invariant=True)
LENGTHS, NEW = (40, 5, 33, 17, 70, 12), 8


def logits_of(engine, requests):
    """The tokens of each request, and the logits that they were chosen from."""
    engine.run(requests)
    logits = {id(request): [] for request in requests}
    for step in engine.trace:
        for request, row in step.chosen():
            logits[request].append(row)
    return [(request.output, np.stack(logits[id(request)])) for request in requests]


def new_requests():
    rng = np.random.default_rng(0)
    drawn = Sampling(temperature=2.0, top_p=0.9, seed=1)
    requests = [Request(rng.integers(0, 256, length).tolist(), NEW) for length in LENGTHS]
    requests[3].sampling = drawn
    return requests


@pytest.mark.always("v4")
@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_who_else_is_served_changes_no_bit(config):
    model = Model.from_config(config)
    engine = Engine(model, model.init_params(seed=0, dtype=jnp.bfloat16), OPTIONS)
    together = logits_of(engine, new_requests())
    assert len({tuple(tokens) for tokens, _ in together}) == len(LENGTHS)
    for request, (tokens, logits) in zip(new_requests(), together):
        ((alone, logits_alone),) = logits_of(engine, [request])
        assert alone == tokens
        np.testing.assert_array_equal(logits_alone[:NEW], logits[:NEW])
    assert len(engine.routes) == 2  # a program for prompts, one for tokens

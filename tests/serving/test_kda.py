"""Kimi delta attention in chunks and token by token, against transformers' module over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.glm5_next import modeling_glm5_next as modeling

from jax_sparse_mla import ForwardBatch, ForwardMode, ModelSpec, RequestTables, build_v32_metadata
from jax_sparse_mla.serving import kda
from jax_sparse_mla.serving.config import KDA

HIDDEN, HEADS, DIM, KERNEL, MAX_REQUESTS, NUM_ROWS = 24, 2, 8, 4, 5, 56
LENGTHS, REQUEST_ROWS = (75, 40, 2), (3, 0, 4)
SPEC = ModelSpec.from_hf_config({"model_type": "glm5_next", "index_kpool": 4})


@functools.cache
def case(lower_bound):
    """The module, its parameters, and of each request the projected rows and the module's output before its norm."""
    of_one = {"req_pool_indices": one, "seq_lens": one, "extend_lens": one}
    tables = RequestTables(req_to_token=jnp.zeros((2, 64), jnp.int32))
    batch = ForwardBatch(mode=ForwardMode.EXTEND, max_seq_len=64, **of_one, out_cache_loc=none)
    metadata = build_v32_metadata(SPEC, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
    step = kda.prepare(batch, metadata)
    assert not step.fresh.any() and not step.counts.any() and step.owner.shape == (0,)


def test_drafts_are_refused():
    ints = jnp.ones(2, jnp.int32)
    batch = ForwardBatch(
        mode=ForwardMode.TARGET_VERIFY,
        max_seq_len=64,
        req_pool_indices=ints[:1],
        seq_lens=ints[:1],
        out_cache_loc=ints,
        num_draft_tokens=2,
    )
    tables = RequestTables(req_to_token=jnp.zeros((2, 64), jnp.int32))
    metadata = build_v32_metadata(SPEC, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
    with pytest.raises(ValueError, match=r"batch\.mode must be EXTEND, DECODE or IDLE, got TARGET_VERIFY"):
        kda.prepare(batch, metadata)

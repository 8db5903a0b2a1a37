"""TARGET_VERIFY through a whole V4 layer: rejected drafts leave no trace in what later steps read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    DRAFTS,
    LENGTHS,
    MAX_LEN,
    MAX_REQUESTS,
    PROMPT_ROWS,
    REQUEST_ROWS,
    make_step,
    make_world,
    step_function,
)

import jax_sparse_mla as mla


def prefill(world, cache, count):
    batch, rows, _ = make_step(world, mla.ForwardMode.EXTEND, [(0, 0, count), 0, 0, 0], num_rows=PROMPT_ROWS)
    return step_function(world.ratio, True)(cache, rows, world.params, batch, world.tables)[0]


def verify(world, cache, start, rng):
    """One verify step of request 0: the true token at `start` and three drafts that are some other tokens."""
    tokens = [(0, start)] + [(1, int(t)) for t in rng.integers(0, LENGTHS[1], DRAFTS - 1)]
    index = tuple(np.array(tokens).T)
    batch = mla.ForwardBatch(
        mode=mla.ForwardMode.TARGET_VERIFY,
        max_seq_len=MAX_LEN,
        req_pool_indices=jnp.array([REQUEST_ROWS[0]], jnp.int32),
        seq_lens=jnp.array([start], jnp.int32),
        out_cache_loc=world.tables.req_to_token[REQUEST_ROWS[0], start : start + DRAFTS],
        num_draft_tokens=DRAFTS,
    )
    rows = jax.tree.map(lambda x: jnp.asarray(x[index]), world.rows)
    return step_function(world.ratio, False)(cache, rows, world.params, batch, world.tables)[0]


@pytest.mark.long
@pytest.mark.parametrize("ratio, start, steps", [(4, 10, 14), (128, 120, 9)])
def test_rejected_drafts_leave_no_trace(ratio, start, steps):
    world, rng = make_world(ratio), np.random.default_rng(ratio)
    _, cache, _ = prefill(world, world.empty_cache(bf16=True, max_draft_tokens=DRAFTS), start)
    outs = []
    for step in range(steps):  # one token is accepted each time, three are rejected
        out, cache, _ = verify(world, cache, start + step, rng)
        outs.append(np.asarray(out[0], np.float32))
    expected, plain, _ = prefill(world, world.empty_cache(bf16=True, max_draft_tokens=DRAFTS), start + steps)
    np.testing.assert_allclose(np.stack(outs), np.asarray(expected[start : start + steps], np.float32), atol=2e-2)

    groups = (start + steps) // ratio
    slots = world.tables.req_to_token[REQUEST_ROWS[0], ratio - 1 : groups * ratio : ratio] // ratio
    got, want = (np.asarray(mla.gather_kv(c.compressed, slots), np.float32) for c in (cache, plain))
    np.testing.assert_allclose(got, want, rtol=1 / 128, atol=1e-3)
    assert np.abs(want).max(axis=1).min() > 0.1  # entries are there


def test_the_layer_keeps_what_it_is_told_to():
    state = dataclasses.asdict(make_world(4).empty_cache(max_draft_tokens=5))["state"]
    assert state["kv"].shape == (MAX_REQUESTS, 8 + 5, 1024)

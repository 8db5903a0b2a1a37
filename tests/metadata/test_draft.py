"""Steps of a multi-step draft: the slice, the lengths, one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.metadata import (
    ForwardBatch,
    ForwardMode,
    RequestTables,
    build_v4_metadata,
    build_v32_metadata,
    draft_step_batch,
)
from jax_sparse_mla.metadata import v4 as v4_module
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
MAX_LEN = 600


def i32(values):
    return jnp.asarray(np.asarray(values, np.int64).astype(np.int32))


def decode_batch(seq_lens, out_cache_loc, req_pool_indices=None, max_seq_len=MAX_LEN):
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        max_seq_len=max_seq_len,
        req_pool_indices=i32(np.arange(len(seq_lens)) if req_pool_indices is None else req_pool_indices),
        seq_lens=i32(seq_lens),
        out_cache_loc=i32(out_cache_loc),
    )


def identity_tables(requests=4):
    pool = requests * MAX_LEN
    return RequestTables(
        req_to_token=i32(np.arange(pool).reshape(requests, MAX_LEN)), full_to_swa=i32([*range(pool), -1])
    )


@given(
    shape=st.sampled_from([(1, 1, 1), (2, 1, 3), (3, 2, 2), (2, 3, 4)]),
    seed=st.integers(0, 2**32 - 1),
    shift=st.booleans(),
    traced=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_each_step_equals_loops_over_requests_and_branches(shape, seed, shift, traced):
    requests, topk, num_steps = shape
    rng = np.random.default_rng(seed)
    seq_lens = rng.choice([0, 5, 300, -4, INT_MIN, INT_MAX, INT_MAX - 1], requests)
    rows = rng.choice([0, 3, -7, INT_MAX, INT_MIN], requests)
    slots = rng.choice(np.array([-1, -7, INT_MAX, INT_MIN, *range(100, 200)]), requests * topk * num_steps)
    batch = decode_batch(seq_lens, slots, rows)
    for step in range(num_steps):
        given_step = jnp.int32(step) if traced else step
        got = draft_step_batch(batch, given_step, num_steps, topk=topk, shift_seq_lens=shift)
        want = [], [], []
        for b in range(requests):
            for k in range(topk):
                length = min(int(seq_lens[b]) + (step + 1 if shift else 0), INT_MAX) if seq_lens[b] > 0 else 0
                want[0].append(rows[b])
                want[1].append(length)
                want[2].append(slots[(b * topk + k) * num_steps + step])
        np.testing.assert_array_equal(got.req_pool_indices, want[0])
        np.testing.assert_array_equal(got.seq_lens, want[1])
        np.testing.assert_array_equal(got.out_cache_loc, want[2])
        assert got.mode is ForwardMode.DECODE and got.max_seq_len == MAX_LEN
        assert got.extend_lens is None and got.num_draft_tokens is None
        assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.int32)}


def test_two_requests_three_steps_through_both_builders():
    """Six slots for two requests: refused as a decode step, served step by step."""
    batch, tables = decode_batch([10, 300], [10, 11, 12, 900, 901, 902]), identity_tables()
    with pytest.raises(ValueError, match="draft_step_batch"):
        build_v4_metadata(DEEPSEEK_V4_FLASH, batch, tables)
    for step in range(3):
        step_batch = draft_step_batch(batch, step, 3)
        v4 = build_v4_metadata(DEEPSEEK_V4_FLASH, step_batch, tables)
        v32 = build_v32_metadata(DEEPSEEK_V32, step_batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_sparse")
        slots = [10 + step, 900 + step]
        for metadata in (v4, v32):
            np.testing.assert_array_equal(metadata.out_cache_loc, slots)
            np.testing.assert_array_equal(metadata.positions, [10 + step, 300 + step])
        # The newest key of the window is the token that this step writes.
        np.testing.assert_array_equal(v4.swa_page_indices[:, 0], slots)
        np.testing.assert_array_equal(v4.swa_out_cache_loc, slots)
        np.testing.assert_array_equal(v32.cache_seqlens, [11 + step, 301 + step])


def test_all_steps_compile_once():
    # A bucket that no other test uses, so that nothing is compiled before.
    batch, tables = decode_batch([10, 0], range(10), max_seq_len=599), identity_tables()
    before = v4_module._build_v4._cache_size()
    for step in range(5):
        build_v4_metadata(DEEPSEEK_V4_FLASH, draft_step_batch(batch, step, 5), tables)
    assert v4_module._build_v4._cache_size() == before + 1

    calls = []

    @jax.jit
    def forward(batch, step):
        calls.append(step)
        return draft_step_batch(batch, step, 5)

    for step in range(5):
        np.testing.assert_array_equal(forward(batch, jnp.int32(step)).out_cache_loc, [step, 5 + step])
    assert len(calls) == 1


@pytest.mark.parametrize("step", [-1, 3, INT_MAX, INT_MIN])
def test_a_traced_step_out_of_range_is_all_padding(step):
    batch, tables = decode_batch([10, 300], range(100, 106)), identity_tables()
    got = jax.jit(draft_step_batch, static_argnums=2)(batch, jnp.int32(step), 3)
    np.testing.assert_array_equal(got.seq_lens, [0, 0])
    np.testing.assert_array_equal(got.out_cache_loc, [-1, -1])
    metadata = build_v4_metadata(DEEPSEEK_V4_FLASH, got, tables)
    np.testing.assert_array_equal(metadata.seq_lens_causal, [0, 0])
    np.testing.assert_array_equal(metadata.out_cache_loc, [0, 0])

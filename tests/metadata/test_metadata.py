"""Metadata of V3.2 and V4 against brute-force loops over requests and positions, from the formulas."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_cases import (
    MAX_LEN,
    MODES,
    NUM_REQUESTS,
    POOL,
    TINY_V4,
    TINY_V32,
    assert_equal,
    assert_v4,
    assert_v32,
    make_batch,
    make_tables,
    to_jax,
)

from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.metadata import (
    ForwardMode,
    V32Metadata,
    build_v4_metadata,
    build_v32_metadata,
)
from jax_sparse_mla.metadata import v4 as v4_module
from jax_sparse_mla.metadata import v32 as v32_module
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32

# ---- against the oracle ----

cases = given(
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**32 - 1),
    hostile=st.booleans(),
    max_seq_len=st.sampled_from([MAX_LEN + 1000, 33]),
)


@cases
@settings(max_examples=50, deadline=None)
def test_v4_equals_brute_force(mode, seed, hostile, max_seq_len):
    rng = np.random.default_rng(seed)
    table, to_swa = make_tables(rng, page_size=TINY_V4.page_size, holes=hostile)
    assert_v4(TINY_V4, mode, make_batch(rng, mode, hostile=hostile), table, to_swa, max_seq_len)


@cases
@settings(max_examples=50, deadline=None)
def test_v32_equals_brute_force(mode, seed, hostile, max_seq_len):
    rng = np.random.default_rng(seed)
    table, _ = make_tables(rng, page_size=TINY_V32.page_size, holes=hostile)
    assert_v32(TINY_V32, mode, make_batch(rng, mode, hostile=hostile), table, max_seq_len)


@pytest.mark.always(3)
@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_the_real_models_under_jit(mode):
    rng = np.random.default_rng(1)
    table, to_swa = make_tables(rng, page_size=256, max_len=1500, pool=256 * 64)
    fields = make_batch(rng, mode, longest=1490)
    fields["seq_lens"][:2] = [
        1024,
        255,
    ]  # a boundary of both ratios, and the end of a page's first 255 tokens
    fields["extend_lens"][:2] = [4, 0]
    build = jax.jit(build_v4_metadata, static_argnums=0)
    assert_v4(DEEPSEEK_V4_FLASH, mode, fields, table, to_swa, 4096, build=build)
    assert_v32(DEEPSEEK_V32, mode, fields, table, 1400)


def test_ratios_1_and_2():
    """V4.1's: a token completes an entry of ratio 1 and every second one of ratio 2, and both are selected."""
    spec = dataclasses.replace(TINY_V4, name="tiny V4.1", compress_ratios=(0, 1, 2))
    for mode, hostile in ((ForwardMode.EXTEND, True), (ForwardMode.DECODE, False)):
        rng = np.random.default_rng(4)
        table, to_swa = make_tables(rng, page_size=spec.page_size, holes=hostile)
        assert_v4(spec, mode, make_batch(rng, mode, hostile=hostile), table, to_swa, MAX_LEN)


def test_rows_of_a_padding_request_stay_where_the_engine_put_them():
    """A padding request with rows of its own must not move the slots of the request behind it."""
    table = np.arange(6 * 60).reshape(6, 60)
    fields = {
        "req_pool_indices": [2, 4, 0],
        "seq_lens": [7, 0, 3],
        "extend_lens": [1, 2, 2],
        "out_cache_loc": [11, 12, 13, 14, 15, 16],
    }
    got = assert_v32(TINY_V32, ForwardMode.EXTEND, fields, table, MAX_LEN)
    assert_equal("out_cache_loc", got.out_cache_loc, [11, 0, 0, 14, 15, 0])
    assert_equal("seqlens_expanded", got.seqlens_expanded, [7, 0, 0, 2, 3, 0])
    assert_equal("cu_seqlens_q", got.cu_seqlens_q, [0, 1, 3, 5])
    # At the end of the batch it has no rows.
    fields["seq_lens"], fields["extend_lens"] = [7, 3, 0], [1, 2, 2]
    assert_equal("tail", assert_v32(TINY_V32, ForwardMode.EXTEND, fields, table, MAX_LEN).cu_seqlens_q, [0, 1, 3, 3])


# ---- padding, permutation, compilation ----


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_no_requests(mode):
    fields = {name: np.zeros(0) for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "extend_lens")}
    if mode is ForwardMode.EXTEND:
        fields["out_cache_loc"] = np.full(3, 5)
    table, to_swa = make_tables(np.random.default_rng(6), page_size=TINY_V4.page_size)
    assert_v4(TINY_V4, mode, fields, table, to_swa, MAX_LEN)
    assert_v32(TINY_V32, mode, fields, table, MAX_LEN)


def test_overflow_is_told_and_masks_what_does_not_fit():
    rng = np.random.default_rng(7)
    table, to_swa = make_tables(rng, page_size=TINY_V4.page_size)
    fields = make_batch(rng, ForwardMode.DECODE)
    fields["seq_lens"] = np.array([33, 34, 5, 0])
    assert bool(assert_v4(TINY_V4, ForwardMode.DECODE, fields, table, to_swa, 33).overflow)
    assert bool(assert_v32(TINY_V32, ForwardMode.DECODE, fields, table, 33).overflow)
    fields["seq_lens"][1] = 33
    assert not bool(assert_v4(TINY_V4, ForwardMode.DECODE, fields, table, to_swa, 33).overflow)
    assert not bool(assert_v32(TINY_V32, ForwardMode.DECODE, fields, table, 33).overflow)
    # The drafts count: 31 + 3 exceeds 33.
    fields = make_batch(rng, ForwardMode.TARGET_VERIFY) | {"seq_lens": np.array([31, 4, 5, 0])}
    assert bool(assert_v4(TINY_V4, ForwardMode.TARGET_VERIFY, fields, table, to_swa, 33).overflow)
    # More query rows than slots to write them to.
    fields = make_batch(rng, ForwardMode.EXTEND)
    fields |= {"seq_lens": np.full(4, 9), "extend_lens": np.array([9, 9, 9, 9])}
    assert bool(assert_v4(TINY_V4, ForwardMode.EXTEND, fields, table, to_swa, 33).overflow)


def test_twenty_decode_steps_compile_once():
    builders = v4_module._build_v4, v32_module._build_v32
    before = [build._cache_size() for build in builders]
    rng = np.random.default_rng(8)
    table, to_swa = make_tables(rng, page_size=TINY_V4.page_size)
    fields = make_batch(rng, ForwardMode.DECODE, longest=20)
    for step in range(20):
        fields["seq_lens"] = np.where(fields["seq_lens"] > 0, fields["seq_lens"] + 1, 0)
        fields["out_cache_loc"] = rng.integers(0, POOL, NUM_REQUESTS)
        # A bucket that no other test uses, so that nothing is compiled before.
        batch, tables = to_jax(ForwardMode.DECODE, fields, table, to_swa, max_seq_len=47)
        # What DECODE does not read must not select another compilation.
        extend_lens = None if step % 2 else batch.extend_lens
        batch = dataclasses.replace(batch, num_draft_tokens=step, extend_lens=extend_lens)
        build_v4_metadata(TINY_V4, batch, tables)
        build_v32_metadata(TINY_V32, batch, tables, fp8_kv_cache=bool(step % 2), prefill_backend="flashmla_kv")
    assert [build._cache_size() for build in builders] == [size + 1 for size in before]


def test_metadata_passes_through_jit_as_a_pytree():
    rng = np.random.default_rng(9)
    table, to_swa = make_tables(rng, page_size=TINY_V4.page_size)
    batch, tables = to_jax(ForwardMode.EXTEND, make_batch(rng, ForwardMode.EXTEND), table, to_swa)
    v4 = build_v4_metadata(TINY_V4, batch, tables)
    v32 = build_v32_metadata(TINY_V32, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_sparse")
    same = jax.jit(lambda x: x)
    for metadata in (v4, v32):
        again = same(metadata)
        assert type(again) is type(metadata)
        chex.assert_trees_all_equal(again, metadata)
    assert isinstance(v32, V32Metadata) and same(v32).topk_transform is TopkTransform.RAGGED

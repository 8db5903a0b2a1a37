"""debug: each check passes on good values, names the bad one, eagerly and under checkify."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_sparse_mla.debug import check_batch, check_indices, check_metadata, check_slots
from jax_sparse_mla.metadata import (
    ForwardBatch,
    ForwardMode,
    RequestTables,
    build_prefill_plan,
    build_v4_metadata,
    build_v32_metadata,
)
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def eager_message(check, *arguments) -> str | None:
    try:
        assert check(*arguments) is None
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def checkified(check):
    return jax.jit(checkify.checkify(check))  # compiled once per check and shapes


def checkify_message(check, *arguments) -> str | None:
    error, _ = checkified(check)(*arguments)
    return error.get()


WAYS = pytest.mark.parametrize("message", [eager_message, checkify_message], ids=["eager", "checkify"])


def int32(*values):
    return jnp.array(values, jnp.int32)


# --- indices and slots -----------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("bad", [-2, 512, INT_MAX, INT_MIN])
def test_indices(message, bad):
    good = jnp.arange(24, dtype=jnp.int32).reshape(2, 3, 4).at[0, 0, 1].set(-1).at[0, 0, 2].set(511)

    def check(indices):
        check_indices(indices, 512)

    assert message(check, good) is None
    found = message(check, good.at[1, 2, 3].set(bad))
    assert f"check_indices: indices[1, 2, 3] is {bad}, neither -1 nor below num_slots=512" in found


@WAYS
def test_indices_past_the_length_are_not_scanned(message):
    indices = jnp.full((2, 3, 4), 7, jnp.int32).at[:, :, 2:].set(9999)

    def check(indices, length):
        check_indices(indices, 10, topk_length=length)

    assert message(check, indices, int32(2, 1)) is None
    assert message(check, indices, jnp.full((2, 3), 2, jnp.int32)) is None
    assert "indices[1, 0, 2] is 9999" in message(check, indices, int32(2, 3))
    assert "indices[0, 1, 2] is 9999" in message(check, indices, int32(*[2, 4, 0] * 2).reshape(2, 3))
    assert "topk_length[1] is 5, outside [0, topk=4]" in message(check, indices, int32(2, 5))
    assert "topk_length[0] is -1, outside" in message(check, indices, int32(-1, 0))


@WAYS
def test_slots(message):
    def check(slots):
        check_slots(slots, 100)

    assert message(check, int32(0, 99, -1, 0)) is None
    assert "check_slots: slots[2] is 100, neither -1 nor below num_slots=100" in message(check, int32(0, -1, 100))
    assert "slots[0] is -7" in message(check, int32(-7, 5))
    assert message(check, jnp.zeros((0,), jnp.int32)) is None


def test_eager_errors_list_the_first_bad_entries():
    slots = jnp.arange(20, dtype=jnp.int32)
    found = eager_message(lambda s: check_slots(s, 10), slots)
    listed = "slots[10] is 10, slots[11] is 11, slots[12] is 12, slots[13] is 13, slots[14] is 14 and 5 more"
    assert listed in found


def test_checkify_of_jit_throws_and_passes_the_result_on():
    def step(slots):
        check_slots(slots, 10)
        return slots + 1

    error, out = checkify.checkify(jax.jit(step))(int32(3, 9))
    error.throw()
    np.testing.assert_array_equal(out, [4, 10])
    error, _ = checkify.checkify(jax.jit(step))(int32(3, 12))
    with pytest.raises(ValueError, match=r"slots\[1\] is 12"):
        error.throw()


def test_plain_jit_is_refused():
    with pytest.raises(ValueError, match="checkify"):
        jax.jit(lambda s: check_slots(s, 10))(int32(1))


# --- batches ---------------------------------------------------------------------------------------

TABLES = RequestTables(
    req_to_token=jnp.arange(6 * 512, dtype=jnp.int32).reshape(6, 512),
    full_to_swa=jnp.append(jnp.arange(3072, dtype=jnp.int32), jnp.int32(-1)),
)


def decode(**changes):
    batch = ForwardBatch(
        mode=ForwardMode.DECODE,
        max_seq_len=512,
        req_pool_indices=int32(3, 5, 99),
        seq_lens=int32(17, 512, 0),  # the last request is padding and may name any row
        out_cache_loc=int32(100, 3071, -5),
    )
    return dataclasses.replace(batch, **changes)


def extend(**changes):
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        max_seq_len=512,
        req_pool_indices=int32(1, 2),
        seq_lens=int32(5, 9),
        extend_lens=int32(5, 2),
        out_cache_loc=jnp.arange(10, dtype=jnp.int32).at[7:].set(99999),  # padding rows
    )
    return dataclasses.replace(batch, **changes)


@WAYS
def test_good_batches(message):
    verify = decode(
        mode=ForwardMode.TARGET_VERIFY,
        num_draft_tokens=2,
        seq_lens=int32(17, 510, 0),
        out_cache_loc=jnp.arange(6, dtype=jnp.int32),
    )
    for batch in (decode(), extend(), verify, decode(mode=ForwardMode.IDLE)):
        assert message(check_batch, batch, TABLES) is None
    no_swa = dataclasses.replace(TABLES, full_to_swa=None)
    assert message(check_batch, decode(out_cache_loc=int32(INT_MAX, 1, 2)), no_swa) is None


@WAYS
def test_a_window_table_without_its_last_entry(message):
    """What stands at the end is taken for "no slot": without it, the pool's last slot is."""
    tables = dataclasses.replace(TABLES, full_to_swa=TABLES.full_to_swa[:-1])
    found = message(check_batch, decode(out_cache_loc=int32(100, 200, -5)), tables)
    assert "tables.full_to_swa[3071] is 3071, the last entry, which must be -1" in found


@WAYS
@pytest.mark.parametrize(
    "batch, expected",
    [
        (decode(seq_lens=int32(17, 513, 0)), "batch.seq_lens[1] is 513, above max_seq_len=512"),
        (decode(max_seq_len=511), "batch.seq_lens[1] is 512, above max_seq_len=511"),
        (decode(seq_lens=int32(17, -3, 0)), "batch.seq_lens[1] is -3, negative"),
        (decode(req_pool_indices=int32(6, 5, 0)), "batch.req_pool_indices[0] is 6, outside the 6 rows"),
        (decode(req_pool_indices=int32(3, INT_MIN, 0)), f"batch.req_pool_indices[1] is {INT_MIN}, outside"),
        (
            decode(out_cache_loc=int32(100, 3072, 0)),
            "batch.out_cache_loc[1] is 3072, outside the pool of 3072",
        ),
        (decode(out_cache_loc=int32(-1, 3, 0)), "batch.out_cache_loc[0] is -1, outside the pool"),
        (extend(extend_lens=int32(6, 2)), "batch.extend_lens[0] is 6, outside [0, seq_lens]"),
        (extend(extend_lens=int32(5, -2)), "batch.extend_lens[1] is -2, outside [0, seq_lens]"),
        (
            extend(seq_lens=int32(9, 9), extend_lens=int32(5, 6)),
            "cumsum(batch.extend_lens)[1] is 11, above the 10 rows",
        ),
        (extend(extend_lens=int32(5, 3)), "batch.out_cache_loc[7] is 99999, outside the pool"),
        (
            decode(
                mode=ForwardMode.TARGET_VERIFY,
                num_draft_tokens=2,
                seq_lens=int32(17, 511, 0),
                out_cache_loc=jnp.arange(6, dtype=jnp.int32),
            ),
            "batch.seq_lens[1] is 511, above max_seq_len=512 or the 512 columns of req_to_token less 2 draft",
        ),
    ],
)
def test_bad_batches(message, batch, expected):
    found = message(check_batch, batch, TABLES)
    assert found is not None and f"check_batch: {expected}" in found


# --- metadata --------------------------------------------------------------------------------------


def metadata_of(kind, batch):
    if kind == "v4":
        return build_v4_metadata(DEEPSEEK_V4_FLASH, batch, TABLES)
    if kind == "plan":
        return build_prefill_plan(
            DEEPSEEK_V4_FLASH, batch, TABLES, compress_ratio=4, swa_capacity=64, compressed_capacity=64
        )
    return build_v32_metadata(DEEPSEEK_V32, batch, TABLES, fp8_kv_cache=True, prefill_backend="flashmla_sparse")


@pytest.mark.always(2)
@WAYS
@pytest.mark.parametrize(
    "kind, row",
    [("v4", "seq_lens_causal[6] is 9"), ("v32", "seqlens_expanded[6] is 9"), ("plan", "seq_lens[1] is 9")],
)
def test_metadata(message, kind, row):
    assert message(check_metadata, metadata_of(kind, extend())) is None
    found = message(check_metadata, metadata_of(kind, extend(max_seq_len=8)))
    assert f"check_metadata: metadata.{row}, the longest row, and the step overflows" in found


@WAYS
def test_overflow_without_rows(message):
    batch = extend(out_cache_loc=jnp.zeros((0,), jnp.int32))
    assert "overflows" in message(check_metadata, metadata_of("v4", batch))


# --- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: check_indices(jnp.zeros((2, 3)), 5), TypeError, "check_indices: indices must"),
        (lambda: check_indices(int32(1), 5.0), TypeError, "check_indices: num_slots must"),
        (
            lambda: check_indices(jnp.zeros((2, 3), jnp.int32), 5, topk_length=int32(1, 2, 3)),
            ValueError,
            r"check_indices: topk_length must have shape \[2\]",
        ),
        (lambda: check_slots(np.zeros(2, np.int64), 5), TypeError, "check_slots: slots must"),
        (lambda: check_slots(int32(1), -1), ValueError, "check_slots: num_slots must"),
        (lambda: check_batch(None, TABLES), TypeError, "check_batch: batch must be a ForwardBatch"),
        (lambda: check_batch(decode(), None), TypeError, "check_batch: tables must be a RequestTables"),
        (lambda: check_metadata(decode()), TypeError, "check_metadata: metadata must be a V4Metadata"),
    ],
)
def test_bad_arguments(call, error, text):
    with pytest.raises(error, match=re.compile(text)):
        call()

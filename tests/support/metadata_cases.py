"""Batches and tables of small models for the metadata tests, and the oracle: loops over requests and positions."""

from __future__ import annotations

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.metadata import (
    ForwardBatch,
    ForwardMode,
    RequestTables,
    build_v4_metadata,
    build_v32_metadata,
)
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
# A V4 and a V3.2 with pages of 16 and 8 tokens: small enough to enumerate every position.
TINY_V4 = dataclasses.replace(
    DEEPSEEK_V4_FLASH, name="tiny V4", page_size=16, window=5, index_topk=6, compress_ratios=(0, 4, 8)
)
TINY_V32 = dataclasses.replace(DEEPSEEK_V32, name="tiny V3.2", page_size=8, index_topk=6)
MODES = list(ForwardMode)
NUM_REQUESTS, DRAFTS, EXTEND_ROWS, IDLE_ROWS = 4, 3, 19, 5
MAX_REQUESTS, MAX_LEN, POOL = 6, 60, 512


V4_ROW_FIELDS = ("seq_lens_causal", "positions", "row_to_request", "out_cache_loc", "page_table")
V4_ROW_FIELDS += ("swa_page_indices", "swa_topk_lengths", "swa_out_cache_loc")


def i32(values):
    return jnp.asarray(np.asarray(values, np.int64).astype(np.int32))


def ceil_to(value, multiple):
    return (value + multiple - 1) // multiple * multiple


def make_tables(rng, *, page_size, holes=False, max_len=MAX_LEN, pool=POOL):
    """Distinct pages for every request, as an allocator gives them; page 0 belongs to nobody."""
    pages = max_len // page_size + 1
    order = rng.permutation(np.arange(1, pool // page_size))[: MAX_REQUESTS * pages].reshape(MAX_REQUESTS, pages)
    table = (order[:, :, None] * page_size + np.arange(page_size)).reshape(MAX_REQUESTS, -1)[:, :max_len].copy()
    to_swa = np.append(rng.permutation(pool), -1)
    if holes:
        table[rng.random(table.shape) < 0.2] = rng.choice([-1, -7, INT_MIN, INT_MAX, pool + 1])
        to_swa[rng.random(to_swa.shape) < 0.2] = rng.choice([-1, -9, INT_MIN])
    return table.astype(np.int64), to_swa.astype(np.int64)


def make_batch(rng, mode, *, hostile=False, longest=MAX_LEN - DRAFTS):
    """numpy fields of a batch in `mode`, a padding request somewhere, chunked prefixes in EXTEND."""
    seq_lens = rng.integers(1, longest + 1, NUM_REQUESTS)
    seq_lens[rng.random(NUM_REQUESTS) < 0.25] = 0
    extend_lens = np.zeros(NUM_REQUESTS, np.int64)
    for b in np.flatnonzero(seq_lens):
        extend_lens[b] = min(rng.integers(0, 8), seq_lens[b], EXTEND_ROWS - extend_lens.sum())
    rows = {
        ForwardMode.DECODE: NUM_REQUESTS,
        ForwardMode.EXTEND: EXTEND_ROWS,
        ForwardMode.IDLE: IDLE_ROWS,
    }.get(mode, NUM_REQUESTS * DRAFTS)
    batch = {
        "req_pool_indices": rng.permutation(MAX_REQUESTS)[:NUM_REQUESTS],
        "seq_lens": seq_lens,
        "extend_lens": extend_lens,
        "out_cache_loc": rng.integers(1, POOL, rows),
    }
    if hostile:
        for name, values in {
            "req_pool_indices": [-7, INT_MAX, INT_MIN, MAX_REQUESTS],
            "out_cache_loc": [-1, -7, INT_MAX, INT_MIN, POOL],
            "seq_lens": [-1, INT_MIN, INT_MAX, MAX_LEN + 7],
            "extend_lens": [-3, INT_MAX, INT_MIN],
        }.items():
            where = rng.random(batch[name].shape) < 0.4
            batch[name] = np.where(where, rng.choice(values, batch[name].shape), batch[name])
    return batch


def to_jax(mode, fields, table, to_swa=None, *, max_seq_len=MAX_LEN):
    batch = ForwardBatch(
        mode=mode,
        max_seq_len=max_seq_len,
        num_draft_tokens=DRAFTS,
        **{name: i32(value) for name, value in fields.items()},
    )
    return batch, RequestTables(req_to_token=i32(table), full_to_swa=None if to_swa is None else i32(to_swa))


# ---- the oracle: python integers and loops only ----


def at(values, *index):
    """`values[index]`, −1 for an index outside and for a negative entry."""
    for i in index:
        if not 0 <= i < len(values):
            return -1
        values = values[i]
    return max(int(values), -1)


def oracle_requests(mode, fields):
    """Tokens of each request."""
    if mode is ForwardMode.IDLE:
        return [0] * len(fields["seq_lens"])
    lengths = [max(int(n), 0) for n in fields["seq_lens"]]
    if mode is ForwardMode.TARGET_VERIFY:
        lengths = [min(n + DRAFTS, INT_MAX) if n else 0 for n in lengths]
    return lengths


def oracle_rows(mode, fields):
    """Per row (request, causal length), None for padding; and whether an EXTEND batch has too many rows."""
    num_rows = len(fields["out_cache_loc"])
    lengths, rows = oracle_requests(mode, fields), []
    for b, length in enumerate(lengths):
        if mode is ForwardMode.DECODE:
            causal = [length]
        elif mode is ForwardMode.EXTEND:
            queries = max(int(fields["extend_lens"][b]), 0)
            causal = [length - queries + 1 + j for j in range(min(queries, num_rows - len(rows)))]
            if len(causal) < queries:
                return (rows + [(b, n) if n > 0 else None for n in causal])[:num_rows], True
        elif mode is ForwardMode.IDLE:
            causal = []
        else:  # both: the last DRAFTS tokens
            causal = [length - DRAFTS + 1 + j for j in range(DRAFTS)]
        rows += [(b, n) if length > 0 and n > 0 else None for n in causal]
    return rows + [None] * (num_rows - len(rows)), False


def oracle_v4(spec, mode, fields, table, to_swa, bucket):
    rows, dropped = oracle_rows(mode, fields)
    num_pages = -(-bucket // spec.page_size)
    out = {name: [] for name in V4_ROW_FIELDS}
    ratios = {
        r: {name: [] for name in ("out_loc", "lengths", "topk_lengths", "page_indices")}
        for r in spec.compress_ratios
        if r
    }
    for t, row in enumerate(rows):
        b, seq = row or (0, 0)
        request = int(fields["req_pool_indices"][b]) if row else -1
        loc = int(fields["out_cache_loc"][t]) if row else 0
        pages = [at(table, request, p * spec.page_size) // spec.page_size for p in range(num_pages)]
        window = [
            at(to_swa, at(table, request, seq - 1 - k)) if row and seq - 1 - k >= 0 else -1 for k in range(spec.window)
        ]
        out["seq_lens_causal"].append(seq)
        out["positions"].append(seq - 1)
        out["row_to_request"].append(b)
        out["out_cache_loc"].append(loc)
        out["page_table"].append(pages)
        out["swa_page_indices"].append(window + [-1] * (ceil_to(spec.window, 64) - spec.window))
        out["swa_topk_lengths"].append(min(seq, spec.window))
        out["swa_out_cache_loc"].append(at(to_swa, loc) if row else 0)
        for r, fields_r in ratios.items():
            boundary = row is not None and seq % r == 0
            fields_r["out_loc"].append((loc // r if loc >= 0 else -1) if boundary else 0)
            fields_r["lengths"].append(seq // r)
            scanned = max(seq // r, 1) if row else 0
            fields_r["topk_lengths"].append(min(scanned, spec.index_topk) if r in (1, 2, 4) else scanned)
            if r in (1, 2, 4):
                entries = [-1] * ceil_to(spec.index_topk, 64)
            else:
                e = spec.page_size // r
                entries = [
                    pages[j // e] * e + j % e if j < seq // r and pages[j // e] >= 0 else -1
                    for j in range(num_pages * e)
                ]
                entries += [-1] * (ceil_to(len(entries), 64) - len(entries))
            fields_r["page_indices"].append(entries)
    overflow = dropped or any(row is not None and row[1] > bucket for row in rows)
    return out, ratios, overflow


def oracle_v32(spec, mode, fields, table, bucket):
    rows, dropped = oracle_rows(mode, fields)
    lengths = oracle_requests(mode, fields)
    num_rows = len(rows)
    starts = [min(sum(lengths[:b]), INT_MAX) for b in range(len(lengths) + 1)]
    seqs = [row[1] if row else 0 for row in rows]
    row_starts = [starts[row[0]] if row else 0 for row in rows]
    if mode is ForwardMode.EXTEND:
        queries = [max(int(n), 0) for n in fields["extend_lens"]]
        last = max([t + 1 for t, row in enumerate(rows) if row], default=0)
        cu_q = [min(sum(queries[:b]), last) for b in range(len(queries) + 1)]
    else:
        cu_q = list(range(num_rows + 1))
    request_of = [int(r) if n > 0 else -1 for r, n in zip(fields["req_pool_indices"], lengths)]
    ragged = []
    for request, length in zip(request_of, lengths):
        ragged += [at(table, request, pos) for pos in range(min(length, len(lengths) * bucket - len(ragged)))]
    return {
        "cache_seqlens": lengths,
        "seqlens_expanded": seqs,
        "topk_lengths": [min(n, spec.index_topk) for n in seqs],
        "positions": [n - 1 for n in seqs],
        "out_cache_loc": [int(x) if row else 0 for row, x in zip(rows, fields["out_cache_loc"])],
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": starts,
        "page_table": [
            [at(table, request, p) // spec.page_size for p in range(0, bucket, spec.page_size)]
            for request in request_of
        ],
        "row_to_request": [row[0] if row else 0 for row in rows],
        "index_row_starts": row_starts,
        "index_row_ends": [min(s + n, INT_MAX) for s, n in zip(row_starts, seqs)],
        "kv_slots": ragged + [-1] * (len(lengths) * bucket - len(ragged)),
        "overflow": dropped or any(n > bucket for n in lengths),
    }


def assert_equal(name, got, want):
    got = np.asarray(got)
    assert got.dtype == np.int32, (name, got.dtype)
    np.testing.assert_array_equal(got.astype(np.int64), np.asarray(want, np.int64).reshape(got.shape), err_msg=name)


def assert_v4(spec, mode, fields, table, to_swa, max_seq_len, build=build_v4_metadata):
    got = build(spec, *to_jax(mode, fields, table, to_swa, max_seq_len=max_seq_len))
    bucket = min(max_seq_len, table.shape[1])
    want, ratios, overflow = oracle_v4(spec, mode, fields, table, to_swa, bucket)
    num_rows = len(fields["out_cache_loc"])
    chex.assert_shape(got.page_table, (num_rows, -(-bucket // spec.page_size)))
    chex.assert_shape(got.swa_page_indices, (num_rows, ceil_to(spec.window, 64)))
    for name, value in want.items():
        assert_equal(name, getattr(got, name), value)
    assert set(got.compressed) == set(ratios)
    for ratio, struct in ratios.items():
        assert got.compressed[ratio].page_indices.shape[1] % 64 == 0
        for name, value in struct.items():
            assert_equal(f"compressed[{ratio}].{name}", getattr(got.compressed[ratio], name), value)
    assert got.overflow.dtype == bool and bool(got.overflow) == overflow
    return got


def assert_v32(spec, mode, fields, table, max_seq_len, *, fp8=True, backend="flashmla_sparse"):
    batch, tables = to_jax(mode, fields, table, max_seq_len=max_seq_len)
    got = build_v32_metadata(spec, batch, tables, fp8_kv_cache=fp8, prefill_backend=backend)
    want = oracle_v32(spec, mode, fields, table, min(max_seq_len, table.shape[1]))
    ragged = mode is ForwardMode.EXTEND and fp8 and backend == "flashmla_sparse"
    assert got.topk_transform is (TopkTransform.RAGGED if ragged else TopkTransform.PAGED)
    assert bool(got.overflow) == want.pop("overflow")
    kv_slots = want.pop("kv_slots")
    if ragged:
        assert_equal("kv_slots", got.kv_slots, kv_slots)
        assert_equal("topk_indices_offset", got.topk_indices_offset, want["index_row_starts"])
    else:
        assert got.kv_slots is None and got.topk_indices_offset is None
    for name, value in want.items():
        assert_equal(name, getattr(got, name), value)
    return got

"""Metadata of V3.2 and V4 against brute-force loops over requests and positions, from the formulas."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.indices import TopkTransform, topk_transform
from jax_sparse_mla.metadata import (
    CompressedMetadata,
    ForwardBatch,
    ForwardMode,
    RequestTables,
    V4Metadata,
    V32Metadata,
    build_v4_metadata,
    build_v32_metadata,
)
from jax_sparse_mla.metadata import v4 as v4_module
from jax_sparse_mla.metadata import v32 as v32_module
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, DEEPSEEK_V32

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
# A V4 and a V3.2 with pages of 16 and 8 tokens: small enough to enumerate every position.
TINY_V4 = dataclasses.replace(
    DEEPSEEK_V4_FLASH, name="tiny V4", page_size=16, window=5, index_topk=6, compress_ratios=(0, 4, 8)
)
TINY_V32 = dataclasses.replace(DEEPSEEK_V32, name="tiny V3.2", page_size=8, index_topk=6)
MODES = list(ForwardMode)
NUM_REQUESTS, DRAFTS, EXTEND_ROWS, IDLE_ROWS = 4, 3, 19, 5
MAX_REQUESTS, MAX_LEN, POOL = 6, 60, 512


V4_ROW_FIELDS = (
    "seq_lens_causal",
    "positions",
    "row_to_request",
    "out_cache_loc",
    "page_table",
    "swa_page_indices",
    "swa_topk_lengths",
    "swa_out_cache_loc",
)


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
            fields_r["topk_lengths"].append(min(scanned, spec.index_topk) if r == 4 else scanned)
            if r == 4:
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


def test_ratios_are_properties_and_widths_are_the_models():
    rng = np.random.default_rng(2)
    table, to_swa = make_tables(rng, page_size=256, max_len=1024, pool=256 * 64)
    fields = make_batch(rng, ForwardMode.DECODE)
    batch, tables = to_jax(ForwardMode.DECODE, fields, table, to_swa)
    for spec, width in ((DEEPSEEK_V4_FLASH, 512), (DEEPSEEK_V4_PRO, 1024)):
        metadata = build_v4_metadata(spec, batch, tables)
        chex.assert_shape(metadata.c4_page_indices, (NUM_REQUESTS, width))
        assert set(metadata.compressed) == {4, 128}
        for ratio in (4, 128):
            assert isinstance(metadata.compressed[ratio], CompressedMetadata)
            for name in ("out_loc", "lengths", "topk_lengths", "page_indices"):
                assert getattr(metadata, f"c{ratio}_{name}") is getattr(metadata.compressed[ratio], name)
    metadata = build_v4_metadata(dataclasses.replace(DEEPSEEK_V4_FLASH, compress_ratios=(0,)), batch, tables)
    assert metadata.compressed == {}
    with pytest.raises(AttributeError, match="ratio 128"):
        _ = metadata.c128_out_loc


def test_a_decode_row_by_hand():
    """Request row 1 lies in pages 7 and 3 of 256 tokens; its 384th token completes a group of both ratios."""
    table = np.zeros((2, 512), np.int64)
    table[1] = np.concatenate([7 * 256 + np.arange(256), 3 * 256 + np.arange(256)])
    to_swa = np.append(np.arange(4096) + 10_000, -1)
    fields = {
        "req_pool_indices": [1],
        "seq_lens": [384],
        "out_cache_loc": [3 * 256 + 127],
        "extend_lens": [9],
    }
    metadata = build_v4_metadata(DEEPSEEK_V4_FLASH, *to_jax(ForwardMode.DECODE, fields, table, to_swa, max_seq_len=512))
    assert_equal("page_table", metadata.page_table, [[7, 3]])
    # Newest first: offsets 127 … 0 of page 3, the window's 128 tokens.
    assert_equal("window", metadata.swa_page_indices, [10_000 + 3 * 256 + 127 - np.arange(128)])
    assert_equal("swa_out", metadata.swa_out_cache_loc, [10_000 + 895])
    assert_equal("c4_out", metadata.c4_out_loc, [895 // 4])
    assert_equal("c128_out", metadata.c128_out_loc, [895 // 128])
    assert_equal("c128", metadata.c128_page_indices, [[14, 15, 6] + [-1] * 61])
    assert (int(metadata.c4_lengths[0]), int(metadata.c4_topk_lengths[0])) == (96, 96)
    assert (int(metadata.c128_lengths[0]), int(metadata.c128_topk_lengths[0])) == (3, 3)


def test_extend_continues_a_prefix_and_pads():
    table = np.arange(6 * 60).reshape(6, 60)
    fields = {
        "req_pool_indices": [2, 4, 0],
        "seq_lens": [7, 0, 3],
        "extend_lens": [2, 0, 3],
        "out_cache_loc": [11, 12, 13, 14, 15, 16, 17],
    }
    batch, tables = to_jax(ForwardMode.EXTEND, fields, table)
    got = build_v32_metadata(TINY_V32, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_sparse")
    assert_equal("seqlens_expanded", got.seqlens_expanded, [6, 7, 1, 2, 3, 0, 0])
    assert_equal("positions", got.positions, [5, 6, 0, 1, 2, -1, -1])
    assert_equal("out_cache_loc", got.out_cache_loc, [11, 12, 13, 14, 15, 0, 0])
    assert_equal("cu_seqlens_q", got.cu_seqlens_q, [0, 2, 2, 5])
    assert_equal("cu_seqlens_k", got.cu_seqlens_k, [0, 7, 7, 10])
    assert_equal("row_to_request", got.row_to_request, [0, 0, 2, 2, 2, 0, 0])
    assert_equal("offsets", got.topk_indices_offset, [0, 0, 7, 7, 7, 0, 0])
    assert_equal("kv_slots", got.kv_slots[:11], [*range(120, 127), 0, 1, 2, -1])


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


# ---- what the fields are for: top-k positions become slots ----


@pytest.mark.parametrize("mode", MODES, ids=lambda m: m.name)
def test_topk_positions_reach_the_tokens_they_name(mode):
    rng = np.random.default_rng(3)
    table, _ = make_tables(rng, page_size=TINY_V32.page_size)
    fields = make_batch(rng, mode)
    batch, tables = to_jax(mode, fields, table)
    metadata = build_v32_metadata(TINY_V32, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_sparse")
    rows = len(fields["out_cache_loc"])
    logits = jnp.asarray(rng.standard_normal((rows, MAX_LEN)), jnp.float32)
    chosen = topk_transform(
        logits,
        metadata.seqlens_expanded,
        TINY_V32.index_topk,
        method=metadata.topk_transform,
        page_table=metadata.page_table,
        page_size=TINY_V32.page_size,
        row_to_request=metadata.row_to_request,
        topk_indices_offset=metadata.topk_indices_offset,
    )
    for t, row in enumerate(oracle_rows(mode, fields)[0]):
        slots = np.asarray(chosen[t])
        if metadata.topk_transform is TopkTransform.RAGGED:
            slots = np.where(slots >= 0, np.asarray(metadata.kv_slots)[slots], -1)
        if row is None:
            assert (slots == -1).all()
            continue
        request, length = fields["req_pool_indices"][row[0]], row[1]
        best = np.argsort(-np.asarray(logits)[t, :length], kind="stable")[: TINY_V32.index_topk]
        assert set(slots[slots >= 0]) == {table[request, p] for p in best}


def test_decode_with_an_fp8_cache_and_the_sparse_backend_is_paged():
    """The engine crashes here: its transform says RAGGED while only EXTEND builds the offsets."""
    rng = np.random.default_rng(4)
    table, _ = make_tables(rng, page_size=TINY_V32.page_size)
    for mode in (m for m in MODES if m is not ForwardMode.EXTEND):
        got = assert_v32(TINY_V32, mode, make_batch(rng, mode), table, MAX_LEN)
        assert got.topk_transform is TopkTransform.PAGED and got.topk_indices_offset is None
    for fp8, backend in ((False, "flashmla_sparse"), (True, "flashmla_kv")):
        fields = make_batch(rng, ForwardMode.EXTEND)
        got = assert_v32(TINY_V32, ForwardMode.EXTEND, fields, table, MAX_LEN, fp8=fp8, backend=backend)
        assert got.topk_transform is TopkTransform.PAGED


# ---- padding, permutation, compilation ----


@pytest.mark.parametrize("mode", [m for m in MODES if m is not ForwardMode.IDLE], ids=lambda m: m.name)
def test_permuting_requests_permutes_rows(mode):
    rng = np.random.default_rng(5)
    table, to_swa = make_tables(rng, page_size=TINY_V4.page_size)
    fields = make_batch(rng, mode)
    order = rng.permutation(NUM_REQUESTS)
    each = {ForwardMode.DECODE: 1, ForwardMode.EXTEND: None}.get(mode, DRAFTS)
    counts = fields["extend_lens"] if each is None else np.full(NUM_REQUESTS, each)
    starts = np.cumsum(counts) - counts
    rows = np.concatenate([starts[b] + np.arange(counts[b]) for b in order] + [np.arange(counts.sum(), EXTEND_ROWS)])
    rows = rows[: len(fields["out_cache_loc"])].astype(int)
    permuted = {name: np.asarray(fields[name])[order] for name in ("req_pool_indices", "seq_lens", "extend_lens")}
    permuted["out_cache_loc"] = fields["out_cache_loc"][rows]
    a = build_v4_metadata(TINY_V4, *to_jax(mode, fields, table, to_swa))
    b = build_v4_metadata(TINY_V4, *to_jax(mode, permuted, table, to_swa))
    skip = {"row_to_request", "query_start_loc", "overflow"}
    for field in (f.name for f in dataclasses.fields(V4Metadata) if f.name not in skip):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, rows=rows: x[rows], getattr(a, field)), getattr(b, field))
    live = np.asarray(b.seq_lens_causal) > 0
    moved = np.asarray(a.row_to_request)[rows]
    np.testing.assert_array_equal(order[np.asarray(b.row_to_request)][live], moved[live])


@pytest.mark.parametrize("requests,rows", [(0, 0), (0, 3), (2, 3)])
def test_idle_is_all_padding(requests, rows):
    fields = {
        "req_pool_indices": np.zeros(requests),
        "seq_lens": np.full(requests, 9),
        "out_cache_loc": np.full(rows, 7),
        "extend_lens": np.zeros(requests),
    }
    table, to_swa = make_tables(np.random.default_rng(6), page_size=TINY_V4.page_size)
    assert_v4(TINY_V4, ForwardMode.IDLE, fields, table, to_swa, MAX_LEN)
    assert_v32(TINY_V32, ForwardMode.IDLE, fields, table, MAX_LEN)


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
    fields["seq_lens"] = np.array([32, 33, 5, 0])
    assert bool(assert_v4(TINY_V4, ForwardMode.DECODE, fields, table, to_swa, 32).overflow)
    assert bool(assert_v32(TINY_V32, ForwardMode.DECODE, fields, table, 32).overflow)
    fields["seq_lens"][1] = 32
    assert not bool(assert_v4(TINY_V4, ForwardMode.DECODE, fields, table, to_swa, 32).overflow)
    assert not bool(assert_v32(TINY_V32, ForwardMode.DECODE, fields, table, 32).overflow)
    # The drafts count: 30 + 3 exceeds 32.
    fields = make_batch(rng, ForwardMode.TARGET_VERIFY) | {"seq_lens": np.array([30, 4, 5, 0])}
    assert bool(assert_v4(TINY_V4, ForwardMode.TARGET_VERIFY, fields, table, to_swa, 32).overflow)
    # More query rows than slots to write them to.
    fields = make_batch(rng, ForwardMode.EXTEND)
    fields |= {"seq_lens": np.full(4, 9), "extend_lens": np.array([9, 9, 9, 9])}
    assert bool(assert_v4(TINY_V4, ForwardMode.EXTEND, fields, table, to_swa, 32).overflow)


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


# ---- refusals ----


def _args(mode, /, **changes):
    rng = np.random.default_rng(10)
    table, to_swa = make_tables(rng, page_size=TINY_V4.page_size)
    batch, tables = to_jax(mode, make_batch(rng, mode), table, to_swa)
    return dataclasses.replace(batch, **changes), tables


@pytest.mark.parametrize(
    "mode,changes,error,message",
    [
        (
            ForwardMode.DECODE,
            {"out_cache_loc": i32([1, 2, 3])},
            ValueError,
            r"out_cache_loc.*draft_step_batch",
        ),
        (ForwardMode.EXTEND, {"extend_lens": None}, ValueError, "extend_lens"),
        (ForwardMode.EXTEND, {"extend_lens": i32([1])}, ValueError, "extend_lens"),
        (ForwardMode.TARGET_VERIFY, {"num_draft_tokens": None}, ValueError, "num_draft_tokens"),
        (ForwardMode.TARGET_VERIFY, {"num_draft_tokens": 0}, ValueError, "num_draft_tokens"),
        (ForwardMode.DRAFT_EXTEND, {"num_draft_tokens": 2}, ValueError, r"out_cache_loc.*num_draft_tokens"),
        (ForwardMode.DECODE, {"req_pool_indices": i32([1, 2])}, ValueError, "req_pool_indices"),
        (ForwardMode.DECODE, {"seq_lens": jnp.ones(4)}, TypeError, "seq_lens"),
        (ForwardMode.DECODE, {"out_cache_loc": np.ones(4, np.int64)}, TypeError, "out_cache_loc"),
        (ForwardMode.DECODE, {"max_seq_len": 12.0}, TypeError, "max_seq_len"),
        (ForwardMode.DECODE, {"max_seq_len": -1}, ValueError, "max_seq_len"),
        (ForwardMode.DECODE, {"mode": "decode"}, TypeError, "mode"),
    ],
)
def test_batches_that_do_not_fit_their_mode_are_refused_by_name(mode, changes, error, message):
    batch, tables = _args(mode, **changes)
    with pytest.raises(error, match=f"build_v4_metadata.*{message}"):
        build_v4_metadata(TINY_V4, batch, tables)
    with pytest.raises(error, match=f"build_v32_metadata.*{message}"):
        build_v32_metadata(TINY_V32, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")


def test_wrong_models_and_tables_are_refused_by_name():
    batch, tables = _args(ForwardMode.DECODE)
    v32 = {"fp8_kv_cache": True, "prefill_backend": "flashmla_sparse"}
    with pytest.raises(ValueError, match=r"spec.*window"):
        build_v4_metadata(TINY_V32, batch, tables)
    with pytest.raises(ValueError, match=r"spec.*window"):
        build_v32_metadata(TINY_V4, batch, tables, **v32)
    with pytest.raises(TypeError, match="spec"):
        build_v4_metadata("v4", batch, tables)
    with pytest.raises(TypeError, match="tables"):
        build_v4_metadata(TINY_V4, batch, tables.req_to_token)
    with pytest.raises(TypeError, match="batch"):
        build_v32_metadata(TINY_V32, None, tables, **v32)
    with pytest.raises(TypeError, match="full_to_swa"):
        build_v4_metadata(TINY_V4, batch, dataclasses.replace(tables, full_to_swa=None))
    with pytest.raises(ValueError, match="req_to_token"):
        build_v4_metadata(TINY_V4, batch, dataclasses.replace(tables, req_to_token=i32([1])))
    with pytest.raises(ValueError, match="compress_ratios"):
        build_v4_metadata(dataclasses.replace(TINY_V4, compress_ratios=(0, 3)), batch, tables)
    with pytest.raises(ValueError, match="prefill_backend"):
        build_v32_metadata(TINY_V32, batch, tables, fp8_kv_cache=True, prefill_backend="fa3")

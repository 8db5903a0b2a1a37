"""The prefill workspace: its slots against loops, and what each query then reads of it."""

import chex
import jax
import metadata_cases
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_cases import EXTEND_ROWS, NUM_REQUESTS, TINY_V4, at, i32, make_batch, make_tables

from jax_sparse_mla.indices import combine_topk_swa_indices
from jax_sparse_mla.metadata import ForwardMode, build_prefill_plan
from jax_sparse_mla.metadata import prefill_plan as plan_module

RATIOS, MAX_LEN = (0, 4, 8), 64
AMPLE = {"swa_capacity": 48, "compressed_capacity": 64}
TIGHT = {"swa_capacity": 13, "compressed_capacity": 9}


def make_case(rng, *, hostile=False):
    """numpy fields of an EXTEND batch with prefixes and padding requests, and its tables."""
    tables = make_tables(rng, page_size=TINY_V4.page_size, holes=hostile, max_len=MAX_LEN)
    return make_batch(rng, ForwardMode.EXTEND, hostile=hostile, longest=MAX_LEN), *tables


def to_jax(fields, table, to_swa, *, max_seq_len=MAX_LEN):
    return metadata_cases.to_jax(ForwardMode.EXTEND, fields, table, to_swa, max_seq_len=max_seq_len)


# ---- the oracle: python integers and loops only ----


def compressed_slot(fields, table, b, j, ratio, bucket):
    """Entry j of request b, through its 16-token pages; −1 past the bucket's pages."""
    entries = TINY_V4.page_size // ratio
    first_token = j // entries * TINY_V4.page_size
    page = at(table, int(fields["req_pool_indices"][b]), first_token) // TINY_V4.page_size
    return page * entries + j % entries if page >= 0 and first_token < bucket else -1


def window_slot(fields, table, to_swa, b, pos):
    return at(to_swa, at(table, int(fields["req_pool_indices"][b]), pos))


def oracle_plan(fields, table, to_swa, ratio, bucket, swa_capacity, compressed_capacity):
    compressed_capacity = compressed_capacity if ratio else 0
    seq_lens = [max(int(n), 0) for n in fields["seq_lens"]]
    extend_lens = [max(int(n), 0) for n in fields["extend_lens"]]
    compressed, swa = [], []
    plan = {"compressed_base": [], "swa_base": [], "gather_lens": [], "seq_lens": seq_lens}
    compressed_total = swa_total = 0
    for b, (seq, extend) in enumerate(zip(seq_lens, extend_lens)):
        rows = seq // ratio if ratio else 0
        fits = compressed_total + rows <= compressed_capacity
        plan["compressed_base"].append(compressed_total if fits else compressed_capacity + swa_capacity)
        compressed += [
            compressed_slot(fields, table, b, j, ratio, bucket)
            for j in range(min(rows, compressed_capacity - len(compressed)))
        ]
        compressed_total += rows
        gather = min(seq, extend + TINY_V4.window - 1) if extend else 0
        plan["gather_lens"].append(gather)
        plan["swa_base"].append(compressed_capacity + min(swa_total, swa_capacity))
        swa += [
            window_slot(fields, table, to_swa, b, seq - gather + i) for i in range(min(gather, swa_capacity - len(swa)))
        ]
        swa_total += gather
    plan["compressed_slots"] = compressed + [-1] * (compressed_capacity - len(compressed))
    plan["swa_slots"] = swa + [-1] * (swa_capacity - len(swa))
    rows = []
    for b, (seq, extend) in enumerate(zip(seq_lens, extend_lens)):
        for j in range(min(extend, EXTEND_ROWS - len(rows))):
            rows.append((b, seq - extend + j) if seq - extend + j >= 0 else None)
    rows += [None] * (EXTEND_ROWS - len(rows))
    last = max([t + 1 for t, row in enumerate(rows) if row], default=0)
    plan["query_start_loc"] = [min(sum(extend_lens[:b]), last) for b in range(NUM_REQUESTS + 1)]
    plan["query_pos"] = [row[1] if row else -1 for row in rows]
    plan["row_to_request"] = [row[0] if row else 0 for row in rows]
    plan["overflow"] = (
        compressed_total > compressed_capacity
        or swa_total > swa_capacity
        or any(seq > bucket for seq in seq_lens)
        or sum(extend_lens) > EXTEND_ROWS
    )
    return plan, rows


def assert_plan(fields, table, to_swa, ratio, capacities, max_seq_len, build=build_prefill_plan):
    batch, tables = to_jax(fields, table, to_swa, max_seq_len=max_seq_len)
    plan = build(TINY_V4, batch, tables, compress_ratio=ratio, **capacities)
    bucket = min(max_seq_len, MAX_LEN)
    want, rows = oracle_plan(fields, table, to_swa, ratio, bucket, **capacities)
    assert bool(plan.overflow) == want.pop("overflow")
    for name, value in want.items():
        got = np.asarray(getattr(plan, name))
        assert got.dtype == np.int32 and got.shape == (len(value),), name
        np.testing.assert_array_equal(got, value, err_msg=name)
    assert plan.topk == {0: 0, 4: TINY_V4.index_topk, 8: max(bucket // 8, 1)}[ratio]
    assert (plan.compress_ratio, plan.window) == (ratio, TINY_V4.window)
    assert plan.workspace_rows == len(want["compressed_slots"]) + len(want["swa_slots"])
    return plan, rows


@given(
    seed=st.integers(0, 2**32 - 1),
    ratio=st.sampled_from(RATIOS),
    # Each pair is a compilation; the last two are shared with the test of the keys.
    room=st.sampled_from([(AMPLE, 40), (AMPLE, MAX_LEN), (TIGHT, MAX_LEN)]),
    hostile=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_plan_equals_brute_force(seed, ratio, room, hostile):
    capacities, max_seq_len = room
    case = make_case(np.random.default_rng(seed), hostile=hostile)
    assert_plan(*case, ratio, capacities, max_seq_len)


def keys_read(plan, positions):
    """Per query row, the keys in the order they are read: ("compressed" | "window", slot)."""
    indices, lengths = combine_topk_swa_indices(
        i32(positions),
        plan.query_start_loc,
        plan.query_pos,
        plan.seq_lens,
        plan.gather_lens,
        plan.compressed_base,
        plan.swa_base,
        window=plan.window,
        compress_ratio=max(plan.compress_ratio, 1),
        topk=plan.topk,
    )
    split = plan.compressed_slots.shape[0]
    slots = np.concatenate([plan.compressed_slots, plan.swa_slots])
    read = []
    for row, length in zip(np.asarray(indices), np.asarray(lengths)):
        hit = [i for i in row[:length] if 0 <= i < plan.workspace_rows and slots[i] >= 0]
        read.append([("compressed" if i < split else "window", slots[i]) for i in hit])
    return read


@given(
    seed=st.integers(0, 2**32 - 1),
    ratio=st.sampled_from(RATIOS),
    capacities=st.sampled_from([AMPLE, TIGHT]),
    hostile=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_queries_read_their_own_keys_and_no_others(seed, ratio, capacities, hostile):
    """With room for all, exactly the keys of the formula; without, some of them, never another request's."""
    rng = np.random.default_rng(seed)
    fields, table, to_swa = make_case(rng, hostile=hostile)
    plan, rows = assert_plan(fields, table, to_swa, ratio, capacities, MAX_LEN)
    if ratio == 8:  # every entry
        positions = np.broadcast_to(np.arange(plan.topk), (EXTEND_ROWS, plan.topk))
    else:
        positions = np.full((EXTEND_ROWS, max(plan.topk, 1)), -1)
        for t, row in enumerate(rows):
            complete = min((row[1] + 1) // 4, MAX_LEN) if row else 0
            chosen = rng.permutation(complete)[: plan.topk]
            positions[t, : len(chosen)] = chosen
    for row, chosen, read in zip(rows, positions, keys_read(plan, positions)):
        if row is None:
            assert read == []
            continue
        b, pos = row
        entries = [j for j in chosen if 0 <= j < (pos + 1) // ratio] if ratio else []
        want = [("compressed", compressed_slot(fields, table, b, j, ratio, MAX_LEN)) for j in entries]
        want += [
            ("window", window_slot(fields, table, to_swa, b, p))
            for p in range(max(pos - TINY_V4.window + 1, 0), pos + 1)
        ]
        want = [key for key in want if key[1] >= 0]
        if not bool(plan.overflow):
            assert read == want
        else:
            assert len(read) <= len(want) and set(read) <= set(want)


def test_capacities_that_just_fit_do_not_overflow():
    """13 window rows and 9 compressed ones, or 64 tokens; then one more of each."""
    fields, table, to_swa = make_case(np.random.default_rng(0))

    def overflows(capacities, seq_lens, extend_lens):
        lengths = {"seq_lens": np.array(seq_lens), "extend_lens": np.array(extend_lens)}
        return bool(assert_plan(fields | lengths, table, to_swa, 4, capacities, MAX_LEN)[0].overflow)

    assert not overflows(TIGHT, [24, 12, 0, 2], [2, 1, 0, 2])
    assert overflows(TIGHT, [24, 12, 0, 2], [3, 1, 0, 2])
    assert overflows(TIGHT, [28, 12, 0, 2], [2, 1, 0, 2])
    assert not overflows(AMPLE, [64, 12, 0, 2], [2, 1, 0, 2])
    assert overflows(AMPLE, [65, 12, 0, 2], [2, 1, 0, 2])


def test_no_requests():
    fields = {name: np.zeros(0) for name in ("req_pool_indices", "seq_lens", "extend_lens")}
    fields["out_cache_loc"] = np.ones(3)
    _, table, to_swa = make_case(np.random.default_rng(0))
    batch, tables = to_jax(fields, table, to_swa)
    plan = build_prefill_plan(TINY_V4, batch, tables, compress_ratio=4, **AMPLE)
    assert not bool(plan.overflow)
    np.testing.assert_array_equal(plan.query_pos, [-1, -1, -1])
    assert (np.asarray(plan.swa_slots) == -1).all() and (np.asarray(plan.compressed_slots) == -1).all()


def test_chunks_compile_once_and_plans_pass_through_jit(monkeypatch):
    traces = []

    def counting(batch, tables, expand=plan_module.expand_rows):
        traces.append(1)
        return expand(batch, tables)

    monkeypatch.setattr(plan_module, "expand_rows", counting)
    rng = np.random.default_rng(1)
    for _ in range(5):
        # Capacities that no other test uses, so that nothing is compiled before.
        batch, tables = to_jax(*make_case(rng))
        plan = build_prefill_plan(TINY_V4, batch, tables, compress_ratio=4, swa_capacity=51, compressed_capacity=67)
    assert len(traces) == 1
    again = jax.jit(lambda x: x)(plan)
    chex.assert_trees_all_equal(again, plan)
    assert (again.compress_ratio, again.window, again.topk) == (4, 5, 6)
    build = jax.jit(build_prefill_plan, static_argnums=0, static_argnames=("compress_ratio", *AMPLE))
    assert_plan(*make_case(rng), 4, AMPLE, MAX_LEN, build=build)

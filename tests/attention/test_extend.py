"""sparse_mla_extend: a prefill chunk from paged caches, against attention written from positions.

The oracle knows nothing of workspaces: a query at position p of a request attends to its tokens p − 127 … p
and to compressed entries (ratio 4: those chosen; ratio 128: all complete ones), where the engine put them.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import device_cache, skip_unless_able
from attention_oracle import (
    BF16,
    INT_MAX,
    INT_MIN,
    HostCache,
    assert_close_flashmla,
    attend,
    keys_of,
    pack_cache,
    queries,
)

from jax_sparse_mla.attention import sparse_mla_decode, sparse_mla_extend
from jax_sparse_mla.attention.machine import installed_for
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, PrefillPlan, RequestTables, build_prefill_plan
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH

HEADS, TOPK, WINDOW, PAGE = 4, 64, 128, 256
SPEC = dataclasses.replace(DEEPSEEK_V4_FLASH, num_heads=HEADS, index_topk=TOPK)
SCALE = 0.2
POOL_PAGES, SWA_PAGES, BUCKET, ROWS = 16, 2, 768, 64
RATIOS = (0, 4, 128)

# (tokens, this chunk included; query rows of this chunk). A long prefix; a request shorter than the window;
# padding; a chunk across a page border, whose first row does not see the last compressed entry; no prefix.
REQUESTS = ((700, 20), (37, 30), (0, 0), (261, 6), (5, 5))
CAPACITIES = {"swa_capacity": 352, "compressed_capacity": 272}  # needed: 147 + 37 + 133 + 5, and 175 + 9 + 65 + 1

SINK = np.array([np.inf, -np.inf, 0.5, 2.0], np.float32)


@dataclasses.dataclass
class Chunk:
    """One chunk of several requests, where the engine put their rows, and what the indexer chose."""

    requests: tuple[tuple[int, int], ...]
    req_pool_indices: np.ndarray
    req_to_token: np.ndarray
    full_to_swa: np.ndarray
    swa: HostCache
    compressed: dict[int, HostCache]
    q: np.ndarray  # bfloat16 [ROWS, HEADS, 512]
    chosen: np.ndarray  # int32 [ROWS, TOPK], compressed positions of ratio 4

    def rows(self) -> list[tuple[int, int]]:
        """(request, position) of each query row that is not padding."""
        return [(b, p) for b, (seq, new) in enumerate(self.requests) for p in range(seq - new, seq)]

    def token_slot(self, request: int, position: int) -> int:
        full = self.req_to_token[self.req_pool_indices[request], position]
        return int(self.full_to_swa[full])

    def compressed_slot(self, ratio: int, request: int, entry: int) -> int:
        """Entry j lies on the page of its tokens, of which each has a ratio-th as many entries."""
        first_token = self.req_to_token[self.req_pool_indices[request], entry * ratio]
        page, offset = divmod(int(first_token), PAGE)
        return page * (PAGE // ratio) + offset // ratio

    def token_key(self, request: int, position: int) -> np.ndarray:
        return self.swa.rows[self.token_slot(request, position)]

    def compressed_key(self, ratio: int, request: int, entry: int) -> np.ndarray:
        return self.compressed[ratio].rows[self.compressed_slot(ratio, request, entry)]


def make_chunk(seed: int = 0) -> Chunk:
    rng = np.random.default_rng(seed)
    count = len(REQUESTS)
    req_to_token = np.full((count + 2, BUCKET), -1, np.int32)
    pages = rng.permutation(np.arange(1, POOL_PAGES))  # page 0 is the engine's dummy
    req_rows = rng.permutation(count + 2)[:count].astype(np.int32)
    full_to_swa = np.full(POOL_PAGES * PAGE + 1, -1, np.int32)
    swa_slots = list(rng.permutation(SWA_PAGES * PAGE))
    swa_live = np.zeros(SWA_PAGES * PAGE, bool)
    live = {ratio: np.zeros(POOL_PAGES * PAGE // ratio, bool) for ratio in (4, 128)}
    used = 0
    for b, (seq, new) in enumerate(REQUESTS):
        for position in range(seq):
            if position % PAGE == 0:
                page, used = pages[used], used + 1
            full = page * PAGE + position % PAGE
            req_to_token[req_rows[b], position] = full
            if position > seq - new - WINDOW:  # older tokens have left the window's cache
                full_to_swa[full] = swa_slots.pop()
                swa_live[full_to_swa[full]] = True
            for ratio in live:
                live[ratio][full // ratio] |= (position + 1) % ratio == 0
    chunk = Chunk(
        requests=REQUESTS,
        req_pool_indices=req_rows,
        req_to_token=req_to_token,
        full_to_swa=full_to_swa,
        swa=pack_cache("V4_FP8", PAGE, keys_of(rng, len(swa_live), 512), swa_live),
        compressed={r: pack_cache("V4_FP8", PAGE // r, keys_of(rng, len(live[r]), 512), live[r]) for r in live},
        q=queries(rng, (ROWS, HEADS, 512)),
        chosen=rng.choice(np.array([0, -1, INT_MIN, INT_MAX, 3], np.int32), (ROWS, TOPK)),
    )
    for row, (_, position) in enumerate(chunk.rows()):
        complete = (position + 1) // 4
        entries = rng.permutation(complete)[:TOPK]
        entries[rng.random(len(entries)) < 0.1] = -1
        chunk.chosen[row] = -1
        chunk.chosen[row, : len(entries)] = entries
    return chunk


def oracle(chunk: Chunk, ratio: int, *, sink=SINK):
    """out, lse."""
    out, lse = np.zeros((ROWS, HEADS, 512)), np.full((ROWS, HEADS), -np.inf)
    for row, (b, p) in enumerate(chunk.rows()):
        keys = [chunk.token_key(b, position) for position in range(max(0, p - WINDOW + 1), p + 1)]
        entries = {0: [], 4: chunk.chosen[row][: (p + 1) // 4], 128: range((p + 1) // 128)}[ratio]
        for entry in entries:
            if 0 <= entry < (p + 1) // ratio:
                keys.append(chunk.compressed_key(ratio, b, int(entry)))
        out[row], _, lse[row] = attend(chunk.q[row], np.array(keys).reshape(-1, 512), SCALE, sink)
    return out, lse


def plan_of(chunk: Chunk, ratio: int, *, rows: int = ROWS, bucket: int = BUCKET, **capacities) -> PrefillPlan:
    seq_lens, extend_lens = (jnp.asarray(x, jnp.int32) for x in zip(*chunk.requests))
    batch = ForwardBatch(
        mode=ForwardMode.EXTEND,
        max_seq_len=bucket,
        req_pool_indices=jax.device_put(chunk.req_pool_indices),
        seq_lens=seq_lens,
        out_cache_loc=jnp.zeros((rows,), jnp.int32),
        extend_lens=extend_lens,
    )
    tables = jax.device_put(RequestTables(req_to_token=chunk.req_to_token, full_to_swa=chunk.full_to_swa))
    return build_prefill_plan(SPEC, batch, tables, compress_ratio=ratio, **CAPACITIES | capacities)


def arguments_of(chunk: Chunk, ratio: int) -> dict:
    return {
        "q": jax.device_put(chunk.q),
        "swa_cache": device_cache(chunk.swa),
        "compressed_cache": device_cache(chunk.compressed[ratio]) if ratio else None,
        "topk_positions": jax.device_put(chunk.chosen) if ratio == 4 else None,
        "attn_sink": jax.device_put(SINK),
    }


@functools.partial(jax.jit, static_argnames="backend")
def extend(plan, arguments, workspace=None, backend=None):
    return sparse_mla_extend(plan=plan, **arguments, workspace=workspace, softmax_scale=SCALE, backend=backend)


@functools.cache
def shared_chunk() -> Chunk:
    return make_chunk()


def check(result, expected) -> None:
    out, lse = result
    chex.assert_type([out, lse], [jnp.bfloat16, jnp.float32])
    assert_close_flashmla(lse, expected[1], "prefill.lse")
    assert_close_flashmla(out, expected[0], "prefill.out")
    assert not np.any(np.asarray(out, np.float32)[np.isneginf(expected[1])])


@pytest.mark.always(2)
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("seed", range(2))
def test_a_chunk_equals_attention_by_position(ratio, seed):
    chunk = make_chunk(seed)
    plan = plan_of(chunk, ratio)
    assert not plan.overflow
    result = extend(plan, arguments_of(chunk, ratio))
    check(result, oracle(chunk, ratio))
    real = len(chunk.rows())
    assert real == 61 < ROWS
    assert np.all(np.isfinite(result[1][:real])) and np.all(np.isneginf(result[1][real:]))


@pytest.mark.long
def test_without_jit_and_without_a_sink():
    chunk = shared_chunk()
    arguments = arguments_of(chunk, 4) | {"attn_sink": None}
    result = sparse_mla_extend(plan=plan_of(chunk, 4), **arguments, softmax_scale=SCALE)
    check(result, oracle(chunk, 4, sink=None))


@pytest.mark.always(1)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_workspace_changes_nothing(ratio):
    """Whatever stands in it: the rows that the plan fills are overwritten, the others never read."""
    chunk, plan = shared_chunk(), plan_of(shared_chunk(), ratio)
    expected = extend(plan, arguments_of(chunk, ratio))
    workspace = jnp.full((plan.workspace_rows + 5, 512), jnp.nan, jnp.bfloat16)
    chex.assert_trees_all_equal(extend(plan, arguments_of(chunk, ratio), workspace), expected)
    check(expected, oracle(chunk, ratio))


def paged_arguments(chunk: Chunk, ratio: int) -> dict:
    """The chunk as a decode call of one row per query: the slots of its keys in the paged caches."""
    window = np.full((ROWS, 1, WINDOW), -1, np.int32)
    entries = np.full((ROWS, 1, max(TOPK, BUCKET // 128)), -1, np.int32)
    for row, (b, p) in enumerate(chunk.rows()):
        seen = range(max(0, p - WINDOW + 1), p + 1)
        window[row, 0, : len(seen)] = [chunk.token_slot(b, position) for position in seen]
        chosen = {0: [], 4: chunk.chosen[row], 128: range((p + 1) // 128)}[ratio]
        slots = [chunk.compressed_slot(ratio, b, int(entry)) for entry in chosen if entry >= 0]
        entries[row, 0, : len(slots)] = slots
    q, indices = jax.device_put((chunk.q[:, None], window))
    arguments = {"q": q, "cache": device_cache(chunk.swa), "indices": indices}
    if ratio:
        arguments |= {"extra_cache": device_cache(chunk.compressed[ratio]), "extra_indices": jax.device_put(entries)}
    return arguments | {"attn_sink": jax.device_put(SINK)}


@pytest.mark.always(1)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=[] if name == "reference" else [pytest.mark.gpu])
        for name in sorted(installed_for("decode") | installed_for("prefill"))
    ],
)
@pytest.mark.parametrize("ratio", RATIOS)
def test_paged_decode_agrees(ratio, backend):
    """Both routes of a chunk, kernel "paged_decode" and kernel "sparse_prefill", give the same attention."""
    for phase in ("decode", "prefill"):
        skip_unless_able(backend, phase, ROWS, HEADS, TOPK)
    chunk = shared_chunk()
    paged = sparse_mla_decode(**paged_arguments(chunk, ratio), softmax_scale=SCALE, backend=backend)
    out, lse = extend(plan_of(chunk, ratio), arguments_of(chunk, ratio), backend=backend)
    check((paged[0][:, 0], paged[1][:, 0]), (np.asarray(out, np.float64), np.asarray(lse, np.float64)))


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", RATIOS)
def test_what_the_memory_held_is_never_read(ratio):
    """Without a workspace XLA allocates one and nothing zeroes it."""
    chunk = shared_chunk()
    arguments = {"plan": plan_of(chunk, ratio), "arguments": arguments_of(chunk, ratio)}
    compiled = extend.lower(**arguments).compile()
    assert "broadcast" not in re.findall(r"bf16\[\d+,512\]\S* (\w+)\(", compiled.as_text())
    for poison in [jnp.full((1 << bits,), jnp.nan, jnp.bfloat16) for bits in range(8, 28)]:
        poison.delete()
    check(compiled(**arguments), oracle(chunk, ratio))


def test_the_workspace_s_size_is_the_plan_s():
    plan = plan_of(shared_chunk(), 4)
    assert plan.workspace_rows == CAPACITIES["swa_capacity"] + CAPACITIES["compressed_capacity"]
    assert plan_of(shared_chunk(), 0).workspace_rows == CAPACITIES["swa_capacity"]
    for row in (0, plan.workspace_rows - 1):
        workspace = jnp.zeros((row, 512), jnp.bfloat16)
        with pytest.raises(ValueError, match="sparse_mla_extend: workspace must have at least"):
            extend(plan, arguments_of(shared_chunk(), 4), workspace)


def test_padding_rows_may_hold_anything():
    chunk = shared_chunk()
    expected = extend(plan_of(chunk, 4), arguments_of(chunk, 4))
    poisoned = dataclasses.replace(chunk, q=chunk.q.copy(), chosen=chunk.chosen.copy())
    poisoned.q[61:], poisoned.chosen[61:] = np.nan, 0
    chex.assert_trees_all_equal(extend(plan_of(poisoned, 4), arguments_of(poisoned, 4)), expected)


def test_chosen_positions_that_are_none_are_skipped():
    """Hostile values, entries that the request does not have yet, and columns past the plan's topk."""
    chunk = shared_chunk()
    expected = extend(plan_of(chunk, 4), arguments_of(chunk, 4))
    hostile = chunk.chosen.copy()
    holes = np.argwhere(hostile[:61] == -1)
    values = [INT_MIN, -7, INT_MAX, INT_MAX - 200]
    for i, (row, column) in enumerate(holes):
        seq = chunk.requests[chunk.rows()[row][0]][0]
        hostile[row, column] = [*values, seq // 4][i % 5]
    assert len(holes) > 100
    arguments = arguments_of(chunk, 4)
    chex.assert_trees_all_equal(
        extend(plan_of(chunk, 4), arguments | {"topk_positions": jax.device_put(hostile)}), expected
    )
    wide = np.concatenate([chunk.chosen, np.zeros((ROWS, 9), np.int32)], axis=1)
    result = extend(plan_of(chunk, 4), arguments | {"topk_positions": jax.device_put(wide)})
    chex.assert_trees_all_equal(result, expected)


def test_no_positions_stand_for_every_complete_entry():
    chunk, plan = shared_chunk(), plan_of(shared_chunk(), 128)
    arguments = arguments_of(chunk, 128)
    every = jnp.broadcast_to(jnp.arange(plan.topk, dtype=jnp.int32), (ROWS, plan.topk))
    expected = extend(plan, arguments)
    chex.assert_trees_all_equal(extend(plan, arguments | {"topk_positions": every}), expected)


# --- what does not fit ---


@pytest.mark.always(1)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_bucket_below_the_longest_request_makes_no_nan(ratio):
    chunk, plan = shared_chunk(), plan_of(shared_chunk(), ratio, bucket=512)
    assert plan.overflow
    out, lse = extend(plan, arguments_of(chunk, ratio))
    assert np.all(np.isfinite(np.asarray(out, np.float32))) and not np.any(np.isnan(lse))
    short = slice(20, 61)  # the requests that fit the bucket
    expected = oracle(chunk, ratio)
    check((out[short], lse[short]), (expected[0][short], expected[1][short]))


# --- bad input ---


@pytest.mark.parametrize(
    "change, error", [({"attn_sink": np.zeros(HEADS, BF16)}, TypeError), ({"backend": "cutlass"}, ValueError)]
)
def test_bad_input(change, error):
    """`tests/contract/test_bad_input.py` has the rest."""
    given = {"plan": plan_of(shared_chunk(), 4)} | arguments_of(shared_chunk(), 4) | {"softmax_scale": SCALE}
    with pytest.raises(error, match=rf"\b{next(iter(change))}\b"):
        jax.eval_shape(lambda: sparse_mla_extend(**given | change))

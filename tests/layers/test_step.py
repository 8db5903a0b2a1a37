"""Whole steps of a layer, as an engine runs them: in place, compiled once, padding inert, any chunking the same."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    DRAFTS,
    INT_MAX,
    INT_MIN,
    LENGTHS,
    MAX_LEN,
    PROMPT_ROWS,
    REQUEST_ROWS,
    V4,
    Results,
    compressed_entries,
    make_step,
    make_world,
    run_step,
    softmax_out,
    step_function,
)

import jax_sparse_mla as mla
from jax_sparse_mla import layers

DECODE, EXTEND = mla.ForwardMode.DECODE, mla.ForwardMode.EXTEND
RATIOS = (0, 4, 128, None)  # None: V3.2
names = {0: "V4 window only", 4: "V4 ratio 4", 128: "V4 ratio 128", None: "V3.2"}
all_layers = pytest.mark.parametrize("ratio", RATIOS, ids=names.get)


# ---- in place ----


def copies_of(text, arrays):
    """The lines of compiled HLO that copy an array of one of these shapes and types."""
    short = {"uint8": "u8", "float32": "f32"}
    shapes = {f"{short[a.dtype.name]}[{','.join(map(str, a.shape))}]" for a in arrays}
    assert all(shape in text for shape in shapes)
    pattern = "|".join(re.escape(shape) for shape in shapes)
    return [line for line in text.splitlines() if re.search(rf"= \(?({pattern})\S* copy(-start)?\(", line)]


def aliased_outputs(text):
    header = text.splitlines()[0]
    return len(re.findall(r"\{\d*\}: \(\d+, \{\}", header)) if "input_output_alias" in header else 0


@pytest.mark.parametrize("ratio, arrays", [(4, 7), (None, 2)], ids=[names[4], names[None]])
def test_a_whole_step_is_in_place(ratio, arrays):
    """Every cache of a ratio-4 layer: window, compressed, index keys, both carried states; and V3.2's two."""
    world = make_world(ratio)
    batch, rows, _ = make_step(world, DECODE, [(0, 7, 1), 0, (1, 3, 1), (2, 11, 1)], num_rows=4)
    cache, step = world.empty_cache(), step_function(ratio, False)

    def compiled(step):
        return step.lower(cache, rows, world.params, batch, world.tables).compile().as_text()

    assert copies_of(compiled(step), jax.tree.leaves(cache)) == []
    assert aliased_outputs(compiled(step)) == len(jax.tree.leaves(cache)) == arrays
    # The check can fail: without donation the caches are copied.
    text = compiled(jax.jit(step.__wrapped__))
    assert copies_of(text, jax.tree.leaves(cache)) and aliased_outputs(text) == 0


# ---- the same results in every chunking ----

WHOLE = [[(0, 0, 264), 0, 0, 0], [0, (1, 0, 137), 0, (2, 0, 70)]]
CHUNKS = [
    [(0, 0, 101), (2, 0, 3), 0, 0],
    [(1, 0, 90), 2, (2, 3, 30), (0, 101, 17)],
    [(0, 118, 120), 0, 0, 0],
    [0, (2, 33, 37), (1, 90, 47), (0, 238, 26)],
]
ONE_BY_ONE = [
    [(1, p, 1) if p < LENGTHS[1] else 0, 0, (2, p, 1) if p < LENGTHS[2] else 0, (0, p, 1)] for p in range(LENGTHS[0])
]


@functools.cache
def served(ratio, how):
    """Results and cache of a world served from empty bf16 caches."""
    world = make_world(ratio)
    steps, mode, num_rows = {
        "whole": (WHOLE, EXTEND, PROMPT_ROWS),
        "chunks": (CHUNKS, EXTEND, PROMPT_ROWS),
        "paged chunks": (CHUNKS, EXTEND, 140),
        "tokens": (ONE_BY_ONE, DECODE, 4),
    }[how]
    # With room for drafts, as test_speculative_step has it: the same programs.
    cache, results = world.empty_cache(bf16=True, max_draft_tokens=DRAFTS), Results.empty(world.spec)
    with_plan = how in ("whole", "chunks")
    for work in steps:
        cache = run_step(world, cache, mode, work, num_rows=num_rows, with_plan=with_plan, results=results)
    return results, cache


def assert_same(a: Results, b: Results, *, atol):
    """Equal outputs; where a tie within rounding was decided otherwise, which may be rare, the row is left out."""
    live = ~np.isnan(a.out).any((2, 3))
    assert (live == ~np.isnan(b.out).any((2, 3))).all() and live.any()
    other = live & (a.positions != b.positions).any(-1)
    assert other.sum() <= 0.02 * live.sum()
    np.testing.assert_allclose(a.out[live & ~other], b.out[live & ~other], rtol=0, atol=atol)
    for padding in (*a.padding, *b.padding):
        assert (padding == 0).all()


def assert_caches_agree(a, b, *, skip_page_0=False):
    """The same bytes, but for a rounding here and there; page 0 takes what padding rows write."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (np.asarray(v)[skip_page_0 and v.dtype == jnp.uint8 :] for v in (x, y))
        assert (x != y).mean() < 1e-3


# Paged prefill, without a workspace, attends as decode does: two of the layers stand for all.
WAYS = [
    *((ratio, how) for ratio in RATIOS for how in ("chunks", "tokens")),
    (4, "paged chunks"),
    (None, "paged chunks"),
]


@pytest.mark.always("V4 ratio 4-paged chunks")
@pytest.mark.parametrize("ratio, how", WAYS, ids=[f"{names[ratio]}-{how}" for ratio, how in WAYS])
def test_chunks_and_single_tokens_equal_the_whole_prompt(ratio, how):
    (want, want_cache), (got, cache) = served(ratio, "whole"), served(ratio, how)
    assert [(~np.isnan(r).any((1, 2))).sum() for r in got.out] == list(LENGTHS)
    assert_same(got, want, atol=1e-3)
    # Written slots only: every real slot is the same, whatever padding did to page 0.
    assert_caches_agree(cache, want_cache, skip_page_0=True)


@pytest.mark.always(1)
@all_layers
def test_the_whole_prompt_equals_dense_attention(ratio):
    """The layer's formula in numpy: last 128 keys, the compressed entries, the sink; V3.2: the selected keys."""
    world, (results, _) = make_world(ratio), served(ratio, "whole")
    spec, rows = world.spec, world.rows
    sink = None if ratio is None else np.asarray(world.params.attn_sink, np.float64)
    for request, length in enumerate(LENGTHS):
        kv = rows.kv[request].astype(np.float64)
        entries = np.zeros((0, 512))
        if ratio:
            kv_rows, scores = rows.compressed_kv[request, :length], rows.compressed_score[request, :length]
            entries = compressed_entries(world.params.compressor, kv_rows, scores, spec.kind(ratio))
        some = {0, 2, 3, 4, 63, 64, 127, 128, 129, length - 1} | set(range(5, length, 23))
        for p in sorted(p for p in some if p < length):
            chosen = results.positions[request, p]
            chosen = chosen[chosen >= 0]
            if ratio is None:
                assert len(set(chosen)) == min(p + 1, spec.index_topk) and chosen.max() <= p
                keys = kv[chosen]
            else:
                complete = entries[: (p + 1) // ratio] if ratio else entries
                if ratio == 4:
                    assert len(set(chosen)) == min(len(complete), spec.index_topk)
                    complete = complete[chosen]
                keys = np.concatenate([kv[max(0, p - 127) : p + 1], complete])
            want = softmax_out(rows.q[request, p].astype(np.float64), keys, spec.softmax_scale, sink)
            np.testing.assert_allclose(results.out[request, p], want, rtol=0, atol=4e-3)


@pytest.mark.parametrize("ratio", [4, None], ids=names.get)
def test_the_indexer_selects_what_scores_highest(ratio):
    """Against unquantised scores: FP8 may swap neighbours, not more."""
    world, (results, _) = make_world(ratio), served(ratio, "whole")
    rows, topk = world.rows, world.spec.index_topk
    if ratio is None:
        q, weights, keys = rows.index_q[0], rows.index_weights[0], rows.index_k[0].astype(np.float64)
    else:
        index = rows.index
        q, weights = index.q[0], index.weights[0]
        keys = compressed_entries(world.params.index_compressor, index.kv[0], index.score[0], world.spec.kind(4))
    agreed = []
    for p in range(LENGTHS[0] // 2, LENGTHS[0], 7):
        count = (p + 1) // (ratio or 1)
        scores = np.maximum(q[p].astype(np.float64) @ keys[:count].T, 0)
        want = np.argsort(-(weights[p].astype(np.float64) @ scores))[:topk]
        agreed.append(len(set(want) & set(results.positions[0, p])) / topk)
    assert np.mean(agreed) > 0.85  # 0.1 or 0.25 by chance


# ---- padding, order, poison ----

ROWS = 160
# A prefix for two of the requests, a chunk for all three, a decode step. Requests stay where they are.
SERVICE = [
    (EXTEND, [(0, 0, 118), 0, 0, (2, 0, 30)]),
    (EXTEND, [(0, 118, 60), 2, (1, 0, 50), (2, 30, 35)]),
    (DECODE, [(0, 178, 1), 0, (1, 50, 1), (2, 65, 1)]),
    (DECODE, [(0, 179, 1), (1, 51, 1), 0, 0]),
]


def serve(ratio, *, order=None, hostile=False, cache=None, tables=None):
    """Results, final cache; `order` permutes the requests of every step."""
    world = make_world(ratio)
    world = dataclasses.replace(world, tables=tables or world.tables)
    cache, results = cache or world.empty_cache(), Results.empty(world.spec)
    for mode, work in SERVICE:
        work = work if order is None else [work[i] for i in order]
        num_rows = ROWS if mode is EXTEND else len(work)
        arguments = {"with_plan": mode is EXTEND, "results": results, "hostile": hostile}
        cache = run_step(world, cache, mode, work, num_rows=num_rows, **arguments)
    return results, cache


served_once = functools.cache(serve)


def poisoned(cache):
    """Every byte 0xFF (NaN in fp8, bf16, UE8M0 and float32), every number NaN."""
    return jax.tree.map(lambda x: jnp.full_like(x, 255 if x.dtype == jnp.uint8 else jnp.nan), cache)


def stale(tables):
    """Tables whose entries past the requests' ends and of free rows hold garbage and other requests' slots."""
    table = np.array(tables.req_to_token)
    garbage = np.resize([INT_MIN, -7, INT_MAX, table[REQUEST_ROWS[0], 0], 10**6, 0], MAX_LEN)
    free = [r for r in range(len(table)) if r not in REQUEST_ROWS]
    table[free] = garbage
    for request, length in enumerate(LENGTHS):
        table[REQUEST_ROWS[request], length:] = garbage[length:]
    return dataclasses.replace(tables, req_to_token=jnp.asarray(table))


class TestRowsThatMustNotMatter:
    @pytest.mark.long
    @all_layers
    def test_padding_is_inert(self, ratio):
        """NaN, INT_MIN, INT_MAX in padding rows and requests instead of zeros: nothing changes but page 0."""
        (want, want_cache), (got, cache) = served_once(ratio), serve(ratio, hostile=True)
        np.testing.assert_array_equal(got.out, want.out)
        np.testing.assert_array_equal(got.positions, want.positions)
        assert_same(got, want, atol=0)
        assert_caches_agree(cache, want_cache, skip_page_0=True)

    @pytest.mark.long
    @all_layers
    def test_permuting_requests_permutes_results(self, ratio):
        (want, want_cache), (got, cache) = served_once(ratio), serve(ratio, order=[3, 2, 0, 1], hostile=True)
        assert_same(got, want, atol=1e-3)
        assert_caches_agree(cache, want_cache, skip_page_0=True)

    @pytest.mark.always(1)
    @all_layers
    def test_unused_cache_rows_never_reach_an_output(self, ratio):
        world, (want, _) = make_world(ratio), served_once(ratio)
        cache = poisoned(world.empty_cache())
        got, cache = serve(ratio, cache=cache, tables=stale(world.tables), hostile=True)
        np.testing.assert_array_equal(got.out, want.out)  # NaN only where nothing was asked for
        assert np.isfinite(got.out[0, :180]).all() and np.isfinite(got.out[1, :52]).all()
        np.testing.assert_array_equal(got.positions, want.positions)
        assert (np.asarray(jax.tree.leaves(cache)[0]) == 255).mean() > 0.5  # the poison was there all along


# ---- one compilation per bucket ----


@pytest.mark.parametrize("ratio", [4, None], ids=names.get)
def test_decode_compiles_once_per_bucket(ratio):
    """20 steps, requests joining, leaving and growing over page and group borders; then a draft of 3 steps."""
    world = make_world(ratio)
    cache, results = world.empty_cache(), Results.empty(world.spec)
    step = step_function(ratio, False)
    before, pointers = step._cache_size(), None
    for i in range(20):
        work = [(0, i, 1), (1, i - 5, 1) if i >= 5 else 0, 0, (2, i, 1) if i < 12 else 0]
        cache = run_step(world, cache, DECODE, work, num_rows=4, with_plan=False, results=results)
        pointers = pointers or [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]
        assert pointers == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]  # in place
        if i == 0:
            compiled = step._cache_size()
    assert compiled <= before + 1 and step._cache_size() == compiled

    table = np.asarray(world.tables.req_to_token)
    slots = np.concatenate([table[REQUEST_ROWS[0], 20:23], table[REQUEST_ROWS[1], 15:18], [0] * 6])
    draft = mla.ForwardBatch(
        mode=DECODE,
        max_seq_len=MAX_LEN,
        req_pool_indices=jnp.asarray([*REQUEST_ROWS[:2], 0, 0], jnp.int32),
        seq_lens=jnp.asarray([20, 15, 0, 0], jnp.int32),
        out_cache_loc=jnp.asarray(slots, jnp.int32),
    )
    outs = []
    for i in range(3):
        _, rows, _ = make_step(world, DECODE, [(0, 20 + i, 1), (1, 15 + i, 1), 0, 0], num_rows=4)
        batch = mla.draft_step_batch(draft, i, 3)
        (out, cache, _), _ = step(cache, rows, world.params, batch, world.tables)
        outs.append(np.asarray(out))
    assert step._cache_size() == compiled
    # The draft of request 0 and 1 continues them: the same as decoding on.
    cache, plain = world.empty_cache(), Results.empty(world.spec)
    for i in range(23):
        work = [(0, i, 1), (1, i - 5, 1) if i >= 5 else 0, 0, 0]
        cache = run_step(world, cache, DECODE, work, num_rows=4, with_plan=False, results=plain)
    for i, out in enumerate(outs):
        np.testing.assert_allclose(out[0], plain.out[0, 20 + i], rtol=0, atol=1e-3)
        np.testing.assert_allclose(out[1], plain.out[1, 15 + i], rtol=0, atol=1e-3)
        assert (out[2:] == 0).all()


# ---- a workspace, or the pages ----


@pytest.mark.parametrize(
    "mode, rows, gathered, expected",
    [
        (EXTEND, 255, None, False),
        (EXTEND, 256, None, True),
        (DECODE, 256, None, False),
        (EXTEND, 256, False, False),
        (EXTEND, 8, True, True),
    ],
)
def test_the_plan_decides_what_a_step_attends_to(mode, rows, gathered, expected):
    """From the measured crossover on (docs/reference/routing.md) a chunk gathers, unless the caller says which."""
    requests = rows if mode is DECODE else 2
    numbers = {name: jnp.zeros(requests, jnp.int32) for name in ("req_pool_indices", "seq_lens")}
    batch = mla.ForwardBatch(
        mode=mode,
        max_seq_len=MAX_LEN,
        out_cache_loc=jnp.zeros(rows, jnp.int32),
        extend_lens=jnp.zeros(2, jnp.int32) if mode is EXTEND else None,
        **numbers,
    )
    tables = mla.RequestTables(
        req_to_token=jnp.zeros((2, MAX_LEN), jnp.int32), full_to_swa=jnp.full(MAX_LEN, -1, jnp.int32)
    )
    step = jax.eval_shape(functools.partial(layers.prepare_v4_step, V4, gathered=gathered), batch, tables)
    assert sorted(step.plans) == ([0, 4, 128] if expected else [])


# ---- JAX's 64 bit types ----


@pytest.mark.always("V4 ratio 4", "V3.2")
@all_layers
def test_64_bit_types_change_nothing(ratio):
    """With `jax_enable_x64` Python's numbers are int64 and float64 to some of JAX's functions."""

    def step():
        world = make_world(ratio)
        batch, rows, _ = make_step(world, DECODE, [(0, 0, 1), (1, 3, 1), 0, 0], num_rows=4)  # as many as above
        return step_function(ratio, False)(world.empty_cache(), rows, world.params, batch, world.tables)

    narrow = step()
    with jax.enable_x64(True):
        wide = step()
    chex.assert_trees_all_equal_dtypes(narrow, wide)
    chex.assert_trees_all_equal(narrow, wide)

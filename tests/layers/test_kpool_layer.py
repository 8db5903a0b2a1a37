"""GLM-5.3's sparse attention layer: `v32_layer` with pools of index keys over caches without rope."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import LENGTHS, MAX_LEN, MAX_REQUESTS, REQUEST_ROWS, World, make_step

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.indexer.logits import IndexKeys
from jax_sparse_mla.kv_cache import KVLayout

POOL = 4
SPEC = dataclasses.replace(
    mla.ModelSpec.from_hf_config({"model_type": "glm5_next", "index_kpool": POOL}),
    num_heads=2,
    index_heads=8,
    index_topk=16,
)
EXTEND, DECODE, VERIFY = mla.ForwardMode.EXTEND, mla.ForwardMode.DECODE, mla.ForwardMode.TARGET_VERIFY
PROMPTS = (262, 134, 66)  # the rest of each request comes in decode steps


@functools.cache
def world() -> World:
    rng = np.random.default_rng(0)

    def normal(*dims, scale=1.0, dtype=np.float32):
        return (rng.standard_normal((len(LENGTHS), max(LENGTHS), *dims)) * scale).astype(np.dtype(dtype))

    pages = MAX_LEN // SPEC.page_size
    order = 1 + rng.permutation(len(LENGTHS) * pages).reshape(len(LENGTHS), pages)
    table = np.full((MAX_REQUESTS, MAX_LEN), -1, np.int32)
    table[list(REQUEST_ROWS)] = (order[:, :, None] * SPEC.page_size + np.arange(SPEC.page_size)).reshape(-1, MAX_LEN)
    rows = layers.V32Rows(
        q=normal(SPEC.num_heads, 512),
        kv=normal(512, dtype=jnp.bfloat16),
        index_q=normal(SPEC.index_heads, 128, dtype=jnp.bfloat16),
        index_k=normal(128, dtype=jnp.bfloat16),
        index_weights=normal(SPEC.index_heads, scale=(128 * SPEC.index_heads) ** -0.5),
        index_score=normal(128, dtype=jnp.bfloat16),
    )
    with jax.ensure_compile_time_eval():  # the first caller may be tracing
        ape = jnp.asarray(rng.standard_normal((POOL, 128)), jnp.float32)
        tables = mla.RequestTables(req_to_token=jnp.asarray(table))
    return World(spec=SPEC, ratio=None, rows=rows, params=ape, tables=tables, num_pages=1 + len(LENGTHS) * pages)


def empty_caches(num_layers=2, **options):
    sizes = {"num_pages": world().num_pages, "num_layers": num_layers, "max_requests": MAX_REQUESTS}
    return layers.V32LayerCache.zeros(SPEC, **sizes, **options)


@functools.partial(jax.jit, static_argnames="backend", donate_argnums=0)
def step(pool, rows, ape, batch, tables, *, backend):
    """The second of two layers."""
    metadata = mla.build_v32_metadata(SPEC, batch, tables, fp8_kv_cache=True, prefill_backend=backend)
    out, pool, positions = layers.v32_layer(pool.layer(1), rows, batch, metadata, spec=SPEC, index_ape=ape)
    return out, pool.whole(), positions, metadata


def serve(steps, backend, caches, hostile=False):
    """By (request, position) the output and positions; and the caches."""
    found = {}
    for mode, work, num_rows in steps:
        batch, rows, owners = make_step(world(), mode, work, num_rows=num_rows, hostile=hostile)
        if mode is VERIFY:
            batch = dataclasses.replace(batch, num_draft_tokens=3, seq_lens=batch.seq_lens - 3)
        arguments = caches, rows, world().params, batch, world().tables
        out, caches, positions, metadata = step(*arguments, backend=backend if mode is EXTEND else "flashmla_kv")
        out, positions, lengths = np.asarray(out, np.float32), np.asarray(positions), np.asarray(metadata.topk_lengths)
        assert positions.shape == (num_rows, SPEC.index_width) and not bool(metadata.overflow)
        np.testing.assert_array_equal(lengths, np.sum(positions >= 0, axis=1))
        pools, live = np.asarray(metadata.cache_seqlens) // POOL, list(owners.values())
        starts = (np.cumsum(pools) - pools)[np.asarray(metadata.row_to_request)[live]]
        np.testing.assert_array_equal(np.asarray(metadata.index_row_starts)[live], starts)
        seen = [(position + 1) // POOL for _, position in owners]
        np.testing.assert_array_equal(np.asarray(metadata.index_row_ends)[live] - starts, seen)
        for owner, row in owners.items():
            assert owner not in found
            found[owner] = out[row], positions[row]
            assert (positions[row, : lengths[row]] >= 0).all()
    return found, caches


def chunk(*work):
    return EXTEND, [*work], 400


@functools.cache
def whole():
    """Each prompt in one step, gathered; then a token a step."""
    prompts = [chunk(*((r, 0, n) for r, n in enumerate(PROMPTS) if r != 1)), chunk((1, 0, PROMPTS[1]))]
    tokens = [(DECODE, [(r, n + i, 1) for r, n in enumerate(PROMPTS)], 3) for i in range(2)]
    return serve([*prompts, *tokens], "flashmla_sparse", empty_caches())


@pytest.mark.long
def test_any_chunking_selects_the_same():
    """Prompts in parts that end within pools, from the pages; drafts verified three at a time; hostile padding."""
    parts = [chunk((0, 0, 101), 3, (2, 0, 66)), chunk((1, 0, 134), (0, 101, 150)), chunk((0, 251, 11), 5)]
    rest = [(VERIFY, [(2, 66, 3), (1, 134, 3)], 6), (DECODE, [(0, 262, 1), 1, 1], 3)]
    poisoned = jax.tree.map(lambda x: np.full_like(x, 255 if x.dtype == jnp.uint8 else np.nan), empty_caches())
    given = dataclasses.replace(poisoned, index_state=empty_caches(max_draft_tokens=3).index_state)
    found, caches = serve([*parts, *rest], "flashmla_kv", given, hostile=True)
    expected, whole_caches = whole()
    assert len(found.keys() & expected.keys()) == sum(PROMPTS) + 5
    for owner in found.keys() & expected.keys():
        (out, positions), (out_, positions_) = found[owner], expected[owner]
        np.testing.assert_array_equal(positions, positions_)
        np.testing.assert_allclose(out, out_, rtol=0.02, atol=0.004)
    keys, keys_ = (np.asarray(x.layer(1).index_k.alone().data) for x in (caches, whole_caches))
    table = np.asarray(world().tables.req_to_token)
    for row, n in zip(REQUEST_ROWS, PROMPTS):
        slots = table[row, POOL - 1 : n : POOL] // POOL
        of_page, offset = divmod(slots, 64)
        for start, width in ((offset * 128, 128), (64 * 128 + offset * 4, 4)):
            columns = start[:, None] + np.arange(width)
            np.testing.assert_array_equal(keys[of_page[:, None], columns], keys_[of_page[:, None], columns])
            assert keys_[of_page[:, None], columns].any(axis=1).all()


@pytest.mark.long
def test_the_formula():
    """Attention over the selected rows of the cache; the selection is nearly that of unquantised keys."""
    found, caches = whole()
    ape, rows = np.asarray(world().params), jax.tree.map(np.asarray, world().rows)
    overlaps = []
    for (request, position), (out, positions) in found.items():
        length, count = position + 1, (position + 1) // POOL
        positions = positions[positions >= 0]
        tail = np.arange(count * POOL, length)
        np.testing.assert_array_equal(positions[len(positions) - len(tail) :], tail)
        pools = positions[: len(positions) - len(tail)].reshape(-1, POOL)
        np.testing.assert_array_equal(pools, pools[:, :1] + np.arange(POOL))
        assert len(pools) == min(count, SPEC.index_topk // POOL) and not (pools[:, 0] % POOL).any()
        slots = np.asarray(world().tables.req_to_token)[REQUEST_ROWS[request], positions]
        k = np.asarray(mla.gather_kv(caches.kv.layer(1), slots.astype(np.int32)), np.float32)
        logits = rows.q[request, position] @ k.T * SPEC.softmax_scale
        weights = np.exp(logits - logits.max(1, keepdims=True))
        np.testing.assert_allclose(out, weights / weights.sum(1, keepdims=True) @ k, rtol=0.02, atol=0.01)
        if count > SPEC.index_topk // POOL:
            weight = np.exp(rows.index_score[request, : count * POOL].astype(np.float32).reshape(count, POOL, -1) + ape)
            keys = rows.index_k[request, : count * POOL].astype(np.float32).reshape(count, POOL, -1)
            keys = np.sum(weight / weight.sum(1, keepdims=True) * keys, axis=1)
            scores = np.maximum(rows.index_q[request, position].astype(np.float32) @ keys.T, 0)
            best = np.argsort(-(rows.index_weights[request, position] @ scores))[: len(pools)]
            overlaps.append(len(np.intersect1d(best, pools[:, 0] // POOL)) / len(pools))
    assert len(overlaps) > 350 and np.mean(overlaps) > 0.95


def test_geometry():
    assert (SPEC.kv_layout, SPEC.page_size, SPEC.index_pool, SPEC.index_width) == (KVLayout.NOPE_FP8, 256, 4, 19)
    caches = jax.eval_shape(lambda: empty_caches(max_draft_tokens=3))
    assert caches.kv.data.shape == (2 * world().num_pages, 256 * 528)
    assert caches.index_k.data.shape == (2 * world().num_pages, 64 * 132)
    assert caches.index_state.kv.shape == (2 * MAX_REQUESTS, POOL + 3, 128)
    shared = layers.V32LayerCache.zeros(SPEC, num_pages=2, num_layers=3, indexed=(True, False, True), max_requests=1)
    assert [shared.layer(i).index_state.layer_index for i in range(3)] == [0, None, 1]
    assert [shared.layer(i).alone().index_state is None for i in range(3)] == [False, True, False]


def test_what_is_refused():
    batch, rows, _ = make_step(world(), DECODE, [(0, 0, 1), (1, 3, 1)], num_rows=2)
    cache, ape = empty_caches(1), world().params

    def call(cache, rows, **options):
        def traced(cache, rows, batch, tables):
            metadata = mla.build_v32_metadata(SPEC, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
            return layers.v32_layer(cache, rows, batch, metadata, spec=SPEC, **options)

        return jax.eval_shape(traced, cache, rows, batch, world().tables)

    call(cache, rows, index_ape=ape)
    sizes = {"num_pages": world().num_pages, "num_layers": 3, "max_requests": MAX_REQUESTS}
    pool, shared = empty_caches(), layers.V32LayerCache.zeros(SPEC, **sizes, indexed=(True, False, True))
    for whole in (pool, shared):
        call(whole.layer(0), rows, index_ape=ape)
        for state in (whole.index_state, whole.index_state.layer(1)):
            mixed = dataclasses.replace(whole.layer(0), index_state=state)
            with pytest.raises(ValueError, match=r"v32_layer: cache.* the view of one.*index_state"):
                call(mixed, rows, index_ape=ape)
    few = jax.tree.map(lambda x: x[:1], cache.index_state)
    short = IndexKeys.zeros(world().num_pages, 256).data
    for error, given, of_rows, options, message in (
        (TypeError, cache, rows, {}, "index_ape must be given with pools of 4 tokens"),
        (TypeError, cache, dataclasses.replace(rows, index_score=None), {"index_ape": ape}, "rows.index_score must be"),
        (
            TypeError,
            dataclasses.replace(cache, index_state=None),
            rows,
            {"index_ape": ape},
            "cache.index_state must be",
        ),
        (
            ValueError,
            dataclasses.replace(cache, index_k=short),
            rows,
            {"index_ape": ape},
            "cache.index_k must have pages of 64 keys",
        ),
        (
            ValueError,
            dataclasses.replace(cache, index_k=cache.index_k[:2]),
            rows,
            {"index_ape": ape},
            "cache.index_k must have a key for every 4 tokens that cache.kv has room for, got 2 pages",
        ),
        (
            ValueError,
            dataclasses.replace(cache, index_state=few),
            rows,
            {"index_ape": ape},
            "cache.index_state must have a row for each request of the batch, 2 in all, got 1: make it with",
        ),
        (
            ValueError,
            cache,
            rows,
            {"index_ape": ape, "batch_invariant": True},
            "batch_invariant serves no pools of index keys, got pools of 4",
        ),
        (
            ValueError,
            cache,
            rows,
            {"index_ape": ape, "pages_axis": "model"},
            "pages_axis serves no pools of index keys, got pools of 4",
        ),
    ):
        with pytest.raises(error, match=f"v32_layer: {message}"):
            call(given, of_rows, **options)
    with pytest.raises(ValueError, match="max_requests must be given: glm5_next has index pools"):
        layers.V32LayerCache.zeros(SPEC, num_pages=2)

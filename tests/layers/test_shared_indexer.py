"""IndexShare: a V3.2 layer that attends to what an earlier layer has selected, and caches without its index keys."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import MAX_LEN, V32, make_step, make_world

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.indexer.logits import INDEX_K_BYTES

INDEXED = (True, False, False, True)
KV, INDEX = ("q", "kv"), ("index_q", "index_k", "index_weights")
# A chunk of 70 rows of two requests, then a token each; more than the 16 that are selected.
STEPS = ((mla.ForwardMode.EXTEND, [(0, 0, 60), (1, 0, 40)]), (mla.ForwardMode.DECODE, [(0, 60, 1), (1, 40, 1)]))


def without_index(rows):
    return dataclasses.replace(rows, **dict.fromkeys(INDEX))


def other_rows(rows, seed):
    """Of another layer: other queries, keys and values, the same indexer."""
    rng = np.random.default_rng(seed)
    return dataclasses.replace(
        rows, **{name: jnp.asarray(rng.permutation(np.asarray(getattr(rows, name)).T).T) for name in KV}
    )


@functools.partial(jax.jit, static_argnames=("indexed", "backend"), donate_argnums=0)
def step(pool, rows, batch, tables, *, indexed, backend):
    """Layers one after the other; `indexed` says which of them select for themselves."""
    metadata = mla.build_v32_metadata(V32, batch, tables, fp8_kv_cache=True, prefill_backend=backend)
    outs, selected = [], None
    for i, (of_layer, has_indexer) in enumerate(zip(rows, indexed)):
        of_layer = of_layer if has_indexer else without_index(of_layer)
        given = None if has_indexer else selected
        out, pool, selected = layers.v32_layer(pool.layer(i), of_layer, batch, metadata, spec=V32, selected=given)
        outs.append((out, selected))
    return outs, pool.whole()


@pytest.mark.long
@pytest.mark.parametrize("backend", ["flashmla_sparse", "flashmla_kv"])
def test_a_shared_selection_is_that_of_the_same_indexer(backend):
    """Where every layer has the first one's index rows, sharing them changes no bit: of outputs, selections, caches."""
    world = make_world(None)
    sizes = {"num_pages": world.num_pages, "num_layers": len(INDEXED)}
    shared = layers.V32LayerCache.zeros(V32, **sizes, indexed=INDEXED)
    whole = layers.V32LayerCache.zeros(V32, **sizes)
    assert len(jax.tree.leaves(shared)) == len(jax.tree.leaves(whole)) == 2
    for mode, work in STEPS:
        num_rows = sum(count for *_, count in work)
        batch, rows, _ = make_step(world, mode, work, num_rows=num_rows)
        rows = [rows, *(other_rows(rows, seed) for seed in range(1, len(INDEXED)))]
        arguments = rows, batch, world.tables
        structure = jax.tree.structure(shared)
        found, shared = step(shared, *arguments, indexed=INDEXED, backend=backend)
        assert jax.tree.structure(shared) == structure
        expected, whole = step(whole, *arguments, indexed=(True,) * len(INDEXED), backend=backend)
        for (out, selected), (out_, selected_) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(selected, selected_)
            np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(out_, np.float32))
        outs = [np.asarray(out, np.float32) for out, _ in found]
        assert all((a != b).any() for a, b in itertools.pairwise(outs))
        assert (np.sum(np.asarray(found[1][1]) >= 0, axis=1) == V32.index_topk).sum() >= 2
    np.testing.assert_array_equal(shared.kv.data, whole.kv.data)
    for layer in (0, 3):
        of_whole, of_shared = (x.layer(layer).alone().index_k.data for x in (whole, shared))
        assert np.asarray(of_whole).any()
        np.testing.assert_array_equal(of_shared, of_whole)


def test_memory_of_the_index_keys():
    """GLM-5.2: 21 of 78 layers keep index keys, so a token takes 53,940 bytes instead of 61,464."""
    indexed = mla.models.indexed_layers(
        {"model_type": "glm_moe_dsa", "num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    )
    assert [i for i, own in enumerate(indexed) if own] == [0, 1, *range(2, 78, 4)] and sum(indexed) == 21

    def per_token(**options):
        make = functools.partial(layers.V32LayerCache.zeros, V32, num_pages=5, num_layers=78, **options)
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(make))) / (5 * V32.page_size)

    assert per_token() - per_token(indexed=indexed) == 57 * INDEX_K_BYTES
    assert (per_token(), per_token(indexed=indexed)) == (61464, 53940)
    pool = jax.eval_shape(lambda: layers.V32LayerCache.zeros(V32, num_pages=5, num_layers=78, indexed=indexed))
    assert [pool.layer(i).index_k.first_page for i in (0, 1, 2, 6, 74)] == [0, 5, 10, 15, 100]
    assert pool.layer(74).kv.first_page == 370
    assert [pool.layer(i).has_index_k for i in (2, 3, 5, 6)] == [True, False, False, True]


def test_views():
    pool = layers.V32LayerCache.zeros(V32, num_pages=3, num_layers=4, indexed=INDEXED)
    for i, own in enumerate(INDEXED):
        alone = pool.layer(i).alone()
        assert (alone.index_k is not None) == own == alone.has_index_k and alone.kv.num_layers == 1
        assert jax.tree.structure(pool.layer(i).whole()) == jax.tree.structure(pool)
    one = layers.V32LayerCache.zeros(V32, num_pages=3, num_layers=3, indexed=(True, False, False))
    assert one.index_k.shape == (3, 64 * INDEX_K_BYTES) and [one.layer(i).has_index_k for i in range(3)] == [1, 0, 0]
    assert layers.V32LayerCache.zeros(V32, num_pages=3, indexed=(False,)).index_k is None
    with pytest.raises(ValueError, match="indexed must name 4 layers, got 3"):
        layers.V32LayerCache.zeros(V32, num_pages=3, num_layers=4, indexed=INDEXED[:3])


def test_what_is_refused():
    world = make_world(None)
    batch, rows, _ = make_step(world, mla.ForwardMode.DECODE, [(0, 0, 1), (1, 3, 1)], num_rows=2)
    pool = layers.V32LayerCache.zeros(V32, num_pages=world.num_pages, num_layers=4, indexed=INDEXED)
    selected, shared = jnp.zeros((2, V32.index_topk), jnp.int32), without_index(rows)
    scores = jnp.zeros((2, MAX_LEN))

    def call(cache, rows, **options):
        def traced(cache, rows, batch, tables):
            metadata = mla.build_v32_metadata(V32, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
            return layers.v32_layer(cache, rows, batch, metadata, spec=V32, **options)

        return jax.eval_shape(traced, cache, rows, batch, world.tables)

    call(pool.layer(1), shared, selected=selected)
    call(pool.layer(1), shared, index_scores=scores)
    for cache, of_layer, options, message in (
        (pool.layer(1), shared, {}, "selected must be given in a layer without an indexer"),
        (pool.layer(0), rows, {"selected": selected, "index_scores": scores}, "must be None with index_scores"),
        (pool.layer(2), shared, {"selected": selected, "index_scores": scores}, "must be None with index_scores"),
        (pool.layer(1), shared, {"selected": selected[:, :5]}, r"selected must have shape \[2, 16\], got \[2, 5\]"),
        (pool.layer(1), rows, {}, "got rows with index_k and a cache without"),
        (pool.layer(0), shared, {"selected": selected}, "got rows without index_k and a cache with"),
        (pool, rows, {}, r"cache.kv holds 4 layers: pass the view of one"),
        (dataclasses.replace(pool, kv=pool.kv.layer(3)), rows, {}, "must be the view of one layer"),
        (dataclasses.replace(pool.layer(3), kv=pool.kv.layer(0)), rows, {}, "must be the view of one layer"),
    ):
        with pytest.raises(ValueError, match=f"v32_layer: .*{message}"):
            call(cache, of_layer, **options)
    with pytest.raises(TypeError, match="v32_layer: selected must be int32"):
        call(pool.layer(1), shared, selected=selected.astype(jnp.float32))

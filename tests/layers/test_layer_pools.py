"""Several layers in one array: a view of one layer does what a cache of its own does, and touches no other layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import LAYERS, MIDDLE, V4, V32, all_layers, make_step, make_world, stacked, step_function

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.compressor.api import compress_kv
from jax_sparse_mla.compressor.state import CompressorState
from jax_sparse_mla.indexer.logits import IndexKeys, gather_index_k, write_index_k, write_transformed_index_k

LAYOUTS = pytest.mark.parametrize("layout", [mla.KVLayout.V4_FP8, mla.KVLayout.V32_FP8, mla.KVLayout.V4_BF16], ids=repr)


def among_others(rows):
    """The array of several layers in which this one's rows stand; the others hold what nothing may read."""
    rows = np.asarray(rows)
    poison = np.full_like(rows, 0xFF if rows.dtype == np.uint8 else np.nan)
    return jnp.asarray(np.concatenate([rows if layer == MIDDLE else poison for layer in range(LAYERS)]))


def view(alone):
    """A cache or state of one layer, or the arrays in such a tree, as the view of a layer among others."""
    if isinstance(alone, jax.Array):
        alone = IndexKeys(data=alone)
    leaves = {f.name: getattr(alone, f.name) for f in dataclasses.fields(alone)}
    pools = {name: among_others(x) for name, x in leaves.items() if isinstance(x, jax.Array)}
    return dataclasses.replace(alone, **pools, num_layers=LAYERS).layer(MIDDLE)


def assert_only_this_layer(pool, before, alone) -> None:
    """The layer's bytes are those of the layer alone, and all others are as they were."""
    assert (pool.num_layers, pool.layer_index) == (LAYERS, MIDDLE)
    alone = IndexKeys(data=alone) if isinstance(alone, jax.Array) else alone
    for now, then, own in zip(*(jax.tree.leaves(x) for x in (pool, before, alone)), strict=True):
        now, expected = np.asarray(now), np.array(then)
        rows = len(own)
        expected[MIDDLE * rows : (MIDDLE + 1) * rows] = np.asarray(own)
        np.testing.assert_array_equal(now, expected)


def random_cache(layout, pages: int, page_size: int, seed: int = 0) -> mla.PagedKV:
    rng = np.random.default_rng(seed)
    cache = mla.PagedKV.zeros(layout, pages, page_size)
    rows = jnp.asarray(rng.standard_normal((cache.num_slots, layout.qk_dim)), jnp.bfloat16)
    return mla.write_kv(cache, jnp.arange(cache.num_slots, dtype=jnp.int32), rows)


SLOTS = jnp.asarray([0, 5, -1, 19, 2**31 - 1, 20, -(2**31), 12], jnp.int32)  # of 20; 20 is the next layer's first
ROWS = np.random.default_rng(1).standard_normal((8, 576)).astype(jnp.bfloat16)


# ---- what a view is ----


def test_shapes_and_views():
    pool = mla.PagedKV.zeros(mla.KVLayout.V4_FP8, 5, 4, num_layers=LAYERS)
    assert pool.data.shape == (15, mla.KVLayout.V4_FP8.page_bytes(4)) and (pool.num_pages, pool.num_slots) == (5, 20)
    second = pool.layer(1)
    assert (second.num_pages, second.num_slots, second.first_page) == (5, 20, 5)
    assert second.layer(2).first_page == 10 and second.data is pool.data
    assert jax.tree.structure(second.whole()) == jax.tree.structure(pool)
    assert second.pages.shape == (5, pool.data.shape[1])
    alone = mla.PagedKV.zeros(mla.KVLayout.V4_FP8, 5, 4)
    assert jax.tree.structure(alone.layer(0)) == jax.tree.structure(alone)
    sizes = {"num_pages": 2, "num_swa_pages": 2, "max_requests": 1}
    assert layers.V4LayerCache.zeros(mla.DEEPSEEK_V32, 0, **sizes).compressed is None


@pytest.mark.parametrize("index, error", [(3, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_a_layer_that_is_not_there(index, error):
    pool = mla.PagedKV.zeros(mla.KVLayout.V4_FP8, 5, 4, num_layers=LAYERS)
    with pytest.raises(error, match=r"PagedKV\.layer: index"):
        pool.layer(index)


def test_all_layers_where_one_is_wanted():
    pool = mla.PagedKV.zeros(mla.KVLayout.V4_FP8, 5, 4, num_layers=LAYERS)
    with pytest.raises(ValueError, match=r"gather_kv: cache holds 3 layers: pass the view of one, cache\.layer\(i\)"):
        mla.gather_kv(pool, SLOTS)
    keys = IndexKeys.zeros(5, 4, num_layers=LAYERS)
    with pytest.raises(ValueError, match=r"write_index_k: index_cache holds 3 layers"):
        write_index_k(keys, SLOTS, ROWS[:, :128])
    uneven = dataclasses.replace(pool, data=pool.data[1:]).layer(0)
    with pytest.raises(ValueError, match="must have as many rows for each of its 3 layers, got 14"):
        mla.gather_kv(uneven, SLOTS)
    for layers_, index in ((3, 7), (3, -1), (1, 1)):
        wrong = dataclasses.replace(pool, num_layers=layers_, layer_index=index)
        with pytest.raises(ValueError, match="layer_index must be"):
            mla.gather_kv(wrong, SLOTS)
    with pytest.raises(ValueError, match=r"PagedKV\.zeros: num_layers"):
        mla.PagedKV.zeros(mla.KVLayout.V4_FP8, 5, 4, num_layers=0)


# ---- each function ----


@pytest.mark.long
@LAYOUTS
def test_cache_functions(layout):
    alone = random_cache(layout, 5, 4)
    pool = view(alone)
    rows = jnp.asarray(ROWS[:, : layout.qk_dim])
    assert_only_this_layer(mla.write_kv(pool, SLOTS, rows), pool, mla.write_kv(alone, SLOTS, rows))
    np.testing.assert_array_equal(mla.gather_kv(pool, SLOTS), mla.gather_kv(alone, SLOTS))
    np.testing.assert_array_equal(mla.dequantize_kv(pool), mla.dequantize_kv(alone))
    for slots in (None, SLOTS):
        want = mla.split_pages(alone, 2, slots=slots)
        got = mla.split_pages(pool, 2, slots=slots)
        assert got.num_layers == 1
        np.testing.assert_array_equal(got.data, want.data)
        out = random_cache(layout, 10, 2, seed=3)
        want = mla.split_pages(alone, 2, slots=slots, out=out)
        into = view(out)
        assert_only_this_layer(mla.split_pages(pool, 2, slots=slots, out=into), into, want)


@pytest.mark.parametrize("write", [write_index_k, write_transformed_index_k])
def test_index_keys(write):
    keys = jnp.asarray(ROWS[:, :128])
    alone = write(jnp.zeros((5, 4 * 132), jnp.uint8), jnp.arange(8, dtype=jnp.int32) * 2, keys)
    pool = view(alone)
    assert_only_this_layer(write(pool, SLOTS, keys), pool, write(alone, SLOTS, keys))
    for got, want in zip(gather_index_k(pool, SLOTS), gather_index_k(alone, SLOTS)):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    q = jnp.asarray(ROWS[:4, :256].reshape(4, 2, 128)).astype(jnp.float8_e4m3fn)
    table = jnp.asarray([[0, 4, -1], [5, 2, 1], [3, -(2**31), 4], [2**31 - 1, 0, 2]], jnp.int32)
    arguments = jnp.ones((4, 2)), table, jnp.asarray([12, 9, 11, 0], jnp.int32)
    got, want = (mla.index_logits(q, arguments[0], cache, *arguments[1:]) for cache in (pool, alone))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("ratio", [4, 128])
def test_compressor_states(ratio):
    rng = np.random.default_rng(ratio)
    width = 16 * (2 if ratio == 4 else 1)
    alone = CompressorState.zeros(4, ratio=ratio, head_dim=16)
    alone = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32), alone)
    step = {
        "positions": jnp.asarray([ratio - 2, ratio - 1, -1, 7 * ratio - 1, 5], jnp.int32),
        "req_rows": jnp.asarray([2, 2, -1, 0, 4], jnp.int32),  # 4 is the next layer's first request
        "query_start_loc": jnp.asarray([0, 2, 3, 4, 5], jnp.int32),
        "ape": jnp.asarray(rng.standard_normal((ratio, width)), jnp.float32),
        "norm_weight": jnp.ones(16),
        "inv_freq": jnp.ones(4),
        "ratio": ratio,
    }
    kv, score = (jnp.asarray(rng.standard_normal((5, width)), jnp.float32) for _ in range(2))
    entries, rows, state = compress_kv(alone, kv, score, **step)
    pool = view(alone)
    got_entries, got_rows, got_state = compress_kv(pool, kv, score, **step)
    np.testing.assert_array_equal(np.asarray(got_entries, np.float32), np.asarray(entries, np.float32))
    np.testing.assert_array_equal(got_rows, rows)
    assert_only_this_layer(got_state, pool, state)


@pytest.mark.always(1)
@LAYOUTS
def test_decode(layout):
    rng = np.random.default_rng(4)
    first, second = random_cache(layout, 5, 4), random_cache(layout, 7, 2, seed=2)
    q = jnp.asarray(rng.standard_normal((2, 1, 3, layout.qk_dim)), jnp.bfloat16)
    tables = {
        "indices": jnp.asarray(rng.integers(-2, 22, (2, 1, 8)), jnp.int32),
        "extra_indices": jnp.asarray(rng.integers(-2, 16, (2, 1, 6)), jnp.int32),
    }
    decode = functools.partial(mla.sparse_mla_decode, q, **tables, softmax_scale=0.05)
    want = decode(cache=first, extra_cache=second)
    got = decode(cache=view(first), extra_cache=view(second))
    for a, b in zip(got, want):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


# ---- layers ----


def test_stacked_parameters():
    params = {ratio: make_world(ratio).params for ratio in (0, 4, 128)}
    pool = stacked(params[4])
    assert len(jax.tree.leaves(pool)) == len(jax.tree.leaves(params[4])) == 7 and pool.num_layers == LAYERS
    alone = pool.layer(MIDDLE).compressor.alone()
    assert jax.tree.structure(alone) == jax.tree.structure(params[4].compressor)
    for got, want in zip(jax.tree.leaves(alone), jax.tree.leaves(params[4].compressor), strict=True):
        np.testing.assert_array_equal(got, want)
    single = layers.V4LayerParams.stack([params[0]])
    assert jax.tree.structure(single.layer(0)) == jax.tree.structure(params[0])
    with pytest.raises(ValueError, match=r"V4LayerParams\.stack: layers must have the same parts"):
        layers.V4LayerParams.stack([params[4], params[128]])
    with pytest.raises(ValueError, match="got none"):
        layers.V4LayerParams.stack([])
    with pytest.raises(ValueError, match=r"V4LayerParams\.layer: index must be below num_layers, 3, got 3"):
        pool.layer(3)


@pytest.mark.long
@pytest.mark.parametrize("ratio", [0, 4, 128, None], ids=["window", "ratio 4", "ratio 128", "V3.2"])
def test_a_layer_s_steps(ratio):
    """Outputs and bytes of a view are those of a layer alone."""
    world = make_world(ratio)
    batch, rows, _ = make_step(world, mla.ForwardMode.EXTEND, [(0, 0, 130), (1, 0, 14), 0], num_rows=160)
    step = step_function(ratio, False)
    (want, alone, chosen), _ = step(world.empty_cache(), rows, world.params, batch, world.tables)
    params = world.params if ratio is None else stacked(world.params).layer(MIDDLE)
    (got, pool, also), _ = step(all_layers(world).layer(MIDDLE), rows, params, batch, world.tables)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    np.testing.assert_array_equal(also, chosen)
    for now, own in zip(jax.tree.leaves(pool), jax.tree.leaves(alone), strict=True):
        shares = np.asarray(now).reshape(LAYERS, *own.shape)
        np.testing.assert_array_equal(shares[MIDDLE], own)
        assert not shares[[0, 2]].any()


def test_fields_of_different_layers():
    world = make_world(4)
    batch, rows, _ = make_step(world, mla.ForwardMode.DECODE, [(0, 7, 1)], num_rows=1)
    metadata, pool = mla.build_v4_metadata(V4, batch, world.tables), all_layers(world)
    one = world.empty_cache()
    for mixed in (
        dataclasses.replace(pool.layer(1), swa=pool.swa.layer(0)),
        dataclasses.replace(pool.layer(1), index_k=one.index_k),
    ):
        with pytest.raises(ValueError, match=r"cache must be the view of one layer, cache\.layer\(i\)"):
            layers.v4_layer(mixed, rows, world.params, batch, metadata, None, spec=V4, ratio=4)
    params = stacked(world.params)
    mixed = dataclasses.replace(params.layer(1), compressor=params.compressor.layer(0))
    with pytest.raises(ValueError, match=r"params must be the view of one layer, params\.layer\(i\)"):
        layers.v4_layer(one, rows, mixed, batch, metadata, None, spec=V4, ratio=4)
    with pytest.raises(ValueError, match=r"params.* holds 3 layers: pass the view of one"):
        layers.v4_layer(one, rows, params, batch, metadata, None, spec=V4, ratio=4)


def test_fields_of_different_layers_of_v32():
    world = make_world(None)
    batch, rows, _ = make_step(world, mla.ForwardMode.DECODE, [(0, 7, 1)], num_rows=1)
    metadata = mla.build_v32_metadata(V32, batch, world.tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
    pool, one = all_layers(world), world.empty_cache()
    second, several = pool.layer(1), r"cache must be the view of one layer, cache\.layer\(i\)"
    for mixed, message in (
        (pool, r"cache\.kv holds 3 layers: pass the view of one, cache\.kv\.layer\(i\)"),
        (dataclasses.replace(second, index_k=pool.index_k), r"cache\.index_k holds 3 layers: pass the view of one"),
        (dataclasses.replace(second, index_k=pool.index_k.layer(0)), several),
        (dataclasses.replace(second, index_k=one.index_k), several),
        (dataclasses.replace(one, index_k=second.index_k), several),
        (dataclasses.replace(second, kv=dataclasses.replace(second.kv, layer_index=LAYERS)), r"cache\.kv\.layer_index"),
        (
            dataclasses.replace(second, kv=dataclasses.replace(second.kv, data=pool.kv.data[1:])),
            "must have as many rows",
        ),
    ):
        with pytest.raises(ValueError, match=f"v32_layer: .*{message}"):
            layers.v32_layer(mixed, rows, batch, metadata, spec=V32)


def test_layers_of_all_kinds_in_place_with_few_arrays():
    """However many layers there are, the state that a step donates is 12 arrays, each updated in place."""
    ratios = (0, 0, 4, 128, 4, 128, 4)
    kinds = {ratio: make_world(ratio) for ratio in (0, 4, 128)}

    def pool(ratio, world):
        return layers.V4LayerCache.zeros(
            V4,
            ratio,
            num_pages=world.num_pages,
            num_swa_pages=world.num_pages,
            max_requests=world.tables.req_to_token.shape[0],
            num_layers=ratios.count(ratio),
        )

    state = {ratio: pool(ratio, world) for ratio, world in kinds.items()}
    batch, *_ = make_step(kinds[4], mla.ForwardMode.DECODE, [(0, 7, 1), (1, 3, 1)], num_rows=2)
    rows = {r: make_step(w, mla.ForwardMode.DECODE, [(0, 7, 1), (1, 3, 1)], num_rows=2)[1] for r, w in kinds.items()}

    def decode(state, rows, batch):
        step = layers.prepare_v4_step(V4, batch, kinds[4].tables)
        total, done = 0.0, dict.fromkeys(state, 0)
        for ratio in ratios:
            arguments = rows[ratio], kinds[ratio].params, batch, step.metadata, None
            out, state[ratio], _ = layers.v4_layer(
                state[ratio].layer(done[ratio]), *arguments, spec=V4, ratio=ratio, backend="reference"
            )
            done[ratio] += 1
            total += out.astype(jnp.float32).sum()
        return {ratio: cache.whole() for ratio, cache in state.items()}, total

    assert len(jax.tree.leaves(state)) == 12
    lowered = jax.jit(decode, donate_argnums=0).lower(state, rows, batch)
    assert lowered.as_text().count("tf.aliasing_output") == 12
    assert jax.tree.structure(lowered.out_info[0]) == jax.tree.structure(state)


def test_pools_of_v32():
    pool = layers.V32LayerCache.zeros(V32, num_pages=3, num_layers=61)
    assert len(jax.tree.leaves(pool)) == 2
    assert pool.layer(60).kv.first_page == 180 and pool.layer(60).index_k.first_page == 180

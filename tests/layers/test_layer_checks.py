"""What a layer refuses at trace time, by name: caches of a geometry that would give wrong results and no error."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.compressor.state import compressor_window
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import INDEX_K_BYTES, IndexKeys
from jax_sparse_mla.kv_cache import PagedKV

WORK, ROWS = [(0, 0, 1), (1, 3, 1)], 2
RATIOS = (0, 4, 128)


def same(x):
    return x


def traced(ratio, *, change_cache=same, change_rows=same, change_params=same):
    """Traces a decode step of a layer, and runs nothing; ratio None is V3.2's."""
    world = small_engine.make_world(ratio)
    batch, rows, _ = small_engine.make_step(world, mla.ForwardMode.DECODE, WORK, num_rows=ROWS)
    cache, rows = change_cache(world.empty_cache()), change_rows(rows)

    def step(cache, rows, params, batch, tables):
        if ratio is None:
            metadata = mla.build_v32_metadata(
                world.spec, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv"
            )
            return layers.v32_layer(cache, rows, batch, metadata, spec=world.spec)
        metadata = layers.prepare_v4_step(world.spec, batch, tables).metadata
        return layers.v4_layer(cache, rows, params, batch, metadata, None, spec=world.spec, ratio=ratio)

    params = None if ratio is None else change_params(world.params)
    return jax.eval_shape(step, cache, rows, params, batch, world.tables)


@pytest.mark.parametrize("ratio", [None, *RATIOS])
def test_what_zeros_makes_is_served(ratio):
    out, *_ = traced(ratio)
    assert out.shape[0] == ROWS


CACHES = [(0, "swa"), *((ratio, name) for ratio in (4, 128) for name in ("swa", "compressed", "state"))]
MISSING = [
    *(
        (ratio, "cache", name, f"must be .* in a layer of compress ratio {ratio}, got NoneType; .*zeros.spec, ")
        for ratio, name in [*CACHES, (4, "index_k"), (4, "index_state")]
    ),
    *((4, "rows", name, "must be given .* ratio 4, got NoneType") for name in ("compressed_kv", "index")),
    (128, "rows", "compressed_score", "must be given .* ratio 128, got NoneType"),
    (128, "params", "compressor", "must be given .* ratio 128, got NoneType"),
    (4, "params", "index_compressor", "must be given .* ratio 4, got NoneType"),
    *((None, "cache", name, "must be .*, got NoneType; V32LayerCache.zeros") for name in ("kv", "index_k")),
    *((None, "rows", name, "must be given with rows.index_k") for name in ("index_q", "index_weights")),
]


@pytest.mark.parametrize("ratio, of, field, message", MISSING, ids=[f"{r}-{of}-{name}" for r, of, name, _ in MISSING])
def test_what_is_missing(ratio, of, field, message):
    with pytest.raises(TypeError, match=f"v{32 if ratio is None else 4}_layer: {of}.{field} {message}"):
        traced(ratio, **{f"change_{of}": lambda given: dataclasses.replace(given, **{field: None})})


@pytest.mark.parametrize("ratio, field", [(None, "kv"), (0, "swa"), (4, "compressed")])
def test_an_array_where_a_cache_is_wanted(ratio, field):
    """It has no layout, by which rows are written."""
    with pytest.raises(TypeError, match=rf"layer: cache\.{field} must be a PagedKV.*, got \w+; V\d+LayerCache\.zeros"):
        traced(ratio, change_cache=lambda of: dataclasses.replace(of, **{field: getattr(of, field).data}))


@pytest.mark.parametrize("ratio", [4, None])
def test_index_keys_that_are_not_in_pages(ratio):
    def change(cache):
        return dataclasses.replace(cache, index_k=cache.index_k.reshape(-1, 64, INDEX_K_BYTES))

    with pytest.raises(
        ValueError, match=r"layer: cache\.index_k must be \[num_pages, page_bytes\], got \[\d+, 64, 132\]"
    ):
        traced(ratio, change_cache=change)


@pytest.mark.parametrize("ratio, keys", [(4, 256), (4, 16), (None, 256)])
def test_another_index_page_size(ratio, keys):
    """27% of the selections were wrong, and nothing said so."""

    def change(cache):
        bytes_in_all = cache.index_k.size // (keys * INDEX_K_BYTES) * keys * INDEX_K_BYTES
        return dataclasses.replace(cache, index_k=jnp.zeros(bytes_in_all, jnp.uint8).reshape(-1, keys * INDEX_K_BYTES))

    message = rf"cache.index_k must have pages of 64 keys .* got {keys * 132} .*{keys} keys"
    with pytest.raises(ValueError, match=message):
        traced(ratio, change_cache=change)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("pages", [1, 3])
def test_fewer_compressed_pages(ratio, pages):
    def change(cache):
        few = cache.compressed
        return dataclasses.replace(cache, compressed=PagedKV.zeros(few.layout, pages, few.page_size))

    message = r"v4_layer: cache.(compressed must have an entry|index_k must have a key) for every \d+ tokens.* got "
    with pytest.raises(ValueError, match=message):
        traced(ratio, change_cache=change)


@pytest.mark.parametrize("ratio", [4, None])
def test_index_keys_of_another_dtype(ratio):
    with pytest.raises(TypeError, match=r"layer: cache\.index_k must be uint8, got int8"):
        traced(ratio, change_cache=lambda cache: dataclasses.replace(cache, index_k=cache.index_k.astype(jnp.int8)))


@pytest.mark.parametrize("format", [IndexFormat.FP4, IndexFormat.FP8.written_by("vllm")], ids=repr)
@pytest.mark.parametrize("ratio", [4, None])
def test_index_keys_of_another_format(ratio, format):
    """V4's kernel would write keys of 132 bytes into pages of 68, and these layers round queries as SGLang does."""

    def change(cache):
        keys = IndexKeys.zeros(len(cache.index_k), 64, format=format)
        return dataclasses.replace(cache, index_k=keys)

    with pytest.raises(ValueError, match=r"cache.index_k must be of IndexFormat.FP8, .* got IndexFormat.FP"):
        traced(ratio, change_cache=change)


@pytest.mark.parametrize("ratio", [4, None])
def test_fewer_index_pages(ratio):
    message = r"cache.index_k must have a key for every .* that cache.\w+ has room for, got 2 pages"
    with pytest.raises(ValueError, match=message):
        traced(ratio, change_cache=lambda cache: dataclasses.replace(cache, index_k=cache.index_k[:2]))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ratio, field", [(4, "state"), (128, "state"), (4, "index_state")])
def test_fewer_compressor_rows_than_requests(ratio, field, rows):
    """Two requests of the batch, of which the pool's last row may be one."""

    def change(cache):
        return dataclasses.replace(cache, **{field: jax.tree.map(lambda x: x[:rows], getattr(cache, field))})

    message = f"v4_layer: cache.{field} must have a row for each row of req_to_token, 5 in all, got {rows}: .*max_requ"
    with pytest.raises(ValueError, match=message):
        traced(ratio, change_cache=change)


@pytest.mark.parametrize("mode", [mla.ForwardMode.TARGET_VERIFY, mla.ForwardMode.DRAFT_EXTEND])
@pytest.mark.parametrize("ratio, field", [(4, "state"), (128, "state"), (4, "index_state")])
@pytest.mark.parametrize("drafts", [1, 2])
def test_states_without_room_for_drafts(mode, ratio, field, drafts):
    """Rejected drafts replaced what the next step's window needs: compressed entries were wrong by up to 4.75."""
    world = small_engine.make_world(ratio)
    batch, rows, _ = small_engine.make_step(world, mla.ForwardMode.DECODE, WORK, num_rows=ROWS)
    slots = jnp.zeros(ROWS * drafts, jnp.int32)
    batch = dataclasses.replace(batch, mode=mode, num_draft_tokens=drafts, out_cache_loc=slots)
    rows = jax.tree.map(lambda x: jnp.concatenate([x] * drafts), rows)

    def step(cache):
        metadata = layers.prepare_v4_step(world.spec, batch, world.tables).metadata
        return layers.v4_layer(cache, rows, world.params, batch, metadata, None, spec=world.spec, ratio=ratio)

    cache, window = world.empty_cache(max_draft_tokens=drafts), compressor_window(ratio)
    for ring in (window + drafts - 1, window + drafts):
        out, *_ = jax.eval_shape(step, keeping(cache, field, ring))
        assert out.shape[0] == ROWS * drafts
    if drafts > 1:
        message = f"v4_layer: cache.{field} must keep {window + drafts - 1} tokens .* max_draft_tokens={drafts}"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(step, keeping(cache, field, window + drafts - 2))


def keeping(cache, field, ring):
    return dataclasses.replace(cache, **{field: jax.tree.map(lambda x: x[:, :ring], getattr(cache, field))})


def test_metadata_of_no_step_and_fewer_compressor_rows_than_requests():
    """Metadata that `prepare_v4_step` has not made knows the batch's requests alone."""
    world = small_engine.make_world(4)
    batch, rows, _ = small_engine.make_step(world, mla.ForwardMode.DECODE, WORK, num_rows=ROWS)
    metadata = mla.build_v4_metadata(world.spec, batch, world.tables)
    cache = world.empty_cache()
    cache = dataclasses.replace(cache, state=jax.tree.map(lambda x: x[:1], cache.state))
    with pytest.raises(ValueError, match=r"cache\.state must have a row for each request of the batch, 2 in all, got"):
        layers.v4_layer(cache, rows, world.params, batch, metadata, None, spec=world.spec, ratio=4)


def test_a_ratio_without_metadata_and_a_plan_of_another_ratio():
    world = small_engine.make_world(4)
    batch, rows, _ = small_engine.make_step(world, mla.ForwardMode.EXTEND, WORK, num_rows=ROWS)
    step = layers.prepare_v4_step(world.spec, batch, world.tables, gathered=True)
    arguments = (world.empty_cache(), rows, world.params, batch, step.metadata)
    with pytest.raises(ValueError, match=r"ratio must be one that metadata was built for \(0, 4, 128\), got 8"):
        layers.v4_layer(*arguments, None, spec=world.spec, ratio=8)
    with pytest.raises(ValueError, match=re.escape("plan must be of the layer's ratio 4, got one of ratio 0: V4Step")):
        layers.v4_layer(*arguments, step.plans[0], spec=world.spec, ratio=4)


@pytest.mark.parametrize("kind", [pytest.param(jnp.asarray, marks=pytest.mark.cpu), np.asarray])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_window_table_without_its_last_entry(kind, jitted):
    """Where the host has its values, as an argument or closed over; `debug.check_batch` tells of the others."""
    world = small_engine.make_world(128)
    batch, _, _ = small_engine.make_step(world, mla.ForwardMode.DECODE, WORK, num_rows=ROWS)
    tables = mla.RequestTables(
        req_to_token=world.tables.req_to_token, full_to_swa=kind(np.asarray(world.tables.full_to_swa)[:-1])
    )
    last, size = int(tables.full_to_swa[-1]), tables.full_to_swa.shape[0]

    def prepare(batch):
        return layers.prepare_v4_step(world.spec, batch, tables)

    message = rf"prepare_v4_step: tables.full_to_swa must be \[pool \+ 1\].* got {last} as the last of {size} entries"
    with pytest.raises(ValueError, match=message):
        (lambda batch: jax.eval_shape(prepare, batch))(batch) if jitted else prepare(batch)
    with pytest.raises(ValueError, match=r"tables.full_to_swa must be .* got no entry"):
        layers.prepare_v4_step(world.spec, batch, dataclasses.replace(tables, full_to_swa=jnp.zeros(0, jnp.int32)))

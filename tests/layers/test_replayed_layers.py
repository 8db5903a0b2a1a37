"""Layers that take positions instead of selecting: what a replayed step computes is the first one's to the bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import V4, V32, make_step, make_world

import jax_sparse_mla as mla
from jax_sparse_mla import layers

EXTEND, DECODE = mla.ForwardMode.EXTEND, mla.ForwardMode.DECODE
# More than the 16 entries that are selected: a chunk, then a token each.
STEPS = ((EXTEND, [(0, 0, 90), (1, 0, 30)]), (DECODE, [(0, 90, 1), (1, 30, 1)]))


@functools.partial(jax.jit, static_argnames=("ratio", "gathered"))
def step(cache, rows, params, batch, tables, selected=None, *, ratio, gathered):
    if ratio is None:
        backend = "flashmla_sparse" if gathered else "flashmla_kv"
        metadata = mla.build_v32_metadata(V32, batch, tables, fp8_kv_cache=True, prefill_backend=backend)
        return layers.v32_layer(cache, rows, batch, metadata, spec=V32, selected=selected)
    shared = layers.prepare_v4_step(V4, batch, tables, gathered=gathered and batch.mode is EXTEND)
    plan = shared.plans.get(ratio)
    options = {"spec": V4, "ratio": ratio, "selected": selected}
    return layers.v4_layer(cache, rows, params, batch, shared.metadata, plan, **options)


def bits(tree):
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]


@pytest.mark.always("None-False", "4-True")
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("ratio", [None, 4])
def test_a_replayed_step_equals_the_first_to_the_bit(ratio, gathered):
    """Output, caches and positions; other positions give another output and the same caches."""
    world = make_world(ratio)
    cache, run = world.empty_cache(), functools.partial(step, ratio=ratio, gathered=gathered)
    for mode, work in STEPS:
        batch, rows, owners = make_step(world, mode, work, num_rows=sum(count for *_, count in work), hostile=True)
        arguments = cache, rows, world.params, batch, world.tables
        first = run(*arguments)
        positions = first[2]
        assert (np.sum(np.asarray(positions) >= 0, axis=1) == 16).any()
        replayed = run(*arguments, positions)
        for got, want in zip(bits(replayed), bits(first), strict=True):
            np.testing.assert_array_equal(got, want)
        unseen = jnp.where(positions < 0, jnp.where(jnp.arange(16) % 2 == 0, 2**31 - 1, -7), positions)
        for got, want in zip(bits(run(*arguments, unseen)), bits(first), strict=True):
            np.testing.assert_array_equal(got, want)
        # A row's positions in place of its own, of those that it sees.
        other = run(*arguments, jnp.where(positions > 2, positions - 1, positions))
        for got, want in zip(bits(other[1]), bits(first[1]), strict=True):
            np.testing.assert_array_equal(got, want)
        late = owners[work[0][0], work[0][1] + work[0][2] - 1]
        assert (np.asarray(other[0][late], np.float32) != np.asarray(first[0][late], np.float32)).any()
        cache = first[1]


def test_the_indexer_of_a_replayed_step_is_not_read():
    """Its queries may be missing in V3.2; its keys are written."""
    world = make_world(None)
    batch, rows, _ = make_step(world, EXTEND, [(0, 0, 70)], num_rows=70)
    _, cache, positions = step(world.empty_cache(), rows, None, batch, world.tables, ratio=None, gathered=False)
    without = dataclasses.replace(rows, index_q=None, index_weights=None)
    arguments = world.empty_cache(), without, None, batch, world.tables
    _, replayed, _ = step(*arguments, positions, ratio=None, gathered=False)
    np.testing.assert_array_equal(replayed.index_k, cache.index_k)
    assert np.asarray(replayed.index_k).any()
    with pytest.raises(
        TypeError, match=r"rows\.index_q must be given with rows.index_k, or else index_scores or selected"
    ):
        step(*arguments, ratio=None, gathered=False)


@pytest.mark.parametrize("ratio", [0, 128])
def test_layers_that_select_none_take_none(ratio):
    world = make_world(ratio)
    batch, rows, _ = make_step(world, DECODE, [(0, 0, 1)], num_rows=1)
    arguments = world.empty_cache(), rows, world.params, batch, world.tables
    assert step(*arguments, ratio=ratio, gathered=False)[2] is None
    with pytest.raises(ValueError, match="v4_layer: selected must be None in a layer that does not select"):
        step(*arguments, jnp.zeros((1, 16), jnp.int32), ratio=ratio, gathered=False)


def test_what_is_refused():
    world = make_world(4)
    batch, rows, _ = make_step(world, DECODE, [(0, 0, 1)], num_rows=1)
    arguments = world.empty_cache(), rows, world.params, batch, world.tables
    for selected, error, message in (
        (jnp.zeros((1, 15), jnp.int32), ValueError, r"selected must have shape \[1, 16\], got \[1, 15\]"),
        (jnp.zeros((1, 16)), TypeError, "selected must be int32"),
    ):
        with pytest.raises(error, match=f"v4_layer: {message}"):
            step(*arguments, selected, ratio=4, gathered=False)

"""A row of a layer's step does not depend on how many rows the step has, where that is asked for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import make_step, make_world

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.indexer import select as index_selection

FEW, MANY = 60, 264  # on a GPU a step of so many rows may take other kernels than one of a few


def run(world, ratio: int | None, count: int, num_rows: int, *, gathered: bool, batch_invariant: bool = True):
    """`(out, positions)` of the first request's first `count` tokens, in one step."""
    batch, rows, _ = make_step(world, mla.ForwardMode.EXTEND, [(0, 0, count)], num_rows=num_rows)
    rows = dataclasses.replace(rows, q=rows.q.astype(jnp.bfloat16))
    facts = {"spec": world.spec, "batch_invariant": batch_invariant}

    @jax.jit
    def step(cache, rows, params, batch, tables):
        if ratio is None:
            options = {"fp8_kv_cache": True, "prefill_backend": "flashmla_sparse" if gathered else "flashmla_kv"}
            metadata = mla.build_v32_metadata(world.spec, batch, tables, **options)
            return layers.v32_layer(cache, rows, batch, metadata, **facts)
        prepared = layers.prepare_v4_step(world.spec, batch, tables, gathered=gathered)
        plan = prepared.plans.get(ratio)
        return layers.v4_layer(cache, rows, params, batch, prepared.metadata, plan, ratio=ratio, **facts)

    out, _, positions = step(world.empty_cache(), rows, world.params, batch, world.tables)
    return np.asarray(out)[:FEW].view(np.uint16), None if positions is None else np.asarray(positions)[:FEW]


@pytest.mark.always("None-True", "4-False")
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("ratio", [None, 0, 4, 128])
def test_a_row_does_not_depend_on_the_number_of_rows(ratio, gathered):
    world = make_world(ratio)
    few, many = (run(world, ratio, count, count + 4, gathered=gathered) for count in (FEW, MANY))
    np.testing.assert_array_equal(few[0], many[0])
    np.testing.assert_array_equal(few[1], many[1])


@pytest.mark.always("None")
@pytest.mark.parametrize("ratio", [None, 4])
def test_selections_are_those_of_all_logits_at_once(ratio, monkeypatch):
    """Where the logits are too many for one array, rows go through in parts, also without a workspace."""
    world = make_world(ratio)
    wanted = run(world, ratio, FEW, FEW + 4, gathered=False, batch_invariant=False)
    monkeypatch.setattr(index_selection, "SCRATCH_BYTES", 16_000)
    shapes = []
    logits_of = index_selection.logits_of
    monkeypatch.setattr(
        index_selection, "logits_of", lambda q, *args, **how: shapes.append(q.shape[0]) or logits_of(q, *args, **how)
    )
    found = run(world, ratio, FEW, FEW + 4, gathered=False, batch_invariant=False)
    assert shapes and max(shapes) < FEW
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(found[0], wanted[0])

"""A made-up model whose layers of one ratio are of a kind that no published model has: one spec says so, this one.

Ratio 4 here is not V4's, nor ratio 2 V4.1's: the kind of the layer alone says whether windows overlap and what is
selected.
"""

import dataclasses

import jax
import numpy as np
import pytest
from small_engine import LENGTHS, MAX_LEN, V4, compressed_entries, make_step, make_world, softmax_out

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.models import LayerKind, ModelSpec

EXTEND, DECODE = mla.ForwardMode.EXTEND, mla.ForwardMode.DECODE
KINDS = {
    "ratio 4 that attends to all, without overlap": LayerKind(
        ratio=4, window=128, selects="all", owns_kv=True, gated=True
    ),
    "ratio 2 with overlap, and an indexer with a compressor": LayerKind(
        ratio=2, window=128, selects="own", owns_kv=True, gated=True, overlap=True, index_keys="compressor"
    ),
}
STEPS = [
    (EXTEND, [(0, 0, 160), (2, 0, 69)], 240),
    (EXTEND, [(0, 160, 100), (1, 0, 30)], 240),
    (DECODE, [(0, 260, 1), (2, 69, 1)], 2),
]


def made_up(kind: LayerKind) -> ModelSpec:
    kinds = LayerKind(window=128), kind
    return dataclasses.replace(V4, name="made up", compress_ratios=(0, kind.ratio), layers=kinds)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_changed_kind_is_served_as_dense_attention(kind):
    spec = made_up(kind)
    world = make_world(kind.ratio, spec)
    cache, outs, selections = world.empty_cache(bf16=True), {}, {}

    @jax.jit
    def run(cache, rows, params, batch, tables):
        step = layers.prepare_v4_step(spec, batch, tables, gathered=batch.mode is EXTEND)
        plan, metadata = step.plans.get(kind.ratio), step.metadata
        return step, layers.v4_layer(cache, rows, params, batch, metadata, plan, spec=spec, ratio=kind.ratio)

    for mode, work, num_rows in STEPS:
        batch, rows, owners = make_step(world, mode, work, num_rows=num_rows)
        step, (out, cache, positions) = run(cache, rows, world.params, batch, world.tables)
        assert not step.overflow
        check_metadata(step, spec, kind)
        assert (positions is None) == (kind.selects == "all")
        for owner, row in owners.items():
            outs[owner] = np.asarray(out[row], np.float32)
            selections[owner] = None if positions is None else np.asarray(positions[row])
    rows, params = world.rows, world.params
    for request, length in enumerate(LENGTHS):
        arrays = rows.compressed_kv[request, :length], rows.compressed_score[request, :length]
        entries, index = compressed_entries(params.compressor, *arrays, kind), rows.index
        if index is not None:
            arrays = index.kv[request, :length], index.score[request, :length]
            keys = compressed_entries(params.index_compressor, *arrays, kind)
        served = sorted(position for owner, position in outs if owner == request)
        for position in {*served[:9], *served[::17], served[-1]}:
            at, seen = (request, position), entries[: (position + 1) // kind.ratio]
            if index is not None:
                chosen = selections[at][selections[at] >= 0]
                assert len(set(chosen)) == min(len(seen), spec.index_topk) and (np.diff(chosen) > 0).all()
                assert_scores_highest(chosen, index.q[at], index.weights[at], keys[: len(seen)])
                seen = seen[chosen]
            window = rows.kv[request, max(0, position - 127) : position + 1].astype(np.float64)
            q, sink = rows.q[at].astype(np.float64), np.asarray(params.attn_sink, np.float64)
            want = softmax_out(q, np.concatenate([window, seen]), spec.softmax_scale, sink)
            np.testing.assert_allclose(outs[at], want, rtol=0, atol=4e-3)


def check_metadata(step, spec, kind):
    """Lengths, widths and the plan say what the kind says."""
    part, seen = step.metadata.compressed[kind.ratio], np.asarray(step.metadata.seq_lens_causal) // kind.ratio
    live = np.asarray(step.metadata.seq_lens_causal) > 0
    topk = spec.index_topk if kind.selects == "own" else MAX_LEN // kind.ratio
    np.testing.assert_array_equal(part.lengths, seen)
    np.testing.assert_array_equal(part.topk_lengths, np.where(live, np.clip(seen, 1, topk), 0))
    assert part.page_indices.shape[1] == -(-topk // 64) * 64
    listed = (np.asarray(part.page_indices) >= 0).sum(1)
    np.testing.assert_array_equal(listed, seen if kind.selects == "all" else 0)
    for plan in [step.plans[kind.ratio]] if step.plans else []:
        assert (plan.topk, plan.selected) == (topk, kind.selects == "own")


def assert_scores_highest(chosen, q, weights, keys):
    """Against unquantised scores: FP8 may swap neighbours, not more."""
    scores = weights.astype(np.float64) @ np.maximum(q.astype(np.float64) @ keys.T, 0)
    if len(chosen):
        lowest = np.sort(scores)[-len(chosen)]
        assert (scores[chosen] >= lowest - 0.1 * np.ptp(scores)).mean() > 0.8


def test_specs_hash_by_their_kinds():
    """Programs that take a spec as a static argument are the spec's own; the order of layers is not theirs to see."""
    plain = dataclasses.replace(V4, compress_ratios=(0, 4))
    changed = made_up(KINDS["ratio 4 that attends to all, without overlap"])
    assert dataclasses.replace(changed, name=plain.name) != plain
    assert dataclasses.replace(changed, name=plain.name, layers=()) == plain
    twice = dataclasses.replace(changed, layers=changed.layers * 2)
    assert twice == changed and hash(twice) == hash(changed) and len(twice.layers) == 4


def test_a_spec_with_another_window_or_other_pools():
    """Its layers have them too."""
    changed = dataclasses.replace(made_up(KINDS["ratio 4 that attends to all, without overlap"]), window=64)
    assert [kind.window for kind in changed.layers] == [changed.kind(4).window] * 2 == [64] * 2
    linear, own = LayerKind(), mla.DEEPSEEK_V32.kind()
    layers = linear, dataclasses.replace(own, pool=4)
    assert dataclasses.replace(mla.DEEPSEEK_V32, layers=layers).layers == (linear, own)

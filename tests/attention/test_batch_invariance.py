"""`batch_invariant`: a row computed alone equals, to the bit, the same row computed with others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse_mla as mla
from jax_sparse_mla import DeviceInfo, KVLayout
from jax_sparse_mla.attention.backend import BACKENDS, Call
from jax_sparse_mla.attention.machine import missing_for
from jax_sparse_mla.attention.route import plan_call

ROWS, SLOTS = 9, 512
H200 = DeviceInfo("cuda", (9, 0), 132, 232_448)
# (layout, heads, columns): the second one's rows are summed otherwise alone than together where nothing prevents it.
SHAPES = ((KVLayout.V4_FP8, 8, 64), (KVLayout.V32_FP8, 16, 130), (KVLayout.V4_FP8, 64, 512))
ON_GPU = jax.default_backend() == "gpu"
SERVING = [pytest.param(name, marks=pytest.mark.cpu if name == "reference" else pytest.mark.gpu) for name in BACKENDS]


def arguments(layout: KVLayout, heads: int, columns: int, rows: int):
    rng = np.random.default_rng(rows)
    kv = jnp.asarray(rng.standard_normal((SLOTS, layout.qk_dim)), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((rows, heads, layout.qk_dim)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-1, SLOTS, (rows, columns)), jnp.int32)
    return kv, q, indices, jnp.asarray(rng.integers(0, columns + 1, rows), jnp.int32)


def check(attend, rows: int, sizes) -> None:
    """`attend(part)` of parts of these sizes gives the bits of the whole's rows."""
    whole = attend(slice(0, rows))
    for size in sizes:
        for start in {0, rows // 2, rows - size}:
            part = slice(start, start + size)
            for alone, together in zip(attend(part), whole):
                np.testing.assert_array_equal(np.asarray(alone), np.asarray(together[part]))


@pytest.mark.always(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_rows_alone_and_together(phase, name, shape):
    layout, heads, columns = shape
    if name in missing_for(phase) or phase in BACKENDS[name].batch_dependent:
        pytest.skip(missing_for(phase).get(name) or BACKENDS[name].batch_dependent[phase])
    rows, sizes = (300, (1, 2, 33)) if ON_GPU and name != "reference" else (ROWS, (1, 2, 4))
    kv, q, indices, lengths = arguments(layout, heads, columns, rows)
    cache = mla.PagedKV.zeros(layout, SLOTS // 64, 64)
    cache = mla.write_kv(cache, jnp.arange(SLOTS, dtype=jnp.int32), kv)
    options = {"softmax_scale": 0.1, "backend": name, "batch_invariant": True}

    def attend(part):
        some = {"topk_length": lengths[part], **options}
        if phase == "prefill":
            return mla.sparse_mla_prefill(q[part], kv, indices[part], **some)
        return mla.sparse_mla_decode(q[part, None], cache, indices[part, None], **some)

    check(attend, rows, sizes)


def test_the_router_takes_backends_that_can():
    call = Call("decode", KVLayout.V4_FP8, 8, 64, H200, 640, batch_invariant=True)
    unable = {"hopper": "not installed"}
    plan = plan_call(call, unable=unable)
    assert plan.backend == "triton" and "depends on the batch" in plan.rejected["flashmla"]
    with pytest.raises(ValueError, match="depends on the batch"):
        plan_call(call, unable=unable, override="flashmla")
    spec, facts = mla.DEEPSEEK_V4_FLASH, {"num_q_tokens": 500, "device": H200, "installed": {"flashmla", "triton"}}
    assert mla.plan_attention("decode", spec, **facts).backend == "flashmla"
    assert mla.plan_attention("decode", spec, **facts, batch_invariant=True).backend == "triton"
    assert mla.plan_attention("prefill", spec, **facts, batch_invariant=True).backend == "flashmla"


def test_every_number_of_rows_has_the_same_backend():
    chosen = {
        plan_call(Call("decode", KVLayout.V4_FP8, rows, 64, H200, 640, batch_invariant=True), unable={}).backend
        for rows in (1, 2, 8, 100, 1000, 20_000)
    }
    assert len(chosen) == 1

"""FlashMLA's real kernels under XLA: what `test_sparse_mla.py`, which runs every backend, does not have."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import (
    assert_agree,
    assert_same,
    check_last_slots_of_5_gib,
    decode_arguments,
    prefill_arguments,
    small_decode,
    small_prefill,
)

from jax_sparse_mla.attention import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.machine import installed_for
from jax_sparse_mla.kv_cache import KVLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("flashmla" not in installed_for("decode"), reason="FlashMLA is not installed"),
]


@pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8"])
def test_decode_gives_the_bits_of_the_call_from_torch(layout):
    torch, wheel = pytest.importorskip("torch"), pytest.importorskip("flash_mla")
    import drop_in_calls

    extra = (512, 64) if layout == "V4_FP8" else None
    case = small_decode(
        layout=layout, heads=64, batch=9, q_len=1, topk=128, extra=extra, lengths="none", extra_lengths="none"
    )
    for indices, cache in ((case.indices, case.cache), (case.extra_indices, case.extra_cache)):
        if indices is not None:
            indices[(indices < 0) | (indices >= len(cache.rows))] = -1
    case.attn_sink = np.linspace(-3, 3, 64, dtype=np.float32)
    out, lse = sparse_mla_decode(**decode_arguments(case), backend="flashmla")
    given = {"tile_scheduler_metadata": wheel.get_mla_metadata()[0], "use_legacy": True}
    wanted, wanted_lse = wheel.flash_mla_with_kvcache(**drop_in_calls.decode_arguments(case) | given)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)), wanted.float().cpu().numpy())
    wanted_lse = wanted_lse.transpose(1, 2).cpu().numpy()
    np.testing.assert_array_equal(np.asarray(lse), np.where(np.isposinf(wanted_lse), -np.inf, wanted_lse))


@pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8"])
def test_the_last_slots_of_a_5_gib_cache(layout):
    check_last_slots_of_5_gib(layout, "flashmla")


def test_more_rows_than_the_vendors_schedule_takes():
    """Its planner keeps the batch in shared memory, 11,622 rows of it on an H200."""
    rows, topk, layout = 12_000, 64, KVLayout.V4_FP8
    cache = decode_arguments(small_decode(page_size=64))["cache"]
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (rows, 1, 16, 512), jnp.bfloat16)
    indices = jax.random.randint(keys[1], (rows, 1, topk), -1, cache.num_slots, jnp.int32)
    cache = dataclasses.replace(cache, data=cache.data & 0x3F, layout=layout)  # finite, whatever was poison
    call = jax.jit(lambda q, indices: sparse_mla_decode(q, cache, indices, softmax_scale=0.05, backend="flashmla"))
    out, lse = call(q, indices)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        few = sparse_mla_decode(q[part], cache, indices[part], softmax_scale=0.05, backend="reference")
        assert_agree((out[part], lse[part]), few, "decode")


def test_results_past_2_gib():
    rows, heads = 33_000, 128
    keys = jax.random.split(jax.random.key(1), 3)
    kv = jax.random.normal(keys[0], (256, 512), jnp.bfloat16) / 10  # the size that FlashMLA's tolerances are for
    indices = jax.random.randint(keys[1], (rows, 128), -1, 256, jnp.int32)
    call = jax.jit(lambda q, indices: sparse_mla_prefill(q, kv, indices, softmax_scale=0.5, backend="flashmla"))
    q = jax.random.normal(keys[2], (rows, heads, 512), jnp.bfloat16)
    results = call(q, indices)
    assert results[0].nbytes > 1 << 31
    for part in (slice(0, 5), slice(16_380, 16_390), slice(rows - 5, rows)):
        found = [x[part] for x in results]
        assert_same(found, call(q[part], indices[part]))
        few = sparse_mla_prefill(q[part], kv, indices[part], softmax_scale=0.5, backend="reference")
        assert_agree(found, few, "prefill")


def test_repeated_calls_share_the_stream_with_what_surrounds_them():
    """Inputs made just before and results used just after, fifty times over: order and reuse of memory."""
    arguments = decode_arguments(small_decode(heads=64, extra=(64, 2)))
    q = arguments.pop("q")

    @jax.jit
    def chain(q, arguments):
        total = jnp.zeros(q.shape, jnp.float32)
        for i in range(50):
            out, _ = sparse_mla_decode(q + jnp.bfloat16(i / 64), **arguments, softmax_scale=0.05, backend="flashmla")
            total += out.astype(jnp.float32)
        return total

    del arguments["softmax_scale"]
    total = np.asarray(chain(q, arguments))
    expected = sum(
        np.asarray(
            sparse_mla_decode(q + jnp.bfloat16(i / 64), **arguments, softmax_scale=0.05, backend="flashmla")[0],
            np.float32,
        )
        for i in range(50)
    )
    np.testing.assert_allclose(total, expected, rtol=1e-6, atol=1e-5)


def test_no_call_is_part_of_a_command_buffer():
    arguments = prefill_arguments(small_prefill())
    scale = arguments.pop("softmax_scale")
    program = jax.jit(lambda arguments: sparse_mla_prefill(**arguments, softmax_scale=scale, backend="flashmla"))
    text = program.lower(arguments).compile().as_text()
    assert "jax_sparse_mla_torch_call" in text
    for computation in text.split("\n\n"):
        if "command_buffer" in computation.split("{")[0]:
            assert "jax_sparse_mla_torch_call" not in computation

"""What every backend of sparse_mla_decode and sparse_mla_prefill must do: one class, which a test module subclasses.

The module gives the fixture `backend`, a name. The oracle is `attention_oracle.py`, numpy float64 loops.
"""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import (
    assert_agree,
    assert_same,
    check_decode,
    check_prefill,
    decode_arguments,
    prefill_arguments,
    run_decode,
    run_prefill,
    skip_unless_able,
    small_decode,
    small_prefill,
)
from attention_oracle import (
    BF16,
    INT_MAX,
    INT_MIN,
    assert_close_flashmla,
    attend,
    decode_cases,
    prefill_cases,
)

from jax_sparse_mla.attention import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv, write_kv

SINKS = (np.inf, -np.inf, 0.25, -3e38)


def skip_most_of_plain_jax_on_a_gpu(backend: str, number: int) -> None:
    """All of it is run where there is no GPU; for one, XLA needs seconds to compile each case."""
    if backend == "reference" and jax.default_backend() == "gpu" and number % 3:
        pytest.skip("plain JAX: every third case on a GPU, all on a CPU")


def numbered(cases: list):
    return pytest.mark.parametrize("number, case", list(enumerate(cases)), ids=[case.name for case in cases])


class SparseMLAConformance:
    """What every backend must do."""

    @pytest.mark.always(6)
    @numbered(decode_cases())
    def test_decode_equals_the_oracle(self, backend, number, case):
        skip_most_of_plain_jax_on_a_gpu(backend, number)
        check_decode(case, run_decode(case, backend))

    @pytest.mark.always(5)
    @numbered(prefill_cases())
    def test_prefill_equals_the_oracle(self, backend, number, case):
        skip_most_of_plain_jax_on_a_gpu(backend, number)
        check_prefill(case, run_prefill(case, backend))

    @pytest.mark.parametrize("seed", range(4))
    def test_small_shapes_equal_the_oracle(self, backend, seed):
        for case in (small_decode(seed), small_decode(seed, extra=(16, 2))):
            check_decode(case, run_decode(case, backend))
        case = small_prefill(seed)
        check_prefill(case, run_prefill(case, backend))

    def test_under_jit(self, backend):
        case = small_decode(extra=(16, 2))
        expected = run_decode(case, backend)
        jitted = jax.jit(sparse_mla_decode, static_argnames=("softmax_scale", "backend"))
        assert_agree(jitted(**decode_arguments(case), backend=backend), expected, "decode")
        case = small_prefill()
        expected = run_prefill(case, backend)
        jitted = jax.jit(sparse_mla_prefill, static_argnames=("softmax_scale", "backend"))
        assert_agree(jitted(**prefill_arguments(case), backend=backend), expected, "prefill")

    def test_values_select_no_compilation(self, backend):
        """Lengths and indices are data: steps of one bucket share one compilation."""
        traces = []

        def step(arguments):
            traces.append(1)
            return sparse_mla_decode(**arguments, softmax_scale=0.05, backend=backend)

        jitted = jax.jit(step)
        for seed in range(3):
            case = small_decode(seed, extra=(16, 2))
            run_decode(case, backend)  # skips where the backend cannot
            arguments = decode_arguments(case)
            del arguments["softmax_scale"]
            jitted(arguments)
        assert len(traces) == 1

    @pytest.mark.long
    @pytest.mark.parametrize("layout, heads, topk, extra_topk", [("V4_FP8", 64, 128, 512), ("V32_FP8", 128, 2048, 0)])
    @pytest.mark.parametrize("batch", [1, 64])
    def test_a_model_s_decode_is_within_5e_3_of_float64(self, backend, layout, heads, topk, extra_topk, batch):
        if batch > 1 and (backend == "reference" or jax.default_backend() == "cpu"):  # the reference stands in there
            pytest.skip("a batch is many rows of the same to the reference")
        rng = np.random.default_rng(0)
        layout = getattr(KVLayout, layout)
        skip_unless_able(backend, "decode", batch, heads, topk)
        q = rng.standard_normal((batch, 1, heads, layout.qk_dim)).astype(BF16)
        sink = rng.standard_normal(heads).astype(np.float32)
        arguments, keys = {}, []
        for name, columns, page_size in (("", topk, 64), ("extra_", extra_topk, 2)):
            if not columns:
                continue
            rows = jnp.asarray(rng.standard_normal((4096, layout.qk_dim)).astype(BF16))
            cache = PagedKV.zeros(layout, 4096 // page_size, page_size)
            cache = arguments[f"{name}cache"] = write_kv(cache, jnp.arange(4096, dtype=jnp.int32), rows)
            indices = rng.integers(0, 4096, (batch, 1, columns)).astype(np.int32)
            arguments[f"{name}indices"] = jnp.asarray(indices)
            keys.append(np.asarray(gather_kv(cache, jnp.asarray(indices[-1, 0]))).astype(np.float64))
        out, lse = sparse_mla_decode(q, **arguments, attn_sink=sink, softmax_scale=0.04, backend=backend)
        expected_out, _, expected_lse = attend(q[-1, 0], np.concatenate(keys), 0.04, sink)
        error = np.linalg.norm(np.asarray(out, np.float64)[-1, 0] - expected_out) / np.linalg.norm(expected_out)
        assert error < 5e-3
        np.testing.assert_allclose(lse[-1, 0], expected_lse, atol=1e-3)

    # --- rows without a key ---

    @pytest.mark.parametrize("sink", [True, False])
    def test_empty_decode_rows_give_zero_and_minus_infinity(self, backend, sink):
        case = small_decode(extra=(16, 2))
        case.attn_sink = np.array(SINKS, np.float32) if sink else None
        slots = len(case.cache.rows)
        case.indices[0] = np.resize(np.array([-1, -7, INT_MIN, INT_MAX, slots], np.int32), (2, 16))
        case.indices[1:] = 0
        case.extra_indices[:] = len(case.extra_cache.rows)
        case.topk_length = np.array([[16, INT_MAX], [0, -1], [INT_MIN, 0]], np.int32)
        case.extra_topk_length = np.full((3, 2), 16, np.int32)
        case.q[2] = np.nan  # a padding row's query is anything
        out, lse = run_decode(case, backend)
        assert np.all(np.asarray(out, np.float32) == 0) and np.all(np.isneginf(lse))

    @pytest.mark.parametrize("sink", [True, False])
    def test_empty_prefill_rows_give_zero_and_minus_infinity(self, backend, sink):
        case = small_prefill()
        case.attn_sink = np.array(SINKS, np.float32) if sink else None
        case.indices[:3] = np.resize(np.array([-1, -7, INT_MIN, INT_MAX, len(case.kv)], np.int32), (3, 16))
        case.indices[3:] = 0
        case.topk_length = np.array([16, INT_MAX, 1, 0, -1, INT_MIN], np.int32)
        case.q[4] = np.nan
        out, max_logits, lse = run_prefill(case, backend)
        assert np.all(np.asarray(out, np.float32) == 0)
        assert np.all(np.isneginf(max_logits)) and np.all(np.isneginf(lse))

    @pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
    def test_no_query_rows(self, backend, shape):
        case = small_decode(extra=(16, 2))
        batch, q_len = shape
        for name in ("q", "indices", "topk_length", "extra_indices", "extra_topk_length"):
            setattr(case, name, getattr(case, name)[:batch, :q_len])
        out, lse = run_decode(case, backend)
        chex.assert_shape([out, lse], [(*shape, 4, 512), (*shape, 4)])
        case = small_prefill()
        for name in ("q", "indices", "topk_length"):
            setattr(case, name, getattr(case, name)[:0])
        out, max_logits, lse = run_prefill(case, backend)
        chex.assert_shape([out, max_logits, lse], [(0, 4, 512), (0, 4), (0, 4)])

    def test_no_columns(self, backend):
        case = small_decode(extra=(16, 2))
        case.indices, case.topk_length = case.indices[..., :0], None
        check_decode(case, run_decode(case, backend))  # the extra cache alone
        case.extra_indices, case.extra_topk_length = case.extra_indices[..., :0], None
        check_decode(case, run_decode(case, backend))
        case = small_prefill()
        case.indices = case.indices[:, :0]
        check_prefill(case, run_prefill(case, backend))

    def test_no_rows_to_attend_to(self, backend):
        case = small_prefill()
        case.kv = case.kv[:0]
        check_prefill(case, run_prefill(case, backend))

    # --- what counts as a key ---

    def test_a_duplicate_counts_twice(self, backend):
        case = small_decode(q_len=1, lengths="none", sink=False)
        live = np.flatnonzero(~np.isnan(case.cache.rows).any(axis=1))
        a, b = live[:2]
        case.indices[:] = -1
        case.indices[0, 0, :1] = a
        case.indices[1, 0, :2] = a
        case.indices[2, 0, :3] = a, b, a
        case.q[:] = case.q[0]
        out, lse = run_decode(case, backend)
        assert_close_flashmla(lse[1], np.asarray(lse[0], np.float64) + np.log(2), "decode.lse")
        assert_same(out[1], out[0])
        check_decode(case, (out, lse))

    def test_the_first_and_the_last_slot_are_slots_like_others(self, backend):
        case = small_decode(lengths="none")
        case.indices[:] = -1
        case.indices[0, 0, 3] = 0
        case.indices[0, 1, 5] = len(case.cache.rows) - 1
        out, lse = run_decode(case, backend)
        assert np.all(np.isfinite(lse[0])) and np.all(np.isneginf(lse[1:]))
        check_decode(case, (out, lse))

    def test_a_length_is_a_span_of_columns_not_a_count(self, backend):
        case = small_decode(sink=False)
        live = np.flatnonzero(~np.isnan(case.cache.rows).any(axis=1))
        case.indices[:] = [-1, -1, live[0], *live[1:14]]
        case.topk_length = np.array([[3, 3], [2, 2], [4, 16]], np.int32)
        out, lse = run_decode(case, backend)
        check_decode(case, (out, lse))
        only = np.broadcast_to(case.cache.rows[live[0]], (2, 4, 512))
        assert_close_flashmla(out[0], only, "decode.out")  # one key: the output is its value
        assert np.all(np.isneginf(lse[1]))

    def test_a_length_per_request_is_that_length_for_its_rows(self, backend):
        case = small_decode(lengths="batch", extra=(16, 2), extra_lengths="batch")
        per_request = run_decode(case, backend)
        check_decode(case, per_request)
        case.topk_length = np.repeat(case.topk_length[:, None], 2, axis=1)
        case.extra_topk_length = np.repeat(case.extra_topk_length[:, None], 2, axis=1)
        assert_same(run_decode(case, backend), per_request)

    # --- the attention sink ---

    def test_infinite_sinks(self, backend):
        case = small_decode(extra=(16, 2), rows="mixed", lengths="none", extra_lengths="none")
        without_out, without_lse = run_decode(dataclasses.replace(case, attn_sink=None), backend)
        case.attn_sink = np.array([np.inf, -np.inf, -np.inf, np.inf], np.float32)
        out, lse = run_decode(case, backend)
        assert_same(lse, without_lse)
        assert_same(out[:, :, 1:3], without_out[:, :, 1:3])
        assert np.any(np.asarray(without_out, np.float32)[:, :, 0])
        assert not np.any(np.asarray(out, np.float32)[:, :, [0, 3]])

    # --- batches ---

    def test_requests_do_not_see_each_other(self, backend):
        """Permuting the requests permutes the results; padding requests change no other."""
        case = small_decode(extra=(16, 2))
        out, lse = run_decode(case, backend)
        names = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
        order = np.array([2, 0, 1])
        permuted = dataclasses.replace(case, **{name: getattr(case, name)[order] for name in names})
        assert_agree(run_decode(permuted, backend), (out[order], lse[order]), "decode")
        padded = dataclasses.replace(case, **{name: getattr(case, name).copy() for name in names})
        padded.q[1], padded.topk_length[1], padded.extra_topk_length[1] = np.nan, 0, 0
        padded_out, padded_lse = run_decode(padded, backend)
        real = np.array([0, 2])
        assert_agree((padded_out[real], padded_lse[real]), (out[real], lse[real]), "decode")
        assert not np.any(np.asarray(padded_out[1], np.float32)) and np.all(np.isneginf(padded_lse[1]))

    def test_inputs_need_not_be_jax_arrays(self, backend):
        case = small_prefill()
        expected = run_prefill(case, backend)
        names = ("q", "kv", "indices", "topk_length", "attn_sink")
        host = {name: getattr(case, name) for name in names}
        assert_same(sparse_mla_prefill(**host, softmax_scale=np.float64(0.1), backend=backend), expected)

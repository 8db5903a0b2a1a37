"""FlashInfer's top-k behind our contract: a stand-in with its argument list and order here, the kernels on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tvm_stub
from attention_calls import H200
from hypothesis import given, settings
from hypothesis import strategies as st
from topk_oracle import assert_positions, brute_positions, draw_ints, draw_logits

from jax_sparse_mla.indices import topk_positions
from jax_sparse_mla.indices.topk import flashinfer as topk_flashinfer
from jax_sparse_mla.indices.topk.route import TOPK_BACKENDS

pytest.importorskip("tvm_ffi")

EXAMPLES = settings(max_examples=30, deadline=None)
SHAPES = [(7, 50, 8), (7, 50, 1), (4, 130, 64), (3, 64, 64)]


def their_order(logits):
    """FlashInfer's keys: the bits of the float, negative ones reversed."""
    bits = logits.view(np.uint16 if logits.dtype.itemsize == 2 else np.uint32).astype(np.int64)
    sign = 1 << (8 * logits.dtype.itemsize - 1)
    return np.where(bits & sign, 2 * sign - 1 - bits, bits | sign)


def ragged_stub(logits, out, offsets, lengths, states, k, deterministic, tie_break, graph_safe, starts):
    assert (states, deterministic, tie_break, graph_safe) == (None, False, 1, False)
    assert out.shape == (len(logits), k) and lengths.shape == offsets.shape == (len(logits),)
    assert 1 <= k <= min(2048, logits.shape[1])
    assert logits.dtype in (np.float32, jnp.bfloat16) and out.dtype == np.int32
    for row in range(len(logits)):
        start = 0 if starts is None else starts[row]
        length = lengths[row]
        assert start >= 0 and length >= 0 and start + length <= logits.shape[1]  # the kernel trusts them
        window = their_order(logits[row])[start : start + length]
        chosen = np.lexsort((np.arange(length), -window))[:k]
        # Any order where not all are given.
        chosen = np.sort(chosen) if length <= k else chosen[np.argsort(chosen * 7919 % 1009)]
        out[row] = -1
        out[row, : len(chosen)] = chosen + offsets[row]


def cub_stub(logits, out, offsets, lengths, workspace, k, tie_break, starts):
    assert workspace.dtype == np.uint8 and workspace.size
    ragged_stub(logits, out, offsets, lengths, None, k, False, tie_break, False, starts)


@pytest.fixture(scope="module", autouse=True)
def their_module():
    if jax.default_backend() == "gpu":
        pytest.importorskip("flashinfer")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        functions = {"radix_topk_ragged_transform": ragged_stub, "cub_topk_ragged_transform": cub_stub}
        patch.setattr(topk_flashinfer, "_module", tvm_stub.module(**functions))
        yield


@pytest.mark.gpu
def test_on_the_gpu():
    """The tests of this file ran FlashInfer's kernels."""
    assert TOPK_BACKENDS["flashinfer"].missing("topk", "jax", H200) is None


positions = jax.jit(topk_flashinfer.topk_positions, static_argnames="topk")


@EXAMPLES
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(["few values", "normal"]),
    dtype=st.sampled_from([np.float32, jnp.bfloat16]),
    ragged=st.booleans(),
)
def test_our_contract(seed, shape, kind, dtype, ragged):
    rng = np.random.default_rng(seed)
    rows, columns, topk = shape
    logits = draw_logits(rng, rows, columns, kind, dtype)
    lengths = draw_ints(rng, rows, 0, columns + 9)
    starts = draw_ints(rng, rows, -3, columns + 2) if ragged else None
    got = positions(logits, lengths, topk=topk, row_starts=starts)
    assert_positions(got, brute_positions(logits, lengths, topk, starts), topk)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_order_of_every_kind_of_number(dtype):
    largest = float(jnp.finfo(dtype).max)
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    ascending = [-np.inf, -largest, -1.0, -2 * tiny, -tiny, 0.0, tiny, 2 * tiny, 1.0, largest, np.inf]
    x = np.array([*ascending, -0.0, 0.0, np.nan, -np.nan], dtype)
    *keys, minus_zero, zero, nan, negative_nan = their_order(np.asarray(jax.jit(topk_flashinfer._in_their_order)(x)))
    assert (np.diff(keys) > 0).all()
    assert minus_zero == zero == keys[5]
    assert nan == negative_nan < keys[0]


@pytest.mark.parametrize("kind", ["few values", "normal"])
def test_a_few_long_rows(kind):
    rng = np.random.default_rng(2)
    rows, columns, topk = 3, 16384, 500
    logits = draw_logits(rng, rows, columns, kind)
    lengths, starts = np.array([columns + 5, 900, 499], np.int32), np.array([-3, 7, 0], np.int32)
    got = positions(logits, lengths, topk=topk, row_starts=starts)
    assert_positions(got, brute_positions(logits, lengths, topk, starts), topk)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns, topk", [(1, 131072, 2048), (64, 32768, 512), (300, 4096, 2048)])
def test_large_rows(rows, columns, topk):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((rows, columns)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = 0.0
    lengths = rng.integers(0, columns + 1, rows).astype(np.int32)
    got = positions(logits, lengths, topk=topk, row_starts=None)
    np.testing.assert_array_equal(got, topk_positions(logits, lengths, topk))

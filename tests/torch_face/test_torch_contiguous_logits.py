"""`contiguous_index_logits` on torch tensors: JAX's logits, and a gradient beside float64 autodiff."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from index_gradient import TOLERANCE, arguments, check, windows
from sparse_mla_torch.operations.contiguous import contiguous_index_logits
from triton_device import DEVICE, tensor

from jax_sparse_mla.indexer import contiguous
from jax_sparse_mla.indexer import contiguous_index_logits as of_jax

pytestmark = pytest.mark.torch


def gradients(q, weights, keys, row_starts, lengths, g, *, fp8=False):
    moving = [tensor(np.asarray(x)).requires_grad_() for x in (q, weights, keys)]
    row_starts, lengths, g = (tensor(np.asarray(x)) for x in (row_starts, lengths, g))
    logits = contiguous_index_logits(*moving, row_starts, lengths, fp8=fp8)
    found = torch.autograd.grad(logits, moving, g, materialize_grads=True)
    return [x.detach().cpu().float().numpy() for x in (logits, *found)]


def found_of(given, **options):
    logits, *found = gradients(*given, **options)
    return logits, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_causal_sequence(dtype):
    given = arguments(np.random.default_rng(0), 70, 8, 300, dtype)
    check(given, found_of(given), TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@example(0, 1, 1, 1, [(-1, 2**31 - 1)])  # a score whose products nearly cancel
@given(
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 33),
    st.lists(st.tuples(windows, windows), min_size=1),
)
def test_of_any_windows(seed, rows, heads, columns, given):
    starts, lengths = np.resize(np.array(given, np.int64), (rows, 2)).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contiguous, "CHUNK_BYTES", 4 * heads * 8 * 2)
        patch.setattr(contiguous, "MAX_COLUMNS", 8)
        of_windows = arguments(np.random.default_rng(seed), rows, heads, columns, "float32", starts, lengths)
        check(of_windows, found_of(of_windows), 2e-6)


def test_fp8_is_jax_s():
    given = arguments(np.random.default_rng(2), 20, 4, 32, "float32")
    logits, _ = found_of(given, fp8=True)
    np.testing.assert_allclose(logits, of_jax(*given[:5], fp8=True), rtol=1e-5, atol=1e-5)
    check(given, found_of(given, fp8=True), 2e-6, fp8=True)


def test_what_no_row_sees_may_be_nan():
    q, weights, keys, starts, lengths, g = arguments(np.random.default_rng(1), 6, 2, 12, "float32")
    lengths = jnp.asarray(np.arange(6) + 2, jnp.int32)
    want = gradients(q, weights, keys, starts, lengths, g)
    unseen = np.arange(12) >= np.asarray(lengths)[:, None]
    found = gradients(q, weights, keys.at[7:].set(jnp.nan), starts, lengths, jnp.where(unseen, jnp.nan, g))
    for x, wanted in zip(found, want, strict=True):
        np.testing.assert_array_equal(x, wanted)


def test_a_second_gradient_and_wrong_arguments_are_refused():
    given = [tensor(np.asarray(x)) for x in arguments(np.random.default_rng(0), 3, 2, 5, "float32")]
    q = given[0].clone().requires_grad_()
    (dq,) = torch.autograd.grad(contiguous_index_logits(q, *given[1:5]), q, given[5], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(dq.sum(), q)
    for i, wrong, error, message in (
        (0, given[0].half(), TypeError, "q must be"),
        (2, given[2].bfloat16(), TypeError, "keys must be"),
        (1, given[1][:2], ValueError, "weights must have shape"),
        (4, given[4][:2], ValueError, "lengths must have shape"),
    ):
        with pytest.raises(error, match=f"contiguous_index_logits: {message}"):
            contiguous_index_logits(*given[:i], wrong, *given[i + 1 : 5])
    empty = contiguous_index_logits(given[0][:0], given[1][:0], given[2], given[3][:0], given[4][:0])
    assert empty.shape == (0, 5) and str(empty.device).startswith(str(DEVICE).split(":")[0])

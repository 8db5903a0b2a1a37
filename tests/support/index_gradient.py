"""The oracle of the indexer's gradient: torch differentiates the formula in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import strategies as st

from jax_sparse_mla.indexer.keys import INDEX_DIM, IndexFormat, quantize_fp8

HOSTILE = (-1, -7, -(2**31), 2**31 - 1, 0)
windows = st.one_of(st.sampled_from(HOSTILE), st.integers(-5, 40))
# Of the norm of a gradient: float32 sums, and bfloat16 products of what is rounded to bfloat16.
TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}


def oracle(q, weights, keys, row_starts, lengths, g):
    """Logits and the gradients of Σ g · logit over those that are seen, in float64."""
    q, weights, keys = (torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (q, weights, keys))
    at = np.arange(len(keys))
    starts, lengths = (np.asarray(x, np.int64)[:, None] for x in (row_starts, lengths))
    seen = (at >= starts) & (at < starts + np.maximum(lengths, 0))
    logits = (torch.relu(torch.einsum("rhd,cd->rhc", q, keys)) * weights[..., None]).sum(1)
    (logits * torch.tensor(np.where(seen, g, 0.0).astype(np.float64))).sum().backward()
    values = np.where(seen, logits.detach().numpy(), -np.inf)
    return values, [x.grad.numpy() for x in (q, weights, keys)]


def arguments(rng, rows, heads, columns, dtype, starts=None, lengths=None):
    """q, weights, keys, row_starts, lengths, and g: rows of a causal sequence, but for the given starts and lengths."""
    q, keys = (jnp.asarray(rng.standard_normal((*n, INDEX_DIM)), dtype) for n in ((rows, heads), (columns,)))
    weights = jnp.asarray(rng.standard_normal((rows, heads)), jnp.float32)
    starts = np.zeros(rows) if starts is None else starts
    lengths = columns - rows + np.arange(rows) + 1 if lengths is None else lengths
    g = jnp.asarray(rng.standard_normal((rows, columns)), jnp.float32)
    return q, weights, keys, jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32), g


def dequantised(x):
    """What FP8 holds of x, in float64."""
    values, scale = quantize_fp8(x, IndexFormat.FP8)
    return np.asarray(values, np.float64) * np.asarray(scale, np.float64)[..., None]


def check(given, result, tolerance, *, fp8=False):
    """The logits and gradients that a function made of `arguments`; with `fp8` of what is rounded."""
    q, weights, keys, *others = given
    if fp8:
        q, keys = dequantised(q), dequantised(keys)
    values, expected = oracle(q, weights, keys, *others)
    logits, found = np.asarray(result[0]), result[1]
    np.testing.assert_array_equal(np.isneginf(logits), np.isneginf(values))
    seen = ~np.isneginf(values)
    np.testing.assert_allclose(logits[seen], values[seen], rtol=1e-5, atol=1e-4)
    # The weights' gradients are made of scores, sums of 128 float32 products of which nearly all may cancel.
    products = np.einsum("rhd,cd->rhc", *(np.abs(np.asarray(x, np.float64)) for x in (q, keys)))
    rounding = np.finfo(np.float32).eps * np.linalg.norm(
        (products * np.where(seen, np.abs(others[2]), 0)[:, None]).sum(2)
    )
    for name, x, wanted in zip(("q", "weights", "keys"), found, expected, strict=True):
        x, least = np.asarray(x, np.float64), rounding if name == "weights" else 0
        assert np.linalg.norm(x - wanted) <= tolerance * np.linalg.norm(wanted) + least, name
        assert not x[wanted == 0].any(), name  # what no row sees

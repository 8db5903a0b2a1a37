"""Top-k by a sort in plain Python, and the logits and numbers that it is tried with."""

from __future__ import annotations

import math

import chex
import jax.numpy as jnp
import numpy as np

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
NAN, INF = math.nan, math.inf
# Ties, both zeros, denormals of either sign, infinities, NaNs of either sign.
VALUES = np.array([0.0, -0.0, 1.0, -1.0, 2.5, 1e-42, -1e-42, INF, -INF, NAN, -NAN, 3e38, -3e38, 1e-38], np.float32)


def brute_positions(logits, lengths, topk, row_starts=None):
    """For each row the list of positions, which ascend."""
    out = []
    for i, length in enumerate(lengths.tolist()):
        start = 0 if row_starts is None else int(row_starts[i])
        if length <= topk:
            out.append(list(range(max(length, 0))))
            continue
        first, last = max(start, 0), min(start + length, logits.shape[1])
        scored = [(float(logits[i, c]), c - start) for c in range(first, last)]
        # Python compares −0.0 == 0.0 and tells denormals apart. NaN sorts below everything.
        scored.sort(key=lambda x: (math.isnan(x[0]), 0.0 if math.isnan(x[0]) else -x[0], x[1]))
        out.append(sorted(p for _, p in scored[:topk]))
    return out


def assert_positions(got, want, topk):
    chex.assert_shape(got, (len(want), topk))
    chex.assert_type(got, jnp.int32)
    for row, positions in zip(np.asarray(got).tolist(), want, strict=True):
        assert row == positions + [-1] * (topk - len(positions))


def draw_logits(rng, rows, columns, kind, dtype=np.float32):
    if kind == "few values":
        values = rng.choice(VALUES, (rows, columns))
    else:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
    return np.asarray(values.astype(dtype))


def draw_ints(rng, rows, low, high, hostile=0.1):
    values = rng.integers(low, high, rows)
    return np.where(rng.random(rows) < hostile, rng.choice([INT_MIN, -7, INT_MAX], rows), values).astype(np.int32)

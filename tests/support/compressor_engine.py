"""A small engine around compress_kv for its tests, and the oracle: the formula in float64 loops."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla.compressor.api import compress_kv
from jax_sparse_mla.compressor.state import CompressorState

HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
MAX_REQUESTS = 6
NUM_REQUESTS = 3  # B of every step
BUCKETS = (8, 64, 640)  # rows of a step, so that few shapes are compiled


# --- oracles ---------------------------------------------------------------------------------------


class Parameters:
    """Random parameters of a compressor."""

    def __init__(self, seed, ratio, head_dim, rope_dim):
        rng = np.random.default_rng(seed)
        self.ratio, self.head_dim, self.coff = ratio, head_dim, 2 if ratio == 4 else 1
        self.width = self.coff * head_dim
        self.ape = rng.normal(size=(ratio, self.width)).astype(np.float32)
        self.norm_weight = rng.uniform(0.5, 1.5, head_dim).astype(np.float32)
        self.inv_freq = (10000.0 ** (-np.arange(rope_dim // 2) / max(1, rope_dim // 2))).astype(np.float32)

    def tokens(self, seed, length, dtype=np.float32):
        rng = np.random.default_rng(seed)
        kv = rng.normal(size=(length, self.width)).astype(dtype)
        return kv, (3 * rng.normal(size=(length, self.width))).astype(dtype)

    def arrays(self):
        fields = ("ape", "norm_weight", "inv_freq")
        return {name: jax.device_put(getattr(self, name)) for name in fields}


def rotate_by_hand(x, position, inv_freq):
    x = x.astype(np.float64).copy()
    start = len(x) - 2 * len(inv_freq)
    for i, frequency in enumerate(inv_freq):
        angle = float(np.float32(position) * np.float32(frequency))  # the angle itself is a float32
        even, odd = x[start + 2 * i], x[start + 2 * i + 1]
        x[start + 2 * i] = even * np.cos(angle) - odd * np.sin(angle)
        x[start + 2 * i + 1] = even * np.sin(angle) + odd * np.cos(angle)
    return x


def entry_by_hand(p: Parameters, kv, score, last, eps=1e-6):
    """The entry of the group that ends at position `last` of a request with tokens kv, score; float64."""
    kv, score = kv.astype(np.float64), score.astype(np.float64)
    first, hd = last - p.ratio + 1, p.head_dim
    values, logits = [], []
    if p.coff == 2 and first > 0:
        for i in range(p.ratio):
            values.append(kv[first - p.ratio + i, :hd])
            logits.append(score[first - p.ratio + i, :hd] + p.ape[i, :hd])
    for i in range(p.ratio):
        values.append(kv[first + i, -hd:])
        logits.append(score[first + i, -hd:] + p.ape[i, -hd:])
    weight = np.exp(np.array(logits) - np.max(logits, axis=0))
    pooled = np.sum(weight * np.array(values), axis=0) / np.sum(weight, axis=0)
    normed = pooled / np.sqrt(np.mean(pooled**2) + eps) * p.norm_weight
    return rotate_by_hand(normed, first, p.inv_freq)


def assert_entry(got, want):
    """Equal up to the last rounding to bfloat16 (and a float32 sum's error just before it)."""
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=2**-8, atol=1e-4)


# --- an engine -------------------------------------------------------------------------------------


def bucket_of(rows):
    return next(b for b in BUCKETS if b >= rows)


class Engine:
    """Feeds chunks of requests to compress_kv and keeps each request's entries by group."""

    def __init__(self, p: Parameters, *, ring=None, fill=np.nan, dtype=np.float32, jit=False):
        self.p, self.dtype, self.jit = p, dtype, jit
        zeros = CompressorState.zeros(MAX_REQUESTS, ratio=p.ratio, head_dim=p.head_dim, ring=ring)
        self.state = jax.tree.map(lambda x: jnp.full_like(x, fill), zeros)
        self.entries = {}

    def step(self, chunks, *, garbage=0):
        """chunks: (name, req_row, first position, kv, score) per request; more requests and rows are padding.

        The rest of the bucket is padding rows of NaN, with req_rows that name a live request or nothing.
        """
        rows = sum(len(kv) for _, _, _, kv, _ in chunks)
        total = bucket_of(rows + garbage)
        rng = np.random.default_rng(rows)
        kv = np.full((total, self.p.width), np.nan, self.dtype)
        score = kv.copy()
        positions = rng.choice([-1, -7, -(2**31)], total).astype(np.int32)
        req_rows = rng.choice([0, 1, 2, *HOSTILE], total).astype(np.int32)
        starts, where = [0], {}
        for name, req_row, first, chunk_kv, chunk_score in chunks:
            start, end = starts[-1], starts[-1] + len(chunk_kv)
            kv[start:end], score[start:end] = chunk_kv, chunk_score
            positions[start:end] = np.arange(first, first + len(chunk_kv))
            req_rows[start:end] = req_row
            where |= {start + i: (name, first + i) for i in range(len(chunk_kv))}
            starts.append(end)
        starts += [starts[-1]] * (NUM_REQUESTS - len(chunks))
        arguments = dict(
            positions=jax.device_put(positions),
            req_rows=jax.device_put(req_rows),
            query_start_loc=jnp.asarray(starts, dtype=jnp.int32),
            ratio=self.p.ratio,
            **self.p.arrays(),
        )
        function = jax.jit(compress_kv, static_argnames="ratio") if self.jit else compress_kv
        entries, entry_rows, self.state = function(self.state, jax.device_put(kv), jax.device_put(score), **arguments)
        bound = min(total, total // self.p.ratio + NUM_REQUESTS)
        chex.assert_shape([entries, entry_rows], [(bound, self.p.head_dim), (bound,)])
        assert entries.dtype == jnp.bfloat16 and entry_rows.dtype == jnp.int32

        entries, entry_rows = np.asarray(entries), np.asarray(entry_rows)
        complete = [row for row, (_, position) in where.items() if (position + 1) % self.p.ratio == 0]
        np.testing.assert_array_equal(entry_rows, complete + [-1] * (bound - len(complete)))
        assert not entries[len(complete) :].astype(np.float32).any()
        for row, entry in zip(complete, entries):
            name, position = where[row]
            self.entries[name, position // self.p.ratio] = entry


def one_shot(p, kv, score, dtype=np.float32):
    engine = Engine(p, dtype=dtype)
    engine.step([("r", 0, 0, kv, score)])
    return [engine.entries["r", group] for group in range(len(kv) // p.ratio)]

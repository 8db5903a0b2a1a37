"""Calls of the top-k for its kernels' tests: hostile arguments, and what plain JAX makes of them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from on_the_cpu import on_the_cpu

from jax_sparse_mla.indices import TopkTransform, topk_positions, topk_transform
from jax_sparse_mla.indices.lookup import add_or_minus_one, page_slot_or_minus_one
from jax_sparse_mla.indices.topk.api import topk_reference

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
# Ties, both zeros, denormals of either sign, infinities, NaNs of either sign.
VALUES = np.array([0, -0.0, 1, -1, 2.5, 1e-42, -1e-42, np.inf, -np.inf, np.nan, -np.nan, 3e38, -3e38], np.float32)
KINDS = ("normal", "few values", "mostly zero", "ascending", "nan", "infinite", "spikes", "far from zero", "any bits")


@dataclasses.dataclass
class TopkCase:
    """Arguments of a call, as numpy arrays; the method is what the table or the offsets say."""

    logits: np.ndarray
    lengths: np.ndarray
    topk: int
    row_starts: np.ndarray | None = None
    page_table: np.ndarray | None = None
    page_size: int = 1
    row_to_request: np.ndarray | None = None
    offsets: np.ndarray | None = None


def make_logits(rng, rows, columns, kind) -> np.ndarray:
    normal = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "few values":
        return rng.choice(VALUES, (rows, columns))
    if kind == "mostly zero":
        return np.where(rng.random((rows, columns)) < 0.02, normal, rng.choice(VALUES[:2], (rows, columns)))
    if kind == "ascending":
        return np.sort(normal, axis=1)
    if kind == "nan":
        return np.where(rng.random((rows, columns)) < 0.01, normal, np.float32(np.nan))
    if kind == "infinite":
        return np.where(rng.random((rows, columns)) < 0.5, normal, np.float32(np.inf))
    if kind == "far from zero":  # many share their upper bits
        return normal + 12
    if kind == "any bits":
        return rng.integers(0, 2**32, (rows, columns), np.uint32).view(np.float32)
    if kind == "spikes":  # the largest stand side by side: what a sample is likeliest to misjudge
        normal[:, columns // 3 : columns // 2] += 1e6
    return normal


def hostile_ints(rng, rows, low, high) -> np.ndarray:
    values = rng.integers(low, high, rows)
    hostile = rng.choice([INT_MIN, -7, INT_MAX, 0], rows)
    return np.where(rng.random(rows) < 0.15, hostile, values).astype(np.int32)


def make_case(seed, shape, kind, method, ragged_logits, dtype=np.float32) -> TopkCase:
    rng = np.random.default_rng(seed)
    rows, columns, topk = shape
    lengths = np.where(rng.random(rows) < 0.5, columns - rng.integers(0, 9, rows), rng.integers(0, columns + 9, rows))
    lengths = np.where(rng.random(rows) < 0.1, rng.choice([INT_MIN, -7, INT_MAX], rows), lengths).astype(np.int32)
    case = TopkCase(make_logits(rng, rows, columns, kind).astype(dtype), lengths, topk)
    if ragged_logits:
        case.row_starts = hostile_ints(rng, rows, -3, columns // 4)
    if method is TopkTransform.PAGED:
        case.page_size = int(rng.choice([1, 3, 64]))
        pages = columns // case.page_size
        case.page_table = rng.integers(0, INT_MAX // case.page_size, (3, max(pages, 1))).astype(np.int32)
        holes = rng.random(case.page_table.shape) < 0.2
        bad = np.array([-1, INT_MIN, INT_MAX, INT_MAX // case.page_size])
        case.page_table[holes] = rng.choice(bad, int(holes.sum()))
        case.row_to_request = hostile_ints(rng, rows, -1, 4)
    elif method is TopkTransform.RAGGED:
        case.offsets = rng.choice(np.array([0, 1, 77, INT_MAX, INT_MAX - 3000, -1, INT_MIN], np.int32), rows)
    return case


def method_of(case: TopkCase) -> TopkTransform | None:
    if case.page_table is None and case.offsets is None:
        return None
    return TopkTransform.RAGGED if case.page_table is None else TopkTransform.PAGED


def run_jax(case: TopkCase):
    logits, lengths = jnp.asarray(case.logits), jnp.asarray(case.lengths)
    if (method := method_of(case)) is None:
        return topk_positions(logits, lengths, case.topk, case.row_starts)
    optional = {"row_starts": case.row_starts, "page_table": case.page_table, "row_to_request": case.row_to_request}
    optional |= {"page_size": case.page_size, "topk_indices_offset": case.offsets}
    return topk_transform(logits, lengths, case.topk, method=method, **optional)


plain_positions = on_the_cpu(topk_reference, static_argnames="topk")
plain_add, plain_slot = on_the_cpu(add_or_minus_one), on_the_cpu(page_slot_or_minus_one, static_argnums=3)


def expected(case: TopkCase) -> np.ndarray:
    """The plain function's positions, transformed."""
    positions = np.asarray(plain_positions(case.logits, case.lengths, topk=case.topk, row_starts=case.row_starts))
    if case.offsets is not None:
        return np.asarray(plain_add(positions, case.offsets[:, None]))
    if case.page_table is not None:
        row = np.arange(len(positions), dtype=np.int32) if case.row_to_request is None else case.row_to_request
        return np.asarray(plain_slot(case.page_table, row[:, None], positions, case.page_size))
    return positions


def assert_selected(got, case: TopkCase) -> None:
    """Ascending positions, holes in their places."""
    np.testing.assert_array_equal(got, expected(case))

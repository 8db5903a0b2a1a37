"""The sanitiser of FlashMLA's index tables: the kernel against numpy, in Triton's interpreter or on the GPU."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ON_GPU = jax.default_backend() == "gpu"
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it decides what @triton.jit makes

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attention_oracle import INT_MAX, INT_MIN, hostile, sinks

from jax_sparse_mla.attention.backends.flashmla import sanitise_reference
from jax_sparse_mla.attention.triton import sanitise as kernels

pytestmark = pytest.mark.torch
DEVICE = "cuda" if ON_GPU else "cpu"
POISON = 77
HEADS = 64


def expected(indices, lengths, num_slots, width):
    """Literally: entry by entry."""
    rows, topk = indices.shape
    out = np.full((rows, width), -1, np.int32)
    spans = np.full(rows, topk) if lengths is None else np.array([max(0, min(int(n), topk)) for n in lengths])
    for row in range(rows):
        for column in range(spans[row]):
            if 0 <= indices[row, column] < num_slots:
                out[row, column] = indices[row, column]
    return out, spans


def table(rng, rows: int, topk: int, num_slots: int, with_lengths: bool):
    indices = rng.integers(0, max(num_slots, 1), (rows, topk), dtype=np.int32)
    holes = rng.random((rows, topk)) < 0.4
    indices[holes] = hostile(rng, int(holes.sum()), num_slots)
    lengths = None
    if with_lengths:
        choices = np.array([INT_MIN, -1, 0, 1, topk // 2, topk, topk + 1, INT_MAX], np.int32)
        lengths = rng.choice(choices, rows)
    return indices, lengths, num_slots, -(-topk // 64) * 64


def launch(rows: int, tables, sink):
    """The kernel over one or two tables, into poisoned outputs with room behind that must stay as it is."""
    absent = (np.zeros((rows, 1), np.int32), None, 0, 0)
    arguments, outputs, scalars = [], [], []
    for indices, lengths, num_slots, width in [*tables, absent][:2]:
        on_device = torch.from_numpy(indices).to(DEVICE)
        arguments += [on_device, on_device if lengths is None else torch.from_numpy(lengths).to(DEVICE)]
        scalars.append(num_slots)
        size = rows * width + 64
        outputs += [torch.full((n,), POISON, dtype=torch.int32, device=DEVICE) for n in (size, rows + 64)]
    has_sink = sink is not None
    sink = torch.from_numpy(sink if has_sink else np.zeros(1, np.float32)).to(DEVICE)
    outputs.append(torch.full((HEADS + 64,), POISON, dtype=torch.float32, device=DEVICE))
    widths = [t[3] for t in tables] + [0] * (2 - len(tables))
    constants = {"TOPK": tables[0][0].shape[1], "WIDTH": widths[0], "HAS_LENGTHS": tables[0][1] is not None}
    constants |= {
        "STRIDE": tables[0][0].shape[1],
        "EXTRA_TOPK": tables[-1][0].shape[1],
        "EXTRA_STRIDE": tables[-1][0].shape[1],
        "EXTRA_WIDTH": widths[1],
        "HAS_EXTRA_LENGTHS": tables[-1][1] is not None,
        "HEADS": HEADS,
        "HAS_SINK": has_sink,
        "LEAST_SINK": -1e30,
        "ROWS_PER_LENGTH": 1,
    }
    kernels.sanitise_kernel[kernels.grid(rows, *widths)](
        *arguments, sink, rows, *scalars, len(sink), *outputs, **constants, **kernels.OPTIONS
    )
    return [x.cpu().numpy() for x in outputs], widths


@pytest.mark.long
@given(
    rows=st.sampled_from([1, 5, 9]),
    topk=st.sampled_from([1, 64, 100, 300]),
    extra_topk=st.sampled_from([None, 2, 64, 520]),
    num_slots=st.sampled_from([0, 7, 640, INT_MAX - 1]),
    lengths=st.tuples(st.booleans(), st.booleans()),
    heads=st.sampled_from([None, 1, 48, 64]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_both_tables_equal_the_rule(rows, topk, extra_topk, num_slots, lengths, heads, seed):
    rng = np.random.default_rng(seed)
    tables = [table(rng, rows, topk, num_slots, lengths[0])]
    if extra_topk is not None:
        tables.append(table(rng, rows, extra_topk, 64, lengths[1]))
    sink = None if heads is None else sinks(rng, heads)
    (*outputs, out_sink), widths = launch(rows, tables, sink)
    for given_table, out, out_lengths, width in zip(tables, outputs[::2], outputs[1::2], widths):
        wanted, spans = expected(*given_table)
        np.testing.assert_array_equal(out[: rows * width].reshape(rows, width), wanted)
        assert np.all(out[rows * width :] == POISON)
        had_lengths = given_table[1] is not None
        np.testing.assert_array_equal(out_lengths[:rows], spans if had_lengths else np.full(rows, POISON))
        assert np.all(out_lengths[rows:] == POISON)
        plain, plain_lengths = sanitise_reference(
            jax.device_put(given_table[0]), jax.device_put(given_table[1]) if had_lengths else None, *given_table[2:]
        )
        np.testing.assert_array_equal(plain, wanted)
        assert (plain_lengths is None) if not had_lengths else np.array_equal(plain_lengths, spans)
    wanted = np.full(HEADS + 64, POISON, np.float32)
    if sink is not None:
        wanted[:HEADS] = np.append(np.maximum(sink, np.float32(-1e30)), np.zeros(HEADS - heads, np.float32))
    np.testing.assert_array_equal(out_sink, wanted)

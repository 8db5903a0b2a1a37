"""The published case tables, their data and float64 oracle, and the runner that remembers what passed."""

from __future__ import annotations

import collections
import dataclasses
import re

import numpy as np
import pytest
from flashmla_cases import DecodeShape, PrefillShape, TableShape, decode_table, prefill_table

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import attention_oracle
import case_data

from benchmarks import cases

DECODES = [
    DecodeShape("grid", "V32_FP8", 3, 3, 2, TableShape(50, 24, 7)),
    DecodeShape("grid", "V4_FP8", 2, 5, 1, TableShape(40, 16, 64, True), TableShape(30, 40, 3, True)),
    DecodeShape("corner", "V4_FP8", 2, 4, 3, TableShape(20, 16, 5), TableShape(12, 8, 2), all_invalid=True),
    DecodeShape("corner", "V4_FP8", 2, 6, 2, TableShape(20, 16, 5), zero_tokens=True, varied=False, sink=False),
]
PREFILLS = [
    PrefillShape("feature", 512, 3, 9, 40, 24, sink=True, lengths=True),
    PrefillShape("corner", 576, 2, 6, 8, 32, sink=True, lengths=True, all_invalid=True),
    PrefillShape("regular", 576, 2, 1, 16, 16),
]
SHAPES = pytest.mark.parametrize("shape", DECODES + PREFILLS, ids=lambda shape: shape.id)


# --- the tables -----------------------------------------------------------------------------------


def test_the_tables_have_the_published_numbers_of_cases():
    decode, prefill = decode_table(), prefill_table()
    assert collections.Counter(shape.table for shape in decode) == {"grid": 3680, "corner": 1036, "performance": 32}
    assert sum(shape.layout == "V32_FP8" and shape.table != "performance" for shape in decode) == 240
    tables = {"regular": 120, "feature": 224, "corner": 36, "performance": 13}
    assert collections.Counter(shape.table for shape in prefill) == tables
    assert len({shape.id for shape in decode + prefill}) == len(decode + prefill)


# --- data and oracle ------------------------------------------------------------------------------


def numpy_of(x: torch.Tensor | None) -> np.ndarray | None:
    if x is None:
        return None
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(attention_oracle.BF16)
    return x.numpy()


def by_the_other_oracle(call: case_data.Call) -> tuple[np.ndarray, ...]:
    """The loops in numpy over the caches' bytes."""
    names = {"softmax_scale": call.softmax_scale, "attn_sink": numpy_of(call.attn_sink), "name": "small"}
    first = call.keys[0]
    if call.q.ndim == 3:
        arrays = {"q": call.q, "kv": first.rows, "indices": first.indices, "topk_length": first.lengths}
        arrays = {name: numpy_of(x) for name, x in arrays.items()}
        return attention_oracle.prefill_oracle(attention_oracle.PrefillCase(**arrays, **names))
    arrays = {"q": numpy_of(call.q)}
    for prefix, keys in zip(("", "extra_"), call.keys):
        data = numpy_of(keys.data)
        rows = attention_oracle.unpack_cache(keys.layout.name, keys.page_size, data)
        arrays[f"{prefix}cache"] = attention_oracle.HostCache(keys.layout.name, keys.page_size, data, rows)
        arrays[f"{prefix}indices"], arrays[f"{prefix}topk_length"] = numpy_of(keys.indices), numpy_of(keys.lengths)
    out, lse = attention_oracle.decode_oracle(attention_oracle.DecodeCase(**arrays, **names))
    return out, None, lse


@SHAPES
def test_the_oracle_equals_numpy_loops_over_the_bytes(shape, monkeypatch):
    call = case_data.make_call(shape, "cpu")
    columns = sum(keys.indices.shape[-1] for keys in call.keys)
    monkeypatch.setattr(case_data, "CHUNK", 2 * columns * call.q.shape[-1])  # two rows at a time
    chunks = list(case_data.oracle(call))
    assert len(chunks) == -(-call.q.shape[:-2].numel() // 2)
    for actual, expected in zip((torch.cat(x) for x in list(zip(*chunks))[1:]), by_the_other_oracle(call)):
        if expected is not None:
            np.testing.assert_allclose(actual.numpy(), expected.reshape(actual.shape), rtol=1e-9, atol=1e-12)


def rounded(call: case_data.Call) -> tuple[torch.Tensor, ...]:
    """What a perfect kernel gives."""
    _, out, top, lse = (x if isinstance(x[0], slice) else torch.cat(x) for x in zip(*case_data.oracle(call)))
    lead = call.q.shape[:-1]
    out = out.bfloat16().view(*lead, 512)
    top, lse = (x.float().view(lead) for x in (top, lse))
    return (out, lse) if call.q.ndim == 4 else (out, top, lse)


@pytest.mark.parametrize("defect", ("scale", "nan", "empty lse", "zero", "one element", "shape"))
def test_comparison_refuses_what_is_wrong(defect):
    shape = DECODES[3]
    call = case_data.make_call(shape, "cpu")
    out, lse = rounded(call)
    empty = torch.isneginf(lse)
    assert empty.any() and not empty.all()
    if defect == "scale":
        lse = lse * 1.001
    elif defect == "nan":
        out[~empty] = torch.nan
    elif defect == "empty lse":  # FlashMLA's own convention
        lse = lse.masked_fill(empty, torch.inf)
    elif defect == "zero":
        out[empty] = 1e-30
    elif defect == "one element":
        at = tuple(torch.nonzero(out.abs() > 0.01)[0])
        out[at] *= 1.05
    else:
        with pytest.raises(AssertionError, match="shape"):
            case_data.compare(call, (out[..., :448], lse))
        return
    assert case_data.compare(call, (out, lse))[1]


# A published case, unvaried.
LONG_ROWS = DecodeShape("grid", "V4_FP8", 64, 4, 1, TableShape(2046, 2048, 64), varied=False)


def without_a_key(call: case_data.Call, row: int) -> case_data.Call:
    """The call whose row has 2,046 keys, without the first of them."""
    (keys,) = call.keys
    (columns,) = torch.nonzero(case_data._scanned(keys, len(keys.rows))[row, 0], as_tuple=True)
    assert len(columns) == 2046
    indices = keys.indices.clone()
    indices[row, 0, columns[0]] = -1
    return dataclasses.replace(call, keys=[dataclasses.replace(keys, indices=indices)])


def test_a_row_that_lost_one_key_of_2046_is_refused():
    """FlashMLA's tolerances over the whole tensor let it through."""
    call = case_data.make_call(LONG_ROWS, "cpu")
    right = rounded(call)
    assert not case_data.compare(call, right)[1]
    row = int(case_data._scanned(call.keys[0], len(call.keys[0].rows)).sum(-1).argmax())
    lost = rounded(without_a_key(call, row))
    _, out, _, lse = (x if isinstance(x[0], slice) else torch.cat(x) for x in zip(*case_data.oracle(call)))
    for name, results, expected in (("out", (lost[0], right[1]), out), ("lse", (right[0], lost[1]), lse)):
        (wrong,) = case_data.compare(call, results)[1]
        # Every element passes; cos_diff sees one row of the 4 here, and would not of the 321 of other cases.
        also = r"(, cos_diff \S+)?" if name == "out" else ""
        assert re.fullmatch(rf"decode\.{name}: a row off by [\d.]+ times what it may be{also}", wrong)
        actual = results[0].float() if name == "out" else results[1]
        with pytest.raises(AssertionError, match=rf"decode\.{name}: \d+ of 256 rows off; first \[{row}, "):
            attention_oracle.assert_close_rows(actual.view(expected.shape).numpy(), expected.numpy(), f"decode.{name}")


# --- the runner -----------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("shape", (DECODES[1], PREFILLS[0]), ids=lambda shape: shape.id)
def test_the_reference_passes_through_jit(shape):
    entry = cases.run_case(cases.Task(shape, "jit"), "reference", "cpu")
    assert entry["verdict"] == "passed", entry
    assert set(entry["errors"]) == ({"out", "lse"} if shape is DECODES[1] else {"out", "max_logits", "lse"})

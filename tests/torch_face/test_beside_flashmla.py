"""Which calls an engine's FlashMLA keeps: the rule over made-up times, the table that it reads, and how it is made."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("torch")

from attention_calls import H200
from sparse_mla_torch.attention import beside_flashmla
from sparse_mla_torch.attention.beside_flashmla import measured_ratio, why_flashmla_alone

from benchmarks import beside_flashmla as benchmark
from jax_sparse_mla.attention.backend import BACKENDS, PHASES, Call
from jax_sparse_mla.kv_cache import KVLayout

pytestmark = pytest.mark.torch

MADE_UP = {
    "families": [
        {
            **{"phase": "decode", "layout": "V4_FP8", "columns": 1152, "extra_page_size": 64},
            "times": {"128": [[1, 20, 10], [4, 5, 10], [4, 6, 10], [16, 20, 10]], "64": [[8, 30, 10]]},
        },
        {
            **{"phase": "decode", "layout": "V4_FP8", "columns": 1152, "extra_page_size": 2},
            "times": {"128": [[8, 9.7, 10]]},
        },
        {
            **{"phase": "prefill", "layout": "V4_BF16", "columns": 512, "extra_page_size": None},
            "times": {"64": [[1, 30, 20], [32, 18, 20], [256, 30, 20]]},
        },
    ]
}


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    table = tmp_path / "table.json"
    table.write_text(json.dumps(MADE_UP))
    monkeypatch.setattr(beside_flashmla, "TABLE", table)
    beside_flashmla.families.cache_clear()
    yield
    beside_flashmla.families.cache_clear()


def decode(rows: int, heads: int = 128, columns: int = 1152, page_size: int | None = 64) -> Call:
    return Call("decode", KVLayout.V4_FP8, rows, heads, H200, columns, extra_page_size=page_size)


def prefill(rows: int, heads: int = 64, columns: int = 512) -> Call:
    return Call("prefill", KVLayout.V4_BF16, rows, heads, H200, columns)


@pytest.mark.parametrize(
    ("call", "ratio"),
    [
        (decode(1), 2),
        (decode(4), 0.5),  # the least of two
        (decode(2), 1),  # half way between 1 and 4
        (decode(16), 2),
        (decode(1000), 2),
        (decode(0), 2),
        (decode(4, heads=65), 0.5),  # padded to 128
        (decode(4, heads=16), 3),
        (decode(4, heads=192), None),
        (decode(4, page_size=2), 0.97),
        (decode(4, page_size=16), 0.5),
        (decode(4, page_size=None), None),  # one cache
        (decode(4, columns=2304), None),
        (decode(4, columns=2303), 0.5),
        (decode(4, columns=576), None),
        (decode(4, columns=0), None),
        (prefill(32), 0.9),
        (prefill(32, columns=640), 0.9),
        (prefill(32, columns=128), 0.9),
        (prefill(32, heads=128), None),
        (Call("prefill", KVLayout.V32_BF16, 32, 64, H200, 512), None),
        (Call("decode", KVLayout.V4_FP8, 4, 128, H200, None, extra_page_size=64), None),
    ],
)
def test_a_ratio_is_that_of_the_nearest_that_were_measured(made_up, call, ratio):
    found = measured_ratio(call)
    assert found == ratio if ratio is None else math.isclose(found, ratio)


def test_calls_that_flashmla_does_sooner_are_left(made_up):
    left = [rows for rows in (1, 8, 24, 32, 64, 256, 4096) if why_flashmla_alone(prefill(rows), "hopper")]
    assert left == [24, 32]
    assert why_flashmla_alone(decode(4), "hopper") == "FlashMLA's decode takes 0.50 of our time for 4 rows of 128 heads"
    # By 2% at least.
    assert why_flashmla_alone(decode(8, page_size=2), "hopper")
    assert not why_flashmla_alone(decode(2), "hopper")


@pytest.mark.parametrize(
    ("phase", "layout", "heads", "topk", "backend", "is_left"),
    [
        ("decode", "V4_FP8", 64, 640, "triton", True),  # 10.9 and 12.2 in a graph, but V3.2's 18.3 and 16.9
        ("decode", "V32_FP8", 128, 2048, "triton", True),
        ("decode", "V4_FP8", 192, 640, "triton", False),  # FlashMLA takes no such heads
        ("decode", "V4_FP8", 64, 640, "flashmla", True),
        ("decode", "V4_BF16", 64, 640, "hopper", False),  # nor such rows
        ("prefill", "V4_BF16", 64, 640, "triton", True),
    ],
)
def test_calls_of_other_backends_are_left_to_flashmla(phase, layout, heads, topk, backend, is_left):
    call = Call(phase, getattr(KVLayout, layout), 4, heads, H200, topk)
    assert (why_flashmla_alone(call, backend) is not None) == is_left


def test_the_table_is_one_that_the_command_writes():
    text = beside_flashmla.TABLE.read_text()
    families = json.loads(text)["families"]
    assert benchmark.table(families) == text
    measured = {
        benchmark.name_of(family): family for of_phase in benchmark.FAMILIES.values() for family, _ in of_phase()
    }
    for family in families:
        assert family.items() >= measured[benchmark.name_of(family)].items() and {"device", "commit"} <= family.keys()
        call = Call(family["phase"], getattr(KVLayout, family["layout"]), 1, 64, H200)
        assert family["phase"] in PHASES and not BACKENDS["flashmla"].cannot(call)
        for heads, times in family["times"].items():
            assert int(heads) > 0 and times and all(min(numbers) > 0 for numbers in times)


@pytest.mark.parametrize("heads", [64, 128])
def test_window_layers_are_measured_in_small_steps(heads):
    """V4's layers of one cache and 128 columns: FlashMLA was faster for some rows, which the table must tell apart."""
    (family,) = (x for x in benchmark.decode_families() if x[0]["model"] == "V4 window")
    facts, measures = family
    assert facts["columns"] == 128 and facts["extra_page_size"] is None
    assert {rows for of_heads, rows in measures if of_heads == heads} == {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256}
    for rows in (1, 48, 128):
        (measure,) = measures[heads, rows]
        (case,) = measure.args
        assert (case.heads, case.batch * case.q_len, case.columns) == (heads, rows, (128,)) and len(case.layouts) == 1


def test_a_part_that_is_measured_again_renews_its_rows_alone():
    family = {"model": "V4", "phase": "prefill", "layout": "V4_BF16", "columns": 640, "extra_page_size": None}
    before = [family | {"device": "a", "commit": "b", "times": {"64": [[1, 2, 3], [4, 5, 6]], "8": [[1, 1, 1]]}}]
    assert benchmark.renewed(family, {}, before) == before[0] and benchmark.renewed(family, {}, []) is None
    rows = {(64, 4): [{"peer_us": 7, "ours_us": 8}, {"peer_us": 9, "ours_us": 9}], (64, 1): [{"failed": "why"}]}
    found = benchmark.renewed(family, rows, before)
    assert found["times"] == {"64": [[1, 2, 3], [4, 7, 8], [4, 9, 9]], "8": [[1, 1, 1]]} and found["device"] != "a"

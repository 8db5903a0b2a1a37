"""SGLang's layer beside ours, without SGLang: the rows of two processes, and stand-ins that refuse to compute."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from sparse_mla_torch.attention.beside_flashmla import why_flashmla_alone

from benchmarks import all as everything
from benchmarks import engines, engines_sglang, engines_vllm, record, tables
from benchmarks.absent import Absent, Missing
from benchmarks.engines import Captured, difference
from benchmarks.sglang import kit
from benchmarks.sglang.layer_calls import Recorder
from benchmarks.vllm import rows
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.hopper.decode_plan import sooner_than_prefill
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.layout import KVLayout


def test_a_row_has_both_sides_and_how_far_they_are_apart():
    theirs = {"a": {"output": torch.ones(4), "error": 0.02, "graph_us": 20.0}, "b": {"failed": "why"}}
    ours = {"a": {"output": torch.ones(4) * 1.5, "error": 0.03, "graph_us": 10.0, "served": {"f ours": 1}}}
    a, b = engines.rows(theirs, ours)
    assert a["apart"] == 0.5 and a["error"] == {"theirs": 0.02, "ours": 0.03} and a["served"] == {"f ours": 1}
    assert b["failed"] == {"theirs": "why"} and "apart" not in b
    lines = engines.table([a, b]).splitlines()
    assert "0.5000" in lines[1] and "20.0" in lines[1] and "why" in lines[2]


def test_an_eager_row_shows_what_the_gpu_worked_not_what_it_waited_for():
    side = {"eager_us": 900.0, "busy_us": 31.0, "host_us": 1000.0}
    (row,) = engines.rows({"mixed": side}, {"mixed": side})
    assert row["busy_us"] == {"theirs": 31.0, "ours": 31.0}
    assert "31.0" in engines.table([row]) and "900.0" not in engines.table([row])


def test_the_table_counts_all_that_ours_served_and_leaves_out_what_has_no_time(monkeypatch, tmp_path):
    def row(case, theirs, ours, who):
        error = {"theirs": 0.002, "ours": 0.002}
        return {"case": case, "served": {who: 1}, "error": error, "graph_us": {"theirs": theirs, "ours": ours}}

    found = [
        row("V4, served 8x8192, 16 heads", 30.0, 10.0, "flash_mla_sparse_fwd ours"),
        row("V4, decode, 16 heads", 9.0, 10.0, "flash_mla_with_kvcache ours"),
        row("V4, served 64x8192, 16 heads", 30.0, 60.0, "flash_mla_with_kvcache theirs"),
        {"case": "V3.2, served 8x8192, 16 heads", "served": {}, "failed": {"ours": "why"}},
    ]
    record = {"device": "a GPU", "commit": "abc"}
    monkeypatch.setattr(tables, "result", lambda _: record)
    for some, last in ((found, "takes 0.90 to 3.00 times"), (found[2:], "Our kernels served 0 of the 2 rows.")):
        record["rows"] = some
        lines = tables.vllm_layer().splitlines()
        assert last in lines[-1] and not any("V3.2" in line for line in lines)
    assert lines[2] == "| V4, 64 × 8192, 16 heads | 30.0 | 60.0 | 0.50 | 0.0020 and 0.0020 | FlashMLA's |"


def a_row(case="decode, ratio 4", served=f"{kit.DECODE} ours", **changes):
    error = {"theirs": 0.025, "ours": 0.025}
    return {"case": case, "served": {served: 1} if served else {}, "error": error, "graph_error": error} | changes


WELL = {"graph_error": {"theirs": 0.0, "ours": 0.0}}
OF_ROWS = WELL | {"error": {"theirs": 0.003, "ours": 0.003}}
OF_BF16 = "dsa_sparse_decode_long_prefix, flashmla_sparse, bf16"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (a_row(**WELL), None),
        (a_row("prefill, ratio 0", f"{kit.PREFILL} theirs", **WELL), None),
        (a_row(kit.LEFT[0], f"{kit.DECODE} theirs", **WELL), None),
        (a_row(served="", **WELL), "ours did not serve it"),
        (a_row(served=f"{kit.DECODE} theirs", **WELL), "ours did not serve it"),
        (a_row(served=f"{kit.PREFILL} refused", **WELL), "ours did not serve it"),
        (a_row(kit.LEFT[0], "", **WELL), "ours did not serve it"),
        (a_row(**WELL, skipped={"theirs": "no"}), "skipped"),
        (a_row(**WELL, failed={"ours": "no"}), "failed"),
        (a_row(**WELL | {"error": {"theirs": 0.025, "ours": 0.031}}), "error of ours is 0.031, above 0.03"),
        (a_row(**WELL | {"error": {"theirs": float("nan"), "ours": 0.025}}), "error of theirs is nan"),
        (a_row(**WELL | {"error": {"ours": 0.025}}), "a side has no error"),
        (a_row(), "graph_error of theirs"),
        (a_row("dsa_sparse_decode_long_prefix, flashmla_kv, bf16", **WELL), None),
        (a_row("dsa_sparse_decode_long_prefix, flashmla_kv, bf16", f"{kit.PREFILL} ours", **WELL), "did not serve"),
        (a_row(kit.DECODED[0], f"{kit.PREFILL} theirs", **OF_ROWS), "did not serve"),
        (a_row(kit.DECODED[0], f"{kit.PREFILL} ours", **OF_ROWS), None),
        (a_row(OF_BF16, f"{kit.PREFILL} ours", **OF_ROWS), "did not serve"),
        (a_row("x, flashmla_kv, fp8", **WELL | {"error": {"theirs": 0.066, "ours": 0.06}}), "theirs is 0.066"),
        (a_row(OF_BF16, f"{kit.PREFILL} theirs", **WELL), "error of theirs is 0.025, above 0.004"),
    ],
)
def test_a_row_that_shows_nothing_or_something_wrong_is_a_problem(row, why):
    found = kit.problem(row)
    assert found is None if why is None else why in found
    assert bool(engines.problems([row], kit.problem)) == (why is not None)
    made = next(part for part in everything.PARTS if part.name == f"sglang {kit.part_of(row['case'])}")
    assert made.whole({"rows": [row] * 200}) == (why is None)


@pytest.mark.parametrize(
    ("case", "served", "changes", "why"),
    [
        ("V4, ratio 4, decode, 16 heads", f"{kit.DECODE} ours", {}, None),
        ("V4, ratio 4, decode, 16 heads", f"{kit.DECODE} theirs", {}, "was wanted"),
        ("V4, ratio 1, served 64x8192, 64 heads", f"{kit.DECODE} theirs", {}, None),
        ("V3.2, served 8x8192, 128 heads", f"{kit.DECODE} theirs", {}, None),
        ("V3.2, served 64x8192, 16 heads", f"{kit.DECODE} theirs", {}, "was wanted"),
        ("V3.2, served 64x8192, 16 heads, bf16", f"{kit.PREFILL} ours", {}, None),
        ("V3.2, served 64x8192, 16 heads, bf16", f"{kit.PREFILL} theirs", {}, "was wanted"),
        ("V3.2, served 64x8192, 64 heads, bf16", f"{kit.PREFILL} theirs", {}, None),
        ("V3.2, mixed, 64 heads", f"{kit.PREFILL} theirs", {}, "was wanted"),
        ("V3.2, decode, 16 heads", f"{kit.DECODE} refused", {}, "was wanted"),
        ("V3.2, decode, 16 heads", "", {}, "was wanted"),
        ("V3.2, decode, 16 heads", f"{kit.DECODE} ours", {"error": {"ours": 0.002}}, "a side has no error"),
        ("V3.2, decode, 16 heads", f"{kit.DECODE} ours", {"error": {"theirs": 0.1, "ours": 0.002}}, "error of theirs"),
        ("V3.2, decode, 16 heads", f"{kit.DECODE} ours", {"failed": {"ours": "no"}}, "failed"),
    ],
)
def test_a_row_of_vllm_that_shows_nothing_or_something_wrong_is_a_problem(case, served, changes, why):
    good = {"error": {"theirs": 0.002, "ours": 0.002}, "graph_error": {"theirs": 0.0, "ours": 0.0}}
    found = rows.problem({"case": case, "served": {served: 1} if served else {}, **good, **changes})
    assert found is None if why is None else why in found


@pytest.mark.parametrize("wrong", [{}, {"served": {}}])
@pytest.mark.parametrize("command", [engines_sglang, engines_vllm])
def test_the_exit_code_says_whether_the_run_shows_something(command, wrong, monkeypatch, tmp_path):
    one = {"output": torch.ones(4), "error": 0.002, "served": {f"{kit.DECODE} ours": 1}}
    sides = {"theirs": one, "ours": one | wrong}
    monkeypatch.setattr(command, "run", lambda side, *_: engines.NOTHING | {"results": {"verify": sides[side]}})
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(record, "RESULTS", tmp_path)  # whose rows stay where this very code made the record
    monkeypatch.setattr(sys, "argv", ["a command"])
    assert command.main() == len(wrong)
    written = json.loads((tmp_path / command.RECORD).read_text())
    assert [row["case"] for row in written["rows"]] == ["verify"] and written["not_run"]
    monkeypatch.setattr(sys, "argv", ["a command", "--no-gpu"])
    (tmp_path / command.RECORD).unlink()
    assert command.main() == 0 and not (tmp_path / command.RECORD).exists()


def test_each_side_sees_the_first_gpu_only(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    code = "import os; raise SystemExit(int(os.environ['CUDA_VISIBLE_DEVICES']))"
    call = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **options: call([sys.executable, "-c", code], **options))
    assert engines_sglang.run("ours", tmp_path, [])["exit_status"] == 3


def test_what_our_plugin_leaves_to_flashmla_is_what_the_router_leaves():
    sizes = {f"{batch}x{context}": batch for batch, context in kit.SERVED}
    cases = {
        f"served {size}, ratio {ratio}": ("V4_FP8", rows, 64, 128 + {0: 0, 4: 512, 128: 64}[ratio])
        for size, rows in sizes.items()
        for ratio in (0, 4, 128)
    }
    cases |= {
        f"served {size}, {heads} heads, flashmla_kv, fp8": ("V32_FP8", rows, heads, kit.V32_TOPK)
        for size, rows in sizes.items()
        for heads in (128, 16)
    }
    left = [name for name, facts in cases.items() if is_left(*facts)]
    assert sorted(left) == sorted(kit.LEFT)
    decoded = [
        f"served {size}, {heads} heads, flashmla_sparse, bf16"
        for size, count in sizes.items()
        for heads in (128, 16)
        if sooner_than_prefill(count, max(heads, 64), kit.V32_TOPK, sm_count=132)  # SGLang pads them
    ]
    assert sorted(decoded) == sorted(kit.DECODED)


def is_left(layout: str, count: int, heads: int, topk: int) -> bool:
    """Whether our plugin leaves a decode to FlashMLA on an H200."""
    device = DeviceInfo("cuda", (9, 0), 132, 232_448)
    call = Call("decode", getattr(KVLayout, layout), count, heads, device, topk)
    return why_flashmla_alone(call, "hopper") is not None


def test_what_our_plugin_leaves_of_vllms_cases_is_what_the_router_leaves():
    left = [
        f"V3.2, {batch}, {heads} heads"
        for batch, count in {"decode": 3, "two tokens": 6, "mixed": 2}.items()
        for heads in (16, 64, 128)
        # Of fewer than 32 heads vLLM takes the tokens of all requests for one's.
        if is_left("V32_FP8", 152 if (batch, heads) == ("mixed", 16) else count, heads, 128)
    ]
    for size, count in {"8x8192": 8, "64x8192": 64}.items():
        for heads in (16, 64, 128):
            name = f"V3.2, served {size}, {heads} heads"
            left += [name] if is_left("V32_FP8", count, heads, 2048) else []
            left += [] if sooner_than_prefill(count, heads, 2048, sm_count=132) else [f"{name}, bf16"]
        left += [f"V4, ratio 1, served {size}, {h} heads" for h in (16, 64) if is_left("V4_FP8", count, h, 128)]
        left += [f"V4, ratio 4, served {size}, {h} heads" for h in (16, 64) if is_left("V4_FP8", count, h, 640)]
    assert sorted(left) == sorted(rows.LEFT)
    assert all(sooner_than_prefill(3, heads, 2048, sm_count=132) for heads in (16, 64, 128))


def test_the_list_of_parts_needs_no_torch():
    script = "import sys; sys.modules['torch'] = None; import benchmarks.all"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=everything.ROOT)


@pytest.fixture
def absent():
    finder = Absent(("some_absent_package",))
    sys.meta_path.append(finder)
    yield finder
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.startswith("some_absent_package")]:
        del sys.modules[name]


def test_what_is_of_an_absent_package_is_imported_and_listed_and_cannot_be_called(absent):
    module = importlib.import_module("some_absent_package.kernels")
    assert absent.imported == {"some_absent_package"}
    with pytest.raises(Missing, match=r"some_absent_package\.kernels\.matmul"):
        module.matmul(1, 2)


def test_a_stand_in_may_decorate_and_be_subclassed_while_a_module_is_imported(absent, tmp_path, monkeypatch):
    lines = ("import some_absent_package as x", "@x.jit", "def f():", "    return 1", "class C(x.Base):", "    pass")
    (tmp_path / "uses_it.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("uses_it")
    module.C()
    with pytest.raises(Missing):
        module.f()


def test_without_a_gpu_a_replay_calls_again():
    held = torch.zeros(2)
    captured = Captured(lambda: held + 1, gpu=False)
    held.fill_(4)
    captured.replay()
    assert captured.output.tolist() == [5, 5]


def test_a_case_that_fails_says_why_and_the_kit_s_tolerance_is_not_asked():
    class Case:
        in_graph, case, options = False, None, {}

        @staticmethod
        def function(testcase, case, device):
            torch.testing.assert_close(torch.zeros(3), torch.ones(3), atol=0, rtol=0)
            raise Missing("a kernel")

    found = Recorder(None).run(Case, "cpu")
    assert found["error"] == 1 and found["failed"] == "Missing: a kernel"
    assert difference(torch.full((3,), 2.0), torch.ones(3)) == 1


def test_parts_go_by_the_names_of_cases():
    names = {
        "kit dsv4_swa_extend": "kit",
        "decode, ratio 4": "kit",
        "graph: decode": "graph",
        "served 8x8192": "served",
    }
    assert {name: kit.Case(name, None, None, {}).part for name in names} == names

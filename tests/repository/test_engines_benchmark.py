"""SGLang's layer beside ours, without SGLang: the rows of two processes, and stand-ins that refuse to compute."""

from __future__ import annotations

import importlib
import sys

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from benchmarks import engines_sglang
from benchmarks.sglang import kit
from benchmarks.sglang.layer_calls import Captured, Recorder, difference
from benchmarks.sglang.loaded import Absent, Missing


def test_a_row_has_both_sides_and_how_far_they_are_apart():
    theirs = {"a": {"output": torch.ones(4), "error": 0.02, "graph_us": 20.0}, "b": {"failed": "why"}}
    ours = {"a": {"output": torch.ones(4) * 1.5, "error": 0.03, "graph_us": 10.0, "served": {"f ours": 1}}}
    a, b = engines_sglang.rows(theirs, ours)
    assert a["apart"] == 0.5 and a["error"] == {"theirs": 0.02, "ours": 0.03} and a["served"] == {"f ours": 1}
    assert b["failed"] == {"theirs": "why"} and "apart" not in b
    lines = engines_sglang.table([a, b]).splitlines()
    assert "0.5000" in lines[1] and "20.0" in lines[1] and "why" in lines[2]


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

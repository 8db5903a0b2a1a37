"""Which tests run nowhere: the list is as documented, and a test that joins it unlisted fails the run."""

import json

import run_record
from run_record import GPU_RUN, OTHER_RUNS, ROOT, UNRUN, differences, names, nodes, run_nowhere

A, B, C = "tests/a/test_a.py::Test::test_x[1-2]", "tests/a/test_a.py::Test::test_x[3]", "tests/b/test_b.py::test_y"
MODULE = "tests/c/test_c.py"
SUPPORT = ROOT / "tests" / "support"


def test_names_are_kept_by_file_and_function():
    found = names({A, B, C, MODULE})
    assert found["tests/a/test_a.py"] == {"Test::test_x": ["[1-2]", "[3]"]}
    assert nodes(found) == {A, B, C, MODULE}


def test_the_commit_may_be_given(monkeypatch):
    monkeypatch.setenv("COMMIT", "abc1234")
    assert run_record._commit() == "abc1234"
    monkeypatch.delenv("COMMIT")
    assert run_record._commit() != "abc1234"


def test_what_passed_on_a_gpu_does_not_run_nowhere():
    skipped = {A: "no GPU", B: "no GPU", C: "no nvcc", MODULE: "no package"}
    assert run_nowhere(skipped, {A, B}, {}) == {C: "no nvcc", MODULE: "no package"}  # a record without names
    gpu_run = {"passed": names({A, f"{MODULE}::test_z"})}
    assert run_nowhere(skipped, {A, B}, gpu_run) == {B: "no GPU", C: "no nvcc"}
    long_run = {"passed": names({C}), "skipped": {"its own reason": [B]}}
    assert run_nowhere(skipped, {A, B}, gpu_run, long_run) == {B: "its own reason"}


def test_the_list_is_neither_shorter_nor_longer():
    unrun = {A: "why", B: "why", C: "why"}
    assert not differences(unrun, {"why": ["tests/a/test_a.py::Test::test_x", C]})
    assert not differences(unrun, {"why": [A, B], "another": [C]})
    assert differences(unrun, {"why": [A, C]}) == [f"{B} runs nowhere (why)"]
    assert differences({C: "why"}, {"why": [A, C]}) == [f"{A} is listed as run nowhere, and is not"]


def test_the_list_names_tests_that_exist():
    for reason, entries in json.loads(UNRUN.read_text()).items():
        assert reason and entries
        for entry in entries:
            file, _, function = entry.partition("::")
            texts = [path.read_text() for path in (ROOT / file, *SUPPORT.glob("*.py"))]  # test classes that are shared
            name = function.partition("[")[0].split("::")[-1]
            assert any(f"def {name}(" in text for text in texts) or not function, entry


def test_what_the_list_names_passed_in_no_recorded_run():
    """The end of a whole run says so too; this is seen by whoever runs the tests of this folder after a new record."""
    listed = {entry for entries in json.loads(UNRUN.read_text()).values() for entry in entries}
    for path in (GPU_RUN, *OTHER_RUNS):
        ran = sorted(listed & nodes(json.loads(path.read_text()).get("passed", {})))
        assert not ran, path.name


def test_the_gpu_run_names_what_passed():
    """A record of before `--record` has no names."""
    recorded = json.loads(GPU_RUN.read_text())
    if "passed" in recorded:
        assert nodes(recorded["passed"]) and recorded["counts"]["failed"] == len(nodes(recorded.get("failed", {})))
        assert "NVIDIA" in recorded["device"]
    else:
        assert recorded["runs"]


SUITE = """
import pytest
@pytest.mark.parametrize("x", [1, 2])
def test_passes(x): pass
def test_skips(): pytest.skip("a reason")
@pytest.mark.gpu
def test_gpu(): pytest.skip("no GPU")
@pytest.mark.long
def test_long(): pass
"""


CONFTEST = """
from pathlib import Path
import run_record
run_record.missing_tools = lambda: []
def pytest_addoption(parser): parser.addoption("--record")
def pytest_configure(config):
    files = dict(gpu_run=Path("gpu.json"), other_runs=[Path("long.json")], unrun=Path("unrun.json"))
    config.pluginmanager.register(run_record.RunRecord(config, "cpu", **files))
"""


def test_a_run_is_recorded_and_judged(pytester, monkeypatch):
    """A suite of its own, in one process and in xdist's workers."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of the plugins only xdist
    two_workers = ["-p", "xdist.plugin", "-n", "2"]
    settings = {"testpaths": ["tests"], "markers": ["gpu: a GPU's", "long: takes long"], "pythonpath": [str(SUPPORT)]}
    settings["addopts"] = "-m 'not long'"  # what the settings leave out is no choice of a part
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\n{settings}\n")
    tests, unrun = pytester.mkdir("tests"), pytester.path / "unrun.json"
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_some.py").write_text(SUITE)
    (tests / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_package')\n")
    module = {"a package": ["tests/test_module.py"]}
    unrun.write_text(json.dumps(module | {"a reason": ["tests/test_some.py::test_skips"]}))
    done = pytester.runpytest_subprocess(*two_workers)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["tests/test_some.py::test_long runs nowhere (takes long)"])
    assert pytester.runpytest_subprocess("-m", "long", "--record=long.json").ret == 0
    for workers in ([], two_workers):
        assert pytester.runpytest_subprocess(*workers, "--record=record.json").ret == 0
        record = json.loads((pytester.path / "record.json").read_text())
        assert nodes(record["passed"]) == {f"tests/test_some.py::test_passes[{x}]" for x in (1, 2)}
        assert record["counts"] == {"passed": 2, "failed": 0, "skipped": 3}
        assert record["skipped"]["a reason"] == ["tests/test_some.py::test_skips"]

    unrun.write_text(json.dumps(module))
    done = pytester.runpytest_subprocess(*two_workers)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["tests/test_some.py::test_skips runs nowhere (a reason)"])
    for part in (["tests/test_some.py"], ["-m", "not gpu"]):  # a part of the suite is not judged
        assert pytester.runpytest_subprocess(*part).ret == 0

"""What stands beside the figures: the code they are of, which parts are left, README's tables, peers or why not."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
import types

import pytest
from run_record import OTHER_RUNS

from benchmarks import all as everything
from benchmarks import peers, record, suite, tables

# --- README ----------------------------------------------------------------------------------------


def test_the_documents_figures_are_those_of_the_results():
    texts = [path.read_text() for path in tables.PAGES]
    assert [tables.rewritten(text) for text in texts] == texts, "run python -m benchmarks.tables"
    shown = [name for text in texts for _, name, _ in tables._BLOCK.findall(text)]
    assert sorted(shown) == sorted(tables.BLOCKS)


@pytest.fixture
def results(monkeypatch, tmp_path):
    """A folder of results that README's tables are made of."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.result.cache_clear()
    yield lambda name, **content: record.write_json(tmp_path / f"{name}.json", {"commit": "abc", **content})
    tables.result.cache_clear()


def test_a_row_says_who_is_faster_and_what_was_not_measured(results, monkeypatch):
    def row(case, ours, times, **missing):
        best = min(times, key=times.get, default=None)
        return {"case": case, "ours": {"jax": ours}, "peers": times, "best_peer": best, "not_measured": missing}

    found = [
        row("a", 4.0, {"sglang": 3.0}),
        row("b", 1000.0, {"flashinfer": 12_345.0}),
        row("c", 2.0, {}, sglang="why"),
    ]
    results("op", rows=found, versions={"sglang": "0.5.23"})
    same = [tables.Row("one", "op", ("a",), "jax"), tables.Row("two", "op", ("a", "b"), "jax")]
    monkeypatch.setattr(
        tables, "ROWS", (*same, tables.Row("three", "op", ("c",), "jax"), tables.Row("four", "op", ("d",)))
    )
    lines = tables.operations().splitlines()
    assert lines[2:6] == [
        "| one | SGLang 3.0 | 4.0 | 0.75 |",
        "| two | SGLang 3.0 / FlashInfer 12,345 | 4.0 / 1,000 | 0.75 / 12 |",
        "| three | SGLang not measured | 2.0 | – |",
        "| four | not measured | not measured | – |",
    ]
    assert lines[-1] == "Of commit abc; SGLang 0.5.23."


def test_a_served_row_says_what_was_measured_or_why_not(results):
    percentiles = {"p50": 5.04}
    row = {
        "requests": 8,
        "context": 2048,
        "first_token_ms": percentiles,
        "tokens_per_s": 1234.5,
        "token_ms": percentiles,
    }
    row |= {"step_ms": 6.0, "step_gpu_ms": 4.0, "attention_share": 0.25, "problem": None}
    failed = dict.fromkeys(row) | {"requests": 64, "context": 2048, "problem": "does not fit"}
    run = {"preset": "v4", "context": 2048, "commit": "def", "rows": [row, failed]}
    runs = [run, *({"preset": "v32", "context": 2048, "commit": commit, "rows": []} for commit in ("def", "abc"))]
    results("serving", runs=runs)
    assert tables.served().splitlines()[2:] == [
        "| v4 | 2,048 | 8 | 5.0 | 1,234 | 5.04 | 6.00, 4.00 | 1.50 | 25% |",
        "| v4 | 2,048 | 64 | does not fit | – | – | – | – | – |",
        "",
        "Commit def; v32 at 2,048: abc.",
    ]


def test_every_block_can_do_without_results(results):
    for block in tables.BLOCKS.values():
        assert block()


def test_a_suite_s_record_is_in_readme_s_sentence(results):
    counts = {"passed": 3303, "failed": 1, "skipped": 7}
    results("h200_tests", counts=counts, seconds=239, device="NVIDIA H100 80GB HBM3")
    results("vllm_tests", counts=counts, versions={"vllm": "0.33.0"})
    assert "on an H100, of commit abc: 3,303 passed, 1 failed, 7 skipped" in tables.suite()
    assert "with vLLM 0.33.0 on a CPU, of commit abc: 3,303 passed, 1 failed, 7 skipped." in tables.suite()


# --- of which code ---------------------------------------------------------------------------------


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A copy of some of the code, in which files can be changed."""
    for name in ("jax_sparse_mla/models.py", "kernels_cuda/sm90.cuh", "benchmarks/run.py", "benchmarks/tables.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(record.ROOT / name, tmp_path / name)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.delenv("OUT", raising=False)

    def digest():
        record.code_digest.cache_clear()
        return record.code_digest()

    yield tmp_path, digest
    record.code_digest.cache_clear()


def test_the_digest_changes_with_the_code_and_with_nothing_else(checkout):
    root, digest = checkout
    before = digest()
    assert len(before) == 12 and before == digest()
    for name in ("README.md", "benchmarks/results/step.json", "benchmarks/tables.py", "jax_sparse_mla/models.pyc"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("changed")
        assert digest() == before, name
    for name in ("jax_sparse_mla/models.py", "kernels_cuda/sm90.cuh", "benchmarks/run.py", "interop/new.c"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("changed")
        assert digest() != before, name
        before = digest()


def test_results_of_other_code_are_not_continued(checkout):
    _, digest = checkout
    record.write_json(record.results_folder() / "x.json", {"code": digest(), "rows": [1]})
    assert record.earlier("x.json")["rows"] == [1] and record.earlier("y.json") == {}
    record.write_json(record.results_folder() / "x.json", {"code": "another", "rows": [1]})
    assert record.earlier("x.json") == {} and record.latest("x.json")["rows"] == [1]


def test_the_commit_may_be_given(monkeypatch):
    record.commit.cache_clear()
    monkeypatch.setenv("COMMIT", "abc1234")
    assert record.environment()["commit"] == "abc1234" and record.environment()["code"] == record.code_digest()
    record.commit.cache_clear()


# --- all parts -------------------------------------------------------------------------------------

_PROGRAM = """
import json, os, sys, time
from benchmarks.record import environment, results_folder, write_json
name, sleep, code = sys.argv[1:]
write_json(results_folder() / f"{name}.json", environment() | {"cases": int(time.sleep(float(sleep)) or 3)})
sys.exit(int(code))
"""


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Runs `benchmarks.all` over parts that only write a file each; returns its exit code."""
    program = tmp_path / "fake" / "part_for_tests.py"
    program.parent.mkdir()
    program.write_text(_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(program.parent))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(everything, "draw", lambda: None)
    monkeypatch.setattr(everything, "gpu_names", lambda: ["0"])
    popen = everything.subprocess.Popen

    def start(command, **options):
        return popen([part.replace("benchmarks.part", "part") for part in command], **options)

    monkeypatch.setattr(everything.subprocess, "Popen", start)

    def run(*arguments, **found):
        made = [everything.Part(n, f"{n}.json", f"part_for_tests {n} {sleep} {code}", 1) for n, sleep, code in PARTS]
        monkeypatch.setattr(everything, "PARTS", tuple(made))
        monkeypatch.setattr(sys, "argv", ["all", *arguments])
        return everything.main()

    return run


PARTS = (("first", 0, 0), ("slow", 60, 0), ("failing", 0, 3))


@pytest.mark.long
def test_a_second_call_goes_on_where_the_first_stopped(parts, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(everything, "MARGIN", 0)
    assert parts("--budget-seconds", "4") == 1
    printed = capsys.readouterr().out
    assert "first: exit code 0" in printed and "slow: stopped" in printed and "failing: takes about" in printed
    ledger = json.loads((tmp_path / "out" / "all.json").read_text())
    assert set(ledger["parts"]) == {"first"} and ledger["commit"] == "abc"
    monkeypatch.setitem(globals(), "PARTS", (("first", 0, 0), ("slow", 0, 0), ("failing", 0, 3)))
    assert parts() == 0
    printed = capsys.readouterr().out
    assert "first: exit" not in printed and "slow: exit code 0" in printed and "failing: exit code 3" in printed
    assert "made, but exit code 3" in printed
    assert parts("--list") == 0 and "left: about 0 minutes" in capsys.readouterr().out


def test_what_a_part_took_is_known_for_other_code_too(parts, monkeypatch, tmp_path):
    before = {"first": {"seconds": 7.5, "exit_code": 0}, "slow": {"seconds": 9.0, "exit_code": 0}}
    record.write_json(tmp_path / "all.json", {"code": "another", "parts": before})
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    monkeypatch.setitem(globals(), "PARTS", (("first", 0, 0), ("failing", 0, 3)))
    assert parts() == 0
    ledger = everything.Ledger()
    first, slow, failing = (everything.Part(name, "", "", 1) for name in ("first", "slow", "failing"))
    assert ledger.takes(first) != 7.5 and ledger.takes(slow) == 9.0 and ledger.takes(failing) == 1
    assert ledger.takes(first._replace(by_case=True)) == 1


def test_a_part_that_was_stopped_comes_after_the_others(parts, monkeypatch, capsys):
    monkeypatch.setattr(everything, "MARGIN", 0)
    monkeypatch.setattr(everything, "PIECE", 0)
    monkeypatch.setitem(globals(), "PARTS", (("slow", 60, 0), ("last", 0, 0)))
    assert parts("--budget-seconds", "1") == 1 and "slow: stopped" in capsys.readouterr().out
    monkeypatch.setitem(globals(), "PARTS", (("slow", 0, 0), ("last", 0, 0)))
    assert parts() == 0
    printed = capsys.readouterr().out
    assert printed.index("last: exit code 0") < printed.index("slow: exit code 0")


def test_files_of_other_code_are_replaced_only_when_told(parts, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(globals(), "PARTS", (("first", 0, 0),))
    record.write_json(record.results_folder() / "first.json", {"commit": "old", "code": "another"})
    assert parts() == 2 and "files of other code: first.json" in capsys.readouterr().out
    assert parts("--list") == 0 and "of other code, old" in capsys.readouterr().out
    assert parts("--replace") == 0
    assert json.loads((tmp_path / "out" / "first.json").read_text())["code"] == record.code_digest()


@pytest.mark.parametrize("same_file", [False, True])
def test_parts_share_the_gpus_and_no_two_write_one_file(monkeypatch, same_file):
    running, most, seen, lock, shares = set(), 0, [], threading.Lock(), {}
    monkeypatch.setattr(everything.os, "sched_getaffinity", lambda _: {2, 3, 5, 7})

    def run(part, limit, gpu=None, cores=()):
        nonlocal most
        with lock:
            assert gpu not in running
            running.add(gpu)
            shares[gpu] = list(cores)
            most = max(most, len(running))
        time.sleep(0.05)
        with lock:
            running.remove(gpu)
            seen.append((part.name, gpu))
        return 0, 1.0

    monkeypatch.setattr(everything, "run", run)
    ledger = types.SimpleNamespace(add=lambda *_: None, takes=lambda part: part.seconds)
    parts = [everything.Part(str(n), "same.json" if same_file else f"{n}.json", "module", 1) for n in range(6)]
    everything.make(parts, ledger, float("inf"), ["0", "1"], parts[0])
    assert most == (1 if same_file else 2) and sorted(name for name, _ in seen) == [part.name for part in parts]
    assert shares in ({"0": [2, 3], "1": [5, 7]}, {"0": [2, 3]}, {"1": [5, 7]})
    seen.clear()
    everything.make(parts, ledger, float("inf"), ["0"], parts[0])
    assert seen == [(part.name, None) for part in parts] and shares[None] == []
    seen.clear()
    long = [everything.Part(str(n), f"{n}.json", "module", 10_000) for n in range(6)]
    everything.make(long, ledger, time.monotonic() + 100, ["0", "1"], long[0])
    assert [name for name, _ in seen] == ["0"]  # the first one of a call runs though it may not end
    seen.clear()
    everything.make(long, ledger, time.monotonic() + 100, ["0", "1"], everything.Part("of another kind", "", "", 1))
    everything.make(parts, ledger, -float("inf"), ["0", "1"], parts[0])
    assert not seen


@pytest.mark.parametrize(
    ("gpus", "pairs"),
    [(["0"], [None]), (["0", "1"], ["0,1"]), (["a", "b", "c", "d"], ["a,b", "c,d"])],
    ids=["one", "two", "four"],
)
def test_a_part_of_two_gpus_has_both_for_itself(monkeypatch, gpus, pairs):
    busy, began, lock = set(), [], threading.Lock()
    monkeypatch.setattr(everything.os, "sched_getaffinity", lambda _: set(range(8)))

    def run(part, limit, gpu=None, cores=()):
        used = set((gpu or "all").split(","))
        with lock:
            assert not busy & used and len(cores) == (8 // len(gpus) * len(used) if gpu else 0)
            busy.update(used)
            began.append((part.name, gpu))
        time.sleep(0.05)
        with lock:
            busy.difference_update(used)
        return 0, 1.0

    monkeypatch.setattr(everything, "run", run)
    ledger = types.SimpleNamespace(add=lambda *_: None, takes=lambda part: part.seconds)
    parts = [everything.Part(str(n), f"{n}.json", "module", 1) for n in range(4)]
    parts += [everything.Part(f"pair {n}", f"pair {n}.json", "module", 1, gpus=2) for n in range(2)]
    everything.make(parts, ledger, float("inf"), gpus, parts[0])
    assert sorted(name for name, _ in began) == sorted(part.name for part in parts)
    assert {gpu for name, gpu in began if "pair" in name} == set(pairs)
    first = {name for name, _ in began[:2]}
    assert first == ({"pair 0", "pair 1"} if len(gpus) > 2 else {"0", "1"})


@pytest.mark.parametrize("gpus", [[], ["0", "1"]], ids=str)
def test_a_part_that_cannot_be_run_ends_the_call(monkeypatch, gpus):
    begun = []

    def run(part, limit, gpu=None, cores=()):
        begun.append(part.name)
        if part.name == "0":
            raise OSError("no space left")
        time.sleep(0.05)
        return 0, 1.0

    monkeypatch.setattr(everything, "run", run)
    parts = [everything.Part(str(n), "same.json" if n < 3 else f"{n}.json", "module", 1) for n in range(6)]
    with pytest.raises(OSError, match="no space left"):
        everything.make(
            parts,
            types.SimpleNamespace(add=lambda *_: None, takes=lambda part: part.seconds),
            float("inf"),
            gpus,
            parts[0],
        )
    assert len(begun) <= 2


def test_gpus_are_those_that_programs_see(monkeypatch):
    monkeypatch.setattr(record, "_output", lambda *command: "GPU 0: H200\nGPU 1: H200")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert record.gpu_names() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc")
    assert record.gpu_names() == ["1", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert record.gpu_names() == []


def test_without_history_the_commit_has_to_be_given(parts, monkeypatch, capsys):
    monkeypatch.delenv("COMMIT")
    monkeypatch.setattr(record, "_output", lambda *command: None)
    record.commit.cache_clear()
    assert parts() == 2 and "set COMMIT" in capsys.readouterr().out
    record.commit.cache_clear()


def test_every_file_of_results_has_a_part_and_every_part_a_module():
    made = {part.file for part in everything.PARTS} | {everything.LEDGER}
    found = {path.name for path in record.RESULTS.glob("*.json")} - {path.name for path in OTHER_RUNS}  # without a GPU
    assert {name.replace("_h100", "") for name in found} <= made
    for part in everything.PARTS:
        assert (record.ROOT / "benchmarks" / f"{part.module.split()[0]}.py").is_file()
    assert len({part.name for part in everything.PARTS}) == len(everything.PARTS)


# --- the suite and the peers -----------------------------------------------------------------------


def test_runs_over_different_files_are_one_record():
    same = {"device": "a GPU", "versions": {"jax": "0.11.2"}, "code": "abc", "python": "3.12"}

    def run(file, failed, reason):
        counts = {"passed": 1, "failed": len(failed), "skipped": 1}
        skipped = {reason: [f"{file}::test_b"]}
        names = {
            "passed": {file: {"test_a": [""]}},
            "failed": {file: {name: [""] for name in failed}} if failed else {},
        }
        return same | names | {"counts": counts, "skipped": skipped, "seconds": 10, "command": f"suite {file}"}

    total = suite.merged([run("a.py", [], "no GPU"), run("b.py", ["test_c"], "no GPU"), run("c.py", [], "none")])
    assert total["counts"] == {"passed": 3, "failed": 1, "skipped": 3} and total["seconds"] == 30
    assert list(total["passed"]) == ["a.py", "b.py", "c.py"] and list(total["failed"]) == ["b.py"]
    assert total["skipped"] == {"no GPU": ["a.py::test_b", "b.py::test_b"], "none": ["c.py::test_b"]}
    assert total["command"] == "suite a.py && suite b.py && suite c.py"
    with pytest.raises(ValueError, match="more than one run has a"):
        suite.merged([run("a.py", [], "x"), run("a.py", [], "x")])
    again = suite.merged([run("a.py", [], "x"), run("b.py", ["test_c", "test_d"], "y"), run("b.py", [], "z")])
    assert again["counts"] == {"passed": 2, "failed": 0, "skipped": 2} and again["failed"] == {}
    assert again["skipped"] == {"x": ["a.py::test_b"], "z": ["b.py::test_b"]} and again["seconds"] == 30
    with pytest.raises(ValueError, match="the runs differ in code"):
        suite.merged([run("a.py", [], "x"), run("b.py", [], "x") | {"code": "def"}])


def test_pieces_of_the_suite_cover_a_half_of_it():
    files = {f"tests/{path.parent.name}/{path.name}" for path in (record.ROOT / "tests").glob("*/test_*.py")}
    one = "tests/attention/test_merge.py"
    run = {"passed": {name: {"test_a": [""]} for name in files - {suite.RULES, suite.SOAK, one}}, "failed": {}}
    assert [suite.covers(run | {"skipped": {}}, half) for half in suite.HALVES] == [False, True]
    assert suite.covers(run | {"skipped": {"no GPU": [f"{one}::test_b"]}}, "operations")


def test_two_halves_of_the_suite_are_one_record(monkeypatch, tmp_path):
    def pytest_run(command, **options):
        half = [part for part in command if part.startswith("tests/")]
        path = next(part.removeprefix("--record=") for part in command if part.startswith("--record="))
        passed = {f"{folder}/test_a.py": {"test_x": [""]} for folder in half}
        record.write_json(
            type(tmp_path)(path), {"counts": {"passed": len(half)}, "passed": passed, "failed": {}} | same
        )
        return types.SimpleNamespace(returncode=0)

    same = {"skipped": {}, "python": "3.12", "machine": "m"}
    made_by = {"device": "a GPU", "versions": {}, "code": record.code_digest(), "command": "suite"}
    monkeypatch.setattr(suite, "environment", lambda: dict(made_by))
    monkeypatch.setattr(suite.subprocess, "run", pytest_run)
    monkeypatch.setattr(suite, "gpu_names", lambda: ["0"])
    monkeypatch.setattr(suite, "gpu_memory", lambda: 80_000)
    monkeypatch.setenv("OUT", str(tmp_path))
    made = {part.name: part for part in everything.PARTS if part.file == "h200_tests.json"}
    for half in suite.HALVES:
        monkeypatch.setattr(sys, "argv", ["suite", "--half", half])
        assert suite.main() == 0
        written = record.earlier("h200_tests.json")
        assert [made[f"suite {name}"].whole(written) for name in suite.HALVES] == [True, half == "rest"]
    tests = {path.parent.name for path in (record.ROOT / "tests").rglob("test_*.py")}
    assert {name.split("/")[1] for name in written["passed"]} == tests and written["counts"]["passed"] == len(tests)
    monkeypatch.setattr(sys, "argv", ["suite", "--half", "operations"])
    assert suite.main() == 0 and record.earlier("h200_tests.json")["halves"] == ["operations"]


def test_the_suite_s_record_is_written_with_the_code(monkeypatch, tmp_path):
    run = {
        "device": "theirs",
        "counts": {"passed": 1},
        "passed": {"a.py": {"test_x": [""]}},
        "skipped": {"no GPU": ["b"]},
    }

    def pytest_run(command, **options):
        assert command[command.index("-n") + 1] == "6"
        path = next(part.removeprefix("--record=") for part in command if part.startswith("--record="))
        record.write_json(type(tmp_path)(path), run)
        return types.SimpleNamespace(returncode=1)

    monkeypatch.setattr(suite.subprocess, "run", pytest_run)
    monkeypatch.setattr(suite, "environment", lambda: {"device": "a GPU", "code": "abc"})
    monkeypatch.setattr(suite, "gpu_names", lambda: ["0", "1"])
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["suite", "--workers", "3"])
    handler = signal.getsignal(signal.SIGINT)
    assert suite.main() == 1 and signal.getsignal(signal.SIGINT) is handler
    written = json.loads((tmp_path / "h200_tests.json").read_text())
    assert written["device"] == "a GPU" and written["code"] == "abc" and written["counts"] == {"passed": 1}
    assert written["passed"] == run["passed"] and written["skipped"] == run["skipped"]


@pytest.fixture
def fresh(monkeypatch):
    peers._loaded.cache_clear()
    yield monkeypatch
    peers._loaded.cache_clear()


def test_a_peer_that_cannot_be_imported_says_why(fresh):
    fresh.setitem(peers._MODULES, "flash_mla", "no_such_module")
    with pytest.raises(peers.NotMeasured, match="ModuleNotFoundError: No module named 'no_such_module'"):
        peers.find("flash_mla")


def test_sglang_s_kernels_are_loaded_without_its_server(fresh, tmp_path):
    folder = tmp_path / "sglang" / "kernels" / "ops" / "attention" / "dsv4"
    folder.mkdir(parents=True)
    for package in (tmp_path / "sglang", tmp_path / "sglang" / "kernels", folder):
        (package / "__init__.py").write_text("raise RuntimeError('the server')")
    (folder / "sparse_prefill_kernels.py").write_text("from sglang.srt.utils import ceil_align, is_cuda\nx = is_cuda()")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        fresh.delitem(sys.modules, name)
    fresh.syspath_prepend(tmp_path)
    try:
        module = peers.find("sglang merge")
        assert isinstance(module, types.ModuleType) and module.x and module.ceil_align(129, 128) == 256
        with pytest.raises(peers.NotMeasured, match="sglang"):
            peers.find("sglang topk")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]

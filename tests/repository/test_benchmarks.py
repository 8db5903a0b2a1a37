"""The benchmark runner's pure parts: rows, ceilings, what a failure costs, the plots, the sanitizer's verdict."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from sparse_mla_torch.attention.beside_flashmla import why_flashmla_alone

from benchmarks import (
    counters,
    flashmla_from_jit,
    hopper_decode,
    memcheck,
    mesh_processes,
    number_formats,
    plots,
    record,
    run,
    suite,
    two_gpus,
)
from benchmarks.ops import attention
from benchmarks.timing import Case, Operation, Run
from jax_sparse_mla import sparse_mla_decode
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.device import DeviceInfo

CEILINGS = run.Ceilings(copy=4.0, matmul={"bf16": 800.0, "fp8": 1600.0})


class FakeTimer:
    """Times a call by what it returns."""

    operations = (Operation("kernel", 0.0, 1.0),)

    def __call__(self, timed: Run) -> float:
        return timed.call()


def case(name: str = "copy", ours=(10.0, 8.0), peers=(20.0, 12.0), **changes) -> Case:
    def runs(times):
        return {f"{'ab'[i]}": Run(lambda us=us: us, "jax") for i, us in enumerate(times)}

    return Case(name, **{"ours": runs(ours), "peers": runs(peers), "bytes": 16_000_000} | changes)


def test_a_row_has_the_best_peer_ratios_and_shares():
    row = run.measure(case(), FakeTimer(), CEILINGS)
    assert row["ceiling_us"] == 4.0  # 16 MB at 4 TB/s
    assert row["best_peer"] == "b" and row["peer_over_ours"] == {"a": 1.2, "b": 1.5}
    assert row["share_of_ceiling"] == {"a": 0.4, "b": 0.5}
    assert row["operations"]["a"] == (("kernel", 0.0, 1.0),)


@pytest.mark.parametrize(("unit", "ceiling"), [("bf16", 10.0), ("fp8", 5.0)])
def test_the_ceiling_is_the_larger_of_bytes_and_operations(unit, ceiling):
    assert CEILINGS.microseconds(case(flop=8 * 10**9, flop_unit=unit)) == ceiling
    assert CEILINGS.microseconds(case(flop=8 * 10**6, flop_unit=unit)) == 4.0


def test_without_a_peer_there_is_no_ratio():
    row = run.measure(case(peers=()), FakeTimer(), CEILINGS)
    assert row["best_peer"] is None and row["peer_over_ours"] == {} and row["share_of_ceiling"]["a"] == 0.4
    assert len(run._lines(row)) == 2


def test_what_fails_costs_only_itself(quick_collections, monkeypatch, capsys):
    def fails():
        raise RuntimeError("out of memory")

    def cases(rng):
        yield case("first", peers=()) if rng.integers(2) < 2 else None
        yield Case("second", {"a": Run(fails, "jax"), "b": Run(lambda: 8.0, "jax")}, {"c": Run(fails, "jax")}, bytes=1)
        yield case("third")
        raise ValueError("no more")

    monkeypatch.setitem(__import__("sys").modules, "benchmarks.ops.fake", types.SimpleNamespace(cases=cases))
    rows, failed = run.measure_operation("fake", FakeTimer(), CEILINGS)
    assert [row["case"] for row in rows] == ["first", "second", "third"]
    assert rows[1]["ours"] == {"b": 8.0} and set(rows[1]["failed"]) == {"a", "c"}
    assert failed == {"fake": "ValueError: no more"}
    assert "a failed: RuntimeError: out of memory" in capsys.readouterr().out


def test_a_call_is_split_into_its_parts():
    timer = FakeTimer()
    timer.operations = [
        Operation("sanitise_kernel", 0.0, 1.5),
        Operation("flash_fwd_splitkv_mla_fp8_sparse_kernel", 2.0, 10.0),
        Operation("flash_fwd_mla_combine_kernel", 9.0, 6.0),  # begins before the other one ends
        Operation("Memcpy DtoD (Device -> Device)", 16.0, 1.0),
        Operation("Memcpy DtoD (Device -> Device)", 18.0, 2.0),
        Operation("loop_select_fusion", 20.0, 0.5),
    ]
    parts = flashmla_from_jit.median_parts(timer, Run(lambda: 20.5, "jax"))
    assert parts == {"sanitise": 1.5, "copies": 3.0, "other": 0.5, "attention": 13.0, "call": 20.5}


def test_inputs_of_attention_are_what_their_shape_says():
    layout = attention.KVLayout.V4_FP8
    shape = attention.Decode("V4", layout, 2, 3, 2, 8, 16, extra_page=2, random_lengths=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SLOTS", 512)
        arrays = attention.decode_arrays(np.random.default_rng(0), shape)
    assert arrays["cache"].page_size == 256 and arrays["extra_cache"].page_size == 2
    assert arrays["cache"].num_slots == arrays["extra_cache"].num_slots == 512
    assert arrays["extra_indices"].shape == (3, 2, 16) and arrays["extra_topk_length"].shape == (3, 2)
    out, lse = sparse_mla_decode(**arrays, softmax_scale=shape.scale, backend="reference")
    assert out.shape == (3, 2, 2, 512) and np.isfinite(np.asarray(out, np.float32)).all()
    assert np.isfinite(np.asarray(lse)).all()


def test_an_operation_that_cannot_be_imported_is_named():
    rows, failed = run.measure_operation("nothing", FakeTimer(), CEILINGS)
    assert rows == [] and "No module named" in failed["nothing"]


def result(op: str, cases: list[Case]) -> dict:
    rows = [run.measure(each, FakeTimer(), CEILINGS) for each in cases]
    ceilings = {"copy": CEILINGS.copy, "matmul": CEILINGS.matmul}
    return {"op": op, "device": "a GPU", "ceilings": ceilings, "failed": {}, "rows": rows}


def test_plots_are_drawn_from_the_json(tmp_path):
    pytest.importorskip("matplotlib")
    results = [
        result("bytes", [case("copy"), case("alone", peers=()), case("failed", ours=())]),
        result("products", [case("bf16", flop=10**9), case("fp8", flop=10**10, flop_unit="fp8", peers=(1.0,))]),
        result("nothing", []),
    ]
    for each in results:
        record.write_json(tmp_path / f"{each['op']}.json", each)
    record.write_json(tmp_path / "cases_triton.json", {"cases": {}})
    drawn = plots.draw(tmp_path)
    assert {path.name for path in drawn} == {"roofline.png", "latency_bytes.png", "latency_products.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "x.json"
    content = {
        "a": 1,
        "rows": [{"x": [1, 2]}, {}],
        "empty": [],
        "cases": {"first": {"y": None}, "second": {}},
        "no": {},
    }
    record.write_json(path, content)
    with pytest.raises(TypeError):
        record.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == content and list(tmp_path.iterdir()) == [path]
    assert '  "first": {"y": null},\n' in path.read_text()


@pytest.mark.parametrize(
    ("log", "exit_code", "clean"),
    [
        ("12 checks passed\n========= ERROR SUMMARY: 0 errors", 0, True),
        ("== 40 passed, 2 deselected in 9.1s ==\n========= ERROR SUMMARY: 0 errors", 0, True),
        ("40 passed in 9.1s\n========= ERROR SUMMARY: 3 errors", 77, False),
        ("40 passed in 9.1s\n========= ERROR SUMMARY: 1 error", 0, False),
        ("1 failed, 39 passed\n========= ERROR SUMMARY: 0 errors", 1, False),
        ("68 passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        ("68 passed\n========= RACECHECK SUMMARY: 28 hazards displayed (28 errors, 0 warnings)", 0, False),
        ("Device not supported", 0, False),  # nothing was checked
        ("========= ERROR SUMMARY: 0 errors", 0, False),  # nothing ran
        ("40 passed", None, False),  # stopped
    ],
)
def test_memcheck_is_clean_only_when_it_ran_to_its_end(log, exit_code, clean):
    assert memcheck.verdict(log, exit_code)["as_wanted"] is clean


@pytest.mark.parametrize("kind", ("read", "write"))
def test_memcheck_is_believed_when_its_control_is_found(kind):
    other = {"read": "write", "write": "read"}[kind]
    log = f"========= Invalid __global__ {kind} of size 4 bytes\n========= ERROR SUMMARY: 2 errors"
    assert memcheck.control_verdict(log, f"control {kind}")["as_wanted"]
    assert not memcheck.control_verdict(log, f"control {other}")["as_wanted"]
    assert not memcheck.control_verdict("========= ERROR SUMMARY: 0 errors", f"control {kind}")["as_wanted"]


def test_a_stopped_memcheck_leaves_no_process_behind():
    """The program under the sanitizer holds the GPU's memory."""
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    assert memcheck.descendants(process.pid) == [child]
    try:
        memcheck.stop(process)
        assert select.select([process.stdout], [], [], 10)[0], "its child has the pipe's other end open"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_memcheck_takes_every_file_of_kernel_tests():
    groups = memcheck.groups()
    kernels = {"attention", "context_parallel", "hopper_memory", "kv", "metadata", "topk_kernels"}
    assert {"control read", "control write", *kernels} <= set(groups)
    assert all(any(Path(word).is_file() for word in arguments) for arguments in groups.values())


def test_the_sm90_bench_has_the_rows_of_flashmla_s_table():
    """The 32 of them, beside single tokens."""
    cases = list(hopper_decode.cases())
    assert len({case.name for case in cases}) == len(cases)
    table = [case for case in cases if case.table != hopper_decode.ONE_TOKEN]
    assert len(table) == 32 and sum(case.model == "V3.2" for case in table) == 6
    assert all(any(map(belongs, cases)) for belongs in hopper_decode.GROUPS.values())
    assert {case.is_v4 for case in cases if case.model.startswith("V4")} == {True}
    recorded = {row["case"] for row in json.loads((record.RESULTS / "hopper_decode.json").read_text())["rows"]}
    assert {case.name for case in table} <= recorded <= {case.name for case in cases}


def test_a_plugin_leaves_to_flashmla_what_the_record_says_is_sooner_there():
    """Of the numbers of heads that FlashMLA does not pad; what differs by 2% at most is not left."""
    record_of = {row["case"]: row for row in json.loads((record.RESULTS / "hopper_decode.json").read_text())["rows"]}
    device, sooner, left = DeviceInfo("cuda", (9, 0), 132, 232_448), set(), set()
    for case in hopper_decode.cases():
        shape, ratios = case.shape, [a / b for a, b in record_of[case.name]["flushed"].values()]
        scopes = [scope for scope in (shape.cache, shape.extra) if scope is not None]
        facts = {"extra_page_size": shape.extra.page_size if shape.extra else None}
        topk = sum(scope.topk for scope in scopes)
        call = Call("decode", case.layout, shape.batch * shape.q_len, shape.heads, device, topk, **facts)
        left |= {case.name} if why_flashmla_alone(call, "hopper") else set()
        sooner |= {case.name} if min(ratios) < 0.98 and shape.heads >= 64 else set()
    assert left == sooner and left


def test_number_formats_are_ordered_by_their_roundings():
    found = number_formats.errors(number_formats.MODELS["V4"]._replace(topk=128), seeds=1)
    output, bfloat16, float16, fp8_queries, two_parts, fp8_weights, all_fp8 = found.values()
    assert 1e-3 < output <= float16 < bfloat16 < two_parts < 3e-3
    assert 1e-2 < fp8_weights < fp8_queries < all_fp8 < 0.2


# --- counters --------------------------------------------------------------------------------------

_NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name"
"0","7","void decode<(int)1>(Call)","GPU Speed Of Light Throughput","Duration","us","61.25",""
"0","7","void decode<(int)1>(Call)","GPU Speed Of Light Throughput","Elapsed Cycles","cycle","107,184",""
"0","7","void decode<(int)1>(Call)","","","","","SOLBottleneck"
"1","7","join(Call)","GPU Speed Of Light Throughput","DRAM Throughput","%","3",""
"""


def test_counters_are_read_by_kernel():
    first, second = counters.metrics(_NCU.splitlines())
    assert first == {
        "kernel": "void decode<(int)1>(Call)",
        "metrics": {"Duration [us]": 61.25, "Elapsed Cycles [cycle]": 107184.0},
    }
    assert second["metrics"] == {"DRAM Throughput [%]": 3.0} and counters.metrics(["==ERROR== no permission"]) == []


@pytest.mark.parametrize("how", ["absent", "denied", "counts"])
def test_a_case_that_is_not_counted_says_why(how, tmp_path):
    ncu = tmp_path / "ncu"
    if how != "absent":
        said = "==ERROR== ERR_NVGPUCTRPERM" if how == "denied" else _NCU
        ncu.write_text(f"""#!{sys.executable}
import sys
open(sys.argv[sys.argv.index("--log-file") + 1], "w").write({said!r})
sys.exit({int(how == "denied")})
""")
        ncu.chmod(0o755)
    row = counters.counted("a case", str(ncu))
    if how == "counts":
        assert [kernel["kernel"] for kernel in row["kernels"]] == ["void decode<(int)1>(Call)", "join(Call)"]
        assert "Duration [us] 61.25" in counters._shown(row)
    else:
        assert {"absent": "FileNotFoundError", "denied": "ERR_NVGPUCTRPERM"}[how] in row["failed"]


def test_the_cases_that_are_counted_exist():
    from benchmarks import bf16_decode

    of_fp8 = {case.name for case in hopper_decode.cases()}
    of_bf16 = {case.name for case in bf16_decode.CASES}
    for name in counters.CASES:
        kind, _, case = name.partition(": ")
        assert case in {"decode, FP8": of_fp8, "decode, bfloat16": of_bf16}.get(kind, {case})


_FRAME = "    @     0x7f4ba6b040ee  xla::CoordinationServiceAgent::SetError()"
_DIED = "F1125 client.h:80] Terminating process. This most likely indicates that another task died. UNAVAILABLE: no RPC"
_GLOO = "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection reset by peer"


@pytest.mark.parametrize(
    "lines, reason",
    [
        (["extend 1/2", "E1125 Polled an error from coordination service", _DIED, "*** Check failure", _FRAME], _DIED),
        ([_FRAME, "E1125 task 1 stopped sending heartbeats"], "E1125 task 1 stopped sending heartbeats"),
        ([_FRAME, "Traceback (most recent call last):", _GLOO, "process 0 failed; the others will end too"], _GLOO),
        (["extend 1/2", _FRAME], ""),
    ],
)
def test_a_survivor_s_reason_is_no_frame_of_its_stack(lines, reason):
    assert mesh_processes.reason("\n".join(lines)) == reason


def test_what_a_process_says_is_read_while_it_writes():
    """Its file has one position for both: to read moves none of what it writes next."""
    code = "import sys, time; [(print(i, flush=True), time.sleep(0.001)) for i in range(200)]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_processes, "COMMAND", [sys.executable, "-c", code])
        process = mesh_processes.Process([], [0], "cpu")
    while process.process.poll() is None:
        said = process.said
    assert process.said.startswith(said) and process.said.split() == [str(i) for i in range(200)]


@pytest.mark.parametrize("memory, workers", [(143_771, 15), (81_559, 8), (5_000, 1), (None, 15)])
def test_tests_share_a_gpus_memory(memory, workers):
    assert suite.workers_a_gpu(memory) == workers


def test_kernels_that_differ_most_are_shown():
    work = [((0, 8_000), "a"), ((8_000, 16_000), "a"), ((20_000, 24_000), "b_12")]
    one = two_gpus.kernels(work)
    assert one == {"a": two_gpus.Kernel(2.0, 0.25), "b": two_gpus.Kernel(0.5, 0.125)}
    other = two_gpus.kernels([((0, 24_000), "a"), ((30_000, 34_000), "b_7"), ((40_000, 48_000), "c")])
    found = two_gpus.differences(one, other)
    assert sorted(list(found)[:2]) == ["a", "c"] and found["b"] == [two_gpus.Kernel(0.5, 0.125)] * 2
    many = {f"kernel {i}": two_gpus.Kernel(float(i), 1.0) for i in range(2 * two_gpus.SHOWN)}
    assert next(iter(two_gpus.differences(many, {}))) == f"kernel {len(many) - 1}"
    assert len(two_gpus.differences(many, {})) == two_gpus.SHOWN
    assert found["c"] == [two_gpus.Kernel(), two_gpus.Kernel(1.0, 0.125)]

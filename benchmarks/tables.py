"""The figures in README and four pages of docs/, written from benchmarks/results/*.json between their markers.

    python -m benchmarks.tables            # rewrites them
    python -m benchmarks.tables --check    # exit code 1 where one of them says anything else

A block stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`. Rows in which a peer is faster are
printed as all others are; what a file has no measurement of is printed as not measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.record import RESULTS, ROOT
from benchmarks.table_rows import ROWS, Row

_PAGES_OF_DOCS = ("engines.md", "maxtext.md", "serving-speed.md", "sharding.md")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / name for name in _PAGES_OF_DOCS))
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_PEERS = {
    "flash_mla": "FlashMLA",
    "deep_gemm": "DeepGEMM",
    "flashinfer": "FlashInfer",
    "flashinfer from jax": "FlashInfer from JAX",
    "sglang": "SGLang",
    "xla": "XLA",
    "plain XLA": "XLA",
}
_WHEELS = {
    "sgl-flash-mla": "FlashMLA",
    "sgl-deep-gemm": "DeepGEMM",
    "sglang": "SGLang",
    "flashinfer-python": "FlashInfer",
}


@functools.cache
def result(name: str) -> dict:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


# --- operations beside their peers -----------------------------------------------------------------


LEAST = "least of the production rows"


def _on(device: str, what: str) -> str:
    """What a line is of; where a table's other lines are not, with the device."""
    return f"{what} (H100)" if "H100" in device else what


class Times(NamedTuple):
    """A case's microseconds; None where it was not measured."""

    ours: float | None
    peer: float | None
    name: str


def _times(row: Row, case: str) -> Times:
    found = next((x for x in result(row.file).get("rows", ()) if x["case"] == case), None)
    if found is None:
        return Times(None, None, "")
    if row.file == "hopper_decode":
        return Times(found["ours_us"], found["flash_mla_us"], _PEERS["flash_mla"])
    if row.file == "peer_backward":
        peer = min((name for name in found["us"] if name != "ours"), key=found["us"].get)
        return Times(found["us"]["ours"], found["us"][peer], peer)
    peer = found["best_peer"]
    missing = " and ".join(_PEERS[name] for name in found.get("not_measured", ()))
    return Times(found["ours"].get(row.ours), found["peers"].get(peer), _PEERS.get(peer, missing))


def operations() -> str:
    lines = ["| what | peer, µs | ours, µs | peer / ours |", "| --- | --- | --- | --- |"]
    for row in ROWS:
        times = [_times(row, case) for case in row.cases]
        names = [x.name for x in times]
        same = len(set(names)) == 1
        peers = " / ".join(number(x.peer) if same else f"{x.name} {number(x.peer)}".strip() for x in times)
        ratios = (x.peer / x.ours if x.peer and x.ours else None for x in times)
        ours = " / ".join(number(x.ours) for x in times)
        peers = f"{names[0]} {peers}".strip() if same else peers
        what = _on(result(row.file).get("device", ""), row.what)
        lines.append(f"| {what} | {peers} | {ours} | {' / '.join(map(ratio, ratios))} |")
    return "\n".join([*lines, "", f"Of {made_by('hopper_decode', 'attention', *(row.file for row in ROWS))}."])


def made_by(*names: str) -> str:
    """The commits and the peers' versions behind these files, in words."""
    files = [result(name) for name in dict.fromkeys(names)]
    commits = sorted({found["commit"] or "unknown" for found in files if found})
    versions = {}
    for found in files:
        for wheel, name in _WHEELS.items():
            if version := found.get("versions", {}).get(wheel):
                versions.setdefault(name, set()).add(version)
    peers = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in versions.items())
    return f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}" + (f"; {peers}" if peers else "")


def means() -> str:
    found = result("hopper_decode")
    values = found.get("geometric_means", {})
    # The record of 9901459 has it rounded, and rounding it again would be wrong: of the rows' own times instead.
    production = [row for row in found.get("rows", ()) if row["table"] == "production"]
    if production:
        values = values | {LEAST: min(row["flash_mla_us"] / row["ours_us"] for row in production)}
    lines = [f"* {name}: {ratio(value)}" for name, value in values.items()]
    return "\n".join(["FlashMLA's time over `hopper`'s, geometric means:", "", *lines])


# --- steps, tests, host ----------------------------------------------------------------------------


def _sizes(case: str) -> str:
    """A case such as 8x8192, for readers."""
    return " × ".join(f"{int(x):,}" for x in case.split("x"))


def steps() -> str:
    """Ours beside SGLang's, of the same run."""
    found = result("peer_step")
    if not found:
        return "A step beside SGLang's: not measured."
    lines = [
        "| requests × tokens | SGLang: wall, GPU, ms | operations | ours: wall, GPU, ms | operations | host, ms "
        "| SGLang / ours |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, times in found["results"].items():
        ours, peer = times["ours"], times["B"]
        both = [f"{x['wall_us'] / 1e3:.2f}, {x['gpu_us'] / 1e3:.2f} | {x['operations']:.0f}" for x in (peer, ours)]
        last = f"{_ms(ours.get('host_us'))} | {ratio(peer['wall_us'] / ours['wall_us'])}"
        lines.append(f"| {_sizes(case)} | {' | '.join(both)} | {last} |")
    count = next(iter(found["results"].values()))["ours"]["steps"]
    return "\n".join([*lines, "", f"Medians of runs of {count} steps; {made_by('peer_step')}."])


def torch_steps() -> str:
    """The step from torch beside the one from JAX, of the same run."""
    found = result("torch_step")
    if not found:
        return "The step from torch: not measured."
    lines = [
        "| requests × tokens | JAX: wall, GPU, host, ms | torch: wall, GPU, host, ms | GPU, torch / JAX "
        "| of the layers alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, times in found["results"].items():
        both = [
            ", ".join(_ms(times[framework].get(f"{what}_us")) for what in ("wall", "gpu", "host"))
            for framework in ("jax", "torch")
        ]
        ratios = [ratio(times["torch"][what] / times["jax"][what]) for what in ("gpu_us", "layers_us")]
        lines.append(f"| {_sizes(case)} | {' | '.join(both + ratios)} |")
    count = next(iter(found["results"].values()))["jax"]["steps"]
    lines += [
        "",
        "The last column leaves out the 42 additions by which the benchmark chains the layers: torch's take longer.",
        f"Medians of runs of {count} steps; commit {found['commit']}.",
    ]
    return "\n".join(lines)


def suite() -> str:
    found, long = result("h200_tests"), result("long_tests")
    if "counts" not in found:
        return "The whole suite on an H200: not measured."
    words = found.get("command", "").split()  # of several runs, which name what the others ignore
    ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    left_out = [path.removeprefix("tests/") for path in ignored if path not in words]
    lines = [f"The last recorded run on an {found['device'].split()[1]}, of commit {found['commit']}: {_counts(found)}"]
    lines.append(f"in {found['seconds']} s; `benchmarks/results/h200_tests.json` names them.")
    if failed := [f"`{name}`" for functions in found.get("failed", {}).values() for name in functions]:
        lines.append(f"What failed: {', '.join(failed)}.")
    if left_out:
        lines.append(f"It left out: {', '.join(left_out)}.")
    if "counts" in long:
        lines.append(f"The last recorded run of the long tests on a CPU, of commit {long['commit']}:")
        lines.append(f"{_counts(long)[:-1]}.")
    others = {"h100": "The whole suite on an H100", "two_gpus": "The files with tests for two GPUs, on two H200s"}
    clients = {"vllm": "vLLM", "sglang": "SGLang", "maxtext": "MaxText"}
    others |= {name: f"The tests with {title} {{}} on a CPU" for name, title in clients.items()}
    for name, title in others.items():
        if found := result(f"{name}_tests"):
            title = title.format(found.get("versions", {}).get(name))
            lines.append(f"{title}, of commit {found['commit']}: {_counts(found)[:-1]}.")
    return "\n".join(lines)


def _counts(record: dict) -> str:
    return " ".join(f"{record['counts'][name]:,} {name}," for name in ("passed", "failed", "skipped"))


def cases() -> str:
    words = []
    for backend in ("hopper", "triton", "drop_in", "flashmla"):
        found = result(f"cases_{backend}")
        passed, failed = (sum(t[verdict] for t in found.get("tables", {}).values()) for verdict in ("passed", "failed"))
        shapes = {case.partition(": ")[2] for case in found.get("cases", ())}
        name = "the torch drop-in" if backend == "drop_in" else f"`{backend}`"
        runs = f"{passed:,} of {passed + failed:,} runs, {len(shapes):,} shapes"
        words.append(f"* {name}: {runs}, commit {found.get('commit')}")
    first = "These runs of FlashMLA's published test shapes agree with float64 within its tolerances:"
    return "\n".join([first, "", *words])


def memcheck() -> str:
    found = result("memcheck")
    groups = found.get("groups", {})
    wanted = sum(group["as_wanted"] for group in groups.values())
    return (
        f"compute-sanitizer's memcheck (commit {found.get('commit')}): {wanted} of {len(groups)} groups of kernels and "
        "controls\nare as they should be."
    )


def flashmla_from_jit() -> str:
    found = result("flashmla_from_jit")
    if not found:
        return "* FlashMLA's way through XLA: not measured."
    decode, prefill = ([r["jit"] for r in found["rows"] if r["case"].startswith(x)] for x in ("decode", "prefill"))
    host = found["host_us"]
    return (
        "* FlashMLA's operators allocate through torch: a call is never in a CUDA graph, takes the host "
        f"{host['jit']:.0f} µs\n  ({host['torch']:.0f} µs from torch), and its results are copied "
        f"({_range(decode, 'copies')} µs in decode, {_range(prefill, 'copies')} µs in a\n  prefill of 4,096 queries). "
        f"The pass over its indices takes {_range(decode, 'sanitise')} µs in decode."
    )


def _range(rows: list[dict], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{number(min(values))} to {number(max(values))}"


def host() -> str:
    found = result("peer_step").get("results", {}).get("8x8192", {}).get("ours")
    if not found:
        return "* What a decode step costs the host: not measured."
    wall, gpu, of_host = (_ms(found.get(name)) for name in ("wall_us", "gpu_us", "host_us"))
    measured = "what it takes the host was not measured" if of_host == "–" else f"it takes the host {of_host} ms"
    return f"* A decode step of 8 requests takes {wall} ms, of which the GPU works {gpu}; {measured}."


def drop_in() -> str:
    rows = result("drop_in").get("rows", ())
    if not rows:
        return "What the drop-in costs the host: not measured."
    low, high = (pick(row["flashmla"] for row in rows) for pick in (min, max))
    trusted = max(row["flashmla valid"] for row in rows)
    return (
        f"Over FlashMLA's operator it adds {low:.1f} to {high:.1f} µs of host time to FlashMLA's own call with its "
        f"checks of\nevery index, at most {trusted:.1f} µs without them."
    )


def served() -> str:
    """The whole model's decode steps, by preset, context and requests."""
    found = result("serving")
    if not found:
        return "Not measured."
    lines = [
        "| model | context | requests | first token | tokens/s | per token p50 | step: wall, GPU | wall / GPU "
        "| attention |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in found["runs"]:
        for row in run["rows"]:
            case = f"| {run['preset']} | {row['context']:,} | {row['requests']} |"
            if row["problem"]:
                lines.append(f"{case} {row['problem']} | – | – | – | – | – |")
                continue
            wall, gpu = row["step_ms"], row["step_gpu_ms"]
            lines.append(
                f"{case} {number(row['first_token_ms']['p50'])} | {row['tokens_per_s']:,.0f} "
                f"| {row['token_ms']['p50']:.2f} | {wall:.2f}, {gpu:.2f} "
                f"| {ratio(wall / gpu)} | {row['attention_share']:.0%} |"
            )
    of = {}
    for run in found["runs"]:
        of.setdefault(run["commit"], []).append(f"{run['preset']} at {run['context']:,}")
    most = max(of, key=lambda commit: len(of[commit]))
    others = "".join(f"; {', '.join(runs)}: {commit}" for commit, runs in of.items() if commit != most)
    return "\n".join([*lines, "", f"Commit {most}{others}."])


def attention_part() -> str:
    """The library's kernels within the model's step, beside the step benchmark's."""
    found = result("attention_part")
    if not found:
        return "Not measured."
    lines = [
        "| requests | step benchmark, µs | in the model, µs | model / benchmark | the model's step, µs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        alone, model, step = (row[name] for name in ("step_benchmark_us", "model_us", "model_step_us"))
        lines.append(
            f"| {row['requests']} | {number(alone)} | {number(model)} | {ratio(model / alone)} | {number(step)} |"
        )
    return "\n".join([*lines, "", f"{found['context']:,} tokens; commit {found['commit']}."])


# --- engines ---------------------------------------------------------------------------------------


def sglang_layer() -> str:
    """SGLang's layer with FlashMLA and with ours."""
    return _engine_layer("engines_sglang", "SGLang")


def vllm_layer() -> str:
    """vLLM's layer with FlashMLA and with ours."""
    return _engine_layer("engines_vllm", "vLLM")


def _engine_layer(record: str, engine: str) -> str:
    """The rows with sizes of serving and those in which ours is slower, and how many others there are."""
    found = result(record)
    if not found:
        return "Not measured."
    lines = ["| decode | with FlashMLA, µs | with ours, µs | ratio | errors | whose kernel |", "| --- " * 6 + "|"]
    ratios, served = [], 0
    for row in found["rows"]:
        by_ours = any(who.endswith(" ours") for who in row["served"])
        served += by_ours
        if len(times := row.get("graph_us", {})) < 2:
            continue
        times_ours = times["theirs"] / times["ours"]
        ratios += [times_ours] if by_ours else []
        if "served " in row["case"] or (by_ours and times_ours < 1):
            name = re.sub(r"(\d)x(\d)", r"\1 × \2", row["case"].replace("served ", ""))
            name = _on(row.get("device", ""), name)
            both = f"{number(times['theirs'])} | {number(times['ours'])} | {ratio(times_ours)}"
            errors = " and ".join(f"{row['error'][side]:.4f}" for side in ("theirs", "ours"))
            whose = "ours" if by_ours else "FlashMLA's"
            lines.append(f"| {name} | {both} | {errors} | {whose} |")
    older = sorted({(row.get("device", found["device"]), row["commit"]) for row in found["rows"] if "commit" in row})
    others = "; ".join(f"{device}, commit {commit}" for device, commit in older)
    made = f"{found['device']}, commit {found['commit']}" + (f" (some rows: {others})" if others else "")
    lines += ["", f"{made}. Our kernels served {served} of the {len(found['rows'])} rows."]
    if ratios:
        spread = f"{ratio(min(ratios))} to {ratio(max(ratios))}"
        lines += [f"From a CUDA graph, {engine} alone takes {spread} times as long as with ours in those rows."]
    return "\n".join(lines)


def maxtext() -> str:
    """MaxText's models with its own dense attention and through the adapter."""
    found = result("maxtext_step")
    columns = "what, tokens | dense: MiB, ms | ours: MiB, ms | error to float32: dense, ours | tokens as dense"
    lines = [f"| {columns} |", "| --- " * 5 + "|"]
    whats = {"forward": "forward pass", "serve": "served", "train": "training step"}
    for case, row in found.get("results", {}).items():
        part, model, length = case.split()
        if part == "serve":
            costs, errors = ["–", "–"], ["–", "–"]
            same = "{} of {}".format(row["dense attention's"], row["tokens"])
        else:
            sides = [row[kind] for kind in ("dense", "ours")]
            costs = [side["why not"] or f"{side['MiB']:,.0f}, {side['seconds'] * 1e3:.1f}" for side in sides]
            rms = row.get("rms to float32", {})
            gradients = {kind: row.get(f"gradients, {kind} to float32", {}).get("all") for kind in ("dense", "ours")}
            far = [rms.get(kind, gradients[kind]) for kind in gradients]
            errors = ["–" if x is None else f"{x:.4f}" for x in far]
            same = f"{row['same argmax']:.1%}" if "same argmax" in row else "–"
        name = f"{whats[part]} of {model.upper().replace('V32', 'V3.2')}, {int(length):,}"
        lines.append(f"| {name} | {' | '.join(costs)} | {', '.join(errors)} | {same} |")
    return "\n".join([*lines, "", f"{found['device']}, commit {found['commit']}."]) if found else "Not measured."


# --- two GPUs --------------------------------------------------------------------------------------


def _of_two_gpus(start: str, columns: Sequence[str], cells: Callable[[str, str, dict], Sequence[str]]) -> str:
    """The sections whose titles begin so, a line for each row: `cells(title, case, row)`; and what made them."""
    sections = {title: made for title, made in result("two_gpus").items() if title.startswith(start)}
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for title, made in sections.items():
        for case, row in made["rows"].items():
            first, *others = cells(title, case, row)
            first += f" (commit {row['commit']})" if "commit" in row else ""  # of an earlier run
            lines.append("| " + " | ".join([first, *others]) + " |")
    made = "; ".join(dict.fromkeys(f"{made['device']}, commit {made['commit']}" for made in sections.values()))
    return "\n".join([*lines, "", f"{made}."]) if sections else "Not measured."


def two_gpus_step() -> str:
    """The attention step of all layers with requests of its own on each GPU."""

    def cells(_, case, row):
        works = ", ".join(map(number, row["all_devices_gpu_us"]))
        one, two = number(row["one_device_us"]), f"{number(row['all_devices_us'])} ({works})"
        return case.replace("x", " × "), str(row["processes"]), one, two, ratio(row["weak_scaling"])

    columns = "requests a GPU × tokens", "processes", "one GPU, µs", "two GPUs, µs (each works)", "one / two"
    return _of_two_gpus("step_over_requests", columns, cells)


def two_gpus_context() -> str:
    """A layer's attention over pages that two GPUs share."""

    def cells(_, case, row):
        layer, tokens = case.split()
        one_launch = row["parallel_us"] if row["one_launch"] else None
        times = row["one_us"], row["own_keys_us"], one_launch, row["all_to_all_us"], row["gathered_us"]
        times = map(number, times)
        return layer, f"{int(tokens):,}", *times, ratio(row["speedup"]), f"{row['parallel_sent_bytes'] / 1e6:.1f}"

    columns = ["layer", "tokens", "one GPU, µs", "own keys", "one launch", "all-to-all", "whole outputs gathered"]
    return _of_two_gpus("context_parallel", [*columns, "one / with exchange", "sent, MB"], cells)


def two_gpus_serving() -> str:
    """The engine over two GPUs."""

    def cells(title, layout, row):
        timed = "decode_step_ms" in row
        speeds = (f"{row['prefill_tokens_per_second']:,.0f}", f"{row['decode_step_ms']:.2f}") if timed else ("–", "–")
        times_one = f"{ratio(row['prefill_speedup'])}, {ratio(row['decode_speedup'])}" if timed else "–"
        others = f"{row['requests_with_another_token']}, {row['largest_margin_there']:.3f}"
        return title.removeprefix("serving "), layout, *speeds, times_one, others

    columns = ["model, requests × prompt", "layout", "prefill, tokens/s", "decode step, ms"]
    columns += ["prefill, decode: times one GPU", "requests with another token, largest margin there"]
    return _of_two_gpus("serving", columns, cells)


# --- numbers and blocks ----------------------------------------------------------------------------


def number(us: float | None) -> str:
    if us is None:
        return "not measured"
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:.2f}"


def ratio(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block
    for block in (
        *(operations, means, steps, torch_steps, suite, cases, memcheck, flashmla_from_jit, host, drop_in),
        *(served, attention_part, two_gpus_step, two_gpus_context, two_gpus_serving, sglang_layer, vllm_layer, maxtext),
    )
}


def rewritten(text: str) -> str:
    """A document with every block as the results have it; KeyError for a block that there is not."""
    return _BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    old = {path: path.read_text() for path in PAGES}
    stale = {path: new for path, text in old.items() if (new := rewritten(text)) != text}
    for path, text in stale.items():
        if args.check:
            print(f"{path.name} differs from benchmarks/results: run python -m benchmarks.tables")
        else:
            path.write_text(text)
            print(f"{path.name} is rewritten")
    if not stale:
        print("The documents say what the results do")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

"""Times every operation beside its peers in one process.

    python -m benchmarks.run [--op NAME ...] [--repeats N]

For each case of `benchmarks.ops`: the best peer, each way to launch ours, peer / ours, the ceiling (the larger of
bytes over the rate of a device copy and operations over the rate of a matrix product, both measured here) and the
share of it that ours reaches. Writes <op>.json, with the device operations behind each time, to $OUT or
benchmarks/results; `benchmarks.plots` draws them. What fails is reported and costs only itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import pkgutil
import sys
import traceback

import numpy as np
import torch

from benchmarks import ops
from benchmarks.peers import NotMeasured
from benchmarks.record import environment, results_folder, write_json
from benchmarks.timing import Case, Timer, copy_rate, matmul_rate


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the machine reached in this process: TB/s of a copy, TFLOP/s of matrix products by unit."""

    copy: float
    matmul: dict[str, float]

    @classmethod
    def measure(cls, timer: Timer) -> Ceilings:
        return cls(copy_rate(timer), {unit: matmul_rate(timer, unit=unit) for unit in ("bf16", "fp8")})

    def microseconds(self, case: Case) -> float:
        """The least time that the case can take."""
        compute = case.flop / self.matmul[case.flop_unit] / 1e6 if case.flop else 0.0
        return max(case.bytes / self.copy / 1e6, compute)


def measure(case: Case, timer: Timer, ceilings: Ceilings) -> dict:
    """A row of the results: times in microseconds by name, ratios and shares of ours, what failed and why."""
    times: dict[str, dict[str, float]] = {"ours": {}, "peers": {}}
    operations, differences, failed, missing = {}, {}, {}, {}
    for group, runs in (("ours", case.ours), ("peers", case.peers)):
        for name, run in runs.items():
            try:
                if name in case.checks:
                    differences[name] = float(f"{case.checks[name]():.3g}")
                times[group][name] = round(timer(run), 3)
                operations[name] = timer.operations
            except NotMeasured as reason:
                missing[name] = str(reason)
            except Exception as error:
                failed[name] = _described(error)
    ours, peers = times["ours"], times["peers"]
    peer = min(peers, key=peers.get, default=None)
    ceiling = ceilings.microseconds(case)
    return {
        "case": case.name,
        "bytes": case.bytes,
        "flop": case.flop,
        "flop_unit": case.flop_unit,
        "ceiling_us": round(ceiling, 3),
        "ours": ours,
        "peers": peers,
        "best_peer": peer,
        "peer_over_ours": {name: round(peers[peer] / us, 3) for name, us in ours.items()} if peer else {},
        "share_of_ceiling": {name: round(ceiling / us, 3) for name, us in ours.items()},
        "difference": differences,
        "not_measured": missing,
        "failed": failed,
        "operations": operations,
    }


def measure_operation(name: str, timer: Timer, ceilings: Ceilings) -> tuple[list[dict], dict[str, str]]:
    """The rows of `benchmarks.ops.<name>`, printed as they come, and what failed outside of a case."""
    rows: list[dict] = []
    print(f"\n{name}\n{_HEADER}")
    try:
        module = importlib.import_module(f"benchmarks.ops.{name}")
        for case in module.cases(np.random.default_rng(0)):
            rows.append(measure(case, timer, ceilings))
            print(*_lines(rows[-1]), sep="\n", flush=True)
            del case
            gc.collect()
    except Exception as error:
        traceback.print_exc()
        return rows, {name: _described(error)}
    return rows, {}


_HEADER = f"{'case':44} {'peer':>12} {'us':>9} {'ours':>8} {'us':>9} {'ratio':>6} {'ceiling':>9} {'share':>6}"


def _lines(row: dict) -> list[str]:
    """One line for each way to launch ours, and for what failed."""
    peer = row["best_peer"]
    beside = f"{peer:>12} {row['peers'][peer]:9.1f}" if peer else f"{'-':>12} {'-':>9}"
    lines = []
    for name, us in row["ours"].items():
        ratio = row["peer_over_ours"].get(name)
        ratio = f"{ratio:6.2f}" if ratio is not None else f"{'-':>6}"
        share = row["share_of_ceiling"][name]
        lines.append(f"{row['case']:44} {beside} {name:>8} {us:9.1f} {ratio} {row['ceiling_us']:9.1f} {share:6.0%}")
    lines += [f"{row['case']:44} {name} not measured: {why}" for name, why in row["not_measured"].items()]
    lines += [f"{row['case']:44} {name} failed: {why}" for name, why in row["failed"].items()]
    return lines


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _works() -> bool:
    """Whether the GPU's context has survived."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def main() -> int:
    every = sorted(module.name for module in pkgutil.iter_modules(ops.__path__))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", default=every, choices=every, metavar="NAME", help=", ".join(every))
    parser.add_argument("--repeats", type=int, default=15, help="calls of which the median counts")
    args = parser.parse_args()

    timer = Timer(args.repeats)
    ceilings = Ceilings.measure(timer)
    rates = ", ".join(f"{rate:.0f} TFLOP/s {unit}" for unit, rate in ceilings.matmul.items())
    print(f"ceilings: copy {ceilings.copy:.2f} TB/s, matrix product {rates}")
    folder, complete = results_folder(), True
    for name in args.op:
        rows, failed = measure_operation(name, timer, ceilings)
        result = environment() | {"ceilings": dataclasses.asdict(ceilings), "failed": failed, "rows": rows}
        write_json(folder / f"{name}.json", {"op": name} | result)
        complete &= not failed and not any(row["failed"] for row in rows)
        if not _works():
            print(f"{name} broke the GPU's context: nothing after it was run")
            complete = False
            break
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main())

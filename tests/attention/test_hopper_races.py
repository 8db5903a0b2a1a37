"""The SM90 decode kernels on the host, each load and store watched: accesses of shared memory that no barrier orders.

`support/host_cuda/races.h` says what is looked at and what is not. On a GPU racecheck looks for much of the same
(`docs/kernels-checked.md`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import decode_on_host
import pytest
from decode_on_host import CACHES, case_of, check_on_host, few, many, run_on_host, wide
from host_build import compiled_once, compiled_to_be_watched

from jax_sparse_mla.kernels import build
from jax_sparse_mla.kernels.sm90.decode_plan import decode_format
from jax_sparse_mla.kv_cache import KVLayout

pytestmark = pytest.mark.no_gpu

PLANS = {
    "persistent, by lengths": (many(2), {"heads": 33}),
    "persistent, two tiles": (many(2), {"heads": 70, "batch": 2}),
    "persistent, cut": (many(3, lengths=False), {"batch": 1, "lengths": "none", "extra_lengths": "none"}),
    "cluster of 16 heads": (few(16, 2), {"heads": 17, "batch": 1, "lengths": "none"}),
    "cluster of 32 heads": (few(32, 3), {"heads": 33, "batch": 1}),
    "wide cluster": (wide(3), {"heads": 33, "batch": 2}),
}
CASES = [(layouts, plan) for layouts in CACHES for plan in PLANS]
NOWHERE = (0, 0)


def case_and_plan(layouts: tuple[str, str], name: str):
    plan, setting = PLANS[name]
    return case_of(*layouts, CACHES.index(layouts), **setting), plan


def races_found(library: ctypes.CDLL, known: tuple[int, int] = NOWHERE) -> int:
    """Reports since the last call, but for those of some bytes of shared memory."""
    return library.races_found(*map(ctypes.c_int64, known))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled_once("sparse_decode", "sparse_decode", tmp_path_factory, watched=True)


@pytest.fixture(scope="module")
def control(tmp_path_factory) -> ctypes.CDLL:
    return compiled_once("races_control", "sparse_decode", tmp_path_factory, watched=True)


@pytest.mark.parametrize("seed", range(3))
def test_barriers_that_order_accesses_and_those_that_do_not(seed, control):
    for number in range(control.programs()):
        for ordered in (True, False):
            control.run_program(number, ordered, seed)
            assert (races_found(control) == 0) == ordered, (number, ordered)


def known_of(library: ctypes.CDLL, layouts: tuple[str, str]) -> tuple[int, int]:
    """Where the masks of valid keys are, which reach the consumers of bfloat16 rows by the arrivals of copies alone. By
    PTX such an arrival orders no other store: see docs/kernels-checked.md."""
    if not layouts[0].endswith("BF16"):
        return NOWHERE
    place = (ctypes.c_int64 * 2)()
    library.place_of_masks(decode_format(getattr(KVLayout, name) for name in layouts), place)
    return tuple(place)


@pytest.mark.always(
    "V4_FP8+V4_FP8-persistent, by lengths", "V32_FP8+V32_FP8-wide cluster", "V4_BF16+V4_BF16-wide cluster"
)
@pytest.mark.parametrize(("layouts", "plan"), CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_accesses_have_an_order(layouts, plan, library):
    case, how = case_and_plan(layouts, plan)
    races_found(library)
    check_on_host(library.sparse_decode_on_host, case, how, seed=3)
    assert races_found(library, known_of(library, layouts)) == 0


@pytest.mark.long
@pytest.mark.parametrize("plan", ["persistent, by lengths", "wide cluster"])
@pytest.mark.parametrize("layouts", [layouts for layouts in CACHES if layouts[0].endswith("BF16")], ids="+".join)
def test_what_is_known_of_bfloat16_rows_is_so(layouts, plan, library):
    case, how = case_and_plan(layouts, plan)
    races_found(library)
    check_on_host(library.sparse_decode_on_host, case, how)
    assert races_found(library) > 0


# Of each file, lines that order accesses, and what stands in their place; the numbers may be right all the same.
ORDERS = [
    ("wide.cuh", "", "", "wide cluster"),  # unchanged
    ("attend.cuh", "sm90::sync_threads(kSumBarrier, 256);", "", "persistent, by lengths"),
    ("keys.cuh", "sm90::wait(&shared.barriers.queries_empty, (number++ & 1) ^ 1);", "", "persistent, by lengths"),
    ("wide.cuh", "sm90::release_in_cluster();", "sm90::arrive_in_cluster();", "wide cluster"),
    ("wide.cuh", "sm90::wait_for_sent(&shared.statistics_full, 0);", "", "wide cluster"),
    ("wide.cuh", "sm90::wait_for_sent(&shared.values_full, 0);", "", "wide cluster"),
    ("cluster.cuh", "sm90::wait_for_sent(&shared.units_full, 0);", "", "cluster of 32 heads"),
    ("cluster.cuh", "__syncthreads();\n      weigh();", "weigh();", "cluster of 32 heads"),
]


@pytest.mark.long
@pytest.mark.parametrize(("file", "line", "other", "plan"), ORDERS, ids=lambda x: x.partition(";")[0])
def test_a_missing_order_is_found(file, line, other, plan, tmp_path):
    changed = shutil.copytree(build.source("sparse_decode").parents[1], tmp_path / "kernels") / "sparse_decode"
    if line:
        text = (changed / file).read_text()
        assert text.count(line) == 1
        (changed / file).write_text(text.replace(line, other or ";"))
    made = compiled_to_be_watched("sparse_decode", "sparse_decode", tmp_path, changed)
    environ = os.environ | {"PYTHONPATH": str(Path(decode_on_host.__file__).parent)}
    command = [sys.executable, __file__, str(made), plan]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    found = any(kind in run.stderr for kind in ("read after a write: ", "written after a read: ", "written twice: "))
    assert found == bool(line) and (line or run.returncode == 0), run.stderr


def main(library: str, plan: str) -> None:
    case, how = case_and_plan(("V32_FP8", "V32_FP8"), plan)
    run_on_host(ctypes.CDLL(library).sparse_decode_on_host, case, how)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The SM90 decode kernels on the host, each load and store watched: accesses of shared memory that no barrier orders.

`support/host_cuda/races.h` says what is looked at and what is not. On a GPU racecheck looks for much of the same
(`docs/internals/kernels-checked.md`).
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import decode_on_host
import pytest
from decode_on_host import CACHES, PLANS, WINDOW_LAYOUTS, case_and_plan, check_on_host
from host_build import changed_kernels, compiled_once, compiled_to_be_watched, replace_once

# The gradient's races are watched in every run: `test_gradient_on_host.py`.
pytestmark = pytest.mark.no_gpu

CASES = [
    (layouts, plan)
    for layouts in CACHES
    for plan in PLANS
    if plan != "window" or (layouts[0] == layouts[1] and layouts[0] in WINDOW_LAYOUTS)
]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled_once("sparse_decode", "sparse_decode", tmp_path_factory, watched=True)


@pytest.fixture(scope="module")
def control(tmp_path_factory) -> ctypes.CDLL:
    return compiled_once("races_control", "sparse_decode", tmp_path_factory, watched=True)


@pytest.mark.always("0")
@pytest.mark.parametrize("seed", range(3))
def test_barriers_that_order_accesses_and_those_that_do_not(seed, control):
    for number in range(control.programs()):
        for ordered in (True, False):
            control.run_program(number, ordered, seed)
            assert (control.races_found() == 0) == ordered, (number, ordered)


@pytest.mark.long
@pytest.mark.parametrize(("layouts", "plan"), CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_accesses_have_an_order(layouts, plan, library):
    case, how = case_and_plan(layouts, plan)
    library.races_found()
    check_on_host(library.sparse_decode_on_host, case, how, seed=3)
    assert library.races_found() == 0


# Of each file, lines that order accesses, and what stands in their place; the numbers may be right all the same.
ORDERS = [
    ("wide.cuh", "", "", "wide cluster"),  # unchanged
    ("attend.cuh", "sm90::sync_threads(kSumBarrier, 256);", "", "persistent, by lengths"),
    ("keys.cuh", "sm90::wait(&shared.barriers.queries_empty, (number++ & 1) ^ 1);", "", "persistent, by lengths"),
    ("wide.cuh", "sm90::release_in_cluster();", "sm90::arrive_in_cluster();", "wide cluster"),
    ("wide.cuh", "sm90::wait_for_sent(&shared.statistics_full, 0);", "", "wide cluster"),
    ("wide.cuh", "sm90::wait_for_sent(&shared.values_full, 0);", "", "wide cluster"),
    ("window.cuh", "sm90::sync_threads(kScoreBarrier, 256);", "", "window"),
    ("window.cuh", "__syncthreads();  // sums of weights are there", "", "window"),
    ("cluster.cuh", "sm90::wait_for_sent(&shared.units_full, 0);", "", "cluster of 32 heads"),
    ("cluster.cuh", "__syncthreads();\n      weigh();", "weigh();", "cluster of 32 heads"),
]


@pytest.mark.long
@pytest.mark.parametrize(("file", "line", "other", "plan"), ORDERS, ids=lambda x: x.partition(";")[0])
def test_a_missing_order_is_found(file, line, other, plan, tmp_path):
    changed = changed_kernels("sparse_decode", tmp_path)
    if line:
        replace_once(changed / file, line, other or ";")
    made = compiled_to_be_watched("sparse_decode", "sparse_decode", tmp_path, changed)
    command = [sys.executable, decode_on_host.__file__, str(made), plan]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = any(kind in run.stderr for kind in ("read after a write: ", "written after a read: ", "written twice: "))
    assert found == bool(line) and (line or run.returncode == 0), run.stderr

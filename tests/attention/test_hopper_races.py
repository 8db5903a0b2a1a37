"""The SM90 decode kernels on the host, each load and store watched: accesses of shared memory that no barrier orders.

`support/host_cuda/races.h` says what is looked at and what is not. On a GPU racecheck looks for much of the same
(`docs/kernels-checked.md`).
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

import decode_on_host
import pytest
from decode_on_host import CACHES, PLANS, case_and_plan, check_on_host
from host_build import changed_kernels, compiled_once, compiled_to_be_watched, replace_once

from jax_sparse_mla.kernels.sm90.decode_plan import decode_format
from jax_sparse_mla.kv_cache import KVLayout

pytestmark = pytest.mark.no_gpu

CASES = [(layouts, plan) for layouts in CACHES for plan in PLANS]
NOWHERE = (0, 0)


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
    """Where the masks of valid keys are. They reach the consumers of bfloat16 rows by the arrivals of copies alone, and
    such an arrival counts as ordering no other store (docs/kernels-checked.md)."""
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
    changed = changed_kernels("sparse_decode", tmp_path)
    if line:
        replace_once(changed / file, line, other or ";")
    made = compiled_to_be_watched("sparse_decode", "sparse_decode", tmp_path, changed)
    command = [sys.executable, decode_on_host.__file__, str(made), plan]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = any(kind in run.stderr for kind in ("read after a write: ", "written after a read: ", "written twice: "))
    assert found == bool(line) and (line or run.returncode == 0), run.stderr

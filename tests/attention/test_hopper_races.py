"""The SM90 decode kernels on the host, each load and store watched: accesses of shared memory that no barrier orders.

`support/host_cuda/races.h` says what is looked at. On a GPU racecheck looks for the same (`docs/kernels-checked.md`).
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

pytestmark = pytest.mark.no_gpu

PLANS = {
    "persistent, by lengths": (many(2), {"heads": 33}),
    "persistent, cut": (many(3, lengths=False), {"batch": 1, "lengths": "none", "extra_lengths": "none"}),
    "cluster of 16 heads": (few(16, 2), {"heads": 17, "batch": 1, "lengths": "none"}),
    "cluster of 32 heads": (few(32, 3), {"heads": 33, "batch": 1}),
    "wide cluster": (wide(3), {"heads": 33, "batch": 2}),
}
CASES = [(layouts, plan) for layouts in CACHES for plan in PLANS]


def is_bf16(layouts: tuple[str, str]) -> bool:
    return layouts[0].endswith("BF16")


def case_and_plan(layouts: tuple[str, str], name: str):
    plan, setting = PLANS[name]
    return case_of(*layouts, CACHES.index(layouts), **setting), plan


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled_once("sparse_decode", "sparse_decode", tmp_path_factory, watched=True)


@pytest.mark.always(4)
@pytest.mark.parametrize(("layouts", "plan"), CASES, ids=lambda x: x if isinstance(x, str) else "+".join(x))
def test_accesses_have_an_order(layouts, plan, library):
    library.races_copies_release(is_bf16(layouts))  # see below
    before, (case, how) = library.races_found(), case_and_plan(layouts, plan)
    check_on_host(library.sparse_decode_on_host, case, how, seed=3)
    assert library.races_found() == before


@pytest.mark.long
@pytest.mark.parametrize("plan", ["persistent, by lengths", "wide cluster"])
def test_what_copies_of_bfloat16_rows_release(plan, library):
    """The masks of a block's valid keys, and nothing else, reach the consumers by copies' arrivals alone, which order
    no other store by PTX. The stores came long before, and a multiprocessor's shared memory keeps their order."""
    library.races_copies_release(False)
    before, (case, how) = library.races_found(), case_and_plan(("V4_BF16", "V4_BF16"), plan)
    check_on_host(library.sparse_decode_on_host, case, how)
    assert library.races_found() - before == 4  # two words, written at two places of the code


# Of each file, lines that order accesses, and what stands in their place; the numbers may be right all the same.
ORDERS = [
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
    text = (changed / file).read_text()
    assert text.count(line) == 1
    (changed / file).write_text(text.replace(line, other or ";"))
    made = compiled_to_be_watched("sparse_decode", "sparse_decode", tmp_path, changed)
    environ = os.environ | {"PYTHONPATH": str(Path(decode_on_host.__file__).parent)}
    command = [sys.executable, __file__, str(made), plan]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert any(kind in run.stderr for kind in ("read after a write: ", "written after a read: ", "written twice: "))


def main(library: str, plan: str) -> None:
    case, how = case_and_plan(("V32_FP8", "V32_FP8"), plan)
    run_on_host(ctypes.CDLL(library).sparse_decode_on_host, case, how)


if __name__ == "__main__":
    main(*sys.argv[1:])

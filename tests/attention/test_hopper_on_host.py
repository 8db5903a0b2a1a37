"""The code of the SM90 decode kernels, compiled for the host and compared with float64: which thread waits for what,
and every number, without a GPU. `support/decode_on_host.py` says how."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import decode_on_host
import ml_dtypes
import numpy as np
import pytest
from attention_oracle import assert_close_flashmla, decode_cases, decode_oracle
from decode_on_host import (
    CACHES,
    WINDOW,
    WINDOW_LAYOUTS,
    case_of,
    check_on_host,
    few,
    many,
    run_on_host,
    wide,
    window_case,
)
from host_build import changed_kernels, compiled_for_the_host, compiled_once, replace_once

pytestmark = pytest.mark.no_gpu
of_all_caches = pytest.mark.parametrize("layouts", CACHES, ids="+".join)


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    return compiled_once("sparse_decode", "sparse_decode", tmp_path_factory).sparse_decode_on_host


@pytest.mark.always(7)
@of_all_caches
@pytest.mark.parametrize(("groups", "heads", "seed"), [(1, 5, 0), (2, 64, 1), (3, 70, 2), (7, 17, 3)])
def test_rows_of_lengths(layouts, groups, heads, seed, decode):
    """Whole rows and parts of rows, as the lengths say."""
    check_on_host(decode, case_of(*layouts, seed, heads=heads), many(groups), seed)


@pytest.mark.always(1)
@of_all_caches
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_rows_of_one_length(layouts, cut, decode):
    case = case_of(*layouts, 4, lengths="none", extra_lengths="none", q_len=2, hot=cut)
    check_on_host(decode, case, many(4, lengths=False, cut=cut), 4)


@pytest.mark.always(3)
@of_all_caches
@pytest.mark.parametrize(("tile", "parts", "heads"), [(16, 2, 5), (16, 7, 17), (32, 3, 40), (32, 16, 32)])
def test_clusters(layouts, tile, parts, heads, decode):
    """Thread blocks without keys among them."""
    check_on_host(decode, case_of(*layouts, parts, heads=heads, batch=2), few(tile, parts), parts)


# Each of the caches with two numbers of thread blocks.
WIDE = [(2, 5), (6, 70), (3, 64), (16, 33)]
WIDE = [*zip(CACHES, itertools.cycle(WIDE)), *zip(CACHES, itertools.cycle(WIDE[1:] + WIDE[:1]))]


@pytest.mark.always(4)
@pytest.mark.parametrize(("layouts", "sizes"), WIDE, ids=lambda x: "+".join(map(str, x)))
def test_wide_clusters(layouts, sizes, decode):
    """Thread blocks without keys among them, and a last tile of few heads."""
    parts, heads = sizes
    check_on_host(decode, case_of(*layouts, parts, heads=heads, batch=2, hot=parts == 3), wide(parts), parts)


@pytest.mark.always(  # what is longer has thousands of keys, or two tiles of heads, which others have too
    "7-V4_FP8-h3-k64-p2-b4x1-extra100p61-sink-hot",
    "8-V32_FP8-h3-k128-p64-b7x1-extra64p64-sink",
    "10-V4_FP8-h3-k128-p61-b1x3-extra100p61-sink",
    "12-V32_BF16-h16-k128-p61-b7x1",
)
@pytest.mark.parametrize("case", decode_cases(), ids=lambda case: case.name)
def test_wide_clusters_serve_the_cases_of_every_backend(case, decode):
    check_on_host(decode, case, wide(4))


@pytest.mark.always(1)
@of_all_caches
def test_one_cache_and_rows_without_keys(layouts, decode):
    for seed, setting in enumerate(
        [{"rows": "none"}, {"lengths": "batch", "sink": False}, {"page_size": 1, "hot": True}]
    ):
        case = case_of(*layouts, seed, batch=2, extra=None, topk=300, **setting)
        for plan in (many(2), few(16, 4), wide(3)):
            check_on_host(decode, case, plan, seed + 1)


# Columns of one block or two, lengths of a row, of a request or none, and heads of a tile and more.
WINDOWS = [
    {"heads": 64, "lengths": "row", "hot": True},
    {"heads": 70, "lengths": "none", "page_size": 256},
    {"heads": 5, "lengths": "batch", "q_len": 2, "sink": False, "hot": True},
    {"heads": 33, "topk": 65, "page_size": 1},
    {"heads": 16, "topk": 64, "lengths": "none"},
    {"heads": 3, "topk": 1},
    {"heads": 8, "rows": "none"},
]


@pytest.mark.always(5)
@pytest.mark.parametrize("layout", WINDOW_LAYOUTS)
@pytest.mark.parametrize("number", range(len(WINDOWS)))
def test_short_rows(layout, number, decode):
    """The window kernel, and that its results are those of the kernel of many rows to the bit."""
    case = window_case(layout, number, **WINDOWS[number])
    check_on_host(decode, case, WINDOW, number)
    of_many = many(2, lengths=case.topk_length is not None, cut=False)
    for a, b in zip(run_on_host(decode, case, WINDOW, number + 1), run_on_host(decode, case, of_many)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sign", [1, -1])
def test_short_rows_whose_second_block_has_the_larger_scores(sign, decode):
    """By more than what leaves the reference as it is, so that the first block's sums are rescaled."""
    case = window_case("V4_BF16", 1, heads=64, lengths="none", hot=True)
    case = dataclasses.replace(case, softmax_scale=sign * 16 * case.softmax_scale)
    results = run_on_host(decode, case, WINDOW)
    expected = decode_oracle(case)
    for x, wanted, name in zip(results, expected, ("decode.out", "decode.lse")):
        assert_close_flashmla(x, wanted, name)
    for a, b in zip(results, run_on_host(decode, case, many(2, lengths=False, cut=False))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("plan", [few(16, 3), wide(3)], ids=["cluster", "wide"])
@pytest.mark.parametrize("power", [-110, 110])
def test_clusters_add_parts_of_any_magnitude(power, plan, decode):
    """What thread blocks send each other is float16, which would underflow or overflow without its power of two."""
    case = case_of("V4_BF16", "V4_BF16", 5, heads=20, batch=2, extra=None, topk=300)
    factor = 2.0**power
    data = (case.cache.data.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(factor)).astype(ml_dtypes.bfloat16)
    changed = dataclasses.replace(
        case,
        cache=dataclasses.replace(case.cache, data=data.view(np.uint8), rows=case.cache.rows * factor),
        softmax_scale=case.softmax_scale / factor,
    )
    out, lse = run_on_host(decode, changed, plan)
    expected_out, expected_lse = decode_oracle(case)
    assert_close_flashmla(lse, expected_lse, "decode.lse")
    assert_close_flashmla(out / factor, expected_out, "decode.out")


# Of each file, lines without which the kernels are wrong.
NEEDED = {
    "attend.cuh": [
        "sm90::wait(&shared.barriers.weights_full[buffer], turn.parity());",
        "sm90::wait(&shared.barriers.keys_full[turn.buffer()][kHalf], turn.parity());",
        "if constexpr (Layout<kFormat>::kTiles > kWeightTile) sm90::sync_threads(kScoreBarrier + side, 128);",
        "sm90::sync_threads(kSumBarrier, 256);",
        "follow(shared, buffer ^ 1, statistics);",
        "sm90::begin_products();\n#pragma unroll\n  for (int i = 4 * kFirst",
        "if constexpr (kWide) values = sm90::without_rank(values);",
    ],
    "keys.cuh": [
        "sm90::arrive_after_copies(&shared.barriers.slots_full[place]);",
        "sm90::wait(&shared.barriers.slots_full[place], block / kAhead & 1);",
        "sm90::wait(&shared.barriers.keys_empty[turn.buffer()][half], turn.parity() ^ 1);",
        "sm90::wait(&shared.barriers.keys_empty[turn.buffer()][0], turn.parity() ^ 1);",
        "sm90::wait(&shared.barriers.queries_empty, (number++ & 1) ^ 1);",
        "sm90::wait_copies();",
        "sm90::wait(&shared.barriers.scales_full[place], n / kAhead & 1);",
        "sm90::wait(&shared.barriers.rows_empty[place], (block / kAhead & 1) ^ 1);",
        "__syncwarp();\n    sm90::arrive_warp(&shared.barriers.keys_full[turn.buffer()][half], lane);",
    ],
    "rows_bf16.cuh": [
        "sm90::wait(shared.keys_empty(turn.buffer(), half, warp % 4), turn.parity() ^ 1);",
        "for (int i = 0; i < 2; i++) sm90::wait(&shared.barriers.keys_empty[turn.buffer()][i], turn.parity() ^ 1);",
    ],
    "kernel.cuh": [
        "__syncthreads();\n  const Piece piece",
        "if (round == 1) cooperative_groups::this_grid().sync();",
        "__syncthreads();  // all barriers are initialised\n",
    ],
    "wide.cuh": [
        "sm90::wait_cluster();  // no thread block needs its keys\n",
        "sm90::wait_for_sent(&shared.statistics_full, 0);",
        "sm90::wait_for_sent(&shared.values_full, 0);",
    ],
    "window.cuh": [
        "__syncthreads();  // the first half of the keys is there, and what is copied",
        "__syncthreads();  // the second half is there",
        "__syncthreads();  // weights are there",
        "__syncthreads();  // sums of weights are there",
        "sm90::sync_threads(kScoreBarrier, 256);",
        "sm90::wait_copies();",
        "rescale_sums(sums, rescale[0], rescale[1]);",
    ],
    "cluster.cuh": [
        "sm90::wait_cluster();  // all barriers are initialised\n",
        "sync_slice();\n  }",
        "__syncthreads();\n      weigh();",
        "__syncthreads();\n      begin_sums",
        "if (more) sync_slice();",
        "sm90::wait_for_sent(&shared.statistics_full, 0);",
        "sm90::wait_for_sent(&shared.units_full, 0);",
        "sm90::wait_copies();",
    ],
}
AFTER_THE_PRODUCTS = [
    ("begin_scores", "sm90::wait(&shared.barriers.keys_full[turn.buffer()][kHalf], turn.parity());"),
    ("begin_sums", "sm90::wait(&shared.barriers.weights_full[buffer], turn.parity());"),
]


def is_wrong(changed: Path, folder: Path) -> bool:
    """Whether the kernels of a changed folder give wrong numbers, or end the process."""
    return judged(compiled_for_the_host("sparse_decode", "sparse_decode", folder, changed)).returncode != 0


def judged(library: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, decode_on_host.__file__, str(library)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def changed(tmp_path):
    return changed_kernels("sparse_decode", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("file", "number"), [(file, i) for file, all in NEEDED.items() for i in range(len(all))])
def test_each_of_these_lines_is_needed(file, number, changed, tmp_path):
    """Without it the kernels give wrong numbers, or the process ends; of several lines the first one is left out."""
    first, *others = NEEDED[file][number].split("\n", 1)
    replace_once(changed / file, NEEDED[file][number], "\n".join([";", *others]))
    assert is_wrong(changed, tmp_path), first


@pytest.mark.long
@pytest.mark.parametrize(("function", "wait"), AFTER_THE_PRODUCTS)
def test_a_wait_after_the_products_began_is_too_late(function, wait, changed, tmp_path):
    text = (changed / "attend.cuh").read_text()
    begin = text.index(f" {function}(Shared<kFormat>& shared")
    end = text.index("\n}\n", begin)
    body = text[begin:end]
    assert body.count(wait) == 1
    (changed / "attend.cuh").write_text(text[:begin] + body.replace(wait, "") + f"\n  {wait}" + text[end:])
    assert is_wrong(changed, tmp_path)


@pytest.mark.long
def test_the_kernels_as_they_are_pass_the_same(tmp_path):
    run = judged(compiled_for_the_host("sparse_decode", "sparse_decode", tmp_path))
    assert run.returncode == 0, run.stderr

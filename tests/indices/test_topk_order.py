"""Every top-k engine writes the same entries in the same places: exact comparisons with plain JAX.

On a GPU each engine runs through JAX. Without one the CUDA kernels' thread blocks are computed on the host.
"""

from __future__ import annotations

import ctypes

import jax.numpy as jnp
import numpy as np
import pytest
from host_build import compiled_once
from topk_cases import INT_MAX, KINDS, TopkCase, assert_selected, make_case, run_jax

from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.indices.topk import route

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of NaN as bfloat16
METHODS = (None, *TopkTransform)

# --- engines on a GPU -----------------------------------------------------------------------------

# (rows, columns, topk): short rows (few and many), keys in shared memory by one block and by clusters, rows in shared
# memory, candidates by one block and by clusters.
GPU_SHAPES = (
    *((300, 50, 8), (300, 3327, 512), (300, 4096, 2048)),
    *((5, 50, 8), (9, 300, 1), (3, 6, 70), (200, 4096, 512), (7, 4096, 2048), (5, 4096, 4096)),
    *((4, 8192, 2048), (300, 5000, 2048), (300, 8192, 700), (3, 16_384, 512), (1, 32_768, 512), (64, 32_768, 2048)),
    *((300, 32_768, 2048), (1, 131_072, 2048), (20, 100_003, 512), (7, 8192, 3000), (300, 16_384, 3000)),
    *((300, 131_072, 512), (40, 131_072, 512), (3, 262_145, 4096), (2, 1 << 20, 2048), (1, 1_800_001, 512)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", route.TOPK_BACKENDS)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_every_engine_gives_one_result(name, shape, monkeypatch):
    rows, columns, topk = shape
    monkeypatch.setenv("JAX_SPARSE_MLA_TOPK_BACKEND", name)
    call = route.Call(rows, columns, topk, route.DeviceInfo.current())
    if why := route.missing().get(name) or "; ".join(route.TOPK_BACKENDS[name].cannot(call)):
        pytest.skip(why)
    kinds = KINDS if rows * columns < 1 << 20 else ("normal", "mostly zero", "spikes")
    for seed, kind in enumerate(kinds):
        dtype = jnp.bfloat16 if seed % 4 == 3 else np.float32
        case = make_case(seed + columns, shape, kind, METHODS[seed % 3], seed % 2 == 1, dtype)
        first = np.asarray(run_jax(case))
        np.testing.assert_array_equal(first, run_jax(case))
        assert_selected(first, case)


# --- CUDA thread blocks on the host ---------------------------------------------------------------

SHORT = 0  # the capacity that stands for the kernels of short rows: for few of them by 1,024 threads, for many by 256
# (columns, topk, threads of a block, entries that its shared memory holds).
BLOCKS = (
    *((50, 8, 1024, SHORT), (301, 1, 1024, SHORT), (4096, 2048, 1024, SHORT), (4096, 512, 1024, SHORT)),
    *((50, 8, 256, SHORT), (301, 1, 256, SHORT), (4096, 2048, 256, SHORT), (3327, 512, 256, SHORT)),
    *((50, 8, 64, 50), (1024, 512, 256, 1024), (5000, 2048, 64, 5000), (8192, 3000, 256, 8192)),  # in order
    *((8196, 512, 256, 5632), (20_001, 2048, 64, 5632), (20_001, 512, 1024, 8192), (40_000, 4096, 256, 6000)),  # lists
    (200_000, 1000, 64, 4200),  # whose segments do not fit
)
# (columns, topk, threads of a block, blocks of a cluster) of the kernel that holds keys.
HELD = (
    *((4097, 512, 256, 1), (5000, 2048, 64, 1), (9000, 1, 128, 1), (16_384, 512, 256, 1), (20_001, 2048, 512, 1)),
    *((32_768, 512, 512, 1), (32_768, 2048, 1024, 1), (16_390, 2048, 128, 2), (20_003, 700, 64, 4), (70, 8, 64, 8)),
)


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    """A function that computes a case by thread blocks of the CUDA kernels."""
    topk = compiled_once("topk_kernels", "topk", tmp_path_factory).topk

    def run(case: TopkCase, threads: int, capacity: int) -> np.ndarray:
        out = np.full((len(case.logits), case.topk), -99, np.int32)
        arrays = [case.lengths, case.row_starts, case.page_table, case.row_to_request, case.offsets, out]
        arrays = [x if x is None else np.ascontiguousarray(x) for x in (case.logits, *arrays)]
        logits, *integers, out = (x if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in arrays)
        sizes = (*case.logits.shape, case.topk, case.page_size)
        pages = (0, 0) if case.page_table is None else case.page_table.shape
        is_bfloat16 = int(case.logits.dtype == jnp.bfloat16)
        topk(logits, is_bfloat16, *integers, *sizes, *pages, threads, capacity, out)
        return arrays[-1]

    return run


def check_every_kind(on_the_host, shape, threads, capacity):
    for seed, kind in enumerate(KINDS):
        dtype = jnp.bfloat16 if seed % 4 == 3 else np.float32
        case = make_case(seed + shape[1], shape, kind, METHODS[seed % 3], seed % 2 == 1, dtype)
        assert_selected(on_the_host(case, threads, capacity), case)


@pytest.mark.always(3)
@pytest.mark.no_gpu
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_cuda_thread_blocks_give_ascending_positions(block, on_the_host):
    columns, topk, threads, capacity = block
    check_every_kind(on_the_host, (2, columns, topk), threads, capacity)


@pytest.mark.always(2)
@pytest.mark.no_gpu
@pytest.mark.parametrize("block", HELD, ids=str)
def test_keys_in_shared_memory_give_ascending_positions(block, on_the_host):
    columns, topk, threads, blocks = block
    check_every_kind(on_the_host, (3, columns, topk), threads, -blocks)


@pytest.mark.no_gpu
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_keys_in_shared_memory_that_many_logits_share(dtype, blocks, on_the_host):
    """Few that are ranked, those of a list, more than it holds; far above the candidates' bound; small; below 0; both
    zeros and numbers beside them; −inf and NaN; windows that begin and end anywhere."""
    rng = np.random.default_rng(8)
    normal = rng.standard_normal((10, 6001)).astype(np.float32)
    normal[1] = normal[1] / 4 + 20
    normal[2] = normal[2] / 64 + 20
    normal[3] = normal[3] * 1e-6
    normal[4, 100:900] *= 1e30
    normal[5] = -np.abs(normal[5]) - 3
    normal[6] = rng.choice([0.0, -0.0, 1e-42, -1e-42, 1e-40, -1e-40], 6001)
    normal[7] = 1.5
    normal[8] = rng.choice([-np.inf, np.nan, -3.4e38], 6001)
    normal[9] = rng.choice([1.0, 0.0, -0.0, -1.0], 6001, p=[0.04, 0.01, 0.01, 0.94])
    short = np.where(rng.random((10, 701)) < 0.8, rng.standard_normal((10, 701)), rng.choice([-np.inf, np.nan], 701))
    for logits, topk, first in ((normal, 1, 0), (normal, 300, 1), (normal, 300, 2), (normal, 1000, 3), (short, 600, 1)):
        starts = (first + np.arange(10)).astype(np.int32)
        lengths = (logits.shape[1] - starts - rng.integers(0, 9, 10)).astype(np.int32)
        case = TopkCase(logits.astype(np.float32).astype(dtype), lengths, topk, row_starts=starts)
        assert_selected(on_the_host(case, 128, -blocks), case)


@pytest.mark.no_gpu
def test_cuda_thread_blocks_on_clumps_and_ties(on_the_host):
    """All that is chosen stands side by side; all logits are equal; the window begins late and ends early."""
    for columns, threads, capacity in ((4096, 1024, SHORT), (4096, 256, SHORT), (4096, 128, 4096), (20_000, 128, 5632)):
        logits = np.zeros((3, columns), np.float32)
        logits[0, columns // 2 : columns // 2 + 700] = 1
        logits[1, -600:] = np.arange(600)
        lengths, starts = np.array([columns, INT_MAX, columns - 9], np.int32), np.array([0, -5, 3], np.int32)
        for topk in (1, 512, 1000):
            case = TopkCase(logits, lengths, topk, row_starts=starts)
            assert_selected(on_the_host(case, threads, capacity), case)


@pytest.mark.no_gpu
def test_keys_in_shared_memory_of_windows_with_few_groups(on_the_host):
    """Hardly more groups than topk; rows of a few pieces; what lies before a window is above all in it."""
    rng = np.random.default_rng(9)
    starts = np.arange(4, dtype=np.int32)

    def check(logits, length, topk):
        lengths = np.full(len(logits), length, np.int32)
        case = TopkCase(logits.astype(np.float32), lengths, topk, row_starts=starts[: len(logits)])
        assert_selected(on_the_host(case, 64, -1), case)

    check(rng.standard_normal((4, 4100)), 3300, 1000)
    for length in (9, 20, 40):
        check(rng.standard_normal((4, 300)), length, 1)
    peaks = np.full((4, 4100), -5.0)
    peaks[:, [500, 600, 700, 800]] = 2, 4, 8, 16
    for row in range(4):
        peaks[row, : starts[row]] = np.inf
    check(peaks, 4000, 4)

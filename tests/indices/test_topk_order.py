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

# (rows, columns, topk): short rows (few and many), rows in shared memory, candidates by one block and by clusters.
GPU_SHAPES = (
    *((300, 50, 8), (300, 3327, 512), (300, 4096, 2048)),
    *((5, 50, 8), (9, 300, 1), (3, 6, 70), (200, 4096, 512), (7, 4096, 2048), (5, 4096, 4096)),
    *((4, 8192, 2048), (300, 5000, 2048), (300, 8192, 700), (3, 16_384, 512), (1, 32_768, 512), (64, 32_768, 2048)),
    *((1, 131_072, 2048), (300, 131_072, 512), (3, 262_145, 4096), (2, 1 << 20, 2048), (1, 1_800_001, 512)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", route.TOPK_BACKENDS)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_every_engine_gives_one_result(name, shape, monkeypatch):
    rows, columns, topk = shape
    monkeypatch.setenv("JAX_SPARSE_MLA_TOPK_BACKEND", name)
    call = route.Call(rows, columns, topk, route.DeviceInfo.current().compute_capability)
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


@pytest.mark.always(3)
@pytest.mark.no_gpu
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_cuda_thread_blocks_give_ascending_positions(block, on_the_host):
    columns, topk, threads, capacity = block
    for seed, kind in enumerate(KINDS):
        dtype = jnp.bfloat16 if seed % 4 == 3 else np.float32
        case = make_case(seed, (2, columns, topk), kind, METHODS[seed % 3], seed % 2 == 1, dtype)
        assert_selected(on_the_host(case, threads, capacity), case)


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

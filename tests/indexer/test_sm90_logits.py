"""The indexer's logits on SM90 (`kernels_cuda/index_logits`), and `index_topk` of torch.

The kernel's cases run on a GPU and, smaller, on the host: `support/logits_on_host.py`.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ml_dtypes
import ptxas
from logits_on_host import logits_function, logits_on_host
from sparse_mla_torch.operations import indexer as torch_indexer
from sparse_mla_torch.operations.indexer import index_topk
from test_triton_indexer import assert_logits, exact_logits, logits_case
from triton_device import DEVICE, ON_GPU, tensor

import jax_sparse_mla as mla
from jax_sparse_mla.indexer import select as index_selection
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import IndexKeys, index_logits, logits_of
from jax_sparse_mla.indexer.route import FROM_ROWS
from jax_sparse_mla.indexer.select import INVARIANT_ROWS, rows_at_once
from jax_sparse_mla.indexer.triton import PREFILL_ROWS
from jax_sparse_mla.launch import build

pytestmark = pytest.mark.torch

PAGED, RAGGED = mla.TopkTransform.PAGED, mla.TopkTransform.RAGGED
# A call has as many rows, of which some may be computed at a time: what the kernel serves.
MANY_ROWS = {"rows_of_call": 256} if ON_GPU else {}
SHAPES = [(301, 64, 9, 64), (256, 64, 3, 320), (263, 64, 5, 128), (1000, 64, 2, 256), (257, 64, 1, 64)]


@pytest.mark.long
@pytest.mark.no_gpu
def test_its_products_are_not_serialised(tmp_path):
    """What ptxas says where registers are short or a wait is missing; the products then run one by one."""
    said = ptxas.said_of("index_logits", tmp_path)
    assert "Performance Loss" not in said and "warpgroup.wait is injected" not in said, said
    spills = re.findall(r"Function properties for \S*fp4_logits\S*\s+(.*)", said)
    assert spills == ["0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"] * 3, said


@pytest.fixture(scope="module")
def logits(tmp_path_factory):
    return logits_function(IndexFormat.FP8, tmp_path_factory)


@pytest.fixture
def on_sm90():
    if torch.cuda.get_device_capability() != (9, 0) or build.module("index_logits", "90a") is None:
        pytest.skip("needs SM90, and the kernel's binary")


def sizes_here(rows: int, heads: int, pages: int, page_size: int) -> tuple[int, int, int, int]:
    """Fewer rows on the host."""
    return (rows if ON_GPU else rows % 17 + 5), heads, pages, page_size


@pytest.mark.always(10 if ON_GPU else 2)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits(shape, shared, logits):
    case = logits_case(np.random.default_rng(11), *sizes_here(*shape), shared=shared)
    assert_logits(logits(case, **MANY_ROWS), *exact_logits(*case))


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="is compiled for the host")
def test_the_build_for_racecheck_gives_the_same_logits(tmp_path_factory):
    logits = logits_on_host(IndexFormat.FP8, tmp_path_factory, "EVERY_LANE_ARRIVES")
    for shared in (True, False):
        case = logits_case(np.random.default_rng(13), 21, 64, 9, 64, shared=shared)
        assert_logits(logits(case), *exact_logits(*case))


@pytest.mark.skipif(ON_GPU, reason="chooses the number of thread blocks, and when warps have their turns")
def test_neither_thread_blocks_nor_turns_change_a_bit(logits):
    case = logits_case(np.random.default_rng(21), 19, 64, 9, 64, shared=True)
    first = logits(case, blocks=1)
    for blocks in (2, 5):
        np.testing.assert_array_equal(logits(case, blocks=blocks, seed=blocks).view(np.int32), first.view(np.int32))


@pytest.mark.skipif(ON_GPU, reason="looks at operands while their product is under way")
@pytest.mark.always(1)
@pytest.mark.parametrize("seed", (2, 3, 4))
def test_no_copy_goes_where_products_of_a_row_without_keys_read(seed, logits):
    case = logits_case(np.random.default_rng(seed), 21, 64, 9, 64, shared=False)
    table, lengths = case[3:]
    table[0], lengths[:] = -1, np.maximum(lengths, 100)
    assert_logits(logits(case, blocks=1, seed=seed), *exact_logits(*case))


def test_a_row_s_bits_do_not_depend_on_the_others(logits):
    rows = 301 if ON_GPU else 21
    case = logits_case(np.random.default_rng(12), rows, 64, 9, 64, shared=True)
    together = logits(case, **MANY_ROWS)
    for some in (slice(0, 1), slice(3, 17), slice(rows // 3, rows), slice(None, None, -1)):
        others = [np.ascontiguousarray(x[some]) if i != 2 else x for i, x in enumerate(case)]
        alone = logits(others, **MANY_ROWS)
        np.testing.assert_array_equal(alone.view(np.int32), together[some].view(np.int32))


def test_what_nobody_reads_is_not_filled(logits):
    case = logits_case(np.random.default_rng(13), *sizes_here(301, 64, 9, 64))
    filled, sparse, lengths = logits(case, **MANY_ROWS), logits(case, fill=False, **MANY_ROWS), case[4]
    end = -(-np.clip(lengths, 0, 9 * 64) // 256) * 256
    written = np.arange(9 * 64) < end[:, None]
    np.testing.assert_array_equal(sparse[written], filled[written])
    assert np.isnan(sparse[~written]).all() and np.isneginf(filled[~written]).all()


@pytest.mark.gpu
def test_a_layer_of_a_pool_through_jax(logits):
    q, weights, cache, table, lengths = logits_case(np.random.default_rng(14), 301, 64, 9, 64, shared=True)
    poison = np.full_like(cache, 0xFF)
    pool = IndexKeys(data=jnp.asarray(np.concatenate([poison, cache, poison])), num_layers=3).layer(1)
    arguments = [jnp.asarray(x) for x in (q, weights)], [jnp.asarray(x) for x in (table, lengths)]
    got = jax.jit(index_logits)(*arguments[0], pool, *arguments[1])
    np.testing.assert_array_equal(np.asarray(got), logits((q, weights, cache, table, lengths), **MANY_ROWS))


# --- torch's index_topk ---------------------------------------------------------------------------


def whole_numbers(rng, rows, requests, pages, page_size, heads):
    """Arguments whose logits are exact, with ties, and what follows them: (arrays, kv table, request, offset)."""
    num_pages = requests * pages + 1
    q = rng.integers(-1, 2, (rows, heads, 128)).astype(ml_dtypes.float8_e4m3fn)
    weights = rng.integers(-2, 3, (rows, heads)).astype(np.float32)
    cache = np.zeros((num_pages, page_size * 132), np.uint8)
    keys = rng.integers(-2, 3, (num_pages, page_size * 128)).astype(ml_dtypes.float8_e4m3fn)
    cache[:, : page_size * 128] = keys.view(np.uint8)
    cache[:, page_size * 128 :] = np.ones((num_pages, page_size), np.float32).view(np.uint8)
    table = rng.permutation(num_pages)[: requests * pages].reshape(requests, pages).astype(np.int32)
    lengths = rng.integers(-2, pages * page_size + 2, rows).astype(np.int32)
    kv_table = rng.integers(-1, 40, (requests, pages)).astype(np.int32)
    request, offset = (rng.integers(low, n, rows).astype(np.int32) for low, n in ((-1, requests + 1), (0, 1000)))
    return (q, weights, cache, table, lengths), kv_table, request, offset


def test_rows_that_may_not_depend_on_each_other_take_one_kernel():
    assert rows_at_once(64, 1 << 30, batch_invariant=True) == INVARIANT_ROWS < min(FROM_ROWS, PREFILL_ROWS)
    assert rows_at_once(64, 1 << 30) == 1 << 22 and rows_at_once(1 << 30, 1) == rows_at_once(0, 0) == 1


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float32])
def test_logits_do_not_depend_on_the_number_of_rows(dtype):
    """Of 64 heads, as the models have them: of one row, of few, and of as many as come together."""
    rows = index_selection.INVARIANT_ROWS
    q, weights, cache, table, lengths = map(jnp.asarray, logits_case(np.random.default_rng(3), rows, 64, 3, 64))
    q = q.astype(jnp.float32).astype(dtype)

    def bits(count):
        some = q[:count], weights[:count], cache, table[:count], lengths[:count]
        found = index_selection.logits_at_once(*some, batch_invariant=True)
        read = jnp.arange(found.shape[1]) < lengths[:count, None]
        return np.asarray(jnp.where(read, found, 0)).view(np.int32)

    wanted = bits(rows)
    for count in (1, 3, 60):
        np.testing.assert_array_equal(bits(count), wanted[:count])


@pytest.mark.parametrize("rows", [3, 300])
def test_many_rows_take_the_logits_of_few(rows, monkeypatch):
    """At most so many rows are computed together, each alone where there is no kernel."""
    calls = []
    monkeypatch.setattr(
        index_selection, "logits_of", lambda q, *args, **how: calls.append((len(q), how)) or logits_of(q, *args, **how)
    )
    q, weights, cache, table, lengths = map(jnp.asarray, logits_case(np.random.default_rng(4), rows, 2, 3, 64))
    arrays = q, weights, cache, table, lengths
    index_selection.selected_positions(*arrays, 16, batch_invariant=True)
    assert calls == [(min(rows, index_selection.INVARIANT_ROWS), {"rows_of_call": None, "fill": False, "alone": True})]


@pytest.mark.parametrize("method", [PAGED, RAGGED])
@pytest.mark.parametrize("rows_at_a_time", [2, None])
def test_torch_selects_what_jax_selects(method, rows_at_a_time):
    arrays, kv_table, request, offset = whole_numbers(np.random.default_rng(15), 5, 2, 3, 32, 4)
    options = {"method": method, "page_size": 32}
    given = {"kv_page_table": kv_table, "row_to_request": request, "topk_indices_offset": offset}
    want = mla.index_topk(*map(jnp.asarray, arrays), 16, **options, **{k: jnp.asarray(v) for k, v in given.items()})
    scratch = rows_at_a_time and torch.full((rows_at_a_time * 96,), float("nan"), device=DEVICE)
    out = torch.full((5, 16), -9, dtype=torch.int32, device=DEVICE)
    tensors = {k: tensor(v) for k, v in given.items()}
    invariant = {"batch_invariant": rows_at_a_time is None}
    torch.set_default_dtype(torch.bfloat16)  # as engines do while they build a model
    try:
        got = index_topk(*map(tensor, arrays), 16, **options, **tensors, **invariant, out=out, scratch=scratch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got is out
    np.testing.assert_array_equal(got.cpu().numpy(), np.asarray(want))


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["q", "weights", "index_cache"])
def test_tensors_that_are_not_aligned_go_to_triton(which, on_sm90):
    case = logits_case(np.random.default_rng(18), 301, 64, 9, 64, shared=True)
    arrays = dict(zip(("q", "weights", "index_cache", "page_table", "lengths"), map(tensor, case)))
    arrays[which] = moved(arrays[which], 4 if which == "index_cache" else 1)
    assert_logits(torch_indexer.index_logits(**arrays), *exact_logits(*case))


def test_scales_that_are_not_aligned_are_refused():
    q, weights, cache, table, lengths = map(tensor, logits_case(np.random.default_rng(20), 3, 2, 2, 16, shared=True))
    with pytest.raises(ValueError, match="index_cache must begin at a multiple of 4 bytes"):
        torch_indexer.index_logits(q, weights, moved(cache, 1), table, lengths)


def moved(x: torch.Tensor, elements: int) -> torch.Tensor:
    """The tensor, so many elements behind the beginning of its memory."""
    memory = torch.empty(x.numel() + elements, dtype=x.dtype, device=DEVICE)
    return memory[elements:].view(x.shape).copy_(x)


@pytest.mark.parametrize("pages, width, requests", [(0, 3, 2), (7, 0, 2), (7, 3, 0)])
def test_torch_and_jax_agree_on_nothing_to_read(pages, width, requests):
    (q, weights, cache, table, lengths), kv_table, request, _ = whole_numbers(np.random.default_rng(19), 5, 2, 3, 32, 4)
    arrays = q, weights, cache[:pages], table[:requests, :width], lengths
    given = {"kv_page_table": kv_table[:requests], "row_to_request": request}
    options = {"method": PAGED, "page_size": 32}
    want = mla.index_topk(*map(jnp.asarray, arrays), 16, **options, **{k: jnp.asarray(v) for k, v in given.items()})
    arrays = [tensor(np.ascontiguousarray(x)) for x in arrays]
    got = index_topk(*arrays, 16, **options, **{k: tensor(np.ascontiguousarray(v)) for k, v in given.items()})
    np.testing.assert_array_equal(got.cpu().numpy(), np.asarray(want))


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("method", [PAGED, RAGGED])
def test_many_rows_in_parts(method, batch_invariant, on_sm90):
    """Torch's and JAX's, in parts that alone would be too few rows for the kernel, against whole logits."""
    arrays, kv_table, request, offset = whole_numbers(np.random.default_rng(16), 700, 3, 20, 64, 64)
    given = {"kv_page_table": kv_table, "row_to_request": request, "topk_indices_offset": offset}
    options = {"method": method, "page_size": 64}
    want = mla.index_topk(*map(jnp.asarray, arrays), 256, **options, **{k: jnp.asarray(v) for k, v in given.items()})
    scratch = torch.full((100 * 1280,), float("nan"), device=DEVICE)
    options |= {"scratch": scratch, "batch_invariant": batch_invariant}
    got = index_topk(*map(tensor, arrays), 256, **options, **{k: tensor(v) for k, v in given.items()})
    np.testing.assert_array_equal(got.cpu().numpy(), np.asarray(want))


def test_what_is_missing_is_named():
    arrays, kv_table, request, _ = whole_numbers(np.random.default_rng(17), 5, 2, 3, 32, 4)
    arrays = [tensor(x) for x in arrays]
    with pytest.raises(ValueError, match="index_topk: kv_page_table is missing"):
        index_topk(*arrays, 16, method=PAGED, row_to_request=tensor(request))
    with pytest.raises(ValueError, match="index_topk: topk_indices_offset is missing"):
        index_topk(*arrays, 16, method=RAGGED, row_to_request=tensor(request))
    with pytest.raises(TypeError, match="method must be"):
        index_topk(*arrays, 16, method="paged", row_to_request=tensor(request))
    with pytest.raises(ValueError, match="at least 96 elements"):
        options = {"kv_page_table": tensor(kv_table), "row_to_request": tensor(request)}
        index_topk(*arrays, 16, method=PAGED, **options, scratch=torch.zeros(95, device=DEVICE))

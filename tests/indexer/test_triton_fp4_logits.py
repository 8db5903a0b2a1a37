"""The logits of FP4 index keys by Triton's kernels, against float64 and the plain function.

Without a GPU they run in Triton's interpreter through the torch launchers. On a GPU the same tests launch them for
real, and those marked `gpu` go through JAX's dispatch.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ml_dtypes
from sparse_mla_torch.operations import indexer as torch_indexer
from test_triton_indexer import (
    DECODE_SHAPES,
    HOSTILE,
    NUM_PAGES,
    PROPERTY,
    TILE_SHAPES,
    assert_logits,
    logits_of_keys,
    tables_case,
)
from triton_bounds import within
from triton_device import DEVICE, ON_GPU, tensor
from without_backend import without

from jax_sparse_mla.indexer import triton as kernels
from jax_sparse_mla.indexer import triton_scores as index_scores
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import (
    IndexKeys,
    gather_index_k,
    index_logits,
    logits_of,
    quantize_index_q,
    write_index_k,
)
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities and NaN in the interpreter
]

DIM = 128
WRITERS = ("sglang", "vllm")

# Exponents of the keys' scales: those that e5m2 holds, and others, for which a run is scored in bfloat16.
MODERATE, WILD = (-8, 8), (-60, 60)
WAYS = ({}, {"wild_q": True}, {"exponents": WILD})  # on the grid; queries and keys that are not

# Rows, heads, pages, page size: pages of half a block, of several, of a part, and of what divides none.
BOUND_SHAPES = [(3, 2, 3, 64), (3, 2, 5, 32), (2, 3, 3, 128), (2, 2, 2, 256), (3, 2, 9, 11), (2, 2, 3, 100)]


@pytest.fixture(autouse=True, scope="module")
def without_the_kernel_of_sm90():
    """It has the same cases in `test_sm90_fp4_logits.py`."""

    def forget():  # what was chosen of the same sizes
        torch_indexer._cuda_kernel.cache_clear()
        logits_of.clear_cache()

    forget()
    with without(LOGITS_BACKENDS, "hopper_fp4"):
        yield
    forget()


def keys_of(data: np.ndarray, writer: str = "sglang") -> IndexKeys:
    return IndexKeys(data=jnp.asarray(data), format=IndexFormat.FP4.written_by(writer))


def logits_case(rng, rows, heads, pages, page_size, *, shared=False, writer="sglang", exponents=MODERATE, wild_q=False):
    """q, weights, cache, table, lengths: NaN scales wherever no row may look. Groups of a key have magnitudes of their
    own, some are zero. Queries are on the FP4 grid; with `wild_q` some are not."""
    table, lengths, slots = tables_case(rng, rows, pages, page_size, shared)
    keys = rng.standard_normal((len(slots), 4, DIM // 4)) * np.exp2(rng.integers(*exponents, (len(slots), 4, 1)))
    keys[rng.random((len(slots), 4)) < 0.05] = 0
    cache = keys_of(np.full((NUM_PAGES, page_size * 68), 0xFF, np.uint8), writer)
    cache = np.array(write_index_k(cache, slots, keys.reshape(-1, DIM).astype(np.float32)).data)
    q, weights = queries(rng, rows, heads, wild_q), rng.standard_normal((rows, heads)).astype(np.float32)
    return q, weights, cache, table, lengths


def queries(rng, rows, heads, wild):
    q = rng.standard_normal((rows, heads, 4, DIM // 4)) * np.exp2(rng.integers(-5, 5, (rows, heads, 4, 1)))
    q = np.array(quantize_index_q(q.reshape(rows, heads, DIM).astype(np.float32), format=IndexFormat.FP4)[0])
    if wild:
        q[::2, :, ::3] = (3e5 * rng.standard_normal(q[::2, :, ::3].shape)).astype(ml_dtypes.bfloat16)
        q[1::3, -1] *= ml_dtypes.bfloat16(2.0**-100)
    return q


def exact_logits(q, weights, cache, table, lengths):
    values, scales = gather_index_k(keys_of(cache), np.arange(cache.size // 68, dtype=np.int32))
    keys = np.asarray(values).astype(np.float64) * np.repeat(np.asarray(scales).astype(np.float64), 32, axis=1)
    return logits_of_keys(q, weights, keys, cache, table, lengths)


def torch_logits(q, weights, cache, table, lengths):
    """By the kernels, into a poisoned result."""
    out = torch.full((len(q), table.shape[1] * (cache.shape[1] // 68)), float("nan"), device=DEVICE)
    arguments = map(tensor, (q, weights, cache, table, lengths))
    assert torch_indexer.index_logits(*arguments, format=IndexFormat.FP4, out=out) is out
    return out


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from(DECODE_SHAPES), st.sampled_from(WRITERS), st.sampled_from(WAYS))
def test_decode_logits(seed, shape, writer, way):
    case = logits_case(np.random.default_rng(seed), *shape, writer=writer, **way)
    assert_logits(torch_logits(*case), *exact_logits(*case))


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from(TILE_SHAPES), st.booleans(), st.booleans())
def test_prefill_logits(seed, shape, shared, wild_q):
    case = logits_case(np.random.default_rng(seed), *shape, shared=shared, wild_q=wild_q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PREFILL_ROWS", 1)
        # More than one chunk of columns, the last one cut off.
        patch.setitem(kernels.FP4_PREFILL_OPTIONS, "COLUMNS", 64)
        assert_logits(torch_logits(*case), *exact_logits(*case))


@pytest.mark.skipif(ON_GPU, reason="replaces a device function, in the interpreter")
@pytest.mark.parametrize("named", ["_fp4_fast", "_fp4_slow"])
def test_what_e5m2_holds_is_scored_once(named, monkeypatch):
    """Keys of moderate scales and queries on the grid take the first way alone; others the second, which is enough."""
    rng = np.random.default_rng(3)
    usual = logits_case(rng, 4, 2, 3, 64)
    monkeypatch.setattr(index_scores, named, (lambda *_: 0) if named == "_fp4_fast" else None)
    assert_logits(torch_logits(*usual), *exact_logits(*usual))
    if named == "_fp4_slow":
        for wild in WAYS[1:]:
            with pytest.raises(Exception, match="NoneType"):
                torch_logits(*logits_case(rng, 4, 2, 3, 64, **wild))


@pytest.mark.skipif(ON_GPU, reason="by the interpreter; compute-sanitizer looks on a GPU")
@pytest.mark.always(2)
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("shape", BOUND_SHAPES, ids=str)
def test_no_access_leaves_the_tensors(shape, tiles, monkeypatch):
    """With hostile tables, odd numbers of pages, both ways of scoring, and all lengths that are near a boundary."""
    if tiles:
        monkeypatch.setattr(kernels, "PREFILL_ROWS", 1)
        monkeypatch.setitem(kernels.FP4_PREFILL_OPTIONS, "COLUMNS", 64)
    rows, _, pages, page_size = shape
    capacity = pages * page_size
    for wild in WAYS:
        case = logits_case(np.random.default_rng(12), *shape, shared=True, **wild)
        near = np.array([capacity, capacity - 1, 0, 1, page_size, capacity + 1, -1, *HOSTILE], np.int32)
        given = [*map(tensor, case[:4])]
        out = torch.empty((rows, capacity))
        for lengths in (case[4], np.resize(near, rows)):
            given[4:] = [tensor(lengths)]
            with within(*given, out) as touched:
                torch_indexer.index_logits(*given, format=IndexFormat.FP4, out=out)
            assert sum(touched) >= rows * capacity


@pytest.mark.always(2)
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("page_size", [64, 32, 16])
@pytest.mark.parametrize("far", [0, 200, 383], ids="key {}".format)
def test_one_key_that_e5m2_does_not_hold(far, page_size, tiles, monkeypatch):
    """The run in which it lies is scored again, and every other key's logit is what it was; so is one that is NaN."""
    if tiles:
        monkeypatch.setattr(kernels, "PREFILL_ROWS", 1)
    rng = np.random.default_rng(13)
    pages = 384 // page_size
    q, weights = queries(rng, 4, 4, False), rng.standard_normal((4, 4)).astype(np.float32)
    cache = rng.integers(0, 256, (pages, page_size * 68), dtype=np.uint8)
    cache[:, page_size * 64 :] = 127 + rng.integers(-13, 14, (pages, page_size * 4))
    table = np.tile(rng.permutation(pages).astype(np.int32), (4, 1))
    lengths = np.array([384, far + 1, far, 77], np.int32)
    before = torch_logits(q, weights, cache, table, lengths).cpu().numpy()
    for scale in (113, 141, 20, 230, 255):  # next to what is held on both sides, further away, and NaN
        cache[table[0, far // page_size], page_size * 64 + far % page_size * 4 + 1] = scale
        got = torch_logits(q, weights, cache, table, lengths).cpu().numpy()
        want, magnitude = exact_logits(q, weights, cache, table, lengths)
        others = np.arange(384) != far
        assert_logits(got[:, others], want[:, others], magnitude[:, others])
        assert_logits(before[:, others], want[:, others], magnitude[:, others])
        if scale == 255:
            assert np.isnan(got[:2, far]).all() and np.isneginf(got[2:, far]).sum() == 1 + (far >= 77)
        else:
            assert_logits(got, want, magnitude)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("wild_q", [False, True], ids=["fast", "slow"])
def test_pages_beyond_two_gib(wild_q, tiles, monkeypatch):
    """Byte offsets are 64-bit numbers. Of the pool's bytes only the few that are read are ever touched."""
    if tiles:
        monkeypatch.setattr(kernels, "PREFILL_ROWS", 1)
    num_pages, used = (2**32 + 2**22) // (64 * 68), 3
    few = logits_case(np.random.default_rng(14), 2, 4, used, 64, wild_q=wild_q)
    q, weights, cache, _, _ = few
    cache = cache[:used]
    cache[:, 64 * 64 :] = 127
    places = np.array([num_pages - 1, num_pages // 2 + 1, num_pages // 4 * 3], np.int32)
    assert int(places.min()) * 64 * 68 > 2**31 and int(places.max()) * 64 * 68 > 2**32
    pool = torch.empty((num_pages, 64 * 68), dtype=torch.uint8, device=DEVICE)
    pool[:1] = 0xFF
    pool[torch.from_numpy(places).to(DEVICE).long()] = tensor(cache)
    lengths = np.array([192, 130], np.int32)
    out = torch.full((2, 192), float("nan"), device=DEVICE)
    given = tensor(q), tensor(weights), pool, tensor(np.tile(places, (2, 1))), tensor(lengths)
    with contextlib.nullcontext() if ON_GPU else within(*given, out):
        torch_indexer.index_logits(*given, format=IndexFormat.FP4, out=out)
    table = np.tile(np.arange(used, dtype=np.int32), (2, 1))
    assert_logits(out, *exact_logits(q, weights, cache, table, lengths))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("page_size", [64, 128, 16])
def test_products_and_sums_of_small_numbers_are_exact(tiles, page_size, monkeypatch):
    """Every partial sum has few bits, so neither the order nor the precision of the sums matters."""
    if tiles:
        monkeypatch.setattr(kernels, "PREFILL_ROWS", 1)
    rng = np.random.default_rng(5)
    q = rng.choice(np.array([-1, 0, 0.5, 1, 1.5]), (4, 32, DIM)).astype(ml_dtypes.bfloat16)
    weights = rng.integers(-4, 5, (4, 32)).astype(np.float32)
    cache = rng.integers(0, 256, (384 // page_size, page_size * 68), dtype=np.uint8)
    cache[:, page_size * 64 :] = 127 + rng.integers(-1, 2, (384 // page_size, page_size * 4))
    table = np.tile(rng.permutation(384 // page_size).astype(np.int32), (4, 1))
    case = q, weights, cache, table, np.array([384, 200, 64, 1], np.int32)
    np.testing.assert_array_equal(torch_logits(*case).cpu().numpy(), exact_logits(*case)[0].astype(np.float32))


def test_bad_tensors_are_refused_by_name():
    q, weights, cache, table, lengths = logits_case(np.random.default_rng(7), 2, 4, 3, 64)
    others = [tensor(x) for x in (weights, cache, table, lengths)]
    with pytest.raises(TypeError, match="index_logits: q must be"):
        torch_indexer.index_logits(tensor(q.astype(np.float32)), *others, format=IndexFormat.FP4)
    with pytest.raises(ValueError, match="page_size \\* 132 bytes"):
        torch_indexer.index_logits(tensor(q), *others)
    with pytest.raises(ValueError, match="FP4 keys must begin at a multiple of 16 bytes"):
        cache = torch.cat([others[1].ravel(), others[1].ravel()[:4]])[4:].view_as(others[1])
        torch_indexer.index_logits(tensor(q), others[0], cache, *others[2:], format=IndexFormat.FP4)
    with pytest.raises(ValueError, match="page_size \\* 68 bytes"):
        others[1] = others[1][:, :100].contiguous()
        torch_indexer.index_logits(tensor(q), *others, format=IndexFormat.FP4)


# --- through JAX, on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 32, 9, 64), (64, 64, 5, 128), (301, 32, 9, 64), (5, 33, 3, 16)], ids=str)
@pytest.mark.parametrize("wild", WAYS, ids=str)
def test_jax_logits(shape, wild):
    case = logits_case(np.random.default_rng(10), *shape, shared=True, **wild)
    q, weights, cache, table, lengths = case
    arguments = jnp.asarray(q), weights, keys_of(cache), table, lengths
    assert "jax_sparse_mla.index_logits" in jax.jit(index_logits).lower(*arguments).as_text()
    assert_logits(index_logits(*arguments), *exact_logits(*case))


@pytest.mark.gpu
def test_jax_logits_of_e4m3_queries_in_a_view_of_a_layer():
    q, *others = logits_case(np.random.default_rng(11), 7, 32, 5, 64)
    q = q.astype(ml_dtypes.float8_e4m3fn)
    weights, cache, table, lengths = others
    layers = np.concatenate([np.full_like(cache, 0xFF), cache, np.full_like(cache, 0xFF)])
    keys = IndexKeys(data=jnp.asarray(layers), num_layers=3, format=IndexFormat.FP4).layer(1)
    assert_logits(index_logits(jnp.asarray(q), weights, keys, table, lengths), *exact_logits(q, *others))

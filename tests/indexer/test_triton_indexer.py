"""The Triton kernels of the indexer against the plain JAX functions, and their compilation, with the compressor's.

Without a GPU they run in Triton's interpreter through the torch launchers, and are compiled for the architectures
that they serve. On a GPU the same tests launch them for real, and those marked `gpu` go through JAX's dispatch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_facts import ARCHITECTURES, LEAST_SHARED_MEMORY, SHARED_MEMORY, compiled_facts
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ml_dtypes
from sparse_mla_torch.operations import indexer as torch_indexer
from torch_graphs import capture
from triton_device import DEVICE, ON_GPU, tensor

from jax_sparse_mla.indexer import triton as kernels
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import (
    gather_index_k,
    index_logits,
    quantize_index_q,
    quantize_index_q_reference,
    write_index_k,
    write_index_k_reference,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities and NaN in the interpreter
]

DIM = 128
NUM_PAGES = 11
HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
PROPERTY = settings(max_examples=8, deadline=None)

# Of the sum of the magnitudes of a logit's terms. Hopper's FP8 tensor cores keep about 14 bits of a sum of products
# (as for every peer that uses them); float32 sums elsewhere.
LOGITS_TOLERANCE = 2.0**-12 if ON_GPU else 1e-5

plain_write = jax.jit(write_index_k_reference, static_argnames="hadamard")
plain_quantize = jax.jit(quantize_index_q_reference, static_argnames="hadamard")


# --- data -----------------------------------------------------------------------------------------


def keys_of_every_kind(n: int, seed: int) -> np.ndarray:
    """float32: of all magnitudes, zero, subnormal, infinite, the largest, and powers of two."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, DIM)).astype(np.float32) * np.exp2(rng.integers(-30, 100, (n, 1))).astype(np.float32)
    rows[1::9] = 0.0
    rows[2::9] *= np.float32(1e-38)
    rows[3::9] = np.sign(rows[3::9]) * np.float32(3.4e38)
    rows[4::9, ::5] = -np.inf
    rows[5::9] = np.exp2(rng.integers(-12, 9, rows[5::9].shape)).astype(np.float32) * 1.75
    return rows


def hostile_slots(rng, n: int, num_slots: int) -> np.ndarray:
    """Distinct slots, the last one among them, some replaced by slots that do not exist."""
    slots = rng.permutation(max(num_slots, n))[:n].astype(np.int32)
    slots[rng.random(n) < 0.2] = rng.choice(np.array([*HOSTILE, num_slots], np.int32))
    slots[slots == num_slots - 1] = -1
    slots[n // 2] = num_slots - 1
    return slots


def write_case(rng, n: int, num_pages: int, page_size: int):
    cache = rng.integers(0, 256, (num_pages, page_size * 132), dtype=np.uint8)
    return cache, hostile_slots(rng, n, num_pages * page_size), keys_of_every_kind(n, int(rng.integers(1 << 30)))


def slots_of(table, lengths, num_pages: int, page_size: int):
    """The slots of each row's columns (0 where there is none), and which columns have one."""
    column = np.arange(table.shape[1] * page_size)
    page = table[:, column // page_size]
    valid = (column < lengths[:, None]) & (page >= 0) & (page < num_pages)
    return np.where(valid, page * page_size + column % page_size, 0), valid


def tables_case(rng, rows: int, pages: int, page_size: int, shared: bool):
    """table, lengths, and all slots, −1 for those at which no row may look; holes and hostile numbers in the tables.

    With `shared`, neighbouring rows belong to one request of three: the same pages, lengths that grow by one.
    """
    capacity = pages * page_size
    owner = np.arange(rows) * 3 // rows if shared else np.arange(rows)
    table = rng.integers(0, NUM_PAGES, (rows, pages)).astype(np.int32)
    table[rng.random((rows, pages)) < 0.15] = rng.choice(np.array([*HOSTILE, NUM_PAGES], np.int32))
    table = table[np.searchsorted(owner, owner)]  # that of the request's first row
    lengths = rng.integers(0, capacity + 1, rows).astype(np.int32)
    if shared:
        lengths = np.minimum(lengths[np.searchsorted(owner, owner)] // 2 + np.arange(rows, dtype=np.int32), capacity)
        unread = -(-lengths // page_size)  # what lies past a row's length is not its business
        table = np.where(np.arange(pages) < unread[:, None], table, rng.integers(-3, 20, table.shape)).astype(np.int32)
    lengths[rng.random(rows) < 0.1] = rng.choice(np.array([-3, 0, capacity, capacity + 1, *HOSTILE], np.int32))
    slots, valid = slots_of(table, lengths, NUM_PAGES, page_size)
    every = np.arange(NUM_PAGES * page_size, dtype=np.int32)
    return table, lengths, np.where(np.isin(every, slots[valid]), every, -1)


def logits_case(rng, rows: int, heads: int, pages: int, page_size: int, *, shared: bool = False):
    """q, weights, cache, table, lengths: NaN wherever no row may look."""
    table, lengths, slots = tables_case(rng, rows, pages, page_size, shared)
    keys = rng.standard_normal((len(slots), DIM)).astype(np.float32) * np.exp2(rng.integers(-8, 8, (len(slots), 1)))
    cache = np.full((NUM_PAGES, page_size * 132), 0xFF, np.uint8)
    cache = np.array(plain_write(cache, slots, keys.astype(np.float32)))
    q = (8 * rng.standard_normal((rows, heads, DIM))).astype(ml_dtypes.float8_e4m3fn)
    return q, rng.standard_normal((rows, heads)).astype(np.float32), cache, table, lengths


def logits_of_keys(q, weights, keys, cache, table, lengths):
    """(logits, the sum of the magnitudes of their terms) in float64, −inf where there is none; keys of all slots."""
    q, weights = q.astype(np.float64), weights.astype(np.float64)
    slots, valid = slots_of(table, lengths, len(cache), len(keys) // len(cache))
    keys = np.where(valid[..., None], keys[slots], 0)
    logits = np.einsum("rch,rh->rc", np.maximum(np.einsum("rhd,rcd->rch", q, keys), 0), weights)
    magnitude = np.einsum("rch,rh->rc", np.einsum("rhd,rcd->rch", np.abs(q), np.abs(keys)), np.abs(weights))
    return np.where(valid, logits, -np.inf), magnitude


def exact_logits(q, weights, cache, table, lengths):
    values, scales = gather_index_k(cache, np.arange(cache.size // 132, dtype=np.int32))
    keys = np.asarray(values).astype(np.float64) * np.asarray(scales).astype(np.float64)[:, None]
    return logits_of_keys(q, weights, keys, cache, table, lengths)


def assert_logits(got, want, magnitude):
    got = got.cpu().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    known = ~np.isneginf(want)
    np.testing.assert_array_less(np.abs(got[known] - want[known]), LOGITS_TOLERANCE * magnitude[known] + 1e-30)


def torch_logits(q, weights, cache, table, lengths):
    """By the kernels, into a poisoned result."""
    out = torch.full((len(q), table.shape[1] * (cache.shape[1] // 132)), float("nan"), device=DEVICE)
    arguments = tensor(q), tensor(weights), tensor(cache), tensor(table), tensor(lengths)
    assert torch_indexer.index_logits(*arguments, out=out) is out
    return out


# --- the key cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [(2, 64), (40, 2), (3, 33), (70, 1)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_write_equals_plain_jax_byte_by_byte(geometry, dtype):
    cache, slots, keys = write_case(np.random.default_rng(1), 37, *geometry)
    keys = keys.astype(dtype)
    written = tensor(cache)
    assert torch_indexer.write_index_k(written, tensor(slots), tensor(keys)) is written
    np.testing.assert_array_equal(written.cpu().numpy(), np.asarray(plain_write(cache, slots, keys)))


def test_scales_and_values_are_rounded_correctly():
    """Keys over one binade of largest magnitudes, whose quotients by 448 are of every kind."""
    rng = np.random.default_rng(2)
    top = np.linspace(1, 2, 500, endpoint=False).astype(np.float32)
    keys = top[:, None] * rng.uniform(-1, 1, (500, DIM)).astype(np.float32)
    keys[:, 17] = top
    cache, slots = np.zeros((8, 64 * 132), np.uint8), np.arange(500, dtype=np.int32)
    written = torch_indexer.write_index_k(tensor(cache), tensor(slots), tensor(keys))
    np.testing.assert_array_equal(written.cpu().numpy(), np.asarray(plain_write(cache, slots, keys)))


def test_a_nan_stays_one_and_harms_no_other_key():
    keys = keys_of_every_kind(9, seed=3)
    keys[4, 3] = np.nan
    cache, slots = np.zeros((1, 64 * 132), np.uint8), np.arange(9, dtype=np.int32)
    written = torch_indexer.write_index_k(tensor(cache), tensor(slots), tensor(keys)).cpu().numpy()
    want = np.asarray(plain_write(cache, slots, keys))
    is_nan = (want[0, : 64 * DIM] & 0x7F) == 0x7F
    assert list(np.flatnonzero(is_nan)) == [4 * DIM + 3] and written[0, 4 * DIM + 3] & 0x7F == 0x7F
    written[0, 4 * DIM + 3] = want[0, 4 * DIM + 3]  # a NaN's sign is free
    np.testing.assert_array_equal(written, want)


def stored(values, scale) -> np.ndarray:
    """The numbers that quantised ones stand for."""
    values = values.cpu().view(torch.uint8).numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    scale = scale.cpu().numpy() if isinstance(scale, torch.Tensor) else np.asarray(scale)
    return values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale[..., None]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_quantised_queries(dtype, hadamard):
    """Bit by bit without the transform; with it the sums may round otherwise, by less than a step of e4m3."""
    q = keys_of_every_kind(99, seed=4)
    q = (np.clip(np.where(np.isfinite(q), q, 1), -1e30, 1e30) if hadamard else q).reshape(33, 3, DIM).astype(dtype)
    values = torch.empty(q.shape, dtype=torch.uint8, device=DEVICE).fill_(0xFF).view(torch.float8_e4m3fn)
    scale = torch.full(q.shape[:2], float("nan"), device=DEVICE)
    torch_indexer.quantize_index_q(tensor(q), hadamard=hadamard, out=(values, scale))
    want_values, want_scale = plain_quantize(q, hadamard=hadamard)
    if not hadamard:
        np.testing.assert_array_equal(values.cpu().view(torch.uint8).numpy(), np.asarray(want_values).view(np.uint8))
        np.testing.assert_array_equal(scale.cpu().numpy(), np.asarray(want_scale))
    np.testing.assert_allclose(scale.cpu().numpy(), np.asarray(want_scale), rtol=1e-5)
    got, want = stored(values, scale), stored(want_values, want_scale)
    step = np.maximum(np.abs(want) / 8, np.asarray(want_scale)[..., None] * 2.0**-9)
    np.testing.assert_array_less(np.abs(got - want), 1.01 * step)
    assert np.mean(got.astype(np.float32) != want.astype(np.float32)) < (0.5 if hadamard else 1e-9)


def test_transformed_keys_are_written():
    keys = keys_of_every_kind(40, seed=4)[6::9].astype(ml_dtypes.bfloat16)
    cache, slots = np.zeros((1, 64 * 132), np.uint8), np.arange(3, 3 + len(keys), dtype=np.int32)
    written = torch_indexer.write_index_k(tensor(cache), tensor(slots), tensor(keys), hadamard=True).cpu().numpy()
    want = np.asarray(plain_write(cache, slots, keys, hadamard=True))
    got, expected = (stored(*gather_index_k(c, slots)) for c in (written, want))
    np.testing.assert_allclose(got, expected, atol=np.abs(expected).max() / 8, rtol=0.13)
    assert np.mean(written != want) < 0.02


# --- logits ---------------------------------------------------------------------------------------

# rows, heads, pages, page size; blocks are 64 columns wide.
DECODE_SHAPES = [(3, 4, 3, 64), (5, 64, 2, 128), (1, 33, 5, 16), (4, 2, 9, 11), (2, 1, 70, 1)]
TILE_SHAPES = [(9, 4, 3, 64), (6, 64, 2, 128), (7, 2, 9, 11), (3, 3, 5, 16)]


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from(DECODE_SHAPES))
def test_decode_logits(seed, shape):
    case = logits_case(np.random.default_rng(seed), *shape)
    assert_logits(torch_logits(*case), *exact_logits(*case))


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from(TILE_SHAPES), st.booleans())
def test_prefill_logits(seed, shape, shared):
    case = logits_case(np.random.default_rng(seed), *shape, shared=shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PREFILL_ROWS", 1)
        # More than one chunk of columns, the last one cut off.
        patch.setitem(kernels.PREFILL_OPTIONS, "COLUMNS", 64)
        assert_logits(torch_logits(*case), *exact_logits(*case))


@pytest.mark.parametrize("tiles", [False, True])
def test_products_and_sums_of_small_integers_are_exact(tiles, monkeypatch):
    """Every partial sum has few bits, so neither the order nor the precision of the sums matters."""
    if tiles:
        monkeypatch.setattr(kernels, "PREFILL_ROWS", 1)
    rng = np.random.default_rng(5)
    q = rng.integers(-1, 2, (4, 64, DIM)).astype(ml_dtypes.float8_e4m3fn)
    weights = rng.integers(-4, 5, (4, 64)).astype(np.float32)
    cache = np.zeros((3, 64 * 132), np.uint8)
    keys = rng.integers(-2, 3, (192, DIM)).astype(np.float32)
    cache[:, : 64 * DIM] = keys.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(3, -1)
    scales = np.exp2(rng.integers(-5, 5, (3, 64))).astype(np.float32)
    cache[:, 64 * DIM :] = scales.view(np.uint8)
    table, lengths = np.tile(np.array([[2, 0, 1]], np.int32), (4, 1)), np.array([192, 100, 64, 1], np.int32)
    got = torch_logits(q, weights, cache, table, lengths).cpu().numpy()
    np.testing.assert_array_equal(got, exact_logits(q, weights, cache, table, lengths)[0].astype(np.float32))


@pytest.mark.parametrize("tiles, shared", [(False, False), (True, False), (True, True)])
def test_what_nobody_reads_is_not_filled(tiles, shared, monkeypatch):
    if tiles:
        monkeypatch.setattr(kernels, "PREFILL_ROWS", 1)
    case = logits_case(np.random.default_rng(8), 9, 4, 5, 64, shared=shared)
    sparse = torch.full((9, 320), float("nan"), device=DEVICE)
    options = {"rows_of_call": 9, "fill": False, "format": IndexFormat.FP8}
    torch_indexer.launch_logits(*map(tensor, case), sparse, **options)
    filled, sparse = (x.cpu().numpy() for x in (torch_logits(*case), sparse))
    behind = np.arange(320) >= -(-np.clip(case[4], 0, 320) // 64)[:, None] * 64
    np.testing.assert_array_equal(sparse[~behind], filled[~behind])
    # A tile may write up to the end of its longest row.
    assert np.isneginf(filled[behind]).all()
    assert not np.isfinite(sparse[behind]).any() and np.isnan(sparse[behind]).any()


def test_a_row_may_be_all_of_a_batch():
    """One row holds nearly all columns, the others none: every program takes its share."""
    rng = np.random.default_rng(6)
    q, weights, cache, table, _ = logits_case(rng, 6, 2, 20, 64)
    case = (
        q,
        weights,
        np.where(cache == 0xFF, 0, cache).astype(np.uint8),
        table,
        np.array([0, 0, 1280, 0, 1, 0], np.int32),
    )
    assert_logits(torch_logits(*case), *exact_logits(*case))


@pytest.mark.parametrize("rows", [64, 8192])
def test_a_wider_page_table_does_not_compile_the_logits_anew(rows):
    """An eager engine's page tables grow from step to step: what follows their width must not be a constant."""
    plans = [kernels.plan_logits(rows, 64, pages, 64, 132) for pages in (2000, 2001, 2048)]
    assert plans[0].constants == plans[1].constants == plans[2].constants


def test_bad_tensors_are_refused_by_name():
    q, weights, cache, table, lengths = map(
        tensor, (np.zeros((2, 4, DIM), np.uint8), *logits_case(np.random.default_rng(7), 2, 4, 3, 64)[1:])
    )
    with pytest.raises(TypeError, match="index_logits: q must be"):
        torch_indexer.index_logits(q, weights, cache, table, lengths)
    q = q.view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="index_logits: weights"):
        torch_indexer.index_logits(q, weights[:1], cache, table, lengths)
    with pytest.raises(ValueError, match="1 to 64 heads, got 65"):
        torch_indexer.index_logits(torch.zeros((2, 65, DIM), device=DEVICE).to(q.dtype), weights, cache, table, lengths)
    with pytest.raises(ValueError, match="page_size \\* 132 bytes"):
        torch_indexer.index_logits(q, weights, cache[:, :100].contiguous(), table, lengths)
    with pytest.raises(ValueError, match="write_index_k: k must have shape"):
        torch_indexer.write_index_k(cache, lengths, weights)


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.long
@ARCHITECTURES
def test_kernels_compile_for_every_architecture_within_its_shared_memory(capabilities, tmp_path):
    for fact in compiled_facts("indexer", tmp_path, capabilities):
        logits = fact["kernel"].startswith("logits")  # its stages follow the device's shared memory
        assert fact["shared"] <= (SHARED_MEMORY[fact["capability"]] if logits else LEAST_SHARED_MEMORY), fact
        # SM80 has no e4m3 type and multiplies float16 numbers.
        fp4, fp8_products = "FP4" in fact["kernel"], fact["capability"] >= 89
        assert (fact["e4m3_products"] or fact["tensor_memory"]) == (logits and not fp4 and fp8_products), fact
        assert not fact["tensor_memory"] or fact["capability"] == 100, fact
        assert fact["e5m2_products"] == (fp4 and fp8_products), fact
        assert not fp4 or fact["bf16_products"], fact  # of what e5m2 does not hold
        assert (fact["side_by_side"] or 0) % 4 == 0 and (fact["side_by_side"] is None) != (fp4 and fp8_products), fact
        assert fact["capability"] != 90 or not logits or fact["wgmma"], fact
        # The transform has one order of its sums, so that the layer's kernel writes the bytes of the others.
        assert logits or fact["operand_widths"] in ([], ["2"]), fact


# --- through JAX, on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 64, 9, 64), (301, 64, 9, 64), (5, 33, 3, 16)], ids=str)
def test_jax_logits(shape):
    case = logits_case(np.random.default_rng(10), *shape, shared=True)
    arguments = [jnp.asarray(x) for x in case]
    assert "jax_sparse_mla.index_logits" in jax.jit(index_logits).lower(*arguments).as_text()
    assert_logits(index_logits(*arguments), *exact_logits(*case))
    with_bf16 = index_logits(arguments[0].astype(jnp.bfloat16), *arguments[1:])  # plain JAX
    np.testing.assert_array_equal(np.isneginf(with_bf16), np.isneginf(index_logits(*arguments)))


@pytest.mark.gpu
def test_jax_writes_keys_in_place_byte_by_byte():
    cache, slots, keys = write_case(np.random.default_rng(11), 100, 5, 64)
    want = np.asarray(plain_write(cache, slots, keys))
    donated = jnp.asarray(cache)
    pointer = donated.unsafe_buffer_pointer()
    written = jax.jit(write_index_k, donate_argnums=0)(donated, slots, keys)
    assert written.unsafe_buffer_pointer() == pointer and donated.is_deleted()
    np.testing.assert_array_equal(np.asarray(written), want)
    values, scale = quantize_index_q(jnp.asarray(keys[None]))
    want_values, want_scale = plain_quantize(keys[None])
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), np.asarray(want_values).view(np.uint8))
    np.testing.assert_array_equal(np.asarray(scale), np.asarray(want_scale))


@pytest.mark.gpu
def test_the_last_slots_of_a_5_gib_cache():
    num_pages, page_size = 640_000, 64  # 5.4e9 bytes
    num_slots = num_pages * page_size
    slots = np.array([num_slots - 1, num_slots - 64, num_slots - 65, 0, 300_000 * 64 + 5, -1, num_slots], np.int32)
    keys = keys_of_every_kind(7, seed=13)
    keys[4] = 1.5
    written = torch_indexer.write_index_k(
        torch.zeros((num_pages, page_size * 132), dtype=torch.uint8, device=DEVICE), tensor(slots), tensor(keys)
    )
    touched = written.view(torch.int32).ne(0).any(dim=1).nonzero().flatten().tolist()
    assert touched == [0, 300_000, num_pages - 2, num_pages - 1]
    small_slots = np.array([255, 192, 191, 0, 69, -1, 256], np.int32)
    small = np.asarray(plain_write(np.zeros((4, 64 * 132), np.uint8), small_slots, keys))
    np.testing.assert_array_equal(written[touched].cpu().numpy(), small)

    rng = np.random.default_rng(14)
    for rows in (3, 300):
        q, weights = logits_case(rng, rows, 64, 4, 64)[:2]
        table = np.tile(np.array([[num_pages - 1, num_pages - 2, 300_000, 0]], np.int32), (rows, 1))
        lengths = np.full(rows, 256, np.int32)
        out = torch_indexer.index_logits(tensor(q), tensor(weights), written, tensor(table), tensor(lengths))
        small_table = np.tile(np.array([[3, 2, 1, 0]], np.int32), (rows, 1))
        want = torch_logits(q, weights, small, small_table, lengths)
        assert torch.equal(out, want) and want.ne(0).any()


@pytest.mark.gpu
def test_torch_captures_the_kernels_in_a_cuda_graph():
    rng = np.random.default_rng(15)
    _, weights, cache, table, lengths = logits_case(rng, 8, 64, 4, 64)
    tensors = [tensor(x) for x in (weights, cache, table, lengths)]
    queries = torch.randn((8, 64, DIM), device=DEVICE, dtype=torch.bfloat16)
    quantised = torch_indexer.quantize_index_q(queries, hadamard=True)
    out = torch.empty((8, 256), device=DEVICE)
    slots, keys = tensor(np.arange(8, dtype=np.int32)), torch.randn((8, DIM), device=DEVICE)

    def step():
        torch_indexer.write_index_k(tensors[1], slots, keys)
        torch_indexer.quantize_index_q(queries, hadamard=True, out=quantised)
        torch_indexer.index_logits(quantised[0], *tensors, out=out)

    step()  # compiles
    graph, _ = capture(step)
    queries.mul_(-1.5)
    slots += 20
    out.fill_(float("nan"))
    graph.replay()
    got = out.clone()
    step()
    assert torch.equal(got.nan_to_num(7.0), out.nan_to_num(7.0)) and not torch.isnan(got).all()

"""indexer: the bytes of the index-K cache, the quantiser, and the logits.

The oracles are torch's and ml_dtypes' casts, numpy's divisions, loops over the formula in float64, and the
scoring of transformers' DeepSeek-V4 and V3.2.
"""

from __future__ import annotations

import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.indexer import logits as indexer
from jax_sparse_mla.indexer.logits import (
    CHUNK_BYTES,
    gather_index_k,
    hadamard_transform,
    index_logits,
    quantize_index_q,
    write_index_k,
)
from jax_sparse_mla.indices import topk_positions
from jax_sparse_mla.launch.dispatch import use_triton

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
DIM = 128
HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
PROPERTY = settings(max_examples=25, deadline=None)
F32_MAX = float(np.finfo(np.float32).max)


# --- oracles ---------------------------------------------------------------------------------------


def quantised(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(e4m3 values, float32 scales) of finite rows, by numpy's float32 operations."""
    rows = rows.astype(np.float32)
    amax = np.maximum(np.abs(rows).max(axis=-1), np.float32(1e-4))
    scale = (amax / np.float32(448)).astype(np.float32)
    inverse = (np.float32(1) / scale).astype(np.float32)
    return np.clip(rows * inverse[..., None], np.float32(-448), np.float32(448)).astype(E4M3), scale


def write_by_hand(cache: np.ndarray, slots, rows: np.ndarray) -> np.ndarray:
    cache, page_size = cache.copy(), cache.shape[1] // 132
    for slot, values, scale in zip(slots, *quantised(rows)):
        if 0 <= slot < cache.shape[0] * page_size:
            page, offset = divmod(int(slot), page_size)
            cache[page, 128 * offset : 128 * offset + 128] = values.view(np.uint8)
            start = 128 * page_size + 4 * offset
            cache[page, start : start + 4] = np.array([scale], "<f4").view(np.uint8)
    return cache


def stored_key(cache: np.ndarray, slot: int) -> tuple[np.ndarray, float]:
    """(values, scale) of a slot, in float64."""
    page_size = cache.shape[1] // 132
    page, offset = divmod(slot, page_size)
    values = cache[page, 128 * offset : 128 * offset + 128].view(E4M3).astype(np.float64)
    start = 128 * page_size + 4 * offset
    return values, float(cache[page, start : start + 4].copy().view("<f4")[0])


def logits_by_hand(q, weights, cache, page_table, lengths) -> tuple[np.ndarray, np.ndarray]:
    """(logits, the sum of the magnitudes of their terms), float64, column by column."""
    page_size = cache.shape[1] // 132
    q, weights = np.asarray(q).astype(np.float64), np.asarray(weights).astype(np.float64)
    rows, pages = page_table.shape
    logits = np.full((rows, pages * page_size), -np.inf)
    magnitude = np.zeros_like(logits)
    for row in range(rows):
        for column in range(min(max(int(lengths[row]), 0), pages * page_size)):
            page = int(page_table[row, column // page_size])
            if 0 <= page < cache.shape[0]:
                values, scale = stored_key(cache, page * page_size + column % page_size)
                logits[row, column] = scale * np.sum(np.maximum(q[row] @ values, 0) * weights[row])
                magnitude[row, column] = scale * np.sum((np.abs(q[row]) @ np.abs(values)) * np.abs(weights[row]))
    return logits, magnitude


def promised_error(q) -> float:
    """Of `index_logits`, in sums of the terms' magnitudes: FP8 tensor cores keep less of a sum than float32 does."""
    return 2.0**-12 if q.dtype == E4M3 and use_triton() else 1e-5


def assert_logits(got, want, magnitude, tolerance=1e-5):
    got = np.asarray(got)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    known = ~np.isneginf(want)
    np.testing.assert_array_less(np.abs(got[known] - want[known]), tolerance * magnitude[known] + 1e-30)


def random_rows(rng, n, *shape):
    """Rows of very different magnitudes, zeros among them."""
    rows = rng.normal(size=(n, *shape)) * 10.0 ** rng.uniform(-6, 6, size=(n, *(1,) * len(shape)))
    return (rows * (rng.random((n, *(1,) * len(shape))) > 0.1)).astype(np.float32)


def filled_cache(rng, num_pages, page_size, slots):
    """A cache that is NaN (0xFF) everywhere but in the given slots."""
    cache = np.full((num_pages, page_size * 132), 0xFF, np.uint8)
    return write_by_hand(cache, slots, random_rows(rng, len(slots), DIM))


# --- the quantiser ---------------------------------------------------------------------------------


def test_scales_are_the_correctly_rounded_quotients_over_the_whole_range():
    rng = np.random.default_rng(0)
    x = np.exp(rng.uniform(np.log(1e-5), np.log(F32_MAX), 300_000)).astype(np.float32)
    edges = (448 * 2.0 ** np.arange(-22, 119)).astype(np.float32)
    one_binade = np.linspace(1, 2, 300_000, endpoint=False).astype(np.float32)
    x = np.concatenate(
        [x, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1e38)), one_binade]
    )
    x = np.concatenate([x, np.float32([0, 1e-4, np.nextafter(np.float32(1e-4), np.float32(1)), F32_MAX])])
    rows = np.stack([x, -x / 3, x * np.float32(0.7)], axis=-1)[:, None]
    values, scale = quantize_index_q(jnp.asarray(rows))
    want_values, want_scale = quantised(rows)
    np.testing.assert_array_equal(np.asarray(scale).view(np.int32), want_scale.view(np.int32))
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), want_values.view(np.uint8))
    # The test can fail: multiplying by a rounded 1/448 is another number for many x.
    assert np.count_nonzero(x * (np.float32(1) / np.float32(448)) != x / np.float32(448)) > 1000


def test_rounding_is_to_nearest_even_also_close_to_the_middle():
    numbers = np.arange(0, 127, dtype=np.uint8).view(E4M3).astype(np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    near = [
        middle,
        np.nextafter(middle, np.float32(500)),
        np.nextafter(middle, np.float32(0)),
        middle * (1 + 2**-12),
    ]
    x = np.concatenate([*near, numbers]).astype(np.float32)
    rows = np.stack([x, np.full_like(x, 448)], axis=-1)[:, None]  # amax 448: the scale is 1
    values, scale = quantize_index_q(jnp.asarray(rows))
    np.testing.assert_array_equal(np.asarray(scale), 1)
    np.testing.assert_array_equal(np.asarray(values)[:, 0, 0].view(np.uint8), x.astype(E4M3).view(np.uint8))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "f32"])
def test_quantiser_equals_torch(dtype):
    torch = pytest.importorskip("torch")
    rows = random_rows(np.random.default_rng(1), 500, 4, DIM).astype(dtype)
    values, scale = quantize_index_q(jnp.asarray(rows))
    x = torch.from_numpy(rows.astype(np.float32))
    want_scale = torch.clamp(x.abs().amax(-1), min=1e-4) / torch.tensor(448.0)
    want = torch.clamp(x * (1.0 / want_scale)[..., None], -448, 448).to(torch.float8_e4m3fn)
    chex.assert_shape(scale, (500, 4))
    np.testing.assert_array_equal(np.asarray(scale), want_scale.numpy())
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), want.view(torch.uint8).numpy())


def test_quantiser_on_zeros_infinities_and_nan():
    x = np.ones((4, 1, DIM), np.float32)
    x[0], x[1, 0, 0], x[2, 0, 5], x[3, 0, 7] = 0, np.inf, -np.inf, np.nan
    values, scale = (np.asarray(part) for part in quantize_index_q(jnp.asarray(x)))
    assert scale[0, 0] == np.float32(1e-4) / np.float32(448)
    assert not values[0].astype(np.float32).any()
    assert values[1, 0, 0] == 448 and values[2, 0, 5] == -448 and np.isfinite(scale).all()
    assert np.isnan(values[3, 0, 7].astype(np.float32))
    assert not np.isnan(values[:3].astype(np.float32)).any()


# --- writing and gathering -------------------------------------------------------------------------


@PROPERTY
@given(
    seed=st.integers(0, 2**32 - 1),
    geometry=st.sampled_from([(3, 64), (5, 2), (2, 1)]),
    dtype=st.sampled_from([BF16, np.float32]),
)
def test_written_bytes(seed, geometry, dtype):
    rng = np.random.default_rng(seed)
    num_pages, page_size = geometry
    num_slots = num_pages * page_size
    slots = rng.permutation(num_slots + 9)[:9].astype(np.int32)  # some past the end
    slots[rng.random(9) < 0.3] = rng.choice(HOSTILE)
    rows = random_rows(rng, 9, DIM).astype(dtype)
    cache = rng.integers(0, 256, (num_pages, page_size * 132), dtype=np.uint8)
    got = write_index_k(jnp.asarray(cache), jnp.asarray(slots), jnp.asarray(rows))
    np.testing.assert_array_equal(np.asarray(got), write_by_hand(cache, slots, rows))


@pytest.mark.parametrize("geometry", [(3, 64), (5, 2)])
def test_gathered_keys_are_the_stored_ones(geometry):
    rng = np.random.default_rng(3)
    num_slots = geometry[0] * geometry[1]
    cache = filled_cache(rng, *geometry, range(0, num_slots, 2))
    slots = np.array([0, num_slots - 2 + num_slots % 2, 2, num_slots, *HOSTILE, 2], np.int32)
    values, scale = gather_index_k(jnp.asarray(cache), jnp.asarray(slots))
    chex.assert_shape([values, scale], [(9, DIM), (9,)])
    assert values.dtype == E4M3 and scale.dtype == np.float32
    for slot, value, s in zip(slots, np.asarray(values), np.asarray(scale)):
        want, want_scale = stored_key(cache, slot) if 0 <= slot < num_slots else (np.zeros(DIM), 0)
        np.testing.assert_array_equal(value.astype(np.float64), want)
        assert s == want_scale


def copies_of(text: str, cache) -> list[str]:
    shape = f"u8[{cache.shape[0]},{cache.shape[1]}]"
    assert shape in text
    return [line for line in text.splitlines() if re.search(re.escape(shape) + r"\S* copy(-start)?\(", line)]


def test_donated_write_and_read_has_no_copy():
    cache, slots = jnp.zeros((40, 64 * 132), jnp.uint8), jnp.arange(5, dtype=jnp.int32)
    rows = jnp.ones((5, DIM), jnp.bfloat16)

    def step(cache, slots, rows):
        cache = write_index_k(cache, slots, rows)
        table, lengths = jnp.zeros((2, 3), jnp.int32), jnp.ones((2,), jnp.int32)
        return cache, index_logits(jnp.ones((2, 4, DIM)), jnp.ones((2, 4)), cache, table, lengths)

    def compiled(donate):
        return jax.jit(step, donate_argnums=donate).lower(cache, slots, rows).compile().as_text()

    assert not copies_of(compiled((0,)), cache)
    assert copies_of(compiled(()), cache)  # the check can fail


# --- logits ----------------------------------------------------------------------------------------


@PROPERTY
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(3, 4, 3, 16), (2, 64, 2, 64), (1, 1, 5, 2)]),  # rows, heads, P, page_size
    dtype=st.sampled_from([E4M3, BF16, np.float32]),
)
def test_logits(seed, shape, dtype):
    rng = np.random.default_rng(seed)
    rows, heads, pages, page_size = shape
    num_pages, capacity = 7, pages * page_size
    page_table = rng.permutation(num_pages)[:pages][None].repeat(rows, 0).astype(np.int32)
    page_table[1:] = rng.integers(0, num_pages, (rows - 1, pages))
    page_table[rng.random((rows, pages)) < 0.15] = rng.choice([*HOSTILE, num_pages])
    lengths = rng.integers(0, capacity + 1, rows).astype(np.int32)
    lengths[rng.random(rows) < 0.2] = rng.choice([-3, 0, capacity, capacity + 1, -(2**31), 2**31 - 1])
    used = set()
    for row in range(rows):
        for column in range(min(max(int(lengths[row]), 0), capacity)):
            page = int(page_table[row, column // page_size])
            if 0 <= page < num_pages:
                used.add(page * page_size + column % page_size)
    cache = filled_cache(rng, num_pages, page_size, sorted(used))  # NaN where no row may look

    q = rng.normal(size=(rows, heads, DIM)).astype(dtype)
    weights = rng.normal(size=(rows, heads)).astype(np.float32)
    got = index_logits(*(jnp.asarray(x) for x in (q, weights, cache, page_table, lengths)))
    chex.assert_shape(got, (rows, capacity))
    assert_logits(got, *logits_by_hand(q, weights, cache, page_table, lengths), promised_error(q))


@pytest.mark.parametrize("dtype", [E4M3, BF16, np.float32], ids=["e4m3", "bf16", "f32"])
def test_products_are_exact(dtype):
    """Small integers, scales powers of two: every partial sum is an integer below 2^24, so nothing rounds."""
    rng = np.random.default_rng(5)
    cache = np.zeros((7, 16 * 132), np.uint8)  # the first shape of test_logits
    keys = rng.integers(-15, 16, (7, 16, DIM)).astype(E4M3)
    cache[:, : 16 * 128] = keys.reshape(7, -1).view(np.uint8)
    cache[:, 16 * 128 :] = (2.0 ** rng.integers(-8, 9, (7, 16))).astype("<f4").view(np.uint8)
    q = rng.integers(-15, 16, (3, 4, DIM)).astype(dtype)
    weights = rng.integers(-15, 16, (3, 4)).astype(np.float32)
    table, lengths = np.array([[0, 1, 4], [2, 3, 5], [6, 0, 3]], np.int32), np.full(3, 48, np.int32)
    got = index_logits(*(jnp.asarray(x) for x in (q, weights, cache, table, lengths)))
    np.testing.assert_array_equal(np.asarray(got), logits_by_hand(q, weights, cache, table, lengths)[0])


@pytest.mark.parametrize("budget", [1, 40_000, 100_000, 10**9])
def test_blocks_of_any_size_give_the_same_logits(monkeypatch, budget):
    """One page a block, several, a row's pages unevenly cut, several rows a chunk."""
    rng = np.random.default_rng(6)
    rows, heads, pages, page_size = 5, 3, 7, 16
    cache = filled_cache(rng, 9, page_size, range(9 * page_size))
    q, weights = (
        rng.normal(size=(rows, heads, DIM)).astype(BF16),
        rng.normal(size=(rows, heads)).astype(np.float32),
    )
    table = rng.integers(0, 9, (rows, pages)).astype(np.int32)
    table[2, 3] = -1
    lengths = np.array([112, 33, 112, 0, 97], np.int32)
    arguments = q, weights, cache, table, lengths
    monkeypatch.setattr(indexer, "CHUNK_BYTES", budget)
    got = jax.jit(lambda *args: indexer.index_logits_reference(*args))(*(jnp.asarray(x) for x in arguments))
    assert_logits(got, *logits_by_hand(*arguments))
    blocks, pages_per_block, chunk = indexer.blocking(rows, heads, pages, page_size, jnp.bfloat16)
    assert (blocks, pages_per_block, chunk) == {
        1: (7, 1, 1),
        40_000: (2, 4, 1),
        100_000: (1, 7, 2),
        10**9: (1, 7, 3),
    }[budget]


def intermediate_shapes(jaxpr):
    """The shapes of all values of a jaxpr, those inside loops and calls included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for parameter in equation.params.values():
            if hasattr(inner := getattr(parameter, "jaxpr", parameter), "eqns"):
                yield from intermediate_shapes(inner)


@pytest.mark.parametrize(
    "rows, pages",
    [(512, 512), (64, 128), (8, 64), (2, 16384)],
    ids=["prefill", "decode", "small", "million"],
)
def test_scores_of_all_heads_are_never_materialised(rows, pages):
    heads, num_pages = 48, 100  # a number of heads that no other dimension has
    arguments = [
        jax.ShapeDtypeStruct((rows, heads, DIM), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        jax.ShapeDtypeStruct((num_pages, 64 * 132), jnp.uint8),
        jax.ShapeDtypeStruct((rows, pages), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    ]
    plain = jax.make_jaxpr(indexer.index_logits_reference)(*arguments)
    columns = pages * 64
    # Two axes at least besides the heads: the scores of some rows.
    scores = [x for x in intermediate_shapes(plain.jaxpr) if heads in x and DIM not in x and len(x) > 2]
    largest = max(int(np.prod(shape)) for shape in scores)
    assert heads * 64 <= largest <= CHUNK_BYTES // 4
    assert largest < rows * heads * columns

    compiled = jax.jit(index_logits).lower(*arguments).compile()  # plain code or the kernel
    shapes = [[int(n) for n in found.split(",")] for found in re.findall(r"\b\w+\[([\d,]+)\]", compiled.as_text())]
    of_heads = [shape for shape in shapes if heads in shape]
    assert [rows, heads, DIM] in of_heads  # q: the text has the shapes
    assert max(int(np.prod(shape)) for shape in of_heads) < rows * heads * columns
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * CHUNK_BYTES + 3 * rows * columns * 4


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(8)
    cache = filled_cache(rng, 6, 8, range(48))
    q = rng.normal(size=(6, 4, DIM)).astype(BF16)
    q[5] = np.nan  # a padding row's garbage
    weights = rng.normal(size=(6, 4)).astype(np.float32)
    table = rng.integers(0, 6, (6, 3)).astype(np.int32)
    lengths = np.array([24, 7, 0, 9, 20, 0], np.int32)
    logits = np.asarray(index_logits(q, weights, cache, table, lengths))
    assert np.isneginf(logits[5]).all() and not np.isnan(logits).any()
    order = np.array([3, 0, 5, 4, 1, 2])
    permuted = index_logits(q[order], weights[order], cache, table[order], lengths[order])
    np.testing.assert_array_equal(np.asarray(permuted), logits[order])


@pytest.mark.parametrize("rows, pages, num_pages", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_empty_shapes(rows, pages, num_pages):
    cache = np.zeros((num_pages, 8 * 132), np.uint8)
    table, lengths = np.zeros((rows, pages), np.int32), np.full((rows,), 9, np.int32)
    q, weights, keys = (np.ones(shape, np.float32) for shape in ((rows, 2, DIM), (rows, 2), (2, DIM)))
    logits = np.asarray(index_logits(q, weights, cache, table, lengths))
    chex.assert_shape(logits, (rows, pages * 8))
    assert np.isneginf(logits).all()
    slots = np.array([0, 3], np.int32)
    assert write_index_k(cache, slots[:0], keys[:0]).shape == cache.shape
    written = write_index_k(cache, slots, keys)
    values, scale = (np.asarray(part) for part in gather_index_k(written, slots))
    assert values.astype(np.float32).any() == scale.any() == (num_pages > 0)


# --- transformers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    return torch


def cached_keys(rng, num_keys, page_size=64):
    """(cache, page table of one request, its keys as the cache holds them, float32)."""
    num_pages = -(-num_keys // page_size) + 2
    table = rng.permutation(num_pages)[: num_pages - 2].astype(np.int32)
    position = np.arange(num_keys)
    slots = (table[position // page_size] * page_size + position % page_size).astype(np.int32)
    cache = jnp.full((num_pages, page_size * 132), 0xFF, jnp.uint8)
    cache = write_index_k(cache, jnp.asarray(slots), jnp.asarray(rng.normal(size=(num_keys, DIM)), jnp.float32))
    values, scale = gather_index_k(cache, jnp.asarray(slots))
    return cache, table, np.asarray(values).astype(np.float32) * np.asarray(scale)[:, None]


@pytest.mark.torch
def test_logits_equal_transformers_v4_scorer(torch):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    rng = np.random.default_rng(9)
    heads, rows, num_keys = 8, 5, 150
    scorer = v4.DeepseekV4IndexerScorer(
        DeepseekV4Config(hidden_size=32, index_n_heads=heads, index_head_dim=DIM, num_hidden_layers=2)
    ).float()
    cache, table, keys = cached_keys(rng, num_keys)
    hidden = torch.from_numpy(rng.normal(size=(1, rows, 32)).astype(np.float32))
    q = rng.normal(size=(rows, heads, DIM)).astype(np.float32)
    with torch.no_grad():
        want = scorer(torch.from_numpy(q)[None], torch.from_numpy(keys)[None], hidden)[0].numpy()
        weights = scorer.weights_proj(hidden)[0].numpy() * np.float32(DIM**-0.5 * heads**-0.5)
    got = index_logits(
        jnp.asarray(q),
        jnp.asarray(weights),
        cache,
        jnp.asarray(np.tile(table, (rows, 1))),
        jnp.full((rows,), num_keys, jnp.int32),
    )
    np.testing.assert_allclose(np.asarray(got)[:, :num_keys], want, rtol=1e-4, atol=1e-4)
    assert np.isneginf(got[:, num_keys:]).all()


@pytest.mark.torch
def test_selection_equals_transformers_v32_indexer(torch):
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config

    rng = np.random.default_rng(10)
    heads, rows, topk = 8, 90, 16
    config = DeepseekV32Config(
        hidden_size=32,
        q_lora_rank=24,
        index_n_heads=heads,
        index_head_dim=DIM,
        index_topk=topk,
        num_hidden_layers=2,
    )
    module = v32.DeepseekV32Indexer(config, layer_idx=0).float()
    cache, table, keys = cached_keys(rng, rows)

    class Keys:  # stands for the model's cache: the keys are ours
        def update_indexer(self, k, layer_idx):
            return torch.from_numpy(keys)[None]

    hidden = torch.from_numpy(rng.normal(size=(1, rows, 32)).astype(np.float32))
    q_resid = torch.from_numpy(rng.normal(size=(1, rows, 24)).astype(np.float32))
    rope = config.qk_rope_head_dim
    no_rope = torch.ones(1, rows, rope), torch.zeros(1, rows, rope)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None]
    with torch.no_grad():
        want = module(hidden, q_resid, no_rope, causal, torch.arange(rows)[None], Keys())[0].numpy()
        q = module.wq_b(q_resid)[0].reshape(rows, heads, DIM).numpy()
        weights = module.weights_proj(hidden)[0].numpy() * np.float32(DIM**-0.5 * heads**-0.5)
    lengths = jnp.arange(1, rows + 1, dtype=jnp.int32)
    logits = index_logits(jnp.asarray(q), jnp.asarray(weights), cache, jnp.asarray(np.tile(table, (rows, 1))), lengths)
    got = np.asarray(topk_positions(logits, lengths, topk))
    for row in range(topk, rows):
        assert set(got[row]) == set(want[row]), row


# --- Hadamard --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_hadamard_is_the_formula(n):
    rng = np.random.default_rng(12)
    bits = np.arange(n)[:, None] & np.arange(n)[None]
    matrix = np.array([[(-1.0) ** int(b).bit_count() for b in row] for row in bits]) / np.sqrt(n)
    x = rng.normal(size=(3, 5, n)).astype(np.float32)
    for function in (hadamard_transform, jax.jit(hadamard_transform)):
        np.testing.assert_allclose(np.asarray(function(jnp.asarray(x))), x @ matrix, atol=2e-6)
    np.testing.assert_allclose(np.asarray(hadamard_transform(hadamard_transform(jnp.asarray(x)))), x, atol=2e-6)
    bf16 = jnp.asarray(x, jnp.bfloat16)
    got = hadamard_transform(bf16)
    assert got.dtype == jnp.bfloat16
    want = np.asarray(bf16).astype(np.float64) @ matrix
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=2**-8, atol=1e-5)


# --- arguments -------------------------------------------------------------------------------------


def test_bad_arguments_of_the_others():
    """What is no public function; those have their cases in `test_bad_input.py`."""
    cache, slots = jnp.zeros((3, 8 * 132), jnp.uint8), jnp.zeros((2,), jnp.int32)
    with pytest.raises(TypeError, match="write_index_k: k must"):
        write_index_k(cache, slots, jnp.zeros((2, DIM), jnp.float8_e4m3fn))
    with pytest.raises(ValueError, match="gather_index_k: slots must"):
        gather_index_k(cache, slots[None])
    with pytest.raises(TypeError, match="quantize_index_q: q must"):
        quantize_index_q(jnp.zeros((2, 4, DIM), jnp.int32))
    with pytest.raises(ValueError, match=r"hadamard_transform: x must .* power of two, got \[2, 96\]"):
        hadamard_transform(jnp.zeros((2, 96)))


def test_a_key_with_a_nan_has_nan_logits_and_harms_no_other():
    """A top-k takes NaN last; a number that stands for it would compete."""
    rng = np.random.default_rng(4)
    rows, heads, pages, page_size = 4, 64, 40, 64
    keys = rng.standard_normal((pages * page_size, DIM)).astype(np.float32)
    keys[::7, 3] = np.nan
    cache = write_index_k(jnp.zeros((pages, page_size * 132), jnp.uint8), jnp.arange(len(keys), dtype=jnp.int32), keys)
    q = jnp.asarray(rng.standard_normal((rows, heads, DIM)), jnp.float8_e4m3fn)
    table = jnp.tile(jnp.arange(pages, dtype=jnp.int32), (rows, 1))
    weights, lengths = rng.standard_normal((rows, heads)).astype(np.float32), np.full(rows, len(keys), np.int32)
    logits = np.asarray(index_logits(q, weights, cache, table, lengths))
    np.testing.assert_array_equal(np.isnan(logits), np.tile(np.arange(len(keys)) % 7 == 0, (rows, 1)))

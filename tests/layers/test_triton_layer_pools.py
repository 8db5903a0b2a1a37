"""The Triton kernels on the pages of one layer among others: what they do on the layer's share alone, and no more.

XLA hands kernels whole arrays, so each takes where its layer begins. Here torch hands them the same, in Triton's
interpreter or on a GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ml_dtypes
from sparse_mla_torch.launch.executor import executor
from triton_attention_cases import run_decode, small_decode
from triton_device import DEVICE, tensor

from jax_sparse_mla import PagedKV, gather_kv, sparse_mla_decode, write_kv
from jax_sparse_mla.attention.index_table import TableShape
from jax_sparse_mla.attention.triton import launch as sparse_mla
from jax_sparse_mla.attention.triton.plan import Tile
from jax_sparse_mla.compressor import triton as compressor
from jax_sparse_mla.indexer import triton as indexer
from jax_sparse_mla.kv_cache import KVLayout
from jax_sparse_mla.kv_cache import triton as kv_cache
from jax_sparse_mla.kv_cache.layout import Pages

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of NaN in the interpreter
]

PAGES, PAGE_SIZE = 5, 4
OURS = slice(PAGES, 2 * PAGES)
WHERE = PAGES, PAGES  # our first page, and how many are ours
SLOTS = np.array([0, 5, -1, 19, 2**31 - 1, 20, -(2**31), 12], np.int32)  # 20 is the next layer's first
LAYOUTS = pytest.mark.parametrize("layout", [KVLayout.V4_FP8, KVLayout.V32_FP8, KVLayout.V4_BF16], ids=repr)


def execute(*args, **kwargs):
    return executor(torch.device(DEVICE))(*args, **kwargs)


execute.device = executor(torch.device(DEVICE)).device


def among_others(array: np.ndarray) -> torch.Tensor:
    """The array between two of the same size that hold NaN or bytes of 0xFF."""
    poison = np.full_like(array, 0xFF if array.dtype == np.uint8 else np.nan)
    return tensor(np.concatenate([poison, array, poison]))


def assert_ours_alone(pool: torch.Tensor, alone: torch.Tensor, before: torch.Tensor) -> None:
    rows = len(alone)
    assert torch.equal(pool[rows : 2 * rows], alone)
    for others in (slice(0, rows), slice(2 * rows, None)):
        a, b = pool[others].cpu().numpy(), before[others].cpu().numpy()
        np.testing.assert_array_equal(a, b)


def random_bytes(*shape) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 120, shape, dtype=np.uint8)


@LAYOUTS
def test_cache_kernels(layout):
    data = random_bytes(PAGES, layout.page_bytes(PAGE_SIZE))
    rows = np.random.default_rng(1).standard_normal((8, layout.qk_dim)).astype(ml_dtypes.bfloat16)
    slots, own, shared = tensor(SLOTS), Pages(layout, PAGE_SIZE, 0, PAGES), Pages(layout, PAGE_SIZE, *WHERE)

    alone, pool, before = tensor(data), among_others(data), among_others(data)
    alone = kv_cache.write_kv(execute, alone, None, slots, tensor(rows), pages=own)
    pool = kv_cache.write_kv(execute, pool, None, slots, tensor(rows), pages=shared)
    assert_ours_alone(pool, alone, before)

    want = kv_cache.gather_kv(execute, alone, None, slots, pages=own)
    got = kv_cache.gather_kv(execute, pool, None, slots, pages=shared)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))

    out, halves = random_bytes(2 * PAGES, layout.page_bytes(2)), Pages(layout, 2, 0, 2 * PAGES)
    want = kv_cache.split_pages(execute, tensor(out), alone, slots, pages=own, out_pages=halves)
    halves = halves._replace(first_page=2 * WHERE[0])
    got = kv_cache.split_pages(execute, among_others(out), pool, slots, pages=shared, out_pages=halves)
    assert_ours_alone(got, want, among_others(out))


@pytest.mark.always(2)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("rows", [2, 70])
def test_index_kernels(hadamard, rows):
    """Few rows and many rows have kernels of their own."""
    rng, slots = np.random.default_rng(2), tensor(SLOTS)
    data, k = np.zeros((PAGES, 16 * 132), np.uint8), rng.standard_normal((8, 128)).astype(np.float32)
    alone, pool, before = tensor(data), among_others(data), among_others(data)
    alone = indexer.write_index_k(execute, alone, slots, tensor(k), hadamard=hadamard)
    pool = indexer.write_index_k(execute, pool, slots, tensor(k), hadamard=hadamard, pages=WHERE)
    assert_ours_alone(pool, alone, before)

    q = tensor(rng.standard_normal((rows, 2, 128)).astype(ml_dtypes.float8_e4m3fn))
    weights = tensor(rng.standard_normal((rows, 2)).astype(np.float32))
    table = tensor(np.tile(np.array([3, 5, -1, 0], np.int32), (rows, 1)))
    lengths = tensor(rng.integers(0, 65, rows).astype(np.int32))
    want = indexer.index_logits(execute, q, weights, alone, table, lengths)
    got = indexer.index_logits(execute, q, weights, pool, table, lengths, pages=WHERE)
    assert torch.equal(got, want)


@pytest.mark.parametrize("ratio", [4, 128])
def test_compressor_kernels(ratio):
    rng, requests, head_dim = np.random.default_rng(3), 5, 16
    width, ring = head_dim * (2 if ratio == 4 else 1), 8 if ratio == 4 else 128
    state = [rng.standard_normal((requests, ring, width)).astype(np.float32) for _ in range(2)]
    step = [
        *(rng.standard_normal((5, width)).astype(np.float32) for _ in range(2)),
        np.array([ratio - 2, ratio - 1, -1, 7 * ratio - 1, 5], np.int32),
        np.array([2, 2, -1, 0, requests], np.int32),  # the last is the next layer's first request
        np.array([0, 2, 3, 4, 5], np.int32),
        rng.standard_normal((ratio, width)).astype(np.float32),
        np.ones(head_dim, np.float32),
        np.ones(4, np.float32),
    ]
    facts = {"ratio": ratio, "norm_eps": 1e-6, "num_entries": 5}
    want = compressor.compress(execute, *map(tensor, [*state, *step]), **facts)
    pool, before = ([among_others(x) for x in state] for _ in range(2))
    got = compressor.compress(execute, *pool, *map(tensor, step), **facts, requests=(requests, requests))
    assert torch.equal(got[0].view(torch.int16), want[0].view(torch.int16)) and torch.equal(got[1], want[1])
    for i in range(2):
        assert_ours_alone(got[2 + i], want[2 + i], before[i])


@pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8", "V4_BF16"])
def test_attention_kernel(layout):
    case = small_decode(5, layout=layout, extra=(30, 2) if layout == "V4_FP8" else None)
    want = run_decode(case, num_splits=1)
    arrays, scopes = [], []
    kv_layout = getattr(KVLayout, layout)
    for cache, indices, lengths in (
        (case.cache, case.indices, case.topk_length),
        (case.extra_cache, case.extra_indices, case.extra_topk_length),
    ):
        if cache is None:
            continue
        pages = len(cache.data)
        per_length = 0 if lengths is None else indices.size // indices.shape[-1] // lengths.size
        arrays.append((among_others(cache.data), tensor(indices), None if lengths is None else tensor(lengths)))
        scopes.append(
            TableShape(
                indices.shape[-1],
                per_length,
                pages * cache.page_size,
                cache.page_size,
                kv_layout.page_bytes(cache.page_size),
                pages,
            )
        )
    q, sink = tensor(case.q), tensor(case.attn_sink)
    rows, heads = int(np.prod(case.q.shape[:-2])), case.q.shape[-2]
    shape = sparse_mla.CallShape(kv_layout, rows, heads, scopes, case.softmax_scale, True)
    tile = Tile(block_h=16, block_n=16, num_warps=4, num_stages=1)
    attend, _ = sparse_mla.launches(shape, execute.device, num_splits=1, tile=tile, native_fp8=True)
    out, lse = execute(attend, sparse_mla.inputs(q, arrays, sink))[:2]
    assert torch.equal(out.cpu().view(torch.int16).reshape(-1), want[0].view(torch.int16).reshape(-1))
    assert torch.equal(lse.cpu().reshape(-1), want[1].reshape(-1))


@pytest.mark.gpu
def test_pools_beyond_2_gib():
    """The last of 43 layers, whose bytes begin beyond 2^31."""
    pool = PagedKV.zeros(KVLayout.V4_FP8, 512, 256, num_layers=43)
    assert pool.layer(42).first_page * pool.data.shape[1] > 2**31
    last, alone = pool.layer(42), PagedKV.zeros(KVLayout.V4_FP8, 512, 256)
    slots = jnp.asarray(np.random.default_rng(0).permutation(alone.num_slots)[:4096], jnp.int32)
    rows = jax.random.normal(jax.random.key(0), (4096, 512), jnp.bfloat16)
    write = jax.jit(write_kv, donate_argnums=0)
    last, alone = write(last, slots, rows), write(alone, slots, rows)
    assert pool.data.is_deleted()  # donated: written in place
    np.testing.assert_array_equal(gather_kv(last, slots).view(jnp.uint16), gather_kv(alone, slots).view(jnp.uint16))
    assert not bool(jnp.any(last.data[: 42 * 512]))
    q = jax.random.normal(jax.random.key(1), (8, 1, 64, 512), jnp.bfloat16)
    attend = jax.jit(lambda cache: sparse_mla_decode(q, cache, slots.reshape(8, 1, 512), softmax_scale=0.05))
    for got, want in zip(attend(last), attend(alone)):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))

"""The Triton kernels of V3.2's metadata, bit by bit against the plain JAX builder; in Triton's interpreter without a
GPU. Compiled for every architecture in test_triton_metadata."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata_cases import DRAFTS, MAX_LEN, MODES, TINY_V32, make_batch, make_tables, to_jax

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from metadata_tensors import DEVICE, INT_MAX, assert_same, poison, tensor
from sparse_mla_torch.operations.metadata import build_v32_metadata

from jax_sparse_mla import metadata
from jax_sparse_mla.indices import TopkTransform
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32, ModelSpec

pytestmark = pytest.mark.torch

PROPERTY = settings(max_examples=10, deadline=None)

SPARSE = {"fp8_kv_cache": True, "prefill_backend": "flashmla_sparse"}
PAGED = {"fp8_kv_cache": True, "prefill_backend": "flashmla_kv"}


def launched(spec, batch, tables, prefill):
    """By the torch launcher into poisoned buffers; arrays of the JAX batch and tables."""
    to_torch = functools.partial(jax.tree.map, lambda x: torch.from_numpy(np.array(x)).to(DEVICE))
    out = poison(to_torch(metadata.build_v32_metadata(spec, batch, tables, **prefill)))
    assert build_v32_metadata(spec, to_torch(batch), to_torch(tables), **prefill, out=out) is out
    return out


@pytest.mark.always("ForwardMode.DECODE", "ForwardMode.EXTEND")
@PROPERTY
@given(
    max_seq_len=st.sampled_from([MAX_LEN, 37, 1000]),
    prefill=st.sampled_from([SPARSE, PAGED]),
    hostile=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.parametrize("mode", MODES)
def test_equals_plain_jax(mode, max_seq_len, prefill, hostile, seed):
    rng = np.random.default_rng(seed)
    table, _ = make_tables(rng, page_size=TINY_V32.page_size, holes=hostile)
    batch, tables = to_jax(mode, make_batch(rng, mode, hostile=hostile), table, max_seq_len=max_seq_len)
    expected = metadata.build_v32_metadata(TINY_V32, batch, tables, **prefill)
    assert_same(launched(TINY_V32, batch, tables, prefill), expected)


def large_step(mode, requests, rows, columns, drafts=None):
    """More requests than a chunk of the sums, more rows and pages than a program's block; some hostile."""
    rng = np.random.default_rng(requests)
    seq_lens = rng.integers(0, columns + 10, requests)
    seq_lens[rng.random(requests) < 0.1] = INT_MAX
    fields = {
        "req_pool_indices": rng.integers(-1, requests + 1, requests),
        "seq_lens": seq_lens,
        "extend_lens": rng.integers(0, max(2 * rows // requests, 2), requests),
        "out_cache_loc": rng.integers(-1, 1 << 20, rows),
    }
    batch, tables = to_jax(mode, fields, rng.integers(-1, 1 << 20, (requests, columns)), max_seq_len=columns)
    return dataclasses.replace(batch, num_draft_tokens=drafts), tables


@pytest.mark.always("ForwardMode.TARGET_VERIFY-70-210-200-3", "ForwardMode.DECODE-3-3-17000-None")
@pytest.mark.parametrize(
    ("mode", "requests", "rows", "columns", "drafts"),
    [
        (ForwardMode.DECODE, 3, 3, 17_000, None),
        (ForwardMode.EXTEND, 1100, 300, 20, None),
        (ForwardMode.TARGET_VERIFY, 70, 210, 200, 3),
    ],
)
def test_several_programs_and_chunks(mode, requests, rows, columns, drafts):
    batch, tables = large_step(mode, requests, rows, columns, drafts)
    expected = metadata.build_v32_metadata(DEEPSEEK_V32, batch, tables, **SPARSE)
    assert_same(launched(DEEPSEEK_V32, batch, tables, SPARSE), expected)


def test_what_it_refuses():
    tables = RequestTables(req_to_token=torch.zeros(2, 64, dtype=torch.int32, device=DEVICE))
    batch = ForwardBatch(
        mode=ForwardMode.DECODE,
        max_seq_len=64,
        req_pool_indices=tensor([0, 1]),
        seq_lens=tensor([1, 2]),
        out_cache_loc=tensor([3, 4]),
    )
    build = functools.partial(build_v32_metadata, DEEPSEEK_V32, **SPARSE)
    with pytest.raises(ValueError, match="spec must be a model without a sliding window"):
        build_v32_metadata(DEEPSEEK_V4_FLASH, batch, tables, **SPARSE)
    pooled = ModelSpec.from_hf_config({"model_type": "glm5_next", "index_kpool": 4})
    with pytest.raises(ValueError, match=r"tokens have an index key each, got glm5_next with pools of 4"):
        build_v32_metadata(pooled, batch, tables, **SPARSE)
    with pytest.raises(
        ValueError, match=r"one entry per request in DECODE, \[2\], got \[6\]; for a step of a multi-step draft"
    ):
        build(dataclasses.replace(batch, out_cache_loc=tensor(range(6))), tables)
    with pytest.raises(TypeError, match=r"batch.seq_lens must be a torch.Tensor, int32 \[B\]"):
        build(dataclasses.replace(batch, seq_lens=batch.seq_lens.long()), tables)
    out = build(batch, tables)
    with pytest.raises(ValueError, match=r"out.topk_transform must be TopkTransform.PAGED"):
        build(batch, tables, out=dataclasses.replace(out, topk_transform=TopkTransform.RAGGED))
    with pytest.raises(ValueError, match=r"out.seqlens_expanded must have shape"):
        build(batch, tables, out=dataclasses.replace(out, seqlens_expanded=tensor([1])))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "requests", "rows", "columns", "drafts"),
    [
        (ForwardMode.DECODE, 64, 64, 131_072, None),
        (ForwardMode.DECODE, 4096, 4096, 2050, None),
        (ForwardMode.EXTEND, 1100, 16_384, 1000, None),
        (ForwardMode.EXTEND, 3, 5000, 70_000, None),
        (ForwardMode.TARGET_VERIFY, 700, 2800, 3000, 4),
        (ForwardMode.DRAFT_EXTEND, 70, 210, 3000, DRAFTS),
        (ForwardMode.IDLE, 3, 7, 3000, None),
    ],
)
@pytest.mark.parametrize("prefill", [SPARSE, PAGED], ids=["sparse", "paged"])
def test_large_steps_on_a_gpu(mode, requests, rows, columns, drafts, prefill):
    batch, tables = large_step(mode, requests, rows, columns, drafts)
    expected = metadata.build_v32_metadata(DEEPSEEK_V32, batch, tables, **prefill)
    assert_same(launched(DEEPSEEK_V32, batch, tables, prefill), expected)

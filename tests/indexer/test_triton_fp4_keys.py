"""The Triton kernels that quantise by the rule of FP4 index keys, byte by byte against the plain JAX functions.

Without a GPU they run in Triton's interpreter. On a GPU the same tests launch them for real, and those marked `gpu` go
through JAX's dispatch.
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
from test_triton_fp4_logits import keys_of
from test_triton_indexer import hostile_slots, keys_of_every_kind
from triton_device import DEVICE, tensor

from jax_sparse_mla.indexer import triton_fp4
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import (
    IndexKeys,
    quantize_index_q,
    quantize_index_q_reference,
    write_index_k,
    write_index_k_reference,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities and NaN in the interpreter
]

EXECUTE = executor(torch.device(DEVICE))
WRITERS = {"sglang": (-13, False), "vllm": (-126, True)}


def numbers(n: int, seed: int, dtype) -> np.ndarray:
    """Of every kind, groups of magnitudes of their own, ties between codes, a NaN, and zeros of both signs."""
    rng = np.random.default_rng(seed)
    rows = keys_of_every_kind(n, seed)
    rows[6::9] = (rng.integers(-24, 25, rows[6::9].shape) / 4).astype(np.float32)
    rows[7::9] *= np.exp2(rng.integers(-60, 20, (len(rows[7::9]), 4))).repeat(32, axis=1).astype(np.float32)
    rows[8::9, 5], rows[8::9, 70] = np.nan, -0.0
    return rows.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("geometry", [(2, 64), (3, 33), (70, 1)], ids=str)
@pytest.mark.always(4)
def test_keys(geometry, writer, dtype):
    """All other bytes stay as they were; slots that do not exist are skipped."""
    rng, (pages, page_size) = np.random.default_rng(1), geometry
    cache = rng.integers(0, 256, (pages, page_size * 68), dtype=np.uint8)
    slots, keys = hostile_slots(rng, 37, pages * page_size), numbers(37, 2, dtype)
    least, keeps_zero = WRITERS[writer]
    written = tensor(cache)
    options = {"hadamard": False, "least_exponent": least, "keeps_zero": keeps_zero}
    triton_fp4.write_index_k(EXECUTE, written, tensor(slots), tensor(keys), **options)
    wanted = write_index_k_reference(keys_of(cache, writer), jnp.asarray(slots), jnp.asarray(keys)).data
    np.testing.assert_array_equal(written.cpu().numpy(), np.asarray(wanted))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_queries(dtype):
    q = numbers(99, 4, dtype).reshape(33, 3, 128)
    values = triton_fp4.round_queries_to_fp4(EXECUTE, tensor(q), hadamard=False).float().cpu().numpy()
    wanted, scale = quantize_index_q_reference(jnp.asarray(q), format=IndexFormat.FP4)
    wanted = np.asarray(wanted, np.float32)
    np.testing.assert_array_equal(values, wanted)
    zero = wanted == 0
    np.testing.assert_array_equal(np.signbit(values[zero]), np.signbit(wanted[zero]))
    assert (np.asarray(scale) == 1).all() and np.isnan(wanted).any()


def test_transformed_queries():
    """The transform's sums may round otherwise, which moves a number by a code at most."""
    q = np.random.default_rng(5).standard_normal((16, 2, 128)).astype(ml_dtypes.bfloat16)
    values = triton_fp4.round_queries_to_fp4(EXECUTE, tensor(q), hadamard=True).float().cpu().numpy()
    wanted = np.asarray(
        quantize_index_q_reference(jnp.asarray(q), hadamard=True, format=IndexFormat.FP4)[0], np.float32
    )
    assert np.mean(values != wanted) < 0.01 and np.abs(values - wanted).max() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("writer", WRITERS)
def test_jax_writes_and_rounds_byte_by_byte(writer):
    rng, format = np.random.default_rng(6), IndexFormat.FP4.written_by(writer)
    data = rng.integers(0, 256, (3 * 5, 64 * 68), dtype=np.uint8)
    slots, keys = jnp.asarray(hostile_slots(rng, 100, 5 * 64)), jnp.asarray(numbers(100, 7, np.float32))
    cache = IndexKeys(data=jnp.asarray(data), num_layers=3, format=format).layer(1)
    wanted = np.asarray(write_index_k_reference(cache, slots, keys).data)
    assert "jax_sparse_mla.write_index_k_fp4" in jax.jit(write_index_k).lower(cache, slots, keys).as_text()
    np.testing.assert_array_equal(write_index_k(cache, slots, keys).data, wanted)
    values, scale = quantize_index_q(keys[None], format=format)
    wanted, _ = quantize_index_q_reference(keys[None], format=format)
    np.testing.assert_array_equal(np.asarray(values, np.float32), np.asarray(wanted, np.float32))
    assert (np.asarray(scale) == 1).all()

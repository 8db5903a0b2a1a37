"""The CUDA kernel of few rows times their experts' weights, against float64's products of the multiplied-out weights.

On a GPU JAX runs it; elsewhere it is compiled for the host, where the threads of a block take turns.
"""

from __future__ import annotations

import ctypes
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from host_build import GUARD, aligned, compiled_once, poisoned
from test_quantised_triton import weight
from triton_device import ON_GPU

from jax_sparse_mla.serving.quantised import WeightFormat, multiplied_out

pytestmark = pytest.mark.torch
BF16 = ml_dtypes.bfloat16
FP4, FP8 = WeightFormat.FP4, WeightFormat.FP8
ONE, EACH, SORTED = range(3)


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """`product(kind, x, weight, which, dtype)` in a poisoned result; on the host also the launch's tiles, its columns
    and the seed of an order of warps."""
    if ON_GPU:
        return _on_the_device
    return partial(_on_the_host, compiled_once("expert_rows", "expert_rows", tmp_path_factory))


def _on_the_device(kind, x, weight, which=None, dtype="bfloat16", **launch):
    from jax_sparse_mla.serving import quantised_cuda

    given = [jnp.asarray(x), weight.values, weight.scales, *([] if which is None else [jnp.asarray(which)])]
    run = jax.jit(partial(quantised_cuda.product, sizes=kind == SORTED, dtype=dtype))
    return np.asarray(run(*given))


def _on_the_host(library, kind, x, weight, which=None, dtype="bfloat16", *, tiles=2, wide=1, seed=0):
    n, k = weight.shape[-2:]
    out, guard = poisoned((len(x), n), np.dtype(BF16 if dtype == "bfloat16" else dtype))
    arrays = [aligned(np.asarray(a)) for a in (x, weight.values, weight.scales)]
    arrays += [None if which is None else np.asarray(which, np.int32)]
    shift, is_float = weight.rows.bit_length() - 1, weight.scales.dtype == jnp.float32
    sizes = len(x), 1 if weight.ndim == 2 else weight.shape[0], n, k, weight.format is FP4, shift, is_float
    library.expert_rows_on_host(
        *(None if a is None else ctypes.c_void_p(a.ctypes.data) for a in arrays),
        *map(int, (*sizes, kind, dtype == "float32", tiles, wide)),
        ctypes.c_uint(seed),
        ctypes.c_void_p(out.ctypes.data),
    )
    assert (guard == GUARD).all(), "something was written behind the result"
    return out


def case(form, n, k, kind, ue8m0, rng):
    """x, a weight, and which: an expert of no row, one of more rows than columns, one of a single row."""
    shape = (n, k) if kind == ONE else (5, n, k)
    which = {ONE: None, EACH: [4, 0, 4, 2, 4, 0, 1, *[4] * 8], SORTED: [3, 0, 20, 1, 0]}[kind]
    rows = {ONE: 17, EACH: 15, SORTED: 26}[kind]
    return rng.standard_normal((rows, k)).astype(BF16), weight(form, *shape, ue8m0=ue8m0), which


def exact(kind, x, weight, which):
    """float64 products of the live rows, and the sums of their magnitudes."""
    wide = np.asarray(multiplied_out(weight), np.float64)
    if kind == ONE:
        wide = np.broadcast_to(wide, (len(x), *wide.shape))
    else:
        wide = wide[np.repeat(np.arange(len(wide)), which) if kind == SORTED else np.asarray(which)]
    x = x[: len(wide)].astype(np.float64)
    return np.einsum("rnk,rk->rn", wide, x), np.einsum("rnk,rk->rn", np.abs(wide), np.abs(x))


def assert_products(found, wanted, bound, rounding):
    assert np.isfinite(found[: len(wanted)].astype(np.float64)).all()
    assert (np.abs(found[: len(wanted)].astype(np.float64) - wanted) <= rounding * bound).all()
    assert np.abs(found[: len(wanted)].astype(np.float64) - wanted).max() <= rounding * np.abs(wanted).max()


WEIGHTS = [(FP4, 80, 256, True), (FP4, 40, 1280, True), (FP8, 200, 128, False), (FP8, 48, 256, True)]


@pytest.mark.always(5)
@pytest.mark.parametrize("kind", [ONE, EACH, SORTED])
@pytest.mark.parametrize("form, n, k, ue8m0", WEIGHTS)
def test_products(form, n, k, ue8m0, kind, product):
    x, stored, which = case(form, n, k, kind, ue8m0, np.random.default_rng(n))
    wanted, bound = exact(kind, x, stored, which)
    launches = [dict(tiles=2, wide=1), dict(tiles=3, wide=2, seed=1), dict(tiles=1, wide=4)]
    results = []
    for dtype, launch in zip(("float32", "bfloat16", "float32"), launches, strict=True):
        results.append(product(kind, x, stored, which, dtype, **launch))
        # A float32 scale rounds the multiplied-out weights, but not what the kernel sums.
        assert_products(results[-1], wanted, bound, 2**-8 if dtype == "bfloat16" or not ue8m0 else 1e-5)
    live = len(wanted)
    np.testing.assert_array_equal(results[0][:live], results[2][:live])  # whatever rows come together
    np.testing.assert_array_equal(results[0][:live].astype(BF16), results[1][:live])
    if not ON_GPU:  # rows behind all parts
        assert np.isnan(results[0][live:]).all()

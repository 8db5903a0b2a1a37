"""The CUDA kernel of few rows times their experts' weights, against float64's products of the multiplied-out weights.

On a GPU JAX runs it; elsewhere it is compiled for the host, where the threads of a block take turns.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

pytest.importorskip("tvm_ffi")

import tvm_stub
from host_build import GUARD, aligned, compiled_once, poisoned
from test_quantised_triton import small_layer, weight
from triton_device import ON_GPU

from jax_sparse_mla.device import DeviceInfo, pretend
from jax_sparse_mla.launch import build
from jax_sparse_mla.serving import quantised, quantised_cuda
from jax_sparse_mla.serving.layers import linear, swiglu
from jax_sparse_mla.serving.moe import experts
from jax_sparse_mla.serving.quantised import Quantised, WeightFormat, multiplied_out
from jax_sparse_mla.serving.shapes_alone import H200

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


def _on_the_device(kind, x, weight, which=None, dtype="bfloat16", gated=False, limit=None, **launch):
    given = [jnp.asarray(x), weight.values, weight.scales, *([] if which is None else [jnp.asarray(which)])]
    run = jax.jit(partial(quantised_cuda.few_rows, sizes=kind == SORTED, dtype=dtype, gated=gated, limit=limit))
    return np.asarray(run(*given))


def _on_the_host(
    library,
    kind,
    x,
    weight,
    which=None,
    dtype="bfloat16",
    *,
    tiles=2,
    split=8,
    wide=1,
    warps=8,
    columns=None,
    seed=0,
    gated=False,
    limit=None,
):
    n, k = weight.shape[-2:]
    rows = len(which) if kind == EACH else len(x)
    out, guard = poisoned((rows, n), np.dtype(BF16 if dtype == "bfloat16" else dtype))
    arrays = [aligned(np.asarray(a)) for a in (x, weight.values, weight.scales)]
    arrays += [None if which is None else np.asarray(which, np.int32)]
    shift, is_float = weight.rows.bit_length() - 1, weight.scales.dtype == jnp.float32
    sizes = (
        rows,
        1 if weight.ndim == 2 else weight.shape[0],
        n,
        k,
        rows // len(x),
        weight.format is FP4,
        shift,
        is_float,
    )
    library.expert_rows_on_host(
        *(None if a is None else ctypes.c_void_p(a.ctypes.data) for a in arrays),
        *map(int, (*sizes, kind, dtype == "float32", tiles, split, wide, warps, columns or 8 * wide, gated)),
        ctypes.c_float(limit or 0),
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
    launches = [
        dict(tiles=2, split=4, columns=3),
        dict(tiles=4, split=4, wide=1 if kind == EACH else 2, warps=16, seed=1),
        dict(tiles=6, split=4, wide=4, warps=16),
    ]
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


def every_fp4_number():
    """x, a weight, and their product: column j of the weight has the number j % 16, and row n the scale n."""
    packed = np.tile(np.arange(16, dtype=np.uint8), 16)
    values = np.broadcast_to(packed[::2] | packed[1::2] << 4, (256, 128)).copy()
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    codes = packed.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    wanted = codes[5::9, None] * 2.0 ** (np.arange(256) - 127)
    return np.eye(256, dtype=BF16)[5::9], Quantised.stored(FP4, values, scales, BF16), wanted


def every_fp8_number(scale):
    """x, a weight, and their product: row n of the weight is the byte n. A scale is a UE8M0 byte or a float."""
    values = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 128, axis=1)
    is_float = isinstance(scale, float)
    scales = np.full((2, 1), scale, np.float32 if is_float else np.uint8)
    numbers = values[:, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = scale if is_float else np.nan if scale == 255 else 2.0 ** (scale - 127)
    with np.errstate(over="ignore"):
        wanted = (numbers * factor).astype(np.float32)
    x = np.eye(128, dtype=BF16)[::17]
    return x, Quantised.stored(FP8, values, scales, BF16), np.broadcast_to(wanted, (len(x), 256))


def test_every_fp4_number_times_every_scale(product):
    """Exact, below bfloat16's normal numbers too; what is beyond bfloat16, or has NaN for its scale, is no number."""
    x, stored, wanted = every_fp4_number()
    found = product(ONE, x, stored, dtype="float32", tiles=16, split=1, wide=4, warps=16)
    np.testing.assert_array_equal(found[:, :253], wanted[:, :253])
    assert np.isnan(found[:, 253:]).all()  # infinite numbers times 0 are among its sums


@pytest.mark.parametrize("scale", [0, 1, 126, 254, 255, 0.75])
def test_every_fp8_number(scale, product):
    """The two NaN among them leave their neighbours alone."""
    x, stored, wanted = every_fp8_number(scale)
    np.testing.assert_array_equal(product(ONE, x, stored, dtype="float32", tiles=8), wanted)


@pytest.mark.parametrize(("row", "lane"), [(21, 0), (5, 37), (21, 127)])
def test_one_nan_of_a_weight(row, lane, product):
    """It makes its row NaN, and none of a tile that the same warp computes next."""
    rng = np.random.default_rng(lane)
    x, stored = rng.standard_normal((3, 128)).astype(BF16), weight(FP8, 32, 128)
    values = np.array(stored.values)
    values[row, lane] = 0xFF
    found = product(ONE, x, Quantised.stored(FP8, values, np.asarray(stored.scales), BF16), dtype="float32")
    assert (np.isnan(found) == (np.arange(32) == row)).all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("form", WeightFormat)
def test_a_row_that_is_no_number_stays_alone(form, number, product):
    x, stored, which = case(form, 16, 256, SORTED, True, np.random.default_rng(3))
    before = product(SORTED, x, stored, which)
    x[9, 100] = number
    after = product(SORTED, x, stored, which)
    others = np.arange(sum(which)) != 9
    np.testing.assert_array_equal(after[:24][others], before[:24][others])
    assert not np.isfinite(after[9].astype(np.float32)).all()


@pytest.mark.parametrize("sizes", [{280: 1, 3: 2, 255: 1, 256: 1, 299: 1}, {299: 41}, {}], ids=str)
def test_many_experts_and_one_of_all_rows(sizes, product):
    rng, which = np.random.default_rng(4), np.zeros(300, np.int32)
    for expert, size in sizes.items():
        which[expert] = size
    x, stored = rng.standard_normal((41, 128)).astype(BF16), weight(FP8, 300, 16, 128, ue8m0=False)
    found = product(SORTED, x, stored, which, "float32")
    wanted, bound = exact(SORTED, x, stored, which)
    if sizes:
        assert_products(found, wanted, bound, 2**-8)


def test_many_rows_that_name_experts(product):
    rng = np.random.default_rng(5)
    which = rng.integers(0, 5, 77).astype(np.int32)
    which[40:] = np.where(which[40:] == 3, 1, which[40:])  # the last of an expert's rows is in no later group of 32
    x, stored = rng.standard_normal((77, 256)).astype(BF16), weight(FP4, 5, 16, 256)
    assert_products(product(EACH, x, stored, which, "float32"), *exact(EACH, x, stored, which), 1e-5)


def test_rows_that_share_a_row_of_x(product):
    """As if it were repeated, to the bit."""
    rng, which = np.random.default_rng(6), np.asarray([2, 0, 1, 1, 0, 4], np.int32)
    x, stored = rng.standard_normal((2, 256)).astype(BF16), weight(FP4, 5, 32, 256)
    shared, repeated = (product(EACH, each, stored, which, "float32") for each in (x, np.repeat(x, 3, axis=0)))
    np.testing.assert_array_equal(shared, repeated)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("kind", [ONE, EACH, SORTED])
def test_swiglu_of_x(kind, limit, product):
    """Nearly the product of what `swiglu` makes, in float64: x is rounded to bfloat16 once."""
    rng = np.random.default_rng(7)
    x, stored, which = case(FP8 if kind == ONE else FP4, 48, 256, kind, True, rng)
    gate_up = (2 * rng.standard_normal((len(x), 512))).astype(BF16)
    gate_up[3, 5], gate_up[4, 300] = 60, -60
    wide = swiglu(jnp.asarray(gate_up, jnp.float32), limit)
    found = product(kind, gate_up, stored, which, "float32", gated=True, limit=limit)
    assert_products(found, *exact(kind, np.asarray(wide, np.float64), stored, which), 2**-8)


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_swiglu_of_what_is_no_number(number, half, product):
    """A bound takes what is infinite, but for a gate of minus infinity, which JAX multiplies by 0; a NaN stays one."""
    gate_up = np.ones((3, 512), BF16)
    gate_up[1, 256 * half + 7] = number
    found = product(ONE, gate_up, weight(FP8, 16, 256), dtype="float32", gated=True, limit=7.0)
    bounded = np.isinf(number) and (half or number > 0)
    assert np.isfinite(found[[0, 2]]).all() and np.isfinite(found[1]).all() == bounded
    assert bounded or np.isnan(found[1]).all()
    assert np.isfinite(np.asarray(swiglu(jnp.asarray(gate_up), 7.0), np.float32)).all() == bounded


@pytest.mark.cpu
def test_layers_take_it(product, monkeypatch):
    """Experts of few rows and of sorted ones and a dense weight, through XLA."""
    kinds, gates = [], []

    def stand_in(x, values, scales, which, sizes, gated, limit, out):
        kinds.append(ONE if which is None else SORTED if sizes else EACH)
        gates.append(gated)
        form = FP4 if scales.shape[-1] * 16 == values.shape[-1] else FP8
        stored = Quantised(format=form, dtype=np.dtype(BF16), values=values, scales=scales)
        given = kinds[-1], x, stored, which, str(out.dtype)
        out[...] = pool.submit(product, *given, gated=gated, limit=limit).result()

    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()  # the thread begins here: those that XLA's begin flush subnormal numbers to 0, as they do
    module = tvm_stub.module(expert_rows=stand_in)
    monkeypatch.setattr(build, "module", lambda name, arch: module())
    monkeypatch.setattr(quantised, "dispatch", lambda kernel, plain, *args: kernel(*args))
    for form, rows in ((FP8, 3), (FP4, 8)):
        x, *given, _, _ = small_layer(form, rows)
        x, gate_up, down = jnp.tile(x, (1, 2)), weight(form, 8, 512, 256), weight(form, 8, 256, 256)
        dense = weight(FP8, 200, 256, ue8m0=False)
        wanted = (
            experts(x, *given, multiplied_out(gate_up), multiplied_out(down), 1.0),
            linear(x, multiplied_out(dense)),
        )
        with pretend(H200):
            found = experts(x, *given, gate_up, down, 1.0), linear(x, dense)
        for one, other in zip(found, wanted, strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())
    pool.shutdown()
    assert kinds == [EACH, EACH, ONE, SORTED, SORTED, ONE] and gates == [False, True, False] * 2


@pytest.mark.cpu
def test_what_it_serves(monkeypatch):
    def serves(x_rows, *shape, form=FP4, rows=1, which=None, device=H200):
        values = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // form.per_byte), jnp.uint8)
        scales = jax.ShapeDtypeStruct((*shape[:-2], shape[-2] // rows, shape[-1] // form.group), jnp.uint8)
        stored = Quantised(format=form, dtype=np.dtype(BF16), values=values, scales=scales)
        x = jax.ShapeDtypeStruct((x_rows, shape[-1]), jnp.bfloat16)
        named = {"sizes": which == SORTED} if which in (EACH, SORTED) else {}
        with pretend(device):
            product = quantised_cuda.chosen(x, stored, *([x] if named else []), **named)
        assert product is None or product.func in (quantised_cuda.few_rows, quantised_cuda.many_rows)
        return product is not None and product.func is quantised_cuda.few_rows

    monkeypatch.setattr(build, "module", lambda name, arch: name)
    most = quantised_cuda.MOST_ROWS
    assert serves(most, 256, 512) and not serves(most + 1, 256, 512)
    assert serves(most * 8, 8, 256, 512, which=SORTED) and not serves(most * 8 + 1, 8, 256, 512, which=SORTED)
    assert serves(1024, 256, 16, 512, which=EACH) and not serves(1025, 256, 16, 512, which=EACH)
    assert (
        serves(1, 384, 128, form=FP8, rows=128)
        and not serves(1, 256, 384)
        and not serves(1, 384, 512, form=FP8, rows=96)
    )
    assert serves(1, 256, 12_288) and not serves(1, 256, 16_384)
    assert not serves(1, 256, 512, device=DeviceInfo("cuda", (7, 5), 40, 65_536)) and not serves(
        1, 256, 512, device=DeviceInfo("cpu")
    )
    assert not serves(8, 8, 128, 512, form=FP8, rows=128, which=SORTED)
    monkeypatch.setattr(build, "module", lambda name, arch: None)
    assert not serves(1, 256, 512)


class Plan(NamedTuple):
    """What `plan.cuh` makes of a call."""

    split: int
    tiles: int
    columns: int
    wide: int
    warps: int
    across: int
    down: int
    bytes: int


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """`plan(kind, rows, experts, n, k, fp4)` on an H200, or with `sms`, and None where nothing fits."""
    library = compiled_once("expert_rows", "expert_rows", tmp_path_factory)

    def of(kind, rows, experts, n, k, fp4, sms=132):
        found = (ctypes.c_int * 8)()
        fits = library.expert_rows_plan(kind, rows, experts, n, k, fp4, sms, H200.shared_memory_optin, 233_472, found)
        return Plan(*found) if fits else None

    return of


@pytest.mark.cpu
@pytest.mark.parametrize(
    "n, k, fp4", [(4096, 4096, 1), (4096, 2048, 1), (7168, 2048, 1), (16, 256, 1), (1536, 4096, 0)]
)
@pytest.mark.parametrize("kind, most", [(ONE, 64), (EACH, 1024), (SORTED, 2048)])
def test_a_plan_covers_the_weight_and_fits(plan, kind, most, n, k, fp4):
    """And the order of sums is that of the weight, whatever rows there are."""
    experts = 1 if kind == ONE else 256
    plans = {rows: plan(kind, rows, experts, n, k, fp4) for rows in (1, 3, 8, 9, 48, most)}
    assert len({each.split for each in plans.values()}) == 1
    for rows, each in plans.items():
        assert each.across * each.tiles * 16 >= n > (each.across - 1) * each.tiles * 16
        assert each.down == {ONE: 1, EACH: rows, SORTED: min(rows, experts)}[kind]
        assert each.warps % each.split == 0 and each.columns <= 8 * each.wide
        assert each.warps == 16 or each.wide == 1
        named = 4 * quantised_cuda.MOST_NAMED
        assert each.bytes + named <= H200.shared_memory_optin
        assert each.warps == 16 or 2 * (each.bytes + named + 1024) <= 233_472


@pytest.mark.cpu
def test_plans_fill_a_device(plan):
    """V4-Flash's products at decode take one wave of an H200's 132 multiprocessors, or leave few of them idle."""
    shapes = [(EACH, 6, 256, 4096, 4096, 1), (EACH, 6, 256, 4096, 2048, 1)]
    shapes += [(ONE, 1, 1, n, k, 0) for n, k in ((32768, 1024), (4096, 8192), (4096, 4096), (4096, 2048))]
    for shape in shapes:
        found = plan(*shape)
        slots = 132 * (2 if found.warps == 8 else 1)
        assert 0.9 * slots < found.across * found.down <= slots, (shape, found)


@pytest.mark.cpu
def test_a_plan_fits_where_the_kernel_serves(plan):
    for fp4, rows in ((0, 1), (0, 8), (1, 8)):
        served = [k for k in range(256, 20_000, 256) if 16 * k + 16 * 640 + 512 + 4096 <= H200.shared_memory_optin]
        assert all(plan(ONE, rows, 1, n, k, fp4) for k in served for n in (16, 4096))
    assert plan(ONE, 8, 1, 4096, 16_384, 1) is None


def test_the_source_has_room_for_what_it_serves():
    source = (build.folder() / "expert_rows" / "kernel.cuh").read_text()
    assert f"kMostNamed = {quantised_cuda.MOST_NAMED};" in source
    assert f"kStepBytes = {quantised_cuda.STEP_BYTES};" in source

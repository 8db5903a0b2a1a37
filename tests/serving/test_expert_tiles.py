"""Products of sorted rows with quantised weights by the CUDA kernel of many rows.

On a GPU of SM90 JAX runs it; elsewhere it is compiled for the host, where the threads of a block take turns.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("tvm_ffi")

import ptxas
import tvm_stub
from host_build import (
    GUARD,
    aligned,
    changed_kernels,
    compiled_for_the_host,
    compiled_once,
    poisoned,
    replace_once,
)
from test_expert_rows import ONE, SORTED, assert_products, every_fp4_number, every_fp8_number, exact
from test_quantised_triton import small_layer, weight
from triton_device import ON_GPU

from jax_sparse_mla.device import DeviceInfo, pretend
from jax_sparse_mla.launch import build
from jax_sparse_mla.serving import quantised, quantised_cuda
from jax_sparse_mla.serving.moe import experts
from jax_sparse_mla.serving.quantised import Quantised, WeightFormat, multiplied_out
from jax_sparse_mla.serving.shapes_alone import H200

pytestmark = pytest.mark.torch
BF16 = ml_dtypes.bfloat16
FP4, FP8 = WeightFormat.FP4, WeightFormat.FP8


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """`product(x, weight, sizes, dtype)` in a poisoned result; on the host also how many thread blocks there are, and
    the seed of an order of warps."""
    if ON_GPU:
        return _on_the_device
    return partial(_on_the_host, compiled_once("expert_tiles", "expert_tiles", tmp_path_factory))


def _on_the_device(x, weight, sizes=None, dtype="bfloat16", **launch):
    given = [jnp.asarray(x), weight.values, weight.scales, *([] if sizes is None else [jnp.asarray(sizes, jnp.int32)])]
    return np.asarray(jax.jit(partial(quantised_cuda.many_rows, dtype=dtype))(*given))


def _on_the_host(library, x, weight, sizes=None, dtype="bfloat16", *, blocks=3, seed=0):
    n, k = weight.shape[-2:]
    out, guard = poisoned((len(x), n), np.dtype(BF16 if dtype == "bfloat16" else dtype))
    given = quantised_cuda.in_lanes(x) if weight.format is FP4 else x
    arrays = [aligned(np.asarray(a)) for a in (given, weight.values, weight.scales)]
    arrays += [None if sizes is None else np.asarray(sizes, np.int32)]
    shift, is_float = weight.rows.bit_length() - 1, weight.scales.dtype == jnp.float32
    numbers = len(x), 1 if weight.ndim == 2 else weight.shape[0], n, k, weight.format is FP4, shift, is_float
    library.expert_tiles_on_host(
        *(None if a is None else ctypes.c_void_p(a.ctypes.data) for a in arrays),
        *map(int, (*numbers, dtype == "float32", blocks)),
        ctypes.c_uint(seed),
        ctypes.c_void_p(out.ctypes.data),
    )
    assert (guard == GUARD).all(), "something was written behind the result"
    return out


def kind_of(sizes):
    return ONE if sizes is None else SORTED


@pytest.mark.always(5)
@pytest.mark.parametrize("form, n, k, ue8m0", [(FP4, 304, 512, True), (FP8, 200, 256, False), (FP8, 136, 384, True)])
def test_products(form, n, k, ue8m0, product):
    """Of sorted rows: experts without rows, of one row, of one part and of several; and of one weight."""
    rng = np.random.default_rng(n)
    for seed, sizes in enumerate(([3, 0, 150, 1, 0], None)):
        rows = 21 if sizes is None else sum(sizes) + 2
        stored = weight(form, n, k, ue8m0=ue8m0) if sizes is None else weight(form, 5, n, k, ue8m0=ue8m0)
        x = rng.standard_normal((rows, k)).astype(BF16)
        x[rows if sizes is None else sum(sizes) :] = np.nan
        found = product(x, stored, sizes, "float32", seed=seed)
        wanted, bound = exact(kind_of(sizes), x, stored, sizes)
        assert_products(found, wanted, bound, 2**-8 if not ue8m0 else 1e-5)
        rounded = product(x, stored, sizes, "bfloat16", blocks=2)
        np.testing.assert_array_equal(found[: len(wanted)].astype(BF16), rounded[: len(wanted)])
        if not ON_GPU:  # rows behind all parts
            assert np.isnan(found[len(wanted) :]).all()


@pytest.mark.parametrize("count", [1, 16, 17, 33, 47, 64, 65, 90, 97, 113, 128, 129, 257])
def test_every_width(count, product):
    """A row's result does not depend on how many rows come with it."""
    rng = np.random.default_rng(5)
    for form in WeightFormat:
        stored, x = weight(form, 2, 128, 256), rng.standard_normal((258, 256)).astype(BF16)
        found = product(x, stored, [0, count], "float32")
        wanted, bound = exact(SORTED, x, stored, [0, count])
        assert_products(found, wanted, bound, 1e-5)
        np.testing.assert_array_equal(found[:1], product(x, stored, [0, 1], "float32")[:1])


def test_every_fp4_number_times_every_scale(product):
    """Exact, below bfloat16's normal numbers too; what is beyond bfloat16, or has NaN for its scale, is no number."""
    x, stored, wanted = every_fp4_number()
    found = product(x, stored, dtype="float32")
    np.testing.assert_array_equal(found[:, :253], wanted[:, :253])
    assert np.isnan(found[:, 253:]).all()  # infinite numbers times 0 are among its sums


@pytest.mark.parametrize("scale", [0, 1, 126, 254, 255, 0.75])
def test_every_fp8_number(scale, product):
    """The two NaN among them leave their neighbours alone."""
    x, stored, wanted = every_fp8_number(scale)
    np.testing.assert_array_equal(product(x, stored, dtype="float32"), wanted)


@pytest.mark.parametrize(("row", "lane"), [(21, 0), (5, 37), (21, 127), (200, 64)])
def test_one_nan_of_a_weight(row, lane, product):
    """It makes its row NaN, and none of a tile that the same warps compute next."""
    rng = np.random.default_rng(lane)
    x, stored = rng.standard_normal((3, 128)).astype(BF16), weight(FP8, 300, 128)
    values = np.array(stored.values)
    values[row, lane] = 0xFF
    found = product(x, Quantised.stored(FP8, values, np.asarray(stored.scales), BF16), dtype="float32", blocks=1)
    assert (np.isnan(found) == (np.arange(300) == row)).all()


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("form", WeightFormat)
def test_a_row_that_is_no_number_stays_alone(form, number, product):
    rng = np.random.default_rng(3)
    x, stored, sizes = rng.standard_normal((24, 256)).astype(BF16), weight(form, 3, 16, 256), [3, 20, 1]
    before = product(x, stored, sizes)
    x[9, 100] = number
    after = product(x, stored, sizes)
    others = np.arange(24) != 9
    np.testing.assert_array_equal(after[others], before[others])
    assert not np.isfinite(after[9].astype(np.float32)).all()


@pytest.mark.parametrize("sizes", [{280: 1, 3: 2, 255: 1, 256: 1, 299: 1}, {299: 41}, {}], ids=str)
def test_many_experts_and_one_of_all_rows(sizes, product):
    rng, which = np.random.default_rng(4), np.zeros(300, np.int32)
    for expert, size in sizes.items():
        which[expert] = size
    x, stored = rng.standard_normal((41, 128)).astype(BF16), weight(FP8, 300, 16, 128, ue8m0=False)
    found = product(x, stored, which, "float32")
    wanted, bound = exact(SORTED, x, stored, which)
    if sizes:
        assert_products(found, wanted, bound, 2**-8)


def test_many_parts_of_an_expert(product):
    """More than stand one beside the other, of a weight of several tiles."""
    rng = np.random.default_rng(6)
    x, stored, sizes = rng.standard_normal((700, 256)).astype(BF16), weight(FP4, 2, 264, 256), [650, 50]
    found = product(x, stored, sizes, "float32", seed=2)
    assert_products(found, *exact(SORTED, x, stored, sizes), 1e-5)


@pytest.mark.cpu
def test_layers_take_it(product, monkeypatch):
    """Both products of experts with sorted rows, through XLA."""
    forms = []

    def stand_in(x, values, scales, sizes, out):
        form = FP4 if values.shape[-1] < x.shape[-1] else FP8
        forms.append(form)
        if form is FP4:  # into its own order again
            x = x[:, np.argsort(quantised_cuda.in_lanes(np.arange(x.shape[1])[None])[0])]
        stored = Quantised(format=form, dtype=np.dtype(BF16), values=values, scales=scales)
        out[...] = pool.submit(product, x, stored, sizes, str(out.dtype)).result()

    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()  # the thread begins here: those that XLA's begin flush subnormal numbers to 0, as they do
    module = tvm_stub.module(expert_tiles=stand_in)
    monkeypatch.setattr(build, "module", lambda name, arch: module())
    monkeypatch.setattr(quantised, "dispatch", lambda kernel, plain, *args: kernel(*args))
    small = DeviceInfo("cuda", (9, 0), 8, H200.shared_memory_optin)  # eight tiles are enough for it
    for form, rows in ((FP8, 96), (FP4, 36)):
        x, *given, _, _ = small_layer(form, rows)
        x, gate_up, down = jnp.tile(x, (1, 2)), weight(form, 8, 512, 256), weight(form, 8, 256, 256)
        wanted = np.asarray(experts(x, *given, multiplied_out(gate_up), multiplied_out(down), 1.0), np.float32)
        with pretend(small):
            found = np.asarray(experts(x, *given, gate_up, down, 1.0), np.float32)
        np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())
    pool.shutdown()
    assert forms == [FP8, FP8, FP4, FP4]


@pytest.mark.cpu
def test_the_order_of_lanes():
    found = quantised_cuda.in_lanes(np.arange(512)[None])[0]
    h, i, p, e = np.unravel_index(np.arange(256), (2, 16, 4, 2))
    wanted = 64 * p + 32 * h + 8 * (i // 4) + 4 * e + i % 4
    np.testing.assert_array_equal(found, np.concatenate([wanted, wanted + 256]))


@pytest.mark.cpu
def test_what_it_serves(monkeypatch):
    """More rows than the kernel of few, of FP8 than Triton's; as many tiles as multiprocessors; sorted rows, SM90."""

    def chosen(x_rows, *shape, form=FP4, rows=1, sizes=True, device=H200):
        values = jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // form.per_byte), jnp.uint8)
        scales = jax.ShapeDtypeStruct((*shape[:-2], shape[-2] // rows, shape[-1] // form.group), jnp.uint8)
        stored = Quantised(format=form, dtype=np.dtype(BF16), values=values, scales=scales)
        x = jax.ShapeDtypeStruct((x_rows, shape[-1]), jnp.bfloat16)
        which = [x] if len(shape) == 3 else []
        with pretend(device):
            product = quantised_cuda.chosen(x, stored, *which, sizes=sizes, dtype="float32")
        return product and (product.func.__name__, product.keywords["dtype"])

    monkeypatch.setattr(build, "module", lambda name, arch: (name, arch))
    few, many = ("few_rows", "float32"), ("many_rows", "float32")
    rows, fp8_rows = quantised_cuda.MOST_ROWS * 64 + 1, quantised_cuda.FROM_ROWS * 64
    fp8 = partial(chosen, form=FP8, rows=128)
    assert chosen(rows - 1, 64, 1024, 512) == few and chosen(rows, 64, 1024, 512) == many
    assert fp8(fp8_rows - 1, 64, 1024, 512) is None and fp8(fp8_rows, 64, 1024, 512) == many
    assert chosen(1024 * 64, 64, 1024, 512) == fp8(1024 * 64, 64, 1024, 512) == many
    assert chosen(rows, 64, 512, 512) is None and chosen(rows, 64, 514, 512) == many  # 128 and 192 tiles
    assert fp8(64 * 8, 8, 1024, 4096) is None  # V4's output groups have 32
    assert chosen(rows, 64, 1024, 384) is None and fp8(fp8_rows, 64, 1024, 384) == many
    assert chosen(rows, 64, 1025, 512) is None and chosen(fp8_rows, 64, 1056, 512, form=FP8, rows=96) is None
    assert chosen(rows, 64, 1024, 512, sizes=False) is None and chosen(9, 1024, 512, sizes=False) is None
    assert chosen(1025 * 9, 1025, 1024, 512) is None
    assert chosen(rows, 64, 1024, 512, device=DeviceInfo("cuda", (10, 0), 148, 232_448)) is None
    monkeypatch.setattr(build, "module", lambda name, arch: None if name == "expert_tiles" else name)
    assert chosen(rows, 64, 1024, 512) is None


def test_the_source_has_room_for_what_it_serves():
    source = (build.folder() / "expert_tiles" / "kernel.cuh").read_text()
    assert f"kMostExperts = {quantised_cuda.MOST_EXPERTS};" in source


@pytest.mark.long
@pytest.mark.no_gpu
def test_its_products_are_not_serialised(tmp_path):
    """What ptxas says where registers are short or a wait is missing; the products then run one by one."""
    said = ptxas.said_of("expert_tiles", tmp_path)
    assert "Performance Loss" not in said and "warpgroup.wait is injected" not in said, said


# Lines without which the kernel is wrong.
NEEDED = [
    "wait(&shared.free_weights[place.at], place.phase ^ 1);",
    "arrive_after_copies(full);",
    "wait(&shared.free_x[place.at], place.phase ^ 1);",
    "wait(&shared.full_weights[weights_at.at], weights_at.phase);\n  load(0);",
    "wait(&shared.full_weights[weights_at.at], weights_at.phase);\n            load(0);",
    "wait(&shared.full_weights[weights_at.at], weights_at.phase);\n    const",
    "wait(&shared.full_x[x_at.at], x_at.phase);\n        }",
    "if (i == 0 && pass == 0) wait(&shared.full_x[x_at.at], x_at.phase);",
    "begin_products();\n#pragma",
    "begin_products();\n          multiply",
    "wait_products<1>();\n        if",
    "wait_products<1>();\n        }",
    "wait_products<0>();\n  arrive_warp(&shared.free_x[used], thread);",
    "wait_products<0>();\n#pragma unroll",
    "__syncthreads();",
]


def assert_right(library):
    """Of rings that are filled more than once, in several orders of warps."""
    rng = np.random.default_rng(7)
    for form, k in ((FP4, 1280), (FP8, 896)):
        for seed in range(3):
            x, stored = rng.standard_normal((40, k)).astype(BF16), weight(form, 2, 264, k)
            found = _on_the_host(library, x, stored, [23, 17], "float32", blocks=2, seed=seed)
            assert_products(found, *exact(SORTED, x, stored, [23, 17]), 1e-5)


@pytest.mark.long
@pytest.mark.no_gpu
@pytest.mark.parametrize("number", [None, *range(len(NEEDED))])
def test_each_of_these_lines_is_needed(number, tmp_path):
    """Without it the kernel gives wrong numbers, or the process ends; with all of them neither."""
    changed = changed_kernels("expert_tiles", tmp_path)
    if number is not None:
        others = NEEDED[number].split("\n", 1)[1:]
        replace_once(changed / "kernel.cuh", NEEDED[number], "\n".join([";", *others]))
    library = compiled_for_the_host("expert_tiles", "expert_tiles", tmp_path, changed)
    command = [sys.executable, __file__, str(library)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert (run.returncode != 0) == (number is not None), run.stderr[-2000:]


if __name__ == "__main__":
    assert_right(ctypes.CDLL(sys.argv[1]))

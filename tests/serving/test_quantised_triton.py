"""The Triton kernel of products with quantised weights against float64: in Triton's interpreter, or on a GPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import triton
import triton.language as tl
from compiled_facts import ARCHITECTURES, SHARED_MEMORY, compiled_facts
from sparse_mla_torch.launch.executor import executor
from triton_device import ON_GPU, Interpreted, tensor

from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.number_formats import e2m1_times_ue8m0
from jax_sparse_mla.launch import dispatch, triton_call
from jax_sparse_mla.launch.describe import Device
from jax_sparse_mla.serving import quantised, quantised_triton
from jax_sparse_mla.serving.layers import FEW_ROWS, grouped_linear, linear
from jax_sparse_mla.serving.moe import experts
from jax_sparse_mla.serving.quantised import Quantised, WeightFormat, in_groups, multiplied_out

BF16 = ml_dtypes.bfloat16


def weight(form, *shape, ue8m0=True):
    """A weight of any bytes that are numbers, and scales near 1."""
    rng, rows = np.random.default_rng(shape), 1 if form is WeightFormat.FP4 else 128
    values = rng.integers(0, 256, (*shape[:-1], shape[-1] // form.per_byte), np.uint8)
    if form is WeightFormat.FP8:
        values = np.where(values & 0x7F == 0x7F, 0, values).astype(np.uint8)
    groups = *shape[:-2], -(-shape[-2] // rows), shape[-1] // form.group
    scales = rng.integers(118, 128, groups, np.uint8) if ue8m0 else rng.uniform(0.1, 2, groups).astype(np.float32)
    return Quantised.stored(form, values, scales, BF16)


@triton.jit
def every_code(out_ptr):
    scale, code = tl.arange(0, 256), tl.arange(0, 16)
    value = e2m1_times_ue8m0(code[None, :], scale[:, None])
    tl.store(out_ptr + scale[:, None] * 16 + code[None, :], value)


@pytest.mark.torch
def test_every_code_times_every_scale():
    out = tensor(np.zeros((256, 16), BF16))
    every_code[(1,)](out)
    found = out.float().cpu().numpy().astype(np.float64)
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    wanted = codes * 2.0 ** (np.arange(256) - 127)[:, None]
    wanted[np.abs(wanted) < 2.0**-126], wanted[0] = 0, 0
    np.testing.assert_array_equal(found[:253], wanted[:253])
    assert np.isnan(found[253:]).all()


@pytest.mark.torch
@pytest.mark.parametrize(
    "form, n, k, ue8m0",
    [(WeightFormat.FP4, 80, 256, True), (WeightFormat.FP8, 200, 128, False), (WeightFormat.FP8, 128, 256, True)],
)
def test_products(form, n, k, ue8m0):
    """Of one weight, of each row's expert, and of sorted rows, among them an expert without rows and one of many
    tiles; rows behind all parts are left alone."""
    rng, count = np.random.default_rng(n), 5
    of_experts, alone = weight(form, count, n, k, ue8m0=ue8m0), weight(form, n, k, ue8m0=ue8m0)
    sizes = np.array([3, 0, 20, 1, 0], np.int32)
    for which, is_sizes, rows in ((None, False, 17), ([4, 0, 4, 2], False, 4), (sizes, True, 26)):
        one = alone if which is None else of_experts
        wide = np.asarray(multiplied_out(one), np.float64)
        x = rng.standard_normal((rows, k)).astype(BF16)
        if which is None:
            wide = np.broadcast_to(wide, (rows, n, k))
        else:
            which = np.array(which, np.int32)
            wide = wide[np.repeat(np.arange(count), which) if is_sizes else which]
        live = len(wide)
        wanted = np.einsum("rnk,rk->rn", wide, x[:live].astype(np.float64))
        parted = np.concatenate([x[:, ::2], x[:, 1::2]], axis=1) if form is WeightFormat.FP4 else x
        given = [tensor(np.asarray(a)) for a in (parted, one.values, one.scales)] + [
            None if which is None else tensor(which)
        ]
        run = executor(given[0].device)
        for dtype in ("float32", "bfloat16") if which is None else ("bfloat16",):
            found = quantised_triton.product(run, *given, sizes=is_sizes, dtype=dtype).float().cpu().numpy()[:live]
            # Weights that a float32 scale rounds to bfloat16 are wider apart than the sums, which the kernel scales.
            rounding = 2**-8 if dtype == "bfloat16" or not ue8m0 else 1e-5
            bound = np.einsum("rnk,rk->rn", np.abs(wide), np.abs(x[:live].astype(np.float64)))
            assert np.abs(found - wanted).max() <= rounding * np.abs(wanted).max() and np.isfinite(found).all()
            assert (np.abs(found - wanted) <= rounding * bound).all()


def small_layer(form, rows):
    """x, chosen, weights, gate_up, down of eight experts; a choice of 8 is another device's."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(0.1 * rng.standard_normal((rows, 128)), jnp.bfloat16)
    chosen = jnp.asarray(np.stack([rng.permutation(9)[:2] for _ in range(rows)]), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(rows, 2)), jnp.float32)
    return x, chosen, weights, weight(form, 8, 256, 128), weight(form, 8, 128, 128)


@pytest.mark.torch
@pytest.mark.parametrize("rows", [3, 11])
def test_experts_take_the_kernel(monkeypatch, rows):
    """Rows that read their experts' weights, and sorted ones; and a dense weight: both products, with the same sums."""
    *given, gate_up, down = small_layer(WeightFormat.FP4, rows)
    wanted = np.asarray(experts(*given, gate_up, down, 1.0))
    dense = weight(WeightFormat.FP8, 200, 128)
    dense_wanted = linear(given[0], dense)
    monkeypatch.setattr(quantised, "dispatch", lambda kernel, plain, *args: kernel(*args))
    monkeypatch.setattr(triton_call, "executor", triton_call.executor if ON_GPU else Interpreted)
    found = experts(*given, gate_up, down, 1.0)
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())
    np.testing.assert_allclose(
        linear(given[0], dense).astype(np.float32), dense_wanted.astype(np.float32), rtol=2**-7, atol=1e-3
    )


@pytest.mark.cpu
def test_the_kernel_is_traced_beside_the_plain_code(monkeypatch):
    """As on a machine with a GPU, whose programs for a CPU take the plain code: to the bit that without a GPU."""
    launched = []

    def execute(launch, inputs):
        launched.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    execute.device = Device((9, 0), 132)
    *given, gate_up, down = small_layer(WeightFormat.FP8, 11)
    wanted = jax.jit(experts, static_argnums=5)(*given, gate_up, down, 1.0)
    monkeypatch.setattr(dispatch, "use_triton", lambda: True)
    monkeypatch.setattr(triton_call, "executor", lambda: execute)
    found = jax.jit(lambda *args: experts(*args, 1.0))(*given, gate_up, down)
    np.testing.assert_array_equal(found, wanted)
    assert len(launched) == 2 and {x.constants["WHICH"] for x in launched} == {2}
    linear_of = jax.jit(lambda x: linear(x, gate_up[0]))
    rows = [1, FEW_ROWS, FEW_ROWS + 1]
    for n in rows:
        linear_of(jnp.ones((n, 128), jnp.bfloat16))
    assert len(launched) == 4

    def gradients(*weights):
        return jax.jit(jax.grad(lambda x: jnp.sum(experts(x, *given[1:], *weights, 1.0) + linear(x, weights[1][0]))))(
            given[0]
        )

    np.testing.assert_array_equal(gradients(gate_up, down), gradients(multiplied_out(gate_up), multiplied_out(down)))


@ARCHITECTURES
def test_kernels_compile(capabilities, tmp_path):
    """Within each generation's shared memory; on SM90 by wgmma, and what is read comes by copies of 16 bytes."""
    for fact in compiled_facts("quantised", tmp_path, capabilities):
        assert fact["shared"] <= SHARED_MEMORY[fact["capability"]], fact
        if fact["capability"] == 90:
            assert fact["wide_copies"] and fact["wgmma"] == (fact["kernel"] != "fp8 of 8"), fact


@pytest.mark.gpu
@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("rows", [1, 8, 64, 700])
def test_jax_runs_the_kernel(form, rows):
    """Both products are by one kernel: that of few rows, Triton's, or on SM90 for many rows that of many."""
    rng = np.random.default_rng(rows)
    gate_up, down = weight(form, 32, 1536, 1280), weight(form, 32, 1280, 768)  # enough tiles for 132 multiprocessors
    x = jnp.asarray(0.1 * rng.standard_normal((rows, 1280)), jnp.bfloat16)
    chosen = jnp.asarray(np.stack([rng.permutation(32)[:4] for _ in range(rows)]), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(rows, 4)), jnp.float32)
    step = jax.jit(experts, static_argnums=5).lower(x, chosen, weights, gate_up, down, 1.0)
    name = "jax_sparse_mla.expert_rows"
    if rows == 700 and DeviceInfo.current().compute_capability == (9, 0):
        name = "jax_sparse_mla.expert_tiles"
    elif rows == 700 or (rows, form) == (64, WeightFormat.FP8):
        name = "quantised_product_kernel"
    assert step.as_text().count(name) >= 2
    wanted = experts(x, chosen, weights, multiplied_out(gate_up), multiplied_out(down), 1.0)
    np.testing.assert_allclose(
        step.compile()(x, chosen, weights, gate_up, down), wanted, atol=0.03 * np.abs(wanted).max()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows, kernel", [(1, "expert_rows"), (8, "expert_rows"), (40, "quantised_product"), (65, "")])
def test_groups_read_their_own_weight(rows, kernel):
    """The groups of attention's output: few rows name their group, more are sorted by it, many are one product."""
    w = in_groups(weight(WeightFormat.FP8, 4 * 256, 512), 4)
    x = jax.random.normal(jax.random.key(rows), (rows, 4, 512), jnp.bfloat16)
    step = jax.jit(grouped_linear).lower(x, w)
    assert kernel in step.as_text() and ("jax_sparse_mla" in step.as_text()) == bool(kernel)
    wide = np.asarray(multiplied_out(w), np.float64)
    expected = np.einsum("tgi,goi->tgo", np.asarray(x, np.float64), wide)
    np.testing.assert_allclose(np.asarray(step.compile()(x, w), np.float64), expected, rtol=2**-7, atol=0.05)

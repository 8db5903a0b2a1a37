"""Prefill's gradient through kernels: the Triton backward, on a GPU the SM90 one too, and how `jax.grad` comes to it.

Errors are measured against float64 automatic differentiation, and allowed is twice what bfloat16 code has.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import prefill_arguments, pretend_h200, small_prefill
from compiled_facts import ARCHITECTURES, SHARED_MEMORY, compiled_facts

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gradient_oracle import check_gradients, gradient_by_jax, saved
from triton_device import ON_GPU, Interpreted

from jax_sparse_mla.attention import gradient, sparse_mla_prefill, sparse_mla_prefill_probabilities
from jax_sparse_mla.attention import probabilities as probabilities_module
from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.machine import installed_for
from jax_sparse_mla.launch import triton_call

CASES = {
    "V4": small_prefill(0, heads=3, sizes=(60, 40), q_len=7),
    "V3.2, a second tile of heads": small_prefill(1, dim=576, heads=20, sizes=(60, 40), q_len=3, sink=False),
    "no lengths, large scores": small_prefill(2, heads=2, sizes=(50, 33), q_len=5, lengths=False, hot=True),
    "two tiles of heads": small_prefill(4, heads=70, sizes=(150, 70), q_len=2),
    "no key at all": small_prefill(3, heads=2, sizes=(30, 16), q_len=2, rows="none"),
}
BOTH = pytest.mark.parametrize("deterministic", [False, True], ids=["float32", "fixed point"])


@pytest.fixture
def interpreted(monkeypatch):
    if ON_GPU:
        pytest.skip("Triton's interpreter is for the CPU; TestOnTheGPU runs the kernel")
    for module in (triton_call, gradient):
        monkeypatch.setattr(module, "executor", Interpreted)


@pytest.mark.always(2)
@BOTH
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_s_gradient_is_float64_s(interpreted, name, deterministic):
    case = CASES[name]
    arrays = gradient.Arrays(*saved(case))
    found = gradient.by_kernel(arrays, softmax_scale=case.softmax_scale, deterministic=deterministic)
    check_gradients(case, found)


def test_the_order_of_rows_does_not_matter_in_fixed_point(interpreted):
    case, static = CASES["V4"], {"softmax_scale": CASES["V4"].softmax_scale, "deterministic": True}
    q, kv, indices, lengths, sink, *others = saved(case)
    _, dkv, _ = gradient.by_kernel(gradient.Arrays(q, kv, indices, lengths, sink, *others), **static)
    turned = (x[::-1] for x in (q, indices, lengths, *others))
    q, indices, lengths, *others = turned
    _, again, _ = gradient.by_kernel(gradient.Arrays(q, kv, indices, lengths, sink, *others), **static)
    np.testing.assert_array_equal(np.asarray(dkv, np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 0), (0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2)])
def test_a_call_without_keys_has_a_gradient_of_zeros(sizes, backend):
    rows, heads, kv_len, topk = sizes
    q, kv = jnp.ones((rows, heads, 512), jnp.bfloat16), jnp.ones((kv_len, 512), jnp.bfloat16)

    def attend(q, kv):
        indices = jnp.zeros((rows, topk), jnp.int32)
        return sparse_mla_prefill(q, kv, indices, softmax_scale=1.0, backend=backend)[0].astype(jnp.float32).sum()

    for found, x in zip(jax.grad(attend, (0, 1))(q, kv), (q, kv)):
        np.testing.assert_array_equal(found, jnp.zeros_like(x))


def test_integers_of_64_bits():
    rng = np.random.default_rng(0)
    sizes = np.array([0, 1, 127, 2**31, 2**32 - 129, 2**32, 2**32 + 1, 2**40 + 12345, 2**62])
    sums = np.concatenate([sizes, -sizes, rng.integers(-(2**62), 2**62, 6)]).reshape(4, 6)
    scales = np.float32([1, 2.0**40, 2.0**-3, 2.0**62])
    found = gradient.from_fixed_point(jnp.asarray(sums.view(np.int32)), jnp.asarray(scales))
    np.testing.assert_allclose(np.asarray(found), sums / scales[:, None].astype(np.float64), rtol=2e-7)


def test_a_gradient_that_is_not_finite_shows(interpreted):
    case = CASES["V4"]
    *arrays, g_out, g_lse = saved(case)
    call = partial(gradient.by_kernel, softmax_scale=case.softmax_scale, deterministic=True)
    _, dkv, _ = call(gradient.Arrays(*arrays, g_out.at[0, 0, 0].set(jnp.inf), g_lse))
    assert np.isnan(np.asarray(dkv, np.float32)).all()


def test_probabilities(interpreted, monkeypatch):
    """By the kernel and in plain JAX; their sum is the number of heads."""
    monkeypatch.setattr(probabilities_module, "dispatch", lambda kernel, plain, *args, rule: kernel(*args))
    for name in ("V4", "V3.2, a second tile of heads"):
        given = prefill_arguments(CASES[name])
        sink = given.pop("attn_sink")
        lse = sparse_mla_prefill(**given, backend="reference")[2]
        with jax.disable_jit():
            found = np.asarray(sparse_mla_prefill_probabilities(**given, lse=lse))
        static = {"softmax_scale": given.pop("softmax_scale")}
        plain = np.asarray(probabilities_module._plain(**given, lse=lse, **static))
        np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-6)
        empty = np.isneginf(np.asarray(lse)).all(1)
        np.testing.assert_allclose(found.sum(1), np.where(empty, 0, lse.shape[1]), rtol=1e-4)
        assert sink is None or empty.any() or len(found) > 3


class TestRoute:
    """Which gradient a program has: no kernel runs here."""

    @pytest.fixture(autouse=True)
    def h200(self, monkeypatch):
        pretend_h200(monkeypatch, "triton")

        def constant(arrays, **static):
            return tuple(jnp.full_like(x, 4321.0) for x in (arrays.q, arrays.kv, arrays.attn_sink))

        def prefill(q, kv, indices, topk_length, attn_sink, *, softmax_scale):
            return jnp.full((*q.shape[:-1], 512), 8765.0, q.dtype), *[jnp.full(q.shape[:-1], 8765.0)] * 2

        monkeypatch.setattr(gradient, "by_kernel", constant)
        record = dataclasses.replace(BACKENDS["triton"])
        object.__setattr__(record, "function", lambda phase: prefill)
        monkeypatch.setitem(BACKENDS, "triton", record)
        jax.clear_caches()
        yield
        jax.clear_caches()

    @staticmethod
    def lowered(platform: str, backend=None, change=lambda f: f) -> str:
        given = {name: x for name, x in prefill_arguments(CASES["V4"]).items() if name != "softmax_scale"}

        def loss(q, kv, attn_sink):
            changed = given | {"q": q, "kv": kv, "attn_sink": attn_sink}
            return sparse_mla_prefill(**changed, softmax_scale=0.1, backend=backend)[0].astype(jnp.float32).sum()

        arrays = given["q"], given["kv"], given["attn_sink"]
        return jax.jit(jax.grad(change(loss), (0, 1, 2))).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()

    @pytest.mark.parametrize("change", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
    @pytest.mark.parametrize("backend", [None, "triton"])
    def test_the_kernels_for_cuda(self, backend, change):
        text = self.lowered("cuda", backend, change)
        assert "4.321" in text and "8.765" in text and "exponential" not in text

    @pytest.mark.parametrize("platform, mapped", [("cpu", False), ("cuda", True)], ids=["a CPU", "vmap"])
    def test_the_reference_s_elsewhere(self, platform, mapped):
        """Under `vmap` it is the reference's on a GPU, too."""

        def over_one(f):
            return lambda *arrays: jax.vmap(f)(*(x[None] for x in arrays)).sum()

        text = self.lowered(platform, change=over_one if mapped else lambda f: f)
        assert "4.321" not in text and "8.765" not in text and "exponential" in text

    def test_without_triton_an_error_names_the_remedy(self, monkeypatch):
        monkeypatch.setattr(gradient, "why_not", lambda name: f"{name} is not installed")
        with pytest.raises(NotImplementedError, match=r'sparse_mla_prefill: .*triton is not installed.*"reference"'):
            self.lowered("cuda")


@pytest.mark.long
@ARCHITECTURES
def test_it_compiles_within_the_shared_memory(capabilities, tmp_path):
    """Compiled, not run."""
    for fact in compiled_facts("gradient", tmp_path, capabilities):
        assert fact["shared"] <= SHARED_MEMORY[fact["capability"]], fact
        assert fact["wgmma"] == (fact["capability"] == 90 and "statistics" not in fact["kernel"]), fact
        assert fact["wide_additions"] == ("float32" in fact["kernel"]), fact


@pytest.mark.gpu
class TestOnTheGPU:
    @pytest.mark.parametrize("backend", ["flashmla", "hopper", "triton"])
    def test_through_every_forward_kernel(self, backend):
        if backend not in installed_for("prefill"):
            pytest.skip(f"{backend} is not installed")
        for case in CASES.values():
            flags = (False, True, True)
            found = [gradient_by_jax(case, backend=backend, deterministic_gradient=flag) for flag in flags]
            check_gradients(case, found[0])
            check_gradients(case, found[1])
            jax.tree.map(np.testing.assert_array_equal, found[1], found[2])

    def test_production_sizes_repeat_to_the_bit(self):
        for heads, dim in ((64, 512), (128, 576), (16, 512)):
            case = small_prefill(5, dim=dim, heads=heads, sizes=(2048, 700), q_len=150)
            found = [gradient_by_jax(case, deterministic_gradient=flag) for flag in (False, True, True)]
            check_gradients(case, found[0])
            jax.tree.map(np.testing.assert_array_equal, found[1], found[2])
            check_gradients(case, found[1])

    def test_probabilities(self):
        given = prefill_arguments(small_prefill(6, heads=70, sizes=(300, 130), q_len=9)) | {"attn_sink": None}
        lse = sparse_mla_prefill(**given)[2]
        del given["attn_sink"]
        found = np.asarray(sparse_mla_prefill_probabilities(**given, lse=lse))
        plain = np.asarray(probabilities_module._plain(**given, lse=lse))
        np.testing.assert_allclose(found, plain, rtol=2e-3, atol=1e-5)

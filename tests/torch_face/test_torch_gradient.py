"""Prefill's gradient from torch: `torch.autograd` through the operator, the kernels' side of it in Triton's interpreter
and on the host, on a GPU all of it beside JAX's gradient.

Errors are those of float64 automatic differentiation (`gradient_oracle`), and allowed is twice what bfloat16 code has.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import H200, prefill_arguments, small_prefill
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import gradient_on_host
from drop_in_calls import optional
from gradient_oracle import check_gradients, cotangents, gradient_by_jax, saved
from host_build import compiled_once
from sparse_mla_torch.attention import gradient
from sparse_mla_torch.launch.executor import executor
from torch_graphs import capture
from triton_device import DEVICE, poisoned_memory, tensor

from jax_sparse_mla.attention import gradient as jax_gradient
from jax_sparse_mla.attention import sparse_mla_prefill_probabilities
from jax_sparse_mla.attention.backend import GradientArrays, GradientCall
from jax_sparse_mla.attention.hopper import backward as sm90
from jax_sparse_mla.attention.triton import backward as kernels
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch import build

pytestmark = pytest.mark.torch
OPS = torch.ops.jax_sparse_mla
CASES = {
    "V4": small_prefill(0, heads=3, sizes=(60, 40), q_len=7),
    "V3.2": small_prefill(1, dim=576, heads=20, sizes=(60, 40), q_len=3, sink=False),
    "no lengths, large scores": small_prefill(2, heads=2, sizes=(50, 33), q_len=5, lengths=False, hot=True),
    "no key at all": small_prefill(3, heads=2, sizes=(30, 16), q_len=2, rows="none"),
}
DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)]


def leaves(case, device: str = DEVICE) -> dict[str, torch.Tensor | None]:
    """The operator's tensors, those that differentiate as leaves."""
    names = ("q", "kv", "indices", "topk_length", "attn_sink")
    made = {name: optional(getattr(case, name)) for name in names}
    made = {name: x if x is None else x.to(device) for name, x in made.items()}
    return {name: x.requires_grad_() if x is not None and x.is_floating_point() else x for name, x in made.items()}


def host(x: torch.Tensor | None) -> np.ndarray | None:
    return None if x is None else x.float().cpu().numpy()


def differentiated(case, device: str = DEVICE, attend=OPS.sparse_mla_prefill, **options) -> tuple:
    """The gradients of q, kv and the sink by out and lse."""
    given = leaves(case, device)
    out, _, lse = attend(**given, softmax_scale=case.softmax_scale, **options)
    torch.autograd.backward((out, lse), [tensor(x).to(device) for x in cotangents(case)])
    return tuple(host(None if given[name] is None else given[name].grad) for name in ("q", "kv", "attn_sink"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"deterministic_gradient": True}, {"empty_lse_is_inf": True}], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.always(5)
def test_autograd_is_float64_s(name, options, device):
    check_gradients(CASES[name], differentiated(CASES[name], device, **options))


SHAPES = [(512, 1, (1, 1), 1), (512, 3, (40, 24), 5), (576, 2, (17, 9), 4)]  # values, heads, keys and columns, rows


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    shape=st.sampled_from(SHAPES),
    lengths=st.booleans(),
    sink_or_hot=st.sampled_from([(True, False), (False, False), (False, True)]),  # a large score leaves a sink nothing
    holes=st.sampled_from([0, 0.3, 1]),
)
def test_any_holes_and_lengths(seed, shape, lengths, sink_or_hot, holes):
    """Rows without a key, indices out of range, duplicates, NaN in keys that nobody reads: `small_prefill` has them."""
    dim, heads, sizes, q_len = shape
    sink, hot = sink_or_hot
    case = small_prefill(seed, dim=dim, heads=heads, sizes=sizes, q_len=q_len, lengths=lengths, sink=sink, hot=hot)
    absent = np.random.default_rng(seed).random(case.indices.shape) < holes
    case = dataclasses.replace(case, indices=np.where(absent, -1, case.indices).astype(np.int32))
    check_gradients(case, differentiated(case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(2, 3, 4, 0), (0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2)])
def test_a_call_without_keys_has_a_gradient_of_zeros(sizes, device):
    rows, heads, kv_len, topk = sizes
    given = [torch.ones(*shape, dtype=torch.bfloat16, device=device) for shape in ((rows, heads, 512), (kv_len, 512))]
    given.append(torch.ones(heads, device=device))
    q, kv, sink = (x.requires_grad_() for x in given)
    indices = torch.zeros(rows, topk, dtype=torch.int32, device=device)
    OPS.sparse_mla_prefill(q, kv, indices, 1.0, None, sink)[0].sum().backward()
    for x in given:
        assert x.grad.shape == x.shape and not x.grad.any()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_queries_and_one_of_the_results(device):
    """A loss of out alone, with a gradient that is one number expanded, and of lse alone."""
    case = CASES["V4"]
    rows, heads, dim = case.q.shape
    for which in (0, 2):
        given = leaves(case, device)
        wider = torch.zeros(rows, heads + 2, dim, dtype=torch.bfloat16, device=device)
        wider[:, :heads] = given["q"].detach()
        wider.requires_grad_()
        for q in (given["q"], wider[:, :heads]):
            results = OPS.sparse_mla_prefill(**given | {"q": q}, softmax_scale=case.softmax_scale)
            result = results[which]
            torch.where(torch.isinf(result), 0, result).sum().backward()
        assert given["q"].grad.any() and not wider.grad[:, heads:].any()
        torch.testing.assert_close(wider.grad[:, :heads], given["q"].grad)


def test_once_and_not_by_max_logits():
    given, scale = leaves(CASES["V4"]), CASES["V4"].softmax_scale
    out, max_logits, _ = OPS.sparse_mla_prefill(**given, softmax_scale=scale)
    assert out.requires_grad and not max_logits.requires_grad
    (dq,) = torch.autograd.grad(out.float().square().sum(), given["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="sparse_mla_prefill_backward"):
        dq.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["V4", "V3.2"])
def test_a_compiled_graph_differentiates(name, device):
    torch._dynamo.reset()
    compiled = torch.compile(OPS.sparse_mla_prefill, fullgraph=True, backend="aot_eager")
    for x, y in zip(differentiated(CASES[name], device, compiled), differentiated(CASES[name], device), strict=True):
        if device == "cpu" or x is None:
            np.testing.assert_array_equal(x, y)
        else:  # its sums come in any order
            np.testing.assert_allclose(x, y, rtol=0.02, atol=0.01 * np.abs(x).max())


@pytest.mark.no_gpu
def test_a_compiled_graph_knows_the_order_of_gradients():
    """They are contiguous, though q is not."""
    q, kv, indices, *_ = (x if x is None else tensor(np.asarray(x)) for x in saved(CASES["V4"]))
    q, scale = q.transpose(0, 1).contiguous().transpose(0, 1), CASES["V4"].softmax_scale
    out, _, lse = OPS.sparse_mla_prefill(q, kv, indices, scale)
    arguments = q, kv, indices, None, None, out, lse, torch.ones_like(out), torch.ones_like(lse), scale, False
    torch.library.opcheck(OPS._sparse_mla_prefill_backward.default, arguments, test_utils="test_faketensor")


def arrays_of(case, device: str = DEVICE) -> gradient.Arrays:
    return gradient.Arrays(*(x if x is None else tensor(np.asarray(x)).to(device) for x in saved(case)))


SERVES = [({}, "hopper"), ({"deterministic": True}, "triton"), ({"device": DeviceInfo("cuda", (8, 0))}, "triton")]
PRODUCTION = [(64, 512, True), (128, 576, False), (8, 512, True)]  # heads, values of a key, whether there is a sink


class TestKernels:
    """The kernels' side, of CPU tensors."""

    pytestmark = pytest.mark.no_gpu

    @pytest.fixture(scope="class")
    def library(self, tmp_path_factory):
        return compiled_once("sparse_backward", "sparse_backward", tmp_path_factory, watched=True)

    @pytest.mark.parametrize("deterministic", [False, True], ids=["float32", "fixed point"])
    @pytest.mark.always(3)
    @pytest.mark.parametrize("name", CASES)
    def test_triton(self, name, deterministic):
        arrays = arrays_of(CASES[name])
        arrays = arrays._replace(lse=torch.where(torch.isneginf(arrays.lse), torch.inf, arrays.lse))
        with poisoned_memory():
            found = gradient.by_kernel(arrays, CASES[name].softmax_scale, deterministic)
        check_gradients(CASES[name], tuple(map(host, found)))
        assert found[0].dtype == found[1].dtype == torch.bfloat16

    @pytest.mark.parametrize("case", [small_prefill(1, dim=576, heads=3, sizes=(80, 70), q_len=1)], ids=["V3.2"])
    def test_sm90(self, library, monkeypatch, case):
        """Its library takes torch's tensors in its own order, and leaves columns in its own."""
        tvm_ffi = pytest.importorskip("tvm_ffi")

        class Library:
            def sparse_backward(self, *tensors_and_scale):
                *given, scale, dq, sums = tensors_and_scale
                assert all(x is None or (x.is_contiguous() and not x.requires_grad) for x in (*given, dq, sums))
                arrays = [None if x is None else as_array(x) for x in given]
                found = gradient_on_host.launched(library, arrays, scale)
                dq.copy_(tensor(found[0]))
                sums.copy_(tensor(found[1]))

        monkeypatch.setattr(build, "module", lambda *binary: Library())
        monkeypatch.setattr(tvm_ffi, "use_torch_stream", contextlib.nullcontext)
        monkeypatch.setattr(gradient.route, "device_info", lambda device: H200)
        gradient._kernel.cache_clear()
        found = gradient.by_kernel(arrays_of(case), case.softmax_scale, False)
        gradient._kernel.cache_clear()
        check_gradients(case, tuple(map(host, found)))

    def test_statistics_are_jax_s(self):
        """With every kind of sink, beside rows without a key."""
        case = small_prefill(8, heads=5, q_len=6)
        case.attn_sink[:] = [0.5, np.inf, -np.inf, -3e38, 200]
        for attn_sink in (case.attn_sink, None):
            changed = dataclasses.replace(case, attn_sink=attn_sink)
            *_, sink, out, lse, g_out, g_lse = saved(changed)
            factor, offset, dsink = jax_gradient.statistics(sink, out, lse, g_out, g_lse)
            given = (optional(None if x is None else np.asarray(x)) for x in (sink, out, lse, g_out, g_lse))
            found = kernels.statistics(executor(torch.device("cpu")), *given)
            for x, y in zip(found[:2], (factor, offset)):
                np.testing.assert_allclose(x.numpy(), y, rtol=1e-5, atol=1e-6)
            assert (found[2] is None) == (dsink is None)
            if dsink is not None:
                np.testing.assert_allclose(found[2].sum(0).numpy(), dsink, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("changes", [{}, {"g_out": np.inf}], ids=["finite", "not finite"])
    def test_scales_of_keys_are_jax_s(self, changes):
        arrays = arrays_of(CASES["V4"])
        for name, value in changes.items():
            getattr(arrays, name)[0, 0, 0] = value
        offset = torch.randn(arrays.lse.shape, generator=torch.Generator().manual_seed(0))
        given = arrays.q, arrays.kv, arrays.g_out, offset
        expected = jax_gradient.key_scales(*(jnp.asarray(host(x)) for x in given), 0.1)
        np.testing.assert_array_equal(gradient.key_scales(*given, 0.1).numpy(), expected)

    @pytest.mark.parametrize(("changes", "serves"), SERVES)
    def test_which_kernel_serves(self, monkeypatch, changes, serves):
        pytest.importorskip("tvm_ffi")
        call = GradientCall(**{"device": H200, "qk_dim": 512, "deterministic": False} | changes)
        for binary, kernel in ((object(), serves), (None, "triton")):
            monkeypatch.setattr(build, "module", lambda *_, binary=binary: binary)
            gradient._kernel.cache_clear()
            assert gradient._kernel(call) == kernel
        gradient._kernel.cache_clear()


def as_array(x: torch.Tensor) -> np.ndarray:
    """numpy's, in bfloat16 where it is."""
    return np.asarray(jnp.asarray(host(x), jnp.bfloat16)) if x.dtype == torch.bfloat16 else x.cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["V4", "V3.2"])
def test_probabilities(name, device):
    """Their sum is the number of heads; they are a teacher's, without a gradient."""
    case, given = CASES[name], leaves(CASES[name], device)
    sink = given.pop("attn_sink")
    _, _, lse = OPS.sparse_mla_prefill(**given, attn_sink=sink, softmax_scale=case.softmax_scale)
    found = OPS.sparse_mla_prefill_probabilities(**given, lse=lse, softmax_scale=case.softmax_scale)
    assert found.shape == case.indices.shape and not found.requires_grad
    empty = np.isneginf(host(lse.detach())).all(1)
    np.testing.assert_allclose(host(found).sum(1), np.where(empty, 0, lse.shape[1]), rtol=2e-3)
    arrays = prefill_arguments(case) | {"lse": jnp.asarray(host(lse.detach()))}
    del arrays["attn_sink"]
    np.testing.assert_allclose(host(found), sparse_mla_prefill_probabilities(**arrays), rtol=2e-3, atol=1e-5)


@pytest.mark.gpu
class TestOnTheGPU:
    @pytest.mark.parametrize(("heads", "dim", "sink"), PRODUCTION)
    def test_beside_jax_s_and_repeated_to_the_bit(self, heads, dim, sink):
        case = small_prefill(5, dim=dim, heads=heads, sizes=(2048, 700), q_len=150, sink=sink)
        found = differentiated(case)
        check_gradients(case, found)
        for x, y in zip(found, gradient_by_jax(case)):
            if x is not None:
                np.testing.assert_allclose(x, np.asarray(y, np.float32), rtol=0.02, atol=0.01 * np.abs(x).max())
        once, again = (differentiated(case, deterministic_gradient=True) for _ in range(2))
        check_gradients(case, once)
        for x, y in zip(once, again):
            np.testing.assert_array_equal(x, y)

    @pytest.mark.parametrize("heads", [8, 64])
    def test_one_kernel_of_both_frameworks(self, heads):
        """Of the same statistics torch's launch gives the same dq, to the bit."""
        if gradient._kernel(GradientCall(DeviceInfo.current(), 512, False)) != "hopper":
            pytest.skip("the CUDA kernel does not serve here")
        case = small_prefill(6, heads=heads, sizes=(300, 130), q_len=9)
        q, kv, indices, lengths, sink, out, lse, g_out, g_lse = saved(case)
        factor, offset, _ = jax_gradient.statistics(sink, out, lse, g_out, g_lse)
        arrays = GradientArrays(q, kv, indices, lengths, g_out, lse, factor, offset)
        scale = case.softmax_scale
        dq, dkv = jax.jit(lambda arrays: sm90.backward(None, arrays, softmax_scale=scale))(arrays)
        given = GradientArrays(*(optional(None if x is None else np.asarray(x)) for x in arrays))
        found = gradient._on_sm90(None, given, softmax_scale=scale)
        np.testing.assert_array_equal(host(found[0]), np.asarray(dq, np.float32))
        np.testing.assert_allclose(host(found[1]), np.asarray(dkv, np.float32), rtol=0.01, atol=1e-3)

    def test_a_graph_replays_forward_and_backward(self):
        cases = [small_prefill(seed, heads=64, sizes=(300, 130), q_len=9) for seed in range(3)]
        given, (g_out, g_lse) = leaves(cases[0]), map(tensor, cotangents(cases[0]))
        wanted = [given[name] for name in ("q", "kv", "attn_sink")]

        def step():
            out, _, lse = OPS.sparse_mla_prefill(**given, softmax_scale=cases[0].softmax_scale)
            return torch.autograd.grad((out, lse), wanted, (g_out, g_lse))

        step()
        graph, results = capture(step)
        for case in (*cases, cases[0]):
            with torch.no_grad():
                for name, x in leaves(case).items():
                    given[name].copy_(x)
            for x in results:
                x.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            check_gradients(case, tuple(map(host, results)))

"""Attention takes the routed kernel where a program is lowered for CUDA, and the reference everywhere else.

The kernel here is plain JAX whose results are constants that one finds in a program's text, and which notes what it
was given; the device is said to be an H200. What runs on a real one is marked `gpu`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import (
    H200,
    MADE_UP,
    assert_same,
    decode_arguments,
    prefill_arguments,
    pretend_h200,
    pretend_installed,
    small_decode,
    small_prefill,
)
from jax.sharding import AxisType, PartitionSpec

from jax_sparse_mla.attention import DeviceInfo, sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.backend import BACKENDS
from jax_sparse_mla.attention.serve import calls_of
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.launch import build

ATTENTION = {"decode": sparse_mla_decode, "prefill": sparse_mla_prefill}
BOTH = pytest.mark.parametrize("phase", ATTENTION)


def arguments_of(phase: str, **changes) -> dict:
    given = decode_arguments(small_decode(extra=(16, 2))) if phase == "decode" else prefill_arguments(small_prefill())
    return given | changes


def lowered(phase: str, platform: str, function=None, **changes) -> jax.stages.Lowered:
    """The program of a call for a platform."""
    given = arguments_of(phase, **changes)
    static = {name: given.pop(name) for name in ("softmax_scale", "backend") if name in given}
    function = function or ATTENTION[phase]
    jitted = jax.jit(lambda given: function(**given, **static))
    return jitted.trace(given).lower(lowering_platforms=(platform,))


def text(*args, **kwargs) -> str:
    return lowered(*args, **kwargs).as_text()


@pytest.fixture
def kernel(monkeypatch):
    """Installs a kernel as "triton"; gives the arguments of its calls."""
    calls = []

    def decode(q, tables, attn_sink, *, softmax_scale, assume_valid_indices):
        calls.append([table.lengths for table in tables])
        return jnp.full(q.shape, 4321.0, q.dtype), jnp.full(q.shape[:-1], 4321.0)

    def prefill(q, kv, indices, topk_length, attn_sink, *, softmax_scale):
        calls.append([topk_length])
        return jnp.full(q.shape, 4321.0, q.dtype), *[jnp.full(q.shape[:-1], 4321.0)] * 2

    module = types.ModuleType("constant_attention")
    module.decode, module.prefill = decode, prefill
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(BACKENDS["triton"], module=module.__name__))
    pretend_h200(monkeypatch, "triton")
    monkeypatch.setattr(build, "module", lambda *_: None)  # for the pretended device nvcc would compile, for 20 seconds
    jax.clear_caches()  # what was traced with another kernel is kept
    yield calls
    jax.clear_caches()


def takes_the_kernel(program: str) -> bool:
    assert ("4.321" in program) != ("exponential" in program)  # one of the two, never both
    return "4.321" in program


@pytest.mark.parametrize("backend", BACKENDS)
@BOTH
def test_adapters_have_the_reference_s_signatures(phase, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    layouts = BACKENDS[backend].layouts
    if layouts is not None and phase not in layouts:
        pytest.skip(f"{backend} has no {phase}; the router says so")
    functions = (BACKENDS[name].function(phase) for name in ("reference", backend))
    wanted, found = (inspect.signature(function).parameters for function in functions)
    assert [(p.name, p.kind) for p in found.values()] == [(p.name, p.kind) for p in wanted.values()]


@BOTH
def test_the_platform_lowered_for_decides(kernel, phase):
    assert takes_the_kernel(text(phase, "cuda"))
    assert not takes_the_kernel(text(phase, "cpu"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layout_that_no_kernel_names_is_the_references(monkeypatch, backend):
    """On the device of each backend the call takes the reference, by name it is refused."""
    devices = BACKENDS[backend].devices
    device = DeviceInfo("cpu") if devices is None else dataclasses.replace(H200, compute_capability=devices[0][0])
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: device))
    pretend_installed(monkeypatch, *BACKENDS)
    cache = PagedKV.zeros(MADE_UP, 2, 64)
    assert cache.data.shape == (2, 64 * 528)
    given = arguments_of("decode", cache=cache, extra_cache=None, extra_indices=None, extra_topk_length=None)
    static = {"softmax_scale": given.pop("softmax_scale")}

    def attend(given, **more):
        return sparse_mla_decode(**given, **static, **more)

    lowered = jax.jit(attend).trace(given).lower(lowering_platforms=("cuda",))
    assert calls_of(lowered) == {("decode", "reference")}
    if backend != "reference":
        with pytest.raises(ValueError, match=f"backend '{backend}' cannot serve this decode call: .*got made up"):
            attend(given, backend=backend)


@BOTH
def test_a_program_says_which_backend_it_calls(kernel, phase):
    """The one that it runs on its platform; none where no attention is called."""
    for platform, backend in (("cuda", "triton"), ("cpu", "reference")):
        assert calls_of(lowered(phase, platform)) == {(phase, backend)}
    assert calls_of(lowered(phase, "cuda", backend="reference")) == {(phase, "reference")}
    assert calls_of(jax.jit(jnp.sin).lower(1.0)) == frozenset()


@BOTH
def test_a_backend_asked_for_by_name_is_not_replaced(kernel, phase, monkeypatch):
    assert takes_the_kernel(text(phase, "cpu", backend="triton"))
    assert not takes_the_kernel(text(phase, "cuda", backend="reference"))
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "triton")
    assert takes_the_kernel(text(phase, "cpu"))


@BOTH
def test_vmap_takes_the_reference(kernel, phase):
    given = arguments_of(phase)
    scale, q = given.pop("softmax_scale"), given.pop("q")

    def one(q):
        return ATTENTION[phase](q=q, **given, softmax_scale=scale)

    batch = jnp.stack([q, -q])
    program = jax.jit(jax.vmap(one)).trace(batch).lower(lowering_platforms=("cuda",)).as_text()
    assert not takes_the_kernel(program)
    with jax.default_device(jax.devices("cpu")[0]):
        results = jax.vmap(one)(batch)
        for i in range(2):
            for a, b in zip(results, one(batch[i]), strict=True):
                np.testing.assert_allclose(np.asarray(a[i], np.float32), np.asarray(b, np.float32), 2**-7, 1e-5)


@BOTH
def test_under_shard_map_results_vary_over_the_mesh(kernel, phase):
    given = arguments_of(phase)
    scale, q = given.pop("softmax_scale"), given.pop("q")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))

    def local(q):
        out, *rest = ATTENTION[phase](q=q, **given, softmax_scale=scale)
        return jax.lax.psum(out.astype(jnp.float32), "x"), jax.lax.psum(rest[-1], "x")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec())
    program = jax.jit(sharded).trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert takes_the_kernel(program) and "all_gather" not in program


@BOTH
def test_an_exported_program_serves_both_platforms(kernel, phase):
    given = arguments_of(phase)
    scale = given.pop("softmax_scale")
    cache = {name: given.pop(name) for name in ("cache", "extra_cache") if name in given}
    given = {name: x for name, x in given.items() if x is not None}
    exported = jax.export.export(
        jax.jit(lambda given: ATTENTION[phase](**given, **cache, softmax_scale=scale)), platforms=("cpu", "cuda")
    )(given)
    assert exported.platforms == ("cpu", "cuda")
    with jax.default_device(jax.devices("cpu")[0]):
        here = jax.device_put(given, jax.devices("cpu")[0])
        expected = ATTENTION[phase](**here, **cache, softmax_scale=scale, backend="reference")
        assert_same(exported.call(here), expected)


def loss(phase, backend=None, vmapped=False):
    """A function of q that one would differentiate."""
    given = arguments_of(phase)
    scale, q = given.pop("softmax_scale"), given.pop("q")
    static = {"softmax_scale": scale, "backend": backend}

    def of_q(q):
        return sum(x.astype(jnp.float32).sum() for x in ATTENTION[phase](q=q, **given, **static)[:1])

    return (lambda q: jax.vmap(of_q)(q[None]).sum()) if vmapped else of_q, q


JACFWD = pytest.param(lambda f: jax.jit(jax.jacfwd(f)), id="jacfwd")  # without jit it would make its basis first


@pytest.mark.parametrize("derive", [jax.grad, lambda f: jax.jit(jax.grad(f)), JACFWD, lambda f: partial(jax.vjp, f)])
@pytest.mark.parametrize("backend", [None, "triton"])
def test_a_gradient_through_a_decode_kernel_names_the_backend_that_has_one(kernel, backend, derive):
    of_q, q = loss("decode", backend)
    message = 'sparse_mla_decode: its kernels have no gradient; differentiate with backend="reference"'
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        derive(of_q)(q)


@BOTH
def test_a_gradient_by_the_reference(kernel, phase):
    """Named, and under `vmap`, where it serves in the kernel's place."""
    of_q, q = loss(phase, "reference")
    expected = jax.jit(jax.grad(of_q))(q)
    assert np.isfinite(np.asarray(expected, np.float32)).all() and np.asarray(expected, np.float32).any()
    of_q, q = loss(phase, vmapped=True)
    with jax.default_device(jax.devices("cpu")[0]):
        found = np.asarray(jax.jit(jax.grad(of_q))(q), np.float32)
    np.testing.assert_allclose(found, np.asarray(expected, np.float32), rtol=2**-7, atol=1e-6)  # bfloat16's last bit


@BOTH
def test_what_does_not_depend_on_the_kernel_is_differentiated(kernel, phase):
    of_q, q = loss(phase)
    gradient = jax.jit(jax.grad(lambda q: of_q(jax.lax.stop_gradient(q)) + 3 * q.astype(jnp.float32).sum()))(q)
    np.testing.assert_array_equal(np.asarray(gradient, np.float32), 3.0)


def test_absent_lengths_reach_the_kernel_as_none(kernel):
    """No array is filled with the columns' number: a launch of its own, in front of every layer's attention."""
    text("decode", "cuda", topk_length=None, extra_topk_length=None)
    text("decode", "cuda", extra_topk_length=None)
    text("prefill", "cuda", topk_length=None)
    both, one, prefill = kernel
    assert both == [None, None]
    assert one[0].shape == (3, 2) and one[1] is None
    assert prefill == [None]


@pytest.mark.gpu
class TestOnTheGPU:
    @BOTH
    def test_arrays_of_the_cpu_are_served_there(self, phase):
        """By the reference, without a word to the GPU's backends."""
        given = jax.device_put(arguments_of(phase), jax.devices("cpu")[0])
        given["softmax_scale"] = float(given["softmax_scale"])
        expected = ATTENTION[phase](**given, backend="reference")
        results = ATTENTION[phase](**given)
        assert all(x.devices() == {jax.devices("cpu")[0]} for x in results)
        assert_same(results, expected)

    @BOTH
    def test_nothing_is_launched_beside_the_kernel(self, phase):
        given = arguments_of(phase, **dict.fromkeys(("topk_length", "extra_topk_length")))
        scale = given.pop("softmax_scale")
        if phase == "prefill":
            del given["extra_topk_length"]
        jitted = jax.jit(lambda given: ATTENTION[phase](**given, softmax_scale=scale, backend="triton"))
        program = jitted.lower(given).compile().as_text()
        entry = program[program.index("ENTRY") :]
        operations = set(re.findall(r"^\s+(?:ROOT )?\S+ = .*? ([a-z][a-z0-9-]*)\(", entry, re.MULTILINE))
        assert operations <= {"parameter", "custom-call", "get-tuple-element", "bitcast", "tuple"}, entry

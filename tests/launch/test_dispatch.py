"""How a JAX function takes a Triton kernel: by the platform that the program is lowered for, and never under vmap.

The kernel here is plain JAX that gives another result than the plain code, so that one sees which of them ran. As a
custom call does, it forgets over which mesh axes its argument varies.
"""

from __future__ import annotations

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_sparse_mla.launch.dispatch as dispatching
from jax_sparse_mla import packages
from jax_sparse_mla.launch.dispatch import dispatch, use_triton
from jax_sparse_mla.launch.transforms import ENGINE_PROGRAM, KernelCall


def kernel(x):
    return jnp.full(x.shape, 4321.0)


def plain(x):
    return x + 1234.0


def dispatched(x):
    return dispatch(kernel, plain, x)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(dispatching, "available", lambda: True)
    monkeypatch.delenv("JAX_SPARSE_MLA_BACKEND", raising=False)


def program(function, x, platform: str) -> str:
    """The function's program for a platform; jitted anew, since what was traced before is kept."""
    return jax.jit(lambda x: function(x)).trace(x).lower(lowering_platforms=(platform,)).as_text()


X = jnp.arange(6.0).reshape(2, 3)


def test_the_platform_lowered_for_decides(with_triton):
    assert use_triton()
    cuda, cpu = program(dispatched, X, "cuda"), program(dispatched, X, "cpu")
    assert "4.321" in cuda and "1.234" not in cuda
    assert "1.234" in cpu and "4.321" not in cpu


@pytest.mark.parametrize(
    "mapped",
    [jax.vmap(dispatched), jax.vmap(jax.vmap(dispatched)), lambda x: jax.lax.map(dispatched, x, batch_size=2)],
    ids=["vmap", "vmap of vmap", "map in batches"],
)
def test_vmap_takes_the_plain_code(with_triton, mapped):
    text = program(mapped, X, "cuda")
    assert "1.234" in text and "4.321" not in text


def test_vmap_over_some_arguments(with_triton):
    def both(x, y):
        return x + y, jnp.broadcast_to(y, x.shape)

    added, second = jax.vmap(lambda y: dispatch(lambda x, y: (x, x), both, X[0], y))(jnp.arange(2.0))
    np.testing.assert_array_equal(added, X[0][None] + np.arange(2.0)[:, None])
    np.testing.assert_array_equal(second, np.broadcast_to(np.arange(2.0)[:, None], (2, 3)))


def test_a_loop_keeps_the_kernel(with_triton):
    text = program(lambda x: jax.lax.map(dispatched, x), X, "cuda")
    assert "4.321" in text and "1.234" not in text


def test_nothing_is_differentiated_through_it(with_triton):
    gradient = jax.grad(lambda x: (dispatched(x) + 2 * x).sum())(X)
    np.testing.assert_array_equal(gradient, np.full((2, 3), 2.0))


def test_a_derivative_through_a_kernel_says_what_has_one(with_triton):
    """Where the caller did not say that nothing is differentiated through it."""
    for function in (
        KernelCall(kernel, plain),
        KernelCall(kernel, plain, batches=True),
        KernelCall(kernel, plain, replaceable=False),
    ):
        with pytest.raises(
            NotImplementedError, match=r'kernel: .* no gradient; differentiate with backend="reference"'
        ):
            jax.jit(jax.grad(lambda x, function=function: function(x).sum()))(X)
        mapped = program(jax.vmap(function), X, "cuda")
        assert ("4.321" in mapped) != ("1.234" in mapped)


def test_a_package_that_does_not_import_is_said(monkeypatch, tmp_path):
    """Plain code serves, many times slower: nobody should look for the reason."""
    (tmp_path / "triton.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="NVIDIA H200")])
    for cached in (packages.why_not, packages.warn_once):
        cached.cache_clear()
    with pytest.warns(UserWarning, match=r"triton does not import: OSError: libcuda.so.1"):
        assert dispatching.unready() is not None
    packages.why_not.cache_clear()


def test_a_program_of_an_engine_traces_no_plain_code(with_triton):
    """It is for this GPU alone; programs of others that call the same jitted function keep theirs."""
    traced = []

    @jax.jit
    def called(x):
        return dispatch(kernel, lambda x: traced.append(x.shape) or plain(x), x)

    with ENGINE_PROGRAM(True):
        assert "4.321" in program(called, X, "cuda") and not traced
    assert "1.234" in program(called, X, "cpu") and traced


@pytest.mark.parametrize("of_engine", [False, True])
def test_under_shard_map_results_vary_as_the_plain_codes(with_triton, of_engine):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")

    def function(x):
        result = dispatched(x)
        assert jax.typeof(result).manual_axis_type.varying == {"x"}
        return result

    sharded = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    with ENGINE_PROGRAM(of_engine):
        text = program(sharded, X, "cuda")
    assert "4.321" in text and "all_gather" not in text


def test_the_environment_turns_kernels_off(with_triton, monkeypatch):
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")
    assert not use_triton()
    assert "4.321" not in program(dispatched, X, "cuda")


def test_a_cpu_takes_no_kernel(monkeypatch):
    monkeypatch.delenv("JAX_SPARSE_MLA_BACKEND", raising=False)
    assert use_triton() == (jax.default_backend() == "gpu" and dispatching.available())
    if jax.default_backend() == "cpu":
        np.testing.assert_array_equal(dispatched(X), X + 1234.0)

"""`torch_operator.torch_call` on XLA's CPU buffers: what an operator gets, what comes back, what fails."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jax_sparse_mla.launch import compile_cache, torch_operator
from jax_sparse_mla.launch.torch_operator import Strided, torch_call

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cpu,
    pytest.mark.skipif(not torch_operator.available(), reason="needs a C++ compiler"),
]

OPERATORS = {
    "everything(Tensor x, Tensor? y, Tensor? z, int n, bool flag, float f, str? name=None) -> (Tensor, Tensor?)": (
        lambda x, y, z, n, flag, f: got.update(x=x.clone(), y=y, z=z, n=n, flag=flag, f=f) or (x * 1, x * 2)
    ),
    "several(Tensor x) -> Tensor[]": lambda x: [x + i for i in range(3)],
    "some(Tensor x) -> Tensor?[]": lambda x: [x + 1, None, x + 2],
    "wide(Tensor x) -> Tensor": lambda x: torch.cat([x, -x], dim=1),
    "transposed(Tensor x) -> Tensor": lambda x: x.T,
    "fails(Tensor x) -> Tensor": lambda x: 1 / 0,
    "float_of(Tensor x) -> float": lambda x: 1.0,
}
got: dict = {}
X = jnp.arange(24, dtype=jnp.int32).reshape(4, 6)
SAME = jax.ShapeDtypeStruct((4, 6), jnp.int32)


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = torch.library.Library("torch_call_test", "DEF")
    for schema, function in OPERATORS.items():
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")
    yield library
    library._destroy()


def call(name: str, results, **arguments):
    arrays = {key: value for key, value in arguments.items() if isinstance(value, jax.Array)}
    return jax.jit(lambda arrays: torch_call(f"torch_call_test::{name}", arguments | arrays, results))(arrays)


def test_arguments_of_every_kind_arrive():
    first, second = call("everything", [SAME, SAME], x=X, y=X[:2], z=None, n=-3, flag=True, f=0.25)
    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(second, 2 * X)
    np.testing.assert_array_equal(got["x"].numpy(), X)
    assert got["y"].shape == (2, 6) and got["z"] is None
    assert got["n"] == -3 and got["flag"] is True and got["f"] == 0.25


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32, jnp.bfloat16, jnp.float32])
def test_dtypes(dtype):
    x = X.astype(dtype)
    results = call("several", [jax.ShapeDtypeStruct((4, 6), dtype)] * 2, x=x)
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, x + jnp.asarray(i, dtype))


@pytest.mark.parametrize("offset", [0, 3])
def test_a_strided_view(offset):
    def view(x):
        arguments = {"x": Strided(x, (4, 2), (6, 1), offset), "y": None, "z": None, "n": 0, "flag": False, "f": 0.0}
        return torch_call("torch_call_test::everything", arguments, [jax.ShapeDtypeStruct((4, 2), jnp.int32)])

    (result,) = jax.jit(view)(X)
    np.testing.assert_array_equal(result, X[:, offset : offset + 2])


def test_a_result_takes_the_front_of_each_row():
    (result,) = call("wide", [SAME], x=X)
    np.testing.assert_array_equal(result, X)
    (result,) = call("wide", [jax.ShapeDtypeStruct((4, 9), jnp.int32)], x=X)
    np.testing.assert_array_equal(result, jnp.concatenate([X, -X], 1)[:, :9])


def test_optional_items_of_a_list():
    (first,) = call("some", [SAME], x=X)
    np.testing.assert_array_equal(first, X + 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="returned None"):
        jax.block_until_ready(call("some", [SAME, SAME], x=X))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("fails", (4, 6), jnp.int32, "fails: the operator failed.*division by zero"),
        ("wide", (4, 13), jnp.int32, "another dtype, layout or size"),
        ("wide", (4, 6), jnp.float32, "another dtype, layout or size"),
        ("transposed", (6, 4), jnp.int32, "another dtype, layout or size"),
    ],
)
def test_failures_are_xla_errors_and_the_next_call_works(name, shape, dtype, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(name, [jax.ShapeDtypeStruct(shape, dtype)], x=X))
    np.testing.assert_array_equal(call("several", [SAME], x=X)[0], X)


def test_a_view_that_exceeds_its_operand_is_an_xla_error():
    view = Strided(X, (4, 6), (6, 1), offset=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a view exceeds its operand"):
        jax.block_until_ready(torch_call("torch_call_test::several", {"x": view}, [SAME]))
    others = {"x": X, "y": X, "n": 0, "flag": False, "f": 0.0}  # whose handles are freed
    with pytest.raises(jax.errors.JaxRuntimeError, match="a view exceeds its operand"):
        jax.block_until_ready(torch_call("torch_call_test::everything", others | {"z": view}, [SAME]))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("several", {"x": X, "q": X}, "has no argument q, only x"),
        ("several", {}, "needs its argument x"),
        ("several", {"x": None}, "x is Tensor, got NoneType"),
        ("everything", {"x": X, "y": None, "z": None, "n": 1.5, "flag": True, "f": 1.0}, "n is int, got float"),
        (
            "everything",
            {"x": X, "y": None, "z": None, "n": 1, "flag": True, "f": 1.0, "name": "a"},
            "name is .*got str",
        ),
        ("float_of", {"x": X}, "returns float cannot be called"),
    ],
)
def test_arguments_that_do_not_fit_the_schema_are_named(name, arguments, message):
    with pytest.raises(TypeError, match=message):
        torch_call(f"torch_call_test::{name}", arguments, [SAME])


def test_vmap_calls_one_after_the_other():
    (result,) = jax.vmap(lambda x: torch_call("torch_call_test::several", {"x": x}, [SAME]))(jnp.stack([X, 2 * X]))
    np.testing.assert_array_equal(result, jnp.stack([X, 2 * X]))


@pytest.mark.parametrize("shape", [(), (0, 6), (4, 0)])
def test_results_without_rows_or_elements(shape):
    """On XLA's side nothing divides by them."""
    (result,) = call("several", [jax.ShapeDtypeStruct(shape, jnp.int32)], x=X)
    np.testing.assert_array_equal(result, np.resize(X, shape))


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    """`test_compile_cache` has what all compiled code has in common."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_cache, "find_compiler", lambda kind: None)
    assert not torch_operator.available()
    with pytest.raises(RuntimeError, match=r"torch_call has to be compiled, and none of c\+\+, .* name it in CXX"):
        torch_operator._load()

"""`tvm.call` on XLA's CPU buffers: what a function gets, and calls traced by several threads at once."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tvm_stub

from jax_sparse_mla.launch import tvm
from jax_sparse_mla.launch.tvm import Buffer

pytest.importorskip("tvm_ffi")
pytestmark = pytest.mark.cpu

SIX = jax.ShapeDtypeStruct((6,), jnp.int32)
X = jnp.arange(24, dtype=jnp.uint8).reshape(2, 12)


def call(function, arguments, *operands, result=SIX):
    module = tvm_stub.module(function=function)
    return jax.jit(lambda *operands: tvm.call(module, "function", arguments, [result], *operands)[0])(*operands)


def test_arguments_come_in_the_function_s_order():
    def function(out, number, absent, flag, fraction, name, x):
        assert (number, absent, flag, fraction, name) == (-3, None, True, 0.25, "0,1;2,3") and x.shape == (2, 12)
        out[...] = x.sum()

    result = call(function, (Buffer(1), -3, None, True, 0.25, "0,1;2,3", Buffer(0)), X)
    np.testing.assert_array_equal(result, np.full(6, X.sum()))


def test_a_paged_view_leaves_the_padding_out():
    def function(pages, out):
        assert pages.shape == (2, 2, 5) and pages.strides == (12, 5, 1)
        out[...] = pages

    result = call(function, (Buffer(0, 2, 5), Buffer(1)), X, result=jax.ShapeDtypeStruct((2, 2, 5), jnp.uint8))
    np.testing.assert_array_equal(result, np.asarray(X)[:, :10].reshape(2, 2, 5))


def test_a_part_of_a_buffer():
    """The pages of one layer among others, as they are and with their padding left out."""
    pool = jnp.arange(72, dtype=jnp.uint8).reshape(6, 12)

    def function(pages, rows, out):
        assert pages.shape == (2, 12) and rows.shape == (2, 2, 5) and rows.strides == (12, 5, 1)
        out[...] = pages
        out[:, :10] += rows.reshape(2, 10)

    arguments = Buffer(0, first=3, pages=2), Buffer(0, 2, 5, first=3, pages=2), Buffer(1)
    result = call(function, arguments, pool, result=jax.ShapeDtypeStruct((2, 12), jnp.uint8))
    expected = np.array(pool[3:5])
    expected[:, :10] *= 2
    np.testing.assert_array_equal(result, expected)


@pytest.mark.always(1)
@pytest.mark.parametrize(
    "arguments, message",
    [
        ((Buffer(0, 2, 7), Buffer(1)), "page of 12 bytes cannot hold 2 rows of 7"),
        ((Buffer(0, first=1, pages=2), Buffer(1)), "rows 1 to 3 of a buffer of 2"),
        ((Buffer(2),), "no buffer 2 of 2"),
    ],
)
def test_what_does_not_fit_is_an_xla_error(arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(lambda *args: pytest.fail("called"), arguments, X))


def test_threads_that_trace_at_once():
    def add(x, n, out):
        out[...] = x + n

    module, x, failures = tvm_stub.module(add=add), jnp.arange(6, dtype=jnp.int32), []

    def work(first):
        try:
            for n in range(first, first + 20):
                arguments = (Buffer(0), n, Buffer(1))
                (y,) = jax.jit(lambda x, a=arguments: tvm.call(module, "add", a, [SIX], x))(x)
                np.testing.assert_array_equal(y, np.arange(6) + n)
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not failures


@pytest.mark.long
def test_a_target_s_name_says_what_is_bound(tmp_path):
    """XLA's cache on disk gives one process's programs to another, which may have traced other calls first."""
    source = """if True:
        import sys
        sys.modules["torch"] = None  # tvm_ffi would import it, and takes seconds
        import jax, tvm_stub
        from jax_sparse_mla.launch import tvm

        def add(x, n, out): out[...] = x + n

        module, x = tvm_stub.module(add=add), jax.numpy.arange(3)
        for n in sys.argv[1:]:
            call = lambda x: tvm.call(module, "add", (tvm.Buffer(0), int(n), tvm.Buffer(1)), [x], x)[0]
            words = jax.jit(call).lower(x).as_text().split()
            print(n, jax.jit(call)(x), *{word for word in words if "add." in word})
    """
    paths = os.pathsep.join([str(pathlib.Path(__file__).parents[1] / "support"), *sys.path])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    lines = []
    for numbers in (("1", "2"), ("2", "1")):
        command = [sys.executable, "-c", source, *numbers]
        lines.append(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split("\n")
        )
    assert sorted(lines[0]) == sorted(lines[1]) and len(set(lines[0])) == 3  # with the empty last one
    assert "1 [1 2 3]" in lines[0][0] and "2 [2 3 4]" in lines[1][0] and "add." in lines[0][0]


def test_more_functions_than_a_thousand():
    """A program of a model with 43 layers calls about 130, and a server has many programs."""
    module, x = tvm_stub.module(add=lambda x, n, out: np.add(x, n, out=out)), jnp.arange(6, dtype=jnp.int32)

    def chain(x):
        for n in range(1500):
            (x,) = tvm.call(module, "add", (Buffer(0), n, Buffer(1)), [SIX], x)
        return x

    np.testing.assert_array_equal(jax.jit(chain)(x), np.arange(6) + 1500 * 1499 // 2)


def test_a_key_without_a_function_is_an_error():
    call(lambda x, out: None, (Buffer(0), Buffer(1)), X)
    name, _ = tvm.target("function", ("a test",), lambda: lambda *_: None)
    unknown = jax.ffi.ffi_call(name, SIX)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no function has the key 7"):
        jax.block_until_ready(jax.jit(lambda x: unknown(x, key=np.int64(7)))(X))

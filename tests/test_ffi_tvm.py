"""`ffi_tvm.call` on XLA's CPU buffers: what a function gets, and calls traced by several threads at once."""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tvm_stub

from jax_sparse_mla import ffi_tvm
from jax_sparse_mla.ffi_tvm import Buffer

pytest.importorskip("jax_tvm_ffi")
pytestmark = pytest.mark.cpu

SIX = jax.ShapeDtypeStruct((6,), jnp.int32)
X = jnp.arange(24, dtype=jnp.uint8).reshape(2, 12)


def call(function, arguments, *operands, result=SIX):
    module = tvm_stub.module(function=function)
    return jax.jit(lambda *operands: ffi_tvm.call(module, "function", arguments, [result], *operands)[0])(*operands)


def test_arguments_come_in_the_function_s_order():
    def function(out, number, absent, flag, fraction, x):
        assert (number, absent, flag, fraction) == (-3, None, True, 0.25) and x.shape == (2, 12)
        out[...] = x.sum()

    result = call(function, (Buffer(1), -3, None, True, 0.25, Buffer(0)), X)
    np.testing.assert_array_equal(result, np.full(6, X.sum()))


def test_a_paged_view_leaves_the_padding_out():
    def function(pages, out):
        assert pages.shape == (2, 2, 5) and pages.strides == (12, 5, 1)
        out[...] = pages

    result = call(function, (Buffer(0, 2, 5), Buffer(1)), X, result=jax.ShapeDtypeStruct((2, 2, 5), jnp.uint8))
    np.testing.assert_array_equal(result, np.asarray(X)[:, :10].reshape(2, 2, 5))


@pytest.mark.parametrize(
    "arguments, message",
    [((Buffer(0, 2, 7), Buffer(1)), "page of 12 bytes cannot hold 2 rows of 7"), ((Buffer(2),), "no buffer 2 of 2")],
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
                (y,) = jax.jit(lambda x, a=arguments: ffi_tvm.call(module, "add", a, [SIX], x))(x)
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

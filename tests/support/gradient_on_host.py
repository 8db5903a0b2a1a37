"""The SM90 kernel of prefill's gradient, compiled for the host: in place of its launch, and as a program that judges a
library.

    python gradient_on_host.py LIBRARY    # three blocks of V3.2's keys, five of V4's; says what no barrier orders

The threads of a thread block take turns; `host_cuda/sm90_host.h` says what happens when. A process ends where an
operand changes while its product is under way.
"""

from __future__ import annotations

import ctypes
import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
from attention_calls import small_prefill
from attention_oracle import PrefillCase
from gradient_oracle import check_gradients, saved
from host_build import GUARD, aligned, poisoned

from jax_sparse_mla.attention import gradient
from jax_sparse_mla.attention.hopper import backward as sm90

THREE_BLOCKS = small_prefill(4, dim=576, heads=33, sizes=(300, 140), q_len=2, lengths=False)
FIVE_BLOCKS = small_prefill(6, heads=7, sizes=(400, 290), q_len=1, lengths=False)  # ds and p of two are held


def check_on_host(library: ctypes.CDLL, case: PrefillCase, seed: int = 0) -> None:
    """Compares `gradient.by_kernel`, whose SM90 kernel is the library's, with float64."""

    def backward(execute, arrays, *, softmax_scale):
        arrays = (None if x is None else np.asarray(x) for x in arrays[:-1])
        dq, dkv = launched(library, arrays, softmax_scale, seed)
        return jnp.asarray(dq), sm90.columns_in_order(jnp.asarray(dkv))

    able = mock.patch.object(gradient, "first_able", lambda backends, *_: backends["hopper"])
    with able, mock.patch.object(sm90, "backward", backward):
        arrays = gradient.Arrays(*saved(case))
        found = gradient.by_kernel(arrays, softmax_scale=case.softmax_scale, deterministic=False)
    check_gradients(case, found)


def launched(library: ctypes.CDLL, arrays, softmax_scale: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """dq and dkv as the kernel leaves them, of numpy's arrays in the order of `GradientArrays`."""
    q, kv, indices, lengths, grad, *others = (None if x is None else aligned(x) for x in arrays)
    (dq, guard), (dkv, guard_of_keys) = poisoned(q.shape, q.dtype), poisoned(kv.shape, np.float32)
    dkv[...] = 0
    tensors = [q, kv, grad, indices, lengths, *others, dq, dkv]
    addresses = (ctypes.c_void_p * 10)(*(None if x is None else x.ctypes.data for x in tensors))
    sizes = (ctypes.c_int64 * 10)(*(0 if x is None else x.nbytes for x in tensors))
    (rows, heads, dim), scale = q.shape, ctypes.c_double(softmax_scale)
    shape = rows, heads, dim, indices.shape[1], len(kv)
    library.sparse_backward_on_host(*shape, scale, addresses, sizes, ctypes.c_uint(seed))
    assert (guard == GUARD).all() and (guard_of_keys == GUARD).all(), "something was written behind the results"
    return dq, dkv


def main() -> int:
    library = ctypes.CDLL(sys.argv[1])
    for case in (THREE_BLOCKS, FIVE_BLOCKS):
        check_on_host(library, case, seed=3)
    return min(library.races_found(), 1)


if __name__ == "__main__":
    sys.exit(main())

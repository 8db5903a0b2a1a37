"""The SM90 kernel of prefill's gradient on the host, each load and store of shared memory watched; and which calls take
it. `test_gradient.TestOnTheGPU` runs it on a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from attention_calls import H200, small_prefill

pytest.importorskip("torch")
pytest.importorskip("triton")

import gradient_on_host
import ptxas
from gradient_on_host import FIVE_BLOCKS, THREE_BLOCKS, check_on_host
from gradient_oracle import saved
from host_build import changed_kernels, compiled_once, compiled_to_be_watched, replace_once

from jax_sparse_mla.attention import gradient
from jax_sparse_mla.attention.backend import GRADIENT_BACKENDS, GradientArrays, GradientCall
from jax_sparse_mla.attention.hopper import backward as sm90
from jax_sparse_mla.attention.triton import backward as triton_backward
from jax_sparse_mla.backend import first_able
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch import build

pytestmark = pytest.mark.no_gpu

CASES = {
    "V4, two blocks of keys": small_prefill(0, heads=5, sizes=(150, 90), q_len=1),
    "V3.2, a second tile of heads": small_prefill(1, dim=576, heads=70, sizes=(100, 60), q_len=1, sink=False),
    "no lengths, large scores": small_prefill(2, heads=64, sizes=(100, 65), q_len=2, lengths=False, hot=True),
    "V3.2, three blocks": THREE_BLOCKS,
    "V4, five blocks": FIVE_BLOCKS,
    "no key at all": small_prefill(3, heads=64, sizes=(30, 16), q_len=2, rows="none"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled_once("sparse_backward", "sparse_backward", tmp_path_factory, watched=True)


@pytest.mark.always("V3.2, a second tile of heads")
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_float64_s_and_accesses_have_an_order(library, name):
    library.races_found()
    check_on_host(library, CASES[name], seed=len(name))
    assert library.races_found() == 0


def test_with_64_bit_types(library):
    """The share of a sink that is not there was a float64 array, which the kernel read as float32."""
    with jax.enable_x64(True):
        check_on_host(library, small_prefill(5, heads=3, sizes=(60, 30), q_len=1, sink=False))


def test_arrays_of_another_dtype_are_refused():
    arrays = list(saved(CASES["V4, two blocks of keys"]))
    q, kv, indices, lengths, _, _, lse, grad, _ = arrays
    shares = jnp.ones(q.shape[:2], jnp.float16)
    with pytest.raises(TypeError, match="sparse_backward: float32 is wanted, got float16, float16"):
        sm90.backward(None, GradientArrays(q, kv, indices, lengths, grad, lse, shares, shares), softmax_scale=1.0)


# Lines that order accesses; without one the numbers may be right all the same. The wait of `score_keys` for its own
# scores is not among them: on a GPU a product's warps may read each other's rows of the first matrix, which this model
# does not do.
ORDERS = [
    "",  # unchanged
    "sm90::wait(&shared.keys_empty, (n & 1) ^ 1);",
    "sm90::wait(&shared.keys_full, n & 1);",
    "sm90::wait(&shared.scores_empty[at], phase ^ 1);",
    "sm90::wait(&shared.scores_full[at], n / kScored & 1);",
    "sm90::sync_threads(kReadBarrier, kConsumers);",
]


@pytest.mark.long
@pytest.mark.parametrize("line", ORDERS)
def test_a_missing_order_is_found(line, tmp_path):
    changed = changed_kernels("sparse_backward", tmp_path)
    if line:
        replace_once(changed / "kernel.cuh", line, ";")
    made = compiled_to_be_watched("sparse_backward", "sparse_backward", tmp_path, changed)
    command = [sys.executable, gradient_on_host.__file__, str(made)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode == 0) == (not line), run.stderr


GRADIENTS = [
    ({}, "hopper", None),
    ({"qk_dim": 576}, "hopper", None),
    ({"qk_dim": 640}, "triton", "takes keys of 512 or 576 values, got 640"),
    ({"deterministic": True}, "triton", "its dkv does not repeat to the bit"),
    ({"device": DeviceInfo("cuda", (8, 0))}, "triton", "serves SM90, got compute capability 8.0"),
    ({"device": DeviceInfo("cuda", (10, 0))}, "triton", "serves SM90, got compute capability 10.0"),
]


@pytest.mark.parametrize("changes, serves, why", GRADIENTS)
def test_which_kernel_serves(monkeypatch, changes, serves, why):
    call = GradientCall(**{"device": H200, "qk_dim": 512, "deterministic": False} | changes)
    assert GRADIENT_BACKENDS["hopper"].cannot(call) == ([] if why is None else [why])
    for binary, backend in ((object(), serves), (None, "triton")):
        monkeypatch.setattr(build, "module", lambda kernel, arch, binary=binary: binary)
        assert first_able(GRADIENT_BACKENDS, call, "gradient").name == backend


@pytest.mark.parametrize("tile", [None, triton_backward.Tile(16, 32, 128, 4)])
def test_a_tile_of_triton_s_kernel_is_used(monkeypatch, tile):
    case = CASES["V4, two blocks of keys"]

    def said(kernel):
        def backward(execute, arrays, **options):
            raise InterruptedError(kernel)

        return backward

    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: H200))
    unused = "a binary is built that the tile's kernel is not"
    monkeypatch.setattr(build, "module", lambda *_: object() if tile is None else pytest.fail(unused))
    monkeypatch.setattr(sm90, "backward", said("sm90"))
    monkeypatch.setattr(triton_backward, "backward", said("triton"))
    arrays = gradient.Arrays(*saved(case))
    with pytest.raises(InterruptedError, match="sm90" if tile is None else "triton"):
        gradient.by_kernel(arrays, softmax_scale=case.softmax_scale, deterministic=False, tile=tile)


@pytest.mark.long
def test_its_products_are_not_serialised(tmp_path):
    """What ptxas says where registers are short or a wait is missing; the products then run one by one."""
    said = ptxas.said_of("sparse_backward", tmp_path)
    assert "Performance Loss" not in said and "warpgroup.wait is injected" not in said, said
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", said)]
    assert len(spilled) == 2 and max(spilled) <= 32, said

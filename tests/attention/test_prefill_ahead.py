"""The prefill kernel that is compiled ahead, in XLA's programs: who gets it, and how the driver is to launch it."""

import ctypes
import functools
import math
import struct
import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tvm_ffi")

from attention_calls import pretend_h200

import jax_sparse_mla as mla
from jax_sparse_mla.attention.backends import hopper
from jax_sparse_mla.attention.hopper.prefill import alone
from jax_sparse_mla.launch import compile_cache, mosaic, triton_call, triton_launch
from jax_sparse_mla.launch.transforms import ENGINE_PROGRAM
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH
from jax_sparse_mla.serving import native

SOURCE = Path(__file__).parents[1] / "support" / "host_cuda" / "driver.c"
# The arrays of each parameter, as Mosaic orders them: the first one's buffer is what the test's driver writes to.
ORDER = (15, 2, *range(5, 15), 3, 4, 16, 17, 0, 1)


@pytest.fixture
def begun(monkeypatch, driver):
    """Kernels that are taken for compiled, and how often each was asked for."""
    kernel, asked = mosaic.Compiled(b"\x7fELF code", "kernel", 384, 218_112, ORDER), []
    monkeypatch.setattr(alone, "_begun", set())
    monkeypatch.setattr(alone, "loaded", lambda name: asked.append(name) or kernel)
    monkeypatch.setattr(triton_call, "own_launcher", lambda: True)
    monkeypatch.setattr(triton_launch, "DRIVER", driver._name)
    return asked


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", SOURCE, "-o", path], check=True)
    return ctypes.CDLL(str(path))


def arguments(tokens=40, heads=16, keys=9, columns=24, lengths=True):
    ones = jnp.ones((tokens, heads, 512), jnp.bfloat16), jnp.ones((keys, 512), jnp.bfloat16)
    indices, counts = jnp.full((tokens, columns), 77, jnp.int32), jnp.ones(tokens, jnp.int32) if lengths else None
    return *ones, indices, counts, None


@pytest.mark.cpu
@pytest.mark.parametrize("lengths", [True, False])
def test_a_launch_as_the_driver_gets_it(driver, begun, monkeypatch, lengths):
    parameters = ctypes.c_int.in_dll(driver, "parameters")
    parameters.value = len(ORDER) - 1
    alone.begin(16, 512)
    given = arguments(lengths=lengths)
    with ENGINE_PROGRAM(True):
        out, max_logits, lse = hopper.prefill(*given, softmax_scale=0.5)
    assert (out.shape, out.dtype) == ((40, 16, 512), jnp.bfloat16) and max_logits.shape == lse.shape == (40, 16)
    report = np.asarray(out).view(np.int64).ravel()
    assert report[:5].tolist() == [40, 1, 1, 384, 218_112]  # fewer tokens than the GPU has multiprocessors
    indices, *numbers = report[5 : 5 + parameters.value].tolist()
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] for x in (0.5 * math.log2(math.e), math.log(2), -math.inf)]
    assert numbers[:10] == [256 * x for x in (40, 16, 16, 9, 24, 24, 40, *bits)]
    length, sink, *statistics, q, kv = numbers[10:]
    assert [q, kv, indices, length] == [0 if x is None else x.unsafe_buffer_pointer() for x in given[:4]]
    assert sink == 0 and statistics == [x.unsafe_buffer_pointer() for x in (max_logits, lse)]


def text_of(function, *shapes, ahead=True) -> str:
    with ENGINE_PROGRAM(ahead):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def is_xlas_own(text: str) -> bool:
    return "mosaic_gpu" in text and "jax_sparse_mla.kernel" not in text


def test_only_what_an_engine_has_begun_is_compiled_ahead(begun):
    """The name of its call means something to this process alone: others export XLA's own."""
    q, kv, indices, *_ = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments())

    def attend(q):
        return hopper.prefill(q, jnp.zeros(kv.shape, kv.dtype), jnp.zeros(indices.shape, jnp.int32), None, None,
                              softmax_scale=0.5)  # fmt: skip

    assert is_xlas_own(text_of(attend, q)) and not begun
    alone.begin(64, 512)
    assert is_xlas_own(text_of(attend, q)) and not begun, "another kernel's heads"
    alone.begin(16, 512)
    text = text_of(lambda q: attend(q), q)
    assert "jax_sparse_mla.kernel" in text and "mosaic_gpu" not in text and begun == ["16x512"]
    assert is_xlas_own(text_of(attend, q, ahead=False)), "a program of whoever has an engine in the same process"
    batched = text_of(jax.vmap(attend), jax.ShapeDtypeStruct((2, *q.shape), q.dtype))
    assert is_xlas_own(batched), "it has a batching rule"


def test_the_public_call_has_it(begun, monkeypatch):
    """What it gives stands in the place of the plain code's results."""
    pretend_h200(monkeypatch, "hopper")
    alone.begin(16, 512)
    q, kv, indices, *_ = arguments()
    attend = functools.partial(mla.sparse_mla_prefill, softmax_scale=0.5)
    text = text_of(attend, q, kv, indices)
    assert "jax_sparse_mla.kernel" in text and begun == ["16x512"]


class NeverRuns(threading.Thread):
    def start(self):
        pass


@pytest.mark.parametrize("why", [None, "it takes jax 0.11.1 or later"])
def test_an_engine_begins_it_where_it_can_be_compiled(begun, monkeypatch, why):
    pretend_h200(monkeypatch, "hopper")
    monkeypatch.setattr(alone, "unready", lambda *_: why)
    monkeypatch.setattr(native.threading, "Thread", NeverRuns)
    monkeypatch.setattr(native, "_threads", [])
    native.begin_to_load()
    assert alone.begun() == []
    native.begin_to_load(DEEPSEEK_V4_FLASH)
    assert alone.begun() == ([] if why else ["any-x512"])
    assert [part.library.name for part in native._parts() if part.library.compiler == "mosaic"] == (
        [] if why else ["prefill-any-x512"]
    )


def test_one_that_cannot_be_compiled_is_xla_s_and_said(monkeypatch):
    def load(library, opener):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(compile_cache, "load", load)
    alone.loaded.cache_clear()
    with pytest.warns(UserWarning, match="XLA compiles the prefill kernel anew in every program: no ptxas"):
        assert alone.loaded("8x512") is None
    alone.loaded.cache_clear()

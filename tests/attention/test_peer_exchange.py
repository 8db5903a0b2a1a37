"""The exchange of context parallel decode by one launch on each GPU: who gets it, and its kernel.

Without a GPU the kernel's protocol and its sums run on the host (`support/host_cuda/peer_exchange.cpp`), where every
thread of every block of every device is a thread. How the library takes it is also in test_sharding, over four devices.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from host_build import SOURCES, compiled_once
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import packages
from jax_sparse_mla.attention import context_parallel_decode, cut_pages, exchange, peer_exchange, sparse_mla_decode
from jax_sparse_mla.attention.exchange import merge_received_reference, send_reference
from jax_sparse_mla.attention.peer_exchange import Groups, groups_of
from jax_sparse_mla.kernels import build
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv

BFLOAT16, FLOAT32 = ml_dtypes.bfloat16, np.float32
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])

# --- who gets it ----------------------------------------------------------------------------------


def gpu(ordinal: int, **facts) -> SimpleNamespace:
    usual = {"platform": "gpu", "compute_capability": "9.0", "process_index": 0, "local_hardware_id": ordinal}
    return SimpleNamespace(**usual | facts)


def mesh_of(gpus, shape, names) -> SimpleNamespace:
    devices = np.empty(len(gpus), object)
    devices[:] = gpus
    return SimpleNamespace(devices=devices.reshape(shape), axis_names=names)


def test_groups_lie_along_the_axis():
    eight = mesh_of([gpu(i) for i in (3, 2, 1, 0, 7, 6, 5, 4)], (2, 4), ("a", "b"))
    assert groups_of(eight, "b") == Groups((3, 2, 1, 0, 7, 6, 5, 4), 4)
    assert groups_of(eight, "b").name == "3,2,1,0;7,6,5,4"
    assert groups_of(eight, "a").name == "3,7;2,6;1,5;0,4"
    assert groups_of(eight, ("a", "b")).name == "3,2,1,0,7,6,5,4"
    assert groups_of(eight, ("b", "a")).name == "3,7,2,6,1,5,0,4"
    assert groups_of(mesh_of([gpu(i) for i in range(4)], (4, 1), ("a", "b")), "b") is None
    assert groups_of(eight, "c") is None  # an axis of `jax.vmap`
    assert groups_of(mesh_of([gpu(i) for i in range(16)], (16,), ("a",)), "a") is None


@pytest.mark.parametrize(
    "facts",
    [{"platform": "cpu"}, {"compute_capability": "8.0"}, {"compute_capability": "10.0"}, {"process_index": 1}],
    ids=str,
)
def test_other_devices_have_an_all_to_all(facts):
    assert groups_of(mesh_of([gpu(0), gpu(1, **facts)], (2,), ("a",)), "a") is None


def test_a_mesh_of_cpus_has_an_all_to_all():
    mesh = Mesh(np.array(jax.devices("cpu")), ("a",))
    assert groups_of(mesh, "a") is None


@pytest.mark.parametrize(
    ("shape", "dtype", "taken"),
    [
        ((64, 1, 64, 512), jnp.bfloat16, True),
        ((2, 512), jnp.float32, True),
        ((2, 64), jnp.bfloat16, True),
        ((2, 32), jnp.bfloat16, False),
        ((2, 4096), jnp.float32, True),
        ((2, 8192), jnp.float32, False),
        ((2, 448), jnp.bfloat16, False),
        ((2, 512), jnp.float16, False),
        ((0, 64, 512), jnp.bfloat16, False),
        ((2**26, 64, 512), jnp.bfloat16, False),
    ],
)
def test_what_the_kernel_takes(shape, dtype, taken):
    assert peer_exchange.takes(jax.ShapeDtypeStruct(shape, dtype)) == taken


def test_sizes_are_those_of_the_kernel():
    text = (build.source("peer_exchange").parent / "kernel.cuh").read_text()

    def number(pattern):
        return int(re.search(pattern, text)[1])

    threads, each = number(r"define PEER_THREADS (\d+)"), number(r"kEach = (\d+);")
    assert number(r"kMostDevices = (\d+);") == peer_exchange.MOST_DEVICES
    assert number(r"kLeastPieces = (\d+);") * 16 == peer_exchange.LEAST_BYTES
    assert threads * each * 16 == peer_exchange.MOST_BYTES


def test_what_keeps_gpus_from_it_is_warned_of_once(monkeypatch, recwarn):
    def prepare(name, ordinals, size):
        assert (name, ordinals, size) == ("0,1;2,3", [0, 1, 2, 3], 2)
        raise RuntimeError("GPU 0 cannot access the memory of GPU 1")

    monkeypatch.setattr(build, "peer_exchange_module", lambda: {"prepare": prepare})
    peer_exchange.ready.cache_clear()
    packages.warn_once.cache_clear()
    for _ in range(2):
        assert not peer_exchange.ready(Groups((0, 1, 2, 3), 2))
    assert [str(x.message) for x in recwarn] == [
        "jax_sparse_mla: context parallel decode exchanges by an all-to-all, its own kernel cannot be used: GPU 0 "
        "cannot access the memory of GPU 1"
    ]
    monkeypatch.setattr(build, "peer_exchange_module", lambda: None)  # which warns by itself
    peer_exchange.ready.cache_clear()
    assert not peer_exchange.ready(Groups((0, 1), 2))
    peer_exchange.ready.cache_clear()


def test_what_the_environment_decides(monkeypatch):
    groups, out = Groups((0, 1), 2), jax.ShapeDtypeStruct((4, 1, 64, 512), jnp.bfloat16)
    monkeypatch.setattr(peer_exchange, "groups_of", lambda mesh, axis_name: groups)
    monkeypatch.setattr(peer_exchange, "ready", lambda groups: True)
    monkeypatch.delenv("JAX_SPARSE_MLA_BACKEND", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=1")
    served = functools.partial(exchange._served_by_one_launch, out, "a", None)
    assert served() == groups
    for flag in ("command_buffer_scheduling_mode=CONCURRENT", "graph_enable_concurrent_region=true"):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_{flag}")
        assert served() is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=SERIALIZE")
    assert served() == groups
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "reference")
    assert served() is None


# --- the kernel on the host -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled_once("peer_exchange", "peer_exchange", tmp_path_factory)


# In a process of its own: a launch that gives up ends it.
PROGRAM = """
import ctypes, sys
words = [word.encode() for word in sys.argv[1:]]
sys.exit(ctypes.CDLL(sys.argv[1]).peer_main(len(words), (ctypes.c_char_p * len(words))(*words)))
"""


def launches(library, *words: int) -> subprocess.CompletedProcess:
    """`peer_main`: devices, launches, one in how many steps is late, blocks, how many of them run at once."""
    command = [sys.executable, "-c", PROGRAM, library._name, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def run(library, outs, lses, sink, rows, *, blocks=4, start=0, seldom=100):
    """Parts [size, rows, heads, v_dim] and lse [size, rows, heads], of launches of so many rows each."""
    size, total, heads, v_dim = outs.shape
    own, half = heads // size, outs.dtype != np.float32
    merged = np.full((size, total, own, v_dim), 7, outs.dtype)
    merged_lse = np.full((size, total, own), np.nan, np.float32)
    pieces = v_dim * outs.itemsize // 16
    assert pieces & (pieces - 1) == 0 and sum(rows) == total

    def addresses(x):
        return (ctypes.c_void_p * size)(*(each.ctypes.data for each in x))

    library.peer_run(
        half, size, len(rows), (ctypes.c_int * len(rows))(*rows), heads, pieces.bit_length() - 1, blocks, blocks,
        ctypes.c_uint32(start), -1, ctypes.c_int64(60 * 10**9), seldom, addresses(outs), addresses(lses),
        ctypes.c_void_p(None if sink is None else sink.ctypes.data), addresses(merged), addresses(merged_lse),
    )  # fmt: skip
    return merged, merged_lse


def wanted(outs, lses, sink):
    """What `send` and `merge_received` give in plain JAX, with words exchanged here."""
    size, total, heads, v_dim = outs.shape
    own = heads // size
    words = np.stack([np.asarray(send_reference(jnp.asarray(o), jnp.asarray(s), size)) for o, s in zip(outs, lses)])
    results = []
    for rank in range(size):
        some = None if sink is None else jnp.asarray(sink[rank * own : (rank + 1) * own])
        shape, dtype = (total, own, v_dim), outs.dtype.name
        results.append(merge_received_reference(jnp.asarray(words[:, rank]), some, shape, dtype))
    return [np.stack([np.asarray(x[i]) for x in results]) for i in range(2)]


def parts(rng, size, rows, own, dtype, v_dim=64):
    outs = rng.standard_normal((size, sum(rows), own * size, v_dim)).astype(dtype)
    lses = rng.normal(0, 2, outs.shape[:-1]).astype(np.float32)
    lses[rng.random(lses.shape) < 0.1] = -np.inf
    return outs, lses


def assert_merged(found, expected):
    (merged, merged_lse), (out, lse) = found, expected
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6, atol=1e-6)
    step = 2**-7 if out.dtype != np.float32 else 1e-6
    np.testing.assert_allclose(merged.astype(np.float32), out.astype(np.float32), rtol=step, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, BFLOAT16), (3, BFLOAT16), (2, FLOAT32), (4, FLOAT32)],
    ids=["2-bfloat16", "3-bfloat16", "2-float32", "4-float32"],
)
def test_the_sums_of_the_reference(size, dtype, library):
    rng = np.random.default_rng(size)
    rows = rng.integers(1, 17, 10).tolist()
    outs, lses = parts(rng, size, rows, 3, dtype, 64 if dtype is not FLOAT32 else 32)
    outs[np.isneginf(lses)] = np.nan  # absent parts may hold anything
    sink = rng.standard_normal(3 * size).astype(np.float32)
    sink[:3] = np.inf, -np.inf, 0
    for some in (None, sink):
        found = run(library, outs, lses, some, rows, start=2**32 - 7)
        assert_merged(found, wanted(outs, lses, some))


@DTYPES
def test_wide_heads(dtype, library):
    """A chunk is one item of the host's 64 pieces: a model's 512 values in bfloat16."""
    rng, rows = np.random.default_rng(2), [1, 5]
    outs, lses = parts(rng, 2, rows, 2, dtype, 512 if dtype is not FLOAT32 else 256)
    assert_merged(run(library, outs, lses, None, rows), wanted(outs, lses, None))


def test_nan_stays_nan(library):
    outs, lses = parts(np.random.default_rng(3), 2, [2], 1, BFLOAT16)
    lses[0, 0] = np.nan
    merged, merged_lse = run(library, outs, lses, None, [2])
    np.testing.assert_array_equal(np.isnan(merged_lse[..., 0]), [[True, False]] * 2)
    np.testing.assert_array_equal(np.isnan(merged.astype(np.float32)).all((2, 3)), [[True, False]] * 2)


def test_exact_sums_to_the_bit(library):
    """Parts of one lse, or absent ones: weights are powers of two, so nothing depends on how exp is computed."""
    rng, size = np.random.default_rng(5), 4
    rows = rng.integers(1, 17, 30).tolist()
    outs, lses = parts(rng, size, rows, 2, BFLOAT16)
    some = rng.integers(0, 3, lses.shape[1:])  # all parts, one of them, none
    one = np.arange(size)[:, None, None] == rng.integers(0, size, lses.shape[1:])
    lses = np.where((some == 0) | ((some == 1) & one), np.float32(1.5), -np.inf).astype(np.float32)
    merged, merged_lse = run(library, outs, lses, None, rows)
    out, lse = wanted(outs, lses, None)
    np.testing.assert_array_equal(merged.view(np.uint16), out.view(np.uint16))
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)


@pytest.mark.always("3-60-3-3", "2-100-5-2")
@pytest.mark.parametrize(("devices", "count", "blocks", "resident"), [(2, 200, 4, 4), (3, 60, 3, 3), (2, 100, 5, 2)])
def test_many_launches(devices, count, blocks, resident, library):
    """To the bit. Where fewer blocks run at once than there are, in their order, they still come."""
    done = launches(library, devices, count, 150, blocks, resident)
    assert done.returncode == 0 and ": 0 wrong" in done.stdout, done.stdout


def test_a_device_that_does_not_come(library):
    done = launches(library, 2, 3, 0, 3, 3, 1, 200_000_000)  # device 1, for which others wait so many nanoseconds
    assert done.returncode == 3 and "gave up waiting for rank 1" in done.stdout


# What the protocol needs, taken away one by one: the thread sanitizer must see it.
MUTANTS = {
    "as it is": ("", ""),
    "one slot": ("static_cast<int64_t>(epoch & 1) * call.size", "int64_t{0}"),
    "no wait": ("wait(call, thread, block, epoch);", ";"),
    "a wait for the epoch before": (">= 0; }", ">= -1; }"),
    "a flag before all have stored": (
        "    __syncthreads();\n    if (thread < call.size && thread != call.rank)\n      release(",
        "    if (thread < call.size && thread != call.rank)\n      release(",
    ),
    "sums before all have waited": ("epoch);\n    __syncthreads();\n", "epoch);\n"),
}


@pytest.mark.always("as it is")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_the_thread_sanitizer_sees(mutant, tmp_path):
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    source, (taken, instead) = (build.source("peer_exchange").parent / "kernel.cuh").read_text(), MUTANTS[mutant]
    assert taken in source
    (tmp_path / "kernel.cuh").write_text(source.replace(taken, instead) if taken else source)
    program = tmp_path / "peer"
    flags = ["-std=c++20", "-g", "-O1", "-ffp-contract=off", "-w", "-pthread", "-fsanitize=thread", "-DPEER_MAIN"]
    command = [compiler, *flags, f"-I{tmp_path}", "-o", program, SOURCES / "peer_exchange.cpp"]
    if "tsan" in (said := subprocess.run(command, capture_output=True, text=True)).stderr:
        pytest.skip("no ThreadSanitizer")
    assert said.returncode == 0, said.stderr[-3000:]
    fixed_addresses = ["setarch", "-R"] if shutil.which("setarch") else []
    words = [*fixed_addresses, program, *map(str, (2, 20, 40, 4, 4))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run here")
    # On a busy machine a mutant's threads may see wrong words before the sanitiser sees the race.
    found = "data race" in done.stderr or bool(re.search(r": [1-9]\d* wrong", done.stdout))
    assert found == bool(taken) and (taken or ": 0 wrong" in done.stdout), done.stdout + done.stderr[-2000:]


# --- two GPUs -------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch) -> Mesh:
    if len(jax.devices()) < 2:
        pytest.skip("needs a second GPU")
    monkeypatch.delenv("JAX_SPARSE_MLA_BACKEND", raising=False)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    if (groups := groups_of(mesh, "x")) is None:
        pytest.skip("needs two SM90 GPUs of this process")
    assert peer_exchange.ready(groups), "the kernel is not there, or the GPUs cannot reach each other: see the warning"
    return mesh


def over(mesh: Mesh, function, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def of_two(seed: int, rows: int, heads: int, dtype):
    """out and lse of each of two devices, one after the other, and the sink."""
    rng = np.random.default_rng(seed)
    outs, lses = parts(rng, 2, [rows], heads // 2, dtype, 512)
    outs[np.isneginf(lses)] = np.nan
    return jnp.asarray(outs), jnp.asarray(lses), jnp.asarray(rng.standard_normal(heads), jnp.float32)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("rows", "heads"), [(1, 2), (65, 64), (700, 128)])
def test_two_gpus_exchange_by_one_launch(rows, heads, dtype, two_gpus):
    arguments, found = of_two(0, rows, heads, dtype), []
    for mesh in (two_gpus, None):

        def exchanged(outs, lses, sink, mesh=mesh):
            return exchange.exchanged(outs[0], lses[0], sink, "x", mesh)

        program = over(two_gpus, exchanged, P("x"), P(None, "x")).lower(*arguments).compile()
        assert ("jax_sparse_mla.peer_exchange" in program.as_text()) == (mesh is not None)
        assert ("all-to-all" in program.as_text()) == (mesh is None)
        given = jax.device_put(arguments, program.input_shardings[0])
        found.append([np.asarray(x) for x in program(*given)])
        for x, y in zip(found[-1], program(*given)):
            np.testing.assert_array_equal(x, np.asarray(y))
    assert_merged(*found)


@pytest.mark.gpu
def test_exchanges_that_need_nothing_of_each_other_come_one_by_one(two_gpus):
    """Eight of one program, which XLA captures into a graph, in 200 runs that follow each other: to the bit."""
    sizes = [(1, 64), (64, 64), (3, 2), (129, 128), (64, 64), (1, 2), (300, 64), (17, 8)]
    arguments = [of_two(i, *size, BFLOAT16) for i, size in enumerate(sizes)]
    arguments = jax.device_put(arguments, NamedSharding(two_gpus, P("x")))

    def all_of_them(arguments):
        return [exchange.exchanged(outs[0], lses[0], sink, "x", two_gpus) for outs, lses, sink in arguments]

    together = over(two_gpus, all_of_them, P("x"), P(None, "x"))
    alone = [over(two_gpus, all_of_them, P("x"), P(None, "x"))([some])[0] for some in arguments]
    kept = [found for i in range(200) for found in [together(arguments)] if i % 20 == 19]
    for found in kept:
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.gpu
def test_context_parallel_decode_of_two_gpus(two_gpus):
    rng = np.random.default_rng(3)
    cache = PagedKV.zeros(KVLayout.V4_FP8, 8, 64)
    rows = jnp.asarray(rng.standard_normal((512, 512)), jnp.bfloat16)
    cache = write_kv(cache, jnp.arange(512, dtype=jnp.int32), rows)
    q = jnp.asarray(rng.standard_normal((16, 1, 64, 512)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-4, 520, (16, 1, 128)), jnp.int32).at[3].set(-1)
    sink = jnp.asarray(rng.standard_normal(64), jnp.float32)

    def attend(q, cache, indices, sink):
        options = {"axis_name": "x", "softmax_scale": 0.04, "attn_sink": sink, "mesh": two_gpus}
        return context_parallel_decode(q, cache, indices, **options)

    program = over(two_gpus, attend, (P(), P("x"), P(), P("x")), P(None, None, "x"))
    arguments = q, cut_pages(cache, 2), indices, sink
    assert "jax_sparse_mla.peer_exchange" in program.lower(*arguments).as_text()
    out, lse = program(*arguments)
    expected, expected_lse = sparse_mla_decode(q, cache, indices, softmax_scale=0.04, attn_sink=sink)
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=1e-4, atol=1e-4)
    found, expected = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(found, expected, rtol=2**-6, atol=2**-8)

"""The kernels of context parallel decode against the plain functions: own parts of index lists, and the exchange.

Without a GPU they run in Triton's interpreter, and are compiled for the architectures that they serve. The tests marked
`gpu` go through JAX's dispatch. What several devices do together is in test_sharding.
"""

from __future__ import annotations

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import pretend_h200
from compiled_facts import ARCHITECTURES, LEAST_SHARED_MEMORY, compiled_facts
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

if jax.default_backend() != "gpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: it decides what @triton.jit makes

pytest.importorskip("torch")
pytest.importorskip("triton")

from triton_device import ON_GPU, Interpreted

from jax_sparse_mla.attention import (
    apply_attn_sink,
    context_parallel_decode,
    cut_pages,
    exchange,
    merge_attention,
    sparse_mla_decode,
)
from jax_sparse_mla.attention.triton import exchange as kernels
from jax_sparse_mla.indices import Ownership, triton_ownership
from jax_sparse_mla.indices.ownership import Positions, _pack_rows_reference, pack_positions
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv
from jax_sparse_mla.launch import dispatch, triton_call

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities in the interpreter
]

EXECUTOR = triton_call.executor if ON_GPU else Interpreted
INT_MAX = 2**31 - 1
HOSTILE = (-1, -7, -(2**31), INT_MAX)


# --- own parts of index lists ---------------------------------------------------------------------


def index_lists(rng, rows: int, width: int, end: int, *, has_lengths: bool) -> tuple[jax.Array, jax.Array | None]:
    """Indices below `end` and some beyond it, with hostile ones; a row may be nobody's, and lengths are of any size."""
    lists = rng.integers(-2, end + 3, (rows, width))
    lists = np.where(rng.random(lists.shape) < 0.1, rng.choice([*HOSTILE, end - 1, end], lists.shape), lists)
    lists[::5] = -1
    lengths = rng.integers(0, width + 1, rows)
    hostile = rng.choice([0, -3, width, width + 9, INT_MAX, -(2**31), width - 1], rows)
    lengths = np.where(rng.random(rows) < 0.4, hostile, lengths)
    return jnp.asarray(lists, jnp.int32), jnp.asarray(lengths, jnp.int32) if has_lengths else None


pack_rows = jax.jit(_pack_rows_reference, static_argnums=2)


def check_packed(seed: int, size: int, widths, interleaves, has_lengths, all_slots: bool) -> None:
    rng, rank, end = np.random.default_rng(seed), seed % size, 40 * size
    last = INT_MAX if all_slots else end - 1
    rows = [index_lists(rng, 9, width, end, has_lengths=given) for width, given in zip(widths, has_lengths)]
    facts = tuple((Ownership(size, interleave), last) for interleave, _ in zip(interleaves, widths))
    lists = [(rule.interleave, last, lengths is not None) for (rule, last), (_, lengths) in zip(facts, rows)]
    found = triton_ownership.pack(EXECUTOR(), jnp.int32(rank), *jax.tree.leaves(rows), size=size, lists=lists)
    expected = pack_rows(rows, rank, facts)
    for actual, wanted in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize(
    "case",
    [
        (7, 2, (128, 512), (64, 16), (True, False), False),
        (8, 3, (300, 24), (1, 3), (False, True), True),
        (9, 4, (2048,), (64,), (False,), False),
        (10, 3, (4097, 5), (2, 256), (True, True), False),  # more than one chunk of columns
    ],
    ids=lambda case: "+".join(map(str, case[2])),
)
def test_packed_lists_are_those_of_plain_jax(case):
    check_packed(*case)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 8),
    widths=st.sampled_from([(1,), (24,), (128, 512), (3, 1), (300, 70), (4097, 5), (2048,), (128, 8320)]),
    interleaves=st.tuples(*[st.sampled_from([1, 2, 3, 64, 256])] * 2),
    has_lengths=st.tuples(st.booleans(), st.booleans()),
    all_slots=st.booleans(),
)
def test_any_packed_lists_are_those_of_plain_jax(seed, size, widths, interleaves, has_lengths, all_slots):
    check_packed(seed, size, widths, interleaves, has_lengths, all_slots)


def test_every_index_is_somebody_s_once():
    """Ranks together have what the lists have, in any chunking of the kernel's."""
    rng, rule, lists = np.random.default_rng(0), Ownership(3, 4), []
    indices = jnp.asarray(rng.permutation(9000)[None], jnp.int32)
    for rank in range(3):
        own, count = triton_ownership.pack(EXECUTOR(), jnp.int32(rank), indices, size=3, lists=[(4, INT_MAX, False)])
        assert not np.any(own[0, : count[0]] < 0) and np.all(own[0, count[0] :] == -1)
        lists.append(rule.position(np.asarray(own[0, : count[0]]), rank))
    np.testing.assert_array_equal(np.sort(np.concatenate(lists)), np.arange(9000))


@pytest.mark.parametrize("shapes", [((2, 3, 0), (2, 3, 5)), ((2, 3, 5), (2, 3, 0)), ((0, 3, 5), (0, 3, 1))])
def test_lists_without_an_entry(shapes):
    lists = [Positions(Ownership(2, 1), 9, jnp.full(shape, 4, jnp.int32), None) for shape in shapes]
    for (own, count), shape in zip(jax.jit(lambda: pack_positions(lists, 0))(), shapes):
        np.testing.assert_array_equal(own, np.full(shape, 2))
        np.testing.assert_array_equal(count, np.full(shape[:-1], shape[-1]))


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (4,)])
def test_there_is_a_length_for_each_list(shape):
    """A kernel would read behind an array of fewer."""
    positions = jnp.arange(24, dtype=jnp.int32).reshape(3, 8)
    with pytest.raises(ValueError, match=r"Ownership.pack: lengths must have shape \[3\]"):
        Ownership(2, 1).pack(positions, 0, jnp.zeros(shape, jnp.int32))


# --- the exchange ---------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])


send = jax.jit(exchange.send_reference, static_argnums=2)
merge_received = jax.jit(exchange.merge_received_reference, static_argnames=("shape", "dtype"))


def attended(seed: int, n: int, leading: tuple[int, ...], heads: int, v_dim: int, dtype):
    """Of each of n devices out and lse of all heads; out is NaN where a device has no key."""
    rng = np.random.default_rng(seed)
    lses = 5 * rng.standard_normal((n, *leading, heads)).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    lses[:, ..., 0] = -np.inf
    outs = rng.standard_normal((*lses.shape, v_dim)).astype(np.float32)
    outs[np.isneginf(lses)] = np.nan
    return [(jnp.asarray(out, dtype), jnp.asarray(lse)) for out, lse in zip(outs, lses)]


def sinks(heads: int) -> jax.Array:
    return jnp.asarray(np.resize(np.array([0.5, np.inf, -np.inf, -3.0, 4.0], np.float32), heads))


def received(sent: list[jax.Array], device: int) -> jax.Array:
    """What the all-to-all gives this device. What fills the words up may be anything."""
    return jnp.stack([words[device] for words in sent])


@DTYPES
@pytest.mark.parametrize("has_sink", [False, True])
def test_the_exchange_is_merge_and_sink(dtype, has_sink):
    """The plain code: rounded once, where merge and sink one after the other round twice."""
    n, heads = 3, 6
    parts = attended(0, n, (2, 2), heads, 16, dtype)
    sent = [send(*part, n) for part in parts]
    for device in range(n):
        of = slice(device * heads // n, (device + 1) * heads // n)
        sink = sinks(heads)[of] if has_sink else None
        shape = (2, 2, heads // n, 16)
        out, lse = merge_received(received(sent, device), sink, shape, dtype)
        outs, lses = zip(*((out[:, :, of].astype(jnp.float32), lse[:, :, of]) for out, lse in parts))
        whole, whole_lse = merge_attention(outs, lses)
        whole = apply_attn_sink(whole, whole_lse, sink) if has_sink else whole
        np.testing.assert_allclose(lse, whole_lse, rtol=1e-6, atol=1e-6)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(jnp.float32), whole.astype(dtype).astype(jnp.float32), rtol=2**-8)


def check_exchange(seed: int, n: int, rows: int, own: int, v_dim: int, dtype, has_sink: bool) -> None:
    parts, device = attended(seed, n, (rows, 1), n * own, v_dim, dtype), seed % n
    items = rows * own
    used = items * (v_dim * jnp.dtype(dtype).itemsize // 4 + 1)
    sent = []
    for part in parts:
        expected = send(*part, n)
        words = kernels.send(EXECUTOR(), *part, words=expected.shape)
        assert expected.shape[1] % 4 == 0 and 0 <= expected.shape[1] - used < 4
        np.testing.assert_array_equal(words[:, :used], expected[:, :used])
        sent.append(words.at[:, used:].set(-1))  # NaN in every dtype
    sink = sinks(own) if has_sink else None
    static = {"shape": (rows, 1, own, v_dim), "dtype": jnp.dtype(dtype).name}
    found = kernels.merge_received(EXECUTOR(), received(sent, device), sink, **static)
    assert_merged(found, merge_received(received(sent, device), sink, **static), dtype)


@pytest.mark.parametrize("shape", [(0, 4, 512), (3, 0, 512), (0, 0, 512)])
def test_parts_of_no_rows_or_heads(shape):
    out, lse = exchange.merge_received(jnp.zeros((2, 0), jnp.int32), None, shape, np.dtype(jnp.bfloat16))
    assert out.shape == shape and lse.shape == shape[:-1] and out.dtype == jnp.bfloat16


def assert_merged(found, expected, dtype) -> None:
    """Equal up to the exponential's last bits, and to one rounding of out."""
    (out, lse), (wanted, wanted_lse) = found, expected
    assert out.dtype == wanted.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-6, atol=2e-6)
    out, wanted = (np.asarray(x, np.float32) for x in (out, wanted))
    np.testing.assert_array_equal(wanted == 0, out == 0)
    np.testing.assert_allclose(out, wanted, rtol=2**-7 if dtype == jnp.bfloat16 else 1e-5, atol=1e-6)


def test_exchange_kernels_are_plain_jax():
    check_exchange(0, 2, 2, 4, 512, jnp.bfloat16, True)
    check_exchange(1, 3, 5, 3, 32, jnp.bfloat16, False)
    check_exchange(2, 4, 1, 3, 6, jnp.float32, True)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 5),
    rows=st.sampled_from([1, 2, 5]),
    own=st.sampled_from([1, 3, 4]),
    v_dim=st.sampled_from([512, 6, 32]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float32]),
    has_sink=st.booleans(),
)
def test_any_exchange_is_plain_jax(seed, n, rows, own, v_dim, dtype, has_sink):
    check_exchange(seed, n, rows, own, v_dim, dtype, has_sink)


def test_nan_stays_nan():
    """An lse that is NaN is no absent part: what is wrong must be seen."""
    words = jnp.full((2, 8), -1, jnp.int32).at[0].set(0)
    for found in (
        kernels.merge_received(EXECUTOR(), words, shape=(1, 1, 2), dtype="float32"),
        merge_received(words, None, (1, 1, 2), "float32"),
    ):
        assert np.isnan(found[1]).all() and np.isnan(found[0]).all()


# --- compilation and dispatch ---------------------------------------------------------------------


@pytest.mark.long
@ARCHITECTURES
def test_kernels_compile_for_every_architecture_without_a_gpu(capabilities, tmp_path):
    for fact in compiled_facts("context_parallel", tmp_path, capabilities):
        assert fact["shared"] <= LEAST_SHARED_MEMORY, fact
        assert fact["wide_load"] and fact["wide_store"] == (not fact["kernel"].startswith("pack")), fact


@pytest.mark.cpu
def test_what_a_layer_launches(monkeypatch):
    """On each of two GPUs: one launch packs both tables, attention follows, one launch sends and one merges."""
    launched = []

    def execute(self, launch, inputs):
        launched.append(launch.name)
        return tuple(None if x is None else jnp.zeros(x.shape, x.dtype) for x in launch.outputs)

    pretend_h200(monkeypatch, "triton")
    monkeypatch.setattr(dispatch, "available", lambda: True)
    monkeypatch.setattr(triton_call.Executor, "__call__", execute)
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def whole(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))

    def layer(q, cache, extra_cache, indices, extra_indices, lengths, sink):
        options = {"axis_name": "x", "softmax_scale": 0.04, "attn_sink": sink, "extra_topk_length": lengths}
        options |= {"extra_cache": extra_cache, "extra_indices": extra_indices}
        return context_parallel_decode(q, cache, indices, **options)

    caches = PagedKV.zeros(KVLayout.V4_FP8, 8, 64), PagedKV.zeros(KVLayout.V4_FP8, 16, 16)
    tables = jnp.zeros((4, 1, 128), jnp.int32), jnp.zeros((4, 1, 512), jnp.int32), jnp.zeros((4, 1), jnp.int32)
    arguments = jnp.zeros((4, 1, 64, 512), jnp.bfloat16), *caches, *tables, jnp.zeros(64)
    specs = {"in_specs": (P(), P("x"), P("x"), P(), P(), P(), P("x")), "out_specs": P(None, None, "x")}
    program = jax.jit(jax.shard_map(layer, mesh=mesh, **specs)).trace(*jax.tree.map(whole, arguments))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    # Attention's launches, and what is traced for the types of results, stand between these.
    mine = [name for name in launched if name in ("pack_own", "send_parts", "merge_received")]
    assert list(dict.fromkeys(mine)) == ["pack_own", "send_parts", "merge_received"] and len(mine) == 3, launched
    assert text.count('"stablehlo.all_to_all"') == text.count("stablehlo.partition_id") == 1
    for operation in ("scatter", "reduce_window", "concatenate", "slice", "transpose", "bitcast_convert"):
        assert f"stablehlo.{operation}" not in text, operation


def test_the_sink_has_a_gradient_where_kernels_run(monkeypatch):
    """That of the plain code; kernels have none."""
    parts = attended(3, 2, (2, 1), 8, 16, jnp.float32)
    words = received([exchange.send_reference(*part, 2) for part in parts], 0)
    sink = jnp.linspace(-2, 2, 4)

    def total(sink):
        return jnp.sum(exchange.merge_received(words, sink, (2, 1, 4, 16), np.dtype("float32"))[0] ** 2)

    expected = jax.grad(total)(sink)
    pretend_h200(monkeypatch, "triton")
    monkeypatch.setattr(dispatch, "available", lambda: True)
    exchange.merge_received.clear_cache()
    found = jax.grad(total)(sink)
    exchange.merge_received.clear_cache()
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(128, 512), (128, 8192), (2048,)])
def test_jax_packs_with_the_kernel(widths):
    rng = np.random.default_rng(1)
    rows = [index_lists(rng, 64, width, 9000, has_lengths=True) for width in widths]
    for rank in range(3):
        lists = [Positions(Ownership(3, 16 << i), 8999, *some) for i, some in enumerate(rows)]
        pack = jax.jit(lambda rank, lists=lists: pack_positions(lists, rank))
        assert pack.lower(rank).compile().as_text().count('custom_call_target="jax_sparse_mla.pack_kernel') == 1
        expected = _pack_rows_reference(rows, rank, tuple((some.rule, some.last) for some in lists))
        for actual, wanted in zip(jax.tree.leaves(pack(rank)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.gpu
@DTYPES
def test_jax_exchanges_with_the_kernels(dtype):
    n, rows, heads = 2, 65, 6
    parts, sink = attended(2, n, (rows, 1), heads, 512, dtype), sinks(heads // n)
    sent = [exchange.send(*part, n) for part in parts]
    used = rows * heads // n * (512 * jnp.dtype(dtype).itemsize // 4 + 1)
    for words, part in zip(sent, parts):
        np.testing.assert_array_equal(words[:, :used], send(*part, n)[:, :used])
    shape = (rows, 1, heads // n, 512)
    for device in range(n):
        for some in (sink, None):
            words = received(sent, device)
            found = exchange.merge_received(words, some, shape, dtype)
            assert_merged(found, merge_received(words, some, shape, dtype), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_devices_of_an_axis_share_the_pages(count):
    """A layer's program has three launches of Triton beside its attention, and no scatter."""
    if len(jax.devices()) < count:
        pytest.skip("needs a second GPU")
    rng = np.random.default_rng(3)
    cache, rows = PagedKV.zeros(KVLayout.V4_FP8, 8, 64), jnp.asarray(rng.standard_normal((512, 512)), jnp.bfloat16)
    cache = write_kv(cache, jnp.arange(512, dtype=jnp.int32), rows)
    q = jnp.asarray(rng.standard_normal((16, 1, 64, 512)), jnp.bfloat16)
    indices = jnp.asarray(rng.integers(-4, 520, (16, 1, 128)), jnp.int32).at[3].set(-1)
    attend = functools.partial(context_parallel_decode, axis_name="x", softmax_scale=0.04)
    specs = {"in_specs": (P(), P("x"), P(), P("x")), "out_specs": P(None, None, "x")}
    mesh = Mesh(np.array(jax.devices()[:count]), ("x",))
    program = jax.jit(jax.shard_map(lambda *a: attend(*a[:3], attn_sink=a[3]), mesh=mesh, **specs))
    arguments = q, cut_pages(cache, count), indices, sinks(64)
    text = program.lower(*arguments).as_text()
    launches = re.findall(r"jax_sparse_mla\.(pack|send|merge_received)_kernel", text)
    assert sorted(set(launches)) == ["merge_received", "pack", "send"] and "scatter" not in text
    out, lse = program(*arguments)
    wanted, wanted_lse = sparse_mla_decode(q, cache, indices, softmax_scale=0.04, attn_sink=sinks(64))
    np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(wanted, np.float32), rtol=2**-6, atol=2**-9)

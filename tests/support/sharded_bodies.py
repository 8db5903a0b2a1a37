"""What runs over four devices and is compared with one; tests/attention/test_sharding.py starts the process.

python sharded_bodies.py [NAME ...]     all but the long ones by default
"""

import dataclasses
import functools
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_world import (
    BATCH,
    COLLECTIVES,
    EXTRA_TOPK,
    HEADS,
    PAGE,
    PAGES,
    TOPK,
    assert_close,
    attend,
    cache,
    check_steps,
    decode,
    decode_args,
    extra_cache,
    extra_indices,
    indices,
    lengths,
    mesh,
    prefill,
    prefill_args,
    q,
    rng,
    run_plain,
    run_sharded,
    sink,
)
from virtual_devices import assert_refused, run_cases

import jax_sparse_mla as mla
from jax_sparse_mla import sharding, write_index_k
from jax_sparse_mla.attention import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.indexer import select as index_selection
from jax_sparse_mla.kv_cache import gather_kv, write_kv

BODIES = {}


def body(function):
    BODIES[function.__name__] = function
    return function


@body
def heads_and_tokens():
    heads, rows, whole = P(None, None, "x"), P("x"), P()
    for function, args, specs, out_specs in (
        (decode, decode_args, (heads, *[whole] * 5, rows), heads),
        (decode, decode_args, (rows, whole, rows, rows, whole, rows, whole), rows),
        (prefill, prefill_args, (P(None, "x"), *[whole] * 3, rows), P(None, "x")),
        (prefill, prefill_args, (rows, whole, rows, rows, whole), rows),
    ):
        sharded, collectives = run_sharded(function, specs, out_specs, *args)
        assert collectives == [] and tuple(sharded[0].sharding.spec)[: len(out_specs)] == tuple(out_specs), collectives
        assert_close(sharded, function(*args), 1e-6)


@body
def bfloat16_over_both():
    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    args = (decode_args[0].astype(jnp.bfloat16), *decode_args[1:])
    specs = (P("x", None, "y"), P(), P("x"), P("x"), P(), P("x"), P("y"))
    sharded, collectives = run_sharded(decode, specs, P("x", None, "y"), *args, mesh=square)
    assert collectives == [], collectives
    expected = decode(*args)
    assert sharded[0].dtype == jnp.bfloat16
    assert_close(sharded[1], expected[1], 1e-6)
    assert_close(sharded[0].astype(jnp.float32), expected[0].astype(jnp.float32), 2**-8)


@body
def gradients_over_tokens():
    def loss(q, kv, indices, lengths, sink):
        out, _, lse = prefill(q, kv, indices, lengths, sink)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse))

    def by_q(*args):
        return jax.grad(loss)(*args)

    specs = (P("x"), P(), P("x"), P("x"), P())
    sharded, _ = run_sharded(by_q, specs, P("x"), *prefill_args)
    assert_close(sharded, by_q(*prefill_args), 1e-5)


@body
def gradients_through_kernels():
    # The backward kernel is the reference's gradient here: what is tested is who adds up what. Heads are cut, too.
    from jax_sparse_mla.attention import gradient, reference
    from jax_sparse_mla.launch.transforms import KernelCall

    def by_kernel(*args, softmax_scale, deterministic):
        return gradient.by_reference(*args, softmax_scale=softmax_scale)

    def by_name(*args, **options):
        return KernelCall(*args, **options, replaceable=False)

    def forward(*args):
        return reference.prefill(*args, softmax_scale=0.3)

    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    through = gradient.differentiable(forward, "prefill", 0.3, deterministic=False)
    specs = (P("x", "y"), P(), P("x"), P("x"), P("y"))

    def loss_of(prefill):
        def loss(*args):
            out, _, lse = prefill(*args)
            return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse))

        return loss

    def by_all(*args, of=through):
        return jax.grad(loss_of(of), (0, 1, 4))(*args)

    def of_mapped(*args):
        mapped = jax.shard_map(through, mesh=square, in_specs=specs, out_specs=(P("x", "y"),) * 3)
        return by_all(*args, of=mapped)

    expected = by_all(*prefill_args, of=prefill)
    patched = mock.patch.object(gradient, "KernelCall", by_name)
    with mock.patch.object(gradient, "by_kernel", by_kernel), patched:
        assert_close(jax.jit(of_mapped)(*prefill_args), expected, 1e-5)
        inside = jax.jit(jax.shard_map(by_all, mesh=square, in_specs=specs, out_specs=(specs[0], P(), P("y"))))
        assert_close(inside(*prefill_args), expected, 1e-5)
        found, collectives = run_plain(by_all, specs, *prefill_args, mesh=square)
        assert collectives == ["all-reduce"], collectives
        assert_close(found, expected, 1e-5)


@body
def context_parallel_decode():
    from jax_sparse_mla.attention import context_parallel_decode, cut_pages, own_slots

    # Request 2 has all its keys on device 1 in either cache, request 3 none in the first cache.
    of_one = (jnp.arange(TOPK) % 2 * 4 + 1) * PAGE + jnp.arange(TOPK) % PAGE
    spread = indices.at[2].set(of_one).at[3].set(-1)
    extra_spread = extra_indices.at[2].set((4 * jnp.arange(EXTRA_TOPK) + 1) * 2)
    own_lengths = lengths.at[2].set(TOPK)
    extra_lengths = jnp.asarray(rng.integers(0, EXTRA_TOPK + 1, BATCH), jnp.int32).at[2].set(EXTRA_TOPK)

    over_pages = functools.partial(attend, context_parallel_decode, axis_name="x")
    whole = functools.partial(attend, sparse_mla_decode)
    args = [q, cache, spread, own_lengths, extra_cache, extra_spread, extra_lengths, sink]
    expected = whole(*args)
    empty = np.isneginf(expected[1])
    assert empty[0].all() and not empty[2].any()

    def cut(args, n):
        return [*args[:1], cut_pages(args[1], n), *args[2:4], cut_pages(args[4], n), *args[5:]]

    specs, heads = (P(), P("x"), P(), P(), P("x"), P(), P(), P("x")), P(None, None, "x")
    results, collectives = run_sharded(over_pages, specs, heads, *cut(args, 4))
    assert collectives == ["all-to-all"], collectives
    assert results[0].sharding.spec == heads
    assert_close(results, expected, 1e-5)

    # bfloat16, one cache, no lengths, no sink: requests over one axis, pages over the other.
    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("y", "x"))
    bf16 = q.astype(jnp.bfloat16)

    def plain(q, cache, indices):
        return context_parallel_decode(q, cache, indices, axis_name="x", softmax_scale=0.3)

    specs = P("y"), P("x"), P("y")
    results, _ = run_sharded(plain, specs, P("y", None, "x"), bf16, cut_pages(cache, 2), spread, mesh=square)
    expected = sparse_mla_decode(bf16, cache, spread, softmax_scale=0.3)
    assert results[0].dtype == jnp.bfloat16
    assert_close(results[1], expected[1], 1e-5)
    assert_close(results[0].astype(jnp.float32), expected[0].astype(jnp.float32), 2**-7)

    # To the bit, whatever the other rows of the call.
    def invariant(q, cache, indices):
        return context_parallel_decode(q, cache, indices, axis_name="x", softmax_scale=0.3, batch_invariant=True)

    specs, pages = (P(), P("x"), P()), cut_pages(cache, 4)
    together, _ = run_sharded(invariant, specs, heads, bf16, pages, spread)
    alone, _ = run_sharded(invariant, specs, heads, bf16[4:5], pages, spread[4:5])
    for a, b in zip(together, alone):
        np.testing.assert_array_equal(np.asarray(a[4:5]), np.asarray(b))

    # The sink has a gradient, and what is exchanged as bits has none, by name.
    def total(q, sink):
        def local(q, cache, indices, sink):
            return context_parallel_decode(q, cache, indices, axis_name="x", softmax_scale=0.3, attn_sink=sink)[0]

        sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x"), P(), P("x")), out_specs=heads)
        return jnp.sum(jax.jit(sharded)(q, cut_pages(cache, 4), spread, sink) ** 2)

    def total_of_one(sink):
        return jnp.sum(sparse_mla_decode(q, cache, spread, softmax_scale=0.3, attn_sink=sink)[0] ** 2)

    found, expected = jax.grad(total, 1)(q, sink), jax.grad(total_of_one)(sink)
    assert float(jnp.abs(expected).max()) > 0
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    try:
        jax.grad(total)(q, sink)
    except NotImplementedError as error:
        assert "only attn_sink has one" in str(error)
    else:
        raise AssertionError("a gradient in q")

    # Each device writes the rows of its own pages, here of both layers' views of one array.
    layers_of = dataclasses.replace(cache, num_layers=2).layer(1)
    slots, new = jnp.asarray([0, 5, 17, 63, 33, -1, 64, 4000], jnp.int32), q[:, 0, 0]

    def write(cache, slots, new):
        return write_kv(cache, own_slots(slots, cache, "x"), new)

    written, collectives = run_sharded(write, (P("x"), P(), P()), P("x"), cut_pages(layers_of, 4), slots, new)
    assert collectives == [], collectives
    np.testing.assert_array_equal(written.data, cut_pages(write_kv(layers_of, slots, new), 4).data)

    # Index keys that are shared out, too: each device has the logits of its own tokens, and all choose alike.
    from jax_sparse_mla.indices import Ownership, global_topk, topk_positions

    rule, counts = Ownership(4, 2), jnp.asarray([37, 3, 0, 40], jnp.int32)
    logits = jnp.round(2 * jax.random.normal(jax.random.key(5), (4, 40)))
    by_owner = jnp.argsort(rule.owner(jnp.arange(40)), stable=True)

    def choose(logits, counts):
        chosen = global_topk(logits, counts, 6, ownership=rule, axis_name="x")
        return chosen[None], rule.pack(chosen, jax.lax.axis_index("x"))[1][None]

    (chosen, parts), collectives = run_sharded(choose, (P(None, "x"), P()), P("x"), logits[:, by_owner], counts)
    assert collectives == ["all-gather"], collectives
    expected = topk_positions(logits, counts, 6)
    np.testing.assert_array_equal(chosen, jnp.broadcast_to(expected, (4, *expected.shape)))
    np.testing.assert_array_equal(parts.sum(0), (expected >= 0).sum(1))

    for call, words in (
        (lambda: cut_pages(cache, 3), "3 devices cannot share 8 pages"),
        (lambda: run_sharded(plain, (P(), P("x"), P()), heads, bf16[:, :, :3], pages, spread), "3 heads"),
    ):
        assert_refused(call, words)


@body
def plain_jit():
    from jax_sparse_mla.attention import reference

    # A loop over chunks of rows is as opaque as a kernel: without a rule all devices compute all rows.
    patched = mock.patch.object(reference, "CHUNK_BYTES", 200_000)
    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    rows, heads = P("x"), P("y")
    args = (*prefill_args[:3], None, prefill_args[4])  # traced anew, since the size of a chunk is no argument
    expected = prefill(*prefill_args[:3], None, prefill_args[4])
    with patched:
        jax.clear_caches()
        specs = (P("x", None, "y"), P(), rows, rows, P(), rows, heads)
        results, collectives = run_plain(decode, specs, *decode_args, mesh=square)
        assert collectives == [] and results[0].sharding.spec == P("x", None, "y"), collectives
        assert_close(results, decode(*decode_args), 1e-6)
        assert "CustomSPMDPartitioning" not in jax.jit(decode).lower(*decode_args).as_text()  # of one device

        specs = (P("x", "y"), P(), rows, P(), heads)
        for shardy in (True, False):
            jax.config.update("jax_use_shardy_partitioner", shardy)
            results, collectives = run_plain(prefill, specs, *args, mesh=square)
            assert collectives == [] and results[2].sharding.spec == P("x", "y"), collectives
            assert_close(results, expected, 1e-6)
        jax.config.update("jax_use_shardy_partitioner", True)

        results, collectives = run_plain(prefill, (P("x", "y"), P("x"), P(), P(), P()), *args, mesh=square)
        assert collectives == ["all-gather"] and results[2].sharding.spec == P("x", "y")  # of the keys alone
        assert_close(results, expected, 1e-6)

        def gradient(q, kv, indices, lengths, sink):
            return jax.grad(lambda q, sink: prefill(q, kv, indices, lengths, sink)[0].sum(), (0, 1))(q, sink)

        assert_close(run_plain(gradient, specs, *args, mesh=square)[0], gradient(*args), 1e-5)
        mapped = jax.vmap(lambda q, sink: prefill(q, *args[1:4], sink))
        twice = jnp.stack([args[0], -args[0]]), jnp.stack([args[4], args[4] + 1])
        results, _ = run_plain(mapped, (P(None, "x"), P()), *twice)
        assert_close(jax.tree.map(lambda x: x[0], results), expected, 1e-6)

    # Programs on disk are found by their text, which must differ where what is called does.
    over = jax.device_put(q, NamedSharding(mesh, rows))
    attend = (lambda q, s=s: sparse_mla_decode(q, cache, indices, softmax_scale=s) for s in (0.3, 0.3, 0.4))
    lowered = [re.sub('backend_config = "[0-9]+"', "", jax.jit(f).lower(over).as_text()) for f in attend]
    assert lowered[0] == lowered[1] != lowered[2] and "CustomSPMDPartitioning" in lowered[0]


@body
def plain_jit_of_a_kernel():
    import pytest
    from attention_calls import pretend_h200

    from jax_sparse_mla.attention import reference
    from jax_sparse_mla.attention.backend import BACKENDS
    from jax_sparse_mla.attention.serve import calls_of

    seen = []

    def kernel(q, *args, **static):
        seen.append(q.shape)
        return reference.prefill(q, *args, **static)

    def attend(*args, backend="triton"):
        q, kv, indices, lengths, sink = args
        options = {"topk_length": lengths, "attn_sink": sink, "backend": backend}
        return sparse_mla_prefill(q, kv, indices, softmax_scale=0.3, **options)

    bf16 = [x.astype(jnp.bfloat16) for x in prefill_args[:2]]
    args, specs = (*bf16, *prefill_args[2:]), (P("x"), P(), P("x"), P("x"), P())
    with pytest.MonkeyPatch.context() as patch:
        pretend_h200(patch, "triton")
        patch.setattr(type(BACKENDS["triton"]), "function", lambda self, phase: kernel)
        results, collectives = run_plain(attend, specs, *args)
        assert collectives == [] and seen[-1] == (BATCH // 4, HEADS, 512), (collectives, seen)
        assert_close(results[2], prefill(*args)[2], 1e-6)

        # Where it is not asked for by name, the program for CUDA calls it too.
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for spec, x in zip(specs, args)]
        unnamed = jax.jit(lambda *args: attend(*args, backend=None)).trace(*placed)
        lowered = unnamed.lower(lowering_platforms=("cuda",))
        assert calls_of(lowered) == {("prefill", "triton")} and "sdy.sharding_rule" in lowered.as_text()


@body
def caches_under_plain_jit():
    from jax_sparse_mla.kv_cache import rows as functions

    pages, rows, whole = P("x"), P("x"), P()
    slots = jnp.arange(8, dtype=jnp.int32) * 18 - 2  # on every device's pages, and one on none
    new = q[:, 0, 0].at[1, :2].set(-0.0)
    written = write_kv(cache, slots, new)
    gathered = gather_kv(written, slots)
    seen = []  # by what stands for a kernel: the pages and rows that a device works on

    def noting(function):
        def noted(cache, slots, *args):
            seen.append((cache.num_pages, len(slots)))
            return function(cache, slots, *args)

        return mock.patch.object(functions, function.__name__, noted)

    jax.clear_caches()
    with noting(functions.write_rows_reference), noting(functions.gather_rows_reference):
        for of_cache, of_rows, moved, share in (
            (pages, whole, [], (PAGES // 4, 8)),
            (whole, rows, ["all-gather"], (PAGES, 8)),
            (pages, rows, ["all-gather"], (PAGES // 4, 8)),  # of slots and rows, never of the cache
        ):
            got, collectives = run_plain(write_kv, (of_cache, of_rows, of_rows), cache, slots, new)
            assert collectives == moved and share in seen and got.data.sharding.spec == of_cache, collectives
            np.testing.assert_array_equal(got.data, written.data)
        for of_cache, of_rows, moved, share in (
            (whole, rows, [], (PAGES, 2)),
            (pages, whole, ["all-reduce"], (PAGES // 4, 8)),
            (pages, rows, ["all-gather", "all-reduce"], (PAGES // 4, 8)),
        ):
            got, collectives = run_plain(gather_kv, (of_cache, of_rows), written, slots)
            assert collectives == moved and share in seen and got.sharding.spec == of_rows, collectives
            np.testing.assert_array_equal(*(np.asarray(x).view(np.uint16) for x in (got, gathered)))

    keys, k = jnp.zeros((PAGES, PAGE * 132), jnp.uint8), q[:, 0, 0, :128]
    got, collectives = run_plain(write_index_k, (pages, rows, rows), keys, slots, k)
    assert collectives == ["all-gather"] and got.sharding.spec == pages, collectives
    np.testing.assert_array_equal(got, write_index_k(keys, slots, k))
    jax.clear_caches()


@body
def explicit_axes():
    square = jax.make_mesh((2, 2), ("x", "y"))  # explicit axes are its default
    assert set(square.axis_types) == {jax.sharding.AxisType.Explicit}

    def run_explicit(f, specs, *args):
        sharded = [jax.device_put(x, NamedSharding(square, spec)) for spec, x in zip(specs, args)]
        with jax.set_mesh(square):
            compiled = jax.jit(f).lower(*sharded).compile()
            results = compiled(*sharded)
        return results, [name for name in COLLECTIVES if name in compiled.as_text()]

    rows, both = P("x"), P("x", None, "y")
    specs = (both, P(), rows, rows, P(), rows, P("y"))
    results, collectives = run_explicit(decode, specs, *decode_args)
    assert collectives == [] and results[0].sharding.spec == P("x", None, "y", None), collectives
    assert_close(results, decode(*decode_args), 1e-6)

    specs = (P("x", "y"), P(), rows, rows, P("y"))
    results, collectives = run_explicit(prefill, specs, *prefill_args)
    assert collectives == [] and results[2].sharding.spec == P("x", "y"), collectives
    assert_close(results, prefill(*prefill_args), 1e-6)
    results, _ = run_explicit(prefill, (P("x", "y"), P(), P(), P(), P()), *prefill_args)  # the rest follows q
    assert_close(results, prefill(*prefill_args), 1e-6)

    slots, new = jnp.arange(8, dtype=jnp.int32) * 3 - 2, q[:, 0, 0]
    written, _ = run_explicit(write_kv, (P(), rows, rows), cache, slots, new)
    np.testing.assert_array_equal(written.data, write_kv(cache, slots, new).data)
    gathered, collectives = run_explicit(gather_kv, (P(), rows), cache, slots)
    assert collectives == [] and gathered.sharding.spec[0] == "x"

    # Eager calls, of arrays that are on no mesh too; the second of two compiles nothing.
    over = jax.device_put(q, NamedSharding(square, rows))
    counts = []
    for _ in range(2):
        results = sparse_mla_decode(over, cache, indices, softmax_scale=0.3, topk_length=lengths, attn_sink=sink)
        counts.append(sharding._by_rule._cache_size())
    assert counts[0] == counts[1]
    expected = sparse_mla_decode(q, cache, indices, softmax_scale=0.3, topk_length=lengths, attn_sink=sink)
    assert_close(results, expected, 1e-6)
    pages = jax.device_put(cache, NamedSharding(square, P("x")))
    for call in (lambda: gather_kv(pages, slots), lambda: sparse_mla_decode(q, pages, indices, softmax_scale=1.0)):
        try:
            call()
        except ValueError as error:
            assert "cache is sharded over explicit mesh axes" in str(error)
        else:
            raise AssertionError("a sharded cache was copied to every device")
    assert_close(gathered.astype(jnp.float32), gather_kv(cache, slots).astype(jnp.float32), 0)


@body
def chunks_of_a_selection():
    # More than one chunk of rows, whose carry must vary as the rows do.
    index_selection.SCRATCH_BYTES = 4 * 64 * 2
    rows = q[:, :, :, :128].reshape(64, 128)
    keys = write_index_k(jnp.zeros((4, 16 * 132), jnp.uint8), jnp.arange(64, dtype=jnp.int32), rows)
    index_q = q[:, 0, :2, :128].astype(jnp.float8_e4m3fn)
    table = jnp.tile(jnp.arange(4, dtype=jnp.int32), (8, 1))

    def select(q, keys, table, lengths):
        options = {"method": mla.TopkTransform.PAGED, "kv_page_table": table, "page_size": 16}
        return mla.index_topk(q, jnp.ones((len(q), 2)), keys, table, lengths, 8, **options)

    args, specs = (index_q, keys, table, jnp.full(8, 60, jnp.int32)), (P("x"), P(), P("x"), P("x"))
    sharded, collectives = run_sharded(select, specs, P("x"), *args)
    assert collectives == [], collectives
    np.testing.assert_array_equal(sharded, select(*args))
    sharded, collectives = run_plain(select, (P("x"), P(), P(), P("x")), *args)
    assert collectives == [] and sharded.sharding.spec[0] == "x", collectives
    np.testing.assert_array_equal(sharded, select(*args))


# Of a layer of each kind; those of V4 are at the last tokens of groups, whose entries are written and attended to.
_DECODES = mla.ForwardMode.DECODE, [(0, 7, 1), (1, 3, 1), (2, 11, 1), 0], 4
_CHUNKS = mla.ForwardMode.EXTEND, [(0, 0, 12), (1, 0, 12), (2, 0, 12), 12], 48
STEPS = {
    "decode_steps": (None, *_DECODES),
    "chunks": (4, *_CHUNKS),
    "decode_steps_of_v4": (4, *_DECODES),
    "decode_steps_of_ratio_128": (128, mla.ForwardMode.DECODE, [(0, 255, 1), (1, 127, 1), (2, 11, 1), 0], 4),
    "chunks_of_v32": (None, *_CHUNKS),
}
BODIES |= {name: functools.partial(check_steps, *arguments) for name, arguments in STEPS.items()}

if __name__ == "__main__":
    run_cases(BODIES, sys.argv[1:] or BODIES)

"""Arrays, and functions that run others over four virtual CPU devices; for `sharded_bodies`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from small_engine import make_step, make_world

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.attention import sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv

assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()), ("x",))
BATCH, Q_LEN, HEADS, TOPK, EXTRA_TOPK, PAGES, PAGE = 8, 2, 4, 24, 16, 8, 16
SLOTS = PAGES * PAGE
rng = np.random.default_rng(0)


def filled(page_size, pages):
    cache = PagedKV.zeros(KVLayout.V4_FP8, pages, page_size)
    slots = page_size * pages
    rows = rng.standard_normal((slots, 512)).astype(np.float32) / 10
    return write_kv(cache, jnp.arange(slots, dtype=jnp.int32), jnp.asarray(rows))


def index_table(columns, slots):
    table = rng.integers(-2, slots + 2, (BATCH, Q_LEN, columns)).astype(np.int32)
    table[0] = -1  # a request without keys
    return jnp.asarray(table)


cache, extra_cache = filled(PAGE, PAGES), filled(2, 64)
q = jnp.asarray(rng.standard_normal((BATCH, Q_LEN, HEADS, 512)), jnp.float32)
indices, extra_indices = index_table(TOPK, SLOTS), index_table(EXTRA_TOPK, 128)
extra_indices = extra_indices.at[1].set(-1)
lengths = jnp.asarray(rng.integers(0, TOPK + 1, (BATCH, Q_LEN)), jnp.int32)
sink = jnp.asarray([np.inf, -np.inf, 0.3, 2.0], jnp.float32)
kv = jnp.asarray(rng.standard_normal((SLOTS, 512)) / 10, jnp.float32)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def run_sharded(f, in_specs, out_specs, *args, mesh=mesh):
    """Results of f under jit and shard_map, and the collectives in its compiled text."""
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for spec, x in zip(in_specs, args)]
    compiled = mapped.lower(*args).compile()
    text = compiled.as_text()
    return compiled(*args), [name for name in COLLECTIVES if name in text]


def run_plain(f, specs, *args, mesh=mesh):
    """As run_sharded, but under plain jit: the partitioner decides."""
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for spec, x in zip(specs, args)]
    compiled = jax.jit(f).lower(*args).compile()
    text = compiled.as_text()
    return compiled(*args), [name for name in COLLECTIVES if name in text]


def assert_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.array_equal(np.isneginf(a), np.isneginf(b)) and not np.isnan(a).any()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def attend(function, q, cache, indices, lengths, extra_cache, extra_indices, extra_lengths=None, sink=None, **options):
    """Calls a decode function of two caches. The arrays are positional, so that a mesh can cut them."""
    return function(
        q,
        cache,
        indices,
        softmax_scale=0.3,
        topk_length=lengths,
        extra_cache=extra_cache,
        extra_indices=extra_indices,
        extra_topk_length=extra_lengths,
        attn_sink=sink,
        **options,
    )


def decode(q, cache, indices, lengths, extra_cache, extra_indices, sink):
    return attend(sparse_mla_decode, q, cache, indices, lengths, extra_cache, extra_indices, None, sink)


def prefill(q, kv, indices, lengths, sink):
    return sparse_mla_prefill(q, kv, indices, softmax_scale=0.3, topk_length=lengths, attn_sink=sink)


def check_steps(ratio, mode, work, num_rows):
    """A whole step of a layer under shard_map equals the step on one device: to the bit over requests."""
    world, chunk = make_world(ratio), mode is mla.ForwardMode.EXTEND
    spec = dataclasses.replace(world.spec, num_heads=4)
    batch, rows, _ = make_step(world, mode, work, num_rows=num_rows)
    rows = dataclasses.replace(rows, q=jnp.concatenate([rows.q, -rows.q], 1).astype(jnp.bfloat16))
    params = world.params and dataclasses.replace(world.params, attn_sink=jnp.arange(4.0))

    def step(cache, rows, params, batch, tables):
        if ratio is None:
            options = {"fp8_kv_cache": True, "prefill_backend": "flashmla_sparse" if chunk else "flashmla_kv"}
            metadata = mla.build_v32_metadata(spec, batch, tables, **options)
            return layers.v32_layer(cache, rows, batch, metadata, spec=spec)
        prepared = layers.prepare_v4_step(spec, batch, tables, gathered=chunk)
        plan = prepared.plans.get(ratio)
        return layers.v4_layer(cache, rows, params, batch, prepared.metadata, plan, spec=spec, ratio=ratio)

    def run(args, in_specs, out_specs):
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))
        compiled = mapped.lower(*args).compile()
        assert not [name for name in COLLECTIVES if name in compiled.as_text()]
        out, _, positions = compiled(*args)
        return np.asarray(out, np.float32), positions

    cache, rest = world.empty_cache(), (rows, params, batch, world.tables)
    out, after, positions = jax.jit(step)(cache, *rest)
    if ratio is None and not chunk:
        check_plain_step(step, (cache, *rest), (out, after, positions))
    out = np.asarray(out, np.float32)

    # Each device has the caches of its own requests, and no device needs another's.
    four = jax.tree.map(lambda x: jnp.concatenate([x] * 4), cache)
    own_out, own_positions = run((four, *rest), (P("x"), P("x"), P(), P("x"), P()), P("x"))
    np.testing.assert_array_equal(own_out, out)
    np.testing.assert_array_equal(own_positions, positions)

    of_rows = dataclasses.replace(jax.tree.map(lambda _: P(), rows), q=P(None, "x"))
    of_params = params and dataclasses.replace(jax.tree.map(lambda _: P(), params), attn_sink=P("x"))
    own_out, own_positions = run((cache, *rest), (P(), of_rows, of_params, P(), P()), (P(None, "x"), P(), P()))
    assert_close(own_out, out, 2**-7)
    np.testing.assert_array_equal(own_positions, positions)


def check_plain_step(step, args, expected):
    """The partitioner cuts the rows of attention and selection, and moves no cache."""
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    args = [jax.device_put(x, sharding) for sharding, x in zip((whole, rows, whole, rows, whole), args)]
    compiled = jax.jit(step).lower(*args).compile()
    got = compiled(*args)
    assert got[0].sharding.spec[0] == got[2].sharding.spec[0] == "x"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    moved = [line for line in compiled.as_text().splitlines() if any(f" {name}(" in line for name in COLLECTIVES)]
    assert moved and not [line for line in moved if "u8[" in line or ",4,576]" in line], moved  # caches, queries


decode_args = (q, cache, indices, lengths, extra_cache, extra_indices, sink)
prefill_args = (q[:, 0], kv, indices[:, 0], lengths[:, 0], sink)

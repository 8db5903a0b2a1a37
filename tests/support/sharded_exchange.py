"""What `context_parallel_decode` does with its mesh, over four virtual CPU devices; for `sharded_bodies`."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sharded_world import BATCH, HEADS, assert_close, cache, indices, mesh, q, run_sharded, sink

from jax_sparse_mla.attention import context_parallel_decode, cut_pages, exchange, peer_exchange


def check_a_mesh_of_cpus():
    """The exchange is an all-to-all, as without a mesh. A mesh that `shard_map` does not run over is refused."""
    heads, pages = P(None, None, "x"), cut_pages(cache, 4)
    specs = P(), P("x"), P(), P("x")

    def attend(q, cache, indices, sink, mesh=mesh):
        options = {"axis_name": "x", "softmax_scale": 0.3, "attn_sink": sink, "mesh": mesh}
        return context_parallel_decode(q, cache, indices, **options)

    expected, collectives = run_sharded(functools.partial(attend, mesh=None), specs, heads, q, pages, indices, sink)
    found, same = run_sharded(attend, specs, heads, q, pages, indices, sink)
    assert collectives == same == ["all-to-all"]
    for x, y in zip(found, expected):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    square = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    for other, error, words in (
        (square, ValueError, "mesh has the axes {'x': 2, 'y': 2}, shard_map runs over {'x': 4}"),
        (mesh.abstract_mesh, TypeError, "mesh must be a jax.sharding.Mesh or None, got AbstractMesh"),
    ):
        try:
            run_sharded(functools.partial(attend, mesh=other), specs, heads, q, pages, indices, sink)
        except error as raised:
            assert words in str(raised), raised
        else:
            raise AssertionError(words)


def check_one_launch():
    """Where the devices count as GPUs that the kernel serves. Each has parts of all heads."""
    rng = np.random.default_rng(7)
    parts = jnp.asarray(rng.standard_normal((4, BATCH, HEADS, 512)), jnp.float32)
    lses = jnp.asarray(rng.standard_normal((4, BATCH, HEADS)), jnp.float32)

    def exchanged(parts, lses, sink, mesh=mesh):
        return exchange.exchanged(parts[0], lses[0], sink, "x", mesh)

    def sharded(function):
        return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))

    def total(parts, lses, sink, **options):
        return jnp.sum(jax.jit(sharded(functools.partial(exchanged, **options)))(parts, lses, sink)[0] ** 2)

    wanted, gradient = sharded(exchanged)(parts, lses, sink), jax.grad(total, 2)(parts, lses, sink)
    calls = []

    def call(module, function, arguments, results, *operands):
        calls.append((function, arguments))
        return jax.ffi.ffi_call(function, tuple(results))(*operands)

    groups = peer_exchange.Groups((0, 1, 2, 3), 4)
    with (
        mock.patch.object(peer_exchange, "groups_of", lambda mesh, axis_name: groups),
        mock.patch.object(peer_exchange, "ready", lambda groups: True),
        mock.patch.object(peer_exchange.tvm, "call", call),
    ):
        lowered = jax.jit(sharded(exchanged)).trace(parts, lses, sink).lower(lowering_platforms=("cuda",)).as_text()
        assert lowered.count("stablehlo.custom_call @peer_exchange") == 1 and "all_to_all" not in lowered
        places = [x.index if isinstance(x, peer_exchange.tvm.Buffer) else x for x in calls[0][1]]
        assert places == [0, 1, 2, "0,1,2,3", 3, 4]
        without = functools.partial(exchanged, sink=None)
        jax.jit(sharded(without)).trace(parts, lses).lower(lowering_platforms=("cuda",))
        assert [x.index for x in calls[-1][1] if isinstance(x, peer_exchange.tvm.Buffer)] == [0, 1, 2, 3]

        # Elsewhere, under vmap and for the sink's gradient it is the all-to-all; there is no other gradient.
        for x, y in zip(sharded(exchanged)(parts, lses, sink), wanted):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        twice = jax.vmap(exchanged, in_axes=(None, None, 0))
        both = jax.shard_map(twice, mesh=mesh, in_specs=(P("x"), P("x"), P(None, "x")), out_specs=P(None, None, "x"))(
            parts, lses, jnp.stack([sink, sink])
        )
        assert_close(jax.tree.map(lambda x: x[1], both), wanted, 1e-6)
        np.testing.assert_allclose(jax.grad(total, 2)(parts, lses, sink), gradient, rtol=1e-6)
        try:
            jax.grad(total)(parts, lses, sink)
        except NotImplementedError as error:
            assert "only attn_sink has one" in str(error)
        else:
            raise AssertionError("a gradient in out")

"""Layers whose pages four virtual CPU devices share, in a process that tests/layers/test_shared_pages.py starts.

python shared_pages.py [CASE ...]        prints RESULTS and a JSON object, case → traceback
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from small_engine import LENGTHS, MAX_LEN, MAX_REQUESTS, REQUEST_ROWS, make_step, make_world
from virtual_devices import run_cases

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.attention import cut_pages
from jax_sparse_mla.indexer.logits import IndexKeys
from jax_sparse_mla.kv_cache import PagedKV
from jax_sparse_mla.layers import layer as layer_module
from jax_sparse_mla.serving.pages import RequestPool

DECODE, EXTEND = mla.ForwardMode.DECODE, mla.ForwardMode.EXTEND


def world_of(ratio, devices, topk):
    """A world whose page i of a request lies on device `i % devices`, with four heads, of which each has its own."""
    world = make_world(ratio)
    window = None if ratio is None else world.spec.window
    sizes = {"max_requests": MAX_REQUESTS, "max_len": MAX_LEN, "page_size": world.spec.page_size, "window": window}
    pool = RequestPool(**sizes, seed=3, devices=devices)
    for row in REQUEST_ROWS:
        pool.extend(row, 0, MAX_LEN)
    to_swa = None if ratio is None else jnp.asarray(pool.full_to_swa)
    tables = mla.RequestTables(req_to_token=jnp.asarray(pool.req_to_token), full_to_swa=to_swa)
    params = world.params and dataclasses.replace(world.params, attn_sink=jnp.arange(4.0))
    q = np.concatenate([world.rows.q, -world.rows.q], -2)
    rows, spec = dataclasses.replace(world.rows, q=q), dataclasses.replace(world.spec, num_heads=4, index_topk=topk)
    return dataclasses.replace(world, spec=spec, rows=rows, params=params, tables=tables, num_pages=pool.num_pages)


def cut(world, cache, devices):
    """The caches as the devices have them, one after the other: their pages of the full pool, and all of the window."""

    def pages(part):
        if isinstance(part, PagedKV):
            return cut_pages(part, devices)
        data = jnp.moveaxis(part.reshape(part.shape[0] // devices, devices, -1), 1, 0)
        return data.reshape(part.shape)

    assert not isinstance(cache.index_k, IndexKeys)
    if world.ratio is None:
        return dataclasses.replace(cache, kv=pages(cache.kv), index_k=pages(cache.index_k))
    whole = jax.tree.map(lambda x: jnp.concatenate([x] * devices), cache)
    shared = {name: getattr(cache, name) for name in ("compressed", "index_k")}
    return dataclasses.replace(whole, **{name: pages(x) for name, x in shared.items() if x is not None})


def check(ratio, devices, paged=False, scratch=None, topk=16):
    """Prompts, then a step that decodes: outputs as on one device, up to the rounding of parts; positions and all bytes
    of the caches are the same. Of some requests a device has no key."""
    world = world_of(ratio, devices, topk)
    spec, mesh = world.spec, Mesh(np.array(jax.devices()[:devices]), ("x",))

    def step(cache, rows, params, batch, *, pages_axis=None):
        chunk = batch.mode is EXTEND and not paged
        if ratio is None:
            options = {"fp8_kv_cache": True, "prefill_backend": "flashmla_sparse" if chunk else "flashmla_kv"}
            metadata = mla.build_v32_metadata(spec, batch, world.tables, **options)
            return layers.v32_layer(cache, rows, batch, metadata, spec=spec, pages_axis=pages_axis)
        prepared = layers.prepare_v4_step(spec, batch, world.tables, gathered=chunk)
        options = {"spec": spec, "ratio": ratio, "pages_axis": pages_axis}
        return layers.v4_layer(cache, rows, params, batch, prepared.metadata, prepared.plans.get(ratio), **options)

    one = world.empty_cache()
    shared = cut(world, one, devices)
    lengths, seen = [n - 4 for n in LENGTHS], 0
    for mode, starts, count in ((EXTEND, [0] * 3, None), (DECODE, lengths, 1)):
        work = [(i, start, count or n) for i, (start, n) in enumerate(zip(starts, lengths))]
        num_rows = sum(n for *_, n in work) + 2
        work.append(2 if mode is EXTEND else 0)
        num_rows = num_rows if mode is EXTEND else len(work)
        batch, rows, _ = make_step(world, mode, work, num_rows=num_rows)
        rows = dataclasses.replace(rows, q=rows.q.astype(jnp.bfloat16))
        out, one, positions = jax.jit(step)(one, rows, world.params, batch)
        of_rows = dataclasses.replace(jax.tree.map(lambda _: P(), rows), q=P(None, "x"))
        of_params = world.params and dataclasses.replace(jax.tree.map(lambda _: P(), world.params), attn_sink=P("x"))
        mapped = jax.shard_map(
            functools.partial(step, pages_axis="x"),
            mesh=mesh,
            in_specs=(P("x"), of_rows, of_params, P()),
            out_specs=(P(None, "x"), P("x"), P("x")),
        )
        with mock.patch.object(layer_module, "SCRATCH_BYTES", scratch or layer_module.SCRATCH_BYTES):
            own_out, shared, own_positions = jax.jit(mapped)(shared, rows, world.params, batch)
        np.testing.assert_allclose(np.asarray(own_out, np.float32), np.asarray(out, np.float32), rtol=2**-7, atol=2**-7)
        seen += np.abs(np.asarray(out, np.float32)).max()
        if positions is not None:
            for each in np.split(np.asarray(own_positions), devices):  # all devices choose alike
                np.testing.assert_array_equal(each, positions)
        for found, wanted in zip(jax.tree.leaves(shared), jax.tree.leaves(cut(world, one, devices)), strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert seen > 0.1


CASES = {
    "v32": functools.partial(check, None, 4),
    "v32_paged": functools.partial(check, None, 2, paged=True, scratch=4 * 256 * 64),
    "v32_wide": functools.partial(check, None, 4, topk=200),  # more than one device has
    "c4": functools.partial(check, 4, 4),
    "c4_paged": functools.partial(check, 4, 2, paged=True),
    "c128": functools.partial(check, 128, 2),
    "window": functools.partial(check, 0, 2),
}

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:] or CASES)

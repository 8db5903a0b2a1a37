"""Attention and whole steps over several devices, by jax.shard_map and over explicit axes: heads and tokens without a
collective, keys merged by lse.

The bodies run in another process, which has four virtual CPU devices; this one keeps its own.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

DEVICES = 4
QUICK_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"  # as in conftest.py
SUPPORT = str(pathlib.Path(__file__).parents[1] / "support")

PREAMBLE = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    import dataclasses
    import jax_sparse_mla as mla
    from jax_sparse_mla import index_selection, layers, sharding, write_index_k
    from jax_sparse_mla.attention import merge_attention, sparse_mla_decode, sparse_mla_prefill
    from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv, write_kv
    from small_engine import V4, V32, make_step, make_world

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
        \"\"\"Results of f under jit and shard_map, and the collectives in its compiled text.\"\"\"
        mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for spec, x in zip(in_specs, args)]
        compiled = mapped.lower(*args).compile()
        text = compiled.as_text()
        return compiled(*args), [name for name in COLLECTIVES if name in text]

    def assert_close(actual, expected, tolerance):
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert np.array_equal(np.isneginf(a), np.isneginf(b)) and not np.isnan(a).any()
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    def decode(q, cache, indices, lengths, extra_cache, extra_indices, sink):
        return sparse_mla_decode(
            q, cache, indices, softmax_scale=0.3, topk_length=lengths,
            extra_cache=extra_cache, extra_indices=extra_indices, attn_sink=sink,
        )

    def prefill(q, kv, indices, lengths, sink):
        return sparse_mla_prefill(q, kv, indices, softmax_scale=0.3, topk_length=lengths, attn_sink=sink)

    decode_args = (q, cache, indices, lengths, extra_cache, extra_indices, sink)
    prefill_args = (q[:, 0], kv, indices[:, 0], lengths[:, 0], sink)
"""

BODIES = {
    "decode_over_heads": """
        specs = (P(None, None, "x"), P(), P(), P(), P(), P(), P("x"))
        sharded, collectives = run_sharded(decode, specs, P(None, None, "x"), *decode_args)
        assert collectives == [], collectives
        assert sharded[0].sharding.spec[2] == "x"
        assert_close(sharded, decode(*decode_args), 1e-6)
    """,
    "decode_over_tokens": """
        specs = (P("x"), P(), P("x"), P("x"), P(), P("x"), P())
        sharded, collectives = run_sharded(decode, specs, P("x"), *decode_args)
        assert collectives == [], collectives
        assert_close(sharded, decode(*decode_args), 1e-6)
    """,
    "prefill_over_heads": """
        specs = (P(None, "x"), P(), P(), P(), P("x"))
        sharded, collectives = run_sharded(prefill, specs, P(None, "x"), *prefill_args)
        assert collectives == [], collectives
        assert_close(sharded, prefill(*prefill_args), 1e-6)
    """,
    "prefill_over_tokens": """
        specs = (P("x"), P(), P("x"), P("x"), P())
        sharded, collectives = run_sharded(prefill, specs, P("x"), *prefill_args)
        assert collectives == [], collectives
        assert_close(sharded, prefill(*prefill_args), 1e-6)
    """,
    "bfloat16_over_both": """
        square = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
        args = (decode_args[0].astype(jnp.bfloat16), *decode_args[1:])
        specs = (P("x", None, "y"), P(), P("x"), P("x"), P(), P("x"), P("y"))
        sharded, collectives = run_sharded(decode, specs, P("x", None, "y"), *args, mesh=square)
        assert collectives == [], collectives
        expected = decode(*args)
        assert sharded[0].dtype == jnp.bfloat16
        assert_close(sharded[1], expected[1], 1e-6)
        assert_close(sharded[0].astype(jnp.float32), expected[0].astype(jnp.float32), 2**-8)
    """,
    "gradients_over_tokens": """
        def loss(q, kv, indices, lengths, sink):
            out, _, lse = prefill(q, kv, indices, lengths, sink)
            return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse))

        def by_q(*args):
            return jax.grad(loss)(*args)

        specs = (P("x"), P(), P("x"), P("x"), P())
        sharded, _ = run_sharded(by_q, specs, P("x"), *prefill_args)
        assert_close(sharded, by_q(*prefill_args), 1e-5)
    """,
    "context_parallel": """
        # Each device holds a quarter of the pages and keeps the indices into them: global slot to local slot.
        def local_part(q, cache, indices, lengths):
            first = jax.lax.axis_index("x") * cache.num_slots
            mine = (indices >= first) & (indices < first + cache.num_slots)
            local = jnp.where(mine, indices - first, -1)
            return sparse_mla_decode(q, cache, local, softmax_scale=0.3, topk_length=lengths)

        def merged_by_collectives(*args):
            out, lse = local_part(*args)
            top = jax.lax.pmax(lse, "x")
            weight = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - jnp.where(jnp.isneginf(top), 0, top)))
            total = jax.lax.psum(weight, "x")
            out = jax.lax.psum(out * weight[..., None], "x") / jnp.where(total == 0, 1, total)[..., None]
            return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(jnp.where(total == 0, 1, total)))

        def stacked(*args):
            return jax.tree.map(lambda x: x[None], local_part(*args))

        # Requests 2 and 3 have all their keys on the first and on the last device.
        quarter = SLOTS // 4
        run = jnp.arange(TOPK) % quarter
        indices = indices.at[2].set(run).at[3].set(SLOTS - 1 - run)
        args, specs = (q, cache, indices, lengths), (P(), P("x"), P(), P())
        whole = sparse_mla_decode(q, cache, indices, softmax_scale=0.3, topk_length=lengths)
        assert np.isneginf(whole[1][0]).all() and np.isfinite(whole[1]).any()

        by_collectives, collectives = run_sharded(merged_by_collectives, specs, P(), *args)
        assert collectives == ["all-reduce"], collectives
        assert_close(by_collectives, whole, 1e-5)

        (outs, lses), collectives = run_sharded(stacked, specs, P("x"), *args)
        assert collectives == [], collectives
        assert outs.shape == (4, *q.shape) and np.isneginf(lses[1:, 2]).all()
        assert_close(merge_attention(outs, lses), whole, 1e-5)
    """,
    "context_parallel_prefill": """
        def local_part(q, kv, indices):
            first = jax.lax.axis_index("x") * kv.shape[0]
            mine = (indices >= first) & (indices < first + kv.shape[0])
            out, _, lse = sparse_mla_prefill(q, kv, jnp.where(mine, indices - first, -1), softmax_scale=0.3)
            return out[None], lse[None]

        q, indices = q[:, 0], indices[:, 0]
        parts, collectives = run_sharded(local_part, (P(), P("x"), P()), P("x"), q, kv, indices)
        assert collectives == [], collectives
        out, _, lse = sparse_mla_prefill(q, kv, indices, softmax_scale=0.3)
        assert_close(merge_attention(*parts), (out, lse), 1e-5)
    """,
    "explicit_axes": """
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
            counts.append(sharding._on_own_rows._cache_size())
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
    """,
    "chunks_of_a_selection": """
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
    """,
    "a_step_over_requests": """
        # Each device has the caches of its own requests, and no device needs another's.
        for ratio in (4, None):
            world, spec = make_world(ratio), V32 if ratio is None else V4
            work = [(0, 7, 1), (1, 3, 1), (2, 11, 1), 0]
            batch, rows, _ = make_step(world, mla.ForwardMode.DECODE, work, num_rows=4)

            def step(cache, rows, params, batch, tables):
                if ratio is None:
                    options = {"fp8_kv_cache": True, "prefill_backend": "flashmla_kv"}
                    metadata = mla.build_v32_metadata(spec, batch, tables, **options)
                    return layers.v32_layer(cache, rows, batch, metadata, spec=spec)
                prepared = layers.prepare_v4_step(spec, batch, tables)
                return layers.v4_layer(cache, rows, params, batch, prepared.metadata, None, spec=spec, ratio=ratio)

            cache = world.empty_cache()
            four = jax.tree.map(lambda x: jnp.concatenate([x] * 4), cache)
            args, specs = (four, rows, world.params, batch, world.tables), (P("x"), P("x"), P(), P("x"), P())
            mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=True))
            text = mapped.lower(*args).compile().as_text()
            assert not [name for name in COLLECTIVES if name in text]
            expected = jax.jit(step)(cache, *args[1:])
            for got, want in zip(mapped(*args)[::2], expected[::2]):  # out and positions
                np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    """,
    "a_chunk_over_heads": """
        world = make_world(4)
        spec = dataclasses.replace(V4, num_heads=4)
        batch, rows, _ = make_step(world, mla.ForwardMode.EXTEND, [(0, 0, 30), (1, 0, 14), 0], num_rows=48)
        rows = dataclasses.replace(rows, q=jnp.asarray(rng.standard_normal((48, 4, 512)), jnp.bfloat16))
        params = dataclasses.replace(world.params, attn_sink=jnp.arange(4.0))

        def step(cache, rows, params, batch, tables):
            prepared = layers.prepare_v4_step(spec, batch, tables, gathered=True)
            plan = prepared.plans[4]
            return layers.v4_layer(cache, rows, params, batch, prepared.metadata, plan, spec=spec, ratio=4)[0]

        over = jax.tree.map(lambda _: P(), rows), jax.tree.map(lambda _: P(), params)
        over = dataclasses.replace(over[0], q=P(None, "x")), dataclasses.replace(over[1], attn_sink=P("x"))
        args = world.empty_cache(), rows, params, batch, world.tables
        specs = (P(), *over, P(), P())
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=True))
        text = mapped.lower(*args).compile().as_text()
        assert not [name for name in COLLECTIVES if name in text]
        got, want = mapped(*args), jax.jit(step)(*args)
        assert_close(got.astype(jnp.float32), want.astype(jnp.float32), 2**-7)
    """,
}


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Every body's traceback, empty where it passed: one process for all, as starting one costs seconds."""
    script = textwrap.dedent(PREAMBLE) + "\nimport json, traceback\nresults = {}\n"
    for name, body in BODIES.items():
        run = f"try:\n    exec(compile({textwrap.dedent(body)!r}, {name!r}, 'exec'), dict(globals()))\n"
        script += run + f"except Exception:\n    results[{name!r}] = traceback.format_exc()\n"
        script += f"else:\n    results[{name!r}] = ''\n"
    script += "print('RESULTS' + json.dumps(results))\n"
    # No accelerator, and no backend that a caller's environment asks for.
    dropped = (
        "XLA_FLAGS",
        "JAX_SPARSE_MLA_BACKEND",
        "JAX_SPARSE_MLA_DECODE_BACKEND",
        "JAX_SPARSE_MLA_PREFILL_BACKEND",
    )
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), SUPPORT])
    environment |= {
        "PYTHONPATH": path,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} {QUICK_TO_COMPILE}",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS")]
    assert done.returncode == 0 and lines, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(lines[-1].removeprefix("RESULTS"))


@pytest.mark.parametrize("name", BODIES)
def test_sharded_equals_one_device(results, name):
    assert results[name] == "", results[name]

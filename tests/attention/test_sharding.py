"""Attention over several devices by jax.shard_map: heads and tokens without a collective, keys merged by lse.

The bodies run in another process, which has four virtual CPU devices; this one keeps its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

DEVICES = 4

PREAMBLE = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    from jax_sparse_mla.attention import merge_attention, sparse_mla_decode, sparse_mla_prefill
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
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
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

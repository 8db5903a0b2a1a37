"""The Mosaic GPU prefill kernel: it lowers for CUDA without a GPU, batches, shards and exports; on an H200, what only
its own shapes and roles can get wrong. What every backend must do is in `test_sparse_mla.py`.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import (
    assert_agree,
    assert_same,
    check_prefill,
    prefill_arguments,
    pretend_h200,
    small_prefill,
)
from attention_oracle import assert_close_flashmla
from jax.sharding import AxisType, PartitionSpec

from jax_sparse_mla.attention import reference, sparse_mla_prefill
from jax_sparse_mla.attention.backends.hopper import prefill
from jax_sparse_mla.attention.hopper.prefill.few_heads import team
from jax_sparse_mla.attention.hopper.prefill.kernel import sparse_prefill

KERNEL = "@mosaic_gpu_v2"


def call(arguments: dict, function=prefill):
    return function(**arguments)


def shapes(tokens=3, heads=64, qk_dim=512, kv_len=300, topk=200, lengths=True, sink=True) -> dict:
    return {
        "q": jax.ShapeDtypeStruct((tokens, heads, qk_dim), jnp.bfloat16),
        "kv": jax.ShapeDtypeStruct((kv_len, qk_dim), jnp.bfloat16),
        "indices": jax.ShapeDtypeStruct((tokens, topk), jnp.int32),
        "topk_length": jax.ShapeDtypeStruct((tokens,), jnp.int32) if lengths else None,
        "attn_sink": jax.ShapeDtypeStruct((heads,), jnp.float32) if sink else None,
    }


def program(function, *arguments) -> str:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def scaled(arguments: dict):
    return call(arguments | {"softmax_scale": 0.5})


# --- without a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("qk_dim", [512, 576])
@pytest.mark.parametrize("heads, topk, given", [(1, 1, True), (64, 2048, False), (100, 200, True), (128, 1024, False)])
def test_it_lowers_for_cuda_on_any_machine(heads, topk, given, qk_dim):
    """Mosaic checks shared memory, layouts and operands while it lowers."""
    text = program(scaled, shapes(heads=heads, topk=topk, qk_dim=qk_dim, lengths=given, sink=given))
    assert text.count(KERNEL) == 1
    for operation in ("stablehlo.pad", "stablehlo.slice", "stablehlo.transpose"):
        assert operation not in text, "heads and columns are padded inside the kernel"


@pytest.mark.parametrize(
    "heads, columns, qk_dim",
    [(1, 8, 512), (8, 8, 576), (9, 16, 512), (16, 16, 576), (24, 32, 512), (32, 32, 512)],
)
def test_few_heads_are_the_columns_of_a_product(heads, columns, qk_dim):
    text = program(scaled, shapes(heads=heads, qk_dim=qk_dim, lengths=heads > 8, sink=heads < 24))
    assert text.count(KERNEL) == 1
    assert set(re.findall(r"m64n(\d+)k16", text)) == {str(columns)}
    for operation in ("stablehlo.pad", "stablehlo.slice", "stablehlo.transpose"):
        assert operation not in text, "heads and columns are padded inside the kernel"


@pytest.mark.always(2)
@pytest.mark.parametrize("heads, qk_dim", [(33, 512), (64, 512), (128, 512), (17, 576), (32, 576)])
def test_other_heads_are_the_rows(heads, qk_dim):
    """More heads, and those of which two teams' arrays do not fit in shared memory."""
    assert set(re.findall(r"m64n(\d+)k16", program(scaled, shapes(heads=heads, qk_dim=qk_dim)))) == {"64", "256"}


@pytest.mark.parametrize("heads, qk_dim", [(8, 512), (16, 512), (32, 512), (8, 576), (16, 576)])
def test_the_ring_of_slots(heads, qk_dim):
    """A block's mask is written again once a slice of V of the block two before is released: it must have been read."""
    shape = team.Shape(heads, qk_dim)
    assert shape.slices <= shape.slots <= 2 * shape.slices - shape.tails
    assert len(shape.arrivals) == shape.barriers.weights_empty + 1


@pytest.mark.always(2)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("given", [True, False])
def test_it_lowers_where_64_bits_are_enabled(given, heads):
    """Python's numbers are int64 there, which `lax` does not mix with int32."""
    with jax.enable_x64(True):
        assert program(scaled, shapes(heads=heads, lengths=given, sink=given)).count(KERNEL) == 1


@pytest.mark.parametrize("shared_kv", [True, False])
def test_vmap_is_one_kernel(shared_kv):
    axes = {"q": 0, "kv": None if shared_kv else 0, "indices": 0, "topk_length": 0, "attn_sink": None}
    batched = {
        name: x if axes[name] is None else jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for name, x in shapes().items()
    }
    assert program(jax.vmap(scaled, in_axes=(axes,)), batched).count(KERNEL) == 1


def test_vmap_of_a_call_that_the_router_decides(monkeypatch):
    """Lowered for a CPU it is the reference, which the program holds as well: the platform is known later."""
    pretend_h200(monkeypatch, "hopper")
    given = {name: jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for name, x in shapes(tokens=5, topk=70).items()}

    def attend(given):
        return sparse_mla_prefill(**given, softmax_scale=0.5)

    lowered = jax.jit(jax.vmap(attend)).trace(given)
    assert lowered.lower(lowering_platforms=("cuda",)).as_text().count(KERNEL) == 1
    assert KERNEL not in lowered.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_needs_no_collective(check_vma):
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = {"q": 0, "kv": None, "indices": 0, "topk_length": 0, "attn_sink": None}
    specs = {name: PartitionSpec() if axis is None else PartitionSpec("x") for name, axis in specs.items()}
    sharded = jax.shard_map(scaled, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("x"), check_vma=check_vma)
    text = program(sharded, shapes(tokens=8))
    assert text.count(KERNEL) == 1
    assert not any(name in text for name in ("all_gather", "all_reduce", "collective_permute", "all_to_all"))


def test_it_exports_without_a_disabled_check():
    exported = jax.export.export(jax.jit(scaled), platforms=("cuda",))(shapes())
    assert KERNEL in exported.mlir_module()
    assert [x.shape for x in exported.out_avals] == [(3, 64, 512), (3, 64), (3, 64)]


@pytest.mark.parametrize("change", [{"tokens": 0}, {"heads": 0}, {"kv_len": 0}, {"topk": 0}], ids=str)
def test_nothing_to_attend_to_takes_no_kernel(change, monkeypatch):
    pretend_h200(monkeypatch, "hopper")
    arguments = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes(**change).items()}
    out, max_logits, lse = sparse_mla_prefill(**arguments, softmax_scale=0.5, backend="hopper")
    tokens, heads = arguments["q"].shape[:2]
    assert out.shape == (tokens, heads, 512) and out.dtype == jnp.bfloat16 and not np.any(np.asarray(out, np.float32))
    assert np.all(np.isneginf(max_logits)) and np.all(np.isneginf(lse)) and lse.shape == (tokens, heads)


def test_it_needs_no_torch():
    code = """
        import sys
        import jax, jax.numpy as jnp
        from jax_sparse_mla.attention.backends.hopper import prefill
        q, kv = jnp.zeros((2, 64, 512), jnp.bfloat16), jnp.zeros((9, 512), jnp.bfloat16)
        f = jax.jit(lambda *x: prefill(*x, None, None, softmax_scale=1.0))
        f.trace(q, kv, jnp.zeros((2, 5), jnp.int32)).lower(lowering_platforms=("cuda",))
        assert "torch" not in sys.modules and "triton" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# --- on an H200 ----------------------------------------------------------------------------------------------------


def random_arguments(seed=0, *, tokens, heads, qk_dim=512, kv_len=4096, topk=256) -> dict:
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "q": jax.random.normal(keys[0], (tokens, heads, qk_dim), jnp.bfloat16),
        "kv": jax.random.normal(keys[1], (kv_len, qk_dim), jnp.bfloat16) / 10,
        "indices": jax.random.randint(keys[2], (tokens, topk), -1, kv_len, jnp.int32),
        "topk_length": None,
        "attn_sink": jax.random.normal(keys[3], (heads,)),
        "softmax_scale": 0.5,
    }


@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def hopper(self):
        if jax.devices()[0].compute_capability != "9.0":
            pytest.skip("the kernel is SM90's")

    @pytest.mark.parametrize("heads", [1, 5, 8, 9, 16, 24, 32, 33, 63, 65, 100, 128, 200])
    @pytest.mark.parametrize("qk_dim", [512, 576])
    def test_any_head_count(self, heads, qk_dim):
        """The last tile's missing heads are neither read nor written: the heads after it in memory are intact."""
        case = small_prefill(heads=heads, dim=qk_dim, sizes=(300, 130))
        check_prefill(case, call(prefill_arguments(case)))

    @pytest.mark.parametrize("topk", [1, 63, 64, 65, 127, 128, 129, 193, 1000])
    @pytest.mark.parametrize("heads", [4, 64])
    def test_any_topk(self, heads, topk):
        case = small_prefill(heads=heads, sizes=(200, topk))
        check_prefill(case, call(prefill_arguments(case)))

    @pytest.mark.parametrize("qk_dim", [512, 576])
    @pytest.mark.parametrize("heads", [8, 16, 32, 128])
    def test_more_items_than_teams_or_multiprocessors(self, heads, qk_dim):
        """Every block of threads takes several items, of lengths 0 to topk in any order."""
        tokens = 700 if heads == 128 else 1500
        arguments = random_arguments(heads, tokens=tokens, heads=heads, qk_dim=qk_dim)
        lengths = jax.random.randint(jax.random.key(9), (tokens,), -3, 300, jnp.int32)
        arguments["topk_length"] = lengths.at[100:440].set(0)
        results = call(arguments)
        assert_agree(results, call(arguments, reference.prefill), "prefill")
        for _ in range(20):
            assert all(jnp.array_equal(a, b) for a, b in zip(call(arguments), results, strict=True))

    @pytest.mark.parametrize("heads", [8, 16, 32, 64])
    def test_scores_that_rise(self, heads):
        """The reference rises in many blocks, of some heads and not of others, and sums so far are multiplied."""
        arguments = random_arguments(heads, tokens=300, heads=heads, kv_len=1024, topk=1024)
        position = jnp.arange(1024)
        q = arguments["q"].at[..., 0].set(8.0)
        arguments["q"] = q.at[..., 1].set(jnp.arange(heads)[None] % 3)
        kv = arguments["kv"].at[:, 0].set(position / 256)
        arguments["kv"] = kv.at[:, 1].set(8 * jnp.sin(position / 40))
        arguments["indices"] = jnp.broadcast_to(jnp.arange(1024, dtype=jnp.int32), (300, 1024))
        out, *statistics = call(arguments)
        expected_out, *expected = call(arguments, reference.prefill)
        assert_close_flashmla(out, np.asarray(expected_out).astype(np.float64), "prefill.out")
        # Terms of a sum are up to 32 here, and tensor cores round such sums more coarsely than float32 additions do.
        for found, wanted in zip(statistics, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-18 * float(jnp.abs(wanted).max()))

    @pytest.mark.parametrize("heads, qk_dim", [(5, 576), (16, 576), (32, 512)])
    def test_both_kernels_agree(self, heads, qk_dim):
        arguments = random_arguments(tokens=200, heads=heads, qk_dim=qk_dim, topk=500)
        assert_agree(call(arguments), call(arguments | {"sm_count": 132}, sparse_prefill), "prefill")

    @pytest.mark.parametrize("qk_dim", [512, 576])
    @pytest.mark.parametrize("heads", [16, 64])
    def test_a_hundred_runs_give_the_same_bits(self, heads, qk_dim):
        arguments = random_arguments(tokens=300, heads=heads, qk_dim=qk_dim, topk=500)
        del arguments["softmax_scale"]
        attend = jax.jit(scaled)
        first = attend(arguments)
        for _ in range(100):
            assert all(jnp.array_equal(a, b) for a, b in zip(attend(arguments), first, strict=True))

    @pytest.mark.parametrize("shared_kv", [True, False])
    def test_vmap(self, shared_kv):
        several = [random_arguments(seed, tokens=5, heads=16) for seed in range(3)]
        if shared_kv:
            several = [one | {"kv": several[0]["kv"]} for one in several]
        names = ("q", "indices") if shared_kv else ("q", "indices", "kv")
        fixed = {name: x for name, x in several[0].items() if name not in names}
        stacked = {name: jnp.stack([one[name] for one in several]) for name in names}
        batched = jax.vmap(lambda given: call(given | fixed))(stacked)
        for i, one in enumerate(several):
            assert_same([x[i] for x in batched], call(one | {"attn_sink": fixed["attn_sink"]}))

    def test_shard_map(self):
        arguments = random_arguments(tokens=6, heads=32)
        scale = arguments.pop("softmax_scale")
        arguments = {name: x for name, x in arguments.items() if x is not None}
        mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
        specs = {name: PartitionSpec("x") if name in ("q", "indices") else PartitionSpec() for name in arguments}

        def local(given):
            return call({"topk_length": None, "softmax_scale": scale} | given)

        sharded = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("x"))
        assert_same(jax.jit(sharded)(arguments), local(arguments))

    def test_the_last_rows_of_five_gib(self):
        rows = (5 << 30) // 1024
        arguments = random_arguments(tokens=4, heads=64)
        small = arguments["kv"][:256]
        big = jnp.full((rows, 512), jnp.nan, jnp.bfloat16).at[-256:].set(small)
        indices = jnp.clip(arguments["indices"], 0, 255)
        found = call(arguments | {"kv": big, "indices": indices + (rows - 256)})
        assert_same(found, call(arguments | {"kv": small, "indices": indices}))

    @pytest.mark.parametrize("tokens, heads", [(33_000, 128), (140_000, 16)])
    def test_results_of_more_than_two_gib(self, tokens, heads):
        arguments = random_arguments(tokens=tokens, heads=heads, topk=64)
        results = call(arguments)
        assert results[0].nbytes > 1 << 31
        beyond = (1 << 31) // (heads * 512 * 2) - 1  # the row before the first one behind 2 GiB
        for part in (slice(0, 3), slice(beyond, beyond + 3), slice(tokens - 3, tokens)):
            few = arguments | {name: arguments[name][part] for name in ("q", "indices")}
            assert_same([x[part] for x in results], call(few))
            assert_agree([x[part] for x in results], call(few, reference.prefill), "prefill")

    @pytest.mark.parametrize("heads", [8, 16, 32, 64])
    def test_a_query_of_nan_stays_in_its_head(self, heads):
        case = small_prefill(heads=heads, lengths=False, sizes=(200, 150))
        expected = call(prefill_arguments(case))
        case = dataclasses.replace(case, q=case.q.copy())
        case.q[2, 3] = np.nan
        found = [np.asarray(x, np.float32) for x in call(prefill_arguments(case))]
        others = np.ones((6, heads), bool)
        others[2, 3] = False
        assert_same([x[others] for x in found], [np.asarray(x, np.float32)[others] for x in expected])
        assert np.isnan(found[0][2, 3]).all() and np.isnan(found[2][2, 3])

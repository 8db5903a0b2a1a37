"""The public contract as a user sees it: names, signatures, what an import pulls in, jit."""

import dataclasses
import enum
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_calls import (
    GOOD,
    INT_MAX,
    INT_MIN,
    TINY_V4,
    batch,
    function_of,
    i32,
    is_array,
    plan,
    tables,
)

import jax_sparse_mla as mla

# The signatures of the contract, character by character where it gives them.
SIGNATURES = {
    "write_kv": "cache, slots, kv",
    "gather_kv": "cache, slots",
    "dequantize_kv": "cache",
    "split_pages": "cache, page_size, *, slots=None, out=None",
    "quantize_ue8m0": "x, group",
    "sparse_mla_decode": "q, cache, indices, *, softmax_scale, topk_length=None, extra_cache=None, "
    "extra_indices=None, extra_topk_length=None, attn_sink=None, assume_valid_indices=False, backend=None, "
    "batch_invariant=False",
    "sparse_mla_prefill": "q, kv, indices, *, softmax_scale, topk_length=None, attn_sink=None, backend=None, "
    "batch_invariant=False, deterministic_gradient=False",
    "build_prefill_plan": "spec, batch, tables, *, compress_ratio, swa_capacity, compressed_capacity",
    "sparse_mla_extend": "q, plan, swa_cache, compressed_cache, topk_positions, *, softmax_scale, "
    "attn_sink=None, workspace=None, backend=None, batch_invariant=False",
    "merge_attention": "outs, lses",
    "apply_attn_sink": "out, lse, attn_sink",
    "combine_swa_extra_indices": "swa_indices, swa_lengths, extra_indices, extra_lengths, num_swa_rows",
    "combine_topk_swa_indices": "topk_indices, query_start_loc, query_pos, seq_lens, gather_lens, "
    "compressed_base, swa_base, *, window, compress_ratio, topk",
    "swa_slots": "positions, req_rows, req_to_token, full_to_swa, *, window",
    "swa_gather_plan": "seq_lens, extend_lens, req_rows, req_to_token, full_to_swa, *, window, capacity",
    "topk_positions": "logits, lengths, topk, row_starts=None",
    "select_topk_transform": "forward_mode, *, fp8_kv_cache, prefill_backend",
    "select_prefill_backend": "total_kv_tokens, total_q_tokens",
    "topk_transform": "logits, lengths, topk, *, method, page_table=None, page_size=1, row_to_request=None, "
    "topk_indices_offset=None, row_starts=None",
    "build_v4_metadata": "spec, batch, tables",
    "build_v32_metadata": "spec, batch, tables, *, fp8_kv_cache, prefill_backend",
    "draft_step_batch": "batch, step, num_steps, *, topk=1, shift_seq_lens=True",
    "flashmla_schedule": "topk_length, *, batch, topk, extra_topk=0, extra_topk_length=None, num_sm_parts",
    "index_logits": "q, weights, index_cache, page_table, lengths",
    "index_topk": "q, weights, index_cache, page_table, lengths, topk, *, method, kv_page_table=None, page_size=1, "
    "row_to_request=None, topk_indices_offset=None",
    "write_index_k": "index_cache, slots, k",
    "paged_mqa_schedule": "context_lens, *, num_sms, split_kv=256",
    "plan_attention": "phase, spec, *, num_q_tokens, device, installed, kv_dtype='fp8', num_heads=None, "
    "topk=None, override=None, batch_invariant=False",
    "ModelSpec.from_hf_config": "config",
    "PagedKV.zeros": "layout, num_pages, page_size, *, num_layers=1",
    "DeviceInfo.current": "",
}
# Fields that the contract names, in order where it gives an order. A dataclass may have more.
FIELDS = {
    "ModelSpec": "name num_heads qk_dim v_dim nope_dim rope_dim softmax_scale kv_layout page_size index_topk "
    "index_heads index_dim window compress_ratios has_attn_sink layers",
    "PagedKV": "data layout page_size num_layers layer_index",
    "ForwardBatch": "mode max_seq_len req_pool_indices seq_lens out_cache_loc extend_lens num_draft_tokens",
    "RequestTables": "req_to_token full_to_swa",
    "V4Metadata": "seq_lens_causal positions page_table out_cache_loc swa_page_indices swa_topk_lengths "
    "swa_out_cache_loc compressed",
    "V32Metadata": "cache_seqlens seqlens_expanded topk_lengths cu_seqlens_q cu_seqlens_k page_table "
    "row_to_request topk_indices_offset topk_transform kv_slots index_row_starts index_row_ends",
    "PrefillPlan": "overflow",
    "Plan": "backend kernel reason rejected",
    "DeviceInfo": "platform compute_capability sm_count shared_memory_optin",
}
STATIC_FIELDS = {
    "PagedKV": {"layout", "page_size", "num_layers", "layer_index"},
    "ForwardBatch": {"mode", "max_seq_len", "num_draft_tokens"},
    "RequestTables": set(),
    "V32Metadata": {"topk_transform"},
}
C_PROPERTIES = "c4_out_loc c4_lengths c4_topk_lengths c4_page_indices c128_out_loc c128_topk_lengths c128_page_indices"
# Names that the contract gives without a signature.
OTHERS = "DEEPSEEK_V32 DEEPSEEK_V4_FLASH DEEPSEEK_V4_PRO KVLayout TopkTransform ForwardMode compress_kv debug"


def resolve(name):
    value = mla
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    namespace = {}
    exec(f"def wanted({SIGNATURES[name]}): pass", namespace)
    wanted = inspect.signature(namespace["wanted"]).parameters
    got = inspect.signature(resolve(name)).parameters

    def describe(parameters):
        positional = [(p.name, p.kind, p.default) for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
        keyword = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
        return positional, keyword

    assert describe(got) == describe(wanted)


def test_every_public_name_is_listed_and_documented():
    missing = {name.split(".")[0] for name in SIGNATURES} | set(FIELDS) | set(OTHERS.split())
    assert not missing - set(mla.__all__)
    for name in mla.__all__:
        value = getattr(mla, name)
        if callable(value):
            assert (inspect.getdoc(value) or "").strip(), name
    for check in ("check_indices", "check_slots", "check_batch", "check_metadata"):
        assert callable(getattr(mla.debug, check))


@pytest.mark.parametrize("name", FIELDS)
def test_dataclass_fields(name):
    cls = getattr(mla, name)
    fields = [f.name for f in dataclasses.fields(cls)]
    wanted = FIELDS[name].split()
    assert not set(wanted) - set(fields)
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == fields  # every field is a keyword argument under its own name
    if name in ("PagedKV", "ForwardBatch", "ModelSpec", "DeviceInfo", "Plan"):
        assert fields == wanted
    assert cls.__dataclass_params__.frozen
    if name in STATIC_FIELDS:
        assert {f.name for f in dataclasses.fields(cls) if f.metadata.get("static")} == STATIC_FIELDS[name]


def test_v4_metadata_properties():
    spec = dataclasses.replace(TINY_V4, compress_ratios=(0, 4, 128), page_size=128)
    metadata = mla.build_v4_metadata(spec, batch(), tables())
    assert sorted(metadata.compressed) == [4, 128]
    for name in C_PROPERTIES.split():
        ratio, field = name[1:].split("_", 1)
        assert getattr(metadata, name) is getattr(metadata.compressed[int(ratio)], field)
    with pytest.raises(AttributeError, match="128"):
        _ = mla.build_v4_metadata(TINY_V4, batch(), tables()).c128_out_loc


def test_enums_constants_and_layouts():
    assert [m.name for m in mla.ForwardMode] == ["DECODE", "EXTEND", "TARGET_VERIFY", "DRAFT_EXTEND", "IDLE"]
    assert [m.name for m in mla.TopkTransform] == ["PAGED", "RAGGED"]
    assert issubclass(mla.ForwardMode, enum.Enum)
    sizes = {"V32_FP8": (656, 576), "V4_FP8": (584, 512), "V32_BF16": (1152, 576), "V4_BF16": (1024, 512)}
    for name, (row_bytes, qk_dim) in sizes.items():
        layout = getattr(mla.KVLayout, name)
        assert (layout.bytes_per_token, layout.qk_dim, layout.v_dim) == (row_bytes, qk_dim, 512)
        assert (layout.nope_dim, layout.rope_dim) == (qk_dim - 64, 64)
        assert mla.PagedKV.zeros(layout, 3, 64).data.shape == (3, layout.page_bytes(64))
        assert mla.PagedKV.zeros(layout, 3, 64).num_slots == 192
    assert [mla.KVLayout.V4_FP8.page_bytes(n) for n in (256, 64, 2)] == [149_760, 37_440, 1_728]
    flash, pro, v32 = mla.DEEPSEEK_V4_FLASH, mla.DEEPSEEK_V4_PRO, mla.DEEPSEEK_V32
    assert (flash.num_heads, pro.num_heads, v32.num_heads) == (64, 128, 128)
    assert (flash.index_topk, pro.index_topk, v32.index_topk) == (512, 1024, 2048)
    assert (flash.window, v32.window, flash.compress_ratios, v32.compress_ratios) == (
        128,
        None,
        (0, 4, 128),
        (),
    )
    assert (flash.page_size, v32.page_size, flash.has_attn_sink, v32.has_attn_sink) == (256, 64, True, False)
    assert flash.softmax_scale == pro.softmax_scale == 512**-0.5
    assert v32.softmax_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert len({flash, pro, v32}) == 3  # hashable: static arguments
    assert mla.DeviceInfo.current().platform in ("cpu", "cuda")


FORBIDDEN = "torch triton transformers chex hypothesis jax_triton jax_tvm_ffi tvm_ffi flash_mla flashinfer sgl_kernel"


def test_import_is_light_and_starts_no_backend():
    """An import pulls in jax and numpy alone and touches no device; a call then works."""
    code = (
        "import sys, jax\n"
        "before = set(sys.modules)\n"  # some installations start with more than jax
        "import jax_sparse_mla, jax_sparse_mla.layers, jax_sparse_mla.cli\n"
        "assert not any(name.startswith('jax_sparse_mla.serving') for name in sys.modules)\n"
        "import jax_sparse_mla.serving\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized(), 'a JAX backend was started'\n"
        "cache = jax_sparse_mla.PagedKV.zeros(jax_sparse_mla.KVLayout.V4_FP8, 1, 2)\n"
        "jax_sparse_mla.gather_kv(cache, [0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert "jax_sparse_mla" in loaded and not set(FORBIDDEN.split()) & set(loaded)


def test_names_come_when_they_are_asked_for():
    """Each in a process that has asked for no other, and modules too; what there is none of raises."""
    code = (
        "import sys, jax_sparse_mla as mla\n"
        "assert not {'jax', 'numpy'} & set(sys.modules), 'the package imports them by itself'\n"
        "from jax_sparse_mla import activity, _public\n"
        "for name in _public.__all__:\n"
        "    assert name in dir(mla) and getattr(mla, name) is getattr(_public, name), name\n"
        "for name in 'attention indexer indices kv_cache layers metadata models debug device serving'.split():\n"
        "    assert getattr(mla, name) is sys.modules[f'jax_sparse_mla.{name}'], name\n"
        "names = {}\n"
        "exec('from jax_sparse_mla import *', names)\n"
        "assert set(_public.__all__) <= set(names)\n"
        "assert all(hasattr(mla.serving, name) and name in dir(mla.serving) for name in mla.serving.__all__)\n"
        "assert not any(hasattr(of, name) for of in (mla, mla.serving) for name in ('none', '__wrapped__'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- every public array function jits ----


def split_static(kwargs):
    """What may be traced (anything that holds an array), and the rest."""
    traced = {k for k, v in kwargs.items() if any(is_array(x) for x in jax.tree.leaves(v))}
    return {k: v for k, v in kwargs.items() if k in traced}, {k: v for k, v in kwargs.items() if k not in traced}


@pytest.mark.always(15)
@pytest.mark.parametrize("name", GOOD)
def test_jit_equals_eager(name):
    function, kwargs = function_of(name), GOOD[name]()
    traced, static = split_static(kwargs)
    eager = function(**kwargs)
    jitted = jax.jit(lambda arguments: function(**arguments, **static))(traced)
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool:
            np.testing.assert_array_equal(a, b)
        else:
            a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4, equal_nan=False)


def test_every_array_function_has_a_good_call():
    """A public function that is not called here is one of those that decide from plain data."""
    called = {name.split()[0] for name in GOOD}
    functions = {n for n in mla.__all__ if inspect.isfunction(getattr(mla, n))}
    assert functions - called == {"plan_attention", "select_prefill_backend", "select_topk_transform"}


# ---- slots that no cache has, and dtypes ----


def test_hostile_workspace_rows_are_not_keys():
    """A plan whose slots do not exist in the caches: its zero rows are skipped, not attended to."""
    kwargs = GOOD["sparse_mla_extend"]()
    bad = dataclasses.replace(
        plan(),
        swa_slots=i32(np.resize([INT_MIN, -7, 96, INT_MAX, -1], 16)),
        compressed_slots=i32(np.resize([INT_MIN, -7, 24, INT_MAX, -1], 8)),
    )
    out, lse = jax.jit(lambda plan: mla.sparse_mla_extend(**{**kwargs, "plan": plan}))(bad)
    assert not np.asarray(out, np.float32).any() and (np.asarray(lse) == -np.inf).all()


def test_no_dtype_is_promoted():
    """Both added a condition to an int32."""
    table, row = jnp.zeros((2, 4), jnp.int32), jnp.zeros(1, jnp.int32)
    with jax.numpy_dtype_promotion("strict"):
        starts, lengths = jnp.array([0, 2], jnp.int32), jnp.array([2], jnp.int32)
        arguments = table, starts, jnp.array([0, 1], jnp.int32), lengths, lengths, row, row
        mla.combine_topk_swa_indices(*arguments, window=4, compress_ratio=4, topk=4)
        mla.flashmla_schedule(jnp.array([5], jnp.int32), batch=1, topk=64, num_sm_parts=2)

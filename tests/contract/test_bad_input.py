"""Every public function refuses bad arguments at trace time, naming itself and the argument."""

import dataclasses
import itertools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import pretend_installed
from public_calls import (
    DEVICE,
    GOOD,
    TINY_V4,
    TINY_V32,
    array_paths,
    batch,
    full_cache,
    function_of,
    i32,
    index_cache,
    normal,
    plan,
    replaced,
    shapes,
    tables,
)

import jax_sparse_mla as mla
from jax_sparse_mla.compressor.state import CompressorState

CALLS = {
    **GOOD,
    "plan_attention": lambda: {
        "phase": "decode",
        "spec": TINY_V4,
        "num_q_tokens": 3,
        "device": DEVICE,
        "installed": {"flashmla"},
        "kv_dtype": "fp8",
        "num_heads": 2,
        "topk": 4,
        "override": "reference",
    },
    "select_prefill_backend": lambda: {"total_kv_tokens": 3, "total_q_tokens": 4},
    "select_topk_transform": lambda: {
        "forward_mode": mla.ForwardMode.DECODE,
        "fp8_kv_cache": True,
        "prefill_backend": "flashmla_kv",
    },
}


def refuses(name, path, bad, error, *words):
    """The call with `bad` at `path` raises exactly `error`, and its message starts with the function's name."""
    function = name.split()[0]
    with pytest.raises((TypeError, ValueError)) as caught:
        function_of(name)(**replaced(CALLS[name](), path, bad))
    message = f"{path} = {str(bad)[:60]}: {caught.type.__name__}: {caught.value}"
    assert caught.type is error, message
    assert str(caught.value).startswith(f"{function}: "), message
    for word in words:
        assert re.search(word, str(caught.value)), message


def word(path):
    """A pattern that matches the argument's path as a word."""
    return rf"(?<![\w.]){re.escape(path)}(?!\w)"


# ---- arrays: every array argument of every function, generated ----

ARRAYS = [(name, path) for name in GOOD for path in shapes(name)]
# Carried through and not looked at by the function.
UNREAD = {
    ("sparse_mla_extend", "plan.overflow"),
    ("sparse_mla_extend", "plan.row_to_request"),
}
CHECKED = [case for case in ARRAYS if case not in UNREAD]
# Arguments of any rank, and of the ranks that the contract allows besides the good one.
ANY_RANK = {("split_pages", "slots"), ("quantize_ue8m0", "x")}
LENGTHS = {("sparse_mla_decode", "topk_length"), ("sparse_mla_decode", "extra_topk_length")}
# None is accepted, or refused with a ValueError because it is a mode that lacks it.
OPTIONAL = {
    "sparse_mla_decode": {"topk_length", "extra_topk_length", "attn_sink"},
    "sparse_mla_prefill": {"topk_length", "attn_sink"},
    "sparse_mla_extend": {"topk_positions", "attn_sink", "workspace"},
    "split_pages": {"slots"},
    "compress_kv": {"ape"},
    "topk_positions": {"row_starts"},
    "topk_transform": {"row_starts", "page_table", "row_to_request", "topk_indices_offset"},
    "index_topk": {"kv_page_table", "row_to_request", "topk_indices_offset"},
    "flashmla_schedule": {"topk_length", "extra_topk_length"},
    "build_v32_metadata": {"tables.full_to_swa", "batch.extend_lens"},
    "build_prefill_plan": {"batch.extend_lens"},
}
ids = "-".join


def host(name, path):
    return np.asarray(dict(array_paths(GOOD[name]()))[path])


@pytest.mark.parametrize("name, path", CHECKED, ids=map(ids, CHECKED))
def test_dtypes(name, path):
    array = host(name, path)
    wrong = {"float16", "float64", "int32", "complex64"}
    if array.dtype.kind in "iu":
        wrong = {"int64", "uint32", "int16", "float32", "float16", "bool"}
    for dtype in sorted(wrong):
        refuses(name, path, array.astype(dtype), TypeError, word(path), dtype)


@pytest.mark.parametrize("name, path", CHECKED, ids=map(ids, CHECKED))
def test_what_is_no_array(name, path):
    tensor = types.SimpleNamespace(dtype="torch.int32", shape=(3,), ndim=1)  # another framework's
    for bad in ("text", object(), {"a": 1}, [[1, 2], [3]], [2**40], tensor):
        if not ("stacked" in name and isinstance(bad, list)):  # there a list is a sequence of parts
            refuses(name, path, bad, TypeError, word(path))
    if path not in OPTIONAL.get(name.split()[0], ()):
        refuses(name, path, None, TypeError, word(path))


RANKED = [case for case in CHECKED if case not in ANY_RANK and "stacked" not in case[0]]


@pytest.mark.parametrize("name, path", RANKED, ids=map(ids, RANKED))
def test_ranks(name, path):
    array = host(name, path)
    function = name.split()[0]
    # These bind the leading dimensions of the arguments after them, so those are named.
    named = word("lses[0]") if path in ("outs", "outs[0]") else word(path)
    named = word("lse") if (function, path) == ("apply_attn_sink", "out") else named
    higher = array[None, None] if (name, path) in LENGTHS else array[None]
    refuses(name, path, higher, ValueError, named)
    refuses(name, path, array.ravel()[0], ValueError, word(path) if array.ndim == 1 else function)
    if array.ndim > 1 and (name, path) not in LENGTHS:
        refuses(name, path, array[0], ValueError, named)


# Dimensions that nothing else fixes; all others must agree with another argument or with the layout.
FREE = {
    ("cache.data", 0), ("out.data", None), ("extra_cache.data", 0), ("swa_cache.data", 0), ("compressed_cache.data", 0),
    ("gather_kv slots", 0), ("quantize_ue8m0 x", 0), ("sparse_mla_prefill kv", 0), ("sparse_mla_prefill indices", 1),
    ("plan.compressed_slots", 0), ("plan.swa_slots", 0), ("topk_positions", 1), ("workspace", 0),
    ("batch.out_cache_loc", 0), ("tables.req_to_token", 0), ("tables.req_to_token", 1), ("tables.full_to_swa", 0),
    ("req_to_token", 0), ("req_to_token", 1), ("full_to_swa", 0), ("merge_attention stacked outs", 3),
    ("apply_attn_sink out", 2), ("swa_indices", 1), ("extra_indices", 1), ("topk_indices", 1), ("logits", 1),
    ("page_table", 1), ("kv_page_table", 1), ("topk_transform page_table", 0), ("context_lens", 0), ("index_cache", 0),
    ("query_start_loc", 0), ("inv_freq", 0), ("sparse_mla_decode indices", 2), ("extra_indices", 2),
}  # fmt: skip
NOT_FREE = {
    ("draft_step_batch", "batch.out_cache_loc", 0),
    ("build_v4_metadata", "batch.out_cache_loc", 0),
    ("combine_topk_swa_indices", "query_start_loc", 0),
    ("sparse_mla_decode", "extra_indices", 1),
}
WIDE = [
    (name, path, axis)
    for name, path in CHECKED
    for axis in range(shapes(name)[path].ndim)
    if (name, path) not in ANY_RANK or (name, path, axis) == ("quantize_ue8m0", "x", 1)
    if (name, path, axis) in NOT_FREE or not {(path, axis), (f"{name} {path}", axis)} & FREE
]


@pytest.mark.parametrize("name, path, axis", WIDE, ids=[f"{n}-{p}-{a}" for n, p, a in WIDE])
def test_sizes(name, path, axis):
    array = host(name, path)
    longer = np.concatenate([array, array.take([0], axis)], axis)
    # Whichever of the two that disagree is checked last is named.
    others = "|".join(word(p.split(".")[0]) for p in shapes(name))
    refuses(name, path, longer, ValueError, others)
    if array.shape[axis] > 1 and (name, path) != ("quantize_ue8m0", "x"):
        refuses(name, path, array.take(range(array.shape[axis] - 1), axis), ValueError, others)


# ---- static arguments ----

STATIC_INTS = {
    "split_pages": {"page_size": 1},
    "quantize_ue8m0": {"group": 1},
    "build_prefill_plan": {"compress_ratio": 0, "swa_capacity": 1, "compressed_capacity": 0},
    "combine_topk_swa_indices": {"window": 1, "compress_ratio": 1, "topk": 0},
    "swa_slots": {"window": 1},
    "swa_gather_plan": {"window": 1, "capacity": 0},
    "topk_positions": {"topk": 1},
    "topk_transform": {"topk": 1, "page_size": 1},
    "index_topk": {"topk": 1, "page_size": 1},
    "draft_step_batch": {"step": 0, "num_steps": 1, "topk": 1, "batch.max_seq_len": None},
    "build_v4_metadata": {"batch.max_seq_len": 0},
    "build_v32_metadata": {"batch.max_seq_len": 0},
    "flashmla_schedule": {"batch": 1, "topk": 0, "extra_topk": 0, "num_sm_parts": 1},
    "paged_mqa_schedule": {"num_sms": 1, "split_kv": 1},
    "compress_kv": {"ratio": 1},
    "plan_attention": {"num_q_tokens": 0, "num_heads": 1, "topk": 0},
    "select_prefill_backend": {"total_kv_tokens": 0, "total_q_tokens": 0},
    "write_kv": {"cache.page_size": 1},
    "gather_kv": {"cache.page_size": 1},
    "dequantize_kv": {"cache.page_size": 1},
    "sparse_mla_decode": {"cache.page_size": 1, "extra_cache.page_size": 1},
    "sparse_mla_extend": {"swa_cache.page_size": 1, "compressed_cache.page_size": 1},
}
INTS = [(n, p, least) for n, args in STATIC_INTS.items() for p, least in args.items() if least is not None]


@pytest.mark.parametrize("name, path, least", INTS, ids=[f"{n}-{p}" for n, p, _ in INTS])
def test_static_ints(name, path, least):
    for bad in (True, 1.0, 1.5, math.nan, "4", (4,), np.zeros(2, np.int64), jnp.float32(4)):
        refuses(name, path, bad, TypeError, word(path))
    for bad in {least - 1, -7, -(2**40)}:
        refuses(name, path, bad, ValueError, word(path), re.escape(str(bad)))
    if name != "select_prefill_backend":  # plain Python, no arrays: it may count what int32 cannot
        refuses(name, path, 2**40, ValueError, "1099511627776")


SCALED = ["sparse_mla_decode", "sparse_mla_prefill", "sparse_mla_extend"]


@pytest.mark.parametrize("name", SCALED)
def test_softmax_scale(name):
    for bad in (None, "1", True, jnp.float32(1), np.ones(2), 1j):
        refuses(name, "softmax_scale", bad, TypeError, "softmax_scale")
    for bad in (math.nan, math.inf, -math.inf):
        refuses(name, "softmax_scale", bad, ValueError, "softmax_scale")
    kwargs = CALLS[name]()
    del kwargs["softmax_scale"]
    with pytest.raises(TypeError, match=f"{name}: softmax_scale"):
        jax.jit(lambda scale: function_of(name)(**kwargs, softmax_scale=scale))(1.0)
    with pytest.raises(TypeError, match="softmax_scale"):
        function_of(name)(**kwargs)  # required


def wide(cache):
    return dataclasses.replace(cache, data=jnp.pad(cache.data, ((0, 0), (0, 1))))


def v32_cache():
    return full_cache(mla.KVLayout.V32_FP8)


CACHES = [
    (name, path)
    for name in (
        "write_kv",
        "gather_kv",
        "dequantize_kv",
        "split_pages",
        "sparse_mla_decode",
        "sparse_mla_extend",
    )
    for path, dot, field in (argument.partition(".") for argument in shapes(name))
    if field == "data"
]


@pytest.mark.parametrize("name, path", CACHES, ids=map(ids, CACHES))
def test_caches(name, path):
    cache = GOOD[name]()[path]
    for bad in (cache.data, np.asarray(cache.data), 3, "cache", {"data": cache.data}):
        refuses(name, path, bad, TypeError, word(path), "PagedKV")
    refuses(name, f"{path}.layout", "V4_FP8", TypeError, word(f"{path}.layout"))
    refuses(name, f"{path}.data", cache.data[:, :-1], ValueError, word(f"{path}.data"), str(cache.data.shape[1]))
    refuses(name, path, wide(cache), ValueError, word(f"{path}.data"))
    # The bytes of another layout, and of another page size.
    refuses(
        name,
        f"{path}.layout",
        mla.KVLayout.V4_BF16 if "dequant" not in name else mla.KVLayout.V4_FP8,
        ValueError,
    )
    refuses(name, f"{path}.page_size", cache.page_size * 2, ValueError, word(path))


def tree(path, value):
    return (path, value, TypeError, path)


# What one function alone requires: (call, path, bad value or what makes it, error, words of the message).
SPECIAL = {
    "split_pages": [
        ("page_size", 5, ValueError, "page_size must divide"),
        ("page_size", 32, ValueError, "page_size must divide"),
        ("out", lambda: full_cache(pages=6), ValueError, "out must have"),
        ("out", lambda: full_cache(pages=23, page_size=4), ValueError, "out must have .* 24 pages"),
        ("cache", lambda: full_cache(mla.KVLayout.V4_BF16), ValueError, "out must have layout"),
    ],
    "quantize_ue8m0": [("group", 60, ValueError, "group"), ("x", jnp.float32(1.0), ValueError, "x must have shape")],
    "write_kv": [
        ("cache", v32_cache, ValueError, "kv must have shape .*576"),
        ("slots", np.arange(4, dtype=">i4"), TypeError, "slots must be int32"),
    ],
    "sparse_mla_decode": [
        ("extra_cache", v32_cache, ValueError, "extra_cache must have cache's layout"),
        ("cache", v32_cache, ValueError, "q must have shape .*576"),
        ("extra_cache", None, ValueError, "extra_indices was given without extra_cache"),
        ("extra_indices", None, TypeError, "extra_indices"),
        ("backend", "flashinfer", ValueError, "backend 'flashinfer' cannot serve"),
        ("backend", "cuda", ValueError, "backend must be one of .*'cuda'"),
        ("backend", 3, ValueError, "backend must be one of"),
    ],
    "sparse_mla_prefill": [
        ("kv", normal(20, 512), ValueError, "kv must have shape .*576"),
        ("backend", "hopper", ValueError, "backend 'hopper' cannot serve"),
        ("backend", "cuda", ValueError, "backend must be one of .*'cuda'"),
    ],
    "sparse_mla_extend": [
        tree("plan", None),
        tree("plan", "plan"),
        ("plan", lambda: plan(0), ValueError, "compressed_cache must be None exactly when"),
        ("compressed_cache", None, ValueError, "compressed_cache must be None exactly when"),
        ("compressed_cache", v32_cache, ValueError, "compressed_cache must have swa_cache's layout"),
        ("workspace", jnp.zeros((23, 512), jnp.bfloat16), ValueError, "workspace must have at least 24 rows"),
        ("workspace", jnp.zeros((30, 512), jnp.float32), TypeError, "workspace must be bfloat16"),
        ("topk_positions", i32(np.zeros((6, 5))), ValueError, "topk_positions must have at least 6 columns"),
    ],
    "build_prefill_plan": [
        tree("spec", None),
        tree("batch", {}),
        tree("tables", None),
        ("spec", TINY_V32, ValueError, "spec must be a model with a sliding window"),
        ("batch", batch(), ValueError, "batch.mode must be EXTEND, got DECODE"),
        ("compress_ratio", 128, ValueError, r"compress_ratio must be one of \[0, 4, 8\]"),
        ("batch.extend_lens", None, ValueError, "batch.extend_lens must be given in EXTEND"),
        ("batch.mode", "extend", TypeError, "batch.mode must be a ForwardMode"),
    ],
    "build_v4_metadata": [
        tree("spec", "DEEPSEEK_V4_FLASH"),
        tree("batch", None),
        tree("tables", tables().req_to_token),
        ("spec", TINY_V32, ValueError, "spec must be a model with a sliding window"),
        ("tables.full_to_swa", None, TypeError, "tables.full_to_swa"),
        ("batch.mode", 1, TypeError, "batch.mode"),
        ("batch.out_cache_loc", i32(range(6)), ValueError, "DECODE.*draft_step_batch"),
        ("spec", dataclasses.replace(TINY_V4, compress_ratios=(5,)), ValueError, "compress_ratios"),
        ("spec", dataclasses.replace(TINY_V4, compress_ratios=(-4,)), ValueError, "compress_ratios"),
        ("batch.mode", mla.ForwardMode.EXTEND, ValueError, "batch.extend_lens"),
        ("batch.mode", mla.ForwardMode.TARGET_VERIFY, ValueError, "batch.num_draft_tokens must be given"),
        ("batch.mode", mla.ForwardMode.DRAFT_EXTEND, ValueError, "batch.num_draft_tokens must be given"),
        (
            "batch",
            batch(mla.ForwardMode.TARGET_VERIFY, num_draft_tokens=2),
            ValueError,
            "num_draft_tokens = 2",
        ),
        ("batch", batch(mla.ForwardMode.DRAFT_EXTEND, num_draft_tokens=0), ValueError, "num_draft_tokens"),
        ("batch", batch(mla.ForwardMode.DRAFT_EXTEND, num_draft_tokens=1.0), TypeError, "num_draft_tokens"),
    ],
    "build_v32_metadata": [
        tree("spec", None),
        tree("batch", None),
        tree("tables", None),
        ("spec", TINY_V4, ValueError, "spec must be a model without a sliding window"),
        ("fp8_kv_cache", 1, TypeError, "fp8_kv_cache must be a bool"),
        ("fp8_kv_cache", None, TypeError, "fp8_kv_cache must be a bool"),
        ("prefill_backend", "flashmla_auto", ValueError, "prefill_backend must be 'flashmla_sparse'"),
        ("prefill_backend", None, ValueError, "prefill_backend"),
        ("batch.out_cache_loc", None, TypeError, "batch.out_cache_loc"),
        ("batch.extend_lens", None, ValueError, "batch.extend_lens must be given in EXTEND"),
    ],
    "draft_step_batch": [
        tree("batch", None),
        tree("shift_seq_lens", 1),
        ("batch.mode", mla.ForwardMode.EXTEND, ValueError, "batch.mode must be DECODE"),
        ("batch.out_cache_loc", i32(range(11)), ValueError, "B .* topk .* num_steps .*12 entries, got 11"),
        ("num_steps", 4, ValueError, "batch.out_cache_loc must have"),
        ("topk", 3, ValueError, "batch.out_cache_loc must have"),
        ("step", 3, ValueError, "step must be < num_steps=3"),
        ("step", jnp.zeros(1, jnp.int32), ValueError, "step must have shape"),
        ("step", jnp.float32(0), TypeError, "step"),
    ],
    "merge_attention": [
        ("outs", [], ValueError, "outs and lses must have as many parts"),
        ("lses", [normal(3, 2, dtype=jnp.float32)], ValueError, "outs and lses must have as many parts"),
        ("outs[1]", normal(3, 2, 16, dtype=jnp.float32), TypeError, r"outs\[1\] is float32"),
        tree("outs", None),
        tree("lses", 3.0),
    ],
    "combine_swa_extra_indices": [
        ("num_swa_rows", -1, ValueError, "num_swa_rows must be >= 0"),
        ("num_swa_rows", 2**31, ValueError, "num_swa_rows must fit int32"),
        ("num_swa_rows", True, TypeError, "num_swa_rows"),
        ("num_swa_rows", 5.0, TypeError, "num_swa_rows"),
        ("num_swa_rows", i32([5]), ValueError, "num_swa_rows"),
        ("num_swa_rows", None, TypeError, "num_swa_rows"),
    ],
    "combine_topk_swa_indices": [("topk", 3, ValueError, "topk_indices must have at least topk=3 columns")],
    "topk_transform": [
        ("method", "paged", TypeError, "method must be TopkTransform.PAGED"),
        ("method", None, TypeError, "method must be TopkTransform.PAGED"),
        ("page_table", None, ValueError, "page_table is missing"),
        ("row_to_request", None, ValueError, "page_table has 2 rows for 3 rows"),
    ],
    "topk_transform ragged": [
        ("topk_indices_offset", None, ValueError, "offset.*RAGGED.*build_v32.*EXTEND.*flashmla_sparse.*PAGED")
    ],
    "select_topk_transform": [
        ("forward_mode", "decode", TypeError, "forward_mode"),
        ("fp8_kv_cache", 1, TypeError, "fp8_kv_cache"),
        ("prefill_backend", "trtllm", ValueError, "prefill_backend.*'trtllm'"),
    ],
    "flashmla_schedule": [
        ("extra_topk", 0, ValueError, "extra_topk_length needs extra_topk"),
        ("topk", 2**31 - 1, ValueError, "topk"),
    ],
    "index_logits": [
        (
            "index_cache",
            jnp.zeros((4, 131), jnp.uint8),
            ValueError,
            "index_cache must have .*page_size . 132 bytes",
        ),
        (
            "index_cache",
            jnp.zeros((4, 0), jnp.uint8),
            ValueError,
            "index_cache must have .*page_size . 132 bytes",
        ),
        ("weights", normal(2, 3), TypeError, "weights must be float32"),
        ("q", normal(2, 3, 64), ValueError, "q must have shape"),
    ],
    "index_topk": [
        ("index_cache", jnp.zeros((4, 131), jnp.uint8), ValueError, "index_cache must have .*page_size . 132 bytes"),
        ("method", None, TypeError, "method must be TopkTransform.PAGED"),
        ("kv_page_table", None, ValueError, "kv_page_table is missing"),
        ("method", mla.TopkTransform.RAGGED, ValueError, "topk_indices_offset is missing"),
    ],
    "write_index_k": [
        ("index_cache", lambda: index_cache()[:, 1:], ValueError, "index_cache must have .*page_size . 132 bytes"),
        ("k", normal(3, 64), ValueError, "k must have shape"),
    ],
    "compress_kv": [
        tree("state", None),
        ("ratio", 128, ValueError, "state.*128"),
        ("ape", jnp.zeros((8, 16)), ValueError, "ape must have shape"),
        ("inv_freq", jnp.zeros(9), ValueError, "inv_freq must have at most 8 values"),
        ("norm_eps", "1e-6", TypeError, "norm_eps must"),
        ("query_start_loc", jnp.zeros(0, jnp.int32), ValueError, "query_start_loc must"),
        ("state", CompressorState(kv=jnp.zeros((3, 4, 32)), score=jnp.zeros((3, 4, 32))), ValueError, "state must"),
    ],
    "plan_attention": [
        tree("spec", "DEEPSEEK_V32"),
        tree("device", "cuda"),
        tree("installed", "flashmla"),
        tree("installed", None),
        ("phase", "train", ValueError, "phase must be one of decode, prefill, got 'train'"),
        ("phase", None, ValueError, "phase"),
        ("kv_dtype", "int8", ValueError, "kv_dtype must be one of fp8, bf16"),
        ("kv_dtype", jnp.bfloat16, ValueError, "kv_dtype"),
        ("override", "cuda", ValueError, "'cuda'"),
        ("override", "triton", ValueError, "backend 'triton' cannot serve this decode call: .*not installed"),
        ("installed", {"flashmla", "cutlass"}, ValueError, "'cutlass'"),
    ],
}
CASES = [(name, *case) for name, cases in SPECIAL.items() for case in cases]


@pytest.mark.parametrize(
    "name, path, bad, error, pattern", CASES, ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)]
)
def test_what_one_function_requires(name, path, bad, error, pattern, monkeypatch):
    """Where no kernel is installed: which of them could serve a call depends on the machine."""
    pretend_installed(monkeypatch)
    refuses(name, path, bad() if isinstance(bad, types.FunctionType) else bad, error, pattern)


def test_unknown_keywords_and_missing_arguments():
    for name in CALLS:
        kwargs = CALLS[name]()
        with pytest.raises(TypeError, match="unexpected keyword argument 'page_tables'"):
            function_of(name)(**kwargs, page_tables=3)
        first = next(iter(kwargs))
        with pytest.raises(TypeError, match=first):
            function_of(name)(**{k: v for k, v in kwargs.items() if k != first})


def test_refused_at_trace_time_too():
    """Under jit the same errors come, before anything is compiled."""
    for name, path in itertools.islice(CHECKED, 0, None, 7):
        kwargs = GOOD[name]()
        bad = jnp.asarray(host(name, path)).astype(jnp.float16)
        static = {k: v for k, v in kwargs.items() if k != path.split(".")[0].split("[")[0]}
        traced = {k: v for k, v in replaced(kwargs, path, bad).items() if k not in static}
        with pytest.raises(TypeError, match=f"{name.split()[0]}: .*float16"):
            jax.eval_shape(lambda traced, n=name, s=static: function_of(n)(**traced, **s), traced)


def test_paged_kv_zeros():
    for bad in (True, 1.0, "4", None):
        with pytest.raises(TypeError, match=r"PagedKV\.zeros: num_pages"):
            mla.PagedKV.zeros(mla.KVLayout.V4_FP8, bad, 64)
        with pytest.raises(TypeError, match=r"PagedKV\.zeros: page_size"):
            mla.PagedKV.zeros(mla.KVLayout.V4_FP8, 4, bad)
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"PagedKV.zeros: num_pages must be >= 1, got {bad}"):
            mla.PagedKV.zeros(mla.KVLayout.V4_FP8, bad, 64)
        with pytest.raises(ValueError, match=f"PagedKV.zeros: page_size must be >= 1, got {bad}"):
            mla.PagedKV.zeros(mla.KVLayout.V4_FP8, 4, bad)
    with pytest.raises(TypeError, match=r"PagedKV\.zeros: layout must be a KVLayout, got str"):
        mla.PagedKV.zeros("V4_FP8", 4, 64)
    for bad in (0, -1, True, 1.5, "64"):
        with pytest.raises(ValueError, match="page_bytes: page_size"):
            mla.KVLayout.V4_FP8.page_bytes(bad)


def test_dataclasses_refuse_unknown_fields_and_assignment():
    with pytest.raises(TypeError, match="page_bytes"):
        mla.PagedKV(data=jnp.zeros((1, 584), jnp.uint8), layout=mla.KVLayout.V4_FP8, page_bytes=584)
    with pytest.raises(TypeError):
        mla.ForwardBatch(mla.ForwardMode.DECODE, 3, i32([0]), i32([1]), i32([1]))  # keywords only
    for value, field in (
        (batch(), "seq_lens"),
        (tables(), "req_to_token"),
        (TINY_V4, "window"),
        (plan(), "topk"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, None)


@pytest.mark.parametrize("bad", [{}, {"model_type": "llama"}, types.SimpleNamespace(), None])
def test_model_spec_from_hf_config(bad):
    with pytest.raises(
        ValueError, match=r"ModelSpec\.from_hf_config: model_type must be 'deepseek_v32' or 'deepseek_v4'"
    ):
        mla.ModelSpec.from_hf_config(bad)

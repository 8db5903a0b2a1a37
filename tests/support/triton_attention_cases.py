"""The checks of test_triton_attention.py: the attention kernel against the oracle, through the torch launcher.

With TRITON_INTERPRET=1 on the CPU, in Triton's interpreter; without it on the GPU, where compute-sanitizer can watch:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python tests/support/triton_attention_cases.py

Shapes are tiny; the interpreter is slow.
"""

from __future__ import annotations

import dataclasses
import os
import sys

import attention_calls
import ml_dtypes
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
import triton_interpreter  # noqa: F401
from attention_oracle import (
    E4M3,
    INT_MAX,
    INT_MIN,
    assert_close_flashmla,
    decode_oracle,
    prefill_oracle,
    unpack_cache,
)
from layout_oracle import TENSOR_SCALE
from sparse_mla_torch.attention.backends.triton import Attention
from sparse_mla_torch.launch.executor import launch_device

from jax_sparse_mla.attention.index_table import TableShape
from jax_sparse_mla.attention.triton import plan as planning
from jax_sparse_mla.attention.triton.launch import CallShape, launches
from jax_sparse_mla.kv_cache.layout import KVLayout, workspace_layout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy_2_4(tensor, scope) -> None:
    """Scalars are arrays of one element to the interpreter (3.6), which numpy no longer takes for int()."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot(self, a, b, d, *_):
    """The interpreter (3.6) multiplies bfloat16 operands as the integers that it stores them as."""
    wide = (
        x.data.view(ml_dtypes.bfloat16).astype(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b)
    )
    return interpreter.TensorHandle(np.matmul(*wide, dtype=np.float32) + d.data, d.dtype.scalar)


_fp_trunc = interpreter.InterpreterBuilder.create_fp_trunc


def _round(self, x, to):
    """The interpreter (3.6) cuts float32 off to bfloat16; devices round to nearest."""
    if to.scalar != tl.bfloat16:
        return _fp_trunc(self, x, to)
    return interpreter.TensorHandle(x.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)


if INTERPRETED:
    interpreter._patch_lang_tensor = _patch_tensor_for_numpy_2_4
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_fp_trunc = _round
# −inf less −inf and log 0 stand in lanes that the kernel then masks.
np.seterr(divide="ignore", invalid="ignore", over="ignore")

# A launch with several blocks for each row of a small case.
SMALL = {"tile": planning.Tile(block_h=16, block_n=16, num_warps=4, num_stages=1), "native_fp8": True}
WITH_FP4 = planning.Tile(block_h=16, block_n=planning.MIN_FP4_BLOCK, num_warps=4, num_stages=1)
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def tensor(x: np.ndarray | None) -> torch.Tensor | None:
    if x is None:
        return None
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(x.copy()).to(DEVICE)


def table(cache, indices, lengths):
    """The tensors of one table, and its facts."""
    if cache is None:
        return None
    layout = getattr(KVLayout, cache.layout)
    shared = 0 if lengths is None else indices.size // (indices.shape[-1] or 1) // lengths.size
    pages = cache.page_size, layout.page_bytes(cache.page_size)
    scope = TableShape(indices.shape[-1], shared, len(cache.data) * cache.page_size, *pages, layout=layout)
    scale = tensor(np.full(1, TENSOR_SCALE)) if layout.has_tensor_scale else None
    return (tensor(cache.data), tensor(indices), tensor(lengths), scale), scope


def attend(layout, case, tables, results, **options):
    """Through the launcher of torch."""
    tensors, scopes = zip(*tables)
    q, sink = tensor(case.q), tensor(case.attn_sink)
    rows, heads = int(np.prod(case.q.shape[:-2])), case.q.shape[-2]
    shape = CallShape(layout, rows, heads, scopes, case.softmax_scale, sink is not None)
    Attention(*launches(shape, launch_device(q.device), **options))(q, tensors, sink, *results)


def small_decode(seed: int, **setting):
    return attention_calls.small_decode(seed, **{"topk": 40, "batch": 2} | setting)


def run_decode(case, num_splits=None, plan=True, **changes):
    """With poisoned outputs: what is not written shows."""
    shape = case.q.shape[:-1]
    out = torch.full((*shape, 512), torch.nan, dtype=torch.bfloat16), torch.full(shape, torch.nan)
    out = tuple(x.to(DEVICE) for x in out)
    layout = getattr(KVLayout, case.cache.layout)
    tables = [table(case.cache, case.indices, case.topk_length)]
    if case.extra_cache is not None:
        tables.append(table(case.extra_cache, case.extra_indices, case.extra_topk_length))
    tile = {"tile": WITH_FP4} if any(scope.layout.fp4_dim for _, scope in tables) else {}
    attend(layout, case, tables, out, **({**SMALL, "num_splits": num_splits, **tile, **changes} if plan else {}))
    return tuple(x.cpu() for x in out)


def check_decode(case, results) -> None:
    out, lse = (x.to(torch.float64).numpy() for x in results)
    expected_out, expected_lse = decode_oracle(case)
    assert_close_flashmla(lse, expected_lse, "decode.lse")
    assert_close_flashmla(out, expected_out, "decode.out")
    assert not np.any(out[np.isneginf(expected_lse)])
    live = np.isfinite(expected_lse)
    if expected_out[live].any():
        error = np.linalg.norm(out[live] - expected_out[live]) / np.linalg.norm(expected_out[live])
        assert error < 5e-3, f"relative error {error:.2e}"


def check_prefill(case, **options) -> None:
    shape = case.q.shape[:-1]
    out, max_logits, lse = (
        torch.full(size, torch.nan, dtype=dtype, device=DEVICE)
        for size, dtype in (((*shape, 512), torch.bfloat16), (shape, torch.float32), (shape, torch.float32))
    )
    scope = TableShape(case.indices.shape[-1], int(case.topk_length is not None), len(case.kv))
    tables = [((tensor(case.kv), tensor(case.indices), tensor(case.topk_length)), scope)]
    layout = workspace_layout(case.q.shape[-1])
    attend(layout, case, tables, (out, lse, max_logits), may_split=False, **options)
    results = out, max_logits, lse
    kinds = ("prefill.out", "prefill.max_logits", "prefill.lse")
    for kind, actual, expected in zip(kinds, results, prefill_oracle(case), strict=True):
        assert_close_flashmla(actual.cpu().to(torch.float64).numpy(), expected, kind)


@check
def every_layout():
    for seed, layout in enumerate(("V4_FP8", "V32_FP8", "V4_BF16", "V32_BF16")):
        case = small_decode(seed, layout=layout, page_size=(64, 61, 2, 64)[seed])
        check_decode(case, run_decode(case, 1))
    newer = ("V41_FP8", "V41_FP8_SPLIT", "NOPE_FP8", "NOPE_BF16", "NOPE_FP8_TENSOR")
    for seed, layout in enumerate(newer):
        case = small_decode(seed, layout=layout, page_size=(64, 61, 2, 64, 61)[seed], extra=(24, 2))
        check_decode(case, run_decode(case, 1))
        if layout.startswith("V41"):
            case.cache = attention_calls.with_unused_bytes(case.cache, 0)
            check_decode(case, run_decode(case, 2, native_fp8=False))


@check
def two_layouts_at_once():
    """Of 80 + 48 columns, in blocks of 32, splits begin and end in either cache, and have blocks of both."""
    for seed, layout in enumerate(("V41_FP8", "V41_FP8_SPLIT")):
        extra = layout.replace("FP8", "FP4")
        sizes = {"topk": 80, "page_size": (64, 61)[seed], "extra": (48, (2, 61)[seed])}
        case = small_decode(seed, layout=layout, extra_layout=extra, **sizes)
        for splits in (1, 2):
            check_decode(case, run_decode(case, splits))
        for cache in ("cache", "extra_cache"):
            setattr(case, cache, attention_calls.with_unused_bytes(getattr(case, cache), 0))
        check_decode(case, run_decode(case, 5, native_fp8=False))
        case.indices, case.topk_length = case.indices[..., :0], None
        check_decode(case, run_decode(case, 1))
    case.cache, case.indices, case.topk_length = case.extra_cache, case.extra_indices, case.extra_topk_length
    case.extra_cache = case.extra_indices = case.extra_topk_length = None  # as JAX hands over an extra cache alone
    check_decode(case, run_decode(case, 1))


@check
def every_pair_of_e2m1_numbers():
    """One key a row, whose softmax weight is 1: the output is the key, with every byte and every scale in it."""
    case = small_decode(20, layout="V41_FP8", extra_layout="V41_FP4", extra=(16, 8), heads=1, batch=1, q_len=9)
    data = np.zeros_like(case.extra_cache.data)
    tokens = data.reshape(-1, 288)  # of an interleaved page, which has no padding
    tokens[:9, :256] = np.arange(9 * 256).reshape(9, 256) * 7 % 256
    scales = np.arange(9 * 32) % 256
    tokens[:9, 256:] = np.where((scales & 0x7F) == 0x7F, 0, scales).reshape(9, 32)
    rows = unpack_cache("V41_FP4", 8, data)
    case.extra_cache = dataclasses.replace(case.extra_cache, data=data, rows=rows)
    case.q[:], case.indices[:] = 0, -1
    case.extra_indices[:], case.extra_topk_length, case.attn_sink = -1, None, None
    case.extra_indices[0, :, 5] = np.arange(9)
    for native in (True, False):
        out, _ = run_decode(case, 1, native_fp8=native)
        np.testing.assert_array_equal(out[0, :, 0].float().numpy(), rows[:9].astype(np.float32))


@check
def the_integer_e4m3_decode():
    for layout in ("V4_FP8", "V32_FP8"):
        case = small_decode(4, layout=layout)
        native, integer = run_decode(case, 1), run_decode(case, 1, native_fp8=False)
        assert torch.equal(native[0], integer[0]) and torch.equal(native[1], integer[1])


@check
def every_e4m3_byte_decodes_by_integers():
    """One key a row, whose softmax weight is 1: the output is the key, so every byte shows."""
    case = small_decode(5, heads=1, batch=1, q_len=4, topk=16, lengths="none", sink=False)
    data = np.zeros_like(case.cache.data)
    row = np.arange(4 * 448, dtype=np.int64).reshape(4, 448) % 256  # each of the four rows has all bytes,
    row[(row & 0x7F) == 0x7F] = 0  # but NaN, which would spread through q · k
    data[0, : 4 * 576].reshape(4, 576)[:, :448] = row
    data[0, 64 * 576 :].reshape(-1, 8)[:4, :7] = 127 + 3  # scale 2^3
    case.cache = dataclasses.replace(case.cache, data=data)
    case.q[:] = 0
    case.indices[:] = -1
    case.indices[0, :, 7] = np.arange(4)
    out, _ = run_decode(case, 1, native_fp8=False)
    wide = row.astype(np.uint8).view(E4M3).astype(np.float32) * 8
    np.testing.assert_array_equal(out[0, :, 0, :448].float().numpy(), wide)
    for nan in (0x7F, 0xFF):
        data[0, 5] = nan
        out, _ = run_decode(case, 1, native_fp8=False)
        assert torch.all(torch.isnan(out[0, 0])) and not torch.any(torch.isnan(out[0, 1:]))


@check
def splits_join():
    for seed, splits in ((6, 2), (7, 3), (8, 9)):  # 40 + 24 columns are 5 blocks: with 9 splits some have none
        case = small_decode(seed, extra=(24, 2))
        check_decode(case, run_decode(case, splits))


@check
def splits_of_a_single_cache_and_without_a_sink():
    case = small_decode(9, sink=False, layout="V32_FP8", topk=64, lengths="batch")
    check_decode(case, run_decode(case, 4))


@check
def what_the_planner_chooses():
    for seed, lengths in ((10, "none"), (11, "batch")):
        case = small_decode(seed, extra=(24, 64), lengths=lengths, extra_lengths=lengths, batch=1)
        check_decode(case, run_decode(case, plan=False))


@check
def heads_past_a_tile():
    for heads in (1, 16, 17):
        case = small_decode(12, heads=heads, batch=1, q_len=2)
        for splits in (1, 2):
            check_decode(case, run_decode(case, splits))
    case = small_decode(17, heads=65, batch=1, q_len=1, extra=(24, 61))
    check_decode(case, run_decode(case, 1, tile=planning.Tile(64, 64, 8, 2)))  # wgmma, on SM90


@check
def large_scores():
    case = small_decode(13, hot=True, extra=(16, 61))
    check_decode(case, run_decode(case, 2))


@check
def rows_without_a_key():
    for splits in (1, 3):
        case = small_decode(14, extra=(16, 2), batch=3)
        case.attn_sink = np.array((np.inf, -np.inf, 0.25, -3e38), np.float32)
        hostile = np.array([-1, -7, INT_MIN, INT_MAX, len(case.cache.rows)], np.int32)
        case.indices[0] = np.resize(hostile, (2, 40))
        case.indices[1:] = 0
        case.extra_indices[:] = len(case.extra_cache.rows)
        case.topk_length = np.array([[16, INT_MAX], [0, -1], [INT_MIN, 0]], np.int32)
        case.extra_topk_length = np.full((3, 2), 16, np.int32)
        case.q[2] = np.nan
        out, lse = run_decode(case, splits)
        assert torch.all(out == 0) and torch.all(torch.isneginf(lse))


@check
def nothing_to_attend_to():
    case = small_decode(15, lengths="none")
    case.indices = case.indices[..., :0]
    check_decode(case, run_decode(case, 1))


@check
def prefill():
    for seed, (dim, heads, hot) in enumerate(((512, 3, False), (576, 17, False), (512, 1, True))):
        case = attention_calls.small_prefill(seed, q_len=4, dim=dim, heads=heads, hot=hot, sizes=(40, 24))
        check_prefill(case, **SMALL)
    check_prefill(attention_calls.small_prefill(3, q_len=4, dim=576, heads=2, sizes=(40, 20)))
    case.kv = case.kv[:0]
    check_prefill(case)
    case.indices = case.indices[:, :0]
    check_prefill(case)


if __name__ == "__main__":
    chosen = [function for function in CHECKS if len(sys.argv) == 1 or function.__name__ in sys.argv[1:]]
    for function in chosen:
        function()
        print(function.__name__, flush=True)
    print(f"{len(chosen)} checks passed")

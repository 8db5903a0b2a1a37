"""The SM90 kernels of the indexer's logits, as functions of a case: launched by torch on a GPU of theirs, elsewhere
compiled for the host, where the threads of a block take turns (`host_cuda/sm90_host.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from host_build import GUARD, aligned, compiled_once, poisoned
from sparse_mla_torch.operations import indexer as torch_indexer
from triton_device import DEVICE, ON_GPU, tensor

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.launch import build


def logits_function(index_format: IndexFormat, tmp_path_factory) -> Callable[..., np.ndarray]:
    """`logits(case, *, fill=True)`: q, weights, cache, page table and lengths to logits, in a poisoned result. On the
    host also `blocks` of the launch, and the `seed` of an order of warps."""
    if ON_GPU:
        if torch.cuda.get_device_capability() != (9, 0) or build.module("index_logits", "90a") is None:
            pytest.skip("needs SM90, and the kernel's binary")
        return lambda case, **options: _on_the_device(index_format, case, **options)
    return logits_on_host(index_format, tmp_path_factory)


def logits_on_host(index_format: IndexFormat, tmp_path_factory, *defined: str) -> Callable[..., np.ndarray]:
    """`logits_function` on the host, with macros defined."""
    library = compiled_once("index_logits", "index_logits", tmp_path_factory, defined=defined)
    return partial(_on_the_host, library, index_format)


def _shape_of_logits(case: tuple, index_format: IndexFormat) -> tuple[int, int]:
    q, _, cache, table, _ = case
    return len(q), table.shape[1] * (cache.shape[1] // index_format.key_bytes)


def _on_the_device(index_format: IndexFormat, case: tuple, *, fill: bool = True, rows_of_call: int | None = None):
    q, _, cache, *_ = case
    rows, out = rows_of_call or len(q), torch.full(_shape_of_logits(case, index_format), float("nan"), device=DEVICE)
    sizes = rows, q.shape[1], cache.shape[1] // index_format.key_bytes
    assert torch_indexer._cuda_kernel(out.device, index_format == IndexFormat.FP4, *sizes)
    torch_indexer.launch_logits(*map(tensor, case), out, rows_of_call=rows, fill=fill, format=index_format)
    return out.cpu().numpy()


def _on_the_host(
    library: ctypes.CDLL, index_format: IndexFormat, case: tuple, *, fill: bool = True, blocks: int = 3, seed: int = 0
) -> np.ndarray:
    q, weights, cache, table, lengths = (aligned(x) for x in case)
    out, guard = poisoned(_shape_of_logits(case, index_format), np.float32)
    fp4 = index_format == IndexFormat.FP4
    page_size = cache.shape[1] // index_format.key_bytes
    heads = [q.shape[1]] if fp4 else []
    sizes = len(q), *heads, table.shape[1], page_size, len(cache), fill, blocks
    function = library.fp4_logits_on_host if fp4 else library.index_logits_on_host
    arrays = (ctypes.c_void_p(x.ctypes.data) for x in (q, weights, cache, table, lengths))
    function(*arrays, *sizes, ctypes.c_uint(seed), ctypes.c_void_p(out.ctypes.data))
    assert (guard == GUARD).all(), "something was written behind the logits"
    return out

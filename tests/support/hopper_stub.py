"""A stand-in for the library of `kernels_cuda/sparse_decode/` on the CPU: its plan, and its launch by the oracle.

What it is handed are addresses, as the CUDA library is: it reads and writes the memory that these name.
"""

from __future__ import annotations

import ctypes
import functools
import pickle

import numpy as np
import torch
from attention_oracle import attend, unpack_cache

from jax_sparse_mla.attention.hopper.decode_plan import (
    ALWAYS,
    AS_LENGTHS_SAY,
    V4,
    V4_BF16,
    V32,
    V32_BF16,
    V41,
    V41_FP4,
)

PLANNED: list[dict] = []
RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p)
STATUS = [0]  # what a launch answers
# By the kernel's format: layouts of the first and of the second cache, of which a row's stride chooses one.
LAYOUTS = {
    V4: (["V4_FP8"],) * 2,
    V32: (["V32_FP8"],) * 2,
    V41: (["V41_FP8", "V41_FP8_SPLIT"],) * 2,
    V41_FP4: (["V41_FP8", "V41_FP8_SPLIT"], ["V41_FP4", "V41_FP4_SPLIT"]),
    V4_BF16: (["V4_BF16"],) * 2,
    V32_BF16: (["V32_BF16"],) * 2,
}
# Of a layout, with a page size P: a row's stride, where scales begin, their stride, and a token's bytes.
PLACES = {
    "V4_FP8": lambda P: (576, 576 * P, 8, 584),
    "V32_FP8": lambda P: (656, 512, 656, 656),
    "V41_FP8": lambda P: (528, 512, 528, 528),
    "V41_FP8_SPLIT": lambda P: (512, 512 * P, 16, 528),
    "V41_FP4": lambda P: (288, 256, 288, 288),
    "V41_FP4_SPLIT": lambda P: (256, 256 * P, 32, 288),
    "V4_BF16": lambda P: (1024, 0, 1024, 1024),
    "V32_BF16": lambda P: (1152, 0, 1152, 1152),
}


def memory(address: int, shape: tuple[int, ...], dtype, strides: tuple[int, ...] | None = None) -> np.ndarray:
    """The array that begins at an address; strides in elements."""
    dtype = np.dtype(dtype)
    strides = strides or np.cumprod((1, *shape[:0:-1]))[::-1]
    size = sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1
    held = (ctypes.c_char * (int(size) * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, held, 0, [int(x) * dtype.itemsize for x in strides])


def bf16(address: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(memory(address, shape, np.int16)).view(torch.bfloat16)


def plan(rows, heads, kind, table, extra_table, scale, empty_lse, tile, groups, cuts, device) -> bytes:
    names = ("rows", "heads", "format", "tables", "scale", "empty_lse", "tile", "groups", "cuts", "device")
    values = (rows, heads, kind, (list(table), list(extra_table)), scale, empty_lse, tile, groups, cuts, device)
    PLANNED.append(dict(zip(names, values)))
    made = pickle.dumps(PLANNED[-1])
    return len(made).to_bytes(8, "little") + made


def keys_of(planned, row: int, number: int, data: int, indices: int, lengths: int) -> np.ndarray:
    """Float64 rows of the cache that a query row reads in one table."""
    topk, stride, rows_per_length, num_slots, page_size, page_bytes, *places = planned["tables"][number]
    assert bool(lengths) == (rows_per_length > 0)
    span = topk
    if lengths:
        every = memory(lengths, (planned["rows"] // rows_per_length,), np.int32)
        span = int(np.clip(every[row // rows_per_length], 0, topk))
    slots = memory(indices, (planned["rows"], topk), np.int32, (stride, 1))[row, :span]
    (layout,) = [x for x in LAYOUTS[planned["format"]][number] if list(PLACES[x](page_size)[:3]) == places]
    width = PLACES[layout](page_size)[3]
    pages = memory(data, (num_slots // page_size, page_size * width), np.uint8, (page_bytes, 1))
    return unpack_cache(layout, page_size, pages)[slots[(slots >= 0) & (slots < num_slots)]]


@RUN
def run(planned, addresses, stream) -> int:
    if STATUS[0]:
        return STATUS[0]
    size = int.from_bytes(ctypes.string_at(planned, 8), "little")
    planned = pickle.loads(ctypes.string_at(planned + 8, size))
    q, *tables, sink, out, lse, scratch = addresses[:11]
    rows, heads = planned["rows"], planned["heads"]
    assert bool(scratch) == (planned["cuts"] in (ALWAYS, AS_LENGTHS_SAY))
    queries = bf16(q, (rows, heads, 576 if planned["format"] in (V32, V32_BF16) else 512)).double().numpy()
    sink = memory(sink, (heads,), np.float32) if sink else None
    out, lse = bf16(out, (rows, heads, 512)), memory(lse, (rows, heads), np.float32)
    for row in range(rows):
        keys = [
            keys_of(planned, row, i, *tables[3 * i : 3 * i + 3])
            for i, table in enumerate(planned["tables"])
            if table[0]
        ]
        values, _, found = attend(queries[row], np.concatenate(keys), planned["scale"], sink)
        out[row] = torch.from_numpy(values).bfloat16()
        lse[row] = np.where(np.isneginf(found), planned["empty_lse"], found)
    return 0


@functools.cache
def library() -> object:
    """The module that `build.module("sparse_decode", "90a")` loads."""
    functions = {"sparse_decode_plan": plan, "sparse_decode_run": lambda: ctypes.cast(run, ctypes.c_void_p).value}
    return type("Library", (), {name: staticmethod(function) for name, function in functions.items()})

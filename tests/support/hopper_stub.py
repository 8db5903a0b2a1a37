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

PLANNED: list[dict] = []
RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p)
STATUS = [0]  # what a launch answers


def memory(address: int, shape: tuple[int, ...], dtype, strides: tuple[int, ...] | None = None) -> np.ndarray:
    """The array that begins at an address; strides in elements."""
    dtype = np.dtype(dtype)
    strides = strides or np.cumprod((1, *shape[:0:-1]))[::-1]
    size = sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1
    held = (ctypes.c_char * (int(size) * dtype.itemsize)).from_address(address)
    return np.ndarray(shape, dtype, held, 0, [int(x) * dtype.itemsize for x in strides])


def bf16(address: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(memory(address, shape, np.int16)).view(torch.bfloat16)


def plan(rows, heads, dim, table, extra_table, scale, empty_lse, tile, groups, cuts, device) -> bytes:
    names = ("rows", "heads", "dim", "tables", "scale", "empty_lse", "tile", "groups", "cuts", "device")
    values = (rows, heads, dim, (list(table), list(extra_table)), scale, empty_lse, tile, groups, cuts, device)
    PLANNED.append(dict(zip(names, values)))
    made = pickle.dumps(PLANNED[-1])
    return len(made).to_bytes(8, "little") + made


def keys_of(planned, row: int, table, data: int, indices: int, lengths: int) -> np.ndarray:
    """Float64 rows of the cache that a query row reads in one table."""
    topk, stride, rows_per_length, num_slots, page_size, page_bytes = table
    assert bool(lengths) == (rows_per_length > 0)
    span = topk
    if lengths:
        every = memory(lengths, (planned["rows"] // rows_per_length,), np.int32)
        span = int(np.clip(every[row // rows_per_length], 0, topk))
    slots = memory(indices, (planned["rows"], topk), np.int32, (stride, 1))[row, :span]
    width, layout = (656, "V32_FP8") if planned["dim"] == 576 else (584, "V4_FP8")
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
    assert bool(scratch) == (planned["cuts"] != 0)
    queries = bf16(q, (rows, heads, planned["dim"])).double().numpy()
    sink = memory(sink, (heads,), np.float32) if sink else None
    out, lse = bf16(out, (rows, heads, 512)), memory(lse, (rows, heads), np.float32)
    for row in range(rows):
        keys = [
            keys_of(planned, row, table, *tables[3 * i : 3 * i + 3])
            for i, table in enumerate(planned["tables"])
            if table[0]
        ]
        values, _, found = attend(queries[row], np.concatenate(keys), planned["scale"], sink)
        out[row] = torch.from_numpy(values).bfloat16()
        lse[row] = np.where(np.isneginf(found), planned["empty_lse"], found)
    return 0


@functools.cache
def library() -> object:
    """What `build.sparse_decode_module` gives."""
    functions = {"sparse_decode_plan": plan, "sparse_decode_run": lambda: ctypes.cast(run, ctypes.c_void_p).value}
    return type("Library", (), {name: staticmethod(function) for name, function in functions.items()})

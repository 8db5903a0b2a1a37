"""Triton's interpreter with the bounds of its tensors: what a kernel reads and writes must lie in one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from triton.runtime import interpreter


@contextlib.contextmanager
def within(*tensors: torch.Tensor) -> Iterator[list[int]]:
    """Loads and stores of kernels in the interpreter fail where their mask lets one leave all of the tensors.

    Gives a list that holds, after each access, the number of elements that it touched.
    """
    starts = np.array([x.data_ptr() for x in tensors], np.uint64)
    ends = starts + np.array([x.numel() * x.element_size() for x in tensors], np.uint64)
    builder, touched = interpreter.InterpreterBuilder, []

    def check(what, pointers, mask):
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.uint64)
        inside = ((first[:, None] >= starts) & (first[:, None] + np.uint64(size) <= ends)).any(axis=1)
        assert inside.all(), f"a {what} of {size} bytes leaves the tensors at {(~inside).sum()} of {len(first)} places"
        touched.append(len(first))

    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(self, pointers, mask, *others):
        check("load", pointers, mask)
        return load(self, pointers, mask, *others)

    def checked_store(self, pointers, value, mask, *others):
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    try:
        yield touched
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store

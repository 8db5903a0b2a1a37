"""Metadata as torch tensors on the device under test, and results of both frameworks compared to the bit."""

from __future__ import annotations

import jax
import numpy as np
import torch
import triton_interpreter  # noqa: F401

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
POISON = 0x7B7B7B7B


def tensor(x) -> torch.Tensor:
    return torch.from_numpy(np.array(x, np.int64).astype(np.int32)).to(DEVICE)


def poison(tree):
    for x in jax.tree.leaves(tree):
        x.fill_(POISON)
    return tree


def assert_same(actual, expected) -> None:
    """Leaf by leaf: structure, dtype, shape, every element."""
    actual, structure = jax.tree_util.tree_flatten_with_path(actual)
    expected, wanted = jax.tree_util.tree_flatten_with_path(expected)
    assert structure == wanted
    for (path, x), (_, want) in zip(actual, expected):
        x, want = (y.cpu().numpy() if isinstance(y, torch.Tensor) else np.asarray(y) for y in (x, want))
        assert x.dtype == want.dtype, path
        np.testing.assert_array_equal(x, want, err_msg=jax.tree_util.keystr(path))

"""The index logits on SM90 by `kernels_cuda/index_logits/`, as XLA calls them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS
from jax_sparse_mla.launch import build, tvm


def index_logits(execute: Any, *arrays: jax.Array, pages: tuple[int, int] | None, fill: bool, fp4: bool) -> jax.Array:
    """float32 `[rows, capacity]`; arguments as in `indexer/triton.py`.

    Without `fill` columns are unwritten from the end of the block that holds a row's last key: of 256, over FP4 keys
    128.
    """
    del execute  # TVM FFI launches it
    q, _, index_cache, page_table, _ = arrays
    key_bytes = (IndexFormat.FP4 if fp4 else IndexFormat.FP8).key_bytes
    rows, capacity = q.shape[0], page_table.shape[1] * (index_cache.shape[1] // key_bytes)
    first_page, num_pages = pages or (0, index_cache.shape[0])
    arguments = [*map(tvm.Buffer, range(5)), num_pages, first_page, fill, tvm.Buffer(5)]
    out = jax.ShapeDtypeStruct((rows, capacity), jnp.float32)
    function = "index_logits_fp4" if fp4 else "index_logits"
    kernel = build.Binary(*LOGITS_BACKENDS["hopper"].binaries["index_logits"])
    return tvm.call(kernel, function, arguments, [out], *arrays)[0]

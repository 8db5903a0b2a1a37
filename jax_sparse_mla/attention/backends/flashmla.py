"""FlashMLA's kernels from jitted JAX: SM90 and SM100, FP8 paged decode and bf16 prefill.

They come as torch operators, from `sgl-flash-mla` or, where that is absent, from `sglang-kernel`;
`torch_operator.torch_call` runs them inside XLA programs. The operators check little, and some of their checks end the
process. So arguments are made valid before the call, and results are converted to this package's conventions after it:

* Heads are padded to 64 or 128. The rows of a batch (batch · q_len) are requests of one query token each: lengths are
  per query token, and one schedule serves any split of the rows into batch and q_len.
* The decode kernel knows no invalid index but −1 and has no bounds check, and a sink below −2.36e38 makes NaN of a
  split row without keys: `_sanitise` rewrites the index tables, lengths and sinks in one launch.
* An empty row has lse +inf there; sglang-kernel's prefill statistics are base 2.
* On SM90 each call makes its split-KV schedule by `flashmla_schedule`, which has no limit on the batch; FlashMLA's own
  has one.

The operators allocate what they return with torch's allocator, and `torch_call` copies it into XLA's buffers: leave
torch some of the GPU's memory (XLA_PYTHON_CLIENT_MEM_FRACTION). These calls are never part of a CUDA graph; on an H200
each takes about 36 µs of the host (V4, two caches): 23 in the operator, 7 for the two copies, 5 for the tensors. So a
decode step of few rows, whose kernels take less, is bound by the host.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse_mla.attention.index_table import V_DIM, IndexTable
from jax_sparse_mla.attention.merge import apply_attn_sink, merge_attention
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from jax_sparse_mla.launch import torch_operator
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import executor
from jax_sparse_mla.metadata.schedules import flashmla_schedule
from jax_sparse_mla.packages import why_not

DECODE_COLUMNS = 64  # the kernels scan whole blocks: topk is a multiple
PREFILL_COLUMNS = 128

# exp of this is 0 as exp(−inf) is, and its product with log2(e) is finite.
LEAST_SINK = -1e30

# The decode operator allocates (rows + partitions) · heads · 512 floats for partial results on every call, and counts
# them in int32. More rows than fit in this go through in several calls.
MAX_ACCUMULATOR_BYTES = 1 << 30


# --- the operators ------------------------------------------------------------------------------------------------


class Library(NamedTuple):
    namespace: str  # in torch.ops
    log2_prefill: bool  # its prefill returns max_logits and lse in base 2


def unready(phase: str, framework: str) -> str | None:
    """Why its operators cannot be called here although its packages are found; `library` loads them."""
    if _files("flash_mla", "_C_legacy*.so") and not _sgl_kernel_files() and (why := why_not("flash_mla")):
        return why
    if not (_files("flash_mla", "_C_legacy*.so") or _sgl_kernel_files()):
        return "flash_mla or sgl_kernel is there without the kernels for SM90 and for the V3.2 and V4 caches"
    if framework == "jax" and not torch_operator.available():
        return "calling its operators from XLA needs a C++ compiler"
    return None


def _files(package: str, pattern: str) -> list[Path]:
    """Files beside a package's modules."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [path for folder in folders for path in Path(folder).glob(pattern)]


def _sgl_kernel_files() -> list[Path]:
    return _files("sgl_kernel", "flashmla_ops*.so")


@functools.cache
def library() -> Library:
    """Loads the operators, from the first package that has them."""
    failures = []
    for load in (_load_flash_mla, _load_sgl_kernel):
        try:
            return load()
        except (ImportError, OSError, RuntimeError) as error:
            failures.append(f"{load.__name__.removeprefix('_load_')}: {error}")
    raise RuntimeError(
        f"FlashMLA cannot be loaded ({'; '.join(failures)}); JAX_SPARSE_MLA_BACKEND names another backend"
    )


def _load_flash_mla() -> Library:
    import flash_mla

    if not hasattr(flash_mla, "has_legacy") or not flash_mla.has_legacy():
        raise ImportError("this build lacks the kernels for SM90 and for the V3.2 and V4 caches")
    return Library("flash_mla_legacy", log2_prefill=False)


def _load_sgl_kernel() -> Library:
    import torch

    libraries = _sgl_kernel_files()
    if not libraries:
        raise ImportError("not installed, or without flashmla_ops")
    torch.ops.load_library(str(libraries[0]))
    return Library("sgl_kernel", log2_prefill=True)


# --- decode -------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("softmax_scale", "assume_valid_indices", "batch_invariant"))
def decode(
    q: jax.Array,  # [batch, q_len, heads, qk_dim]
    tables: Sequence[IndexTable],  # one or two
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    assume_valid_indices: bool = False,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """out bfloat16 `[batch, q_len, heads, v_dim]`, lse float32 `[batch, q_len, heads]`."""
    del batch_invariant  # its record refuses such calls
    batch, q_len, heads, qk_dim = q.shape
    tables = [table.rows() for table in tables]
    q = q.reshape(batch * q_len, heads, qk_dim)
    attend = functools.partial(_decode_rows, softmax_scale=softmax_scale, assume_valid_indices=assume_valid_indices)
    if len(tables) == 2 and tables[0].cache.layout == KVLayout.V32_FP8:  # its kernel reads one cache
        parts = [attend(q, [table], None) for table in tables]
        out, lse = merge_attention(*zip(*parts))
        out = out if attn_sink is None else apply_attn_sink(out, lse, attn_sink)
    else:
        out, lse = attend(q, tables, attn_sink)
    return out.reshape(batch, q_len, heads, V_DIM), lse.reshape(batch, q_len, heads)


def _decode_rows(
    q: jax.Array,  # [rows, heads, qk_dim]
    tables: list[IndexTable],
    attn_sink: jax.Array | None,
    *,
    softmax_scale: float,
    assume_valid_indices: bool,
) -> tuple[jax.Array, jax.Array]:
    """out `[rows, heads, 512]`, lse `[rows, heads]`, in as many calls as the accumulators need."""
    rows, heads, _ = q.shape
    device = DeviceInfo.current()
    chunk = MAX_ACCUMULATOR_BYTES // (padded_heads(heads) * V_DIM * 4) - device.sm_count
    pieces = []
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        tables_of_part = [
            IndexTable(cache, indices[part], lengths if lengths is None else lengths[part])
            for cache, indices, lengths in tables
        ]
        schedule = _schedule(tables_of_part, q[part].shape, device)
        static = schedule, softmax_scale, assume_valid_indices
        pieces.append(_decode_call(q[part], tables_of_part, attn_sink, *static))
    return pieces[0] if len(pieces) == 1 else tuple(jnp.concatenate(x) for x in zip(*pieces))


def _schedule(
    tables: Sequence[IndexTable], q_shape: tuple[int, ...], device: DeviceInfo
) -> tuple[jax.Array, jax.Array] | None:
    """The split of these rows, each a request of one token; None on SM100, whose partitions the operator plans."""
    if device.compute_capability is not None and device.compute_capability[0] == 10:
        return None
    rows, heads, _ = q_shape
    # Each 64 heads of a row have a thread block of their own, and work side by side. A CPU has no multiprocessors.
    parts = max(device.sm_count // (padded_heads(heads) // 64), 1)
    topk, *extra_topk = (table.indices.shape[1] for table in tables)
    build = functools.partial(flashmla_schedule, batch=rows, topk=topk, extra_topk=sum(extra_topk), num_sm_parts=parts)
    lengths = [table.lengths for table in tables]
    if tables[0].cache.layout == KVLayout.V32_FP8 or all(length is None for length in lengths):
        with jax.ensure_compile_time_eval():  # this depends on the shape alone: a constant of the program
            return build(None)
    return build(lengths[0], extra_topk_length=lengths[1] if extra_topk else None)


def _decode_call(
    q: jax.Array,
    tables: list[IndexTable],
    attn_sink: jax.Array | None,
    schedule: tuple[jax.Array, jax.Array] | None,
    softmax_scale: float,
    assume_valid_indices: bool,
) -> tuple[jax.Array, jax.Array]:
    rows, heads, qk_dim = q.shape
    padded = padded_heads(heads)
    if not assume_valid_indices or any(table.indices.shape[1] % DECODE_COLUMNS for table in tables):
        tables, attn_sink = _sanitise(tables, attn_sink, padded)
    elif attn_sink is not None:
        attn_sink = _pad_heads(attn_sink[None], padded)[0]
    if tables[0].cache.layout == KVLayout.V32_FP8:  # takes no lengths: what lies beyond them is −1
        tables = [table._replace(lengths=None) for table in tables]
    arguments = {
        "q": _pad_heads(q, padded).reshape(rows, 1, padded, qk_dim),
        "attn_sink": attn_sink,
        "tile_scheduler_metadata": None if schedule is None else schedule[0],
        "num_splits": None if schedule is None else schedule[1],
        "extra_kv": None,
        "extra_indices": None,
        "extra_topk_length": None,
        "d_v": V_DIM,
        "sm_scale": softmax_scale,
    }
    for prefix, (cache, indices, lengths) in zip(("", "extra_"), tables):
        arguments[f"{prefix}kv"] = _pages(cache)
        arguments[f"{prefix}indices"] = indices[:, None, :]
        arguments[f"{prefix}topk_length"] = lengths
    results = [
        jax.ShapeDtypeStruct((rows, heads, V_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, padded), jnp.float32),
    ]
    out, lse = torch_operator.torch_call(f"{library().namespace}::sparse_decode_fwd", arguments, results)
    return out, _natural_lse(lse[:, :heads], log2=False)


def _pages(cache: PagedKV) -> torch_operator.Strided:
    """The operator's view, `[pages, page_size, 1, bytes per token]`; what pads a page is in the stride."""
    width = cache.layout.bytes_per_token
    sizes, page_bytes = (cache.num_pages, cache.page_size, 1, width), cache.data.shape[1]
    return torch_operator.Strided(
        cache.data, sizes, (page_bytes, width, width, 1), offset=cache.first_page * page_bytes
    )


def _sanitise(
    tables: list[IndexTable], attn_sink: jax.Array | None, padded: int
) -> tuple[list[IndexTable], jax.Array | None]:
    """−1 for what names no slot or lies beyond a length, lengths clipped, columns padded to whole blocks; the sink."""
    num_slots = [table.cache.num_slots for table in tables]
    widths = [math.ceil(table.indices.shape[1] / DECODE_COLUMNS) * DECODE_COLUMNS for table in tables]

    def kernel(pairs, sink):
        from jax_sparse_mla.attention.triton import sanitise

        shapes = [
            sanitise.Table(index.shape[1], width, slots, lengths is not None)
            for (index, lengths), width, slots in zip(pairs, widths, num_slots)
        ]
        heads = 0 if sink is None else sink.shape[0]
        launch = sanitise.sanitise(
            pairs[0][0].shape[0], shapes, heads=heads, padded_heads=padded, least_sink=LEAST_SINK
        )
        arrays = [x for pair in (*pairs, (None, None))[:2] for x in pair]
        *outputs, out_sink = executor()(launch, [*arrays, sink])
        results = zip(pairs, outputs[::2], outputs[1::2])
        safe = [(index, None if lengths is None else clipped) for (_, lengths), index, clipped in results]
        return safe, None if sink is None else out_sink

    def plain(pairs, sink):
        if sink is not None:
            sink = _pad_heads(jnp.maximum(sink, LEAST_SINK)[None], padded)[0]
        return [sanitise_reference(*pair, *sizes) for pair, *sizes in zip(pairs, num_slots, widths)], sink

    safe, attn_sink = dispatch(kernel, plain, [(table.indices, table.lengths) for table in tables], attn_sink)
    return [IndexTable(table.cache, *pair) for table, pair in zip(tables, safe)], attn_sink


def sanitise_reference(
    indices: jax.Array, lengths: jax.Array | None, num_slots: int, width: int
) -> tuple[jax.Array, jax.Array | None]:
    """`_sanitise` of one table in plain JAX: indices `[rows, width]` and lengths."""
    topk = indices.shape[1]
    valid = (indices >= 0) & (indices < num_slots)
    if lengths is not None:
        lengths = jnp.clip(lengths, 0, topk)
        valid &= jnp.arange(topk) < lengths[:, None]
    return jnp.pad(jnp.where(valid, indices, -1), ((0, 0), (0, width - topk)), constant_values=-1), lengths


# --- prefill ------------------------------------------------------------------------------------------------------
# Its kernel checks every index against kv_len: nothing to sanitise.


@functools.partial(jax.jit, static_argnames=("softmax_scale", "batch_invariant"))
def prefill(
    q: jax.Array,  # [q_len, heads, qk_dim]
    kv: jax.Array,  # [kv_len, qk_dim]
    indices: jax.Array,  # [q_len, topk] rows of kv
    topk_length: jax.Array | None,  # [q_len]
    attn_sink: jax.Array | None,  # [heads]
    *,
    softmax_scale: float,
    batch_invariant: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out bfloat16 `[q_len, heads, v_dim]`, max_logits and lse float32 `[q_len, heads]`."""
    del batch_invariant  # a row's result never depends on the others
    (rows, heads, _), topk = q.shape, indices.shape[1]
    package, padded = library(), padded_heads(heads)
    if topk_length is not None:
        topk_length = jnp.clip(topk_length, 0, topk)
        capability = DeviceInfo.current().compute_capability
        if capability is not None and capability[0] == 10:  # its kernel reads rows beyond the length, NaN included
            indices = jnp.where(jnp.arange(topk) < topk_length[:, None], indices, -1)
    indices = jnp.pad(indices, ((0, 0), (0, -topk % PREFILL_COLUMNS)), constant_values=-1)
    arguments = {
        "q": _pad_heads(q, padded),
        "kv": kv[:, None, :],
        "indices": indices[:, None, :],
        "sm_scale": softmax_scale,
        "d_v": V_DIM,
        "attn_sink": None if attn_sink is None else _pad_heads(attn_sink[None], padded)[0],
        "topk_length": topk_length,
    }
    statistics = jax.ShapeDtypeStruct((rows, padded), jnp.float32)
    results = [jax.ShapeDtypeStruct((rows, heads, V_DIM), jnp.bfloat16), statistics, statistics]
    out, max_logits, lse = torch_operator.torch_call(f"{package.namespace}::sparse_prefill_fwd", arguments, results)
    max_logits = max_logits[:, :heads] * (math.log(2) if package.log2_prefill else 1)
    return out, max_logits, _natural_lse(lse[:, :heads], package.log2_prefill)


# --- shared -------------------------------------------------------------------------------------------------------


def _natural_lse(lse: jax.Array, log2: bool) -> jax.Array:
    lse = jnp.where(lse == jnp.inf, -jnp.inf, lse)  # the operators' lse of an empty row
    return lse * math.log(2) if log2 else lse


def padded_heads(heads: int) -> int:
    return 64 if heads <= 64 else 128


def _pad_heads(x: jax.Array, padded: int) -> jax.Array:
    """`[rows, heads, ...]` with zeros behind the heads."""
    return jnp.pad(x, ((0, 0), (0, padded - x.shape[1]), *((0, 0),) * (x.ndim - 2)))

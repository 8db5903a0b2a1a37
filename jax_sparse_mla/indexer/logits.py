"""The indexer of the models: its key cache, its quantiser, and the logits from which the top-k selects.

The index-K cache is a uint8 array `[num_pages, page_size * 132]`. A page holds `page_size * 128` bytes of
float8_e4m3fn keys (token `offset` at `offset * 128`), then one little-endian float32 scale per token. This is
SGLang's fp8 index-K page and what DeepGEMM's paged logits read. Slots are `page * page_size + offset`. `IndexKeys` has
the pages of several layers in one array, or keys of another format (`IndexFormat`: V4.1's FP4 keys of 68 bytes); each
function takes the view of one layer where it takes a cache.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_sparse_mla import sharding
from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, UINT8, ArgumentChecks
from jax_sparse_mla.backend import first_able, load
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indexer.keys import (
    INDEX_DIM,
    SCALE_BYTES,
    IndexFormat,
    decode_keys,
    encode_keys,
    keys_of_bytes,
    quantize_fp8,
    round_queries_to_fp4,
)
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS, Call
from jax_sparse_mla.kv_cache.pool import LayerPool, layer_shape
from jax_sparse_mla.kv_cache.windows import gather_windows, locate_slots, scatter_windows, write_own_pages
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.transforms import shared, varying_alike
from jax_sparse_mla.launch.triton_call import executor, launching

INDEX_K_BYTES = IndexFormat.FP8.key_bytes  # per token

# Bytes in one step of plain `index_logits`: the gathered keys, and every head's scores against them.
CHUNK_BYTES = 32 << 20

# Rows at a time where none may depend on how many there are: fewer than those from which other kernels serve.
INVARIANT_ROWS = 128


@pytree_dataclass
class IndexKeys(LayerPool):
    """The index-K caches of several layers in one array; `layer(i)` is the view of one, see `PagedKV`.

    Attributes:
      data: uint8 `[num_layers * num_pages, page_size * format.key_bytes]`.
      num_layers: how many layers' pages `data` holds, one layer after the other (static).
      layer_index: the layer of a view; None for all of them (static).
      format: of the keys (static). A bare array has FP8 keys of 132 bytes.
    """

    data: jax.Array
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)
    format: IndexFormat = static(default=IndexFormat.FP8)

    @classmethod
    def zeros(
        cls, num_pages: int, page_size: int, *, num_layers: int = 1, format: IndexFormat = IndexFormat.FP8
    ) -> IndexKeys:
        """`num_pages` zeroed pages of `page_size` keys for each of `num_layers` layers."""
        check = ArgumentChecks("IndexKeys.zeros")
        if not isinstance(format, IndexFormat):
            raise TypeError(f"IndexKeys.zeros: format must be an IndexFormat, got {type(format).__name__}")
        page_bytes = check.static_int("page_size", page_size, minimum=1) * format.key_bytes
        shape = layer_shape(check, num_layers, ("num_pages", num_pages), page_bytes)
        return cls(data=jnp.zeros(shape, jnp.uint8), num_layers=num_layers, format=format)

    @property
    def num_pages(self) -> int:
        """Pages of a layer."""
        return self.data.shape[0] // self.num_layers

    @property
    def first_page(self) -> int:
        """The page of `data` at which the view's layer begins."""
        return self.first_of(self.num_pages)

    @property
    def page_size(self) -> int:
        return self.data.shape[1] // self.format.key_bytes


# --- logits ----------------------------------------------------------------------------------------


def index_logits(
    q: jax.Array, weights: jax.Array, index_cache: jax.Array | IndexKeys, page_table: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The logits from which the top-k selects: `logits[t, j] = k_scale[j] * Σ_h relu(q_h · k_j) * weights[t, h]`.

    The formula is that of SGLang and DeepGEMM (paged MQA logits). Products are exact, sums are float32, and an array
    `[rows, heads, columns]` is never made, nor for the gradient in q and weights, which `indexer/gradient.py` computes;
    for training `contiguous_index_logits` has one in the keys too. The gradient is of reverse mode alone. On an NVIDIA
    GPU a kernel serves float8_e4m3fn queries on the FP8 tensor cores. Those of Hopper keep about 14 bits of a sum of
    products: the error is within 2^-12 of the sum of the magnitudes of a logit's terms. Over FP4 keys it serves
    bfloat16 queries too, by FP8 products of e5m2 numbers where these hold keys and queries, otherwise by bfloat16 ones.

    Args:
      q: float8_e4m3fn, bfloat16 or float32 `[rows, heads, 128]`, the query of each row.
      weights: float32 `[rows, heads]`; the caller multiplies `head_dim^-0.5`, `heads^-0.5` and the scale of q into
        them.
      index_cache: uint8 `[num_pages, page_size * 132]`, or a view of `IndexKeys` of any format; the values of FP4 keys
        have their scales multiplied in, and k_scale is 1.
      page_table: int32 `[rows, P]`, the pages of each row's keys: column j is token `j % page_size` of page
        `page_table[t, j // page_size]`. Outside `[0, num_pages)` (canonical: −1) it is no page.
      lengths: int32 `[rows]`, keys of each row, clipped to `[0, P * page_size]`.

    Returns:
      float32 `[rows, P * page_size]`; −inf from `lengths[t]` on and where there is no page, whatever the cache
      holds there.

    Raises:
      TypeError: a wrong dtype.
      ValueError: shapes that do not agree, pages that are not a multiple of 132 bytes.
    """
    checked = check_logits(ArgumentChecks("index_logits"), q, weights, index_cache, page_table, lengths)
    return _differentiated(*varying_alike(checked))


@jax.custom_vjp
def _differentiated(q, weights, index_cache, page_table, lengths):
    return logits_of(q, weights, index_cache, page_table, lengths)


def _save(*arguments):
    return logits_of(*arguments), arguments


def _pull(arguments, g):
    from jax_sparse_mla.indexer.gradient import index_logits_gradient  # which imports this module

    return *index_logits_gradient(*arguments, g), None, None, None


_differentiated.defvjp(_save, _pull)


def check_logits(check: ArgumentChecks, q, weights, index_cache, page_table, lengths) -> tuple:
    """The arguments of `index_logits` as jax arrays."""
    q = check("q", q, ("rows", "heads", INDEX_DIM), (jnp.float8_e4m3fn, *FLOATS))
    weights = check("weights", weights, ("rows", "heads"), FLOAT32)
    index_cache = check_index_cache(check, index_cache)
    page_table = check("page_table", page_table, ("rows", None), INT32)
    return q, weights, index_cache, page_table, check("lengths", lengths, ("rows",), INT32)


_LOGITS_RULE = sharding.PartitionRule((P("rows"), P("rows"), P(), P("rows"), P("rows")), P("rows"))


@functools.partial(jax.jit, static_argnames=("rows_of_call", "run", "fill", "alone"))
def logits_of(q, weights, index_cache, page_table, lengths, *, rows_of_call=None, run=None, fill=True, alone=False):
    """`index_logits` of checked arguments.

    Args:
      page_table: with `run`, a divisor of the page size (static), of runs of so many keys: page p has those from
        `p * page_size / run` on. By default a run is a page.
      alone: a row's logits do not depend, to the bit, on the others, nor on how many rows there are.
      rows_of_call: rows by which the kernel is chosen, where a call comes in parts; by default those of q.
      fill: False where nobody reads the columns from a row's length on; they may then hold anything.
    """
    arguments = q, weights, index_cache, page_table, lengths
    keys = as_index_keys(index_cache)
    plain = functools.partial(index_logits_reference, run=run, alone=alone)
    fp4, page_size = keys.format.name == "FP4", keys.page_size
    rows = rows_of_call or q.shape[0]
    call = Call(DeviceInfo.current(), q.dtype.name, keys.format.name, rows, q.shape[1], page_size, run or page_size)
    empty = any(x.size == 0 for x in jax.tree.leaves(arguments))
    if empty or any(LOGITS_BACKENDS["triton"].refuses(call)):
        return plain(*arguments)

    def kernel(q, *others):  # maybe a device's share of the rows
        share = call._replace(rows=rows_of_call or q.shape[0])
        backend = first_able(LOGITS_BACKENDS, share, "index_logits")
        arrays = jax.tree.leaves(((q.astype(jnp.bfloat16) if fp4 else q), *others))
        parts = {} if run is None else {"run": run}  # for kernels that read them
        return load(backend.function)(executor(), *arrays, pages=_pages(index_cache), fill=fill, fp4=fp4, **parts)

    return dispatch(kernel, plain, *arguments, rule=_LOGITS_RULE)


def index_logits_reference(q, weights, index_cache, page_table, lengths, *, run=None, alone=False):
    """`index_logits` in plain JAX: what a kernel must do but for the order and the precision of its sums.

    `alone` goes row by row, for a product of several rows may be summed in another order.
    """
    keys = as_index_keys(index_cache)
    unit = run or keys.page_size
    (rows, heads, _), runs = q.shape, page_table.shape[1]
    if rows == 0 or runs * unit == 0 or keys.num_pages == 0:
        return jnp.full((rows, runs * unit), -jnp.inf, jnp.float32)
    # bfloat16 holds every e4m3 number, and its products are exact in float32: the tensor cores' fast path.
    dtype = jnp.float32 if q.dtype == jnp.float32 else jnp.bfloat16
    blocks, per_block, chunk = blocking(rows, heads, runs, unit, dtype)
    # Where each row is alone: XLA may compile another product where the array that it is read from has another shape.
    more = -rows % INVARIANT_ROWS if alone else 0

    def rows_of(x):
        return jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))

    def by_block(x, filled):
        x = jnp.pad(rows_of(x), ((0, 0), (0, blocks * per_block - runs)), constant_values=filled)
        return x.reshape(rows + more, blocks, -1)

    table = by_block(page_table, -1)
    q, weights, lengths = rows_of(q), rows_of(weights), rows_of(jnp.maximum(lengths, 0))

    def one_block(task):
        row, block = task // blocks, task % blocks
        values, scales, valid = keys_of_runs(
            keys, unit, table[row, block], block * per_block * unit, lengths[row], dtype
        )
        scores = jnp.einsum(
            "hd,cd->hc",
            q[row].astype(dtype),
            values,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        scores = jnp.where(scores <= 0, 0.0, scores)  # a maximum of NaN and 0 may be 0 on a CPU
        # A product and a sum rather than a second matrix product, whose float32 may be rounded to TF32.
        logits = jnp.sum(scores * weights[row][:, None], axis=0) * scales
        return jnp.where(valid, logits, -jnp.inf)

    # Whole chunks only: what is over at the end computes the last block again and is cut off. Two turns at least where
    # each is alone: XLA compiles a loop of one turn otherwise than a longer one.
    tasks = rows * blocks
    turns = max(tasks, 2) if alone else -(-tasks // chunk) * chunk
    task = jnp.minimum(jnp.arange(turns, dtype=jnp.int32), tasks - 1)
    logits = lax.map(one_block, task, batch_size=None if alone else chunk)[:tasks]
    return logits.reshape(rows, blocks * per_block * unit)[:, : runs * unit]


def keys_of_runs(keys: IndexKeys, unit: int, found, start, length, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The keys of some runs: values `[columns, 128]`, their scales, and which of them a row sees.

    Args:
      unit: keys of a run, see `logits_of`.
      found: int32 `[runs]`, of a row of the table; where it names no run the keys are any.
      start: the column of the first key.
      length: how many columns the row sees.
      dtype: of the values.
    """
    of_page = keys.page_size // unit
    is_run = (found >= 0) & (found < keys.num_pages * of_page)
    found = jnp.where(is_run, found, 0)
    values, scales = _gather_runs(keys, found // of_page + keys.first_page, found % of_page * unit, unit)
    values, scales = keys_of_bytes(keys.format, values, scales, dtype)
    columns = found.shape[0] * unit
    valid = jnp.repeat(is_run, unit) & (start + jnp.arange(columns, dtype=jnp.int32) < length)
    return values.reshape(columns, INDEX_DIM), scales.reshape(columns), valid


def _gather_runs(keys: IndexKeys, page, first, unit: int) -> tuple[jax.Array, jax.Array]:
    """The bytes of `unit` keys from `first [n]` on of pages `[n]` of `keys.data`: values `[n, unit, …]` and scales."""
    value_bytes, values_end = keys.format.value_bytes, keys.page_size * keys.format.value_bytes
    if unit == keys.page_size:
        data = gather_windows(keys.data, page, jnp.zeros_like(page), keys.data.shape[1])
        values, scales = data[:, :values_end], data[:, values_end:]
    else:
        values = gather_windows(keys.data, page, first * value_bytes, unit * value_bytes)
        scales = gather_windows(keys.data, page, values_end + first * SCALE_BYTES, unit * SCALE_BYTES)
    return values.reshape(-1, unit, value_bytes), scales.reshape(-1, unit, SCALE_BYTES)


def blocking(rows: int, heads: int, pages: int, page_size: int, dtype) -> tuple[int, int, int]:
    """(blocks that a row's pages are cut into, pages per block, blocks per step), by `CHUNK_BYTES`."""
    bytes_per_page = page_size * (heads * 4 + INDEX_K_BYTES + INDEX_DIM * np.dtype(dtype).itemsize)
    fitting_pages = max(1, CHUNK_BYTES // bytes_per_page)
    blocks = -(-pages // fitting_pages)
    pages_per_block = -(-pages // blocks)
    fitting_blocks = max(1, CHUNK_BYTES // (pages_per_block * bytes_per_page))
    tasks = rows * blocks
    # Two steps at least, so that no batch is small enough for all its rows' scores to stand side by side.
    steps = min(tasks, max(2, -(-tasks // fitting_blocks)))
    return blocks, pages_per_block, -(-tasks // steps)


# --- the key cache ---------------------------------------------------------------------------------


def write_index_k(index_cache: jax.Array | IndexKeys, slots: jax.Array, k: jax.Array) -> jax.Array | IndexKeys:
    """Writes index keys, quantised: `s = max(amax, 1e-4) / 448`, `e4m3(clip(k * (1 / s), -448, 448))`.

    This is SGLang's fused writer for V3.2 and V4: float32 scales that are not powers of two. Every operation
    is correctly rounded, so the bytes do not depend on the device. Keys of another `IndexFormat` are quantised by its
    rule. Pass keys as they are scored: after norm and rope and, for V4, after `hadamard_transform` (or use
    `write_transformed_index_k`).

    Under `jit` with the cache donated it writes in place.

    Args:
      index_cache: uint8 `[num_pages, page_size * 132]`, or a view of `IndexKeys` of any format.
      slots: int32 `[n]`. A negative or out-of-range slot skips its row. If a slot is given twice, it is not defined
        which row it holds.
      k: bfloat16 or float32 `[n, 128]`. No finite key makes a NaN; an infinity is clipped. A NaN makes its FP4 group of
        32 values NaN.

    Returns:
      The cache with the rows written, all other bytes unchanged.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, pages that are not a multiple of 132 bytes.
    """
    return _write_index_k(*_check_write("write_index_k", index_cache, slots, k), hadamard=False)


def write_transformed_index_k(
    index_cache: jax.Array | IndexKeys, slots: jax.Array, k: jax.Array
) -> jax.Array | IndexKeys:
    """`write_index_k` of `hadamard_transform(k)` for V4's keys after norm and rope; the transform stays float32."""
    return _write_index_k(*_check_write("write_transformed_index_k", index_cache, slots, k), hadamard=True)


def _check_write(function: str, index_cache: jax.Array | IndexKeys, slots: jax.Array, k: jax.Array) -> tuple:
    check = ArgumentChecks(function)
    index_cache = check_index_cache(check, index_cache)
    slots = check("slots", slots, ("n",), INT32)
    return index_cache, slots, check("k", k, ("n", INDEX_DIM), FLOATS)


@functools.partial(jax.jit, static_argnames="hadamard")
def _write_index_k(index_cache, slots, k, *, hadamard):
    keys = as_index_keys(index_cache)
    if keys.data.size == 0 or slots.size == 0:
        return index_cache

    name, rule_of_writer = "indexer.triton.write_index_k", {}
    if keys.format.name == "FP4":
        name, keeps_zero = "indexer.triton_fp4.write_index_k", keys.format.writer != "sglang"
        rule_of_writer = {"least_exponent": keys.format.least_exponent, "keeps_zero": keeps_zero}

    def kernel(keys, slots, k):  # maybe a device's share of the keys, with fewer pages
        return launching(name, hadamard=hadamard, pages=_pages(keys), **rule_of_writer)(keys, slots, k)

    def plain(keys, slots, k):
        return write_index_k_reference(keys, slots, k, hadamard=hadamard).data

    pages = P(sharding.PAGES) if keys.num_layers == 1 else P()  # those of several layers lie one after the other
    rule = sharding.PartitionRule((pages, P(), P()), pages, across=write_own_pages)
    if keys.format == IndexFormat.FP8 or keys.format.name == "FP4":
        data = dispatch(kernel, plain, keys, slots, k, rule=rule)
    else:  # of FP8 keys the kernel writes SGLang's
        data = shared(plain, rule)(keys, slots, k)
    return dataclasses.replace(index_cache, data=data) if isinstance(index_cache, IndexKeys) else data


def write_index_k_reference(index_cache, slots, k, *, hadamard=False):
    """`write_index_k` in plain JAX: what a kernel must do byte by byte (but for the order of the transform's sums)."""
    keys = as_index_keys(index_cache)
    values, scales = encode_keys(keys.format, _hadamard_transform(k.astype(jnp.float32)) if hadamard else k)
    _, page, offset = _locate(keys, slots)
    width = keys.format.value_bytes
    data = scatter_windows(keys.data, page, offset * width, values)
    data = scatter_windows(data, page, keys.page_size * width + offset * SCALE_BYTES, scales)
    return dataclasses.replace(keys, data=data) if isinstance(index_cache, IndexKeys) else data


def gather_index_k(index_cache: jax.Array | IndexKeys, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gathers index keys as they are stored; a key is `values * scale`.

    Args:
      index_cache: uint8 `[num_pages, page_size * 132]`, or a view of `IndexKeys` of any format.
      slots: int32 `[n]`. A negative or out-of-range slot gives zeros and scale 0.

    Returns:
      `(values, scales)`: float8_e4m3fn `[n, 128]` and float32 `[n]`. Of FP4 keys the e2m1 numbers, which e4m3 holds,
      and `[n, 4]`, a scale for each 32 values.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, pages that are not a multiple of 132 bytes.
    """
    check = ArgumentChecks("gather_index_k")
    index_cache = check_index_cache(check, index_cache)
    return _gather_index_k(index_cache, check("slots", slots, ("n",), INT32))


@jax.jit
def _gather_index_k(index_cache, slots):
    keys = as_index_keys(index_cache)
    valid, page, offset = _locate(keys, slots)
    if keys.num_pages == 0:  # nothing to gather from: every slot is out of range
        keys = dataclasses.replace(keys, data=jnp.zeros((1, keys.data.shape[1]), jnp.uint8))
    values, scales = decode_keys(keys.format, *(x[:, 0] for x in _gather_runs(keys, page, offset, 1)))
    values = jnp.where(valid[:, None], lax.bitcast_convert_type(values, jnp.uint8), jnp.uint8(0))
    scales = jnp.where(valid[:, None], scales, 0.0)
    scales = scales[:, 0] if keys.format.group == INDEX_DIM else scales
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn), scales


def check_index_cache(check: ArgumentChecks, index_cache: jax.Array | IndexKeys) -> jax.Array | IndexKeys:
    """Refuses what is not the index-K cache of one layer."""
    if isinstance(index_cache, IndexKeys):
        data = check("index_cache.data", index_cache.data, (None, "page_bytes"), UINT8)
        index_cache.check_view(check, "index_cache", data.shape[0])
    else:
        data = index_cache = check("index_cache", index_cache, ("num_pages", "page_bytes"), UINT8)
    page_bytes, key_bytes = data.shape[1], as_index_keys(index_cache).format.key_bytes
    if page_bytes == 0 or page_bytes % key_bytes:
        raise check.fail(
            f"index_cache must have pages of page_size * {key_bytes} bytes, page_size >= 1, got shape "
            f"{list(data.shape)}"
        )
    return index_cache


def as_index_keys(index_cache: jax.Array | IndexKeys) -> IndexKeys:
    """The cache of one layer as IndexKeys."""
    return index_cache if isinstance(index_cache, IndexKeys) else IndexKeys(data=index_cache)


def _pages(index_cache: jax.Array | IndexKeys) -> tuple[int, int]:
    """The cache's first page in its array, and how many pages it has."""
    keys = as_index_keys(index_cache)
    return keys.first_page, keys.num_pages


def _locate(keys: IndexKeys, slots: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `locate_slots`, with pages of `keys.data`."""
    valid, page, offset = locate_slots(slots, keys.num_pages, keys.page_size)
    return valid, jnp.where(valid, page + keys.first_page, keys.data.shape[0]), offset


# --- quantising ------------------------------------------------------------------------------------


def quantize_index_q(
    q: jax.Array, *, hadamard: bool = False, format: IndexFormat = IndexFormat.FP8
) -> tuple[jax.Array, jax.Array]:
    """Quantises index queries by the keys' rule, with one scale per row and head.

    Multiply the scale into the weights to get the logits of q: `index_logits(values, weights * scale, …)`. SGLang does
    so in its fused query kernel. Queries of FP4 keys keep a scale for each 32 values: they are the products, which
    bfloat16 holds, and their scale is 1.

    Args:
      q: bfloat16 or float32 `[rows, heads, dim]` (any leading axes).
      hadamard: q passes `hadamard_transform` first, in float32, as V4's does (static); dim is a power of two.
      format: of the keys (static). FP4's are of 128 values; amax has the floor 6 · 2^−126, whoever wrote the keys.

    Returns:
      `(values, scale)`: float8_e4m3fn (FP4: bfloat16) `[rows, heads, dim]` and float32 `[rows, heads]`.

    Raises:
      TypeError: a wrong dtype.
      ValueError: q has no dimension, or one that cannot be transformed.
    """
    check = ArgumentChecks("quantize_index_q")
    q = check("q", q, (None,) * max(1, check.rank("q", q)), FLOATS)
    if not isinstance(hadamard, bool):
        raise TypeError(f"quantize_index_q: hadamard must be a static bool, got {type(hadamard).__name__}")
    if hadamard and q.shape[-1].bit_count() != 1:
        raise check.fail(f"q must have shape [..., dim] with dim a power of two, got {list(q.shape)}")
    if not isinstance(format, IndexFormat):
        raise TypeError(f"quantize_index_q: format must be an IndexFormat, got {type(format).__name__}")
    if format.name == "FP4" and q.shape[-1] != INDEX_DIM:
        raise check.fail(f"q must have shape [..., {INDEX_DIM}] with FP4 keys, got {list(q.shape)}")
    return _quantize_index_q(q, hadamard=hadamard, format=format)


@functools.partial(jax.jit, static_argnames=("hadamard", "format"))
def _quantize_index_q(q, *, hadamard, format):
    plain = functools.partial(quantize_index_q_reference, hadamard=hadamard, format=format)
    fp4 = format.name == "FP4"
    if q.size == 0 or q.shape[-1] != INDEX_DIM or not (fp4 or format == IndexFormat.FP8):
        return plain(q)

    def rounded(q):
        values = launching("indexer.triton_fp4.round_queries_to_fp4", hadamard=hadamard)(q)
        return values, jnp.ones(q.shape[:-1], jnp.float32)

    rows = P(*(f"rows{i}" for i in range(q.ndim - 1)))
    kernel = rounded if fp4 else launching("indexer.triton.quantize_index_q", hadamard=hadamard)
    return dispatch(kernel, plain, q, rule=sharding.PartitionRule((rows,), (rows, rows)))


def quantize_index_q_reference(x, *, hadamard=False, format=IndexFormat.FP8):
    """`quantize_index_q` in plain JAX: what a kernel must do bit by bit (but for the order of the transform's sums)."""
    x = _hadamard_transform(x.astype(jnp.float32)) if hadamard else x
    if format.name == "FP4":
        return round_queries_to_fp4(x), jnp.ones(x.shape[:-1], jnp.float32)
    return quantize_fp8(x, format)


def hadamard_transform(x: jax.Array) -> jax.Array:
    """The Walsh-Hadamard transform of the last axis, times `n^-0.5`: orthogonal, its own inverse.

    V4's index queries and keys pass through it before they are quantised (SGLang; natural order, which is Sylvester's
    matrix). `write_transformed_index_k`, and `quantize_index_q` with `hadamard=True`, include it. It changes logits
    only by the rounding to fp8. Keys that were written with it must be read with queries that passed it too.

    Args:
      x: bfloat16 or float32 `[..., n]`, n a power of two.

    Returns:
      Like x; computed in float32.

    Raises:
      TypeError: a wrong dtype.
      ValueError: n is not a power of two.
    """
    check = ArgumentChecks("hadamard_transform")
    x = check("x", x, (None,) * check.rank("x", x), FLOATS)
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        raise check.fail(f"x must have shape [..., n] with n a power of two, got {list(x.shape)}")
    return _hadamard_transform(x)


@jax.jit
def _hadamard_transform(x: jax.Array) -> jax.Array:
    n = x.shape[-1]
    transformed = jnp.matmul(x.astype(jnp.float32), sylvester(n), precision=lax.Precision.HIGHEST)
    return (transformed * np.float32(n**-0.5)).astype(x.dtype)


@functools.cache
def sylvester(n: int) -> np.ndarray:
    """Sylvester's matrix of ±1: entry (i, j) is −1 where i and j share an odd number of set bits."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix

"""Candidate blocks of DeepSeek-V4.1: one indexer scores every entry, and later ones only what it found promising.

The candidate source cuts a row's positions into blocks of 8 and publishes those with the largest logits in them, 2,048
at most. The newest block is always one of them. An indexer of a later layer scores the positions of these blocks alone,
with its own queries. (SGLang's `candidate_blocks.py`; vLLM's of the same name.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_sparse_mla.argument_checks import FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.indexer.logits import (
    IndexKeys,
    as_index_keys,
    check_logits,
    logits_of,
)
from jax_sparse_mla.indexer.select import SCRATCH_BYTES, in_chunks, rows_at_once
from jax_sparse_mla.indices import TopkTransform, topk_positions, topk_transform
from jax_sparse_mla.indices.lookup import take_2d_or_minus_one
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.transforms import shared
from jax_sparse_mla.launch.triton_call import launching
from jax_sparse_mla.sharding import PartitionRule

BLOCK_SIZE = 8  # the published model's


def candidate_blocks(
    logits: jax.Array, lengths: jax.Array, topk_blocks: int, *, block_size: int = BLOCK_SIZE
) -> jax.Array:
    """The blocks of positions with the largest logits.

    A block's score is the largest logit of its positions below the row's length. The block of the last of them counts
    as larger than any. Ties go to the lower block; a NaN counts as −inf. A row of no more blocks than `topk_blocks` has
    all of them.

    Args:
      logits: float32 or bfloat16 `[rows, columns]`, as of `index_logits`.
      lengths: int32 `[rows]`, positions of each row, clipped to `[0, columns]`.
      topk_blocks: how many blocks, at least 1 (static).
      block_size: positions of a block, at least 1 (static).

    Returns:
      int32 `[rows, topk_blocks]`: blocks in ascending order, padded with −1 at the end.

    Raises:
      TypeError: a wrong dtype. ValueError: shapes that do not agree.
    """
    check = ArgumentChecks("candidate_blocks")
    logits = check("logits", logits, ("rows", "columns"), FLOATS)
    lengths = check("lengths", lengths, ("rows",), INT32)
    topk_blocks = check.static_int("topk_blocks", topk_blocks, minimum=1)
    block_size = check.static_int("block_size", block_size, minimum=1)
    return _candidate_blocks(logits, lengths, topk_blocks, block_size)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _candidate_blocks(logits, lengths, topk_blocks, block_size):
    lengths, plain = jnp.clip(lengths, 0, logits.shape[1]), functools.partial(block_scores, block_size=block_size)
    if logits.size == 0:
        scores = plain(logits, lengths)
    else:
        kernel = launching("indexer.triton_candidates.block_scores", block_size=block_size)
        scores = dispatch(kernel, plain, logits, lengths, rule=_SCORES_RULE)
    return topk_positions(scores, -(-lengths // block_size), topk_blocks)


_SCORES_RULE = PartitionRule((P("rows"), P("rows")), P("rows"))


def block_scores(logits: jax.Array, lengths: jax.Array, *, block_size: int) -> jax.Array:
    """float32 `[rows, blocks]` in plain JAX, of checked arguments: what a kernel must write of the blocks that a length
    reaches into."""
    rows, columns = logits.shape
    blocks = -(-columns // block_size)
    scores = jnp.where(jnp.arange(columns) < lengths[:, None], logits.astype(jnp.float32), -jnp.inf)
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    scores = jnp.pad(scores, ((0, 0), (0, blocks * block_size - columns)), constant_values=-np.inf)
    scores = jnp.max(scores.reshape(rows, blocks, block_size), axis=-1, initial=-np.inf)
    newest = jnp.arange(blocks) == (lengths[:, None] - 1) // block_size
    return jnp.where(newest, jnp.inf, jnp.minimum(scores, np.finfo(np.float32).max))


def index_topk_and_blocks(
    q: jax.Array,
    weights: jax.Array,
    index_cache: jax.Array | IndexKeys,
    page_table: jax.Array,
    lengths: jax.Array,
    topk: int,
    topk_blocks: int,
    *,
    block_size: int = BLOCK_SIZE,
) -> tuple[jax.Array, jax.Array]:
    """The positions that the candidate source selects and its published blocks, in the bounded memory of `index_topk`.

    Args:
      q, weights, index_cache, page_table, lengths: as in `index_logits`.
      topk: how many positions, at least 1 (static).
      topk_blocks, block_size: as in `candidate_blocks` (static).

    Returns:
      `(positions, blocks)`, of one array of logits: `topk_positions(logits, lengths, topk)` and
      `candidate_blocks(logits, lengths, topk_blocks)`, int32 `[rows, topk]` and `[rows, topk_blocks]`.

    Raises:
      TypeError: a wrong dtype. ValueError: shapes that do not agree.
    """
    check, rows_of, index_cache = _check("index_topk_and_blocks", q, weights, index_cache, page_table, lengths)
    topk = check.static_int("topk", topk, minimum=1)
    topk_blocks = check.static_int("topk_blocks", topk_blocks, minimum=1)
    block_size = _check_block(check, block_size, index_cache)
    return _both(rows_of, index_cache, topk, topk_blocks, block_size, SCRATCH_BYTES)


@functools.partial(jax.jit, static_argnames=("topk", "topk_blocks", "block_size", "scratch_bytes"))
def _both(rows_of, index_cache, topk, topk_blocks, block_size, scratch_bytes):
    def select(rows_of, index_cache):
        (rows,), width = rows_of["lengths"].shape, rows_of["pages"].shape[1] * as_index_keys(index_cache).page_size

        def chunk(rows_of):
            arguments = rows_of["q"], rows_of["weights"], index_cache, rows_of["pages"], rows_of["lengths"]
            logits = logits_of(*arguments, rows_of_call=rows, fill=False)  # nothing past a length is read
            positions = topk_positions(logits, rows_of["lengths"], topk)
            return positions, _candidate_blocks(logits, rows_of["lengths"], topk_blocks, block_size)

        return in_chunks(chunk, rows_of, rows_at_once(width, scratch_bytes))

    return _over_rows(select, rows_of, index_cache, (P("rows"), P("rows")))


def index_topk_in_blocks(
    q: jax.Array,
    weights: jax.Array,
    index_cache: jax.Array | IndexKeys,
    page_table: jax.Array,
    lengths: jax.Array,
    topk: int,
    blocks: jax.Array,
    *,
    block_size: int = BLOCK_SIZE,
) -> jax.Array:
    """The positions of the largest logits among those of each row's blocks; no other is computed.

    Args:
      q, weights, index_cache, page_table, lengths: as in `index_logits`.
      topk: how many positions, at least 1 (static).
      blocks: int32 `[rows, n]`, as `candidate_blocks` gives them: ascending, −1 last.
      block_size: positions of a block, a divisor of the page size of the keys (static).

    Returns:
      int32 `[rows, topk]`: positions in ascending order, padded with −1 at the end; ties go to the lower one. A row
      whose blocks have no more positions than `topk` has all of them.

    Raises:
      TypeError: a wrong dtype. ValueError: shapes that do not agree, or blocks that would lie in two pages.
    """
    check, rows_of, index_cache = _check("index_topk_in_blocks", q, weights, index_cache, page_table, lengths)
    rows_of["blocks"] = check("blocks", blocks, ("rows", "n"), INT32)
    topk = check.static_int("topk", topk, minimum=1)
    block_size = _check_block(check, block_size, index_cache)
    return _in_blocks(rows_of, index_cache, topk=topk, block_size=block_size, scratch_bytes=SCRATCH_BYTES)


@functools.partial(jax.jit, static_argnames=("topk", "block_size", "scratch_bytes"))
def _in_blocks(rows_of, index_cache, *, topk, block_size, scratch_bytes):
    keys = as_index_keys(index_cache)

    def select(rows_of, keys):
        def chunk(rows_of):
            sizes = {"block_size": block_size, "page_size": keys.page_size, "num_pages": keys.num_pages}
            arrays = rows_of["blocks"], rows_of["pages"], rows_of["lengths"]
            plain = functools.partial(candidate_runs_reference, **sizes)
            if any(x.size == 0 for x in arrays):
                kept, runs, held = plain(*arrays)
            else:
                kernel = launching("indexer.triton_candidates.candidate_runs", **sizes)
                kept, runs, held = dispatch(kernel, plain, *arrays, rule=_RUNS_RULE)
            # What counts is a run of columns: the blocks ascend, and only the newest may be cut off.
            arguments = rows_of["q"], rows_of["weights"], keys, runs, held
            logits = logits_of(*arguments, rows_of_call=rows, run=block_size, fill=False)
            return topk_transform(logits, held, topk, method=TopkTransform.PAGED, page_table=kept, page_size=block_size)

        rows, n = rows_of["blocks"].shape
        return in_chunks(chunk, rows_of, rows_at_once(n * block_size, scratch_bytes))

    return _over_rows(select, rows_of, keys, P("rows"))


_RUNS_RULE = PartitionRule((P("rows"),) * 3, (P("rows"),) * 3)


def candidate_runs_reference(
    blocks: jax.Array, page_table: jax.Array, lengths: jax.Array, *, block_size: int, page_size: int, num_pages: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the keys of each row's blocks lie, in plain JAX: what a kernel must do.

    Returns:
      `(kept, runs, held)`: int32 `[rows, n]`, the blocks that the row's length reaches into, in their order, −1 behind
      them; their runs of keys as `logits_of` takes them, −1 where there is no page; int32 `[rows]`, their positions
      below the length.
    """
    lengths = jnp.clip(lengths, 0, page_table.shape[1] * page_size)[:, None]
    exists = (blocks >= 0) & (blocks < -(-lengths // block_size))
    order = jnp.argsort(~exists, axis=1, stable=True)
    exists = jnp.take_along_axis(exists, order, axis=1)
    kept = jnp.where(exists, jnp.take_along_axis(blocks, order, axis=1), -1)
    first = jnp.where(exists, kept, 0) * block_size
    row = jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    page = take_2d_or_minus_one(page_table, row, jnp.where(exists, first // page_size, -1))
    is_page = (page >= 0) & (page < num_pages)
    run = jnp.where(is_page, page, 0) * (page_size // block_size) + first % page_size // block_size
    held = jnp.sum(jnp.where(exists, jnp.minimum(lengths - first, block_size), 0), axis=1, dtype=jnp.int32)
    return kept, jnp.where(is_page, run, -1), held


def _check(function, q, weights, index_cache, page_table, lengths):
    check = ArgumentChecks(function)
    q, weights, index_cache, pages, lengths = check_logits(check, q, weights, index_cache, page_table, lengths)
    return check, {"q": q, "weights": weights, "pages": pages, "lengths": lengths}, index_cache


def _check_block(check: ArgumentChecks, block_size: int, index_cache: jax.Array | IndexKeys) -> int:
    block_size, page_size = check.static_int("block_size", block_size, minimum=1), as_index_keys(index_cache).page_size
    if page_size % block_size:
        raise check.fail(f"block_size must divide the page size of index_cache, {page_size}, got {block_size}")
    return block_size


def _over_rows(select, rows_of, index_cache, results):
    rule = PartitionRule((jax.tree.map(lambda _: P("rows"), rows_of), P()), results)
    return shared(select, rule)(rows_of, index_cache)

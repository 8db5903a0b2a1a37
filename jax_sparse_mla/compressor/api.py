"""The compressor of DeepSeek-V4 and V4.1, which turns every `ratio` tokens into one row of a cache, and KPool's.

A token brings a kv row and a score row. The entry of the group of tokens that ends at position p (p + 1 is a
multiple of ratio) is, per channel,

    entry = Σ_w softmax_w(score_w + ape_w) * kv_w                 over the tokens w of its window

followed by RMSNorm and rope at the group's first position. The window of ratio 128 is the group's 128 tokens. Windows
of ratio 4 overlap: rows are `[A | B]`, twice as wide, and a window has 8 tokens, the A halves of the group before and
the B halves of the group itself. A request's first group has no group before it. (This is SGLang's V4 compressor;
DeepSeek calls the two CSA and HCA.) The V4 indexer compresses its keys with the same function.

V4.1 has ratios 1 and 2 and no ape. A group of ratio 1 is a token, which has no score: its kv is what is normed. V4.1's
index keys are made of the entry before rope, so the layer passes no frequencies and rotates it afterwards.

GLM-5.3's KPool makes one index key of a group of tokens by the same sum, without overlap, norm and rope: `pool_keys`.

Groups may span steps, so each request carries its last tokens in a ring, `CompressorState`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla._chunks import map_rows
from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, INT_MAX, ArgumentChecks
from jax_sparse_mla.compressor.state import (
    CHUNK_BYTES,
    CompressorArrays,
    CompressorState,
    Tokens,
    carry,
    checked_state,
    compressor_window,
    row_halves,
    window_sum,
    zero_after,
)
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import launching
from jax_sparse_mla.rope import rope_interleaved, round_to_bfloat16


def compress_kv(
    state: CompressorState | None,
    kv: jax.Array,
    score: jax.Array | None,
    *,
    positions: jax.Array,
    req_rows: jax.Array,
    query_start_loc: jax.Array,
    ape: jax.Array | None,
    norm_weight: jax.Array,
    inv_freq: jax.Array,
    ratio: int,
    norm_eps: float = 1e-6,
    round_pooled: bool = False,
    overlap: bool | None = None,
) -> tuple[jax.Array, jax.Array, CompressorState | None]:
    """Compresses the groups that this step's tokens complete, and carries the last tokens on.

    Any chunking of a request's tokens over steps gives the same entries. Arithmetic is float32. Under `jit`
    with the state donated it is updated in place.

    Args:
      state: the carried tokens, of this ratio and head_dim; None where score is: ratio 1 carries none.
      kv, score: bfloat16 or float32 `[T, coff * head_dim]`, one row per query token of B requests; the rows
        of a request follow each other, their positions ascending by one. score may be None for ratio 1: no gate.
      positions: int32 `[T]`, each token's position in its request; negative on padding rows (canonical: −1).
      req_rows: int32 `[T]`, the row of each token's request in the state. A row outside the state makes the
        token a padding row, without a state a negative one does. No two requests of a step may share one.
      query_start_loc: int32 `[B + 1]`, each request's first row. Rows from the last entry on are padding
        rows; B bounds the number of entries.
      ape: float32 `[ratio, coff * head_dim]`, added to the score of a token by `position % ratio`; None: nothing is.
      norm_weight: bfloat16 or float32 `[head_dim]`, of the RMSNorm.
      inv_freq: float32 `[rope_dim / 2]`, inverse frequencies of the rope on the last rope_dim values; `[0]`: no rope.
      ratio: tokens per entry, at least 1 (static).
      norm_eps: of the RMSNorm (static).
      round_pooled: rounds the weighted sum to bfloat16 before the norm, as SGLang's compressor of V4.1 does and
        vLLM's does not (static).
      overlap: whether windows overlap (static); None: those of ratio 4 do, as in V4.

    Returns:
      `(entries, rows, state)`: bfloat16 `[N, head_dim]`, int32 `[N]` and the updated state, with
      `N = min(T, T // ratio + B)`. `rows[i]` is the query row whose token completed entry i, ascending;
      unused entries come last, have row −1 and are 0.

    Raises:
      TypeError: a wrong dtype, or state is no CompressorState.
      ValueError: shapes that do not agree with each other and with ratio.
    """
    check = ArgumentChecks("compress_kv")
    ratio = check.static_int("ratio", ratio, minimum=1)
    if ratio == 1 and score is None:
        if state is not None or ape is not None:
            raise check.fail("state and ape must be None where score is: a token of ratio 1 without a gate is an entry")
    elif not isinstance(state, CompressorState):
        raise TypeError(f"compress_kv: state must be a CompressorState, got {type(state).__name__}")
    if overlap is not None and not isinstance(overlap, bool):
        raise TypeError(f"compress_kv: overlap must be None or a static bool, got {type(overlap).__name__}")
    coff, window = row_halves(ratio, overlap), compressor_window(ratio, overlap)
    tokens = Tokens(
        kv=check("kv", kv, ("T", "width"), FLOATS),
        score=None if state is None else check("score", score, ("T", "width"), FLOATS),
        positions=check("positions", positions, ("T",), INT32),
        req_rows=check("req_rows", req_rows, ("T",), INT32),
    )
    head_dim, odd = divmod(check.dims["width"], coff)
    if odd or head_dim == 0:
        raise check.fail(f"kv must have shape [T, {coff} * head_dim], got {list(tokens.kv.shape)}")
    if state is not None:
        state = checked_state(check, state, "width", window)
    query_start_loc = check("query_start_loc", query_start_loc, (None,), INT32)
    if query_start_loc.shape[0] == 0:
        raise check.fail("query_start_loc must have shape [B + 1], got [0]")
    ape = check.optional("ape", ape, (ratio, "width"), FLOAT32)
    norm_weight = check("norm_weight", norm_weight, (head_dim,), FLOATS)
    inv_freq = check("inv_freq", inv_freq, (None,), FLOAT32)
    if 2 * inv_freq.shape[0] > head_dim:
        raise check.fail(f"inv_freq must have at most {head_dim // 2} values, got {inv_freq.shape[0]}")
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, (int, float, np.floating)):
        raise TypeError(f"compress_kv: norm_eps must be a static float, got {type(norm_eps).__name__}")
    if not isinstance(round_pooled, bool):
        raise TypeError(f"compress_kv: round_pooled must be a static bool, got {type(round_pooled).__name__}")
    return _compress_kv(
        state,
        tokens,
        query_start_loc,
        ape,
        norm_weight,
        inv_freq,
        ratio=ratio,
        norm_eps=float(norm_eps),
        round_pooled=round_pooled,
    )


@functools.partial(jax.jit, static_argnames=("ratio", "norm_eps", "round_pooled"))
def _compress_kv(state, tokens, query_start_loc, ape, norm_weight, inv_freq, *, ratio, norm_eps, round_pooled):
    num_tokens, num_requests = tokens.positions.shape[0], query_start_loc.shape[0] - 1
    head_dim, max_requests = norm_weight.shape[0], INT_MAX if state is None else state.max_requests
    num_entries = min(num_tokens, num_tokens // ratio + num_requests)
    if num_tokens == 0 or max_requests == 0:
        rows = jnp.full((num_entries,), -1, jnp.int32)
        return jnp.zeros((num_entries, head_dim), jnp.bfloat16), rows, state
    if ape is None:
        ape = jnp.zeros((ratio, tokens.kv.shape[1]), jnp.float32)
    requests = (0 if state is None else state.first_of(max_requests)), max_requests
    carried = (None, None) if state is None else (state.kv, state.score)
    step = tokens.kv, tokens.score, tokens.positions, tokens.req_rows
    arrays = CompressorArrays(*carried, *step, query_start_loc, ape, norm_weight, inv_freq)

    kernel = launching(
        "compressor.triton.compress", ratio=ratio, norm_eps=norm_eps, num_entries=num_entries, requests=requests
    )
    plain = functools.partial(
        compress_kv_reference,
        ratio=ratio,
        norm_eps=norm_eps,
        num_entries=num_entries,
        requests=requests,
        round_pooled=round_pooled,
    )
    # The kernel takes neighbouring values in pairs.
    kernel_serves = num_entries and head_dim % 2 == 0 and inv_freq.shape[0] and state is not None and not round_pooled
    entries, rows, kv, score = dispatch(kernel, plain, arrays) if kernel_serves else plain(arrays)
    return entries, rows, None if state is None else dataclasses.replace(state, kv=kv, score=score)


def compress_kv_reference(
    arrays: CompressorArrays, *, ratio, norm_eps, num_entries, requests=None, round_pooled=False
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """`(entries, rows, state_kv, state_score)` of `compress_kv` in plain JAX: what a kernel must do but for the order
    of its sums. There are tokens and requests.

    `requests` are the first row and the number of rows of the layer's requests in the state; None: all of them. Windows
    overlap where kv has two halves of `norm_weight`'s width.
    """
    state_kv, state_score, kv, score, positions, req_rows, query_start_loc, ape, norm_weight, inv_freq = arrays
    state = None if state_kv is None else CompressorState(kv=state_kv, score=state_score)
    first_request, max_requests = requests or (0, state_kv.shape[0])
    num_tokens, head_dim = positions.shape[0], norm_weight.shape[0]
    halves = kv.shape[1] // head_dim
    live = (positions >= 0) & (req_rows >= 0) & (req_rows < max_requests)
    # From here on they are rows of the state.
    tokens = Tokens(kv=kv, score=score, positions=positions, req_rows=req_rows + first_request)
    live &= jnp.arange(num_tokens, dtype=jnp.int32) < query_start_loc[-1]
    completes_group = live & (tokens.positions % ratio == ratio - 1)
    (rows,) = jnp.nonzero(completes_group, size=num_entries, fill_value=-1)
    rows = rows.astype(jnp.int32)

    def one_entry(row):
        if state is None:  # a token is the group
            pooled = tokens.kv[jnp.maximum(row, 0)].astype(jnp.float32)
        else:
            pooled = window_sum(state, tokens, ape, row, ratio, halves)
        pooled = round_to_bfloat16(pooled) if round_pooled else pooled
        normed = pooled * lax.rsqrt(jnp.mean(pooled * pooled) + norm_eps) * norm_weight.astype(jnp.float32)
        first_position = tokens.positions[jnp.maximum(row, 0)] - (ratio - 1)
        entry = round_to_bfloat16(rope_interleaved(normed, first_position, inv_freq)).astype(jnp.bfloat16)
        return jnp.where(row >= 0, entry, jnp.bfloat16(0))

    # Four float32 arrays [window, head_dim]: kv and score, from this step and from the state.
    window_bytes = 4 * 4 * halves * ratio * head_dim
    entries = map_rows(one_entry, rows, CHUNK_BYTES // window_bytes)
    if state is None:
        return entries, rows, None, None
    state = carry(state, tokens, live, zero_after(entries))
    return entries, rows, state.kv, state.score

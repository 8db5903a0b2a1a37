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
from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.argument_checks import FLOAT32, FLOATS, INT32, INT_MAX, ArgumentChecks
from jax_sparse_mla.dispatch import dispatch
from jax_sparse_mla.kv_cache.pool import LayerPool, layer_shape
from jax_sparse_mla.xla.triton_call import launching

# The one ratio whose windows overlap: its rows are twice as wide, its windows twice as long.
OVERLAP_RATIO = 4

# Bytes of the windows that are compressed at the same time.
CHUNK_BYTES = 32 << 20


def _coff(ratio: int, overlap: bool | None = None) -> int:
    """Halves of a row, and groups of a window (DeepSeek's name)."""
    return 2 if (ratio == OVERLAP_RATIO if overlap is None else overlap) else 1


def compressor_window(ratio: int) -> int:
    """Tokens of a group's window: 8 for ratio 4, which overlaps, and ratio otherwise."""
    return _coff(ratio) * ratio


@pytree_dataclass
class CompressorState(LayerPool):
    """The last tokens of each request, as a ring: position p of a request lies at `[row, p % ring]`.

    It may hold the rings of several layers in one array each; `state.layer(i)` is the view of one, see `PagedKV`.

    Attributes:
      kv, score: float32 `[num_layers * max_requests, ring, coff * head_dim]`, `coff` 2 where windows overlap and 1
        otherwise; scores without ape.
      num_layers: how many layers' requests the arrays hold, one layer after the other (static).
      layer_index: the layer of a view; None for all of them (static).

    If all tokens of a request pass `compress_kv` or `pool_keys` from position 0 on, what an earlier request left in the
    row is never read. A request that starts later (a cached prefix) needs the ring of the request that it continues.
    """

    kv: jax.Array
    score: jax.Array
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)

    @classmethod
    def zeros(
        cls,
        max_requests: int,
        *,
        ratio: int,
        head_dim: int,
        ring: int | None = None,
        num_layers: int = 1,
        overlap: bool | None = None,
    ) -> CompressorState:
        """A state of zeros.

        Args:
          max_requests: rows, one per request that lives at a time.
          ratio: tokens per entry.
          head_dim: values of an entry.
          ring: tokens kept per request, at least the window; None is the window: `2 * ratio` with overlap, ratio
            otherwise. Where up to D tokens of a step may be rejected afterwards (speculative decoding) it
            must be at least `window + D`, so that rejected tokens do not replace those that the next step still
            needs; SGLang doubles it.
          num_layers: layers, each with rings of its own.
          overlap: whether windows overlap; None: those of ratio 4 do. KPool's (`pool_keys`) never do.
        """
        check = ArgumentChecks("CompressorState.zeros")
        ratio = check.static_int("ratio", ratio, minimum=1)
        head_dim = check.static_int("head_dim", head_dim, minimum=1)
        coff = _coff(ratio, overlap)
        window = coff * ratio
        ring = window if ring is None else check.static_int("ring", ring, minimum=window)
        shape = layer_shape(check, num_layers, ("max_requests", max_requests), ring, coff * head_dim)
        return cls(kv=jnp.zeros(shape, jnp.float32), score=jnp.zeros(shape, jnp.float32), num_layers=num_layers)

    @property
    def max_requests(self) -> int:
        """Rows of a layer."""
        return self.kv.shape[0] // self.num_layers


@pytree_dataclass
class _Tokens:
    """This step's tokens; as in `compress_kv`."""

    kv: jax.Array
    score: jax.Array
    positions: jax.Array
    req_rows: jax.Array


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
      ratio: tokens per entry, at least 1 (static); 4 has overlap.
      norm_eps: of the RMSNorm (static).
      round_pooled: rounds the weighted sum to bfloat16 before the norm, as SGLang's compressor of V4.1 does and
        vLLM's does not (static).

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
    coff, window = _coff(ratio), _coff(ratio) * ratio
    tokens = _Tokens(
        kv=check("kv", kv, ("T", "width"), FLOATS),
        score=None if state is None else check("score", score, ("T", "width"), FLOATS),
        positions=check("positions", positions, ("T",), INT32),
        req_rows=check("req_rows", req_rows, ("T",), INT32),
    )
    head_dim, odd = divmod(check.dims["width"], coff)
    if odd or head_dim == 0:
        raise check.fail(f"kv must have shape [T, {coff} * head_dim], got {list(tokens.kv.shape)}")
    if state is not None:
        state = _checked_state(check, state, "width", window)
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
    static = {"ratio": ratio, "norm_eps": float(norm_eps), "round_pooled": round_pooled}
    return _compress_kv(state, tokens, query_start_loc, ape, norm_weight, inv_freq, **static)


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
    static = {"ratio": ratio, "norm_eps": norm_eps, "num_entries": num_entries, "requests": requests}
    step = tokens.kv, tokens.score, tokens.positions, tokens.req_rows
    carried = (None, None) if state is None else (state.kv, state.score)
    arguments = *carried, *step, query_start_loc, ape, norm_weight, inv_freq

    kernel = launching("compressor.compress", **static)
    plain = functools.partial(compress_kv_reference, **static, round_pooled=round_pooled)
    # The kernel takes neighbouring values in pairs.
    kernel_serves = num_entries and head_dim % 2 == 0 and inv_freq.shape[0] and state is not None and not round_pooled
    entries, rows, kv, score = dispatch(kernel, plain, *arguments) if kernel_serves else plain(*arguments)
    return entries, rows, None if state is None else dataclasses.replace(state, kv=kv, score=score)


def compress_kv_reference(
    state_kv,
    state_score,
    kv,
    score,
    positions,
    req_rows,
    query_start_loc,
    ape,
    norm_weight,
    inv_freq,
    *,
    ratio,
    norm_eps,
    num_entries,
    requests=None,
    round_pooled=False,
):
    """`(entries, rows, state_kv, state_score)` of `compress_kv` in plain JAX: what a kernel must do but for the order
    of its sums. There are tokens and requests.

    `requests` are the first row and the number of rows of the layer's requests in the state; None: all of them.
    """
    state = None if state_kv is None else CompressorState(kv=state_kv, score=state_score)
    first_request, max_requests = requests or (0, state_kv.shape[0])
    num_tokens, head_dim = positions.shape[0], norm_weight.shape[0]
    live = (positions >= 0) & (req_rows >= 0) & (req_rows < max_requests)
    # From here on they are rows of the state.
    tokens = _Tokens(kv=kv, score=score, positions=positions, req_rows=req_rows + first_request)
    live &= jnp.arange(num_tokens, dtype=jnp.int32) < query_start_loc[-1]
    completes_group = live & (tokens.positions % ratio == ratio - 1)
    (rows,) = jnp.nonzero(completes_group, size=num_entries, fill_value=-1)
    rows = rows.astype(jnp.int32)

    def one_entry(row):
        if state is None:  # a token is the group
            pooled = tokens.kv[jnp.maximum(row, 0)].astype(jnp.float32)
        else:
            pooled = _pool_window(state, tokens, ape, row, ratio, _coff(ratio))
        pooled = round_to_bfloat16(pooled) if round_pooled else pooled
        normed = pooled * lax.rsqrt(jnp.mean(pooled * pooled) + norm_eps) * norm_weight.astype(jnp.float32)
        first_position = tokens.positions[jnp.maximum(row, 0)] - (ratio - 1)
        entry = round_to_bfloat16(rope_interleaved(normed, first_position, inv_freq)).astype(jnp.bfloat16)
        return jnp.where(row >= 0, entry, jnp.bfloat16(0))

    # Four float32 arrays [window, head_dim]: kv and score, from this step and from the state.
    window_bytes = 4 * 4 * _coff(ratio) * ratio * head_dim
    entries = map_rows(one_entry, rows, CHUNK_BYTES // window_bytes)
    if state is None:
        return entries, rows, None, None
    state = _carry(state, tokens, live, _zero_after(entries))
    return entries, rows, state.kv, state.score


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """float32 x rounded to bfloat16, as float32: XLA may drop a cast to bfloat16 and back, and never this."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def pool_keys(
    state: CompressorState,
    k: jax.Array,
    score: jax.Array,
    *,
    positions: jax.Array,
    req_rows: jax.Array,
    ape: jax.Array,
    pool: int,
    num_requests: int,
) -> tuple[jax.Array, jax.Array, CompressorState]:
    """KPool (GLM-5.3): one index key for each `pool` tokens that this step's tokens complete.

    Per channel `key = Σ_t softmax_t(score_t + ape_t) * k_t` over the tokens t of a pool, `pool` tokens from a multiple
    of it on. Arithmetic is float32, and any chunking of a request's tokens over steps gives the same keys. transformers
    rounds the weights and the sum to the keys' dtype. It is plain JAX on every device.

    Args:
      state: the carried tokens: `CompressorState.zeros(..., ratio=pool, overlap=False)`.
      k, score: bfloat16 or float32 `[T, head_dim]`, after the keys' norm, and the gate's product; the rows of a request
        follow each other, their positions ascending by one.
      positions: int32 `[T]`, each token's position in its request; negative on padding rows (canonical: −1).
      req_rows: int32 `[T]`, the row of each token's request in the state. A row outside the state makes the token a
        padding row. No two requests of a step may share one.
      ape: float32 `[pool, head_dim]`, added to the score of a token by `position % pool`.
      pool: tokens of a key, at least 1 (static).
      num_requests: the most requests that the rows may be of (static).

    Returns:
      `(keys, rows, state)`: float32 `[N, head_dim]`, int32 `[N]` and the updated state, with
      `N = min(T, T // pool + num_requests)`. `rows[i]` is the row whose token completed key i, ascending; unused keys
      come last, have row −1 and are 0.

    Raises:
      TypeError: a wrong dtype, or state is no CompressorState.
      ValueError: shapes that do not agree with each other and with pool.
    """
    check = ArgumentChecks("pool_keys")
    if not isinstance(state, CompressorState):
        raise TypeError(f"pool_keys: state must be a CompressorState, got {type(state).__name__}")
    pool = check.static_int("pool", pool, minimum=1)
    tokens = _Tokens(
        kv=check("k", k, ("T", "head_dim"), FLOATS),
        score=check("score", score, ("T", "head_dim"), FLOATS),
        positions=check("positions", positions, ("T",), INT32),
        req_rows=check("req_rows", req_rows, ("T",), INT32),
    )
    state = _checked_state(check, state, "head_dim", pool)
    ape = check("ape", ape, (pool, "head_dim"), FLOAT32)
    num_requests = check.static_int("num_requests", num_requests, minimum=0)
    return _pool_keys(state, tokens, ape, pool=pool, num_requests=num_requests)


def _checked_state(check: ArgumentChecks, state: CompressorState, width: str, window: int) -> CompressorState:
    """The state with its arrays as jax arrays: of one layer, rows of `width` values, a ring of at least the window."""
    arrays = {name: (f"state.{name}", getattr(state, name)) for name in ("kv", "score")}
    arrays = {name: check(*given, ("max_requests", "ring", width), FLOAT32) for name, given in arrays.items()}
    state = dataclasses.replace(state, **arrays)
    state.check_view(check, "state", state.kv.shape[0])
    if check.dims["ring"] < window:
        raise check.fail(f"state must keep at least {window} tokens per request, got {check.dims['ring']}")
    return state


@functools.partial(jax.jit, static_argnames=("pool", "num_requests"))
def _pool_keys(state, tokens, ape, *, pool, num_requests):
    (num_tokens, head_dim), max_requests = tokens.kv.shape, state.max_requests
    num_keys = min(num_tokens, num_tokens // pool + num_requests)
    if num_keys == 0 or max_requests == 0:
        return jnp.zeros((num_keys, head_dim)), jnp.full((num_keys,), -1, jnp.int32), state
    live = (tokens.positions >= 0) & (tokens.req_rows >= 0) & (tokens.req_rows < max_requests)
    tokens = dataclasses.replace(tokens, req_rows=tokens.req_rows + state.first_of(max_requests))
    (rows,) = jnp.nonzero(live & (tokens.positions % pool == pool - 1), size=num_keys, fill_value=-1)
    rows = rows.astype(jnp.int32)
    at_most = CHUNK_BYTES // (4 * 4 * pool * head_dim)
    keys = map_rows(lambda row: _pool_window(state, tokens, ape, row, pool, 1), rows, at_most)
    carried = _carry(state, tokens, live, _zero_after(keys.astype(jnp.bfloat16)))
    return keys, rows, dataclasses.replace(state, kv=carried.kv, score=carried.score)


def _pool_window(
    state: CompressorState, tokens: _Tokens, ape: jax.Array, row: jax.Array, ratio: int, coff: int
) -> jax.Array:
    """The weighted sum over the window that ends at query row `row`; 0 for row −1. float32 `[head_dim]`."""
    ring, head_dim = state.kv.shape[1], state.kv.shape[2] // coff
    window = coff * ratio
    last = jnp.maximum(row, 0)
    request = jnp.clip(tokens.req_rows[last], 0, state.kv.shape[0] - 1)
    # The window's tokens, oldest first, by group; the first of two groups is the one before.
    back = jnp.arange(window - 1, -1, -1, dtype=jnp.int32).reshape(coff, ratio)
    position = tokens.positions[last] - back
    step_row = jnp.maximum(last - back, 0)
    # The row may be another request's or a padding row.
    in_step = (tokens.req_rows[step_row] == request) & (tokens.positions[step_row] == position)
    ring_slot = position % ring  # below position 0 it is in range as well, and masked below

    def gather(of_step, of_state):
        groups = []
        for group in range(coff):
            half = slice(group * head_dim, (group + 1) * head_dim)  # A of the group before, B of the last one
            from_step = of_step[step_row[group], half].astype(jnp.float32)
            from_state = of_state[request, ring_slot[group], half]
            groups.append(jnp.where(in_step[group][:, None], from_step, from_state))
        return jnp.concatenate(groups)  # [window, head_dim]

    exists = ((row >= 0) & (position >= 0)).reshape(window, 1)
    ape = ape.reshape(ratio, coff, head_dim).swapaxes(0, 1).reshape(window, head_dim)
    kv = jnp.where(exists, gather(tokens.kv, state.kv), 0.0)  # 0 · NaN is NaN: stale rows may hold anything
    score = jnp.where(exists, gather(tokens.score, state.score) + ape, -jnp.inf)
    top = jnp.max(score, axis=0)
    weight = jnp.exp(score - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weight, axis=0)
    return jnp.sum(weight * kv, axis=0) / jnp.where(total == 0, 1.0, total)


def _zero_after(x: jax.Array) -> jax.Array:
    """A 0 (int32) that takes bfloat16 `x` to compute.

    Code that adds this 0 runs after x is known. XLA writes to a donated buffer in place only if all reads of the buffer
    provably come before; an optimization barrier is removed too early to prove that.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)
    return jnp.max(bits, initial=0) >> 16


def _carry(state: CompressorState, tokens: _Tokens, live: jax.Array, zero: jax.Array) -> CompressorState:
    """The state with the last `ring` tokens of each request of this step; not before `zero` is known."""
    max_requests, ring = state.kv.shape[:2]
    kept = live & ~_replaced_later(live, tokens.req_rows, ring)
    request = jnp.where(kept, tokens.req_rows, max_requests)  # out of range: dropped
    place = request + zero, tokens.positions % ring

    def write(old, new):
        return old.at[place].set(new.astype(jnp.float32), mode="drop")

    return CompressorState(kv=write(state.kv, tokens.kv), score=write(state.score, tokens.score))


def _replaced_later(live: jax.Array, req_rows: jax.Array, ring: int) -> jax.Array:
    """bool `[T]`: a later token of this step has the same place in the ring.

    Such a token must not be written, since it is not defined which of two writes to one place stays.
    """
    replaced = live[ring:] & (req_rows[ring:] == req_rows[:-ring])
    return jnp.pad(replaced, (0, live.shape[0] - replaced.shape[0]))


def rope_interleaved(x: jax.Array, positions: jax.Array, inv_freq: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates the pairs (2i, 2i + 1) of the last `2 * len(inv_freq)` values by `position * inv_freq[i]`.

    This is V4's rope of queries, sliding-window keys and compressed keys. With `inverse` it rotates the attention's
    output back, at the query's position. The magnitude is 1 (V4 has no YaRN attention factor).

    Args:
      x: bfloat16 or float32 `[..., d]`; the values before the rotated ones stay as they are.
      positions: int32, broadcast against the leading axes of x (`positions[:, None]` for `[T, heads, d]`).
      inv_freq: float32 `[rope_dim / 2]`, `rope_dim <= d`.
      inverse: rotates back (static).

    Returns:
      Like x; computed in float32.

    Raises:
      TypeError: a wrong dtype.
      ValueError: more than d values to rotate, positions that do not broadcast.
    """
    check = ArgumentChecks("rope_interleaved")
    x = check("x", x, (None,) * max(1, check.rank("x", x)), FLOATS)
    positions = check("positions", positions, (None,) * check.rank("positions", positions), INT32)
    inv_freq = check("inv_freq", inv_freq, (None,), FLOAT32)
    leading, rope_dim = x.shape[:-1], 2 * inv_freq.shape[0]
    if rope_dim > x.shape[-1]:
        raise check.fail(f"x must have shape [..., d], d >= 2 * len(inv_freq) = {rope_dim}, got {list(x.shape)}")
    aligned = zip(reversed(positions.shape), reversed(leading))
    if positions.ndim > len(leading) or any(p not in (1, n) for p, n in aligned):
        raise check.fail(f"positions must broadcast to {list(leading)}, got {list(positions.shape)}")
    return _rope_interleaved(x, positions, inv_freq, inverse=inverse)


@functools.partial(jax.jit, static_argnames=("inverse",))
def _rope_interleaved(x, positions, inv_freq, *, inverse):
    rope_dim = 2 * inv_freq.shape[0]
    nope, rope = jnp.split(x, [x.shape[-1] - rope_dim], axis=-1)
    angle = positions[..., None].astype(jnp.float32) * inv_freq
    cos, sin = jnp.cos(angle), jnp.sin(-angle if inverse else angle)
    pairs = rope.astype(jnp.float32).reshape(*rope.shape[:-1], rope_dim // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([nope, rotated.reshape(rope.shape).astype(x.dtype)], axis=-1)

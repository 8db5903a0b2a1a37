"""Kimi delta attention (KDA, arXiv 2510.26692), the linear attention of GLM-5.3: a state a request instead of a cache.

Queries, keys and values pass a causal convolution of a few tokens. Then a head carries one matrix S, float32
`[key, value]`, from token to token:

    S ← exp(g) S,   u = β (v − Sᵀ k),   S ← S + k uᵀ,   out = Sᵀ q

where g ≤ 0 is a decay for each key channel and β is in (0, 1). A request's prompt goes through in chunks of CHUNK
tokens: within one, all tokens' u solve a triangular system. It is plain JAX on every device.

A state is that of the last token that a request has computed. It cannot go back, so tokens that may be rejected must
not pass here, and a prefix cannot be reused without the state at its end.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.indices.lookup import exclusive_cumsum, split_ragged
from jax_sparse_mla.kv_cache.pool import LayerPool
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, V32Metadata
from jax_sparse_mla.serving.config import KDA

# Tokens of a chunk: the decays between all pairs of them, in each channel, stand side by side.
CHUNK = 16
# Epsilon of the keys' and the queries' norms.
NORM_EPS = 1e-6


@pytree_dataclass
class KDAState(LayerPool):
    """States of the requests, of several layers in the same arrays; `layer(i)` is the view of one, see `PagedKV`.

    Attributes:
      conv: float32 `[num_layers * max_requests, kernel - 1, 3 * heads * dim]`, the convolution's last inputs, oldest
        first: those of the queries, the keys, the values.
      recurrent: float32 `[num_layers * max_requests, heads, dim, dim]`, S of each head, `[key, value]`.
      num_layers: how many layers' requests the arrays hold, one layer after the other (static).
      layer_index: the layer of a view; None for all of them (static).

    A request whose first token is at position 0 begins with zeros, whatever its row holds.
    """

    conv: jax.Array
    recurrent: jax.Array
    num_layers: int = static(default=1)
    layer_index: int | None = static(default=None)

    @classmethod
    def zeros(cls, config: KDA, max_requests: int, *, num_layers: int = 1) -> KDAState:
        rows, dim = num_layers * max_requests, config.head_dim
        return cls(
            conv=jnp.zeros((rows, config.kernel - 1, 3 * config.heads * dim), jnp.float32),
            recurrent=jnp.zeros((rows, config.heads, dim, dim), jnp.float32),
            num_layers=num_layers,
        )

    @property
    def max_requests(self) -> int:
        """Rows of a layer."""
        return self.recurrent.shape[0] // self.num_layers


@pytree_dataclass
class KDARows:
    """The projections of a layer from T rows, in the model's dtype: qkv `[T, 3 * heads * dim]`, the convolution's
    input; decay `[T, heads * dim]`, from which g is made; beta `[T, heads]`, the logits of β."""

    qkv: jax.Array
    decay: jax.Array
    beta: jax.Array


@pytree_dataclass
class KDAParams:
    """A layer's small parameters, float32: conv `[3 * heads * dim, kernel]`, the last column for a token itself;
    dt_bias `[heads * dim]`, added to the decay; a_log `[heads]`, the logarithm of the decay's rate; o_norm `[dim]`, of
    the RMSNorm of the output."""

    conv: jax.Array
    dt_bias: jax.Array
    a_log: jax.Array
    o_norm: jax.Array


@pytree_dataclass
class KDAStep:
    """Where a step's rows belong, for all layers of the step; int32.

    Attributes:
      owner, offset: `[T]`, the request of a row and its number within the request's rows; −1 on padding rows.
      starts, counts: `[B]`, each request's first row and number of rows.
      req_rows: `[B]`, its row of the state; beyond all rows where the request has none here.
      fresh: bool `[B]`, its first row is at position 0.
      chunk_request: `[N]`, the request of each chunk, in order; −1 behind the last.
      chunk_rows: `[N, CHUNK]`, the rows of a chunk; T where it has no more.
    """

    owner: jax.Array
    offset: jax.Array
    starts: jax.Array
    counts: jax.Array
    req_rows: jax.Array
    fresh: jax.Array
    chunk_request: jax.Array
    chunk_rows: jax.Array


def prepare(batch: ForwardBatch, metadata: V32Metadata) -> KDAStep:
    """The step of a batch.

    Raises:
      ValueError: a mode other than EXTEND, DECODE or IDLE: rejected tokens would stay in the state.
    """
    if batch.mode not in (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.IDLE):
        raise ValueError(f"kda.prepare: batch.mode must be EXTEND, DECODE or IDLE, got {batch.mode.name}")
    (rows,), (requests,) = batch.out_cache_loc.shape, batch.seq_lens.shape
    live = metadata.positions >= 0
    owner = jnp.where(live, metadata.row_to_request, -1)
    counts = jnp.zeros(requests, jnp.int32).at[jnp.where(live, owner, requests)].add(1, mode="drop")
    by_request = batch.mode is ForwardMode.EXTEND
    starts = metadata.cu_seqlens_q[:-1] if by_request else jnp.arange(requests, dtype=jnp.int32)
    first = metadata.positions[jnp.minimum(starts, rows - 1)] if rows else jnp.full_like(starts, -1)
    chunks = exclusive_cumsum(-(-counts // CHUNK))
    chunk_request, number = split_ragged(chunks, min(rows, rows // CHUNK + requests))
    of_chunk = jnp.maximum(chunk_request, 0)
    within = number[:, None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    held = (chunk_request[:, None] >= 0) & (within < counts[of_chunk][:, None])
    return KDAStep(
        owner=owner,
        offset=jnp.where(live, jnp.arange(rows, dtype=jnp.int32) - starts[jnp.maximum(owner, 0)], -1),
        starts=starts,
        counts=counts,
        req_rows=jnp.where(counts > 0, batch.req_pool_indices, jnp.iinfo(jnp.int32).max),
        fresh=first == 0,
        chunk_request=chunk_request,
        chunk_rows=jnp.where(held, starts[of_chunk][:, None] + within, rows),
    )


def kda_layer(
    state: KDAState, rows: KDARows, params: KDAParams, step: KDAStep, *, config: KDA, chunked: bool
) -> tuple[jax.Array, KDAState]:
    """One layer's linear attention, before the norm of its output.

    Args:
      state: a view of one layer; donate it.
      rows, params: the layer's.
      step: from `prepare`.
      config: sizes (static).
      chunked: whether requests have several rows; otherwise row i is that of request i (static).

    Returns:
      out `[T, heads, dim]` in the rows' dtype, 0 on padding rows, and the state after each request's last row.
    """
    max_requests = state.max_requests
    has_row = (step.req_rows >= 0) & (step.req_rows < max_requests)
    state_rows = jnp.where(has_row, step.req_rows, 0) + state.first_of(max_requests)
    begins = step.fresh | ~has_row

    def before(x):
        return jnp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0, x[state_rows])

    conv, recurrent = before(state.conv), before(state.recurrent)
    qkv = rows.qkv.astype(jnp.float32)
    convolved = jax.nn.silu(_convolved(qkv, conv, params.conv, step)).astype(rows.qkv.dtype)
    heads = convolved.astype(jnp.float32).reshape(-1, 3, config.heads, config.head_dim)
    q, k, v = heads[:, 0], heads[:, 1], heads[:, 2]
    q, k = _unit(q) * config.head_dim**-0.5, _unit(k)
    decay, beta = _decay(rows.decay, params, config), jax.nn.sigmoid(rows.beta).astype(jnp.float32)
    run = _by_chunks if chunked else _one_token
    out, recurrent = run(recurrent, q, k, v, decay, beta, step)

    # After everything that reads the state, which is donated; a request without rows is dropped.
    to = jnp.where(has_row, state_rows, state.recurrent.shape[0])
    state_after = KDAState(
        conv=state.conv.at[to].set(_last_inputs(qkv, conv, step), mode="drop"),
        recurrent=state.recurrent.at[to].set(recurrent, mode="drop"),
        num_layers=state.num_layers,
        layer_index=state.layer_index,
    )
    return jnp.where(step.owner[:, None, None] >= 0, out, 0).astype(rows.qkv.dtype), state_after


def gated_norm(out: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of each head's output, times the sigmoid of the gate, both `[T, heads, dim]`: in out's dtype, computed in
    float32."""
    wide = out.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (weight * wide * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def _decay(rows: jax.Array, params: KDAParams, config: KDA) -> jax.Array:
    """g, float32 `[T, heads, dim]`: bounded from below, or a softplus."""
    x = (rows.astype(jnp.float32) + params.dt_bias).reshape(-1, config.heads, config.head_dim)
    rate = jnp.exp(params.a_log)[:, None]
    if config.lower_bound is not None:
        return config.lower_bound * jax.nn.sigmoid(rate * x)
    return -rate * jax.nn.softplus(x)


def _convolved(x: jax.Array, before: jax.Array, weight: jax.Array, step: KDAStep) -> jax.Array:
    """Each row's sum over itself and the rows before it, which are the step's or carried ones."""
    kernel = weight.shape[1]
    owner, total = jnp.maximum(step.owner, 0), x * weight[:, -1]
    for back in range(1, kernel):
        offset = step.offset - back
        carried = before[owner, jnp.clip(offset + kernel - 1, 0, kernel - 2)]
        of_step = jnp.pad(x, ((back, 0), (0, 0)))[: len(x)]
        total += jnp.where(offset[:, None] >= 0, of_step, carried) * weight[:, kernel - 1 - back]
    return total


def _last_inputs(x: jax.Array, before: jax.Array, step: KDAStep) -> jax.Array:
    """The carried inputs after the step, `[B, kernel - 1, channels]`."""
    size = before.shape[1]
    at = step.counts[:, None] - size + jnp.arange(size, dtype=jnp.int32)  # numbers within the request's rows
    of_step = x[jnp.clip(step.starts[:, None] + at, 0, len(x) - 1)]
    request = jnp.arange(len(step.counts))[:, None]
    return jnp.where((at >= 0)[:, :, None], of_step, before[request, jnp.clip(at + size, 0, size - 1)])


def _one_token(state, q, k, v, g, beta, step):
    """A row for each request, in order: out `[B, heads, dim]` and states `[B, heads, key, value]`."""
    state = state * jnp.exp(g)[..., None]
    u = beta[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))
    state = state + k[..., None] * u[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2), state


def _by_chunks(states, q, k, v, g, beta, step):
    """Rows of any number for each request, chunk after chunk: out `[T, heads, dim]` and states."""
    rows, heads, dim = q.shape
    later = jnp.arange(CHUNK)[:, None] < jnp.arange(CHUNK)
    earlier = later.T

    def product(subscripts, *operands):
        return jnp.einsum(subscripts, *operands, precision=lax.Precision.HIGHEST)

    def one_chunk(states, chunk):
        request, of_chunk = chunk

        def gathered(x):  # `[heads, CHUNK, …]`; places without a row have zeros, which change no state
            return jnp.moveaxis(x.at[of_chunk].get(mode="fill", fill_value=0), 0, 1)

        cq, ck, cv, cg, cb = map(gathered, (q, k, v, g, beta))
        total = jnp.cumsum(cg, axis=1)
        # The share of an earlier token's update that is left at a later token, in each key channel.
        left = jnp.exp(jnp.where(later[:, :, None], -jnp.inf, total[:, :, None] - total[:, None]))
        state = states[jnp.maximum(request, 0)]
        since = jnp.exp(total)
        coupling = product("hid,hjd,hijd->hij", ck, ck, left) * cb[:, :, None] * earlier
        delta = cb[:, :, None] * (cv - product("hid,hdv->hiv", ck * since, state))
        u = lax.linalg.triangular_solve(
            jnp.eye(CHUNK) + coupling, delta, left_side=True, lower=True, unit_diagonal=True
        )
        out = product("hid,hdv->hiv", cq * since, state)
        out += product("hij,hjv->hiv", product("hid,hjd,hijd->hij", cq, ck, left), u)
        state = state * since[:, -1, :, None] + product("hjd,hjv->hdv", ck * left[:, -1], u)
        row = jnp.where(request >= 0, request, states.shape[0])
        return states.at[row].set(state, mode="drop"), out

    states, outs = lax.scan(one_chunk, states, (step.chunk_request, step.chunk_rows))
    outs = jnp.swapaxes(outs, 1, 2).reshape(-1, heads, dim)  # of each chunk's places
    out = jnp.zeros((rows, heads, dim)).at[step.chunk_rows.reshape(-1)].set(outs, mode="drop")
    return out, states

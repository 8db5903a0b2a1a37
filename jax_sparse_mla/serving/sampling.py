"""Chooses tokens from logits on the device, each request by its own parameters."""

from __future__ import annotations

import enum
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass


class Choice(enum.IntEnum):
    """How a step chooses its tokens, as its most demanding request needs it."""

    GREEDY = 0  # the most likely tokens
    DRAW = 1  # of the whole vocabulary, for requests that have a temperature
    TOP_P = 2  # of what `top_p` leaves, which takes a sort of the vocabulary
    ALL = 3  # as TOP_P, from logits that a hook may have changed; log-probabilities are returned too


@pytree_dataclass
class Adjusting:
    """What a `LogitsHook` knows of B rows of logits.

    Attributes:
      parameters: float32 `[B, size]`, each request's `Request.adjust`; zeros of one that has none.
      counts: int32 `[B, vocab]`, how often each token stands in the request's output so far.
      temperature: float32 `[B]`.
    """

    parameters: jax.Array
    counts: jax.Array
    temperature: jax.Array


class LogitsHook(Protocol):
    """Changes logits before a token is chosen, as a part of the step's program: `EngineOptions.logits_hook`.

    A call takes logits float32 `[B, vocab]` and Adjusting, and returns logits of the same shape; −inf forbids a token.
    Where a request's parameters are zeros, its logits must stay as they are. `size` is the number of parameters of a
    request. It must be hashable. Compiled programs are kept by its `repr`: hooks that differ must not have the same.
    """

    size: int

    def __call__(self, logits: jax.Array, adjusting: Adjusting) -> jax.Array: ...


@pytree_dataclass
class SamplingArrays:
    """The parameters of B requests: temperature and top_p float32 `[B]`, seed int32 `[B]`; see `request.Sampling`."""

    temperature: jax.Array
    top_p: jax.Array
    seed: jax.Array


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The most likely tokens of logits float32 `[B, vocab]`, the lower one of equals, and how clear the choice is.

    Returns:
      tokens int32 `[B]`; margins float32 `[B]`: the distance of the best logit from the second best, as a share of the
      best one's size; and finite bool `[B]`: whether all logits are. What is not finite has any token and margin.
    """
    low = jnp.full_like(logits, -jnp.inf)
    numbers = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    parts = logits, numbers, low, jnp.isfinite(logits)
    # One pass: XLA makes two launches of it, and two more of each further reduction.
    none = jnp.float32(-jnp.inf), jnp.int32(logits.shape[1]), jnp.float32(-jnp.inf), jnp.bool(True)
    best, tokens, second, finite = lax.reduce(parts, none, _better, (1,))
    tokens = jnp.minimum(tokens, logits.shape[1] - 1)  # NaN may leave none
    return tokens, (best - second) / jnp.maximum(jnp.abs(best), jnp.finfo(jnp.float32).tiny), finite


def _better(a: tuple, b: tuple) -> tuple:
    """The best logit of two parts of a row, its number, the second best, and whether all are finite."""
    (x, i, below_x, x_finite), (y, j, below_y, y_finite) = a, b
    first = (x > y) | ((x == y) & (i < j))
    second = jnp.maximum(jnp.minimum(x, y), jnp.maximum(below_x, below_y))
    return jnp.where(first, x, y), jnp.where(first, i, j), second, x_finite & y_finite


def sample(
    logits: jax.Array, positions: jax.Array, params: SamplingArrays, *, cut: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens drawn for each request, or its most likely one where the temperature is 0.

    The draw is `jax.random.fold_in(key(seed), position)`'s: it depends on no other request, and drafts that are
    verified later draw the same.

    Args:
      logits: float32 `[B, vocab]`.
      positions: int32 `[B]`, the position that each new token will have in its request.
      cut: whether any top_p may be less than 1. Static; the tokens of requests that have 1 do not depend on it.

    Returns:
      As `greedy`; margins and what is finite are those of the logits, whatever was drawn.
    """
    best, margins, finite = greedy(logits)
    scaled = logits / jnp.maximum(params.temperature, 1e-6)[:, None]
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(params.seed, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    perturbed = scaled + noise
    if cut:
        perturbed = jnp.where(scaled >= _lowest_kept(scaled, params.top_p[:, None]), perturbed, -jnp.inf)
    drawn = jnp.argmax(perturbed, -1).astype(jnp.int32)
    return jnp.where(params.temperature > 0, drawn, best), margins, finite


def _lowest_kept(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """`[B, 1]`, the lowest of the fewest most likely logits whose probabilities sum to `top_p`; -inf if it is 1."""
    ordered = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, -1)
    before = jnp.cumsum(probabilities, -1) - probabilities
    kept = (before < top_p).at[:, 0].set(True)
    lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(top_p < 1, lowest, -jnp.inf)


def log_probs(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of logits float32 `[B, vocab]` and tokens int32 `[B]`: log-probabilities of the tokens float32 `[B]`, the `count`
    most likely tokens int32 `[B, count]`, and their log-probabilities; fewer where the vocabulary has fewer."""
    every = jax.nn.log_softmax(logits, -1)
    values, top = lax.top_k(every, min(count, logits.shape[-1]))
    return jnp.take_along_axis(every, tokens[:, None], 1)[:, 0], top.astype(jnp.int32), values

"""Chooses tokens from logits on the device, each request by its own parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_sparse_mla._pytree import pytree_dataclass


@pytree_dataclass
class SamplingArrays:
    """The parameters of B requests: temperature and top_p float32 `[B]`, seed int32 `[B]`; see `request.Sampling`."""

    temperature: jax.Array
    top_p: jax.Array
    seed: jax.Array


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The most likely tokens, the lower one of equals, and how clear the choice is.

    Args:
      logits: float32 `[B, vocab]`.

    Returns:
      tokens int32 `[B]`, and margins float32 `[B]`: the distance of the best logit from the second best, as a share of
      the best one's size.
    """
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    best = jnp.max(logits, -1)
    # Two reductions cost less than a top-k of the whole vocabulary.
    others = jnp.where(jnp.arange(logits.shape[-1]) == tokens[:, None], -jnp.inf, logits)
    margins = (best - jnp.max(others, -1)) / jnp.maximum(jnp.abs(best), jnp.finfo(jnp.float32).tiny)
    return tokens, margins


def sample(logits: jax.Array, positions: jax.Array, params: SamplingArrays) -> tuple[jax.Array, jax.Array]:
    """Tokens drawn for each request, or its most likely one where the temperature is 0.

    The draw is `jax.random.fold_in(key(seed), position)`'s: it depends on no other request, and drafts that are
    verified later draw the same.

    Args:
      logits: float32 `[B, vocab]`.
      positions: int32 `[B]`, the position that each new token will have in its request.
      params: of the B requests.

    Returns:
      As `greedy`; the margins are those of the logits, whatever was drawn.
    """
    best, margins = greedy(logits)
    scaled = logits / jnp.maximum(params.temperature, 1e-6)[:, None]
    ordered = jnp.sort(scaled, axis=-1, descending=True)
    probabilities = jax.nn.softmax(ordered, -1)
    before = jnp.cumsum(probabilities, -1) - probabilities
    kept = before < params.top_p[:, None]
    # The first is always kept; logits that equal the last kept one are kept too.
    lowest = jnp.min(jnp.where(kept.at[:, 0].set(True), ordered, jnp.inf), -1, keepdims=True)
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(params.seed, positions)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
    drawn = jnp.argmax(jnp.where(scaled >= lowest, scaled + noise, -jnp.inf), -1).astype(jnp.int32)
    return jnp.where(params.temperature > 0, drawn, best), margins

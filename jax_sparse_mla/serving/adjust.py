"""A hook on logits with what requests ask for most: a bias, penalties, top-k and min-p."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_sparse_mla.serving.sampling import Adjusting

_PLAIN = 4  # parameters before those of the bias


@dataclasses.dataclass(frozen=True)
class Adjust:
    """A `sampling.LogitsHook`; `parameters` makes a request's `adjust` for it.

    Attributes:
      biases: so many tokens of a request can have a bias.
    """

    biases: int = 64

    @property
    def size(self) -> int:
        return _PLAIN + 2 * self.biases

    def parameters(
        self,
        *,
        top_k: int = 0,
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
    ) -> tuple[float, ...]:
        """A request's parameters; empty where they change nothing.

        Args:
          top_k: draws come from the so many most likely tokens, and from those as likely as the last of them; 0: all.
          min_p: draws come from tokens that are at least this share as likely as the most likely one, 0 … 1.
          presence_penalty, frequency_penalty: subtracted from the logit of a token that stands in the output, once,
            and as often as it stands there.
          logit_bias: added to the logits of these tokens.

        Raises:
          ValueError: a value out of its range, or more biases than `biases`.
        """
        bias = dict(logit_bias or {})
        if not 0 <= top_k < 2**24:  # float32 holds it
            raise ValueError(f"top_k must be at least 0 and below {2**24}, got {top_k}")
        if not 0 <= min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, got {min_p}")
        for name, value in (("presence_penalty", presence_penalty), ("frequency_penalty", frequency_penalty)):
            if not -2 <= value <= 2:
                raise ValueError(f"{name} must be from -2 to 2, got {value}")
        if len(bias) > self.biases or not all(0 <= token < 2**24 for token in bias):
            raise ValueError(f"logit_bias must have at most {self.biases} tokens, each at least 0 and below {2**24}")
        if not all(-100 <= value <= 100 for value in bias.values()):
            raise ValueError("logit_bias must have values from -100 to 100")
        padding = [0.0] * (self.biases - len(bias))
        whole = (top_k, min_p, presence_penalty, frequency_penalty, *bias, *padding, *bias.values(), *padding)
        return tuple(map(float, whole)) if any(whole) else ()

    def __call__(self, logits: jax.Array, adjusting: Adjusting) -> jax.Array:
        top_k, min_p, presence, frequency = adjusting.parameters[:, :_PLAIN, None].swapaxes(0, 1)
        tokens, biases = jnp.split(adjusting.parameters[:, _PLAIN:], 2, axis=1)
        rows = jnp.arange(len(logits))[:, None]
        logits = logits.at[rows, tokens.astype(jnp.int32)].add(biases, mode="drop")
        counts = adjusting.counts
        logits = logits - presence * (counts > 0) - frequency * counts
        # Of the last: a token of which none is more likely than the k-th.
        kth = jnp.clip(top_k.astype(jnp.int32), 1, logits.shape[-1]) - 1
        lowest = jnp.take_along_axis(jnp.sort(logits, -1, descending=True), kth, 1)
        dropped = (top_k > 0) & (logits < lowest)
        # Shares of probabilities at the temperature are differences of logits.
        share = jnp.log(jnp.maximum(min_p, jnp.finfo(jnp.float32).tiny)) * adjusting.temperature[:, None]
        dropped |= (min_p > 0) & (logits - jnp.max(logits, -1, keepdims=True) < share)
        return jnp.where(dropped, -jnp.inf, logits)

"""Stand-ins for `serving.model.Model` that compile in no time, for tests of the engine around them."""

import dataclasses

import jax.numpy as jnp

from jax_sparse_mla import DEEPSEEK_V4_FLASH, ForwardMode
from jax_sparse_mla.serving.model import ForwardOutput

VOCABULARY, NEVER_MADE = 64, 61  # tokens from NEVER_MADE on are in prompts only
POISON = 63


@dataclasses.dataclass(frozen=True)
class Summing:
    """Each token is a sum over the keys of all tokens before it, read from pages; the key of POISON is NaN.

    It has a window's pages and no use of them. As its own first layer it makes drafts that are all right.
    """

    spec = dataclasses.replace(DEEPSEEK_V4_FLASH, page_size=4, window=4)
    vocab_size, config = VOCABULARY, None

    def new_caches(self, *, num_pages, **_):
        return jnp.zeros(num_pages * self.spec.page_size, jnp.float32)

    def new_draft(self, params, **_):
        return None

    def forward(self, params, caches, inputs, *, layers=None):
        batch, rows = inputs.batch, jnp.arange(len(inputs.tokens))
        keys = jnp.where(inputs.tokens == POISON, jnp.nan, (inputs.tokens + 1) * (inputs.positions % 7 + 1))
        caches = caches.at[batch.out_cache_loc].set(keys)
        if batch.mode is ForwardMode.EXTEND:
            request = jnp.searchsorted(jnp.cumsum(batch.extend_lens), rows, side="right")
        else:
            request = rows * len(batch.seq_lens) // len(rows)
        slots = inputs.tables.req_to_token.at[batch.req_pool_indices.at[request].get(mode="clip")].get(mode="clip")
        seen = (jnp.arange(slots.shape[1])[None] <= inputs.positions[:, None]) & (slots >= 0)
        hidden = jnp.sum(jnp.where(seen, caches[slots], 0), axis=1)
        return ForwardOutput(hidden=hidden, caches=caches)

    def logits(self, params, hidden):
        chosen = (hidden % NEVER_MADE)[:, None] == jnp.arange(VOCABULARY)[None]
        return jnp.where(jnp.isnan(hidden)[:, None], jnp.nan, chosen.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Smooth(Summing):
    """As `Summing`, but every token has a logit of its own."""

    def logits(self, params, hidden):
        likely = super().logits(params, hidden)
        return 3 * likely + jnp.sin(hidden[:, None] + jnp.arange(VOCABULARY))


def expected(prompt, count):
    """The tokens that `Summing` makes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum((token + 1) * (at % 7 + 1) for at, token in enumerate(tokens)) % NEVER_MADE)
    return tokens[len(prompt) :]

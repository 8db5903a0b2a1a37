"""Where the page table has no more entries than an indexer selects, each row selects all that it sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_sparse_mla.indexer.logits import IndexKeys
from jax_sparse_mla.indices import topk_positions
from jax_sparse_mla.layers.layer import IndexedEntries, select_entries
from jax_sparse_mla.layers.state import LayerOptions

ROWS, HEADS, PAGE = 5, 3, 64


def select(lengths, pages, topk, *, at_once, fill=0xFF):
    """Of index keys that are NaN."""
    keys = IndexKeys(data=jnp.full((4, PAGE * 132), fill, jnp.uint8))
    table = jnp.zeros((ROWS, pages), jnp.int32)
    entries = IndexedEntries(keys, lengths, table, None, PAGE)
    queries = jnp.ones((ROWS, HEADS, 128), jnp.float8_e4m3fn), jnp.ones((ROWS, HEADS), jnp.float32)
    options = LayerOptions()
    return select_entries(queries, entries, topk, options=options, at_once=at_once, with_slots=at_once)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("pages", "topk"), [(2, 128), (1, 128), (2, 200)])
def test_the_positions_are_the_top_ks_and_no_logits_are_made(pages, topk, at_once):
    lengths = jnp.asarray([0, 1, 63, PAGE * pages - 1, PAGE * pages], jnp.int32)
    positions, _ = select(lengths, pages, topk, at_once=at_once)
    scores = np.random.default_rng(0).standard_normal((ROWS, PAGE * pages)).astype(np.float32)
    np.testing.assert_array_equal(positions, topk_positions(scores, lengths, topk))
    made = jax.make_jaxpr(lambda lengths: select(lengths, pages, topk, at_once=at_once))(lengths)
    assert "dot_general" not in str(made)


@pytest.mark.parametrize("at_once", [False, True])
def test_one_entry_more_is_selected_by_its_logits(at_once):
    lengths = jnp.full(ROWS, 128, jnp.int32)
    made = jax.make_jaxpr(lambda lengths: select(lengths, 2, 127, at_once=at_once))(lengths)
    assert "dot_general" in str(made)

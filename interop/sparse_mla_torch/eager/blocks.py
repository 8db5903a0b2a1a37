"""transformers' eager attention on a CPU, in blocks of query rows and without the keys that a block does not see."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Query rows of a block. A block of the V4 preset has about 700 keys, and its scores fit in a CPU's cache.
BLOCK = 256


@contextlib.contextmanager
def eager_in_blocks() -> Iterator[None]:
    """Within it, transformers' eager attention takes `BLOCK` query rows at a time. Also a decorator.

    Eager attention multiplies each query with each key, and then masks most scores: of 3,400 keys a row of V4's window
    layers sees 128. Of a block's rows only the keys that one of them sees are multiplied; a key that no row sees adds
    exactly zero. The functions that compute are transformers' own. Attention weights are not returned. It may be
    nested, but only one thread may use it at a time.
    """
    before = ALL_ATTENTION_FUNCTIONS.get("eager")
    ALL_ATTENTION_FUNCTIONS["eager"] = _attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]
        if before is not None:
            ALL_ATTENTION_FUNCTIONS["eager"] = before


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The module's own eager attention of queries `[batch, heads, rows, d]`, with an additive mask, by blocks."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    rows = query.shape[2]
    whole = rows <= BLOCK or query.device.type != "cpu" or attention_mask is None or attention_mask.dtype == torch.bool
    if whole or attention_mask.shape[2:] != (rows, key.shape[2]):
        return eager(module, query, key, value, attention_mask, **options)
    seen = attention_mask > torch.finfo(attention_mask.dtype).min
    if not seen.any(-1).all():  # softmax gives a row that sees nothing equal parts of all keys
        return eager(module, query, key, value, attention_mask, **options)
    seen = seen.any(1)
    outputs = []
    for start in range(0, rows, BLOCK):
        block = slice(start, start + BLOCK)
        keys = seen[:, block].any((0, 1)).nonzero()[:, 0]
        mask = attention_mask[:, :, block, keys]
        outputs.append(eager(module, query[:, :, block], key[:, :, keys], value[:, :, keys], mask, **options)[0])
    return torch.cat(outputs, dim=1), None

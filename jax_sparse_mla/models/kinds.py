"""The kind of a layer: what its attention reads and owns, as data that every part of a step reads."""

from __future__ import annotations

import dataclasses
from typing import Literal

# The compress ratio of V4's layers with an indexer.
INDEXED_RATIO = 4
# The compress ratios of V4.1, which all select: by an indexer of their own or by that of an earlier layer.
V41_RATIOS = (1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The kind of a layer: what its attention reads and owns. The default is a layer without sparse attention, as the
    linear ones of GLM-5.3.

    Attributes:
      ratio: the compress ratio, tokens of a compressed entry; 0 where the layer reads no compressed cache.
      window: tokens of the sliding window, the same in all layers of a model; None without one. A layer with a window
        attends to it and, by `selects`, to compressed entries; a layer without one selects among the tokens themselves.
      selects: what the layer attends to beside its window: "none"; "own", at most `index_topk` that its own indexer
        selects; "shared", what an earlier layer selected; "all" compressed entries.
      owns_kv: whether the layer writes the cache that `selects` reads, and, if it selects, its index keys. A layer of
        V4.1 that is no KV source reads that of an earlier layer.
      overlap: whether the compressor's windows overlap: rows are twice as wide, and windows twice as long.
      gated: whether tokens bring the compressor scores, by which it weighs a group's rows; a state carries both.
      index_keys: what the index keys are made of: "none", "tokens" (their own rows), "compressor" (rows of a second
        compressor), or "entries" (the compressed rows before rope).
      pool: tokens of an index key of "tokens".
      candidates: V4.1: whether the indexer "publishes" its best blocks, selects "among" those published, or "none".
    """

    ratio: int = 0
    window: int | None = None
    selects: Literal["none", "own", "shared", "all"] = "none"
    owns_kv: bool = False
    overlap: bool = False
    gated: bool = False
    index_keys: Literal["none", "tokens", "compressor", "entries"] = "none"
    pool: int = 1
    candidates: Literal["none", "publishes", "among"] = "none"

    @property
    def selected(self) -> bool:
        """Whether a query attends to selected entries alone, `index_topk` at most."""
        return self.selects in ("own", "shared")


def kind_of_ratio(ratio: int, *, window: int | None, pool: int = 1) -> LayerKind:
    """The kind of a published model's layer of this compress ratio: V4's, the KV source of V4.1, or V3.2's without a
    window. Layers of another kind stand in `ModelSpec.layers`."""
    if window is None:
        return LayerKind(selects="own", owns_kv=True, index_keys="tokens", pool=pool)
    if ratio == 0:
        return LayerKind(window=window)
    if ratio in V41_RATIOS:
        gated = ratio > 1  # an entry of ratio 1 is a token's row
        return LayerKind(ratio=ratio, window=window, selects="own", owns_kv=True, gated=gated, index_keys="entries")
    indexed = ratio == INDEXED_RATIO
    return LayerKind(
        ratio=ratio,
        window=window,
        selects="own" if indexed else "all",
        owns_kv=True,
        overlap=indexed,
        gated=True,
        index_keys="compressor" if indexed else "none",
    )

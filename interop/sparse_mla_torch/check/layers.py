"""transformers' attention modules, run eagerly on whole sequences: what they return, and the entries they select."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm5_next import modeling_glm5_next as glm53
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from jax_sparse_mla.models import LayerKind, ModelSpec

_INDEXERS = (v4.DeepseekV4Indexer, v32.DeepseekV32Indexer, glm.GlmMoeDsaIndexer, glm53.Glm5NextTextIndexer)


class Layer:
    """The attention module of one layer, by transformers, the model's rotary embedding, and the layer's kind."""

    def __init__(self, module: torch.nn.Module, rotary: torch.nn.Module | None, kind: LayerKind):
        self.module, self.rotary, self.ratio = module, rotary, kind.ratio
        self.has_indexer = kind.selected  # whether it attends to entries that an indexer selects
        self.shares = kind.selects == "shared"  # whether it takes what the last layer with an indexer selected

    def eager(self, hidden: torch.Tensor, shared: np.ndarray | None = None) -> tuple[torch.Tensor, np.ndarray | None]:
        """The attention of one whole sequence `[1, n, hidden]`.

        Args:
          shared: for a layer that shares, the positions that the last layer with an indexer selected.

        Returns:
          The output `[1, n, hidden]`, and the selected positions `[n, k]`, or None where nothing is selected. A
          position past the query's own is −1.
        """
        raise NotImplementedError


class V4Layer(Layer):
    """A `DeepseekV4Attention` module; its positions are those of compressed entries."""

    def eager(self, hidden, shared=None):
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embeddings = {
            kind: self.rotary(hidden, position_ids=position_ids, layer_type=kind) for kind in ("main", "compress")
        }
        age = position_ids.T - position_ids
        visible = (age >= 0) & (age < self.module.sliding_window)
        mask = hidden.new_zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
        with selected_indices() as selected:
            out, _ = self.module(hidden, embeddings, position_ids, mask)
        return out, selected[0][0].cpu().numpy() if selected else None


class V32Layer(Layer):
    """A `DeepseekV32Attention` or `GlmMoeDsaAttention` module."""

    def eager(self, hidden, shared=None):
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        visible = position_ids <= position_ids.T
        lowest = torch.finfo(hidden.dtype).min
        mask = hidden.new_zeros(visible.shape).masked_fill(~visible, lowest)[None, None]
        embeddings = self.rotary(hidden, position_ids=position_ids)
        options = {}
        if self.shares:  # a −1 says that all visible positions are selected, the query's own too
            query_positions = np.arange(len(shared))[:, None]
            indices = torch.from_numpy(np.where(shared < 0, query_positions, shared))
            options["prev_topk_indices"] = indices[None].to(hidden.device)
        with selected_indices() as selected:
            out, *_ = self.module(hidden, embeddings, mask, **options)
        if self.shares:
            return out, shared
        positions = selected[0][0].cpu().numpy()
        return out, np.where(positions <= np.arange(len(positions))[:, None], positions, -1)


class Glm53Layer(Layer):
    """A `Glm5NextTextAttention` or `Glm5NextTextLinearAttention` module."""

    def eager(self, hidden, shared=None):
        if not self.has_indexer:
            return self.module(hidden), None
        with selected_indices() as selected:
            out, *_ = self.module(hidden, torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device))
        return out, selected[0][0].cpu().numpy()


def layers_of(model: torch.nn.Module, spec: ModelSpec) -> list[Layer]:
    """The attention of each layer of a causal model, or of the text model beside a vision tower."""
    decoder = getattr(model.model, "language_model", model.model)
    layer_type = V4Layer if spec.windowed else Glm53Layer if spec.kind().pool > 1 else V32Layer
    rotary = getattr(decoder, "rotary_emb", None)
    pairs = zip(decoder.layers, spec.layers, strict=True)
    return [layer_type(layer.self_attn, rotary, kind) for layer, kind in pairs]


@contextlib.contextmanager
def selected_indices() -> Iterator[list[torch.Tensor]]:
    """Collects the indices that transformers' indexers return within it."""
    selected: list[torch.Tensor] = []
    originals = {cls: cls.forward for cls in _INDEXERS}

    def recording(original):
        def forward(self, *args, **kwargs):
            selected.append(original(self, *args, **kwargs))
            return selected[-1]

        return forward

    for cls, original in originals.items():
        cls.forward = recording(original)
    try:
        yield selected
    finally:
        for cls, original in originals.items():
            cls.forward = original

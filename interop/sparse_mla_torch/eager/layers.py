"""transformers' attention modules, run eagerly on whole sequences: what they return, and the entries they select."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


class Layer:
    """The attention module of one layer, by transformers, and the model's rotary embedding."""

    def __init__(self, module: torch.nn.Module, rotary: torch.nn.Module | None):
        self.module, self.rotary = module, rotary

    def eager(self, hidden: torch.Tensor, shared: np.ndarray | None = None) -> tuple[torch.Tensor, np.ndarray | None]:
        """The attention of one whole sequence `[1, n, hidden]`.

        Args:
          shared: for a layer that shares a selection, the positions that the last layer with an indexer selected.

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
        with selected_indices(self.module) as selected:
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
        if shared is not None:  # a −1 says that all visible positions are selected, the query's own too
            query_positions = np.arange(len(shared))[:, None]
            indices = torch.from_numpy(np.where(shared < 0, query_positions, shared))
            options["prev_topk_indices"] = indices[None].to(hidden.device)
        with selected_indices(self.module) as selected:
            out, *_ = self.module(hidden, embeddings, mask, **options)
        if shared is not None:
            return out, shared
        positions = selected[0][0].cpu().numpy()
        return out, np.where(positions <= np.arange(len(positions))[:, None], positions, -1)


class Glm53Layer(Layer):
    """A `Glm5NextTextAttention` or `Glm5NextTextLinearAttention` module."""

    def eager(self, hidden, shared=None):
        if type(self.module).__name__.endswith("LinearAttention"):
            return self.module(hidden), None
        with selected_indices(self.module) as selected:
            out, *_ = self.module(hidden, torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device))
        return out, selected[0][0].cpu().numpy()


_LAYERS = {"deepseek_v4": V4Layer, "deepseek_v32": V32Layer, "glm_moe_dsa": V32Layer, "glm5_next": Glm53Layer}


def layers_of(model: torch.nn.Module) -> list[Layer]:
    """The attention of each layer of a causal model, or of the text model beside a vision tower."""
    decoder = getattr(model.model, "language_model", model.model)
    layer_type, rotary = _LAYERS[model.config.model_type], getattr(decoder, "rotary_emb", None)
    return [layer_type(layer.self_attn, rotary) for layer in decoder.layers]


@contextlib.contextmanager
def selected_indices(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collects the indices that the indexers within a module return."""
    selected: list[torch.Tensor] = []
    indexers = [part for part in module.modules() if type(part).__name__.endswith("Indexer")]
    hooks = [part.register_forward_hook(lambda _, inputs, indices: selected.append(indices)) for part in indexers]
    try:
        yield selected
    finally:
        for hook in hooks:
            hook.remove()

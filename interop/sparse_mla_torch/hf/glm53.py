"""The attention of transformers' GLM-5.3 modules on whole sequences, for the comparison with the JAX engine."""

from __future__ import annotations

import numpy as np
import torch
from transformers.models.glm5_next import modeling_glm5_next as glm53

from jax_sparse_mla.models import ModelSpec
from sparse_mla_torch.hf.replace import selected_indices


class Glm53Layer:
    """A `Glm5NextTextAttention` or `Glm5NextTextLinearAttention` module; attributes as of `V32Layer`."""

    ratio = 0
    shares = False

    def __init__(self, module: torch.nn.Module, spec: ModelSpec, ratio: int):
        self.module, self.spec = module, spec
        self.has_indexer = not isinstance(module, glm53.Glm5NextTextLinearAttention)

    def eager(self, hidden, model, shared: None = None) -> tuple[torch.Tensor, np.ndarray | None]:
        """As `V4Layer.eager`: the output, and the selected positions of a layer that selects."""
        if not self.has_indexer:
            return self.module(hidden), None
        with selected_indices() as selected:
            out, *_ = self.module(hidden, torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device))
        return out, selected[0][0].cpu().numpy()


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of a causal model, or of the text model beside a vision tower."""
    return getattr(model.model, "language_model", model.model).layers

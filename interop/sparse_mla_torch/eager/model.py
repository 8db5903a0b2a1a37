"""A model of transformers', from its config and weights or from a checkpoint, and what the check asks of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from sparse_mla_torch.cpu_matmul import quick_products
from sparse_mla_torch.eager.blocks import eager_in_blocks
from sparse_mla_torch.eager.layers import layers_of

_WITH_VISION = "glm5_next", "glm5_next_text"  # GLM-5.3 has no class without its vision tower that makes logits


class Eager:
    """Its methods take and return numbers and numpy arrays, which go from process to process."""

    def __init__(self, model: PreTrainedModel | None = None):
        self.model = model

    def load(self, folder: str) -> None:
        """The model of a checkpoint in bfloat16; raises OSError or ValueError if there is none.

        It stays on the CPU: the JAX model may leave no room for it on the GPU.
        """
        if not os.path.isdir(folder):  # otherwise transformers would look for it on the Hub
            raise FileNotFoundError(f"no checkpoint folder {folder}")
        auto_class = _auto_class(AutoConfig.from_pretrained(folder))
        self.model = auto_class.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()

    def build(self, config: Mapping[str, Any]) -> list[str]:
        """The model of a config, in bfloat16; returns the names of its tensors, which `fill` sets."""
        config = AutoConfig.for_model(**config, attn_implementation="eager")
        self.model = in_bfloat16(_auto_class(config).from_config(config))
        return list(self.model.state_dict())

    @torch.no_grad()
    def fill(self, arrays: Mapping[str, np.ndarray], on_gpu: bool) -> None:
        """Sets tensors to arrays, float32 by name, and moves the model to the GPU if asked and torch has one."""
        tensors = self.model.state_dict()
        for name, array in arrays.items():
            tensors[name].copy_(torch.from_numpy(array))
        if on_gpu and torch.cuda.is_available():
            self.model.to("cuda")

    @torch.no_grad()
    @quick_products()
    @eager_in_blocks()
    def attend(
        self, index: int, hidden: Sequence[np.ndarray], shared: Sequence[np.ndarray | None]
    ) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """The attention of a layer on whole sequences of hidden states `[n, hidden]`, float32.

        Args:
          shared: for each sequence what the last layer with an indexer selected, if the layer takes it; else None.

        Returns:
          For each sequence the output float32 `[n, hidden]` and the selected positions, as `Layer.eager` gives them.
        """
        layer, results = layers_of(self.model)[index], []
        for rows, selected in zip(hidden, shared, strict=True):
            rows = torch.from_numpy(rows).to(self.model.device, self.model.dtype)
            output, selected = layer.eager(rows[None], selected)
            results.append((output[0].float().cpu().numpy(), selected))
        return results

    @torch.no_grad()
    @quick_products()
    @eager_in_blocks()
    def agreeing(self, prompt: int, tokens: Sequence[int]) -> int:
        """How many of a text's tokens, from position `prompt` on, the model chooses too after the same tokens."""
        inputs = torch.tensor(tokens[:-1], device=self.model.device)[None]
        logits = self.model(input_ids=inputs, use_cache=False).logits[0, prompt - 1 :]
        return int((logits.float().argmax(-1).cpu() == torch.tensor(tokens[prompt:])).sum())


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """The model, but for what transformers keeps in float32, in evaluation mode."""
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if not any(f".{part}." in f".{name}." for part in keep):
            parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def _auto_class(config: Any) -> type:
    return AutoModelForImageTextToText if config.model_type in _WITH_VISION else AutoModelForCausalLM

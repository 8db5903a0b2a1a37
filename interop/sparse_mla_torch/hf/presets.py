"""transformers' models, built in memory from a seed or loaded from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM
from transformers.models.deepseek_v32 import DeepseekV32ForCausalLM
from transformers.models.glm_moe_dsa import GlmMoeDsaForCausalLM

from jax_sparse_mla.serving import checkpoint
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.presets import CONFIGS, PRESETS

_MODELS = {
    "deepseek_v4": DeepseekV4ForCausalLM,
    "deepseek_v32": DeepseekV32ForCausalLM,
    "glm_moe_dsa": GlmMoeDsaForCausalLM,
}


def build_preset(name: str, seed: int) -> PreTrainedModel:
    """The random model of one of PRESETS in bfloat16 that the JAX engine has from this seed."""
    if name not in CONFIGS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return from_named_arrays(CONFIGS[name], Model.from_config(CONFIGS[name]).random_arrays(seed))


def from_named_arrays(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PreTrainedModel:
    """A model in bfloat16 with eager attention.

    Args:
      config: as `config.json` has it.
      arrays: all tensors, by the names of `Model.random_arrays`.
    """
    names = checkpoint.read_config(config)
    model_type = _MODELS[config["model_type"]]
    fields = {name: value for name, value in config.items() if name != "model_type"}
    model = in_bfloat16(model_type(model_type.config_class(**fields, attn_implementation="eager")))
    with torch.no_grad():
        for stored, tensor in model.state_dict().items():
            if (name := checkpoint.canonical_name(stored, names)) is not None:
                tensor.copy_(torch.from_numpy(arrays[name].astype(np.float32)))
    return model


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """The model, but for what transformers keeps in float32, in evaluation mode."""
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def load_checkpoint(path: str) -> PreTrainedModel:
    """The model of a checkpoint folder in bfloat16 with eager attention.

    Raises:
      OSError, ValueError: no such folder, no checkpoint in it, or a model type that transformers does not know.
    """
    if not os.path.isdir(path):  # otherwise transformers would look for it on the Hub
        raise FileNotFoundError(f"no checkpoint folder {path}")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()


def on_device_of_jax(model: PreTrainedModel) -> PreTrainedModel:
    """The model on the GPU if JAX runs there and torch has it too, else as it is."""
    return model.to("cuda") if jax.default_backend() == "gpu" and torch.cuda.is_available() else model

"""transformers' models, built in memory from a seed or loaded from a checkpoint."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from jax_sparse_mla.models import GLM53_TYPES
from jax_sparse_mla.serving import checkpoint
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.presets import CONFIGS, PRESETS


def build_preset(name: str, seed: int) -> PreTrainedModel:
    """The random model of one of PRESETS that the JAX engine has from this seed, in bfloat16 with eager attention; on
    the GPU if JAX runs there and torch has it too."""
    if name not in CONFIGS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    jax_model = Model.from_config(CONFIGS[name])
    arrays = jax_model.random_arrays(seed)
    config = AutoConfig.for_model(**CONFIGS[name], attn_implementation="eager")
    model = in_bfloat16(_auto_class(config).from_config(config))
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if (stored := checkpoint.canonical_name(tensor_name, jax_model.config)) is not None:
                tensor.copy_(torch.from_numpy(arrays[stored].astype(np.float32)))
    return model.to("cuda") if jax.default_backend() == "gpu" and torch.cuda.is_available() else model


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """The model, but for what transformers keeps in float32, in evaluation mode."""
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    for name, parameter in model.named_parameters():
        if not any(f".{part}." in f".{name}." for part in keep):
            parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def load_checkpoint(path: str) -> PreTrainedModel:
    """The model of a checkpoint folder in bfloat16 with eager attention; OSError or ValueError if there is none."""
    if not os.path.isdir(path):  # otherwise transformers would look for it on the Hub
        raise FileNotFoundError(f"no checkpoint folder {path}")
    auto_class = _auto_class(AutoConfig.from_pretrained(path))
    return auto_class.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager").eval()


def _auto_class(config: Any) -> type:
    """GLM-5.3 has no class without its vision tower that makes logits."""
    return AutoModelForImageTextToText if config.model_type in GLM53_TYPES else AutoModelForCausalLM

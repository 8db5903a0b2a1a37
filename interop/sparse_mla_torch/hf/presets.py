"""transformers' models, built in memory from a seed or loaded from a checkpoint, and their weights for JAX."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from jax_sparse_mla.serving.model import Model, Params
from jax_sparse_mla.serving.presets import CONFIGS, PRESETS

_MODELS = {
    "deepseek_v4": DeepseekV4ForCausalLM,
    "deepseek_v32": DeepseekV32ForCausalLM,
    "glm_moe_dsa": GlmMoeDsaForCausalLM,
}


def _v4_config() -> DeepseekV4Config:
    return DeepseekV4Config(**_fields("v4"))


def _v32_config() -> DeepseekV32Config:
    return DeepseekV32Config(**_fields("v32"))


def _glm5_config() -> GlmMoeDsaConfig:
    return GlmMoeDsaConfig(**_fields("glm5"))


def _fields(name: str) -> dict:
    fields = {**CONFIGS[name], "attn_implementation": "eager"}
    del fields["model_type"]
    return fields


def build_preset(name: str, seed: int) -> PreTrainedModel:
    """A random model of one of PRESETS in bfloat16, the same for the same seed."""
    configs = {"v4": _v4_config, "v32": _v32_config, "glm5": _glm5_config}
    if name not in configs:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return random_model(configs[name](), seed)


def random_model(config: DeepseekV4Config | DeepseekV32Config | GlmMoeDsaConfig, seed: int) -> PreTrainedModel:
    """A random model of this config in bfloat16, the same for the same seed.

    transformers sets sinks, position biases and norm weights to constants. Here they are random too, so that code which
    ignores one of them gives another result.
    """
    torch.manual_seed(seed)
    model = _MODELS[config.model_type](config)
    model.apply(model._init_weights)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("sinks", "position_bias")):
                parameter.normal_()
            elif "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.ndim == 2 and parameter_name.startswith("model.layers"):
                # Unit gain, so that activations keep their size through a projection of this small width.
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    for parameter_name, parameter in model.named_parameters():
        if not any(part in parameter_name.split(".") for part in keep):
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


def to_jax_model(model: PreTrainedModel) -> tuple[Model, Params]:
    """The same model for the JAX engine: copies of its parameters.

    Raises:
      ValueError: what `Model.from_config` and `Model.from_named_arrays` raise.
    """
    jax_model = Model.from_config(model.config.to_dict())
    return jax_model, jax_model.from_named_arrays({name: _array(x) for name, x in model.state_dict().items()})


def _array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu().contiguous()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()

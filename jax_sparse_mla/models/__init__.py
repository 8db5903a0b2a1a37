"""Models as data: the attention constants of each, and the kind of each layer; a file for each family of configs."""

from jax_sparse_mla.models.config import check_types, is_int, rope_parameters, text_config
from jax_sparse_mla.models.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, v4_layer_ratios
from jax_sparse_mla.models.deepseek_v32 import DEEPSEEK_V32, indexed_layers, yarn_mscale
from jax_sparse_mla.models.deepseek_v41 import V41Layer, V41Spec, v41_layers
from jax_sparse_mla.models.glm53 import GLM53_TYPES, PooledModelSpec
from jax_sparse_mla.models.kinds import INDEXED_RATIO, V41_RATIOS, LayerKind
from jax_sparse_mla.models.spec import ModelSpec

__all__ = [
    "DEEPSEEK_V4_FLASH",
    "DEEPSEEK_V4_PRO",
    "DEEPSEEK_V32",
    "GLM53_TYPES",
    "INDEXED_RATIO",
    "V41_RATIOS",
    "LayerKind",
    "ModelSpec",
    "PooledModelSpec",
    "V41Layer",
    "V41Spec",
    "check_types",
    "indexed_layers",
    "is_int",
    "rope_parameters",
    "text_config",
    "v4_layer_ratios",
    "v41_layers",
    "yarn_mscale",
]

"""DeepSeek-V4 and V3.2 as plain JAX functions over parameter pytrees; `import jax_sparse_mla` does not import it."""

from jax_sparse_mla.serving.decoder import StepInputs
from jax_sparse_mla.serving.model import Caches, ForwardOutput, Model, Params, load

__all__ = ["Caches", "ForwardOutput", "Model", "Params", "StepInputs", "load"]

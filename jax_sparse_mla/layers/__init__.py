"""One layer's attention in one forward step, from projected rows to attention output; it updates the layer's caches.

The functions put the parts of the library together as a serving engine does: write, compress, index, select, merge,
attend. They are plain JAX: jit them with the layer's cache donated, and the caches are updated in place.
"""

from jax_sparse_mla.layers.state import (
    CompressorParams,
    IndexKeyParams,
    IndexRows,
    V4LayerCache,
    V4LayerParams,
    V4Rows,
    V32LayerCache,
    V32Rows,
    V41Selection,
)
from jax_sparse_mla.layers.step import V4Step, gathers, prepare_v4_step
from jax_sparse_mla.layers.v4 import v4_layer
from jax_sparse_mla.layers.v32 import v32_layer
from jax_sparse_mla.layers.v41 import v41_layer

__all__ = [
    "CompressorParams",
    "IndexKeyParams",
    "IndexRows",
    "V4LayerCache",
    "V4LayerParams",
    "V4Rows",
    "V4Step",
    "V32LayerCache",
    "V32Rows",
    "V41Selection",
    "gathers",
    "prepare_v4_step",
    "v4_layer",
    "v32_layer",
    "v41_layer",
]

"""GLM-5.3: a config becomes a spec, whose index keys stand for pools of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_sparse_mla.indexer.keys import INDEX_DIM
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.models.config import index_dim_of, is_int, layout_of, positive, reader, text_config
from jax_sparse_mla.models.kinds import LayerKind, kind_of_ratio
from jax_sparse_mla.models.spec import ModelSpec, reads

# GLM-5.3 with its vision tower, and its text model alone.
GLM53_TYPES = ("glm5_next", "glm5_next_text")
_LINEAR = "linear_attention"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PooledModelSpec(ModelSpec):
    """The constants of a model with an index key for each pool of tokens (KPool, GLM-5.3).

    Attributes:
      index_pool: tokens of an index key. `index_topk` counts tokens, in whole pools, and a page holds whole pools too.
    """

    index_pool: int = dataclasses.field()


@reads(*GLM53_TYPES)
def _spec_of(config: Any) -> PooledModelSpec:
    read = reader(text_config(config))
    latent, rope_dim, pool = read("kv_lora_rank", 512), read("qk_rope_head_dim", 0), read("index_kpool", 16)
    topk = positive("index_topk", read("index_topk", 2048))
    index_dim = index_dim_of(read("index_head_dim", INDEX_DIM))
    if rope_dim:
        raise ValueError(f"ModelSpec.from_hf_config: qk_rope_head_dim must be 0 in glm5_next, got {rope_dim}")
    if not is_int(pool) or pool < 2 or topk % pool:
        raise ValueError(
            "ModelSpec.from_hf_config: index_kpool must be an integer from 2 on that divides index_topk, got "
            f"{pool!r} and {topk}"
        )
    if read("index_kpool_always_select_tail") is False:
        raise ValueError("ModelSpec.from_hf_config: index_kpool_always_select_tail must be True, got False")
    return PooledModelSpec(
        name="glm5_next",
        num_heads=read("num_attention_heads", 64),
        qk_dim=latent,
        v_dim=latent,
        nope_dim=latent,
        rope_dim=0,
        softmax_scale=read("qk_nope_head_dim", 256) ** -0.5,
        kv_layout=layout_of("glm5_next", (KVLayout.NOPE_FP8,), latent, 0, latent),
        page_size=64 * pool,  # so that a page has 64 index keys, as those of every model
        index_topk=topk,
        index_heads=read("index_n_heads", 32),
        index_dim=index_dim,
        index_pool=pool,
        layers=_layer_kinds(read, pool),
    )


def _layer_kinds(read: Callable[..., Any], pool: int) -> tuple[LayerKind, ...]:
    """The kind of each layer; () where the config does not say how many there are. By default every fourth layer has
    sparse attention."""
    num_layers, types = read("num_hidden_layers"), read("layer_types")
    if not is_int(num_layers):
        return ()
    if types is None:
        types = [_LINEAR if i % 4 != 3 else "indexed_attention" for i in range(num_layers)]
    indexed = kind_of_ratio(0, window=None, pool=pool)
    return tuple(LayerKind() if name == _LINEAR else indexed for name in types[:num_layers])

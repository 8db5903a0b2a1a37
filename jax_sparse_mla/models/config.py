"""Readers of a Hugging Face config that the model families share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from jax_sparse_mla.indexer.keys import INDEX_DIM
from jax_sparse_mla.kv_cache.layout import KVLayout


def text_config(config: Any) -> Any:
    """The part of a config that is the text model's: `text_config`, or all of it."""
    part = reader(config)("text_config")
    return config if part is None else part


def reader(config: Any) -> Callable[..., Any]:
    """`read(key, default=None)` of a mapping or of an object with attributes; None is as a missing value."""
    get = config.get if isinstance(config, Mapping) else functools.partial(getattr, config)
    return lambda key, default=None: default if (value := get(key, None)) is None else value


def rope_parameters(config: Any) -> Mapping[str, Any]:
    """The rope of a config from the one of its two keys that counts: `rope_scaling`, as in transformers."""
    read = reader(config)
    return read("rope_scaling") or read("rope_parameters") or {}


# The keys that are read, by the type of their values. A config's tables have keys of these names, too.
_POSITIVE = """vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank intermediate_size
    moe_intermediate_size n_routed_experts num_local_experts index_n_heads index_head_dim index_topk qk_nope_head_dim
    v_head_dim o_groups o_lora_rank hc_mult sliding_window linear_num_heads linear_head_dim linear_conv_kernel_dim
    num_heads short_conv_kernel_size original_max_position_embeddings max_position_embeddings dspark_markov_rank"""
_INTEGERS = """head_dim qk_rope_head_dim first_k_dense_replace num_hash_layers n_shared_experts n_group topk_group
    num_experts_per_tok hc_sinkhorn_iters dspark_block_size dspark_noise_token_id"""
_NUMBERS = """rms_norm_eps rope_theta compress_rope_theta routed_scaling_factor hc_eps partial_rotary_factor
    linear_lower_bound gate_lower_bound factor mscale mscale_all_dim attention_factor beta_fast beta_slow"""
_BOOLS = "tie_word_embeddings norm_topk_prob truncate safe_gate"
_TABLES = """text_config rope_parameters rope_scaling linear_attn_config quantization_config compress_rates main
    compress"""
_MOST = {"num_hidden_layers": 4096}  # of others what an int32 holds


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e308 <= value <= 1e308


def _is_size(value: Any) -> bool:
    return is_int(value) and 0 <= value < 2**31


# For each key whether a value is of its type, and the type in words.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_POSITIVE.split(), (lambda value: _is_size(value) and value > 0, "a positive integer")),
    **dict.fromkeys(_INTEGERS.split(), (_is_size, "an integer from 0 on")),
    **dict.fromkeys(_NUMBERS.split(), (_is_number, "a finite number")),
    **dict.fromkeys(_BOOLS.split(), (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(_TABLES.split(), (lambda value: not isinstance(value, (str, int, float, list)), "a table")),
    "swiglu_limit": (lambda value: _is_number(value) or value == math.inf, "a number"),
    "layer_types": (lambda value: _are(value, str), "a list of names"),
    "mlp_layer_types": (lambda value: _are(value, str), "a list of names"),
    **dict.fromkeys(("compress_ratios", "dspark_target_layer_ids"), (lambda x: _are(x, int), "a list of integers")),
}


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, kind) for value in values)


def check_types(config: Any) -> None:
    """Refuses a mapping with a value of the wrong type, by its key; a missing value and None are left alone."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if value is None or key not in _TYPES:
            continue
        is_right, kind = _TYPES[key]
        if not is_right(value) or (key in _MOST and value > _MOST[key]):
            most = f" up to {_MOST[key]}" if key in _MOST else ""
            raise ValueError(f"Model.from_config: {key} must be {kind}{most}, got {value!r}")
        if key == "compress_rates":
            for name, rate in value.items():
                if not is_int(rate):
                    raise ValueError(f"Model.from_config: {key}.{name} must be an integer, got {rate!r}")
        elif key in _TABLES.split():
            check_types(value)


def layout_of(model: str, layouts: tuple[KVLayout, ...], qk_dim: int, rope_dim: int, v_dim: int) -> KVLayout:
    """The one of these byte layouts whose rows have these dimensions."""
    for layout in layouts:
        if (layout.qk_dim, layout.rope_dim, layout.v_dim) == (qk_dim, rope_dim, v_dim):
            return layout
    known = ", ".join(f"{x} ({x.nope_dim} + {x.rope_dim}, v {x.v_dim})" for x in layouts)
    raise ValueError(
        f"ModelSpec.from_hf_config: {model} with {qk_dim - rope_dim} + {rope_dim} K values and {v_dim} V values "
        f"has no cache layout; known: {known}"
    )


def is_int(value: Any) -> bool:
    """Whether it is an integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(name: str, value: Any) -> int:
    """The value, if it is an integer from 1 on."""
    if not is_int(value) or value < 1:
        raise ValueError(f"ModelSpec.from_hf_config: {name} must be a positive integer, got {value!r}")
    return value


def index_dim_of(value: Any) -> int:
    """The value, if index keys of this dimension can be stored."""
    if value != INDEX_DIM:
        raise ValueError(f"ModelSpec.from_hf_config: index_head_dim must be {INDEX_DIM}, got {value}")
    return value

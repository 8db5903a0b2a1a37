"""transformers' DeepSeek-V3.2, DeepSeek-V4 and GLM-5 attend sparsely, by our kernels, after one call.

    with sparse_mla_torch.transformers.use(model):
        model.generate(**inputs)

transformers scores every key for every query, makes a mask of all keys, and attends to all of them under it. Here a
block of queries is scored at a time and attends to the selected keys only, so that memory grows with the tokens and not
with their square. The model's parameters, caches and signatures stay transformers' own.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers import __version__ as _installed
from transformers.masking_utils import find_packed_sequence_indices

from sparse_mla_torch.transformers.select import Seen

_OLDEST = (5, 24)
if tuple(map(int, re.findall(r"\d+", _installed)[:2])) < _OLDEST:
    raise ImportError(f"sparse_mla_torch.transformers is written for transformers 5.24, got {_installed}")

from sparse_mla_torch.transformers import dsa, v4  # noqa: E402, their modules are not in an older transformers

# By model_type: the class of its attention that attends sparsely, and the sizes of its config that our kernels have.
_MODELS: dict[str, tuple[type[torch.nn.Module], dict[str, int]]] = {
    "deepseek_v32": (dsa.SparseV32Attention, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "glm_moe_dsa": (dsa.SparseGlmAttention, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "deepseek_v4": (v4.SparseV4Attention, {"head_dim": 512}),
}
_NAMES = "input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache"  # of a decoder's forward


def use(model: PreTrainedModel) -> Use:
    """Makes a model attend by our kernels, in `model(...)` and `model.generate(...)`, until `undo`.

    Tokens are those of eager attention, but for rounding: entries are selected by the same scores, and attention takes
    the same entries. Every call is checked before it changes a cache.

    Args:
      model: of the types deepseek_v32, deepseek_v4 and glm_moe_dsa, with or without a head; in bfloat16, or in float32
        on a CPU.

    Returns:
      What undoes it: `handle.undo()`, or the end of `with use(model):`.

    Raises:
      TypeError: another model, or another dtype.
      ValueError: sizes that no kernel has, a model that is in use already, attention modules under another's hooks.
    """
    if not isinstance(model, PreTrainedModel) or model.config.model_type not in _MODELS:
        got = model.config.model_type if isinstance(model, PreTrainedModel) else type(model).__name__
        raise TypeError(f"use: model must be transformers' {', '.join(_MODELS)}, got {got}")
    sparse, sizes = _MODELS[model.config.model_type]
    for name, size in sizes.items():
        if getattr(model.config, name) != size:
            raise ValueError(f"use: the kernels have {name} {size}, got {getattr(model.config, name)}")
    dtypes = (torch.bfloat16,) if model.device.type == "cuda" else (torch.bfloat16, torch.float32)
    if model.dtype not in dtypes:
        raise TypeError(f"use: on {model.device.type} a model is of {' or '.join(map(str, dtypes))}, got {model.dtype}")
    decoder = model.base_model
    modules = [layer.self_attn for layer in decoder.layers]
    if any(isinstance(module, sparse) for module in modules):
        raise ValueError("use: this model is in use already: undo it first")
    if any("forward" in vars(module) for module in modules):
        raise ValueError("use: the attention has a forward of its own instance (hooks of device_map, a compiled layer)")
    return Use(decoder, modules, sparse)


class Use:
    """A model in use; as a context manager it gives this object, and undoes at its end."""

    def __init__(self, decoder: torch.nn.Module, modules: list[torch.nn.Module], sparse: type[torch.nn.Module]):
        self._modules = [(module, type(module)) for module in modules]
        for module in modules:
            module.__class__ = sparse
        self._hook = decoder.register_forward_pre_hook(_see, with_kwargs=True)

    def undo(self) -> None:
        """Puts transformers' own attention back. Caches may be used further; a second call does nothing."""
        self._hook.remove()
        for module, own in self._modules:
            module.__class__ = own
        self._modules = []

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def _see(decoder: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Refuses what is not served, and gives the layers a `Seen` in the place of a mask of all queries and keys."""
    given = dict(zip(_NAMES, args)) | kwargs
    mask, cache = given.get("attention_mask"), given.get("cache", given.get("past_key_values"))
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]

    def refuse(what: str) -> ValueError:
        return ValueError(f"sparse_mla_torch.transformers: {what}")

    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        raise refuse(
            "attention_mask must be [batch, tokens]; a static cache makes masks of all keys, and is not served"
        )
    if cache is not None and not isinstance(cache, DynamicCache):
        raise refuse(f"the cache must be a DynamicCache, got {type(cache).__name__}")
    attentions = given.get("output_attentions")
    if decoder.config.output_attentions if attentions is None else attentions:
        raise refuse("there are no weights of all keys: output_attentions is not served")
    if decoder.training and decoder.config.attention_dropout:
        raise refuse("attention_dropout is not served: set it to 0")
    if tokens is None:
        return args, kwargs  # which transformers refuses
    past = cache.get_seq_length() if cache is not None else 0
    total = past + tokens.shape[1]
    position_ids = given.get("position_ids")
    if mask is not None:
        mask = mask[:, :total].to(tokens.device)
        if mask.shape[1] < total:  # as in transformers, keys behind the mask's end are not seen
            mask = torch.nn.functional.pad(mask, (0, total - mask.shape[1]))
        mask = None if bool(mask.all()) else mask.bool()  # the step's only wait for the device
    elif cache is None and position_ids is not None and find_packed_sequence_indices(position_ids) is not None:
        raise refuse("sequences packed into one row are not served: give them rows of their own")
    given["attention_mask"] = {"indexed_attention": Seen(past, mask)}  # V4 takes the first mask of any name
    return (), given

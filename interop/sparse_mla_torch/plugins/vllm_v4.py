"""vLLM's layers of DeepSeek-V4 and V4.1 with our kernels where they call FlashMLA, and with heads not padded."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from sparse_mla_torch import flash_mla
from sparse_mla_torch.plugins import calls, vllm_v41

_LAYER = "DeepseekV4FlashMLAAttention"
_CALLERS = {"_forward_decode": "flash_mla_with_kvcache", "_forward_prefill": "flash_mla_sparse_fwd"}
# The arguments that vLLM's functions take, of the names that `flash_mla`'s have; it passes them by name.
_ARGUMENTS = {
    "flash_mla_with_kvcache": (
        *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"),
        *("softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache"),
        *("extra_indices_in_kvcache", "topk_length", "extra_topk_length", "out"),
    ),
    "flash_mla_sparse_fwd": ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "out"),
}
# Heads that FlashMLA's kernels take: all of them, and prefill on SM90.
_HEADS, _SM90_PREFILL_HEADS = (64, 128), (8, 16, 32, 64, 128)


@functools.cache
def attention_class(theirs: type) -> type:
    """A subclass of vLLM's layer on FlashMLA whose calls are ours; another layer class stays as it is.

    Raises:
      AttributeError, TypeError: the class is not as it was when this was written.
    """
    calls.log_under("vllm")
    if theirs.__name__ != _LAYER:
        calls.log.warning("jax-sparse-mla leaves %s to vLLM: only %s is served", theirs.__name__, _LAYER)
        return theirs

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        theirs.__init__(self, *args, **kwargs)
        calls.warm_up(self.n_local_heads, self.head_dim)

    methods: dict[str, Any] = {"get_padded_num_q_heads": classmethod(lambda cls, num_heads: num_heads)}
    methods["__init__"] = __init__
    methods["__doc__"] = f"{_LAYER} with the kernels of jax-sparse-mla."
    for method, name in _CALLERS.items():
        caller = getattr(theirs, method)
        function, arguments = caller.__globals__[name], _ARGUMENTS[name]
        if name not in caller.__code__.co_names or not {*inspect.signature(function).parameters} >= {*arguments}:
            raise TypeError(f"{method} does not call {name} with {', '.join(arguments)}")
        # The method with our function in the place of vLLM's: its module is left as it is.
        methods[method] = types.FunctionType(
            caller.__code__,
            caller.__globals__ | {name: functools.partial(_serve, name, function)},
            *(caller.__name__, caller.__defaults__, caller.__closure__),
        )
        methods[method].__kwdefaults__ = caller.__kwdefaults__
    return type("JaxSparseMLAV4Attention", (theirs,), methods)


def _serve(name: str, theirs: Callable[..., Any], **kwargs: Any) -> Any:
    ours = getattr(flash_mla, name)
    padded = functools.partial(_padded, name, theirs, **kwargs)
    if name == "flash_mla_with_kvcache":
        ours = functools.partial(ours, kv_layout=vllm_v41.layout_of(kwargs["k_cache"]))
    return calls.ours_or_theirs(name, lambda: ours(**kwargs, beside_flashmla=True), padded)


def _padded(name: str, theirs: Callable[..., Any], **kwargs: Any) -> Any:
    """vLLM's own function, with heads of zeros where its kernel does not take so few."""
    q, out = kwargs["q"], kwargs.get("out")
    heads, padded = q.shape[-2], _heads_of_kernel(name, q)
    if heads == padded:
        return theirs(**kwargs)
    sink = kwargs.get("attn_sink")
    kwargs["q"] = torch.nn.functional.pad(q, (0, 0, 0, padded - heads))
    kwargs["attn_sink"] = None if sink is None else torch.nn.functional.pad(sink, (0, padded - heads))
    kwargs.pop("out", None)
    result, *statistics = theirs(**kwargs)
    result = result[..., :heads, :]
    return (result if out is None else out.copy_(result), *(x[:, :heads] for x in statistics))


def _heads_of_kernel(name: str, q: torch.Tensor) -> int:
    on_sm90 = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9
    served = _SM90_PREFILL_HEADS if name == "flash_mla_sparse_fwd" and on_sm90 else _HEADS
    return next((n for n in served if n >= q.shape[-2]), q.shape[-2])

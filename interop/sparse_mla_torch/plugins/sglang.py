"""SGLang: `JAX_SPARSE_MLA_SGLANG=1` puts ours around the two functions through which it calls FlashMLA.

Entry point of `sglang.srt.plugins`, run in every process. SGLang applies the hooks before its attention backends import
the functions. Their graphs, schedules and metadata stay SGLang's. It pads the heads of a rank to 64 or 128 for
FlashMLA; around V3.2's and V4's attention we remember how many there are, so that ours computes no padding.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparse_mla_torch.plugins.imports import or_leave, when_imported

if TYPE_CHECKING:
    import torch

SWITCH = "JAX_SPARSE_MLA_SGLANG"
TESTED = ("0.5.23",)  # SGLang's versions
MODULE = "sglang.kernels.ops.attention.flash_mla_interface"
V32_BACKEND = "sglang.srt.layers.attention.dsa_backend"
V4_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
# Rows of V4 that are decoded without the padding. Queries are copied for that, which a launch of some 2 µs does, so it
# must gain more: 64 heads instead of 16 cost 2.8 µs with 8 rows, 12.1 with 64, but 3.6 with 256 (hopper_decode.json).
ROWS_WORTH_A_COPY = range(8, 129)

log = logging.getLogger("sglang.jax_sparse_mla")
_registered: list[str] = []  # in this process


class _Unpadded(threading.local):
    """Of the step that runs in a thread.

    Attributes:
      q: V3.2's queries of a decode before they were padded, `[batch, 1, heads, 576]`.
      heads: of V4 on this rank.
      is_decode: whether V4's step is a decode; a graph of an extend wants all heads back.
      left: whether ours has left V3.2's prefill to SGLang.
    """

    q: torch.Tensor | None = None
    heads: int | None = None
    is_decode = False
    left = False


_unpadded = _Unpadded()


def register() -> None:
    """Registers the hooks, once in a process; leaves an SGLang alone that is not as it was when this was written."""
    if os.environ.get(SWITCH, "") not in ("", "0") and not _registered:
        or_leave("SGLang", _register, log)


def _register() -> str | None:
    """Why nothing was registered; None if it is."""
    from sglang.version import __version__

    if not __version__.startswith(TESTED):
        return f"its version {__version__} is none of {', '.join(TESTED)}"
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sparse_mla_torch.plugins import calls, sglang_v41

    hooks = [(MODULE, flash_mla_with_kvcache, _DECODE), (MODULE, flash_mla_sparse_fwd, _PREFILL)]
    hooks += sglang_v41.HOOKS if sglang_v41.is_asked_for() else ()
    for module, hook, parameters in hooks:
        if why := _differs(getattr(importlib.import_module(module), hook.__name__), hook.__name__, parameters):
            return why
    calls.log_under("sglang")
    for module, hook, _ in hooks:
        HookRegistry.register(f"{module}.{hook.__name__}", hook, HookType.AROUND)
    when_imported(V32_BACKEND, _without_v32s_padding, log)
    when_imported(V4_BACKEND, _keep_heads, log)
    _registered.append(MODULE)
    log.info("jax-sparse-mla is asked first where SGLang calls FlashMLA")
    return None


def _differs(function: Any, name: str, parameters: Iterable[str]) -> str | None:
    """Whether SGLang's function takes other arguments than ours; one that has been hooked shows its own."""
    theirs = list(inspect.signature(function).parameters)
    return None if theirs == list(parameters) else f"{name} takes {', '.join(theirs)}"


def _replace(cls: type, name: str, ours: Any) -> None:
    """Puts ours in the place of a method, unless that takes other arguments."""
    theirs = getattr(cls, name)
    if why := _differs(theirs, ours.__name__, inspect.signature(ours).parameters):
        raise TypeError(why)
    setattr(cls, name, functools.wraps(theirs)(ours))


def _warm_up(backend: type, heads_and_dim: Callable[[Any], tuple[int, int]]) -> None:
    """Has SGLang's backend prepare prefill as soon as it is made."""
    theirs = backend.__init__

    @functools.wraps(theirs)
    def make(self, *args, **kwargs):
        theirs(self, *args, **kwargs)
        from sparse_mla_torch.plugins.calls import warm_up

        or_leave("prefill's warm-up", lambda: warm_up(*heads_and_dim(self)), log)

    backend.__init__ = make


def _without_v32s_padding(module: ModuleType) -> None:
    """Has V3.2's decode leave its queries in `_unpadded`, and its prefill ask ours before it pads them.

    A function that takes other arguments is left as it is.
    """
    backend = module.DeepseekSparseAttnBackend
    decodes = backend._forward_flashmla_kv

    def decode(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1):
        _unpadded.q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        try:
            return decodes(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)
        finally:
            _unpadded.q = None

    _replace(backend, "_forward_flashmla_kv", decode)
    prefills = backend._forward_flashmla_sparse

    def prefill(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None, attn_sink=None):
        from sparse_mla_torch.plugins.calls import ours_or_theirs

        def ours():
            lengths = topk_length if topk_length is not None and len(topk_length) == len(q_all) else None
            return _prefill(q_all, kv_cache, page_table_1.unsqueeze(1), sm_scale, v_head_dim, attn_sink, lengths)[0]

        def theirs():
            _unpadded.left = True
            try:
                return prefills(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length, attn_sink)
            finally:
                _unpadded.left = False

        return ours_or_theirs("flash_mla_sparse_fwd", ours, theirs)

    _replace(backend, "_forward_flashmla_sparse", prefill)
    _warm_up(backend, lambda made: (made.num_dcp_q_heads, made.kv_lora_rank + made.qk_rope_head_dim))


def _keep_heads(module: ModuleType) -> None:
    """Has V4's attention leave the number of its heads in `_unpadded`."""
    backend = module.DeepseekV4AttnBackend
    theirs = backend.forward

    def forward(self, q, k, v, layer, forward_batch, *args, **kwargs):
        _unpadded.heads, _unpadded.is_decode = layer.tp_q_head_num, forward_batch.forward_mode.is_decode()
        try:
            return theirs(self, q, k, v, layer, forward_batch, *args, **kwargs)
        finally:
            _unpadded.heads = None

    def heads_and_dim(made):
        config = made.model_runner.model_config
        return config.num_attention_heads // module.get_parallel().attn_tp_size, config.head_dim

    _replace(backend, "forward", forward)
    _warm_up(backend, heads_and_dim)


def _without_padding(q: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The queries and the sink of the heads that a rank has."""
    if _unpadded.q is not None:
        return _unpadded.q, sink  # V3.2 has no sink
    heads = _unpadded.heads if _unpadded.is_decode else None
    if heads is None or heads >= q.shape[2] or len(q) not in ROWS_WORTH_A_COPY:
        return q, sink
    return q[:, :, :heads], None if sink is None else sink[:heads]


def flash_mla_with_kvcache(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """The hook around SGLang's decode."""
    from sparse_mla_torch.plugins.calls import ours_or_theirs

    return ours_or_theirs("flash_mla_with_kvcache", lambda: _decode(*args, **kwargs), lambda: theirs(*args, **kwargs))


def flash_mla_sparse_fwd(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    """The hook around SGLang's prefill."""
    from sparse_mla_torch.plugins.calls import ours_or_theirs

    if _unpadded.left:
        return theirs(*args, **kwargs)
    return ours_or_theirs("flash_mla_sparse_fwd", lambda: _prefill(*args, **kwargs), lambda: theirs(*args, **kwargs))


# The arguments of SGLang's functions, in its order, under the names that `flash_mla`'s have.
_DECODE = (
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"),
    *("softmax_scale", "causal", "descale_q", "descale_k", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache"),
    *("extra_indices_in_kvcache", "topk_length", "extra_topk_length", "kv_format", "use_legacy"),
)
_PREFILL = ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length", "use_legacy")


def _decode(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of padded queries have only the heads that are no padding, which are those that SGLang takes."""
    from sparse_mla_torch import flash_mla
    from sparse_mla_torch.plugins import sglang_v41

    arguments = dict(zip(_DECODE, args)) | kwargs
    arguments["kv_layout"] = sglang_v41.layout_of(arguments)
    arguments["q"], arguments["attn_sink"] = _without_padding(arguments["q"], arguments.get("attn_sink"))
    # With a schedule of tensors SGLang does not say that an indexed cache is FP8.
    arguments["is_fp8_kvcache"] = arguments.get("is_fp8_kvcache") or None
    return flash_mla.flash_mla_with_kvcache(**arguments, beside_flashmla=True)


def _prefill(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Of V4 the output has the heads that SGLang pads too, which it does not read: graphs of an extend have room for
    them. The statistics, which it does not take, have not."""
    arguments = dict(zip(_PREFILL, args)) | kwargs
    q, sink, heads = arguments["q"], arguments.get("attn_sink"), _unpadded.heads
    if heads is None or heads >= q.shape[1]:
        return _unpadded_prefill(**arguments)
    arguments |= {"q": q[:, :heads], "attn_sink": None if sink is None else sink[:heads]}
    out, *statistics = _unpadded_prefill(**arguments)
    padded = out.new_empty((*q.shape[:2], out.shape[2]))
    padded[:, :heads] = out
    return padded, *statistics


def _unpadded_prefill(
    *, use_legacy: bool = True, d_v: int = 512, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The statistics of SGLang's legacy kernel, its default, are in base 2.

    A decode of few rows makes no largest logits: SGLang takes the output alone.
    """
    from sparse_mla_torch import flash_mla
    from sparse_mla_torch.plugins import short_prefill

    if d_v == 512 and (decoded := short_prefill.decode(**arguments)):
        out, lse = decoded
        return out, None, lse / math.log(2) if use_legacy else lse
    return flash_mla.flash_mla_sparse_fwd(
        **arguments, d_v=d_v, return_log2_lse=True if use_legacy else None, beside_flashmla=True
    )

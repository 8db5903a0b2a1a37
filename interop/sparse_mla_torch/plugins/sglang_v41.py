"""SGLang's native caches of DeepSeek-V4.1 on SM90: `SGLANG_DSV4_KV_LAYOUT=v41` or `v41_new`, which it has for SM100.

The sizes of SGLang's pools, its writers and the FP4 keys of its indexer follow the layout, and need no SM100. What does
is the choice of the layout, the gather before a prefill, and FlashMLA's decode. Ours take their place, on SM90 alone.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from sparse_mla_torch.plugins import calls

if TYPE_CHECKING:
    from collections.abc import Callable

LAYOUT, COMPRESSED_LAYOUT = "SGLANG_DSV4_KV_LAYOUT", "SGLANG_DSV4_COMPRESSED_KV_LAYOUT"
_MODES = ("v41", "v41_new")  # of LAYOUT
_KERNELS = "sglang.kernels.ops.attention.dsv4"
# Our names of SGLang's layouts.
_OURS = {"v41": "V41_FP8_SPLIT", "v41_fp4": "V41_FP4_SPLIT", "v41_new": "V41_FP8", "v41_fp4_new": "V41_FP4"}
_BYTES = 528  # a token of the window's cache


def is_asked_for() -> bool:
    """Whether the user wants the caches, and the GPU is one on which SGLang refuses them and we do not."""
    return os.environ.get(LAYOUT, "").lower() in _MODES and torch.cuda.is_available() and _is_sm90()


def _is_sm90() -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability()[0] == 9


def select_dsv4_kv_layout(theirs: Callable[[], Any]) -> Any:
    """The hook around SGLang's choice: the layout that the user names, and the option of the compressed caches."""
    from sglang.srt.runtime_context import get_exec

    if get_exec().kernel.dsv4_attn_backend in ("trtllm", "flashmla_mega"):  # they read other caches
        return theirs()
    layout = importlib.import_module(f"{_KERNELS}.kv_layout").KVLayout.parse(os.environ[LAYOUT])
    calls.log.info("jax-sparse-mla decodes from SGLang's %s caches on SM90", layout.value)
    return layout, os.environ.get(COMPRESSED_LAYOUT, "auto").lower()


def dequantize_k_cache_paged_v41(theirs: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """The hook around SGLang's gather of a prefill's rows."""
    function = dequantize_k_cache_paged_v41.__name__
    return calls.ours_or_theirs(function, lambda: _gather(*args, **kwargs), lambda: theirs(*args, **kwargs))


def _gather(
    quant_k_cache: torch.Tensor,
    page_table_1_flattened: torch.Tensor,
    page_size: int,
    out: torch.Tensor | None = None,
    layout: Any = "v41",
) -> torch.Tensor:
    """bfloat16 `[n, 1, 512]` of slots `[n]`, into `out` where it is given; zeros where there is no slot."""
    from jax_sparse_mla.kv_cache import KVLayout, PagedKV
    from sparse_mla_torch.operations.kv_cache import gather_kv

    ours = getattr(KVLayout, _OURS[getattr(layout, "value", layout)])
    cache = PagedKV(data=quant_k_cache.view(torch.uint8), layout=ours, page_size=page_size)
    slots = page_table_1_flattened.to(torch.int32)
    rows = gather_kv(cache, slots, out=None if out is None else out.view(len(slots), 512))
    return rows.unsqueeze(1) if out is None else out


def layout_of(arguments: dict[str, Any]) -> str | None:
    """Our name of the layout of a decode's cache, where its bytes per token do not tell it; None where they do.

    Pages in which a token's scales follow it go to the wheel's new kernels. V3.2's rows without rope, which have as
    many bytes, come with a schedule of tensors, or with their format's name, which is refused.
    """
    if arguments["k_cache"].shape[-1] != _BYTES or isinstance(arguments["tile_scheduler_metadata"], torch.Tensor):
        return None
    return _OURS["v41" if arguments.get("use_legacy", True) else "v41_new"]


# SGLang's modules, the hooks around their functions, and what these take.
HOOKS = (
    ("sglang.srt.mem_cache.deepseek_v4_memory_pool", select_dsv4_kv_layout, ()),
    (
        *(f"{_KERNELS}.dequant_k_cache", dequantize_k_cache_paged_v41),
        ("quant_k_cache", "page_table_1_flattened", "page_size", "out", "layout"),
    ),
)

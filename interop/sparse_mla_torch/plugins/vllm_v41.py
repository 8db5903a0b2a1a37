"""vLLM's native caches of DeepSeek-V4.1 on SM90: `--kv-cache-dtype nvfp4_ds_mla`, which it has for SM100 alone.

A token has 528 bytes in a window's cache and 288 in a compressed one. vLLM's page sizes, writers and gathers follow the
bytes, and the indexer's keys are FP8 on SM90 whatever the caches are. What asks for SM100 is the choice of the records,
an instruction of the writer, and FlashMLA's decode.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import triton
import triton.language as tl

_ATTENTION, _CHOICE = "vllm.models.deepseek_v41.attention", "_use_v41_mxfp8_kv_record"
_WRITER, _CONVERSION = "vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache", "_fp32x2_to_fp4x2"
_DTYPE = "nvfp4_ds_mla"
_WINDOW_BYTES, _LAYOUT = 528, "V41_FP8"  # a token's scales follow its values


@triton.jit
def fp32x2_to_fp4x2(x_lo, x_hi):
    """Bytes of two e2m1 codes, x_lo's below: what PTX's cvt.rn.satfinite.e2m1x2 makes of numbers."""
    return (_code(x_lo) | (_code(x_hi) << 4)).to(tl.uint8)


@triton.jit
def _code(x):
    """Halfway between neighbours a tie goes to the even code; from 6 on all are 6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


def use_records(vllm_config: Any) -> None:
    """Has vLLM keep V4.1's records in this process, where the user asks for them and the GPU is of SM90.

    Raises:
      AttributeError: vLLM is not as it was when this was written.
    """
    from vllm.platforms import current_platform

    if vllm_config.cache_config.cache_dtype != _DTYPE or not current_platform.is_device_capability_family(90):
        return
    replacements = ((_ATTENTION, _CHOICE, lambda: True), (_WRITER, _CONVERSION, fp32x2_to_fp4x2))
    modules = [importlib.import_module(name) for name, *_ in replacements]
    for module, (_, name, _) in zip(modules, replacements):
        getattr(module, name)
    for module, (_, name, ours) in zip(modules, replacements):
        setattr(module, name, ours)


def layout_of(k_cache: torch.Tensor) -> str | None:
    """Our name of the layout of a window's cache of V4.1; None where its bytes tell it."""
    return _LAYOUT if k_cache.shape[-1] == _WINDOW_BYTES else None

"""vLLM in a process without a GPU that takes itself for one on an H200: import it before anything of vLLM's."""

from __future__ import annotations

import os
import sys
import types

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

# Compiled operators, which no call here needs: they want torch's CUDA libraries to be loaded. With FlashMLA's "there",
# vLLM takes its own Python functions, and one that is called all the same fails.
_COMPILED = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa3_C", "_flashmla_C", "_flashmla_extension_C")
for _name in (f"vllm.{name}" for name in _COMPILED):
    sys.modules[_name] = types.ModuleType(_name)

import torch
import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class H200(CudaPlatformBase):
    """Whose tensors are on the CPU."""

    device_type = "cpu"

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id=0):
        return "H200"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 141 << 30

    @classmethod
    def num_compute_units(cls, device_id=0):
        return 132

    @classmethod
    def is_pin_memory_available(cls):
        return False


vllm.platforms._current_platform = H200()
torch.accelerator.empty_cache = torch.cuda.empty_cache = lambda: None

from vllm import _custom_ops

for _name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported"):
    setattr(_custom_ops, _name, lambda *args: False)  # asked while modules are imported

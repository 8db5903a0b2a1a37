"""SGLang in a process without a GPU that takes itself for one on an H200: import it before anything of SGLang's.

Tensors are on the CPU and Triton's kernels run in its interpreter. Packages and kernels that need a GPU are stand-ins:
FlashMLA's schedules are made, its kernels fail; kernels that nvcc compiles at run time do nothing, but for two of whose
results the attention reads.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import re
import sys
import types

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
os.environ["SGLANG_DSA_FUSE_TOPK"] = "0"  # SGLang's test kit gives positions, and not slots

import sparse_mla_torch.ops  # noqa: F401 - JAX looks for GPUs when it is imported: before torch pretends to have one
import torch
import triton_interpreter  # noqa: F401 - of tests/support: without it the kit's quantiser takes minutes
from quiet import Quiet


class StandIn(type):
    """A class of any name whose instances may be made and called."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


def stand_in(name: str) -> type:
    do_nothing = {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, *args, **kwargs: None}
    return StandIn(name, (), do_nothing)


class Module(types.ModuleType):
    __path__ = ()
    __version__ = "99.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, stand_in(name))
        return getattr(self, name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of these packages, in which there is whatever is asked for."""

    PACKAGES = (
        *("torchvision", "torchaudio", "soundfile", "timm", "gguf", "kernels", "cuda", "cutlass"),
        *("tilelang", "deep_gemm", "sgl_kernel", "flashinfer", "flash_attn", "flash_mla", "torch_memory_saver"),
    )

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


PROPERTIES = types.SimpleNamespace(
    **{"name": "H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 141 << 30},
    **{"warp_size": 32, "L2_cache_size": 50 << 20},
)


def pretend_to_have_a_gpu() -> None:
    torch.version.cuda = "13.0"
    answers = {
        **{"is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True},
        **{"get_device_capability": (9, 0), "get_device_name": PROPERTIES.name, "get_device_properties": PROPERTIES},
        **{"mem_get_info": (140 << 30, 141 << 30), "is_current_stream_capturing": False, "current_stream": Quiet()},
        **{"manual_seed_all": None, "synchronize": None, "set_rng_state": None, "empty_cache": None},
        **{"set_device": None},
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.stream = Quiet
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()


class FlashMLASchedMeta:
    """FlashMLA's schedule."""

    def __init__(self, tile_scheduler_metadata=None, num_splits=None):
        self.have_initialized, self.config = False, None
        self.tile_scheduler_metadata, self.num_splits = tile_scheduler_metadata, num_splits


def schedule_tensors(seqlens, *args, **kwargs):
    return torch.zeros(132, 8, dtype=torch.int32), torch.zeros(len(seqlens) + 1, dtype=torch.int32)


def fail(*args, **kwargs):
    raise RuntimeError("FlashMLA's own kernel was called")


def put_flash_mla() -> None:
    """The vendor's wheel."""
    wheel, interface = types.ModuleType("flash_mla"), types.ModuleType("flash_mla.flash_mla_interface")
    wheel.__path__ = []
    wheel.FlashMLASchedMeta = interface.FlashMLASchedMeta = FlashMLASchedMeta
    wheel.get_mla_metadata = lambda *args, **kwargs: (FlashMLASchedMeta(), None)
    wheel.get_mla_decoding_metadata = schedule_tensors
    wheel.flash_mla_with_kvcache = wheel.flash_mla_sparse_fwd = fail
    wheel.fused_norm_rope_attn_rope_cast = types.SimpleNamespace()
    sys.modules |= {"flash_mla": wheel, "flash_mla.flash_mla_interface": interface}


class CompiledAtRunTime:
    """The kernels of one of SGLang's CUDA sources."""

    def set_mla_kv_buffer(self, buffer, slots, nope, rope, warps, skipped):
        kept = slots != skipped
        rows = torch.cat([nope.view(torch.uint8), rope.view(torch.uint8)], -1)
        buffer.view(torch.uint8)[slots[kept], : rows.shape[1]] = rows[kept]

    def concat_mla_absorb_q(self, nope, rope, out):
        torch.cat([nope, rope], -1, out=out)

    def __getattr__(self, name):
        return lambda *args, **kwargs: 132


def put_run_time_kernels() -> None:
    """In every module of SGLang that has been imported."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang") and "load_jit" in vars(module):
            module.load_jit = lambda *names, **options: CompiledAtRunTime()


def prepare_kit(kit) -> None:
    """Puts stand-ins into the kit of V4, and into what both kits import."""
    import deep_gemm
    import sglang.srt.layers.attention.deepseek_v4_backend as backend
    import sglang.srt.layers.attention.dsv4.compressor_v2 as compressor

    kit.quant_to_nope_fp8_rope_bf16_pack_triton = quantise
    # The compressor's plan, made by a kernel that is compiled at run time and not read here.
    backend.create_paged_compressor_data = compressor.create_paged_compressor_data = lambda *args, **kwargs: None
    deep_gemm.get_num_sms = lambda: 132
    deep_gemm.get_paged_mqa_logits_metadata = lambda *args, **kwargs: torch.zeros(133, 2, dtype=torch.int32)
    importlib.import_module("sglang.kernels.ops.attention.dsv4.attn")  # to be given the stand-ins, too
    put_run_time_kernels()
    pad = importlib.import_module("sglang.kernels.ops.attention.pad")
    importlib.import_module("sglang.srt.layers.attention.dsa_backend").seqlens_expand_triton = on_the_cpu(
        pad.seqlens_expand_triton
    )


def prepare_v41(kit) -> None:
    """Gives the kit of V4 the caches that SGLang chooses for V4.1, written by the quantisers of SGLang's own tests.

    Its writers are compiled at run time. The kit's reference takes compressed rows as the cache gives them back.
    """
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
    from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as quantisers

    def pool(**options):
        layout, compressed = pools.select_dsv4_kv_layout()
        kit.layouts = layout, pools.resolve_compressed_kv_layout(layout, options["compression_ratios"][0], compressed)
        return pools.DeepSeekV4TokenToKVPool(kv_layout=layout, compressed_kv_layout=compressed, **options)

    def tokens(layout, rows):
        """Of a page each: a token's values, and its scales behind them."""
        quantise = quantisers.quantize_k_cache_v41_fp4 if layout.is_fp4 else quantisers.quantize_k_cache_v41
        return quantise(rows.unsqueeze(1))[:, : layout.bytes_per_token].split(
            [layout.data_bytes, layout.scale_bytes], 1
        )

    def store(layout, buffer, page_size, slots, rows):
        data_stride, scales_at, scale_stride = layout.row_addressing(page_size)
        page, offset = slots // page_size * buffer.shape[1], slots % page_size
        places = page + offset * data_stride, page + scales_at + offset * scale_stride
        for at, written in zip(places, tokens(layout, rows)):
            buffer.view(torch.uint8).view(-1)[at[:, None] + torch.arange(written.shape[1])] = written

    def of_window(self, layer_id, swa_loc, cache_nope_fp8_rope_bf16_pack):
        buffer = self.get_swa_raw_buffer(layer_id)
        store(self.kv_layout, buffer, self.swa_page_size, swa_loc, cache_nope_fp8_rope_bf16_pack)

    def compressed(self, layer_id, loc, cache_nope_fp8_rope_bf16_pack):
        rows, layout = cache_nope_fp8_rope_bf16_pack, self.get_extra_key_layout(layer_id)
        store(layout, self.get_extra_key_buffer(layer_id), self.get_extra_key_page_size(layer_id), loc, rows)
        back = quantisers.dequantize_k_cache_v41_fp4 if layout.is_fp4 else quantisers.dequantize_k_cache_v41
        rows.copy_(back(torch.cat(tokens(layout, rows), 1), 1)[:, 0])

    kit.DeepSeekV4TokenToKVPool, kit.quant_to_nope_fp8_rope_bf16_pack_triton = pool, lambda rows: rows
    pools.DeepSeekV4TokenToKVPool.set_swa_key_buffer_radix = of_window
    pools.DeepSeekV4TokenToKVPool.set_extra_key_buffer = compressed


def on_the_cpu(function):
    """SGLang's function without its assertions that tensors are on a GPU; its Triton kernel is interpreted."""
    source = re.sub(r"assert \w+\.is_cuda\n", "pass\n", inspect.getsource(function))
    names = dict(vars(inspect.getmodule(function)))
    exec(source, names)
    return names[function.__name__]


def quantise(k: torch.Tensor):
    """The kit's quantiser: Triton 3.6's interpreter rounds float32 to float8 otherwise than a GPU."""
    from sglang.test.kernels.deepseek_v4 import k_cache_reference

    groups = k[:, :448].float().view(-1, 7, 64)
    exponents = torch.ceil(torch.log2((groups.abs().amax(-1) / 448).clamp_min(2.0**-22)))
    values = (groups / torch.exp2(exponents)[..., None]).to(torch.float8_e4m3fn)
    return k_cache_reference.NopeFp8RopeBf16Pack(
        k_nope_fp8=values.view(-1, 448),
        k_rope_bf16=k[:, 448:].contiguous(),
        scale_k_nope_ue8m0=(exponents + 127).to(torch.uint8),
    )


sys.meta_path.insert(0, Absent())
pretend_to_have_a_gpu()
put_flash_mla()
for _name in ("sglang.kernels.jit.utils.compile", "sglang.kernels.jit.utils.compile.loader"):
    importlib.import_module(_name)
put_run_time_kernels()

"""Other projects' kernels, loaded from their own wheels while a benchmark runs; nothing of theirs is copied here.

`find(name)` gives a peer's module, or the reason why it cannot be measured, which the results then print. SGLang's
kernels are loaded without its server: the packages above them are replaced by empty ones, and the few helpers of the
server that the kernels import by stand-ins that answer for a CUDA machine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.harness import NotMeasured

_SGLANG = "sglang.kernels.ops.attention.dsv4"
_MODULES = {
    "flash_mla": "flash_mla",
    "fa3": "sgl_kernel.flash_attn",
    "deep_gemm": "deep_gemm",
    "flashinfer": "flashinfer.topk",
    "sglang gather": f"{_SGLANG}.dequant_k_cache",
    "sglang merge": f"{_SGLANG}.sparse_prefill_kernels",
    "sglang topk": f"{_SGLANG}.topk",
    "sglang store": f"{_SGLANG}.attn",
    "sglang rope": f"{_SGLANG}.norm_rope",
    "sglang compress": f"{_SGLANG}.compress",
    "sglang lengths": f"{_SGLANG}.metadata_kernel",
    "sglang pages": f"{_SGLANG}.attn_metadata_kernels",
    "sglang index keys": "sglang.kernels.ops.kvcache.dsa_index_k_cache",
    "sglang workspace": "sglang.srt.layers.attention.dsv4.sparse_prefill_utils",
}
# These would import the whole server, or register kernels that no one asks for.
_EMPTY_PACKAGES = ("", ".srt", ".kernels", ".kernels.jit", ".kernels.ops", ".kernels.ops.attention", _SGLANG[6:])
_EMPTY_PACKAGES += (".kernels.ops.quantization", ".srt.utils")
_EMPTY_PACKAGES += (".kernels.ops.kvcache", ".srt.layers", ".srt.layers.attention")
_EMPTY_PACKAGES += (".srt.layers.attention.dsa", ".srt.layers.attention.dsv4")


@functools.cache
def _loaded(name: str) -> ModuleType | str:
    module = _MODULES[name]
    try:
        if module.startswith("sglang"):
            _prepare_sglang()
        return importlib.import_module(module)
    except Exception as error:  # whatever a peer's import raises is the reason why it is not measured
        return f"{type(error).__name__}: {error}"[:300]


def find(name: str) -> ModuleType:
    """A peer's module; NotMeasured, with the reason, where it cannot be imported."""
    if isinstance(module := _loaded(name), str):
        raise NotMeasured(module)
    return module


def sglang() -> dict[str, ModuleType]:
    """SGLang's modules of a step by their names without "sglang"; NotMeasured where one cannot be imported."""
    names = "topk", "store", "rope", "compress", "lengths", "pages", "gather", "index keys", "workspace"
    return {name: find(f"sglang {name}") for name in names}


def _prepare_sglang() -> None:
    if "sglang" in sys.modules:
        return
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        raise ImportError("no package sglang on the path")
    (root,) = spec.submodule_search_locations
    for suffix in _EMPTY_PACKAGES:
        _empty_package("sglang" + suffix, Path(root, *suffix.split(".")[1:]))
    helpers = {name: lambda: False for name in ("is_hip", "is_xpu", "is_npu", "is_musa", "is_gfx95_supported")}
    helpers |= {"is_cuda": lambda: True, "ceil_align": _ceil_align, "get_cuda_version": _cuda_version}
    vars(sys.modules["sglang.srt.utils"]).update(helpers)
    _module("sglang.srt.utils.common", **helpers, async_h2d=_to_device)
    _module(
        "sglang.srt.layers.attention.dsa.utils",
        INDEXER_K_CACHE_PRESHUFFLE_TILE=0,  # of AMD's cache layout
        aiter_can_use_preshuffle_paged_mqa=lambda: False,
    )
    _module("sglang.kernels.ops.quantization.fp8_kernel", is_fp8_fnuz=lambda: False)


def _empty_package(name: str, folder: Path) -> None:
    """A package that is its folder alone; `origin` is where SGLang looks for its CUDA sources."""
    package = _module(name)
    package.__path__ = [str(folder)]
    package.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=str(folder / "__init__.py"), is_package=True)


def _module(name: str, **contents) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(contents)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def _to_device(values: list, *, dtype, device):
    import torch

    return torch.tensor(values, dtype=dtype, device=device)


def _ceil_align(x: int, to: int) -> int:
    return -(-x // to) * to


def _cuda_version() -> tuple[int, ...]:
    import torch

    return tuple(map(int, torch.version.cuda.split(".")))

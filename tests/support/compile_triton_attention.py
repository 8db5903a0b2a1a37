"""Run by test_triton_attention.py: compiles the attention kernel for a compute capability, without a GPU.

A script, not a test module: another test may have turned Triton's interpreter on in its process. Prints one JSON list.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jax_sparse_mla.kernels.launch import Device
from jax_sparse_mla.kernels.triton.sparse_mla import plan as planning
from jax_sparse_mla.kernels.triton.sparse_mla.kernel import combine_kernel, sparse_mla_kernel
from jax_sparse_mla.kernels.triton.sparse_mla.launch import launches
from jax_sparse_mla.kv_cache.layout import KVLayout, workspace_layout

TYPES = {"q": "*bf16", "sink": "*fp32", "qk_scale": "fp32", "lse": "*fp32", "max_logits": "*fp32"}
TYPES |= {name: "*i32" for name in ("indices", "lengths", "extra_indices", "extra_lengths")}
TYPES |= {"partial": "*fp32", "partial_lse": "*fp32"}


def compiled(kernel, constexprs: dict, types: dict, capability: tuple[int, int], **options):
    """The kernel's machine code, by the ptxas of triton's wheel."""
    types = TYPES | types
    signature = {name: "constexpr" if name in constexprs else types.get(name, "i32") for name in kernel.arg_names}
    # Pointers are multiples of 16, as jax-triton and torch promise.
    pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    source = ASTSource(kernel, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in pointers})
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return triton.compile(source, target=target, options=options)


def compiled_attention(layout: KVLayout, num_heads: int, capability: tuple[int, int], *, prefill: bool, tile=None):
    """The kernel as it is launched, and its launch."""
    sizes = [(0, 0), (0, 0)] if prefill else [(size, layout.page_bytes(size)) for size in (256, 64)]
    scopes = [planning.Scope(topk, 1, 16_384, *size) for topk, size in zip((128, 512), sizes)]
    shape = layout, 64, num_heads, scopes, 0.1, True, Device(capability, 132)
    launch, _ = launches(*shape, max_logits=prefill, may_split=not prefill, tile=tile)
    constants = dict(launch.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    if not prefill:
        constants["max_logits"] = None
    cache = "*bf16" if prefill else "*u8"
    types = {"kv": cache, "extra_kv": cache, "out": "*fp32" if launch.grid[1] > 1 else "*bf16"}
    return compiled(sparse_mla_kernel, constants, types, capability, **options), launch


def describe(name: str, num_heads: int, kernel) -> dict:
    ptx = kernel.asm["ptx"]
    return {
        "layout": name,
        "num_heads": num_heads,
        "shared": kernel.metadata.shared,
        "cubin_bytes": len(kernel.asm["cubin"]),
        "e4m3": "e4m3x2" in ptx,
        "wgmma": "wgmma" in ptx,
        "wide_copies": any("cp.async" in line and "0x10" in line for line in ptx.splitlines()),
    }


def main(capability: tuple[int, int]) -> None:
    rows = []
    for name, num_heads in (("V4_FP8", 64), ("V32_FP8", 128)):
        kernel, _ = compiled_attention(getattr(KVLayout, name), num_heads, capability, prefill=False)
        rows.append(describe(name, num_heads, kernel))
    kernel, _ = compiled_attention(workspace_layout(576), 16, capability, prefill=True)
    rows.append(describe("workspace 576", 16, kernel))
    constexprs = {"HAS_SINK": True, "EMPTY_IS_INF": True, "ALL_SPLITS": 16, "SOME_SPLITS": 8}
    assert len(compiled(combine_kernel, constexprs, {"out": "*bf16"}, capability).asm["cubin"]) > 0
    print(json.dumps(rows))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        main((int(sys.argv[1]), int(sys.argv[2])))

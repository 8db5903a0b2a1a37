"""Compiles the attention kernels for the compute capabilities given, without a GPU; prints a JSON list of facts.

Run by test_triton_attention.py in a process of its own, because Triton's interpreter, once on, replaces the compiler.
"""

from __future__ import annotations

import json
import sys

from compile_triton import compile_kernel

from jax_sparse_mla.attention.index_table import TableShape
from jax_sparse_mla.attention.triton.kernel import combine_kernel, sparse_mla_kernel
from jax_sparse_mla.attention.triton.launch import CallShape, launches
from jax_sparse_mla.kv_cache.layout import KVLayout, workspace_layout
from jax_sparse_mla.launch.describe import Device

# What of the newer layouts is compiled, the second cache's behind a "+": of each tile one capability in every run, and
# for the long test's capabilities the other ways to read rows.
NEWER = dict.fromkeys((80, 90), ("V41_FP8", "V41_FP8+V41_FP4"))
NEWER |= dict.fromkeys((89, 120), ("V41_FP8_SPLIT+V41_FP4_SPLIT", "NOPE_FP8_TENSOR"))
TYPES = {"q": "*bf16", "qk_scale": "fp32"}
TYPES |= {name: "*fp32" for name in ("sink", "scale", "extra_scale", "lse", "max_logits")}
TYPES |= {name: "*i32" for name in ("indices", "lengths", "extra_indices", "extra_lengths")}
TYPES |= {"partial": "*fp32", "partial_lse": "*fp32"}


def compiled(kernel, constants: dict, types: dict, capability: tuple[int, int], **options):
    """The kernel's machine code, by the ptxas of triton's wheel."""
    types = {name: of for name, of in (TYPES | types).items() if name in kernel.arg_names and name not in constants}
    return compile_kernel(kernel, types, constants, 10 * capability[0] + capability[1], **options)


def compiled_attention(
    layout: KVLayout, num_heads: int, capability: tuple[int, int], *, prefill: bool, tile=None, extra_layout=None
):
    """The kernel as it is launched, and its launch."""
    layouts = layout, extra_layout or layout
    sizes = [(0, 0, 0, 0)] * 2 if prefill else [(n, x.page_bytes(n), 0, 0, x) for n, x in zip((256, 64), layouts)]
    scopes = [TableShape(topk, 1, 16_384, *size) for topk, size in zip((128, 512), sizes)]
    shape = CallShape(layout, 64, num_heads, scopes, 0.1, True)
    launch, _ = launches(shape, Device(capability, 132), max_logits=prefill, may_split=not prefill, tile=tile)
    constants = dict(launch.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    if not prefill:
        constants["max_logits"] = None
    if not layout.has_tensor_scale:
        constants |= {"scale": None, "extra_scale": None}
    cache = "*bf16" if prefill else "*u8"
    types = {"kv": cache, "extra_kv": cache, "out": "*fp32" if launch.grid[1] > 1 else "*bf16"}
    return compiled(sparse_mla_kernel, constants, types, capability, **options), launch


def describe(name: str, num_heads: int, kernel) -> dict:
    ptx = kernel.asm["ptx"]
    return {
        "kernel": name,
        "num_heads": num_heads,
        "shared": kernel.metadata.shared,
        "cubin_bytes": len(kernel.asm["cubin"]),
        "e4m3": "e4m3x2" in ptx,
        "wgmma": "wgmma" in ptx,
        "wide_loads": "ld.global.v4" in ptx,
        "wide_copies": any("cp.async" in line and "0x10" in line for line in ptx.splitlines()),
    }


def main() -> None:
    facts = []
    for number in map(int, sys.argv[1].split(",")):
        capability, rows = divmod(number, 10), []
        newer = [(name, 64) for name in NEWER[number]]
        for name, num_heads in (("V4_FP8", 64), ("V32_FP8", 128), *newer):
            layout, *extra = (getattr(KVLayout, x) for x in name.split("+"))
            kernel, _ = compiled_attention(layout, num_heads, capability, prefill=False, extra_layout=(*extra, None)[0])
            rows.append(describe(name, num_heads, kernel))
        kernel, _ = compiled_attention(workspace_layout(576), 16, capability, prefill=True)
        rows.append(describe("workspace 576", 16, kernel))
        constants = {"HAS_SINK": True, "EMPTY_IS_INF": True, "ALL_SPLITS": 16, "SOME_SPLITS": 8}
        rows.append(describe("combine", 0, compiled(combine_kernel, constants, {"out": "*bf16"}, capability)))
        facts += [{"capability": number} | row for row in rows]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

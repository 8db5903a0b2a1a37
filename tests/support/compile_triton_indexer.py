"""Compiles the indexer's and the compressor's kernels for the compute capabilities given, without a GPU.

Run by test_triton_indexer in a process of its own, because Triton's interpreter, once on, replaces the compiler.
Prints a JSON list of facts.
"""

import re

from compile_triton import Array, Recorder, facts, in_ptx

from jax_sparse_mla.compressor import triton as compressor
from jax_sparse_mla.indexer import triton as indexer
from jax_sparse_mla.kv_cache import KVLayout
from jax_sparse_mla.layers import triton as layer
from jax_sparse_mla.layers.write import Step

FLOATS = ("weights_ptr", "scale_ptr")


def types(kernel, **others):
    """Of the kernel's run-time arguments: an index, unless a list above or the caller says otherwise."""
    names = {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")}
    names |= dict.fromkeys(FLOATS, "*fp32")
    names |= {"cache_ptr": "*u8", "cache_in_ptr": "*u8"} | others
    return {name: names[name] for name in kernel.arg_names if name in names}


def cases(capability):
    """(name, kernel, argument types, constants with num_warps) of every kernel, as launched for both models."""
    hardware_fp8 = capability >= 89
    e4m3 = "*fp8e4nv" if hardware_fp8 else "*u8"
    fp8 = {"HARDWARE_FP8": hardware_fp8}
    for hadamard in (True, False):
        constants = fp8 | {"HADAMARD": hadamard}
        for dtype, of in (("*bf16", "bfloat16"), ("*fp32", "float32")):
            kernel = indexer.quantize_index_q_kernel
            pointers = types(kernel, q_ptr=dtype, values_ptr=e4m3)
            yield f"quantise q {dtype} {hadamard}", kernel, pointers, constants | indexer.QUANTIZE_OPTIONS[of]
            kernel = indexer.write_index_k_kernel
            write = constants | {"PAGE_SIZE": 64} | indexer.WRITE_OPTIONS
            yield f"write k {dtype} {hadamard}", kernel, types(kernel, k_ptr=dtype), write
    for rows in (64, 8192):
        for fp4, heads, page_size in ((False, 64, 64), (False, 32, 64), (True, 32, 64), (True, 64, 11)):
            plan = indexer.plan_logits(rows, heads, 512, page_size, 132, fp4=fp4)
            pointers = types(plan.kernel, q_ptr="*bf16" if fp4 else e4m3, out_ptr="*fp32")
            name = f"logits{' of FP4 keys' * fp4} {rows} {heads} {page_size}"
            yield name, plan.kernel, pointers, plan.constants | fp8 | {"FILL": True}
    for ratio, head_dim, rows in ((4, 512, 64), (4, 128, 2048), (128, 512, 8192)):
        yield from launches(capability, f"{ratio} {head_dim}", compress, ratio, head_dim, rows)
    for ratio, rows, layers in ((0, 8, 1), (4, 8, 43), (128, 8, 43)):
        yield from launches(capability, f"{ratio} {rows}", write_layer, ratio, rows, layers)


def launches(capability, name, function, *arguments):
    """The launches that a function describes, as cases."""
    recorder = Recorder(capability)
    function(recorder, *arguments)
    for launch, *case in recorder.cases:
        yield f"{launch} {name}", *case


def compressor_arrays(ratio, head_dim, rows, layers=1):
    """kv, score, ape, norm_weight, inv_freq and the two arrays of the state."""
    width, ring = head_dim * (2 if ratio == 4 else 1), 8 if ratio == 4 else 128
    step, state = Array((rows, width), "bfloat16"), Array((layers * 64, ring, width))
    parameters = Array((layers * ratio, width)), Array((layers * head_dim,)), Array((layers * 32,))
    return step, step, *parameters, state, state


def compress(execute, ratio, head_dim, rows):
    kv, score, *parameters, state_kv, state_score = compressor_arrays(ratio, head_dim, rows)
    step = Array((rows,), "int32"), Array((rows,), "int32"), Array((65,), "int32")
    static = {"ratio": ratio, "norm_eps": 1e-6, "num_entries": rows // ratio + 64}
    compressor.compress(execute, state_kv, state_score, kv, score, *step, *parameters, **static)


def write_layer(execute, ratio, rows, layers):
    layout, ints = KVLayout.V4_FP8, Array((rows,), "int32")
    parts = [layer.NOTHING, layer.NOTHING, (None, None, None)]
    if ratio:
        cache = Array((layers * 64, layout.page_bytes(256 // ratio)), "uint8")
        parts[0] = layer.Compressing(*compressor_arrays(ratio, 512, rows, layers), cache)
    if ratio == 4:
        cache = Array((layers * 64, 64 * 132), "uint8")
        parts[1] = layer.Compressing(*compressor_arrays(ratio, 128, rows, layers), cache)
        parts[2] = Array((rows, 64, 128), "bfloat16"), Array((rows, 64)), Array((128, 128), "bfloat16")
    sizes, where = (256, 256 // (ratio or 1)), (layers, 0)
    constants = layer.LayerConstants(layout, ratio, sizes, where, where, (1e-6, 1e-6))
    step = Step(ints, ints, Array((9,), "int32"), ints, ints if ratio else None)
    swa = Array((layers * 64, layout.page_bytes(256)), "uint8")
    layer.v4_layer(
        execute, step, Array((rows, 512), "bfloat16"), swa, Array((layers * 64,)), *parts, constants=constants
    )


def operand_widths(kernel):
    """How many values a thread holds side by side of a product's operand: the order of the product's sums."""
    return sorted(set(re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"])))


def side_by_side(kernel):
    """How many bytes of a key a thread holds side by side where inline assembly takes words of them; None without."""
    text = kernel.asm["ttgir"]
    layouts = set(re.findall(r"tt\.elementwise_inline_asm .*prmt.* -> tensor<\d+x64xi8, (#\w+)>", text))
    layouts = [re.search(rf"^{name} = (.*)$", text, re.MULTILINE)[1] for name in layouts]
    widths = [re.search(r"sizePerThread = \[1, (\d+)\].*order = \[1, 0\]", layout) for layout in layouts]
    return min((int(width[1]) if width else 1 for width in widths), default=None)


if __name__ == "__main__":
    products = {f"{dtype}_products": in_ptx(f"{dtype}.{dtype}") for dtype in ("e4m3", "e5m2", "bf16")}
    facts(cases, **products, wgmma=in_ptx("wgmma"), operand_widths=operand_widths, side_by_side=side_by_side)

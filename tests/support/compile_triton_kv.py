"""Compiles the byte and index kernels for the compute capabilities given, without a GPU; prints a JSON line of facts.

Run by test_triton_kv in a process of its own, because Triton's interpreter, once on, replaces the compiler.
"""

from compile_triton import facts, in_ptx

from jax_sparse_mla.attention.triton import merge, sanitise
from jax_sparse_mla.indices import triton as indices
from jax_sparse_mla.kv_cache import KVLayout
from jax_sparse_mla.kv_cache import triton as kv_cache
from jax_sparse_mla.serving import hyper_connections_triton


def cases(capability):
    """(name, kernel, pointer types, constants with num_warps) of every kernel, as launched."""

    def ints(kernel):
        return {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")}

    data = {"data_ptr": "*u8", "data_in_ptr": "*u8", "out_in_ptr": "*u8", "slots_ptr": "*i32"}
    names = ("V41_FP8", "V41_FP4_SPLIT", "NOPE_FP8_TENSOR")
    layouts = [(getattr(KVLayout, name), "*bf16") for name in ("V4_FP8", *names)]
    for layout, kv in (*layouts, (KVLayout.V32_FP8, "*fp32")):
        constants = kv_cache.layout_constants(layout, 64) | {"HARDWARE_CASTS": capability >= 89}
        if layout.has_tensor_scale:
            data = data | {"scale_ptr": "*fp32"}
        else:
            constants |= {"scale_ptr": None}
        write = constants | {"MIN_SCALE_EXPONENT": layout.min_scale_exponent} | kv_cache.WRITE_OPTIONS
        yield f"write {layout.name}", kv_cache.write_kv_kernel, data | {"kv_ptr": kv}, write
        gather = constants | kv_cache.GATHER_OPTIONS
        yield f"gather {layout.name}", kv_cache.gather_kv_kernel, data | {"out_ptr": "*bf16"}, gather
    touched, split = kv_cache.touched_pages_kernel, kv_cache.split_pages_kernel
    yield "touched", touched, ints(touched), {"PAGE_SIZE": 256} | kv_cache.TOUCHED_OPTIONS
    split_pointers = ints(split) | data | {"out_ptr": "*u8"}
    split_constants = kv_cache.split_constants(KVLayout.V4_FP8, 256, 64) | kv_cache.SPLIT_OPTIONS
    yield "split", split, split_pointers, split_constants
    swa, topk = indices.combine_swa_extra_kernel, indices.combine_topk_swa_kernel
    yield "swa_extra", swa, ints(swa), {"SWA_WIDTH": 128, "EXTRA_WIDTH": 512, "WIDTH": 640} | indices.SWA_EXTRA_OPTIONS
    topk_constants = {"TOPK_STRIDE": 512, "TOPK": 512, "WINDOW": 128, "RATIO": 4, "WIDTH": 640, "SEARCH_STEPS": 7}
    yield "topk_swa", topk, ints(topk), topk_constants | indices.TOPK_SWA_OPTIONS
    safe = {"TOPK": 128, "WIDTH": 128, "HAS_LENGTHS": True, "HAS_EXTRA_LENGTHS": True}
    safe |= {"EXTRA_TOPK": 512, "EXTRA_WIDTH": 512, "HEADS": 64, "HAS_SINK": True, "LEAST_SINK": -1e30}
    pointers = ints(sanitise.sanitise_kernel) | {"sink_ptr": "*fp32", "out_sink_ptr": "*fp32"}
    yield "sanitise", sanitise.sanitise_kernel, pointers, safe | sanitise.OPTIONS
    absent = ("lengths", "extra", "extra_lengths", "sink", "out_lengths", "extra_out", "extra_out_lengths", "out_sink")
    alone = safe | {"HAS_LENGTHS": False, "HAS_EXTRA_LENGTHS": False, "EXTRA_TOPK": 0, "EXTRA_WIDTH": 0}
    alone |= {"HAS_SINK": False} | {f"{name}_ptr": None for name in absent}
    yield "sanitise one table", sanitise.sanitise_kernel, pointers, alone | sanitise.OPTIONS
    pointers = {"outs_ptr": "*bf16", "out_ptr": "*bf16"}
    pointers |= dict.fromkeys(("lses_ptr", "sink_ptr", "lse_ptr"), "*fp32")
    for has_sink in (False, True):
        constants = merge.constants(512, 3, has_sink) | {"num_warps": 4}
        yield "merge sink" if has_sink else "merge", merge.merge_kernel, pointers, constants
    pointers = {"logits_ptr": "*fp32", "out_ptr": "*fp32", "eps": "fp32"}
    constants = {"N": 4, "ITERATIONS": 20} | hyper_connections_triton.OPTIONS
    yield "hyper-connections", hyper_connections_triton.doubly_stochastic_kernel, pointers, constants


if __name__ == "__main__":
    facts(cases, e4m3=in_ptx("e4m3"), wide_store=in_ptx("st.global.v"))

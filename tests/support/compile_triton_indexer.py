"""Compiles the indexer's and the compressor's kernels for the compute capabilities given, without a GPU.

Run by test_triton_indexer in a process of its own, because Triton's interpreter, once on, replaces the compiler.
Prints a JSON list of facts.
"""

from compile_triton import facts, in_ptx

from jax_sparse_mla.kernels.triton import compressor, indexer

FLOATS = ("weights_ptr", "scale_ptr", "state_kv_ptr", "state_score_ptr", "state_kv_in_ptr", "state_score_in_ptr")
FLOATS += ("ape_ptr", "inv_freq_ptr", "pooled_ptr")
BFLOATS = ("k_ptr", "kv_ptr", "score_ptr", "norm_weight_ptr", "entries_ptr")


def types(kernel, **others):
    """Of the kernel's run-time arguments: an index, unless a list above or the caller says otherwise."""
    names = {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")}
    names |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(BFLOATS, "*bf16") | {"norm_eps": "fp32"}
    names |= {"cache_ptr": "*u8", "cache_in_ptr": "*u8"} | others
    return {name: names[name] for name in kernel.arg_names if name in names}


def cases(capability):
    """(name, kernel, argument types, constants with num_warps) of every kernel, as launched for both models."""
    hardware_fp8 = capability >= 89
    e4m3 = "*fp8e4nv" if hardware_fp8 else "*u8"
    fp8 = {"HARDWARE_FP8": hardware_fp8}
    for hadamard in (True, False):
        constants = fp8 | {"HADAMARD": hadamard}
        for dtype in ("*bf16", "*fp32"):
            kernel = indexer.quantize_index_q_kernel
            pointers = types(kernel, q_ptr=dtype, values_ptr=e4m3)
            yield f"quantise q {dtype} {hadamard}", kernel, pointers, constants | indexer.QUANTIZE_OPTIONS
            kernel = indexer.write_index_k_kernel
            write = constants | {"PAGE_SIZE": 64} | indexer.WRITE_OPTIONS
            yield f"write k {dtype} {hadamard}", kernel, types(kernel, k_ptr=dtype), write
    for rows in (64, 8192):
        plan = indexer.plan_logits(rows, 64, 512, 64, 132)
        yield f"logits {rows}", plan.kernel, types(plan.kernel, q_ptr=e4m3, out_ptr="*fp32"), plan.constants | fp8
    pool, find, finish = compressor.pool_kernel, compressor.find_rows_kernel, compressor.finish_kernel
    for ratio, head_dim, rows in ((4, 512, 64), (4, 128, 64), (128, 512, 8192)):
        constants = compressor.pool_constants(ratio, head_dim, 128, rows)
        yield f"pool {ratio} {head_dim}", pool, types(pool), constants
        constants = compressor.finish_constants(ratio, head_dim, 64, 128)
        yield f"finish {ratio} {head_dim}", finish, types(finish), constants
    yield "find", find, types(find), {"RATIO": 4} | compressor.FIND_OPTIONS


if __name__ == "__main__":
    facts(cases, e4m3_products=in_ptx("e4m3.e4m3"), wgmma=in_ptx("wgmma"))

"""Compiles the Triton top-k kernels for the compute capabilities given, without a GPU; prints a JSON line of facts.

Run by test_topk_kernels in a process of its own, because Triton's interpreter, once on, replaces the compiler.
"""

from compile_triton import facts

from jax_sparse_mla.indices.topk import triton as topk

SHAPES = [(64, 131_072, 2048), (64, 131_072, 512), (4096, 131_072, 2048), (1, 8192, 512), (1, 300, 64)]


def cases():
    """(name, kernel, pointer types, constants with num_warps) of every kernel, as launched."""
    integers = "lengths row_starts page_table row_to_request offsets candidate_positions num_candidates progress out"
    types = dict.fromkeys(integers.split(), "*i32")
    types |= dict.fromkeys(("logits", "candidates", "thresholds"), "*fp32")
    for rows, columns, k in SHAPES:
        name = f"{rows} x {columns}, {k}"
        plan = topk.plan_topk(rows, columns, k)
        smallest = (rows, columns, k) == SHAPES[-1]
        # The transforms differ by one addition: the other one is compiled at the smallest shape alone.
        for method in (topk.PAGED, topk.RAGGED) if smallest else (topk.PAGED,):
            constants = topk.select_constants(plan, k, method.value, 64, True, True)
            yield f"select {method.value} {name}", topk.topk_select_kernel, types, constants
        if plan.filtered:
            yield f"filter {name}", topk.topk_filter_kernel, types, topk.filter_constants(plan, k, True)
            yield f"threshold {name}", topk.topk_threshold_kernel, types, topk.threshold_constants(plan, k, True)


if __name__ == "__main__":
    facts(lambda capability: cases())

"""Compiles the kernels of prefill's gradient for the compute capabilities given, without a GPU.

Run by test_gradient.py in a process of its own, because Triton's interpreter, once on, replaces the compiler. Prints a
JSON list of facts.
"""

from compile_triton import WHOLE, Array, Recorder, facts, in_ptx

from jax_sparse_mla.attention.backend import GradientArrays
from jax_sparse_mla.attention.triton.backward import backward, probabilities


def cases(capability):
    rarer = ((64, 512, False), (64, 576, False)) if capability == WHOLE else ()  # elsewhere a tile has room to spare
    for heads, qk_dim, fixed_point in (*rarer, (64, 576, True)):
        execute = Recorder(capability)
        q, kv, indices = (
            Array((64, heads, qk_dim), "bfloat16"),
            Array((512, qk_dim), "bfloat16"),
            Array((64, 96), "int32"),
        )
        of_heads, grad = Array((64, heads)), Array((64, heads, 512), "bfloat16")
        scales = Array((512,)) if fixed_point else None
        lengths = Array((64,), "int32")
        arrays = GradientArrays(q, kv, indices, lengths, grad, of_heads, of_heads, of_heads, scales)
        backward(execute, arrays, softmax_scale=0.1)
        if fixed_point:
            probabilities(execute, q, kv, indices, None, of_heads, softmax_scale=0.1)
        for name, *case in execute.cases:
            number = "fixed point" if fixed_point else "float32"
            yield f"{name} {qk_dim}" + f" {number}" * (name == "sparse_mla_backward"), *case


if __name__ == "__main__":
    facts(cases, wgmma=in_ptx("wgmma"), wide_additions=in_ptx("add.v4.f32"))

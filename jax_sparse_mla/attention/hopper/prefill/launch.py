"""The launch of a prefill kernel by Pallas Mosaic GPU, whose arguments both kernels have alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_sparse_mla.attention.index_table import V_DIM


def launch(
    work: Callable[..., None],
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None],
    *,
    scratch: Sequence[Any],
    blocks: int,
    num_threads: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """out bfloat16 `[tokens, heads, 512]`, max_logits and lse float32 `[tokens, heads]`; no dimension is 0.

    Args:
      work: what each warpgroup runs, of the references of q, kv, indices and topk_length, those of the three results
        and of the sink, and those of the scratch memory.
      arrays: q bfloat16 `[tokens, heads, qk_dim]`, kv bfloat16 `[kv_len, qk_dim]`, indices int32 `[tokens, topk]`,
        topk_length int32 `[tokens]` or None, attn_sink float32 `[heads]` or None.
      scratch, blocks, num_threads: shared memory, thread blocks, and warpgroups of each.
    """
    tokens, heads, _ = arrays[0].shape
    has_lengths, has_sink = (x is not None for x in arrays[3:])

    def body(q_ref, kv_ref, indices_ref, *refs):
        refs = list(refs)
        length_ref = refs.pop(0) if has_lengths else None
        sink_ref = refs.pop(0) if has_sink else None
        work(q_ref, kv_ref, indices_ref, length_ref, (*refs[:3], sink_ref), refs[3:])

    statistic = jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((tokens, heads, V_DIM), jnp.bfloat16), statistic, statistic),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=num_threads,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the kernels have their own
            reduction_scratch_bytes=0,  # no reduction of Pallas' leaves its warp
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return kernel(*(x for x in arrays if x is not None))

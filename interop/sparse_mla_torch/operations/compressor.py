"""The compressor of DeepSeek-V4 on torch tensors."""

from __future__ import annotations

from torch import Tensor

from jax_sparse_mla.argument_checks import FLOAT32, FLOATS
from jax_sparse_mla.compressor import triton as kernels
from jax_sparse_mla.compressor.state import compressor_window, row_halves
from jax_sparse_mla.launch.describe import dtype_of
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import TensorChecks


def compress_kv(
    state_kv: Tensor,
    state_score: Tensor,
    kv: Tensor,
    score: Tensor,
    *,
    positions: Tensor,
    req_rows: Tensor,
    query_start_loc: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    inv_freq: Tensor,
    ratio: int,
    norm_eps: float = 1e-6,
    overlap: bool | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch's `jax_sparse_mla.compress_kv`; the state, float32 `[max_requests, ring, coff * head_dim]`, is updated.

    `kv` and `score` have one dtype, `head_dim` is even, and there is at least one frequency. `out` are `(entries,
    rows)`, bfloat16 `[N, head_dim]` and int32 `[N]`, `N = min(T, T // ratio + B)`: unused entries come last, have row
    −1 and are 0.
    """
    check = TensorChecks("compress_kv", kv)
    (head_dim,) = check("norm_weight", norm_weight, (None,), FLOATS).shape
    (half_rope,) = check("inv_freq", inv_freq, (None,), FLOAT32).shape
    width, window = row_halves(ratio, overlap) * head_dim, compressor_window(ratio, overlap)
    num_rows, _ = check("kv", kv, (None, width), FLOATS).shape
    max_requests, ring, _ = check("state_kv", state_kv, (None, None, width), FLOAT32).shape
    num_requests = check("query_start_loc", query_start_loc, (None,)).shape[0] - 1
    num_entries = min(num_rows, num_rows // ratio + num_requests)
    if head_dim % 2 or not 0 < 2 * half_rope <= head_dim or ring < window or num_requests < 0:
        raise check.fail(
            "needs an even head_dim, 1 to head_dim / 2 frequencies, a ring of at least "
            f"{window} tokens and query_start_loc [B + 1], "
            f"got head_dim {head_dim}, {half_rope}, {ring} and {num_requests + 1} entries"
        )
    entries, rows = check.outs(out, (num_entries, head_dim), (num_entries,), dtypes=("bfloat16", "int32"))
    check("state_score", state_score, state_kv.shape, FLOAT32)
    check("score", score, kv.shape, (dtype_of(kv),))
    check("positions", positions, (num_rows,))
    check("req_rows", req_rows, (num_rows,))
    check("ape", ape, (ratio, width), FLOAT32)
    if num_entries == 0 or max_requests == 0:
        entries.zero_()
        rows.fill_(-1)
        return entries, rows
    state, step = (state_kv, state_score), (kv, score, positions, req_rows, query_start_loc)
    kernels.compress(
        *(executor(kv.device), *state, *step, ape, norm_weight, inv_freq),
        ratio=ratio,
        norm_eps=float(norm_eps),
        num_entries=num_entries,
        out=(entries, rows),
    )
    return entries, rows

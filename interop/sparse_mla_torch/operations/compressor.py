"""The compressor of DeepSeek-V4 on torch tensors, by the rules of `jax_sparse_mla.compressor.api`.

It launches on the current stream and neither synchronises nor copies to the host: a CUDA graph captures it.
"""

from __future__ import annotations

import torch

from jax_sparse_mla.compressor import triton as kernels
from jax_sparse_mla.compressor.state import compressor_window, row_halves
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations.checks import FLOATS, check_tensor, output_or_new


def compress_kv(
    state_kv: torch.Tensor,
    state_score: torch.Tensor,
    kv: torch.Tensor,
    score: torch.Tensor,
    *,
    positions: torch.Tensor,
    req_rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    ratio: int,
    norm_eps: float = 1e-6,
    overlap: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compresses the groups that this step's tokens complete; the state is updated in place.

    Args:
      state_kv, state_score: the carried tokens, float32 `[max_requests, ring, coff * head_dim]`.
      kv, score: bfloat16 or float32 `[T, coff * head_dim]`, both of one dtype; head_dim even.
      positions, req_rows, query_start_loc, ape, norm_weight, inv_freq, ratio, norm_eps, overlap: as
        `jax_sparse_mla.compress_kv`; norm_weight of kv's dtype or float32, at least one frequency.
      out: `(entries, rows)` to write into, bfloat16 `[N, head_dim]` and int32 `[N]`, `N = min(T, T // ratio + B)`;
        allocated by default.

    Returns:
      `out`: unused entries come last, have row −1 and are 0.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong shape, or a tensor that is not contiguous or on another device.
    """
    function = "compress_kv"
    (head_dim,) = check_tensor(function, "norm_weight", norm_weight, (None,), kv, FLOATS)
    (half_rope,) = check_tensor(function, "inv_freq", inv_freq, (None,), kv, (torch.float32,))
    width, window = row_halves(ratio, overlap) * head_dim, compressor_window(ratio, overlap)
    num_rows, _ = check_tensor(function, "kv", kv, (None, width), kv, FLOATS)
    state_shape = (None, None, width)
    max_requests, ring, _ = check_tensor(function, "state_kv", state_kv, state_shape, kv, (torch.float32,))
    num_requests = check_tensor(function, "query_start_loc", query_start_loc, (None,), kv)[0] - 1
    num_entries = min(num_rows, num_rows // ratio + num_requests)
    if head_dim % 2 or not 0 < 2 * half_rope <= head_dim or ring < window or num_requests < 0:
        raise ValueError(
            f"{function}: needs an even head_dim, 1 to head_dim / 2 frequencies, a ring of at least "
            f"{window} tokens and query_start_loc [B + 1], "
            f"got head_dim {head_dim}, {half_rope}, {ring} and {num_requests + 1} entries"
        )
    entries, rows = out or (None, None)
    entries = output_or_new(function, "out[0]", entries, (num_entries, head_dim), kv, torch.bfloat16)
    rows = output_or_new(function, "out[1]", rows, (num_entries,), kv)
    for name, x, shape, dtype in (
        ("state_score", state_score, state_kv.shape, torch.float32),
        ("score", score, kv.shape, kv.dtype),
        ("positions", positions, (num_rows,), torch.int32),
        ("req_rows", req_rows, (num_rows,), torch.int32),
        ("ape", ape, (ratio, width), torch.float32),
    ):
        check_tensor(function, name, x, tuple(shape), kv, (dtype,))
    if num_entries == 0 or max_requests == 0:
        entries.zero_()
        rows.fill_(-1)
        return entries, rows
    step = kv, score, positions, req_rows, query_start_loc, ape, norm_weight, inv_freq
    kernels.compress(
        executor(kv.device),
        state_kv,
        state_score,
        *step,
        ratio=ratio,
        norm_eps=float(norm_eps),
        num_entries=num_entries,
        out=(entries, rows),
    )
    return entries, rows

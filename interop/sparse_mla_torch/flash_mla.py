"""FlashMLA's functions for torch tensors: change `import flash_mla` to `from sparse_mla_torch import flash_mla`.

Signatures and return conventions are FlashMLA's (commit 9241ae3 and the wheel sgl-flash-mla 1.0.0, whose further
keywords come last). Calls that its Hopper kernels refuse are served too: any number of heads, any number of index
columns, V3.2 with `topk_length` or with an extra cache, out-of-range indices and lengths, any batch, CPU tensors.

On CUDA the router picks FlashMLA's own operators, where they are installed and faster, or our kernels
(docs/reference/routing.md). All run on torch's current stream. A CUDA graph can capture them once a call of the same
shapes has run; where JAX runs in the process too, capture with `capture_error_mode="thread_local"`
(docs/internals/cuda-graphs.md). The environment variables JAX_SPARSE_MLA_DECODE_BACKEND, JAX_SPARSE_MLA_PREFILL_BACKEND
and JAX_SPARSE_MLA_BACKEND name a backend instead. They are read at the first call of new shapes.

Both functions also take what vLLM and SGLang pass to theirs: their schedule objects and tensors, `out` as one tensor,
index rows that stand apart, pages with padding behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from jax_sparse_mla.argument_checks import BF16, FLOAT32
from sparse_mla_torch import ops
from sparse_mla_torch.attention import call_cache, decode, prefill
from sparse_mla_torch.attention.call_cache import Prepared
from sparse_mla_torch.attention.route import FasterAlone
from sparse_mla_torch.operations.checks import TensorChecks, are_aligned

__all__ = ["FasterAlone", "FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_DECODE, _PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
_INF = float("inf")
_LN_2 = 0.6931471805599453
_OURS = "_sparse_mla_torch"  # where an engine's schedule keeps ours
# FlashMLA's names of the cache formats, by bytes per token.
_KV_FORMATS = {656: ("V32",), 584: ("V4", "MODEL1")}


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The split-KV schedule of decode calls: empty at first, filled by its first call, reused by the later ones.

    A call may reuse it if it has the shapes of the first call (validated) and the same values of `topk_length` and
    `extra_topk_length` (not validated). Our kernels need no schedule: where they serve the call, the tensors stay
    None.

    Attributes:
      have_initialized: whether a call has filled it.
      config: that call's shapes.
      tile_scheduler_metadata: int32 `[num_sm_parts, 8]`.
      num_splits: int32 `[batch + 1]`.
    """

    Config = decode.Shape

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None
    _shape: decode.Shape | None = dataclasses.field(default=None, repr=False, compare=False)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty schedule, and None. The arguments of FlashMLA's older versions are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    assume_valid_indices: bool = False,
    beside_flashmla: bool = False,
    kv_layout: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse attention of each query over the cached tokens that its indices name.

    Args:
      q: bfloat16 `[batch, s_q, heads, head_dim]`, head_dim 576 (V3.2) or 512 (V4).
      k_cache: uint8, int8 or float8_e4m3fn `[pages, page_size, 1, bytes]`, 656 bytes a token (V3.2) or 584 (V4); pages
        may stand apart.
      block_table, cache_seqlens: ignored; sparse attention needs neither.
      head_dim_v: 512.
      tile_scheduler_metadata: what this module's `get_mla_metadata` returned; or FlashMLA's object, which keeps ours as
        an attribute and stays fit for FlashMLA's own function; or an older FlashMLA's tensor, which is ignored.
      num_splits: None, or the tensor that goes with a schedule tensor, ignored.
      softmax_scale: head_dim^-0.5 by default.
      causal: False.
      is_fp8_kvcache: True, or None.
      indices: int32 `[batch, s_q, topk]`, page · page_size + offset; −1 and any other index of no token is skipped.
        Rows may stand apart.
      attn_sink: float32 `[heads]`, a logit per head, in the denominator only.
      extra_k_cache, extra_indices_in_kvcache: a second cache of the same format, and its indices.
      topk_length, extra_topk_length: int32 `[batch]` or `[batch, s_q]`, how many leading columns count.
      enable_batch_invariant: no row's keys are split, so its result does not depend on the other rows (on SM90
        by our decode kernel, elsewhere by the Triton kernel).
      use_legacy: ignored: which of the wheel's two builds runs is decided here.
      kv_format: "V32" or "V4"; must match the bytes of k_cache. None derives it from them.
      descale_q, descale_k: None; they belong to dense FP8 decode.
      out: `(out, lse)` of the results' shapes to write into, or out alone. Where FlashMLA's operator serves the call,
        it allocates its results and these are copied.
      assume_valid_indices: a promise that every entry within a length is −1 or a token's slot, that entries beyond it
        are −1, that lengths are from 0 to the columns, and that no finite sink is below −2e38. It saves a pass over the
        tables where FlashMLA's operator serves the call. A broken promise reads out of bounds.
      beside_flashmla: the caller has FlashMLA's own function: what that does sooner is refused with `FasterAlone`.
      kv_layout: the layout of k_cache where its bytes per token tell none, such as "V41_FP8"; the extra cache then has
        the same one, or the one of its bytes that goes beside it.

    Returns:
      out bfloat16 `[batch, s_q, heads, 512]`, 0 where no token counts, and lse float32 `[batch, heads, s_q]` (not
      contiguous), natural log, without the sink, +inf where no token counts.

    Raises:
      TypeError, ValueError: what is not served; the message names the argument.
      FasterAlone: see `beside_flashmla`.
    """
    if indices is None or head_dim_v != 512 or num_splits is not None or causal or is_fp8_kvcache is False:
        _refuse_dense(indices, head_dim_v, num_splits, causal, is_fp8_kvcache)
    if kv_format is not None or descale_q is not None or descale_k is not None:
        _check_format(k_cache, kv_format, descale_q, descale_k)
    if is_compiling():
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        rows, lse = ops.sparse_mla_decode(
            *(q, k_cache, indices, scale, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length),
            *(attn_sink, enable_batch_invariant, assume_valid_indices, True, kv_layout),
        )
        return _traced(_DECODE, (rows, lse.transpose(1, 2)), out)
    # The fields of decode.Options: a plain tuple is made faster.
    options = (_DECODE, softmax_scale, _INF, enable_batch_invariant, assume_valid_indices, beside_flashmla)
    if kv_layout is not None:
        options += (True, kv_layout)
    tensors = (q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, attn_sink)
    call = call_cache.find(options, tensors)
    if call is None:
        call = _prepared(decode.prepare, options, tensors)
    if type(tile_scheduler_metadata) is not FlashMLASchedMeta or tile_scheduler_metadata._shape is not call.shape:
        tile_scheduler_metadata = _use_schedule(tile_scheduler_metadata, call)
    if out is None:
        return call.run(  # as `*tensors`, but that takes longer
            q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length,
            attn_sink, tile_scheduler_metadata, None,
        )  # fmt: skip
    batch, s_q, heads, _ = q.shape
    shapes = [(batch, s_q, heads, 512), (batch, heads, s_q)]
    out = _checked_out(options[0], out, shapes, q)
    rows = (out[0], None if out[1] is None else out[1].transpose(1, 2))
    return _into(call, (*tensors, tile_scheduler_metadata), out, rows)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    assume_valid_indices: bool = False,
    beside_flashmla: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Sparse attention of each query over the rows of a workspace that its indices name.

    Args:
      q: bfloat16 `[s_q, heads, head_dim]`, head_dim 576 or 512.
      kv: bfloat16 `[s_kv, 1, head_dim]`; V is the first 512 values of a row.
      indices: int32 `[s_q, 1, topk]`; an index of no row is skipped.
      sm_scale: the factor of q·k.
      d_v: 512.
      topk_length: int32 `[s_q]`, how many leading columns count.
      return_log2_lse: None gives max_logits and lse in natural units, True in base 2, False gives None for both.
      out: `(out, max_logits, lse)` to write into, or out alone, as in `flash_mla_with_kvcache`. Both statistics are
        written even if `return_log2_lse` is False.
      assume_valid_indices: a promise that every length is from 0 to the columns; indices are always checked.
      attn_sink, use_legacy, beside_flashmla: as in `flash_mla_with_kvcache`.

    Returns:
      out bfloat16 `[s_q, heads, 512]`, 0 where no row counts; max_logits float32 `[s_q, heads]`, −inf there; lse
      float32 `[s_q, heads]`, without the sink, +inf there.

    Raises:
      TypeError, ValueError, FasterAlone: as `flash_mla_with_kvcache`.
    """
    if d_v != 512:
        raise ValueError(f"flash_mla_sparse_fwd: d_v must be 512, got {d_v}")
    if is_compiling():
        # Without a branch, which would break the graph: two dimensions have no third to transpose, and what has several
        # KV heads keeps three, which the operator refuses.
        kv, indices = (x.transpose(1, 2).squeeze(2) for x in (kv, indices))
        results = ops.sparse_mla_prefill(q, kv, indices, sm_scale, topk_length, attn_sink, True)
        if return_log2_lse:
            results = (results[0], results[1] / _LN_2, results[2] / _LN_2)
        results = _traced(_PREFILL, results, out)
        return (results[0], None, None) if return_log2_lse is False else results
    # The fields of prefill.Options.
    options = (_PREFILL, sm_scale, _INF, return_log2_lse is True, assume_valid_indices, beside_flashmla)
    tensors = (q, kv, indices, topk_length, attn_sink)
    call = call_cache.find(options, tensors)
    if call is None:
        call = _prepared(prefill.prepare, options, tensors)
    if out is None:
        results = call.run(q, kv, indices, topk_length, attn_sink, None)
    else:
        out = _checked_out(options[0], out, [(*q.shape[:2], 512), q.shape[:2], q.shape[:2]], q)
        results = _into(call, tensors, out, out)
    return (results[0], None, None) if return_log2_lse is False else results


def _prepared(prepare: Callable[..., Prepared], options: tuple, tensors: tuple) -> Prepared:
    """The call; as FlashMLA's, it makes q's device the current one, on which kernels are launched."""
    device = tensors[0].get_device() if isinstance(tensors[0], torch.Tensor) else -1
    if device < 0 or device == torch._C._cuda_getDevice():
        return prepare(options, *tensors)
    with torch.cuda.device(device):
        call = prepare(options, *tensors)

    def run(*arguments):
        with torch.cuda.device(device):
            return call.run(*arguments)

    return call._replace(run=run)


def _refuse_dense(indices, head_dim_v, num_splits, causal, is_fp8_kvcache) -> None:
    """Names the argument that asks for something other than sparse decode from an FP8 cache."""
    if indices is None:
        raise ValueError(
            f"{_DECODE}: dense decode (indices=None) is not served here: call FlashMLA's own function for it"
        )
    if is_fp8_kvcache is False:
        raise ValueError(
            f"{_DECODE}: is_fp8_kvcache must be True or None, got False: k_cache holds bytes here, and how many a "
            "token has says whether they are FP8 (656, 584) or bfloat16 (1152, 1024)"
        )
    for argument, value, expected in (
        ("head_dim_v", head_dim_v, 512),
        ("num_splits", None if isinstance(num_splits, torch.Tensor) else num_splits, None),
        ("causal", causal, False),
    ):
        if value != expected:
            raise ValueError(f"{_DECODE}: {argument} must be {expected}, got {value!r}")


def _check_format(k_cache, kv_format, descale_q, descale_k) -> None:
    if descale_q is not None or descale_k is not None:
        raise ValueError(f"{_DECODE}: descale_q and descale_k belong to dense FP8 decode, which is not served here")
    served = _KV_FORMATS.get(k_cache.shape[-1], ())
    if kv_format not in served:
        raise ValueError(
            f"{_DECODE}: kv_format {kv_format!r} is not what k_cache's {k_cache.shape[-1]} bytes per token are "
            f"({' or '.join(served) or 'no format that is served'}); V32 (656) and V4 (584) are served"
        )


def _use_schedule(schedule: Any, call: Prepared) -> FlashMLASchedMeta:
    """The schedule of a call: filled with its config by the first one, refused by one of another shape."""
    shape = call.shape
    if call.plan is None:
        call.run()  # raises
    meta = _own_schedule(schedule)
    if meta._shape is shape:
        return meta
    if not meta.have_initialized:
        meta.have_initialized, meta.config = True, shape
    elif meta.config != shape:
        raise ValueError(
            f"{_DECODE}: tile_scheduler_metadata was filled by a call of {meta.config}, this call is {shape}"
        )
    meta._shape = shape
    return meta


def _own_schedule(schedule: Any) -> FlashMLASchedMeta:
    """Our schedule: itself, the one that an engine's object of FlashMLA's class keeps, or a new one for a tensor."""
    if isinstance(schedule, FlashMLASchedMeta):
        return schedule
    if isinstance(schedule, torch.Tensor):
        return FlashMLASchedMeta()
    if type(schedule).__name__ != FlashMLASchedMeta.__name__ or not hasattr(schedule, "__dict__"):
        raise TypeError(
            f"{_DECODE}: tile_scheduler_metadata must come from sparse_mla_torch.flash_mla.get_mla_metadata, or be an "
            f"engine's FlashMLASchedMeta or schedule tensor, got {type(schedule).__name__}"
        )
    if _OURS not in schedule.__dict__:
        schedule.__dict__[_OURS] = FlashMLASchedMeta()
    return schedule.__dict__[_OURS]


def _checked_out(
    function: str, out: Any, shapes: list[tuple[int, ...]], like: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The tensors to write into, None where the caller gives none. The first is bfloat16, the others float32."""
    check = TensorChecks(function, like)
    if isinstance(out, torch.Tensor):
        return check.strided("out", out, shapes[0], BF16), *[None] * (len(shapes) - 1)
    if not isinstance(out, (tuple, list)) or len(out) != len(shapes):
        raise TypeError(f"{function}: out must be a tensor or {len(shapes)} tensors, got {type(out).__name__}")
    for i, (x, shape) in enumerate(zip(out, shapes)):
        check.strided(f"out[{i}]", x, shape, FLOAT32 if i else BF16)
    return tuple(out)


def _copied(results: tuple, out: tuple) -> tuple[torch.Tensor, ...]:
    """`out` with the results copied into it; the results themselves where it has None."""
    return tuple(result if x is None else x.copy_(result) for x, result in zip(out, results, strict=True))


def _traced(function: str, results: tuple, out: Any) -> tuple[torch.Tensor, ...]:
    """The results in a compiled graph, which can fuse the copies into `out`."""
    if out is None:
        return results
    return _copied(results, _checked_out(function, out, [tuple(x.shape) for x in results], results[0]))


def _into(call: Prepared, tensors: tuple, out: tuple, rows: tuple) -> tuple[torch.Tensor, ...]:
    """The call's results in `out`, new ones where it has None; `rows` are its views in the kernels' shapes."""
    dense = all(x is None or x.is_contiguous() for x in rows)
    if not call.writes_into or not dense or not are_aligned(rows):
        return _copied(call.run(*tensors, None), out)
    return tuple(result if x is None else x for x, result in zip(out, call.run(*tensors, rows)))

"""Which top-k transform and which prefill kernel a forward step uses (SGLang's rules)."""

from __future__ import annotations

import math

from jax_sparse_mla.argument_checks import ArgumentChecks
from jax_sparse_mla.indices.topk.api import TopkTransform
from jax_sparse_mla.metadata.batch import ForwardMode

_SPARSE, _PAGED_KV = "flashmla_sparse", "flashmla_kv"  # reads gathered bf16 rows; reads the paged fp8 cache
# From this many KV tokens for each query token on, the gather takes longer than the paged kernel loses.
_KV_TOKENS_PER_QUERY = 512


def select_topk_transform(forward_mode: ForwardMode, *, fp8_kv_cache: bool, prefill_backend: str) -> TopkTransform:
    """The form that the indexer's top-k positions take in a step of V3.2.

    Args:
      forward_mode: the step's mode.
      fp8_kv_cache: whether the cache holds the packed fp8 rows.
      prefill_backend: `"flashmla_sparse"` or `"flashmla_kv"`.

    Returns:
      RAGGED for EXTEND with an fp8 cache and `"flashmla_sparse"`, which gathers the cache and addresses the
      gathered rows; PAGED otherwise.

    Raises:
      TypeError: a mode that is not a ForwardMode, an `fp8_kv_cache` that is not a bool.
      ValueError: another backend.
    """
    return topk_transform_of("select_topk_transform", forward_mode, fp8_kv_cache, prefill_backend)


def topk_transform_of(
    function: str, forward_mode: ForwardMode, fp8_kv_cache: bool, prefill_backend: str
) -> TopkTransform:
    """`select_topk_transform` for a caller whose errors name it."""
    if not isinstance(forward_mode, ForwardMode):
        raise TypeError(f"{function}: forward_mode must be a ForwardMode, got {forward_mode!r}")
    if not isinstance(fp8_kv_cache, bool):
        raise TypeError(f"{function}: fp8_kv_cache must be a bool, got {fp8_kv_cache!r}")
    if not isinstance(prefill_backend, str) or prefill_backend not in (_SPARSE, _PAGED_KV):
        raise ValueError(f"{function}: prefill_backend must be {_SPARSE!r} or {_PAGED_KV!r}, got {prefill_backend!r}")
    gathered = forward_mode is ForwardMode.EXTEND and fp8_kv_cache and prefill_backend == _SPARSE
    return TopkTransform.RAGGED if gathered else TopkTransform.PAGED


def select_prefill_backend(total_kv_tokens: int, total_q_tokens: int) -> str:
    """The `flashmla_auto` rule: which kernel prefills an fp8 cache.

    Args:
      total_kv_tokens: context tokens of all requests of the step.
      total_q_tokens: query tokens of all requests of the step.

    Returns:
      `"flashmla_sparse"` when `total_kv_tokens < 512 * total_q_tokens`, else `"flashmla_kv"`.

    Raises:
      TypeError: a count that is not an int (a traced value cannot choose a kernel).
      ValueError: a negative count.
    """
    check = ArgumentChecks("select_prefill_backend")
    total_kv_tokens = check.static_int("total_kv_tokens", total_kv_tokens, minimum=0, maximum=math.inf)
    total_q_tokens = check.static_int("total_q_tokens", total_q_tokens, minimum=0, maximum=math.inf)
    return _SPARSE if total_kv_tokens < _KV_TOKENS_PER_QUERY * total_q_tokens else _PAGED_KV

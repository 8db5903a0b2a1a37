"""The state of an engine at the start of a forward step: the batch and the request tables."""

from __future__ import annotations

import enum

import jax

from jax_sparse_mla._pytree import pytree_dataclass, static


class ForwardMode(enum.Enum):
    """The mode of a forward step (SGLang's names)."""

    DECODE = "decode"
    EXTEND = "extend"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    IDLE = "idle"


@pytree_dataclass
class ForwardBatch:
    """One forward step of B requests and T query rows.

    Attributes:
      mode: what the step does (static).
      max_seq_len: the bucket that sizes page tables (static, tokens); clamped to the table's width.
      req_pool_indices: int32 `[B]`, each request's row in the request tables.
      seq_lens: int32 `[B]`, tokens of each request including this step's, except in TARGET_VERIFY and in the
        steps of a draft, where the builders add them; 0 marks a padding request.
      out_cache_loc: int32 `[T]`, the slot of the full pool that each row's K is written to.
      extend_lens: int32 `[B]`, query rows of each request (EXTEND only).
      num_draft_tokens: query rows per request (TARGET_VERIFY and DRAFT_EXTEND only; static).
    """

    mode: ForwardMode = static()
    max_seq_len: int = static()
    req_pool_indices: jax.Array
    seq_lens: jax.Array
    out_cache_loc: jax.Array
    extend_lens: jax.Array | None = None
    num_draft_tokens: int | None = static(default=None)


@pytree_dataclass
class RequestTables:
    """Where each request's tokens lie.

    Attributes:
      req_to_token: int32 `[max_requests, max_len]`, the full-pool slot of each position of each request.
      full_to_swa: int32 `[pool + 1]`, the sliding-window slot of each full-pool slot; −1 where it has none, and
        in the last entry, so that a slot of −1 maps to −1. None for a model without a window.
    """

    req_to_token: jax.Array
    full_to_swa: jax.Array | None = None


def row_constants(mode: ForwardMode, num_draft_tokens: int | None) -> dict[str, int]:
    """How a mode expands requests to query rows, as constants of the kernels.

    ROWS_EACH are the query rows of every request, 0 in EXTEND; DRAFTS_TO_ADD are tokens that lengths lack.
    """
    return {
        "ROWS_EACH": 0 if mode is ForwardMode.EXTEND else (num_draft_tokens or 1),
        "DRAFTS_TO_ADD": num_draft_tokens if mode is ForwardMode.TARGET_VERIFY else 0,
        "IDLE": mode is ForwardMode.IDLE,
    }

"""Options of an engine."""

from __future__ import annotations

import dataclasses
import numbers
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_sparse_mla.serving.config import Config
    from jax_sparse_mla.serving.sampling import LogitsHook

# A round is one program, in which drafts are made one behind the other: many take minutes and gigabytes to compile.
MAX_DRAFTS = 32

GATHERED, PAGED = PREFILL_BACKENDS = ("flashmla_sparse", "flashmla_kv")


def default_chunk_size(config: Config, tokens: int) -> int:
    """Rows of a prefill step for a model and so many tokens of all requests at once: so many that an expert has 128 on
    average, since a step reads all experts' weights, however few rows each has. From 1,024 to 8,192, a power of two."""
    rows = min(128 * config.moe.num_experts // config.moe.top_k, tokens)
    return min(max(1024, 1 << max(0, rows - 1).bit_length()), 8192)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
      bf16_cache: whether the caches are bfloat16 instead of FP8.
      prefill_backend: "flashmla_sparse" gathers a workspace, "flashmla_kv" attends to the pages; None: as planned.
      chunk_size: query rows of a prefill step.
      max_batch: requests served at once.
      max_len: tokens of the longest request, its output included.
      seed: of the page order.
      trace: whether to keep the steps of the latest run, for comparisons.
      speculative_steps: the most draft tokens of a step for which the caches have room, at most `MAX_DRAFTS`.
      backend: the attention backend's name; None takes the router's choice for each call.
      num_pages: pages of the full pool; None has enough for `max_batch` requests of `max_len`.
      context_parallel: devices of a mesh's axis "model" that share the pages of the caches, each with every so many-th
        page of a request; 1: each has all pages. Of `num_pages` each has its part.
      reuse_points: prefix reuse, 0 is off: with a window the number of states that are kept, else any number is on.
      logits_hook: changes logits as requests ask by `Request.adjust`; its program runs only in steps of such requests.
      batch_invariant: a request's tokens and logits do not depend, to the bit, on who else is served. Every step is
        padded to the largest, and a step reads one prompt. Nothing may be preempted or reused: `num_pages` must be None
        and `reuse_points` 0. Requests that ask for `logprobs` or a hook, which run another program, are refused.

    Raises:
      TypeError: a count that is no integer. ValueError: an unknown prefill backend, or a count below its least.
    """

    bf16_cache: bool = False
    prefill_backend: str | None = None
    chunk_size: int = 1024
    max_batch: int = 8
    max_len: int = 4096
    seed: int = 0
    trace: bool = False
    speculative_steps: int = 0
    backend: str | None = None
    num_pages: int | None = None
    context_parallel: int = 1
    reuse_points: int = 0
    logits_hook: LogitsHook | None = None
    batch_invariant: bool = False

    def __post_init__(self):
        if self.prefill_backend not in (None, *PREFILL_BACKENDS):
            raise ValueError(
                f"prefill_backend must be one of {', '.join(PREFILL_BACKENDS)}, got {self.prefill_backend!r}"
            )
        leasts = {"chunk_size": 1, "max_batch": 1, "max_len": 2, "speculative_steps": 0, "reuse_points": 0}
        leasts["context_parallel"] = 1
        if self.num_pages is not None:
            leasts["num_pages"] = 2  # page 0 is that of padding
        for name, least in leasts.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if (pages := self.num_pages) is not None:
            devices = self.context_parallel
            if pages % devices or pages < 2 * devices:
                raise ValueError(f"num_pages must be at least 2 for each of {devices} devices that share them, and as "
                                 f"many for each, got {pages}")  # fmt: skip
        if self.speculative_steps > MAX_DRAFTS:
            raise ValueError(f"speculative_steps must be at most {MAX_DRAFTS}, got {self.speculative_steps}")
        for name, value in (("num_pages", None), ("reuse_points", 0)) if self.batch_invariant else ():
            if (given := getattr(self, name)) != value:
                raise ValueError(
                    f"{name} must be {value} with batch_invariant, got {given}: what is read again or was read by "
                    "others is rounded otherwise"
                )

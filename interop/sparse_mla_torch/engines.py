"""Turns a serving engine's batch into this library's metadata, in an attention backend's `init_forward_metadata`.

`sglang_step` and `vllm_step` take the engine's tensors under the engine's names. `draft_step` takes one step out of a
multi-step draft. `build_metadata` makes the metadata, as torch tensors. An SGLang backend:

    def init_forward_metadata(self, forward_batch):
        step = sglang_step(
            forward_batch.forward_mode,
            req_to_token=self.req_to_token,
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            out_cache_loc=forward_batch.out_cache_loc,
            full_to_swa=self.full_to_swa_index_mapping,
            extend_seq_lens=forward_batch.extend_seq_lens,
            num_draft_tokens=self.speculative_num_draft_tokens,
        )
        self.metadata = build_metadata(DEEPSEEK_V4_FLASH, step)  # out=… where a captured graph keeps the buffers

On a GPU everything runs on torch's current stream, nothing is read back to the host, and no JAX backend is initialised.
So these calls may be captured in a CUDA graph: a replay reads the engine's tensors again and writes the same metadata
buffers. On the CPU the JAX builders do the work.

Tensors are int32 or int64. int64 tensors are copied once, to int32; out-of-range values stay out of range. The big
tables (`req_to_token`, block tables) must be int32, as in both engines: a copy in each step would cost more than the
metadata.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import torch

from jax_sparse_mla import metadata
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.indices.lookup import INT_MAX
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables, V4Metadata, V32Metadata
from jax_sparse_mla.models import ModelSpec
from sparse_mla_torch import bridge
from sparse_mla_torch.attention import route
from sparse_mla_torch.operations.checks import TensorChecks

INT_MIN = -INT_MAX - 1

# SGLang's names of forward modes. A mixed batch is an EXTEND; its decodes extend their requests by one token.
_SGLANG_MODES = {
    **{mode.name: mode for mode in ForwardMode},
    "MIXED": ForwardMode.EXTEND,
    "SPLIT_PREFILL": ForwardMode.EXTEND,
    "DRAFT_EXTEND_V2": ForwardMode.DRAFT_EXTEND,
}


class EngineStep(NamedTuple):
    """A forward step as the metadata builders take it, of int32 torch tensors."""

    batch: ForwardBatch
    tables: RequestTables


def sglang_step(
    forward_mode: Any,
    *,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    full_to_swa: torch.Tensor | None = None,
    extend_seq_lens: torch.Tensor | None = None,
    num_draft_tokens: int | None = None,
    max_seq_len: int | None = None,
) -> EngineStep:
    """A step of an SGLang batch of B requests and T query rows; arguments by SGLang's names.

    Args:
      forward_mode: SGLang's ForwardMode, its name, or ours. MIXED and SPLIT_PREFILL are EXTEND.
      req_to_token: int32 `[max_requests, max_len]`, the full-pool slot of each position of each request.
      req_pool_indices: `[B]`, rows of `req_to_token`.
      seq_lens: `[B]`, with this step's tokens except in TARGET_VERIFY and before a draft; 0 for a padding request.
      out_cache_loc: `[T]`, the slots that this step writes; `[B * topk * num_steps]` for a draft (see `draft_step`).
      full_to_swa: `[pool + 1]`, `full_to_swa_index_mapping`, its last entry −1; for models with a window. An engine
        that keeps it in int32 saves a copy a step.
      extend_seq_lens: `[B]`, query rows of each request; read in EXTEND.
      num_draft_tokens: query rows of each request; read in TARGET_VERIFY and DRAFT_EXTEND.
      max_seq_len: the bucket of the page tables, in tokens; by default the width of `req_to_token`.

    Raises:
      TypeError: not a tensor, or of another dtype.
      ValueError: an unknown mode, a tensor of another rank, not contiguous, or on another device than `seq_lens`.
    """
    check = _StepChecks("sglang_step", seq_lens)
    name = forward_mode if isinstance(forward_mode, str) else getattr(forward_mode, "name", repr(forward_mode))
    if name not in _SGLANG_MODES:
        raise check.fail(f"forward_mode must be one of {', '.join(_SGLANG_MODES)}, got {name}")
    mode = _SGLANG_MODES[name]
    lens = check.values("seq_lens", seq_lens)
    table = check("req_to_token", req_to_token, (None, None))
    return EngineStep(
        ForwardBatch(
            mode=mode,
            max_seq_len=table.shape[1] if max_seq_len is None else max_seq_len,
            req_pool_indices=check.values("req_pool_indices", req_pool_indices),
            seq_lens=lens,
            out_cache_loc=check.values("out_cache_loc", out_cache_loc),
            extend_lens=check.values("extend_seq_lens", extend_seq_lens) if mode is ForwardMode.EXTEND else None,
            num_draft_tokens=num_draft_tokens,
        ),
        RequestTables(
            req_to_token=table, full_to_swa=None if full_to_swa is None else check.values("full_to_swa", full_to_swa)
        ),
    )


def vllm_step(
    spec: ModelSpec,
    *,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    query_start_loc: torch.Tensor | None = None,
    uniform_query_len: int | None = None,
    swa_block_tables: torch.Tensor | None = None,
    num_blocks: int | None = None,
    max_seq_len: int | None = None,
) -> EngineStep:
    """A step of a vLLM batch of B requests and T query rows; arguments by vLLM's names.

    Args:
      spec: the model.
      block_tables: int32 `[B, blocks]`. What lies past a request's last block is not read.
      seq_lens: `[B]`, with this step's tokens; 0 for a padding request.
      slot_mapping: `[T]`, the slots that this step writes, −1 on padding rows.
      block_size: tokens of a block, a multiple of `spec.page_size`.
      query_start_loc: `[B + 1]`, each request's first row, for a prefill or mixed batch (EXTEND).
      uniform_query_len: query rows of every request, instead: 1 for a decode (DECODE), 1 + drafts for the
        verification of drafts (DRAFT_EXTEND: these lengths have the drafts already).
      swa_block_tables: int32 `[B, blocks]`, the blocks of the sliding-window cache (vLLM's second cache group), of
        the same size; positions outside the window may have any block. Pass the block tables themselves if the
        windows are kept in full.
      num_blocks: blocks of the full cache, with `swa_block_tables`.
      max_seq_len: the bucket of the page tables, in tokens; by default what `block_tables` cover.

    Raises:
      TypeError: not a tensor, or of another dtype.
      ValueError: a tensor of another rank or shape, not contiguous, or on another device than `seq_lens`; arguments
        that exclude or need each other.
    """
    check = _StepChecks("vllm_step", seq_lens)
    if (query_start_loc is None) == (uniform_query_len is None):
        raise check.fail("give either query_start_loc or uniform_query_len")
    if (swa_block_tables is None) != (num_blocks is None):
        raise check.fail("swa_block_tables and num_blocks go together")
    if block_size < 1 or block_size % spec.page_size:
        raise check.fail(f"block_size must be a multiple of {spec.page_size} for {spec.name}, got {block_size}")
    if uniform_query_len is not None and uniform_query_len < 1:
        raise check.fail(f"uniform_query_len must be at least 1, got {uniform_query_len}")
    lens = check.values("seq_lens", seq_lens)
    full = check("block_tables", block_tables, (None, None))
    if len(full) != len(lens):
        raise check.fail(f"block_tables must have one row per request, {len(lens)}, got {len(full)}")
    covered = full.shape[1] * block_size
    tokens = covered if max_seq_len is None else min(max_seq_len, covered)
    used = torch.arange(full.shape[1], device=full.device) * block_size < lens[:, None]
    full = _blocks_in_use(full, used, block_size)
    to_swa = None
    if swa_block_tables is not None:
        swa = check("swa_block_tables", swa_block_tables, (None, None))
        if swa.shape != full.shape:
            raise check.fail(f"swa_block_tables must be {list(full.shape)}, got {list(swa.shape)}")
        to_swa = _full_to_swa(full, _blocks_in_use(swa, used, block_size), num_blocks, block_size)
    mode, extend_lens = ForwardMode.DECODE, None
    if uniform_query_len is None:
        mode, extend_lens = ForwardMode.EXTEND, check.values("query_start_loc", query_start_loc).diff()
    elif uniform_query_len > 1:
        mode = ForwardMode.DRAFT_EXTEND
    return EngineStep(
        ForwardBatch(
            mode=mode,
            max_seq_len=tokens,
            req_pool_indices=torch.arange(len(lens), dtype=torch.int32, device=lens.device),
            seq_lens=lens,
            out_cache_loc=check.values("slot_mapping", slot_mapping),
            extend_lens=extend_lens,
            num_draft_tokens=uniform_query_len if mode is ForwardMode.DRAFT_EXTEND else None,
        ),
        RequestTables(req_to_token=_slots(full, block_size).flatten(1), full_to_swa=to_swa),
    )


def draft_step(
    step: EngineStep, index: int, num_steps: int, *, topk: int = 1, shift_seq_lens: bool = True
) -> EngineStep:
    """One decode step of a multi-step draft: `jax_sparse_mla.draft_step_batch`, on torch tensors.

    Args:
      step: the whole draft, from `sglang_step` in DECODE: the committed lengths, and `out_cache_loc` of
        `[B, topk, num_steps]` flattened.
      index: which step, 0 … num_steps − 1.
      num_steps, topk, shift_seq_lens: as in `draft_step_batch`.

    Raises:
      ValueError: another mode, an index out of range, or an `out_cache_loc` of another length.
    """
    batch, requests = step.batch, len(step.batch.seq_lens)
    if batch.mode is not ForwardMode.DECODE:
        raise ValueError(f"draft_step: step must be in DECODE, got {batch.mode.name}")
    if topk < 1 or not 0 <= index < num_steps:
        raise ValueError(f"draft_step: needs topk >= 1 and 0 <= index < num_steps, got {topk}, {index}, {num_steps}")
    if len(batch.out_cache_loc) != requests * topk * num_steps:
        raise ValueError(
            f"draft_step: out_cache_loc must have B * topk * num_steps = {requests} * {topk} * {num_steps} entries, "
            f"got {len(batch.out_cache_loc)}"
        )
    lens, advance = batch.seq_lens, index + 1 if shift_seq_lens else 0
    lens = (lens.clamp(max=INT_MAX - advance) + advance).masked_fill(lens <= 0, 0)

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x[:, None].expand(requests, topk).flatten()

    return step._replace(
        batch=dataclasses.replace(
            batch,
            req_pool_indices=branches(batch.req_pool_indices),
            seq_lens=branches(lens),
            out_cache_loc=batch.out_cache_loc.view(-1, num_steps)[:, index].contiguous(),
            num_draft_tokens=None,
        )
    )


def build_metadata(
    spec: ModelSpec,
    step: EngineStep,
    *,
    fp8_kv_cache: bool = True,
    prefill_backend: str | None = None,
    out: V4Metadata | V32Metadata | None = None,
) -> V4Metadata | V32Metadata:
    """The metadata of a step: as `jax_sparse_mla.build_v4_metadata` or `build_v32_metadata`, of torch tensors.

    A batch without requests (an idle rank's) needs no metadata.

    Args:
      spec: the model; whether it has a window decides which metadata.
      step: from `sglang_step`, `vllm_step` or `draft_step`.
      fp8_kv_cache, prefill_backend: of V3.2: see `jax_sparse_mla.select_topk_transform`. None: the `kernel` of the
        step's plan says whether EXTEND gathers a workspace ("flashmla_sparse") or not ("flashmla_kv").
      out: buffers to write into: the result of an earlier call of the same mode and shapes; new ones by default. Pass
        them where a captured graph or a layer keeps them.

    Raises:
      TypeError, ValueError: as the builders; `out` of another mode, model or shape.
    """
    if not spec.windowed:
        prefill_backend = prefill_backend or _prefill_backend(spec, step)
    elif step.tables.full_to_swa is None:
        raise ValueError(f"build_metadata: {spec.name} has a window, and the step no full_to_swa (swa_block_tables)")
    build = _launch if step.batch.seq_lens.is_cuda else _build_by_jax
    return build(spec, step, fp8_kv_cache, prefill_backend, out)


def _prefill_backend(spec: ModelSpec, step: EngineStep) -> str:
    """The part that an EXTEND step attends to, by its rows; other modes attend to the pages whatever this says."""
    rows, device = len(step.batch.out_cache_loc), route.device_info(step.batch.seq_lens.device)
    call = Call("decode", spec.kv_layout, rows, spec.num_heads, device, spec.index_width, chunk=True)
    return "flashmla_sparse" if route.plan(call).kernel == "sparse_prefill" else "flashmla_kv"


def _launch(spec: ModelSpec, step: EngineStep, fp8_kv_cache: bool, prefill_backend: str | None, out: Any) -> Any:
    # Triton is imported only here, where there is a GPU.
    with torch.cuda.device_of(step.batch.seq_lens):
        from sparse_mla_torch.operations.metadata import build_v4_metadata, build_v32_metadata

        if spec.windowed:
            return build_v4_metadata(spec, *step, out=out)
        return build_v32_metadata(spec, *step, fp8_kv_cache=fp8_kv_cache, prefill_backend=prefill_backend, out=out)


def _build_by_jax(spec: ModelSpec, step: EngineStep, fp8_kv_cache: bool, prefill_backend: str | None, out: Any) -> Any:
    if spec.windowed:
        made = bridge.call(metadata.build_v4_metadata, spec, *step)
    else:
        made = bridge.call(
            metadata.build_v32_metadata, spec, *step, fp8_kv_cache=fp8_kv_cache, prefill_backend=prefill_backend
        )
    if out is None:
        # Copies, because the bridge's tensors are JAX's memory and layers write into the indexer's indices.
        return jax.tree.map(torch.clone, made)
    if jax.tree.structure(out) != jax.tree.structure(made):
        raise ValueError("build_metadata: out was made for another model or top-k transform")

    def write(path, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if buffer.dtype != value.dtype or buffer.shape != value.shape:
            raise ValueError(
                f"build_metadata: out{jax.tree_util.keystr(path)} must be {value.dtype} {list(value.shape)}, "
                f"got {buffer.dtype} {list(buffer.shape)}"
            )
        return buffer.copy_(value)

    jax.tree_util.tree_map_with_path(write, out, made)
    return out


class _StepChecks(TensorChecks):
    """Checks of the tensors of an engine's step."""

    def values(self, name: str, x: Any) -> torch.Tensor:
        """int32 or int64 `[n]`, as int32; saturated, so that a value past int32 does not become a valid one."""
        if isinstance(x, torch.Tensor) and x.dtype == torch.int64:
            x = x.clamp(INT_MIN, INT_MAX).to(torch.int32)
        return self(name, x, (None,), ("int32", "int64"))


def _blocks_in_use(blocks: torch.Tensor, used: torch.Tensor, block_size: int) -> torch.Tensor:
    """The blocks that hold a token, −1 elsewhere and where a block's slots do not fit int32."""
    return blocks.masked_fill(~used | (blocks < 0) | (blocks >= INT_MAX // block_size), -1)


def _slots(blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slots of each block, in a new last dimension; −1 for block −1."""
    offsets = torch.arange(block_size, dtype=torch.int32, device=blocks.device)
    return (blocks[..., None] * block_size + offsets).masked_fill(blocks[..., None] < 0, -1)


def _full_to_swa(full: torch.Tensor, swa: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """The sliding-window slot of each full slot, from both caches' blocks in use; −1 where none, and at the end."""
    index = full.masked_fill((full < 0) | (full >= num_blocks), num_blocks)
    # A block that several requests share (a common prefix) has the same tokens in each one's window block.
    pages = torch.full((num_blocks + 1,), -1, dtype=torch.int32, device=full.device)
    pages.scatter_reduce_(0, index.flatten().long(), swa.flatten(), "amax")
    pages[num_blocks:].fill_(-1)
    return _slots(pages, block_size).flatten()[: num_blocks * block_size + 1]

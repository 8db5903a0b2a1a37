"""A chunk of one request's prefill with SGLang's kernels, launched one after the other: SGLang has no graph for it."""

from __future__ import annotations

import types

import torch

from benchmarks.sglang.state import C4_RING, C128_RING, Layer, State
from benchmarks.sglang.step import Metadata, Seen, Step


class ChunkMetadata(Metadata):
    """Arrays that all layers of a chunk share.

    Attributes:
      raw: int32 `[T, topk]`, the positions that the indexer selects.
      starts, ends: int32 `[T]`, the range of keys of a row's logits; none for rows that select all.
      workspace: SGLang's plan of the gathered rows and the indices into them.
    """

    def __init__(self, chunk: Chunk, start: int):
        state, sglang = chunk.state, chunk.sglang
        rows, device, requests = len(state.kv), state.device, state.requests
        end, spec = start + rows, state.stack.spec
        out_loc = state.slots[0, start:end]
        seq_lens, extend_lens = (torch.tensor([n], device=device) for n in (end, rows))
        expanded = sglang["pages"].ExpandPrefillCausally.execute(
            req_pool_indices=requests,
            seq_lens=seq_lens,
            extend_seq_lens=extend_lens,
            extend_start_loc=torch.zeros_like(extend_lens),
            seq_lens_cpu=[end],
            extend_seq_lens_cpu=[rows],
            num_tokens=rows,
            padded_num_tokens=rows,
        )
        repeated, lens = expanded.req_pool_indices_repeated, expanded.seq_lens_casual
        self.of_rows(state, sglang, chunk.deep_gemm, repeated, lens, end, out_loc)
        self.raw = torch.empty_like(self.c4_slots)
        make = sglang["compress"].CompressorPrefillPlan.generate
        host = torch.tensor([end]), torch.tensor([rows])
        table = requests, *host, state.req_to_token, state.full_to_swa, spec.page_size
        self.plans = {4: make(4, *table, C4_RING, rows), 128: make(128, *table, C128_RING, rows)}
        self.swa_out = state.full_to_swa[out_loc].to(torch.int32)

        self.entries, self.first_pages, self.last_length = end // 4, self.page_table[:1].contiguous(), self.c4_lens[-1:]
        self.starts = torch.zeros_like(self.c4_lens)
        self.ends = torch.where(self.c4_lens - self.starts > spec.index_topk, self.c4_lens, self.starts)
        self.workspace = sglang["workspace"].SparsePrefillChunkCache.build(
            seq_lens=seq_lens.int(),
            extend_seq_lens=extend_lens.int(),
            query_lens=extend_lens.int(),
            query_pos=self.positions,
            req_pool_indices=requests.int(),
            req_to_token=state.req_to_token,
            full_to_swa=state.full_to_swa,
            swa_window_size=spec.window,
            swa_page_size=spec.page_size,
            num_qo_tokens=rows,
            max_seq_len=end,
            total_swa=min(end, rows + spec.window - 1),
            seq_lens_cpu=[end],
        )

    def sparse_page_indices(self, ratio: int) -> torch.Tensor:
        """For `workspace`, which only asks for ratio 128's."""
        return self.c128_slots

    def sparse_raw_indices(self, ratio: int) -> torch.Tensor:
        """For `workspace`, which only asks for ratio 4's."""
        return self.raw


class Chunk(Step):
    """`chunk(start)` prefills request 0 from `start` on, as many tokens as the state's inputs have rows."""

    def __init__(self, state: State):
        super().__init__(state, streams=False)
        self.buffer = self.sglang["workspace"].SparsePrefillKVBuffer(torch.device(state.device))
        self.keys = types.SimpleNamespace(index_page_size=64, index_head_dim=state.stack.spec.index_dim)

    def __call__(self, start: int, seen: dict[int, Seen | None] | None = None) -> torch.Tensor:
        """The last layer's output, bfloat16 `[T, heads, 512]`; `seen` as a step's."""
        self.buffer.forget_head()
        return self._layers(ChunkMetadata(self, start), seen)

    def _select(self, layer: Layer, q: torch.Tensor, weights: torch.Tensor, metadata: ChunkMetadata) -> None:
        keys, scales = self.sglang["index keys"].GetKAndS.execute(
            self.keys,
            layer.index_k,
            page_indices=metadata.first_pages,
            seq_len_tensor=metadata.last_length,
            seq_len_sum=metadata.entries,
            max_seq_len=metadata.entries,
        )
        logits = self.deep_gemm.fp8_mqa_logits(
            q,
            (keys.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(-1)),
            weights.squeeze(2),
            metadata.starts,
            metadata.ends,
            clean_logits=False,
            max_seqlen_k=-(-metadata.entries // 64) * 64,
        )
        self.sglang["topk"].topk_transform_paged_v2(
            logits,
            metadata.c4_lens,
            metadata.page_table,
            metadata.c4_slots,
            64,
            metadata.topk_plan,
            metadata.raw,
        )

    def _attend(self, layer: Layer, q: torch.Tensor, metadata: ChunkMetadata) -> torch.Tensor:
        spec, plan = self.state.stack.spec, metadata.workspace
        dequantize = self.sglang["gather"].dequantize_k_cache_paged_dsv4
        tokens = len(plan.swa_token_ids)
        if layer.ratio:
            page_size = spec.page_size // layer.ratio
            slots, indices, lengths = plan.layer_inputs(layer.ratio, metadata, page_size)
            source = layer.compressed.data_ptr(), slots.data_ptr(), len(slots)
            workspace, _ = self.buffer.get_with_head(len(slots) + tokens, head_source=source)
            dequantize(layer.compressed, slots, page_size=page_size, out=workspace[: len(slots)])
        else:
            workspace, indices, lengths = self.buffer.get(tokens), plan.c0_combined_indices, plan.c0_combined_lens
        dequantize(layer.swa, plan.swa_token_ids, page_size=spec.page_size, out=workspace[-tokens:])
        out, _, _ = self.flash_mla.flash_mla_sparse_fwd(
            q=q,
            kv=workspace,
            indices=indices[:, None],
            sm_scale=spec.softmax_scale,
            d_v=spec.v_dim,
            attn_sink=layer.sink,
            topk_length=lengths,
            use_legacy=True,
            return_log2_lse=True,  # as SGLang calls it: else two more launches make it natural
        )
        return out

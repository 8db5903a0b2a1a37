"""vLLM's own attention classes of DeepSeek-V3.2 and V4 over batches that are made here, each call beside torch.

vLLM's metadata builders, index conversions, gathers and forward methods run as they are. What a layer reads of vLLM's
configuration is given by plain objects. Import this after vLLM's platform is what it shall be.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace as Facts
from typing import NamedTuple

import torch
import vllm.config.vllm as vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.worker.workspace import init_workspace_manager

OURS, THEIRS = "JAX_SPARSE_MLA", "FLASHMLA_SPARSE"
MAX_TOKENS = 512  # of a step


class LayerCall(NamedTuple):
    """A layer's attention over one batch.

    Attributes:
      function: gives `[tokens, heads, 512]`, without the heads that a backend pads.
      wanted: the same by torch in float32, over the cache's rows as numbers.
      page_bytes: from one page of the (window's) cache to the next.
    """

    function: Callable[[], torch.Tensor]
    wanted: torch.Tensor
    page_bytes: int


class Batch:
    """Requests as vLLM's runner hands them to a metadata builder, the decodes first."""

    def __init__(self, query_lens: list[int], seq_lens: list[int], device: torch.device):
        lens = torch.tensor(query_lens, dtype=torch.int32)
        self.device, self.longest, self.tokens = device, max(seq_lens), sum(query_lens)
        self.lens_on_host = torch.tensor(seq_lens, dtype=torch.int32)
        self.starts_on_host = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0).to(torch.int32)])
        self.longest_query = max(query_lens)
        positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens)])
        requests = torch.repeat_interleave(torch.arange(len(query_lens)), lens.long())
        self.positions, self.requests = positions.to(device), requests.to(device)

    def tables(self, block_size: int) -> CommonAttentionMetadata:
        blocks, count = -(-self.longest // block_size), len(self.lens_on_host)
        table = (1 + torch.randperm(count * blocks, device=self.device).to(torch.int32)).view(-1, blocks)
        return CommonAttentionMetadata(
            query_start_loc=self.starts_on_host.to(self.device),
            query_start_loc_cpu=self.starts_on_host,
            seq_lens=self.lens_on_host.to(self.device),
            num_reqs=count,
            num_actual_tokens=self.tokens,
            max_query_len=self.longest_query,
            max_seq_len=self.longest,
            block_table_tensor=table,
            slot_mapping=slots_of(table, self.requests, self.positions, block_size),
            seq_lens_cpu_upper_bound=self.lens_on_host,
            positions=self.positions,
        )


def slots_of(table: torch.Tensor, requests, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    return table[requests, positions // block_size].long() * block_size + positions % block_size


def fill(
    cache: torch.Tensor, table: torch.Tensor, lens: list[int], values: int, layout: str | None = None
) -> torch.Tensor:
    """Writes random rows for each request; the cache's rows as numbers, `[slots, values]`."""
    from sparse_mla_torch import ops

    (pages, block_size), device = cache.shape[:2], cache.device
    slots = torch.cat([slots_of(table, i, torch.arange(n, device=device), block_size) for i, n in enumerate(lens)])
    if len(slots):
        rows = torch.randn(len(slots), values, device=device).bfloat16()
        ops.write_kv(cache.unsqueeze(2), slots.int(), rows, layout)
    slots = torch.arange(pages * block_size, dtype=torch.int32, device=device)
    return ops.gather_kv(cache.unsqueeze(2), slots, layout).float()


def attend(q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None = None) -> torch.Tensor:
    logits = q.float() @ keys.T * scale
    if sink is not None:
        logits = torch.cat([logits, sink[:, None]], 1)
    return torch.softmax(logits, -1)[:, : len(keys)] @ keys[:, :512]


def choose(into: torch.Tensor, counts: list[int]) -> None:
    """Writes some of the first `count` positions into each row, in any order: what an indexer finds."""
    into.fill_(-1)
    for row, count in zip(into, counts):
        chosen = torch.randperm(count, device=into.device)[: into.shape[1]]
        row[: len(chosen)] = chosen


def sizes(**more) -> Facts:
    """What vLLM's classes read of their configuration."""
    parallel = ("decode_context_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size")
    return Facts(
        **{
            "scheduler_config": Facts(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=64),
            "parallel_config": Facts(**dict.fromkeys(parallel, 1), cp_kv_cache_interleave_size=1),
            "attention_config": Facts(
                hisparse_config=None, sparse_mla_prefill_workspace_factor=2, sparse_mla_force_mqa=False
            ),
            "speculative_config": None,
            "num_speculative_tokens": 0,
        }
        | more
    )


class V32:
    """A layer of DeepSeek-V3.2 over its cache, through a backend of vLLM's."""

    BLOCK = 64

    def __init__(
        self, heads: int, backend: str, device: torch.device, *, topk: int = 128, max_len: int = 512, fp8: bool = True
    ):
        dtype = "fp8_ds_mla" if fp8 else "bfloat16"
        model = Facts(
            **{"index_topk": topk, "kv_lora_rank": 512, "q_lora_rank": 1536, "model_type": "deepseek_v32"},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        )
        config = sizes(
            model_config=Facts(
                **{"hf_text_config": model, "hf_config": model, "dtype": torch.bfloat16, "max_model_len": max_len},
                get_num_attention_heads=lambda parallel: heads,
                model_arch_config=Facts(total_num_attention_heads=heads),
            ),
            cache_config=Facts(block_size=self.BLOCK, cache_dtype=dtype),
            compilation_config=Facts(static_forward_context={"layer": Facts(prefill_backend=None)}),
        )
        vllm_config._current_vllm_config = config
        init_workspace_manager(device, 1)
        import vllm.model_executor.layers.attention.sparse_mla_attention as layer

        layer.get_tensor_model_parallel_world_size = lambda: 1
        layer.has_flashinfer = lambda: False
        self.heads, self.device, chosen = heads, device, AttentionBackendEnum[backend].get_class()
        self.topk = torch.full((MAX_TOKENS, topk), -1, dtype=torch.int32, device=device)
        self.impl = chosen.get_impl_cls()(
            *(heads, 576, 576**-0.5, 1, None, None, dtype, None, "decoder", None),
            topk_indices_buffer=self.topk,
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None},
        )
        self.impl.dcp_world_size, self.impl.need_to_return_lse_for_decode = 1, False
        self.dtype, self.width = (torch.uint8, 656) if fp8 else (torch.bfloat16, 576)
        bytes_of = {"cache_dtype_str": dtype, "state_content_bytes": 656} if fp8 else {}
        spec = MLAAttentionSpec(
            **{"block_size": self.BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": self.dtype}, **bytes_of
        )
        self.builder = chosen.get_builder_cls()(spec, ["layer"], config, device)

    def call(self, query_lens: list[int], seq_lens: list[int]) -> LayerCall:
        batch = Batch(query_lens, seq_lens, self.device)
        tables = batch.tables(self.BLOCK)
        table = tables.block_table_tensor
        cache = torch.zeros(int(table.max()) + 2, self.BLOCK, self.width, dtype=self.dtype, device=self.device)
        rows = fill(cache.view(torch.uint8), table, seq_lens, 576)
        choose(self.topk[: batch.tokens], [position + 1 for position in batch.positions.tolist()])
        shape = batch.tokens, self.heads
        q = tuple((torch.randn(*shape, n, device=self.device) / 2).bfloat16() for n in (512, 64))
        metadata = self.builder.build(0, tables)
        wanted = torch.empty(*shape, 512, device=self.device)
        for token in range(batch.tokens):
            chosen = self.topk[token][self.topk[token] >= 0].long()
            slots = slots_of(table, batch.requests[token], chosen, self.BLOCK)
            wanted[token] = attend(torch.cat(q, -1)[token], rows[slots], 576**-0.5)
        return LayerCall(lambda: self.impl.forward_mqa(q, cache, metadata, None)[0], wanted, cache.stride(0))


class V4:
    """Layers of DeepSeek-V4, one of each compress ratio, through the class that vLLM's model takes for a backend.

    Attributes:
      RATIOS: of the layers; the first has the window alone.
      CHOSEN: of the layers that attend to chosen entries, not to all.
      RECORDS: bytes a token and names of our layouts (None: told by the bytes), of the window's and compressed rows.
    """

    MODEL, CACHE_UTILS = "vllm.models.deepseek_v4.nvidia.model", "vllm.models.deepseek_v4.common.ops.cache_utils"
    WINDOW, SWA_BLOCK, BLOCK = 128, 64, 256
    RATIOS, CHOSEN = (1, 4, 128), (4,)
    DTYPE, ALIGNMENT = "fp8_ds_mla", 576
    RECORDS = ((584, None), (584, None))

    def __init__(self, heads: int, backend: str, device: torch.device, *, topk: int = 128, max_len: int = 1024):
        model = Facts(
            **{"index_topk": topk, "sliding_window": self.WINDOW, "compress_ratios": [0, *self.RATIOS[1:]]},
            **{"num_attention_heads": heads, "head_dim": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 3},
            model_type="deepseek_v4",
        )
        config = sizes(
            model_config=Facts(hf_config=model, hf_text_config=model, max_model_len=max_len, dtype=torch.bfloat16),
            use_v2_model_runner=True,
            kernel_config=Facts(enable_jit_warmup=False),
            cache_config=Facts(block_size=self.BLOCK, cache_dtype=self.DTYPE),
            compilation_config=Facts(static_forward_context={}),
            attention_config=Facts(hisparse_config=None, backend=AttentionBackendEnum[backend]),
        )
        vllm_config._current_vllm_config = config
        init_workspace_manager(device, 1)
        # Triton's gather, and not CuTe DSL's.
        importlib.import_module(self.CACHE_UTILS).has_cutedsl = lambda: False
        self.heads, self.device, self.topk, self.max_len = heads, device, topk, max_len
        self.layer_class = importlib.import_module(self.MODEL)._select_dsv4_attn_cls(config)
        self.padded = self.layer_class.get_padded_num_q_heads(heads)
        (window_bytes, _), (compressed_bytes, _) = self.RECORDS
        common = {
            **{"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "cache_dtype_str": self.DTYPE},
            **{"alignment": self.ALIGNMENT, "model_version": "deepseek_v4"},
        }
        window = {"sliding_window": self.WINDOW, "state_content_bytes": window_bytes}
        alone, *compressing = self.RATIOS
        self.specs = {alone: SlidingWindowMLASpec(block_size=self.SWA_BLOCK, **window, **common)}
        builders = {alone: self.layer_class.swa_backend_cls.get_builder_cls()}
        for ratio in compressing:
            self.specs[ratio] = MLAAttentionSpec(
                block_size=self.BLOCK, tokens_per_state=ratio, state_content_bytes=compressed_bytes, **common
            )
            builders[ratio] = self.layer_class.backend_cls.get_builder_cls()
        self.builders = {
            ratio: builder(self.specs[ratio], [f"layer {ratio}"], config, device) for ratio, builder in builders.items()
        }

    def cache(self, ratio: int, rows: int, pages: int) -> torch.Tensor:
        """As vLLM has it: pages of so many rows, each page padded."""
        step, width = self.specs[ratio].page_size_bytes, self.RECORDS[ratio != self.RATIOS[0]][0]
        memory = torch.zeros(pages * step, dtype=torch.uint8, device=self.device)
        return memory.as_strided((pages, rows, width), (step, width, 1))

    def facts(self, ratio: int) -> dict:
        """What a layer of this model has besides."""
        return {"prefix": "layer", "kv_cache": None, "max_image_tokens": 0}

    def call(self, ratio: int, query_lens: list[int], seq_lens: list[int]) -> LayerCall:
        batch, alone = Batch(query_lens, seq_lens, self.device), self.RATIOS[0]
        swa_tables, tables = batch.tables(self.SWA_BLOCK), batch.tables(self.BLOCK)
        metadata = {"swa": self.builders[alone].build(0, swa_tables)}
        swa_table, table = swa_tables.block_table_tensor, tables.block_table_tensor
        swa = self.cache(alone, self.SWA_BLOCK, int(swa_table.max()) + 2)
        swa_rows = fill(swa, swa_table, seq_lens, 512, self.RECORDS[0][1])
        layer = object.__new__(self.layer_class)
        torch.nn.Module.__init__(layer)
        topk = torch.full((MAX_TOKENS, self.topk), -1, dtype=torch.int32, device=self.device)
        sink = torch.zeros(self.padded, device=self.device)
        sink[: self.heads] = torch.randn(self.heads, device=self.device)
        facts = {
            **{"compress_ratio": ratio, "swa_cache_layer": Facts(prefix="swa", kv_cache=swa)},
            **{"scale": 512**-0.5, "window_size": self.WINDOW},
            **{"max_num_batched_tokens": MAX_TOKENS, "max_model_len": self.max_len, "topk_indices_buffer": topk},
            "attn_sink": sink,
        }
        layer.__dict__.update(facts | self.facts(ratio))
        if ratio != alone:
            rows_of_block = self.BLOCK // ratio
            metadata["layer"] = self.builders[ratio].build(0, tables)
            layer.__dict__["kv_cache"] = self.cache(ratio, rows_of_block, int(table.max()) + 2)
            rows = fill(layer.kv_cache, table, [n // ratio for n in seq_lens], 512, self.RECORDS[1][1])
            choose(topk[: batch.tokens], [(position + 1) // ratio for position in batch.positions.tolist()])
        q = torch.zeros(batch.tokens, self.padded, 512, dtype=torch.bfloat16, device=self.device)
        q[:, : self.heads] = torch.randn(batch.tokens, self.heads, 512, device=self.device) / 2
        out = torch.full_like(q, torch.nan)
        wanted = torch.empty(batch.tokens, self.heads, 512, device=self.device)
        for token, (request, position) in enumerate(zip(batch.requests.tolist(), batch.positions.tolist())):
            window = torch.arange(max(0, position - self.WINDOW + 1), position + 1, device=self.device)
            keys = swa_rows[slots_of(swa_table, request, window, self.SWA_BLOCK)]
            if ratio != alone:
                all_of_them = torch.arange((position + 1) // ratio, device=self.device)
                chosen = topk[token][topk[token] >= 0].long() if ratio in self.CHOSEN else all_of_them
                keys = torch.cat([keys, rows[slots_of(table, request, chosen, rows_of_block)]])
            wanted[token] = attend(q[token, : self.heads], keys, layer.scale, sink[: self.heads])

        from vllm.forward_context import override_forward_context

        def function() -> torch.Tensor:
            with override_forward_context(Facts(attn_metadata=metadata)):
                layer.forward_mqa(q, None, batch.positions, out)
            return out[:, : self.heads]

        return LayerCall(function, wanted, swa.stride(0))


class V41(V4):
    """Layers of DeepSeek-V4.1 with its native caches; a compressing layer is its own KV source."""

    MODEL, CACHE_UTILS = "vllm.models.deepseek_v41.nvidia.model", "vllm.models.deepseek_v41.common.ops.cache_utils"
    SWA_BLOCK, RATIOS, CHOSEN = 32, (0, 1, 2), (1, 2)
    DTYPE, ALIGNMENT = "nvfp4_ds_mla", 512
    RECORDS = ((528, "V41_FP8"), (288, "V41_FP4"))

    def facts(self, ratio: int) -> dict:
        source = "layer" if ratio else None
        return {"use_pcp": False, "compressed_cache_prefix": source, "kv_cache": None, "kv_source_layer_id": 0} | {
            "layer_id": 0,
            "_prefill_num_heads": self.padded,
            "is_kv_source": bool(ratio),
        }

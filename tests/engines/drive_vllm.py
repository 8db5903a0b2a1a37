"""vLLM's own classes, loaded with our plugin as vLLM loads it, over CPU tensors: one line of JSON for each case.

`test_vllm.py` runs this and judges it. vLLM's metadata builders, index conversions and gathers run as they are (its
Triton kernels in Triton's interpreter). Our kernels' place takes the reference, as always on a CPU; what is tested is
what vLLM hands over and takes back. Where vLLM calls a compiled operator of its own, torch does the same here.

    python tests/engines/drive_vllm.py choice|v32|v4|left
"""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import pickle
import sys
from types import SimpleNamespace as Facts

import vllm_without_gpu  # isort: split

import torch
import vllm.config.vllm as vllm_config
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.worker.workspace import init_workspace_manager

CPU = torch.device("cpu")


def report(case: str, **facts) -> None:
    print(json.dumps({"case": case, **facts}), flush=True)


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def served() -> dict[str, int]:
    """What our plugin counted since it was last asked."""
    from sparse_mla_torch.plugins import calls

    counted = {" ".join(key): count for key, count in calls.counts.items()}
    calls.counts.clear()
    return counted


class Batch:
    """Requests as vLLM's runner hands them to a metadata builder, the decodes first."""

    def __init__(self, query_lens: list[int], seq_lens: list[int]):
        self.query_lens = torch.tensor(query_lens, dtype=torch.int32)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        ends = self.query_lens.cumsum(0).to(torch.int32)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends])
        self.tokens, self.longest = int(ends[-1]), max(seq_lens)
        self.positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens)])
        self.requests = torch.repeat_interleave(torch.arange(len(query_lens)), self.query_lens.long())

    def tables(self, block_size: int) -> CommonAttentionMetadata:
        blocks = -(-self.longest // block_size)
        count = len(self.seq_lens) * blocks
        table = (1 + torch.randperm(count).to(torch.int32)).view(-1, blocks)
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts,
            seq_lens=self.seq_lens,
            num_reqs=len(self.seq_lens),
            num_actual_tokens=self.tokens,
            max_query_len=int(self.query_lens.max()),
            max_seq_len=self.longest,
            block_table_tensor=table,
            slot_mapping=slots_of(table, self.requests, self.positions, block_size),
            seq_lens_cpu_upper_bound=self.seq_lens,
            positions=self.positions,
        )


def slots_of(table: torch.Tensor, requests, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    return table[requests, positions // block_size].long() * block_size + positions % block_size


def fill(cache: torch.Tensor, table: torch.Tensor, lens: list[int], values: int) -> torch.Tensor:
    """Writes random rows for each request; the cache's rows as numbers, `[slots, values]`."""
    from sparse_mla_torch import ops

    pages, block_size = cache.shape[:2]
    slots = torch.cat([slots_of(table, i, torch.arange(n), block_size) for i, n in enumerate(lens)])
    if len(slots):
        ops.write_kv(cache.unsqueeze(2), slots.int(), torch.randn(len(slots), values).bfloat16())
    return ops.gather_kv(cache.unsqueeze(2), torch.arange(pages * block_size, dtype=torch.int32)).float()


def attend(q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor | None = None) -> torch.Tensor:
    logits = q.float() @ keys.T * scale
    if sink is not None:
        logits = torch.cat([logits, sink[:, None]], 1)
    return torch.softmax(logits, -1)[:, : len(keys)] @ keys[:, :512]


def some(count: int, at_most: int) -> torch.Tensor:
    """So many of the first `count` positions, in any order: what an indexer finds."""
    return torch.randperm(count)[:at_most].int()


def sizes(**more) -> Facts:
    """What vLLM's classes read of their configuration."""
    parallel = ("decode_context_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size")
    return Facts(
        **{
            "scheduler_config": Facts(max_num_batched_tokens=512, max_num_seqs=8),
            "parallel_config": Facts(**dict.fromkeys(parallel, 1), cp_kv_cache_interleave_size=1),
            "attention_config": Facts(
                hisparse_config=None, sparse_mla_prefill_workspace_factor=2, sparse_mla_force_mqa=False
            ),
            "speculative_config": None,
            "num_speculative_tokens": 0,
        }
        | more
    )


# --- the choice of a backend ---------------------------------------------------------------------------------------


def choice() -> None:
    import vllm.plugins
    from vllm.config.attention import AttentionConfig
    from vllm.v1.attention.selector import get_attn_backend

    vllm.plugins.plugins_loaded = False
    load_general_plugins()  # again, as vLLM may in one process
    member = AttentionBackendEnum.JAX_SPARSE_MLA
    config = AttentionConfig(backend="jax_sparse_mla")
    report("registered", path=member.get_path(), chosen=config.backend.name, jax="jax" in sys.modules)

    process = multiprocessing.get_context("spawn").Process(target=in_a_worker, args=(config,))
    process.start()
    process.join()
    copies = [copy.deepcopy(config), pickle.loads(pickle.dumps(config))]
    report("a worker's configuration", exit=process.exitcode, copies=[x.backend is member for x in copies])

    def selected(backend, cache: str = "fp8_ds_mla", head_size: int = 576) -> str:
        vllm_config._current_vllm_config = sizes(
            cache_config=Facts(user_specified_block_size=False, cache_dtype=cache, block_size=64),
            kv_transfer_config=None,
            attention_config=Facts(use_non_causal=False, backend=backend, backend_per_kind={}),
            model_config=Facts(rswa_window=None, hf_text_config=Facts(index_topk=2048, qk_rope_head_dim=64)),
        )
        try:
            options = {"use_mla": True, "use_sparse": True, "num_heads": 128}
            return get_attn_backend(head_size, torch.bfloat16, cache, **options).__name__
        except ValueError as refusal:
            return str(refusal)
        finally:
            vllm_config._current_vllm_config = None

    from vllm.model_executor.layers.attention.mla_attention import _canonicalize_sparse_mla_kv_cache_dtype

    cache = _canonicalize_sparse_mla_kv_cache_dtype(member.get_class(), "fp8")
    other = selected(AttentionBackendEnum.FLASHMLA_SPARSE)
    report("V3.2", fp8=selected(member), bf16=selected(member, "bfloat16"), other=other, cache=cache)

    import vllm.models.deepseek_v4.nvidia.flashmla as layer
    import vllm.models.deepseek_v4.nvidia.model as model

    before = dict(vars(layer))
    names = {}
    for backend in (None, AttentionBackendEnum.FLASHMLA_SPARSE, member):
        chosen = model._select_dsv4_attn_cls(Facts(attention_config=Facts(backend=backend)))
        names[getattr(backend, "name", "none")] = [chosen.__name__, chosen.get_padded_num_q_heads(16)]
    unchanged = all(vars(layer).get(name) is value for name, value in before.items())
    report("V4", classes=names, module_unchanged=unchanged)


def in_a_worker(config) -> None:
    """vLLM's workers unpickle their configuration before they load plugins."""
    assert config.backend is AttentionBackendEnum.JAX_SPARSE_MLA, config.backend
    assert config.backend.get_path().startswith("sparse_mla_torch.")


# --- DeepSeek-V3.2 -------------------------------------------------------------------------------------------------


class V32:
    TOPK, BLOCK = 128, 64

    def __init__(self, heads: int):
        from vllm.v1.attention.backends.mla import flashmla_sparse, index_group

        index_group._create_side_stream = lambda device: vllm_without_gpu.Quiet()
        index_group._create_event = vllm_without_gpu.Quiet
        index_group.current_stream = flashmla_sparse.current_stream = vllm_without_gpu.Quiet
        model = Facts(
            **{"index_topk": self.TOPK, "kv_lora_rank": 512, "q_lora_rank": 1536, "model_type": "deepseek_v32"},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        )
        config = sizes(
            model_config=Facts(
                **{"hf_text_config": model, "hf_config": model, "dtype": torch.bfloat16, "max_model_len": 512},
                get_num_attention_heads=lambda parallel: heads,
                model_arch_config=Facts(total_num_attention_heads=heads),
            ),
            cache_config=Facts(block_size=self.BLOCK, cache_dtype="fp8_ds_mla"),
            compilation_config=Facts(static_forward_context={"layer": Facts(prefill_backend=None)}),
        )
        vllm_config._current_vllm_config = config
        init_workspace_manager(CPU, 1)
        import vllm.model_executor.layers.attention.sparse_mla_attention as layer

        layer.get_tensor_model_parallel_world_size = lambda: 1
        layer.has_flashinfer = lambda: False
        self.heads, backend = heads, AttentionBackendEnum.JAX_SPARSE_MLA.get_class()
        self.topk = torch.full((512, self.TOPK), -1, dtype=torch.int32)
        self.impl = backend.get_impl_cls()(
            *(heads, 576, 576**-0.5, 1, None, None, "fp8_ds_mla", None, "decoder", None),
            topk_indices_buffer=self.topk,
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None},
        )
        self.impl.dcp_world_size, self.impl.need_to_return_lse_for_decode = 1, False
        spec = MLAAttentionSpec(
            **{"block_size": self.BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": torch.uint8},
            **{"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656},
        )
        self.builder = backend.get_builder_cls()(spec, ["layer"], config, CPU)

    def run(self, name: str, query_lens: list[int], seq_lens: list[int]) -> None:
        batch = Batch(query_lens, seq_lens)
        tables = batch.tables(self.BLOCK)
        table = tables.block_table_tensor
        cache = torch.zeros(int(table.max()) + 2, self.BLOCK, 656, dtype=torch.uint8)
        rows = fill(cache, table, seq_lens, 576)
        self.topk.fill_(-1)
        for token, position in enumerate(batch.positions.tolist()):
            chosen = some(position + 1, self.TOPK)
            self.topk[token, : len(chosen)] = chosen
        q = tuple((torch.randn(batch.tokens, self.heads, n) / 2).bfloat16() for n in (512, 64))
        metadata = self.builder.build(0, tables)
        out, _ = self.impl.forward_mqa(q, cache, metadata, None)
        wanted = torch.empty(batch.tokens, self.heads, 512)
        for token in range(batch.tokens):
            chosen = self.topk[token][self.topk[token] >= 0].long()
            slots = slots_of(table, batch.requests[token], chosen, self.BLOCK)
            wanted[token] = attend(torch.cat(q, -1)[token], rows[slots], 576**-0.5)
        error = relative_rms(out, wanted)
        report(f"{name}, {self.heads} heads", error=error, served=served(), shape=list(out.shape))


def gather_by_torch(*arguments) -> None:
    """vLLM's cp_gather_and_upconvert_fp8_kv_cache."""
    from sparse_mla_torch import ops

    cache, out, table, starts, requests = arguments
    ends = [*starts.tolist()[1:], len(out)]
    for i in range(requests):
        first, last = int(starts[i]), int(ends[i])
        slots = slots_of(table, i, torch.arange(last - first), cache.shape[1])
        out[first:last] = ops.gather_kv(cache.unsqueeze(2), slots.int())


def stand_in_for_v32s_operators() -> None:
    operators = vllm_without_gpu._custom_ops
    operators.concat_mla_q = lambda nope, rope, out: torch.cat([nope, rope], -1, out=out)
    operators.cp_gather_and_upconvert_fp8_kv_cache = gather_by_torch
    zeros = torch.zeros
    torch.zeros = lambda *args, pin_memory=False, **options: zeros(*args, **options)


def v32() -> None:
    stand_in_for_v32s_operators()
    for heads in (16, 64):
        layer = V32(heads)
        layer.run("decode", [1, 1, 1], [70, 200, 129])
        layer.run("two tokens", [2, 2, 2], [70, 200, 129])
        layer.run("mixed", [1, 1, 150], [70, 200, 150])


# --- DeepSeek-V4 ---------------------------------------------------------------------------------------------------


class V4:
    WINDOW, TOPK, SWA_BLOCK, BLOCK = 128, 128, 64, 256

    def __init__(self, heads: int):
        model = Facts(
            **{"index_topk": self.TOPK, "sliding_window": self.WINDOW, "compress_ratios": [0, 4, 128]},
            **{"num_attention_heads": heads, "head_dim": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 3},
            model_type="deepseek_v4",
        )
        config = sizes(
            model_config=Facts(hf_config=model, hf_text_config=model, max_model_len=1024, dtype=torch.bfloat16),
            use_v2_model_runner=True,
            kernel_config=Facts(enable_jit_warmup=False),
            cache_config=Facts(block_size=self.BLOCK, cache_dtype="fp8_ds_mla"),
            compilation_config=Facts(static_forward_context={}),
            attention_config=Facts(hisparse_config=None, backend=AttentionBackendEnum.JAX_SPARSE_MLA),
        )
        vllm_config._current_vllm_config = config
        init_workspace_manager(CPU, 1)
        import vllm.models.deepseek_v4.common.ops.cache_utils as cache_utils
        import vllm.models.deepseek_v4.nvidia.model as model_module

        cache_utils.has_cutedsl = lambda: False  # Triton's gather, and not CuTe DSL's
        self.heads, self.layer_class = heads, model_module._select_dsv4_attn_cls(config)
        self.padded = self.layer_class.get_padded_num_q_heads(heads)
        common = {
            **{"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla"},
            **{"state_content_bytes": 584, "alignment": 576, "model_version": "deepseek_v4"},
        }
        self.specs = {1: SlidingWindowMLASpec(block_size=self.SWA_BLOCK, sliding_window=self.WINDOW, **common)}
        builders = {1: self.layer_class.swa_backend_cls.get_builder_cls()}
        for ratio in (4, 128):
            self.specs[ratio] = MLAAttentionSpec(block_size=self.BLOCK, tokens_per_state=ratio, **common)
            builders[ratio] = self.layer_class.backend_cls.get_builder_cls()
        self.builders = {
            ratio: builder(self.specs[ratio], [f"layer {ratio}"], config, CPU) for ratio, builder in builders.items()
        }

    def cache(self, ratio: int, rows: int, pages: int) -> torch.Tensor:
        """As vLLM has it: pages of so many rows, each page padded."""
        step = self.specs[ratio].page_size_bytes
        return torch.zeros(pages * step, dtype=torch.uint8).as_strided((pages, rows, 584), (step, 584, 1))

    def run(self, name: str, ratio: int, query_lens: list[int], seq_lens: list[int]) -> None:
        batch = Batch(query_lens, seq_lens)
        swa_tables, tables = batch.tables(self.SWA_BLOCK), batch.tables(self.BLOCK)
        metadata = {"swa": self.builders[1].build(0, swa_tables)}
        swa_table = swa_tables.block_table_tensor
        swa = self.cache(1, self.SWA_BLOCK, int(swa_table.max()) + 2)
        swa_rows = fill(swa, swa_table, seq_lens, 512)
        layer = object.__new__(self.layer_class)
        torch.nn.Module.__init__(layer)
        topk = torch.full((512, self.TOPK), -1, dtype=torch.int32)
        facts = {
            **{"prefix": "layer", "compress_ratio": ratio, "swa_cache_layer": Facts(prefix="swa", kv_cache=swa)},
            **{"kv_cache": None, "scale": 512**-0.5, "window_size": self.WINDOW, "max_image_tokens": 0},
            **{"max_num_batched_tokens": 512, "max_model_len": 1024, "topk_indices_buffer": topk},
            "attn_sink": torch.randn(self.padded),
        }
        layer.__dict__.update(facts)
        if ratio > 1:
            rows_of_block, table = self.BLOCK // ratio, tables.block_table_tensor
            metadata["layer"] = self.builders[ratio].build(0, tables)
            layer.__dict__["kv_cache"] = self.cache(ratio, rows_of_block, int(table.max()) + 2)
            rows = fill(layer.kv_cache, table, [n // ratio for n in seq_lens], 512)
            for token, position in enumerate(batch.positions.tolist()):
                chosen = some((position + 1) // ratio, self.TOPK)
                topk[token, : len(chosen)] = chosen
        q = (torch.randn(batch.tokens, self.padded, 512) / 2).bfloat16()
        out = torch.full_like(q, torch.nan)
        from vllm.forward_context import override_forward_context

        with override_forward_context(Facts(attn_metadata=metadata)):
            layer.forward_mqa(q, None, batch.positions, out)
        wanted = torch.empty(batch.tokens, self.padded, 512)
        for token, (request, position) in enumerate(zip(batch.requests.tolist(), batch.positions.tolist())):
            window = torch.arange(max(0, position - self.WINDOW + 1), position + 1)
            keys = swa_rows[slots_of(swa_table, request, window, self.SWA_BLOCK)]
            if ratio > 1:
                chosen = topk[token][topk[token] >= 0].long() if ratio == 4 else torch.arange((position + 1) // ratio)
                keys = torch.cat([keys, rows[slots_of(table, request, chosen, rows_of_block)]])
            wanted[token] = attend(q[token], keys, layer.scale, layer.attn_sink)
        facts = {"error": relative_rms(out, wanted), "served": served(), "shape": list(out.shape)}
        report(f"{name}, ratio {ratio}, {self.heads} heads", page_bytes=swa.stride(0), **facts)


def v4() -> None:
    for heads in (16, 64):
        layers = V4(heads)
        for ratio in (1, 4, 128):
            layers.run("decode", ratio, [1, 1, 1], [70, 300, 513])
            layers.run("mixed", ratio, [1, 1, 40], [70, 600, 300])


# --- what is left to vLLM ------------------------------------------------------------------------------------------


def left() -> None:
    """Ours refuses every call: vLLM's functions get theirs as vLLM makes them, with as many heads as they take."""
    import vllm.models.deepseek_v4.nvidia.flashmla as v4_layer
    import vllm.v1.attention.backends.mla.flashmla_sparse as v32_layer
    from sparse_mla_torch import flash_mla

    ours, asked = {name: getattr(flash_mla, name) for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")}, []

    def theirs(name):
        def function(*args, **arguments):
            heads = (args[0] if args else arguments["q"]).shape[-2]
            assert heads in (64, 128), f"{name} of {heads} heads would end the process"
            asked.append(name)
            return ours[name](*args, **arguments)

        function.__signature__ = inspect.signature(getattr(v4_layer, name))
        return function

    def refuse(*args, **arguments):
        raise ValueError("ours refuses this")

    for name in ours:
        for layer in (v4_layer, v32_layer):
            setattr(layer, name, theirs(name))
        setattr(flash_mla, name, refuse)
    stand_in_for_v32s_operators()
    V32(16).run("left, V3.2 mixed", [1, 1, 150], [70, 200, 150])
    V32(64).run("left, V3.2 mixed", [1, 1, 150], [70, 200, 150])
    V4(16).run("left, V4 mixed", 4, [1, 1, 40], [70, 600, 300])
    report("left", asked=asked)


if __name__ == "__main__":
    torch.manual_seed(0)
    load_general_plugins()
    {"choice": choice, "v32": v32, "v4": v4, "left": left}[sys.argv[1]]()

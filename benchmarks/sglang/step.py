"""A decode step with SGLang's kernels, in the order and on the streams that its model and backend launch them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.sglang.state import C4_RING, C128_RING, EPS, Compressor, Layer, State

# SGLang takes its side streams for graphs of up to so many rows on SM90.
STREAM_ROWS = 64


class Metadata:
    """Arrays that all layers of a step share, made as SGLang's backend makes it inside its graph.

    Attributes:
      positions, c4_lens: int32 `[T]`. swa_lens, c4_topk_lens, c128_lens: int32 `[T]`, the attention's lengths.
      page_table: int32 `[T, pages]`.
      swa_slots: int32 `[T, 128]`. c4_slots: int32 `[T, topk]`, written by each indexer. c128_slots: int32.
      swa_out, c4_out, c128_out: the slots of this step's rows and entries.
      schedule, topk_plan: of the index logits and of the top-k. plans: by ratio, the compressors'.
      flashmla: by ratio, FlashMLA's schedule, which its first call makes.
    """

    def __init__(self, state: State, sglang: dict[str, ModuleType], deep_gemm: ModuleType, flash_mla: ModuleType):
        requests, lens = state.requests, state.lens
        out_loc = state.slots.gather(1, lens[:, None])[:, 0]
        lens.add_(1)
        self.of_rows(state, sglang, deep_gemm, requests, lens, state.req_to_token.shape[1], out_loc)
        make = sglang["compress"].CompressorDecodePlan.generate
        table = requests, state.req_to_token, state.full_to_swa, lens, state.stack.spec.page_size
        self.plans = {4: make(4, *table, C4_RING), 128: make(128, *table, C128_RING)}
        self.swa_out = state.full_to_swa[out_loc].to(torch.int32)
        self.flashmla = {ratio: flash_mla.get_mla_metadata()[0] for ratio in (0, 4, 128)}

    def of_rows(
        self,
        state: State,
        sglang: dict[str, ModuleType],
        deep_gemm: ModuleType,
        requests: torch.Tensor,
        lens: torch.Tensor,
        max_len: int,
        out_loc: torch.Tensor,
    ) -> None:
        """Makes a row's arrays, from its request `[T]`, length `[T]` and the slot `[T]` that it writes."""
        spec = state.stack.spec
        pages = sglang["pages"].BuildPageTablePositions.execute(
            req_to_token=state.req_to_token,
            req_pool_indices_repeated=requests,
            seq_lens_casual=lens,
            max_seq_len=max_len,
            page_size=spec.page_size,
            swa_window=spec.window,
        )
        self.page_table, self.positions = pages.page_table, pages.positions_casual
        self.swa_lens = pages.swa_topk_lengths
        swa_slots = sglang["pages"].BuildCausalSwaPageIndices.execute(
            req_to_token=state.req_to_token,
            full_to_swa_mapping=state.full_to_swa,
            req_pool_indices_repeated=requests,
            seq_lens_casual=pages.seq_lens_casual,
            swa_window=spec.window,
            page_index_aligned_size=64,
        )
        compressed = sglang["lengths"].init_compression_metadata(
            pages.seq_lens_casual, self.positions, out_loc, self.page_table, spec.page_size, True
        )
        self.c4_out, _, self.c4_lens, c4_lens_1, self.c128_out, _, _, self.c128_lens, c128_slots = compressed
        self.c128_slots, self.swa_slots = _to_64(c128_slots), _to_64(swa_slots)
        self.c4_topk_lens = torch.clamp(c4_lens_1, max=spec.index_topk)
        shape = len(lens), spec.index_topk
        self.c4_slots = _to_64(torch.full(shape, -1, dtype=torch.int32, device=lens.device))
        self.schedule = sglang["store"].get_paged_mqa_logits_metadata(
            self.c4_lens[:, None], 64, deep_gemm.get_num_sms()
        )
        self.topk_plan = sglang["topk"].plan_topk_v2(self.c4_lens)


def _to_64(slots: torch.Tensor) -> torch.Tensor:
    """Padded by −1 to a multiple of 64 columns; a copy where there is nothing to pad, as SGLang's is."""
    return F.pad(slots, (0, -slots.shape[1] % 64), value=-1)


@dataclasses.dataclass
class Seen:
    """A layer's input kv bfloat16 `[T, 512]`, its output bfloat16 `[T, heads, 512]`, and the slots that its indexer
    selected, if it has one, int32 `[T, topk]`."""

    kv: torch.Tensor
    out: torch.Tensor
    slots: torch.Tensor | None = None


class Step:
    """`step()` runs one step on `state` and returns the last layer's output, bfloat16 `[B, heads, 512]`.

    With `streams`, as in SGLang's graphs of up to `STREAM_ROWS` rows, the window's key, the compressor, the indexer's
    compressor and its query run on side streams.
    """

    def __init__(self, state: State, streams: bool):
        self.state = state
        self.sglang, self.deep_gemm, self.flash_mla = peers.sglang(), peers.find("deep_gemm"), peers.find("flash_mla")
        self.deep_gemm.set_pdl(True)  # as SGLang's server does: its kernels begin while the one before ends
        self.side = [torch.cuda.Stream() for _ in range(5)] if streams else None

    def __call__(self, seen: dict[int, Seen] | None = None) -> torch.Tensor:
        """With `seen`, the layers whose numbers it has are recorded in it."""
        return self._layers(Metadata(self.state, self.sglang, self.deep_gemm, self.flash_mla), seen)

    def _layers(self, metadata: Metadata, seen: dict[int, Seen] | None) -> torch.Tensor:
        state, kv, out = self.state, self.state.kv, None
        for number, layer in enumerate(state.layers):
            if out is not None:
                kv = state.kv + out[:, 0]
            out = self._layer(layer, kv, metadata)
            if seen is not None and number in seen:
                seen[number] = Seen(kv, out, None if layer.index_k is None else metadata.c4_slots.clone())
        return out

    def capture(self) -> Graph:
        """The step as a CUDA graph; the requests' lengths move on with every warm-up."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX is here too
            out = self()
        return Graph(graph, out)

    def _layer(self, layer: Layer, kv: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        kv_stream, compressor_stream, indexer_stream, *index_streams = self.side or (None,) * 5
        if kv_stream is None:
            self._write_kv(layer, kv, metadata)
        with _fork(indexer_stream):
            if layer.index_k is not None:
                self._index(layer, metadata, *index_streams)
        if kv_stream is not None:
            with _fork(kv_stream):
                self._write_kv(layer, kv, metadata)
        with _fork(compressor_stream):
            if layer.compressor is not None:
                self._compress(layer.ratio, layer.compressor, layer.compressed, metadata)
        for stream in (kv_stream, compressor_stream, indexer_stream):
            _join(stream)
        return self._attend(layer, self.state.q, metadata)

    def _write_kv(self, layer: Layer, kv: torch.Tensor, metadata: Metadata) -> None:
        self.sglang["rope"].fused_k_norm_rope_flashmla(
            kv=kv,
            kv_weight=self.state.kv_weight,
            eps=EPS,
            freqs_cis=self.state.freqs,
            positions=metadata.positions,
            out_loc=metadata.swa_out,
            kvcache=layer.swa,
            page_size=self.state.stack.spec.page_size,
        )

    def _compress(self, ratio: int, compressor: Compressor, cache: torch.Tensor, metadata: Metadata) -> None:
        compress, plan = self.sglang["compress"], metadata.plans[ratio]
        entries = compress.compress_forward(
            kv_score_buffer=compressor.state,
            kv_score_input=compressor.rows,
            ape=compressor.ape,
            plan=plan,
            head_dim=len(compressor.norm_weight),
            compress_ratio=ratio,
        )
        compress.compress_norm_rope_store(
            entries,
            plan,
            norm_weight=compressor.norm_weight,
            norm_eps=EPS,
            freq_cis=self.state.freqs,
            out_loc=metadata.c4_out if ratio == 4 else metadata.c128_out,
            kvcache=cache,
            page_size=self.state.stack.spec.page_size // ratio,
        )

    def _index(
        self,
        layer: Layer,
        metadata: Metadata,
        q_stream: torch.cuda.Stream | None,
        weights_stream: torch.cuda.Stream | None,
    ) -> None:
        """Selects the entries that the attention reads.

        The weights are an input of the step: their stream, which SGLang's query waits for, has nothing to do.
        """
        if q_stream is None:
            q, weights = self._index_query(metadata)
            self._compress(layer.ratio, layer.index_compressor, layer.index_k, metadata)
        else:
            stream = torch.cuda.current_stream()
            q_stream.wait_stream(stream)
            weights_stream.wait_stream(stream)
            self._compress(layer.ratio, layer.index_compressor, layer.index_k, metadata)
            q_stream.wait_stream(weights_stream)
            with torch.cuda.stream(q_stream):
                q, weights = self._index_query(metadata)
            stream.wait_stream(q_stream)
        self._select(layer, q, weights, metadata)

    def _select(self, layer: Layer, q: torch.Tensor, weights: torch.Tensor, metadata: Metadata) -> None:
        logits = self.deep_gemm.fp8_paged_mqa_logits(
            q.unsqueeze(1),
            layer.index_k.view(len(layer.index_k), 64, 1, -1),
            weights.squeeze(2),
            metadata.c4_lens[:, None],
            metadata.page_table,
            metadata.schedule,
            metadata.page_table.shape[1] * 64,
            False,
        )
        self.sglang["topk"].topk_transform_paged_v2(
            logits, metadata.c4_lens, metadata.page_table, metadata.c4_slots, 64, metadata.topk_plan
        )

    def _index_query(self, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.state
        return self.sglang["rope"].fused_q_indexer_rope_hadamard_quant(
            state.index_q, state.index_weights, state.index_scale, state.freqs, metadata.positions
        )

    def _attend(self, layer: Layer, q: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        spec, extra = self.state.stack.spec, {}
        if layer.ratio:
            slots, lens = metadata.c128_slots, metadata.c128_lens
            if layer.ratio == 4:
                slots, lens = metadata.c4_slots, metadata.c4_topk_lens
            extra = {
                "extra_k_cache": _rows(layer.compressed, spec.page_size // layer.ratio),
                "extra_indices_in_kvcache": slots[:, None],
                "extra_topk_length": lens,
            }
        out, _ = self.flash_mla.flash_mla_with_kvcache(
            q=q[:, None],
            k_cache=_rows(layer.swa, spec.page_size),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=spec.v_dim,
            tile_scheduler_metadata=metadata.flashmla[layer.ratio],
            softmax_scale=spec.softmax_scale,
            is_fp8_kvcache=True,
            indices=metadata.swa_slots[:, None],
            topk_length=metadata.swa_lens,
            attn_sink=layer.sink,
            use_legacy=True,
            **extra,
        )
        return out[:, 0]


@dataclasses.dataclass
class Graph:
    """A captured step; `out` is what each replay writes."""

    graph: torch.cuda.CUDAGraph
    out: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


def _rows(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """uint8 `[pages, page_size, 1, 584]`: FlashMLA's view of pages; it finds the scales by itself."""
    return pages[:, : page_size * 584].view(len(pages), page_size, 1, 584)


@contextlib.contextmanager
def _fork(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Inside, launches go to the stream and come after what the current one has; None: to the current one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _join(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)

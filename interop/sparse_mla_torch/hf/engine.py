"""A small serving engine around a transformers model: continuous batching, chunked prefill, then decode.

The model's token-wise parts run in torch over the real tokens of a step. Its attention runs in jax_sparse_mla, over the
step padded to a bucket, so that each bucket compiles once.

The same requests get the same tokens in every run (docs/routing.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_sparse_mla import (
    ForwardBatch,
    ForwardMode,
    ModelSpec,
    RequestTables,
    build_v32_metadata,
)
from jax_sparse_mla.layers import gathers, prepare_v4_step
from jax_sparse_mla.models import v4_layer_ratios
from sparse_mla_torch.bridge import jax_device
from sparse_mla_torch.hf.layers import Step, V4Layer, V32Layer
from sparse_mla_torch.hf.page_pool import RequestPool
from sparse_mla_torch.hf.replace import AttentionReplacement

GATHERED, PAGED = PREFILL_BACKENDS = ("flashmla_sparse", "flashmla_kv")


@dataclasses.dataclass
class Request:
    """A prompt and the tokens generated for it."""

    prompt: list[int]
    max_new_tokens: int
    output: list[int] = dataclasses.field(default_factory=list)
    # For each output token, the distance of its logit from the second best, as a share of its own size; NaN for a token
    # that was imported.
    margins: list[float] = dataclasses.field(default_factory=list)
    row: int | None = None  # in the request tables, while it is being served
    computed: int = 0  # tokens whose K rows are cached

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def in_prefill(self) -> bool:
        return self.computed < len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.max_new_tokens

    def choose(self, logits: torch.Tensor) -> None:
        """Appends the most likely token."""
        best, second = logits.float().topk(2).values.tolist()
        self.output.append(int(logits.float().argmax()))
        self.margins.append((best - second) / max(abs(best), torch.finfo(torch.float32).tiny))


# The requests of a step, with the positions that it computes of each.
Served = list[tuple[Request, range]]


@dataclasses.dataclass
class TracedStep:
    """A step that ran, for the comparison with eager: each layer's input rows and selected positions."""

    step: Step
    hidden: list[torch.Tensor]
    positions: list[np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options of the engine.

    Attributes:
      bf16_cache: whether the caches are bfloat16 instead of FP8.
      prefill_backend: "flashmla_sparse" gathers a workspace, "flashmla_kv" attends to the paged cache; None takes
        what the plan says.
      chunk_size: query rows of a prefill step.
      max_batch: requests served at once.
      max_len: tokens of the longest request, its output included.
      seed: of the page order.
      trace: whether to keep what the comparison with eager needs of the latest run.
      speculative_steps: the most draft tokens of a step for which the caches have room (see `SpeculativeDecoder`).
      backend: the attention backend's name; None takes the router's choice for each call.
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


class Engine:
    """Serves requests on a transformers DeepSeek-V3.2 or V4 model, on the device where its parameters are.

    Attributes:
      prefill_backend: what its prefill steps attend to, one of PREFILL_BACKENDS.
      routes: `{(mode, compress ratio, bucket): (phase, backend)}`, the attention that each kind of layer called, read
        from the programs that ran.

    Raises:
      ValueError: another model type, an unknown prefill backend, or a device that JAX does not have here.
    """

    def __init__(self, model: torch.nn.Module, options: EngineOptions):
        if options.prefill_backend not in (None, *PREFILL_BACKENDS):
            raise ValueError(
                f"prefill_backend must be one of {', '.join(PREFILL_BACKENDS)}, got {options.prefill_backend!r}"
            )
        self.model, self.options = model, options
        self.device = next(model.parameters()).device
        self._jax_device = jax_device(self.device)
        self.spec = ModelSpec.from_hf_config(model.config)
        self.is_v4 = self.spec.window is not None
        chosen = GATHERED if gathers(self.spec, options.chunk_size) else PAGED
        self.prefill_backend = options.prefill_backend or chosen
        layer_type = V4Layer if self.is_v4 else V32Layer
        modules = [layer.self_attn for layer in model.model.layers]
        ratios = v4_layer_ratios(model.config) if self.is_v4 else (0,) * len(modules)
        self.layers = [layer_type(module, self.spec, ratio) for module, ratio in zip(modules, ratios)]
        self.pool = RequestPool(
            max_requests=options.max_batch,
            max_len=options.max_len + options.speculative_steps,  # a request's last drafts may pass its end
            page_size=self.spec.page_size,
            window=self.spec.window,
            seed=options.seed,
        )
        self.caches = [self.new_cache(index) for index in range(len(self.layers))]
        self.routes: dict[tuple[ForwardMode, int, int], frozenset[tuple[str, str]]] = {}
        self.trace: list[TracedStep] = []
        self._step: Step | None = None

    def new_cache(self, layer: int) -> Any:
        """Empty caches for one layer."""
        cache = self.layers[layer].new_cache(
            pool=self.pool,
            max_requests=self.options.max_batch,
            max_draft_tokens=self.options.speculative_steps + 1 if self.options.speculative_steps else 0,
            bf16=self.options.bf16_cache,
        )
        # Committed to the device, as a step's results are; otherwise the second step would compile again.
        return jax.device_put(cache, self._jax_device)

    @torch.no_grad()
    def run(
        self,
        requests: list[Request],
        on_step: Callable[[Step, list[Request]], None] = lambda *_: None,
        advance: Callable[[list[Request]], Step] | None = None,
    ) -> None:
        """Serves all requests to their end. Prefill goes first; requests join as others leave.

        Args:
          requests: new requests, or imported ones (`sparse_mla_torch.handover`); their outputs are filled in.
          on_step: called after each step with the step and all requests.
          advance: runs the next step of the requests being served, and returns it; `advance` by default.

        Raises:
          ValueError: a request that is empty, not new, longer than `max_len`, or has tokens the model does not know.
            No request has been served then.
        """
        for i, request in enumerate(requests):
            self._check(i, request)
        advance = advance or self.advance
        # Imported requests have their rows already.
        running, waiting = [r for r in requests if r.row is not None], [r for r in requests if r.row is None]
        self.trace = []
        try:
            with AttentionReplacement(self.model, self._attend):
                while waiting or running:
                    while waiting and len(running) < self.options.max_batch:
                        waiting[0].row = self.pool.open()
                        running.append(waiting.pop(0))
                    on_step(advance(running), requests)
                    for request in [r for r in running if r.finished]:
                        running.remove(request)
                        self._close(request)
        finally:
            for request in running:  # none, unless a step raised
                self._close(request)

    def _check(self, i: int, request: Request) -> None:
        vocab, max_len = self.model.config.vocab_size, self.options.max_len
        if request.row is None and (request.output or request.computed):
            raise ValueError(f"request {i} has been served before")
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(
                f"request {i} must have at least one token and ask for one, got {len(request.prompt)} and "
                f"{request.max_new_tokens}"
            )
        if len(request.prompt) + request.max_new_tokens > max_len:
            raise ValueError(
                f"request {i} has {len(request.prompt)} tokens and asks for {request.max_new_tokens}: more than "
                f"max_len {max_len}"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
            raise ValueError(f"request {i} has tokens out of the model's vocabulary of {vocab}")

    def _close(self, request: Request) -> None:
        self.pool.close(request.row)
        request.row = None

    def advance(self, running: list[Request]) -> Step:
        """Runs the next step: a prefill chunk while any prompt is unread, else one decode token of each request."""
        options = self.options
        prefill = [r for r in running if r.in_prefill]
        served, budget = [], options.chunk_size if prefill else options.max_batch
        for request in prefill or running:
            count = min(len(request.tokens) - request.computed, budget)
            if count:
                served.append((request, range(request.computed, request.computed + count)))
                budget -= count
        step = self.new_step(self.new_batch(ForwardMode.EXTEND if prefill else ForwardMode.DECODE, served), served)
        tokens, last_rows = [], []
        for request, positions in served:
            tokens += request.tokens[positions.start : positions.stop]
            last_rows.append(len(tokens) - 1)
        for (request, positions), logits in zip(served, self.forward(step, tokens, last_rows)):
            request.computed = positions.stop
            if not request.in_prefill:
                request.choose(logits)
        return step

    def new_batch(self, mode: ForwardMode, served: Served) -> ForwardBatch:
        """Maps the positions to slots; returns their batch. In TARGET_VERIFY each request has the same number."""
        options = self.options
        drafts = len(served[0][1]) if mode is ForwardMode.TARGET_VERIFY else None
        num_rows = options.chunk_size if mode is ForwardMode.EXTEND else options.max_batch * (drafts or 1)
        req_rows, seq_lens, extend_lens = (np.zeros(options.max_batch, np.int32) for _ in range(3))
        out_cache_loc = np.zeros(num_rows, np.int32)
        start = 0
        for i, (request, positions) in enumerate(served):
            slots = self.pool.extend(request.row, positions.start, positions.stop)
            out_cache_loc[start : start + len(slots)] = slots
            start += len(slots)
            req_rows[i], extend_lens[i] = request.row, len(slots)
            seq_lens[i] = positions.start if drafts else positions.stop
        return ForwardBatch(
            mode=mode,
            max_seq_len=self._bucket(max(positions.stop for _, positions in served)),
            req_pool_indices=jnp.asarray(req_rows),
            seq_lens=jnp.asarray(seq_lens),
            out_cache_loc=jnp.asarray(out_cache_loc),
            extend_lens=jnp.asarray(extend_lens) if mode is ForwardMode.EXTEND else None,
            num_draft_tokens=drafts,
        )

    def new_step(self, batch: ForwardBatch, served: Served) -> Step:
        """The step of a batch whose positions are mapped; `served` is in the order of the batch."""
        # Copies, because the pool's tables change before the next step and JAX may alias a numpy buffer.
        tables = RequestTables(
            req_to_token=jnp.array(self.pool.req_to_token),
            full_to_swa=jnp.array(self.pool.full_to_swa) if self.is_v4 else None,
        )
        options = self.options
        metadata, plans = _build_step(
            batch, tables, spec=self.spec, bf16_cache=options.bf16_cache, prefill_backend=self.prefill_backend
        )
        positions = np.concatenate([np.arange(p.start, p.stop) for _, p in served])
        return Step(
            batch=batch,
            tables=tables,
            metadata=metadata,
            plans=plans,
            requests=np.concatenate([np.full(len(p), id(request)) for request, p in served]),
            positions=positions,
            backend=options.backend,
            routes=self.routes,
        )

    def _bucket(self, max_len: int) -> int:
        """The table width for `max_len` tokens: a power of two, so that few widths compile."""
        bucket = 4096
        while bucket < max_len:
            bucket *= 2
        return min(bucket, self.pool.req_to_token.shape[1])

    def forward(self, step: Step, tokens: list[int], keep: list[int]) -> torch.Tensor:
        """Runs the model over a step's tokens and caches K rows; returns the logits after the tokens `keep`."""
        self._step = step
        if self.options.trace:
            self.trace.append(TracedStep(step, [], []))
        return self.model(
            input_ids=torch.tensor(tokens, device=self.device)[None],
            position_ids=torch.from_numpy(step.positions).to(self.device)[None],
            attention_mask={"indexed_attention": None},  # ours needs none: transformers is told not to build one
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self.device),
        ).logits[0]

    def _attend(self, index: int, hidden: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        layer = self.layers[index]
        out, self.caches[index], positions = layer(self.caches[index], hidden, position_embeddings, self._step)
        if self.options.trace:
            traced = self.trace[-1]
            traced.hidden.append(hidden[0].clone())
            traced.positions.append(None if positions is None else np.asarray(positions)[: self._step.num_tokens])
        return out


@functools.partial(jax.jit, static_argnames=("spec", "bf16_cache", "prefill_backend"))
def _build_step(batch: ForwardBatch, tables: RequestTables, *, spec: ModelSpec, bf16_cache: bool, prefill_backend: str):
    """Metadata, and prefill plans by ratio: once a step, shared by the layers."""
    if spec.window is None:
        options = {"fp8_kv_cache": not bf16_cache, "prefill_backend": prefill_backend}
        return build_v32_metadata(spec, batch, tables, **options), {}
    gathered = batch.mode is ForwardMode.EXTEND and prefill_backend == GATHERED
    step = prepare_v4_step(spec, batch, tables, gathered=gathered)
    return step.metadata, step.plans

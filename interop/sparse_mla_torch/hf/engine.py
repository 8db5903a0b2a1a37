"""A small serving engine around a transformers model: continuous batching, chunked prefill, then decode.

The model's token-wise parts run in torch over the real tokens of a step. Its attention runs in jax_sparse_mla, over the
step padded to a bucket, so that each bucket compiles once.

On a GPU the caches are torch's, and a decode step runs in torch alone, from a CUDA graph where the modules allow it
(`graph`); `why_not_torch` says where not. Prefill then gives JAX the caches to read, and copies what it made of them
back.

The same requests get the same tokens in every run (docs/routing.md).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
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
from jax_sparse_mla.packages import why_not
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import (
    GATHERED,
    PAGED,
    PREFILL_BACKENDS,
    EngineOptions,
    Scheduler,
    StepPlan,
    check_all,
)
from sparse_mla_torch.bridge import jax_device, to_jax
from sparse_mla_torch.cpu_matmul import quick_products
from sparse_mla_torch.hf.graph import Capture, StepGraph
from sparse_mla_torch.hf.layers import Step, TorchStep, V4Layer, V32Layer
from sparse_mla_torch.hf.replace import AttentionReplacement

__all__ = ["GATHERED", "PAGED", "PREFILL_BACKENDS", "Engine", "EngineOptions", "Request", "TracedStep"]

log = logging.getLogger(__name__)


def choose(logits: torch.Tensor) -> list[tuple[int, float]]:
    """Of each of the rows `[n, vocab]` the most likely token, and the distance of its logit from the second best, as a
    share of its own size."""
    logits = logits.float()
    tokens, pairs = logits.argmax(-1).tolist(), logits.topk(2).values.tolist()
    tiny = torch.finfo(torch.float32).tiny
    return [(token, (best - second) / max(abs(best), tiny)) for token, (best, second) in zip(tokens, pairs)]


def why_not_torch(device: torch.device, options: EngineOptions, capture: Capture | None = None) -> str | None:
    """Why decode steps go through JAX, over caches of its own; None if they run in torch. A capture that is given needs
    no GPU."""
    if capture is None and device.type != "cuda":
        return "CUDA graphs need a GPU"
    if options.trace:
        return "a run that is to be checked keeps each layer's rows (--no-check: none)"
    if options.speculative_steps:
        return "drafts are verified in JAX, over the same caches"
    if options.backend is not None:
        return f"JAX is asked for the backend {options.backend}"
    return None if capture else why_not("triton")


@dataclasses.dataclass
class TracedStep:
    """A step that ran, for comparisons; as `serving.engine.TracedStep`.

    Attributes:
      step: the step.
      layers: of each layer its input rows `[n, hidden]`, and the selected positions or None.
      samples: of its requests, whether the last row chooses a token.
      logits: float32, from which tokens were chosen.
    """

    step: Step
    layers: list[tuple[torch.Tensor, np.ndarray | None]] = dataclasses.field(default_factory=list)
    samples: np.ndarray | None = None
    logits: torch.Tensor | None = None

    @property
    def batch(self) -> ForwardBatch:
        return self.step.batch

    @property
    def tables(self) -> RequestTables:
        return self.step.tables

    @property
    def requests(self) -> np.ndarray:
        return self.step.requests

    @property
    def positions(self) -> np.ndarray:
        return self.step.positions

    def hidden(self, layer: int) -> torch.Tensor:
        return self.layers[layer][0]

    def selected(self, layer: int) -> np.ndarray | None:
        return self.layers[layer][1]

    def chosen(self) -> list[tuple[int, np.ndarray]]:
        requests = dict.fromkeys(self.step.requests.tolist())
        rows = zip(requests, self.logits.cpu().numpy(), self.samples)
        return [(request, logits) for request, logits, samples in rows if samples]


class Engine:
    """Serves requests on a transformers DeepSeek-V3.2, V4 or GLM-5 model, on the device where its parameters are.

    It takes the most likely token only, and reuses no prefixes.

    Args:
      model: in evaluation mode.
      options: the engine's.
      capture: captures decode steps, as `graph.cuda_capture` does, which a GPU takes by default. Where it is given,
        decode steps run in torch on any device, if the options allow it.

    Attributes:
      scheduler: the requests, their pages, and counters of what happened.
      prefill_backend: what its prefill steps attend to, one of PREFILL_BACKENDS.
      routes: `{(mode, compress ratio, bucket): (phase, backend)}`, the attention that each kind of layer called, read
        from the programs that ran.
      drafter: what makes drafts, in words.
      graph: runs decode steps in torch; None where they go through JAX.

    Raises:
      ValueError: another model type, options that it does not have, or a device that JAX does not have here.
    """

    drafter = "first layer"

    def __init__(self, model: torch.nn.Module, options: EngineOptions, *, capture: Capture | None = None):
        if options.reuse_points:
            raise ValueError("the torch engine reuses no prefixes: reuse_points must be 0")
        self.model, self.options = model, options
        self.device = next(model.parameters()).device
        self._jax_device = jax_device(self.device)
        self.spec = ModelSpec.from_hf_config(model.config)
        if self.spec.index_pool > 1:
            raise ValueError(f"the torch engine does not serve {self.spec.name}: the JAX engine does (--engine jax)")
        self.is_v4 = self.spec.window is not None
        chosen = GATHERED if gathers(self.spec, options.chunk_size) else PAGED
        self.prefill_backend = options.prefill_backend or chosen
        layer_type = V4Layer if self.is_v4 else V32Layer
        modules = [layer.self_attn for layer in model.model.layers]
        ratios = v4_layer_ratios(model.config) if self.is_v4 else (0,) * len(modules)
        self.layers = [layer_type(module, self.spec, ratio) for module, ratio in zip(modules, ratios)]
        self.scheduler = Scheduler(self.spec, options, model.config.vocab_size)
        self.graph: StepGraph | None = None
        self._capture, self._through_jax = capture, why_not_torch(self.device, options, capture)
        if self._through_jax is None:
            self._take_torch()
        else:
            self.caches = [self.new_cache(index) for index in range(len(self.layers))]
        self.routes: dict[tuple[ForwardMode, int, int], frozenset[tuple[str, str]]] = {}
        self.trace: list[TracedStep] = []
        self._step: Step | TorchStep | None = None
        self._selected: jax.Array | torch.Tensor | None = None  # what the latest layer of the step has selected

    @property
    def pool(self):
        """The request tables."""
        return self.scheduler.pool

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compress ratio of each layer."""
        return tuple(layer.ratio for layer in self.layers)

    def layer_cache(self, layer: int) -> Any:
        """The caches of one layer."""
        return self.caches[layer]

    def set_layer_cache(self, layer: int, cache: Any) -> None:
        """Puts what `layer_cache` gave back, updated."""
        self.caches[layer] = cache

    def with_options(self, **changes: Any) -> Engine:
        """An engine of the same model with other options."""
        return Engine(self.model, dataclasses.replace(self.options, **changes), capture=self._capture)

    @property
    def decode_steps(self) -> str:
        """How decode steps run, in words."""
        graph = self.graph
        if graph is None:
            return f"through JAX: {self._through_jax}"
        if graph.reason is not None:
            return f"eager: {graph.reason}"
        return f"one CUDA graph a step: {graph.replays} of {graph.steps} replayed, {len(graph.buckets)} captured"

    def new_cache(self, layer: int) -> Any:
        """Empty caches for one layer, of JAX's arrays."""
        # Committed to the device, as a step's results are; otherwise the second step would compile again.
        return jax.device_put(self._zeros(layer), self._jax_device)

    def _zeros(self, layer: int) -> Any:
        return self.layers[layer].new_cache(
            pool=self.pool,
            max_requests=self.options.max_batch,
            max_draft_tokens=self.options.speculative_steps + 1 if self.options.speculative_steps else 0,
            bf16=self.options.bf16_cache,
        )

    def _take_torch(self) -> None:
        """Makes what decode steps in torch need, whose addresses a graph keeps: caches, tables and the graph."""
        from sparse_mla_torch.layers import torch_cache  # needs triton

        shapes = [jax.eval_shape(functools.partial(self._zeros, index)) for index in range(len(self.layers))]
        self.caches = [torch_cache(of_layer, self.device) for of_layer in shapes]
        self._tables = RequestTables(
            req_to_token=torch.from_numpy(self.pool.req_to_token).to(self.device, copy=True),
            full_to_swa=torch.from_numpy(self.pool.full_to_swa).to(self.device, copy=True) if self.is_v4 else None,
        )
        self._tables_changed = False
        sizes = {"max_rows": self.options.max_batch, "device": self.device}
        engine = weakref.ref(self)  # else caches and graphs would outlive the engine until Python collects cycles
        self.graph = StepGraph(lambda *args: engine()._torch_step(*args), **sizes, capture=self._capture)

    def _leave_torch(self, reason: str) -> None:
        """Gives JAX copies of the caches, with which all goes on there."""
        log.warning("decode steps go through JAX: %s", reason)
        self.graph, self._tables, self._through_jax = None, None, reason
        arrays = jax.tree.map(lambda x: jnp.array(to_jax(x), copy=True), self.caches)
        self.caches = jax.device_put(arrays, self._jax_device)

    @torch.no_grad()
    def run(
        self,
        requests: list[Request],
        on_step: Callable[[Step, list[Request]], None] = lambda *_: None,
        advance: Callable[[], Step | None] | None = None,
    ) -> None:
        """Serves all requests to their end. Prefill goes first; requests join as others leave.

        Args:
          requests: new requests, or imported ones (`sparse_mla_torch.handover`); their outputs are filled in.
          on_step: called after each step with the step and all requests.
          advance: runs the scheduler's next step, and returns it (None: there is nothing to run); `advance` by default.

        Raises:
          ValueError: a request that the scheduler refuses, or that draws its tokens. None has been served then.
        """
        check_all(self.scheduler, requests)
        for i, request in enumerate(requests):
            if request.sampling.temperature:
                raise ValueError(f"request {i} has a temperature: the torch engine takes the most likely token only")
        advance = advance or self.advance
        self.trace = []
        try:
            for request in requests:
                self.scheduler.submit(request)
            with AttentionReplacement(self.model, self._attend):
                while not self.scheduler.idle:
                    if (step := advance()) is not None:
                        on_step(step, requests)
        except BaseException:
            self.scheduler.abort()
            raise

    def advance(self) -> Step | None:
        """Runs the scheduler's next step: a prefill chunk while any prompt is unread, else one decode token each. None
        where all requests have been cancelled."""
        plan = self.scheduler.plan()
        return None if plan is None else self.run_plan(plan)

    def run_plan(self, plan: StepPlan) -> Step:
        """Runs an EXTEND or DECODE step."""
        step, logits = self._decode(plan) or self._run_through_jax(plan)
        chosen = choose(logits)
        if self.options.trace:
            self.trace[-1].samples = plan.samples
        self.scheduler.complete(plan, [[token] for token, _ in chosen], [[margin] for _, margin in chosen])
        return step

    def _run_through_jax(self, plan: StepPlan) -> tuple[Step, torch.Tensor]:
        step = self.new_step(self.new_batch(plan), plan)
        last_rows = (np.cumsum(plan.counts) - 1).tolist()
        return step, self.forward(step, plan.tokens.tolist(), last_rows)

    def _decode(self, plan: StepPlan) -> tuple[Step, torch.Tensor] | None:
        """Runs a DECODE step in torch; None where it goes through JAX, and for another step."""
        if self.graph is None:
            return None
        self._tables_changed |= bool(len(plan.mapped))
        if plan.mode is not ForwardMode.DECODE:
            return None
        if self._tables_changed:
            self._tables.req_to_token.copy_(torch.from_numpy(self.pool.req_to_token))
            if self.is_v4:
                self._tables.full_to_swa.copy_(torch.from_numpy(self.pool.full_to_swa))
            self._tables_changed = False
        count = len(plan.requests)
        batch = plan.forward_batch(self.pool, num_rows=count, num_requests=count)
        inputs = np.stack([plan.tokens, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc])
        try:
            logits = self.graph(inputs, plan.max_seq_len)
        except (TypeError, ValueError) as error:  # what the kernels' checks refuse
            self._leave_torch(f"{type(error).__name__}: {error}")
            return None
        step = Step(
            batch=batch,
            tables=None,
            metadata=None,
            plans={},
            requests=np.array([id(request) for request in plan.requests]),
            positions=plan.positions().astype(np.int64),
            backend=None,
            routes=self.routes,
        )
        return step, logits

    def _torch_step(self, inputs: torch.Tensor, width: int) -> torch.Tensor:
        """Runs the model over one token of each row, and caches K rows; what a graph captures.

        Args:
          inputs: int32 `[4, rows]`: tokens, rows of the request tables, lengths with the token, slots. A row of zeros
            is padding.
          width: of the page tables, in tokens.

        Returns:
          logits `[rows, vocab]`.
        """
        tokens, requests, lengths, slots = inputs
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            max_seq_len=width,
            req_pool_indices=requests,
            seq_lens=lengths,
            out_cache_loc=slots,
        )
        self._step = TorchStep.new(self.spec, batch, self._tables, self.routes)
        return self.model(
            input_ids=tokens.long()[None],
            position_ids=(lengths - 1).clamp(min=0).long()[None],
            attention_mask={"indexed_attention": None},
            use_cache=False,
        ).logits[0]

    def new_batch(self, plan: StepPlan) -> ForwardBatch:
        """The padded batch of a plan."""
        options, each = self.options, int(plan.counts[0])
        rows = options.chunk_size if plan.mode is ForwardMode.EXTEND else options.max_batch * each
        batch = plan.forward_batch(self.pool, num_rows=rows, num_requests=options.max_batch)
        return jax.tree.map(jnp.asarray, batch)

    def new_step(self, batch: ForwardBatch, plan: StepPlan, positions: np.ndarray | None = None) -> Step:
        """The step of a batch whose requests are those of the plan, in order; `positions` if not the plan's."""
        # Copies, because the pool's tables change before the next step and JAX may alias a numpy buffer.
        tables = RequestTables(
            req_to_token=jnp.array(self.pool.req_to_token),
            full_to_swa=jnp.array(self.pool.full_to_swa) if self.is_v4 else None,
        )
        options = self.options
        metadata, plans = _build_step(
            batch, tables, spec=self.spec, bf16_cache=options.bf16_cache, prefill_backend=self.prefill_backend
        )
        positions = plan.positions() if positions is None else positions
        each = len(positions) // len(plan.requests) if batch.mode is ForwardMode.DECODE else plan.counts
        return Step(
            batch=batch,
            tables=tables,
            metadata=metadata,
            plans=plans,
            requests=np.repeat([id(request) for request in plan.requests], each),
            positions=positions.astype(np.int64),
            backend=options.backend,
            routes=self.routes,
        )

    @quick_products()
    def forward(self, step: Step, tokens: list[int], keep: list[int]) -> torch.Tensor:
        """Runs the model over a step's tokens and caches K rows; returns the logits after the tokens `keep`."""
        self._step = step
        if self.options.trace:
            self.trace.append(TracedStep(step))
        logits = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[None],
            position_ids=torch.from_numpy(step.positions).to(self.device)[None],
            attention_mask={"indexed_attention": None},  # ours needs none: transformers is told not to build one
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self.device),
        ).logits[0]
        if self.options.trace:
            self.trace[-1].logits = logits.float()
        return logits

    def _attend(self, index: int, hidden: torch.Tensor, position_embeddings: Any) -> torch.Tensor:
        layer = self.layers[index]
        if isinstance(self._step, TorchStep):
            arguments = self.caches[index], hidden, position_embeddings, self._step
            out, self._selected = layer.decode(*arguments, self._selected if layer.shares else None)
            return out
        options = {"selected": self._selected} if layer.shares else {}
        arguments = self.caches[index], hidden, position_embeddings, self._step
        out, self.caches[index], positions = layer(*arguments, **options)
        self._selected = positions
        if self.options.trace:
            positions = None if positions is None else np.asarray(positions)[: self._step.num_tokens]
            self.trace[-1].layers.append((hidden[0].clone(), positions))
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

"""Attention layers of transformers' DeepSeek models, run through jax_sparse_mla's paged caches.

A layer keeps the module's own projections, in torch. One jitted JAX function for each kind of layer and step shape
replaces what is between them: cache writes, compression, indexing, selection and attention. `decode` does the same by
torch's face of the library, over caches that torch owns: a CUDA graph can capture it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from jax_sparse_mla import ForwardBatch, ForwardMode, ModelSpec, RequestTables
from jax_sparse_mla.attention.api import calls_of
from jax_sparse_mla.attention.route import Plan
from jax_sparse_mla.layers import (
    CompressorParams,
    IndexRows,
    V4LayerCache,
    V4LayerParams,
    V4Rows,
    V32LayerCache,
    V32Rows,
    v4_layer,
    v32_layer,
)
from jax_sparse_mla.models import INDEXED_RATIO
from jax_sparse_mla.serving.scheduler import PAGED
from sparse_mla_torch.bridge import to_jax, to_torch
from sparse_mla_torch.hf.replace import selected_indices

# One compilation for each kind of layer, step shape and bucket; all layers share it. The layer's cache is donated, but
# for torch's: JAX may not write to that.
_V4, _V32 = ("spec", "ratio", "backend"), ("spec", "backend")
_run_v4 = jax.jit(v4_layer, static_argnames=_V4, donate_argnums=0)
_run_v32 = jax.jit(v32_layer, static_argnames=_V32, donate_argnums=0)
_KEEPING = {_run_v4: jax.jit(v4_layer, static_argnames=_V4), _run_v32: jax.jit(v32_layer, static_argnames=_V32)}


@dataclasses.dataclass
class Step:
    """What all layers of a forward step share.

    Attributes:
      batch, tables: as given to the metadata builders; of a step that ran on torch's tables a batch of numpy arrays,
        and None.
      metadata: V4Metadata or V32Metadata. plans: by compress ratio, of a V4 step that gathers a workspace.
      requests, positions: numpy `[n]`, each row's request and position; the rows behind these n are padding.
      backend: the attention backend's name, or None for the router's choice.
      routes: the engine's `{(mode, ratio, bucket): (phase, backend)}`, which the layers fill in.
    """

    batch: ForwardBatch
    tables: RequestTables
    metadata: Any
    plans: dict[int, Any]
    requests: np.ndarray
    positions: np.ndarray
    backend: str | None
    routes: dict[tuple[ForwardMode, int, int], frozenset[tuple[str, str]]]

    @property
    def mode(self) -> ForwardMode:
        return self.batch.mode

    @property
    def max_seq_len(self) -> int:
        return self.batch.max_seq_len

    @property
    def num_rows(self) -> int:
        """Padded rows."""
        return self.metadata.row_to_request.shape[0]

    @property
    def num_tokens(self) -> int:
        """Real rows, n."""
        return len(self.positions)


@dataclasses.dataclass
class TorchStep:
    """What all layers of a decode step on torch's tensors share.

    Attributes:
      batch, metadata: of torch tensors, as `sparse_mla_torch.layers` takes them.
      routes: as those of `Step`.
    """

    batch: ForwardBatch
    metadata: Any
    routes: dict[tuple[ForwardMode, int, int], frozenset[tuple[str, str]]]

    @classmethod
    def new(cls, spec: ModelSpec, batch: ForwardBatch, tables: RequestTables, routes: dict) -> TorchStep:
        """The step of a batch and tables of torch tensors; its metadata are made here."""
        # Both need triton.
        from sparse_mla_torch.layers import prepare_v4_step
        from sparse_mla_torch.operations.metadata_v32 import build_v32_metadata

        if spec.window is not None:
            return cls(batch, prepare_v4_step(spec, batch, tables).metadata, routes)
        paged = {"fp8_kv_cache": True, "prefill_backend": PAGED}  # which a decode step is, whatever the cache
        return cls(batch, build_v32_metadata(spec, batch, tables, **paged), routes)

    def take_route(self, ratio: int, plan: Plan) -> None:
        """Writes down what attends in a layer of this ratio; its `on_plan`."""
        self.routes[self.batch.mode, ratio, self.batch.max_seq_len] = frozenset({("decode", plan.backend)})


class V4Layer:
    """A `DeepseekV4Attention` module with paged caches."""

    shares = False

    def __init__(self, module: v4.DeepseekV4Attention, spec: ModelSpec, ratio: int):
        self.module, self.spec, self.ratio = module, spec, ratio
        self.has_indexer = ratio == INDEXED_RATIO
        compressor = module.compressor
        self._tensors = V4LayerParams(
            attn_sink=_param(module.sinks),
            compressor=_compressor_params(compressor) if ratio else None,
            index_compressor=_compressor_params(compressor.indexer) if self.has_indexer else None,
        )
        self.params = jax.tree.map(to_jax, self._tensors)

    def new_cache(self, *, pool, max_requests: int, max_draft_tokens: int, bf16: bool) -> V4LayerCache:
        return V4LayerCache.zeros(
            self.spec,
            self.ratio,
            num_pages=pool.num_pages,
            num_swa_pages=pool.num_swa_pages,
            max_requests=max_requests,
            max_draft_tokens=max_draft_tokens,
            bf16=bf16,
        )

    def __call__(self, cache, hidden, position_embeddings, step: Step, index_scores=None):
        """hidden bfloat16 `[1, n, hidden]` → (output `[1, n, hidden]`, cache, selected positions or None)."""
        out, cache, positions = _run(
            _run_v4,
            step,
            self,
            cache,
            jax.tree.map(lambda x: _pad(x, step), self._rows(hidden, position_embeddings)),
            self.params,
            step.batch,
            step.metadata,
            step.plans.get(self.ratio),
            spec=self.spec,
            ratio=self.ratio,
            index_scores=index_scores,
            backend=step.backend,
        )
        return self._output(_unpad(out, step), hidden, position_embeddings), cache, positions

    def decode(self, cache, hidden, position_embeddings, step: TorchStep, selected: None = None):
        """As `__call__` in a decode step of n rows, over torch's cache, in place: (output, None)."""
        from sparse_mla_torch import layers  # needs triton

        rows = jax.tree.map(torch.Tensor.contiguous, self._rows(hidden, position_embeddings))
        arguments = cache, rows, self._tensors, step.batch, step.metadata
        on_plan = functools.partial(step.take_route, self.ratio)
        out = layers.v4_layer(*arguments, spec=self.spec, ratio=self.ratio, on_plan=on_plan)
        return self._output(out, hidden, position_embeddings), None

    def _rows(self, hidden, position_embeddings) -> V4Rows:
        """The projections of n rows."""
        module = self.module
        cos, sin = position_embeddings[module.rope_layer_type]
        q_residual = module.q_a_norm(module.q_a_proj(hidden))
        heads = (*hidden.shape[:-1], -1, module.head_dim)
        q = v4.apply_rotary_pos_emb(module.q_b_norm(module.q_b_proj(q_residual).view(heads)), cos, sin, unsqueeze_dim=2)
        kv = v4.apply_rotary_pos_emb(module.kv_norm(module.kv_proj(hidden)).view(heads), cos, sin, unsqueeze_dim=2)
        rows = {"q": q, "kv": kv[:, :, 0]}
        if self.ratio:
            rows["compressed_kv"] = module.compressor.kv_proj(hidden)
            rows["compressed_score"] = module.compressor.gate_proj(hidden)
        rows = {name: x[0] for name, x in rows.items()}
        return V4Rows(**rows, index=self._index_rows(hidden, q_residual, cos, sin) if self.has_indexer else None)

    def _output(self, out, hidden, position_embeddings) -> torch.Tensor:
        """`[1, n, hidden]` of the attention's out `[n, heads, 512]`."""
        module = self.module
        cos, sin = position_embeddings[module.rope_layer_type]
        # V is K with its rope part, so the output is rotated back at the query's position.
        out = v4.apply_rotary_pos_emb(out[None], cos, -sin, unsqueeze_dim=2)
        grouped = module.o_a_proj(out.reshape(*hidden.shape[:-1], module.config.o_groups, -1)).flatten(2)
        return module.o_b_proj(grouped)

    def _index_rows(self, hidden, q_residual, cos, sin) -> IndexRows:
        indexer = self.module.compressor.indexer
        q = indexer.q_b_proj(q_residual).view(*hidden.shape[:-1], indexer.num_heads, indexer.head_dim)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden).float() * (scorer.softmax_scale * scorer.weights_scaling)
        return IndexRows(
            q=v4.apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)[0],
            weights=weights[0],
            kv=indexer.kv_proj(hidden)[0],
            score=indexer.gate_proj(hidden)[0],
        )

    def eager(self, hidden, model, shared: None = None) -> tuple[torch.Tensor, np.ndarray | None]:
        """transformers' own attention on one whole sequence, and the compressed positions that it selects."""
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        embeddings = {
            kind: model.model.rotary_emb(hidden, position_ids=position_ids, layer_type=kind)
            for kind in ("main", "compress")
        }
        age = position_ids.T - position_ids
        visible = (age >= 0) & (age < self.module.sliding_window)
        mask = hidden.new_zeros(visible.shape).masked_fill(~visible, float("-inf"))[None, None]
        with selected_indices() as selected:
            out, _ = type(self.module).forward(self.module, hidden, embeddings, position_ids, mask)
        return out, selected[0][0].cpu().numpy() if selected else None


class V32Layer:
    """A `DeepseekV32Attention` or `GlmMoeDsaAttention` module with paged caches; the heads' parts without rope are in
    the latent space.

    Attributes:
      shares: whether it has no indexer and takes what the last layer with one selected.
      has_indexer: whether it attends to what an indexer has selected.
    """

    ratio = 0
    has_indexer = True

    def __init__(self, module: v32.DeepseekV32Attention | glm.GlmMoeDsaAttention, spec: ModelSpec, ratio: int):
        self.module, self.spec = module, spec
        self.shares = module.indexer is None
        self._is_glm = isinstance(module, glm.GlmMoeDsaAttention)
        nope, v_dim = module.qk_nope_head_dim, module.v_head_dim
        kv_b = module.kv_b_proj.weight.detach().view(module.num_heads, nope + v_dim, module.kv_lora_rank)
        self._k_up, self._v_up = kv_b[:, :nope], kv_b[:, nope:]

    def new_cache(self, *, pool, max_requests: int, max_draft_tokens: int, bf16: bool) -> V32LayerCache:
        return V32LayerCache.zeros(self.spec, num_pages=pool.num_pages, bf16=bf16, indexed=(not self.shares,))

    def __call__(self, cache, hidden, position_embeddings, step: Step, index_scores=None, selected=None):
        """As `V4Layer.__call__`; `selected` as in `layers.v32_layer`."""
        out, cache, positions = _run(
            _run_v32,
            step,
            self,
            cache,
            jax.tree.map(lambda x: _pad(x, step), self._rows(hidden, position_embeddings)),
            step.batch,
            step.metadata,
            spec=self.spec,
            index_scores=index_scores,
            selected=selected,
            backend=step.backend,
        )
        return self._output(_unpad(out, step)), cache, positions

    def decode(self, cache, hidden, position_embeddings, step: TorchStep, selected: torch.Tensor | None = None):
        """As `V4Layer.decode`: (output, the slots that it attended to); `selected` are those of an earlier layer."""
        from sparse_mla_torch import layers  # needs triton

        rows = jax.tree.map(torch.Tensor.contiguous, self._rows(hidden, position_embeddings))
        options = {"slots": selected, "on_plan": functools.partial(step.take_route, self.ratio)}
        out, slots = layers.v32_layer(cache, rows, step.batch, step.metadata, spec=self.spec, **options)
        return self._output(out), slots

    def _rows(self, hidden, position_embeddings) -> V32Rows:
        """The projections of n rows."""
        module = self.module
        cos, sin = position_embeddings
        heads = (*hidden.shape[:-1], -1, module.qk_head_dim)
        q_residual = module.q_a_layernorm(module.q_a_proj(hidden))
        q = module.q_b_proj(q_residual).view(heads).transpose(1, 2)
        q_nope, q_rope = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        latent, k_rope = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = v32.apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], cos, sin)
        q_latent = torch.einsum("bhtd,hdl->bhtl", q_nope, self._k_up)
        rows = {
            "q": torch.cat([q_latent, q_rope], dim=-1).transpose(1, 2),
            "kv": torch.cat([module.kv_a_layernorm(latent), k_rope[:, 0]], dim=-1),
        }
        if not self.shares:
            rows |= self._index_rows(hidden, q_residual, cos, sin)
        return V32Rows(**{name: x[0] for name, x in rows.items()})

    def _output(self, out) -> torch.Tensor:
        """`[1, n, hidden]` of the attention's out `[n, heads, 512]`."""
        values = torch.einsum("thl,hvl->thv", out, self._v_up)
        return self.module.o_proj(values.flatten(1)[None])

    def _index_rows(self, hidden, q_residual, cos, sin) -> dict[str, torch.Tensor]:
        indexer = self.module.indexer
        rope, rest = indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim
        q = indexer.wq_b(q_residual).view(*hidden.shape[:-1], indexer.n_heads, indexer.head_dim)
        k = indexer.k_norm(indexer.wk(hidden))[:, :, None]
        q_rope, q_rest = q.split([rope, rest], dim=-1)
        k_rope, k_rest = k.split([rope, rest], dim=-1)
        rotate = v32.apply_rotary_pos_emb_interleave if self._is_glm else v32.apply_rotary_pos_emb
        q_rope, k_rope = rotate(q_rope, k_rope, cos, sin, unsqueeze_dim=2)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float()
        return {
            "index_q": torch.cat([q_rope, q_rest], dim=-1),
            "index_k": torch.cat([k_rope, k_rest], dim=-1)[:, :, 0],
            "index_weights": weights * (indexer.softmax_scale * indexer.n_heads**-0.5),
        }

    def eager(self, hidden, model, shared: np.ndarray | None = None) -> tuple[torch.Tensor, np.ndarray]:
        """As `V4Layer.eager`; positions past the query's own are −1. A layer that shares takes `shared`, what this
        method of the last layer with an indexer returned."""
        position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        visible = position_ids <= position_ids.T
        lowest = torch.finfo(hidden.dtype).min
        mask = hidden.new_zeros(visible.shape).masked_fill(~visible, lowest)[None, None]
        embeddings = model.model.rotary_emb(hidden, position_ids=position_ids)
        options = {}
        if self.shares:  # where there is a −1, all that is visible is selected, the query's own position too
            own = np.arange(len(shared))[:, None]
            options["prev_topk_indices"] = torch.from_numpy(np.where(shared < 0, own, shared))[None].to(hidden.device)
        with selected_indices() as selected:
            out, *_ = type(self.module).forward(self.module, hidden, embeddings, mask, **options)
        if self.shares:
            return out, shared
        chosen = selected[0][0].cpu().numpy()
        return out, np.where(chosen <= np.arange(len(chosen))[:, None], chosen, -1)


def _compressor_params(module) -> CompressorParams:
    if (scaling := module.rotary_emb.compress_attention_scaling) != 1:
        # The released V4 models rotate with attention_factor 1, and so does our compressor.
        raise ValueError(f"rope_parameters['compress'] must have attention_factor 1, got {scaling}")
    return CompressorParams(
        ape=_param(module.position_bias),
        norm_weight=_param(module.kv_norm.weight),
        inv_freq=_param(module.rotary_emb.compress_inv_freq),
        norm_eps=module.kv_norm.variance_epsilon,
    )


def _run(
    function: Callable[..., Any], step: Step, layer: V4Layer | V32Layer, cache: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls `function(cache, *args, **kwargs)`; for new shapes, writes the program's attention into the step's routes.

    A cache of torch's stays where it is: JAX makes a new one of it, which is copied back.
    """
    given, of_torch = cache, isinstance(jax.tree.leaves(cache)[0], torch.Tensor)
    if of_torch:
        function, given = _KEEPING[function], jax.tree.map(to_jax, cache)
    program = step.mode, layer.ratio, step.batch.max_seq_len
    if program not in step.routes:
        step.routes[program] = calls_of(function.lower(given, *args, **kwargs))
    out, updated, positions = function(given, *args, **kwargs)
    if of_torch:
        jax.tree.map(lambda mine, theirs: mine.copy_(to_torch(theirs)), cache, updated)
        updated = cache
    return out, updated, positions


def _param(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().clone()  # a copy, since the model's own tensor may be written to


def _pad(x: torch.Tensor, step: Step) -> jax.Array:
    """The n real rows `[n, …]`, with zeros as the step's padding rows."""
    padded = x.new_zeros(step.num_rows, *x.shape[1:])
    padded[: len(x)] = x
    return to_jax(padded)


def _unpad(x: jax.Array, step: Step) -> torch.Tensor:
    return to_torch(x)[: step.num_tokens]

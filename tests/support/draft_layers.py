"""Draft layers (multi-token prediction) of transformers' modules behind small models of one layer: what they predict.

transformers leaves V4's out. It is put together here as DeepSeek's reference does: the streams of a position and the
token behind it, each normalised and multiplied, are added, and go through a window layer with its own head of streams.
"""

from __future__ import annotations

import copy
import functools
import re

import numpy as np
import torch
from support.hf_models import named_arrays, random_model, small_glm5_config, small_v4_config, small_v32_config
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from jax_sparse_mla.serving import Model


class V4DraftLayer(v4.DeepseekV4DecoderLayer):
    """Its own parameters have the released names, those of the layer transformers'."""

    prefix = "mtp.0."

    def __init__(self, config):
        config = copy.deepcopy(config)
        config.layer_types, config.mlp_layer_types = ["sliding_attention"], ["moe"]
        super().__init__(config, 0)
        for name in ("enorm", "hnorm", "norm"):
            self.add_module(name, v4.DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        for name in ("e_proj", "h_proj"):
            self.add_module(name, torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False))
        self.hc_head = v4.DeepseekV4HyperHead(config)

    def forward(self, embedded, streams, **options):
        """Rows for the head, and the streams that they are made of."""
        streams = self.e_proj(self.enorm(embedded)).unsqueeze(2) + self.h_proj(self.hnorm(streams))
        streams = super().forward(streams, **options)
        return self.norm(self.hc_head(streams)), streams


class GlmLayer(glm.GlmMoeDsaDecoderLayer):
    """Its rows alone, as a draft layer of transformers takes them."""

    def forward(self, *args, **options):
        return super().forward(*args, **options)[0]


class V32DraftLayer(MtpLayer):
    """transformers' own, of V3.2 or GLM-5."""

    def __init__(self, config):
        self.prefix = f"model.layers.{config.num_hidden_layers}."
        config = copy.deepcopy(config)
        config.mlp_layer_types, config.indexer_types = ["sparse"], ["full"]
        layer = GlmLayer if config.model_type == "glm_moe_dsa" else v32.DeepseekV32DecoderLayer
        super().__init__(config, layer, v32.DeepseekV32RMSNorm, 0)

    def forward(self, embedded, hidden, **options):
        hidden = super().forward(embedded, hidden, **options)
        return hidden, hidden


def new_draft_layer(config, echo: float = 0):
    """A random one in float32; echo as of `Drafting`."""
    draft = (V4DraftLayer if config.model_type == "deepseek_v4" else V32DraftLayer)(config).eval()
    randomise(draft, 1, echo)
    eye = torch.eye(config.hidden_size)
    if echo and isinstance(draft, V4DraftLayer):
        draft.e_proj.weight.data, draft.h_proj.weight.data = eye, echo * draft.h_proj.weight
    elif echo:
        draft.eh_proj.weight.data = torch.cat([eye, echo * draft.eh_proj.weight[:, config.hidden_size :]], dim=1)
    return draft


def named_draft(draft) -> dict[str, np.ndarray]:
    """Its parameters and buffers as a checkpoint names them, without those that it shares with the model."""
    released = (r"^mtp_block\.", ""), (r"^post_norm\.", "shared_head.norm."), (r"^hc_head\.hc_", "hc_head_")
    arrays = named_arrays(draft)
    for pattern, replacement in released:
        arrays = {re.sub(pattern, replacement, name): x for name, x in arrays.items()}
    return {draft.prefix + name: x for name, x in arrays.items()}


class Drafting:
    """A float32 model of one layer with a draft layer; of GLM-5 of two layers, the second without an indexer.

    Args:
      name: "v4", "v32" or "glm5".
      echo: 0, or how much is kept of what a layer adds to the rows. Then a token hangs mostly on the one before it, and
        the draft layer passes the embedding on: it predicts what the model does, where the rest does not decide.
    """

    def __init__(self, name: str, echo: float = 0):
        if name == "v4":
            only = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
            config = small_v4_config(num_hidden_layers=1, **only)
        elif name == "glm5":
            config = small_glm5_config(num_hidden_layers=2, indexer_types=["full", "shared"], index_topk=256)
        else:
            config = small_v32_config(num_hidden_layers=1, first_k_dense_replace=0, index_topk=256)
        self.name, self.module = name, random_model(config, seed=0).float()
        randomise(self.module, 0, echo)
        self.draft = new_draft_layer(config, echo)

    @functools.cached_property
    def jax_model(self):
        """`(model, params)`."""
        model = Model.from_config(self.module.config.to_dict())
        return model, model.from_named_arrays(named_arrays(self.module) | named_draft(self.draft))

    @torch.no_grad()
    def run(self, tokens: list[int]):
        """Of a text: logits `[n, vocab]`, what the draft layer reads `[1, n, …]`, and options of a layer."""
        seen = {}
        layer = self.module.model.layers[0]
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, options: seen.update(options=options), with_kwargs=True),
            layer.register_forward_hook(lambda _, args, out: seen.update(streams=out)),
        ]
        out = self.module.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        states = seen["streams"] if self.name == "v4" else out.last_hidden_state
        return self.module.lm_head(out.last_hidden_state)[0].numpy(), states, seen["options"]

    @torch.no_grad()
    def predict(self, behind: list[int], states: torch.Tensor, options: dict) -> tuple[np.ndarray, torch.Tensor]:
        """The draft layer's logits `[n, vocab]` and its own states, of the tokens behind the positions."""
        tokens = torch.tensor([behind])
        rows, states = self.draft(self.module.model.embed_tokens(tokens), states, **options | {"input_ids": tokens})
        return self.module.lm_head(rows)[0].numpy(), states


def randomise(module: torch.nn.Module, seed: int, echo: float) -> None:
    """Parameters of unit gain; buffers of routers are random too."""
    generator = torch.Generator().manual_seed(seed)
    for name, x in module.named_parameters():
        if "norm" in name and x.ndim == 1:
            x.data.normal_(1, 0.0 if echo else 0.1, generator=generator)
        elif name.endswith(("base", "scale")):
            x.data.normal_(1, 0.5, generator=generator)
        elif name.endswith("embed_tokens.weight"):
            x.data.normal_(generator=generator)
        elif x.ndim > 1:
            x.data.normal_(std=x.shape[-1] ** -0.5, generator=generator)
            if echo and name.endswith(("o_b_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight")):
                x.data *= echo
        else:
            x.data.normal_(generator=generator)
    for name, x in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            x.normal_(std=0.1, generator=generator)

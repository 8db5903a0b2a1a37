"""Replaces transformers' attention in a model: its forwards raise, its modules' projections stay in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm5_next import modeling_glm5_next as glm53
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from sparse_mla_torch.hf.shared_patch import SharedPatch

_REPLACED = (
    v4.DeepseekV4Attention,
    v4.DeepseekV4HCACompressor,
    v4.DeepseekV4CSACompressor,
    v4.DeepseekV4Indexer,
    v4.DeepseekV4IndexerScorer,
    v32.DeepseekV32Attention,
    v32.DeepseekV32Indexer,
    glm.GlmMoeDsaAttention,
    glm.GlmMoeDsaIndexer,
)
_INDEXERS = (v4.DeepseekV4Indexer, v32.DeepseekV32Indexer, glm.GlmMoeDsaIndexer, glm53.Glm5NextTextIndexer)


class AttentionReplacement:
    """While active, `model`'s attention modules call `forward(layer_index, hidden, position_embeddings)` and every
    attention, compressor and indexer forward of transformers raises. Several may be active at once."""

    def __init__(self, model: torch.nn.Module, forward: Callable[[int, torch.Tensor, object], torch.Tensor]):
        self._modules = [layer.self_attn for layer in model.model.layers]
        self._forward = forward

    def __enter__(self) -> AttentionReplacement:
        _REFUSING.__enter__()
        for index, module in enumerate(self._modules):
            module.forward = self._module_forward(index)
        return self

    def __exit__(self, *_: object) -> None:
        _REFUSING.__exit__()
        for module in self._modules:
            del module.forward

    def _module_forward(self, index: int):
        # GLM's returns its selection too, for the layers that share it; ours goes another way.
        rest = (None, None) if isinstance(self._modules[index], glm.GlmMoeDsaAttention) else (None,)

        def forward(hidden_states, position_embeddings, **_):
            return self._forward(index, hidden_states, position_embeddings), *rest

        return forward


@contextlib.contextmanager
def selected_indices() -> Iterator[list[torch.Tensor]]:
    """Collects what transformers' indexers return, for the comparison with our own selection."""
    selected: list[torch.Tensor] = []
    originals = {cls: cls.forward for cls in _INDEXERS}

    def recording(original):
        def forward(self, *args, **kwargs):
            selected.append(original(self, *args, **kwargs))
            return selected[-1]

        return forward

    for cls, original in originals.items():
        cls.forward = recording(original)
    try:
        yield selected
    finally:
        for cls, original in originals.items():
            cls.forward = original


def _refuse(cls: type):
    def forward(self, *args, **kwargs):
        raise RuntimeError(f"{cls.__name__}.forward was called: jax_sparse_mla serves this model's attention")

    return forward


def _refuse_all() -> Callable[[], None]:
    originals = {cls: cls.forward for cls in _REPLACED}
    for cls in _REPLACED:
        cls.forward = _refuse(cls)

    def take_back():
        for cls, original in originals.items():
            cls.forward = original

    return take_back


_REFUSING = SharedPatch(_refuse_all)

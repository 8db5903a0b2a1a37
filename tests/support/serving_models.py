"""The small transformers models that the JAX models are compared with, and what they make of some requests."""

from __future__ import annotations

import functools

import numpy as np
import torch
from support.hf_models import (
    named_arrays,
    random_model,
    random_tokens,
    small_glm5_config,
    small_glm53_config,
    small_v4_config,
    small_v32_config,
    torch_logits,
)

from jax_sparse_mla.serving import Model, Params
from jax_sparse_mla.serving.checkpoint import from_named_arrays

# Longer than a page of V4, read in several parts; short of a window; and without a complete C128 group.
LENGTHS, NEW = (440, 135, 25), 4
CHUNK = 112
# Root mean square of a row's difference, in standard deviations of the logits; the median measured 0.002. Float32 rows
# differ by what a bfloat16 cache rounds, where that does not send a row to another expert.
FLOAT32 = 0.006


def config(name: str):
    """V4: each kind of layer, a hash layer and two with routers. V3.2: a dense layer and experts in groups. GLM-5: a
    layer without an indexer between two with one. GLM-5.3: a dense layer of linear attention, one with index pools.

    The longest request has more C4 entries, and more tokens, than are selected.
    """
    if name == "v4":
        return small_v4_config(mlp_layer_types=["hash_moe", "moe", "moe"], index_topk=96)
    if name == "glm5":
        return small_glm5_config(index_topk=256)
    if name == "glm53":
        kinds = {"layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"]}
        return small_glm53_config(**kinds, num_hidden_layers=2, index_topk=256)
    return small_v32_config(n_routed_experts=8, n_group=4, topk_group=2, index_topk=256)


@functools.cache
def torch_model(name: str, dtype: torch.dtype):
    """A random model whose buffers are random too, and whose embedding and experts do not vanish beside the rest."""
    model = random_model(config(name), seed=0)
    model = model.float() if dtype == torch.float32 else model
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("embed_tokens.weight"):
            parameter.data.normal_(generator=generator)
        elif parameter.ndim == 3:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        elif parameter_name.endswith(("base", "scale")):
            parameter.data.normal_(1, 0.5, generator=generator)
        elif parameter_name.endswith("sinks"):
            parameter.data.normal_(4, 1, generator=generator)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("tid2eid"):
            experts = model.config.n_routed_experts
            buffer.copy_(torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in buffer]))
        elif buffer_name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1, generator=generator)
    return model


@functools.cache
def jax_model(name: str, dtype: torch.dtype) -> tuple[Model, Params]:
    module = torch_model(name, dtype)
    model = Model.from_config(module.config.to_dict())
    return model, from_named_arrays(model.config, named_arrays(module))


def requests() -> list[list[int]]:
    return [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


@functools.cache
def expected(name: str, dtype: torch.dtype) -> list[np.ndarray]:
    """transformers' logits of each request."""
    return [torch_logits(torch_model(name, dtype), tokens) for tokens in requests()]


def row_differences(logits: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The root mean square of each row's difference, in standard deviations of what is wanted."""
    return np.sqrt(np.mean((logits - wanted) ** 2, axis=-1)) / wanted.std()


def rows_that_see_all(model: Model) -> int:
    """The first rows of a request, of which nothing is left out of the attention."""
    return model.spec.index_topk * (4 if model.spec.window else 1)


def assert_float32_logits(logits: list[np.ndarray], expected: list[np.ndarray], all_seen: int) -> None:
    """Of each request; of its first `all_seen` rows nothing is left out of the attention."""
    for got, wanted in zip(logits, expected, strict=True):
        assert got.shape == wanted.shape
        rows = row_differences(got, wanted)
        assert np.mean(rows[:all_seen] < FLOAT32) > 0.97
        # FP8 index keys rank some entries otherwise than float32 ones.
        assert len(got) <= all_seen or np.median(rows[all_seen:]) < 0.05
        best = np.sort(wanted, axis=-1)
        clear = (best[:, -1] - best[:, -2] > 0.1 * wanted.std()) & (rows < FLOAT32)
        assert clear.mean() > 0.3 and (got.argmax(-1) == wanted.argmax(-1))[clear].all()
    assert len(logits[0]) > all_seen + NEW

"""Checkpoints: safetensors files, and what their tensors are called, become a model's parameters. torch is not needed.

Names are those that transformers writes, those of its modules, or those of the released checkpoints.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jax_sparse_mla.serving.architectures import read_params
from jax_sparse_mla.serving.config import Config, Glm53Config, V4Config, V32Config
from jax_sparse_mla.serving.memory import check_memory, host_device
from jax_sparse_mla.serving.params import LayerParams
from jax_sparse_mla.serving.quantised import JoinedRows, Quantised, WeightFormat, join_rows, multiplied_out
from jax_sparse_mla.serving.tensors import Shape, Tensors, random_params, shapes_of

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# The dtype of FP4 weights, two values a byte, and of scales that are powers of two.
FP4, UE8M0 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e8m0fnu)
# Dtypes of weights that are read; routers' tables are integers.
WEIGHTS = tuple(map(np.dtype, (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)))
NAMES_SHOWN = 6


def from_named_arrays(
    config: Config,
    arrays: Mapping[str, Any],
    *,
    draft_layer: bool = True,
    as_stored: bool = True,
    place: Callable[[LayerParams], LayerParams] | None = None,
    devices: int = 1,
) -> Any:
    """The parameters of arrays by name, as a state dict or a checkpoint has them.

    Args:
      config: the model's.
      arrays: numpy arrays, bfloat16 and FP8 of `ml_dtypes`. Weights get the embedding's dtype, bfloat16 or float32;
        what the model keeps in float32 becomes float32. An FP8 weight `x` has a scale for each block of 128 x 128
        values, `x_scale_inv` (released V4: `….scale` beside `….weight`). A routed expert's weight may be FP4: int8
        `[out, in / 2]`, two e2m1 values a byte with the even one in the low nibble, and float8_e8m0fnu scales
        `[out, in / 32]` of the same name.
      draft_layer: whether to read the draft layer or DSpark's drafter if there is one. Further draft layers and
        drafters of another form are left out. What the config says of draft layers does not count: transformers says
        one and saves none. A drafter is read by what the config says of it.
      as_stored: whether weights that products read stay FP8 and FP4 (`Quantised`); else all are multiplied out.
      place: takes a layer that the host has read to the devices, before the host reads the next one. None: all goes to
        the default device.
      devices: among how many the weights are cut.

    Raises:
      ValueError: names that are missing or unknown, a wrong shape, or a dtype that is not read; it names them.
        Weights that the device has no room for.
    """
    stored: dict[str, Any] = {}
    for stored_name, array in arrays.items():
        name = canonical_name(stored_name, config)
        if name in stored:
            raise ValueError(f"checkpoint of {config.spec.name}: {name} is stored twice, once as {stored_name}")
        if name is not None:
            stored[name] = array
    _join_convolutions(stored)
    draft_layer = draft_layer and not stored.keys().isdisjoint(_DRAFTER_HAS.get(type(config), ()))
    if not draft_layer:
        stored = {name: array for name, array in stored.items() if not name.startswith("draft.")}
    read = functools.partial(read_params, config, draft_layer=draft_layer)
    shapes, kept = shapes_of(read)
    _check(_stored_shapes(shapes, stored), stored, config)
    dtype = stored["embed_tokens.weight"].dtype
    if dtype not in (np.float32, ml_dtypes.bfloat16):
        raise ValueError(f"checkpoint: embed_tokens.weight must be bfloat16 or float32, got {dtype}")
    kept = kept if as_stored else set()
    needed = sum(_bytes(stored, name, shape, dtype, name in kept) for name, shape in shapes.items())
    what = "the weights need" if devices == 1 else "a device's part of the weights needs at least"
    check_memory(what, needed // devices)

    def get(name: str, shape: Shape, dtype: Any, is_product: bool) -> Any:
        return _tensor(stored, name, shape, dtype, as_stored and is_product)

    tensors = Tensors(get, dtype)
    if place is None:
        return read(tensors)

    def read_layer(read: Callable[..., LayerParams], config: Config, i: int, kind: Hashable) -> LayerParams:
        return place(read(config, i, tensors))

    with jax.default_device(host_device()):
        return read(dataclasses.replace(tensors, read_layer=read_layer))


def _bytes(stored: Mapping[str, Any], name: str, shape: Shape, dtype: np.dtype, as_stored: bool) -> int:
    """What a weight takes on the device."""
    names = [name] if name in stored or not _is_stacked(name) else [x for part in _parts(name, shape[0]) for x in part]
    if not as_stored or _form(names[0], stored[names[0]]) is None:
        return math.prod(shape) * dtype.itemsize
    return sum(stored[name].nbytes + stored[_scale_of(name)].nbytes for name in names)


def init_params(
    config: Config,
    seed: int,
    dtype: Any,
    *,
    draft_layer: bool = False,
    as_stored: bool = False,
    shardings: Callable[[Any], Any] | None = None,
) -> Any:
    """Random parameters; see `Model.init_params` and `random_params`."""
    read = functools.partial(read_params, config, draft_layer=draft_layer)
    experts = (WeightFormat.FP4 if isinstance(config, V4Config) else WeightFormat.FP8) if as_stored else None
    return random_params(read, seed, dtype, config.moe.num_experts, shardings, experts)


_LAYER = r"layers\.\d+|draft(?:\.\d+)?"
# From the released names to those of transformers' modules; each is applied once, in this order.
_V4_RULES = (
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"(^|\.)hc_head_(fn|base|scale)$", r"\1hc_head.hc_\2"),
    (rf"^({_LAYER})\.hc_(attn|ffn)_(fn|base|scale)$", r"\1.\2_hc.\3"),
    (rf"^({_LAYER})\.attn_norm\.", r"\1.input_layernorm."),
    (rf"^({_LAYER})\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (rf"^({_LAYER})\.attn\.", r"\1.self_attn."),
    (rf"^({_LAYER})\.ffn\.", r"\1.mlp."),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.attn_sink$", ".sinks"),
    (r"(\.self_attn(?:\..+)?)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.w(q_a|q_b|kv|o_a|o_b)\.", r".\1_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"_proj\.scale$", "_proj.weight_scale_inv"),
)
_GLM53_RULES = (
    (r"^language_model\.", ""),
    (r"\.self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)(?=$|\.)", r".self_attn.forget_gate.\1"),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
)
_RULES = {V4Config: _V4_RULES, V32Config: (), Glm53Config: _GLM53_RULES}
# Further draft layers, what a draft layer shares with the model, how sure a drafter is, and buffers that follow from
# the config.
_NOT_READ = re.compile(
    r"^mtp\.|^draft\.(\d+\.)?(emb|embed|embed_tokens|head|shared_head\.head|confidence_head)\.|rotary_emb\."
)
_LEFT_OUT = {V4Config: _NOT_READ, V32Config: _NOT_READ, Glm53Config: re.compile(r"^visual\.")}
# Tensors of which a draft layer or a drafter of the known form has one.
_DRAFTER_HAS = {V4Config: ("draft.e_proj.weight", "draft.0.main_proj.weight"), V32Config: ("draft.eh_proj.weight",)}


def canonical_name(name: str, config: Config) -> str | None:
    """A tensor's name without "model.", and as transformers' modules have it; None for what is not read.

    The draft layer's begin with "draft.", those of a drafter's stages with "draft.0." and so on. V3.2's draft layer is
    stored as a layer behind the model's; GLM-5.3's is not read. An indexer of a layer that takes another's selection is
    left out, as transformers does.
    """
    kind, name = type(config), name.removeprefix("model.")
    if kind is V32Config:
        name = re.sub(rf"^layers\.{config.num_layers}\.", "draft.", name)
    elif kind is V4Config:
        name = re.sub(r"^mtp\.0\.", "draft.", name) if config.block_drafter is None else re.sub("^mtp", "draft", name)
    for pattern, replacement in _RULES[kind]:
        name = re.sub(pattern, replacement, name)
    layer = re.match(r"layers\.(\d+)\.", name)
    is_behind = kind is not V4Config and layer is not None and int(layer[1]) >= config.num_layers
    is_tied = config.tied and name == "lm_head.weight"
    is_unused = kind is V32Config and ".self_attn.indexer." in name and layer is not None and not (
        is_behind or config.indexed[int(layer[1])])  # fmt: skip
    return None if is_behind or is_tied or is_unused or _LEFT_OUT[kind].search(name) else name


def _join_convolutions(stored: dict[str, Any]) -> None:
    """Saved linear attention has a convolution each for queries, keys and values; transformers' modules have one."""
    for name in [name for name in stored if name.endswith(".q_conv1d.weight")]:
        parts = [name.replace(".q_conv1d.", f".{x}_conv1d.") for x in "qkv"]
        arrays = [stored.get(part) for part in parts]
        kinds = {(x.dtype, x.shape[1:]) for x in arrays if isinstance(x, np.ndarray) and x.ndim}
        if len(kinds) == 1 and all(isinstance(x, np.ndarray) and x.ndim for x in arrays):
            stored[name.replace(".q_conv1d.", ".conv1d.")] = np.concatenate([stored.pop(part) for part in parts])


def _parts(name: str, num_experts: int) -> list[list[str]]:
    """The tensors that make `…experts.gate_up_proj` or `…experts.down_proj` where experts are stored one by one: for
    each of the joined weights one name an expert."""
    experts, _, which = name.rpartition(".")
    weights = ["gate_proj", "up_proj"] if which == "gate_up_proj" else [which]
    return [[f"{experts}.{e}.{weight}.weight" for e in range(num_experts)] for weight in weights]


# An expert that is stored by itself.
_EXPERT = re.compile(r"\.experts\.\d+\.")


def _is_stacked(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _form(name: str, array: Any) -> WeightFormat | None:
    """The format of a stored tensor: FP4 is that of routed experts alone. None: its numbers are its weights."""
    if array.dtype == FP4 and (_is_stacked(name) or _EXPERT.search(name)):
        return WeightFormat.FP4
    return WeightFormat.FP8 if array.dtype == FP8 and len(array.shape) > 1 else None


def _stored_shapes(shapes: Mapping[str, Shape], stored: Mapping[str, Any]) -> dict[str, Shape]:
    """The shapes by stored name: the same, but for experts that are stored one by one."""
    expected = {}
    for name, shape in shapes.items():
        if name in stored or not _is_stacked(name) or shape[0] > len(stored):
            expected[name] = shape
            continue
        parts = _parts(name, shape[0])
        one = shape[1] // len(parts), shape[2]
        expected |= {part: one for names in parts for part in names}
    return expected


def _scale_of(name: str) -> str:
    return f"{name}_scale_inv"


def _check(expected: Mapping[str, Shape], stored: Mapping[str, Any], config: Config) -> None:
    problems = []
    if missing := [name for name in expected if name not in stored]:
        problems.append(f"missing: {_some(missing)}")
    allowed = set(expected) | {_scale_of(name) for name in expected}
    if unknown := sorted(set(stored) - allowed):
        problems.append(f"unknown: {_some(unknown)}")
    of_experts: dict[str, Any] = {}
    for name in [name for name in expected if name in stored]:
        dtype = stored[name].dtype
        first = of_experts.setdefault(_EXPERT.sub(".experts.*.", name), dtype)
        if dtype != first and {dtype, first} & {FP8, FP4}:
            problems.append(f"{name} must be {first} as the experts before it, got {dtype}")
        elif problem := _problem(name, expected[name], stored):
            file = getattr(stored[name], "filename", None)
            problems.append(problem if file is None else f"{problem} (in {file.name})")
    if problems:
        raise ValueError(f"checkpoint of {config.spec.name}: {'; '.join(problems[:NAMES_SHOWN])}")


def _problem(name: str, shape: Shape, stored: Mapping[str, Any]) -> str | None:
    """The fault of a stored tensor that must have this shape, or of its scales; None if there is none."""
    array = stored[name]
    form = _form(name, array)

    def scales() -> Shape:
        return *shape[:-2], -(-shape[-2] // form.rows), -(-shape[-1] // form.group)

    if form is WeightFormat.FP4:
        packed = *shape[:-1], shape[-1] // form.per_byte
        if shape[-1] % form.group:
            return f"{name} is FP4, whose rows must be of a multiple of {form.group} values, got {shape[-1]}"
        if tuple(array.shape) != packed:
            return f"{name} is int8, two FP4 values a byte, and must have shape {list(packed)}, got {list(array.shape)}"
        return _scale_problem(name, "FP4", scales(), (UE8M0,), stored)
    if tuple(array.shape) != shape:
        return f"{name} must have shape {list(shape)}, got {list(array.shape)}"
    if name.endswith("tid2eid"):
        is_integer = getattr(array.dtype, "kind", "") in "iu"
        return None if is_integer else f"{name} must be an integer array, got {array.dtype}"
    if form is WeightFormat.FP8:
        return _scale_problem(name, "FP8", scales(), (*WEIGHTS, UE8M0), stored)
    if array.dtype not in WEIGHTS:
        return f"{name} must be of {', '.join(map(str, (*WEIGHTS, FP8)))}, got {array.dtype}"
    return None


def _scale_problem(
    name: str, kind: str, shape: Shape, dtypes: tuple[np.dtype, ...], stored: Mapping[str, Any]
) -> str | None:
    """Without its scales, or with others, a quantised weight would be read as something else."""
    scale_name = _scale_of(name)
    scale = stored.get(scale_name)
    if scale is None or tuple(scale.shape) != shape:
        got = "none" if scale is None else list(scale.shape)
        return f"{name} is {kind} and needs {scale_name} of shape {list(shape)}, got {got}"
    if scale.dtype not in dtypes:
        return f"{scale_name} of {kind} must be of {', '.join(map(str, dtypes))}, got {scale.dtype}"
    return None


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _tensor(stored: Mapping[str, np.ndarray], name: str, shape: Shape, dtype: Any, as_stored: bool) -> Any:
    """`Tensors.get` of stored arrays."""
    if name in stored or not _is_stacked(name):
        return _on_device(stored, [name], dtype, shape, as_stored)
    parts = _parts(name, shape[0])
    one = shape[0], shape[1] // len(parts), shape[2]
    joined = join_rows([_on_device(stored, names, dtype, one, as_stored) for names in parts])
    return multiplied_out(joined) if isinstance(joined, JoinedRows) else joined


def _on_device(stored: Mapping[str, np.ndarray], names: list[str], dtype: Any, shape: Shape, as_stored: bool) -> Any:
    """The arrays of these names, stacked."""
    arrays = [stored[name] for name in names]
    if (form := _form(names[0], arrays[0])) is None:
        # No `jnp` here, and the host gives the shape: each shape would be a program of its own.
        return jax.device_put(np.stack([array.astype(dtype) for array in arrays]).reshape(shape))
    values = np.stack([array.view(np.uint8) for array in arrays]).reshape(*shape[:-1], shape[-1] // form.per_byte)
    scales = [stored[_scale_of(name)] for name in names]
    exact = all(scale.dtype == UE8M0 for scale in scales)
    scales = np.stack([scale.view(np.uint8) if exact else scale.astype(np.float32) for scale in scales])
    weight = Quantised.stored(form, values, scales.reshape(*shape[:-2], *scales.shape[-2:]), dtype)
    return weight if as_stored else multiplied_out(weight)

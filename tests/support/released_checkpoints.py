"""Checkpoints as they are released: quantised from float tensors, by the released names, written byte by byte."""

from __future__ import annotations

import json
import re

import jax
import ml_dtypes
import numpy as np

from jax_sparse_mla.serving.quantised import JoinedRows, Quantised, multiplied_out

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code; bit 3 is the sign


def write(folder, config, tensors):
    """A checkpoint of one file, written byte by byte: the package's numpy face writes no FP8."""
    names = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
    names |= {"int64": "I64", "int32": "I32", "int8": "I8", "float16": "F16"}
    header, data = {}, b""
    for name, x in tensors.items():
        part = np.ascontiguousarray(x).tobytes()
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": names[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        data += part
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def to_fp8(x, scale_dtype):
    """Values and one power of two for each block of 128 x 128."""
    rows, columns = (-(-n // 128) for n in x.shape)
    padded = np.zeros((rows * 128, columns * 128), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(rows, 128, columns, 128)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(axis=(1, 3)) / 448))
    values = (blocks / scale[:, None, :, None]).reshape(padded.shape)[: x.shape[0], : x.shape[1]]
    return values.astype(ml_dtypes.float8_e4m3fn), scale.astype(scale_dtype)


def without_quantised(params):
    """Parameters with all weights multiplied out."""
    return jax.tree.map(multiplied_out, params, is_leaf=lambda x: isinstance(x, (Quantised, JoinedRows)))


# From transformers' names to the released ones, as V4's checkpoints have them.
V4_RELEASED = (
    (r"^model\.", ""),
    (r"^embed_tokens", "embed"),
    (r"^lm_head", "head"),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.scorer\.weights_proj", ".weights_proj"),
    (r"\.compressor\.indexer\.(kv_proj|gate_proj|kv_norm|position_bias)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.", ".indexer."),
    (r"\.self_attn\.", ".attn."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.position_bias", ".ape"),
    (r"\.mlp\.gate\.e_score_correction_bias", ".mlp.gate.bias"),
    (r"(experts.*)\.gate_proj", r"\1.w1"),
    (r"(experts.*)\.down_proj", r"\1.w2"),
    (r"(experts.*)\.up_proj", r"\1.w3"),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.(q_a|q_b|kv|o_a|o_b)_proj\.", r".w\1."),
)


def to_fp4(x):
    """Two e2m1 values a byte, the even one in the low nibble, and a power of two for each 32 values of a row."""
    groups = x.reshape(len(x), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(axis=-1) / 6)).astype(int)
    away = np.abs(np.abs(groups / 2.0 ** exponents[..., None])[..., None] - E2M1)
    codes = (away.argmin(axis=-1) + 8 * np.signbit(groups)).reshape(x.shape)
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    return packed.view(np.int8), (exponents + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def from_fp4(packed, scales):
    """float64, which holds every product."""
    packed, scales = packed.view(np.uint8), scales.view(np.uint8).astype(int)
    codes = np.stack([packed % 16, packed // 16], axis=-1).reshape(len(packed), -1)
    signs = np.where(codes >= 8, -1.0, 1.0)
    powers = np.where(scales == 255, np.nan, 2.0 ** (scales - 127.0))
    return signs * E2M1[codes % 8] * np.repeat(powers, 32, axis=1)


def one_by_one(arrays):
    """The same tensors with each expert's by itself."""
    parts = {}
    for name, x in arrays.items():
        prefix, _, which = name.rpartition(".")
        if not prefix.endswith(".experts"):
            parts[name] = x
            continue
        joined = np.split(x, 2, axis=1) if which == "gate_up_proj" else [x]
        names = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        parts |= {f"{prefix}.{e}.{n}.weight": part[e] for n, part in zip(names, joined) for e in range(len(part))}
    return parts


def quantised(arrays, scale_dtype, *, fp4_experts=False):
    """A checkpoint's tensors, and those of the same values without FP8 or FP4."""
    plain, stored = {}, {}
    for name, x in one_by_one(arrays).items():
        plain[name] = stored[name] = x
        if fp4_experts and ".experts." in name:
            values, scale = to_fp4(x.astype(np.float32))
            plain[name] = from_fp4(values, scale).astype(x.dtype)
        elif re.search(r"(proj|wk|wq_b|with_mqa)\.weight$", name) and "compressor" not in name:
            values, scale = to_fp8(x.astype(np.float32), scale_dtype)
            wide = np.repeat(np.repeat(scale.astype(np.float32), 128, 0), 128, 1)[: x.shape[0], : x.shape[1]]
            plain[name] = (values.astype(np.float32) * wide).astype(x.dtype)
        else:
            continue
        stored |= {name: values, f"{name}_scale_inv": scale}
    return plain, stored


def released_v4(stored):
    """The released names."""
    for pattern, replacement in V4_RELEASED:
        stored = {re.sub(pattern, replacement, n): x for n, x in stored.items()}
    return {n.replace(".weight_scale_inv", ".scale"): x for n, x in stored.items()}


FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
FP4_CONFIG = FP8_CONFIG | {"expert_dtype": "fp4"}

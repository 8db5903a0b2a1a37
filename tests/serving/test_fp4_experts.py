"""FP4 experts: bytes against ml_dtypes' numbers, a checkpoint against transformers' loader, and what is refused."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support.hf_models import named_arrays, random_model, random_tokens, small_v4_config, torch_logits
from support.released_checkpoints import FP4_CONFIG, from_fp4, quantised, released_v4, to_fp4, without_quantised, write
from support.serving_models import config, row_differences, torch_model
from support.serving_steps import Steps
from transformers import FineGrainedFP8Config
from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM
from transformers.quantizers import quantizer_finegrained_fp8

from jax_sparse_mla import ForwardMode
from jax_sparse_mla.serving import Model, load
from jax_sparse_mla.serving.checkpoint import from_named_arrays
from jax_sparse_mla.serving.quantised import Quantised, WeightFormat, multiplied_out

E8M0 = ml_dtypes.float8_e8m0fnu
GATE = "model.layers.1.mlp.experts.{}.gate_proj.weight"
SCALE = GATE.format(2) + "_scale_inv"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_byte_times_every_scale(dtype):
    """Exact where the dtype has the product: subnormal numbers too; beyond its largest number is infinity."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 16))
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(256, 512)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    wanted = values * np.repeat(scales.view(E8M0).astype(np.float64), 32, axis=1)
    np.testing.assert_array_equal(from_fp4(packed, scales), wanted)  # the oracle of the other tests
    # Three matrices, of which the last is in another order.
    weight = Quantised.stored(WeightFormat.FP4, *(np.stack([x, x, x[::-1]]) for x in (packed, scales)), dtype)
    got = multiplied_out(weight)
    assert got.shape == (3, 256, 512) and got.dtype == dtype
    with np.errstate(over="ignore"):
        rounded = wanted.astype(np.dtype(dtype))
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(rounded.astype(np.float64)[finite], wanted[finite])
    np.testing.assert_array_equal(np.isinf(rounded), np.abs(wanted) >= 2.0**128)
    assert np.isnan(wanted[255]).all() and np.isinf(rounded).any()
    for i, rows in enumerate((rounded, rounded, rounded[::-1])):
        np.testing.assert_array_equal(np.asarray(got[i], np.float32), rows.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(got[i])[~np.isnan(rows)], np.signbit(rows)[~np.isnan(rows)])


def test_no_more_than_one_expert_is_held_in_float32():
    experts, rows, columns = 32, 256, 512
    values, scales = (jax.ShapeDtypeStruct((experts, rows, columns // n), jnp.uint8) for n in (2, 32))
    weight = Quantised(format=WeightFormat.FP4, dtype=np.dtype(jnp.bfloat16), values=values, scales=scales)
    memory = jax.jit(multiplied_out).lower(weight).compile().memory_analysis()
    assert memory.output_size_in_bytes == experts * rows * columns * 2
    assert memory.temp_size_in_bytes <= rows * columns * 4 + 4096


def test_a_checkpoint_against_transformers_loader(tmp_path, monkeypatch):
    """Released names, FP4 experts, FP8 in the rest: transformers' parameters. It asks for accelerate, which it does
    not use here."""
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *_: True)
    module = torch_model("v4", torch.bfloat16)
    keys = json.loads(module.config.to_json_string())
    _, stored = quantised(named_arrays(module), E8M0, fp4_experts=True)
    folder = write(tmp_path / "fp4", keys | FP4_CONFIG, released_v4(stored))
    options = {"dtype": torch.bfloat16, "quantization_config": FineGrainedFP8Config(dequantize=True)}
    theirs = DeepseekV4ForCausalLM.from_pretrained(folder, attn_implementation="eager", **options)
    model, params = load(folder)
    arrays, before = named_arrays(theirs), named_arrays(module)
    wanted = from_named_arrays(model.config, arrays)
    jax.tree.map(np.testing.assert_array_equal, without_quantised(params), wanted)
    name = "model.layers.1.mlp.experts.down_proj"
    assert arrays.keys() == before.keys() and (arrays[name] != before[name]).mean() > 0.5


def test_logits(tmp_path):
    """Of a layer, from the folder: those of the same values stored in bfloat16, and near transformers' of these."""
    only = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    module = random_model(small_v4_config(**only), seed=0)
    for x in module.parameters():
        if x.ndim == 3:  # so that experts do not vanish beside the rest
            x.data.normal_(std=x.shape[-1] ** -0.5, generator=torch.Generator().manual_seed(1))
    keys = json.loads(module.config.to_json_string())
    plain, stored = quantised(named_arrays(module), E8M0, fp4_experts=True)
    tokens = random_tokens(64, 0)

    def logits(folder):
        steps = Steps(*load(folder), num_requests=1)
        return steps(ForwardMode.EXTEND, {0: (0, tokens)}, 64)[0]

    got = logits(write(tmp_path / "fp4", keys | FP4_CONFIG, released_v4(stored)))
    folder = write(tmp_path / "plain", keys, released_v4(plain))
    np.testing.assert_array_equal(got, logits(folder))
    theirs = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    rows, before = (np.median(row_differences(got, torch_logits(x, tokens))) for x in (theirs, module))
    assert rows < 0.05 < before, (rows, before)  # without FP4's and FP8's rounding the logits are others


def test_experts_in_one_tensor():
    """As transformers' modules have them, FP4 and with their scales."""
    arrays = named_arrays(torch_model("v4", torch.bfloat16))
    plain, stored = dict(arrays), dict(arrays)
    for name in [name for name in arrays if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        packed, scales = map(np.stack, zip(*(to_fp4(x.astype(np.float32)) for x in arrays[name])))
        plain[name] = np.stack([from_fp4(*x) for x in zip(packed, scales)]).astype(arrays[name].dtype)
        stored |= {name: packed, f"{name}_scale_inv": scales}
    model = Model.from_config(config("v4").to_dict() | FP4_CONFIG)
    got, wanted = (from_named_arrays(model.config, x) for x in (stored, plain))
    jax.tree.map(np.testing.assert_array_equal, without_quantised(got), wanted)
    table = "model.layers.0.mlp.gate.tid2eid"  # int8, and no weight
    got = from_named_arrays(model.config, stored | {table: stored[table].astype(np.int8)}, as_stored=False)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize(
    "change, message",
    [
        ({SCALE: None}, r"2.gate_proj.weight is FP4 and needs .*scale_inv of shape \[64, 2\], got none"),
        ({SCALE: np.ones((64, 4), E8M0)}, r"of shape \[64, 2\], got \[64, 4\]"),  # for 16 values, as NVFP4 has them
        # INT4 of the same shapes and names, and bytes that could be numbers.
        ({SCALE: np.ones((64, 2), ml_dtypes.bfloat16)}, "of FP4 must be of float8_e8m0fnu, got bfloat16"),
        ({SCALE: np.ones((64, 2), np.uint8)}, "of FP4 must be of float8_e8m0fnu, got uint8"),
        (
            {GATE.format(2): np.ones((64, 64), np.int8)},
            r"is int8, two FP4 values a byte, and must have shape \[64, 32\], got \[64, 64\]",
        ),
        ({GATE.format(0): np.ones((64, 64), ml_dtypes.bfloat16)}, r"1.gate_proj.weight must be bfloat16 .*, got int8"),
        ({GATE.format(1): np.ones((64, 32), np.uint8)}, "1.gate_proj.weight must be int8 as the experts before it"),
        ({GATE.format(0): np.ones((64, 32), np.uint8)}, r"gate_proj.weight must have shape \[64, 64\], got \[64, 32\]"),
        (
            {"model.layers.1.mlp.shared_experts.up_proj.weight": np.ones((64, 64), np.int8)},
            "shared_experts.up_proj.weight must be of .*, got int8",
        ),
    ],
)
def test_what_could_be_something_else_is_refused(change, message):
    _, stored = quantised(named_arrays(torch_model("v4", torch.bfloat16)), E8M0, fp4_experts=True)
    model = Model.from_config(config("v4").to_dict() | FP4_CONFIG)
    with pytest.raises(ValueError, match=message):
        from_named_arrays(model.config, {name: x for name, x in (stored | change).items() if x is not None})


def test_rows_that_are_no_groups_are_refused():
    module = torch_model("v4", torch.bfloat16)
    _, stored = quantised(named_arrays(module), E8M0, fp4_experts=True)
    model = Model.from_config(module.config.to_dict() | FP4_CONFIG | {"moe_intermediate_size": 48})
    with pytest.raises(
        ValueError, match=r"0\.down_proj.weight is FP4, whose rows must be of a multiple of 32 .*, got 48"
    ):
        from_named_arrays(
            model.config, {n: x for n, x in stored.items() if "gate_proj" not in n and "up_proj" not in n}
        )

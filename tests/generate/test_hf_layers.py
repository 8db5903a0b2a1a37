"""Layers of transformers models over paged caches, against transformers' own eager attention."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import (
    DEVICE,
    MODELS,
    new_engine,
    random_model,
    serve,
    served,
    small_model,
    small_v4_config,
    small_v32_config,
)
from sparse_mla_torch.hf import layers as hf_layers
from sparse_mla_torch.hf.comparison import TorchRun, compare_layers
from sparse_mla_torch.hf.engine import Request
from sparse_mla_torch.hf.replace import selected_indices
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32

from jax_sparse_mla import ForwardMode, TopkTransform

COMPILING = "OPTIMISED"  # see conftest.py
pytestmark = pytest.mark.torch


def as_close_as_bf16_is(report) -> bool:
    """Of one layer's comparison over bf16 caches. A single row tells most: a parameter of the C128 compressor moves
    few of them."""
    return report.cosine >= 0.9999 and report.worst_row >= 0.9998


def cosines(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


@torch.no_grad()
def replay(run, layer, steps_of, *, steps=None):
    """What a layer gives and selects on the rows that it had in `run`, through the steps of another run.

    Returns per request: `[tokens, hidden]`, and a list of sets of positions (None where nothing is selected).
    """
    engine, hidden = steps_of.engine, run.hidden(layer)
    cache, rotary = engine.new_cache(layer), engine.model.model.rotary_emb
    outputs, selected = [[] for _ in hidden], [[] for _ in hidden]
    for step in steps_of.steps if steps is None else steps:
        owner = steps_of.index_of(step)
        rows = torch.stack([hidden[i][p] for i, p in zip(owner, step.positions)])[None]
        at = {"position_ids": torch.from_numpy(step.positions).to(DEVICE)[None]}
        if engine.is_v4:
            embeddings = {kind: rotary(rows, **at, layer_type=kind) for kind in ("main", "compress")}
        else:
            embeddings = rotary(rows, **at)
        out, cache, positions = engine.layers[layer](cache, rows, embeddings, step)
        for i, row in zip(owner, out[0]):
            outputs[i].append(row)
        if positions is not None:
            for i, row in zip(owner, np.asarray(positions)[: step.num_tokens]):
                selected[i].append(set(row[row >= 0].tolist()))
    return [torch.stack(rows) for rows in outputs if rows], selected if selected[0] else None


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_is_what_transformers_runs(name):
    """`eager` on a layer's input is the very output that the unchanged model computes there."""
    model, seen = small_model(name), []
    attentions = [layer.self_attn for layer in model.model.layers]
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, out: seen.append((args[0] if args else kwargs["hidden_states"], out[0])),
            with_kwargs=True,
        )
        for module in attentions
    ]
    try:
        with torch.no_grad(), selected_indices() as chosen:
            model(input_ids=torch.arange(300, device=DEVICE)[None] % 251, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    engine, chosen = new_engine(name), iter(chosen)
    assert len(seen) == len(engine.layers)
    for layer, (hidden, expected) in zip(engine.layers, seen):
        out, positions = layer.eager(hidden, model)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        if layer.has_indexer:
            expected_positions = next(chosen)[0].cpu().numpy()
            causal = (np.arange(300)[:, None] + 1) // max(layer.ratio, 1)
            assert np.array_equal(positions, np.where(expected_positions < causal, expected_positions, -1))
        else:
            assert positions is None


@pytest.mark.long
@pytest.mark.parametrize(("name", "bf16"), [("v4", True), ("v32", True), ("v32", False)])
def test_layers_match_eager(name, bf16):
    """Chunked prefill and decode of a continuous batch, layer by layer, given eager's selection.

    V4's FP8 caches are compared in test_cli.py, by the preset's own check.
    """
    run = served(name, bf16)
    modes = [step.mode for step in run.steps]
    assert modes.count(ForwardMode.EXTEND) >= 6 and modes.count(ForwardMode.DECODE) >= 8
    reports = compare_layers(TorchRun(run.engine), run.requests)
    kinds = ["window", "window + C4 top-16", "window + C128"] if name == "v4" else ["top-64"] * 2
    assert [report.kind for report in reports] == kinds
    for report in reports:
        assert report.passes("bf16" if bf16 else "fp8"), report
        assert as_close_as_bf16_is(report) if bf16 else min(report.cosine, report.worst_row + 0.002) >= 0.999
        assert (report.overlap is not None) == run.engine.layers[report.layer].has_indexer
        if report.overlap is not None:
            assert report.dropping_rows > 300 and report.overlap > 0.97


@pytest.mark.long
def test_the_comparison_notices_a_wrong_parameter():
    """Each parameter that transformers does not apply itself, replaced by its neutral value."""
    run = served("v4", True)
    engine = run.engine
    one, c4, c128 = engine.layers

    def fails(layer, **changes):
        params = layer.params
        layer.params = dataclasses.replace(params, **changes)
        try:
            (report,) = compare_layers(TorchRun(engine), run.requests, [engine.layers.index(layer)])
            return not as_close_as_bf16_is(report)
        finally:
            layer.params = params

    assert not fails(c128)
    assert fails(one, attn_sink=jnp.full_like(one.params.attn_sink, -jnp.inf))
    for layer in (c4, c128):
        for field in ("ape", "norm_weight", "inv_freq"):
            changed = {field: jnp.zeros_like(getattr(layer.params.compressor, field))}
            assert fails(layer, compressor=dataclasses.replace(layer.params.compressor, **changed)), field


@pytest.mark.long
@pytest.mark.cpu  # see STEADY_MODELS
@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_decode_equal_one_prefill(name):
    """The same tokens in one chunk, and in many chunks and decode steps: layer by layer, and to the last token."""
    many = served(name, True)
    whole = serve(
        new_engine(name, bf16_cache=True, chunk_size=640, max_batch=3),
        [Request(request.tokens[:-1], 1) for request in many.requests],
    )
    assert len(whole.steps) == 1 and len(many.steps) > 10
    for layer in range(len(many.engine.layers)):
        expected, expected_selection = replay(many, layer, whole)
        outputs, selection = replay(many, layer, many)
        for a, b in zip(outputs, expected):
            assert a.shape == b.shape and cosines(a, b).min() >= 0.9999
        assert selection == expected_selection
    for i, request in enumerate(many.requests):
        torch.testing.assert_close(whole.logits[i][0], many.logits[i][-1], rtol=0, atol=0.01)
        margin = many.logits[i][-1].topk(2).values.diff().abs()
        assert whole.requests[i].output == request.output[-1:] or margin < 0.02


@pytest.mark.long
@pytest.mark.parametrize(("name", "bf16"), [("v4", True), ("v32", False)])
def test_prefill_backends_agree(name, bf16):
    """Prefill from a gathered bf16 workspace, and from the paged cache. Decode is the same in both."""
    sparse, paged = served(name, bf16), served(name, bf16, "flashmla_kv")
    for run, gathered in ((sparse, True), (paged, False)):
        for step in run.steps:
            ragged = gathered and step.mode is ForwardMode.EXTEND
            if name == "v32":
                assert step.metadata.topk_transform is (TopkTransform.RAGGED if ragged else TopkTransform.PAGED)
                assert (step.metadata.topk_indices_offset is not None) == ragged
            else:
                assert sorted(step.plans) == ([0, 4, 128] if ragged else [])
    for layer in range(len(sparse.engine.layers)):
        expected, expected_selection = replay(sparse, layer, sparse)
        outputs, selection = replay(sparse, layer, paged)
        assert all(cosines(a, b).min() >= 0.9999 for a, b in zip(outputs, expected))
        assert selection == expected_selection


def test_bf16_v32_prefill_is_paged():
    assert {step.metadata.topk_transform for step in served("v32", True).steps} == {TopkTransform.PAGED}


def one_c128_layer(**changes):
    layers = {"num_hidden_layers": 1, "layer_types": ["heavily_compressed_attention"], "mlp_layer_types": ["moe"]}
    return small_v4_config(**layers, **changes)


@pytest.mark.long
def test_the_compressor_takes_the_model_s_epsilon():
    run = served("v4", True)
    layer = run.engine.layers[2]
    other = random_model(one_c128_layer(rms_norm_eps=0.5), 0).to(DEVICE).model.layers[0].self_attn
    assert hf_layers.V4Layer(other, run.engine.spec, 128).params.compressor.norm_eps == 0.5
    first_chunks = run.steps[:2]  # 224 tokens: one entry
    expected = replay(run, 2, run, steps=first_chunks)[0][0]
    params = layer.params
    layer.params = dataclasses.replace(params, compressor=dataclasses.replace(params.compressor, norm_eps=1.0))
    try:
        out = replay(run, 2, run, steps=first_chunks)[0][0]
    finally:
        layer.params = params
    assert torch.equal(out[:127], expected[:127]) and cosines(out[127:], expected[127:]).min() < 0.9998


def test_a_compressor_with_a_magnitude_is_refused():
    config = one_c128_layer()
    config.rope_parameters["compress"]["attention_factor"] = 1.25
    model = random_model(config, 0).to(DEVICE)
    spec = served("v4", True).engine.spec
    with pytest.raises(ValueError, match=r"attention_factor 1, got 1\.25"):
        hf_layers.V4Layer(model.model.layers[0].self_attn, spec, 128)


# Why layers are compared with eager's own selection: transformers' V3.2 does not always agree with itself.


@dataclasses.dataclass
class Selection:
    """What a V3.2 indexer did at one position: its scores of the visible keys, and the keys it selected."""

    scores: torch.Tensor
    selected: set[int]


def record_selections(monkeypatch, stable):
    """Records every selection of transformers' V3.2 indexers, `{layer: {position: Selection}}`, while they run.

    stable: ties go to the lower index, instead of where `torch.topk` puts them.
    """
    seen = {0: {}, 1: {}}
    forward = v32.DeepseekV32Indexer.forward

    def record(self, *args, **kwargs):
        def topk_of_scores(scores, k, dim):
            if stable:
                values, indices = (x[..., :k] for x in scores.sort(dim=dim, descending=True, stable=True))
            else:
                values, indices = torch.topk(scores, k, dim=dim)  # the method is patched
            for row, chosen in zip(scores[0], indices[0]):
                position = len(seen[self.layer_idx])
                seen[self.layer_idx][position] = Selection(row[: position + 1].clone(), set(chosen.tolist()))
            return torch.return_types.topk((values, indices))

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", topk_of_scores)
            return forward(self, *args, **kwargs)

    monkeypatch.setattr(v32.DeepseekV32Indexer, "forward", record)
    return seen


def generate_and_score(monkeypatch, seed, stable):
    """A tiny float32 V3.2 generates with its cache, and then reads the whole text at once."""
    config = small_v32_config(vocab_size=260, index_n_heads=4, index_topk=8, rope_parameters=None)
    torch.manual_seed(seed)
    model = v32.DeepseekV32ForCausalLM(config).float().eval()
    prompt = torch.randint(0, 260, (1, 60))
    with torch.no_grad(), monkeypatch.context() as patch:
        decoding = record_selections(patch, stable)
        options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        text = model.generate(prompt, **options, pad_token_id=0, eos_token_id=None)
    with torch.no_grad(), monkeypatch.context() as patch:
        reading = record_selections(patch, stable)
        chosen = model(text).logits[0, 59:-1].argmax(-1)
    return decoding, reading, int((chosen == text[0, 60:]).sum())


def test_transformers_v32_breaks_exact_ties_by_the_width_of_the_scores(monkeypatch):
    """Index scores are sums of relu: with few heads some keys score exactly 0. Which of them `torch.topk` takes
    depends on how many columns there are, so decode and one forward pass select different keys, and can differ
    in a token by more than rounding."""
    ties = differing_tokens = 0
    for seed in (0, 1):
        decoding, reading, agreeing = generate_and_score(monkeypatch, seed, stable=False)
        differing_tokens += 16 - agreeing
        for position, once in reading[0].items():  # the first layer: both have the same input
            if position not in decoding[0]:
                continue  # the last token is not decoded any more
            again = decoding[0][position]
            torch.testing.assert_close(again.scores, once.scores, rtol=0, atol=1e-6)
            if position >= 7:  # no key of the future is selected once there are enough others
                assert max(once.selected) <= position and max(again.selected) <= position
            for key in (once.selected ^ again.selected) & set(range(position + 1)):
                assert once.scores[key] == again.scores[key] == 0
                ties += 1
    assert ties > 0 and differing_tokens > 0


def test_transformers_v32_agrees_with_itself_where_ties_have_an_order(monkeypatch):
    for seed in (0, 1):
        decoding, reading, agreeing = generate_and_score(monkeypatch, seed, stable=True)
        assert agreeing == 16
        assert all(decoding[0][p].selected == reading[0][p].selected for p in decoding[0] if p >= 7)

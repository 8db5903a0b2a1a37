"""transformers' models in use by our kernels: logits and tokens of eager attention, in memory without its squares."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import sparse_mla_torch
from compiled_facts import ARCHITECTURES, LEAST_SHARED_MEMORY, compiled_facts
from hf_models import CONFIGS, DEVICE, random_model, random_tokens, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_mla_torch.attention import prefill
from sparse_mla_torch.transformers import dsa, select, use, v4
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from triton_device import DEVICE as TRITON_DEVICE

pytestmark = pytest.mark.torch

MODELS = "v32", "glm5", "v4"
LENGTH = 200  # V3.2 and GLM-5 select 64 entries; V4's window has 128, and it selects 16 of 50 entries
EACH = pytest.mark.parametrize("name", MODELS)
FLOAT32 = pytest.mark.cpu  # in which kernels do not compute


def float32_model(name):
    return copy.deepcopy(small_model(name)).float()


@pytest.fixture(scope="module")
def models():
    return {name: float32_model(name) for name in MODELS}


def batch_of(rows, length=LENGTH):
    return torch.tensor([random_tokens(length, seed) for seed in range(rows)])


@torch.no_grad()
def run(model, tokens, cuts=(), mask=None):
    """The logits of all tokens, in chunks that begin at these positions, with a cache; positions as `generate`'s."""
    cache, logits, options = DynamicCache(config=model.config), [], {}
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for start, stop in zip((0, *cuts), (*cuts, tokens.shape[1])):
        if mask is not None:
            options |= {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits.append(model(tokens[:, start:stop], cache=cache, **options).logits)
    return torch.cat(logits, 1)


def left_padding(tokens, *counts):
    mask = torch.ones_like(tokens)
    for row, count in zip(mask, counts):
        row[:count] = 0
    return mask


def assert_close(ours, eager, mask=None):
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours[real], eager[real], rtol=1e-4, atol=1e-4)


# --- the same as eager ----------------------------------------------------------------------------


@FLOAT32
@EACH
@torch.no_grad()
def test_logits_are_eager_s(name, models):
    model, tokens = models[name], batch_of(2)
    eager = model(tokens, use_cache=False).logits
    with use(model):
        assert_close(model(tokens, use_cache=False).logits, eager)
        assert_close(run(model, tokens), eager)


@FLOAT32
@pytest.mark.always("v4")
@EACH
@settings(max_examples=3, deadline=None)
@given(
    st.sets(st.integers(1, LENGTH - 1), max_size=3), st.sampled_from(["left", "right", "holes"]), st.integers(75, 150)
)
def test_chunks_and_padding(name, models, cuts, side, padding):
    """Chunks of any sizes, the last of one token, in a batch in which one row is padded, wherever."""
    model, tokens = models[name], batch_of(2)
    mask = left_padding(tokens, padding)
    if side == "right":
        mask = mask.flip(1)
    elif side == "holes":
        mask[0, ::3] = 1
    cuts = sorted(cuts | {LENGTH - 1})
    eager = run(model, tokens, cuts, mask)
    with use(model):
        assert_close(run(model, tokens, cuts, mask), eager, mask)


@FLOAT32
@pytest.mark.always("v4")
@EACH
def test_generated_tokens_are_eager_s(name, models):
    model, tokens = models[name], batch_of(3)
    options = {"attention_mask": left_padding(tokens, 0, 67, 130), "do_sample": False, "pad_token_id": 0}
    for more in ({"max_new_tokens": 6}, {"max_new_tokens": 2, "num_beams": 2}):
        eager = model.generate(tokens, **options, **more)
        with use(model):
            ours = model.generate(tokens, **options, **more)
        assert torch.equal(ours, eager), more


@FLOAT32
@pytest.mark.always("v4")
@EACH
@torch.no_grad()
def test_a_cache_goes_on_after_undo(name, models):
    model, tokens = models[name], batch_of(1)
    eager = run(model, tokens, [150])
    cache = DynamicCache(config=model.config)
    with use(model):
        model(tokens[:, :150], cache=cache)
    assert_close(model(tokens[:, 150:], cache=cache).logits, eager[:, 150:])


@FLOAT32
@pytest.mark.always("v4")
@EACH
@torch.no_grad()
def test_blocks_of_rows(name, models, monkeypatch):
    model, tokens = models[name], batch_of(2)
    mask = left_padding(tokens, 40)
    eager = model(tokens, attention_mask=mask).logits
    monkeypatch.setattr(select, "_MOST_ROWS", 2 * 48)
    with use(model):
        assert_close(model(tokens, attention_mask=mask).logits, eager, mask)


@FLOAT32
@torch.no_grad()
def test_an_adapter_on_the_latent_projection(models):
    """kv_b_proj is absorbed into queries and outputs, whatever module it is."""

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0.3 * x.sum(-1, keepdim=True) * torch.linspace(-1, 1, self.out_features)

    model, tokens = copy.deepcopy(models["v32"]), batch_of(1)
    before = model(tokens).logits
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Adapted
    eager = model(tokens).logits
    assert (eager - before).abs().max() > 0.01
    with use(model):
        assert_close(model(tokens).logits, eager)


@pytest.mark.always("v4")
@EACH
@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_eager(name):
    """Without choices between near scores, of which rounding makes others: all entries and all experts."""
    everything = {"index_topk": 256, "num_experts_per_tok": 4}
    model = random_model(CONFIGS[name](**everything), seed=1).to(DEVICE)
    tokens = batch_of(2).to(DEVICE)
    exact = copy.deepcopy(model).float()(tokens).logits
    eager = (model(tokens).logits - exact).abs()
    with use(model):
        ours = (model(tokens).logits - exact).abs()
    assert ours.mean() < 1.2 * eager.mean() and ours.max() < 2 * eager.max()


@pytest.mark.always("v4")
@EACH
@torch.no_grad()
def test_steps_in_bfloat16_are_those_of_the_whole_prompt(name):
    """In a batch and alone, with and without padding: but for near choices, of which rounding makes others."""
    model = random_model(CONFIGS[name](num_experts_per_tok=4), seed=2).to(DEVICE)
    tokens = batch_of(2).to(DEVICE)
    mask = left_padding(tokens, 30)
    with use(model):
        for rows, seen in ((tokens, None), (tokens[1:], None), (tokens, mask)):
            positions = None if seen is None else (seen.cumsum(1) - 1).clamp(min=0)
            whole = model(rows, attention_mask=seen, position_ids=positions, use_cache=False).logits[:, 150:]
            steps = run(model, rows, range(150, LENGTH), seen)[:, 150:]
            apart = (steps - whole).float().abs().mean() / whole.float().std()
            assert apart < 0.05, apart


# --- memory -----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@FLOAT32
@pytest.mark.always("v4")
@EACH
@torch.no_grad()
def test_no_tensor_has_the_square_of_the_tokens(name, models, monkeypatch):
    monkeypatch.setattr(select, "_SCRATCH_BYTES", 2**19)
    monkeypatch.setattr(select, "_MOST_ROWS", 32)

    def growth():
        """How the largest tensor grows with twice the tokens."""
        elements = []
        for length in (400, 800):
            with Largest() as mode:
                models[name](batch_of(1, length), use_cache=False, logits_to_keep=1)
            elements.append(mode.elements)
        return elements[1] / elements[0]

    assert growth() > 3
    with use(models[name]):
        assert growth() < 2.3


# --- the host's work --------------------------------------------------------------------------------

# Operations that launch nothing.
VIEWS = {"view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "split_with_sizes", "t"}
VIEWS |= {"transpose", "permute", "detach", "alias", "unbind", "empty", "new_empty", "empty_like"}
VIEWS.add("constant_pad_nd")  # launches, but not on a GPU


class Launches(TorchDispatchMode):
    """The operations that a GPU would launch a kernel for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        self.names += [name] * (name not in VIEWS)
        return function(*args, **(kwargs or {}))


@FLOAT32
@pytest.mark.always("v4")
@pytest.mark.parametrize(
    ("name", "most"), [("v32", (32, 27)), ("glm5", (32, 15, 27)), ("v4", (35, 90, 43))], ids=MODELS
)
@torch.no_grad()
def test_launches_of_a_decode_step(name, most, models, monkeypatch):
    """Of each layer's attention: what layers share is made by the first one. Here one operation stands for what is one
    kernel on a GPU."""

    def selected(q, weights, keys, lengths, topk, *_):
        q.sum()  # for the scores
        return lengths.new_zeros(*lengths.shape, topk)

    model, tokens = models[name], batch_of(1)
    monkeypatch.setattr(prefill, "attend", lambda q, *_: (q.new_zeros(*q.shape[:2], 512),))
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, *_: x.clone())
    for module in (dsa, v4):
        monkeypatch.setattr(module, "select", selected)
    layers = [layer.self_attn for layer in model.model.layers]
    with use(model):
        cache, launches = DynamicCache(config=model.config), Launches()
        model(tokens[:, : LENGTH - 1], cache=cache)
        before, counts = [], []
        hooks = [x.register_forward_pre_hook(lambda *_: before.append(len(launches.names))) for x in layers]
        hooks += [x.register_forward_hook(lambda *_: counts.append(len(launches.names) - before[-1])) for x in layers]
        with launches:
            model(tokens[:, LENGTH - 1 :], cache=cache, attention_mask=torch.ones_like(tokens))
        for hook in hooks:
            hook.remove()
    assert all(count <= bound for count, bound in zip(counts, most, strict=True)), counts
    # The mask's last look at the device is the step's only wait.
    assert launches.names.count("_local_scalar_dense") <= 1 and "nonzero" not in launches.names


def tensors_of(cache):
    """What a cache holds, by layer and name, with copies of it."""
    held = [(layer, name, x) for layer in cache.layers for name, x in vars(layer).items()]
    return [(layer, name, x, x.clone()) for layer, name, x in held if isinstance(x, torch.Tensor)]


@FLOAT32
@pytest.mark.always("v4")
@EACH
@torch.no_grad()
def test_rows_of_a_cache_are_written_once(name, models):
    """Whoever holds a cache's tensors, or a copy of the cache, holds what they were."""
    model, tokens = models[name], batch_of(2)
    expected = model(tokens, use_cache=False).logits
    with use(model):
        cache = DynamicCache(config=model.config)
        model(tokens[:, :180], cache=cache)
        before = tensors_of(cache)
        # The same layers in other objects, whose tensors are the first cache's.
        alike = copy.copy(cache)
        alike.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in alike.layers:
            vars(layer).update({key: dict(x) for key, x in vars(layer).items() if isinstance(x, dict)})
        deep = copy.deepcopy(cache)
        for each in (alike, deep, cache):  # other tokens, then the true ones
            step = tokens[:, 180:190] if each is cache else tokens[:, 180:190].flip(0)
            got = model(step, cache=each).logits
        assert_close(got, expected[:, 180:190])
        assert all(torch.equal(x, was) for *_, x, was in before)
        # Beams change places, and come back by the tensors that there were.
        kept_before = tensors_of(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(tokens[:, 190:195].flip(0), cache=cache).logits
        assert_close(swapped, expected[:, 190:195].flip(0))
        assert all(torch.equal(x, was) for *_, x, was in kept_before)


@FLOAT32
@pytest.mark.parametrize("name", ["v32", "glm5"])
def test_a_step_copies_no_rows_but_its_own(name, models):
    model, tokens = models[name], batch_of(2)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    with use(model):
        with torch.inference_mode():
            model(tokens[:, :150], cache=cache)
        with torch.no_grad():  # where what inference mode made is not written to
            model(tokens[:, 150:160], cache=cache)
            at = [layer.keys.data_ptr() for layer in cache.layers]
            for i in range(160, 180):
                logits = model(tokens[:, i : i + 1], cache=cache).logits
            assert_close(logits, expected[:, 179:180])
            assert [layer.keys.data_ptr() for layer in cache.layers] == at
            cache.crop(-10)
            assert_close(model(tokens[:, 170:175], cache=cache).logits, expected[:, 170:175])
            assert [layer.keys.data_ptr() for layer in cache.layers] != at
        grown = model(tokens[:, 175:180], cache=cache).logits  # with gradients
        assert_close(grown, expected[:, 175:180])
        grown.sum().backward()
        model.zero_grad()
        with torch.no_grad():
            cache.layers[0].keys = cache.layers[0].keys.detach()
            assert_close(model(tokens[:, 180:], cache=cache).logits, expected[:, 180:])


# --- what is refused, and undone ------------------------------------------------------------------


@pytest.mark.always("v4")
@EACH
def test_undo(name):
    model, tokens = copy.deepcopy(small_model(name)), batch_of(1, 60).to(DEVICE)
    with torch.no_grad():
        before = model(tokens).logits
        classes = [type(module) for module in model.modules()]
        handle = sparse_mla_torch.transformers.use(model)
        with pytest.raises(ValueError, match="in use already"):
            use(model)
        other = copy.deepcopy(model)
        handle.undo()
        handle.undo()
        assert [type(module) for module in model.modules()] == classes and not model.model._forward_pre_hooks
        assert torch.equal(model(tokens).logits, before)
        with pytest.raises(KeyError), use(model):
            raise KeyError
        assert torch.equal(model(tokens).logits, before)
        # A copy stays in use, and what was undone before undoes nothing.
        with use(model):
            handle.undo()
            assert torch.equal(other(tokens).logits, model(tokens).logits)


@pytest.mark.always("v4")
@EACH
def test_calls_that_are_refused(name):
    model, tokens = copy.deepcopy(small_model(name)), batch_of(1, 20).to(DEVICE)
    two = torch.arange(10, device=DEVICE).repeat(2)[None]
    refused = [
        ("output_attentions", {"output_attentions": True}),
        ("attention_mask must be", {"attention_mask": torch.ones(1, 1, 20, 20, device=DEVICE)}),
        ("static cache", {"attention_mask": {"indexed_attention": torch.ones(1, 1, 20, 20, device=DEVICE)}}),
        ("DynamicCache, got StaticCache", {"cache": StaticCache(config=small_model("v32").config, max_cache_len=64)}),
        ("packed", {"position_ids": two, "use_cache": False}),
    ]
    cache = DynamicCache(config=model.config)
    with use(model), torch.no_grad():
        for match, options in refused:
            with pytest.raises(ValueError, match=match):
                model(tokens, **{"cache": None if "use_cache" in options else cache, **options})
        model.train()
        model.config.attention_dropout = 0.1
        with pytest.raises(ValueError, match="attention_dropout"):
            model(tokens, cache=cache)
        assert cache.get_seq_length() == 0
        model.eval()
        if name != "v4":  # which refuses it itself
            with pytest.raises(ValueError, match="static cache"):
                model.generate(tokens, max_new_tokens=2, cache_implementation="static", pad_token_id=0)


def test_models_that_are_refused(monkeypatch):
    with pytest.raises(TypeError, match="got Linear"):
        use(torch.nn.Linear(2, 2))
    model = copy.deepcopy(small_model("v32"))
    with pytest.raises(TypeError, match=r"of torch.bfloat16.*, got torch.float16"):
        use(model.half())
    model.bfloat16()
    monkeypatch.setattr(model.config, "kv_lora_rank", 256)
    with pytest.raises(ValueError, match="kv_lora_rank 512, got 256"):
        use(model)
    monkeypatch.undo()
    attention = model.model.layers[1].self_attn
    attention.forward = attention.forward
    with pytest.raises(ValueError, match="hooks"):
        use(model)
    assert not any("Sparse" in type(module).__name__ for module in model.modules())
    monkeypatch.setattr(model.config, "model_type", "llama")
    with pytest.raises(TypeError, match="got llama"):
        use(model)


@FLOAT32
@pytest.mark.always("v4")
@EACH
def test_gradients_are_eager_s(name, models):
    model, tokens = models[name].train(), batch_of(2, 150)
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    eager = {of: x.grad for of, x in model.named_parameters()}
    model.zero_grad()
    with use(model):
        model(tokens, labels=tokens).loss.backward()
    model.eval()
    compared = 0
    for of, parameter in model.named_parameters():
        if eager[of] is not None and eager[of].any():
            scale = eager[of].abs().max()
            torch.testing.assert_close(parameter.grad / scale, eager[of] / scale, rtol=0, atol=1e-3, msg=of)
            compared += "self_attn" in of
    assert compared > 10


# --- selection --------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 24), st.integers(0, 99))
def test_selected_entries(rows, columns, topk, seed):
    random, topk = torch.Generator().manual_seed(seed), min(topk, columns - 1)
    q, keys = torch.randn(2, rows, 8, 16, generator=random), torch.randn(2, columns, 16, generator=random)
    weights = torch.rand(2, rows, 8, generator=random)
    lengths = torch.randint(0, columns + 1, (2, rows), generator=random, dtype=torch.int32)
    seen = torch.rand(2, columns, generator=random) < 0.7 if seed % 2 else None
    first = torch.full((2 * rows,), 7, dtype=torch.int32) if seed % 3 else None
    roomy = torch.nn.functional.pad(keys, (0, 0, 0, seed % 4), value=torch.nan)
    indices = select.select(q, weights, roomy, lengths, topk, seen, first)
    everything = select.leading(lengths, columns, seen)
    scores = (torch.einsum("brhd,bcd->brhc", q, keys).relu() * weights[..., None]).sum(2)
    for b in range(2):
        for r in range(rows):
            entries = [c for c in range(lengths[b, r]) if seen is None or seen[b, c]]
            best = sorted(entries, key=lambda c: -scores[b, r, c])[:topk]
            got = indices[b, r] if seen is not None else indices[b, r, : lengths[b, r]]
            assert sorted(got[got >= 0].tolist()) == sorted(c + 7 * (first is not None) for c in best)
            assert [c for c in everything[b, r].tolist() if c >= 0] == entries


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_the_kernel_scores_as_the_plain_code(rows):
    from sparse_mla_torch.transformers import scores

    random = torch.Generator().manual_seed(rows)
    q, keys = torch.randn(2, rows, 5, 32, generator=random), torch.randn(2, 150, 32, generator=random)
    weights = torch.randn(2, rows, 5, generator=random)
    lengths = torch.randint(0, 151, (2, rows), generator=random, dtype=torch.int32)
    lengths[1] //= 8  # a block that no row of the tile sees
    arrays = [x.to(TRITON_DEVICE) for x in (q.bfloat16(), weights, keys.bfloat16(), lengths)]
    arrays[2] = torch.nn.functional.pad(arrays[2], (0, 0, 0, 9), value=torch.nan)[:, :150]  # a cache with room
    got = scores.index_scores(*arrays).cpu()
    expected = select.index_scores(q.bfloat16().float(), weights, keys.bfloat16().float(), lengths)
    seen = torch.arange(150) < lengths[..., None]
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-4)


@ARCHITECTURES
def test_the_kernel_compiles(capabilities, tmp_path):
    for fact in compiled_facts("transformers", tmp_path, capabilities):
        assert fact["shared"] <= LEAST_SHARED_MEMORY and fact["bf16_products"], fact
        assert fact["wgmma"] == (fact["capability"] == 90 and "2048" in fact["kernel"]), fact

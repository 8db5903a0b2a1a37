"""DSpark's drafter: its drafts are an oracle's, an engine that drafts by it chooses as plain decoding does, and its
released tensors are read."""

import collections
import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support.draft_layers import randomise
from support.dspark_oracle import Oracle, Sizes, config_keys, random_tensors
from support.hf_models import named_arrays, random_model, random_tokens, small_v4_config
from support.released_checkpoints import FP4_CONFIG, from_fp4, to_fp4, to_fp8, without_quantised, write

from jax_sparse_mla.serving import Model, load
from jax_sparse_mla.serving.dspark import forget
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.quantised import WeightFormat
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.step import changes_ahead

SIZES = Sizes()
MARKOV = 0.55
ROWS = 3  # of the drafter's state


def config(sizes=SIZES, **changes):
    """A model of three layers, as the released config has it."""
    fields = dict(model_type="deepseek_v4", vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, head_dim=512)
    fields |= dict(num_attention_heads=sizes.heads, q_lora_rank=sizes.rank, o_groups=sizes.groups)
    fields |= dict(o_lora_rank=sizes.rank, moe_intermediate_size=sizes.width, n_routed_experts=sizes.experts)
    fields |= dict(num_experts_per_tok=sizes.chosen, num_hidden_layers=3, num_hash_layers=0, index_n_heads=16)
    fields |= dict(index_topk=16, qk_rope_head_dim=64, sliding_window=128, hc_mult=4, num_nextn_predict_layers=1)
    fields |= dict(compress_ratios=[0, 4, 128] + [0] * len(sizes.targets), rope_theta=10000, index_head_dim=128)
    fields["rope_scaling"] = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    return fields | config_keys(sizes) | changes


def text_model(seed=0):
    """Random float32 arrays of the model alone."""
    arrays = Model.from_config(config()).random_arrays(seed)
    return {name: x if x.dtype == np.int32 else x.astype(np.float32) for name, x in arrays.items()}


def oracle(sizes, arrays, tensors):
    return Oracle(sizes, tensors, arrays["embed_tokens.weight"], arrays["lm_head.weight"])


def test_drafts_are_the_oracles():
    """Of texts shorter and longer than the window, read in chunks, with rejected rows, gaps, other drafts, and a block
    longer than it was trained with; a row that begins anew sees nothing of the text before."""
    arrays, tensors = text_model(), random_tensors(SIZES, 1)
    model = Model.from_config(config())
    params = model.from_named_arrays(arrays | tensors)
    reference, rng = oracle(SIZES, arrays, tensors), np.random.default_rng(2)
    hidden = rng.standard_normal((ROWS, 400, len(SIZES.targets) * SIZES.hidden)).astype(np.float32)
    hidden *= np.linspace(0.5, 2, 400)[:, None]  # a row in another's place shows
    keep, propose = jax.jit(model.keep), jax.jit(model.propose)
    draft = model.new_draft(params, max_requests=ROWS, num_pages=2, num_swa_pages=2, bf16=True)

    def extend(draft, parts, width=256):
        """Rows of several requests, and padding of NaN; {row: (start, count, how many of them stay)}."""
        row_of, positions = np.full(width, ROWS + 1), np.zeros(width, int)
        states, at = np.full((width, hidden.shape[-1]), np.nan, np.float32), 0
        for row, (start, count, _) in parts.items():
            row_of[at : at + count], positions[at : at + count] = row, np.arange(start, start + count)
            states[at : at + count] = hidden[row, start : start + count]
            at += count
        padded = [(row, start, start + kept) for row, (start, _, kept) in parts.items()]
        padded += [(ROWS, 0, 0)] * (ROWS - len(padded))
        return keep(params, draft, states, *(jnp.asarray(x, jnp.int32) for x in (row_of, positions, *zip(*padded))))

    def check(draft, starts, forced=None, count=SIZES.block, begins=(0,) * ROWS):
        proposals = np.full((ROWS, count), -1) if forced is None else np.array(forced)
        anchors = rng.integers(0, 250, ROWS)
        arguments = [jnp.asarray(x, jnp.int32) for x in (np.arange(ROWS), anchors, starts, proposals)]
        got = np.asarray(propose(params, draft, *arguments))
        for row in range(ROWS):
            # What lies before the first position that is known is as a window's end.
            seen = dataclasses.replace(SIZES, window=min(SIZES.window, starts[row] - begins[row]))
            of_row = oracle(seen, arrays, tensors) if begins[row] else reference
            wanted, logits = of_row.draft(hidden[row, : starts[row]], anchors[row], count, proposals[row])
            best = np.sort(logits, -1)
            assert (best[:, -1] - best[:, -2]).min() > 1e-4 and got[row].tolist() == wanted

    draft = extend(draft, {0: (0, 100, 100), 2: (0, 20, 20)})
    draft = extend(draft, {0: (100, 210, 210), 2: (20, 5, 5)})
    draft = extend(draft, {1: (0, 128, 128)})
    check(draft, [310, 128, 25])
    draft = extend(draft, {0: (310, 6, 1), 1: (128, 6, 6), 2: (25, 6, 3)})  # verified rows, of which some stay
    check(draft, [311, 134, 28], forced=[[-1, 7, -1, -1, 9], [3, -1, -1, -1, -1], [-1] * 5])
    check(draft, [311, 134, 28], count=7)
    check(draft, [311, 134, 28], count=2)
    # Positions 28 to 39 were decoded without drafts, and row 0 goes to another request, which begins at 256.
    draft = extend(draft, {2: (40, 30, 30)})
    hidden[0] = np.nan  # the request before ended by it
    draft = extend(draft, {0: (350, 30, 30)})  # places that the next one leaves
    hidden[0] = rng.standard_normal(hidden[0].shape)
    draft = extend(forget(draft, jnp.array([0, ROWS])), {0: (256, 90, 90)})
    check(draft, [346, 134, 70], begins=(256, 0, 40))
    # Row 1 goes back to an earlier token.
    draft = extend(draft, {1: (130, 8, 8)})
    check(draft, [346, 138, 70], begins=(256, 0, 40))


def as_released(tensors):
    """The tensors in bfloat16 with experts in FP4 and other products in FP8, and the same values without."""
    plain = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    stored = dict(plain)
    for name in tensors:
        scale = name.removesuffix("weight") + "scale"
        if ".ffn.experts." in name:
            stored[name], stored[scale] = to_fp4(plain[name].astype(np.float32))
            plain[name] = from_fp4(stored[name], stored[scale]).astype(ml_dtypes.bfloat16)
        elif re.search(r"(attn\.w\w+|shared_experts\.w\d|main_proj)\.weight$", name):
            stored[name], stored[scale] = to_fp8(plain[name].astype(np.float32), ml_dtypes.float8_e8m0fnu)
            wide = np.repeat(np.repeat(stored[scale].astype(np.float32), 128, 0), 128, 1)
            wide = wide[: plain[name].shape[0], : plain[name].shape[1]]
            plain[name] = (stored[name].astype(np.float32) * wide).astype(ml_dtypes.bfloat16)
    return plain, stored


def test_a_released_checkpoint(tmp_path):
    """FP8 and FP4 stay as stored; what the drafter shares with the model and how sure it is are left out."""
    text = {name: x if x.dtype == np.int32 else x.astype(ml_dtypes.bfloat16) for name, x in text_model().items()}
    plain, stored = as_released(random_tensors(SIZES, 1))
    stored |= {f"mtp.{i}.{name}.weight": np.zeros((2, 2), np.float16) for i in (0, 1) for name in ("embed", "head")}
    folder = write(tmp_path / "released", config(**FP4_CONFIG), text | stored)
    model, params = load(folder)
    wanted = model.from_named_arrays(text | plain)
    jax.tree.map(np.testing.assert_array_equal, without_quantised(params), wanted)
    random = jax.eval_shape(lambda: model.init_params(0, draft_layer=True))
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), random, wanted)
    first, second = (stage.weights for stage in params.draft.stages)
    for weight in (params.draft.target_proj, first.attention.in_proj, second.attention.o_b, second.mlp.shared_down):
        assert weight.format is WeightFormat.FP8
    assert first.mlp.gate_up.format is second.mlp.down.format is WeightFormat.FP4
    for without in (load(folder, draft_layer=False)[1], model.from_named_arrays(text)):
        jax.tree.map(np.testing.assert_array_equal, without, dataclasses.replace(params, draft=None))
    # Without the config's word, and with a block of 0 tokens, it is none.
    for other in (config(dspark_block_size=None), config(dspark_block_size=0)):
        assert Model.from_config(other).from_named_arrays(text | plain).draft is None
    del plain["mtp.1.markov_head.markov_w2.weight"]
    with pytest.raises(ValueError, match=r"missing: draft\.1\.markov_head\.markov_w2\.weight; unknown: draft\.2\.norm"):
        model.from_named_arrays(text | plain | {"mtp.2.norm.weight": np.ones(SIZES.hidden, np.float32)})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dspark_target_layer_ids": [1, 3]}, "dspark_target_layer_ids must be of the 3 layers, in order, got"),
        ({"dspark_target_layer_ids": [2, 0]}, "in order, got"),
        ({"dspark_target_layer_ids": "all"}, "dspark_target_layer_ids must be a list of integers"),
        ({"dspark_target_layer_ids": None}, "the config has no dspark_target_layer_ids"),
        ({"dspark_noise_token_id": 256}, "dspark_noise_token_id must be below 256, got 256"),
        ({"dspark_block_size": -1}, "dspark_block_size must be an integer from 0 on"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank must be a positive integer"),
    ],
)
def test_a_config_that_is_not_read(change, message):
    with pytest.raises(ValueError, match=message):
        Model.from_config(config(**change))


class Text:
    """A float32 model of transformers with a random drafter. A token decides most of what comes next, its number and
    one, for both; the rest decides how often they agree.

    Two layers of one kind, which a loop takes together on a CPU, and two whose output the drafter reads.
    """

    def __init__(self):
        self.sizes = dataclasses.replace(SIZES, markov=SIZES.hidden, targets=(2, 3))
        kinds = {"layer_types": ["sliding_attention"] * 4, "mlp_layer_types": ["moe"] * 4}
        self.module = random_model(small_v4_config(num_hidden_layers=4, **kinds), seed=0).float()
        randomise(self.module, 0, echo=0.25)
        self.module.lm_head.weight.data = self.module.model.embed_tokens.weight.data.roll(1, 0)
        arrays, tensors = named_arrays(self.module), random_tensors(self.sizes, 1)
        embedding, unembedding = arrays["model.embed_tokens.weight"], arrays["lm_head.weight"]
        tensors["mtp.1.markov_head.markov_w1.weight"] = embedding
        tensors["mtp.1.markov_head.markov_w2.weight"] = unembedding * MARKOV
        self.model = Model.from_config(self.module.config.to_dict() | config_keys(self.sizes))
        self.params = self.model.from_named_arrays(arrays | tensors)
        self.oracle = Oracle(self.sizes, tensors, embedding, unembedding)

    @torch.no_grad()
    def run(self, tokens):
        """Logits `[n, vocabulary]`, and what the drafter reads `[n, targets * hidden]`."""
        outputs, layers = [], self.module.model.layers
        hooks = [layers[i].register_forward_hook(lambda *a: outputs.append(a[-1][0].mean(1))) for i in (2, 3)]
        logits = self.module(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        for hook in hooks:
            hook.remove()
        return logits, torch.cat(outputs, -1).numpy()

    def serve(self, engine, requests):
        """Serves them; the drafts of each round, by request and number of tokens known."""
        drafts, propose = {}, jax.jit(self.model.propose)

        def on_step(_, requests):
            for i, request in enumerate(requests):
                if request.row is not None and not request.in_prefill:
                    known = len(request.tokens)
                    numbers = jnp.array([[request.row], request.tokens[-1:], [known - 1]])
                    none = jnp.full((1, engine.drafts), -1)
                    drafts[i, known] = propose(engine.params, engine.state.draft, *numbers, none)[0].tolist()

        engine.run(requests, on_step)
        return drafts


def test_an_engine_drafts_by_it():
    """Of requests that are read in chunks and decoded together, one in the row of another: drafts are the oracle's,
    those are kept that the model chose too, and tokens are transformers'."""
    text = Text()
    options = EngineOptions(chunk_size=16, max_batch=2, max_len=320, bf16_cache=True, speculative_steps=3)
    engine = Engine(text.model, text.params, options)
    assert engine.drafter == "block drafter"
    requests = [Request(random_tokens(n, n), new) for n, new in ((150, 24), (10, 20), (33, 20))]
    drafts, kept = text.serve(engine, requests), collections.Counter()
    for i, request in enumerate(requests):
        tokens, known = request.tokens, len(request.prompt) + 1
        logits, hidden = text.run(tokens[:-1])
        assert logits[known - 2 :].argmax(-1).tolist() == request.output
        while known < len(tokens):
            wanted, _ = text.oracle.draft(hidden[: known - 1], tokens[known - 1], 3)
            assert drafts[i, known] == wanted
            right = [a == b for a, b in zip(wanted, tokens[known:-1])] + [False]
            kept[right.index(False)] += 1
            known += 1 + right.index(False)
    assert engine.accepted == kept and len(kept) > 2


def test_a_step_knows_which_requests_begin():
    """Of pages that are mapped before it, none is a request's first."""
    mapped = np.array([(row, index, 9, 9) for row in (2, 0) for index in range(70)])
    plan = SimpleNamespace(mapped=mapped)
    ahead = changes_ahead(plan, room=3, num_table_rows=4).reshape(-1, 4)
    assert plan.mapped[:, :2].tolist() == [[2, 0], [0, 0], [2, 1]]
    whole = np.concatenate([plan.mapped, ahead[ahead[:, 0] < 4]])
    assert sorted(whole.tolist()) == sorted(mapped.tolist())


@pytest.mark.long
def test_drafts_change_no_token():
    """Greedy and drawn tokens are those of plain decoding: with a part of a block and more than one, after plain
    decoding, a reused prefix, and requests whose pages were taken."""
    text = Text()
    options = EngineOptions(chunk_size=32, max_batch=3, max_len=512, bf16_cache=True, speculative_steps=7)
    engine = Engine(text.model, text.params, dataclasses.replace(options, reuse_points=4, num_pages=4))
    common = random_tokens(270, 9)

    def requests():
        drawn = {"sampling": Sampling(temperature=0.8, top_p=0.9, seed=4)}
        of_any = {"sampling": Sampling(temperature=1.0, seed=5)}
        return [
            Request(random_tokens(240, 1), 45),
            Request([*common, 1], 40),
            Request([*common, 2, 3], 30, **drawn),
            Request([*common[:265], 7], 25, **of_any),
            Request([*common, 4], 30),
        ]

    served = []
    for engine.drafts in (0, 7, 2, 0, 5):
        engine.accepted.clear()
        served.append(requests())
        engine.run(served[-1])
        assert not engine.drafts or sum(count for kept, count in engine.accepted.items() if kept) > 10
    assert all([r.output for r in others] == [r.output for r in served[0]] for others in served)
    counters, begins = engine.scheduler.counters, set()
    assert counters.reused > 0 and counters.preempted > 0
    # Of a reused prefix the drafter knows nothing, and nothing of what the row's last request left there.
    last = requests()[1]
    engine.run([last], lambda *_: last.row is not None and begins.add(int(engine.state.draft.begins[last.row])))
    assert last.output == served[0][1].output and min(begins) == text.model.spec.page_size


@pytest.mark.long
def test_the_oracle_is_mlx_vlms():
    """Of a text longer than the window, by the peer's own reading of the released names."""
    mx = pytest.importorskip("mlx.core")
    peer = pytest.importorskip("mlx_vlm.speculative.drafters.deepseek_v4_dspark")
    mx.set_default_device(mx.cpu)
    arrays, tensors, rng = text_model(), random_tensors(SIZES, 1), np.random.default_rng(0)
    text = config() | {"num_key_value_heads": 1, "n_shared_experts": 1, "swiglu_limit": 10.0}
    text |= {"scoring_func": "sqrtsoftplus", "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_topk_prob": True}
    text |= {"max_position_embeddings": 4096, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-6}
    of_peer = {"text_config": text, "n_mtp_layers": 2, "block_size": SIZES.block + 1, "markov_rank": SIZES.markov}
    of_peer |= {"target_layer_ids": list(SIZES.targets), "mask_token_id": SIZES.noise}
    drafter = peer.Model(peer.ModelConfig.from_dict(of_peer))
    weights = drafter.sanitize({name: mx.array(x) for name, x in tensors.items()})
    drafter.load_weights(list(weights.items()), strict=True)
    embedding, unembedding = (mx.array(arrays[f"{name}.weight"]) for name in ("embed_tokens", "lm_head"))

    class Target:
        embed_tokens = staticmethod(lambda tokens: embedding[tokens])
        lm_head = staticmethod(lambda rows: rows @ unembedding.T)

    cache, reference = drafter.reset(Target), oracle(SIZES, arrays, tensors)
    hidden = rng.standard_normal((300, len(SIZES.targets) * SIZES.hidden)).astype(np.float32)
    for start, end in ((0, 90), (90, 91), (91, 96), (96, 299), (299, 300)):
        wanted, _ = reference.draft(hidden[:end], end % 250, SIZES.block)
        found = drafter.draft_block(
            end % 250, mx.array(hidden[None, start:end]), cache, SIZES.block + 1, lambda rows: mx.argmax(rows, -1)
        )
        # Several tokens at once: the peer's window holds more than 128 of them.
        assert np.array(found)[0].tolist() == wanted or end == 299

"""DeepSeek-V4.1: a stack of layers in extend and decode steps, against the torch forms over the whole requests.

The layers have every role: a window alone, KV sources of both ratios, layers that read a source's cache and selection,
the candidate source, and a later indexer that scores its blocks alone.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.kv_cache import KVLayout
from jax_sparse_mla.layers import write
from jax_sparse_mla.models import ModelSpec, v41_layers

COMPILING = "QUICK"  # see conftest.py
CONFIG = {
    "model_type": "deepseek_v41",
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 12,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 2, 4],
    "index_source_layer_ids": [1, 2, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 8,
    "index_topk": 16,
    "index_n_heads": 2,
    "index_head_dim": 128,
}
SPEC = dataclasses.replace(ModelSpec.from_hf_config(CONFIG), page_size=32)
LAYERS = v41_layers(CONFIG)
# Layer: its pool, and its place there. Those without a compressor have a window alone.
PLACES = ((0, 0), (2, 0), (2, 1), (0, 1), (1, 0), (0, 2), (0, 3))
POOLS = {0: 4, 2: 2, 1: 1}  # how many layers
LENGTHS, MAX_LEN, NUM_PAGES, REQUEST_ROWS, MAX_REQUESTS = (76, 41), 96, 7, (2, 0), 3
ON_GPU = jax.default_backend() == "gpu"
# The kernels of a GPU round softmax's weights to bfloat16, the reference does not.
TOLERANCE = {"rtol": 2**-7, "atol": 4e-3 if ON_GPU else 2e-3}
# Logits that differ by less may change places: the FP8 tensor cores keep about 14 bits of a sum of products, and the
# magnitudes of a logit's terms sum up to some 8 here. And the share of selections that may hang on it.
TIE, MAY_DIFFER = (4e-3, 0.02) if ON_GPU else (1e-4, 0.01)
INV_FREQ = (160000.0 ** -(np.arange(32) / 32)).astype(np.float32)
DECODE, EXTEND, VERIFY = mla.ForwardMode.DECODE, mla.ForwardMode.EXTEND, mla.ForwardMode.TARGET_VERIFY
DRAFTS = 5  # rows of a request in a verify step


def bf16(x):
    return np.asarray(x).astype(jnp.bfloat16)


@functools.cache
def model():
    """`(rows, params, tables)`: V4Rows of numpy `[requests, tokens, …]` and V4LayerParams of each layer."""
    rng = np.random.default_rng(0)
    shape = len(LENGTHS), max(LENGTHS)

    def normal(*dims, scale=1.0):
        return (rng.standard_normal((*shape, *dims)) * scale).astype(np.float32)

    rows, params = [], []
    for layer in LAYERS:
        index = source = {}
        if layer.is_index_source:
            weights = normal(2, scale=(2 * 128) ** -0.5)
            index = {"index": layers.IndexRows(q=bf16(normal(2, 128)), weights=weights)}
        if layer.is_kv_source:
            gate = {"compressed_score": normal(512, scale=2)} if layer.ratio == 2 else {}
            index |= {"compressed_kv": normal(512) if gate else bf16(normal(512)), **gate}
            norms = (1 + 0.1 * rng.standard_normal(n).astype(np.float32) for n in (512, 128))
            compressor = layers.CompressorParams(norm_weight=next(norms), inv_freq=INV_FREQ, round_pooled=True)
            wk = bf16(rng.standard_normal((128, 512)) * 512**-0.5)
            source = {"compressor": compressor, "index_keys": layers.IndexKeyParams(wk=wk, norm_weight=next(norms))}
        rows.append(layers.V4Rows(q=bf16(normal(2, 512)), kv=bf16(normal(512)), **index))
        sink = rng.standard_normal(2).astype(np.float32)
        params.append(jax.tree.map(jnp.asarray, layers.V4LayerParams(attn_sink=sink, **source)))
    req_to_token = np.full((MAX_REQUESTS, MAX_LEN), -1, np.int32)
    pages = 1 + rng.permutation(NUM_PAGES - 1).reshape(2, -1)  # page 0 takes what padding rows write
    req_to_token[list(REQUEST_ROWS)] = (pages[:, :, None] * 32 + np.arange(32)).reshape(2, MAX_LEN)
    to_swa = np.concatenate([np.zeros(32), 32 + rng.permutation((NUM_PAGES - 1) * 32), [-1]]).astype(np.int32)
    tables = mla.RequestTables(req_to_token=jnp.asarray(req_to_token), full_to_swa=jnp.asarray(to_swa))
    return rows, params, tables


def empty(spec=SPEC, **sizes):
    sizes |= {"num_pages": NUM_PAGES, "num_swa_pages": NUM_PAGES, "max_requests": MAX_REQUESTS}
    return {r: layers.V4LayerCache.zeros(spec, r, num_layers=n, **sizes) for r, n in POOLS.items()}


@functools.partial(jax.jit, static_argnames=("gathered", "spec"), donate_argnums=0)
def step(pools, rows, params, batch, tables, replayed=None, *, gathered, spec=SPEC):
    """All layers, one by one: `([(out, selection)], pools, overflow)`. `replayed`: positions of some layers."""
    shared = layers.prepare_v4_step(spec, batch, tables, gathered=gathered)
    found, sources, selected = [], {}, None
    for layer, (pool, place), of_layer, own in zip(LAYERS, PLACES, rows, params):
        out, cache, selected = layers.v41_layer(
            pools[pool].layer(place),
            of_layer,
            own,
            batch,
            shared.metadata,
            shared.plans.get(layer.ratio),
            spec=spec,
            layer=layer,
            source=None if layer.is_kv_source else sources.get(layer.kv_source),
            selected=selected,
            replayed=(replayed or {}).get(layer.index),
        )
        pools = {**pools, pool: cache}
        if layer.is_kv_source:
            sources[layer.index] = cache
        found.append((out, selected))
    return found, {pool: cache.whole() for pool, cache in pools.items()}, shared.overflow


def make_step(mode, work, num_rows, rows=None):
    """Work is `(request, first token, tokens)` for each request; padding rows hold NaN. Also the place of each row."""
    usual, _, tables = model()
    rows = rows or usual
    seq_lens, counts, loc, where = [], [], np.zeros(num_rows, np.int32), []
    table = np.asarray(tables.req_to_token)
    for request, start, count in work:
        loc[len(where) : len(where) + count] = table[REQUEST_ROWS[request], start : start + count]
        where += [(request, start + i) for i in range(count)]
        seq_lens, counts = [*seq_lens, start + count * (mode is not VERIFY)], [*counts, count]
    requests, tokens = np.array(where).T

    def pick(x):
        picked = np.full((num_rows, *x.shape[2:]), np.nan, x.dtype)
        picked[: len(where)] = x[requests, tokens]
        return jnp.asarray(picked)

    batch = mla.ForwardBatch(
        mode=mode,
        max_seq_len=MAX_LEN,
        req_pool_indices=jnp.asarray([REQUEST_ROWS[request] for request, *_ in work], jnp.int32),
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
        out_cache_loc=jnp.asarray(loc),
        extend_lens=jnp.asarray(counts, jnp.int32) if mode is EXTEND else None,
        num_draft_tokens=DRAFTS if mode is VERIFY else None,
    )
    return jax.tree.map(pick, rows), batch, where


# Chunks cut pairs and pages; request 1 decodes in an extend step, too.
PREFILL = [[(0, 0, 35), (1, 0, 5)], [(0, 35, 30), (1, 5, 17)], [(0, 65, 1), (1, 22, 9)]]
TOKENS = [[(0, 66 + i, 1), (1, 31 + i, 1)] for i in range(10)]


def serve(steps, *, gathered=True, spec=SPEC, **sizes):
    """By layer, `[requests, tokens, …]` of outputs and selected positions; NaN and −9 where none came.

    A step is its mode, its work, and maybe the rows that take the place of the model's.
    """
    outs = [np.full((2, max(LENGTHS), 2, 512), np.nan, np.float32) for _ in LAYERS]
    chosen = [np.full((2, max(LENGTHS), SPEC.index_topk), -9) for _ in LAYERS]
    _, params, tables = model()
    pools = empty(spec, **sizes)
    for mode, work, *others in steps:
        num_rows = 48 if mode is EXTEND else sum(count for *_, count in work)
        rows, batch, where = make_step(mode, work, num_rows, *others)
        arguments = rows, params, batch, tables
        found, pools, overflow = step(pools, *arguments, gathered=gathered and mode is EXTEND, spec=spec)
        assert not overflow
        places = tuple(np.array(where).T)
        for i, (out, selected) in enumerate(found):
            out = np.asarray(out, np.float32)
            outs[i][places] = out[: len(where)]
            assert not out[len(where) :].any()
            if selected is not None:
                chosen[i][places] = np.asarray(selected.positions)[: len(where)]
    return outs, chosen, pools


STEPS = [(EXTEND, work) for work in PREFILL] + [(DECODE, work) for work in TOKENS]


@functools.cache
def wanted(caches):
    """By layer and request, the oracle's outputs, and the selections with their gaps (None without)."""
    torch = pytest.importorskip("torch")
    import v41_oracle as oracle

    stored = getattr(oracle, caches)
    rows, params, _ = model()
    inv_freq = torch.from_numpy(INV_FREQ)
    outs, chosen = [[] for _ in LAYERS], [[] for _ in LAYERS]
    for r, length in enumerate(LENGTHS):
        compressed_of, selections, blocks = {}, {}, None
        for layer, of_layer, own in zip(LAYERS, rows, params):

            def take(x, r=r, length=length):
                return None if x is None else torch.from_numpy(np.array(x[r, :length], np.float32))

            def parameter(x):
                return torch.from_numpy(np.array(x, np.float32))

            ratio, compressed, selection = layer.ratio, None, None
            if layer.is_kv_source:
                kv, score = take(of_layer.compressed_kv), take(of_layer.compressed_score)
                latent = oracle.latents(kv, score, parameter(own.compressor.norm_weight), round_pooled=True)
                first = torch.arange(len(latent)) * ratio
                of_keys = parameter(own.index_keys.wk), parameter(own.index_keys.norm_weight)
                keys = stored.keys(oracle.index_keys(latent, *of_keys, first, inv_freq))
                compressed_of[layer.index] = stored.compressed(oracle.rope(latent, first, inv_freq)), keys
            if ratio:
                compressed, keys = compressed_of[layer.kv_source]
            if layer.is_index_source:
                scores = oracle.logits(stored.queries(take(of_layer.index.q)), take(of_layer.index.weights), keys)
                lens = oracle.visible(length, ratio)
                if layer.publishes:
                    blocks = oracle.blocks_of(scores, lens, 3, 8)
                among = blocks if layer.among_candidates else None
                selections[layer.index] = oracle.select(scores, lens, SPEC.index_topk, among)
            if ratio:
                selection = selections[layer.index_source]
            q, window_rows, sink = take(of_layer.q), stored.window(take(of_layer.kv)), parameter(own.attn_sink)
            out = oracle.attend(q, window_rows, compressed, selection, sink, SPEC.softmax_scale, SPEC.window)
            outs[layer.index].append(out.numpy())
            chosen[layer.index].append(selection)
    return outs, chosen


def assert_served(found, caches="V41"):
    """Outputs and selections are the oracle's. A selection that hangs on a tie within rounding may differ."""
    outs, chosen, _ = found
    want_outs, want_chosen = wanted(caches)
    differing = 0
    for i in range(len(LAYERS)):
        for r, length in enumerate(LENGTHS):
            for t in range(length):
                if want_chosen[i][r] is not None:
                    positions, gap = want_chosen[i][r][t]
                    got = chosen[i][r, t]
                    if (got[: len(positions)] != positions).any() or (got[len(positions) :] != -1).any():
                        assert gap < TIE
                        differing += 1
                        continue
                np.testing.assert_allclose(outs[i][r, t], want_outs[i][r][t], **TOLERANCE)
    assert differing <= MAY_DIFFER * len(LAYERS) * sum(LENGTHS)


@pytest.mark.long
def test_chunks_and_decode_steps_are_the_torch_forms():
    found = serve(STEPS)
    assert_served(found)
    _, chosen, pools = found
    blocks = {i: [len(set(p // 8)) for p in chosen[i][0, 60:]] for i in (4, 6)}
    assert max(blocks[6]) <= SPEC.candidate_blocks < min(blocks[4])  # among the candidates alone
    np.testing.assert_array_equal(chosen[3], chosen[2])  # another layer's selection
    assert jax.tree.structure(pools) == jax.tree.structure(empty())
    assert len(jax.tree.leaves(pools)) == 9  # for any number of layers


@pytest.mark.long
def test_paged_chunks_are_the_torch_forms():
    assert_served(serve(STEPS, gathered=False))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_v4s_layouts_serve_v41(engine):
    """What engines keep on Hopper: rows of 584 bytes, with index keys of 132 (vLLM), or rounded to FP4 (SGLang)."""
    spec = dataclasses.replace(SPEC, kv_layout=KVLayout.V4_FP8, compressed_layout=None)
    if engine == "vllm":
        spec = dataclasses.replace(spec, index_format=IndexFormat.FP8.written_by("vllm"))
        return assert_served(serve(STEPS, spec=spec), "V4")
    assert_served(serve(STEPS, spec=dataclasses.replace(spec, fp4_rows=True)), "V4_OF_SGLANG")


def other_tokens(rng):
    """The rows of all requests at all positions, each of some other token."""
    rows, _, _ = model()
    shuffled = rng.permutation(len(LENGTHS) * max(LENGTHS))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[shuffled].reshape(x.shape), rows)


# The first rows that are verified, by request: one begins a pair, the other ends a pair and a page.
VERIFIED = (66, 31)


def verifying(at):
    return VERIFY, [(r, start + at, DRAFTS) for r, start in enumerate(VERIFIED)]


@functools.cache
def by_decode_steps():
    return serve(STEPS, max_draft_tokens=DRAFTS)


def assert_as_by_decode_steps(found, parts):
    """Rows and selections are the oracle's, and those of decode steps, with all bytes of these parts of the caches.

    On a GPU the sums of a product may depend on how many rows it has, so that bytes may differ.
    """
    assert_served(found)
    if ON_GPU:
        return
    wanted = by_decode_steps()
    for layer in LAYERS:
        for r, start in enumerate(VERIFIED):
            rows = r, slice(start, start + 2 * DRAFTS)
            got, want = found[0][layer.index][rows], wanted[0][layer.index][rows]
            assert np.isfinite(want).all()
            np.testing.assert_allclose(got, want, **TOLERANCE)
            got, want = found[1][layer.index][rows], wanted[1][layer.index][rows]
            np.testing.assert_array_equal(got, want)
            assert (want >= 0).any() == bool(layer.ratio)
    for ratio in POOLS:
        for name in parts:
            caches = (jax.tree.leaves(getattr(pools[ratio], name)) for *_, pools in (found, wanted))
            for got, want in zip(*caches, strict=True):
                np.testing.assert_array_equal(got, want, err_msg=f"ratio {ratio}: {name}")


@pytest.mark.always(1)
@pytest.mark.parametrize("gathered", [False, True])
def test_replayed_positions(gathered):
    """Of all index sources: the same outputs and caches to the bit. Others give other outputs, in their layer and in
    those that follow it; a layer that scores blocks must be replayed with their source."""
    _, params, tables = model()
    rows, batch, _ = make_step(EXTEND, [(0, 0, 70), (1, 0, 40)], 112)
    sources = [layer.index for layer in LAYERS if layer.is_index_source]
    arguments = rows, params, batch, tables
    found, pools, _ = step(empty(), *arguments, gathered=gathered)
    chosen = {i: found[i][1].positions for i in sources}
    again, pools_again, _ = step(empty(), *arguments, chosen, gathered=gathered)
    for (out, selection), (out_again, selection_again) in zip(found, again, strict=True):
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(out_again, np.float32))
        if selection is not None:
            np.testing.assert_array_equal(selection.positions, selection_again.positions)
    jax.tree.map(np.testing.assert_array_equal, pools, pools_again)
    moved = chosen | {2: jnp.where(chosen[2] > 0, chosen[2] - 1, chosen[2])}
    others, *_ = step(empty(), *arguments, moved, gathered=gathered)
    differ = [(np.asarray(a, np.float32) != np.asarray(b, np.float32)).any() for (a, _), (b, _) in zip(found, others)]
    assert differ == [False, False, True, True, False, False, False]  # layer 3 takes the selection of layer 2
    with pytest.raises(TypeError, match=r"selected\.blocks must be given in layer 6"):
        step(empty(), *arguments, {4: chosen[4]}, gathered=gathered)


@pytest.mark.long
def test_a_verify_step_is_as_many_decode_steps():
    """Every draft is accepted."""
    found = serve([*STEPS[: len(PREFILL)], verifying(0), verifying(DRAFTS)], max_draft_tokens=DRAFTS)
    assert_as_by_decode_steps(found, ("swa", "compressed", "index_k", "state"))


@pytest.mark.long
def test_rejected_drafts_leave_no_trace():
    """Each step accepts its first row alone, or its first two: what follows it are rows of other tokens."""
    steps, rng, at = STEPS[: len(PREFILL)], np.random.default_rng(1), 0
    true, _, _ = model()
    for accepted in (1, 2, 1, 1):
        at += accepted

        def mixed(x, y, at=at):
            x = x.copy()
            for r, start in enumerate(VERIFIED):
                x[r, start + at :] = y[r, start + at :]
            return x

        steps = [*steps, (*verifying(at - accepted), jax.tree.map(mixed, true, other_tokens(rng)))]
    assert at == DRAFTS
    found = serve([*steps, verifying(at)], max_draft_tokens=DRAFTS)
    assert_as_by_decode_steps(found, ("swa", "compressed", "index_k"))  # the states keep rejected rows, unread


def test_a_kv_source_is_written_in_place():
    """The caches of one layer: window, compressed rows, index keys, and both rows of the state."""
    rows, batch, _ = make_step(DECODE, TOKENS[0], 2)
    _, params, tables = model()
    sizes = {"num_pages": NUM_PAGES, "num_swa_pages": NUM_PAGES, "max_requests": MAX_REQUESTS}
    cache = layers.V4LayerCache.zeros(SPEC, 2, **sizes)

    def one(cache, rows, params, batch, tables):
        shared = layers.prepare_v4_step(SPEC, batch, tables)
        return layers.v41_layer(cache, rows, params, batch, shared.metadata, None, spec=SPEC, layer=LAYERS[1])

    lowered = jax.jit(one, donate_argnums=0).lower(cache, rows[1], params[1], batch, tables)
    text = lowered.compile().as_text()
    short = {"uint8": "u8", "float32": "f32"}
    shapes = [f"{short[x.dtype.name]}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(cache)]
    copied = "|".join(map(re.escape, shapes))
    assert len(shapes) == 5 and all(shape in text for shape in shapes)
    assert not re.findall(rf"= \(?({copied})\S* copy(-start)?\(", text)
    assert len(re.findall(r"\{\d*\}: \(\d+, \{\}", text.splitlines()[0])) == 5


def test_a_compressed_cache_is_51_percent_smaller_than_v4s():
    """288 bytes an entry instead of 584; and few layers have one."""
    v4 = dataclasses.replace(SPEC, kv_layout=KVLayout.V4_FP8, compressed_layout=None, page_size=256)
    spec = dataclasses.replace(SPEC, page_size=256)

    def bytes_of(spec, ratio):
        sizes = {"num_pages": 8, "num_swa_pages": 1, "max_requests": 1}
        cache = jax.eval_shape(lambda: layers.V4LayerCache.zeros(spec, ratio, **sizes))
        return cache.compressed.data.size, cache.index_k.data.size

    for ratio in (1, 2):
        tokens = 8 * 256
        (new, keys), (old, _) = bytes_of(spec, ratio), bytes_of(v4, ratio)
        assert new == tokens // ratio * 288 and keys == tokens // ratio * 68
        assert round(1 - 288 / 584, 2) == 0.51 and 0.506 < 1 - new / old < 0.51  # V4's pages are padded
    cache = layers.V4LayerCache.zeros(spec, 0, num_pages=8, num_swa_pages=1, max_requests=1)
    assert cache.compressed is None and cache.index_k is None and cache.state is None


def traced(i, cache, *, source=None, selected=None, rows=None, params=None, spec=SPEC):
    """Traces a decode step of layer i, of which some rows and parameters are replaced, and runs nothing."""
    all_rows, batch, _ = make_step(DECODE, TOKENS[0], 2)
    _, all_params, tables = model()
    own = dataclasses.replace(all_rows[i], **rows or {}), dataclasses.replace(all_params[i], **params or {})
    metadata = layers.prepare_v4_step(spec, batch, tables).metadata
    options = {"spec": spec, "layer": LAYERS[i], "source": source, "selected": selected}
    return layers.v41_layer(cache, *own, batch, metadata, None, **options)


def test_what_is_refused():
    pools, change = empty(), dataclasses.replace
    window, of_2, of_1 = pools[0].layer(0), pools[2].layer(0), pools[1].layer(0)
    positions = jnp.zeros((2, SPEC.index_topk), jnp.int32)
    selected = layers.V41Selection(positions=positions)
    wrong = layers.V41Selection(positions=positions[:, :4])
    small = mla.PagedKV.zeros(KVLayout.V41_FP4, NUM_PAGES - 1, 16, num_layers=2).layer(0)
    few, bare = change(of_2, compressed=small), change(of_1, index_k=of_1.index_k.data)
    one_ratio, no_blocks = change(SPEC, compress_ratios=(0, 1)), change(SPEC, candidate_block_size=0)
    vllms = change(SPEC, index_format=IndexFormat.FP4.written_by("vllm"))
    publisher = next(i for i, layer in enumerate(LAYERS) if layer.publishes)
    assert publisher == 4
    source_of = r"source.compressed must be given: the caches of KV source 4, got None"
    for error, message, i, cache, given in (
        (TypeError, "cache.compressed must be a PagedKV in a KV source of compress ratio 2", 1, window, {}),
        (ValueError, "cache.compressed must be None in a layer that is no KV source", 5, of_1, {}),
        (TypeError, "cache.state must be a CompressorState", 1, change(of_2, state=None), {}),
        (TypeError, "rows.compressed_score must be given", 1, of_2, {"rows": {"compressed_score": None}}),
        (TypeError, "rows.index must be given", 4, of_1, {"rows": {"index": None}}),
        (TypeError, "params.index_keys must be given", 4, of_1, {"params": {"index_keys": None}}),
        (TypeError, "source must be given in a layer that is no KV source", 5, window, {"selected": selected}),
        (ValueError, "source must be None in a KV source", 4, of_1, {"source": of_1}),
        (TypeError, "selected must be given: what the layer before returned", 5, window, {"source": of_1}),
        (TypeError, "selected.blocks must be given in layer 6", 6, window, {"source": of_1, "selected": selected}),
        (TypeError, source_of, 5, window, {"source": window, "selected": selected}),
        (ValueError, r"selected.positions must have shape \[2, 16\]", 5, window, {"source": of_1, "selected": wrong}),
        (ValueError, "cache.index_k must be of IndexFormat.FP4, .* got IndexFormat.FP8$", 4, bare, {}),
        (ValueError, "cache.index_k must have a key for every 2 tokens that cache.compressed has room for", 1, few, {}),
        (ValueError, r"ratio must be one that metadata was built for \(0, 1\), got 2", 1, of_2, {"spec": one_ratio}),
        (ValueError, "spec must have candidate blocks for layer 4", 4, of_1, {"spec": no_blocks}),
        (ValueError, "cache.index_k must be of .*vllm.*, got IndexFormat.FP4$", 4, of_1, {"spec": vllms}),
        (TypeError, r"cache.swa must be .*zeros\(spec, 0, ", 5, change(window, swa=None), {"source": of_1}),
    ):
        with pytest.raises(error, match=f"v41_layer: {message}"):
            traced(i, cache, **given)
    _, batch, _ = make_step(DECODE, TOKENS[0], 2)
    for error, name, value in ((TypeError, "layer", 4), (TypeError, "spec", mla.DEEPSEEK_V4_FLASH)):
        options = {"spec": SPEC, "layer": LAYERS[4]} | {name: value}
        with pytest.raises(error, match=f"v41_layer: {name} must be a V41"):
            layers.v41_layer(of_1, None, None, batch, None, None, **options)
    with pytest.raises(ValueError, match="v4_layer: ratio must be V4's, got 2"):
        rows, batch, _ = make_step(DECODE, TOKENS[0], 2)
        _, params, tables = model()
        metadata = layers.prepare_v4_step(SPEC, batch, tables).metadata
        layers.v4_layer(of_2, rows[1], params[1], batch, metadata, None, spec=SPEC, ratio=2)


def test_v4s_kernel_writes_no_layer(monkeypatch):
    """Nor where the layouts are V4's: through it, a sink in an array of several layers would have no gradient."""
    spec = dataclasses.replace(SPEC, kv_layout=KVLayout.V4_FP8, compressed_layout=None)
    pools, reader = empty(spec), 5
    positions = jnp.zeros((2, spec.index_topk), jnp.int32)
    shared = {"source": pools[1].layer(0), "selected": layers.V41Selection(positions=positions)}
    monkeypatch.setattr(write, "dispatch", lambda *_: pytest.fail("a kernel was taken"))
    write._write.clear_cache()
    for i, given in ((0, {}), (reader, shared)):
        traced(i, pools[0].layer(0), spec=spec, **given)


def test_parameters_of_several_layers_share_arrays():
    _, params, _ = model()
    stacked = layers.V4LayerParams.stack([params[1], params[2]])
    assert stacked.index_keys.wk.shape == (256, 512) and stacked.compressor.round_pooled
    for i in range(2):
        own, given = stacked.layer(i).alone(), params[1 + i]
        for got, want in zip(jax.tree.leaves(own), jax.tree.leaves(given), strict=True):
            np.testing.assert_array_equal(got, want)

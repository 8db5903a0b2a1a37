"""compressor: entries, the carried state, and rope.

The oracles are loops over the formula in float64 and transformers' DeepSeek-V4 compressors (CSA, HCA, and the
one inside its indexer), one-shot and incremental.
"""

from __future__ import annotations

import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla import compressor
from jax_sparse_mla.compressor import CompressorState, compress_kv, rope_interleaved

BF16 = ml_dtypes.bfloat16
HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
PROPERTY = settings(max_examples=20, deadline=None)
MAX_REQUESTS = 6
NUM_REQUESTS = 3  # B of every step
BUCKETS = (8, 64, 640)  # rows of a step, so that few shapes are compiled


# --- oracles ---------------------------------------------------------------------------------------


class Parameters:
    """Random parameters of a compressor."""

    def __init__(self, seed, ratio, head_dim, rope_dim):
        rng = np.random.default_rng(seed)
        self.ratio, self.head_dim, self.coff = ratio, head_dim, 2 if ratio == 4 else 1
        self.width = self.coff * head_dim
        self.ape = rng.normal(size=(ratio, self.width)).astype(np.float32)
        self.norm_weight = rng.uniform(0.5, 1.5, head_dim).astype(np.float32)
        self.inv_freq = (10000.0 ** (-np.arange(rope_dim // 2) / max(1, rope_dim // 2))).astype(np.float32)

    def tokens(self, seed, length, dtype=np.float32):
        rng = np.random.default_rng(seed)
        kv = rng.normal(size=(length, self.width)).astype(dtype)
        return kv, (3 * rng.normal(size=(length, self.width))).astype(dtype)

    def arrays(self):
        fields = ("ape", "norm_weight", "inv_freq")
        return {name: jnp.asarray(getattr(self, name)) for name in fields}


def rotate_by_hand(x, position, inv_freq):
    x = x.astype(np.float64).copy()
    start = len(x) - 2 * len(inv_freq)
    for i, frequency in enumerate(inv_freq):
        angle = float(np.float32(position) * np.float32(frequency))  # the angle itself is a float32
        even, odd = x[start + 2 * i], x[start + 2 * i + 1]
        x[start + 2 * i] = even * np.cos(angle) - odd * np.sin(angle)
        x[start + 2 * i + 1] = even * np.sin(angle) + odd * np.cos(angle)
    return x


def entry_by_hand(p: Parameters, kv, score, last, eps=1e-6):
    """The entry of the group that ends at position `last` of a request with tokens kv, score; float64."""
    kv, score = kv.astype(np.float64), score.astype(np.float64)
    first, hd = last - p.ratio + 1, p.head_dim
    values, logits = [], []
    if p.coff == 2 and first > 0:
        for i in range(p.ratio):
            values.append(kv[first - p.ratio + i, :hd])
            logits.append(score[first - p.ratio + i, :hd] + p.ape[i, :hd])
    for i in range(p.ratio):
        values.append(kv[first + i, -hd:])
        logits.append(score[first + i, -hd:] + p.ape[i, -hd:])
    weight = np.exp(np.array(logits) - np.max(logits, axis=0))
    pooled = np.sum(weight * np.array(values), axis=0) / np.sum(weight, axis=0)
    normed = pooled / np.sqrt(np.mean(pooled**2) + eps) * p.norm_weight
    return rotate_by_hand(normed, first, p.inv_freq)


def assert_entry(got, want):
    """Equal up to the last rounding to bfloat16 (and a float32 sum's error just before it)."""
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=2**-8, atol=1e-4)


# --- an engine -------------------------------------------------------------------------------------


def bucket_of(rows):
    return next(b for b in BUCKETS if b >= rows)


class Engine:
    """Feeds chunks of requests to compress_kv and keeps each request's entries by group."""

    def __init__(self, p: Parameters, *, ring=None, fill=np.nan, dtype=np.float32, jit=False):
        self.p, self.dtype, self.jit = p, dtype, jit
        zeros = CompressorState.zeros(MAX_REQUESTS, ratio=p.ratio, head_dim=p.head_dim, ring=ring)
        self.state = jax.tree.map(lambda x: jnp.full_like(x, fill), zeros)
        self.entries = {}

    def step(self, chunks, *, garbage=0):
        """chunks: (name, req_row, first position, kv, score) per request; more requests and rows are padding.

        The rest of the bucket is padding rows of NaN, with req_rows that name a live request or nothing.
        """
        rows = sum(len(kv) for _, _, _, kv, _ in chunks)
        total = bucket_of(rows + garbage)
        rng = np.random.default_rng(rows)
        kv = np.full((total, self.p.width), np.nan, self.dtype)
        score = kv.copy()
        positions = rng.choice([-1, -7, -(2**31)], total).astype(np.int32)
        req_rows = rng.choice([0, 1, 2, *HOSTILE], total).astype(np.int32)
        starts, where = [0], {}
        for name, req_row, first, chunk_kv, chunk_score in chunks:
            start, end = starts[-1], starts[-1] + len(chunk_kv)
            kv[start:end], score[start:end] = chunk_kv, chunk_score
            positions[start:end] = np.arange(first, first + len(chunk_kv))
            req_rows[start:end] = req_row
            where |= {start + i: (name, first + i) for i in range(len(chunk_kv))}
            starts.append(end)
        starts += [starts[-1]] * (NUM_REQUESTS - len(chunks))
        arguments = dict(
            positions=jnp.asarray(positions),
            req_rows=jnp.asarray(req_rows),
            query_start_loc=jnp.asarray(starts, dtype=jnp.int32),
            ratio=self.p.ratio,
            **self.p.arrays(),
        )
        function = jax.jit(compress_kv, static_argnames="ratio") if self.jit else compress_kv
        entries, entry_rows, self.state = function(self.state, jnp.asarray(kv), jnp.asarray(score), **arguments)
        bound = min(total, total // self.p.ratio + NUM_REQUESTS)
        chex.assert_shape([entries, entry_rows], [(bound, self.p.head_dim), (bound,)])
        assert entries.dtype == jnp.bfloat16 and entry_rows.dtype == jnp.int32

        entries, entry_rows = np.asarray(entries), np.asarray(entry_rows)
        complete = [row for row, (_, position) in where.items() if (position + 1) % self.p.ratio == 0]
        np.testing.assert_array_equal(entry_rows, complete + [-1] * (bound - len(complete)))
        assert not entries[len(complete) :].astype(np.float32).any()
        for row, entry in zip(complete, entries):
            name, position = where[row]
            self.entries[name, position // self.p.ratio] = entry


def one_shot(p, kv, score, dtype=np.float32):
    engine = Engine(p, dtype=dtype)
    engine.step([("r", 0, 0, kv, score)])
    return [engine.entries["r", group] for group in range(len(kv) // p.ratio)]


# --- entries ---------------------------------------------------------------------------------------

SMALL = {4: (16, 8), 128: (16, 8), 5: (6, 6)}  # ratio: head_dim, rope_dim


@pytest.mark.parametrize(
    "ratio, dtype, jit",
    [
        (4, np.float32, False),
        (128, np.float32, False),
        (5, np.float32, False),
        (4, BF16, True),
        (128, BF16, True),
    ],
)
def test_entries_are_the_formula(ratio, dtype, jit):
    p = Parameters(0, ratio, *SMALL[ratio])
    length = 2 * ratio + 3
    kv, score = p.tokens(1, length, dtype)
    engine = Engine(p, dtype=dtype, jit=jit)
    engine.step([("r", 2, 0, kv, score)])
    assert sorted(engine.entries) == [("r", 0), ("r", 1)]
    for (_, group), entry in engine.entries.items():
        assert_entry(entry, entry_by_hand(p, kv, score, (group + 1) * ratio - 1))


def chunkings(ratio):
    """Per step and request, how many tokens: 0, 1, a few, or more than a ring."""
    sizes = [0, 1, 1, 2, 3, ratio - 1, ratio, ratio + 1, min(2 * ratio + 3, 100)]
    return st.lists(st.lists(st.sampled_from(sizes), min_size=3, max_size=3), min_size=4, max_size=8)


@PROPERTY
@given(seed=st.integers(0, 2**32 - 1), ratio=st.sampled_from(list(SMALL)), data=st.data())
def test_any_chunking_gives_the_same_entries(seed, ratio, data):
    """Three requests in one batch, in changing order; their rows of the state hold NaN before."""
    p = Parameters(0, ratio, *SMALL[ratio])
    rng = np.random.default_rng(seed)
    req_row = rng.permutation(MAX_REQUESTS)[:3]
    chunks_of = data.draw(chunkings(ratio))
    lengths = np.sum(chunks_of, axis=0)
    tokens = [p.tokens(seed + r, lengths[r]) for r in range(3)]
    engine, done = Engine(p), np.zeros(3, int)
    for sizes in chunks_of:
        chunks = []
        for r in rng.permutation(3):
            part = slice(done[r], done[r] + sizes[r])
            chunks.append((r, req_row[r], done[r], tokens[r][0][part], tokens[r][1][part]))
        engine.step(chunks, garbage=1)
        done += sizes

        # The state: the last tokens of each request, bit for bit, and nothing else.
        ring = engine.state.kv.shape[1]
        want = np.full((2, *engine.state.kv.shape), np.nan, np.float32)
        for r in range(3):
            for position in range(max(0, done[r] - ring), done[r]):
                want[:, req_row[r], position % ring] = [x[position] for x in tokens[r]]
        np.testing.assert_array_equal(np.stack([engine.state.kv, engine.state.score]), want)

    assert len(engine.entries) == sum(lengths // ratio)
    for (r, group), entry in engine.entries.items():
        assert_entry(entry, entry_by_hand(p, *tokens[r], (group + 1) * ratio - 1))


@pytest.mark.parametrize("ratio", [4, 128])
def test_token_by_token_equals_one_shot(ratio):
    p = Parameters(3, ratio, *SMALL[ratio])
    length = 2 * ratio + 4
    kv, score = p.tokens(4, length)
    engine = Engine(p)
    for position in range(length):
        engine.step([("r", 1, position, kv[position : position + 1], score[position : position + 1])])
    for group, entry in enumerate(one_shot(p, kv, score)):
        got, want = (x.astype(np.float32) for x in (engine.entries["r", group], entry))
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)  # float32 rounding, seen through bfloat16


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_new_request_does_not_see_the_former_one(ratio):
    """A row of the state is taken over without being cleared."""
    p = Parameters(5, ratio, *SMALL[ratio])
    engine = Engine(p)
    old = p.tokens(6, ratio + 3)
    engine.step([("old", 3, 0, *(1e6 * x for x in old))])
    new = p.tokens(7, 2 * ratio)
    for first, last in ((0, 1), (1, ratio - 1), (ratio - 1, 2 * ratio)):
        engine.step([("new", 3, first, new[0][first:last], new[1][first:last])])
    for group in (0, 1):
        assert_entry(engine.entries["new", group], entry_by_hand(p, *new, (group + 1) * ratio - 1))


def test_order_of_requests_does_not_matter():
    p = Parameters(8, 4, *SMALL[4])
    tokens = {r: p.tokens(10 + r, 20) for r in range(3)}
    engines = []
    for order in ((0, 1, 2), (2, 0, 1)):
        engine = Engine(p)
        for first, last in ((0, 3), (3, 11), (11, 20)):
            engine.step([(r, r + 1, first, *(x[first:last] for x in tokens[r])) for r in order])
        engines.append(engine)
    for key, entry in engines[0].entries.items():
        np.testing.assert_array_equal(entry, engines[1].entries[key])
    chex.assert_trees_all_equal(engines[0].state, engines[1].state)


def test_rejected_drafts_need_a_longer_ring():
    """A verify step writes 6 tokens of which 1 is accepted; the next step writes over the others."""
    p = Parameters(11, 4, *SMALL[4])
    kv, score = p.tokens(12, 40)
    drafts = p.tokens(13, 40)

    def entries(ring):
        engine = Engine(p, ring=ring, fill=0)
        engine.step([("r", 0, 0, kv[:9], score[:9])])
        for position in range(9, 24):
            draft = slice(position + 1, position + 6)
            step = [np.concatenate([x[position : position + 1], d[draft]]) for x, d in zip((kv, score), drafts)]
            engine.step([("r", 0, position, *step)])
        return [engine.entries["r", group] for group in range(6)]

    want = [entry_by_hand(p, kv, score, 4 * group + 3) for group in range(6)]
    for got, entry in zip(entries(8 + 5), want):
        assert_entry(got, entry)
    assert any(np.abs(got.astype(np.float64) - entry).max() > 0.1 for got, entry in zip(entries(8), want))


# --- hostile values and empty shapes ---------------------------------------------------------------


def call(p, state, kv, score, positions, req_rows, query_start_loc, **kwargs):
    return compress_kv(
        state,
        jnp.asarray(kv),
        jnp.asarray(score),
        positions=jnp.asarray(positions, jnp.int32),
        req_rows=jnp.asarray(req_rows, jnp.int32),
        query_start_loc=jnp.asarray(query_start_loc, jnp.int32),
        **{**p.arrays(), "ratio": p.ratio, **kwargs},
    )


def test_rows_of_no_request_are_inert():
    p = Parameters(14, 4, *SMALL[4])
    state = CompressorState.zeros(3, ratio=4, head_dim=16)
    kv, score = p.tokens(15, 16)
    for req_rows in ([v] * 16 for v in (*HOSTILE, 3)):
        entries, rows, after = call(p, state, kv, score, np.arange(16), req_rows, [0, 16])
        assert (np.asarray(rows) == -1).all() and not entries.astype(jnp.float32).any()
        chex.assert_trees_all_equal(after, state)
    for positions in ([v] * 16 for v in (-1, -7, -(2**31))):
        entries, rows, after = call(p, state, kv, score, positions, [1] * 16, [0, 16])
        assert (np.asarray(rows) == -1).all() and not entries.astype(jnp.float32).any()
        chex.assert_trees_all_equal(after, state)
    # Rows past the last request's.
    _, rows, after = call(p, state, kv, score, np.arange(16), [1] * 16, [0, 7])
    np.testing.assert_array_equal(rows, [3, -1, -1, -1, -1])
    assert not np.asarray(after.kv)[1, 7].any() and np.asarray(after.kv)[1, 6].all()


def test_padding_rows_before_a_request_do_not_hide_its_state():
    """Rows of no position that carry the request's own req_row."""
    p = Parameters(30, 4, *SMALL[4])
    kv, score = p.tokens(31, 8)
    state = CompressorState.zeros(3, ratio=4, head_dim=16)
    _, _, state = call(p, state, kv[:6], score[:6], np.arange(6), [1] * 6, [0, 6])
    garbage = np.full((5, p.width), np.nan, np.float32)
    kv_step, score_step = np.concatenate([garbage, kv[6:]]), np.concatenate([garbage, score[6:]])
    entries, rows, _ = call(p, state, kv_step, score_step, [-1] * 5 + [6, 7], [1] * 7, [0, 7])
    np.testing.assert_array_equal(rows, [6, -1])
    assert_entry(entries[0], entry_by_hand(p, kv, score, 7))


def test_no_place_of_the_ring_is_written_twice():
    """On the CPU the last write would stay; elsewhere that is not defined."""
    rng = np.random.default_rng(32)
    for ring in (2, 8, 128):
        req_rows = np.repeat(rng.permutation(6), rng.integers(0, 20, 6)).astype(np.int32)
        live = rng.random() < np.linspace(1.5, 0.5, len(req_rows))  # the end of the step is padding
        want = [
            any(live[j] and req_rows[j] == req_rows[i] and (j - i) % ring == 0 for j in range(i + 1, len(live)))
            for i in range(len(live))
        ]
        got = compressor._replaced_later(jnp.asarray(live), jnp.asarray(req_rows), ring)
        np.testing.assert_array_equal(got, want)


def test_the_largest_position_does_not_wrap():
    p = Parameters(16, 4, *SMALL[4])
    kv, score = p.tokens(17, 4)
    last = 2**31 - 1
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    entries, rows, after = call(p, state, kv, score, np.arange(last - 3, last + 1), [1] * 4, [0, 4])
    np.testing.assert_array_equal(rows, [3, -1])
    assert np.isfinite(np.asarray(entries).astype(np.float32)).all()
    np.testing.assert_array_equal(np.asarray(after.kv)[1, 4:], kv)


def test_empty_shapes():
    p = Parameters(18, 4, *SMALL[4])
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    for tokens, requests in ((0, 2), (0, 0), (3, 0), (9, 0)):
        kv, score = p.tokens(19, tokens)
        starts = [0] * (requests + 1)
        entries, rows, after = call(p, state, kv, score, np.arange(tokens), [0] * tokens, starts)
        bound = min(tokens, tokens // 4 + requests)
        chex.assert_shape([entries, rows], [(bound, 16), (bound,)])
        assert (np.asarray(rows) == -1).all()
        chex.assert_trees_all_equal(after, state)


def test_scores_of_minus_infinity_give_no_nan():
    p = Parameters(20, 4, *SMALL[4])
    kv, _ = p.tokens(21, 8)
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    entries, rows, _ = call(p, state, kv, np.full_like(kv, -np.inf), np.arange(8), [0] * 8, [0, 8])
    np.testing.assert_array_equal(rows, [3, 7, -1])
    assert not np.isnan(np.asarray(entries).astype(np.float32)).any()


# --- state, memory, compilation --------------------------------------------------------------------


def test_state_shapes():
    for ratio, shape in {4: (5, 8, 1024), 128: (5, 128, 512), 2: (5, 2, 512)}.items():
        state = CompressorState.zeros(5, ratio=ratio, head_dim=512)
        chex.assert_shape([state.kv, state.score], shape)
        assert state.kv.dtype == state.score.dtype == jnp.float32
    chex.assert_shape(CompressorState.zeros(5, ratio=4, head_dim=512, ring=16).kv, (5, 16, 1024))
    assert len(jax.tree.leaves(state)) == 2
    with pytest.raises(ValueError, match=r"CompressorState\.zeros: ring must be >= 8, got 7"):
        CompressorState.zeros(5, ratio=4, head_dim=512, ring=7)


def compiled(ratio, tokens, donate=(0,)):
    p = Parameters(0, ratio, 512, 64)
    state = jax.eval_shape(lambda: CompressorState.zeros(64, ratio=ratio, head_dim=512))
    kv = jax.ShapeDtypeStruct((tokens, p.width), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    starts = jax.ShapeDtypeStruct((9,), jnp.int32)

    def step(state, kv, score, positions, req_rows, starts):
        return call(p, state, kv, score, positions, req_rows, starts)

    return jax.jit(step, donate_argnums=donate).lower(state, kv, kv, ints, ints, starts).compile(), state


@pytest.mark.parametrize("ratio", [4, 128])
def test_donated_state_is_updated_in_place(ratio):
    def copies(donate):
        program, state = compiled(ratio, 256, donate)
        shape = re.escape("f32[" + ",".join(map(str, state.kv.shape)) + "]")
        assert re.search(shape, program.as_text())
        return re.findall(shape + r"\S* copy(?:-start)?\(", program.as_text())

    assert not copies((0,))
    assert copies(())  # the check can fail


def test_only_the_windows_that_complete_are_gathered():
    """A window per token would be 4096 * 128 * 512 * 4 bytes, a gigabyte."""
    program, _ = compiled(128, 4096)
    assert program.memory_analysis().temp_size_in_bytes < 3 * compressor.CHUNK_BYTES


def test_chunks_of_windows_give_the_same_entries(monkeypatch):
    p = Parameters(22, 4, *SMALL[4])
    kv, score = p.tokens(23, 57)
    want = one_shot(p, kv, score)
    monkeypatch.setattr(compressor, "CHUNK_BYTES", 3 * 4 * 4 * 8 * 16)
    untraced = jax.jit(compressor._compress_kv.__wrapped__, static_argnames=("ratio", "norm_eps"))
    monkeypatch.setattr(compressor, "_compress_kv", untraced)
    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    entries, rows, _ = call(p, state, kv, score, np.arange(57), [0] * 57, [0, 57])
    np.testing.assert_array_equal(rows, [*range(3, 57, 4), -1])
    np.testing.assert_allclose(np.asarray(entries[:14], np.float32), np.array(want, np.float32), rtol=2**-7, atol=1e-6)


def test_positions_and_requests_are_data():
    p = Parameters(24, 4, *SMALL[4])
    traces = []

    @jax.jit
    def step(state, kv, positions, req_rows, starts):
        traces.append(1)
        return call(p, state, kv, kv, positions, req_rows, starts)

    state = CompressorState.zeros(2, ratio=4, head_dim=16)
    for first in (0, 3, 9):
        kv, _ = p.tokens(first, 9)
        positions = jnp.arange(first, first + 9, dtype=jnp.int32)
        _, _, state = step(state, kv, positions, jnp.full((9,), first % 2), jnp.array([0, first]))
    assert len(traces) == 1


# --- transformers ----------------------------------------------------------------------------------

HIDDEN, Q_LORA, HEAD_DIM, ROPE_DIM, INDEX_DIM = 48, 24, 512, 64, 128


@pytest.fixture(scope="module")
def hf():
    """transformers' module and a config with V4's own head dimensions and YaRN."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        q_lora_rank=Q_LORA,
        head_dim=HEAD_DIM,
        qk_rope_head_dim=ROPE_DIM,
        index_head_dim=INDEX_DIM,
        index_n_heads=4,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    modeling_deepseek_v4.test_config, modeling_deepseek_v4.test_torch = config, torch
    return modeling_deepseek_v4


def random_module(torch, module, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        scale, shift = (0.3, 1.0) if "norm" in name else (1.0, 0.0)
        parameter.data = shift + scale * torch.randn(parameter.shape, generator=generator)
    return module.float().eval()


def hf_parameters(module, ratio, head_dim):
    p = Parameters(0, ratio, head_dim, 2)
    p.ape, p.norm_weight = module.position_bias.detach().numpy(), module.kv_norm.weight.detach().numpy()
    inv_freq = module.rotary_emb.compress_inv_freq.numpy()
    assert inv_freq.shape == (ROPE_DIM // 2,) and module.rotary_emb.compress_attention_scaling == 1.0
    p.inv_freq = inv_freq
    return p


def run_chunked(p, kv, score, chunk_sizes):
    """Three requests `[3, length, width]` in one batch; chunk_sizes: per step, tokens per request."""
    engine, done = Engine(p), np.zeros(3, int)
    for sizes in chunk_sizes:
        engine.step([(r, 5 - r, done[r], *(x[r, done[r] : done[r] + sizes[r]] for x in (kv, score))) for r in range(3)])
        done += sizes
    groups = kv.shape[1] // p.ratio
    return np.array([[engine.entries[r, group] for group in range(groups)] for r in range(3)])


def random_chunks(rng, length, largest):
    """Steps until all three requests have `length` tokens: sometimes one token, sometimes many."""
    left = np.full(3, length)
    while left.any():
        sizes = np.minimum(left, rng.choice([0, 1, largest // 3, largest], 3))
        yield sizes
        left -= sizes


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["csa", "hca", "indexer"])
def test_entries_equal_transformers(hf, kind):
    """Our chunks, transformers' one shot and transformers' incremental cache all agree."""
    torch, config = hf.test_torch, hf.test_config
    rng = np.random.default_rng(25)
    ratio, length = (128, 300) if kind == "hca" else (4, 42)
    module_class = {"csa": hf.DeepseekV4CSACompressor, "hca": hf.DeepseekV4HCACompressor}
    module = random_module(torch, module_class.get(kind, hf.DeepseekV4CSACompressor)(config), 26)
    hidden = torch.from_numpy(rng.normal(size=(3, length, HIDDEN)).astype(np.float32))
    q_residual = torch.from_numpy(rng.normal(size=(3, length, Q_LORA)).astype(np.float32))
    part = module.indexer if kind == "indexer" else module

    def incremental(chunks):
        cache_class = hf.DeepseekV4HCACache if kind == "hca" else hf.DeepseekV4CSACache
        cache = type("Cache", (), {"layers": [cache_class(config)]})()
        first = 0
        for size in chunks:
            steps = slice(first, first + size)
            positions = torch.arange(first, first + size)[None].expand(3, -1)
            module(hidden[:, steps], q_residual[:, steps], positions, cache, 0)
            first += size
        return cache.layers[0].compressed_kv["indexer" if kind == "indexer" else "compressor"].numpy()

    with torch.no_grad():
        want = incremental([length])
        in_pieces = incremental([1] * 7 + [ratio] + [length - 7 - ratio])
        kv, score = part.kv_proj(hidden).numpy(), part.gate_proj(hidden).numpy()
    head_dim = INDEX_DIM if kind == "indexer" else HEAD_DIM
    chex.assert_shape(want, (3, length // ratio, head_dim))
    np.testing.assert_allclose(in_pieces, want, rtol=1e-3, atol=1e-4)

    p = hf_parameters(part, ratio, head_dim)
    for sizes in ([[length // 2] * 3] * 2, list(random_chunks(rng, length, 20 if ratio == 4 else 180))):
        got = run_chunked(p, kv, score, sizes)
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-8, atol=1e-3)


@pytest.mark.torch
@pytest.mark.parametrize("positions", [(0, 1, 4, 127), (65535, 1_000_000, 3, 70_000)], ids=["near", "far"])
def test_rope_equals_transformers(hf, positions):
    torch = hf.test_torch
    rng = np.random.default_rng(27)
    x = rng.normal(size=(4, 3, 96)).astype(np.float32)  # [T, heads, d]
    rotary = hf.DeepseekV4RotaryEmbedding(hf.test_config)
    where = torch.tensor(positions)[None]
    cos, sin = rotary(torch.zeros(1), position_ids=where, layer_type="compress")
    want = hf.apply_rotary_pos_emb(torch.from_numpy(x).transpose(0, 1)[None], cos, sin)[0].transpose(0, 1).numpy()
    inv_freq = jnp.asarray(rotary.compress_inv_freq.numpy())
    got = rope_interleaved(jnp.asarray(x), jnp.asarray(positions, jnp.int32)[:, None], inv_freq)
    np.testing.assert_allclose(got, want, atol=1e-5)


# --- rope ------------------------------------------------------------------------------------------


def test_rope_and_back():
    rng = np.random.default_rng(28)
    inv_freq = np.float32([1, 0.3, 0.01])
    x, positions = rng.normal(size=(5, 9)).astype(np.float32), np.array([0, 1, 7, 1000, -1], np.int32)
    turned = rope_interleaved(jnp.asarray(x), jnp.asarray(positions), jnp.asarray(inv_freq))
    for row, position, got in zip(x, positions, turned):
        np.testing.assert_allclose(got, rotate_by_hand(row, position, inv_freq), atol=1e-5)
    back = rope_interleaved(turned, jnp.asarray(positions), jnp.asarray(inv_freq), inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-5)
    np.testing.assert_array_equal(turned[:, :3], x[:, :3])
    bf16 = rope_interleaved(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), jnp.asarray(inv_freq))
    assert bf16.dtype == jnp.bfloat16
    np.testing.assert_allclose(bf16.astype(np.float32), turned, rtol=2**-6, atol=2**-6)


# --- arguments -------------------------------------------------------------------------------------


def good_arguments():
    p = Parameters(0, 4, *SMALL[4])
    return dict(
        state=CompressorState.zeros(2, ratio=4, head_dim=16),
        kv=jnp.zeros((6, 32)),
        score=jnp.zeros((6, 32)),
        positions=jnp.zeros((6,), jnp.int32),
        req_rows=jnp.zeros((6,), jnp.int32),
        query_start_loc=jnp.zeros((3,), jnp.int32),
        ratio=4,
        **p.arrays(),
    )


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("state", jnp.zeros((2, 8, 32)), TypeError),
        ("state", CompressorState(kv=jnp.zeros((2, 4, 32)), score=jnp.zeros((2, 4, 32))), ValueError),
        ("state.kv", CompressorState.zeros(2, ratio=4, head_dim=8), ValueError),
        ("state.kv", CompressorState(kv=jnp.zeros((2, 8, 32), jnp.bfloat16), score=None), TypeError),
        ("state.score", CompressorState(kv=jnp.zeros((2, 8, 32)), score=jnp.zeros((3, 8, 32))), ValueError),
        ("kv", jnp.zeros((6, 32, 1)), ValueError),
        ("kv", jnp.zeros((6, 32), jnp.float16), TypeError),
        ("score", jnp.zeros((5, 32)), ValueError),
        ("positions", jnp.zeros((5,), jnp.int32), ValueError),
        ("positions", jnp.zeros((6,), jnp.float32), TypeError),
        ("req_rows", np.zeros((6,), np.int64), TypeError),
        ("query_start_loc", jnp.zeros((0,), jnp.int32), ValueError),
        ("query_start_loc", None, TypeError),
        ("ape", jnp.zeros((8, 16)), ValueError),
        ("ape", jnp.zeros((4, 32), jnp.bfloat16), TypeError),
        ("norm_weight", jnp.zeros((16, 1)), ValueError),
        ("inv_freq", jnp.zeros((9,)), ValueError),
        ("norm_weight", jnp.zeros((17,)), ValueError),
        ("norm_eps", "1e-6", TypeError),
        ("ratio", 0, ValueError),
        ("ratio", 4.0, TypeError),
    ],
)
def test_bad_arguments(name, value, error):
    with pytest.raises(error, match=rf"compress_kv: {re.escape(name)} must"):
        compress_kv(**{**good_arguments(), name.split(".")[0]: value})


def test_bad_arguments_of_rope():
    x, positions, inv_freq = jnp.zeros((2, 3, 8)), jnp.zeros((2, 3), jnp.int32), jnp.zeros((4,))
    with pytest.raises(ValueError, match="rope_interleaved: x must"):
        rope_interleaved(x, positions, jnp.zeros((5,)))
    with pytest.raises(ValueError, match=r"rope_interleaved: positions must broadcast to \[2, 3\], got \[2\]"):
        rope_interleaved(x, positions[:, 0], inv_freq)
    with pytest.raises(TypeError, match="rope_interleaved: positions must"):
        rope_interleaved(x, positions.astype(jnp.float32), inv_freq)

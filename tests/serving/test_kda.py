"""Kimi delta attention in chunks and token by token, against transformers' module over whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from transformers.models.glm5_next import modeling_glm5_next as modeling

from jax_sparse_mla import ForwardBatch, ForwardMode, ModelSpec, RequestTables, build_v32_metadata
from jax_sparse_mla.serving import kda
from jax_sparse_mla.serving.config import KDA

HIDDEN, HEADS, DIM, KERNEL, MAX_REQUESTS, NUM_ROWS = 24, 2, 8, 4, 5, 56
LENGTHS, REQUEST_ROWS = (75, 40, 2), (3, 0, 4)
SPEC = ModelSpec.from_hf_config({"model_type": "glm5_next", "index_kpool": 4})


@functools.cache
def case(lower_bound):
    """The module, its parameters, and of each request the projected rows and the module's output before its norm."""
    sizes = {"linear_head_dim": DIM, "linear_num_heads": HEADS, "linear_conv_kernel_dim": KERNEL}
    config = modeling.Glm5NextTextConfig(
        hidden_size=HIDDEN, num_hidden_layers=4, q_lora_rank=8, linear_lower_bound=lower_bound, **sizes
    )
    module = modeling.Glm5NextTextLinearAttention(config, 0)
    generator, gate = torch.Generator().manual_seed(0), module.forget_gate
    for name, parameter in module.named_parameters():
        mean, scale = (-2, 2) if name.endswith("dt_bias") else (0, 0.5 if name.endswith("A_log") else 0.4)
        parameter.data = mean + scale * torch.randn(parameter.shape, generator=generator)
    params = kda.KDAParams(
        conv=module.conv1d.weight[:, 0], dt_bias=gate.dt_bias, a_log=gate.A_log, o_norm=module.o_norm.weight
    )
    params = jax.tree.map(lambda x: jnp.asarray(x.detach().numpy()), params)
    seen, rows, outs = [], [], []
    module.o_norm.register_forward_pre_hook(lambda _, args: seen.append([x[0].numpy() for x in args]))
    module.o_proj.register_forward_pre_hook(lambda _, args: seen[-1].append(args[0][0].numpy()))
    with torch.no_grad():
        for length in LENGTHS:
            x = torch.randn(1, length, HIDDEN, generator=generator)
            module(x)
            qkv = torch.cat([project(x) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
            projected = qkv, gate.f_b_proj(gate.f_a_proj(x)), module.b_proj(x)
            rows.append([part[0].numpy() for part in projected])
            outs.append(seen.pop())
    return KDA(heads=HEADS, head_dim=DIM, kernel=KERNEL, lower_bound=lower_bound), params, rows, outs


@functools.partial(jax.jit, static_argnames="config", donate_argnums=0)
def step(state, rows, params, batch, *, config):
    tables = RequestTables(req_to_token=jnp.zeros((MAX_REQUESTS, 256), jnp.int32))
    metadata = build_v32_metadata(SPEC, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
    chunked = batch.mode is ForwardMode.EXTEND
    out, state = kda.kda_layer(
        state.layer(1), rows, params, kda.prepare(batch, metadata), config=config, chunked=chunked
    )
    return out, state.whole()


def serve(lower_bound, steps):
    """The rows of each request, out of steps of (request, tokens); others' rows of the state hold NaN, as theirs do
    before they begin. Decode steps are those of one token for each."""
    config, params, rows, _ = case(lower_bound)
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kda.KDAState.zeros(config, MAX_REQUESTS, num_layers=3))
    done, found = [0] * len(LENGTHS), [[] for _ in LENGTHS]
    for work in steps:
        decode = all(count == 1 for _, count in work)
        num_rows, requests = (4, 4) if decode else (NUM_ROWS, 4)
        given = [np.full((num_rows, *part.shape[1:]), np.nan, np.float32) for part in rows[0]]
        req_rows, lens, counts, at = np.zeros(requests, np.int32), np.zeros(requests, np.int32), [], 0
        for i, (r, count) in enumerate(work):
            for to, part in zip(given, rows[r]):
                to[at : at + count] = part[done[r] : done[r] + count]
            req_rows[i], lens[i], at = REQUEST_ROWS[r], done[r] + count, at + count
            counts.append(count)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            max_seq_len=256,
            req_pool_indices=jnp.asarray(req_rows),
            seq_lens=jnp.asarray(lens),
            out_cache_loc=jnp.zeros(num_rows, jnp.int32),
            extend_lens=None if decode else jnp.asarray(np.pad(counts, (0, requests - len(counts))), jnp.int32),
        )
        rows_of = kda.KDARows(**dict(zip(("qkv", "decay", "beta"), map(jnp.asarray, given))))
        out, state = step(state, rows_of, params, batch, config=config)
        out, at = np.asarray(out), 0
        assert not out[sum(counts) :].any()
        for r, count in work:
            found[r].append(out[at : at + count])
            at, done[r] = at + count, done[r] + count
    return [np.concatenate(part) if part else None for part in found], state


@pytest.mark.long
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_chunks_and_tokens_are_transformers(lower_bound):
    """Parts of several requests in a step, shorter than the convolution and longer than a chunk; then single tokens."""
    steps = [[(0, 33), (1, 2)], [(2, 2), (0, 16), (1, 34)], [(0, 21)], [(1, 1), (0, 1)], [(1, 1), (0, 1)], [(0, 3)]]
    steps += [[(1, 1)], [(1, 1)]]
    found, state = serve(lower_bound, steps)
    _, params, _, wanted = case(lower_bound)
    for got, (out, gate, normed) in zip(found, wanted, strict=True):
        assert got.shape == out.shape
        np.testing.assert_allclose(got, out, rtol=1e-4, atol=1e-5)
        ours = kda.gated_norm(jnp.asarray(out), jnp.asarray(gate), params.o_norm, 1e-5)
        np.testing.assert_allclose(ours.reshape(len(out), -1), normed, rtol=1e-5, atol=1e-5)
        assert len(out) < 40 or np.abs(out[-1]).max() > 0.01
    for x in jax.tree.leaves(state):  # other layers' rows, and rows without a request, are as they were
        by_layer = np.asarray(x).reshape(3, MAX_REQUESTS, -1)
        assert np.isnan(by_layer[[0, 2]]).all() and np.isnan(by_layer[1, [1, 2]]).all()
        assert np.isfinite(by_layer[1, list(REQUEST_ROWS)]).all()


def test_any_chunking_gives_the_same_state():
    """To rounding: the same tokens in one step, and token by token from the start."""
    (one, *_), state = serve(-5.0, [[(0, 40)]])
    (other, *_), tokens = serve(-5.0, [[(0, 1)]] * 40)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(tokens), strict=True):
        row = MAX_REQUESTS + REQUEST_ROWS[0]
        np.testing.assert_allclose(x[row], y[row], rtol=1e-4, atol=1e-5)


def test_a_step_without_rows():
    one = jnp.zeros(1, jnp.int32)
    of_one = {"req_pool_indices": one, "seq_lens": one, "extend_lens": one}
    batch = ForwardBatch(mode=ForwardMode.EXTEND, max_seq_len=64, **of_one, out_cache_loc=one[:0])
    tables = RequestTables(req_to_token=jnp.zeros((2, 64), jnp.int32))
    metadata = build_v32_metadata(SPEC, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
    step = kda.prepare(batch, metadata)
    assert not step.fresh.any() and not step.counts.any() and step.owner.shape == (0,)


def test_drafts_are_refused():
    ints = jnp.ones(2, jnp.int32)
    batch = ForwardBatch(
        mode=ForwardMode.TARGET_VERIFY,
        max_seq_len=64,
        req_pool_indices=ints[:1],
        seq_lens=ints[:1],
        out_cache_loc=ints,
        num_draft_tokens=2,
    )
    tables = RequestTables(req_to_token=jnp.zeros((2, 64), jnp.int32))
    metadata = build_v32_metadata(SPEC, batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
    with pytest.raises(ValueError, match=r"batch\.mode must be EXTEND, DECODE or IDLE, got TARGET_VERIFY"):
        kda.prepare(batch, metadata)

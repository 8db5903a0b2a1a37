"""The layers' decode step on torch tensors beside JAX's: the same bytes in the caches, the same output.

Without a GPU the kernels run in Triton's interpreter, and the attention is the reference.
"""

from __future__ import annotations

import dataclasses
import functools
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import small_engine
from drop_in_calls import BACKENDS, served_by
from small_engine import LAYERS, MAX_REQUESTS, MIDDLE
from sparse_mla_torch import layers as torch_layers
from sparse_mla_torch.attention import call_cache, route
from sparse_mla_torch.attention.backends import triton as triton_backend
from sparse_mla_torch.operations import indexer as torch_selection
from sparse_mla_torch.operations.metadata import build_v32_metadata
from triton_device import DEVICE, tensor

import jax_sparse_mla as mla
from benchmarks import stack as stacks
from benchmarks.stack import Stack, fill
from benchmarks.step import Program, Steps, decode_start
from benchmarks.torch_step import TorchStep
from jax_sparse_mla import layers
from jax_sparse_mla.indexer import select as index_selection

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of NaN in the interpreter
]
DECODE, EXTEND, VERIFY = mla.ForwardMode.DECODE, mla.ForwardMode.EXTEND, mla.ForwardMode.TARGET_VERIFY
PROMPTS = (200, 126, 66)
STEPS = (  # requests that grow, wait, and stand elsewhere in the batch; an int is padding
    [(0, 200, 1), (1, 126, 1), 1, (2, 66, 1)],
    [(1, 127, 1), (2, 67, 1), (0, 201, 1), 1],  # completes a group of 128, and two of 4
    [1, (0, 202, 1), (1, 128, 1), (2, 68, 1)],
    [(0, 203, 1), 1, (2, 69, 1), (1, 129, 1)],
)


def tensors(tree):
    """The tree with torch's copies of its arrays."""
    return jax.tree.map(lambda x: tensor(np.asarray(x)), tree)


def as_numpy(x) -> np.ndarray:
    return np.asarray(x.cpu() if isinstance(x, torch.Tensor) else x)


def bf16_queries(rows):
    return dataclasses.replace(rows, q=rows.q.astype(jnp.bfloat16))


@functools.cache
def prefilled(ratio: int | None, pooled: bool, max_draft_tokens: int = 0):
    """Caches behind the prompts, of a layer alone or among others, and the layer's parameters."""
    world = small_engine.make_world(ratio)
    work, num_rows = [(i, 0, count) for i, count in enumerate(PROMPTS)], sum(PROMPTS)
    batch, rows, _ = small_engine.make_step(world, EXTEND, work, num_rows=num_rows)
    cache = world.empty_cache(max_draft_tokens=max_draft_tokens)
    (_, cache, _), _ = small_engine.step_function(ratio, False)(cache, rows, world.params, batch, world.tables)
    if not pooled:
        return world, cache, world.params
    pool = small_engine.all_layers(world)

    def among_others(whole, alone):
        rows = alone.shape[0]
        return whole.at[MIDDLE * rows : (MIDDLE + 1) * rows].set(alone)

    data = jax.tree.map(among_others, pool, jax.tree.unflatten(jax.tree.structure(pool), jax.tree.leaves(cache)))
    params = None if ratio is None else small_engine.stacked(world.params).layer(MIDDLE)
    return world, data.layer(MIDDLE), params


def check_output(got, want, live: list[int]) -> None:
    """The output of the rows that are not padding; the others' is 0."""
    assert got.dtype is torch.bfloat16 and got.shape == want.shape
    np.testing.assert_allclose(got[live].float().cpu(), np.asarray(want, np.float32)[live], atol=4e-3, rtol=8e-3)
    assert not np.delete(as_numpy(got.float()), live, axis=0).any()


def check_caches(got, want, words="") -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(as_numpy(a), as_numpy(b), err_msg=f"{words} {jax.tree_util.keystr(path)}")


@pytest.mark.always("0-True")
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_decode_steps_equal_jax_s(ratio, pooled):
    world, cache, params = prefilled(ratio, pooled)
    torch_cache, torch_params, torch_tables = map(tensors, (cache, params, world.tables))
    step, arguments = small_engine.step_function(ratio, False), {"spec": world.spec, "ratio": ratio}
    cache = jax.tree.map(jnp.copy, cache)
    for work in STEPS:
        batch, rows, owners = small_engine.make_step(world, DECODE, work, num_rows=len(work), hostile=True)
        rows = bf16_queries(rows)
        (want, cache, _), _ = step(cache, rows, params, batch, world.tables)
        torch_batch = tensors(batch)
        shared = torch_layers.prepare_v4_step(world.spec, torch_batch, torch_tables)
        assert not shared.overflow and not shared.plans
        of_step = tensors(rows), torch_params, torch_batch, shared.metadata
        got = torch_layers.v4_layer(torch_cache, *of_step, **arguments)
        live = list(owners.values())
        check_output(got, want, live)
        check_caches(torch_cache, cache, work)


@pytest.mark.always(1)
@pytest.mark.parametrize("pooled", [False, True])
def test_v32_decode_steps_equal_jax_s(pooled):
    """And a layer without an indexer attends to the same slots, over keys of its own."""
    world, cache, _ = prefilled(None, pooled)
    torch_cache, tables = tensors(cache), tensors(world.tables)
    shared_cache = dataclasses.replace(tensors(cache.alone()), index_k=None)
    cache, step = jax.tree.map(jnp.copy, cache), small_engine.step_function(None, False)
    for work in STEPS:
        batch, rows, owners = small_engine.make_step(world, DECODE, work, num_rows=len(work), hostile=True)
        rows = bf16_queries(rows)
        (want, cache, positions), _ = step(cache, rows, None, batch, world.tables)
        torch_batch, torch_rows, live = tensors(batch), tensors(rows), list(owners.values())
        metadata = build_v32_metadata(world.spec, torch_batch, tables, fp8_kv_cache=True, prefill_backend="flashmla_kv")
        plans, of_step = [], (torch_batch, metadata)
        got, slots = torch_layers.v32_layer(torch_cache, torch_rows, *of_step, spec=world.spec, on_plan=plans.append)
        assert len(plans) == 1
        check_output(got, want, live)
        for row in live:  # the selected slots are those of the selected positions
            request = int(batch.req_pool_indices[row])
            chosen = [int(world.tables.req_to_token[request, p]) for p in positions[row] if p >= 0]
            assert sorted(x for x in slots[row].tolist() if x >= 0) == sorted(chosen)
        check_caches(torch_cache, cache, work)
        without = dataclasses.replace(torch_rows, index_q=None, index_k=None, index_weights=None)
        shared, again = torch_layers.v32_layer(shared_cache, without, *of_step, spec=world.spec, slots=slots)
        assert again is slots and torch.equal(shared, got)


@pytest.mark.parametrize("ratio", [None, 4])
def test_positions_out_and_in(ratio):
    """They are JAX's; a step that takes them equals the first to the bit, others give another output."""
    world, cache, params = prefilled(ratio, False)
    batch, rows, owners = small_engine.make_step(world, DECODE, STEPS[0], num_rows=4)
    rows, step = bf16_queries(rows), small_engine.step_function(ratio, False)
    (_, _, want), _ = step(jax.tree.map(jnp.copy, cache), rows, params, batch, world.tables)
    batch, rows, tables, params = map(tensors, (batch, rows, world.tables, params))
    if ratio is None:
        options = {"fp8_kv_cache": True, "prefill_backend": "flashmla_kv"}
        metadata = build_v32_metadata(world.spec, batch, tables, **options)
    else:
        metadata = torch_layers.prepare_v4_step(world.spec, batch, tables).metadata

    def layer(**given):
        fresh = tensors(cache)
        if ratio is None:
            return torch_layers.v32_layer(fresh, rows, batch, metadata, spec=world.spec, **given), fresh
        shared = {"spec": world.spec, "ratio": ratio}
        return torch_layers.v4_layer(fresh, rows, params, batch, metadata, **shared, **given), fresh

    plain, written = layer()
    plain, *slots = plain if ratio is None else [plain]
    (out, *again, selected), _ = layer(return_selected=True)
    assert torch.equal(out, plain) and all(map(torch.equal, again, slots))
    live = list(owners.values())
    np.testing.assert_array_equal(as_numpy(selected)[live], np.asarray(want)[live])
    assert (selected[live] >= 0).all(1).any() and selected.dtype is torch.int32
    (replayed, *again, returned), caches = layer(selected=selected, return_selected=True)
    assert torch.equal(replayed, plain) and torch.equal(returned, selected) and all(map(torch.equal, again, slots))
    check_caches(caches, jax.tree.map(as_numpy, written))
    unseen = torch.where(selected < 0, 2**31 - 1, selected)
    replayed, *_ = layer(selected=unseen, return_selected=True)[0]
    assert torch.equal(replayed, plain)
    other = torch.where(selected > 2, selected - 1, selected)
    replayed, *_ = layer(selected=other, return_selected=True)[0]
    assert (replayed[live] != plain[live]).any()
    with pytest.raises(ValueError, match="selected must have shape"):
        layer(selected=selected[:, :5].contiguous())
    with pytest.raises(TypeError, match=r"selected must be a torch\.Tensor, int32"):
        layer(selected=selected.long())


def test_positions_of_layers_that_select_none():
    world, cache, params = prefilled(0, False)
    batch, rows, _ = small_engine.make_step(world, DECODE, STEPS[0], num_rows=4)
    batch, rows, cache, params, tables = map(tensors, (batch, bf16_queries(rows), cache, params, world.tables))
    arguments = rows, params, batch, torch_layers.prepare_v4_step(world.spec, batch, tables).metadata
    out, selected = torch_layers.v4_layer(cache, *arguments, spec=world.spec, ratio=0, return_selected=True)
    assert selected is None and out.shape[0] == 4
    with pytest.raises(ValueError, match="selected must be None in a layer of ratio 0"):
        given = torch.zeros(4, 16, dtype=torch.int32, device=DEVICE)
        torch_layers.v4_layer(cache, *arguments, spec=world.spec, ratio=0, selected=given)


def test_v32_steps_that_are_not_served():
    world, cache, _ = prefilled(None, False)
    batch, rows, _ = small_engine.make_step(world, DECODE, STEPS[0], num_rows=4)
    cache, rows, batch, tables = map(tensors, (cache, bf16_queries(rows), batch, world.tables))
    paged = {"fp8_kv_cache": True, "prefill_backend": "flashmla_kv"}
    metadata, slots = build_v32_metadata(world.spec, batch, tables, **paged), torch.zeros(4, 16, dtype=torch.int32)
    without = dataclasses.replace(rows, index_q=None, index_k=None, index_weights=None)
    verify = dataclasses.replace(batch, mode=VERIFY, num_draft_tokens=1)
    for given, of_batch, options, message in (
        (rows, verify, {}, "serves DECODE steps .* got TARGET_VERIFY"),
        (rows, batch, {"slots": slots.to(DEVICE)}, "needs rows of an indexer or slots, got both"),
        (without, batch, {}, "needs rows of an indexer or slots, got neither"),
        (without, batch, {"slots": slots.to(DEVICE), "return_selected": True}, "layers with an indexer, got slots"),
        (without, batch, {"slots": slots.to(DEVICE)}, "rows without index_k and a cache with"),
        (dataclasses.replace(rows, kv=rows.kv[:2]), batch, {}, "kv must have shape"),
        (
            dataclasses.replace(rows, index_weights=rows.index_weights[:, :1]),
            batch,
            {},
            "index_weights must have shape",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            torch_layers.v32_layer(cache, given, of_batch, metadata, spec=world.spec, **options)


@pytest.mark.long
def test_drafts_with_room_in_the_ring_and_without():
    ratio, work = 4, [(0, 200, 3), (1, 126, 3)]
    for room in (0, 2):
        world, cache, params = prefilled(ratio, False, room)
        batch, rows, _ = small_engine.make_step(world, VERIFY, work, num_rows=6)
        seq_lens = batch.seq_lens - 3  # the builder adds the drafts
        batch = dataclasses.replace(batch, seq_lens=seq_lens, num_draft_tokens=3)
        rows = bf16_queries(rows)
        torch_cache, torch_batch = tensors(cache), tensors(batch)
        shared = torch_layers.prepare_v4_step(world.spec, torch_batch, tensors(world.tables))
        call = functools.partial(
            torch_layers.v4_layer,
            *(torch_cache, tensors(rows), tensors(params), torch_batch, shared.metadata),
            spec=world.spec,
            ratio=ratio,
        )
        if not room:
            with pytest.raises(ValueError, match=r"cache.state must keep 10 tokens of each request .* got room for 8"):
                call()
            continue
        cache = jax.tree.map(jnp.copy, cache)
        (want, cache, _), _ = small_engine.step_function(ratio, False)(cache, rows, params, batch, world.tables)
        check_output(call(), want, list(range(6)))
        check_caches(torch_cache, cache, work)


def test_empty_caches_are_torch_s():
    """Of the shapes of JAX's, several layers in one tensor, and of the same dataclasses."""
    sizes = {"num_pages": 3, "num_swa_pages": 2, "max_requests": 2, "num_layers": LAYERS}
    for ratio in (0, 4, 128):
        want = layers.V4LayerCache.zeros(small_engine.V4, ratio, **sizes)
        got = torch_layers.v4_layer_cache(small_engine.V4, ratio, device="cpu", **sizes)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert isinstance(a, torch.Tensor) and not a.any()
            assert tuple(a.shape) == b.shape and str(a.dtype) == f"torch.{b.dtype}"
        view = got.layer(1).alone()
        assert view.swa.data.data_ptr() == got.swa.data.data_ptr() + got.swa.data.numel() // LAYERS  # no copy


def change(tree, path, function):
    """The tree with one of its fields, by a dotted path, replaced."""
    name, _, rest = path.partition(".")
    value = getattr(tree, name)
    return dataclasses.replace(tree, **{name: change(value, rest, function) if rest else function(value)})


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "path", "wrong", "error", "message"),
    [
        ("rows", "q", lambda x: x.float(), TypeError, "rows.q must be a torch.Tensor, bfloat16"),
        ("rows", "kv", lambda x: x[:, :256], ValueError, "rows.kv must have shape"),
        ("rows", "compressed_kv", lambda x: x.double(), TypeError, "rows.compressed_kv must be"),
        ("rows", "index.score", lambda x: x[:1], ValueError, "rows.index.score must have shape"),
        ("rows", "index.q", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), ValueError, "contiguous"),
        ("rows", "compressed_score", lambda x: None, TypeError, "rows.compressed_score must be given"),
        ("params", "attn_sink", lambda x: x[:1], ValueError, "params.attn_sink must have shape"),
        ("params", "index_compressor.ape", lambda x: x.bfloat16(), TypeError, "params.index_compressor.ape must be"),
        ("cache", "swa.data", lambda x: x[:, :-8], ValueError, "cache.swa.data must have shape"),
        ("cache", "index_k", lambda x: x[:2], ValueError, "cache.index_k must have a key for every"),
        ("cache", "index_k", lambda x: x.view(torch.int8), TypeError, "cache.index_k must be"),
        ("cache", "state.score", lambda x: x[:, :4], ValueError, "cache.state.score must have shape"),
        ("cache", "state.kv", lambda x: x[:1], ValueError, "cache.state must have a row for each row of req_to_token"),
        ("metadata", "positions", lambda x: x[:2], ValueError, "the step's positions must have shape"),
        ("metadata", "swa_out_cache_loc", lambda x: x.long(), TypeError, "the step's swa_slots must be"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(which, path, wrong, error, message):
    world, cache, params = prefilled(4, False)
    batch, rows, _ = small_engine.make_step(world, DECODE, STEPS[0], num_rows=4)
    batch, tables = tensors(batch), tensors(world.tables)
    metadata = torch_layers.prepare_v4_step(world.spec, batch, tables).metadata
    given = {"cache": tensors(cache), "rows": tensors(bf16_queries(rows)), "params": tensors(params)}
    given |= {"batch": batch, "metadata": metadata}
    given[which] = change(given[which], path, wrong)
    with pytest.raises(error, match=f"v4_layer: .*{message}"):
        torch_layers.v4_layer(**given, spec=world.spec, ratio=4)


# --- a row alone and among others -----------------------------------------------------------------

# Tokens of the prompts, each the last one of a request of its own. None completes a group, whose entry others read.
TOKENS = [(i, place, 1) for i, count in enumerate(PROMPTS) for place in reversed(range(count)) if place % 4 != 3]
# So many rows take other kernels than few where nothing prevents it; the interpreter has one for any logits.
MANY = 260 if DEVICE == "cuda" else 20


def decode_tokens(ratio, count, monkeypatch, **options):
    """`(out, slots)` of a step of the first tokens' requests, which share the pages of their prompts."""
    world, cache, params = prefilled(ratio, False)
    # V3.2's columns are the selected ones alone: enough for several programs.
    spec = dataclasses.replace(world.spec, index_topk=160) if ratio is None else world.spec
    batch, rows, _ = small_engine.make_step(world, DECODE, TOKENS[:count], num_rows=count)
    own_rows = batch.req_pool_indices + MAX_REQUESTS * jnp.arange(count, dtype=jnp.int32)
    batch = dataclasses.replace(batch, req_pool_indices=own_rows)
    tables = dataclasses.replace(world.tables, req_to_token=jnp.tile(world.tables.req_to_token, (count, 1)))
    states = {name: getattr(cache, name) for name in ("state", "index_state") if getattr(cache, name, None)}
    cache = dataclasses.replace(cache, **jax.tree.map(lambda x: jnp.tile(x, (count, 1, 1)), states))
    cache, rows, batch, tables = map(tensors, (cache, bf16_queries(rows), batch, tables))
    selected, index_topk = [None], torch_layers.index_topk
    with monkeypatch.context() as patch:
        patch.setattr(torch_layers, "index_topk", lambda *x, **y: selected.append(index_topk(*x, **y)) or selected[-1])
        if ratio is None:
            paged = {"fp8_kv_cache": True, "prefill_backend": "flashmla_kv"}
            metadata = build_v32_metadata(spec, batch, tables, **paged)
            out, _ = torch_layers.v32_layer(cache, rows, batch, metadata, spec=spec, **options)
        else:
            metadata = torch_layers.prepare_v4_step(spec, batch, tables).metadata
            of_step = cache, rows, tensors(params), batch, metadata
            out = torch_layers.v4_layer(*of_step, spec=spec, ratio=ratio, **options)
    return out, selected[-1]


@pytest.mark.always("None-triton")
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("hopper", "triton")])
@pytest.mark.parametrize("ratio", [None, 0, 4, 128])
def test_a_row_does_not_depend_on_the_number_of_rows(ratio, backend, monkeypatch):
    """Its output, to the bit, and the slots that its indexer selects."""
    prefilled(ratio, False)  # by no backend's name
    with served_by(backend, monkeypatch):
        many, slots = decode_tokens(ratio, MANY, monkeypatch, batch_invariant=True)
        assert many.isfinite().all() and many.any(-1).all() and (slots is None) == (ratio in (0, 128))
        for count in (1, 3):
            alone, chosen = decode_tokens(ratio, count, monkeypatch, batch_invariant=True)
            assert torch.equal(alone.view(torch.int16), many[:count].view(torch.int16))
            assert slots is None or torch.equal(chosen, slots[:count])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("ratio", [None, 4])
def test_what_batch_invariance_asks_of_the_kernels(ratio, batch_invariant, monkeypatch):
    """Logits of few rows at a time, by the kernel of few; attention to all keys of a row by one program."""
    parts, may_split = [], []
    launch_logits, launches = torch_selection.launch_logits, triton_backend.kernels.launches

    def logits_of(q, *arrays, rows_of_call, **options):
        parts.append((len(q), rows_of_call))
        launch_logits(q, *arrays, rows_of_call=rows_of_call, **options)

    def attention_of(*shape, **options):
        may_split.append(options["may_split"])
        return launches(*shape, **options)

    prefilled(ratio, False)  # by no backend's name
    monkeypatch.setattr(index_selection, "INVARIANT_ROWS", 4)
    monkeypatch.setattr(torch_selection, "launch_logits", logits_of)
    monkeypatch.setattr(triton_backend.kernels, "launches", attention_of)
    with served_by("triton", monkeypatch):
        decode_tokens(ratio, 6, monkeypatch, batch_invariant=batch_invariant)
    assert parts == ([(4, 4), (2, 2)] if batch_invariant else [(6, 6)])
    assert may_split == [not batch_invariant]


# --- all layers of a step -------------------------------------------------------------------------


def both(stack: Stack, start) -> tuple[Steps, TorchStep]:
    """JAX's program and torch's step, before their first step on the same caches."""
    of_torch = TorchStep(stack, DEVICE)
    if DEVICE == "cuda":
        of_torch.capture()
    program = Program(stack, "decode", stack.batch).lower().compile()
    caches = fill(stack.empty_caches())
    of_torch.load(caches)
    of_jax = Steps(program, caches)
    of_jax.start(start)
    of_torch.start(start)
    return of_jax, of_torch


@pytest.mark.long
@pytest.mark.no_gpu
def test_layers_that_share_their_tensors(monkeypatch):
    """Each layer's keys come out of the layer below, as in the benchmark."""
    monkeypatch.setattr(stacks, "use_triton", lambda: True)  # JAX's step then chains its layers as torch's does
    stack = Stack(spec=small_engine.V4, ratios=(0, 4, 128, 4), batch=2, max_len=512)
    of_jax, of_torch = both(stack, np.array([254, 383], np.int32))
    for _ in range(2):
        of_jax(1)
        out = of_torch.step()
        np.testing.assert_allclose(out.float(), np.asarray(of_jax.state[2], np.float32), atol=2e-2, rtol=2e-2)
    assert of_torch.lens.tolist() == np.asarray(of_jax.state[1]).tolist() == [256, 385]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_captured_step_equals_jax_s_to_the_bit(backend, batch, monkeypatch):
    """The output and every byte of the caches, of requests of several lengths."""
    monkeypatch.delenv("JAX_SPARSE_MLA_BACKEND", raising=False)
    if why := route.missing(backend, "decode", route.device_info(torch.device("cuda"))):
        pytest.skip(f"{backend}: {why}")
    monkeypatch.setenv("JAX_SPARSE_MLA_DECODE_BACKEND", backend)
    call_cache.forget()
    stack = Stack(ratios=(0, 4, 128, 4, 128), batch=batch, max_len=4096)
    of_jax, of_torch = both(stack, decode_start(stack, staggered=True))
    for _ in range(6):
        of_jax(1)
        of_torch.out.fill_(torch.nan)
        of_torch(1)
        want, got = np.asarray(of_jax.state[2]), of_torch.out.view(torch.int16).cpu().numpy()
        np.testing.assert_array_equal(got, want.view(np.int16))
        check_caches(of_torch.caches, of_jax.caches)
    assert of_torch.lens.tolist() == np.asarray(of_jax.state[1]).tolist()
    call_cache.forget()


# --- the example ----------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_step.py"


@pytest.mark.no_gpu
def test_the_example_uncaptured(capsys):
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    hidden = runpy.run_path(str(EXAMPLE))["main"](5)
    assert hidden.float().isfinite().all() and not torch.equal(*hidden)
    assert "layers: 3 | tokens: [5, 5] | captured: False" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_example_starts_no_jax_backend():
    code = (
        "import runpy\n"
        f"hidden = runpy.run_path({str(EXAMPLE)!r})['main'](40)\n"
        "assert hidden.float().isfinite().all()\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"layers: 43 | tokens: {[40] * 8} | captured: True" in done.stdout

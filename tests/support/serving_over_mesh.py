"""Engines over meshes of virtual CPU devices, in processes that tests/serving/test_mesh.py starts.

python serving_over_mesh.py [CASE ...]           four devices; prints RESULTS and a JSON object, case → traceback
python serving_over_mesh.py --process I PORT     process I of two, each with two devices
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import unittest.mock
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from released_checkpoints import FP4_CONFIG, quantised, released_v4, without_quantised, write
from toy_model import ToyModel
from virtual_devices import assert_refused, report, run_cases

from jax_sparse_mla.attention import context_parallel_decode, cut_pages, sparse_mla_decode
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, write_kv
from jax_sparse_mla.serving import Model, load, memory
from jax_sparse_mla.serving import mesh as mesh_module
from jax_sparse_mla.serving.engine import SMALLEST_CHUNK, Engine
from jax_sparse_mla.serving.mesh import (
    HEADS,
    REQUESTS,
    MeshEngine,
    cut_model,
    init_cut_params,
    load_cut,
    new_mesh,
    parameter_specs,
)
from jax_sparse_mla.serving.presets import CONFIGS
from jax_sparse_mla.serving.quantised import Quantised
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions

HEADS_OF_FOUR = dict(num_attention_heads=4, index_n_heads=4, index_topk=32, num_hidden_layers=2)
V4 = CONFIGS["v4"] | dict(hidden_size=128, num_attention_heads=8, index_n_heads=4, index_topk=16, num_hidden_layers=1)
V4 |= dict(layer_types=["compressed_sparse_attention"], mlp_layer_types=["moe"])
# Two layers whose sinks share an array, and quick to compile.
WINDOWS = V4 | dict(num_hidden_layers=2, layer_types=["sliding_attention"] * 2, mlp_layer_types=["hash_moe", "moe"])
V32 = CONFIGS["v32"] | HEADS_OF_FOUR | dict(hidden_size=128, n_group=2)
GLM53 = CONFIGS["glm53"]["text_config"] | HEADS_OF_FOUR | dict(model_type="glm5_next_text", hidden_size=64)
GLM53 |= dict(linear_head_dim=32, layer_types=["linear_attention", "indexed_attention"])
GLM53 |= dict(mlp_layer_types=["dense", "sparse"])
# Two logits that are closer than this, as a share of the larger one, may change places. Weights are float32: only a
# key that is rounded to FP8 on the other side moves a logit by more than the order of a sum does.
ROUNDING = 2e-3
LENGTHS, NEW = (5, 40, 70, 17, 3, 100, 33, 64), 8
OPTIONS = EngineOptions(chunk_size=SMALLEST_CHUNK, max_batch=2, max_len=256)  # one program for prompts


def requests(count=None):
    rng = np.random.default_rng(0)
    return [Request(rng.integers(0, 256, n).tolist(), NEW) for n in LENGTHS[:count]]


def served(engine, these=None):
    these = requests() if these is None else these
    engine.run(these)
    assert engine.idle and all(len(request.output) == request.max_new_tokens for request in these)
    return these


def mesh_of(*shape):
    return Mesh(np.array(jax.devices()).reshape(shape), (REQUESTS, HEADS))


def over(model, params, mesh, options=OPTIONS):
    return MeshEngine(*cut_model(model, params, mesh), options, mesh)


def assert_same_tokens(found, expected):
    """Equal up to the first token whose margin is within the rounding; most must be."""
    compared = 0
    for ours, theirs in zip(found, expected, strict=True):
        for a, b, margin in zip(ours.output, theirs.output, theirs.margins):
            if margin < ROUNDING:
                break
            assert a == b, (ours.output, theirs.output, theirs.margins)
            compared += 1
        else:
            np.testing.assert_allclose(ours.margins, theirs.margins, atol=ROUNDING)
    assert compared > 0.8 * NEW * len(expected), compared


def count_arrays(engine):
    """Counts an engine's steps, and those of them whose array comes from the host."""
    counts, pack, start = {"steps": 0, "from the host": 0}, engine._pack, engine._start

    def packing(program, plan):
        counts["from the host"] += plan is not None  # without a plan it is an argument to compile with
        return pack(program, plan)

    def starting(*args):
        counts["steps"] += 1
        return start(*args)

    engine._pack, engine._start = packing, starting
    return counts


def layouts(config, shapes, *, exact=False, count=None, as_stored=False):
    options = dataclasses.replace(OPTIONS, batch_invariant=exact)  # whoever shares a step with whom
    model = Model.from_config(config)
    params = model.init_params(seed=0, dtype=jnp.float32, as_stored=as_stored)
    expected = served(Engine(model, params, options), requests(count))
    assert len({tuple(request.output) for request in expected}) == len(expected)
    for shape in shapes:
        engine = over(model, params, mesh_of(*shape), options)
        counts = count_arrays(engine)
        found = served(engine, requests(count))
        if shape[0] < 4:  # of four shares one always reads while others decode
            assert 0 < counts["from the host"] < counts["steps"]  # the others were on the devices already
        assert_same_tokens(found, expected)
        with jax.transfer_guard("disallow"):  # its programs are compiled
            assert [r.output for r in served(engine, requests(count))] == [r.output for r in found]
        for share in engine.scheduler.shares:
            assert share.counters.finished == 2 * len(expected) // shape[0]
            assert len(share.pool.pages.free) == share.pool.num_pages - 1
        for x, spec in zip(
            jax.tree.leaves(engine.params), jax.tree.leaves(parameter_specs(engine.params, engine.mesh))
        ):
            assert x.sharding.is_equivalent_to(NamedSharding(engine.mesh, spec), x.ndim)
        cut = [x for x in jax.tree.leaves(engine.params) if x.addressable_shards[0].data.size < x.size]
        assert bool(cut) == (shape[1] > 1)
        if as_stored:
            mlp = engine.params.layers[-1].mlp
            assert [len(x.sharding.device_set) for x in jax.tree.leaves(mlp.down)] == [4, 4]
            assert {x.addressable_shards[0].data.shape[0] for x in jax.tree.leaves(mlp.down)} == {
                mlp.down.shape[0] // shape[1]
            }
        if exact:  # each share is an engine by itself: to the bit
            assert [r.output for r in found] == [r.output for r in expected]
            assert [r.margins for r in found] == [r.margins for r in expected]


def v4():
    layouts(V4, [(2, 2)])


def windows():
    """Quantised weights: experts in FP4, cut with their scales."""
    layouts(WINDOWS, [(2, 2)], count=6, as_stored=True)


def v4_requests():
    layouts(V4, [(4, 1)], exact=True)


def v4_heads():
    layouts(V4, [(1, 4)])


def glm53():
    """Requests alone are cut."""
    layouts(GLM53, [(4, 1)])


def v32():
    layouts(V32, [(2, 2)])


def drafts_and_prefixes():
    """Steps of several modes, drafts, states that are kept and restored, on each share by itself."""
    model = ToyModel()
    params = model.init_params(0)
    options = dataclasses.replace(OPTIONS, max_len=600, chunk_size=128, speculative_steps=2, reuse_points=2)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 256, 520).tolist()
    prompts = [[*text[: 257 + 20 * i], i] for i in range(8)] + [[9, i] for i in range(4)]

    def serve(engine):
        these = [Request(prompt, 3 + i % 3) for i, prompt in enumerate(prompts)]
        served(engine, these)
        return [request.output for request in these]

    expected = serve(Engine(model, params, options))
    engine = over(model, params, mesh_of(4, 1), options)
    assert serve(engine) == expected
    again = serve(engine)
    assert again == expected and engine.scheduler.counters.reused > 0
    assert sum(engine.accepted.values()) > 0


def share_pages(config, shape, options, prompts, new):
    """The devices of a share have their parts of the pages, and serve what one device does."""
    model = Model.from_config(config)
    params = model.init_params(seed=0, dtype=jnp.float32, draft_layer=bool(options.speculative_steps))
    plain = dataclasses.replace(options, num_pages=None, speculative_steps=0, reuse_points=0)
    one = Engine(model, params, plain)
    expected = served(one, [Request(prompt, new) for prompt in prompts])
    options = dataclasses.replace(options, context_parallel=shape[1])
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), (REQUESTS, HEADS))
    engine = over(model, params, mesh, options)
    for _ in range(2):
        found = served(engine, [Request(prompt, new) for prompt in prompts])
        for ours, theirs in zip(found, expected, strict=True):
            close = [margin < ROUNDING for margin in theirs.margins]
            until = close.index(True) if any(close) else new
            assert ours.output[:until] == theirs.output[:until], (ours.output, theirs.output, theirs.margins)
            if until == new and not options.speculative_steps:
                np.testing.assert_allclose(ours.margins, theirs.margins, atol=ROUNDING)
    ours, theirs = (served(each, [Request(prompts[0], 2, return_selected=True)])[0] for each in (engine, one))
    np.testing.assert_array_equal(ours.selected, theirs.selected)
    for share in engine.scheduler.shares:
        pool = share.pool
        assert len(pool.pages.free) + len(pool.pages.idle) == pool.num_pages - 1
        assert pool.most_pages == pool.num_pages - shape[1]
    caches = jax.tree.leaves(engine.state.caches, is_leaf=lambda x: isinstance(x, PagedKV))
    cut = [x for x in caches if isinstance(x, PagedKV) and x.page_size < 256]  # a window's pages are whole
    assert cut
    for x in cut:
        shard = x.data.addressable_shards[0].data
        assert shard.shape[0] == x.num_layers * pool.num_pages // shape[1]
        assert len({shard.index[0].start for shard in x.data.addressable_shards}) == shape[0] * shape[1]
    return engine


def context_parallel():
    """Prefixes, drafts and preemption: of the first device the pages run out."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 256, 200).tolist()
    prompts = [text[:120], [*text[:80], *text[120:160]], [7, 8], text[:70]]
    options = dataclasses.replace(OPTIONS, chunk_size=64, speculative_steps=2, reuse_points=1, num_pages=6)
    engine = share_pages(V32, (2, 2), options, prompts, 14)
    counters = engine.scheduler.counters
    assert counters.reused > 0 and counters.preempted > 0, counters
    assert sum(engine.accepted.values()) > 0


def context_parallel_v4():
    """Windows and carried states are whole on every device; short requests leave most devices without a key."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 256, 700).tolist()
    prompts = [text[:640], text[:530], [5, 6, 7], text[300:580]]
    options = dataclasses.replace(OPTIONS, chunk_size=128, max_len=700, reuse_points=2, num_pages=24)
    engine = share_pages(V4, (1, 4), options, prompts, 6)
    assert engine.scheduler.counters.reused > 0


def draft_layers():
    """Cut over heads and experts, a draft layer or a drafter keeps what it keeps on one device."""
    options = dataclasses.replace(OPTIONS, speculative_steps=2)
    drafter = {"dspark_block_size": 5, "dspark_noise_token_id": 0, "dspark_markov_rank": 8}
    for config in (WINDOWS, WINDOWS | drafter | {"dspark_target_layer_ids": [0]}, V32):
        model = Model.from_config(config)
        params = model.init_params(seed=0, dtype=jnp.float32, draft_layer=True)
        one, cut = Engine(model, params, options), over(model, params, mesh_of(1, 4), options)
        assert [r.output for r in served(cut, requests(2))] == [r.output for r in served(one, requests(2))]
        kept = "keys" if config.get("dspark_block_size") else "states"
        states, wanted = (np.asarray(getattr(engine.state.draft, kept)) for engine in (cut, one))
        assert wanted.std() > 0.1
        np.testing.assert_allclose(states, wanted, atol=0.01 * wanted.std())


def replayed(steps=0):
    """Shares return what their rows attend to, and a replayed run equals the first to the bit, whichever share serves a
    request, and beside requests that select. Positions from one device serve as well."""
    options = dataclasses.replace(OPTIONS, speculative_steps=steps, batch_invariant=True)
    model = Model.from_config(V32 | dict(num_hidden_layers=1))
    params = model.init_params(seed=0, dtype=jnp.float32)
    one, engine = Engine(model, params, options), over(model, params, mesh_of(2, 2), options)

    def asked(count=6, replay=None, **fields):
        given = replay or [None] * count
        return [Request(r.prompt, NEW, replay=x, **fields) for r, x in zip(requests(count), given, strict=True)]

    expected, first = (served(x, asked(return_selected=True)) for x in (one, engine))
    assert_same_tokens(first, expected)
    assert all(r.selected.shape == (1, len(r.tokens) - 1, 32) for r in first)
    same = [np.array_equal(a.selected, b.selected) for a, b in zip(first, expected)]
    assert sum(same) > 3, same  # rounding may change a selection
    lows = [0, 3]  # those of one share, which alone select
    mixed = [None if i in lows else r.selected for i, r in enumerate(first)]
    for given in ([r.selected for r in first], mixed):
        again = served(engine, asked(replay=given, return_selected=True))
        for ours, theirs in zip(again, first):
            assert ours.output == theirs.output and ours.margins == theirs.margins
            np.testing.assert_array_equal(ours.selected, theirs.selected)
    assert {program.replays for program in engine.routes} == {True, False}
    assert_same_tokens(served(engine, asked(replay=[r.selected for r in expected])), expected)
    hostile = [np.where(np.arange(32) == 0, 0, np.full_like(r.selected, -1)) for r in first]  # the first token alone
    changed = served(engine, asked(replay=hostile))
    assert all(a.margins != b.margins for a, b in zip(changed[2:], first[2:]))


def replayed_drafts():
    replayed(steps=2)


def made_cut():
    """Random parameters that each device makes for itself are those of one device, cut; none has one whole that is."""
    # Four devices can share the output projection of V4's config, but not its scales.
    for config, as_stored, shape in ((WINDOWS, False, (2, 2)), (V4, True, (1, 4)), (V32, False, (2, 2))):
        model, mesh = Model.from_config(config), mesh_of(*shape)
        own, params = init_cut_params(model, 3, mesh, jnp.float32, as_stored=as_stored)
        whole = model.init_params(3, jnp.float32, as_stored=as_stored)
        expected_own, expected = cut_model(model, whole, mesh)
        assert own == expected_own and jax.tree.structure(params) == jax.tree.structure(expected)
        assert any(x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(params))
        for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected)):
            assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def scales():
    """Each device multiplies its part out to the part of the multiplied-out weight, where all scales differ."""
    for config, shape in ((V4, (2, 2)), (V32, (1, 4))):
        model, mesh, rng = Model.from_config(config), mesh_of(*shape), np.random.default_rng(0)

        def differing(x, rng=rng):
            if not isinstance(x, Quantised):
                return x
            return dataclasses.replace(x, scales=jnp.asarray(rng.integers(100, 140, x.scales.shape, np.uint8)))

        params = model.init_params(seed=0, dtype=jnp.float32, as_stored=True)
        params = jax.tree.map(differing, params, is_leaf=lambda x: isinstance(x, Quantised))
        cut, wanted = (cut_model(model, x, mesh)[1] for x in (params, without_quantised(params)))
        assert any(x.dtype == jnp.uint8 and not x.sharding.is_fully_replicated for x in jax.tree.leaves(cut))
        given, out = (parameter_specs(x, mesh) for x in (cut, wanted))
        found = jax.shard_map(without_quantised, mesh=mesh, in_specs=(given,), out_specs=out)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(found)(cut), wanted)


def write_v4(folder, config):
    """A released checkpoint of random weights, FP8 and FP4."""
    arrays = Model.from_config(config).random_arrays(0)
    stored = quantised(arrays, ml_dtypes.float8_e8m0fnu, fp4_experts=True)[1]
    write(Path(folder), config | FP4_CONFIG, released_v4(stored))


def loaded():
    """From a folder, layer by layer: as cut from the whole model. No device of the mesh has a weight whole that is cut,
    and the host gathers no layers."""
    config = WINDOWS | dict(num_hidden_layers=4, layer_types=["sliding_attention"] * 4, mlp_layer_types=["moe"] * 4)
    mesh = Mesh(np.array(jax.devices()[2:]).reshape(1, 2), (REQUESTS, HEADS))  # the first device is the host's
    shardings, on_host, on_mesh = mesh_module._shardings, [], set()
    others = {id(x): x for x in jax.live_arrays()}  # of other cases

    def watching(params, mesh):
        shards = [shard for x in jax.live_arrays() if id(x) not in others for shard in x.addressable_shards]
        on_host.append(sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0]))
        on_mesh.update(shard.data.shape for shard in shards if shard.device in mesh.devices)
        return shardings(params, mesh)

    with tempfile.TemporaryDirectory() as folder:
        write_v4(folder, config)
        for as_stored in (True, False):
            on_host.clear()
            with unittest.mock.patch.object(mesh_module, "_shardings", watching):
                model, params = load_cut(folder, mesh, as_stored=as_stored)
            *of_layers, _ = on_host  # a copy to the devices may be under way
            assert len(of_layers) == 4, on_host
            assert max(of_layers) - min(of_layers) < 1.5 * memory.size_of(params.layers[0]), on_host
            wanted_model, wanted = cut_model(*load(folder, as_stored=as_stored), mesh)
            assert model == wanted_model and jax.tree.structure(params) == jax.tree.structure(wanted)
            for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(wanted)):
                np.testing.assert_array_equal(x, y)
                assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
                assert x.sharding.is_fully_replicated or x.shape not in on_mesh, x.shape
            on_mesh.clear()
        with unittest.mock.patch.object(memory, "device_memory", lambda: 1 << 20):
            assert_refused(lambda: load_cut(folder, mesh), "a device's part of the weights needs at least 0.0 GiB")


def refusals():
    model = Model.from_config(V4)
    params = jax.eval_shape(lambda: model.init_params(seed=0))
    three = dataclasses.replace(OPTIONS, context_parallel=3)
    ten = dataclasses.replace(model.config.spec, num_heads=10)
    for call, words in (
        (lambda: cut_model(model, params, Mesh(np.array(jax.devices()), ("x",))), "the axes data and model"),
        (lambda: cut_model(Model(dataclasses.replace(model.config, spec=ten)), params, mesh_of(1, 4)), "10 heads"),
        (lambda: cut_model(Model(dataclasses.replace(model.config, o_groups=2)), params, mesh_of(1, 4)), "2 output"),
        (lambda: MeshEngine(model, params, dataclasses.replace(OPTIONS, trace=True), mesh_of(4, 1)), "trace"),
        (lambda: MeshEngine(model, params, three, mesh_of(2, 2)), "context_parallel must be 1 or the 2 devices"),
        (lambda: Engine(model, params, three), "context_parallel must be 1 for an engine of one device, got 3"),
        (lambda: new_mesh(3, 2), "a mesh of 3x2 takes 6 devices, JAX has 4"),
    ):
        assert_refused(call, words)


_CASES = (
    v4,
    v4_requests,
    v4_heads,
    glm53,
    v32,
    drafts_and_prefixes,
    draft_layers,
    replayed,
    replayed_drafts,
    context_parallel,
    context_parallel_v4,
    made_cut,
    scales,
    loaded,
    windows,
    refusals,
)
CASES = {case.__name__: case for case in _CASES}


def over_processes(index, port):
    """Context parallel decode, and an engine whose shares are in different processes."""
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2

    rng = np.random.default_rng(0)
    cache = PagedKV.zeros(KVLayout.V4_FP8, 8, 16)
    rows = jnp.asarray(rng.standard_normal((128, 512)), jnp.float32)
    cache = write_kv(cache, jnp.arange(128, dtype=jnp.int32), rows)
    q = jnp.asarray(rng.standard_normal((2, 1, 4, 512)), jnp.float32)
    indices = jnp.asarray(rng.integers(-2, 130, (2, 1, 24)), jnp.int32)
    sink = jnp.arange(4.0)
    wanted = sparse_mla_decode(q, cache, indices, softmax_scale=0.3, attn_sink=sink)
    mesh = Mesh(np.array(jax.devices()), ("pages",))

    def attend(q, cache, indices, sink):
        return context_parallel_decode(q, cache, indices, axis_name="pages", softmax_scale=0.3, attn_sink=sink)

    specs = P(), P("pages"), P(), P("pages")
    arguments = jax.tree.map(np.asarray, (q, cut_pages(cache, 4), indices, sink))
    arguments = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs)]
    found = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(None, None, "pages")))(*arguments)
    for ours, theirs in zip(found, wanted):
        for shard in ours.addressable_shards:
            np.testing.assert_allclose(shard.data, theirs[shard.index], rtol=1e-5, atol=1e-5)

    model = Model.from_config(WINDOWS)
    params = model.init_params(seed=2, dtype=jnp.float32)  # no token's margin is within the rounding
    mine = served(over(model, params, mesh_of(2, 2)), requests(4))
    if index == 0:
        assert_same_tokens(mine, served(Engine(model, params, OPTIONS), requests(4)))
    # Every process knows what the rows of all shares have attended to, and gives it to all devices.
    model = Model.from_config(V32 | dict(num_hidden_layers=1))
    engine = over(model, model.init_params(seed=0, dtype=jnp.float32), mesh_of(2, 2))
    first = served(engine, [Request(r.prompt, NEW, return_selected=True) for r in requests(4)])
    again = served(engine, [Request(r.prompt, NEW, replay=r.selected) for r in first])
    assert [r.margins for r in again] == [r.margins for r in first]
    assert all(r.selected.shape == (1, len(r.tokens) - 1, 32) for r in first)
    report([[request.output for request in mine], [request.selected.tolist() for request in first]])
    # Both have said what they have. Now and then jaxlib's coordination service aborts where it is shut down in order.
    multihost_utils.sync_global_devices("both have printed")
    os._exit(0)


def main(arguments):
    if arguments[:1] == ["--process"]:
        return over_processes(*map(int, arguments[1:]))
    assert len(jax.devices()) == 4
    run_cases(CASES, arguments or CASES)


if __name__ == "__main__":
    main(sys.argv[1:])

"""A decode step as an engine runs it, metadata, cache writes and attention, in one captured CUDA graph; and memory."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from drop_in_calls import served_by
from metadata_cases import make_tables
from sparse_mla_torch import flash_mla, ops  # noqa: F401  (registers the operators)
from sparse_mla_torch.engines import build_metadata, sglang_step
from torch_graphs import capture
from triton_device import DEVICE, tensor

from jax_sparse_mla import DEEPSEEK_V4_FLASH

pytestmark = [pytest.mark.torch, pytest.mark.gpu]
OPS = torch.ops.jax_sparse_mla
BACKENDS = ("hopper", "triton", "flashmla")

RATIO = 8
SPEC = dataclasses.replace(DEEPSEEK_V4_FLASH, name="small V4", page_size=64, window=128, compress_ratios=(0, 4, RATIO))
MAX_LEN, POOL, HEADS, REPLAYS = 500, 4096, 64, 1000


class Engine:
    """One layer's caches, and the buffers that a graph of `requests` requests reads: int64, as SGLang has them."""

    def __init__(self, requests: int):
        self.table, to_swa = make_tables(np.random.default_rng(0), page_size=SPEC.page_size, max_len=MAX_LEN, pool=POOL)
        to_swa[to_swa == 0] = -1  # slot 0 takes what padding rows write, in any order
        self.fixed = {"req_to_token": tensor(self.table.astype(np.int32)), "full_to_swa": tensor(to_swa)}
        names = ("req_pool_indices", "seq_lens", "out_cache_loc")
        self.batch = {name: torch.zeros(requests, dtype=torch.int64, device=DEVICE) for name in names}
        self.q, self.sink = self.random(requests, 1, HEADS, 512), self.random(HEADS).float()
        self.kv, self.compressed_kv = self.random(requests, 512), self.random(requests, 512)
        self.caches = [self.filled(POOL), self.filled(POOL // RATIO)]

    def random(self, *shape) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16().to(DEVICE)

    def filled(self, slots: int) -> torch.Tensor:
        page_bytes = SPEC.kv_layout.page_bytes(64)
        data = torch.zeros((slots // 64, page_bytes), dtype=torch.uint8, device=DEVICE)
        cache = data.as_strided((slots // 64, 64, 1, 584), (page_bytes, 584, 584, 1))
        OPS.write_kv(cache, torch.arange(slots, dtype=torch.int32, device=DEVICE), self.random(slots, 512))
        return cache

    def fill(self, rng: np.random.Generator) -> None:
        """Other requests at other lengths, some of them padding, and other values."""
        requests = len(self.q)
        lens = rng.integers(0, MAX_LEN + 1, requests) * (rng.random(requests) < 0.9)
        pool = rng.permutation(len(self.table))[:requests]
        slots = np.where(lens > 0, self.table[pool, lens - 1], 0)
        for x, values in zip(self.batch.values(), (pool, lens, slots)):
            x.copy_(torch.from_numpy(values.astype(np.int64)))
        for x in (self.q, self.kv, self.compressed_kv):
            x.normal_()

    def step(self, caches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        meta = build_metadata(SPEC, sglang_step("DECODE", **self.fixed, **self.batch))
        more = meta.compressed[RATIO]
        OPS.write_kv(caches[0], meta.swa_out_cache_loc, self.kv)
        OPS.write_kv(caches[1], more.out_loc, self.compressed_kv)
        return flash_mla.flash_mla_with_kvcache(
            *(self.q, caches[0], None, None, 512, flash_mla.get_mla_metadata()[0]),
            indices=meta.swa_page_indices[:, None],
            topk_length=meta.swa_topk_lengths,
            extra_k_cache=caches[1],
            extra_indices_in_kvcache=more.page_indices[:, None],
            extra_topk_length=more.topk_lengths,
            attn_sink=self.sink,
        )


def copy_of(cache: torch.Tensor) -> torch.Tensor:
    """With the gaps between its pages, which `clone` leaves out: kernels are compiled for them."""
    copy = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=cache.device)
    return copy.copy_(cache)


@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_replays_equal_eager_steps(backend, requests, monkeypatch):
    """Bit by bit; the caches of both go on from step to step."""
    engine, rng = Engine(requests), np.random.default_rng(1)
    engine.fill(rng)
    eager = [copy_of(cache) for cache in engine.caches]
    with served_by(backend, monkeypatch):
        engine.step([copy_of(cache) for cache in engine.caches])  # compiles
        graph, results = capture(lambda: engine.step(engine.caches))
        different = torch.zeros((), dtype=torch.int64, device=DEVICE)
        served = different.clone()
        for _ in range(REPLAYS):
            engine.fill(rng)
            for x in results:
                x.fill_(torch.nan)
            graph.replay()
            for x, y in zip(results, engine.step(eager)):
                different += (x != y).sum()
            served += torch.isfinite(results[1]).sum()
        assert different.item() == 0 and served.item() > REPLAYS * requests * HEADS / 2
        assert all(torch.equal(a[1:], b[1:]) for a, b in zip(engine.caches, eager))  # without slot 0's page


def test_a_capture_and_jax_leave_each_other_alone():
    """While work is captured, XLA's monitors go on asking for the state of its streams."""
    double = jax.jit(lambda x: 2 * x)
    double(jnp.ones(3)).block_until_ready()
    x = torch.ones(3, device=DEVICE)

    def step():
        time.sleep(1)
        return 2 * x

    graph, result = capture(step)
    x.fill_(4)
    graph.replay()
    assert result.tolist() == [8, 8, 8] and double(jnp.full(3, 4)).tolist() == [8, 8, 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_calls_leave_no_memory_behind(backend, monkeypatch):
    from benchmarks.drop_in import LEAK_MIB, leaked

    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "")  # which `leaked` sets
    with served_by(backend, monkeypatch):
        assert max(leaked(10_000, backend).values()) <= LEAK_MIB


def needs_two_gpus() -> None:
    """Skips without them; the first becomes the current one, which is the last where JAX has started meanwhile."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    torch.cuda.set_device(0)


class Pair:
    """An engine on each of two GPUs with equal tables and values, and inputs for some steps."""

    def __init__(self, requests: int, steps: int):
        needs_two_gpus()
        first, rng = Engine(requests), np.random.default_rng(3)
        self.inputs = []
        for _ in range(steps):
            first.fill(rng)
            given = (*first.batch.values(), first.q, first.kv, first.compressed_kv)
            self.inputs.append([x.cpu() for x in given])
        self.engines = first, on_device(first, "cuda:1")

    def give(self, engine: Engine, step: int) -> None:
        given = (*engine.batch.values(), engine.q, engine.kv, engine.compressed_kv)
        for x, value in zip(given, self.inputs[step]):
            x.copy_(value)

    def alone(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every step's results on the first GPU, with copies of its caches."""
        engine, results = self.engines[0], []
        caches = [copy_of(cache) for cache in engine.caches]
        for step in range(len(self.inputs)):
            self.give(engine, step)
            results.append(tuple(x.clone().cpu() for x in engine.step(caches)))
        return results

    def together(self, run) -> list:
        """`run(index, engine)` for both engines at the same time, each in a thread with its GPU as the current one."""

        def work(index: int):
            with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream(index)):
                result = run(index, self.engines[index])
                torch.cuda.current_stream().synchronize()
                return result

        with ThreadPoolExecutor(2) as threads:
            return [future.result() for future in [threads.submit(work, index) for index in range(2)]]

    def check_together(self, run, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`run` gives every step's results, on its own GPU: to the bit those expected."""
        for index, results in enumerate(self.together(run)):
            for found, wanted in zip(results, expected, strict=True):
                for x, y in zip(found, wanted, strict=True):
                    assert x.device.index == index and torch.equal(x.cpu(), y)


def on_device(engine: Engine, device: str) -> Engine:
    """A copy of the engine there; pages lie as far apart as the engine's own."""

    def move(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)

    moved = object.__new__(Engine)
    vars(moved).update(torch.utils._pytree.tree_map_only(torch.Tensor, move, vars(engine)))
    return moved


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_call_two_gpus(backend, captured, monkeypatch):
    """Steps of changing inputs at the same time, bit by bit what one GPU gives, on the GPU of the tensors."""
    with served_by(backend, monkeypatch):
        pair = Pair(requests=3, steps=100)
        expected, graphs = pair.alone(), []
        for index, engine in enumerate(pair.engines if captured else ()):
            with torch.cuda.device(index):
                engine.step([copy_of(cache) for cache in engine.caches])  # compiles
                torch.cuda.synchronize()
                stream = torch.cuda.Stream()  # torch's own for captures is of one GPU
                graphs.append(capture(lambda engine=engine: engine.step(engine.caches), stream=stream))

        def run_step(index, engine):
            if not captured:
                return engine.step(engine.caches)
            graph, results = graphs[index]
            for x in results:
                x.fill_(torch.nan)
            graph.replay()
            return results

        def run(index, engine):
            found = []
            for step in range(len(pair.inputs)):
                pair.give(engine, step)
                found.append(tuple(x.clone() for x in run_step(index, engine)))
            return found

        pair.check_together(run, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nccl_joins_the_heads_of_two_gpus(backend, monkeypatch):
    """Each GPU attends with half of the heads; NCCL adds up outputs that are zero elsewhere, step after step."""
    half = HEADS // 2
    with served_by(backend, monkeypatch):
        pair = Pair(requests=4, steps=20)
        first, second = pair.engines

        def step(engine: Engine, caches, which: int):
            """All heads' outputs, zero but for half of them."""
            heads = slice(which * half, (which + 1) * half)
            own = object.__new__(Engine)
            vars(own).update(vars(engine) | {"q": engine.q[:, :, heads].contiguous(), "sink": engine.sink[heads]})
            out, _ = own.step(caches)
            whole = torch.zeros((*out.shape[:2], HEADS, out.shape[-1]), dtype=torch.float32, device=out.device)
            whole[:, :, heads] = out.float()
            return whole

        wanted = []
        caches = [[copy_of(cache) for cache in first.caches] for _ in range(2)]
        for number in range(len(pair.inputs)):
            pair.give(first, number)
            wanted.append(sum(step(first, caches[which], which) for which in range(2)).cpu())
        for number, expected in enumerate(wanted):
            outs = []
            for which, engine in enumerate((first, second)):
                with torch.cuda.device(which):
                    pair.give(engine, number)
                    outs.append(step(engine, engine.caches, which))
            torch.cuda.nccl.all_reduce(outs)
            for out in outs:
                assert torch.equal(out.cpu(), expected)

"""Measures the JAX engine: time to the first token, time per token, tokens a second, and the attention's part.

The first token comes from a real prefill of one request. Decode steps start behind contexts that nobody read: requests
are opened at their length, and their cached rows are random.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_sparse_mla.compressor.state import CompressorState
from jax_sparse_mla.indexer.logits import INDEX_DIM, INDEX_K_BYTES, IndexKeys, write_index_k
from jax_sparse_mla.kv_cache import PagedKV, write_kv
from jax_sparse_mla.kv_cache.layout import KVLayout
from jax_sparse_mla.metadata import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.kda import KDAState
from jax_sparse_mla.serving.mesh import REQUESTS, MeshEngine, parameter_specs
from jax_sparse_mla.serving.model import Model, Params
from jax_sparse_mla.serving.pages import RequestPool
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.step import State

# Decode steps before those that are timed, and behind them under a profiler.
WARM_UP, PROFILED = 4, 8
# A prefill is repeated so often, or until so many seconds have passed.
PREFILLS, PREFILL_SECONDS = 5, 3.0
# Random pages that are repeated through a cache.
RANDOM_PAGES = 64


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of some times, in milliseconds; between two of them it is interpolated."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        return cls(*(float(value) * 1e3 for value in np.percentile(seconds, (50, 90, 99))))


@dataclasses.dataclass(kw_only=True)
class Row:
    """One case.

    Attributes:
      requests, context: requests that decode at once, and tokens before the first timed one of each.
      first_token_ms: from the submission of one request with this context to its first token, nobody else served.
      tokens_per_s: of all requests together, while they decode.
      token_ms: the time from one token of a request to its next.
      step_ms: the mean wall time of a decode step. step_gpu_ms: the part in which the GPU works, of several the busiest
        one; needs torch there.
      attention_ms: wall time of the attention of all layers alone, with its projections; not over a mesh.
        attention_gpu_ms: of the GPU.
      attention_share: attention over the step, by GPU time where it is known.
      problem: why something is missing.
    """

    requests: int
    context: int
    first_token_ms: Percentiles | None = None
    tokens_per_s: float | None = None
    token_ms: Percentiles | None = None
    step_ms: float | None = None
    step_gpu_ms: float | None = None
    attention_ms: float | None = None
    attention_gpu_ms: float | None = None
    problem: str | None = None

    @property
    def attention_share(self) -> float | None:
        if self.attention_gpu_ms and self.step_gpu_ms:
            return self.attention_gpu_ms / self.step_gpu_ms
        return self.attention_ms / self.step_ms if self.attention_ms and self.step_ms else None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "attention_share": self.attention_share}


def measure(
    model: Model,
    params: Params,
    requests: Sequence[int],
    contexts: Sequence[int],
    *,
    new_tokens: int,
    chunk_size: int,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Iterator[Row]:
    """A row for each context and number of requests, as it is measured; one that does not fit says so.

    Args:
      new_tokens: timed tokens of each request.
      chunk_size: query rows of a prefill step.
      seed: of the tokens, the cached rows and the page order.
      mesh: the devices that serve, for a model and parameters of `cut_model`; None: JAX's first.
    """
    for context in contexts:
        first, problem = _fitting(lambda context=context: first_token(model, params, context, chunk_size, seed, mesh))
        for count in requests:
            row = Row(requests=count, context=context, first_token_ms=first, problem=problem)
            _, failed = _fitting(lambda row=row: decode(model, params, row, new_tokens, seed, mesh))
            row.problem = failed or problem
            yield row


def _fitting(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `run` returns; or None, and why it does not fit the device."""
    try:
        return run(), None
    except NotEnoughMemory as error:
        return None, str(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        problem = f"does not fit: {str(error).splitlines()[0]}"
    finally:
        gc.collect()  # an engine of the case before may be part of a cycle, and holds its caches
    return None, problem


# --- memory ----------------------------------------------------------------------------------------


class NotEnoughMemory(ValueError):
    """Something is larger than the device."""


def device_memory() -> int:
    """Bytes that JAX may take of its device, or of the machine for a CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(what: str, needed: int) -> None:
    """Refuses what is larger than the device, with both sizes.

    Raises:
      NotEnoughMemory: it is.
    """
    if needed > (limit := device_memory()):
        raise NotEnoughMemory(f"does not fit: {what} {needed / 2**30:.1f} GiB, the device has {limit / 2**30:.1f} GiB")


def size_of(arrays: Any) -> int:
    """Bytes of a pytree of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def bytes_of_a_device(arrays: Any) -> int:
    """What each device has of a pytree of arrays with shardings, or of their shapes."""

    def part(x: Any) -> jax.ShapeDtypeStruct:  # `addressable_shards` raises for arrays of processes in JAX 0.11.2
        return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)

    return size_of(jax.tree.map(part, arrays))


def weight_bytes(model: Model, mesh: Mesh | None = None) -> int:
    """Of the random parameters, or of what each device of a mesh has of them; none are made."""
    params = jax.eval_shape(lambda: model.init_params(0))
    if mesh is None:
        return size_of(params)

    def placed(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return bytes_of_a_device(jax.tree.map(placed, params, parameter_specs(params, mesh)))


class _RefusesCaches:
    """An engine that refuses caches which do not fit beside the weights, before they are allocated."""

    def __init__(self, model: Model, params: Params, options: EngineOptions, *mesh: Mesh):
        self._weight_bytes = bytes_of_a_device(params) if mesh else size_of(params)
        super().__init__(model, params, options, *mesh)

    def new_caches(self):
        caches = size_of(jax.eval_shape(super().new_caches))
        check_memory("weights and caches need", self._weight_bytes + caches)
        return super().new_caches()


class _OneDevice(_RefusesCaches, Engine):
    pass


class _OverMesh(_RefusesCaches, MeshEngine):
    pass


def _new_engine(model: Model, params: Params, options: EngineOptions, mesh: Mesh | None) -> Engine:
    return _OneDevice(model, params, options) if mesh is None else _OverMesh(model, params, options, mesh)


# --- prefill ---------------------------------------------------------------------------------------


def first_token(
    model: Model, params: Params, context: int, chunk_size: int, seed: int, mesh: Mesh | None = None
) -> Percentiles:
    """The time to the first token of one request that nobody shares the device with, once compiled."""
    options = EngineOptions(max_batch=1, max_len=context + 1, chunk_size=min(chunk_size, context), seed=seed)
    engine = _new_engine(model, params, options, mesh)
    prompt = np.random.default_rng(seed).integers(0, model.vocab_size, context).tolist()

    def seconds() -> float:
        start = time.perf_counter()
        engine.run([Request(prompt, 1)])
        return time.perf_counter() - start

    seconds()  # compiles
    times = [seconds()]
    while len(times) < PREFILLS and sum(times) < PREFILL_SECONDS:
        times.append(seconds())
    return Percentiles.of(times)


# --- decode ----------------------------------------------------------------------------------------


def decode(model: Model, params: Params, row: Row, new_tokens: int, seed: int, mesh: Mesh | None = None) -> None:
    """Fills in what is measured of decode steps."""
    total = WARM_UP + new_tokens + PROFILED + 2  # the token before the first step, and one that is not read
    shares = 1 if mesh is None else mesh.shape[REQUESTS]
    options = EngineOptions(max_batch=-(-row.requests // shares), max_len=row.context + total, seed=seed)
    engine = _new_engine(model, params, options, mesh)
    open_unread(engine, row.requests, row.context, total, seed)

    def steps(count: int) -> list[float]:
        """When the tokens of each were there."""
        done = []
        for _ in range(count):
            engine.step()
            done.append(time.perf_counter())
        return done

    steps(WARM_UP)
    seconds = np.diff(steps(new_tokens + 1))
    engine.wait()
    row.token_ms, row.step_ms = Percentiles.of(seconds), float(seconds.mean()) * 1e3
    row.tokens_per_s = row.requests / float(seconds.mean())
    attend = None
    if mesh is None:
        attend = attention_steps(engine)
        attend(WARM_UP)
        start = time.perf_counter()
        attend(new_tokens)
        row.attention_ms = (time.perf_counter() - start) / new_tokens * 1e3
    # A profiler slows the host: it comes behind what is timed there.
    row.step_gpu_ms = gpu_ms(lambda: (steps(PROFILED), engine.wait()), PROFILED)
    if attend is not None:
        row.attention_gpu_ms = gpu_ms(lambda: attend(PROFILED), PROFILED)


def open_unread(engine: Engine, count: int, context: int, new_tokens: int, seed: int) -> None:
    """Opens requests at their length without reading a prompt: their pages are mapped, what they cached is random.

    Their tokens are drawn, all equally likely. Random weights soon make the same most likely token for all requests,
    and then the same few experts would serve them.
    """
    rng = np.random.default_rng(seed)
    shares = getattr(engine.scheduler, "shares", [engine.scheduler])  # those of a mesh
    prompt = [0] * context  # never read
    for index, token in enumerate(rng.integers(0, engine.model.vocab_size, count).tolist()):
        scheduler = shares[index % len(shares)]
        pool = scheduler.pool
        sampling = Sampling(temperature=1e6, seed=seed + index)
        request = Request(prompt, new_tokens, output=[token], sampling=sampling, row=pool.open())
        map_pages(pool, request.row, context)
        request.computed = context
        scheduler.submit(request)
    for scheduler in shares:
        scheduler.pool.take_changes()  # the tables go to the device whole
    tables = RequestTables(
        req_to_token=np.concatenate([scheduler.pool.req_to_token for scheduler in shares]),
        full_to_swa=None
        if engine.spec.window is None
        else np.concatenate([scheduler.pool.full_to_swa for scheduler in shares]),
    )
    engine.state = State(
        caches=random_caches(engine.state.caches),
        tables=jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), tables, engine.state.tables),
        last_tokens=engine.state.last_tokens,
    )


def map_pages(pool: RequestPool, row: int, length: int) -> None:
    """Maps a request's first positions page by page, since a window gives back what it leaves."""
    for start in range(0, length, pool.page_size):
        pool.extend(row, start, min(start + pool.page_size, length))


def random_caches(caches: Any) -> Any:
    """Caches with quantised random rows in all pages, the same few pages over and over; takes a model's donated ones.

    States that requests carry stay as they are. The pages of all layers are the same ones.
    """

    def is_part(part: Any) -> bool:
        return isinstance(part, (PagedKV, IndexKeys, CompressorState, KDAState))

    def filled(part: Any) -> Any:
        if isinstance(part, (CompressorState, KDAState)):
            return part
        if isinstance(part, PagedKV):
            some = _random_kv(part.layout, part.page_size)
            return dataclasses.replace(part, data=_fill(part.data, some))
        if isinstance(part, IndexKeys):
            return dataclasses.replace(part, data=filled(part.data))
        return _fill(part, _random_index_keys(part.shape[1]))

    return jax.tree.map(filled, caches, is_leaf=is_part)


# Their shapes hang on no cache's size, so few programs make the pages of all cases.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _random_kv(layout: KVLayout, page_size: int) -> jax.Array:
    some = PagedKV.zeros(layout, RANDOM_PAGES, page_size)
    rows = jax.random.normal(jax.random.key(1), (some.num_slots, layout.qk_dim), jnp.bfloat16)
    return write_kv(some, jnp.arange(some.num_slots, dtype=jnp.int32), rows).data


@functools.partial(jax.jit, static_argnums=0)
def _random_index_keys(page_bytes: int) -> jax.Array:
    some = jnp.zeros((RANDOM_PAGES, page_bytes), jnp.uint8)
    keys = jax.random.normal(jax.random.key(2), (some.size // INDEX_K_BYTES, INDEX_DIM), jnp.bfloat16)
    return write_index_k(some, jnp.arange(len(keys), dtype=jnp.int32), keys)


def _fill(pages: jax.Array, some: jax.Array) -> jax.Array:
    """`some` pages over and over, in the place of `pages`."""
    return _filling(pages.sharding)(pages, some)


@functools.cache
def _filling(sharding: jax.sharding.Sharding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def fill(pages: jax.Array, some: jax.Array) -> jax.Array:
        return some[jnp.arange(pages.shape[0], dtype=jnp.int32) % some.shape[0]]

    return jax.jit(fill, donate_argnums=0, out_shardings=sharding)


# --- attention -------------------------------------------------------------------------------------


def attention_steps(engine: Engine) -> Callable[[int], None]:
    """Runs so many steps of all layers' attention alone, from each layer's input to its output, and waits for them.

    They attend from the last position of each open request, over its caches and by its tables.
    """
    model, requests = engine.model, engine.scheduler.running
    width = max(program.max_seq_len for program in engine.routes)
    rows = jnp.array([request.row for request in requests], jnp.int32)
    positions = jnp.array([request.computed - 1 for request in requests], jnp.int32)
    x = jax.random.normal(jax.random.key(3), (len(requests), model.config.hidden_size), jnp.bfloat16)

    def step(params: Params, state: State, x: jax.Array) -> tuple[State, jax.Array]:
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            max_seq_len=width,
            req_pool_indices=rows,
            seq_lens=positions + 1,
            out_cache_loc=state.tables.req_to_token[rows, positions],
        )
        layers = range(model.num_layers)
        out, caches = model.attention(params, state.caches, batch, state.tables, x, positions, layers=layers)
        return dataclasses.replace(state, caches=caches), out

    jitted = jax.jit(step, donate_argnums=1)

    def attend(count: int) -> None:
        out = x
        for _ in range(count):
            engine.state, out = jitted(engine.params, engine.state, x)
        jax.block_until_ready(out)

    return attend


# --- time of the GPU -------------------------------------------------------------------------------


def gpu_ms(run: Callable[[], Any], steps: int) -> float | None:
    """Milliseconds a step in which the busiest GPU does something while `run()` runs `steps`, which must wait for them.

    None without torch, or without a GPU.
    """
    return max(gpus_ms(run, steps), default=None)


def gpus_ms(run: Callable[[], Any], steps: int) -> list[float]:
    """`gpu_ms` of each GPU that does anything, in the order of their numbers; none without torch, or without a GPU."""
    return [busy([span for span, _ in of_gpu]) / steps / 1e6 for of_gpu in gpu_work(run)]


def gpu_work(run: Callable[[], Any]) -> list[list[tuple[tuple[int, int], str]]]:
    """Of each GPU that does anything while `run()` runs, (begin and end in ns, name) of all that it does.

    CUPTI tells, by torch's profiler: none without torch, or without a GPU. `run` must wait for what it started.
    """
    if jax.default_backend() != "gpu":
        return []
    try:
        from torch.profiler import ProfilerActivity, profile, supported_activities
    except ImportError:
        return []
    if ProfilerActivity.CUDA not in supported_activities():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    found: dict[int, list[tuple[tuple[int, int], str]]] = {}
    for event in profiler.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()):
            span = event.start_ns(), event.start_ns() + event.duration_ns()
            found.setdefault(event.device_index(), []).append((span, event.name()))
    return [found[device] for device in sorted(found)]


def busy(spans: Sequence[tuple[int, int]]) -> int:
    """The time that at least one of some (start, end) covers."""
    covered = last = 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, last))
        last = max(last, end)
    return covered

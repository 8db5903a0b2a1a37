"""What a server does before its first request: it sizes the engine's pool, and compiles all programs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import jax

from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving.engine import SMALLEST_CHUNK, Engine
from jax_sparse_mla.serving.memory import NotEnoughMemory, free_memory, size_of
from jax_sparse_mla.serving.model import Model, Params
from jax_sparse_mla.serving.options import EngineOptions
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import Scheduler, smallest_bucket
from jax_sparse_mla.serving.step import PAGES_AHEAD, empty_state, no_changes


def sized(
    model: Model, params: Params, options: EngineOptions, share: float = 0.9, free: int | None = None
) -> EngineOptions:
    """The options with as many pages as fit; unchanged where all fit, or where they say how many.

    Args:
      model, params: on their devices, as for an engine; of `cut_model` for a mesh.
      share: of the free memory that caches and tables may take. The rest is for the steps' own arrays.
      free: bytes of a device that are free; by default what it says.

    Raises:
      NotEnoughMemory: not even one request of `max_len` fits; nothing has been allocated.
    """
    if options.num_pages is not None or options.batch_invariant:
        return options

    def state_of(num_pages: int | None) -> tuple[int, int]:
        """The pages of a pool, and the bytes of an engine's state with it."""
        with_pages = dataclasses.replace(options, num_pages=num_pages)
        pool = Scheduler(model.spec, with_pages, model.vocab_size).pool
        return pool.num_pages, size_of(jax.eval_shape(lambda: empty_state(model, params, with_pages, pool)))

    if free is None:
        free = free_memory()
        free -= size_of(params) if jax.default_backend() == "cpu" else 0  # which are joined there in a copy
    room, (most, whole) = int(share * free), state_of(None)
    if whole <= room:
        return options
    devices, tokens = options.context_parallel, options.max_len + options.speculative_steps
    least = devices * (1 + -(-tokens // (devices * model.spec.page_size)))
    _, smallest = state_of(least)
    if smallest > room:
        raise NotEnoughMemory(
            f"does not fit: caches for one request of {options.max_len} tokens and states for {options.max_batch} need "
            f"{smallest / 2**30:.2f} GiB, {share:.0%} of what is free is {room / 2**30:.2f} GiB"
        )
    of_page = (whole - smallest) / (most - least)
    more = int((room - smallest) / of_page) // devices * devices  # as many on each device
    return dataclasses.replace(options, num_pages=least + more)


def all_programs(engine: Engine) -> Iterator[tuple]:
    """The keys, as of `Engine.key`, of all programs that an engine's steps can need, but those that replay or give
    out selected positions."""
    options, drafts = engine.options, engine.drafts
    widths = _doubled(smallest_bucket(engine.spec), engine.scheduler.pool.req_to_token.shape[1])
    chunks, requests = _doubled(SMALLEST_CHUNK, options.chunk_size), _doubled(1, options.max_batch)
    choices = list(Choice)
    if options.batch_invariant:
        widths, chunks, requests, choices = widths[-1:], chunks[-1:], requests[-1:], [Choice.TOP_P]
    mode = ForwardMode.TARGET_VERIFY if drafts else ForwardMode.DECODE
    for width in widths:
        for choice in choices:
            for rows in chunks:
                for expanded in (False, True) if engine.expands(rows, width) else (False,):
                    yield engine.key(ForwardMode.EXTEND, rows, 0, width, choice, expanded=expanded)
            for count in requests:
                yield engine.key(mode, count, drafts, width, choice)


def warm_up(engine: Engine, threads: int | None = None) -> int:
    """Compiles all programs of an engine, or loads them from disk, in so many threads; returns their number.

    A server then compiles nothing while it serves. What reuses a long prefix or a state is compiled too.
    """
    keys = list(all_programs(engine))
    engine.compile(keys, threads or max(1, (os.cpu_count() or 1) // 2))
    if engine.options.reuse_points:
        shares = len(engine.scheduler.shares)
        engine.map_pages(*[no_changes(PAGES_AHEAD, engine.options.max_batch)] * shares)
        if engine.spec.windowed:
            engine.copy_states([(0, 0) if engine.mesh is None else ((0, 0),) * shares])
    return len(keys)


def _doubled(least: int, most: int) -> list[int]:
    """Powers of two from `least` on, and `most`, the last."""
    sizes = [min(least, most)]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes

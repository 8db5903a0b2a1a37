"""Steps of a `serving.Model` over requests whose pages are given out beforehand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla import ForwardBatch, ForwardMode, RequestTables
from jax_sparse_mla.serving import Model, StepInputs

PAGES = 2  # of each request


@functools.partial(jax.jit, static_argnames=("model", "layers"), donate_argnums=2)
def run(model, params, caches, inputs, *, layers=None):
    out = model.forward(params, caches, inputs, layers=layers)
    return out.caches, model.logits(params, out.hidden), out.overflow, out.trace


class Steps:
    """Requests in the rows of a table, each with its pages in a shuffled order; page 0 is for padding."""

    def __init__(self, model: Model, params, *, num_requests: int, bf16: bool = True):
        self.model, self.params, self.num_requests = model, params, num_requests
        size = model.spec.page_size
        self.max_len = PAGES * (size if size > 64 else 4 * size)
        each = self.max_len // size
        pages = 1 + np.random.default_rng(0).permutation(num_requests * each).reshape(num_requests, each)
        slots = (pages[:, :, None] * size + np.arange(size)).reshape(num_requests, -1)
        count = 1 + num_requests * each
        to_swa = np.append(np.arange(count * size), -1)
        self.slots = slots.astype(np.int32)
        self.tables = RequestTables(
            req_to_token=jnp.asarray(self.slots),
            full_to_swa=jnp.asarray(to_swa, jnp.int32) if model.spec.window else None,
        )
        self.caches = model.new_caches(
            num_pages=count,
            num_swa_pages=count,
            max_requests=num_requests,
            bf16=bf16,
        )

    def __call__(
        self, mode: ForwardMode, served: dict[int, tuple[int, list[int]]], num_rows: int, *, layers=None, **options
    ):
        """Runs `{row: (first position, tokens)}`, padded to `num_rows`; `(logits of the real rows, trace)`."""

        def padded(values, size):
            values = np.concatenate([np.atleast_1d(np.asarray(x, np.int32)) for x in values])
            return jnp.asarray(np.pad(values, (0, size - len(values))))

        counts = [len(tokens) for _, tokens in served.values()]
        positions = [np.arange(first, first + n) for (first, _), n in zip(served.values(), counts)]
        batch = ForwardBatch(
            mode=mode,
            max_seq_len=self.max_len,
            req_pool_indices=padded(list(served), self.num_requests),
            seq_lens=padded([p[-1] + 1 for p in positions], self.num_requests),
            out_cache_loc=padded([self.slots[row, p] for row, p in zip(served, positions)], num_rows),
            extend_lens=padded(counts, self.num_requests) if mode is ForwardMode.EXTEND else None,
        )
        inputs = StepInputs(
            batch=batch,
            tables=self.tables,
            tokens=padded([tokens for _, tokens in served.values()], num_rows),
            positions=padded(positions, num_rows),
            trace=True,
            **options,
        )
        self.caches, logits, overflow, trace = run(self.model, self.params, self.caches, inputs, layers=layers)
        assert not bool(overflow)
        real = sum(counts)
        trace = [tuple(None if x is None else np.asarray(x)[:real] for x in layer) for layer in trace]
        return np.asarray(logits)[:real], trace


def prefill_and_decode(steps: Steps, requests: list[list[int]], new: int, chunk: int, **options) -> list[np.ndarray]:
    """float32 `[tokens, vocab]` for each request: all but the last `new` tokens in chunks that hold parts of several
    requests, then the others one a step."""
    done, logits = [0] * len(requests), [[] for _ in requests]

    def serve(mode, served, num_rows):
        out, _ = steps(mode, {row: (done[row], tokens) for row, tokens in served.items()}, num_rows, **options)
        for row, tokens in served.items():
            logits[row].append(out[: len(tokens)])
            out, done[row] = out[len(tokens) :], done[row] + len(tokens)

    while any(done[row] < len(tokens) - new for row, tokens in enumerate(requests)):
        served, left = {}, chunk
        for row, tokens in enumerate(requests):
            if part := tokens[done[row] : len(tokens) - new][:left]:
                served[row], left = part, left - len(part)
        serve(ForwardMode.EXTEND, served, chunk)
    for _ in range(new):
        serve(ForwardMode.DECODE, {row: [tokens[done[row]]] for row, tokens in enumerate(requests)}, len(requests))
    return [np.concatenate(rows) for rows in logits]

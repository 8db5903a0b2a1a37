"""Continuous batching in JAX: requests come and go, prompts are read in chunks, then all decode together.

The model is DeepSeek-V4's attention with random weights around it; `--layers 43 --heads 64` is V4-Flash's size. What
an engine takes from here: one jitted step with all that changes donated (caches, request tables, last tokens); one
compilation per bucket of rows; pages handed out on the host; and no step waits for the tokens of the one before, which
stay on the device: the host reads them one step later.
"""

import argparse
import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_mla as mla
from jax_sparse_mla import layers
from jax_sparse_mla.compressor import rope_interleaved

V4_FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)
VOCABULARY = 256
SMALL = dataclasses.replace(mla.DEEPSEEK_V4_FLASH, num_heads=2, index_heads=2, index_topk=64)


@dataclasses.dataclass(frozen=True)
class Config:
    spec: mla.ModelSpec = SMALL
    ratios: tuple[int, ...] = V4_FLASH_RATIOS[:4]
    hidden: int = 64
    max_batch: int = 4  # requests served at once
    max_len: int = 1024  # tokens of the longest request
    chunk: int = 256  # rows of a prefill step
    decode_buckets: tuple[int, ...] = (1, 4)  # rows of a decode step


@dataclasses.dataclass
class Request:
    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0  # the step at which it comes in
    output: list[int] = dataclasses.field(default_factory=list)
    row: int = -1  # in the request tables
    pages: list[int] = dataclasses.field(default_factory=list)
    swa_pages: list[int] = dataclasses.field(default_factory=list)  # 0 behind the window
    computed: int = 0  # tokens whose keys are cached
    sampled: int = 0  # tokens that the device has made; the last of them may not have been read yet


# --- the model, on the device ----------------------------------------------------------------------


def random_weights(config):
    """Embedding, inverse frequencies and, per layer, projections (shaped as the rows that they make) and parameters."""
    spec, keys = config.spec, iter(jax.random.split(jax.random.key(0), 16 * len(config.ratios)))
    inv_freq = 10000.0 ** -(jnp.arange(32) / 32)

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype) * shape[0] ** -0.5

    project = partial(normal, config.hidden)

    def layer(ratio):
        def compressor(dim):
            width = dim * (2 if ratio == 4 else 1)  # windows of ratio 4 overlap
            ape = normal(ratio, width, dtype=jnp.float32)
            params = layers.CompressorParams(ape=ape, norm_weight=jnp.ones(dim), inv_freq=inv_freq)
            return params, project(width), project(width)

        main, main_kv, main_score = compressor(spec.qk_dim) if ratio else (None, None, None)
        index = index_params = None
        if ratio == 4:
            index_params, kv, score = compressor(spec.index_dim)
            q, weights = project(spec.index_heads, spec.index_dim), project(spec.index_heads)
            index = layers.IndexRows(q=q, weights=weights, kv=kv, score=score)
        q, kv = project(spec.num_heads, spec.qk_dim), project(spec.qk_dim)
        rows = layers.V4Rows(q=q, kv=kv, compressed_kv=main_kv, compressed_score=main_score, index=index)
        sink = jnp.zeros(spec.num_heads)
        params = layers.V4LayerParams(attn_sink=sink, compressor=main, index_compressor=index_params)
        return rows, normal(spec.num_heads, spec.v_dim, config.hidden), params

    return normal(VOCABULARY, config.hidden), inv_freq, [layer(ratio) for ratio in config.ratios]


def project(config, projections, hidden, rope):
    """A layer's rows from its input."""
    hidden = hidden * jax.lax.rsqrt(jnp.mean(hidden.astype(jnp.float32) ** 2, -1, keepdims=True)).astype(hidden.dtype)
    rows = jax.tree.map(lambda weights: jnp.tensordot(hidden, weights, 1), projections)
    index = rows.index
    if index is not None:
        scale = (config.spec.index_heads * config.spec.index_dim) ** -0.5
        index = dataclasses.replace(index, q=rope(index.q), weights=index.weights.astype(jnp.float32) * scale)
    return dataclasses.replace(rows, q=rope(rows.q), kv=rope(rows.kv[:, None])[:, 0], index=index)


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def forward(config, weights, state, batch, step):
    """One step. state: caches, tables, last tokens `[max_batch]`. step: tokens `[T]`, −1 for the request's last one;
    each one's row in the tables, position and window slot, `[T]`; and last_row `[B]` of each request."""
    caches, tables, last_tokens = state
    embedding, inv_freq, layer_weights = weights
    tables = mla.RequestTables(
        req_to_token=tables.req_to_token.at[step["row"], step["position"]].set(batch.out_cache_loc, mode="drop"),
        full_to_swa=tables.full_to_swa.at[batch.out_cache_loc].set(step["swa_slot"]),
    )
    shared = layers.prepare_v4_step(config.spec, batch, tables, gathered=batch.mode is mla.ForwardMode.EXTEND)
    rope = partial(rope_interleaved, positions=step["position"][:, None], inv_freq=inv_freq)
    hidden = embedding[jnp.where(step["tokens"] < 0, last_tokens[step["row"]], step["tokens"])]
    for i, (ratio, (projections, output, params)) in enumerate(zip(config.ratios, layer_weights)):
        rows = project(config, projections, hidden, rope)
        attended, caches[i], _ = layers.v4_layer(
            caches[i], rows, params, batch, shared.metadata, shared.plans.get(ratio),
            spec=config.spec, ratio=ratio, schedule=shared.schedules.get(ratio),
        )  # fmt: skip
        hidden = hidden + jnp.tensordot(rope(attended, inverse=True), output, 2)
    tokens = jnp.argmax(hidden[step["last_row"]] @ embedding.T, -1).astype(jnp.int32)
    return (caches, tables, last_tokens.at[batch.req_pool_indices].set(tokens, mode="drop")), tokens


# --- the server, on the host -----------------------------------------------------------------------


class Server:
    def __init__(self, config=None, log=print):
        self.config, self.log = config or Config(), log
        spec, batch = self.config.spec, self.config.max_batch
        pages = 1 + batch * -(-self.config.max_len // spec.page_size)  # page 0 takes what padding rows write
        swa_pages = 1 + batch * (2 + self.config.chunk // spec.page_size)  # a chunk and the window, both cut by pages
        self.free_pages, self.free_swa = list(range(1, pages)), list(range(1, swa_pages))
        self.free_rows = list(range(batch))
        caches = [
            layers.V4LayerCache.zeros(spec, ratio, num_pages=pages, num_swa_pages=swa_pages, max_requests=batch)
            for ratio in self.config.ratios
        ]
        tables = mla.RequestTables(
            req_to_token=jnp.full((batch, self.config.max_len), -1, jnp.int32),
            full_to_swa=jnp.zeros(pages * spec.page_size + 1, jnp.int32).at[-1].set(-1),
        )
        # Committed to the device, as what a step returns is: else the second step would compile again.
        state = (caches, tables, jnp.zeros(batch, jnp.int32))
        self.state, self.weights = jax.device_put((state, random_weights(self.config)), jax.devices()[0])
        self.unread = None, []  # the latest step's tokens, on the device, and whose they are

    def serve(self, requests):
        waiting, running, number = sorted(requests, key=lambda r: r.arrival), [], 0
        while waiting or running:
            while waiting and waiting[0].arrival <= number and len(running) < self.config.max_batch:
                running.append(self.admit(waiting.pop(0)))
            if running:
                self.step(running, number)
            for request in [r for r in running if r.sampled == r.max_new_tokens]:
                running.remove(request)
                self.release(request)
            number += 1
        self.read()

    def admit(self, request):
        tokens = len(request.prompt) + request.max_new_tokens
        if not request.prompt or request.max_new_tokens < 1 or tokens > self.config.max_len:
            raise ValueError(f"a request reads and makes at least a token, {self.config.max_len} in all: got {request}")
        request.row = self.free_rows.pop()
        request.pages = [self.free_pages.pop() for _ in range(-(-tokens // self.config.spec.page_size))]
        return request

    def release(self, request):
        self.free_rows.append(request.row)
        self.free_pages += request.pages
        self.free_swa += [page for page in request.swa_pages if page]

    def step(self, running, number):
        """Reads prompts while there are any, else decodes."""
        config, prefill = self.config, [r for r in running if r.computed < len(r.prompt)]
        num_requests = config.max_batch
        if not prefill:
            num_requests = min(bucket for bucket in config.decode_buckets if bucket >= len(running))
        num_rows, start, served = config.chunk if prefill else num_requests, 0, []
        tokens, positions, slots, swa_slots = np.zeros((4, num_rows), np.int32)
        seq_lens, extend_lens, last_rows = np.zeros((3, num_requests), np.int32)
        rows, req_rows = (np.full(n, config.max_batch, np.int32) for n in (num_rows, num_requests))  # no such row
        for i, request in enumerate(prefill or running):
            end = min(len(request.prompt), request.computed + num_rows - start) if prefill else request.computed + 1
            count = end - request.computed
            if count == 0:
                break
            these = slice(start, start + count)
            tokens[these] = request.prompt[request.computed : end] if prefill else -1
            positions[these], rows[these] = np.arange(request.computed, end), request.row
            slots[these], swa_slots[these] = self.slots(request, positions[these])
            req_rows[i], seq_lens[i], extend_lens[i], last_rows[i] = request.row, end, count, start + count - 1
            request.computed, start = end, start + count
            if end >= len(request.prompt):
                request.sampled += 1
                served.append((i, request))
        batch = mla.ForwardBatch(
            mode=mla.ForwardMode.EXTEND if prefill else mla.ForwardMode.DECODE,
            max_seq_len=config.max_len,
            req_pool_indices=req_rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            extend_lens=extend_lens if prefill else None,
        )
        step = {"tokens": tokens, "row": rows, "position": positions, "swa_slot": swa_slots, "last_row": last_rows}
        compiled, begin = forward._cache_size(), time.perf_counter()
        self.state, new_tokens = forward(config, self.weights, self.state, *jax.device_put((batch, step)))
        self.read()  # those of the step before, while this one runs
        self.unread = new_tokens, served
        note = f", compiled in {time.perf_counter() - begin:.1f} s" if forward._cache_size() > compiled else ""
        self.log(f"step {number}: {batch.mode.name} {start} of {num_rows} rows, {len(running)} requests{note}")

    def slots(self, request, positions):
        """The slots of new tokens in the pool and in the window's; pages behind the window are given back."""
        size, window = self.config.spec.page_size, self.config.spec.window
        for page in range(min(len(request.swa_pages), max(0, positions[0] + 1 - window) // size)):
            if request.swa_pages[page]:
                self.free_swa.append(request.swa_pages[page])
                request.swa_pages[page] = 0
        while len(request.swa_pages) * size <= positions[-1]:
            request.swa_pages.append(self.free_swa.pop())
        pages = np.array([request.pages[: len(request.swa_pages)], request.swa_pages])
        return pages[:, positions // size] * size + positions % size

    def read(self):
        (tokens, served), self.unread = self.unread, (None, [])
        for i, request in served:
            request.output.append(int(tokens[i]))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=2)
    arguments = parser.parse_args(argv)
    spec = dataclasses.replace(SMALL, num_heads=arguments.heads)
    config = Config(spec=spec, ratios=V4_FLASH_RATIOS[: arguments.layers])
    rng, start = np.random.default_rng(0), time.perf_counter()
    sizes = [(300, 6, 0), (40, 12, 0), (520, 4, 3), (7, 9, 6), (130, 5, 8), (64, 3, 9)]
    requests = [Request(rng.integers(0, VOCABULARY, n).tolist(), new, arrival) for n, new, arrival in sizes]
    Server(config).serve(requests)
    for request in requests:
        print(f"{len(request.prompt)} tokens read, {len(request.output)} generated: {request.output}")
    print(f"{forward._cache_size()} compilations, {time.perf_counter() - start:.1f} s")
    return requests


if __name__ == "__main__":
    main()

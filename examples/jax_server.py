"""Continuous batching in JAX: requests come and go, prompts are read in chunks, then all decode together.

The model is DeepSeek-V4's attention with random weights around it; `--full` takes V4-Flash's true size. What an engine
takes from here: one jitted step with all that changes donated (caches, request tables, last tokens); one compilation
per bucket of rows; pages handed out on the host, the window's in a ring of each request; and no step waits for the
tokens of the one before, which stay on the device: the host reads them one step later.
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

    @property
    def ring(self):
        """Pages of a request's window cache: they hold a chunk and the window before it, wherever pages begin."""
        return 2 + self.chunk // self.spec.page_size


@dataclasses.dataclass
class Request:
    prompt: list[int]
    max_new_tokens: int
    arrival: int = 0  # the step at which it comes in
    output: list[int] = dataclasses.field(default_factory=list)
    row: int = -1  # in the request tables
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0  # tokens whose keys are cached

    @property
    def sampled(self):
        """Tokens that the device has made; the last of them may not have been read yet."""
        return max(0, self.computed - len(self.prompt) + 1)


# --- the model, on the device ----------------------------------------------------------------------


def random_weights(config):
    """Embedding, inverse frequencies and, per layer, projections (shaped as the rows that they make) and parameters."""
    spec, keys = config.spec, iter(jax.random.split(jax.random.key(0), 16 * len(config.ratios)))
    inv_freq = 10000.0 ** -(jnp.arange(32) / 32)

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(keys), shape, dtype) * shape[0] ** -0.5

    project = partial(normal, config.hidden)

    def compressor(dim, ratio):
        """Parameters, and the projections to keys and to their scores; windows of ratio 4 overlap."""
        width = dim * (2 if ratio == 4 else 1)
        ape = normal(ratio, width, dtype=jnp.float32)
        params = layers.CompressorParams(ape=ape, norm_weight=jnp.ones(dim), inv_freq=inv_freq)
        return params, project(width), project(width)

    def layer(ratio):
        q = 4 * project(spec.num_heads, spec.qk_dim)  # sharp scores: what is generated hangs on what is attended to
        rows = layers.V4Rows(q=q, kv=project(spec.qk_dim))
        params = layers.V4LayerParams(attn_sink=jnp.zeros(spec.num_heads))
        if ratio:
            main, kv, score = compressor(spec.qk_dim, ratio)
            rows = dataclasses.replace(rows, compressed_kv=kv, compressed_score=score)
            params = dataclasses.replace(params, compressor=main)
        if ratio == 4:
            index, kv, score = compressor(spec.index_dim, ratio)
            q, weights = project(spec.index_heads, spec.index_dim), project(spec.index_heads)
            rows = dataclasses.replace(rows, index=layers.IndexRows(q=q, weights=weights, kv=kv, score=score))
            params = dataclasses.replace(params, index_compressor=index)
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


def extend_tables(config, tables, batch, step):
    """The request tables with the slots of the step's rows; the window's are those of each request's ring."""
    size, (row, position) = config.spec.page_size, (step["row"], step["position"])
    swa_slots = (1 + row * config.ring + position // size % config.ring) * size + position % size
    return mla.RequestTables(
        req_to_token=tables.req_to_token.at[row, position].set(batch.out_cache_loc, mode="drop"),
        full_to_swa=tables.full_to_swa.at[batch.out_cache_loc].set(jnp.where(row < config.max_batch, swa_slots, 0)),
    )


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def forward(config, weights, state, batch, step):
    """One step. state: caches, tables, last tokens `[max_batch]`. step: tokens `[T]`, −1 for the request's last one;
    each one's row in the tables and position `[T]`; and last_row `[B]` of each request."""
    caches, tables, last_tokens = state
    embedding, inv_freq, layer_weights = weights
    tables = extend_tables(config, tables, batch, step)
    shared = layers.prepare_v4_step(config.spec, batch, tables)
    rope = partial(rope_interleaved, positions=step["position"][:, None], inv_freq=inv_freq)
    hidden = embedding[jnp.where(step["tokens"] < 0, last_tokens[step["row"]], step["tokens"])]
    for i, (ratio, (projections, output, params)) in enumerate(zip(config.ratios, layer_weights)):
        rows = project(config, projections, hidden, rope)
        attended, caches[i], _ = layers.v4_layer(
            caches[i], rows, params, batch, shared.metadata, shared.plans.get(ratio),
            spec=config.spec, ratio=ratio,
        )  # fmt: skip
        hidden = hidden + jnp.tensordot(rope(attended, inverse=True), output, 2)
    tokens = jnp.argmax(hidden[step["last_row"]] @ embedding.T, -1).astype(jnp.int32)
    return (caches, tables, last_tokens.at[batch.req_pool_indices].set(tokens, mode="drop")), tokens


# --- the server, on the host -----------------------------------------------------------------------


class Server:
    def __init__(self, config, forward=forward, weights=None):
        """`forward` is a step as the one above of some model, `weights` are its; random ones by default."""
        self.config, self.forward, spec, batch = config, forward, config.spec, config.max_batch
        weights = random_weights(config) if weights is None else weights
        pages = 1 + batch * -(-config.max_len // spec.page_size)  # page 0 takes what padding rows write
        swa_pages = 1 + batch * config.ring
        self.free_pages, self.free_rows = list(range(1, pages)), list(range(batch))
        caches = [
            layers.V4LayerCache.zeros(spec, ratio, num_pages=pages, num_swa_pages=swa_pages, max_requests=batch)
            for ratio in config.ratios
        ]
        tables = mla.RequestTables(
            req_to_token=jnp.full((batch, config.max_len), -1, jnp.int32),
            full_to_swa=jnp.zeros(pages * spec.page_size + 1, jnp.int32).at[-1].set(-1),
        )
        # Committed to the device, as what a step returns is: else the second step would compile again.
        state = (caches, tables, jnp.zeros(batch, jnp.int32))
        self.state, self.weights = jax.device_put((state, weights), jax.devices()[0])
        self.unread = (), ()  # the latest step's tokens, on the device, and whose they are

    def serve(self, requests):
        waiting, running, number = sorted(requests, key=lambda r: r.arrival), [], 0
        while waiting or running:
            while waiting and waiting[0].arrival <= number and len(running) < self.config.max_batch:
                running.append(self.admit(waiting.pop(0)))
            if running:
                self.step(running, number)
            for request in [r for r in running if r.sampled == r.max_new_tokens]:
                running.remove(request)
                self.free_rows.append(request.row)
                self.free_pages += request.pages
            number += 1
        self.read()

    def admit(self, request):
        tokens = len(request.prompt) + request.max_new_tokens
        if not request.prompt or request.max_new_tokens < 1 or tokens > self.config.max_len:
            raise ValueError(f"a request reads and makes at least a token, {self.config.max_len} in all: got {request}")
        request.row = self.free_rows.pop()
        request.pages = [self.free_pages.pop() for _ in range(-(-tokens // self.config.spec.page_size))]
        return request

    def step(self, running, number):
        """Reads prompts while there are any, else decodes."""
        prefill = [r for r in running if r.computed < len(r.prompt)]
        if prefill:
            mode, num_rows, num_requests = mla.ForwardMode.EXTEND, self.config.chunk, self.config.max_batch
        else:
            num_rows = num_requests = min(n for n in self.config.decode_buckets if n >= len(running))
            mode = mla.ForwardMode.DECODE
        served, left = [], num_rows  # requests with their next tokens (-1: what the last step made) and positions
        for request in prefill or running:
            tokens = request.prompt[request.computed :][:left] or [-1]
            if left:
                served.append((request, tokens, np.arange(request.computed, request.computed + len(tokens))))
                left -= len(tokens)
        batch, step = self.inputs(mode, served, num_rows, num_requests)
        self.state, new_tokens = self.forward(self.config, self.weights, self.state, *jax.device_put((batch, step)))
        for request, tokens, _ in served:
            request.computed += len(tokens)
        self.read()  # those of the step before, while this one runs
        self.unread = new_tokens, [request for request, *_ in served if request.sampled]  # all but perhaps the last
        print(f"step {number}: {mode.name} {num_rows - left} of {num_rows} rows, {len(running)} requests")

    def inputs(self, mode, served, num_rows, num_requests):
        """What `forward` takes, padded: rows and requests past the last write to slot 0 and to no row of the tables."""

        def padded(values, size, fill=0):
            return np.pad(np.asarray(values, np.int32), (0, size - len(values)), constant_values=fill)

        no_row, size, (requests, tokens, positions) = self.config.max_batch, self.config.spec.page_size, zip(*served)
        rows, counts = [request.row for request in requests], [len(some) for some in tokens]
        slots = [np.array(r.pages)[at // size] * size + at % size for r, at in zip(requests, positions)]
        batch = mla.ForwardBatch(
            mode=mode,
            max_seq_len=self.config.max_len,
            req_pool_indices=padded(rows, num_requests, no_row),
            seq_lens=padded([at[-1] + 1 for at in positions], num_requests),
            out_cache_loc=padded(np.concatenate(slots), num_rows),
            extend_lens=padded(counts, num_requests) if mode is mla.ForwardMode.EXTEND else None,
        )
        return batch, {
            "tokens": padded(np.concatenate(tokens), num_rows),
            "row": padded(np.repeat(rows, counts), num_rows, no_row),
            "position": padded(np.concatenate(positions), num_rows),
            "last_row": padded(np.cumsum(counts) - 1, num_requests),
        }

    def read(self):
        tokens, requests = self.unread
        for request, token in zip(requests, np.asarray(tokens)):
            request.output.append(int(token))
        self.unread = (), ()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="V4-Flash's attention in its true size, for a GPU")
    full = Config(spec=mla.DEEPSEEK_V4_FLASH, ratios=V4_FLASH_RATIOS, max_len=8192, chunk=2048)
    config = full if parser.parse_args(argv).full else Config()
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

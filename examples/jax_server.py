"""Continuous batching in JAX: requests come and go, prompts are read in chunks, then all decode together.

The model is the attention of DeepSeek-V4 with random weights around it; `--layers 43 --heads 64` is V4-Flash's size.
What an engine takes from here: one jitted step with everything that changes donated (caches, request tables, last
tokens); one compilation per bucket of rows; pages handed out on the host; and no step that waits for the tokens of
the one before: they stay on the device, and the host reads them one step later.
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


@dataclasses.dataclass(frozen=True)
class Config:
    spec: mla.ModelSpec = dataclasses.replace(mla.DEEPSEEK_V4_FLASH, num_heads=2, index_heads=2, index_topk=64)
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
    sampled: int = 0  # tokens asked of the device; the last of them may not have been read yet


# --- the model, on the device ----------------------------------------------------------------------


def widths(config, ratio):
    """What a layer projects from its input, and how wide."""
    spec, pair = config.spec, 2 if ratio == 4 else 1
    parts = {"q": spec.num_heads * spec.qk_dim, "kv": spec.qk_dim}
    if ratio:
        parts |= {"main_kv": pair * spec.qk_dim, "main_score": pair * spec.qk_dim}
    if ratio == 4:
        parts |= {"index_q": spec.index_heads * spec.index_dim, "index_weights": spec.index_heads}
        parts |= {"index_kv": pair * spec.index_dim, "index_score": pair * spec.index_dim}
    return parts


def random_weights(config, seed=0):
    spec, keys = config.spec, iter(jax.random.split(jax.random.key(seed), 8 * len(config.ratios)))
    inv_freq = 10000.0 ** -(jnp.arange(32) / 32)

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns), jnp.bfloat16) * rows**-0.5

    def compressor(ratio, dim):
        ape = jax.random.normal(next(keys), (ratio, dim * (2 if ratio == 4 else 1)))
        return layers.CompressorParams(ape=ape, norm_weight=jnp.ones(dim), inv_freq=inv_freq)

    def layer(ratio):
        params = layers.V4LayerParams(
            attn_sink=jnp.zeros(spec.num_heads),
            compressor=compressor(ratio, spec.qk_dim) if ratio else None,
            index_compressor=compressor(ratio, spec.index_dim) if ratio == 4 else None,
        )
        projection = matrix(config.hidden, sum(widths(config, ratio).values()))
        return projection, matrix(spec.num_heads * spec.v_dim, config.hidden), params

    return matrix(VOCABULARY, config.hidden), inv_freq, [layer(ratio) for ratio in config.ratios]


def project(config, ratio, projection, hidden, positions, inv_freq):
    spec, parts = config.spec, widths(config, ratio)
    hidden = hidden * jax.lax.rsqrt(jnp.mean(hidden.astype(jnp.float32) ** 2, -1, keepdims=True)).astype(jnp.bfloat16)
    values = jnp.split(hidden @ projection, np.cumsum(list(parts.values()))[:-1], axis=-1)
    part = dict(zip(parts, values))

    def rope_heads(x, heads):
        return rope_interleaved(x.reshape(len(x), heads, -1), positions[:, None], inv_freq)

    index = None
    if ratio == 4:
        index = layers.IndexRows(
            q=rope_heads(part["index_q"], spec.index_heads),
            weights=part["index_weights"].astype(jnp.float32) * (spec.index_heads * spec.index_dim) ** -0.5,
            kv=part["index_kv"],
            score=part["index_score"],
        )
    return layers.V4Rows(
        q=rope_heads(part["q"], spec.num_heads),
        kv=rope_heads(part["kv"], 1)[:, 0],
        compressed_kv=part.get("main_kv"),
        compressed_score=part.get("main_score"),
        index=index,
    )


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def forward(config, weights, state, batch, step):
    """One step over padded rows. `state`: caches, tables, last tokens `[max_batch]`. `step`, int32: tokens `[T]`, −1 for
    the request's last one; row (of the tables), position and window slot of each, `[T]`; last_row `[B]` of requests."""
    caches, tables, last_tokens = state
    embedding, inv_freq, layer_weights = weights
    tables = mla.RequestTables(
        req_to_token=tables.req_to_token.at[step["row"], step["position"]].set(batch.out_cache_loc, mode="drop"),
        full_to_swa=tables.full_to_swa.at[batch.out_cache_loc].set(step["swa_slot"]),
    )
    shared = layers.prepare_v4_step(config.spec, batch, tables, gathered=batch.mode is mla.ForwardMode.EXTEND)
    hidden = embedding[jnp.where(step["tokens"] < 0, last_tokens[step["row"]], step["tokens"])]
    for i, (ratio, (projection, output, params)) in enumerate(zip(config.ratios, layer_weights)):
        rows = project(config, ratio, projection, hidden, step["position"], inv_freq)
        attended, caches[i], _ = layers.v4_layer(
            caches[i], rows, params, batch, shared.metadata, shared.plans.get(ratio),
            spec=config.spec, ratio=ratio, schedule=shared.schedules.get(ratio),
        )  # fmt: skip
        attended = rope_interleaved(attended, step["position"][:, None], inv_freq, inverse=True)
        hidden = hidden + attended.reshape(len(hidden), -1) @ output
    tokens = jnp.argmax(hidden[step["last_row"]] @ embedding.T, -1).astype(jnp.int32)
    return (caches, tables, last_tokens.at[batch.req_pool_indices].set(tokens, mode="drop")), tokens


# --- the server, on the host -----------------------------------------------------------------------


class Server:
    def __init__(self, config=None, log=print):
        self.config, self.log = config or Config(), log
        spec, batch = self.config.spec, self.config.max_batch
        pages = 1 + batch * -(-self.config.max_len // spec.page_size)  # page 0 takes what padding rows write
        swa_pages = 1 + batch * (2 + self.config.chunk // spec.page_size)  # a chunk, the window before it, both cut
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
        self.unread = []  # (tokens on the device, the requests that they are for) of the latest step

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
        if not request.prompt or tokens > self.config.max_len:
            raise ValueError(f"a request has 1 to {self.config.max_len} tokens with its output, got {tokens}")
        request.row = self.free_rows.pop()
        request.pages = [self.free_pages.pop() for _ in range(-(-tokens // self.config.spec.page_size))]
        return request

    def release(self, request):
        self.free_rows.append(request.row)
        self.free_pages += request.pages
        self.free_swa += [page for page in request.swa_pages if page]

    def step(self, running, number):
        """Reads prompts while there are any; decodes else."""
        prefill = [r for r in running if r.computed < len(r.prompt)]
        mode = mla.ForwardMode.EXTEND if prefill else mla.ForwardMode.DECODE
        if prefill:
            num_rows, num_requests = self.config.chunk, self.config.max_batch
        else:
            num_rows = num_requests = min(b for b in self.config.decode_buckets if b >= len(running))
        none, zero = np.full(num_rows, self.config.max_batch, np.int32), np.zeros(num_rows, np.int32)
        step = {"tokens": zero.copy(), "row": none, "position": zero.copy(), "swa_slot": zero.copy()}
        step["last_row"], seq_lens, extend_lens = (np.zeros(num_requests, np.int32) for _ in range(3))
        requests, slots, served, start = np.full(num_requests, self.config.max_batch, np.int32), zero, [], 0
        for i, request in enumerate(prefill or running):
            count = min(len(request.prompt) - request.computed, num_rows - start) if prefill else 1
            if count == 0:
                break
            rows, position = slice(start, start + count), request.computed + np.arange(count)
            step["tokens"][rows] = request.prompt[request.computed :][:count] if prefill else -1
            step["row"][rows], step["position"][rows] = request.row, position
            slots[rows], step["swa_slot"][rows] = self.slots(request, position)
            request.computed += count
            requests[i], seq_lens[i], extend_lens[i] = request.row, request.computed, count
            step["last_row"][i] = start + count - 1
            start += count
            if request.computed >= len(request.prompt):
                request.sampled += 1
                served.append((i, request))
        batch = mla.ForwardBatch(
            mode=mode, max_seq_len=self.config.max_len, req_pool_indices=requests, seq_lens=seq_lens,
            out_cache_loc=slots, extend_lens=extend_lens if prefill else None,
        )  # fmt: skip
        compiled, begin = forward._cache_size(), time.perf_counter()
        self.state, tokens = forward(self.config, self.weights, self.state, *jax.device_put((batch, step)))
        self.read()  # of the step before, while this one runs
        self.unread = [(tokens, served)]
        note = f", compiled in {time.perf_counter() - begin:.1f} s" if forward._cache_size() > compiled else ""
        self.log(f"step {number}: {mode.name} {start} of {num_rows} rows, {len(running)} requests{note}")

    def slots(self, request, position):
        """The slots of new tokens in the pool and in the window's; pages behind the window are given back."""
        size, window = self.config.spec.page_size, self.config.spec.window
        for page in range(max(0, position[0] + 1 - window) // size):
            if page < len(request.swa_pages) and request.swa_pages[page]:
                self.free_swa.append(request.swa_pages[page])
                request.swa_pages[page] = 0
        while len(request.swa_pages) * size <= position[-1]:
            request.swa_pages.append(self.free_swa.pop())
        return (np.array(pages)[position // size] * size + position % size
                for pages in (request.pages, request.swa_pages))  # fmt: skip

    def read(self):
        for tokens, served in self.unread:
            tokens = np.asarray(tokens)
            for i, request in served:
                request.output.append(int(tokens[i]))
        self.unread = []


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=2)
    arguments = parser.parse_args(argv)
    config = Config(ratios=V4_FLASH_RATIOS[: arguments.layers])
    config = dataclasses.replace(config, spec=dataclasses.replace(config.spec, num_heads=arguments.heads))
    rng = np.random.default_rng(0)
    sizes = [(300, 6, 0), (40, 12, 0), (520, 4, 3), (7, 9, 6), (130, 5, 8), (64, 3, 9)]
    requests = [Request(rng.integers(0, VOCABULARY, n).tolist(), new, arrival) for n, new, arrival in sizes]
    start = time.perf_counter()
    Server(config).serve(requests)
    for request in requests:
        print(f"{len(request.prompt)} tokens read, {len(request.output)} generated: {request.output}")
    print(f"{forward._cache_size()} compilations, {time.perf_counter() - start:.1f} s")
    return requests


if __name__ == "__main__":
    main()

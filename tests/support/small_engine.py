"""A small engine around the layer steps: random requests, their tables, and steps over them. For whole-step tests.

A `World` holds the projected rows of every token of every request, as a model would compute them. A step's
work is a list of `(request, start, count)`, or an int for a padding request with that many padding rows; what
comes out is put back by request and position.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_sparse_mla as mla
from jax_sparse_mla import layers

V4 = dataclasses.replace(mla.DEEPSEEK_V4_FLASH, name="small V4", num_heads=2, index_heads=2, index_topk=16)
V32 = dataclasses.replace(mla.DEEPSEEK_V32, name="small V3.2", num_heads=2, index_heads=2, index_topk=16)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LENGTHS = (264, 137, 70)  # tokens of the requests
PROMPT_ROWS = LENGTHS[0]  # query rows of a step that computes a whole prompt
MAX_REQUESTS, MAX_LEN = 5, 512
DRAFTS = 4  # tokens of a verify step
LAYERS, MIDDLE = 3, 1  # of a pool: the one with a layer before it and one behind it
REQUEST_ROWS = (3, 0, 4)  # of the request tables


@dataclasses.dataclass(frozen=True)
class World:
    """ratio None: V3.2. rows: numpy `[requests, tokens, ...]`, the fields of V4Rows (V32Rows)."""

    spec: mla.ModelSpec
    ratio: int | None
    rows: layers.V4Rows | layers.V32Rows
    params: layers.V4LayerParams | None
    tables: mla.RequestTables
    num_pages: int

    def empty_cache(self, *, bf16=False, max_draft_tokens=0):
        if self.ratio is None:
            return layers.V32LayerCache.zeros(self.spec, num_pages=self.num_pages, bf16=bf16)
        return layers.V4LayerCache.zeros(
            self.spec,
            self.ratio,
            num_pages=self.num_pages,
            num_swa_pages=self.num_pages,
            max_requests=MAX_REQUESTS,
            max_draft_tokens=max_draft_tokens,
            bf16=bf16,
        )


@functools.cache
def make_world(ratio: int | None, spec: mla.ModelSpec | None = None) -> World:
    """The world of a layer of this ratio, with the rows and parameters that its kind needs."""
    rng = np.random.default_rng(0 if ratio is None else ratio + 1)
    shape = (len(LENGTHS), max(LENGTHS))
    spec = spec or (V32 if ratio is None else V4)
    kind = spec.kind(ratio or 0)

    def normal(*dims, dtype=np.float32, scale=1.0):
        return (rng.standard_normal(dims) * scale).astype(np.dtype(dtype))

    def bf16(*dims):
        return normal(*shape, *dims, dtype=jnp.bfloat16)

    def compressor(head_dim):
        width = head_dim * (2 if kind.overlap else 1)
        inv_freq = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)
        params = layers.CompressorParams(
            ape=normal(ratio, width), norm_weight=1 + normal(head_dim, scale=0.1), inv_freq=inv_freq
        )
        return params, bf16(width), bf16(width)

    # Distinct pages, page 0 left to padding writes. A token's window slot is any but those of page 0.
    pages_per_request = MAX_LEN // spec.page_size
    num_pages = 1 + len(LENGTHS) * pages_per_request
    order = 1 + rng.permutation(num_pages - 1).reshape(len(LENGTHS), pages_per_request)
    req_to_token = np.full((MAX_REQUESTS, MAX_LEN), -1, np.int32)
    slots = (order[:, :, None] * spec.page_size + np.arange(spec.page_size)).reshape(len(LENGTHS), MAX_LEN)
    req_to_token[list(REQUEST_ROWS)] = slots
    pool = num_pages * spec.page_size
    to_swa = np.concatenate([np.zeros(spec.page_size), spec.page_size + rng.permutation(pool - spec.page_size), [-1]])

    params = None
    if ratio is None:
        rows = layers.V32Rows(
            q=normal(*shape, spec.num_heads, 576),
            kv=bf16(576),
            index_q=bf16(spec.index_heads, 128),
            index_k=bf16(128),
            index_weights=normal(*shape, spec.index_heads, scale=(128 * spec.index_heads) ** -0.5),
        )
    else:
        rows = layers.V4Rows(q=normal(*shape, spec.num_heads, 512), kv=bf16(512))
        main = index = None
        if ratio:
            main, kv, score = compressor(512)
            rows = dataclasses.replace(rows, compressed_kv=kv, compressed_score=score)
        if kind.index_keys == "compressor":
            index, kv, score = compressor(128)
            weights = normal(*shape, spec.index_heads, scale=(128 * spec.index_heads) ** -0.5)
            rows = dataclasses.replace(
                rows, index=layers.IndexRows(q=bf16(spec.index_heads, 128), weights=weights, kv=kv, score=score)
            )
        params = layers.V4LayerParams(attn_sink=normal(spec.num_heads), compressor=main, index_compressor=index)
    return World(
        spec=spec,
        ratio=ratio,
        rows=rows,
        params=jax.tree.map(jnp.asarray, params),
        tables=mla.RequestTables(
            req_to_token=jnp.asarray(req_to_token),
            full_to_swa=None if ratio is None else jnp.asarray(to_swa, jnp.int32),
        ),
        num_pages=num_pages,
    )


def all_layers(world) -> layers.V4LayerCache | layers.V32LayerCache:
    """Caches of several layers of the world's kind."""
    sizes = {"num_pages": world.num_pages, "num_layers": LAYERS}
    if world.ratio is None:
        return layers.V32LayerCache.zeros(world.spec, **sizes)
    return layers.V4LayerCache.zeros(
        world.spec, world.ratio, **sizes, num_swa_pages=world.num_pages, max_requests=world.tables.req_to_token.shape[0]
    )


def stacked(params: layers.V4LayerParams) -> layers.V4LayerParams:
    """These parameters between those of other layers, which are NaN."""
    others = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    return layers.V4LayerParams.stack([params if layer == MIDDLE else others for layer in range(LAYERS)])


@functools.cache
def step_function(ratio: int | None, with_plan: bool):
    """The whole step of one layer, jitted with its cache donated: metadata, plan, layer."""
    spec = V32 if ratio is None else V4

    def v4_step(cache, rows, params, batch, tables):
        num_rows, num_requests = batch.out_cache_loc.shape[0], batch.seq_lens.shape[0]
        metadata = mla.build_v4_metadata(spec, batch, tables)
        plan = None
        if with_plan:
            plan = mla.build_prefill_plan(
                spec,
                batch,
                tables,
                compress_ratio=ratio,
                swa_capacity=num_rows + num_requests * (spec.window - 1),
                compressed_capacity=num_requests * (MAX_LEN // ratio) if ratio else 0,
            )
        overflow = metadata.overflow if plan is None else metadata.overflow | plan.overflow
        arguments = {"spec": spec, "ratio": ratio}
        return layers.v4_layer(cache, rows, params, batch, metadata, plan, **arguments), overflow

    def v32_step(cache, rows, params, batch, tables):
        backend = "flashmla_sparse" if with_plan else "flashmla_kv"
        arguments = {"fp8_kv_cache": True, "prefill_backend": backend}
        metadata = mla.build_v32_metadata(spec, batch, tables, **arguments)
        return layers.v32_layer(cache, rows, batch, metadata, spec=spec), metadata.overflow

    return jax.jit(v32_step if ratio is None else v4_step, donate_argnums=0)


def make_step(world: World, mode: mla.ForwardMode, work, *, num_rows: int, hostile: bool = False):
    """(batch, rows, owners) of a step; owners map the (request, position) of each live row to the row.

    hostile: padding requests and rows hold INT_MIN … INT_MAX, a real token's slot and NaN instead of zeros.
    """
    num_requests = len(work)
    req_rows, seq_lens, extend_lens = (np.zeros(num_requests, np.int64) for _ in range(3))
    out_cache_loc, padding = np.zeros(num_rows, np.int64), 0.0
    table = np.asarray(world.tables.req_to_token)
    if hostile:
        out_cache_loc = np.resize([INT_MIN, -7, INT_MAX, table[REQUEST_ROWS[0], 5]], num_rows).astype(np.int64)
        req_rows, padding = np.resize([INT_MAX, INT_MIN, MAX_REQUESTS, -1], num_requests).astype(np.int64), np.nan
    owners, places, next_row = [], [], 0
    for i, item in enumerate(work):
        if isinstance(item, int):
            extend_lens[i] = item
            next_row += 1 if mode is mla.ForwardMode.DECODE else item
            continue
        request, start, count = item
        req_rows[i], seq_lens[i], extend_lens[i] = REQUEST_ROWS[request], start + count, count
        out_cache_loc[next_row : next_row + count] = table[REQUEST_ROWS[request], start : start + count]
        owners += [(request, start + j) for j in range(count)]
        places += range(next_row, next_row + count)
        next_row += count
    assert next_row <= num_rows
    index = tuple(np.array(owners, int).reshape(-1, 2).T)

    def pick(values):
        rows = np.full((num_rows, *values.shape[2:]), padding, values.dtype)
        rows[places] = values[index]
        return jnp.asarray(rows)

    batch = mla.ForwardBatch(
        mode=mode,
        max_seq_len=MAX_LEN,
        req_pool_indices=jnp.asarray(req_rows, jnp.int32),
        seq_lens=jnp.asarray(seq_lens, jnp.int32),
        out_cache_loc=jnp.asarray(out_cache_loc, jnp.int32),
        extend_lens=jnp.asarray(extend_lens, jnp.int32) if mode is mla.ForwardMode.EXTEND else None,
    )
    return batch, jax.tree.map(pick, world.rows), dict(zip(owners, places))


@dataclasses.dataclass
class Results:
    """out `[requests, tokens, heads, v_dim]` and positions `[requests, tokens, topk]`; NaN and −9 where none came."""

    out: np.ndarray
    positions: np.ndarray
    padding: list = dataclasses.field(default_factory=list)  # out of the padding rows of every step

    @classmethod
    def empty(cls, spec):
        shape = (len(LENGTHS), max(LENGTHS))
        out = np.full((*shape, spec.num_heads, spec.v_dim), np.nan, np.float32)
        return cls(out=out, positions=np.full((*shape, spec.index_topk), -9))


def run_step(world, cache, mode, work, *, num_rows, with_plan, results, hostile=False):
    """Runs one step, puts its rows into `results`, and returns the updated cache."""
    batch, rows, owners = make_step(world, mode, work, num_rows=num_rows, hostile=hostile)
    step = step_function(world.ratio, with_plan)
    (out, cache, positions), overflow = step(cache, rows, world.params, batch, world.tables)
    assert not bool(overflow)
    out = np.asarray(out, np.float32)
    positions = None if positions is None else np.sort(np.asarray(positions), axis=-1)[:, ::-1]
    for (request, position), row in owners.items():
        results.out[request, position] = out[row]
        if positions is not None:
            results.positions[request, position] = positions[row]
    live = np.isin(np.arange(num_rows), list(owners.values()))
    results.padding.append(out[~live])
    return cache


def softmax_out(q, keys, scale, sink=None):
    """float64 attention of q `[heads, d]` to keys `[n, d]`; V is the first 512 values of K."""
    scores = scale * q @ keys.T
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None] - top)
    return weights @ keys[:, :512] / total


def compressed_entries(params, kv, score, kind):
    """Every complete group's entry as cached: softmax-pooled window, RMSNorm, rope at the group's start."""
    kv, score, ape = (np.asarray(x, np.float64) for x in (kv, score, params.ape))
    head_dim, ratio = params.norm_weight.shape[0], kind.ratio
    entries = []
    for group in range(len(kv) // ratio):
        rows = np.arange(group * ratio, (group + 1) * ratio)
        values, logits = kv[rows, -head_dim:], score[rows, -head_dim:] + ape[:, -head_dim:]
        if kind.overlap and group > 0:  # the first halves of the group before
            before = rows - ratio
            values = np.concatenate([kv[before, :head_dim], values])
            logits = np.concatenate([score[before, :head_dim] + ape[:, :head_dim], logits])
        weights = np.exp(logits - logits.max(0))
        pooled = (weights * values).sum(0) / weights.sum(0)
        normed = pooled / np.sqrt((pooled**2).mean() + 1e-6) * np.asarray(params.norm_weight, np.float64)
        angle = group * ratio * np.asarray(params.inv_freq, np.float64)
        rotated = (normed[-64::2] + 1j * normed[-63::2]) * np.exp(1j * angle)
        entries.append(np.concatenate([normed[:-64], np.stack([rotated.real, rotated.imag], -1).ravel()]))
    return np.array(entries).reshape(-1, head_dim).astype(jnp.bfloat16).astype(np.float64)

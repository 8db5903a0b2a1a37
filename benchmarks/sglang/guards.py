"""Whether a step of SGLang's kernels is the step that ours is, layer by layer, against our reference on the CPU.

A layer is run again by `v4_layer`, in plain JAX, on one request: its own pages, states and rows, with what the layer
below gave. The step is one at which both kinds of compressors complete an entry. Three things are compared:

* the selection of the indexer: of the entries that SGLang selects, the share whose reference logit is among the top-k;
  a logit counts that is within the error of FP8 tensor cores of the last one selected;
* the output, where the reference attends to SGLang's own selection;
* the caches after the step: the new rows agree to one step of their formats, and no other byte differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.sglang.state import C4_RING, C128_RING, EPS, Compressor, Layer, State
from benchmarks.sglang.step import Graph, Seen, Step
from benchmarks.stack import Stack
from jax_sparse_mla import ForwardBatch, ForwardMode
from jax_sparse_mla.compressor.api import compress_kv
from jax_sparse_mla.compressor.state import CompressorState
from jax_sparse_mla.indexer.logits import index_logits, quantize_index_q, write_transformed_index_k
from jax_sparse_mla.kv_cache import gather_kv, write_kv
from jax_sparse_mla.layers import IndexRows, V4LayerCache, V4Rows, prepare_v4_step, v4_layer
from jax_sparse_mla.models import INDEXED_RATIO
from jax_sparse_mla.rope import rope_interleaved

LEAST_SELECTED = 0.999  # of the top-k
MOST_ERROR = 1e-2  # of a layer's output, ‖theirs − ours‖ / ‖ours‖: both are bfloat16
LOGIT_ERROR = 2**-10  # of a row's largest logit: FP8 tensor cores keep about 14 bits of each sum of products
E4M3_STEP, BF16_STEP = 2**-3, 2**-7  # of a value, between neighbours at the lower end of a binade
STEPS_BEFORE = 7  # eager steps that fill the compressors' states


class GuardError(Exception):
    """SGLang's step is not ours; the message says where."""


class Report(NamedTuple):
    """The worst of all layers and requests that were compared."""

    selected: float
    output_error: float
    # Of what the step writes, the share that is not ours to the bit, each within a step of its format: of a decode step
    # bytes, of a prefill chunk the values of all its entries. An index key whose scale differs does so in every value.
    changed_bytes: float
    graph_error: float  # of the output of a captured step against an eager one, relative to its largest value

    def worse(self, other: Report) -> Report:
        return Report(min(self.selected, other.selected), *(max(pair) for pair in zip(self[1:], other[1:])))


def check(state: State, step: Step, graph: Graph) -> Report:
    """Compares the first layer of each ratio and the last layer, of the first request and the last, and prints it all.

    The requests end at the end of their tables, where every cache is as full as it will be.

    Raises:
      GuardError: they are not the same.
    """
    stack = state.stack
    numbers = sorted({stack.ratios.index(ratio) for ratio in stack.ratios} | {len(stack.ratios) - 1})
    requests = sorted({0, stack.batch - 1})
    state.lens.fill_(stack.max_len - 1 - STEPS_BEFORE)
    for _ in range(STEPS_BEFORE):
        step()
    pairs = [(number, request) for number in numbers for request in requests]
    before = [Request.of(state, state.layers[number], request) for number, request in pairs]
    seen: dict[int, Seen | None] = dict.fromkeys(numbers)
    eager = step(seen)
    after = [Request.of(state, state.layers[number], request) for number, request in pairs]
    graph_error = _graph_error(state, eager, graph)
    if not graph_error <= MOST_ERROR:
        raise GuardError(f"the captured step's output differs from the eager one's by {graph_error:.3g}")
    return _worst(
        (
            f"layer {number} of ratio {stack.ratios[number]}, request {request}",
            functools.partial(compare, state, number, request, first, then, seen[number]),
        )
        for (number, request), first, then in zip(pairs, before, after, strict=True)
    )._replace(graph_error=graph_error)


def _worst(comparisons: Iterable[tuple[str, Callable[[], Report]]]) -> Report:
    """The worst of all reports, each printed under its name; raises GuardError where one is not good enough."""
    report, failures = Report(1.0, 0.0, 0.0, 0.0), []
    for name, compared in comparisons:
        try:
            result = compared()
        except GuardError as error:
            failures.append(f"{name}: {error}")
            continue
        print(f"    {name}: {result}")
        report = report.worse(result)
        if not (result.selected >= LEAST_SELECTED and result.output_error <= MOST_ERROR):
            failures.append(f"{name}: {result}")
    if failures:
        print("\n".join(failures), flush=True)
        raise GuardError(failures[0])
    return report


def check_chunk(state: State, seen: dict[int, Seen | None], rows: int) -> Report:
    """The same of a prefill of one request that fills its table, the last chunk of `rows` rows.

    Its second last row is compared, at whose token no compressor completes an entry, as if it were a decode step; and
    all entries of the compressed caches.

    Raises:
      GuardError: they are not the same.
    """

    def compared(number: int, layer: Layer) -> Report:
        request, length = Request.of(state, layer, 0), state.stack.max_len - 1
        # Where a chunk ends with a whole group, nothing of C128's state is read before it is written again.
        with_state = layer.ratio == INDEXED_RATIO
        result = compare(state, number, 0, request, request, seen[number], rows - 2, length, with_state=with_state)
        return result._replace(changed_bytes=max(result.changed_bytes, _check_entries(state, number, request)))

    layers = [(number, state.layers[number]) for number in seen]
    return _worst((f"layer {n} of ratio {layer.ratio}", functools.partial(compared, n, layer)) for n, layer in layers)


def _check_entries(state: State, number: int, owned: Request) -> float:
    """All entries that a prefill leaves, against our compressor's on the same rows: the share of different values."""
    layer, stack, params = state.layers[number], state.stack, state.params[number]
    mini = dataclasses.replace(stack, batch=1, ratios=(layer.ratio,))
    tables = mini.tables()
    actual, shares = _cache(mini, layer.ratio, owned, *_mini_pages(mini, tables)), [0.0]
    if layer.compressor is not None:
        entries, slots = _entries(stack, layer.ratio, layer.compressor, params.compressor, tables)
        ours = write_kv(mini.empty_caches()[layer.ratio].compressed, slots, entries)
        rows = [np.asarray(gather_kv(cache, slots), np.float32) for cache in (ours, actual.compressed)]
        _near(*(row[:, : stack.spec.nope_dim] for row in rows), E4M3_STEP, "entries' e4m3 values")
        _near(*(row[:, stack.spec.nope_dim :] for row in rows), BF16_STEP, "entries' rotated values")
        shares.append((rows[0] != rows[1]).mean())
    if layer.index_k is not None:
        entries, slots = _entries(stack, layer.ratio, layer.index_compressor, params.index_compressor, tables)
        ours = write_transformed_index_k(jnp.zeros_like(actual.index_k), slots, entries)
        keys = [_keys(np.asarray(data), np.asarray(slots)) for data in (ours, actual.index_k)]
        # A key is rounded to bfloat16 in other places before its transform, which spreads each error over the row.
        _near(*keys, E4M3_STEP, "index keys' values", of_row=BF16_STEP)
        shares.append((keys[0] != keys[1]).mean())
    return float(max(shares))


def _entries(stack: Stack, ratio: int, compressor: Compressor, params, tables) -> tuple[jax.Array, jax.Array]:
    """Our entries of a request whose chunks all have the compressor's rows, and their slots."""
    kv, score = jnp.split(jnp.asarray(_numpy(compressor.rows)), 2, axis=1)
    chunks = stack.max_len // len(kv)
    entries, rows, _ = compress_kv(
        CompressorState.zeros(1, ratio=ratio, head_dim=len(params.norm_weight)),
        jnp.tile(kv, (chunks, 1)),
        jnp.tile(score, (chunks, 1)),
        positions=jnp.arange(stack.max_len, dtype=jnp.int32),
        req_rows=jnp.zeros(stack.max_len, jnp.int32),
        query_start_loc=jnp.asarray([0, stack.max_len], jnp.int32),
        ape=params.ape,
        norm_weight=params.norm_weight,
        inv_freq=params.inv_freq,
        ratio=ratio,
    )
    count = stack.max_len // ratio
    return entries[:count], tables.req_to_token[0, rows[:count]] // ratio


def _graph_error(state: State, eager: torch.Tensor, graph: Graph) -> float:
    """The same step once more, captured; a step that is repeated writes what it wrote."""
    eager = eager.float()
    state.lens.fill_(state.stack.max_len - 1)
    graph.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return ((graph.out.float() - eager).abs().max() / eager.abs().max()).item()


@dataclasses.dataclass
class Request:
    """One request's part of a layer, in the order of its pages: numpy arrays, `[pages, page_bytes]` and
    `[ring, 2 · coff · head_dim]`."""

    swa: np.ndarray
    compressed: np.ndarray | None = None
    state: np.ndarray | None = None
    index_k: np.ndarray | None = None
    index_state: np.ndarray | None = None

    @classmethod
    def of(cls, state: State, layer: Layer, request: int) -> Request:
        page_size = state.stack.spec.page_size
        pages = (state.req_to_token[request, ::page_size] // page_size).long()
        swa_pages = (state.full_to_swa[pages * page_size] // page_size)[: state.stack.window_pages]

        def ring(compressor: Compressor) -> np.ndarray:
            tokens = compressor.state.flatten(0, 1)
            if layer.ratio == INDEXED_RATIO:  # of the page of the last token
                last = state.full_to_swa[pages[-1] * page_size] // page_size
                return _numpy(tokens[last * C4_RING : (last + 1) * C4_RING])
            return _numpy(tokens[request * C128_RING : (request + 1) * C128_RING])

        part = cls(swa=_numpy(layer.swa[swa_pages]))
        if layer.compressor is not None:
            part.compressed, part.state = _numpy(layer.compressed[pages]), ring(layer.compressor)
        if layer.index_k is not None:
            part.index_k, part.index_state = _numpy(layer.index_k[pages]), ring(layer.index_compressor)
        return part


def compare(
    state: State,
    number: int,
    request: int,
    before: Request,
    after: Request,
    seen: Seen,
    row: int | None = None,
    length: int | None = None,
    with_state: bool = True,
) -> Report:
    """One layer and request against `v4_layer`.

    Args:
      state, number: the layer. request: whose step it is.
      before, after: what the request owns. seen: what SGLang's step gave and made.
      row: the request's in the step's inputs and outputs, by default `request`.
      length: of the request, with the step's token; by default all that its table holds.
      with_state: whether the compressors' states are compared, too.
    """
    stack, layer = state.stack, state.layers[number]
    row, length = request if row is None else row, stack.max_len if length is None else length
    mini = dataclasses.replace(stack, batch=1, ratios=(layer.ratio,))
    tables = mini.tables()
    pages, swa_pages = _mini_pages(mini, tables)
    rows, position = _rows(state, layer, row, seen.kv[row : row + 1], length - 1), length - 1
    selection = jnp.zeros((1, 0))
    if layer.index_k is not None:
        chosen = _positions(state, request, _numpy(seen.slots[row]), length)
        selection = jnp.zeros((1, stack.pages * 64)).at[0, chosen].set(1.0)
    cache = _cache(mini, layer.ratio, before, pages, swa_pages)
    run = _reference(mini, layer.ratio)
    out, expected, logits = run(cache, rows, state.params[number], tables, selection, jnp.full(1, length, jnp.int32))

    theirs = _numpy(seen.out[row].float())
    out = np.asarray(out[0], np.float32)
    error = float(np.linalg.norm(theirs - out) / np.linalg.norm(out))
    share = 1.0
    if layer.index_k is not None:
        share = _selected(np.asarray(logits[0]), chosen, stack.spec.index_topk)
    actual = _cache(mini, layer.ratio, after, pages, swa_pages)
    try:
        changed = _check_caches(mini, layer.ratio, position, expected, actual, tables, with_state)
    except GuardError as reason:
        raise GuardError(f"{reason} (selected {share:.4f}, output error {error:.2g})") from None
    return Report(share, error, changed, 0.0)


@functools.cache
def _reference(mini: Stack, ratio: int):
    """`(cache, rows, params, tables, selection, length) -> (out, cache, logits)` of a decode step of one request."""

    @jax.jit
    def run(cache, rows, params, tables, selection, length):
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            max_seq_len=mini.max_len,
            req_pool_indices=jnp.zeros(1, jnp.int32),
            seq_lens=length,
            out_cache_loc=tables.req_to_token[0, length - 1],
        )
        step = prepare_v4_step(mini.spec, batch, tables, gathered=False)
        arguments = cache, rows, params, batch, step.metadata, None
        scores = selection if ratio == INDEXED_RATIO else None
        out, cache, _ = v4_layer(*arguments, spec=mini.spec, ratio=ratio, index_scores=scores)
        logits = None
        if ratio == INDEXED_RATIO:
            q, q_scale = quantize_index_q(rows.index.q, hadamard=True)
            lengths = step.metadata.compressed[ratio].lengths
            logits = index_logits(q, rows.index.weights * q_scale, cache.index_k, step.metadata.page_table, lengths)
        return out, cache, logits

    return run


def _rows(state: State, layer: Layer, row: int, kv: torch.Tensor, position: int) -> V4Rows:
    """One row as our step takes it: what SGLang's kernels do before is done."""
    one, position = slice(row, row + 1), jnp.full((1,), position, jnp.int32)

    def rope(x: jax.Array) -> jax.Array:
        return rope_interleaved(x, position.reshape((1,) * (x.ndim - 1)), state.inv_freq)

    kv = jnp.asarray(_numpy(kv.float()))
    kv = kv * jax.lax.rsqrt(jnp.mean(kv * kv, -1, keepdims=True) + EPS)
    rows = V4Rows(q=_bf16(state.q[one]), kv=rope(kv).astype(jnp.bfloat16))
    if layer.compressor is not None:
        main_kv, main_score = jnp.split(jnp.asarray(_numpy(layer.compressor.rows[one])), 2, axis=1)
        rows = dataclasses.replace(rows, compressed_kv=main_kv, compressed_score=main_score)
    if layer.index_k is not None:
        index_kv, index_score = jnp.split(jnp.asarray(_numpy(layer.index_compressor.rows[one])), 2, axis=1)
        q = rope(jnp.asarray(_numpy(state.index_q[one].float())))
        weights = jnp.asarray(_numpy(state.index_weights[one].float())) * state.index_scale
        rows = dataclasses.replace(rows, index=IndexRows(q=q, weights=weights, kv=index_kv, score=index_score))
    return rows


def _mini_pages(mini: Stack, tables) -> tuple[np.ndarray, np.ndarray]:
    """The pages of the one request, and those of its window's ring."""
    page_size = mini.spec.page_size
    pages = np.asarray(tables.req_to_token)[0, ::page_size] // page_size
    swa_pages = np.asarray(tables.full_to_swa)[pages * page_size] // page_size
    return pages, swa_pages[: mini.window_pages]


def _cache(mini: Stack, ratio: int, request: Request, pages: np.ndarray, swa_pages: np.ndarray) -> V4LayerCache:
    cache = mini.empty_caches()[ratio]

    def put(array, where: np.ndarray, rows: np.ndarray) -> jax.Array:
        array = np.array(array)
        array[where] = rows
        return jnp.asarray(array)

    def ring(rows: np.ndarray) -> CompressorState:
        kv, score = np.split(rows, 2, axis=1)
        return CompressorState(kv=jnp.asarray(kv[None]), score=jnp.asarray(score[None]))

    cache = dataclasses.replace(
        cache, swa=dataclasses.replace(cache.swa, data=put(cache.swa.data, swa_pages, request.swa))
    )
    if ratio:
        data = put(cache.compressed.data, pages, request.compressed)
        compressed = dataclasses.replace(cache.compressed, data=data)
        cache = dataclasses.replace(cache, compressed=compressed, state=ring(request.state))
    if ratio == INDEXED_RATIO:
        index_k = put(cache.index_k, pages, request.index_k)
        cache = dataclasses.replace(cache, index_k=index_k, index_state=ring(request.index_state))
    return cache


def _positions(state: State, request: int, slots: np.ndarray, length: int) -> np.ndarray:
    """The entries that a row's slots are.

    Raises:
      GuardError: a slot of another request's, or one twice.
    """
    page_size = state.stack.spec.page_size
    pages = _numpy(state.req_to_token[request, ::page_size] // page_size)
    number = {page: i for i, page in enumerate(pages.tolist())}
    entries = [number.get(slot // 64, -1) * 64 + slot % 64 for slot in slots.tolist() if slot >= 0]
    expected = min(state.stack.spec.index_topk, length // INDEXED_RATIO)
    if len(set(entries)) != expected or min(entries) < 0:
        raise GuardError(f"request {request} selects {len(set(entries))} of its own entries, not {expected}")
    return np.asarray(entries)


def _selected(logits: np.ndarray, chosen: np.ndarray, topk: int) -> float:
    """The share of the chosen entries whose logits are among the top-k, or as good as that."""
    topk = min(topk, len(logits))
    last = np.partition(logits, len(logits) - topk)[len(logits) - topk]
    return float(np.mean(logits[chosen] >= last - LOGIT_ERROR * np.abs(logits).max()))


def _check_caches(mini: Stack, ratio: int, position: int, expected, actual, tables, with_state: bool) -> float:
    """The share of different bytes in the rows written.

    Raises:
      GuardError: bytes of other rows differ, or a written row by more than a step of its format.
    """
    slot = int(np.asarray(tables.req_to_token)[0, position])
    swa_slot = int(np.asarray(tables.full_to_swa)[slot])
    shares = [_check_kv(mini, expected.swa, actual.swa, swa_slot)]
    if ratio:
        shares.append(_check_kv(mini, expected.compressed, actual.compressed, slot // ratio))
        for ours, theirs in zip(jax.tree.leaves(expected.state), jax.tree.leaves(actual.state), strict=True):
            if with_state and not np.array_equal(ours, theirs):
                raise GuardError(f"the compressor's state differs in a layer of ratio {ratio}")
    if ratio == INDEXED_RATIO:
        shares.append(_check_index_k(expected.index_k, actual.index_k, slot // ratio))
    return max(shares)


def _check_kv(mini: Stack, ours, theirs, slot: int) -> float:
    spec, page, offset = mini.spec, slot // ours.page_size, slot % ours.page_size
    data, scales = 576 * offset, 576 * ours.page_size + 8 * offset
    written = [*range(data, data + 576), *range(scales, scales + 7)]
    share = _only_there_differ(np.asarray(ours.data), np.asarray(theirs.data), page, written, "a KV cache")
    rows = [np.asarray(gather_kv(cache, jnp.asarray([slot], jnp.int32))[0], np.float32) for cache in (ours, theirs)]
    _near(*(row[: spec.nope_dim] for row in rows), E4M3_STEP, "a row's e4m3 values")
    _near(*(row[spec.nope_dim :] for row in rows), BF16_STEP, "a row's rotated values")
    return share


def _check_index_k(ours, theirs, slot: int) -> float:
    values, scale = 128 * (slot % 64), 64 * 128 + 4 * (slot % 64)
    written = [*range(values, values + 128), *range(scale, scale + 4)]
    pages = [np.asarray(ours), np.asarray(theirs)]
    share = _only_there_differ(*pages, slot // 64, written, "the index keys")
    _near(*(_keys(data, np.asarray([slot])) for data in pages), E4M3_STEP, "an index key's values", of_row=BF16_STEP)
    return share


def _keys(pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """float32 `[slots, 128]`."""
    pages = np.ascontiguousarray(pages)
    values = pages[:, : 64 * 128].reshape(-1, 64, 128).view(np.dtype(jnp.float8_e4m3fn))
    scales = np.ascontiguousarray(pages[:, 64 * 128 :]).view(np.float32)
    page, offset = slots // 64, slots % 64
    return values[page, offset].astype(np.float32) * scales[page, offset, None]


def _only_there_differ(ours: np.ndarray, theirs: np.ndarray, page: int, written: list[int], what: str) -> float:
    differ = ours != theirs
    share = differ[page, written].mean()
    differ[page, written] = False
    if differ.any():
        raise GuardError(f"{differ.sum()} bytes of {what} differ outside of the row that the step writes")
    return float(share)


def _near(ours: np.ndarray, theirs: np.ndarray, step: float, what: str, of_row: float = 0.0) -> None:
    """Within one step of the format, values that lie on either side of a rounding boundary, and `of_row` of the row's
    largest."""
    scale = np.maximum(np.abs(ours), np.abs(theirs))
    # Among the smallest numbers of a format steps no longer shrink with the value.
    largest = scale.max(-1, keepdims=True)
    most = np.maximum(step * scale, 2**-9 * largest) + of_row * largest
    apart = np.abs(ours - theirs)
    if not (apart <= most).all():
        worst = np.unravel_index(np.argmax(apart - most), apart.shape)
        raise GuardError(
            f"{(~(apart <= most)).sum()} of {apart.size} {what} differ by more than a step, the worst are "
            f"{ours[worst]:.4g} and {theirs[worst]:.4g} in a row whose largest is {scale[worst[:-1]].max():.4g}"
        )


def _bf16(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(_numpy(x.float())).astype(jnp.bfloat16)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()

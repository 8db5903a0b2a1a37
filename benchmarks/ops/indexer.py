"""The indexer and the compressor: logits, the key cache's writer, the queries' quantiser, compressed entries.

Peers: DeepGEMM's logits, of pages in decode and, in a chunk, of keys gathered beforehand; SGLang's store of keys. Plain
XLA stands beside the queries' quantiser and the compressor, which SGLang has only fused with norms or rope, and beside
the logits of FP4 keys, which DeepGEMM has for SM100 alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch.operations import indexer as torch_indexer

from benchmarks import peers
from benchmarks.harness import Case, Run, Spec, in_place, operation
from jax_sparse_mla.compressor.api import compress_kv, compress_kv_reference
from jax_sparse_mla.compressor.state import CompressorArrays, CompressorState, compressor_window
from jax_sparse_mla.indexer.keys import IndexFormat
from jax_sparse_mla.indexer.logits import (
    INDEX_DIM,
    INDEX_K_BYTES,
    IndexKeys,
    index_logits_reference,
    logits_of,
    quantize_index_q,
    quantize_index_q_reference,
    write_index_k,
)

HEADS = 64
PAGE_SIZE = 64

# Rows, columns, and the rows' lengths: all columns, a few of them, or causal over the last `rows` entries.
DECODE = ((1, 32_768, "full"), (1, 131_072, "full"), (8, 32_768, "full"), (64, 8192, "full"), (64, 32_768, "full"))
DECODE += ((64, 131_072, "full"), (64, 131_072, 2048))
PREFILL = ((1024, 8192, "causal"), (8192, 32_768, "causal"), (8192, 98_304, "causal"))
# Of V4.1's index heads, for keys of both formats.
V41_DECODE, V41_HEADS = ((64, 32_768, "full"), (64, 131_072, "full")), 32
LOGITS_DIFFER = 1e-5  # at most, of the largest logit: sums in another order
FP4_LOGITS_DIFFER = 2.0**-10  # from float32 sums: the FP8 tensor cores keep about 14 bits of a sum of products

# Tokens and requests; ratio and head_dim of V4's compressors.
COMPRESS = ((64, 64), (8192, 1))
COMPRESSORS = ((4, 512), (4, 128), (128, 512))


def specs() -> Iterator[Spec]:
    def spec(name: str, make: Callable, *shape, **options) -> Spec:
        return Spec(name, lambda rng: make(rng, *shape, **options))

    for rows, columns, kind in (*DECODE, *PREFILL):
        name = f"index_logits {rows} x {columns}" + ("" if kind == "full" else f", {kind}")
        yield spec(name, _logits, rows, columns, kind)
    for rows, columns, kind in V41_DECODE:
        for format in (IndexFormat.FP8, IndexFormat.FP4):
            name = f"index_logits {rows} x {columns}, {V41_HEADS} heads, {format.name} keys"
            yield spec(name, _logits, rows, columns, kind, heads=V41_HEADS, format=format)
    for n in (64, 65_536):
        yield spec(f"write_index_k {n}", _write, n)
    for rows in (64, 8192):
        yield spec(f"quantize_index_q {rows} x {HEADS}, hadamard", _quantise, rows)
    for tokens, requests in COMPRESS:
        for ratio, head_dim in COMPRESSORS:
            name = f"compress_kv ratio {ratio} head_dim {head_dim}, {tokens} tokens of {requests}"
            yield spec(name, _compress, tokens, requests, ratio, head_dim)


def _normal(rng, *shape, dtype=jnp.bfloat16) -> jax.Array:
    key = jax.random.key(int(rng.integers(1 << 31)))
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _jitted(function: Callable, *args) -> Run:
    compiled = jax.jit(function)
    return Run(lambda: compiled(*args), "jax")


def _tensor(x: jax.Array) -> torch.Tensor:
    return torch.from_dlpack(x)


def _logits(
    rng, rows: int, columns: int, kind: str | int, *, heads: int = HEADS, format: IndexFormat = IndexFormat.FP8
) -> Case:
    pages = columns // PAGE_SIZE
    prefill = kind == "causal"
    tables = 1 if prefill else rows
    num_pages = tables * pages
    keys = IndexKeys.zeros(num_pages, PAGE_SIZE, format=format)
    for start in range(0, num_pages * PAGE_SIZE, 1 << 20):
        slots = jnp.arange(start, min(start + (1 << 20), num_pages * PAGE_SIZE), dtype=jnp.int32)
        keys = jax.jit(write_index_k, donate_argnums=0)(keys, slots, _normal(rng, slots.shape[0], INDEX_DIM))
    table = rng.permutation(num_pages).astype(np.int32).reshape(tables, pages)
    lengths = np.full(rows, columns if kind == "full" else kind if not prefill else 0, np.int32)
    if prefill:  # C4 entries of a chunk that ends at the last column
        lengths = (columns - (rows - 1 - np.arange(rows)) // 4).astype(np.int32)
    q, scale = quantize_index_q(_normal(rng, rows, heads, INDEX_DIM), format=format)
    weights = _normal(rng, rows, heads, dtype=jnp.float32) * scale
    args = q, weights, keys, jnp.asarray(np.broadcast_to(table, (rows, pages))), jnp.asarray(lengths)
    out = torch.empty((rows, columns), device="cuda")
    tensors = [_query_tensor(q), *map(_tensor, (weights, keys.data, *args[3:]))]
    read = int(lengths[-1]) if prefill else int(lengths.sum())

    # As a step's top-k takes them, and DeepGEMM leaves them: nothing is written behind the lengths.
    def ours():
        torch_indexer.launch_logits(*tensors, out, rows_of_call=rows, fill=False, format=format)
        return out

    if format == IndexFormat.FP4:
        peer, differ = "xla", FP4_LOGITS_DIFFER
        rival = _jitted(index_logits_reference, *args)
    else:
        peer, differ = "deep_gemm", LOGITS_DIFFER
        rival = _deep_gemm_chunk(*tensors) if prefill else _deep_gemm_pages(*tensors)

    def check():
        theirs = rival.call()
        theirs = theirs if rival.framework == "torch" else _tensor(jax.block_until_ready(theirs))
        return _largest_difference(ours(), theirs, tensors[-1], differ)

    return Case(
        ours={
            "jax": _jitted(functools.partial(logits_of, fill=False), *args),
            "torch": Run(ours, "torch"),
        },
        peers={peer: rival},
        bytes=read * format.key_bytes + q.nbytes + 4 * (int(lengths.sum()) + rows * heads),
        flop=2 * heads * INDEX_DIM * int(lengths.sum()),
        flop_unit="fp8",
        checks={peer: check},
    )


def _query_tensor(q: jax.Array) -> torch.Tensor:
    """Torch takes no e4m3 numbers from JAX."""
    if q.dtype == jnp.bfloat16:
        return _tensor(q)
    return _tensor(jax.lax.bitcast_convert_type(q, jnp.uint8)).view(torch.float8_e4m3fn)


def _deep_gemm_pages(q, weights, keys, table, lengths) -> Run:
    """`fp8_paged_mqa_logits`; its schedule is made once a step and not timed."""
    columns = table.shape[1] * PAGE_SIZE
    arguments = q[:, None], keys.view(-1, PAGE_SIZE, 1, INDEX_K_BYTES), weights, lengths[:, None].contiguous(), table

    @functools.cache
    def prepared():
        gemm, sms = peers.find("deep_gemm"), torch.cuda.get_device_properties(0).multi_processor_count
        return gemm.fp8_paged_mqa_logits, gemm.get_paged_mqa_logits_metadata(arguments[3], PAGE_SIZE, sms)

    def call():
        logits, schedule = prepared()
        return logits(*arguments, schedule, columns, clean_logits=False)

    return Run(call, "torch")


def _deep_gemm_chunk(q, weights, keys, table, lengths) -> Run:
    """`fp8_mqa_logits` of one request's keys, gathered beforehand: it reads no pages."""

    @functools.cache
    def prepared():
        logits, body = peers.find("deep_gemm").fp8_mqa_logits, PAGE_SIZE * INDEX_DIM
        pages = keys[table[0].long()]
        values = pages[:, :body].reshape(-1, INDEX_DIM).view(torch.float8_e4m3fn)
        scales = pages[:, body:].contiguous().view(torch.float32).reshape(-1)
        return logits, (values, scales), torch.zeros_like(lengths)

    def call():
        logits, gathered, starts = prepared()
        return logits(q, gathered, weights, starts, lengths, clean_logits=False)

    return Run(call, "torch")


def _largest_difference(ours: torch.Tensor, theirs: torch.Tensor, lengths: torch.Tensor, limit: float) -> float:
    """Over the columns that count, as a share of the largest logit, at most `limit`; a piece of the rows at a time."""
    at, most, largest = torch.arange(ours.shape[1], device=ours.device), 0.0, 0.0
    for rows in torch.arange(len(ours), device=ours.device).split(512):
        counted = at < lengths[rows, None]
        wanted, actual = ours[rows][counted], theirs[rows, : ours.shape[1]][counted]
        most = max(most, (wanted - actual).abs().max().item())
        largest = max(largest, wanted.abs().max().item())
    assert most <= limit * largest, f"logits differ by {most:.3g}, the largest is {largest:.3g}"
    return most / largest


def _write(rng, n: int) -> Case:
    num_pages = 2 * n // PAGE_SIZE
    slots = jnp.asarray(rng.permutation(num_pages * PAGE_SIZE)[:n].astype(np.int32))
    k = _normal(rng, n, INDEX_DIM)

    cache = jnp.zeros((num_pages, PAGE_SIZE * INDEX_K_BYTES), jnp.uint8)
    their_k, their_cache, their_slots = (_tensor(x).clone() for x in (k, cache, slots))
    ours = in_place(write_index_k, cache, slots, k)

    def sglang():
        store = peers.find("sglang store").fused_store_cache
        store(their_k, their_cache, their_slots, page_size=PAGE_SIZE, type="indexer")
        return their_cache

    def share_of_other_keys() -> float:
        """Compares keys as they are read: SGLang's scale may be off by one unit in the last place."""
        wanted, actual = (_keys_of(x) for x in (_tensor(jax.block_until_ready(ours.call())), sglang()))
        share = ((wanted - actual).abs() > 1e-5 * wanted.abs() + 1e-9).float().mean().item()
        assert share < 1e-3, f"{share:.2%} of the keys differ"
        return share

    return Case(
        ours={"jax": ours},
        peers={"sglang": Run(sglang, "torch")},
        bytes=n * (2 * INDEX_DIM + INDEX_K_BYTES + 4),
        checks={"sglang": share_of_other_keys},
    )


def _keys_of(cache: torch.Tensor) -> torch.Tensor:
    """Float32 `[pages, page_size, 128]`: a page's keys stand before its scales."""
    body = PAGE_SIZE * INDEX_DIM
    keys = cache[:, :body].contiguous().view(torch.float8_e4m3fn).float().view(-1, PAGE_SIZE, INDEX_DIM)
    return keys * cache[:, body:].contiguous().view(torch.float32)[..., None]


def _quantise(rng, rows: int) -> Case:
    q = _normal(rng, rows, HEADS, INDEX_DIM)
    return Case(
        ours={"jax": _jitted(functools.partial(quantize_index_q, hadamard=True), q)},
        peers={"xla": _jitted(functools.partial(quantize_index_q_reference, hadamard=True), q)},
        bytes=3 * q.size + 4 * rows * HEADS,
    )


def _compress(rng, tokens: int, requests: int, ratio: int, head_dim: int) -> Case:
    """A request per token at any positions, or one request's chunk."""
    width = head_dim * compressor_window(ratio) // ratio
    per_request = tokens // requests
    positions = (rng.integers(1000, 30_000, (requests, 1)) + np.arange(per_request)).astype(np.int32).ravel()
    kv, score = (_normal(rng, tokens, width) for _ in range(2))
    state = CompressorState.zeros(requests, ratio=ratio, head_dim=head_dim)
    num_entries = min(tokens, tokens // ratio + requests)
    others = (
        jnp.asarray(positions),
        jnp.asarray(np.repeat(np.arange(requests, dtype=np.int32), per_request)),
        jnp.asarray(np.arange(requests + 1, dtype=np.int32) * per_request),
        _normal(rng, ratio, width, dtype=jnp.float32),
        _normal(rng, head_dim, dtype=jnp.float32),
        1 / 10_000 ** (jnp.arange(32) / 32),
    )
    names = ("positions", "req_rows", "query_start_loc", "ape", "norm_weight", "inv_freq")

    def ours(carry, kv, score, *others):
        entries, rows, state = compress_kv(carry[0], kv, score, **dict(zip(names, others)), ratio=ratio)
        return state, entries, rows

    def plain(carry, *args):
        arrays = CompressorArrays(carry[0].kv, carry[0].score, *args)
        entries, rows, *state = compress_kv_reference(arrays, ratio=ratio, norm_eps=1e-6, num_entries=num_entries)
        return CompressorState(kv=state[0], score=state[1]), entries, rows

    def start():
        carried = jax.tree.map(jnp.copy, state)
        return carried, jnp.zeros((num_entries, head_dim), jnp.bfloat16), jnp.zeros((num_entries,), jnp.int32)

    completed = int(np.sum(positions % ratio == ratio - 1))
    kept = min(per_request, state.kv.shape[1]) * requests
    window = 4 * compressor_window(ratio) if requests == tokens else 0  # float32 of the ring, or the step's own rows
    moved = completed * head_dim * (2 * window + 2) + kept * 2 * width * 4
    moved += (kept if requests == tokens else tokens) * 2 * width * 2
    return Case(
        ours={"jax": in_place(ours, start(), kv, score, *others)},
        peers={"xla": in_place(plain, start(), kv, score, *others)},
        bytes=moved,
    )


main = operation("indexer", __doc__, specs)

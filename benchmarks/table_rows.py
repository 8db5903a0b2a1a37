"""The lines of README's table of operations beside their peers: the recorded cases of each, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """A line of the table: the cases of a file, and how ours is launched in them."""

    what: str
    file: str
    cases: tuple[str, ...]
    ours: str = "ours"


def _decode(what: str, name: str, batches: Iterable[int], tokens: int = 1) -> Row:
    return Row(what, "hopper_decode", tuple(f"{name}, {batch} x {tokens}" for batch in batches))


def _topk(rows: int, k: int) -> Row:
    cases = tuple(f"topk_transform paged, {rows} x {columns}, k {k}" for columns in (4096, 32768, 131072))
    return Row(f"top-{k:,} and pages, {rows:,} × 4,096 / 32,768 / 131,072", "topk", cases, "jax")


ROWS = (
    _decode("V4-Flash decode, 64 heads, 128 + 512 indices, 1 / 4 / 16 rows", "V4 Flash, 64 heads", (1, 4, 16)),
    _decode("the same, 64 / 256 rows", "V4 Flash, 64 heads", (64, 256)),
    _decode("the same with 16 heads (FlashMLA padded to 64), 1 / 16 / 256 rows", "V4 Flash, 16 heads", (1, 16, 256)),
    _decode(
        "V4 C128 decode, 64 heads, lengths up to 1,024, 2 / 64 / 128 × 2 rows", "V4 C128, 64 heads", (2, 64, 128), 2
    ),
    _decode("the same with 128 heads", "V4 C128, 128 heads", (2, 64, 128), 2),
    _decode("V4-Pro decode, 128 heads, 128 + 1,024 indices, 1 / 64 / 256 rows", "V4 Pro, 128 heads", (1, 64, 256)),
    _decode("V3.2 decode, 128 heads, 2,048 indices, 1 / 64 / 256 rows", "V3.2, 128 heads", (1, 64, 256)),
    _decode("the same, 2 / 64 × 2 rows", "V3.2, 128 heads", (2, 64), 2),
    # Rows of one token in which FlashMLA is or was faster.
    _decode("V3.2 decode, 128 heads, 2 / 4 / 8 / 32 rows", "V3.2, 128 heads", (2, 4, 8, 32)),
    _decode("V4 C128 decode, 128 heads, 8 / 16 / 32 / 64 rows", "V4 C128, 128 heads", (8, 16, 32, 64)),
    _decode("V4 window layers' decode, 128 heads, 32 / 64 rows", "V4 window, 128 heads", (32, 64)),
    _decode("the same with 64 heads, 64 rows", "V4 window, 64 heads", (64,)),
    Row(
        "prefill, 4,096 queries: V4-Flash, 8,192 / 65,536 keys",
        "attention",
        ("prefill V4 Flash, 64 heads, kv 8192", "prefill V4 Flash, 64 heads, kv 65536"),
        "hopper",
    ),
    Row("the same: V4-Pro, 65,536 keys", "attention", ("prefill V4 Pro, 128 heads, kv 65536",), "hopper"),
    Row(
        "the same: V3.2, 8,192 / 65,536 keys",
        "attention",
        ("prefill V3.2, 128 heads, kv 8192", "prefill V3.2, 128 heads, kv 65536"),
        "hopper",
    ),
    Row(
        "prefill's gradient, 4,096 queries of 64 heads, 1,024 keys a row of 8,192 / 65,536",
        "peer_backward",
        ("V4 Flash 1,024 keys, kv 8,192", "V4 Flash 1,024 keys, kv 65,536"),
    ),
    Row(
        "the same with 128 heads: V4-Pro, 2,048 queries / V3.2, 1,024 queries of 2,048 keys",
        "peer_backward",
        ("V4 Pro 1,024 keys, kv 65,536", "V3.2 2,048 keys, kv 65,536"),
    ),
    Row(
        "the same with 64 heads of dimension 576, causal: 4,096 queries, 1,024 keys of 8,192",
        "peer_backward",
        ("causal, 64 heads, d 576, 1,024 keys, kv 8,192",),
    ),
    *(_topk(rows, k) for rows in (1, 64, 4096) for k in (512, 2048)),
    Row(
        "index logits, FP8, 64 heads, 1 / 8 / 64 × 32,768",
        "indexer",
        tuple(f"index_logits {rows} x 32768" for rows in (1, 8, 64)),
        "jax",
    ),
    Row(
        "the same, 64 × 8,192 / 131,072",
        "indexer",
        tuple(f"index_logits 64 x {columns}" for columns in (8192, 131072)),
        "jax",
    ),
    Row(
        "the same, 64 × 131,072 columns, of which 2,048 have keys",
        "indexer",
        ("index_logits 64 x 131072, 2048",),
        "jax",
    ),
    Row(
        "index logits of a chunk, causal, 1,024 × 8,192 / 8,192 × 32,768 / 8,192 × 98,304",
        "indexer",
        tuple(f"index_logits {shape}, causal" for shape in ("1024 x 8192", "8192 x 32768", "8192 x 98304")),
        "jax",
    ),
    Row("index keys written, 64 / 65,536 rows", "indexer", ("write_index_k 64", "write_index_k 65536"), "jax"),
    Row(
        "index queries quantised, 64 / 8,192 × 64 heads",
        "indexer",
        tuple(f"quantize_index_q {rows} x 64, hadamard" for rows in (64, 8192)),
        "jax",
    ),
    Row(
        "compressor, 64 decode tokens, C4 / C128",
        "indexer",
        tuple(f"compress_kv ratio {ratio} head_dim 512, 64 tokens of 64" for ratio in (4, 128)),
        "jax",
    ),
    Row(
        "`gather_kv` V4, 8,192 / 32,768 / 131,072 tokens",
        "kv_cache",
        tuple(f"gather_kv V4 {tokens} pages" for tokens in (8192, 32768, 131072)),
        "jax",
    ),
    Row("`write_kv` V4, 65,536 rows", "kv_cache", ("write_kv V4 65536 pages",), "jax"),
    Row(
        "merge of top-k and window, 16,384 × 512 / 32,768 × 1,024",
        "indices",
        ("combine_topk_swa 16384 x 512", "combine_topk_swa 32768 x 1024"),
        "jax",
    ),
    Row(
        "merge of window and extra, the same",
        "indices",
        ("combine_swa_extra 16384 x 512", "combine_swa_extra 32768 x 1024"),
        "jax",
    ),
    Row(
        "V4 metadata of a step, 128k tables: decode, batch 1 / 64; extend, 4 × 2,048",
        "metadata",
        ("v4 metadata, DECODE 1 x 1, 128k", "v4 metadata, DECODE 64 x 1, 128k", "v4 metadata, EXTEND 4 x 2048, 128k"),
        "triton",
    ),
    Row("DeepGEMM's schedule, 64 rows", "metadata", ("paged mqa schedule, 64 rows",), "triton"),
)

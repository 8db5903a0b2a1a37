"""FlashMLA's published case tables: every shape that its own sparse tests run, as plain data.

Read from FlashMLA's `tests/test_flash_mla_sparse_decoding.py` and `test_flash_mla_sparse_prefill.py`. Left out is what
has no meaning here: how many times a case is timed, and tensors that are not contiguous (JAX has none). Where its
tables repeat a case they are listed once. The data of a case and its oracle are in `case_data.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True)
class TableShape:
    """One paged cache of a decode case.

    Attributes:
      tokens: of a request, or their mean when lengths vary.
      topk: index columns.
      page_size: tokens of a page.
      lengths: whether the call has a `topk_length` for this cache.
    """

    tokens: int
    topk: int
    page_size: int
    lengths: bool = False

    def __str__(self) -> str:
        return f"{self.tokens}k{self.topk}p{self.page_size}{'L' if self.lengths else ''}"


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """A row of the decode table; `table` is "grid", "corner" or "performance"."""

    table: str
    layout: str  # "V32_FP8" or "V4_FP8"
    heads: int
    batch: int
    q_len: int
    cache: TableShape
    extra: TableShape | None = None
    varied: bool = True  # tokens per request are drawn from N(mean, mean / 2)
    sink: bool = True
    all_invalid: bool = False  # no index is valid
    zero_tokens: bool = False  # about half of the requests have none

    @property
    def id(self) -> str:
        parts = [f"decode-{self.table}-{self.layout}-h{self.heads}-b{self.batch}x{self.q_len}-{self.cache}"]
        parts += [f"extra{self.extra}"] if self.extra else []
        flags = {"fixed": not self.varied, "sink": self.sink, "invalid": self.all_invalid, "zero": self.zero_tokens}
        return "-".join(parts + [name for name, on in flags.items() if on])

    @property
    def stratum(self) -> tuple:
        """What a sample covers evenly."""
        kind = (self.table, self.layout, bool(self.extra))
        if self.table == "corner":
            return (*kind, self.all_invalid, self.zero_tokens)
        if self.table == "performance":
            return (*kind, self.heads, self.cache.topk, bool(self.extra and self.extra.lengths))
        return (*kind, self.heads, self.cache.lengths, bool(self.extra and self.extra.lengths))


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """A row of the prefill table; `table` is "regular", "feature", "corner" or "performance"."""

    table: str
    dim: int
    heads: int
    q_len: int
    kv_len: int
    topk: int
    sink: bool = False
    lengths: bool = False
    all_invalid: bool = False  # rows among the others without a valid index

    @property
    def id(self) -> str:
        size = f"q{self.q_len}-kv{self.kv_len}-k{self.topk}"
        flags = {"sink": self.sink, "lengths": self.lengths, "invalid": self.all_invalid}
        name = f"prefill-{self.table}-d{self.dim}-h{self.heads}-{size}"
        return "-".join([name, *(name for name, on in flags.items() if on)])

    @property
    def stratum(self) -> tuple:
        kind = ("prefill", self.table, self.dim, self.heads)
        if self.table == "corner":
            return (*kind, self.all_invalid, self.q_len > 4096)
        return (*kind, self.sink, self.lengths) if self.table == "feature" else kind


Shape = DecodeShape | PrefillShape

_GRID = ((512, 64, 2), (512, 64, 64), (512, 64, 69), (1024, 576, 2), (1024, 576, 61))
_GRID += ((2046, 2048, 2), (2046, 2048, 64), (2046, 2048, 576))
_CORNER = ((512, 64, 61), (650, 576, 53))
_BATCHES = (4, 74, 321)
_HEADS = (64, 128)

# (layout, extra cache, lengths of the cache, of the extra cache): V3.2's kernel has neither lengths nor a second cache.
_FEATURES = [("V32_FP8", False, False, False)]
_FEATURES += [("V4_FP8", False, lengths, False) for lengths in (False, True)]
_FEATURES += [("V4_FP8", True, *lengths) for lengths in itertools.product((False, True), repeat=2)]

_WINDOW = TableShape(16384, 128, 256)
_PERFORMANCE = [("V32_FP8", 128, TableShape(32768, 2048, 64), None, (2, 64, 74, 128))]
_PERFORMANCE += [
    ("V4_FP8", heads, _WINDOW, extra, (2, 64, 74, 128, 148, 256))
    for heads, extra in (
        (64, TableShape(16384, 512, 64)),
        (128, TableShape(16384, 1024, 64)),
        (64, TableShape(16384, 1024, 2, lengths=True)),
        (128, TableShape(16384, 1024, 2, lengths=True)),
    )
]
_PERFORMANCE += [
    (layout, heads, TableShape(32768, 16384, 64), None, (148,)) for layout in ("V32_FP8", "V4_FP8") for heads in _HEADS
]


def decode_table() -> list[DecodeShape]:
    """4,748 cases: 4,716 of correctness (grid and corner), 32 of performance."""
    shapes = []
    for layout, has_extra, lengths, extra_lengths in _FEATURES:
        for table, sizes, q_lens in (("grid", _GRID, (1, 3)), ("corner", _CORNER, (3,))):
            caches = [TableShape(*size, lengths) for size in sizes]
            extras = [TableShape(*size, extra_lengths) for size in sizes] if has_extra else [None]
            calls = itertools.product(_HEADS, caches, extras, _BATCHES, q_lens)
            for heads, cache, extra, batch, q_len in calls:
                shape = DecodeShape(table, layout, heads, batch, q_len, cache, extra)
                # Lengths that do not vary are for one batch, without lengths.
                both = (True, False) if batch == 74 and not (lengths or extra_lengths) else (True,)
                for varied in both:
                    shapes += _corners(dataclasses.replace(shape, varied=varied))
    for layout, heads, cache, extra, batches in _PERFORMANCE:
        shapes += [DecodeShape("performance", layout, heads, batch, 2, cache, extra) for batch in batches]
    return shapes


def _corners(shape: DecodeShape) -> Iterator[DecodeShape]:
    if shape.table != "corner":
        yield shape
        return
    for invalid, zero, sink in itertools.product((True, False), repeat=3):
        if invalid or zero or sink:
            yield dataclasses.replace(shape, all_invalid=invalid, zero_tokens=zero, sink=sink)


_KV_TOPK = ((128, 128), (256, 256), (512, 512))
_IRREGULAR = ((592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384))
_ALL_INVALID = ((1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048))  # queries, kv, topk
_FEW_VALID = ((1, 32, 2048), (1024, 32, 2048), (1, 64, 8192), (1024, 64, 8192))
_MANY_QUERIES = ((70000, 256, 256),)
_PREFILL_PERFORMANCE = (
    (576, 128, 2048, (8192, 32768, 65536, 98304, 131072)),
    (512, 64, 512, (8192, 32768, 49152, 65536)),
    (512, 128, 1024, (8192, 32768, 49152, 65536)),
)


def prefill_table() -> list[PrefillShape]:
    """393 cases: 120 regular, 224 of features, 36 corners, 13 of performance."""
    shapes = []
    for dim, heads in itertools.product((512, 576), _HEADS):
        for (kv_len, topk), q_len in itertools.product(_KV_TOPK + _IRREGULAR, (1, 62, 213)):
            shapes.append(PrefillShape("regular", dim, heads, q_len, kv_len, topk))
        features = itertools.product(_IRREGULAR, (62, 213), (False, True), (False, True))
        for (kv_len, topk), q_len, sink, lengths in features:
            shapes.append(PrefillShape("feature", dim, heads, q_len, kv_len, topk, sink, lengths))
        for sizes in _ALL_INVALID + _FEW_VALID + _MANY_QUERIES:
            shapes.append(PrefillShape("corner", dim, heads, *sizes, True, True, sizes in _ALL_INVALID))
    for dim, heads, topk, kv_lens in _PREFILL_PERFORMANCE:
        shapes += [PrefillShape("performance", dim, heads, 4096, kv_len, topk, sink=True) for kv_len in kv_lens]
    return shapes


def stratified(shapes: Iterable[Shape], seed: int = 0) -> list[Shape]:
    """All shapes in an order of which every prefix covers the strata evenly, as long as each has shapes left."""
    strata: dict[tuple, list[Shape]] = {}
    for shape in shapes:
        strata.setdefault(shape.stratum, []).append(shape)
    rng = random.Random(seed)
    for members in strata.values():
        rng.shuffle(members)
    rounds = itertools.zip_longest(*strata.values())
    return [shape for one in rounds for shape in one if shape is not None]


def seed_of(shape: Shape) -> int:
    """The seed of a shape's data: the same in every run and on every machine."""
    return zlib.crc32(shape.id.encode())

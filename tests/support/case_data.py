"""The data of the cases of FlashMLA's tables as torch tensors, their oracle in float64, and FlashMLA's comparison.

Data as in FlashMLA's tests (queries in ±1, keys / 10, its softmax scales), and harder where this package promises
more: what an index names only past its row's length, or not at all, is NaN; invalid indices take any hostile value
and also stand between valid ones; some lengths lie far outside the columns. The oracle is written from the formula,
for rows that a table of indices names; it calls nothing of the package.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from attention_oracle import (
    INT_MAX,
    INT_MIN,
    ROW_OUT,
    ROW_STATISTIC,
    ROW_STATISTIC_SHARE,
    ROW_ZERO,
    TOLERANCES,
    V_DIM,
)
from flashmla_cases import DecodeShape, PrefillShape, TableShape, seed_of

from jax_sparse_mla.kv_cache.layout import KVLayout

# A cache has at most this many slots; requests that need more share pages.
MAX_SLOTS = 1 << 20
# Elements of the oracle's gathered keys, and of what is drawn at once, that bound the memory of a case.
CHUNK = 1 << 27
PREFILL_SCALE = 0.5


@dataclasses.dataclass
class Keys:
    """What one index table names.

    Attributes:
      rows: bfloat16 `[slots, dim]`, NaN where no index of the call reads.
      indices: int32 `[..., topk]`.
      lengths: int32, one for each leading position of `indices` or for each of its first axis; None scans all.
      data, layout, page_size: the paged cache that stands for `rows`; None in prefill, whose workspace is `rows`.
    """

    rows: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None
    data: torch.Tensor | None = None
    layout: KVLayout | None = None
    page_size: int = 0


@dataclasses.dataclass
class Call:
    """An attention call: q bfloat16 `[batch, q_len, heads, dim]` or `[q_len, heads, dim]`, one or two tables."""

    q: torch.Tensor
    keys: list[Keys]
    softmax_scale: float
    attn_sink: torch.Tensor | None


class Draw:
    """Random tensors of one seed on one device."""

    def __init__(self, seed: int, device: str):
        self.device = torch.device(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def bfloat16(self, *shape: int, scale: float = 1.0, limit: float, offset: float = 0.0) -> torch.Tensor:
        """Normal numbers, scaled, moved and clamped; in pieces, since a float32 copy of all may not fit."""
        out = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        for some in out.split(max(1, CHUNK // math.prod(shape[1:]))):
            some[:] = (self.normal(*some.shape) * scale + offset).clamp_(-limit, limit)
        return out

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def below(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator, device=self.device, dtype=torch.int32)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self._generator, device=self.device)

    def hostile(self, num_slots: int, *shape: int) -> torch.Tensor:
        """Values that name no slot."""
        values = [INT_MIN, -123456, -7, -1, num_slots, num_slots + 1, INT_MAX - 63, INT_MAX]
        return torch.tensor(values, dtype=torch.int32, device=self.device)[self.below(len(values), *shape).long()]


def make_call(shape: DecodeShape | PrefillShape, device: str = "cuda") -> Call:
    """The same data for the same shape on the same kind of device."""
    draw = Draw(seed_of(shape), device)
    return _prefill(shape, draw) if isinstance(shape, PrefillShape) else _decode(shape, draw)


def _decode(shape: DecodeShape, draw: Draw) -> Call:
    layout = getattr(KVLayout, shape.layout)
    q = draw.bfloat16(shape.batch, shape.q_len, shape.heads, layout.qk_dim, limit=1)
    scopes = [shape.cache] + ([shape.extra] if shape.extra else [])
    keys = [_paged_keys(shape, scope, layout, draw) for scope in scopes]
    return Call(q, keys, layout.qk_dim**-0.55, _sink(shape, draw))


def _prefill(shape: PrefillShape, draw: Draw) -> Call:
    # FlashMLA's data: randn / 10 and one offset for all.
    q, kv = (
        draw.bfloat16(*size, scale=0.1, offset=float(draw.uniform(1) - 0.5) / 10, limit=10)
        for size in ((shape.q_len, shape.heads, shape.dim), (shape.kv_len, shape.dim))
    )
    tokens = torch.full((shape.q_len,), shape.kv_len, dtype=torch.int32, device=draw.device)
    indices = _positions(tokens, shape.topk, draw).int()
    indices = _with_hostile(indices, shape.kv_len, draw)
    if shape.all_invalid:
        rows = draw.uniform(shape.q_len) < 0.5
        rows[0] = True
        indices[rows] = draw.hostile(shape.kv_len, int(rows.sum()), shape.topk)
    lengths = _lengths(shape.q_len, shape.topk, draw) if shape.lengths else None
    keys = Keys(kv, indices, lengths)
    kv.masked_fill_(~_used(keys, shape.kv_len)[:, None], math.nan)
    return Call(q, [keys], PREFILL_SCALE, _sink(shape, draw))


def _sink(shape: DecodeShape | PrefillShape, draw: Draw) -> torch.Tensor | None:
    """About 30% +inf, 30% -inf, the rest normal numbers."""
    if not shape.sink:
        return None
    sink, kind = draw.normal(shape.heads), draw.normal(shape.heads)
    return sink.masked_fill_(kind > 0.5, math.inf).masked_fill_(kind < -0.5, -math.inf)


def _paged_keys(shape: DecodeShape, scope: TableShape, layout: KVLayout, draw: Draw) -> Keys:
    tokens = torch.full((shape.batch,), float(scope.tokens), device=draw.device)
    if shape.varied:
        tokens = (tokens + draw.normal(shape.batch) * scope.tokens / 2).clamp_min(shape.q_len)
    if shape.zero_tokens:
        tokens = torch.where(draw.uniform(shape.batch) < 0.5, 0, tokens)
    tokens = tokens.int()
    pages_of = (tokens + scope.page_size - 1) // scope.page_size
    num_pages = _num_pages(shape.batch, scope, int(pages_of.sum()))
    num_slots = num_pages * scope.page_size

    positions = _positions(tokens.repeat_interleave(shape.q_len), scope.topk, draw)
    positions = positions.view(shape.batch, shape.q_len, scope.topk)
    wanted = int(pages_of.sum()) + 1
    page_list = torch.cat([draw.permutation(num_pages) for _ in range(-(-wanted // num_pages))])
    first_page = (pages_of.cumsum(0) - pages_of)[:, None, None]
    page = page_list[first_page + positions.clamp_min(0) // scope.page_size]
    slots = page * scope.page_size + positions.clamp_min(0) % scope.page_size
    indices = torch.where(positions < 0, -1, slots).int()
    indices = _with_hostile(indices, num_slots, draw)
    if shape.all_invalid:
        indices = draw.hostile(num_slots, *indices.shape)
    lengths = _lengths(shape.batch, scope.topk, draw) if scope.lengths else None
    keys = Keys(torch.empty(0), indices, lengths, None, layout, scope.page_size)
    keys.data, keys.rows = _random_cache(layout, scope.page_size, _used(keys, num_slots), draw)
    return keys


def _num_pages(batch: int, scope: TableShape, wanted: int) -> int:
    """Few different sizes, since each is compiled once: quarters of the expected one."""
    step = max(1, batch * -(-scope.tokens // scope.page_size) // 4)
    return max(1, min(-(-wanted // step) * step, MAX_SLOTS // scope.page_size))


def _positions(tokens: torch.Tensor, topk: int, draw: Draw) -> torch.Tensor:
    """int64 `[rows, topk]`: distinct positions below each row's `tokens` in random order, -1 where it has fewer."""
    width = max(int(tokens.max()), topk)
    chunks = []
    for some in tokens.split(max(1, CHUNK // 2 // width)):
        order = draw.uniform(len(some), width)
        order.masked_fill_(torch.arange(width, device=draw.device) >= some[:, None], -1)
        chosen = order.topk(topk).indices
        chunks.append(torch.where(chosen < some[:, None], chosen, -1))
    return torch.cat(chunks)


def _with_hostile(indices: torch.Tensor, num_slots: int, draw: Draw) -> torch.Tensor:
    """Every -1, and in a quarter of the rows three entries of ten, become values that name no slot."""
    holes = (draw.uniform(*indices.shape[:-1], 1) < 0.25) & (draw.uniform(*indices.shape) < 0.3)
    return torch.where((indices < 0) | holes, draw.hostile(num_slots, *indices.shape), indices)


def _lengths(count: int, topk: int, draw: Draw) -> torch.Tensor:
    """0 to all columns; of four or more, one is far too large and one negative."""
    lengths = draw.below(topk + 1, count)
    if count >= 4:
        lengths[draw.permutation(count)[:2]] = torch.tensor([INT_MAX, INT_MIN], dtype=torch.int32, device=draw.device)
    return lengths


def _scanned(keys: Keys, num_slots: int) -> torch.Tensor:
    """bool, like the indices: inside the length, and of a slot that exists."""
    inside = (keys.indices >= 0) & (keys.indices < num_slots)
    if keys.lengths is not None:
        lengths = keys.lengths.reshape(-1, *[1] * (keys.indices.ndim - 1))
        inside &= torch.arange(keys.indices.shape[-1], device=inside.device) < lengths
    return inside


def _used(keys: Keys, num_slots: int) -> torch.Tensor:
    used = torch.zeros(num_slots, dtype=torch.bool, device=keys.indices.device)
    used[keys.indices[_scanned(keys, num_slots)].long()] = True
    return used


def _random_cache(
    layout: KVLayout, page_size: int, used: torch.Tensor, draw: Draw
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes `[pages, page_bytes]` and the rows that they stand for; every byte that no index needs is 0xFF."""
    chunks = [_random_tokens(layout, some, draw) for some in used.split(CHUNK // 1024)]
    tokens, scales, rows = (torch.cat(parts) for parts in zip(*chunks))
    pages = len(used) // page_size
    data = torch.full((pages, layout.page_bytes(page_size)), 255, dtype=torch.uint8, device=draw.device)
    body = page_size * layout.data_bytes
    data[:, :body] = tokens.view(pages, body)
    if layout.footer_scale_bytes:
        data[:, body : body + page_size * layout.footer_scale_bytes] = scales.view(pages, -1)
    return data, rows


def _random_tokens(layout: KVLayout, used: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, ...]:
    """Token bytes, footer scale bytes and rows; scales are powers of two."""
    kv = draw.bfloat16(len(used), layout.qk_dim, scale=0.1, limit=1)
    groups = kv[:, : layout.fp8_dim].float().view(len(used), layout.num_groups, layout.group)
    exponents = torch.ceil(torch.log2((groups.abs().amax(-1) / 448).clamp_min(1e-4)))
    scale = torch.exp2(exponents)[..., None]
    values = (groups / scale).clamp_(-448, 448).to(torch.float8_e4m3fn)
    rows = torch.cat([(values.float() * scale).bfloat16().flatten(1), kv[:, layout.fp8_dim :]], dim=1)
    parts = [values.view(torch.uint8).flatten(1)]
    if layout.inline_scale_bytes:
        parts.append(scale.flatten(1).view(torch.uint8))
    parts.append(kv[:, layout.fp8_dim :].contiguous().view(torch.uint8))
    footer = torch.full((len(used), layout.footer_scale_bytes), 255, dtype=torch.uint8, device=draw.device)
    if layout.footer_scale_bytes:
        footer[:, : layout.num_groups] = (exponents + 127).to(torch.uint8)
    unused = ~used[:, None]
    return (
        torch.cat(parts, 1).masked_fill_(unused, 255),
        footer.masked_fill_(unused, 255),
        rows.masked_fill_(unused, math.nan),
    )


# --- the oracle -----------------------------------------------------------------------------------


def oracle(call: Call) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Some query rows at a time: which, out `[rows, heads, 512]`, max_logits and lse `[rows, heads]`, float64.

    Query rows are numbered over the batch, `b * q_len + s`.
    """
    q = call.q.reshape(-1, *call.q.shape[-2:])
    named = [(keys.rows, *_flat(keys, len(q))) for keys in call.keys]
    columns = sum(indices.shape[-1] for _, indices, _ in named)
    step = max(1, CHUNK // (columns * q.shape[-1]))
    for start in range(0, len(q), step):
        some = slice(start, min(start + step, len(q)))
        gathered = [_gathered(rows, indices[some], valid[some]) for rows, indices, valid in named]
        valid = torch.cat([valid[some] for *_, valid in named], dim=1)
        yield some, *attend(q[some].double(), torch.cat(gathered, dim=1), valid, call)


def _flat(keys: Keys, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.indices.view(rows, -1), _scanned(keys, len(keys.rows)).view(rows, -1)


def _gathered(rows: torch.Tensor, indices: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """float64 `[rows, columns, dim]`, 0 where an index is not valid."""
    return rows[torch.where(valid, indices, 0).long()].double().masked_fill_(~valid[..., None], 0)


def attend(q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, call: Call) -> tuple[torch.Tensor, ...]:
    """out, max_logits and lse of rows of q over their own keys `[rows, columns, dim]`; float64."""
    scores = (q @ keys.mT).mul_(call.softmax_scale).masked_fill_(~valid[:, None], -math.inf)
    top, lse = scores.amax(-1), torch.logsumexp(scores, -1)
    empty = torch.isneginf(lse)
    out = torch.exp(scores - lse.masked_fill(empty, 0)[..., None]) @ keys[..., :V_DIM]
    if call.attn_sink is not None:
        # exp(lse) / (exp(lse) + exp(sink))
        share = torch.sigmoid(lse - call.attn_sink.double())
        out = out * share.masked_fill(empty, 0)[..., None]
    return out, top, lse


# --- comparing ------------------------------------------------------------------------------------


class Comparison:
    """One result against the oracle, some rows at a time, by FlashMLA's tolerances of `kind`.

    NaN and infinities must stand in the same places, and what is exactly 0 (a row without a key, a sink of +inf) must
    be; every other element is within abs or rel; cos_diff judges the whole, and `ROW_OUT` or `ROW_STATISTIC` each row
    of each head.
    """

    def __init__(self, kind: str, device: torch.device):
        self.kind = kind
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # misplaced, off, products, squares
        self._largest = torch.zeros((), dtype=torch.float64, device=device)
        self._row = torch.zeros((), dtype=torch.float64, device=device)  # the largest share of what a row may be off

    def add(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if actual.shape != expected.shape:
            raise AssertionError(f"{self.kind}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        abs_tol, rel_tol, _ = TOLERANCES[self.kind]
        actual = actual.double()
        misplaced = (expected == 0) & (actual != 0)
        for test in (torch.isnan, torch.isposinf, torch.isneginf):
            misplaced |= test(actual) != test(expected)
        finite = torch.isfinite(actual) & torch.isfinite(expected)
        a, b = actual.where(finite, 0), expected.where(finite, 0)
        error = (a - b).abs()
        off = (error >= abs_tol) & (error >= rel_tol * (b.abs() + 1e-6))
        self._sums += torch.stack([misplaced.sum(), off.sum(), (a * b).sum(), (a * a + b * b).sum()])
        self._largest = torch.maximum(self._largest, error.max())
        if self.kind.endswith("out"):
            share = torch.linalg.vector_norm(error, dim=-1) / (ROW_OUT * torch.linalg.vector_norm(b, dim=-1) + ROW_ZERO)
        else:
            share = error / (ROW_STATISTIC + ROW_STATISTIC_SHARE * b.abs().max())
        self._row = torch.maximum(self._row, share.max())

    def verdict(self) -> tuple[dict[str, float], str | None]:
        """The errors, and what is wrong, if anything is."""
        misplaced, off, products, squares = self._sums.tolist()
        cos_diff = 0.0 if squares < 2e-12 else 1 - 2 * products / squares
        row = self._row.item()
        found = {"largest": self._largest.item(), "cos_diff": cos_diff, "row": row}
        errors = {name: float(f"{value:.3g}") for name, value in found.items()}
        wrong = [f"{int(misplaced)} NaN, infinities or zeros misplaced"] if misplaced else []
        wrong += [f"{int(off)} elements off, the largest by {errors['largest']:.3g}"] if off else []
        wrong += [f"a row off by {row:.3g} times what it may be"] if row > 1 else []
        wrong += [f"cos_diff {cos_diff:.3g}"] if abs(cos_diff) > TOLERANCES[self.kind][2] else []
        return errors, f"{self.kind}: {', '.join(wrong)}" if wrong else None


def compare(call: Call, results: tuple[torch.Tensor, ...]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Of `(out, lse)` (decode) or `(out, max_logits, lse)` (prefill): the errors by name, and what is wrong."""
    phase = "decode" if call.q.ndim == 4 else "prefill"
    names = ("out", "lse") if phase == "decode" else ("out", "max_logits", "lse")
    lead = call.q.ndim - 2
    flat = [result.reshape(-1, *result.shape[lead:]) for result in results]
    comparisons = {name: Comparison(f"{phase}.{name}", call.q.device) for name in names}
    for some, out, top, lse in oracle(call):
        expected = {"out": out, "max_logits": top, "lse": lse}
        for name, result in zip(names, flat, strict=True):
            comparisons[name].add(result[some], expected[name])
    verdicts = {name: comparison.verdict() for name, comparison in comparisons.items()}
    return {name: errors for name, (errors, _) in verdicts.items()}, [w for _, w in verdicts.values() if w]

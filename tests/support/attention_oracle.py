"""The oracle of the attention tests, and the cases that it judges: numpy float64, from the conventions.

Nothing here calls the package. Cache bytes are packed and unpacked by the byte positions of the formats,
attention is a loop over query rows and index columns, and everything that a call must not read is poisoned:
unused cache rows are 0xFF bytes (NaN in e4m3, in bfloat16, in float32 and as a UE8M0 scale), unused workspace
rows NaN.

The cases are strata of FlashMLA's own test tables, at sizes for a CPU; the tolerances are FlashMLA's.
"""

from __future__ import annotations

import dataclasses
import functools

import layout_oracle
import ml_dtypes
import numpy as np

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
V_DIM = 512
QK_DIM = {"V32_FP8": 576, "V4_FP8": 512, "V32_BF16": 576, "V4_BF16": 512} | dict.fromkeys(layout_oracle.RECORDS, 512)

# (abs, rel, cos): an element passes if its absolute or relative error is below; cos_diff judges the whole.
TOLERANCES = {
    "decode.out": (1e-3, 2.01 / 128, 5e-6),
    "decode.lse": (1e-6, 8.01 / 65536, 1e-7),
    "prefill.out": (8e-4, 3.01 / 128, 7e-6),
    "prefill.max_logits": (1e-6, 2.01 / 65536, 1e-7),
    "prefill.lse": (1e-6, 2.01 / 65536, 1e-7),
}
# Those allow a whole tensor what the loss of a key costs one row, so every row of every head is judged as well.
# Output: kernels round the probabilities and the output itself to bfloat16, each by 2^-9 of the row's length at most
# (2e-3 together is usual); this is twice the two. A key of n equal ones is 1/sqrt(n) of the row: 2.2e-2 of 2,046 keys.
ROW_OUT = 2**-7
# Logits and lse: float32 sums of exact products. On an H200 no published case is further off than 1.8e-6, with lse up
# to 9; this is 2.4e-5 there, and grows with the logits, whose terms do. A key of n equal ones adds 1/n: 4.9e-4.
ROW_STATISTIC, ROW_STATISTIC_SHARE = 2**-16, 2**-20
ROW_ZERO = 1e-36  # what float32 and bfloat16 have no normal numbers for, in a row


# --- comparing --------------------------------------------------------------------------------------------


def cos_diff(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (np.where(np.abs(x) < 1e-37, 0, x) for x in (a, b))  # what float32 has no normal number for
    square = float(np.sum(a * a + b * b))
    return 0.0 if square == 0 else 1 - 2 * float(np.sum(a * b)) / square


def assert_close_flashmla(actual, expected, kind: str) -> None:
    """FlashMLA's: NaN and infinities in the same places, every element within abs or rel, cos_diff; and every row."""
    abs_tol, rel_tol, cos_tol = TOLERANCES[kind]
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{kind}: shape {actual.shape}, expected {expected.shape}"
    for what, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(actual) != test(expected))
        assert wrong.size == 0, f"{kind}: {what} misplaced at {wrong[:5].tolist()} ({len(wrong)} in all)"
    finite = np.isfinite(expected)
    a, b = np.where(finite, actual, 0.0), np.where(finite, expected, 0.0)
    if not kind.endswith("out"):
        # A logit near 0 among logits of 127 is the float32 sum of terms that large: its rounding is theirs. With
        # logits of FlashMLA's own size (up to 4) this is its absolute tolerance.
        abs_tol = max(abs_tol, 2**-22 * float(np.abs(b).max(initial=0)))
    error = np.abs(a - b)
    wrong = np.argwhere((error >= abs_tol) & (error >= rel_tol * np.abs(b)))
    assert wrong.size == 0, (
        f"{kind}: {len(wrong)} of {a.size} elements off, the largest by {error.max():.3g}; first at "
        f"{wrong[0].tolist()}: {a[tuple(wrong[0])]:.6g}, expected {b[tuple(wrong[0])]:.6g}"
    )
    assert (difference := cos_diff(a, b)) < cos_tol, f"{kind}: cos_diff {difference:.3g}, allowed {cos_tol:.3g}"
    assert_close_rows(a, b, kind)


def assert_close_rows(a: np.ndarray, b: np.ndarray, kind: str) -> None:
    """Every row of every head by itself."""
    if kind.endswith("out"):
        error, allowed = np.linalg.norm(a - b, axis=-1), ROW_OUT * np.linalg.norm(b, axis=-1) + ROW_ZERO
    else:
        error, allowed = np.abs(a - b), ROW_STATISTIC + ROW_STATISTIC_SHARE * np.abs(b).max(initial=0)
        allowed = np.full(error.shape, allowed)
    wrong = np.argwhere(error > allowed)
    assert wrong.size == 0, (
        f"{kind}: {len(wrong)} of {error.size} rows off; first {wrong[0].tolist()}, by {error[tuple(wrong[0])]:.3g} "
        f"where {allowed[tuple(wrong[0])]:.3g} is allowed"
    )


# --- attention --------------------------------------------------------------------------------------------


def attend(q: np.ndarray, keys: np.ndarray, scale: float, sink: np.ndarray | None):
    """One query row: q `[heads, d]` over keys `[n, d]`; (out `[heads, v_dim]`, max_logits, lse `[heads]`)."""
    heads, v_dim = q.shape[0], min(q.shape[1], V_DIM)
    if len(keys) == 0:
        return np.zeros((heads, v_dim)), np.full(heads, -np.inf), np.full(heads, -np.inf)
    scores = scale * (np.asarray(q, np.float64) @ np.asarray(keys, np.float64).T)
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    lse = top + np.log(weights.sum(axis=1))
    out = (weights / weights.sum(axis=1)[:, None]) @ np.asarray(keys, np.float64)[:, :v_dim]
    if sink is not None:
        # exp(lse) / (exp(lse) + exp(sink)), with the larger of the two taken out; +inf gives 0, −inf gives 1.
        larger = np.maximum(lse, np.where(np.isposinf(sink), lse, sink))
        with np.errstate(over="ignore"):
            share = np.exp(lse - larger) / (np.exp(lse - larger) + np.exp(sink - larger))
        out = out * np.where(np.isposinf(sink), 0.0, share)[:, None]
    return out, top, lse


def scanned(indices: np.ndarray, length: int | None, num_rows: int) -> list[int]:
    """The rows that one index row names, in order: inside the span, and existing."""
    span = len(indices) if length is None else max(0, min(int(length), len(indices)))
    return [int(index) for index in indices[:span] if 0 <= int(index) < num_rows]


def _length_of_row(lengths: np.ndarray | None, b: int, s: int) -> int | None:
    if lengths is None:
        return None
    return lengths[b] if lengths.ndim == 1 else lengths[b, s]


def decode_oracle(case: DecodeCase) -> tuple[np.ndarray, np.ndarray]:
    batch, q_len, heads, _ = case.q.shape
    out, lse = np.zeros((batch, q_len, heads, V_DIM)), np.zeros((batch, q_len, heads))
    tables = [(case.cache, case.indices, case.topk_length)]
    if case.extra_cache is not None:
        tables.append((case.extra_cache, case.extra_indices, case.extra_topk_length))
    for b in range(batch):
        for s in range(q_len):
            keys = np.zeros((0, case.q.shape[-1]))
            for cache, indices, lengths in tables:
                found = scanned(indices[b, s], _length_of_row(lengths, b, s), len(cache.rows))
                keys = np.concatenate([keys, cache.rows[found]])
            out[b, s], _, lse[b, s] = attend(case.q[b, s], keys, case.softmax_scale, case.attn_sink)
    return out, lse


def prefill_oracle(case: PrefillCase) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    results = []
    for row in range(len(case.q)):
        length = None if case.topk_length is None else case.topk_length[row]
        keys = case.kv[scanned(case.indices[row], length, len(case.kv))]
        results.append(attend(case.q[row], keys, case.softmax_scale, case.attn_sink))
    return tuple(np.stack(x) for x in zip(*results))


# --- caches -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class HostCache:
    """The bytes of a paged cache, and the rows they stand for (float64 `[slots, d]`, NaN where poisoned)."""

    layout: str
    page_size: int
    data: np.ndarray
    rows: np.ndarray


def page_bytes(layout: str, page_size: int) -> int:
    if layout in layout_oracle.RECORDS:
        return layout_oracle.page_bytes(layout, page_size)
    if layout == "V4_FP8":
        return -(-page_size * 584 // 576) * 576
    return page_size * {"V32_FP8": 656, "V32_BF16": 1152, "V4_BF16": 1024}[layout]


def _quantise(rows: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 values and power-of-two exponents per group of neighbours; any choice of scale serves a test."""
    grouped = rows.reshape(len(rows), -1, group)
    amax = np.maximum(np.abs(grouped).max(axis=-1) / 448, 1e-4)
    exponents = np.ceil(np.log2(amax)).astype(np.int32)
    values = np.ldexp(grouped, -exponents[..., None])
    return np.clip(values, -448, 448).astype(np.float32).astype(E4M3).reshape(rows.shape), exponents


def pack_cache(layout: str, page_size: int, rows: np.ndarray, live: np.ndarray) -> HostCache:
    """A cache whose live slots hold `rows` `[slots, d]`, quantised, and whose every other byte is 0xFF."""
    slots = len(rows)
    pages = slots // page_size
    assert pages * page_size == slots
    data = np.full((pages, page_bytes(layout, page_size)), 0xFF, np.uint8)
    for slot in np.flatnonzero(live):
        page, offset = divmod(int(slot), page_size)
        row = rows[slot].astype(BF16)
        if layout in layout_oracle.RECORDS:
            layout_oracle.put_token(data, layout, page_size, slot, *layout_oracle.some_token(layout, row))
            continue
        wide = row.astype(np.float64)[None]
        if layout == "V32_FP8":  # 512 e4m3 | 4 float32 scales, one per 128 values | 64 bfloat16
            values, exponents = _quantise(wide[:, :512], 128)
            scales = np.exp2(exponents[0]).astype("<f4")
            body = [values[0].view(np.uint8), scales.view(np.uint8), row[512:].view(np.uint8)]
            at = offset * 656
        elif layout == "V4_FP8":  # 448 e4m3 | 64 bfloat16; behind the page's rows 7 scale bytes of 8 per token
            values, exponents = _quantise(wide[:, :448], 64)
            body = [values[0].view(np.uint8), row[448:].view(np.uint8)]
            at = offset * 576
            scales_at = page_size * 576 + offset * 8
            data[page, scales_at : scales_at + 7] = exponents[0] + 127
        else:
            body = [row.view(np.uint8)]
            at = offset * row.nbytes
        body = np.concatenate(body)
        data[page, at : at + len(body)] = body
    return HostCache(layout, page_size, data, unpack_cache(layout, page_size, data))


def unpack_cache(layout: str, page_size: int, data: np.ndarray) -> np.ndarray:
    """float64 `[slots, d]` of the bytes: `bfloat16(e4m3 · scale)`, and the bfloat16 values as they are."""
    pages = len(data)
    if layout in layout_oracle.RECORDS:
        return layout_oracle.values_of(layout, *layout_oracle.tokens_of(layout, page_size, data))
    if layout in ("V32_BF16", "V4_BF16"):
        return data.view(BF16).reshape(pages * page_size, -1).astype(np.float64)
    if layout == "V32_FP8":
        tokens = data.reshape(pages * page_size, 656)
        values = tokens[:, :512].copy().view(E4M3).astype(np.float64)
        scales = tokens[:, 512:528].copy().view("<f4").astype(np.float64)
        rope = tokens[:, 528:].copy().view(BF16).astype(np.float64)
        group = 128
    else:
        body = data[:, : page_size * 576].reshape(pages * page_size, 576)
        footer = data[:, page_size * 576 : page_size * 584].reshape(pages * page_size, 8)[:, :7].astype(int)
        values = body[:, :448].copy().view(E4M3).astype(np.float64)
        scales = np.where(footer == 255, np.nan, np.exp2(footer - 127.0))
        rope = body[:, 448:].copy().view(BF16).astype(np.float64)
        group = 64
    quantised = (values * np.repeat(scales, group, axis=1)).astype(np.float32).astype(BF16)
    return np.concatenate([quantised.astype(np.float64), rope], axis=1)


# --- cases ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class DecodeCase:
    name: str
    q: np.ndarray  # bfloat16 [batch, q_len, heads, d]
    cache: HostCache
    indices: np.ndarray  # int32 [batch, q_len, topk]
    softmax_scale: float
    topk_length: np.ndarray | None = None  # int32 [batch] or [batch, q_len]
    extra_cache: HostCache | None = None
    extra_indices: np.ndarray | None = None
    extra_topk_length: np.ndarray | None = None
    attn_sink: np.ndarray | None = None  # float32 [heads]


@dataclasses.dataclass
class PrefillCase:
    name: str
    q: np.ndarray  # bfloat16 [q_len, heads, d]
    kv: np.ndarray  # bfloat16 [kv_len, d], NaN in unused rows
    indices: np.ndarray  # int32 [q_len, topk]
    softmax_scale: float
    topk_length: np.ndarray | None = None  # int32 [q_len]
    attn_sink: np.ndarray | None = None


def strata(rng: np.random.Generator, count: int, factors: dict[str, tuple]) -> list[dict]:
    """`count` settings: every level of every factor comes up about equally often, combined at random."""
    columns = {}
    for name, levels in factors.items():
        order = rng.permutation([i % len(levels) for i in range(count)])
        columns[name] = [levels[i] for i in order]
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def queries(rng: np.random.Generator, shape: tuple[int, ...], hot_scale: float | None = None) -> np.ndarray:
    """bfloat16 in ±1; given the softmax scale, so large that scores reach ±180, more than exp can take."""
    gain = 1.0 if hot_scale is None else 30 / hot_scale
    return (gain * np.clip(rng.standard_normal(shape), -1, 1)).astype(BF16)


def keys_of(rng: np.random.Generator, rows: int, dim: int) -> np.ndarray:
    return np.clip(rng.standard_normal((rows, dim)) / 10, -1, 1)


def sinks(rng: np.random.Generator, heads: int) -> np.ndarray:
    """About 30 % +inf, 30 % −inf, the rest normal numbers, and a huge one of either sign."""
    kind, values = rng.random(heads), rng.standard_normal(heads).astype(np.float32)
    values = np.where(kind < 0.3, np.inf, np.where(kind < 0.6, -np.inf, values))
    values[kind > 0.95] = rng.choice([-3e38, 3e38, -200, 200])
    return values.astype(np.float32)


def hostile(rng: np.random.Generator, size: int, num_rows: int) -> np.ndarray:
    """Values that name no row."""
    values = [INT_MIN, -123456, -7, -1, num_rows, num_rows + 1, INT_MAX - 63, INT_MAX]
    return rng.choice(np.array(values, np.int32), size)


ROW_STYLES = ("full", "holes", "padded", "duplicates", "none", "full", "holes")


def index_row(
    rng: np.random.Generator, style: str, columns: int, length: int | None, live: np.ndarray, num_rows: int
) -> np.ndarray:
    """One row of indices: valid ones name live rows; past the length, poisoned rows and hostile values."""
    few = live[: max(1, min(4, len(live)))] if style == "duplicates" else live
    row = rng.choice(few, columns, replace=len(few) < columns).astype(np.int32)
    if style == "holes":
        holes = rng.random(columns) < 0.3
        row[holes] = hostile(rng, int(holes.sum()), num_rows)
    elif style == "padded":
        row[rng.integers(0, columns + 1) :] = -1
    elif style == "none":
        row = hostile(rng, columns, num_rows)
    span = columns if length is None else max(0, min(int(length), columns))
    dead = np.setdiff1d(np.arange(num_rows), live)
    tail = hostile(rng, columns - span, num_rows)
    if len(dead):
        tail = np.where(rng.random(columns - span) < 0.7, rng.choice(dead, columns - span), tail)
    row[span:] = tail
    return row


def _live_slots(rng: np.random.Generator, slots: int) -> np.ndarray:
    """About 60 % of the slots, in random order; slot 0 and the last one among them."""
    live = np.union1d(np.flatnonzero(rng.random(slots) < 0.6), [0, slots - 1])
    return rng.permutation(live)


def _lengths(rng: np.random.Generator, kind: str, batch: int, q_len: int, columns: int) -> np.ndarray | None:
    """None, `[batch]` or `[batch, q_len]`: from 0 to all columns, and hostile values; never 0 first."""
    if kind == "none":
        return None
    shape = (batch,) if kind == "batch" else (batch, q_len)
    lengths = rng.integers(0, columns + 1, shape)
    special = rng.random(shape)
    lengths = np.where(special < 0.1, 0, lengths)
    lengths = np.where((special > 0.1) & (special < 0.2), rng.choice([-3, INT_MIN], shape), lengths)
    lengths = np.where(special > 0.8, rng.choice([columns, columns + 1, INT_MAX], shape), lengths)
    lengths.flat[0] = rng.integers(columns // 2, columns)
    return lengths.astype(np.int32)


def _styles(rng: np.random.Generator, rows: str, shape: tuple[int, int]) -> np.ndarray:
    """How each row's indices are made; the first row has keys unless no row may have any."""
    if rows == "none":
        return np.full(shape, "none")
    styles = rng.choice(ROW_STYLES, shape)
    styles[0, 0] = rng.choice(["full", "holes"])
    return styles


def _host_cache(rng: np.random.Generator, layout: str, page_size: int, columns: int):
    """A cache somewhat larger than an index row, and its live slots."""
    slots = -(-max(64, columns * 5 // 4) // page_size) * page_size
    live = _live_slots(rng, slots)
    mask = np.zeros(slots, bool)
    mask[live] = True
    return pack_cache(layout, page_size, keys_of(rng, slots, QK_DIM[layout]), mask), live


def _index_table(rng, styles, batch, q_len, columns, lengths, live, num_rows) -> np.ndarray:
    table = np.full((batch, q_len, columns), -1, np.int32)
    for b in range(batch):
        for s in range(q_len):
            length = _length_of_row(lengths, b, s)
            table[b, s] = index_row(rng, styles[b, s], columns, length, live, num_rows)
    return table


def decode_case(rng: np.random.Generator, name: str, setting: dict) -> DecodeCase:
    layout, heads, topk = setting["layout"], setting["heads"], setting["topk"]
    batch, q_len = setting["batch"], setting["q_len"]
    dim = QK_DIM[layout]
    cache, live = _host_cache(rng, layout, setting["page_size"], topk)
    scale = dim ** -setting["scale_power"]
    # A row without a key in one cache may have some in the other: each draws its own styles.
    styles = _styles(rng, setting["rows"], (batch, q_len))
    topk_length = _lengths(rng, setting["lengths"], batch, q_len, topk)
    case = DecodeCase(
        name=name,
        q=queries(rng, (batch, q_len, heads, dim), scale if setting["hot"] else None),
        cache=cache,
        indices=_index_table(rng, styles, batch, q_len, topk, topk_length, live, len(cache.rows)),
        softmax_scale=scale,
        topk_length=topk_length,
        attn_sink=sinks(rng, heads) if setting["sink"] else None,
    )
    if setting["extra"] is not None:
        columns, page_size = setting["extra"]
        extra, live = _host_cache(rng, setting.get("extra_layout", layout), page_size, columns)
        styles = _styles(rng, setting["rows"], (batch, q_len))
        lengths = _lengths(rng, setting["extra_lengths"], batch, q_len, columns)
        case.extra_cache, case.extra_topk_length = extra, lengths
        case.extra_indices = _index_table(rng, styles, batch, q_len, columns, lengths, live, len(extra.rows))
    return case


def _case_name(setting: dict) -> str:
    """Such as `V4_FP8-h64-k128-p61-b4x3-extra64p2`."""
    parts = [setting.get("layout", f"d{setting.get('dim')}"), f"h{setting['heads']}", f"k{setting['topk']}"]
    if "page_size" in setting:
        parts += [f"p{setting['page_size']}", f"b{setting['batch']}x{setting['q_len']}"]
    if setting.get("extra"):
        parts.append("extra{}p{}".format(*setting["extra"]))
    parts += [name for name in ("sink", "hot") if setting[name]]
    if setting["rows"] == "none":
        parts.append("all_invalid")
    return "-".join(parts)


@functools.cache
def decode_cases(count: int = 15, seed: int = 20251) -> list[DecodeCase]:
    """Strata of FlashMLA's decode tables, and its corner cases (every index invalid)."""
    rng = np.random.default_rng(seed)
    settings = strata(
        rng,
        count,
        {
            "layout": ("V32_FP8", "V4_FP8", "V4_FP8", "V32_BF16", "V4_BF16"),
            "heads": (1, 3, 16, 64),
            "topk": (64, 128, 100, 128, 512),
            "page_size": (2, 61, 64, 256),
            "batch": (1, 4, 7),
            "q_len": (1, 3),
            "extra": (None, (64, 64), None, (128, 2), (100, 61)),
            "lengths": ("none", "batch", "row"),
            "extra_lengths": ("none", "row", "batch"),
            "sink": (False, True),
            "scale_power": (0.5, 0.55),
            "hot": (False, False, False, True),
            "rows": ("mixed",),
        },
    )
    corner = dict(batch=4, q_len=3, lengths="none", extra_lengths="none", scale_power=0.55, hot=False)
    v4, v32 = {"layout": "V4_FP8", "topk": 64}, {"layout": "V32_FP8", "topk": 64}
    settings += [
        corner | v4 | {"heads": 128, "page_size": 64, "extra": (64, 2), "sink": True, "rows": "mixed"},
        corner | v32 | {"heads": 64, "page_size": 61, "extra": None, "sink": True, "rows": "none"},
        corner | v4 | {"heads": 3, "page_size": 61, "extra": (64, 61), "sink": False, "rows": "none"},
    ]
    return [decode_case(rng, f"{i}-{_case_name(s)}", s) for i, s in enumerate(settings)]


def prefill_case(rng: np.random.Generator, name: str, setting: dict) -> PrefillCase:
    (kv_len, topk), q_len, heads, dim = setting["sizes"], setting["q_len"], setting["heads"], setting["dim"]
    # FlashMLA's data: randn / 10, and one offset for all.
    kv = np.clip(keys_of(rng, kv_len, dim) + rng.uniform(-0.05, 0.05), -10, 10).astype(BF16)
    live = _live_slots(rng, kv_len)
    kv[np.setdiff1d(np.arange(kv_len), live)] = np.nan
    lengths = _lengths(rng, "batch", q_len, 1, topk) if setting["lengths"] else None
    styles = _styles(rng, setting["rows"], (q_len, 1))
    indices = _index_table(rng, styles, q_len, 1, topk, lengths, live, kv_len)[:, 0]
    return PrefillCase(
        name=name,
        q=queries(rng, (q_len, heads, dim), setting["scale"] if setting["hot"] else None),
        kv=kv,
        indices=indices,
        softmax_scale=setting["scale"],
        topk_length=lengths,
        attn_sink=sinks(rng, heads) if setting["sink"] else None,
    )


@functools.cache
def prefill_cases(count: int = 12, seed: int = 20252) -> list[PrefillCase]:
    """Strata of FlashMLA's prefill tables, and its corner case (every index invalid)."""
    rng = np.random.default_rng(seed)
    settings = strata(
        rng,
        count,
        {
            "dim": (512, 576),
            "heads": (1, 3, 16, 64),
            "sizes": ((128, 128), (592, 128), (95, 128), (153, 256), (114, 100), (200, 64), (32, 512)),
            "q_len": (1, 13, 62),
            "lengths": (False, True),
            "sink": (False, True),
            "scale": (0.5, 576**-0.55),
            "hot": (False, False, False, True),
            "rows": ("mixed",),
        },
    )
    corner = dict(dim=512, sizes=(128, 128), q_len=3, lengths=False, sink=True, scale=0.5, hot=False)
    settings += [corner | {"heads": 128, "rows": "mixed"}, corner | {"heads": 16, "rows": "none"}]
    for setting in settings:
        setting["topk"] = setting["sizes"][1]
    return [prefill_case(rng, f"{i}-{_case_name(s)}", s) for i, s in enumerate(settings)]

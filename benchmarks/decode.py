"""Decode by our SM90 kernels beside FlashMLA's, from FP8, bfloat16 and V4.1's caches.

    python -m benchmarks decode [--table fp8 bf16 v41] [--only "V4 Flash" ...]

All are called from torch and timed by CUPTI in one process: what a call does on the GPU, from its first kernel's start
to its last one's end. Errors are those of all rows against float64, norm over norm.

fp8   the rows of FlashMLA's own table, and single tokens. Ours is called through the drop-in. Each case is timed with
      the L2 emptied in three ways (`harness.FLUSHES`): the row has the way in which ours does worst beside FlashMLA,
      and all three under `flushed`. FlashMLA has its heads padded to 64.
bf16  one token a request from bfloat16 rows, with the floor of the case's bytes (at the rate of a copy) and of its
      products (at 4,096 FLOP a clock). Beside it FlashAttention 3 from the same rows in pages of one token (it takes
      one cache whose rows have rope behind their values: V3.2's), and ours and FlashMLA from FP8 rows of the same
      numbers.
v41   two tokens a request from V4.1's rows, and from V4's at the same shapes; Triton's result is compared with ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import case_data
import torch
from flashmla_cases import DecodeShape, decode_table
from sparse_mla_torch import flash_mla as drop_in
from sparse_mla_torch import ops
from sparse_mla_torch.attention import decode
from sparse_mla_torch.attention.pages import pages_of

from benchmarks import peers
from benchmarks.harness import FLUSHES, NotMeasured, Run, Timer, copy_rate, parser, run_cases, status, write
from jax_sparse_mla.kv_cache.layout import KVLayout

SLOTS = 1 << 20  # of each cache: ten times the L2
LONG_ROW = 16384  # index columns
FLOPS_A_CLOCK, CLOCK = 4096, 1.75e9  # of a multiprocessor
PRODUCTION, ONE_TOKEN, LONG = "production", "one token", "long rows"
BATCHES = 1, 2, 4, 8, 16, 32, 64, 256  # of one token
WINDOW_BATCHES = *BATCHES, 24, 48, 96, 128  # where two of our kernels and FlashMLA's take about as long
FP8 = {KVLayout.V4_BF16: KVLayout.V4_FP8, KVLayout.V32_BF16: KVLayout.V32_FP8}
V41_PAIRS = (
    (KVLayout.V4_FP8, KVLayout.V4_FP8),
    (KVLayout.V41_FP8, KVLayout.V41_FP8),
    (KVLayout.V41_FP8_SPLIT, KVLayout.V41_FP8_SPLIT),
    (KVLayout.V41_FP8, KVLayout.V41_FP4),
    (KVLayout.V41_FP8_SPLIT, KVLayout.V41_FP4_SPLIT),
)
E4M3_NAN = 0x7F
# Bytes of a format's scales, the last one excluded: 2^-11 to 2^-7, and e4m3 from 2^-6 to 2^-4.
SCALES = {"ue8m0": (116, 121), "e4m3": (0x08, 0x19)}


class Case(NamedTuple):
    """A decode call; a layout, index columns and the size of a page for each of its one or two caches.

    Attributes:
      kind: a row of FlashMLA's table, the same with one token, a long row, or one of the other tables.
      lengths: whether lengths of the second cache are drawn uniformly.
    """

    name: str
    kind: str
    layouts: tuple[KVLayout, ...]
    heads: int
    batch: int
    q_len: int
    columns: tuple[int, ...]
    page_sizes: tuple[int, ...] = (64, 64)
    lengths: bool = False
    sink: bool = False


def fp8_cases() -> Iterator[Case]:
    table = [shape for shape in decode_table() if shape.table == "performance"]
    of_model = {model_of(shape): shape for shape in reversed(table)}
    of_model["V4 window"] = dataclasses.replace(of_model["V4 Flash"], extra=None)
    for model in ("V4 Flash", "V4 Pro", "V4 C128", "V4 window", "V3.2"):
        # Ranks of a tensor-parallel model have few heads.
        for heads in (128, 64, 32, 16, 8) if model in ("V4 Flash", "V3.2") else (128, 64):
            for batch in sorted(WINDOW_BATCHES) if model == "V4 window" else BATCHES:
                yield fp8_case(dataclasses.replace(of_model[model], heads=heads, batch=batch, q_len=1))
    yield from map(fp8_case, table)


def fp8_case(shape: DecodeShape) -> Case:
    scopes = [scope for scope in (shape.cache, shape.extra) if scope is not None]
    long = shape.cache.topk == LONG_ROW
    name = f"{model_of(shape)}, {shape.heads} heads, {shape.batch} x {shape.q_len}{f', topk {LONG_ROW}' * long}"
    return Case(
        name,
        kind=ONE_TOKEN if shape.q_len == 1 else LONG if long else PRODUCTION,
        layouts=(getattr(KVLayout, shape.layout),) * len(scopes),
        heads=shape.heads,
        batch=shape.batch,
        q_len=shape.q_len,
        columns=tuple(scope.topk for scope in scopes),
        page_sizes=tuple(scope.page_size for scope in scopes),
        lengths=shape.extra is not None and shape.extra.lengths,
        sink=shape.layout == "V4_FP8",
    )


def model_of(shape: DecodeShape) -> str:
    if shape.layout != "V4_FP8":
        return "V3.2"
    if (extra := shape.extra) is None:
        return "V4" if shape.cache.topk == LONG_ROW else "V4 window"
    return "V4 C128" if extra.lengths else {512: "V4 Flash", 1024: "V4 Pro"}[extra.topk]


def bf16_cases() -> Iterator[Case]:
    for model, layout, columns, heads, batches in (
        ("V4 Flash", KVLayout.V4_BF16, (128, 512), 64, (1, 16, 64, 256, 1024)),
        ("V4 Flash", KVLayout.V4_BF16, (128, 512), 16, (256,)),
        ("V3.2", KVLayout.V32_BF16, (2048,), 128, (1, 64, 256)),
        ("V3.2", KVLayout.V32_BF16, (2048,), 64, (64,)),
        ("V3.2", KVLayout.V32_BF16, (2048,), 16, (64,)),
    ):
        for batch in batches:
            name = f"{model}, {heads} heads, {batch} x {' + '.join(map(str, columns))}"
            yield Case(name, "bf16", (layout,) * len(columns), heads, batch, 1, columns)


def v41_cases() -> Iterator[Case]:
    for batch in (1, 16, 64, 256):
        for pair in V41_PAIRS:
            name = f"{' + '.join(layout.name for layout in pair)}, 64 heads, {batch} x 2"
            yield Case(name, "v41", pair, 64, batch, 2, (128, 512), sink=True)


CASES = {"fp8": fp8_cases, "bf16": bf16_cases, "v41": v41_cases}


# --- a case's tensors ------------------------------------------------------------------------------


@functools.cache
def drawn(layout: KVLayout, page_size: int) -> torch.Tensor:
    """A cache of random bytes as the operators take it: `[pages, page_size, 1, bytes of a token]`."""
    generator = torch.Generator(device="cuda").manual_seed(page_size)
    pages, page_bytes = SLOTS // page_size, layout.page_bytes(page_size)
    random = functools.partial(torch.randint, device="cuda", generator=generator)
    data = random(256, (pages, page_bytes), dtype=torch.uint8)

    def part(start: int, stride: int, width: int) -> torch.Tensor:
        return data.as_strided((pages, page_size, width), (page_bytes, stride, 1), start)

    values = part(0, layout.data_bytes, layout.quantised_bytes)
    if layout.fp8_dim:
        values -= ((values & E4M3_NAN) == E4M3_NAN).to(torch.uint8)
    scales = part(*layout.scale_place(page_size), layout.scale_bytes)
    if layout.scales in SCALES:
        scales.copy_(random(*SCALES[layout.scales], scales.shape, dtype=torch.uint8))
    else:  # float32
        exponents = random(-11, -7, (pages, page_size, layout.num_groups))
        scales.copy_(torch.exp2(exponents.float()).view(torch.uint8))
    if plain := layout.qk_dim - layout.quantised_dim:
        rope = torch.randn(pages, page_size, plain, device="cuda", generator=generator).bfloat16()
        begin = layout.quantised_bytes + layout.inline_scale_bytes
        part(begin, layout.data_bytes, 2 * plain).copy_(rope.view(torch.uint8))
    return pages_of(data, layout, page_size)


@functools.cache
def written(layout: KVLayout, page_size: int) -> torch.Tensor:
    """A cache of random rows, the same in each layout of a width."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    data = torch.zeros((SLOTS // page_size, layout.page_bytes(page_size)), dtype=torch.uint8, device="cuda")
    pages = pages_of(data, layout, page_size)
    for slots in torch.arange(SLOTS, dtype=torch.int32, device="cuda").split(1 << 16):
        rows = torch.randn((len(slots), layout.qk_dim), device="cuda", generator=generator).bfloat16()
        ops.write_kv(pages, slots, rows)
    return pages


class Problem:
    """A case's tensors, and how it is called."""

    def __init__(self, case: Case):
        self.case = case
        generator = torch.Generator(device="cuda").manual_seed(0)
        random = functools.partial(torch.randint, dtype=torch.int32, device="cuda", generator=generator)
        rows, dim = (case.batch, case.q_len), case.layouts[0].qk_dim
        self.scale = dim**-0.5 / 2
        self.q = torch.randn((*rows, case.heads, dim), device="cuda", generator=generator).bfloat16()
        self.indices = [random(SLOTS, (*rows, columns)) for columns in case.columns]
        self.lengths = random(case.columns[1] + 1, (case.batch,)) if case.lengths else None
        self.sink = torch.randn(case.heads, device="cuda", generator=generator) if case.sink else None
        self.caches = self.caches_of(case.layouts)

    def caches_of(self, layouts: Sequence[KVLayout]) -> list[torch.Tensor]:
        make = written if self.case.kind == "bf16" else drawn
        return [make(*cache) for cache in zip(layouts, self.case.page_sizes)]

    def by_operator(self, layouts: Sequence[KVLayout], backend: str) -> Callable[[], tuple]:
        """By one of our backends, from caches of these layouts."""
        first, second = [*zip(self.caches_of(layouts), self.indices), (None, None)][:2]
        tensors = (self.q, *first, None, *second, self.lengths, self.sink)
        options = decode.Options("decode benchmark", self.scale, -math.inf, kv_layout=layouts[0].name)
        os.environ["JAX_SPARSE_MLA_DECODE_BACKEND"] = backend
        run = decode._new(options, *tensors).run
        return lambda: run(*tensors, None, None)

    def by_flash_mla(self, package, heads: int, caches: Sequence[torch.Tensor], **options) -> Callable[[], tuple]:
        """By a package with FlashMLA's functions, with as many heads."""
        q, sink, more = self.q, self.sink, heads - self.case.heads
        if more:
            q = torch.nn.functional.pad(q, (0, 0, 0, more))
            sink = None if sink is None else torch.nn.functional.pad(sink, (0, more))
        if len(caches) > 1:
            options |= {"extra_k_cache": caches[1], "extra_indices_in_kvcache": self.indices[1]}
            options |= {"extra_topk_length": self.lengths}
        fixed = {"softmax_scale": self.scale, "is_fp8_kvcache": True, "attn_sink": sink, "indices": self.indices[0]}
        schedule = package.get_mla_metadata()[0]
        call = package.flash_mla_with_kvcache
        return lambda: call(q, caches[0], None, None, 512, schedule, **fixed, **options)

    def by_fa3(self) -> Callable[[], torch.Tensor]:
        call, (columns,) = peers.find("fa3").flash_attn_with_kvcache, self.case.columns
        rows = self.caches[0].flatten(0, 1).view(torch.bfloat16)[:, None]  # a page each
        tensors = {"q": self.q[..., 512:], "qv": self.q[..., :512], "k_cache": rows[..., 512:]}
        tensors |= {"v_cache": rows[..., :512], "page_table": self.indices[0][:, 0]}
        tensors["cache_seqlens"] = torch.full((self.case.batch,), columns, dtype=torch.int32, device="cuda")
        return lambda: call(**tensors, softmax_scale=self.scale, causal=True)

    def error(self, out: torch.Tensor) -> float:
        """The error of all rows together, against float64 over the rows as our gather reads them: FP8 values times
        powers of two are exact in bfloat16."""
        call = case_data.Call(self.q, [], self.scale, self.sink)
        q, out = self.q.flatten(0, 1), out[..., : self.case.heads, :].flatten(0, 1)
        slots = [indices.flatten(0, 1) for indices in self.indices]
        valid = [torch.ones_like(x, dtype=torch.bool) for x in slots]
        if self.lengths is not None:
            lengths = self.lengths.repeat_interleave(self.case.q_len)
            valid[1] = torch.arange(slots[1].shape[1], device=q.device) < lengths[:, None]
        valid, count = torch.cat(valid, 1), max(1, case_data.CHUNK // (sum(self.case.columns) * q.shape[-1]))
        wrong = total = 0.0
        for rows in torch.arange(len(q), device=q.device).split(count):
            keys = [ops.gather_kv(cache, x[rows].flatten()) for cache, x in zip(self.caches, slots)]
            keys = torch.cat([x.double().view(len(rows), -1, q.shape[-1]) for x in keys], 1)
            wanted, *_ = case_data.attend(q[rows].double(), keys, valid[rows], call)
            wrong += (out[rows].double() - wanted).square().sum().item()
            total += wanted.square().sum().item()
        return float(f"{math.sqrt(wrong / total):.3g}")


def our_call(name: str) -> Callable[[], tuple]:
    """Our kernel's call of the case of this name, for `benchmarks.counters`."""
    problem = Problem(next(case for cases in CASES.values() for case in cases() if case.name == name))
    return problem.by_operator(problem.case.layouts, "hopper")


# --- the tables ------------------------------------------------------------------------------------


def measure_fp8(case: Case, timers: Sequence[Timer], copy: float) -> dict:
    problem, calls, row = Problem(case), {}, {"table": case.kind}
    os.environ["JAX_SPARSE_MLA_DECODE_BACKEND"] = "hopper"
    try:
        wheel, heads = peers.find("flash_mla"), -(-case.heads // 64) * 64
        calls["peer"] = problem.by_flash_mla(wheel, heads, problem.caches, use_legacy=True)
    except NotMeasured as reason:
        row["not_measured"] = {"flash_mla": str(reason)}
    calls["ours"] = problem.by_flash_mla(drop_in, case.heads, problem.caches)
    errors = {name: problem.error(call()[0]) for name, call in calls.items()}
    times, worst, flushed = in_the_worst_way(timers, calls)
    row |= {f"{name}_us": us for name, us in times.items()}
    if "peer" in times:
        row |= {"ratio": round(times["peer"] / times["ours"], 2), "peer_error": errors["peer"]}
    return row | {"flush": worst, "flushed": flushed, "error": errors["ours"]}


def in_the_worst_way(
    timers: Sequence[Timer], calls: dict[str, Callable]
) -> tuple[dict[str, float], str, dict[str, list[float]]]:
    """Microseconds by name with the L2 emptied in the way in which the last call does worst beside the first; the way;
    and the times of each."""
    runs = [Run(call, "torch") for call in calls.values()]
    flushed = {timer.flush: [round(us, 1) for us in timer.in_turn(runs)] for timer in timers}
    worst = min(flushed, key=lambda way: flushed[way][0] / flushed[way][-1])
    return dict(zip(calls, flushed[worst])), worst, flushed


def measure_bf16(case: Case, timers: Sequence[Timer], copy: float) -> dict:
    problem, fp8, timer = Problem(case), [FP8[layout] for layout in case.layouts], timers[0]
    of_bytes, of_products = floors(case, copy)
    row = {"bytes_us": round(of_bytes, 1), "products_us": round(of_products, 1)}
    calls = {
        "ours": lambda: problem.by_operator(case.layouts, "hopper"),
        "ours_fp8": lambda: problem.by_operator(fp8, "hopper"),
        "flash_mla_fp8": lambda: problem.by_flash_mla(
            peers.find("flash_mla"), -(-case.heads // 64) * 64, problem.caches_of(fp8), use_legacy=True
        ),
    } | ({"fa3": problem.by_fa3} if len(case.columns) == 1 else {})
    for name, make in calls.items():
        try:
            call = make()
        except NotMeasured as reason:
            row.setdefault("not_measured", {})[name] = str(reason)
            continue
        if name in ("ours", "fa3"):
            row["error" if name == "ours" else "fa3_error"] = problem.error(call() if name == "fa3" else call()[0])
        row[f"{name}_us"] = round(timer(Run(call, "torch")), 1)
    return row | {"share_of_floor": round(max(of_bytes, of_products) / row["ours_us"], 3)}


def floors(case: Case, copy: float) -> tuple[float, float]:
    """Microseconds that the bytes, at `copy` TB/s, and the products take at least."""
    columns, layout = sum(case.columns), case.layouts[0]
    of_row = columns * (layout.bytes_per_token + 4) + case.heads * 2 * (layout.qk_dim + 512)
    flops = 2 * case.batch * case.heads * columns * (layout.qk_dim + 512)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    return case.batch * of_row / copy / 1e6, flops / (FLOPS_A_CLOCK * CLOCK * sm_count) * 1e6


def measure_v41(case: Case, timers: Sequence[Timer], copy: float) -> dict:
    problem, row, outs = Problem(case), {}, []
    for name, backend in (("ours", "hopper"), ("triton", "triton")):
        call = problem.by_operator(case.layouts, backend)
        outs.append(call()[0].double())
        row[f"{name}_us"] = round(timers[0](Run(call, "torch")), 1)
    return row | {"difference": float(f"{(outs[0] - outs[1]).norm() / outs[1].norm():.2g}")}


MEASURE = {"fp8": measure_fp8, "bf16": measure_bf16, "v41": measure_v41}


def means(cases: Iterable[Case], rows: Iterable[dict]) -> dict[str, float]:
    """Geometric means of FlashMLA's time over ours."""
    ratios = {case: row["peer_us"] / row["ours_us"] for case, row in zip(cases, rows) if "ratio" in row}

    def one_token(heads: int, most: int) -> Callable[[Case], bool]:
        start = f"V4 Flash, {heads} heads"
        return lambda case: case.kind == ONE_TOKEN and case.name.startswith(start) and case.batch <= most

    groups = {
        "production rows, long ones among them": lambda case: case.kind != ONE_TOKEN,
        "V4, 64 heads, 2 tokens (Flash and C128)": lambda case: (case.kind, case.heads) == (PRODUCTION, 64),
        "V4 Flash, 64 heads, 1 token, batch 1 to 16": one_token(64, 16),
        "V4 Flash, 16 heads (FlashMLA padded to 64), 1 token, batch 1 to 16": one_token(16, 16),
        "the same, batch 1 to 256": one_token(16, 256),
    }
    members = {name: [ratio for case, ratio in ratios.items() if belongs(case)] for name, belongs in groups.items()}
    result = {name: statistics.geometric_mean(group) for name, group in members.items() if group}
    production = [ratio for case, ratio in ratios.items() if case.kind == PRODUCTION]
    return result | ({"least of the production rows": min(production)} if production else {})


def add_v4(cases: Sequence[Case], rows: Sequence[dict]) -> None:
    """Adds the time of V4's own layouts over ours to the rows of the same batch."""
    pairs = [(case, row) for case, row in zip(cases, rows) if "ours_us" in row]
    of_v4 = {case.batch: row["ours_us"] for case, row in pairs if case.layouts == V41_PAIRS[0]}
    for case, row in pairs:
        if case.batch in of_v4:
            row["v4_over_ours"] = round(of_v4[case.batch] / row["ours_us"], 3)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--table", nargs="*", choices=CASES, default=list(CASES))
    args, failed = made.parse_args(), 0
    for table in args.table:
        cases = [case for case in CASES[table]() if case.name.startswith(tuple(args.only))]
        if args.dry_run:
            print(*(f"{table}: {case.name}" for case in cases), sep="\n")
            continue
        timers = [Timer(7, flush) for flush in FLUSHES] if table == "fp8" else [Timer()]
        copy = round(copy_rate(timers[0]), 3)
        measures = ((case.name, functools.partial(MEASURE[table], case, timers, copy)) for case in cases)
        rows = run_cases(f"decode_{table}", measures, copy_tb_s=copy)
        failed |= status(rows)
        if table == "fp8":
            print(ratios := means(cases, rows))
            write("decode_fp8", rows, copy_tb_s=copy, geometric_means=ratios)
        elif table == "v41":
            add_v4(cases, rows)
            write("decode_v41", rows, copy_tb_s=copy)
        drawn.cache_clear(), written.cache_clear()
    return failed

"""The table by which serving engines' calls are left to FlashMLA: its bare kernels beside ours, by rows and heads.

    python -m benchmarks beside_flashmla [--phase decode prefill] [--only "decode V4 window" ...]
                                         [--heads 64 128] [--rows 32]

Decode's rows are those of `python -m benchmarks decode`, prefill's have few rows up to 4,096, of 8,192 keys. Each is
timed with three ways of emptying the L2, and has the way in which ours does worst. `beside_flashmla.json` is the whole
table, with what was not measured now as it was: put it into `sparse_mla_torch/attention/`, and the plugins follow it.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sparse_mla_torch import flash_mla as drop_in
from sparse_mla_torch.attention import beside_flashmla, call_cache

from benchmarks import peers
from benchmarks.decode import LONG, fp8_cases, in_the_worst_way, measure_fp8
from benchmarks.harness import FLUSHES, ROOT, Timer, environment, parser, run_cases, status
from benchmarks.ops.prefill import called

PREFILLS = {"V4": ("V4_BF16", 512, 640), "V3.2": ("V32_BF16", 576, 2048)}  # layout, values of a key, columns
ROWS = 1, 4, 16, 20, 24, 32, 48, 64, 96, 128, 132, 144, 192, 256, 512, 1024, 4096
HEADS = 128, 64, 32, 16, 8
KEYS = 8192
COUNTS = 10  # calls of which the median counts


Measures = dict[tuple[int, int], list[Callable]]  # of a family, by heads and rows


def name_of(family: dict) -> str:
    return f"{family['phase']} {family['model']}"


def decode_families() -> Iterator[tuple[dict, Measures]]:
    found: dict[str, tuple[dict, Measures]] = {}
    for case in fp8_cases():
        if case.kind == LONG:
            continue
        model, pages = case.name.split(",")[0], [*case.page_sizes[1:], None][0]
        family = {"model": model, "phase": "decode", "layout": case.layouts[0].name, "columns": sum(case.columns)}
        _, measures = found.setdefault(model, (family | {"extra_page_size": pages}, {}))
        key = case.heads, case.batch * case.q_len  # of two cases, such as 4 x 1 and 2 x 2
        measures.setdefault(key, []).append(functools.partial(measure_fp8, case, copy=0.0))
    for family, measures in found.values():
        yield family, measures


def prefill_families() -> Iterator[tuple[dict, Measures]]:
    for model, (layout, dim, columns) in PREFILLS.items():
        measures = {
            (heads, rows): [functools.partial(measure_prefill, heads, dim, columns, rows)]
            for heads in HEADS
            for rows in ROWS
        }
        family = {"model": model, "phase": "prefill", "layout": layout, "columns": columns, "extra_page_size": None}
        yield family, measures


def measure_prefill(heads: int, dim: int, columns: int, rows: int, timers: list[Timer]) -> dict:
    random = torch.Generator(device="cuda").manual_seed(0)
    normal = functools.partial(torch.randn, device="cuda", generator=random)
    arrays = {
        "q": normal(rows, heads, dim).bfloat16(),
        "kv": (normal(KEYS, dim) / 10).bfloat16(),
        "indices": torch.randint(KEYS, (rows, columns), device="cuda", generator=random, dtype=torch.int32),
        "attn_sink": normal(heads),
    }
    os.environ["JAX_SPARSE_MLA_PREFILL_BACKEND"] = "hopper"
    call_cache.forget()
    calls = {"peer": called(peers.find("flash_mla"), arrays, heads=64), "ours": called(drop_in, arrays)}
    wanted, found = (calls[name]()[0][:, :heads].float() for name in ("peer", "ours"))
    assert (found - wanted).norm() < 0.01 * wanted.norm(), "the outputs differ"
    times, flush, _ = in_the_worst_way(timers, calls)
    return {f"{name}_us": us for name, us in times.items()} | {"flush": flush}


FAMILIES = {"decode": decode_families, "prefill": prefill_families}


def table(families: list[dict]) -> str:
    """The table's text, a line for each number of heads."""
    blocks = []
    for family in families:
        times = ",\n".join(f'    "{heads}": {json.dumps(sorted(x))}' for heads, x in family["times"].items())
        facts = json.dumps({name: value for name, value in family.items() if name != "times"})
        blocks.append(f'  {facts[:-1]}, "times": {{\n{times}\n  }}}}')
    return '{"command": "python -m benchmarks beside_flashmla",\n "families": [\n' + ",\n".join(blocks) + "\n ]}\n"


def renewed(family: dict, rows: dict[tuple[int, int], list[dict]], before: list[dict]) -> dict | None:
    """The family with the rows that were measured now, and those that were not as they were; None without any."""
    old = next((x for x in before if name_of(x) == name_of(family)), None)
    kept = {} if old is None else {int(heads): list(times) for heads, times in old["times"].items()}
    for (heads, count), measured in rows.items():
        if times := [[count, row["peer_us"], row["ours_us"]] for row in measured if "peer_us" in row]:
            others = [x for x in kept.get(heads, []) if x[0] != count]
            kept[heads] = others + times
    if not kept:
        return None
    facts = {name: environment()[name] for name in ("device", "commit")}
    facts = facts if rows or old is None else {name: old[name] for name in facts}
    return family | facts | {"times": {str(heads): kept[heads] for heads in sorted(kept, reverse=True)}}


def main() -> int:
    made = parser(__doc__, only="families whose names begin so, such as 'prefill V4'")
    made.add_argument("--phase", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    made.add_argument("--heads", nargs="*", type=int, default=[])
    made.add_argument("--rows", nargs="*", type=int, default=[])
    args = made.parse_args()
    chosen = {}
    for phase, families in FAMILIES.items():
        for family, measures in families():
            asked = phase in args.phase and name_of(family).startswith(tuple(args.only))
            keys = [key for key in measures if key[0] in (args.heads or [key[0]]) and key[1] in (args.rows or [key[1]])]
            chosen[name_of(family)] = family, {key: measures[key] for key in keys if asked}
    if args.dry_run:
        cases = ((name, *key) for name, (_, measures) in chosen.items() for key in measures)
        print(*(f"{name}, {heads} heads, {rows} rows" for name, heads, rows in cases), sep="\n")
        return 0
    timers = [Timer(COUNTS, flush) for flush in FLUSHES]
    before, all_rows, result = json.loads(beside_flashmla.TABLE.read_text())["families"], [], []
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "out")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (family, measures) in chosen.items():
        found: dict[tuple[int, int], list[dict]] = {}
        for (heads, rows), several in measures.items():
            cases = [(f"{name}, {heads} heads, {rows} rows", functools.partial(x, timers=timers)) for x in several]
            found[heads, rows] = run_cases("beside_flashmla_rows", cases)
            all_rows += found[heads, rows]
        result += [family for family in [renewed(family, found, before)] if family]
        (folder / "beside_flashmla.json").write_text(table(result))
    return status(all_rows)

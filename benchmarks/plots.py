"""The plots of the documents, drawn from `results.json`: neither a GPU nor JAX is needed.

    python -m benchmarks plots [FOLDER]        # docs/plots by default

step: all 43 layers of a decode step beside SGLang's kernels. decode, prefill: FlashMLA's time over ours. context: what
a step, the index logits and the top-k cost over the length of the context. All rows of a plot are of one device.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.harness import ROOT, parser

DEVICE = "NVIDIA H200"
OURS, PEER, GRID = "#1f6fb4", "#9aa3ab", "#d9dde1"
SAME_TIME = {"color": "black", "linewidth": 0.9, "linestyle": ":"}
COLOURS = ("#1f6fb4", "#d1603d", "#3a9a6b", "#8a63b0", "#c79a2c")


def rows(operation: str, number: int = 0) -> list[dict]:
    """The rows of one run of the operation on `DEVICE`: the first, or the one of this number."""
    groups = json.loads((ROOT / "benchmarks" / "results.json").read_text())[operation]
    return [group for group in groups if group["device"] == DEVICE][number]["rows"]


def step(axes) -> None:
    ms = {(row["case"], row["step"]): row["wall_us"] / 1e3 for row in rows("step")}
    cases = list(dict.fromkeys(case for case, _ in ms))
    for shift, name, label, colour in ((-0.2, "SGLang", "SGLang's kernels", PEER), (0.2, "ours", "ours", OURS)):
        times = [ms[case, name] for case in cases]
        bars = axes.bar([i + shift for i in range(len(cases))], times, 0.38, color=colour, label=label)
        axes.bar_label(bars, [f"{time:.2f}" for time in times], fontsize=8, padding=2)
    for i, case in enumerate(cases):
        ratio, top = ms[case, "SGLang"] / ms[case, "ours"], ms[case, "SGLang"]
        axes.annotate(f"{ratio:.2f}×", (i, top), (0, 15), textcoords="offset points", ha="center", weight="bold")
    axes.set_xticks(range(len(cases)), [" × ".join(f"{int(x):,}" for x in case.split("x")) for case in cases])
    axes.set(xlabel="requests × tokens of context", ylabel="time of a step, ms", ylim=(0, max(ms.values()) * 1.15))
    title = f"DeepSeek-V4-Flash: attention of all 43 layers, one decode step ({DEVICE})"
    axes.set_title(f"{title}\nbold: SGLang's time over ours", fontsize=10)
    axes.legend(frameon=False, loc="upper left")


def decode(axes) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows("decode"):
        if row["table"] == "one token":
            name, _, size = row["case"].rpartition(", ")
            lines.setdefault(name, []).append((int(size.split(" x ")[0]), row["peer_us"] / row["ours_us"]))
    shown = "V4 Flash, 64 heads", "V4 Flash, 16 heads", "V4 Pro, 128 heads", "V4 C128, 64 heads", "V3.2, 128 heads"
    for name, colour in zip(shown, COLOURS):
        axes.plot(*zip(*lines[name]), "o-", color=colour, label=name, markersize=4.5)
    batches = [batch for batch, _ in lines[shown[0]]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, batches)
    axes.set(xlabel="requests, one token each", ylabel="FlashMLA's time / ours", ylim=(0.5, None))
    axes.axhline(1, **SAME_TIME)
    axes.set_title(f"Decode from FP8 caches beside FlashMLA ({DEVICE}; the L2 emptied before each call)", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2)


def prefill(axes) -> None:
    measured = rows("prefill")
    names = [row["case"].removeprefix("prefill ").replace("V4 sharded", "V4 Flash") for row in measured]
    names = [re.sub(r"kv (\d+)(\d{3})", r"\1,\2 keys", name.replace(" sharded", "")) for name in names]
    ratios = [row["peers"]["flash_mla"] / row["ours"]["hopper"] for row in measured]
    bars = axes.barh(range(len(names)), ratios, 0.62, color=OURS)
    labels = [f"{ratio:.2f}×   ({row['ours']['hopper']:,.0f} µs)" for ratio, row in zip(ratios, measured)]
    axes.bar_label(bars, labels, fontsize=8, padding=3)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="FlashMLA's time / ours", xlim=(0, max(ratios) * 1.3))
    axes.axvline(1, **SAME_TIME)
    axes.set_title(f"Prefill of 4,096 queries beside FlashMLA ({DEVICE})", fontsize=10)


def context(left, right) -> None:
    ours = {row["case"]: row["wall_us"] / 1e3 for row in rows("step", 1)}
    sglang = {row["case"]: row["wall_us"] / 1e3 for row in rows("step") if row["step"] == "SGLang"}
    lengths = 8192, 131_072
    left.plot(lengths, [sglang[f"64x{n}"] for n in lengths], "s--", color=PEER, label="64 requests, SGLang's kernels")
    for requests, colour in ((64, COLOURS[0]), (8, COLOURS[2]), (1, COLOURS[1])):
        points = [(n, ours[f"decode {requests}x{n}"]) for n in lengths]
        points += [(393_216, ours["long: decode after 393216"])] if requests == 1 else []
        left.plot(*zip(*points), "o-", color=colour, label=f"{requests} request{'s' * (requests > 1)}, ours")
    left.set_title("A decode step, 43 layers", fontsize=10)
    left.set(ylabel="ms", ylim=(0, 7))
    for operation, case, what, peer, colour in (
        ("indexer", r"index_logits 64 x (\d+)$", "index logits", ("deep_gemm", "DeepGEMM"), COLOURS[0]),
        ("topk", r"topk_transform paged, 64 x (\d+), k 512$", "top-512 and pages", ("sglang", "SGLang"), COLOURS[1]),
    ):
        measured = [(4 * int(match[1]), row) for row in rows(operation) if (match := re.match(case, row["case"]))]
        lengths, times = [length for length, _ in measured], [row for _, row in measured]
        right.plot(lengths, [row["peers"][peer[0]] for row in times], "s--", color=PEER, label=f"{what}, {peer[1]}")
        right.plot(lengths, [row["ours"]["jax"] for row in times], "o-", color=colour, label=f"{what}, ours")
    right.set_title("In one layer of ratio 4, 64 requests", fontsize=10)
    right.set(ylabel="µs", yscale="log", ylim=(2, 2000))
    right.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    for axes, ticks in ((left, (8192, 131_072, 393_216)), (right, (16_384, 32_768, 131_072, 524_288))):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n // 1024}k" for n in ticks])
        axes.set_xlabel("tokens of context")
        axes.legend(frameon=False, fontsize=8, loc="upper left")


PLOTS = {"step": (step, 1, (7, 3.8)), "decode": (decode, 1, (7, 3.8)), "prefill": (prefill, 1, (7, 3.8))}
PLOTS |= {"context": (context, 2, (9, 3.8))}


def main() -> int:
    made = parser(__doc__, "plots whose names begin so")
    made.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "plots")
    args = made.parse_args()
    plots = {name: plot for name, plot in PLOTS.items() if name.startswith(tuple(args.only))}
    if args.dry_run:
        print(*plots, sep="\n")
        return 0
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, columns, size) in plots.items():
        figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)
        for each in axes[0]:
            each.grid(True, axis="x" if name == "prefill" else "y", color=GRID, linewidth=0.7)
            each.set_axisbelow(True)
            each.spines[["top", "right"]].set_visible(False)
        draw(*axes[0])
        if columns > 1:
            figure.suptitle(f"DeepSeek-V4-Flash: cost over the length of the context ({DEVICE})", fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=100)
        print(folder / f"{name}.png")
    return 0

"""Draws the results of `benchmarks.run` from their JSON: needs matplotlib, and neither a GPU nor JAX.

    python -m benchmarks.plots [FOLDER]

roofline.png: attained rate over operations per byte under the measured ceilings, and bandwidth over bytes for what
does no matrix product. latency_<op>.png: ours, the peers and the ceiling of every case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.record import RESULTS

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
OURS_MARKERS = ("o", "^", "D", "v")
PEER_MARKERS = ("s", "X", "P", "*")
PEER_COLOUR = "#555555"


def draw(folder: Path, behind: Iterable[Path] = ()) -> list[Path]:
    """Draws the results in `folder`, and those in `behind` that it lacks, into `folder`; returns the plots' paths."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plots (python -m benchmarks.plots draws them from the JSON)")
        return []
    matplotlib.use("Agg")
    results = [result for result in _results([*behind, folder]) if any(row["ours"] for row in result["rows"])]
    if not results:
        return []
    paths = [_roofline(results, folder / "roofline.png")]
    return paths + [_latency(result, folder / f"latency_{result['op']}.png") for result in results]


def _results(folders: list[Path]) -> list[dict]:
    """What `benchmarks.run` wrote; of a file in several folders the last one. Other files have no operation's name."""
    paths = {path.name: path for folder in folders for path in folder.glob("*.json")}
    contents = (json.loads(paths[name].read_text()) for name in sorted(paths))
    return [content for content in contents if "op" in content and "ceilings" in content]


# --- roofline -------------------------------------------------------------------------------------


def _roofline(results: list[dict], path: Path) -> Path:
    from matplotlib import pyplot

    figure, (compute, memory) = pyplot.subplots(1, 2, figsize=(13, 5.6), layout="constrained")
    # Runs of one machine differ by a percent or two; the first result's ceilings are drawn.
    copy, matmul = results[0]["ceilings"]["copy"], results[0]["ceilings"]["matmul"]
    for number, result in enumerate(results):
        colour = COLOURS[number % len(COLOURS)]
        for axes, rows in (
            (compute, [row for row in result["rows"] if row["flop"]]),
            (memory, [row for row in result["rows"] if not row["flop"]]),
        ):
            _points(axes, rows, colour, result["op"])
    _roofs(compute, [row for result in results for row in result["rows"] if row["flop"]], copy, matmul)
    compute.set(xscale="log", yscale="log", xlabel="operations per byte that must move", ylabel="TFLOP/s")
    compute.set_title("Matrix products")
    memory.axhline(copy, color="black", linewidth=1)
    memory.annotate(f"copy {copy:.2f} TB/s", (0.02, copy), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    memory.set(xscale="log", xlabel="bytes that must move", ylabel="TB/s", ylim=(0, copy * 1.15))
    memory.set_title("Without a matrix product")
    for axes in (compute, memory):
        axes.grid(True, which="major", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="lower right")
    figure.suptitle(f"{results[0]['device']}: filled = ours, open = the best peer", fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _points(axes, rows: list[dict], colour: str, label: str) -> None:
    """Ours filled (its fastest launch), the best peer open, a line between the two of a case."""
    for row in rows:
        if not row["ours"]:
            continue
        work, x = (row["flop"], row["flop"] / row["bytes"]) if row["flop"] else (row["bytes"], row["bytes"])
        ours = work / min(row["ours"].values()) / 1e6
        axes.plot(x, ours, "o", color=colour, markersize=6, label=label)
        label = None
        if row["best_peer"]:
            peer = work / row["peers"][row["best_peer"]] / 1e6
            axes.plot([x, x], [ours, peer], color=colour, linewidth=0.8, alpha=0.6)
            axes.plot(x, peer, "o", markerfacecolor="white", color=colour, markersize=6)


def _roofs(axes, rows: list[dict], copy: float, matmul: dict[str, float]) -> None:
    intensities = [row["flop"] / row["bytes"] for row in rows] or [1, 1000]
    units = sorted({row["flop_unit"] for row in rows}) or ["bf16"]
    left, right = min(intensities) / 4, max(*intensities, 2 * max(matmul[unit] for unit in units) / copy)
    ridge = max(matmul[unit] for unit in units) / copy
    axes.plot([left, ridge], [left * copy, ridge * copy], color="black", linewidth=1)
    axes.annotate(f"copy {copy:.2f} TB/s ", (left * 2.5, left * 2.5 * copy), ha="right", va="bottom", fontsize=9)
    for unit in units:
        rate = matmul[unit]
        axes.plot([rate / copy, right * 1.5], [rate, rate], color="black", linewidth=1)
        axes.annotate(f"{unit} {rate:.0f} TFLOP/s", (right * 1.5, rate * 0.97), ha="right", va="top", fontsize=9)


# --- latency --------------------------------------------------------------------------------------


def _latency(result: dict, path: Path) -> Path:
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["ours"]]
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.3 * len(rows)), layout="constrained")
    names = {group: sorted({name for row in rows for name in row[group]}) for group in ("ours", "peers")}
    for y, row in enumerate(rows):
        times = [*row["ours"].values(), *row["peers"].values(), row["ceiling_us"]]
        axes.plot([min(times), max(times)], [y, y], color="#cccccc", linewidth=1, zorder=1)
        axes.plot(row["ceiling_us"], y, "|", color="black", markersize=11, markeredgewidth=2, zorder=2)
        for name, us in row["peers"].items():
            marker = PEER_MARKERS[names["peers"].index(name) % len(PEER_MARKERS)]
            axes.plot(us, y, marker, markerfacecolor="white", color=PEER_COLOUR, markersize=7, zorder=3)
        for name, us in row["ours"].items():
            marker = OURS_MARKERS[names["ours"].index(name) % len(OURS_MARKERS)]
            axes.plot(us, y, marker, color=COLOURS[0], markersize=7, zorder=4)
        axes.annotate(_verdict(row), (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    fastest = min(us for row in rows for us in (*row["ours"].values(), *row["peers"].values()))
    axes.set(xscale="log", xlabel="µs", ylim=(len(rows) - 0.4, -0.6))
    axes.set_xlim(left=max(axes.get_xlim()[0], fastest / 3))  # a ceiling far below any launch is not shown
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=8)
    axes.grid(True, axis="x", which="both", alpha=0.25)
    axes.annotate(
        "peer/ours, share", (1.01, -0.95), xycoords=("axes fraction", "data"), fontsize=8, annotation_clip=False
    )
    figure.legend(*_latency_legend(names), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(f"{result['op']} on {result['device']}", fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _verdict(row: dict) -> str:
    """Of the fastest launch of ours: peer / ours, and the share of the ceiling."""
    best = min(row["ours"], key=row["ours"].get)
    ratio = row["peer_over_ours"].get(best)
    return f"{f'{ratio:.2f}×' if ratio else '–':>6}  {row['share_of_ceiling'][best]:4.0%}"


def _latency_legend(names: dict[str, list[str]]) -> tuple[list, list[str]]:
    from matplotlib.lines import Line2D

    handles, labels = [], []
    for number, name in enumerate(names["ours"]):
        marker = OURS_MARKERS[number % len(OURS_MARKERS)]
        handles.append(Line2D([], [], marker=marker, color=COLOURS[0], linestyle=""))
        labels.append(f"ours, {name}")
    for number, name in enumerate(names["peers"]):
        marker = PEER_MARKERS[number % len(PEER_MARKERS)]
        handles.append(Line2D([], [], marker=marker, color=PEER_COLOUR, markerfacecolor="white", linestyle=""))
        labels.append(name)
    handles.append(Line2D([], [], marker="|", color="black", linestyle="", markersize=11, markeredgewidth=2))
    return handles, [*labels, "ceiling"]


if __name__ == "__main__":
    for drawn in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS):
        print(drawn)

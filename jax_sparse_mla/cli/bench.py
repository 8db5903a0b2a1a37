"""`jax-sparse-mla bench`: how fast the JAX engine serves a model, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from jax_sparse_mla.cli.arguments import mesh_shape, natural, positive_int, positive_ints

# (requests, contexts, timed tokens of each request) of a device: a CPU should be done in about two minutes.
GPU_CASES = [1, 8, 64], [2048, 8192, 131072], 128
CPU_CASES = [1, 4], [512, 2048], 16

NOTE = """\
first token: one request alone, its whole prompt read, once compiled (median). Decode: the requests are opened at their
context without reading it; their caches hold random rows, and their tokens are drawn, all equally likely. Per token:
the time from one token of a request to its next. Attention: all layers' attention alone with its projections, over the
step."""
GPU_NOTE = "GPU: the part of a step in which the GPU works, by CUPTI through torch; attention is by GPU time then."

_COLUMNS = (
    ("requests", 8),
    ("context", 8),
    ("first token", 12),
    ("tokens/s", 10),
    ("per token: p50", 15),
    ("p90", 9),
    ("p99", 9),
    ("attention", 10),
    ("GPU", 9),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    from jax_sparse_mla.serving.presets import BENCH_CONFIGS

    def default(which: int) -> str:
        return "default: {} on a GPU, {} on a CPU".format(
            *(str(cases[which]).strip("[]").replace(" ", "") for cases in (GPU_CASES, CPU_CASES))
        )

    parser.add_argument(
        "--preset",
        choices=tuple(BENCH_CONFIGS),
        default="v4",
        help="a model with random weights; v4-flash-slice: four true-size layers of DeepSeek-V4-Flash (default: v4)",
    )
    parser.add_argument("--requests", type=positive_ints, metavar="N,…", help=f"served at once ({default(0)})")
    parser.add_argument("--contexts", type=positive_ints, metavar="TOKENS,…", help=f"of each request ({default(1)})")
    parser.add_argument("--new-tokens", type=positive_int, metavar="N", help=f"timed, of each request ({default(2)})")
    parser.add_argument("--chunk-size", type=positive_int, default=1024, metavar="TOKENS", help="of a prefill step")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where JAX has it")
    parser.add_argument(
        "--mesh",
        type=mesh_shape,
        metavar="SHARESxDEVICES",
        help="over several devices: so many shares of the requests, heads and experts of each over so many devices",
    )
    parser.add_argument("--seed", type=natural, default=0, help="of the weights, the tokens and the page order")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draws it (needs matplotlib, the extra [bench])")


def run(args: argparse.Namespace) -> int:
    """Measures and prints.

    Returns:
      0, or 2 if there is nothing to run: no such device, weights that are larger than its memory, devices that cannot
      share the model, a file that cannot be written, no matplotlib for a plot.
    """
    # Nobody shares the device: JAX may take more of it than its default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    import jax

    from jax_sparse_mla.cli.generate import keep_programs
    from jax_sparse_mla.cli.setup import choose_device
    from jax_sparse_mla.serving import bench
    from jax_sparse_mla.serving.mesh import init_cut_params, model_of_a_device, new_mesh
    from jax_sparse_mla.serving.model import Model
    from jax_sparse_mla.serving.presets import BENCH_CONFIGS

    try:
        if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib (the extra [bench])")
        for path in filter(None, (args.json, args.plot)):
            if not path.parent.is_dir():
                raise FileNotFoundError(f"no folder {path.parent}")
        device = choose_device(args.device)
        model = Model.from_config(BENCH_CONFIGS[args.preset])
        weights, mesh = bench.weight_bytes(model), None
        of_a_device = weights
        if args.mesh is not None:
            mesh = new_mesh(*args.mesh)
            model_of_a_device(model, mesh)  # which refuses
            device, of_a_device = f"{mesh.size} x {device}", bench.weight_bytes(model, mesh)
        bench.check_memory(f"the weights of preset {args.preset} need", of_a_device)
        keep_programs()
    except (OSError, ValueError) as error:
        print(f"jax-sparse-mla bench: {error}", file=sys.stderr)
        return 2
    requests, contexts, new_tokens = CPU_CASES if jax.default_backend() == "cpu" else GPU_CASES
    measured: dict[str, Any] = {
        "device": device,
        "jax": jax.__version__,
        "preset": args.preset,
        "seed": args.seed,
        "weight_bytes": weights,
        "memory_bytes": bench.device_memory(),
        "new_tokens": args.new_tokens or new_tokens,
        "chunk_size": args.chunk_size,
        "note": NOTE.replace("\n", " "),
        "rows": [],
    }
    print(f"device     {device}, {measured['memory_bytes'] / 2**30:.1f} GiB, jax {jax.__version__}")
    print(f"model      preset {args.preset}, seed {args.seed} (random weights, {weights / 2**30:.2f} GiB): "
          f"{model.num_layers} layers, {model.spec.num_heads} heads")  # fmt: skip
    if mesh is None:
        params = model.init_params(args.seed)
    else:
        measured |= {"mesh": "{}x{}".format(*args.mesh), "weight_bytes_of_a_device": of_a_device}
        print(f"mesh       {args.mesh[0]} shares of the requests, heads and experts over {args.mesh[1]} devices, "
              f"{of_a_device / 2**30:.2f} GiB of weights on each")  # fmt: skip
        model, params = init_cut_params(model, args.seed, mesh)
    print(f"decode     {measured['new_tokens']} tokens of each request; prefill in chunks of {args.chunk_size} rows")
    print("times in milliseconds\n")
    print(" ".join(f"{name:>{width}}" for name, width in _COLUMNS))
    rows = bench.measure(
        model,
        params,
        args.requests or requests,
        args.contexts or contexts,
        new_tokens=measured["new_tokens"],
        chunk_size=args.chunk_size,
        seed=args.seed,
        mesh=mesh,
    )
    for row in rows:
        measured["rows"].append(row.to_json())
        print(line(row), flush=True)
        if args.json is not None:  # after each row: a long run that is stopped keeps what it has
            args.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(f"\n{NOTE}")
    if any(row["step_gpu_ms"] for row in measured["rows"]):
        print(GPU_NOTE)
    if args.plot is not None:
        draw(measured, args.plot)
    return 0


def line(row: Any) -> str:
    """A row of the table; a dash where nothing was measured, and why."""
    token = row.token_ms
    values = (
        str(row.requests),
        str(row.context),
        _number(row.first_token_ms and row.first_token_ms.p50),
        _number(row.tokens_per_s, 1),
        *(_number(token and getattr(token, name), 3) for name in ("p50", "p90", "p99")),
        "–" if row.attention_share is None else f"{row.attention_share:.0%}",
        _number(row.step_gpu_ms, 3),
    )
    cells = " ".join(f"{value:>{width}}" for value, (_, width) in zip(values, _COLUMNS))
    return cells + (f"  {row.problem}" if row.problem else "")


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draws tokens a second and the time per token (p50, with p99 as a bar) over the requests, a line for each context;
    and the first token over the context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (rate, latency, first) = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    decoded = [row for row in measured["rows"] if row["token_ms"]]
    for context in dict.fromkeys(row["context"] for row in decoded):
        rows = sorted((row for row in decoded if row["context"] == context), key=lambda row: row["requests"])
        requests, label = [row["requests"] for row in rows], f"{context:,} tokens"
        rate.plot(requests, [row["tokens_per_s"] for row in rows], "o-", label=label)
        p50, p99 = ([row["token_ms"][name] for row in rows] for name in ("p50", "p99"))
        above = [high - low for low, high in zip(p50, p99)]
        latency.errorbar(requests, p50, [[0] * len(above), above], marker="o", capsize=3, label=label)
    times = {row["context"]: row["first_token_ms"]["p50"] for row in measured["rows"] if row["first_token_ms"]}
    first.plot(sorted(times), [times[context] for context in sorted(times)], "o-")
    rate.set(ylabel="tokens a second", xlabel="requests", title="Decode, all requests")
    latency.set(ylabel="ms", xlabel="requests", title="Time per token, p50 and p99")
    first.set(ylabel="ms", xlabel="tokens of the prompt", title="First token, one request")
    for axes, ticks in ((rate, "requests"), (latency, "requests"), (first, "context")):
        values = sorted({row[ticks] for row in measured["rows"]})
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
    if decoded:
        rate.legend(fontsize=8)
    over = f", mesh {measured['mesh']}" if "mesh" in measured else ""
    figure.suptitle(f"preset {measured['preset']} on {measured['device']}{over}", fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

"""The gradient of prefill beside other projects' kernels for it: times and errors in one process, on the same inputs.

    python -m benchmarks.peer_backward [--tilelang FOLDER] [--only "V4 Flash" ...]

The peers are cudnn-frontend's `sparse_attention_backward_wrapper` (with the CuTe DSL) and TileLang's `sparse_mla_bwd`,
an example: FOLDER is `examples/deepseek_v32` of its repository. That one has dimension 576 alone, no sink, and a query
attends to the keys up to its own position; one case is so. Every side gets the same forward pass's output and lse.
Times by CUPTI with the L2 flushed: the whole backward pass, and what the GPU works of it. FLOP are those of five
products. Errors, norm over norm, are those of 48 queries against float64. Writes peer_backward.json to $OUT or
benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import backward
from benchmarks.record import environment, results_folder, version, write_json
from benchmarks.timing import Run, Timer
from jax_sparse_mla.attention import gradient

CAUSAL = backward.Case("causal, 64 heads, d 576, 1,024 keys, kv 8,192", 64, 576, 1024, 8_192, sink=False)
CASES = [*backward.CASES, CAUSAL]
LOG2_E = math.log2(math.e)


def arrays_of(case: backward.Case, causal: bool) -> dict[str, jax.Array | None]:
    """`causal`: the keys of query t are drawn from 0 to t, with repetitions."""
    arrays = case.arrays()
    if causal:
        last = np.arange(1, case.q_len + 1)[:, None]
        indices = np.random.default_rng(2).integers(0, last, (case.q_len, case.topk), np.int32)
        arrays["indices"] = jnp.asarray(indices)
    return arrays


def cudnn_frontend(case: backward.Case, saved: tuple) -> Callable[[], tuple]:
    call = importlib.import_module("cudnn.deepseek_sparse_attention").sparse_attention_backward_wrapper
    q, kv, indices, _, sink, out, lse, g, _ = saved
    q, kv, indices, out, lse, g = map(torch.from_dlpack, (q, kv, indices, out, lse, g))
    sink = torch.full((case.heads,), -math.inf, device="cuda") if sink is None else torch.from_dlpack(sink)
    scale = case.qk_dim**-0.5

    def run() -> tuple:
        found = call(q, kv, out, g, lse, sink, indices, softmax_scale=scale)
        return found["dq"], found["dkv"]

    return run


def tilelang(folder: str, case: backward.Case, saved: tuple) -> Callable[[], tuple]:
    if folder not in sys.path:
        sys.path.insert(0, folder)
    call = importlib.import_module("sparse_mla_bwd").sparse_mla_bwd
    q, kv, indices, _, sink, out, lse, g, _ = saved
    assert sink is None
    q, kv, indices, out, lse, g = (torch.from_dlpack(x)[None] for x in (q, kv, indices, out, lse, g))
    kv, indices, lse = kv[:, :, None], indices[:, :, None], lse * LOG2_E
    scale = case.qk_dim**-0.5

    def run() -> tuple:
        dq, dkv = call(q, kv, out, g, indices, lse, scale)
        return dq[0], dkv[0, :, 0]

    return run


def peers(case: backward.Case, folder: str | None, causal: bool, saved: tuple) -> dict[str, Callable[[], tuple] | str]:
    """By name what to call, or why it cannot be called."""
    makers = {"cudnn-frontend": cudnn_frontend}
    if folder and causal:
        makers["tilelang"] = partial(tilelang, folder)
    found = {}
    for name, make in makers.items():
        try:
            run = make(case, saved)
            run()
            torch.cuda.synchronize()
            found[name] = run
        except Exception as error:  # whatever keeps another project's kernel from running here is the result
            found[name] = f"{type(error).__name__}: {error}"[:300]
    return found


def on_host(x) -> np.ndarray:
    return x.float().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float32)


def our_run(case: backward.Case, saved: tuple) -> Callable[[], tuple]:
    return partial(jax.jit(partial(gradient.by_kernel, softmax_scale=case.qk_dim**-0.5, deterministic=False)), *saved)


def errors(case: backward.Case, folder: str | None, causal: bool) -> dict[str, dict[str, float] | str]:
    """Of each side's dq and dkv, in a smaller case."""
    small = backward.checked(case)
    arrays = arrays_of(small, causal)
    saved = backward.saved(small, arrays)
    wanted = backward.exact(*arrays.values(), case.qk_dim**-0.5)
    sides = {"ours": our_run(small, saved)} | peers(small, folder, causal, saved)

    return {name: run if isinstance(run, str) else distances(run, wanted) for name, run in sides.items()}


def distances(run: Callable[[], tuple], wanted: Iterable[np.ndarray]) -> dict[str, float]:
    """How far a side's dq and dkv are from these."""
    return dict(zip(("dq", "dkv"), map(backward.distance, map(on_host, run()), wanted)))


def measure(case: backward.Case, folder: str | None, timer: Timer) -> dict:
    causal = case is CAUSAL
    saved = backward.saved(case, arrays_of(case, causal))
    sides = {"ours": our_run(case, saved)} | peers(case, folder, causal, saved)
    row = {"case": case.name, "not run": {name: why for name, why in sides.items() if isinstance(why, str)}}
    runs = {name: run for name, run in sides.items() if not isinstance(run, str)}
    ours = [on_host(x) for x in runs["ours"]()[:2]]
    row["apart"] = {name: distances(run, ours) for name, run in runs.items() if name != "ours"}
    row["errors"] = errors(case, folder, causal)
    row["us"], row["busy_us"] = {}, {}
    for name, run in runs.items():
        row["us"][name] = round(timer(Run(run, "jax" if name == "ours" else "torch")), 1)
        row["busy_us"][name] = round(timer.busy[0], 1)
    row["tflops"] = {name: round(case.flop / x / 1e6, 1) for name, x in row["us"].items()}
    row["peer_over_ours"] = {name: round(x / row["us"]["ours"], 3) for name, x in row["us"].items() if name != "ours"}
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tilelang", metavar="FOLDER", help="with TileLang's sparse_mla_bwd.py")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    timer, rows = Timer(repeats=args.repeats), []
    versions = {name: version(name) for name in ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "tilelang")}
    for case in CASES:
        if case.name.startswith(tuple(args.only)):
            rows.append(measure(case, args.tilelang, timer))
            content = {"peers": versions, "rows": rows}
            write_json(results_folder() / "peer_backward.json", environment() | content)
    return 0


if __name__ == "__main__":
    sys.exit(main())

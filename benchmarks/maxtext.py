"""MaxText's DeepSeek-V4 and V3.2 with dense attention and through this library: logits, served tokens, a training step.

    python -m benchmarks maxtext [--models v4 v32] [--parts forward serve train] [--heads 16]
        [--one-layer] [--lengths 512 4096] [--train-lengths 8192 32768]

The models are `examples/maxtext/small.py`: small but for the attention's dimensions. The weights are float32, the
activations bfloat16; dense float32 is the oracle where it fits. Errors of gradients are norms over norms. Memory is
what XLA plans for a program beside its arguments; time is the best of three steps. A program that the device has no
memory for is reported so. The indexer is not trained: its teacher is dense in MaxText. All products of matrices are
cuBLAS's by its own choice, since XLA would compile and time many kernels for each, which takes minutes.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness import ROOT, parser, run_cases, status
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions

sys.path.insert(0, str(ROOT / "examples" / "maxtext"))

try:
    import attention
    import serving
    import small
except ImportError as error:  # MaxText, or what it needs
    missing: ImportError | None = error
else:
    missing = None

MiB = 2**20
FLAGS = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
STEPS = 3  # that are timed
PARTS = ("forward", "serve", "train")
MODELS = ("v4", "v32")
MOST_SELECTED = {"v4": 512, "v32": 2048}
FLOAT32_TOKENS = 8192  # XLA plans 345 GiB for 32,768, after 7 minutes of compilation
REQUESTS = [(300, 6), (7, 40), (129, 30), (480, 5), (64, 20)]  # tokens of the prompt, tokens to make


class Run(NamedTuple):
    result: Any  # on the host; None where it did not fit
    mib: float | None = None
    seconds: float | None = None
    why_not: str | None = None
    compile_seconds: float | None = None

    def figures(self) -> dict:
        times = {"seconds": self.seconds, "compile seconds": self.compile_seconds}
        return {"MiB": self.mib, **times, "why not": self.why_not}


def run(function: Callable, *arguments, dense: bool) -> Run:
    """Compiles and runs it; `dense` without the adapter."""
    if not dense:
        attention.install()
    mib, compiled, began = None, None, time.perf_counter()
    try:
        program = jax.jit(lambda *arrays: function(*arrays)).lower(*arguments).compile()
        compiled = time.perf_counter() - began
        mib = program.memory_analysis().temp_size_in_bytes / MiB
        seconds = []
        for _ in range(1 + STEPS):
            start = time.perf_counter()
            result = jax.block_until_ready(program(*arguments))
            seconds.append(time.perf_counter() - start)
        return Run(jax.device_get(result), mib, min(seconds[1:]), compile_seconds=compiled)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Run(None, mib, why_not="out of memory", compile_seconds=compiled)
    finally:
        attention.uninstall()


def config(args, name: str, length: int, dtype: str, **options):
    """`small.config` with as many heads as asked, selecting a sixteenth of the tokens up to the model's own topk."""
    heads = {"base_num_query_heads": args.heads} | ({"base_num_kv_heads": args.heads} if name == "v32" else {})
    topk = min(MOST_SELECTED[name], max(32, length // 16))
    if args.one_layer:
        options |= {"base_num_decoder_layers": 1, "first_num_dense_layers": 0}
        options |= {"compress_ratios": [4]} if name == "v4" else {}
    return small.config(name, max_target_length=length, dtype=dtype, indexer_topk=topk, **heads, **options)


def programs(args, name: str, length: int, make: Callable, **options) -> dict[str, Run]:
    """Dense in float32, dense in bfloat16 and through the adapter; `make(cfg, model)` gives function and weights."""
    runs = {}
    for kind, dtype in (("float32", "float32"), ("dense", "bfloat16"), ("ours", "bfloat16")):
        if kind == "float32" and length > FLOAT32_TOKENS:
            runs[kind] = Run(None, why_not=f"more than {FLOAT32_TOKENS:,} tokens")
            continue
        cfg = config(args, name, length, dtype, **options)
        model, mesh = small.build(cfg)
        function, weights = make(cfg, model)
        with small.running(cfg, mesh):
            runs[kind] = run(function, weights, small.tokens(cfg, length), dense=kind != "ours")
        print(f"  {name} {length} {kind}: {runs[kind].figures()}", flush=True)
    return runs


def forward(args, name: str, length: int) -> dict:
    runs = programs(args, name, length, lambda cfg, model: small.forward(model))
    result = {kind: r.figures() for kind, r in runs.items()}
    exact, dense, ours = (runs[kind].result for kind in ("float32", "dense", "ours"))
    if exact is not None:
        result["rms to float32"] = {
            kind: rms(logits - exact) for kind, logits in (("dense", dense), ("ours", ours)) if logits is not None
        }
    if dense is not None and ours is not None:
        result |= {
            "largest logit": float(np.abs(dense).max()),
            "largest difference": float(np.abs(ours - dense).max()),
            "rms difference": rms(ours - dense),
            "same argmax": float(np.mean(ours.argmax(-1) == dense.argmax(-1))),
        }
    return result


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def serve(args, name: str, length: int) -> dict:
    cfg = config(args, name, length, "bfloat16")
    model, mesh = small.build(cfg)
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(0, cfg.vocab_size, n).tolist(), new) for n, new in REQUESTS]
    with small.running(cfg, mesh):
        options = EngineOptions(max_batch=3, max_len=length, chunk_size=192)
        engine = Engine(*serving.served(cfg, model), options)
        engine.run(requests)
        function, weights = small.forward(model)
        same, count, short, spread = small.compare(jax.jit(function), weights, requests, length)
    largest = {"largest shortfall of a logit": short, "from the mean logit to the largest": spread}
    return {"programs": len(engine.routes), "tokens": count, "dense attention's": same, **largest}


def train(args, name: str, length: int) -> dict:
    options = {"indexer_sparse_training": True, "remat_policy": "full"}
    runs = programs(args, name, length, small.gradients, **options)
    losses = {kind: None if r.result is None else float(r.result[0]) for kind, r in runs.items()}
    result = {kind: {"loss": losses[kind], **r.figures()} for kind, r in runs.items()}
    gradients = {kind: small.named(r.result[1]) for kind, r in runs.items() if r.result is not None}
    for a, b in (("ours", "dense"), ("dense", "float32"), ("ours", "float32")):
        if a in gradients and b in gradients:
            parts = {key: value for key, value in gradients[b].items() if "attention" in key}
            errors = {"all": small.difference(gradients[a], gradients[b])}
            result[f"gradients, {a} to {b}"] = errors | {"attention's": small.difference(gradients[a], parts)}
    return result


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--lengths", nargs="+", type=int, default=(512, 4096))
    made.add_argument("--train-lengths", nargs="+", type=int, default=(8192, 32768))
    made.add_argument("--one-layer", action="store_true", help="both then select the same keys: no ties flip")
    args = made.parse_args()
    cases = [("forward", forward, name, length) for name in args.models for length in args.lengths]
    cases += [("serve", serve, "v4", 576)] if "v4" in args.models else []
    cases += [("train", train, name, length) for name in args.models for length in args.train_lengths]
    cases = [case for case in cases if case[0] in args.parts]
    cases = [case for case in cases if f"{case[0]} {case[2]} {case[3]}".startswith(tuple(args.only))]
    if args.dry_run:
        print(*(f"{part} {name} {length}" for part, _, name, length in cases), sep="\n")
        return 0
    if missing is not None:
        raise SystemExit(f"MaxText cannot be imported: {missing}")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"  # JAX reads it with its first array
    measures = ((f"{part} {name} {n}", functools.partial(function, args, name, n)) for part, function, name, n in cases)
    return status(run_cases("maxtext", measures, heads=args.heads, one_layer=args.one_layer))

"""How long the engine's programs take to compile, by number of layers.

    python -m benchmarks compile_time --model v4 --layers 4 43 --mode decode extend
    python -m benchmarks compile_time --model v32 --layers 4 61 --full

Random weights with four small experts and narrow rows; heads and kinds of layers are those of DeepSeek-V4-Flash or
V3.2. Kernels are compiled before. `--full` takes the true sizes: arguments have shapes alone, so they need no memory,
and nothing runs.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import jax

from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving.presets import CONFIGS, V4_FLASH_SLICE, V32_SLICE
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.shapes_alone import ShapesAlone

WINDOW, C4, C128 = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
BATCH, CHUNK, MAX_LEN = 8, 256, 4096


def v4_config(layers: int, full: bool) -> dict[str, Any]:
    """Window layers, then C4 and C128 by turns; the first three of 43 choose experts by the token."""
    windows, hashed = (1, 0) if layers <= 4 else (2, 3)
    config = dict(V4_FLASH_SLICE if full else CONFIGS["v4"])
    config |= {} if full else {"num_attention_heads": 64, "o_groups": 8, "index_n_heads": 64}
    return config | {
        "num_hidden_layers": layers,
        "layer_types": [WINDOW] * windows + [(C4, C128)[i % 2] for i in range(layers - windows)],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
    }


def v32_config(layers: int, full: bool) -> dict[str, Any]:
    config = dict(V32_SLICE if full else CONFIGS["v32"])
    config |= {"num_hidden_layers": layers, "first_k_dense_replace": 1 if layers <= 4 else 3}
    attention = "num_attention_heads", "num_key_value_heads", "index_n_heads", "index_topk"
    return config | {name: V32_SLICE[name] for name in attention}


CONFIG = {"v4": v4_config, "v32": v32_config}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIG, default="v4")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 43])
    parser.add_argument("--mode", choices=("decode", "extend"), nargs="+", default=["decode", "extend"])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="lists the cases")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; seconds, and core seconds of the process")
    print(f"{'mode':8}{'layers':>6}{'trace':>16}{'lower':>16}{'XLA':>16}{'all':>16}")
    for mode, layers in itertools.product(args.mode, args.layers):
        if not args.dry_run:  # nvcc and Triton compile what the program calls once on a machine
            phases(args, mode, layers)
        jax.clear_caches()
        times = [] if args.dry_run else phases(args, mode, layers)
        print(f"{mode:8}{layers:6}" + "".join("{:8.1f} ({:5.1f})".format(*x) for x in times), flush=True)


def phases(args: argparse.Namespace, mode: str, layers: int) -> list[tuple[float, float]]:
    options = EngineOptions(chunk_size=CHUNK, max_batch=BATCH, max_len=MAX_LEN)
    engine = ShapesAlone(CONFIG[args.model](layers, args.full), options)
    times = [_now()]
    traced = engine.trace_program(engine.greedy(ForwardMode(mode))[-1])
    times.append(_now())
    lowered = traced.lower()
    times.append(_now())
    lowered.compile()
    times.append(_now())
    return [(b[0] - a[0], b[1] - a[1]) for a, b in [*itertools.pairwise(times), (times[0], times[-1])]]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()

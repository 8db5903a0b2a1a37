"""The gradient of prefill through kernels: time and TFLOP/s, with and without a gradient that repeats to the bit.

    python -m benchmarks.backward [--only "V4 Flash" ...] [--tiles all] [--products]

Times by CUPTI with the L2 flushed: the whole backward pass (what is summed before the kernel, zeros, the kernel, the
cast of dkv, which puts its columns in order), the kernel alone, and the forward pass of the backend that the router
takes. FLOP are those of five products: S, dQ and dK over qk_dim, dP and dV over 512. Errors, norm over norm, are those
of 48 queries against float64, beside those of attention in bfloat16 differentiated by JAX. `--tiles all` measures other
tilings of the kernel, too, or those that are named, such as 64x64/128/8 (heads x keys / columns that are added at a
time / warps); `--products` measures a call without keys, which has all products and neither loads nor additions. Writes
backward.json to $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import environment, results_folder, write_json
from benchmarks.timing import Run, Timer
from jax_sparse_mla import sparse_mla_prefill
from jax_sparse_mla.attention import gradient
from jax_sparse_mla.attention.backend import GRADIENT_BACKENDS, GradientCall
from jax_sparse_mla.attention.triton import backward as kernels
from jax_sparse_mla.backend import first_able
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch.triton_call import executor

V_DIM = 512
TILES = ("64x64/64/8", "64x64/128/8", "16x32/128/4")
CHECKED_QUERIES = 48


class Case(NamedTuple):
    name: str
    heads: int
    qk_dim: int
    topk: int
    kv_len: int
    q_len: int = 4096
    sink: bool = True

    @property
    def flop(self) -> int:
        return 2 * self.q_len * self.heads * self.topk * (3 * self.qk_dim + 2 * V_DIM)

    def arrays(self, seed: int = 0) -> dict[str, jax.Array | None]:
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return jnp.asarray(rng.standard_normal(shape, np.float32))

        indices = rng.integers(0, self.kv_len, (self.q_len, self.topk), np.int32)
        return {
            "q": normal(self.q_len, self.heads, self.qk_dim).astype(jnp.bfloat16),
            "kv": normal(self.kv_len, self.qk_dim).astype(jnp.bfloat16),
            "indices": jnp.asarray(indices),
            "attn_sink": normal(self.heads) if self.sink else None,
            "g_out": normal(self.q_len, self.heads, V_DIM).astype(jnp.bfloat16),
        }


CASES = [
    Case("V4 Flash 1,024 keys, kv 8,192", 64, 512, 1024, 8_192),
    Case("V4 Flash 1,024 keys, kv 65,536", 64, 512, 1024, 65_536),
    Case("V4 Pro 1,024 keys, kv 65,536", 128, 512, 1024, 65_536, q_len=2048),
    Case("V3.2 2,048 keys, kv 65,536", 128, 576, 2048, 65_536, q_len=1024, sink=False),
]


def tile_of(name: str) -> kernels.Tile:
    sizes, segment, warps = name.split("/")
    block_h, block_n = map(int, sizes.split("x"))
    return kernels.Tile(block_h, block_n, int(segment), int(warps))


def kernel_of(case: Case, tile: kernels.Tile | None, deterministic: bool) -> str:
    """The kernel that serves: our own for Hopper, or Triton's with its tiling."""
    device = executor().device
    call = GradientCall(DeviceInfo.current(), case.qk_dim, deterministic)
    if tile is None and (name := first_able(GRADIENT_BACKENDS, call, "gradient").name) != "triton":
        return name
    tile = tile or kernels.choose_tile(case.heads, device)
    return f"triton {tile.block_h}x{tile.block_n}/{tile.segment}/{tile.num_warps}"


def saved(case: Case, arrays: dict) -> gradient.Arrays:
    """What the forward pass saves, and the gradients of out and lse."""
    given = {name: arrays[name] for name in ("q", "kv", "indices", "attn_sink")}
    out, _, lse = jax.jit(partial(sparse_mla_prefill, softmax_scale=case.qk_dim**-0.5))(**given)
    q, kv, indices, sink = given.values()
    return gradient.Arrays(q, kv, indices, None, sink, out, lse, arrays["g_out"], jnp.zeros_like(lse))


def in_bfloat16(q, kv, indices, sink, scale):
    """Attention as it is written in bfloat16, differentiated by JAX."""
    keys = kv[indices]
    scores = scale * jnp.einsum("thd,tkd->thk", q, keys, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(scores, -1)
    total = lse if sink is None else jnp.logaddexp(lse, sink)
    weights = jnp.exp(scores - total[..., None]).astype(q.dtype)
    return jnp.einsum("thk,tkd->thd", weights, keys[..., :V_DIM], preferred_element_type=jnp.float32).astype(q.dtype)


def errors(case: Case, tile: kernels.Tile | None, deterministic: bool) -> dict[str, tuple[float, float]]:
    """Of dq and dkv, and those of attention in bfloat16."""
    case = checked(case)
    arrays, scale = case.arrays(1), case.qk_dim**-0.5
    call = partial(gradient.by_kernel, softmax_scale=scale, deterministic=deterministic, tile=tile)
    found = jax.jit(call)(saved(case, arrays))[:2]
    q, kv, indices, sink, g = arrays.values()
    plain = jax.jit(lambda q, kv: jax.vjp(lambda q, kv: in_bfloat16(q, kv, indices, sink, scale), q, kv)[1](g))(q, kv)
    wanted = exact(q, kv, indices, sink, g, scale)
    pairs = zip(("dq", "dkv"), found, plain, wanted)
    return {name: (distance(x, z), distance(y, z)) for name, x, y, z in pairs}


def checked(case: Case) -> Case:
    """The part of a case whose errors are looked at."""
    return case._replace(q_len=CHECKED_QUERIES, kv_len=min(case.kv_len, 4096))


def distance(found, wanted) -> float:
    """The norm of the difference over that of what is wanted, with three digits."""
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(f"{np.linalg.norm(found - wanted) / np.linalg.norm(wanted):.2e}")


def exact(q, kv, indices, sink, g, scale) -> tuple[np.ndarray, np.ndarray]:
    """dq and dkv in float64."""
    q, kv, sink, g = (None if x is None else np.asarray(x, np.float64) for x in (q, kv, sink, g))
    indices, dq, dkv = np.asarray(indices), np.zeros_like(q), np.zeros_like(kv)
    for row, index in enumerate(indices):
        keys = kv[index]
        scores = scale * q[row] @ keys.T
        top = scores.max(1)
        weights = np.exp(scores - top[:, None])
        total = weights.sum(1) + (0 if sink is None else np.exp(sink - top))
        p = weights / total[:, None]
        dp = g[row] @ keys[:, :V_DIM].T
        ds = scale * p * (dp - (p * dp).sum(1)[:, None])
        dq[row] = ds @ keys
        dk = ds.T @ q[row]
        dk[:, :V_DIM] += p.T @ g[row]
        np.add.at(dkv, index, dk)
    return dq, dkv


def measure(case: Case, timer: Timer, tiles: list[kernels.Tile | None], products: bool) -> list[dict]:
    arrays = case.arrays()
    given = {name: arrays[name] for name in ("q", "kv", "indices", "attn_sink")}
    forward = partial(jax.jit(partial(sparse_mla_prefill, softmax_scale=case.qk_dim**-0.5)), **given)
    forward_us = timer(Run(forward, "jax"))
    inputs, rows = saved(case, arrays), []
    if products:
        inputs = inputs._replace(indices=jnp.full_like(inputs.indices, -1))
    for tile, deterministic in ((tile, deterministic) for deterministic in (False, True) for tile in tiles):
        row = {"case": case.name, "kernel": kernel_of(case, tile, deterministic), "deterministic": deterministic}
        row["keys"] = not products
        static = {"softmax_scale": case.qk_dim**-0.5, "deterministic": deterministic, "tile": tile}
        try:
            row["errors"] = errors(case, tile, deterministic)
            total = timer(Run(partial(jax.jit(partial(gradient.by_kernel, **static)), inputs), "jax"))
        except Exception as error:  # a tile may not fit
            rows.append(row | {"failed": f"{type(error).__name__}: {error}"[:300]})
            print(rows[-1], flush=True)
            continue
        kernel = sum(x.duration for x in timer.operations if "backward_kernel" in x.name)
        row |= {"us": round(total, 1), "kernel_us": round(kernel, 1), "forward_us": round(forward_us, 1)}
        row |= {"tflops": round(case.flop / total / 1e6, 1), "kernel_tflops": round(case.flop / kernel / 1e6, 1)}
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    parser.add_argument("--tiles", nargs="*", default=[], help="all, or names; by default the one that calls take")
    parser.add_argument("--products", action="store_true", help="no key is valid: neither loads nor additions")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    names = TILES if args.tiles == ["all"] else args.tiles
    tiles, timer = [tile_of(name) for name in names] or [None], Timer(repeats=args.repeats)
    chosen = [case for case in CASES if case.name.startswith(tuple(args.only))]
    rows = [row for case in chosen for row in measure(case, timer, tiles, args.products)]
    write_json(results_folder() / "backward.json", environment() | {"op": "backward", "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

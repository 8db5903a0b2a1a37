"""The gradient of prefill beside other projects' kernels for it, and with a gradient that repeats to the bit.

    python -m benchmarks gradient [--tilelang FOLDER] [--only "V4 Flash" ...]

The peers are cudnn-frontend's `sparse_attention_backward_wrapper` (with the CuTe DSL) and TileLang's `sparse_mla_bwd`,
an example: FOLDER is `examples/deepseek_v32` of its repository. That one has dimension 576 alone, no sink, and a query
attends to the keys up to its own position; one case is so. Every side gets the same forward pass's output and lse.

Times by CUPTI with the L2 flushed: the whole backward pass (what is summed before the kernel, zeros, the kernel, the
cast of dkv), what the GPU works of it, our kernel alone, and the forward pass. FLOP are those of five products: S, dQ
and dK over qk_dim, dP and dV over 512. Errors, norm over norm, are those of 48 queries against float64, beside those of
attention in bfloat16 differentiated by JAX ("plain").
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.harness import Run, Timer, described, parser, run_cases, status
from jax_sparse_mla import sparse_mla_prefill
from jax_sparse_mla.attention import gradient

V_DIM = 512
CHECKED_QUERIES = 48
LOG2_E = math.log2(math.e)
OURS = {"ours": False, "ours, deterministic": True}


class Case(NamedTuple):
    name: str
    heads: int
    qk_dim: int
    topk: int
    kv_len: int
    q_len: int = 4096
    sink: bool = True
    causal: bool = False

    @property
    def flop(self) -> int:
        return 2 * self.q_len * self.heads * self.topk * (3 * self.qk_dim + 2 * V_DIM)

    def arrays(self, seed: int = 0) -> dict[str, jax.Array | None]:
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return jnp.asarray(rng.standard_normal(shape, np.float32))

        # Causal: the keys of query t are drawn from 0 to t, with repetitions.
        last = np.arange(1, self.q_len + 1)[:, None] if self.causal else self.kv_len
        indices = rng.integers(0, last, (self.q_len, self.topk), np.int32)
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
    Case("causal, 64 heads, d 576, 1,024 keys, kv 8,192", 64, 576, 1024, 8_192, sink=False, causal=True),
]


def saved(case: Case, arrays: dict) -> tuple:
    """The arrays that the forward pass saves, and the gradients of out and lse."""
    out, _, lse = forward(case, arrays)()
    q, kv, indices, sink, g_out = arrays.values()
    return q, kv, indices, None, sink, out, lse, g_out, jnp.zeros_like(lse)


def forward(case: Case, arrays: dict) -> Callable[[], tuple]:
    call = jax.jit(partial(sparse_mla_prefill, softmax_scale=case.qk_dim**-0.5))
    q, kv, indices, sink, _ = arrays.values()
    return lambda: call(q, kv, indices, attn_sink=sink)


def cudnn_frontend(case: Case, saved: tuple) -> Callable[[], tuple]:
    call = importlib.import_module("cudnn.deepseek_sparse_attention").sparse_attention_backward_wrapper
    q, kv, indices, _, sink, out, lse, g, _ = saved
    q, kv, indices, out, lse, g = map(torch.from_dlpack, (q, kv, indices, out, lse, g))
    sink = torch.full((case.heads,), -math.inf, device="cuda") if sink is None else torch.from_dlpack(sink)
    scale = case.qk_dim**-0.5

    def run() -> tuple:
        gradients = call(q, kv, out, g, lse, sink, indices, softmax_scale=scale)
        return gradients["dq"], gradients["dkv"]

    return run


def tilelang(folder: str, case: Case, saved: tuple) -> Callable[[], tuple]:
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


def peers(case: Case, folder: str | None, saved: tuple) -> dict[str, Callable[[], tuple] | str]:
    """By name what to call, or why it cannot be called."""
    makers = {"cudnn-frontend": cudnn_frontend}
    if folder and case.causal:
        makers["tilelang"] = partial(tilelang, folder)
    runs = {}
    for name, make in makers.items():
        try:
            run = make(case, saved)
            run()
            torch.cuda.synchronize()
            runs[name] = run
        except Exception as error:  # whatever keeps another project's kernel from running is the result
            runs[name] = described(error)
    return runs


def on_host(x) -> np.ndarray:
    return x.float().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float32)


def our_run(case: Case, saved: tuple, deterministic: bool) -> Callable[[], tuple]:
    call = partial(gradient.by_kernel, softmax_scale=case.qk_dim**-0.5, deterministic=deterministic)
    return partial(jax.jit(call), gradient.Arrays(*saved))


def in_bfloat16(q, kv, indices, sink, scale):
    """Attention as it is written in bfloat16, differentiated by JAX."""
    keys = kv[indices]
    scores = scale * jnp.einsum("thd,tkd->thk", q, keys, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(scores, -1)
    total = lse if sink is None else jnp.logaddexp(lse, sink)
    weights = jnp.exp(scores - total[..., None]).astype(q.dtype)
    return jnp.einsum("thk,tkd->thd", weights, keys[..., :V_DIM], preferred_element_type=jnp.float32).astype(q.dtype)


def plain_run(case: Case, saved: tuple) -> Callable[[], tuple]:
    """Attention in bfloat16, differentiated by JAX."""
    q, kv, indices, _, sink, _, _, g, _ = saved
    attend = partial(in_bfloat16, indices=indices, sink=sink, scale=case.qk_dim**-0.5)
    return lambda: jax.jit(lambda q, kv: jax.vjp(attend, q, kv)[1](g))(q, kv)


def sides(case: Case, folder: str | None, saved: tuple) -> dict[str, Callable[[], tuple] | str]:
    """By name what to call, or why it cannot be called."""
    ours = {name: our_run(case, saved, deterministic) for name, deterministic in OURS.items()}
    return ours | peers(case, folder, saved)


def errors(case: Case, folder: str | None) -> dict[str, dict[str, float] | str]:
    """The errors of each side's dq and dkv, in a smaller case."""
    small = case._replace(q_len=CHECKED_QUERIES, kv_len=min(case.kv_len, 4096))
    arrays = small.arrays(1)
    inputs = saved(small, arrays)
    wanted = exact(*arrays.values(), case.qk_dim**-0.5)
    runs = sides(small, folder, inputs) | {"plain": plain_run(small, inputs)}
    return {name: run if isinstance(run, str) else distances(run, wanted) for name, run in runs.items()}


def distances(run: Callable[[], tuple], wanted: Iterable[np.ndarray]) -> dict[str, float]:
    """How far a side's dq and dkv are from these."""
    return dict(zip(("dq", "dkv"), map(distance, map(on_host, run()), wanted)))


def distance(actual, wanted) -> float:
    """The norm of the difference over that of what is wanted, with three digits."""
    actual, wanted = (np.asarray(x, np.float64) for x in (actual, wanted))
    return float(f"{np.linalg.norm(actual - wanted) / np.linalg.norm(wanted):.2e}")


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


def measure(case: Case, folder: str | None, timer: Timer) -> dict:
    arrays = case.arrays()
    inputs = saved(case, arrays)
    runs = sides(case, folder, inputs)
    row: dict = {}
    if missing := {name: why for name, why in runs.items() if isinstance(why, str)}:
        row["not_measured"] = missing
    runs = {name: run for name, run in runs.items() if not isinstance(run, str)}
    ours = [on_host(x) for x in runs["ours"]()[:2]]
    row["apart"] = {name: distances(run, ours) for name, run in runs.items() if name not in OURS}
    row["errors"] = errors(case, folder)
    us, busy_us, kernel_us = {}, {}, {}
    for name, run in runs.items():
        us[name] = round(timer(Run(run, "jax" if name in OURS else "torch")), 1)
        busy_us[name] = round(timer.busy[0], 1)
        if name in OURS:
            kernels = [x for x in timer.operations if "backward_kernel" in x.name]
            kernel_us[name] = round(sum(x.end - x.start for x in kernels) / 1e3, 1)
    row["forward_us"] = round(timer(Run(forward(case, arrays), "jax")), 1)
    row |= {"us": us, "busy_us": busy_us, "kernel_us": kernel_us}
    row["tflops"] = {name: round(case.flop / x / 1e6, 1) for name, x in us.items()}
    row["peer_over_ours"] = {name: round(x / us["ours"], 3) for name, x in us.items() if name not in OURS}
    return row


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--tilelang", metavar="FOLDER", help="with TileLang's sparse_mla_bwd.py")
    made.add_argument("--repeats", type=int, default=7)
    args = made.parse_args()
    cases = [case for case in CASES if case.name.startswith(tuple(args.only))]
    if args.dry_run:
        print(*(case.name for case in cases), sep="\n")
        return 0
    timer = Timer(repeats=args.repeats)
    return status(run_cases("gradient", ((case.name, partial(measure, case, args.tilelang, timer)) for case in cases)))

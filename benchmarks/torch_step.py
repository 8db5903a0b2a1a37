"""A decode step of DeepSeek-V4-Flash's attention from torch beside the same step from JAX, on one GPU, in one process.

    python -m benchmarks torch_step                                      # 43 layers, four cases
    python -m benchmarks torch_step --layers 6 --decode 8x8192

JAX's is the program of `python -m benchmarks step`, torch's is captured in a CUDA graph: the same layers, tables, cache
bytes, rows and parameters, the same kernels. Both first take three steps from the same caches, and the greatest
difference of their outputs is printed, which is to be 0. Then each is timed twice and profiled after either time, so
that both have a second time behind a profiler; the second one counts. Per case and framework: wall time of a step among
those called back to back, the time in which the GPU is busy, from the first operation to the last, operations, and what
a step takes the host, of ten behind an idle GPU. The last columns are torch over JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re

import jax
import numpy as np
import torch
from sparse_mla_torch import to_torch
from sparse_mla_torch.layers import prepare_v4_step, v4_layer

from benchmarks.harness import busy, parser, run_cases, status
from benchmarks.stack import V4_FLASH_RATIOS, Stack, fill
from benchmarks.step import (
    PEER_DECODE,
    Program,
    Steps,
    TorchSteps,
    compile_all,
    decode_start,
    measure,
    timed_steps,
)
from jax_sparse_mla import ForwardBatch, ForwardMode
from jax_sparse_mla.layers import V4LayerCache

COLUMNS = ("wall_us", "gpu_us", "layers_us", "span_us", "operations", "host_us")
CHAIN = re.compile(r"^loop_add_fusion|CUDAFunctor_add<c10::BFloat16>")  # the additions, by XLA's name and by torch's
COMPARED_STEPS = 3


class TorchStep(TorchSteps):
    """A decode step of a stack on torch's tensors, and its replays."""

    def __init__(self, stack: Stack, device: str):
        self.stack, self.device, self.out = stack, device, None
        super().__init__(self.step, torch.zeros(stack.batch, dtype=torch.int32, device=device))
        self.rows, params, self.tables = jax.tree.map(
            self._copy, (stack.rows(stack.batch), stack.params(), stack.tables())
        )
        self.caches = jax.tree.map(self._empty, jax.eval_shape(stack.empty_caches))
        numbers = [stack.ratios[:i].count(ratio) for i, ratio in enumerate(stack.ratios)]
        self.layers = [(r, self.caches[r].layer(i), params[r].layer(i)) for r, i in zip(stack.ratios, numbers)]
        self.requests = torch.arange(stack.batch, dtype=torch.int32, device=device)

    def _empty(self, like: jax.ShapeDtypeStruct) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=getattr(torch, like.dtype.name), device=self.device)

    def _copy(self, array: jax.Array) -> torch.Tensor:
        return to_torch(array).to(self.device, copy=True)

    def step(self) -> torch.Tensor:
        """Takes a token of each request, adds one to the lengths, and attends in all layers."""
        slots, out = self.tables.req_to_token[self.requests, self.lens], None
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            max_seq_len=self.stack.max_len,
            req_pool_indices=self.requests,
            seq_lens=self.lens.add_(1),
            out_cache_loc=slots,
        )
        metadata = prepare_v4_step(self.stack.spec, batch, self.tables).metadata
        for ratio, cache, params in self.layers:
            rows = self.rows[ratio]
            if out is not None:  # no layer can run before the one below it, as in `benchmarks.stack`
                rows = dataclasses.replace(rows, kv=rows.kv + out[:, 0])
            out = v4_layer(cache, rows, params, batch, metadata, spec=self.stack.spec, ratio=ratio)
        return out

    def capture(self) -> TorchStep:
        self.step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX is here too
            self.out = self.step()
        self.replay = graph.replay
        return self

    def load(self, caches: dict[int, V4LayerCache]) -> None:
        """Takes over the bytes of JAX's caches, which may be donated afterwards."""
        for mine, theirs in zip(jax.tree.leaves(self.caches), jax.tree.leaves(caches), strict=True):
            mine.copy_(to_torch(theirs))
            self.wait()


def measure_case(program: Program, repeats: int) -> dict:
    """By framework, its times; and how far the outputs of the same steps are apart."""
    stack = program.stack
    of_torch = TorchStep(stack, "cuda").capture()
    caches = fill(stack.empty_caches())
    of_torch.load(caches)
    both = {"jax": Steps(program, caches), "torch": of_torch}
    start = decode_start(stack, staggered=False)
    for steps in both.values():
        steps.start(start)
        steps(COMPARED_STEPS)
    outs = np.asarray(both["jax"].state[2].astype(np.float32)), of_torch.out.float().cpu().numpy()
    row = {"difference": float(np.abs(outs[0] - outs[1]).max()), "largest": float(np.abs(outs[0]).max())}
    count = timed_steps(repeats)
    for _ in range(2):
        for name, steps in both.items():
            row[name], operations = measure(steps, start, count, repeats, rewind=False)
            row[name]["layers_us"] = busy(o for o in operations if not CHAIN.search(o.name)) / count / 1e3
    return row


def table(rows: list[dict]) -> str:
    ratios = COLUMNS[:4]
    lines = [
        f"{'case':12} {'from':6}" + "".join(f"{c:>12}" for c in COLUMNS) + "".join(f"{c + ' /':>11}" for c in ratios)
    ]
    for row in rows:
        for name in ("jax", "torch"):
            line = f"{row['case']:12} {name:6}" + "".join(f"{row[name][column]:12,.0f}" for column in COLUMNS)
            if name == "torch":
                line += "".join(f"{row['torch'][c] / row['jax'][c]:11.3f}" for c in ratios)
            lines.append(line)
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__, only=None)
    made.add_argument("--decode", default=PEER_DECODE, help="cases, BATCHxCONTEXT")
    made.add_argument("--layers", type=int, default=len(V4_FLASH_RATIOS), help="only the first layers")
    made.add_argument("--repeats", type=int, default=5)
    args = made.parse_args()
    ratios = V4_FLASH_RATIOS[: args.layers]
    sizes = {case: tuple(map(int, case.split("x"))) for case in args.decode.split(",")}
    programs = {c: Program(Stack(ratios=ratios, batch=n, max_len=k), "decode", n) for c, (n, k) in sizes.items()}
    if args.dry_run:
        print(*(program.name for program in programs.values()), sep="\n")
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # half of the memory is torch's
    compile_all(list(programs.values()), workers=4)
    cases = ((case, functools.partial(measure_case, program, args.repeats)) for case, program in programs.items())
    rows = run_cases("torch_step", cases)
    print(table([row for row in rows if "torch" in row]))
    return status(rows)

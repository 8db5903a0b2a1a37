"""Our SM90 decode kernels on each plan that a call may have, beside the plan that `decode_plan` makes of it.

    python -m benchmarks.decode_plans [--only "V4 C128, 128 heads" ...] [--tiles 16 32 64] [--most-rows 64]

The cases are those of `benchmarks.hopper_decode`; `many` is the persistent kernel, `64 x 6` the wide cluster kernel
with clusters of six thread blocks, `16 x 6` and `32 x 6` the cluster kernel. µs by CUPTI, the worse of emptying the
L2 by reading and by writing. The times in `jax_sparse_mla/attention/hopper/decode_plan.py` are fitted to such
numbers. Prints a line for each case and writes nothing.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest import mock

from benchmarks.hopper_decode import Case, Problem, cases, ours
from benchmarks.timing import Run, Timer
from jax_sparse_mla.attention.hopper import decode_plan
from jax_sparse_mla.device import DeviceInfo

WRONG = 5e-3  # more than twice what the roundings to bfloat16 explain


def clusters_of(case: Case, tiles: list[int], sm_count: int) -> Iterator[tuple[int, int]]:
    """Tiles and thread blocks of a cluster, the smallest for each number of blocks that a part may have."""
    shape = case.shape
    blocks = sum(-(-scope.topk // 64) for scope in (shape.cache, shape.extra) if scope is not None)
    for tile in tiles:
        if tile >= 2 * shape.heads and tile > 16:
            continue
        most = min(16, blocks, sm_count // (shape.batch * shape.q_len * -(-shape.heads // tile)))
        for parts in range(2, most + 1):
            if parts == 2 or -(-blocks // parts) < -(-blocks // (parts - 1)):
                yield tile, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names begin so")
    parser.add_argument("--tiles", nargs="*", type=int, choices=(16, 32, 64), default=[16, 32, 64])
    parser.add_argument("--most-rows", type=int, default=64)
    args = parser.parse_args()
    from sparse_mla_torch.attention import call_cache  # hopper_decode has put it on the path

    os.environ["JAX_SPARSE_MLA_DECODE_BACKEND"] = "hopper"
    timers, caches, sm_count = [Timer(7, "read"), Timer(7, "write")], {}, DeviceInfo.current().sm_count
    for case in cases():
        if not case.name.startswith(tuple(args.only)) or case.shape.batch * case.shape.q_len > args.most_rows:
            continue
        problem, found = Problem(case, caches), {}
        plans = {"chosen": decode_plan._time_in_clusters, "many": lambda *shape: decode_plan.NO_CLUSTERS}
        for cluster in clusters_of(case, args.tiles, sm_count):
            plans["{} x {}".format(*cluster)] = lambda *shape, fastest=(0.0, *cluster): fastest
        for name, time_in_clusters in plans.items():
            with mock.patch.object(decode_plan, "_time_in_clusters", time_in_clusters):
                call_cache.forget()
                run = Run(problem.call(ours, case.shape.heads), "torch")
                found[name] = max(timer.in_turn([run])[0] for timer in timers)
                if (error := problem.error(run.call()[0])) > WRONG:
                    raise SystemExit(f"{case.name}, {name}: the error against float64 is {error:.3g}")
        best = min(found, key=found.get)
        times = "  ".join(f"{name}: {us:.1f}" for name, us in found.items())
        print(f"{case.name:32} best {best}: {found['chosen'] / found[best]:.2f}   {times}", flush=True)
    call_cache.forget()


if __name__ == "__main__":
    main()

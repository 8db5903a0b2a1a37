"""FlashMLA's published test shapes on one backend, against float64; a row for each table.

    python -m benchmarks cases --backend triton [--limit 600] [--workers 8] [--budget-seconds 500]

The shapes are those of `tests/support/flashmla_cases.py` in an order of which every prefix covers all strata; data,
oracle and tolerances are in `tests/support/case_data.py`. A backend that torch can launch runs there, without a
compilation for every shape, and 60 shapes also through `jax.jit`; the others run through `jax.jit` only. `hopper` is
both: torch launches its decode, `jax.jit` all of its prefill. `--backend drop_in` is torch's `flash_mla`, by whatever
it picks. Worker processes share the GPU.
"""

from __future__ import annotations

import collections
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

from flashmla_cases import DecodeShape, Shape, decode_table, prefill_table, seed_of, stratified

from benchmarks.harness import described, parser, show, write

DROP_IN = "drop_in"  # no backend of JAX
JITTED_SHAPES = 60  # where torch launches the others
MEMORY_WAITS = (1, 2, 4)  # seconds between attempts of a case that finds too little memory
KEPT_BYTES = 3 << 30  # of torch's pool, between cases: the workers share one GPU's memory


class Task(NamedTuple):
    """A case: the shape, and how the kernel is called, "torch" or "jit"."""

    shape: Shape
    route: str

    @property
    def id(self) -> str:
        return f"{self.route}: {self.shape.id}"


def torch_launches(backend: str, shape: Shape) -> bool:
    return backend in ("triton", DROP_IN) or (backend == "hopper" and isinstance(shape, DecodeShape))


def tasks_of(backend: str, shapes: list[Shape]) -> Iterator[Task]:
    """All tasks of a backend, in the shapes' order.

    What torch launches it launches for all shapes; every fifth of the first 300 of these is also jitted. All others are
    jitted.
    """
    by_torch, by_jax_alone = [], []
    for shape in shapes:
        (by_torch if torch_launches(backend, shape) else by_jax_alone).append(shape)
    jitted = set(by_jax_alone)
    if backend != DROP_IN:
        jitted |= set(by_torch[: 5 * JITTED_SHAPES : 5])
    for shape in shapes:
        if torch_launches(backend, shape):
            yield Task(shape, "torch")
        if shape in jitted:
            yield Task(shape, "jit")


# --- one case -------------------------------------------------------------------------------------


def run_case(task: Task, backend: str, device: str) -> dict:
    """The ledger's entry. Runs in a worker; memory that other workers hold is waited for."""
    import torch

    started = time.perf_counter()
    for wait in (*MEMORY_WAITS, None):
        entry = _attempt(task, backend, device)
        if wait is None or "out of memory" not in entry.get("why", "").lower():
            break
        torch.cuda.empty_cache()
        time.sleep(wait)
    entry["seconds"] = round(time.perf_counter() - started, 3)
    if device == "cuda" and torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
    return entry


def _attempt(task: Task, backend: str, device: str) -> dict:
    import case_data

    entry = {"seed": seed_of(task.shape), "verdict": "failed"}
    try:
        call = case_data.make_call(task.shape, device)
        if backend == DROP_IN:
            results = through_the_drop_in(call)
        else:
            results = (_launched if task.route == "torch" else _jitted)(call, backend)
        entry["errors"], wrong = case_data.compare(call, results)
        if wrong:
            entry["why"] = "; ".join(wrong)
        else:
            entry["verdict"] = "passed"
    except Exception as error:
        entry["why"] = described(error)
    return entry


def _launched(call, backend: str):
    """The call as `flash_mla` makes it, by the backend that the environment names; results are poisoned before."""
    import torch
    from sparse_mla_torch.attention import decode, pages, prefill

    shape = call.q.shape[:-1]
    out = torch.full((*shape, 512), torch.nan, dtype=torch.bfloat16, device=call.q.device)
    stats = [torch.full(shape, torch.nan, device=call.q.device) for _ in range(2)]
    options = f"cases on {backend}", call.softmax_scale, -torch.inf
    names = ("JAX_SPARSE_MLA_DECODE_BACKEND", "JAX_SPARSE_MLA_PREFILL_BACKEND")
    with mock.patch.dict(os.environ, dict.fromkeys(names, backend)):
        if call.q.ndim == 3:
            (keys,) = call.keys
            tensors = call.q, keys.rows[:, None], keys.indices[:, None], keys.lengths, call.attn_sink
            return prefill.prepare(prefill.Options(*options), *tensors).run(*tensors, (out, *stats))
        tensors = [call.q]
        for keys in call.keys:
            tensors += [pages.pages_of(keys.data, keys.layout, keys.page_size), keys.indices, keys.lengths]
        tensors += [None] * (7 - len(tensors)) + [call.attn_sink]
        out, lse = decode.prepare(decode.Options(*options), *tensors).run(*tensors, None, (out, stats[0]))
    return out, lse.transpose(1, 2)


def through_the_drop_in(call):
    """Through `sparse_mla_torch.flash_mla`; its lse of an empty row, +inf, becomes ours."""
    import torch
    from sparse_mla_torch import flash_mla
    from sparse_mla_torch.attention.pages import pages_of

    first, *extra = call.keys
    if call.q.ndim == 3:
        indices, scale = first.indices[:, None], call.softmax_scale
        options = {"attn_sink": call.attn_sink, "topk_length": first.lengths}
        *others, lse = flash_mla.flash_mla_sparse_fwd(call.q, first.rows[:, None], indices, scale, **options)
    else:
        options = {"softmax_scale": call.softmax_scale, "attn_sink": call.attn_sink, "topk_length": first.lengths}
        for keys in extra:
            options["extra_k_cache"] = pages_of(keys.data, keys.layout, keys.page_size)
            options |= {"extra_indices_in_kvcache": keys.indices, "extra_topk_length": keys.lengths}
        cache, (meta, _) = pages_of(first.data, first.layout, first.page_size), flash_mla.get_mla_metadata()
        options["indices"] = first.indices
        *others, lse = flash_mla.flash_mla_with_kvcache(call.q, cache, None, None, 512, meta, **options)
        lse = lse.transpose(1, 2)
    if torch.isneginf(lse).any():
        raise AssertionError("an lse of -inf, which FlashMLA does not give")
    return *others, lse.masked_fill(torch.isposinf(lse), -torch.inf)


def _jitted(call, backend: str):
    """Through `jax.jit`, on the same memory."""
    import jax
    import torch
    from sparse_mla_torch import to_jax, to_torch

    if call.q.ndim == 3:
        (keys,) = call.keys
        arguments = {"q": call.q, "kv": keys.rows, "indices": keys.indices}
        arguments |= {"topk_length": keys.lengths, "attn_sink": call.attn_sink}
    else:
        arguments = _decode_arguments(call)
    arguments = jax.tree.map(to_jax, arguments)
    if call.q.is_cuda:
        torch.cuda.synchronize()  # XLA has a stream of its own
    phase = "prefill" if call.q.ndim == 3 else "decode"
    results = jax.block_until_ready(_jitted_attention(phase, backend, call.softmax_scale)(arguments))
    return tuple(to_torch(x) for x in results)


def _decode_arguments(call) -> dict:
    """The arguments of a decode call that are arrays."""
    from jax_sparse_mla import PagedKV

    arguments = {"q": call.q, "attn_sink": call.attn_sink}
    for prefix, keys in zip(("", "extra_"), call.keys):
        arguments[f"{prefix}cache"] = PagedKV(data=keys.data, layout=keys.layout, page_size=keys.page_size)
        arguments[f"{prefix}indices"] = keys.indices
        arguments[f"{prefix}topk_length"] = keys.lengths
    return arguments


@functools.cache
def _jitted_attention(phase: str, backend: str, softmax_scale: float) -> Callable:
    """One jitted function for all shapes of a phase and scale, which is a static argument."""
    import jax

    from jax_sparse_mla import sparse_mla_decode, sparse_mla_prefill

    attend = {"decode": sparse_mla_decode, "prefill": sparse_mla_prefill}[phase]
    return jax.jit(lambda arrays: attend(**arrays, softmax_scale=softmax_scale, backend=backend))


# --- the tables -----------------------------------------------------------------------------------


def row(backend: str, entries: dict[Task, dict]) -> dict:
    """Counts by route and table, and the largest cos_diff of each result."""
    tables, worst = {}, collections.defaultdict(float)
    for task, entry in entries.items():
        table = f"{task.route} {'-'.join(task.shape.id.split('-')[:2])}"
        tables.setdefault(table, {"passed": 0, "failed": 0})[entry["verdict"]] += 1
        for name, errors in entry.get("errors", {}).items():
            worst[name] = max(worst[name], errors["cos_diff"])
    counts = {verdict: sum(table[verdict] for table in tables.values()) for verdict in ("passed", "failed")}
    shapes = len({task.shape for task in entries})
    return {"case": backend, **counts, "shapes": shapes, "tables": tables, "worst_cos_diff": dict(worst)}


def main() -> int:
    made = parser(__doc__, "cases whose ids begin so")
    made.add_argument("--backend", default="triton", help="a backend of jax_sparse_mla, such as triton, or drop_in")
    made.add_argument("--budget-seconds", type=float, default=500)
    made.add_argument("--workers", type=int, default=8)
    made.add_argument("--limit", type=int, help="at most so many cases")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = made.parse_args()
    tasks = list(tasks_of(args.backend, stratified(decode_table() + prefill_table())))
    tasks = [task for task in tasks if task.shape.id.startswith(tuple(args.only))][: args.limit]
    if args.dry_run:
        print(*(task.id for task in tasks), sep="\n")
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")  # the workers share one GPU's memory
    from jax_sparse_mla.attention.machine import installed_for

    # Also builds a kernel that has to be built, before the workers want it.
    if args.backend not in (installed := installed_for("decode") | {DROP_IN}):
        print(f"{args.backend} is not installed here; these are: {', '.join(sorted(installed))}")
        return 2
    entries, deadline = {}, time.monotonic() + args.budget_seconds
    run = functools.partial(run_case, backend=args.backend, device=args.device)
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for task, entry in zip(tasks, pool.imap(run, tasks)):
            entries[task] = entry
            if entry["verdict"] == "failed":
                print(f"FAILED {task.id}\n       {entry['why']}", flush=True)
            if time.monotonic() > deadline:
                break
    counts = row(args.backend, entries)
    show(counts)
    covered, strata = ({task.shape.stratum for task in group} for group in (entries, tasks))
    print(f"{len(entries)} of {len(tasks)} cases, {len(covered)} of {len(strata)} strata")
    write(f"cases_{args.backend}", [counts])
    return int(counts["failed"] > 0)

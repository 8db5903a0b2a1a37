"""FlashMLA's published cases on one backend, as many as the time allows; a ledger remembers what passed.

    python -m benchmarks.cases --backend triton [--budget-seconds 100] [--workers 8] [--limit N]

The shapes are those of `tests/support/flashmla_cases.py` in an order of which every prefix covers all strata; data,
oracle and tolerances are in `benchmarks/case_data.py`. A backend that torch can launch runs there, without a
compilation for every shape, and 60 shapes also through `jax.jit`; the others run through `jax.jit` only. `hopper` is
both: torch launches its decode, `jax.jit` all of its prefill. `--backend drop_in` is torch's `flash_mla`, by whatever
it picks. Worker processes share the GPU; one that a case ends is replaced. What passed is not run again; what failed
is.
"""

from __future__ import annotations

import argparse
import collections
import functools
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from benchmarks.record import earlier, environment, results_folder, write_json

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "interop")]

from flashmla_cases import DecodeShape, Shape, decode_table, prefill_table, seed_of, stratified  # noqa: E402

DROP_IN = "drop_in"  # no backend of JAX
JITTED_SHAPES = 60  # where torch launches the others
CASE_SECONDS = 60  # after which a case counts as hung
SAVE_SECONDS = 10
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
    from benchmarks import case_data

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
        entry["why"] = f"{type(error).__name__}: {error}"[:600]
    return entry


def _launched(call, backend: str):
    """What `flash_mla` does with a call whose backend the environment names; results are poisoned before."""
    import torch
    from sparse_mla_torch.attention import decode, prefill

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
            tensors += [decode.pages_of(keys.data, keys.layout, keys.page_size), keys.indices, keys.lengths]
        tensors += [None] * (7 - len(tensors)) + [call.attn_sink]
        out, lse = decode.prepare(decode.Options(*options), *tensors).run(*tensors, None, (out, stats[0]))
    return out, lse.transpose(1, 2)


def through_the_drop_in(call):
    """Through `sparse_mla_torch.flash_mla`; its lse of an empty row, +inf, becomes ours."""
    import torch
    from sparse_mla_torch import flash_mla
    from sparse_mla_torch.attention.decode import pages_of

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


# --- workers --------------------------------------------------------------------------------------


def _serve(connection: multiprocessing.connection.Connection, backend: str, device: str) -> None:
    """Runs the tasks that come through the connection; says with each whether the GPU's context still works."""
    import torch

    while (task := connection.recv()) is not None:
        entry, usable = run_case(task, backend, device), True
        if device == "cuda" and entry["verdict"] == "failed":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                usable = False
        connection.send((entry, usable))


class Worker:
    """A process that runs one task at a time."""

    def __init__(self, backend: str, device: str):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, backend, device), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Task | None = None
        self.usable = True
        self._since = 0.0

    def give(self, task: Task) -> None:
        self.task, self._since = task, time.monotonic()
        self.connection.send(task)

    def take(self) -> tuple[Task, dict]:
        """The task's entry; of a process that ended or hangs, a failure."""
        task, self.task = self.task, None
        try:
            entry, self.usable = self.connection.recv()
            return task, entry
        except (EOFError, ConnectionError):
            self.usable = False
            self._process.join()
            why = f"the process ended with exit code {self._process.exitcode}"
            return task, {"seed": seed_of(task.shape), "verdict": "failed", "why": why}

    @property
    def hangs(self) -> bool:
        return self.task is not None and time.monotonic() - self._since > CASE_SECONDS

    def stop(self) -> None:
        """At once when it has a task."""
        if self.task is None and self.usable:
            self.connection.send(None)
            self._process.join(10)
        self.usable = False
        self._process.terminate()
        self._process.join()


def run_tasks(
    tasks: Iterator[Task], start_worker: Callable[[], Worker], workers: int, budget: float
) -> Iterator[tuple[Task, dict]]:
    """Results as they come; no task is begun after `budget` seconds."""
    deadline = time.monotonic() + budget
    pool: list[Worker] = []
    left = collections.deque(tasks)
    try:
        while True:
            if time.monotonic() > deadline:
                left.clear()
            for worker in [worker for worker in pool if not worker.usable]:
                worker.stop()
                pool.remove(worker)
            while len(pool) < min(workers, len(left) + sum(worker.task is not None for worker in pool)):
                pool.append(start_worker())
            for worker in pool:
                if worker.task is None and left:
                    worker.give(left.popleft())
            busy = [worker for worker in pool if worker.task]
            if not busy:
                return
            ready = multiprocessing.connection.wait([worker.connection for worker in busy], timeout=1)
            for worker in busy:
                if worker.connection in ready:
                    yield worker.take()
                elif worker.hangs:
                    task, worker.task = worker.task, None
                    worker.stop()
                    why = f"took more than {CASE_SECONDS} s"
                    yield task, {"seed": seed_of(task.shape), "verdict": "failed", "why": why}
    finally:
        for worker in pool:
            worker.stop()


# --- the ledger -----------------------------------------------------------------------------------


class Ledger:
    """What this code ran, by case id; other code begins anew."""

    def __init__(self, backend: str):
        self._name = f"cases_{backend}.json"
        self._environment = environment()
        self.entries: dict[str, dict] = earlier(self._name).get("cases", {})
        self._saved = time.monotonic()

    def passed(self, task: Task) -> bool:
        """With the data that it would have now."""
        entry = self.entries.get(task.id)
        return entry is not None and entry["verdict"] == "passed" and entry["seed"] == seed_of(task.shape)

    def add(self, task: Task, entry: dict) -> None:
        self.entries[task.id] = entry
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        write_json(results_folder() / self._name, self._environment | self.summary() | {"cases": self.entries})

    def summary(self) -> dict:
        """Counts by table and route."""
        counts: dict[str, dict[str, int]] = {}
        for name, entry in self.entries.items():
            route, _, shape = name.partition(": ")
            table = f"{route} {'-'.join(shape.split('-')[:2])}"
            count = counts.setdefault(table, {"passed": 0, "failed": 0})
            count[entry["verdict"]] += 1
        return {"tables": dict(sorted(counts.items()))}


def strata_covered(ledger: Ledger, tasks: list[Task]) -> tuple[int, int]:
    """How many of the strata have a case in the ledger, and how many there are."""
    ran = {task.shape.stratum for task in tasks if task.id in ledger.entries}
    return len(ran), len({task.shape.stratum for task in tasks})


def report(ledger: Ledger, tasks: list[Task]) -> None:
    for table, count in ledger.summary()["tables"].items():
        print(f"{table:28} {count['passed']:5} passed {count['failed']:5} failed")
    verdicts = collections.Counter(entry["verdict"] for entry in ledger.entries.values())
    covered, strata = strata_covered(ledger, tasks)
    print(
        f"{'in all':28} {verdicts['passed']:5} passed {verdicts['failed']:5} failed, of {len(tasks)} cases; "
        f"{covered} of {strata} strata"
    )
    failures = [(name, entry) for name, entry in ledger.entries.items() if entry["verdict"] == "failed"]
    for name, entry in failures[:12]:
        print(f"FAILED {name}\n       {entry['why'][:300]}")
    for phase in ("decode", "prefill"):
        shape_names = [n for n in ledger.entries if n.split(": ")[1].startswith(phase)]
        errors = [ledger.entries[n].get("errors", {}).get("out", {}).get("cos_diff", 0) for n in shape_names]
        if errors:
            print(f"{phase}: largest cos_diff of out {max(errors):.2g}")


def _installed() -> frozenset[str]:
    """All that can decode here; a kernel that has to be built is built before the workers want it."""
    from jax_sparse_mla.attention.machine import installed_for

    return installed_for("decode")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, help="a backend of jax_sparse_mla, such as triton, or drop_in")
    parser.add_argument("--budget-seconds", type=float, default=100)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit", type=int, help="at most so many cases in this run")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()

    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")  # the workers share one GPU's memory
    if args.backend not in (installed := _installed() | {DROP_IN}):
        print(f"{args.backend} is not installed here; these are: {', '.join(sorted(installed))}")
        return 2
    shapes = stratified(decode_table() + prefill_table())
    tasks = list(tasks_of(args.backend, shapes))
    ledger = Ledger(args.backend)
    left = [task for task in tasks if not ledger.passed(task)][: args.limit]
    started = time.monotonic()
    ran = 0
    for task, entry in run_tasks(
        iter(left), lambda: Worker(args.backend, args.device), args.workers, args.budget_seconds
    ):
        ledger.add(task, entry)
        ran += 1
    ledger.save()
    print(f"{args.backend}: {ran} cases run in {time.monotonic() - started:.0f} s")
    report(ledger, tasks)
    return int(any(entry["verdict"] == "failed" for entry in ledger.entries.values()))


if __name__ == "__main__":
    sys.exit(main())

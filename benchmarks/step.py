"""A decode step of DeepSeek-V4-Flash's attention, 43 layers in one jitted program, beside SGLang's own kernels.

    python -m benchmarks step                        # decode: ours, and SGLang's in a CUDA graph where it is installed
    python -m benchmarks step --ours                 # decode, chunked prefill and a long request, ours alone
    python -m benchmarks step --ours --models v4,v41 --prefill '' --long ''     # decode of V4.1-Flash beside V4-Flash
    python -m benchmarks step --ours --layers 6 --decode 8x8192,64x131072 --prefill '' --long '' --operations 30

A decode case is BATCHxCONTEXT, with --staggered each request one token shorter than the one before it (of 128); a
prefill case PROMPT/CHUNK tokens; the long request is prefilled in chunks and then decodes. After an @ stand options,
NAME=VALUE joined by &: XLA's, or environment variables that are read while a program is traced
(JAX_SPARSE_MLA_DECODE_BACKEND=triton). A program's caches are donated and it is called back to back.
Per case: wall and GPU time per step, the share of the time in which the GPU is busy and device operations per step
(CUPTI, through torch's profiler), how many of them came out of CUDA graphs, and the time that the host takes to
enqueue a step under `jax.transfer_guard("disallow")`. Per program: compile time, and whether the caches stay where they
are (bytes that the executable aliases, copies of a cache's shape in its HLO, buffer addresses).

SGLang's step, captured in a CUDA graph, needs sglang 0.5.23, which compiles its modules when they are first used,
sgl-flash-mla and sgl-deep-gemm. Both steps have the ratios, tables, cache bytes, rows and parameters of
`benchmarks.stack`, take their slots from the request table, add one to the lengths, make their metadata, and give each
layer's keys one head of the output below. A case of SGLang's is only timed after `benchmarks.sglang.guards` has
compared it with our reference; what fails has no times, and the exit code is 1. A step of theirs also normalises and
rotates the key and rotates the index query. Ours is measured in a process of its own, before.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Operation, busy, device_operations, parser, torch, write
from benchmarks.stack import V4_FLASH_RATIOS, Stack, fill
from benchmarks.stack_v41 import V41_FLASH, V41Stack
from jax_sparse_mla import DEEPSEEK_V4_FLASH
from jax_sparse_mla.models import v41_layers

DECODE = "1x8192,4x8192,8x8192,64x8192,1x131072,4x131072,8x131072,64x131072"
PEER_DECODE = "1x8192,8x8192,64x8192,64x131072"
PREFILL = "5602/8192,13302/8192,30352/8192,5602/32768,13302/32768,30352/32768"
LONG = "393216/8192"

# A decode case starts so many tokens before its bucket is full, and times runs of so many steps.
ROOM = 360
STEPS = 50
# Steps enqueued behind an idle device, so few that the host does not wait for the device; and how often. The first of
# them, before which the host has slept, takes two or three times as long as the later ones.
BURST, BURSTS = 10, 5


def decode_start(stack: Stack, staggered: bool) -> np.ndarray:
    """int32 `[batch]`, tokens of each request before the first step."""
    start = np.full(stack.batch, stack.max_len - ROOM, np.int32)
    return start - np.arange(stack.batch, dtype=np.int32) % 128 if staggered else start


# --- programs --------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Program:
    """A step of a stack, compiled for `num_rows` query rows. `options`: XLA's and, in capitals, the environment's."""

    stack: Stack
    phase: str  # "decode" or "prefill"
    num_rows: int
    options: dict = dataclasses.field(default_factory=dict)
    lowered: jax.stages.Lowered | None = None
    compiled: jax.stages.Compiled | None = None
    compile_seconds: float = 0.0  # tracing included

    @property
    def name(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{self.phase} {self.num_rows} rows, {self.stack.max_len} tokens{options}"

    def inputs(self) -> tuple:
        """`(rows, params, tables)`, what every call takes beside the state."""
        return self.stack.rows(self.num_rows), self.stack.params(), self.stack.tables()

    def state(self, caches: list, tokens: int | np.ndarray) -> tuple:
        """The donated argument of a call, and its result: caches, tokens of each request (done of the one), output."""
        count = jnp.full((self.stack.batch,) if self.phase == "decode" else (), tokens, jnp.int32)
        return caches, count, self.stack.empty_out(self.num_rows)

    def lower(self) -> Program:
        """Traces without allocating anything on the device."""
        step = self.stack.decode() if self.phase == "decode" else self.stack.prefill()
        shapes = jax.eval_shape(lambda: (self.state(self.stack.empty_caches(), 0), *self.inputs()))
        end = () if self.phase == "decode" else (jax.ShapeDtypeStruct((), jnp.int32),)
        start = time.perf_counter()
        with variables({name: str(value) for name, value in self.options.items() if name.isupper()}):
            self.lowered = step.lower(*shapes, *end)
        self.compile_seconds = time.perf_counter() - start
        return self

    def compile(self) -> Program:
        start = time.perf_counter()
        self.compiled = self.lowered.compile({k: v for k, v in self.options.items() if not k.isupper()})
        self.compile_seconds += time.perf_counter() - start
        return self

    @functools.cached_property
    def in_place(self) -> dict:
        """The executable's word on the caches; `copies` are instructions that copy an array of a cache's shape."""
        caches = jax.tree.leaves(jax.eval_shape(self.stack.empty_caches))
        return {
            "cache_bytes": sum(x.size * x.dtype.itemsize for x in caches),
            "alias_bytes": self.compiled.memory_analysis().alias_size_in_bytes,
            "temp_bytes": self.compiled.memory_analysis().temp_size_in_bytes,
            "copies": count_copies(self.compiled.as_text(), caches),
        }

    def operation_names(self) -> dict[str, str]:
        """The JAX operation that each kernel of XLA's comes from, by the kernel's name."""
        pairs = re.findall(r'%?([\w.-]+) = .*?op_name="([^"]*)"', self.compiled.as_text())
        return {re.sub(r"[.-]", "_", name): op_name for name, op_name in pairs}


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Environment variables that hold inside; no other is touched, since threads may be compiling."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def count_copies(hlo: str, arrays: list[jax.ShapeDtypeStruct]) -> int:
    """Instructions that copy an array of one of these shapes; what an asynchronous one starts is a tuple."""
    short = {"uint8": "u8", "float32": "f32"}
    shapes = {f"{short[x.dtype.name]}[{','.join(map(str, x.shape))}]" for x in arrays}
    pattern = "|".join(re.escape(shape) for shape in shapes)
    return len(re.findall(rf"= \(?(?:{pattern})[^=\n]* copy(?:-start)?\(", hlo))


# --- time ------------------------------------------------------------------------------------------


def from_graphs(operations: list[Operation]) -> list[Operation]:
    """Operations that a CUDA graph launched: they share their launch with others."""
    launches = collections.Counter(operation.launch for operation in operations)
    return [operation for operation in operations if launches[operation.launch] > 1]


def summary(operations: list[Operation], steps: int) -> dict:
    """Per step; the share of the time in which the GPU works, and that of the operations out of CUDA graphs."""
    span = max(operation.end for operation in operations) - operations[0].start
    return {
        "gpu_us": busy(operations) / steps / 1e3,
        "span_us": span / steps / 1e3,
        "gpu_busy": busy(operations) / span,
        "operations": len(operations) / steps,
        "from_graphs": len(from_graphs(operations)) / len(operations),
    }


class Kind(NamedTuple):
    """Operations of one kernel, XLA's also of one JAX operation; µs and counts per step."""

    us: float
    count: float
    captured: float
    name: str


def by_kind(operations: list[Operation], steps: int, names: dict[str, str]) -> list[Kind]:
    """The kinds of operations, those that take longest first; `names` as `Program.operation_names`."""
    captured = set(from_graphs(operations))
    totals = collections.defaultdict(lambda: [0, 0, 0])
    for operation in operations:
        name = operation.name
        if name in names:
            name = f"{re.sub(r'_[0-9_]+$', '', name)}: {names[name]}"
        totals[name][0] += operation.end - operation.start
        totals[name][1] += 1
        totals[name][2] += operation in captured
    kinds = [Kind(ns / steps / 1e3, n / steps, k / steps, name) for name, (ns, n, k) in totals.items()]
    return sorted(kinds, reverse=True)


@functools.partial(jax.jit, donate_argnums=(0, 1), keep_unused=True)
def _restarted(count: jax.Array, out: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`count` and `out` as `Program.state` makes them, in the same buffers."""
    return jnp.broadcast_to(tokens, count.shape).astype(count.dtype), jnp.zeros_like(out)


class Steps:
    """Calls of a program, each with the state that the last one returned."""

    def __init__(self, program: Program, caches: list, *end: jax.Array):
        self.program, self.state, self.end = program, (caches,), end
        self.inputs = program.inputs()
        self.addresses = self._addresses()

    @property
    def caches(self) -> list:
        return self.state[0]

    def start(self, tokens: int | np.ndarray) -> None:
        """The next call finds so many tokens done; the caches stay as they are, and from the second start on
        every buffer stays where it is: XLA records a CUDA graph anew for one that moved."""
        caches, *count_and_out = self.state
        if not count_and_out:
            self.state = self.program.state(caches, tokens)
        else:
            self.state = (caches, *_restarted(*count_and_out, tokens))
        jax.block_until_ready(self.state)

    def __call__(self, steps: int) -> tuple[float, float]:
        """Seconds until all calls are enqueued, and until their results are there. Nothing may wait for the device
        or copy between it and the host in between."""
        call, state = self.program.compiled, self.state
        start = time.perf_counter()
        with jax.transfer_guard("disallow"):
            for _ in range(steps):
                state = call(state, *self.inputs, *self.end)
        enqueued = time.perf_counter()
        self.state = jax.block_until_ready(state)
        return enqueued - start, time.perf_counter() - start

    def moved(self) -> bool:
        """Whether a cache is at another address than at first."""
        return self.addresses != self._addresses()

    def _addresses(self) -> list[int]:
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(self.caches)]


class TorchSteps:
    """Calls of a step by torch, as `Steps` are those of a program; `replay()` adds one to the lengths `lens`."""

    def __init__(self, replay: Callable[[], object], lens: torch.Tensor):
        self.replay, self.lens = replay, lens

    def start(self, tokens: int | np.ndarray) -> None:
        self.lens.copy_(torch.from_numpy(np.broadcast_to(tokens, self.lens.shape).astype(np.int32)))
        self.wait()

    def __call__(self, steps: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(steps):
            self.replay()
        enqueued = time.perf_counter()
        self.wait()
        return enqueued - start, time.perf_counter() - start

    def wait(self) -> None:
        if self.lens.is_cuda:
            torch.cuda.synchronize()

    def moved(self) -> bool:
        return False


def timed_steps(repeats: int) -> int:
    """How many steps a run has, so that `measure` of so many runs ends before the bucket is full."""
    return min((ROOM - 1 - BURSTS * BURST) // (repeats + 1), STEPS)


def measure(
    steps: Steps | TorchSteps, start: int | np.ndarray, count: int, repeats: int, *, rewind: bool
) -> tuple[dict, list[Operation]]:
    """Times `repeats` runs of `count` steps each and profiles one more; every run begins at `start` if `rewind`."""
    steps.start(start)
    steps(1)

    def run(count: int) -> tuple[float, float]:
        if rewind:
            steps.start(start)
        return steps(count)

    wall = statistics.median(run(count)[1] for _ in range(repeats))
    burst = min(count, BURST)
    host = statistics.median(run(burst)[0] for _ in range(BURSTS))
    if rewind:
        steps.start(start)
    operations = device_operations(lambda: steps(count))
    return {
        "steps": count,
        "wall_us": wall / count * 1e6,
        "host_us": host / burst * 1e6,
        "moved": steps.moved(),
        **summary(operations, count),
    }, operations


# --- cases -----------------------------------------------------------------------------------------


def decode_case(program: Program, repeats: int, staggered: bool) -> tuple[dict, list[Operation]]:
    caches = fill(program.stack.empty_caches())
    start = decode_start(program.stack, staggered)
    return measure(Steps(program, caches), start, timed_steps(repeats), repeats, rewind=False)


def prefill_case(program: Program, prompt: int, repeats: int) -> tuple[dict, list[Operation]]:
    steps = Steps(program, program.stack.empty_caches(), jnp.int32(prompt))
    return measure(steps, 0, -(-prompt // program.num_rows), repeats, rewind=True)


def long_case(prefill: Program, decode: Program, prompt: int, record) -> None:
    """One request: its whole prompt in chunks, the last of them profiled, then decode steps on the same caches."""
    steps = Steps(prefill, prefill.stack.empty_caches(), jnp.int32(prompt))
    steps.start(0)
    chunks = -(-prompt // prefill.num_rows)
    _, wall = steps(chunks - 1)
    operations = device_operations(lambda: steps(1))
    report = {
        "steps": chunks - 1,
        "wall_us": wall / (chunks - 1) * 1e6,
        "moved": steps.moved(),
        "last_chunk": summary(operations, 1),
    }
    record(f"long: prefill {prompt} in {prefill.num_rows}", prefill, (report, operations), profiled=1)
    record(f"long: decode after {prompt}", decode, measure(Steps(decode, steps.caches), prompt, 8, 3, rewind=False))


def programs(arguments) -> tuple[dict, dict, dict]:
    """The programs of the decode, prefill and long cases, by case."""
    make = functools.partial(Stack, spec=DEEPSEEK_V4_FLASH, ratios=V4_FLASH_RATIOS[: arguments.layers])
    decode = {}
    for case in filter(None, arguments.decode.split(",")):
        sizes, _, options = case.partition("@")
        batch, context = map(int, sizes.split("x"))
        for model in arguments.models.split(","):
            made, shape = make, {"batch": batch, "max_len": context}
            if model == "v41":
                made, shape = V41Stack, shape | {"layers": v41_layers(V41_FLASH)[: arguments.layers]}
            name = f"{case}, V4.1" if model == "v41" else case
            decode[name] = Program(made(**shape), "decode", batch, options=xla_options(options))
    prefill, chunks = {}, {}
    cases = [tuple(map(int, case.split("/"))) for case in filter(None, arguments.prefill.split(","))]
    longest = max((-(-prompt // 256) * 256 for prompt, _ in cases), default=0)
    for prompt, chunk in cases:
        stack = make(max_len=longest, window_pages=longest // 256)
        prefill[prompt, chunk] = chunks.setdefault(chunk, Program(stack, "prefill", chunk))
    long = {}
    if arguments.long:
        prompt, chunk = map(int, arguments.long.split("/"))
        stack = make(max_len=prompt + 256, window_pages=prompt // 256 + 1)
        long[prompt] = Program(stack, "prefill", chunk), Program(stack, "decode", 1)
    return decode, prefill, long


def xla_options(text: str) -> dict:
    def value(text: str) -> int | bool | str:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    return {name: value(word) for name, _, word in (option.partition("=") for option in text.split("&")) if name}


def compile_all(todo: list[Program], workers: int) -> None:
    """Several at once: each is lowered here and compiled in a thread, while the next one is lowered."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(Program.compile, program.lower()) for program in todo]:
            program = future.result()
            print(f"compiled {program.name}: {program.compile_seconds:.1f} s {program.in_place}", flush=True)


# --- report ----------------------------------------------------------------------------------------

COLUMNS = ("steps", "wall_us", "gpu_us", "gpu_busy", "operations", "from_graphs", "host_us", "moved")


def table(results: dict[str, dict]) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, bool) or value is None:
            return {True: "yes", False: "no", None: "–"}[value]
        return f"{value:.3f}" if isinstance(value, float) and value <= 1 else f"{value:,.0f}"

    width = max(len(name) for name in results)
    lines = [f"{'case':{width}}" + "".join(f"{column:>12}" for column in COLUMNS)]
    for name, result in results.items():
        lines.append(f"{name:{width}}" + "".join(f"{cell(result.get(column)):>12}" for column in COLUMNS))
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__, only=None)
    made.add_argument("--ours", action="store_true", help="ours alone")
    made.add_argument("--layers", type=int, default=len(V4_FLASH_RATIOS), help="only the first layers")
    made.add_argument("--decode", help="cases, BATCHxCONTEXT")
    made.add_argument("--models", default="v4", help="of the decode cases with --ours, v4 and v41")
    made.add_argument("--staggered", action="store_true", help="decode with lengths that differ")
    made.add_argument("--prefill", default=PREFILL, help="cases, PROMPT/CHUNK, with --ours")
    made.add_argument("--long", default=LONG, help="a case, PROMPT/CHUNK, with --ours")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--workers", type=int, default=4, help="programs compiled at once; 1 for their compile times")
    made.add_argument("--operations", type=int, default=0, help="list so many kinds of operations per case")
    args = made.parse_args()
    if args.decode is None:
        args.decode = DECODE if args.ours else PEER_DECODE
    if not args.ours:
        args.prefill = args.long = ""
    if args.dry_run:
        decode, prefill, long = programs(args)
        names = [f"decode {case}" for case in decode] + [f"prefill {n} in {chunk}" for n, chunk in prefill]
        print(*names, *(f"long: {prompt}" for prompt in long), sep="\n")
        return 0
    if args.ours:
        return measure_ours(args)
    from benchmarks.sglang import compare

    return compare.main(args)


def measure_ours(args) -> int:
    decode, prefill, long = programs(args)
    results, used = {}, []

    def prepare(todo):
        used.extend(todo := list(dict.fromkeys(todo)))
        compile_all(todo, args.workers)

    def record(name, program, measured, profiled=None):
        results[name], operations = measured
        print(table({name: results[name]}).splitlines()[-1], flush=True)
        steps = profiled or results[name]["steps"]
        kinds = by_kind(operations, steps, program.operation_names())[: args.operations]
        if kinds:
            results[name]["kinds"] = [(kind.name[:120], kind.us, kind.count) for kind in kinds]
        for kind in kinds:
            print(f"    {kind.us:9.1f} us {kind.count:7.1f} x {kind.captured:7.1f} in graphs  {kind.name[:150]}")
        of_programs = {p.name: {"compile_seconds": p.compile_seconds, **p.in_place} for p in used}
        write("step_ours", [{"case": case, **row} for case, row in results.items()], programs=of_programs)

    prepare(decode.values())
    for case, program in decode.items():
        name = f"decode {case}{', staggered' * args.staggered}"
        record(name, program, decode_case(program, args.repeats, args.staggered))
    prepare(prefill.values())
    for (prompt, chunk), program in prefill.items():
        record(f"prefill {prompt} in {chunk}", program, prefill_case(program, prompt, args.repeats))
    for prompt, pair in long.items():
        prepare(pair)
        long_case(*pair, prompt, record)
    print(table(results))
    return 0

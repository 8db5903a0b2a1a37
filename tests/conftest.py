"""What all tests share: which are skipped where, and the cache of compiled programs."""

import atexit
import collections
import enum
import functools
import gc
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading

if sys.dont_write_bytecode:
    # Else each process compiles the sources of JAX, torch and transformers, for many seconds: all share a folder.
    sys.dont_write_bytecode, sys.pycache_prefix = False, tempfile.mkdtemp(prefix="bytecode_")
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

_torch = importlib.util.find_spec("torch")
if _torch is not None and not os.path.exists(importlib.util.cache_from_source(_torch.origin)):
    # While this process imports JAX, another one compiles for all of xdist's workers what each would compile itself.
    _command = [sys.executable, "-c", "import torch._dynamo, transformers, triton"]
    atexit.register(subprocess.Popen(_command, stderr=subprocess.DEVNULL).kill)

# What programs free stays with the process for the next one, instead of being mapped anew page by page; glibc reads
# these when xdist's workers and the processes of tests start.
for _name, _bytes in (("MMAP_THRESHOLD", 2**28), ("TRIM_THRESHOLD", 2**30), ("TOP_PAD", 2**24)):
    os.environ.setdefault(f"MALLOC_{_name}_", str(_bytes))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads wait for each other's products by spinning
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and other workers allocate on the same GPU
gc.set_threshold(200_000, 50, 1000)  # a collection of all that JAX keeps takes seconds, and finds little

# `GPUS_OF_TESTS=0,1,2,3 pytest -n 8`: tests use the first GPU that they see, and some a second. So xdist's workers
# begin at different ones. Each sees no more than two, for it takes memory of every GPU that it sees.
_worker, _gpus = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("GPUS_OF_TESTS", "").split(",")
if len(_gpus) > 1:
    _first = int(_worker.removeprefix("gw")) % len(_gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((_gpus[_first:] + _gpus[:_first])[:2])

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax._src.array import ArrayImpl
from jax._src.interpreters import mlir
from jax._src.lax import lax
from jax._src.lib.mlir import ir
from jax._src.literals import TypedNdArray

# Failing assertions of these say as much as those of test modules do.
pytest.register_assert_rewrite(
    "attention_conformance", "compressor_engine", "metadata_cases", "support.serving_models", "topk_oracle"
)

HAS_OLDER_EMITTERS = jax.__version_info__ < (0, 11)  # XLA ends the process for a flag that it does not know

# One LLVM module a program: by default XLA splits it for the compiler's threads, which two cores do not have.
# Its older emitters: see Compiling.QUICK. The processes that tests start compile so too, and share the programs.
_FLAGS = "--xla_cpu_parallel_codegen_split_count=1" + " --xla_cpu_use_fusion_emitters=false" * HAS_OLDER_EMITTERS
os.environ.setdefault("XLA_FLAGS", _FLAGS)

ON_GPU = jax.default_backend() == "gpu"
if not ON_GPU:
    # Triton kernels run in its interpreter, which reads this when a kernel is defined: before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    if not ON_GPU:
        share_compiled_programs(config)
        give_options_to_all_programs()
        keep_dialects()
        make_arrays_without_programs()
        Compiling.QUICK.choose()


@pytest.fixture(autouse=True, scope="module")
def torch_without_slow_products(request):
    """Some CPUs take minutes for transformers' bfloat16 products. Modules that import no torch do not wait for it."""
    used = "torch" in vars(request.module) or "transformers" in sys.modules
    if not used or importlib.util.find_spec("torch") is None:
        yield
        return
    from sparse_mla_torch.cpu_matmul import quick_products

    with quick_products():
        yield


class Compiling(enum.Enum):
    """How XLA compiles CPU programs: a test module names one, as in `COMPILING = "PLAIN"`; QUICK is the default."""

    QUICK = "its older emitters: a third of the compiler's time, programs that run several times as long"
    PLAIN = "without the passes that only make programs faster"
    OPTIMISED = "for programs that compute for longer than they compile"

    def choose(self) -> None:
        optimised = self is Compiling.OPTIMISED
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not optimised))  # for the processes that tests start
        jax.config.update("jax_disable_most_optimizations", not optimised)
        options_of_all_programs.clear()
        if self is not Compiling.QUICK and HAS_OLDER_EMITTERS:
            options_of_all_programs["xla_cpu_use_fusion_emitters"] = True


options_of_all_programs = {}


def give_options_to_all_programs() -> None:
    """XLA reads its flags once a process, and JAX takes options for one `jax.jit` at a time."""
    get_options = compiler.get_compile_options

    @functools.wraps(get_options)
    def with_ours(*args, env_options_overrides=None, **kwargs):
        options = options_of_all_programs | (env_options_overrides or {})
        return get_options(*args, env_options_overrides=options, **kwargs)

    compiler.get_compile_options = with_ours


def keep_dialects() -> None:
    """JAX loads all of MLIR's dialects anew for each program that it lowers; here a thread does for each hundredth."""
    make_context, kept = mlir.make_ir_context, threading.local()

    @functools.wraps(make_context)
    def make_or_reuse():
        if ir.Context.current is not None:
            return make_context()  # what is lowered within another lowering would become a part of its program
        if getattr(kept, "uses", 100) == 100:
            kept.context, kept.uses = make_context(), 0
        kept.uses += 1
        return kept.context

    mlir.make_ir_context = make_or_reuse


def make_arrays_without_programs() -> None:
    """Outside `jax.jit`, JAX compiles a program for each shape of arrays that it takes from NumPy or fills."""
    if not hasattr(lax, "stage_p"):
        return
    stage, broadcast = lax.stage_p.impl, lax.broadcast_in_dim_p.impl
    names = "bool", "uint8", "int8", "int32", "uint32", "float32", jnp.bfloat16
    dtypes = [np.dtype(name) for name in names]  # of the same width with and without 64-bit types

    def plain(x, kind):
        return type(x) is kind and x.dtype in dtypes and not x.weak_type and jax.sharding.get_abstract_mesh().empty

    def take(x):
        return jax.device_put(np.array(x)) if plain(x, TypedNdArray) else stage(x)

    def fill(x, *, shape, **how):
        if plain(x, ArrayImpl) and x.ndim == 0 and math.prod(shape) < 2**20 and not x.committed:
            return jax.device_put(np.full(shape, np.asarray(x)))
        return broadcast(x, shape=shape, **how)

    lax.stage_p.def_impl(take)
    lax.broadcast_in_dim_p.def_impl(fill)


@pytest.fixture(autouse=True, scope="module")
def compiling_of_the_module(request):
    if not ON_GPU:
        Compiling[getattr(request.module, "COMPILING", "QUICK")].choose()


def share_compiled_programs(config):
    """One folder of compiled programs for all processes of a run: xdist's workers, and what tests start."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="jax_programs_")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"  # a small program is compiled as fast as kept
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_finish():
    gc.freeze()  # modules stay: no collection looks at them


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked `long`
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()}"))
        if item.get_closest_marker("no_gpu") and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="is done once, where there is no GPU"))
        if item.get_closest_marker("cpu") and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs JAX's CPU backend: JAX_PLATFORMS=cpu"))
    # xdist's workers begin with a half of the tests each. The serving engine's, which share costly fixtures, come
    # first: what is left at the end, and goes to the worker that is idle, is cheap.
    items.sort(key=lambda item: item.path.parent.name != "serving")
    if not any("::" in argument for argument in config.args):  # tests that are named on the command line are meant
        mark_other_cases_long(items)


def mark_other_cases_long(items: list[pytest.Item]) -> None:
    """`always(4)`: four cases of a test are in every run; `always("a", "b")`: those with these ids."""
    tests = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("always") and not item.get_closest_marker("long"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for test, cases in tests.items():
        chosen = cases[0].get_closest_marker("always").args
        if isinstance(chosen[0], int):
            kept = varied([case for case in cases if not case.get_closest_marker("skip")], chosen[0])
        else:
            kept = [case for case in cases if case.callspec.id in chosen]
            if len(kept) != len(chosen):
                raise pytest.UsageError(f"{test} has no cases {chosen}")
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.long)


def varied(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the cases, each with the most parameters that none before it has; of equal ones, spread over all."""
    order = sorted(range(len(cases)), key=lambda i: i * 0.618 % 1)
    left, kept, seen = [cases[i] for i in order], [], set()
    while left and len(kept) < count:
        best = max(left, key=lambda case: len(case.callspec.indices.items() - seen))
        seen |= best.callspec.indices.items()
        left.remove(best)
        kept.append(best)
    return kept

"""What all tests share: which are skipped where, the cache of compiled programs, and the record of a run."""

import atexit
import os
import shutil
import sys
import tempfile

if sys.dont_write_bytecode:
    # Else each process compiles the sources of JAX, torch and transformers, for many seconds: all share a folder.
    sys.dont_write_bytecode, sys.pycache_prefix = False, tempfile.mkdtemp(prefix="bytecode_")
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

import jax
import pytest
from run_record import RunRecord

# Failing assertions of these say as much as those of test modules do.
pytest.register_assert_rewrite("attention_conformance", "compressor_engine", "metadata_cases", "topk_oracle")

pytest_plugins = ["pytester"]

# One LLVM module a program: by default XLA splits it for the compiler's threads, which two cores do not have.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")

ON_GPU = jax.default_backend() == "gpu"
if not ON_GPU:
    # Triton kernels run in its interpreter, which reads this when a kernel is defined: before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write which tests passed, failed and were skipped, and why")


def pytest_configure(config):
    config.pluginmanager.register(RunRecord(config, jax.devices()[0].device_kind))
    if not ON_GPU:
        share_compiled_programs(config)
        compile_quickly(True)


def compile_quickly(quickly: bool) -> None:
    """XLA's CPU programs without the passes that only make them faster: compiling them is half the time of a run."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))  # for the processes that tests start
    jax.config.update("jax_disable_most_optimizations", quickly)


@pytest.fixture(autouse=True, scope="module")
def optimised_where_computing_takes_longer(request):
    """Modules that say `OPTIMISED = True` compute for longer than they compile."""
    if not ON_GPU and getattr(request.module, "OPTIMISED", False):
        compile_quickly(False)
        yield
        compile_quickly(True)
    else:
        yield


def share_compiled_programs(config):
    """One folder of compiled programs for all processes of a run: xdist's workers, and what tests start."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="jax_programs_")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()}"))
        if "no_gpu" in item.keywords and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="is done once, where there is no GPU"))
        if "cpu" in item.keywords and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs JAX's CPU backend: JAX_PLATFORMS=cpu"))

"""The part of SGLang's wheel that the step needs, and its CUDA modules, compiled ahead for SM90.

SGLang compiles its modules when they are first used, and looks for what it has compiled under keys that hold the
versions of torch and of the host's compiler: compiled on one machine, a module would be compiled again on the next. So
they are kept here under a key of their own, and `use_compiled` lets SGLang's loader find them. What is missing there or
cannot be loaded is compiled as ever.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch

from benchmarks import peers

MODULES = ("topk", "store", "rope", "compress", "lengths", "pages", "gather", "index keys", "workspace")
_KEPT = (
    "sglang/kernels/jit/utils/",
    "sglang/kernels/jit/include/",
    "sglang/kernels/jit/csrc/deepseek_v4/",
    "sglang/kernels/jit/csrc/occupancy/",
)
_KEPT_FLAT = ("sglang/kernels/ops/attention/dsv4/",)
_KEPT_FILES = (
    "sglang/kernels/ops/kvcache/dsa_index_k_cache.py",
    "sglang/srt/environ.py",
    "sglang/srt/layers/attention/dsv4/sparse_prefill_utils.py",
)

# Clusters of 8 and of 16 thread blocks that an H200 holds at a time, by which SGLang routes its top-k: of 8 groups of
# multiprocessors all, 7 or 6 have room for a cluster of 16. Another pair is compiled where it is met.
CLUSTERS = ((30, 7), (32, 8), (28, 6))


def modules() -> dict[str, ModuleType]:
    """SGLang's modules by the names of `MODULES`; NotMeasured where one cannot be imported."""
    return {name: peers.find(f"sglang {name}") for name in MODULES}


def kept(names: list[str]) -> list[str]:
    """Those of a wheel's files that the step imports or compiles."""

    def needed(name: str) -> bool:
        flat = any(name.startswith(p) and "/" not in name.removeprefix(p) and name.endswith(".py") for p in _KEPT_FLAT)
        return flat or name.startswith(_KEPT) or name in _KEPT_FILES or name.endswith(".dist-info/METADATA")

    return [name for name in names if needed(name) and not name.endswith("/")]


def prepare(folder: Path, wheel: Path) -> list[Path]:
    """Makes the folder: SGLang's files, `jit/` with its compiled modules. Needs nvcc, and no GPU.

    Returns:
      The compiled modules.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, kept(archive.namelist()))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["SGLANG_JIT_CACHE_DIR"] = cache
        found = modules()
        arch = importlib.import_module("sglang.kernels.jit.utils.arch")
        with arch.override_jit_cuda_arch(9, 0):
            return [path for build in _builds(found) for path in _compile(build, folder)]


def use_compiled(folder: Path) -> list[str]:
    """Lets SGLang's loader take modules from the folder.

    Returns:
      A list to which the names of those are appended that it asks for and does not find there.
    """
    loader = importlib.import_module("sglang.kernels.jit.utils.compile.loader")
    default, missing = loader._find_prebuilt, []

    def find(*, spec, scope) -> Path | None:
        if (path := _path(folder, spec)).is_file():
            return path
        missing.append(spec.module_name)
        return default(spec=spec, scope=scope)

    loader._find_prebuilt = find
    return missing


def _builds(found: dict[str, ModuleType]) -> Iterator[Callable[[], object]]:
    """What loads each module that the step uses, with the arguments that its tensors lead to."""
    rope, compress, bf16, fp32 = found["rope"], found["compress"], torch.bfloat16, torch.float32
    occupancy = importlib.import_module("sglang.kernels.jit.utils.occupancy")
    layout = importlib.import_module("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout.V4
    yield lambda: rope._jit_main_k_norm_rope_flashmla_module(bf16, 512, 64, 256, layout)
    yield lambda: rope._jit_main_q_norm_rope_module(bf16, 512, 64, True)
    yield lambda: rope._jit_main_q_indexer_rope_hadamard_quant_module(bf16)
    yield rope._jit_fused_rope_module
    for head_dim, ratio in ((512, 4), (128, 4), (512, 128)):
        yield lambda d=head_dim, r=ratio: compress._jit_compress_module(d, fp32, fp32, fp32, r)
    for head_dim, page_size in ((512, 64), (128, 64), (512, 2)):
        yield lambda d=head_dim, p=page_size: compress._jit_compress_norm_rope_module(
            fp32, d, 64, p, False, layout, False
        )
    yield compress._jit_compress_plan_module
    yield found["store"]._jit_metadata_module
    yield occupancy._jit_probe_module
    for clusters in CLUSTERS:
        yield lambda c=clusters: _topk(found["topk"], occupancy, c)


def _topk(topk: ModuleType, occupancy: ModuleType, clusters: tuple[int, int]) -> object:
    """The top-k's module as a GPU that holds so many clusters of 8 and of 16 asks for it."""
    probe = occupancy.get_max_active_clusters
    occupancy.get_max_active_clusters = lambda size, *, occupancy: clusters[size == 16]
    try:
        return topk._jit_topk_v2_module.__wrapped__()
    finally:
        occupancy.get_max_active_clusters = probe


def _compile(build: Callable[[], object], folder: Path) -> list[Path]:
    """Runs a build and keeps the libraries that it asked for."""
    loader = importlib.import_module("sglang.kernels.jit.utils.compile.loader")
    default, asked = loader._find_prebuilt, []

    def find(*, spec, scope) -> Path | None:
        asked.append((spec, scope))
        return path if (path := _path(folder, spec)).is_file() else default(spec=spec, scope=scope)

    loader._find_prebuilt = find
    try:
        build()
    finally:
        loader._find_prebuilt = default
    paths = []
    for spec, scope in dict(asked).items():
        path = _path(folder, spec)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            (library,) = scope.glob(f"deps-*/{spec.module_name}.so")
            shutil.copyfile(library, path)
        paths.append(path)
    return paths


def _path(folder: Path, spec) -> Path:
    """Where a module of these sources, exports and flags is kept: a folder each, as a broken one is removed whole."""
    digest = hashlib.sha256(repr((spec.module_args, spec.wrappers, spec.cuda_cflags)).encode())
    for source in spec.cuda_files:
        digest.update(Path(source).read_bytes())
    return folder / "jit" / digest.hexdigest()[:12] / f"{spec.module_name}.so"

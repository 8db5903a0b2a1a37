"""`jax-sparse-mla doctor`: the device, the backends, the engines that find our plugins, and what would serve each phase
of each model, and why."""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Iterator
from importlib.metadata import entry_points

import jax

from jax_sparse_mla.attention import machine
from jax_sparse_mla.attention.backend import BACKENDS, PHASES, Call
from jax_sparse_mla.attention.route import plan_call
from jax_sparse_mla.backend import KERNEL_UNUSABLE, Backend
from jax_sparse_mla.cli.arguments import positive_int
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indices.topk import route as topk
from jax_sparse_mla.kv_cache.layout import workspace_layout
from jax_sparse_mla.launch import build, triton_carried, triton_versions
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, DEEPSEEK_V32
from jax_sparse_mla.packages import version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--query-tokens", type=positive_int, default=64, metavar="N", help="query rows of the calls to plan for"
    )
    parser.add_argument("--verbose", action="store_true", help="the reasons for and against every backend")


def run(args: argparse.Namespace) -> int:
    device = DeviceInfo.current()
    missing = {phase: machine.missing_for(phase) for phase in PHASES}
    print(*_verdict(device, missing), sep="\n")
    print(f"device     {_describe(device)}")
    print(f"python     {platform.python_version()}, jax {jax.__version__}, jaxlib {version('jaxlib')}")
    if triton := version("triton"):
        unknown = triton_versions.unknown()
        print(f"triton     {triton}: " + ("unknown to our launchers, every launch takes the host longer" if unknown
                                          else "launched by our own launchers"))  # fmt: skip
    kernels = [
        f"{n} of triton {v}" + ("" if v == triton else " (not used)") for v, n in triton_carried.counts().items()
    ]
    carried, others = build.carried()
    print(f"binaries   carried: {', '.join(carried) or 'none, compilers make them at the first use'}")
    print(f"binaries   Triton's kernels carried: {', '.join(kernels) or 'none, Triton compiles them at the first use'}")
    if others:
        print(f"binaries   not used, made of other sources or for another machine: {', '.join(others)}")
    if version("torch") and BACKENDS["hopper"].wrong_device(device) is None:
        why = BACKENDS["hopper"].missing("prefill", "torch", device)
        print(f"torch      prefill: {'hopper' if why is None else f'not hopper, the fastest: {why}'}")
    for engine, plugin in _engines():
        print(f"engine     {engine:10} {plugin}")
    for name, backend in BACKENDS.items() if args.verbose else ():
        phases = [phase for phase in PHASES if backend.layouts is None or phase in backend.layouts]
        print(f"backend    {name:10} {_state(backend, {phase: missing[phase].get(name) for phase in phases})}")
    for name, engine in topk.TOPK_BACKENDS.items() if args.verbose else ():
        print(f"top-k      {name:10} {_state(engine, {'top-k': topk.missing().get(name)})}")
    for spec in (DEEPSEEK_V32, DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO):
        for phase in PHASES:
            layout = workspace_layout(spec.qk_dim) if phase == "prefill" else spec.kv_layout
            columns = spec.index_width + (spec.window or 0)
            call = Call(phase, layout, args.query_tokens, spec.num_heads, device, columns)
            plan = plan_call(call, unable=missing[phase])
            print(f"{spec.name}, {phase}, {args.query_tokens} query rows, FP8 cache: {plan.backend} ({plan.kernel})")
            if args.verbose:
                print(f"    because {plan.reason}")
                print(*(f"    not {name:10} {reason}" for name, reason in plan.rejected.items()), sep="\n", end="\n\n")
    return 0


def _verdict(device: DeviceInfo, missing: dict[str, dict[str, str]]) -> list[str]:
    """Lines that say whether this machine uses the fast kernels, and what to install if not."""
    extra = 'pip install "jax-sparse-mla[cuda13]" (or cuda12)'
    if device.platform == "cpu":
        return ["kernels    plain JAX serves everything: JAX has no NVIDIA GPU here",
                f"install    {extra}, on a machine with an NVIDIA GPU"]  # fmt: skip
    lines, install = [], {}
    for phase in PHASES:
        able = [name for name, backend in BACKENDS.items() if backend.wrong_device(device) is None
                and (backend.layouts is None or phase in backend.layouts)]  # fmt: skip
        why = missing[phase].get(able[0])
        serves = next(name for name in able if name not in missing[phase])
        lines.append(f"kernels    {phase}: {serves}, " + (
            f"not the fastest: {able[0]} cannot be used: {why}" if why else "the fastest here"))  # fmt: skip
        if why:
            nvcc = "nvcc (the CUDA toolkit), or a wheel that carries the kernels"
            install[nvcc if why == KERNEL_UNUSABLE else extra] = None
    return [*lines, *(f"install    {what}" for what in install)]


# For each engine, by the name of its distribution: the group of its plugins, and the switch that chooses ours
# (docs/guides/engines.md).
_ENGINES = {
    "vllm": ("vllm.general_plugins", "--attention-backend JAX_SPARSE_MLA"),
    "sglang": ("sglang.srt.plugins", "JAX_SPARSE_MLA_SGLANG=1"),
}


def _engines() -> Iterator[tuple[str, str]]:
    """Each engine, and in words whether it is installed, finds our plugin and has a version that the plugin suits."""
    for name, (group, switch) in _ENGINES.items():
        ours = [plugin for plugin in entry_points(group=group) if plugin.name == "jax_sparse_mla"]
        installed = version(name)
        if installed is None:
            yield name, "not installed"
        elif not ours:
            yield name, f"{installed}: our plugin is not installed as its entry point ({group})"
        else:
            tested = importlib.import_module(ours[0].module).TESTED
            suits = (
                f"chosen by {switch}" if installed.startswith(tested) else f"left alone, made for {', '.join(tested)}"
            )
            yield name, f"{installed}: {suits}"


def _describe(device: DeviceInfo) -> str:
    if device.platform == "cpu":
        return f"cpu ({jax.device_count()} device{'s' if jax.device_count() > 1 else ''})"
    major, minor = device.compute_capability
    kind = jax.devices()[0].device_kind
    return (
        f"{kind}: compute capability {major}.{minor}, {device.sm_count} SMs, "
        f"{device.shared_memory_optin} bytes of shared memory a block"
    )


def _state(backend: Backend, phases: dict[str, str | None]) -> str:
    """The phases that a backend serves here, or why it serves none; and the packages that JAX calls it through."""
    served = [phase for phase, why in phases.items() if why is None]
    parts = [f"serves {' and '.join(served)}"] if served else []
    refused = [f"no {phase}: {why}" if served else f"not here: {why}" for phase, why in phases.items() if why]
    packages = dict.fromkeys(need.versions() for need in backend.needs if "jax" in need.frameworks)
    return "; ".join([*parts, *dict.fromkeys(refused), *packages])

"""`jax-sparse-mla doctor`: the device, the backends, and what would serve each phase of each model, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import jax

from jax_sparse_mla.attention.api import installed_backends, installed_for
from jax_sparse_mla.attention.route import BACKENDS, PHASES, DeviceInfo, plan_attention
from jax_sparse_mla.cli.arguments import positive_int
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, DEEPSEEK_V32

# What each backend's kernels come from, by the names of distributions; any one of a tuple will do.
PACKAGES = {
    "hopper": (("apache-tvm-ffi",), ("jax-tvm-ffi",)),
    "flashmla": (("sgl-flash-mla", "sglang-kernel"),),
    "flashinfer": (("flashinfer-python",), ("jax-tvm-ffi",)),
    "triton": (("triton",), ("jax-triton",)),
    "reference": (("jax",),),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--query-tokens", type=positive_int, default=64, metavar="N", help="query rows of the calls to plan for"
    )


def run(args: argparse.Namespace) -> int:
    device = DeviceInfo.current()
    print(f"python     {platform.python_version()}, jax {jax.__version__}, jaxlib {_version('jaxlib')}")
    print(f"device     {_describe(device)}")
    installed = installed_backends()
    for name in BACKENDS:
        state = "served by this version" if name in installed else "not part of this version"
        print(f"backend    {name:10} {state}; {_packages(name)}")
    for spec in (DEEPSEEK_V32, DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO):
        columns = spec.index_topk + (spec.window or 0)
        for phase in PHASES:
            plan = plan_attention(
                *(phase, spec),
                num_q_tokens=args.query_tokens,
                device=device,
                installed=installed_for(phase),
                topk=columns,
            )
            print(f"\n{spec.name}, {phase}, {args.query_tokens} query rows, FP8 cache: {plan.backend} ({plan.kernel})")
            print(f"    because {plan.reason}")
            for name, reason in plan.rejected.items():
                print(f"    not {name:10} {reason}")
    return 0


def _describe(device: DeviceInfo) -> str:
    if device.platform == "cpu":
        return f"cpu ({jax.device_count()} device{'s' if jax.device_count() > 1 else ''})"
    major, minor = device.compute_capability
    kind = jax.devices()[0].device_kind
    return (
        f"{kind}: compute capability {major}.{minor}, {device.sm_count} SMs, "
        f"{device.shared_memory_optin} bytes of shared memory a block"
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(backend: str) -> str:
    parts = []
    for alternatives in PACKAGES[backend]:
        found = [f"{name} {version}" for name in alternatives if (version := _version(name))]
        parts.append(", ".join(found) if found else f"{' or '.join(alternatives)} not installed")
    return ", ".join(parts)

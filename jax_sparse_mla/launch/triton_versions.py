"""What our own launchers, from JAX and from torch, know of Triton's versions. Imports triton only when it is asked."""

from __future__ import annotations

import importlib
from typing import Any

from jax_sparse_mla.packages import warn_once, why_not

# Versions whose compiled kernels take what our launchers pass. The tests read it in what the installed one compiles.
KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")

# Of every launch. Triton 3.10 rounds after each multiplication by default; 3.9 warns of it where nothing is chosen.
OPTIONS = {"enable_fp_fusion": True}

# A kernel's last parameters: addresses of memory for itself and for a profiler, which ours do not ask for.
SCRATCH = 2

_MORE = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "instrumentation_mode")


def unknown() -> str | None:
    """The installed Triton's version if our launchers do not know it; None if they do, or where there is no Triton."""
    if why_not("triton"):
        return None
    version = importlib.import_module("triton").__version__
    return None if version.startswith(KNOWN) else version


def are_known(instead: str) -> bool:
    """Whether our launchers know the installed Triton; if not, a warning says what launches `instead`, once."""
    if version := unknown():
        known = f"{KNOWN[0]}x to {KNOWN[-1]}x"
        warn_once(f"triton {version} is none that our launchers know ({known}): {instead}")
    return version is None


def takes_more(metadata: Any) -> bool:
    """Whether a compiled kernel wants more than its own parameters and SCRATCH, or to be launched in a special way."""
    return metadata.num_ctas != 1 or any(getattr(metadata, name, None) for name in _MORE)

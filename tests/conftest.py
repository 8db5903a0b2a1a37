"""What all tests share: GPU tests are skipped, with the reason, where there is no GPU."""

import os

import jax
import pytest

ON_GPU = jax.default_backend() == "gpu"
if not ON_GPU:
    # Triton kernels run in its interpreter, which reads this when a kernel is defined: before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()}"))
        if "cpu" in item.keywords and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs JAX's CPU backend: JAX_PLATFORMS=cpu"))

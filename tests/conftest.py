"""What all tests share: GPU tests are skipped, with the reason, where there is no GPU."""

import os

import jax
import pytest

# Failing assertions of these say as much as those of test modules do.
pytest.register_assert_rewrite("attention_conformance", "compressor_engine", "metadata_cases", "topk_oracle")

ON_GPU = jax.default_backend() == "gpu"
if not ON_GPU:
    # Triton kernels run in its interpreter, which reads this when a kernel is defined: before any test imports one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def ordered_topk(monkeypatch):
    """The CUDA top-k's order varies from run to run, and float sums follow it: what compares runs needs another.

    For what is traced by tests of this fixture alone: programs keep the engine that they were traced with.
    """
    if ON_GPU:
        monkeypatch.setenv("JAX_SPARSE_MLA_TOPK_BACKEND", "triton")


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()}"))
        if "no_gpu" in item.keywords and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="is done once, where there is no GPU"))
        if "cpu" in item.keywords and ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs JAX's CPU backend: JAX_PLATFORMS=cpu"))

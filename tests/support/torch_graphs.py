"""Captures of torch's work in CUDA graphs, in a process that also runs JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def capture(step: Callable[[], T], **options) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of `step`, which has run before on tensors of the same layouts, and what it returned in the capture.

    In torch's default mode, "global", no thread may ask what a stream is doing: XLA's monitor threads do so all the
    time, which breaks the capture, and an answer that is an error ends JAX's work in this process for good.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
        result = step()
    return graph, result

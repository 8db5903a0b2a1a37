"""Which calls an engine's FlashMLA does sooner by itself: those that were measured, by every backend of ours."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from attention_calls import H200
from sparse_mla_torch.attention.beside_flashmla import why_flashmla_alone

from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.kv_cache import KVLayout

pytestmark = pytest.mark.torch

# Decode cases of `python -m benchmarks decode` on an H200 in which FlashMLA's kernel by itself takes less than 0.98 of
# our time: the case and the rows of query tokens. In all others it takes more.
MEASURED = {  # layout, index columns of both tables, slots of a page of the second
    "V4 Flash": ("V4_FP8", 640, 64),
    "V4 Pro": ("V4_FP8", 1152, 64),
    "V4 C128": ("V4_FP8", 1152, 2),
    "V4 window": ("V4_FP8", 128, None),
    "V3.2": ("V32_FP8", 2048, None),
}
MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FLASHMLA_SOONER = {
    ("V4 C128", 128): (16, 64),
    ("V4 window", 128): (32, 64),
    ("V4 window", 64): (64,),
    ("V3.2", 128): (2, 4, 8),
}


@pytest.mark.parametrize(("model", "heads"), [(model, heads) for model in MEASURED for heads in (128, 64)])
def test_calls_that_flashmla_s_kernel_does_sooner_are_those_that_were_measured(model, heads):
    layout, columns, page_size = MEASURED[model]

    def is_left(rows: int) -> bool:
        call = Call("decode", getattr(KVLayout, layout), rows, heads, H200, columns, extra_page_size=page_size)
        return why_flashmla_alone(call, "hopper") is not None

    left = tuple(rows for rows in MEASURED_ROWS if is_left(rows))
    assert left == FLASHMLA_SOONER.get((model, heads), ())


@pytest.mark.parametrize(
    ("phase", "layout", "heads", "topk", "backend", "is_left"),
    [
        ("decode", "V32_FP8", 128, 128, "hopper", False),  # few blocks: a cluster for each row
        ("decode", "V4_FP8", 64, 640, "triton", True),  # 10.9 and 12.2 in a graph, but V3.2's 18.3 and 16.9
        ("decode", "V32_FP8", 128, 2048, "triton", True),
        ("decode", "V4_FP8", 192, 640, "triton", False),  # FlashMLA takes no such heads
        ("decode", "V4_FP8", 64, 640, "flashmla", True),
        ("prefill", "V4_BF16", 64, 640, "triton", True),
        ("prefill", "V4_BF16", 64, 640, "hopper", False),
    ],
)
def test_calls_of_other_backends_are_left_to_flashmla(phase, layout, heads, topk, backend, is_left):
    call = Call(phase, getattr(KVLayout, layout), 4, heads, H200, topk)
    assert (why_flashmla_alone(call, backend) is not None) == is_left

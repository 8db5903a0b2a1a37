"""Top-k of indexer logits with its page-table transform, from one decode row to a prefill chunk.

Peers, called from torch: FlashInfer's transform, and SGLang's for DeepSeek-V4 (`topk_transform_paged_v2`), whose plan
is made once a step and not timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
import torch

from benchmarks import peers
from benchmarks.harness import Case, Run, Spec, operation
from jax_sparse_mla.indices import TopkTransform, topk_transform

PAGE_SIZE = 64
ROWS = (1, 64, 4096)
COLUMNS = (4096, 32768, 131072)
TOPK = (512, 2048)


def specs() -> Iterator[Spec]:
    for rows in ROWS:
        for columns in COLUMNS:
            for topk in TOPK:
                make = functools.partial(_case, rows=rows, columns=columns, topk=topk)
                yield Spec(f"topk_transform paged, {rows} x {columns}, k {topk}", make)


def _case(rng: np.random.Generator, rows: int, columns: int, topk: int) -> Case:
    """Full rows of normal logits and a page table of random pages; both frameworks read the same buffers."""
    generator = torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))
    logits = torch.randn(rows, columns, device="cuda", generator=generator)
    pages = (rows, columns // PAGE_SIZE)
    pages = torch.randint(0, 1 << 20, pages, dtype=torch.int32, device="cuda", generator=generator)
    lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    args = [jax.dlpack.from_dlpack(x) for x in (logits, lengths, pages)]
    ours = _jitted(_paged, args, topk)
    rivals = {"flashinfer": _flashinfer(logits, lengths, pages, topk), "sglang": _sglang(logits, lengths, pages, topk)}
    checks = {name: functools.partial(_share_of_other_slots, ours, run) for name, run in rivals.items()}
    return Case(
        ours={"jax": ours},
        peers=rivals,
        bytes=4 * rows * (columns + 2 * topk),
        checks=checks,
    )


def _jitted(function: Callable, args: list[jax.Array], topk: int) -> Run:
    return Run(functools.partial(jax.jit(functools.partial(function, topk=topk)), *args), "jax")


def _paged(logits, lengths, pages, *, topk):
    return topk_transform(logits, lengths, topk, method=TopkTransform.PAGED, page_table=pages, page_size=PAGE_SIZE)


def _flashinfer(logits: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, topk: int) -> Run:
    """FlashInfer's own call at its defaults: any order, any of equal logits."""

    def call():
        transform = peers.find("flashinfer").top_k_page_table_transform
        return transform(logits, pages, lengths, topk, page_size=PAGE_SIZE)

    return Run(call, "torch")


def _sglang(logits: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, topk: int) -> Run:
    """SGLang's own call: any order, any of equal logits."""
    plan = functools.cache(lambda: peers.find("sglang topk").plan_topk_v2(lengths))
    out = torch.empty((len(logits), topk), dtype=torch.int32, device="cuda")

    def call():
        peers.find("sglang topk").topk_transform_paged_v2(logits, lengths, pages, out, PAGE_SIZE, plan())
        return out

    return Run(call, "torch")


def _share_of_other_slots(ours: Run, theirs: Run) -> float:
    """The share of our slots that the peer does not choose; equal logits may leave a few."""
    wanted, actual = torch.from_dlpack(jax.block_until_ready(ours.call())), theirs.call()
    wanted, actual = (x.sort(-1).values.long() for x in (wanted, actual))
    at = torch.searchsorted(actual, wanted).clamp(max=actual.shape[1] - 1)
    share = (actual.gather(1, at) != wanted).double().mean().item()
    assert share < 1e-3, f"{share:.2%} of the slots are others"
    return share


main = operation("topk", __doc__, specs)

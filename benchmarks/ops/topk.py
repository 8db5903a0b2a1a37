"""Top-k of indexer logits with its page-table transform, from one decode row to a prefill chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np
import torch

from benchmarks.timing import Case, Run, peer
from jax_sparse_mla.indices import TopkTransform, topk_transform
from jax_sparse_mla.indices.topk import flashinfer as topk_flashinfer
from jax_sparse_mla.indices.topk.route import TOPK_BACKENDS

PAGE_SIZE = 64
ROWS = (1, 64, 4096)
COLUMNS = (4096, 32768, 131072)
TOPK = (512, 2048)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Full rows of normal logits and a page table of random pages; both frameworks read the same buffers."""
    generator = torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))
    for rows in ROWS:
        for columns in COLUMNS:
            logits = torch.randn(rows, columns, device="cuda", generator=generator)
            pages = torch.randint(
                0, 1 << 20, (rows, columns // PAGE_SIZE), dtype=torch.int32, device="cuda", generator=generator
            )
            lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
            for topk in TOPK:
                yield _case(logits, lengths, pages, topk)


def _case(logits: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, topk: int) -> Case:
    rows, columns = logits.shape
    args = [jax.dlpack.from_dlpack(x) for x in (logits, lengths, pages)]
    peers = _flashinfer(logits, lengths, pages, topk)
    if TOPK_BACKENDS["flashinfer"].missing("topk", "jax") is None:
        peers["flashinfer from jax"] = _jitted(_flashinfer_from_jax, args, topk)
    return Case(
        f"topk_transform paged, {rows} x {columns}, k {topk}",
        ours={"jax": _jitted(_paged, args, topk)},
        peers=peers,
        bytes=4 * rows * (columns + 2 * topk),
    )


def _jitted(function: Callable, args: list[jax.Array], topk: int) -> Run:
    return Run(functools.partial(jax.jit(functools.partial(function, topk=topk)), *args), "jax")


def _paged(logits, lengths, pages, *, topk):
    return topk_transform(logits, lengths, topk, method=TopkTransform.PAGED, page_table=pages, page_size=PAGE_SIZE)


def _flashinfer_from_jax(logits, lengths, pages, *, topk):
    """Its transform on its own terms, but for ties: nothing of our contract around it."""
    return topk_flashinfer.page_table_transform(logits, pages, lengths, topk, PAGE_SIZE)


def _flashinfer(logits: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, topk: int) -> dict[str, Run]:
    """FlashInfer's own call at its defaults (any order, any of equal logits), where it is installed."""
    flashinfer = peer("flashinfer")
    if flashinfer is None:
        return {}
    transform = flashinfer.top_k_page_table_transform
    call = functools.partial(transform, logits, pages, lengths, topk, page_size=PAGE_SIZE)
    return {"flashinfer": Run(call, "torch")}

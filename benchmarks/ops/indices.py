"""The merges of index lists; peers are SGLang's Triton kernel for top-k and window, plain XLA for window and extra."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch.operations import indices as torch_indices

from benchmarks import peers
from benchmarks.harness import Case, Run, Spec, operation
from jax_sparse_mla.indices import combine_swa_extra_indices, combine_topk_swa_indices
from jax_sparse_mla.indices.merge import combine_swa_extra_reference

WINDOW = 128
SIZES = ((16_384, 512), (32_768, 1_024))  # rows, top-k


def specs() -> Iterator[Spec]:
    for rows, topk in SIZES:
        yield Spec(f"combine_topk_swa {rows} x {topk}", functools.partial(_topk_swa, rows=rows, topk=topk))
        yield Spec(f"combine_swa_extra {rows} x {topk}", functools.partial(_swa_extra, rows=rows, topk=topk))


def _topk_swa(rng: np.random.Generator, rows: int, topk: int) -> Case:
    """A prefill chunk of 8 requests, every row with a full window and a full list."""
    requests, seq_len = 8, 65_536
    per_request = rows // requests
    gathered = per_request + WINDOW - 1
    args = (
        rng.integers(0, seq_len // 4, (rows, topk), dtype=np.int32),
        (np.arange(requests + 1) * per_request).astype(np.int32),
        np.tile(seq_len - per_request + np.arange(per_request), requests).astype(np.int32),
        np.full(requests, seq_len, np.int32),
        np.full(requests, gathered, np.int32),
        (np.arange(requests) * (seq_len // 4)).astype(np.int32),
        (np.arange(requests) * gathered + requests * (seq_len // 4)).astype(np.int32),
    )
    static = {"window": WINDOW, "compress_ratio": 4, "topk": topk}

    def sglang(*args):
        combine = peers.find("sglang merge").combine_topk_swa_indices
        return combine(*args, window_size=WINDOW, compress_ratio=4, topk=topk)

    return _case(
        args,
        sglang=sglang,
        ours=lambda *args: combine_topk_swa_indices(*args, **static),
        on_torch=lambda *args, out: torch_indices.combine_topk_swa_indices(*args, **static, out=out),
        bytes=rows * 4 * (topk + (topk + WINDOW) + 2),  # positions and lengths beside the lists
        topk=topk,
    )


def _swa_extra(rng: np.random.Generator, rows: int, topk: int) -> Case:
    args = (
        rng.integers(0, 65_536, (rows, WINDOW), dtype=np.int32),
        np.full(rows, WINDOW, np.int32),
        rng.integers(0, 65_536, (rows, topk), dtype=np.int32),
        np.full(rows, topk, np.int32),
        np.array(65_536, np.int32),
    )
    return _case(
        args,
        plain=combine_swa_extra_reference,  # SGLang hands FlashMLA two tables instead
        ours=combine_swa_extra_indices,
        on_torch=lambda *args, out: torch_indices.combine_swa_extra_indices(*args, out=out),
        bytes=rows * 4 * (WINDOW + topk + (topk + WINDOW) + 3),
        topk=topk,
    )


def _case(
    args: tuple,
    *,
    ours: Callable,
    on_torch: Callable,
    bytes: int,
    topk: int,
    plain: Callable | None = None,
    sglang: Callable | None = None,
) -> Case:
    """The peer is `plain`, jitted, or `sglang`, called from torch."""
    jax_args, torch_args = [jnp.asarray(x) for x in args], [torch.from_numpy(np.asarray(x)).cuda() for x in args]
    rows = len(args[0])
    out = tuple(torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((rows, topk + WINDOW), (rows,)))
    ours = Run(functools.partial(jax.jit(ours), *jax_args), "jax")
    if plain:
        rival = {"xla": Run(functools.partial(jax.jit(plain), *jax_args), "jax")}
    else:
        rival = {"sglang": Run(functools.partial(sglang, *torch_args), "torch")}
    return Case(
        ours={"jax": ours, "torch": Run(lambda: on_torch(*torch_args, out=out), "torch")},
        peers=rival,
        bytes=bytes,
        checks={} if plain else {"sglang": functools.partial(_entries_that_differ, ours, rival["sglang"])},
    )


def _entries_that_differ(ours: Run, theirs: Run) -> float:
    """The number of entries and lengths that differ; none may. The peer's lists may be wider, with −1 behind."""
    wanted, lengths = map(torch.from_dlpack, jax.block_until_ready(ours.call()))
    actual, actual_lengths = theirs.call()
    differ = (actual[:, : wanted.shape[1]] != wanted).sum() + (actual_lengths != lengths).sum()
    differ += (actual[:, wanted.shape[1] :] != -1).sum()
    assert not differ, f"{int(differ)} entries differ"
    return float(differ)


main = operation("indices", __doc__, specs)

"""A step's metadata, and schedules: one jitted program each.

DeepGEMM's own kernel stands beside its schedule. The others' peer is plain XLA, the functions that define the results:
SGLang makes a step's metadata by about 15 launches among torch operations, FlashMLA its schedule inside its call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sparse_mla_torch.operations import metadata as torch_metadata

from benchmarks import peers
from benchmarks.harness import Case, Run, Spec, operation
from jax_sparse_mla import DeviceInfo
from jax_sparse_mla.indices.window import swa_gather_plan, swa_gather_plan_reference, swa_slots_reference
from jax_sparse_mla.metadata import (
    ForwardBatch,
    ForwardMode,
    RequestTables,
    build_v4_metadata,
    flashmla_schedule,
    paged_mqa_schedule,
)
from jax_sparse_mla.metadata.schedules import flashmla_schedule_reference
from jax_sparse_mla.metadata.v4 import build_v4_reference
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH

SPEC = DEEPSEEK_V4_FLASH
CONTEXT, POOL = 131_072, 1 << 24
SECTOR = 32  # bytes that a look-up of one int32 moves


def specs() -> Iterator[Spec]:
    """V4 steps of several modes and sizes, then the parts that have kernels of their own."""

    def spec(name: str, make: Callable, *sizes) -> Spec:
        return Spec(name, lambda rng: make(rng, *sizes))

    for mode, requests, rows, drafts in (
        (ForwardMode.DECODE, 64, 64, None),
        (ForwardMode.DECODE, 1, 1, None),
        (ForwardMode.TARGET_VERIFY, 64, 256, 4),
        (ForwardMode.EXTEND, 4, 8192, None),
    ):
        name = f"v4 metadata, {mode.name} {requests} x {rows // requests}, 128k"
        yield spec(name, _step_case, mode, requests, rows, drafts)
    for batch in (64, 4096, 16_384):
        yield spec(f"flashmla schedule, batch {batch}", _schedule_case, batch)
    yield spec("paged mqa schedule, 64 rows", _paged_mqa_case, 64)
    for rows in (64, 8192):
        yield spec(f"swa_slots, {rows} rows", _swa_slots_case, rows)
    yield spec("swa_gather_plan, 8 requests, 8192 rows", _gather_plan_case, 8, 8192)


@functools.cache
def _tables() -> RequestTables:
    """The tables of 64 requests, for all cases."""
    rng, requests = np.random.default_rng(0), 64
    pages = rng.permutation(POOL // 256)[: requests * CONTEXT // 256].reshape(requests, -1)
    slots = (pages[:, :, None] * 256 + np.arange(256)).reshape(requests, CONTEXT)
    full_to_swa = np.append(rng.permutation(POOL), -1)
    return RequestTables(req_to_token=_int32(slots), full_to_swa=_int32(full_to_swa))


def _int32(x):
    return jnp.asarray(np.asarray(x, np.int32))


def _case(ours, plain, args, moved):
    """Both jitted; the programs take their arrays as arguments."""
    run = {label: Run(functools.partial(jax.jit(f), *args), "jax") for label, f in (("ours", ours), ("xla", plain))}
    return Case({"triton": run["ours"]}, {"xla": run["xla"]}, bytes=moved)


def _bytes(function, *args):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(function, *args)))


def _step_case(rng, mode, requests, rows, drafts):
    tables = _tables()
    batch = ForwardBatch(
        mode=mode,
        max_seq_len=CONTEXT,
        req_pool_indices=_int32(rng.permutation(64)[:requests]),
        seq_lens=_int32(rng.integers(CONTEXT // 2, CONTEXT - 4, requests)),
        out_cache_loc=_int32(rng.integers(0, POOL, rows)),
        extend_lens=_int32(np.full(requests, rows // requests)) if mode is ForwardMode.EXTEND else None,
        num_draft_tokens=drafts,
    )

    def ours(batch, tables):
        return build_v4_metadata(SPEC, batch, tables)

    def plain(batch, tables):
        return build_v4_reference(SPEC, batch, tables)

    # Reads: a page's first slot in a sector of its own; the window's slots, and as many places of full_to_swa.
    moved = _bytes(ours, batch, tables) + rows * (CONTEXT // 256 + SPEC.window) * SECTOR + rows * SPEC.window * 4
    return _case(ours, plain, (batch, tables), moved)


def _schedule_case(rng, batch):
    lengths, extra = _int32(rng.integers(1, 129, batch)), _int32(rng.integers(1, 513, batch))
    parts = DeviceInfo.current().sm_count

    def ours(lengths, extra):
        static = {"batch": batch, "topk": 128, "extra_topk": 512, "num_sm_parts": parts}
        return flashmla_schedule(lengths, extra_topk_length=extra, **static)

    def plain(lengths, extra):
        return flashmla_schedule_reference(lengths, extra, 128, 512, parts)

    return _case(ours, plain, (lengths, extra), 12 * batch + 32 * parts)


def _paged_mqa_case(rng, rows):
    lengths, sms = _int32(rng.integers(0, CONTEXT // 4, rows)), DeviceInfo.current().sm_count
    ours = Run(functools.partial(jax.jit(functools.partial(paged_mqa_schedule, num_sms=sms)), lengths), "jax")
    on_torch = torch.from_numpy(np.array(lengths)[:, None]).cuda()

    def deep_gemm():
        return peers.find("deep_gemm").get_paged_mqa_logits_metadata(on_torch, 64, sms)

    def entries_that_differ() -> float:
        differ = (torch.from_dlpack(jax.block_until_ready(ours.call())) != deep_gemm()).sum()
        assert not differ, f"{int(differ)} entries differ"
        return float(differ)

    return Case(
        {"triton": ours},
        {"deep_gemm": Run(deep_gemm, "torch")},
        bytes=4 * rows + 8 * sms,
        checks={"deep_gemm": entries_that_differ},
    )


def _swa_slots_case(rng, rows):
    """In JAX plain XLA is what runs; the kernel is torch's."""
    tables = _tables()
    positions, req_rows = rng.integers(0, CONTEXT, rows), rng.integers(0, 64, rows)
    on_device = [torch.from_numpy(np.array(x, np.int32)).cuda() for x in (positions, req_rows, *_arrays(tables))]
    out = torch.empty((rows, SPEC.window), dtype=torch.int32, device="cuda")
    torch_tables = RequestTables(req_to_token=on_device[2], full_to_swa=on_device[3])

    def ours():
        torch_metadata.swa_slots(*on_device[:2], torch_tables, window=SPEC.window, out=out)

    plain = jax.jit(functools.partial(swa_slots_reference, window=SPEC.window))
    plain = functools.partial(plain, _int32(positions), _int32(req_rows), *_arrays(tables))
    moved = rows * SPEC.window * (4 + SECTOR + 4)
    return Case({"triton": Run(ours, "torch")}, {"xla": Run(plain, "jax")}, moved)


def _gather_plan_case(rng, requests, rows):
    tables = _tables()
    seq_lens = _int32(rng.integers(CONTEXT // 2, CONTEXT, requests))
    extend_lens = _int32(np.full(requests, rows // requests))
    capacity = rows + requests * (SPEC.window - 1)
    args = (seq_lens, extend_lens, _int32(rng.permutation(64)[:requests]), *_arrays(tables))
    static = {"window": SPEC.window, "capacity": capacity}
    ours, plain = (functools.partial(f, **static) for f in (swa_gather_plan, swa_gather_plan_reference))
    return _case(ours, plain, args, capacity * (4 + SECTOR + 4))


def _arrays(tables):
    return tables.req_to_token, tables.full_to_swa


main = operation("metadata", __doc__, specs)

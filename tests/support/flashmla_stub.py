"""Stand-ins for FlashMLA's operators on the CPU: their schemas, their checks, their results, computed by the oracle.

What would end the process, read out of bounds or give garbage on a GPU raises here. Results come as the vendors give
them: lse +inf on empty rows and a transposed view, partial results by the schedule, base 2 in sglang-kernel's prefill.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from attention_oracle import attend, unpack_cache

from jax_sparse_mla import packages
from jax_sparse_mla.metadata import flashmla_schedule

# As the two wheels register them: sgl-flash-mla 1.0.0 and sglang-kernel 0.4.5.
_DECODE = (
    "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor{a}? tile_scheduler_metadata, Tensor{b}? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale{kv_format}) -> (Tensor, Tensor, Tensor{ra}?, Tensor{rb}?)"
)
_PREFILL = (
    "sparse_prefill_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v, Tensor? attn_sink=None, "
    "Tensor? topk_length=None{more}) -> Tensor{optional}[]"
)
_AS_SGL_FLASH_MLA = {
    **{"a": "(a!)", "b": "(b!)", "ra": "(a)", "rb": "(b)", "kv_format": ", str? kv_format=None"},
    **{"more": ", bool return_log2_stats=False, bool return_stats=True", "optional": "?"},
}
_AS_SGLANG_KERNEL = dict.fromkeys(("a", "b", "ra", "rb", "kv_format", "more", "optional"), "")

PARTITIONS = 132  # per 64 heads, of the H200 that the tests pretend to have
CALLS: list[tuple[str, tuple[int, ...]]] = []  # operator and the shape of q


@functools.cache
def register() -> dict[str, torch.library.Library]:
    """The libraries, by namespace; for the rest of the process, in which they can be defined once."""
    libraries = {}
    for namespace, style in (("stub_flash_mla", _AS_SGL_FLASH_MLA), ("stub_sgl_kernel", _AS_SGLANG_KERNEL)):
        library = torch.library.Library(namespace, "DEF")
        library.define(_DECODE.format(**style))
        library.define(_PREFILL.format(**style))
        library.impl("sparse_decode_fwd", decode, "CPU")
        library.impl("sparse_prefill_fwd", prefill_log2 if style is _AS_SGLANG_KERNEL else prefill, "CPU")
        libraries[namespace] = library
    return libraries


@contextlib.contextmanager
def empty_package(folder: Path, file: str | None):
    """A package of the one empty file, such as "flash_mla/_C_legacy.abi3.so", or none, while no other is installed.

    Afterwards nothing knows of it: what one test imports stays in `sys.modules`, where the next would find it.
    """
    if any(importlib.util.find_spec(name) for name in ("flash_mla", "sgl_kernel")):
        pytest.skip("the packages themselves are installed")
    if file is not None:
        (folder / file).parent.mkdir()
        (folder / file).touch()
        (folder / file).with_name("__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        packages.why_not.cache_clear()
        try:
            yield
        finally:
            packages.why_not.cache_clear()
            for name in ("flash_mla", "sgl_kernel"):
                sys.modules.pop(name, None)


def check(condition, message) -> None:
    if not condition:
        raise ValueError(f"the process would end: {message}")


def array(x: torch.Tensor | None) -> np.ndarray | None:
    if x is None:
        return None
    return x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()


def decode(
    q, kv, indices, topk_length, attn_sink, metadata, splits, extra_kv, extra_indices, extra_length, d_v, sm_scale
):
    b, s_q, h_q, d_qk = q.shape
    CALLS.append(("decode", tuple(q.shape)))
    check(b > 0 and s_q > 0 and h_q in (64, 128) and d_qk in (512, 576) and d_v == 512, f"q {q.shape}")
    strides = q.stride()
    check(q.dtype == torch.bfloat16 and strides[3] == 1 and all(x % 8 == 0 for x in strides[:3]), f"q's {strides}")
    check(attn_sink is None or (attn_sink.shape == (h_q,) and attn_sink.dtype == torch.float32), "attn_sink")
    if attn_sink is not None:  # the combine of a split row without keys makes NaN of these
        check(not torch.any((attn_sink < -2.3e38) & (attn_sink > -torch.inf)), f"sinks {attn_sink}")
    v32 = d_qk == 576
    check(not v32 or (topk_length is None and extra_kv is None), "V3.2 takes neither lengths nor an extra cache")
    tables = [read_table(kv, indices, topk_length, b, s_q, d_qk)]
    check((extra_kv is None) == (extra_indices is None), "extra cache without indices")
    if extra_kv is not None:
        tables.append(read_table(extra_kv, extra_indices, extra_length, b, s_q, d_qk))
    parts = max(PARTITIONS // (h_q // 64) // s_q, 1)
    if metadata is None:
        metadata, splits = own_schedule(tables, parts)
    check(metadata.shape == (parts, 8) and splits.shape == (b + 1,), f"schedule {metadata.shape} {splits.shape}")
    check(metadata.dtype == splits.dtype == torch.int32, "the schedule's dtype")
    # The kernel takes at least one block of the first table.
    blocks = sum(np.maximum(-(-lengths // 64), i == 0) for i, (_, _, lengths) in enumerate(tables))
    scanned = walk_schedule(array(metadata), array(splits), blocks)
    if v32:  # which may have been told less than all columns
        named = (tables[0][1] != -1).reshape(b, s_q, -1, 64).any(axis=(1, 3))
        check(all(np.all(times[blocks] == 1) for times, blocks in zip(scanned, named)), "a block is not scanned once")
    else:
        check(all(np.all(times == 1) for times in scanned), "a block is not scanned once")
    out, lse = np.zeros((b, s_q, h_q, 512)), np.zeros((b, s_q, h_q))
    queries, sink = array(q), array(attn_sink)
    for row, token in np.ndindex(b, s_q):
        keys = []
        for rows, slots, lengths in tables:
            named = slots[row, token, : lengths[row]]
            keys.append(rows[named[named != -1]])
        out[row, token], _, lse[row, token] = attend(queries[row, token], np.concatenate(keys), sm_scale, sink)
    lse = torch.from_numpy(np.where(np.isneginf(lse), np.inf, lse)).float()
    return torch.from_numpy(out).bfloat16(), lse.transpose(1, 2), metadata, splits


def own_schedule(tables, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the operator computes where it is given none."""
    (_, first, lengths), (_, second, extra_lengths) = (*tables, (None, np.zeros((1, 1, 0)), None))[:2]
    made = flashmla_schedule(
        jnp.asarray(lengths, jnp.int32),
        batch=len(lengths),
        topk=first.shape[-1],
        extra_topk=second.shape[-1],
        extra_topk_length=None if extra_lengths is None else jnp.asarray(extra_lengths, jnp.int32),
        num_sm_parts=parts,
    )
    return tuple(torch.from_numpy(np.array(x)) for x in made)


def read_table(kv, indices, lengths, b, s_q, d_qk):
    """The cache's rows, the indices `[b, s_q, topk]` and the lengths `[b]` of one table."""
    width, layout = (656, "V32_FP8") if d_qk == 576 else (584, "V4_FP8")
    pages, page_size = kv.shape[:2]
    check(kv.element_size() == 1 and kv.shape == (pages, page_size, 1, width), f"kv {kv.dtype} {kv.shape}")
    check(pages > 0 and kv.stride()[1:] == (width, width, 1) and kv.stride(0) % 16 == 0, f"kv strides {kv.stride()}")
    topk = indices.shape[-1]
    check(indices.dtype == torch.int32 and indices.shape == (b, s_q, topk), f"indices {indices.shape}")
    check(topk > 0 and topk % 64 == 0 and indices.stride(2) == 1, f"indices {indices.shape} {indices.stride()}")
    data = kv.view(torch.uint8).as_strided((pages, page_size * width), (kv.stride(0), 1)).numpy()
    rows = unpack_cache(layout, page_size, data)
    slots = indices.numpy()
    if lengths is None:
        lengths = np.full(b, topk)
    else:
        check(lengths.dtype == torch.int32 and lengths.shape == (b,), f"lengths {lengths.shape}")
        lengths = lengths.numpy()
        check(np.all((lengths >= 0) & (lengths <= topk)), f"lengths {lengths} of {topk} columns")
    scanned = np.arange(topk) < lengths[:, None, None]
    bad = slots[scanned & (slots != -1) & ((slots < 0) | (slots >= len(rows)))]
    check(bad.size == 0, f"out-of-bounds reads at {bad[:5]} of {len(rows)} slots")
    return rows, slots, lengths


def walk_schedule(metadata: np.ndarray, splits: np.ndarray, blocks: np.ndarray) -> list[np.ndarray]:
    """How often each block of each row is scanned, as the kernel walks its partitions."""
    times = [np.zeros(count, int) for count in blocks]
    used: list[set[int]] = [set() for _ in blocks]
    for first, last, begin, end, split, first_split, last_split, _ in metadata.tolist():
        if first >= len(blocks):
            continue
        for row in range(first, last + 1):
            start, stop = (begin if row == first else 0), (end if row == last else int(blocks[row]))
            times[row][start:stop] += 1
            is_split = first_split if row == first else (last_split if row == last else False)
            used[row].add(split if is_split and row == first else 0)
    for row, names in enumerate(used):
        check(names == set(range(splits[row + 1] - splits[row])), f"row {row}'s splits {names}")
    return times


def prefill(q, kv, indices, sm_scale, d_v, attn_sink=None, topk_length=None, return_log2_stats=False):
    rows, h_q, d_qk = q.shape
    CALLS.append(("prefill", tuple(q.shape)))
    check(rows > 0 and h_q in (64, 128) and d_qk in (512, 576) and d_v == 512, f"q {q.shape}")
    check(kv.shape[0] > 0 and kv.shape[1:] == (1, d_qk) and kv.dtype == torch.bfloat16, f"kv {kv.shape}")
    topk = indices.shape[-1]
    check(indices.shape == (rows, 1, topk) and topk > 0 and topk % 128 == 0, f"indices {indices.shape}")
    lengths = np.full(rows, topk) if topk_length is None else array(topk_length)
    check(np.all((lengths >= 0) & (lengths <= topk)), f"lengths {lengths} of {topk} columns")
    results = []
    queries, workspace, tables, sink = array(q), array(kv), array(indices), array(attn_sink)
    for row in range(rows):
        slots = tables[row, 0, : lengths[row]]
        keys = workspace[slots[(slots >= 0) & (slots < len(kv))], 0]
        results.append(attend(queries[row], keys, sm_scale, sink))
    out, max_logits, lse = (torch.from_numpy(np.stack(x)) for x in zip(*results))
    unit = np.log(2) if return_log2_stats else 1
    return [out.bfloat16(), (max_logits / unit).float(), torch.where(lse == -torch.inf, torch.inf, lse / unit).float()]


def prefill_log2(*args, **kwargs):
    out, max_logits, lse = prefill(*args, **kwargs)
    return [out, max_logits / np.log(2), lse / np.log(2)]

"""The drop-in as vLLM and SGLang call FlashMLA: their schedules, `out` as one tensor, rows and pages that stand apart.

What they pass was recorded from vLLM 0.33.0 and SGLang 0.5.23 (engines.md); `tests/engines` drives their own code.
"""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import drop_in_calls as calls
from attention_calls import small_prefill
from drop_in_calls import (
    ALL_BACKENDS,
    check_decode,
    check_prefill,
    decode,
    per_request,
    prefill,
    served_with_stand_ins,
)
from sparse_mla_torch import flash_mla
from sparse_mla_torch.flash_mla import flash_mla_with_kvcache

pytestmark = pytest.mark.torch


@pytest.fixture(params=ALL_BACKENDS)
def backend(request, monkeypatch):
    with served_with_stand_ins(request.param, monkeypatch):
        yield request.param


class FlashMLASchedMeta:
    """An engine's own schedule: another class of FlashMLA's name."""

    def __init__(self):
        self.have_initialized, self.config = False, None
        self.tile_scheduler_metadata = self.num_splits = None


@pytest.mark.always(2)
def test_out_alone(backend):
    """The caller's tensor is written, a part of a larger buffer as a rank's rows are; the rest is allocated."""
    case = per_request(heads=64, extra=(40, 2))
    out, lse = decode(case)
    for row in (0, 1):  # contiguous; and so that kernels cannot write into it, where the result is copied
        buffer = out.new_full((2, *out.shape[:3], 512 + row), torch.nan)
        target = buffer[1, ..., row:]
        results = decode(case, out=target)
        assert results[0] is target and torch.equal(target, out) and torch.equal(results[1], lse)
        assert buffer[0].isnan().all()
    small = small_prefill(heads=64)
    expected = prefill(small)
    target = torch.full_like(expected[0], torch.nan)
    results = prefill(small, out=target, return_log2_lse=None)
    assert results[0] is target and all(torch.equal(a, b) for a, b in zip(results, expected))
    check_prefill(small, results)


@pytest.mark.always(2)
def test_an_engines_schedule_keeps_ours(backend):
    case = per_request(heads=64)
    theirs = FlashMLASchedMeta()
    before = dict(vars(theirs))
    for _ in range(2):  # two layers
        check_decode(case, decode(case, tile_scheduler_metadata=theirs))
    kept = vars(theirs).pop("_sparse_mla_torch")
    assert vars(theirs) == before  # FlashMLA's own function may still take it
    assert kept.have_initialized and (kept.tile_scheduler_metadata is not None) == (backend == "flashmla")
    vars(theirs)["_sparse_mla_torch"] = kept
    check_decode(case, decode(case, tile_scheduler_metadata=copy.deepcopy(theirs)))
    with pytest.raises(ValueError, match="was filled by"):
        decode(per_request(heads=63), tile_scheduler_metadata=theirs)


def test_schedule_tensors_are_ignored(backend):
    case = per_request(layout="V32_FP8", topk=64, lengths="none")
    tensors = torch.full((132, 8), -7, dtype=torch.int32), torch.full((4,), -7, dtype=torch.int32)
    results = decode(case, tile_scheduler_metadata=tensors[0], num_splits=tensors[1], kv_format="V32")
    check_decode(case, results)
    assert all((x == -7).all() for x in tensors)


def apart(x: torch.Tensor, more: int, token: int = 0) -> torch.Tensor:
    """The same rows, each in a longer one, and so many rows between two requests."""
    batch, q_len, topk = x.shape
    room = x.new_full((batch, q_len + token, topk + more), 7)
    room[:, :q_len, :topk] = x
    return room[:, :q_len, :topk]


@pytest.mark.always(2)
def test_index_rows_that_stand_apart_are_read_where_they_are(backend, monkeypatch):
    """vLLM's C128 indices are part of a wider table. Rows that are not evenly apart are copied."""
    case = per_request(extra=(40, 2), lengths="none", extra_lengths="none")
    arguments = calls.decode_arguments(case)
    alone = arguments | {"indices": apart(arguments["indices"], 88)}
    both = alone | {"extra_indices_in_kvcache": apart(arguments["extra_indices_in_kvcache"], 3)}
    copies, contiguous = [], torch.Tensor.contiguous
    if backend != "reference":  # which hands JAX contiguous arrays
        monkeypatch.setattr(
            torch.Tensor, "contiguous", lambda x: x if x.is_contiguous() else copies.append(x.shape) or contiguous(x)
        )
    check_decode(case, flash_mla_with_kvcache(**alone))
    check_decode(case, flash_mla_with_kvcache(**both))
    assert not copies
    uneven = {"indices": apart(arguments["indices"], 88, token=1)}
    check_decode(case, flash_mla_with_kvcache(**arguments | uneven))
    expanded = arguments["indices"][:1].expand(arguments["indices"].shape)
    results = flash_mla_with_kvcache(**arguments | {"indices": expanded})
    expected = flash_mla_with_kvcache(**arguments | {"indices": contiguous(expanded)})
    assert all(torch.equal(a, b) for a, b in zip(results, expected))


# As the engines have them: FP8 numbers, [tokens, 1, heads, 512], a row for each token, pages padded to 576 bytes.
PAGES = {"vLLM": (64, 37_440), "SGLang": (256, 149_760), "C128": (2, 1_728)}


@pytest.mark.always(4)
@pytest.mark.parametrize("engine", PAGES)
def test_the_engines_pages(backend, engine):
    page_size, page_bytes = PAGES[engine]
    case = per_request(page_size=page_size, q_len=1, lengths="row", extra=(40, 2), extra_lengths="row")
    arguments = calls.decode_arguments(case)
    assert arguments["k_cache"].stride() == (page_bytes, 584, 584, 1)
    for name in ("k_cache", "extra_k_cache"):
        arguments[name] = arguments[name].view(torch.float8_e4m3fn)
    for name in ("topk_length", "extra_topk_length"):  # the same lengths, a request's as well as a token's
        assert arguments[name].shape == (3, 1)
        results = flash_mla_with_kvcache(**arguments | {name: arguments[name][:, 0]})
        check_decode(case, results)
    check_decode(case, flash_mla_with_kvcache(**arguments, kv_format="MODEL1"))


def test_a_mixed_batch_is_one_request(backend):
    """vLLM's V3.2 with few heads: decodes and prefills are the tokens of one request, each with its length."""
    if backend == "flashmla":
        pytest.skip("lengths of each token: test_what_flashmla_cannot_take")
    case = per_request(layout="V32_FP8", batch=1, q_len=6, heads=16, lengths="row")
    assert calls.decode_arguments(case)["topk_length"].shape == (1, 6)
    check_decode(case, decode(case, tile_scheduler_metadata=FlashMLASchedMeta()))
    assert flash_mla.FlashMLASchedMeta is not FlashMLASchedMeta

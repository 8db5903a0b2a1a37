"""Small, hostile calls of the SM90 kernels against the oracle, few enough that compute-sanitizer can watch them all.

`python -m benchmarks memcheck --only hopper_memory` does. Decode is launched by torch, prefill by `jax.jit`. Without a
GPU the reference serves the same calls.
"""

from __future__ import annotations

import functools
import itertools

import jax
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import attention_calls
import drop_in_calls
from drop_in_calls import ON_GPU, served_by
from sparse_mla_torch.flash_mla import flash_mla_with_kvcache

from jax_sparse_mla.attention import sparse_mla_prefill
from jax_sparse_mla.attention.hopper.decode_plan import ALWAYS, AS_LENGTHS_SAY, NEVER

pytestmark = pytest.mark.torch
BACKEND = "hopper" if ON_GPU else "reference"

BY_SHAPE = {"lengths": "none", "extra_lengths": "none"}
BF16 = {"layout": "V4_BF16"}
V41 = {"layout": "V41_FP8", "extra_layout": "V41_FP4", "page_size": 61}
V41_SPLIT = {"layout": "V41_FP8_SPLIT", "extra_layout": "V41_FP4_SPLIT"}
ONE_HEAD = {"q_len": 1, "heads": 1}  # so that many rows cost the oracle little

# By how an H200's thread blocks share the rows, where no cluster does; with lengths, which are hostile, the kernel
# decides.
DECODES = {
    "whole": BY_SHAPE | {"topk": 130, "heads": 16},
    "whole, one column": BY_SHAPE | {"topk": 1},
    "whole, more rows than groups": BY_SHAPE | ONE_HEAD | {"batch": 140, "topk": 3},
    "cut": BY_SHAPE | {"batch": 1, "topk": 460},
    "cut, two caches, 70 heads": BY_SHAPE | {"topk": 130, "extra": (650, 3), "heads": 70},
    "cut, V3.2, 128 heads, odd pages": BY_SHAPE | {"layout": "V32_FP8", "topk": 950, "heads": 128, "page_size": 7},
    "cut, of whole rows the rest": BY_SHAPE | ONE_HEAD | {"batch": 148, "topk": 900},
    "cut, the line of all rows": BY_SHAPE | ONE_HEAD | {"batch": 100, "topk": 4800, "page_size": 61},
    "lengths": {"topk": 100, "extra": (65, 2), "heads": 16},
    "lengths, one head, odd pages": {"topk": 67, "extra": (130, 1), "heads": 1, "page_size": 61},
    "lengths, V3.2": {"layout": "V32_FP8", "topk": 590, "heads": 70, "page_size": 61},
    "lengths, V3.2, two caches": {"layout": "V32_FP8", "topk": 1, "extra": (33, 5), "heads": 128},
    "lengths, more rows than groups": ONE_HEAD | {"batch": 139, "topk": 70, "extra": (2, 3)},
    "lengths, dealt rows and a rest": ONE_HEAD | {"batch": 140, "topk": 2100, "page_size": 7},
    "lengths, few rows of many columns": {"batch": 3, "topk": 1500, "heads": 65},
    "no valid index": {"rows": "none", "topk": 100, "extra": (65, 2)},
    "whole, V4.1": BY_SHAPE | {"layout": "V41_FP8_SPLIT", "topk": 130, "page_size": 7, "heads": 16},
    "cut, V4.1, two caches": BY_SHAPE | V41 | {"topk": 130, "extra": (650, 3), "extra_layout": "V41_FP8", "heads": 70},
    "cut, V4.1, FP4": BY_SHAPE | V41 | {"topk": 130, "extra": (650, 3), "heads": 70},
    "lengths, V4.1, FP4": V41_SPLIT | {"topk": 67, "extra": (330, 5), "heads": 128},
    "lengths, V4.1, FP4, more rows than groups": V41 | ONE_HEAD | {"batch": 139, "topk": 70, "extra": (2, 3)},
    "whole, bfloat16": BY_SHAPE | BF16 | {"topk": 130, "page_size": 7, "heads": 16},
    "cut, bfloat16": BY_SHAPE | BF16 | {"topk": 130, "extra": (650, 3), "heads": 70},
    "cut, V3.2 in bfloat16, 128 heads, odd pages": BY_SHAPE
    | {"layout": "V32_BF16", "topk": 950, "heads": 128, "page_size": 7},
    "lengths, bfloat16, more rows than groups": BF16 | ONE_HEAD | {"batch": 139, "topk": 70, "extra": (2, 3)},
    "lengths, V3.2 in bfloat16, two caches": {"layout": "V32_BF16", "topk": 590, "extra": (33, 5), "heads": 70},
}


# Every format with every kind of heads: lengths of 0, below it and beyond the columns, odd pages, one cache or two.
FORMATS = {
    "V4": {},
    "V3.2": {"layout": "V32_FP8"},
    "bfloat16": BF16,
    "V3.2 in bfloat16": {"layout": "V32_BF16"},
    "V4.1": {"layout": "V41_FP8", "extra_layout": "V41_FP8"},
    "V4.1, apart": {"layout": "V41_FP8_SPLIT", "extra_layout": "V41_FP8_SPLIT"},
    "V4.1, FP4": {"layout": "V41_FP8", "extra_layout": "V41_FP4", "extra": (33, 2)},  # FP4 rows are the second cache's
    "V4.1, FP4, apart": V41_SPLIT | {"extra": (33, 2)},
}
HEADS = (1, 16, 64, 70, 128)
SIZES = (
    {"topk": 130, "page_size": 7, "extra": (65, 3)},
    {"topk": 67, "page_size": 61},
    {"topk": 1, "page_size": 1, "extra": (130, 61)},
    {"topk": 200, "page_size": 5, "extra": (1, 7)},
    {"topk": 64, "page_size": 3, "extra": (63, 1)},
    {"topk": 129, "page_size": 127},
)
HOSTILE = {
    f"{format}, {heads} heads": {"seed": seed, "heads": heads, "batch": 5} | FORMATS[format] | size
    for seed, ((format, heads), size) in enumerate(zip(itertools.product(FORMATS, HEADS), itertools.cycle(SIZES)))
}


@functools.cache
def case_of(name: str):
    return attention_calls.small_decode(
        **{"lengths": "batch", "extra_lengths": "batch"} | (DECODES | HOSTILE | SHORT)[name]
    )


@pytest.mark.always(7)
@pytest.mark.parametrize("name", DECODES)
def test_rows_are_shared_as_the_name_says(name):
    case = case_of(name)
    topks = [x.shape[-1] for x in (case.indices, case.extra_indices) if x is not None]
    has_lengths = case.topk_length is not None
    batch, q_len, heads, _ = case.q.shape
    plan = attention_calls.plan_of_many(batch * q_len, heads, tuple(topks), has_lengths=has_lengths, sm_count=132)
    kind = name.partition(",")[0]
    assert plan.cuts == {"whole": NEVER, "cut": ALWAYS}.get(kind, AS_LENGTHS_SAY)


# Clusters of any size serve any call: (heads, thread blocks).
CLUSTERS = [(16, 2), (32, 3), (16, 8), (32, 16), (16, 11), (32, 2)]
FEW = [
    *zip((name for name in DECODES if "bfloat16" not in name), itertools.cycle(CLUSTERS)),
    ("lengths, V3.2, two caches", (16, 5)),
    ("no valid index", (16, 7)),
    ("cut, V3.2, 128 heads, odd pages", (32, 15)),  # all parts have keys, and their values take most of the memory
    ("cut, two caches, 70 heads", (32, 14)),
    *((name, cluster) for name in DECODES if "FP4" in name for cluster in ((16, 3), (32, 5))),
    *((name, cluster) for name in DECODES if "bfloat16" in name for cluster in ((16, 11), (32, 3), (16, 2))),
    *zip(HOSTILE, itertools.cycle([*CLUSTERS, (16, 16)])),
]
# Rows of one cache that the window kernel serves.
SHORT = {
    "lengths, short": {"topk": 128, "page_size": 61, "heads": 70},
    "lengths, short, bfloat16": BF16 | {"topk": 100, "page_size": 7, "heads": 16},
    "lengths, short, V4.1": {"layout": "V41_FP8", "topk": 65, "page_size": 3, "heads": 64},
    "lengths, short, V4.1, apart": {"layout": "V41_FP8_SPLIT", "topk": 1, "heads": 128},
    "whole, short": BY_SHAPE | {"topk": 128, "heads": 64, "batch": 140, "q_len": 1},
    "no valid index, short": {"rows": "none", "topk": 64},
}
# Every format, with another number of heads each time.
WIDE = [*zip([*HOSTILE][:: len(HEADS) + 1], (2, 3, 6, 16, 11, 4, 15, 8))]


def check(name: str, cluster: tuple[int, int] | None, monkeypatch, *, window: bool = False, **options):
    """By a cluster kernel in clusters as told, by the window kernel, or by the persistent one."""
    case, launched = case_of(name), attention_calls.by_decode_kernel(cluster, monkeypatch, window=window)
    with served_by(BACKEND, monkeypatch):
        if case.cache.layout.startswith("V41"):
            results = drop_in_calls.decode_by_name(case, **options)
        else:
            options = {f"enable_{name}": value for name, value in options.items()}
            results = flash_mla_with_kvcache(**drop_in_calls.decode_arguments(case), **options)
    drop_in_calls.check_decode(case, results)
    if ON_GPU:
        assert launched and {plan.tile for plan in launched} == {cluster[0] if cluster else 64}


# Which of the two makes no difference to the reference.
@pytest.mark.always("lengths, few rows of many columns-", "no valid index-", "cut, V4.1, FP4-", "cut, bfloat16-")
@pytest.mark.parametrize(
    "batch_invariant", [False, True] if ON_GPU else [False], ids=lambda x: "invariant" if x else ""
)
@pytest.mark.parametrize("name", DECODES)
def test_decode(name, batch_invariant, monkeypatch):
    check(name, None, monkeypatch, batch_invariant=batch_invariant)


@pytest.mark.always(8)
@pytest.mark.parametrize("name", HOSTILE)
def test_decode_of_every_format_and_number_of_heads(name, monkeypatch):
    check(name, None, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "cluster"), FEW)
def test_decode_in_clusters(name, cluster, monkeypatch):
    check(name, cluster, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "parts"), WIDE)
def test_decode_in_wide_clusters(name, parts, monkeypatch):
    check(name, (64, parts), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHORT)
def test_decode_in_windows(name, monkeypatch):
    check(name, None, monkeypatch, window=True)


PREFILLS = [
    {"heads": 70, "sizes": (90, 67)},
    {"dim": 576, "heads": 1, "sizes": (130, 129)},
    # The kernel for few heads, with each of its arrays full.
    {"heads": 8, "sizes": (64, 1)},
    {"heads": 16, "sizes": (90, 67)},
    {"heads": 32, "sizes": (250, 200)},
    {"dim": 576, "heads": 8, "sizes": (90, 64)},
    {"dim": 576, "heads": 16, "sizes": (130, 129)},
]


@pytest.mark.parametrize("setting", PREFILLS)
def test_prefill(setting):
    case = attention_calls.small_prefill(**setting)
    arguments = attention_calls.prefill_arguments(case)
    scale = arguments.pop("softmax_scale")
    attention_calls.skip_unless_able(BACKEND, "prefill", *case.q.shape[:2], case.indices.shape[-1])
    attend = jax.jit(lambda given: sparse_mla_prefill(**given, softmax_scale=scale, backend=BACKEND))
    attention_calls.check_prefill(case, attend(arguments))

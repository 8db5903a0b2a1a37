"""The cases of SGLang's own attention test kit that reach FlashMLA: DeepSeek-V4's, and V3.2's with FP8 and bfloat16.

`python -m benchmarks engines sglang` runs them on a GPU, `tests/engines` on the CPU. Nothing here imports SGLang.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
GATHER = "dequantize_k_cache_paged_v41"
SERVED = ((8, 8192), (64, 8192))  # requests, and tokens of each, of the decode rows with sizes of serving
CHUNK = 2048  # tokens of such a prefill, the second half of a prompt
METHODS = "sglang.test.kits.attention_unittest.attention_methods"
V4_KIT, DSA_KIT = f"{METHODS}.dsv4_attention", f"{METHODS}.dsa_attention"
GRAPHS = "sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner"
PARTS = "kit", "graph", "served"  # also how the names of the last two begin

# The most that a case's error may be, above what was measured on the CPU (docs/guides/engines.md).
V4_ERROR, V41_ERROR, V32_ERROR, BF16_ERROR = 0.03, 0.02, 0.065, 0.004


def part_of(name: str) -> str:
    """Of PARTS, the one that a case of this name belongs to."""
    return next((part for part in PARTS if name.startswith(part)), PARTS[0])


def most_error(name: str) -> float:
    """The bound of a case's errors: by name, as SGLang's `flashmla_kv` makes FP8 rows of a bfloat16 cache."""
    if "flashmla" not in name:
        return V4_ERROR
    return BF16_ERROR if name.endswith("flashmla_sparse, bf16") else V32_ERROR


class Case(NamedTuple):
    """A call of the kit: `function(testcase, case, device=…, **options)`."""

    name: str
    function: Callable
    case: Any
    options: dict[str, Any]

    @property
    def part(self) -> str:
        return part_of(self.name)

    @property
    def in_graph(self) -> bool:
        """Whether SGLang calls the attention inside a CUDA graph: its prefill is eager."""
        mode = self.case.forward_mode
        return mode.is_decode() or mode.is_target_verify()


def v4_cases(kit: ModuleType, modes: Any) -> Iterator[Case]:
    """The kit's own, then each ratio in three modes, and drafts' verification; `modes` is SGLang's ForwardMode.

    SGLang's draft model has window layers only.
    """
    own = kit.make_dsv4_cases("dsv4")
    for case in own:
        yield Case(f"kit {case.name}", kit.run_dsv4_attention_case, case, {})
    decode = {"forward_mode": modes.DECODE, "prefix_lens": (70, 200), "extend_lens": ()}
    extend = {"prefix_lens": (100, 40), "extend_lens": (5, 9)}
    for ratio in (0, 4, 128):
        for name, changes, sparse in (("decode", decode, False), ("extend", extend, False), ("prefill", extend, True)):
            changes = changes | {"compress_ratio": ratio, "attn_sink_value": 0.3, "name": name}
            if ratio == 4 and sparse:  # the kit chooses positions of one request
                changes |= {"prefix_lens": (100,), "extend_lens": (5,)}
            case = dataclasses.replace(own[0], **changes)
            if ratio == 0:
                yield Case(f"{name}, ratio 0", kit.run_dsv4_attention_case, case, {})
            else:
                function = kit.run_dsv4_compress_attention_case
                yield Case(f"{name}, ratio {ratio}", function, case, {"sparse_prefill": sparse})
    drafts = {"prefix_lens": (70, 200), "extend_lens": (3, 3)}
    for ratio in (0, 4, 128):
        name, mode = f"verify, ratio {ratio}", modes.TARGET_VERIFY
        case = dataclasses.replace(own[0], name=name, forward_mode=mode, compress_ratio=ratio, **drafts)
        yield Case(name, kit.run_dsv4_target_verify_attention_case, case, {})
    case = dataclasses.replace(own[0], name="draft", forward_mode=modes.DRAFT_EXTEND_V2, **drafts)
    yield Case("draft", kit.run_dsv4_draft_extend_attention_case, case, {})


def v41_cases(kit: ModuleType, modes: Any) -> Iterator[Case]:
    """Decode, extends and prefill from gathered rows of window layers and both ratios of V4.1, and verification."""
    own = kit.make_dsv4_cases("dsv4")[0]
    decode = {"forward_mode": modes.DECODE, "prefix_lens": (70, 200), "extend_lens": ()}
    extend = {"prefix_lens": (100, 40), "extend_lens": (5, 9)}
    for ratio in (0, 1, 2):
        for name, changes, sparse in (("decode", decode, False), ("extend", extend, False), ("prefill", extend, True)):
            changes = changes | {"compress_ratio": ratio, "attn_sink_value": 0.3, "name": name}
            if ratio and sparse:  # the kit chooses positions of one request
                changes |= {"prefix_lens": (100,), "extend_lens": (5,)}
            case = dataclasses.replace(own, **changes)
            if ratio == 0:
                yield Case(f"{name}, ratio 0", kit.run_dsv4_attention_case, case, {})
            else:
                function = kit.run_dsv4_compress_attention_case
                yield Case(f"{name}, ratio {ratio}", function, case, {"sparse_prefill": sparse})


def dsa_cases(kit: ModuleType, modes: Any) -> Iterator[Case]:
    """The kit's sparse cases by SGLang's kernel and the cache's type, then verification of drafts and the draft model.

    For `flashmla_kv` SGLang makes FP8 rows of a bfloat16 cache in each call.
    """
    decodes = [("flashmla_kv", True), ("flashmla_kv", False), ("flashmla_sparse", False)]
    prefills = [("flashmla_sparse", False), ("flashmla_sparse", True), ("flashmla_kv", True)]
    for case in kit.make_dsa_sparse_cases("dsa"):
        kind, kernels = ("decode", decodes) if case.forward_mode.is_decode() else ("prefill", prefills)
        for kernel, fp8 in kernels:
            options = {f"dsa_{kind}_backend": kernel, "fp8_kv_cache": fp8}
            name = f"{case.name}, {kernel}, {'fp8' if fp8 else 'bf16'}"
            yield Case(name, kit.run_dsa_sparse_attention_case, case, options)
    for kind, mode in (("verify", modes.TARGET_VERIFY), ("draft", modes.DRAFT_EXTEND_V2)):
        name, lengths = f"dsa_sparse_{kind}, flashmla_kv, bf16", {"prefix_lens": (40, 30), "extend_lens": (3, 3)}
        own = dataclasses.replace(kit.make_dsa_sparse_cases("dsa")[0], name=name, forward_mode=mode, **lengths)
        yield Case(name, kit.run_dsa_sparse_speculative_forward_mode_case, own, {})


def graph_cases(graphs: ModuleType, v4: ModuleType, dsa: ModuleType, modes: Any) -> Iterator[Case]:
    """The decode cases through the kit's form of SGLang's graph runner, which fills a graph's metadata before each run.

    Requests are as many as the graph was captured for, but for V4's of one request, whose graph is for two.
    """
    for found in v4_cases(v4, modes):
        if found.case.forward_mode.is_decode():
            yield Case(f"graph: {found.name}", graphs.run_dsv4_cuda_graph_decode_case, found.case, {})
    for found in dsa_cases(dsa, modes):
        if found.case.forward_mode.is_decode():
            yield Case(f"graph: {found.name}", graphs.run_dsa_sparse_cuda_graph_decode_case, found.case, found.options)


# --- sizes of serving ------------------------------------------------------------------------------

V4_TOKENS_A_PAGE, V32_TOPK = 256, 2048
SCATTERED = "scattered"  # a pattern of `scatter_v32`


def served_v4_cases(kit: ModuleType, modes: Any) -> Iterator[Case]:
    """Decode steps and a prefill of V4-Flash's sizes: `enlarge_v4` must have been called."""
    own = kit.make_dsv4_cases("dsv4")[0]
    for batch, context in SERVED:
        for ratio in (0, 4, 128):
            name = f"served {batch}x{context}, ratio {ratio}"
            size = {"prefix_lens": (context - 1,) * batch, "extend_lens": (), "attn_sink_value": 0.3}
            case = dataclasses.replace(own, name=name, forward_mode=modes.DECODE, compress_ratio=ratio, **size)
            if ratio == 0:
                yield Case(name, kit.run_dsv4_attention_case, case, {})
            else:
                entries = batch * (context // V4_TOKENS_A_PAGE + 1) * V4_TOKENS_A_PAGE // ratio
                yield Case(name, kit.run_dsv4_compress_attention_case, case, {"extra_entries": entries})
    for ratio in (0, 4, 128):
        name = f"served prefill of {CHUNK}, ratio {ratio}"
        size = {"prefix_lens": (CHUNK,), "extend_lens": (CHUNK,), "attn_sink_value": 0.3}
        case = dataclasses.replace(own, name=name, forward_mode=modes.EXTEND, compress_ratio=ratio, **size)
        if ratio == 0:
            yield Case(name, kit.run_dsv4_attention_case, case, {})
        else:
            options = {"extra_entries": 2 * CHUNK // ratio, "sparse_prefill": True}
            yield Case(name, kit.run_dsv4_compress_attention_case, case, options)


def served_dsa_cases(kit: ModuleType) -> Iterator[Case]:
    """Decode steps and a prefill of V3.2's sizes, with all heads and with those of one rank of eight, from FP8 and
    bfloat16 rows: `scatter_v32` must have been called."""
    own = next(case for case in kit.make_dsa_sparse_cases("dsa") if case.forward_mode.is_decode())
    options = {"index_topk": V32_TOPK, "index_pattern": "strided"}
    for kernel, fp8 in (("flashmla_kv", True), ("flashmla_sparse", False)):
        how = options | {"dsa_decode_backend": kernel, "fp8_kv_cache": fp8}
        for (batch, context), heads in itertools.product(SERVED, (128, 16)):
            name = f"served {batch}x{context}, {heads} heads, {kernel}, {'fp8' if fp8 else 'bf16'}"
            case = dataclasses.replace(own, name=name, num_heads=heads, prefix_lens=(context - 1,) * batch)
            yield Case(name, kit.run_dsa_sparse_attention_case, case, how)
    own = next(case for case in kit.make_dsa_sparse_cases("dsa") if not case.forward_mode.is_decode())
    for fp8, heads in itertools.product((True, False), (128, 16)):
        how = options | {"index_pattern": SCATTERED, "dsa_prefill_backend": "flashmla_sparse", "fp8_kv_cache": fp8}
        name = f"served prefill of {CHUNK}, {heads} heads, flashmla_sparse, {'fp8' if fp8 else 'bf16'}"
        case = dataclasses.replace(own, name=name, num_heads=heads, prefix_lens=(CHUNK,), extend_lens=(CHUNK,))
        yield Case(name, kit.run_dsa_sparse_attention_case, case, how)


def scatter_v32(kit: ModuleType, torch: ModuleType) -> None:
    """Lets each query choose positions of its own, by the pattern SCATTERED.

    The kit's "strided" gives the queries of a chunk the same ones, and searches lists for it: nearly a minute of a
    CPU for 2,048 queries of at most 4,096 tokens, for each side of each case.
    """
    of_kit = kit._make_dsa_sparse_topk_rows

    def rows(case, *, index_topk: int = kit.DSA_SPARSE_INDEX_TOPK, pattern: str = "trailing") -> list[list[int]]:
        if pattern != SCATTERED:
            return of_kit(case, index_topk=index_topk, pattern=pattern)
        seen = [
            prefix + offset + 1
            for prefix, length in zip(case.prefix_lens, case.input_lens, strict=True)
            for offset in range(length)
        ]
        return scattered(torch, seen, index_topk).tolist()

    kit._make_dsa_sparse_topk_rows = rows


def scattered(torch: ModuleType, seen: list[int], width: int):
    """int64 `[rows, width]`: of each row some of the first `seen` positions, in order, −1 behind them."""
    counts = torch.tensor(seen)[:, None]
    columns = max(width, *seen)
    drawn = torch.rand(len(seen), columns, generator=torch.Generator().manual_seed(0))
    drawn.masked_fill_(torch.arange(columns) >= counts, -1)
    chosen = drawn.topk(width, sorted=False).indices
    chosen = chosen.masked_fill(chosen >= counts, columns).sort().values
    return chosen.masked_fill(chosen == columns, -1)


def enlarge_v4(kit: ModuleType, torch: ModuleType) -> None:
    """Makes the kit's pools as large as a case needs, and lets each query of C4 choose entries of its own.

    The kit has 1,024 slots, and all queries read the same first entries: few bytes, which stay in the L2. Its prefill
    has the entries of one page.
    """
    build, pool = kit.build_dsv4_attention_fixture, kit.DeepSeekV4TokenToKVPool

    def fixture(testcase, case, **options):
        pages = sum(-(-(length + 1) // V4_TOKENS_A_PAGE) + 1 for length in case.seq_lens)
        return build(testcase, case, **{"swa_size": max(1024, pages * V4_TOKENS_A_PAGE)} | options)

    def larger(**options):
        entries = options["swa_size"]
        for ratio in (4, 128):
            options[f"c{ratio}_size"] = max(options[f"c{ratio}_size"], entries // ratio)
        return pool(**options)

    @functools.cache  # a graph is captured after a call, and its capture cannot take what is made on the host
    def chosen(rows: int, width: int, count: int, entries: int, device, dtype):
        generator, indices = torch.Generator().manual_seed(entries), torch.full((rows, width), -1)
        for row in indices:
            row[:count] = torch.randperm(entries, generator=generator)[:count]
        return indices.to(device, dtype)

    def choose(fixture, *, num_entries):
        metadata, ratio = fixture.backend.forward_metadata.core_metadata, fixture.case.compress_ratio
        old, lengths = metadata.sparse_page_indices(ratio), metadata.sparse_topk_lengths(ratio)
        count = min(num_entries, old.shape[1])
        indices = chosen(*old.shape, count, num_entries, old.device, old.dtype).clone()
        metadata.set_sparse_topk(ratio, page_indices=indices, topk_lengths=torch.full_like(lengths, count))

    few = kit._seed_c4_sparse_prefill_indices

    def choose_of_one_request(fixture, *, num_entries):
        """Of a prompt alone, whose entry k lies in slot k."""
        metadata, ratio = fixture.backend.forward_metadata.core_metadata, fixture.case.compress_ratio
        if max(fixture.case.seq_lens) <= V4_TOKENS_A_PAGE:
            return few(fixture, num_entries=num_entries)
        raw, lengths = metadata.sparse_raw_indices(ratio), metadata.sparse_topk_lengths(ratio)
        seen = (metadata.positions_casual + 1) // ratio
        pages = metadata.page_table[0, : -(-max(fixture.case.seq_lens) // V4_TOKENS_A_PAGE)].tolist()
        assert fixture.case.batch_size == 1 and pages == list(range(len(pages))), pages
        chosen = scattered(torch, seen.tolist(), raw.shape[1]).to(raw.device, raw.dtype)
        counts = seen.clamp(max=raw.shape[1]).to(lengths.dtype)
        metadata.set_sparse_topk(ratio, page_indices=chosen.clone(), topk_lengths=counts, raw_indices=chosen)

    kit.build_dsv4_attention_fixture, kit.DeepSeekV4TokenToKVPool = fixture, larger
    kit._seed_c4_sparse_indices, kit._seed_c4_sparse_prefill_indices = choose, choose_of_one_request

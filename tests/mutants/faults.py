"""Small faults of the Python product, for run.py: each is one text in one file, and the tests of its area catch it.

A fault has a name, the file, the tests (as few files as catch it), what it breaks, the text that must occur exactly
once in the file, and the text in its place. `why` marks one that the tests do not notice, and says the reason.
Where code is moved, `file` and `tests` move with it; `python tests/mutants/run.py --check` finds what no longer fits.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    file: str
    tests: tuple[str, ...]
    breaks: str
    old: str
    new: str
    why: str = ""


def of(file: str, *tests: str):
    """Faults of one file that the same tests catch: `(name, breaks, old, new)` each, `why` where nothing catches it."""

    def add(name: str, breaks: str, old: str, new: str, why: str = "") -> None:
        FAULTS.append(Fault(name, file, tests, breaks, old, new, why))

    return add


FAULTS: list[Fault] = []
# fmt: off

# --- indices ----------------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/indices/lookup.py", "tests/indices/test_indices.py")
fault("page-slot", "a token's slot: one token less a page",
      "jnp.where(fits, page, 0) * page_size + offset, -1)", "jnp.where(fits, page, 0) * (page_size - 1) + offset, -1)")
fault("add-wraps", "an index whose sum with the base leaves int32 is not −1",
      "(base >= 0) & (index <= INT_MAX - jnp.maximum(base, 0))", "(base >= 0)")
fault("take-negative", "a negative index takes an entry from the table's end",
      "valid = (index >= 0) & (index < size)", "valid = index < size")
fault("ragged-part", "elements of a ragged concatenation: empty parts before one take its first element",
      'searchsorted(starts[:-1], element, side="right"', 'searchsorted(starts[:-1], element, side="left"')
fault = of("jax_sparse_mla/indices/window.py", "tests/indices/test_indices.py")
fault("window-start", "the window begins a token before the query's own",
      "req_rows[:, None], newest - back)", "req_rows[:, None], newest - 1 - back)")
fault("gather-window", "a chunk gathers a token more than its windows hold",
      "INT_MAX - (window - 1)) + (window - 1)", "INT_MAX - (window - 1)) + window")
fault("gather-position", "the gathered tokens begin one too late",
      "take_or_minus_one(first_pos, request) + index, -1)", "take_or_minus_one(first_pos, request) + index + 1, -1)")
fault = of("jax_sparse_mla/indices/merge.py", "tests/indices/test_indices.py")
fault("combine-width", "a merged list is padded to a multiple of 64", "_WIDTH_MULTIPLE = 128", "_WIDTH_MULTIPLE = 64")
fault("combine-hole", "an extra index of −1 becomes the last window row",
      "extra = add_or_minus_one(extra_indices, num_swa_rows)", "extra = extra_indices + num_swa_rows")
fault("combine-length", "a query that completes an entry does not read it",
      "jnp.minimum(pos // compress_ratio, topk) + completes_entry, topk)",
      "jnp.minimum(pos // compress_ratio, topk), topk)")
fault("combine-next-request", "an entry past the request's own is read",
      "entry < seq_len // compress_ratio, entry, -1)", "entry <= seq_len // compress_ratio, entry, -1)")
fault = of("jax_sparse_mla/indices/ownership.py", "tests/indices/test_ownership.py")
fault("ranks-tie-order", "equal logits of several devices go by device, not by position",
      "dimension=1, num_keys=2)", "dimension=1, num_keys=1)")
fault = of("jax_sparse_mla/indices/pools.py", "tests/indexer/test_kpool.py")
fault("pool-tail", "the tail of unpooled tokens has one too many",
      "(behind >= 0) & (behind < lengths % pool)", "(behind >= 0) & (behind <= lengths % pool)")
fault = of("jax_sparse_mla/indices/topk/api.py", "tests/indices/test_topk.py")
fault("topk-tie-order", "of equal logits the later column is taken",
      "jax.lax.top_k(jnp.where(inside, ordered_keys(logits), OUTSIDE_KEY), count)",
      "(lambda keys, at: (keys, columns - 1 - at))("
      "*jax.lax.top_k(jnp.where(inside, ordered_keys(logits), OUTSIDE_KEY)[:, ::-1], count))")
fault("topk-minus-one-first", "padding stands before the positions",
      "jnp.sort(jax.lax.bitcast_convert_type(positions, jnp.uint32), axis=-1)", "jnp.sort(positions, axis=-1)")
fault("topk-row-starts", "positions count from column 0, not from the row's start",
      "jnp.where(keys == OUTSIDE_KEY, -1, chosen - starts)", "jnp.where(keys == OUTSIDE_KEY, -1, chosen)")
fault("topk-ragged-offset", "padding of −1 becomes offset − 1",
      "add_or_minus_one(positions, offsets[:, None])", "positions + offsets[:, None]")
fault("topk-zeros", "−0.0 stands below +0.0", "jnp.where(magnitude == 0, 0, ordered)", "ordered")
fault("topk-nan", "a NaN logit is the largest",
      "jnp.where(magnitude > 0x7F800000, _NAN_KEY, ordered)", "jnp.where(magnitude > 0x7F800000, 2**31 - 1, ordered)")
fault("topk-short-row", "a row as long as topk is sorted by its logits, which may be unset",
      "jnp.where(lengths <= topk, everything, selected)", "jnp.where(lengths < topk, everything, selected)")
fault = of("jax_sparse_mla/indices/topk/route.py", "tests/indices/test_topk_route.py")
fault("topk-capability", "FlashInfer's top-k is chosen on SM89, where it does not fit",
      "not_on=((8, 6), (8, 9))", "not_on=((8, 6),)")
fault = of("jax_sparse_mla/indices/topk/triton.py", "tests/indices/test_topk_kernels.py")
fault("triton-topk-tie-order", "Triton top-k: the first of the ties is left out",
      "((tie > 0) & (tie_rank < ties))", "((tie > 0) & (tie_rank > 0) & (tie_rank <= ties))")
fault("triton-topk-window", "Triton top-k: a row's window ends a column early",
      "tl.minimum(start + length, columns), first)", "tl.minimum(start + length - 1, columns), first)")
fault = of("jax_sparse_mla/indices/triton.py", "tests/kv_cache/test_triton_kv.py")
fault("triton-combine-hole", "Triton merge of index lists: an extra −1 becomes a row",
      "valid = (index >= 0) & (base >= 0) & (index <=", "valid = (base >= 0) & (index <=")

# --- indexer and candidates -------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/indexer/logits.py", "tests/indexer/test_indexer.py")
fault("indexer-weights", "the heads' weights are left out of the logits",
      "jnp.sum(scores * weights[row][:, None], axis=0)", "jnp.sum(scores, axis=0)")
fault("indexer-relu", "negative scores count", "jnp.where(scores <= 0, 0.0, scores)", "scores")
fault("indexer-length", "a key past the row's length has a logit",
      "jnp.arange(columns, dtype=jnp.int32) < length)", "jnp.arange(columns, dtype=jnp.int32) <= length)")
fault("indexer-hadamard", "the transform is another orthogonal matrix",
      "[[matrix, matrix], [matrix, -matrix]]", "[[matrix, matrix], [-matrix, matrix]]")
fault("indexer-scale-place", "the scales of a page's keys begin a key too early",
      "values_end + first * SCALE_BYTES, unit", "values_end + (first - 1) * SCALE_BYTES, unit")
fault = of("jax_sparse_mla/indexer/keys.py", "tests/indexer/test_indexer.py", "tests/indexer/test_index_formats.py")
fault("index-key-floor", "a key of zeros has a scale of 0",
      "jnp.clip(amax_bits, floor, _MAX_FINITE_BITS)", "jnp.clip(amax_bits, 0, _MAX_FINITE_BITS)")
fault = of("jax_sparse_mla/indexer/keys.py", "tests/indexer/test_index_formats.py")
fault("index-fp4-exponent", "FP4 keys: a group whose largest value is 6 · 2^k takes the next scale",
      "(amax & MANTISSA_MASK) > _MANTISSA_OF_1_5", "(amax & MANTISSA_MASK) >= _MANTISSA_OF_1_5")
fault = of("jax_sparse_mla/indexer/select.py", "tests/indexer/test_index_topk.py")
fault("selection-last-chunk", "the last chunk of rows gives its first rows again",
      "x[-1, chunk - left :]", "x[-1, :left]")
fault = of("jax_sparse_mla/indexer/candidates.py", "tests/indexer/test_candidates.py")
fault("candidates-newest", "the block of the newest token is not always a candidate",
      "(lengths[:, None] - 1) // block_size", "lengths[:, None] // block_size")
fault = of("jax_sparse_mla/indexer/triton_candidates.py", "tests/indexer/test_triton_candidates.py")
fault("triton-candidates-newest", "Triton: the block of the newest token is not always a candidate",
      "block == count - 1", "block == count")
fault("triton-candidates-page", "Triton: a page that does not exist has keys",
      "(page >= 0) & (page < num_pages)", "page >= 0")
fault = of("jax_sparse_mla/indexer/triton_scores.py", "tests/indexer/test_triton_candidates.py")
fault("triton-runs-place", "Triton: all runs of a page are its first",
      "offset += run % runs_of_page * RUN", "offset += 0")
fault = of("jax_sparse_mla/indexer/triton_fp4.py", "tests/indexer/test_triton_fp4_keys.py")
fault("triton-fp4-zero", "Triton: SGLang's FP4 keys keep −0", "if not KEEPS_ZERO:", "if KEEPS_ZERO:")
fault = of("jax_sparse_mla/indexer/triton_scores.py", "tests/indexer/test_triton_indexer.py")
fault("triton-indexer-length", "Triton indexer: a key past the row's length has a logit",
      "(column[:, None] < limit[None, :])", "(column[:, None] <= limit[None, :])")

# --- caches -----------------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/kv_cache/quantize.py", "tests/kv_cache/test_kv_cache.py")
fault("ue8m0-rounding", "a group whose largest value is 448 · 2^k takes the next scale",
      "(amax_bits & MANTISSA_MASK) > _MANTISSA_OF_1_75", "(amax_bits & MANTISSA_MASK) >= _MANTISSA_OF_1_75")
fault("zero-tile", "a tile of zeros has a scale below the least one",
      "jnp.maximum(exponent - 8 + above.astype(jnp.int32), min_exponent)", "exponent - 8 + above.astype(jnp.int32)")
fault("bfloat16-tie", "ties of bfloat16 round up, not to even",
      "round_up = (low > 0x8000) | ((low == 0x8000) & ((high & 1) == 1))", "round_up = low >= 0x8000")
fault("power-of-two-scales", "V3.2's float32 scales are no powers of two",
      "    if least is not None:\n        values, exponents = quantize_groups(x, group, least)",
      "    if least is not None and group != 128:\n        values, exponents = quantize_groups(x, group, least)")
fault = of("jax_sparse_mla/kv_cache/quantize.py", "tests/kv_cache/test_layouts.py")
fault("e2m1-tie", "a tie of e2m1 goes to the odd code", "(0.75, True)", "(0.75, False)")
fault = of("jax_sparse_mla/kv_cache/layout.py", "tests/kv_cache/test_kv_cache.py")
fault("page-bytes", "V4 pages are padded to 64 bytes, not to 576", "page_align=576", "page_align=64")
fault = of("jax_sparse_mla/kv_cache/layout.py", "tests/kv_cache/test_layouts.py")
fault("engine-floor", "vLLM's V4.1 rows have FlashMLA's least scale",
      "(_SGLANG, -13), (_VLLM, -22)", "(_SGLANG, -13), (_VLLM, -13)")
fault = of("jax_sparse_mla/kv_cache/rows.py", "tests/kv_cache/test_kv_cache.py")
fault("eighth-scale-byte", "the unused eighth scale byte of a V4 token is overwritten",
      "_footer_start(cache, offset), scales)\n    return",
      "_footer_start(cache, offset), jnp.pad(scales, ((0, 0), (0, layout.footer_scale_bytes - layout.scale_bytes))))"
      "\n    return")
fault("gather-no-slot", "a slot that is none gives the bytes of another",
      "jnp.where(valid[:, None], decode_rows(layout, rows, scales, cache.tensor_scale), jnp.uint16(0))",
      "decode_rows(layout, rows, scales, cache.tensor_scale)")
fault = of("jax_sparse_mla/kv_cache/windows.py", "tests/kv_cache/test_kv_cache.py")
fault("slot-past-the-end", "the slots of a page past the last one exist",
      "valid = (slots >= 0) & (page < num_pages)", "valid = (slots >= 0) & (page <= num_pages)")
fault = of("jax_sparse_mla/kv_cache/split.py", "tests/kv_cache/test_kv_pages.py")
fault("split-pieces", "the pieces of a page go to the wrong small pages",
      "pages[:, None] * ratio + jnp.arange(ratio, dtype=jnp.int32)",
      "pages[:, None] * ratio + jnp.arange(ratio, dtype=jnp.int32)[::-1]")
fault = of("jax_sparse_mla/kv_cache/pool.py", "tests/layers/test_layer_pools.py")
fault("layer-of-a-pool", "a layer's view begins at the layer before",
      "self.layer_index * rows", "max(self.layer_index - 1, 0) * rows")
fault = of("jax_sparse_mla/kv_cache/number_formats.py", "tests/kv_cache/test_triton_kv.py")
fault("triton-ue8m0-rounding", "Triton cache writer: 448 · 2^k takes the next scale",
      "((amax & _MANTISSA_MASK) > _MANTISSA_OF_1_75)", "((amax & _MANTISSA_MASK) >= _MANTISSA_OF_1_75)")
fault = of("jax_sparse_mla/kv_cache/triton.py", "tests/kv_cache/test_triton_kv.py")
fault("triton-split-footer", "Triton page split: the scales of the pieces are the first piece's",
      "RATIO * body + piece * footer + start", "RATIO * body + start")

# --- attention --------------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/attention/reference.py", "tests/attention/test_attention_reference.py",
           "tests/attention/test_sparse_mla.py")
fault("attention-scale", "scores are not scaled",
      'scores = softmax_scale * jnp.einsum("hd,kd->hk", q', 'scores = jnp.einsum("hd,kd->hk", q')
fault("attention-length", "a column past topk_length is read",
      "(jnp.arange(index.shape[0]) < length)", "(jnp.arange(index.shape[0]) <= length)")
fault("attention-minus-one", "an index of −1 is the last row",
      "exists = (index >= 0) & (index < num_rows)", "exists = index < num_rows")
fault("attention-duplicates", "an index given twice counts once",
      "exists = (index >= 0) & (index < num_rows)",
      "exists = (index >= 0) & (index < num_rows)\n"
      "    exists &= jnp.argmax(index == index[:, None], axis=1) == jnp.arange(index.shape[0])")
fault("attention-lse-base", "lse is in base 2", "shift[:, 0] + jnp.log(total))", "shift[:, 0] + jnp.log2(total))")
fault("attention-poison", "what is skipped is multiplied by 0, and NaN stays",
      "keys = jnp.where(valid[:, None], keys, 0.0)", "keys = jnp.where(valid[:, None], keys, keys)")
fault = of("jax_sparse_mla/attention/merge.py", "tests/attention/test_merge.py")
fault("sink-sign", "a larger sink leaves more of the output",
      "jnp.where(finite, lse, 0.0) - jnp.where(finite, attn_sink, 0.0)",
      "jnp.where(finite, lse, 0.0) + jnp.where(finite, attn_sink, 0.0)")
fault("sink-infinite", "a sink of −inf gives 0, one of +inf changes nothing",
      "jnp.where(attn_sink == jnp.inf, 0.0, 1.0)", "jnp.where(attn_sink == jnp.inf, 1.0, 0.0)")
fault("merge-absent", "a part without a key may hold NaN, and spoils the others",
      "jnp.where(absent[..., None], 0.0, outs.astype(jnp.float32))", "outs.astype(jnp.float32)")
fault("merge-lse", "the merged lse is the largest part's",
      "jnp.where(empty, -jnp.inf, shift + jnp.log(total))", "jnp.where(empty, -jnp.inf, shift)")
fault = of("jax_sparse_mla/attention/extend.py", "tests/attention/test_extend.py")
fault("extend-empty-slot", "a workspace row without a slot is a key of zeros",
      "slots[jnp.where(reachable, indices, 0)] >= 0", "slots[jnp.where(reachable, indices, 0)] >= -1",
      why="no index of the tests names a workspace row without a slot")
fault = of("jax_sparse_mla/attention/gradient.py", "tests/attention/test_gradient.py")
fault("gradient-lse", "the gradient of lse has the wrong sign", "factor * delta - g_lse", "factor * delta + g_lse")
fault("gradient-sink", "the sink's gradient is not weighted by its share", "taken * delta, 0.0)", "delta, 0.0)")
fault("gradient-fixed-point", "a negative sum of 64 bits loses its carry", "~high + (low == 0)", "~high")
fault = of("jax_sparse_mla/attention/context_parallel.py", "tests/attention/test_context_parallel.py")
fault("context-parallel-last-slot", "the slot past the last device's is read",
      "min(n * cache.num_slots - 1,", "min(n * cache.num_slots,", why="no test asks for the slot past the last one")
fault = of("jax_sparse_mla/attention/route.py", "tests/attention/test_route.py")
fault("route-gather", "a chunk of exactly 256 rows is not gathered",
      "GATHERED_FROM_ROWS = 256", "GATHERED_FROM_ROWS = 257")
fault("route-few-keys", "FlashMLA serves one block less a multiprocessor",
      "_BLOCKS_PER_SM_BEFORE_FLASHMLA = 5", "_BLOCKS_PER_SM_BEFORE_FLASHMLA = 4")
fault = of("jax_sparse_mla/attention/backend.py", "tests/attention/test_route.py")
fault("route-heads", "FlashMLA does not serve 128 heads",
      "call.num_heads > self.max_heads", "call.num_heads >= self.max_heads")
fault = of("jax_sparse_mla/backend.py", "tests/attention/test_route.py")
fault("route-override", "an override is not followed", "chosen = override or next(", "chosen = next(")
fault("route-sm80", "GPUs of compute capability 8.x get no kernel", "((8, 0), (99, 9))", "((9, 0), (99, 9))")
fault("route-capability", "SM103 gets no FlashMLA", "((10, 0), (10, 9))", "((10, 0), (10, 0))")
fault = of("jax_sparse_mla/attention/machine.py", "tests/attention/test_attention_arguments.py")
fault("override-order", "the variable of both phases goes before the phase's own",
      'names = (f"JAX_SPARSE_MLA_{phase.upper()}_BACKEND", "JAX_SPARSE_MLA_BACKEND")',
      'names = ("JAX_SPARSE_MLA_BACKEND", f"JAX_SPARSE_MLA_{phase.upper()}_BACKEND")')
fault = of("jax_sparse_mla/attention/triton/kernel.py", "tests/attention/test_triton_attention.py")
fault("triton-attention-lse", "Triton attention: lse is in base 2", "return lse_2 * LN_2", "return lse_2")
fault("triton-attention-sink", "Triton attention: the sink is scaled by ln 2",
      "logit = tl.load(sink + heads, mask=heads < num_heads, other=0.0)",
      "logit = tl.load(sink + heads, mask=heads < num_heads, other=0.0) * LN_2")
fault = of("jax_sparse_mla/attention/triton/backward.py", "tests/attention/test_gradient.py")
fault("triton-gradient-offset", "Triton gradient: the softmax's own term has the wrong sign",
      "dp * head_factor[:, None] - head_offset[:, None]", "dp * head_factor[:, None] + head_offset[:, None]")
fault = of("interop/sparse_mla_torch/attention/gradient.py", "tests/torch_face/test_torch_gradient.py")
fault("torch-gradient-columns", "the CUDA kernel's columns of dkv stay in its own order",
      ".transpose(1, 2))", ".reshape(-1, 2, 4, 2))")
fault = of("jax_sparse_mla/attention/triton/sanitise.py", "tests/attention/test_flashmla_sanitise.py",
           "tests/torch_face/test_flash_mla_drop_in.py")
fault("triton-sanitise", "Triton sanitiser: the slot past the last one stays",
      "(slot >= 0) & (slot < num_slots)", "(slot >= 0) & (slot <= num_slots)")
fault = of("jax_sparse_mla/indices/triton_ownership.py", "tests/attention/test_context_parallel.py")
fault("triton-pack-last", "Triton packing: the last slot is nobody's", "(index <= last)", "(index < last)")
fault = of("jax_sparse_mla/launch/transforms.py", "tests/launch/test_dispatch.py")
fault("dispatch-vmap", "under vmap an argument that is not mapped is taken apart",
      "lambda batched: 0 if batched else None", "lambda batched: 0",
      why="the tests that map some arguments alone do not notice it")

# --- metadata ---------------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/metadata/rows.py", "tests/metadata/test_metadata.py")
fault("extend-causal", "each row of a chunk sees the token after it",
      "take_or_minus_one(row_counts, owner) - 1 - row_in_request",
      "take_or_minus_one(row_counts, owner) - 2 - row_in_request")
fault("verify-lengths", "TARGET_VERIFY does not count the drafts",
      "jnp.minimum(request_lens, longest) + rows_each, 0)", "jnp.minimum(request_lens, longest), 0)")
fault("draft-extend-lengths", "DRAFT_EXTEND counts its tokens twice",
      "    if batch.mode is ForwardMode.TARGET_VERIFY:\n", "    if batch.mode in _FIXED_ROWS_MODES:\n")
fault("idle-rows", "the requests of an IDLE step are served",
      "    if batch.mode is ForwardMode.IDLE:\n", "    if batch.mode is ForwardMode.IDLE and not num_requests:\n")
fault("rows-overflow", "more query rows than out_cache_loc holds are no overflow",
      "> bucket(batch, tables)) | (starts[-1] > num_rows)", "> bucket(batch, tables))")
fault = of("jax_sparse_mla/metadata/draft.py", "tests/metadata/test_draft.py")
fault("draft-step", "a draft step does not attend to its own token", "advance = step + 1", "advance = step")
fault("draft-padding", "a padding request gets a length in a draft",
      "live = in_range & (seq_lens > 0)", "live = in_range")
fault = of("jax_sparse_mla/metadata/v4.py", "tests/metadata/test_metadata.py")
fault("compressed-slot", "a compressed entry is written a slot too far",
      "write_slots // ratio, 0)", "write_slots // ratio + 1, 0)")
fault("compressed-length", "a request without an entry has a length of 0", "jnp.maximum(lengths, 1), 0)", "lengths, 0)")
fault = of("jax_sparse_mla/metadata/v32.py", "tests/metadata/test_metadata.py", "tests/layers/test_kpool_layer.py")
fault("pooled-topk-length", "a model of pools does not read its tail", "spec.index_topk) + lengths % pool",
      "spec.index_topk)", why="no test of pools has more tokens than topk and a tail")
fault = of("jax_sparse_mla/metadata/schedules.py", "tests/metadata/test_schedules.py")
fault("schedule-first-split", "a partition that ends within its request is not marked as a split",
      "first_split = (begin_block > 0) | (one_request & cut)", "first_split = begin_block > 0")
fault("paged-mqa", "the multiprocessors with one split more are the first ones",
      "first_with_one_more = num_sms - total % num_sms", "first_with_one_more = total % num_sms")
fault = of("jax_sparse_mla/metadata/selection.py", "tests/metadata/test_selection.py")
fault("prefill-threshold", "512 keys a query are gathered",
      "total_kv_tokens < _KV_TOKENS_PER_QUERY", "total_kv_tokens <= _KV_TOKENS_PER_QUERY")
fault = of("jax_sparse_mla/metadata/prefill_plan.py", "tests/metadata/test_prefill_plan.py")
fault("plan-overflow", "a window region that just fits overflows",
      "swa_starts[-1] > swa_capacity", "swa_starts[-1] >= swa_capacity")
fault("plan-fits", "a request whose entries do not all fit keeps its rows",
      "fits = starts[1:] <= compressed_capacity", "fits = starts[:-1] <= compressed_capacity")
fault = of("jax_sparse_mla/metadata/triton/v4.py", "tests/metadata/test_triton_metadata.py")
fault("triton-v4-causal", "Triton V4 metadata: each row sees the token after it",
      "causal = length - (count - 1 - (row - start))", "causal = length - (count - 2 - (row - start))")
fault = of("jax_sparse_mla/metadata/triton/v32.py", "tests/metadata/test_triton_metadata_v32.py")
fault("triton-v32-topk", "Triton V3.2 metadata: the top-k length is not cut",
      "tl.minimum(causal, INDEX_TOPK)", "causal")

# --- compressor -------------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/rope.py", "tests/compressor/test_compressor.py")
fault("rope-inverse", "the inverse rotation turns forward", "jnp.sin(-angle if inverse else angle)", "jnp.sin(angle)")
fault = of("jax_sparse_mla/compressor/api.py", "tests/compressor/test_compressor.py")
fault("compressor-rope", "an entry stands at its last token",
      "tokens.positions[jnp.maximum(row, 0)] - (ratio - 1)", "tokens.positions[jnp.maximum(row, 0)]")
fault = of("jax_sparse_mla/compressor/state.py", "tests/compressor/test_compressor.py")
fault("compressor-ring", "a token is kept at the ring's next place",
      "request + zero, tokens.positions % ring", "request + zero, (tokens.positions + 1) % ring")
fault("compressor-overlap", "the halves A and B are exchanged", "slice(group * head_dim, (group + 1) * head_dim)",
      "slice((coff - 1 - group) * head_dim, (coff - group) * head_dim)")
fault = of("jax_sparse_mla/compressor/triton.py", "tests/compressor/test_triton_compressor.py")
fault("triton-compressor-rope", "Triton compressor: an entry stands at its last token",
      "(last_position - (RATIO - 1)).to(tl.float32)", "last_position.to(tl.float32)")
fault("triton-compressor-tail", "Triton compressor: tokens of the step before the last 8 are taken from the ring",
      "if of_ring < window - UNROLL", "if of_ring < window - LOADED")
fault("triton-compressor-last-block", "Triton compressor: a window's last block is left out in a step of decoding",
      "tl.range(ring_end, window, UNROLL)", "tl.range(ring_end, window - UNROLL, UNROLL)")
fault("triton-compressor-first-block", "Triton compressor: a window's first block is left out in a prompt's chunk",
      "tl.range(0, step_begin, UNROLL)", "tl.range(UNROLL, step_begin, UNROLL)")

# --- layers and models ------------------------------------------------------------------------------------------------
fault = of("jax_sparse_mla/layers/write.py", "tests/layers/test_layer_write.py", "tests/layers/test_step.py")
fault("layer-entry-slot", "rows that complete no group write to slot 0", "step.entry_slots[jnp.maximum(rows, 0)], -1)",
      "step.entry_slots[jnp.maximum(rows, 0)], 0)", why="slot 0 lies in the page of padding, which nothing reads")
fault("layer-index-weights", "index weights go without the queries' scale",
      "index.weights * q_scale)", "index.weights)")
fault = of("jax_sparse_mla/layers/state.py", "tests/layers/test_shared_indexer.py")
fault("shared-indexer-layer", "a layer reads the index keys of another",
      "part.layer(sum(self.indexed[:index]))", "part.layer(0)")
fault = of("jax_sparse_mla/layers/state.py", "tests/layers/test_speculative_step.py")
fault("layer-ring-of-drafts", "the compressor's ring has no room for drafts",
      "compressor_window(ratio, kind.overlap) + max_draft_tokens", "compressor_window(ratio, kind.overlap)")
fault = of("jax_sparse_mla/layers/write.py", "tests/layers/test_v41_layers.py")
fault("v41-entry-position", "an entry of V4.1 stands at its last token",
      "step.positions[jnp.maximum(entry_rows, 0)] - (kind.ratio - 1)", "step.positions[jnp.maximum(entry_rows, 0)]")
fault = of("jax_sparse_mla/layers/checks.py", "tests/layers/test_layer_checks.py")
fault("check-ring", "a ring one token too short is accepted",
      "(needed := window + drafts - 1)", "(needed := window + drafts - 2)")
fault = of("jax_sparse_mla/models/deepseek_v41.py", "tests/layers/test_models.py")
fault("config-v41-source", "a V4.1 layer that is a source reads the one before",
      "[i for i in sources[name] if i <= layer]", "[i for i in sources[name] if i < layer]")
fault = of("jax_sparse_mla/models/deepseek_v32.py", "tests/layers/test_models.py")
fault("config-mscale", "yarn's mscale is not squared in the softmax scale",
      "head_dim**-0.5 * mscale**2", "head_dim**-0.5 * mscale")
fault = of("jax_sparse_mla/models/deepseek_v32.py", "tests/serving/test_config.py")
fault("config-shared-schedule", "the schedule of shared indexers is a layer late",
      "max(i - offset + 1, 0) % max(freq, 1)", "max(i - offset, 0) % max(freq, 1)")
fault = of("jax_sparse_mla/layers/triton.py", "tests/layers/test_triton_layer.py")
fault("triton-layer-weights", "Triton layer kernel: index weights go without the queries' scale",
      "weights * scale, mask=inside)", "weights, mask=inside)")

# --- arguments, sharding, libraries -----------------------------------------------------------------------------------
fault = of("jax_sparse_mla/argument_checks.py", "tests/contract/test_bad_input.py")
fault("argument-names", "dimensions of one name need not agree", "expected = dims[expected]", "expected = size")
fault = of("jax_sparse_mla/debug.py", "tests/contract/test_debug.py")
fault("debug-indices", "the index past the last slot is not reported",
      "((indices < -1) | (indices >= num_slots))", "((indices < -1) | (indices > num_slots))")
fault = of("jax_sparse_mla/sharding.py", "tests/attention/test_sharding.py")
fault("sharding-sum", "devices that hold parts of a sum do not add them",
      "tree.unflatten(jax.lax.psum(x, axes) if axes else x for", "tree.unflatten(x if axes else x for",
      why="the quick tests cut no result that is a sum")
fault = of("jax_sparse_mla/serving/kept_programs.py", "tests/serving/test_kept_programs.py")
fault("kept-calls", "a kept program's calls are not made again", "        tvm.restore(bound)\n", "")
fault("kept-usable", "a kept program ignores which kernels can be loaded", "_versions(), expected(),", "_versions(),")
fault("kept-failed", "a program is kept under the name of kernels that could not be built",
      "    if usable() != expected():", "    if False:")
fault("kept-loaded", "a CPU's program that JAX's cache gave is kept",
      "path is None or (was_loaded and", "path is None or (False and")
fault("kept-settings", "a kept program ignores JAX's settings", "sorted(settings.items()), ", "")
fault("kept-variables", "a kept program ignores the environment", "items()), variables", "items())")
fault("kept-owner", "a kept program that others can write is loaded", " or open_to_others(path.lstat())", "")
fault("kept-address", "a program that is named by an address is kept", '" at 0x" in parts or ', "")
fault = of("jax_sparse_mla/launch/compile_cache.py", "tests/launch/test_compile_cache.py")
fault("library-flags", "a library compiled with other flags is taken",
      "_digest(library.compiler, library.flags, contents)", "_digest(library.compiler, contents)")
fault("library-nvcc-variable", "NVCC_PREPEND_FLAGS is no part of a library's name",
      '_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")', '_FLAG_VARIABLES = ("NVCC_APPEND_FLAGS",)')
fault("library-group", "a library that the group may write is loaded", "(stat.S_IWGRP | stat.S_IWOTH)", "stat.S_IWOTH")
fault("library-lock", "libraries wait for each other",
      'folder / f".{_file_name(library)}.lock"', 'folder / ".lock"')
fault("library-asked-again", "whoever waited for a library compiles it again",
      "return _open_cached(library, folder, opener) or _compile", "return _compile")
fault("library-lock-left", "a lock's file stays", "held.callback(path.unlink, missing_ok=True)", "pass")
fault("library-files", "files of a library are compiled one after another",
      "with ThreadPoolExecutor(len(units))", "with ThreadPoolExecutor(1)")
fault = of("jax_sparse_mla/packages.py", "tests/launch/test_packages.py")
fault("once-waits", "threads that want the same compute it each",
      "        with locks[key]:\n            return cached(*key)",
      "        return cached(*key)")
fault("once-all-wait", "threads that want different things wait for each other", "with locks[key]:", "with locks[0]:")
fault("packages-cache", "an import leaves Triton without its cache folder",
      'os.environ.pop("TRITON_CACHE_DIR", None)\n        else', "pass\n        else")

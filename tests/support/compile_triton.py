"""Compiles Triton kernels without a GPU, as the launchers do, and prints a JSON list of facts about them.

    python compile_triton.py NAME CAPABILITY[,CAPABILITY…]     NAME: one of KERNELS

Run by `compiled_facts` in a process of its own, because Triton's interpreter, once on, replaces the compiler.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import triton
from sparse_mla_torch.transformers import scores
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jax_sparse_mla.attention.backend import GradientArrays
from jax_sparse_mla.attention.exchange import _words
from jax_sparse_mla.attention.index_table import TableShape
from jax_sparse_mla.attention.triton import exchange as context_parallel
from jax_sparse_mla.attention.triton import merge, sanitise
from jax_sparse_mla.attention.triton.backward import backward, probabilities, statistics
from jax_sparse_mla.attention.triton.kernel import combine_kernel, sparse_mla_kernel
from jax_sparse_mla.attention.triton.launch import CallShape, launches
from jax_sparse_mla.compressor import triton as compressor
from jax_sparse_mla.indexer import triton as indexer
from jax_sparse_mla.indexer import triton_candidates, triton_fp4
from jax_sparse_mla.indices import triton as indices
from jax_sparse_mla.indices import triton_ownership
from jax_sparse_mla.indices.topk import triton as topk
from jax_sparse_mla.kv_cache import triton as kv_cache
from jax_sparse_mla.kv_cache.layout import KVLayout, Pages, workspace_layout
from jax_sparse_mla.launch import triton_versions
from jax_sparse_mla.launch.describe import Device, Launch
from jax_sparse_mla.layers import triton as layer
from jax_sparse_mla.layers.write import Step
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.metadata.batch import row_constants
from jax_sparse_mla.metadata.triton import schedules, window
from jax_sparse_mla.metadata.triton import v4 as metadata
from jax_sparse_mla.metadata.triton import v32 as metadata_v32
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32
from jax_sparse_mla.serving import heads_triton, hyper_connections_triton, quantised_triton
from jax_sparse_mla.serving.heads import Part

_POINTERS = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32", "uint8": "*u8"}
OPTIONS = "num_warps", "num_stages", "maxnreg"  # Triton's, among a kernel's constants
WHOLE = 90  # for this capability every case is compiled


def compile_kernel(kernel, pointers, constants, capability, **options):
    """Pointers are aligned to 16 bytes; other run-time arguments are int32, unless `pointers` says otherwise."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: pointers.get(name, "i32") for name in names} | dict.fromkeys(constants, "constexpr")
    attrs = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def in_ptx(text: str) -> Callable[[object], bool]:
    return lambda kernel: text in kernel.asm["ptx"]


def facts(name: str, capabilities: list[int]) -> Iterator[dict]:
    """Each compiled kernel's capability, name, shared memory, and what KERNELS asks of it.

    Cases are (name, kernel, argument types, constants with num_warps). SM90 gets all of them. The others get the first
    case of each kernel, and each case whose types or constants differ from SM90's: the rest is the same code again.
    """
    cases, questions = KERNELS[name]
    usual = {name: (types, constants) for name, _, types, constants in cases(WHOLE)}
    for capability in capabilities:
        seen = set()
        for name, kernel, types, constants in cases(capability):
            all_of_them = capability == WHOLE or cases is attention_cases
            if all_of_them or kernel not in seen or usual[name] != (types, constants):
                seen.add(kernel)
                options = {name: constants[name] for name in OPTIONS if name in constants} | triton_versions.OPTIONS
                constants = {name: x for name, x in constants.items() if name not in OPTIONS}
                made = compile_kernel(kernel, types, constants, capability, **options)
                assert made.asm["cubin"], name
                fact = {"capability": capability, "kernel": name, "shared": made.metadata.shared}
                yield fact | {key: find(made) for key, find in questions.items()}


class Array(NamedTuple):
    """What a launch's description reads of an array."""

    shape: tuple[int, ...]
    dtype: str = "float32"


class Recorder:
    """An executor that runs nothing: `cases` are its launches, for `compile_kernel`."""

    def __init__(self, capability: int):
        self.device, self.cases = Device(divmod(capability, 10), 132), []

    def __call__(self, launch: Launch, inputs: Any, out: Any = None) -> tuple[Array | None, ...]:
        results = tuple(None if x is None else Array(tuple(x.shape), x.dtype) for x in launch.outputs)
        given = dict(zip(launch.kernel.arg_names, (*inputs, *launch.scalars, *results)))
        types = {name: self._type(x) for name, x in given.items() if x is not None}
        constants = launch.constants | {name: None for name, x in given.items() if x is None}
        self.cases.append((launch.name, launch.kernel, types, constants))
        return results

    def _type(self, x: Array | float) -> str:
        if not isinstance(x, Array):
            return "fp32" if isinstance(x, float) else "i32"
        e4m3 = "*fp8e4nv" if self.device.hardware_fp8 else "*u8"
        return e4m3 if x.dtype == "float8_e4m3fn" else _POINTERS[x.dtype]


TOPK_SHAPES = [(64, 131_072, 2048), (64, 131_072, 512), (4096, 131_072, 2048), (1, 8192, 512), (1, 300, 64)]


def topk_cases(capability):
    integers = "lengths row_starts page_table row_to_request offsets candidate_positions num_candidates progress out"
    types = dict.fromkeys(integers.split(), "*i32")
    types |= dict.fromkeys(("logits", "candidates", "thresholds"), "*fp32")
    for rows, columns, k in TOPK_SHAPES:
        name = f"{rows} x {columns}, {k}"
        plan = topk.plan_topk(rows, columns, k)
        smallest = (rows, columns, k) == TOPK_SHAPES[-1]
        # The transforms differ by one addition: the other one is compiled at the smallest shape alone.
        for method in (topk.PAGED, topk.RAGGED) if smallest else (topk.PAGED,):
            constants = topk.select_constants(plan, k, method.value, 64, True, True)
            yield f"select {method.value} {name}", topk.topk_select_kernel, types, constants
        if plan.filtered:
            yield f"filter {name}", topk.topk_filter_kernel, types, topk.filter_constants(plan, k, True)
            yield f"threshold {name}", topk.topk_threshold_kernel, types, topk.threshold_constants(plan, k, True)


# The newer layouts that are compiled, the second cache's behind a "+": of each tile one capability in every run, and
# for the long test's capabilities the other ways to read rows.
NEWER = dict.fromkeys((80, 90, 100), ("V41_FP8", "V41_FP8+V41_FP4"))
NEWER |= dict.fromkeys((89, 120), ("V41_FP8_SPLIT+V41_FP4_SPLIT", "NOPE_FP8_TENSOR"))
ATTENTION_TYPES = {"q": "*bf16", "qk_scale": "fp32"} | dict.fromkeys(("partial", "partial_lse"), "*fp32")
ATTENTION_TYPES |= dict.fromkeys(("sink", "scale", "extra_scale", "lse", "max_logits"), "*fp32")
ATTENTION_TYPES |= dict.fromkeys(("indices", "lengths", "extra_indices", "extra_lengths"), "*i32")


def attention_cases(capability):
    def typed(kernel, constants, **types):
        types = ATTENTION_TYPES | types
        return kernel, {n: types[n] for n in kernel.arg_names if n in types and n not in constants}, constants

    def attention(layouts, num_heads, *, prefill):
        sizes = [(0, 0, 0, 0)] * 2 if prefill else [(n, x.page_bytes(n), 0, 0, x) for n, x in zip((256, 64), layouts)]
        tables = [TableShape(topk, 1, 16_384, *size) for topk, size in zip((128, 512), sizes)]
        shape, device = CallShape(layouts[0], 64, num_heads, tables, 0.1, True), Device(divmod(capability, 10), 132)
        launch, _ = launches(shape, device, max_logits=prefill, may_split=not prefill)
        absent = [] if prefill else ["max_logits"]
        absent += [] if layouts[0].has_tensor_scale else ["scale", "extra_scale"]
        out, cache = "*fp32" if launch.grid[1] > 1 else "*bf16", "*bf16" if prefill else "*u8"
        return typed(sparse_mla_kernel, launch.constants | dict.fromkeys(absent), kv=cache, extra_kv=cache, out=out)

    for name, num_heads in (("V4_FP8", 64), ("V32_FP8", 128), *((name, 64) for name in NEWER[capability])):
        first, *extra = (getattr(KVLayout, x) for x in name.split("+"))
        yield name, *attention((first, *(extra or [first])), num_heads, prefill=False)
    yield "workspace 576", *attention((workspace_layout(576),) * 2, 16, prefill=True)
    constants = {"HAS_SINK": True, "EMPTY_IS_INF": True, "ALL_SPLITS": 16, "SOME_SPLITS": 8}
    yield "combine", *typed(combine_kernel, constants, out="*bf16")


def context_parallel_cases(capability):
    record = Recorder(capability)

    def ints(*shape):
        return Array(shape, "int32")

    lists = (64, 2**20, True), (16, 2**31 - 1, True)
    tables = ints(64, 128), ints(64), ints(64, 512), ints(64)
    triton_ownership.pack(record, ints(), *tables, size=2, lists=lists)
    triton_ownership.pack(record, ints(), ints(64, 128), ints(64, 8320), size=3, lists=[(256, 9, False)] * 2)
    triton_ownership.pack(record, ints(), ints(64, 2048), size=8, lists=[(64, 2**20, False)])
    for dtype, rows, heads, parts in (("bfloat16", 64, 64, 2), ("float32", 7, 6, 3)):
        out, lse = Array((rows, 1, heads, 512), dtype), Array((rows, 1, heads))
        words = parts, _words(rows * heads // parts, 512, jnp.dtype(dtype))
        context_parallel.send(record, out, lse, words=words)
        shape = rows, 1, heads // parts, 512
        context_parallel.merge_received(record, ints(*words), shape=shape, dtype=dtype)
        context_parallel.merge_received(record, ints(*words), Array(shape[2:3]), shape=shape, dtype=dtype)
    return [(f"{name} {i}", *rest) for i, (name, *rest) in enumerate(record.cases)]


def gradient_cases(capability):
    rarer = ((64, 512, False), (64, 576, False)) if capability == WHOLE else ()  # elsewhere a tile has room to spare
    for heads, qk_dim, fixed_point in (*rarer, (64, 576, True)):
        execute = Recorder(capability)
        q, kv, indices = (
            Array((64, heads, qk_dim), "bfloat16"),
            Array((512, qk_dim), "bfloat16"),
            Array((64, 96), "int32"),
        )
        of_heads, grad = Array((64, heads)), Array((64, heads, 512), "bfloat16")
        scales = Array((512,)) if fixed_point else None
        lengths = Array((64,), "int32")
        arrays = GradientArrays(q, kv, indices, lengths, grad, of_heads, of_heads, of_heads, scales)
        backward(execute, arrays, softmax_scale=0.1)
        if fixed_point:
            probabilities(execute, q, kv, indices, None, of_heads, softmax_scale=0.1)
            statistics(execute, Array((heads,)), grad, of_heads, grad, of_heads)
        for name, *case in execute.cases:
            number = "fixed point" if fixed_point else "float32"
            yield f"{name} {qk_dim}" + f" {number}" * (name == "sparse_mla_backward"), *case


def types(kernel, **others):
    """The types of the kernel's pointers: int32, unless a list here or the caller says otherwise."""
    names = {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")}
    names |= dict.fromkeys(("weights_ptr", "scale_ptr"), "*fp32")
    names |= {"cache_ptr": "*u8", "cache_in_ptr": "*u8"} | others
    return {name: names[name] for name in kernel.arg_names if name in names}


def indexer_cases(capability):
    hardware_fp8 = capability >= 89
    e4m3 = "*fp8e4nv" if hardware_fp8 else "*u8"
    fp8 = {"HARDWARE_FP8": hardware_fp8}
    for hadamard in (True, False):
        constants = fp8 | {"HADAMARD": hadamard}
        for dtype, of in (("*bf16", "bfloat16"), ("*fp32", "float32")):
            kernel = indexer.quantize_index_q_kernel
            pointers = types(kernel, q_ptr=dtype, values_ptr=e4m3)
            yield f"quantise q {dtype} {hadamard}", kernel, pointers, constants | indexer.QUANTIZE_OPTIONS[of]
            kernel = indexer.write_index_k_kernel
            write = constants | {"PAGE_SIZE": 64} | indexer.WRITE_OPTIONS
            yield f"write k {dtype} {hadamard}", kernel, types(kernel, k_ptr=dtype), write
    for rows in (64, 8192):
        for fp4, heads, page_size in ((False, 64, 64), (False, 32, 64), (True, 32, 64), (True, 64, 11)):
            plan = indexer.plan_logits(rows, heads, 512, page_size, 132, fp4=fp4)
            pointers = types(plan.kernel, q_ptr="*bf16" if fp4 else e4m3, out_ptr="*fp32")
            name = f"logits{' of FP4 keys' * fp4} {rows} {heads} {page_size}"
            yield name, plan.kernel, pointers, plan.constants | fp8 | {"FILL": True}
        plan = indexer.plan_logits(rows, 32, 2048, 64, 132, run=8, fp4=True)
        pointers = types(plan.kernel, q_ptr="*bf16", out_ptr="*fp32")
        yield f"logits of FP4 keys in runs {rows}", plan.kernel, pointers, plan.constants | fp8 | {"FILL": False}
    yield from recorded(capability, "64", candidate_kernels, 64)
    for hadamard in (False, True):
        yield from recorded(capability, f"fp4 {hadamard}", fp4_quantisers, hadamard)
    for ratio, head_dim, rows in ((4, 512, 64), (4, 128, 2048), (128, 512, 8192)):
        yield from recorded(capability, f"{ratio} {head_dim}", compress, ratio, head_dim, rows)
    for ratio, rows, layers in ((0, 8, 1), (4, 8, 43), (128, 8, 43)):
        yield from recorded(capability, f"{ratio} {rows}", write_layer, ratio, rows, layers)


def candidate_kernels(execute, rows):
    triton_candidates.block_scores(execute, Array((rows, 65_536)), Array((rows,), "int32"), block_size=8)
    blocks, table = Array((rows, 2048), "int32"), Array((rows, 1024), "int32")
    sizes = {"block_size": 8, "page_size": 64, "num_pages": 4096}
    triton_candidates.candidate_runs(execute, blocks, table, Array((rows,), "int32"), **sizes)


def fp4_quantisers(execute, hadamard):
    triton_fp4.round_queries_to_fp4(execute, Array((64, 32, 128), "bfloat16"), hadamard=hadamard)
    arrays = Array((9, 64 * 68), "uint8"), Array((64,), "int32"), Array((64, 128))
    triton_fp4.write_index_k(execute, *arrays, hadamard=hadamard, least_exponent=-13, keeps_zero=False)


def transformers_cases(capability):
    for rows, columns in ((1, 8192), (2048, 32768)):
        arrays = Array((1, rows, 64, 128), "bfloat16"), Array((1, rows, 64), "float32")
        arrays += Array((1, columns, 128), "bfloat16"), Array((1, rows), "int32")
        launch = scores.described(1, rows, 64, 128, columns, columns)
        yield from recorded(
            capability, f"{rows}", lambda execute, launch, *arrays: execute(launch, arrays), launch, *arrays
        )


def recorded(capability, name, function, *arguments):
    """The launches that a function describes, as cases."""
    recorder = Recorder(capability)
    function(recorder, *arguments)
    for launch, *case in recorder.cases:
        yield f"{launch} {name}", *case


def compressor_arrays(ratio, head_dim, rows, layers=1):
    """kv, score, ape, norm_weight, inv_freq and the two arrays of the state."""
    width, ring = head_dim * (2 if ratio == 4 else 1), 8 if ratio == 4 else 128
    step, state = Array((rows, width), "bfloat16"), Array((layers * 64, ring, width))
    parameters = Array((layers * ratio, width)), Array((layers * head_dim,)), Array((layers * 32,))
    return step, step, *parameters, state, state


def compress(execute, ratio, head_dim, rows):
    kv, score, *parameters, state_kv, state_score = compressor_arrays(ratio, head_dim, rows)
    step = Array((rows,), "int32"), Array((rows,), "int32"), Array((65,), "int32")
    static = {"ratio": ratio, "norm_eps": 1e-6, "num_entries": rows // ratio + 64}
    compressor.compress(execute, state_kv, state_score, kv, score, *step, *parameters, **static)


def write_layer(execute, ratio, rows, layers):
    layout, ints = KVLayout.V4_FP8, Array((rows,), "int32")
    parts = [layer.NOTHING, layer.NOTHING, (None, None, None)]
    if ratio:
        cache = Array((layers * 64, layout.page_bytes(256 // ratio)), "uint8")
        parts[0] = layer.Compressing(*compressor_arrays(ratio, 512, rows, layers), cache)
    if ratio == 4:
        cache = Array((layers * 64, 64 * 132), "uint8")
        parts[1] = layer.Compressing(*compressor_arrays(ratio, 128, rows, layers), cache)
        parts[2] = Array((rows, 64, 128), "bfloat16"), Array((rows, 64)), Array((128, 128), "bfloat16")
    sizes, where = (256, 256 // (ratio or 1)), (layers, 0)
    constants = layer.LayerConstants(layout, ratio, sizes, where, where, (1e-6, 1e-6))
    step = Step(ints, ints, Array((9,), "int32"), ints, ints if ratio else None)
    swa = Array((layers * 64, layout.page_bytes(256)), "uint8")
    layer.v4_layer(
        execute, step, Array((rows, 512), "bfloat16"), swa, Array((layers * 64,)), *parts, constants=constants
    )


def operand_widths(kernel):
    """How many values a thread holds side by side of a product's operand: the order of the product's sums."""
    return sorted(set(re.findall(r"kWidth = (\d+)", kernel.asm["ttgir"])))


def side_by_side(kernel):
    """How many bytes of a key a thread holds side by side where inline assembly takes words of them; None without."""
    text = kernel.asm["ttgir"]
    layouts = set(re.findall(r"tt\.elementwise_inline_asm .*prmt.* -> tensor<\d+x64xi8, (#\w+)>", text))
    layouts = [re.search(rf"^{name} = (.*)$", text, re.MULTILINE)[1] for name in layouts]
    widths = [re.search(r"sizePerThread = \[1, (\d+)\].*order = \[1, 0\]", layout) for layout in layouts]
    return min((int(width[1]) if width else 1 for width in widths), default=None)


def kv_cases(capability):

    def ints(kernel):
        return {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")}

    data = {"data_ptr": "*u8", "data_in_ptr": "*u8", "out_in_ptr": "*u8", "slots_ptr": "*i32"}
    names = ("V41_FP8", "V41_FP4_SPLIT", "NOPE_FP8_TENSOR")
    layouts = [(getattr(KVLayout, name), "*bf16") for name in ("V4_FP8", *names)]
    for layout, kv in (*layouts, (KVLayout.V32_FP8, "*fp32")):
        constants = kv_cache.layout_constants(layout, 64) | {"HARDWARE_CASTS": capability >= 89}
        if layout.has_tensor_scale:
            data = data | {"scale_ptr": "*fp32"}
        else:
            constants |= {"scale_ptr": None}
        write = constants | {"MIN_SCALE_EXPONENT": layout.min_scale_exponent} | kv_cache.WRITE_OPTIONS
        yield f"write {layout.name}", kv_cache.write_kv_kernel, data | {"kv_ptr": kv}, write
        gather = constants | {"out_in_ptr": None} | kv_cache.GATHER_OPTIONS
        yield f"gather {layout.name}", kv_cache.gather_kv_kernel, data | {"out_ptr": "*bf16"}, gather
    touched, split = kv_cache.touched_pages_kernel, kv_cache.split_pages_kernel
    yield "touched", touched, ints(touched), {"PAGE_SIZE": 256} | kv_cache.TOUCHED_OPTIONS
    split_pointers = ints(split) | data | {"out_ptr": "*u8"}
    split_constants = kv_cache.split_constants(*(Pages(KVLayout.V4_FP8, size, 0, 0) for size in (256, 64)))
    yield "split", split, split_pointers, split_constants | kv_cache.SPLIT_OPTIONS
    swa, topk = indices.combine_swa_extra_kernel, indices.combine_topk_swa_kernel
    yield "swa_extra", swa, ints(swa), {"SWA_WIDTH": 128, "EXTRA_WIDTH": 512, "WIDTH": 640} | indices.SWA_EXTRA_OPTIONS
    topk_constants = {"TOPK_STRIDE": 512, "TOPK": 512, "WINDOW": 128, "RATIO": 4, "WIDTH": 640, "SEARCH_STEPS": 7}
    yield "topk_swa", topk, ints(topk), topk_constants | indices.TOPK_SWA_OPTIONS
    safe = {"TOPK": 128, "WIDTH": 128, "HAS_LENGTHS": True, "HAS_EXTRA_LENGTHS": True}
    safe |= {"EXTRA_TOPK": 512, "EXTRA_WIDTH": 512, "HEADS": 64, "HAS_SINK": True, "LEAST_SINK": -1e30}
    pointers = ints(sanitise.sanitise_kernel) | {"sink_ptr": "*fp32", "out_sink_ptr": "*fp32"}
    yield "sanitise", sanitise.sanitise_kernel, pointers, safe | sanitise.OPTIONS
    absent = ("lengths", "extra", "extra_lengths", "sink", "out_lengths", "extra_out", "extra_out_lengths", "out_sink")
    alone = safe | {"HAS_LENGTHS": False, "HAS_EXTRA_LENGTHS": False, "EXTRA_TOPK": 0, "EXTRA_WIDTH": 0}
    alone |= {"HAS_SINK": False} | {f"{name}_ptr": None for name in absent}
    yield "sanitise one table", sanitise.sanitise_kernel, pointers, alone | sanitise.OPTIONS
    pointers = {"outs_ptr": "*bf16", "out_ptr": "*bf16"}
    pointers |= dict.fromkeys(("lses_ptr", "sink_ptr", "lse_ptr"), "*fp32")
    for has_sink in (False, True):
        constants = merge.constants(512, 3, has_sink) | {"num_warps": 4}
        yield "merge sink" if has_sink else "merge", merge.merge_kernel, pointers, constants
    for norm, joined in (("float32", False), ("bfloat16", True)):
        record, streams = Recorder(capability), Array((3, 4, 4096), "bfloat16")
        weights = Array((25, 16_384)), Array((4096,), norm)
        before = Array((3, 4096), "bfloat16"), Array((3, 4)), Array((3, 4, 4))
        static = {"norm_eps": 1e-6, "eps": 1e-6, "iterations": 20}
        hyper_connections_triton.block_input(record, streams, *weights, *before[: 3 * joined], **static)
        yield from record.cases
    latents = (1536, [Part(0, 1, 1024, 0, True), Part(1024, 1, 512, 64, True)], [Array((1024,)), Array((512,))])
    heads = 40_960, [Part(0, 64, 512, 64, True), Part(32_768, 64, 128, 64, False)], []
    for columns, parts, norms in (latents, heads, (32_768, heads[1][:1], [])):
        record, given = Recorder(capability), (Array((3,), "int32"), Array((32,)))
        x = Array((3, columns), "bfloat16")
        heads_triton.normed_and_rotated(record, x, *given, *norms, parts=tuple(parts), eps=1e-6)
        yield f"normed_and_rotated {columns} {len(parts)}", *record.cases[0][1:]


DRAFT_LAYER = dataclasses.replace(DEEPSEEK_V4_FLASH, compress_ratios=(0,))


def metadata_launches():
    for batch, parts in ((64, 132), (4096, 66)):
        constants = schedules.flashmla_constants(128, 512, batch, parts)
        yield f"flashmla schedule of {batch}", schedules.flashmla_kernel, constants
        constants = schedules.paged_mqa_constants(batch, 132, 256)
        yield f"paged_mqa of {batch}", schedules.paged_mqa_kernel, constants
    yield "flashmla schedule of one cache", schedules.flashmla_kernel, schedules.flashmla_constants(2048, 0, 64, 66)
    for mode, drafts in ((ForwardMode.EXTEND, None), (ForwardMode.TARGET_VERIFY, 4), (ForwardMode.DECODE, None)):
        for spec in (DEEPSEEK_V4_FLASH, DRAFT_LAYER):
            constants = metadata.v4_constants(spec, row_constants(mode, drafts), 64, 131_072)
            name, outputs = f"v4 {mode.name} {len(spec.compress_ratios)} ratios", metadata.v4_outputs(constants, 64, 64)
            fields = metadata.v4_metadata_kernel.arg_names[13:31]
            yield name, metadata.v4_metadata_kernel, dict.fromkeys(fields[len(outputs) :]) | constants
        constants = row_constants(mode, drafts) | window.request_options(64)
        yield f"v32 starts {mode.name}", metadata_v32.request_starts_kernel, constants
        for absent in ({}, {"topk_indices_offset_ptr": None}):
            constants = metadata_v32.v32_constants(DEEPSEEK_V32, row_constants(mode, drafts), 64, 131_072)
            yield f"v32 {mode.name} {len(absent)} absent", metadata_v32.v32_metadata_kernel, absent | constants
    yield "kv_slots", metadata_v32.kv_slots_kernel, {"SEARCH_STEPS": 7} | metadata_v32.SLOTS_OPTIONS
    yield "row_starts", metadata.row_starts_kernel, window.request_options(64)
    yield "swa_slots", window.swa_slots_kernel, {"WINDOW": 128, "BLOCK": 128, "num_warps": 4}
    yield "gather_lens", window.gather_lens_kernel, {"WINDOW": 128} | window.request_options(64)
    yield "gather_slots", window.gather_slots_kernel, {"SEARCH_STEPS": 7} | window.GATHER_OPTIONS


def metadata_cases(capability):
    for name, kernel, constants in metadata_launches():
        pointers = {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")} | {"overflow_ptr": "*i1"}
        yield name, kernel, pointers, constants


def quantised_cases(capability):
    """V4-Flash's experts of few rows, many and very many, V3.2's with float32 scales, a dense weight."""
    for form, rows, sizes in (
        ("fp4", 6, 0),
        ("fp4", 384, 256),
        ("fp4", 49_152, 256),
        ("fp8", 49_152, 256),
        ("fp8", 8192, 256),  # of 32 rows an expert, which fill most of 99 KiB of shared memory
        ("fp8", 8, 0),
    ):
        recorder, (n, k) = Recorder(capability), (4096, 4096)
        dense = (form, rows) == ("fp8", 8)
        of = () if dense else (256,)
        values = Array((*of, n, k if form == "fp8" else k // 2), "uint8")
        scales = Array((*of, n // 128, k // 128)) if form == "fp8" else Array((*of, n, k // 32), "uint8")
        which = None if dense else Array((sizes or rows,), "int32")
        options = {"sizes": bool(sizes), "dtype": "float32" if dense else "bfloat16"}
        quantised_triton.product(recorder, Array((rows, k), "bfloat16"), values, scales, which, **options)
        yield f"{form} of {rows}", *recorder.cases[0][1:]


def wide_copies(kernel):
    return any("cp.async" in line and "0x10" in line for line in kernel.asm["ptx"].splitlines())


WGMMA, E4M3 = {"wgmma": in_ptx("wgmma")}, {"e4m3": in_ptx("e4m3")}
PRODUCTS = {f"{dtype}_products": in_ptx(f"{dtype}.{dtype}") for dtype in ("e4m3", "e5m2", "bf16")}
PRODUCTS["tensor_memory"] = in_ptx("tcgen05.mma.cta_group::1.kind::f8f6f4")  # SM100's instruction for larger tiles
WIDE = {"wide_loads": in_ptx("ld.global.v4"), "wide_copies": wide_copies}
KERNELS = {
    "attention": (attention_cases, {"e4m3": in_ptx("e4m3x2")} | WGMMA | WIDE),
    "context_parallel": (
        context_parallel_cases,
        {"wide_store": in_ptx("st.global.v4"), "wide_load": in_ptx(".v4")},
    ),
    "gradient": (gradient_cases, WGMMA | {"wide_additions": in_ptx("add.v4.f32")}),
    "indexer": (
        indexer_cases,
        PRODUCTS | WGMMA | {"operand_widths": operand_widths, "side_by_side": side_by_side},
    ),
    "kv": (kv_cases, E4M3 | {"wide_store": in_ptx("st.global.v")}),
    "metadata": (metadata_cases, {"redux": in_ptx("redux.sync")}),
    "quantised": (quantised_cases, WGMMA | WIDE),
    "topk": (topk_cases, {}),
    "transformers": (transformers_cases, PRODUCTS | WGMMA),
}


if __name__ == "__main__":
    print(json.dumps(list(facts(sys.argv[1], list(map(int, sys.argv[2].split(",")))))))

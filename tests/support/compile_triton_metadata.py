"""Compiles the metadata kernels for the compute capabilities given, without a GPU; prints a JSON line of facts.

Run by test_triton_metadata in a process of its own, because Triton's interpreter, once on, replaces the compiler.
"""

import dataclasses

from compile_triton import facts, in_ptx

from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.metadata.batch import row_constants
from jax_sparse_mla.metadata.triton import schedules, window
from jax_sparse_mla.metadata.triton import v4 as metadata
from jax_sparse_mla.metadata.triton import v32 as metadata_v32
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V32

DRAFT_LAYER = dataclasses.replace(DEEPSEEK_V4_FLASH, compress_ratios=(0,))


def cases():
    """(name, kernel, constants with num_warps) of every kernel, as launched."""
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
    yield "swa_slots", window.swa_slots_kernel, window.swa_constants(128)
    yield "gather_lens", window.gather_lens_kernel, {"WINDOW": 128} | window.request_options(64)
    yield "gather_slots", window.gather_slots_kernel, {"SEARCH_STEPS": 7} | window.GATHER_OPTIONS


def typed_cases(capability):
    for name, kernel, constants in cases():
        pointers = {name: "*i32" for name in kernel.arg_names if name.endswith("_ptr")} | {"overflow_ptr": "*i1"}
        yield name, kernel, pointers, constants


if __name__ == "__main__":
    facts(typed_cases, redux=in_ptx("redux.sync"))

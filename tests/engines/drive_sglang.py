"""SGLang's own attention backends, hooked by our plugin as SGLang hooks them, over the cases of its own test kit.

`test_sglang.py` runs this and judges it: one line of JSON for each case. SGLang's metadata, indices, caches and Triton
kernels run as they are (in Triton's interpreter); where its FlashMLA would be called, our functions are.

    python tests/engines/drive_sglang.py v4|dsa|left|unset
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import unittest

os.environ["JAX_SPARSE_MLA_SGLANG"] = "0" if sys.argv[1] == "unset" else "1"

import sglang_without_gpu
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins


def report(case: str, **facts) -> None:
    print(json.dumps({"case": case, **facts}), flush=True)


def run(name: str, function, *arguments, **options) -> None:
    """One case of the kit. Its tolerances pass zeros: its comparison is recorded, and not asked."""
    from sparse_mla_torch.plugins import calls

    found, compare = {}, torch.testing.assert_close

    def record(actual, expected, **tolerances):
        difference = (actual.double() - expected.double()).norm() / expected.double().norm()
        found["error"] = difference.item()

    torch.testing.assert_close = record
    calls.counts.clear()
    try:
        function(unittest.TestCase(), *arguments, device="cpu", **options)
    except unittest.SkipTest as reason:
        found["skipped"] = str(reason)
    finally:
        torch.testing.assert_close = compare
    report(name, served={" ".join(key): count for key, count in calls.counts.items()}, **found)


def v4() -> None:
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

    prepare_v4(kit)
    cases = kit.make_dsv4_cases("dsv4")
    for case in cases:
        run(f"kit {case.name}", kit.run_dsv4_attention_case, case)
    decode = {"forward_mode": ForwardMode.DECODE, "prefix_lens": (70, 200), "extend_lens": ()}
    extend = {"prefix_lens": (100, 40), "extend_lens": (5, 9)}
    for ratio in (0, 4, 128):
        for name, changes, sparse in (("decode", decode, False), ("extend", extend, False), ("prefill", extend, True)):
            changes = changes | {"compress_ratio": ratio, "attn_sink_value": 0.3, "name": name}
            if ratio == 4 and sparse:  # the kit chooses positions of one request
                changes |= {"prefix_lens": (100,), "extend_lens": (5,)}
            case = dataclasses.replace(cases[0], **changes)
            if ratio == 0:
                run(f"{name}, ratio 0", kit.run_dsv4_attention_case, case)
            else:
                run(f"{name}, ratio {ratio}", kit.run_dsv4_compress_attention_case, case, sparse_prefill=sparse)
    verify = {"forward_mode": ForwardMode.TARGET_VERIFY, "prefix_lens": (70, 200), "extend_lens": (3, 3)}
    case = dataclasses.replace(cases[0], name="verify", **verify)
    run("verify", kit.run_dsv4_target_verify_attention_case, case)


def prepare_v4(kit) -> None:
    import deep_gemm
    import sglang.srt.layers.attention.deepseek_v4_backend as backend
    import sglang.srt.layers.attention.dsv4.compressor_v2 as compressor

    kit.quant_to_nope_fp8_rope_bf16_pack_triton = quantise
    # The compressor's plan, made by a kernel that is compiled at run time and not read here.
    backend.create_paged_compressor_data = compressor.create_paged_compressor_data = lambda *args, **kwargs: None
    deep_gemm.get_num_sms = lambda: 132
    importlib.import_module("sglang.kernels.ops.attention.dsv4.attn")  # to be given the stand-ins, too
    sglang_without_gpu.put_run_time_kernels()


def quantise(k: torch.Tensor):
    """The kit's quantiser: Triton 3.6's interpreter rounds float32 to float8 otherwise than a GPU."""
    from sglang.test.kernels.deepseek_v4 import k_cache_reference

    groups = k[:, :448].float().view(-1, 7, 64)
    exponents = torch.ceil(torch.log2((groups.abs().amax(-1) / 448).clamp_min(2.0**-22)))
    values = (groups / torch.exp2(exponents)[..., None]).to(torch.float8_e4m3fn)
    return k_cache_reference.NopeFp8RopeBf16Pack(
        k_nope_fp8=values.view(-1, 448),
        k_rope_bf16=k[:, 448:].contiguous(),
        scale_k_nope_ue8m0=(exponents + 127).to(torch.uint8),
    )


def dsa() -> None:
    import deep_gemm
    from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit

    deep_gemm.get_num_sms = lambda: 132
    deep_gemm.get_paged_mqa_logits_metadata = lambda *args, **kwargs: torch.zeros(133, 2, dtype=torch.int32)
    sglang_without_gpu.put_run_time_kernels()
    cases = kit.make_dsa_sparse_cases("dsa")
    decodes = [("flashmla_kv", True), ("flashmla_sparse", False)]
    prefills = [("flashmla_sparse", False), ("flashmla_sparse", True), ("flashmla_kv", True)]
    for case in cases:
        kind, kernels = ("decode", decodes) if case.forward_mode.is_decode() else ("prefill", prefills)
        for kernel, fp8 in kernels:
            options = {f"dsa_{kind}_backend": kernel, "fp8_kv_cache": fp8}
            run(
                f"{case.name}, {kernel}, {'fp8' if fp8 else 'bf16'}", kit.run_dsa_sparse_attention_case, case, **options
            )


def left() -> None:
    """Ours refuses every call: SGLang's function gets it, which calls FlashMLA's."""
    from sparse_mla_torch import flash_mla

    ours, wheel = flash_mla.flash_mla_with_kvcache, sys.modules["flash_mla"]

    def refuse(*args, **kwargs):
        raise ValueError("ours refuses this")

    wheel.flash_mla_with_kvcache = lambda **arguments: ours(**arguments)
    flash_mla.flash_mla_with_kvcache = refuse
    one_of_v4("left")


def unset() -> None:
    """Without the switch nothing of SGLang's is wrapped, and ours is not imported."""
    from sglang.kernels.ops.attention import flash_mla_interface

    names = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    wrapped = [name for name in names if hasattr(getattr(flash_mla_interface, name), "__wrapped__")]
    report("unset", wrapped=wrapped, imported="sparse_mla_torch.plugins.calls" in sys.modules)


def one_of_v4(name: str) -> None:
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

    prepare_v4(kit)
    decode = {"forward_mode": ForwardMode.DECODE, "prefix_lens": (70, 200), "extend_lens": (), "name": "decode"}
    run(name, kit.run_dsv4_attention_case, dataclasses.replace(kit.make_dsv4_cases("dsv4")[0], **decode))


if __name__ == "__main__":
    torch.manual_seed(0)
    load_plugins()
    {"v4": v4, "dsa": dsa, "left": left, "unset": unset}[sys.argv[1]]()

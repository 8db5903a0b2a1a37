"""SGLang's own attention backends, hooked by our plugin as SGLang hooks them, over the cases of its own test kit.

`test_sglang.py` runs this and judges it: one line of JSON for each case. SGLang's metadata, indices, caches and Triton
kernels run as they are (in Triton's interpreter); where its FlashMLA would be called, our functions are.

    python tests/engines/drive_sglang.py v4|v41|v41_new|dsa|left|unset
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import unittest

os.environ["JAX_SPARSE_MLA_SGLANG"] = "0" if sys.argv[1] == "unset" else "1"
if sys.argv[1] in ("v41", "v41_new", "unset"):  # without our plugin SGLang refuses it on SM90
    os.environ["SGLANG_DSV4_KV_LAYOUT"] = "v41_new" if sys.argv[1] == "unset" else sys.argv[1]

import sglang_without_gpu
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins import load_plugins
from sglang_cases import dsa_cases, v4_cases, v41_cases

from benchmarks.engines import difference, served


def report(case: str, **facts) -> None:
    print(json.dumps({"case": case, **facts}), flush=True)


def run(name: str, function, *arguments, **options) -> None:
    """One case of the kit. Its tolerances pass zeros: its comparison is recorded, and not asked."""
    from sparse_mla_torch.plugins import calls

    found, compare = {}, torch.testing.assert_close

    def record(actual, expected, **tolerances):
        found["error"] = difference(actual, expected)

    torch.testing.assert_close = record
    calls.counts.clear()
    try:
        function(unittest.TestCase(), *arguments, device="cpu", **options)
    except unittest.SkipTest as reason:
        found["skipped"] = str(reason)
    finally:
        torch.testing.assert_close = compare
    report(name, served=served(), **found)


def v4() -> None:
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

    sglang_without_gpu.prepare_kit(kit)
    for name, function, case, options in v4_cases(kit, ForwardMode):
        run(name, function, case, **options)


def v41() -> None:
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

    sglang_without_gpu.prepare_kit(kit)
    sglang_without_gpu.prepare_v41(kit)
    for name, function, case, options in v41_cases(kit, ForwardMode):
        run(name, function, case, **options)
        report(f"caches, {name}", layouts=[layout.value for layout in kit.layouts])


def dsa() -> None:
    from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention

    sglang_without_gpu.prepare_kit(dsv4_attention)
    for name, function, case, options in dsa_cases(kit, ForwardMode):
        run(name, function, case, **options)


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
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(device="cpu").install()
    try:
        refused = f"chosen: {pools.select_dsv4_kv_layout()}"
    except AssertionError as reason:
        refused = str(reason)
    report("unset", refused=refused, wrapped=wrapped, imported="sparse_mla_torch.plugins.calls" in sys.modules)


def one_of_v4(name: str) -> None:
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit

    sglang_without_gpu.prepare_kit(kit)
    decode = {"forward_mode": ForwardMode.DECODE, "prefix_lens": (70, 200), "extend_lens": (), "name": "decode"}
    run(name, kit.run_dsv4_attention_case, dataclasses.replace(kit.make_dsv4_cases("dsv4")[0], **decode))


if __name__ == "__main__":
    torch.manual_seed(0)
    load_plugins()
    {"v4": v4, "v41": v41, "v41_new": v41, "dsa": dsa, "left": left, "unset": unset}[sys.argv[1]]()

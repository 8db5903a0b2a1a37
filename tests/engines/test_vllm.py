"""vLLM 0.33 with our plugin, on the CPU: chosen by its flag, its own metadata and forward methods, our functions below.

Skipped where vLLM is not installed; contributing.md has the commands. Errors are relative, root mean square, against
float32 attention over the same cache rows.
"""

from __future__ import annotations

import pytest
from driver import reported, skip_without

pytestmark = [pytest.mark.torch, pytest.mark.no_gpu, skip_without("vllm")]

BF16 = 0.004  # of a bfloat16 result: 0.0017 measured
FP4 = 0.12  # of rows rounded to FP4: 0.095 measured, and the interpreter's scales are coarser than a GPU's
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"


def cases(*arguments: str) -> dict:
    return reported("drive_vllm.py", *arguments)


def test_the_flag_chooses_it():
    found = cases("choice")
    assert found["registered"]["chosen"] == "JAX_SPARSE_MLA"
    assert found["registered"]["jax"] is False, "registering a name imported JAX"
    assert found["a worker's configuration"] == {"exit": 0, "copies": [True, True]}


def test_the_class_of_v32():
    found = cases("choice")["V3.2"]
    assert found["fp8"] == found["bf16"] == "JaxSparseMLABackend"
    assert found["other"] == "FlashMLASparseBackend" and found["cache"] == "fp8_ds_mla"


def test_the_class_of_v4():
    """The other backends have vLLM's, whose heads are padded; its module is as it was."""
    found, theirs = cases("choice")["V4"], ["DeepseekV4FlashMLAAttention", 64]
    ours = {"JAX_SPARSE_MLA": ["JaxSparseMLAV4Attention", 16]}
    assert found["classes"] == {"none": theirs, "FLASHMLA_SPARSE": theirs} | ours
    assert found["module_unchanged"]


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("batch", ["decode", "two tokens", "mixed"])
def test_v32(batch, heads):
    found = cases("v32")[f"{batch}, {heads} heads"]
    served = {f"{DECODE} ours": 1}
    if (batch, heads) == ("mixed", 64):  # with fewer heads vLLM takes the tokens of all requests for one's
        served |= {f"{PREFILL} ours": 1}
    assert found["served"] == served
    assert found["shape"] == [{"decode": 3, "two tokens": 6, "mixed": 152}[batch], heads, 512]
    assert found["error"] < BF16


@pytest.mark.parametrize("able", ["ours", "vLLM"])
@pytest.mark.parametrize("rows", [300, 200])
def test_a_chunk_of_few_heads_is_gathered(rows, able):
    """Where ours prefills, and there are rows enough."""
    found = cases("chunks")[f"{rows} of {rows} tokens, {able} prefills"]
    served = {f"{DECODE} ours": 1} | ({f"{PREFILL} ours": 1} if (rows, able) == (300, "ours") else {})
    assert found["served"] == served and found["shape"] == [rows + 2, 16, 512]
    assert found["error"] < BF16
    assert cases("chunks")["few rows of many tokens"] == {"gathered": False}
    assert cases("chunks")["heads"]["warmed"] == [[16, 576]] * 3 + [[64, 576]]  # the last gathers heads


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_v32_from_bfloat16_rows(batch, heads):
    """By FlashMLA's prefill, of which few rows are decoded."""
    found = cases("bf16")
    assert found["3 rows of prefill"]["decoded"] and not found["152 rows of prefill"]["decoded"]
    found = found[f"{batch}, {heads} heads"]
    assert found["served"] == {f"{PREFILL} ours": 1} and found["error"] < BF16
    assert found["shape"] == [3 if batch == "decode" else 152, heads, 512]


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_v4(batch, ratio, heads):
    """Heads are those of the rank: not padded."""
    found = cases("v4")[f"{batch}, ratio {ratio}, {heads} heads"]
    assert found["served"] == {f"{DECODE} ours": 1} | ({f"{PREFILL} ours": 1} if batch == "mixed" else {})
    assert found["shape"] == [3 if batch == "decode" else 42, heads, 512] and found["page_bytes"] == 37_440
    assert found["error"] < BF16


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_v41_from_its_own_caches(batch, ratio, heads):
    """Of 528 bytes a token of the window and 288 of compressed rows, as `--kv-cache-dtype nvfp4_ds_mla` asks for."""
    found = cases("v41")[f"{batch}, ratio {ratio}, {heads} heads"]
    assert found["served"] == {f"{DECODE} ours": 1} | ({f"{PREFILL} ours": 1} if batch == "mixed" else {})
    assert found["shape"] == [3 if batch == "decode" else 42, heads, 512] and found["page_bytes"] == 32 * 528
    assert found["error"] < BF16


def test_the_records_of_v41():
    """They follow the cache's type, where our backend is chosen; vLLM's writer makes FP4 rows without SM100."""
    found, ours = cases("v41"), "JaxSparseMLAV4Attention"
    assert found["FLASHMLA_SPARSE"] == {"layer": "DeepseekV4FlashMLAAttention", "records": False}
    assert found["JAX_SPARSE_MLA"] == {"layer": ours, "records": False}
    assert found["after"] == {"layer": ours, "records": True}
    assert 0.05 < found["writer"]["error"] < FP4


@pytest.mark.parametrize("case", ["V3.2 mixed, 16 heads", "V3.2 mixed, 64 heads", "V4 mixed, ratio 4, 16 heads"])
def test_what_ours_refuses_is_vllms(case):
    found = cases("left")
    assert found[f"left, {case}"]["error"] < BF16
    assert not any("ours" in what for what in found[f"left, {case}"]["served"])
    assert set(found["left"]["asked"]) == {DECODE, PREFILL}
    for function in (DECODE, PREFILL):
        assert found["log"].count(f"leaves {function} to the engine: ours refuses this") == 1

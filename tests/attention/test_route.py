"""plan_attention: which backend and kernel serve a call, for devices that this machine does not have.

The expected plans come from the table of what each backend serves, written out here once more.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys

import jax
import pytest
from attention_calls import MADE_UP
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla.attention import DeviceInfo, Plan, plan_attention
from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.route import plan_call
from jax_sparse_mla.kv_cache import KVLayout
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, DEEPSEEK_V32

NAMES = ("hopper", "flashmla", "flashinfer", "triton", "reference")  # in the order of preference
OPTIONAL = NAMES[:-1]
KIB_227, KIB_228 = 227 * 1024, 228 * 1024

CPU = DeviceInfo("cpu")
DEVICES = {
    "cpu": CPU,
    "sm75": DeviceInfo("cuda", (7, 5), 40, 65_536),
    "sm80": DeviceInfo("cuda", (8, 0), 108, 166_912),
    "sm89": DeviceInfo("cuda", (8, 9), 128, 101_376),
    "sm90": DeviceInfo("cuda", (9, 0), 132, KIB_227),
    "sm100": DeviceInfo("cuda", (10, 0), 148, KIB_227),
    "sm103": DeviceInfo("cuda", (10, 3), 148, KIB_227),
    "sm120": DeviceInfo("cuda", (12, 0), 188, 101_376),
    "sm121": DeviceInfo("cuda", (12, 1), 48, 101_376),
}

# What serves which device, best first; decode of an FP8 cache.
SERVED_BY = {
    "cpu": ("reference",),
    "sm75": ("reference",),
    "sm80": ("triton", "reference"),
    "sm89": ("triton", "reference"),
    "sm90": ("hopper", "flashmla", "triton", "reference"),
    "sm100": ("flashmla", "triton", "reference"),
    "sm103": ("flashmla", "triton", "reference"),
    "sm120": ("flashinfer", "triton", "reference"),
    "sm121": ("flashinfer", "triton", "reference"),
}
ALL_SETS = [set(c) for n in range(len(OPTIONAL) + 1) for c in itertools.combinations(OPTIONAL, n)]


def plan(phase="decode", spec=DEEPSEEK_V4_FLASH, *, device=CPU, installed=OPTIONAL, **kwargs) -> Plan:
    arguments = {"num_q_tokens": 16, "device": device, "installed": set(installed)}
    return plan_attention(phase, spec, **arguments | kwargs)


def able(device: str, phase: str, kv_dtype: str) -> list[str]:
    names = list(SERVED_BY[device])
    if phase == "decode" and kv_dtype == "bf16":  # only these read bf16 caches
        names = [name for name in names if name in ("hopper", "triton", "reference")]
    if phase == "prefill":  # FlashInfer's sparse MLA attends to packed FP8 caches only
        names = [name for name in names if name != "flashinfer"]
    return names


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_first_installed_backend_that_serves_the_call_is_chosen(device, phase, kv_dtype):
    servants = able(device, phase, kv_dtype)
    for installed in ALL_SETS:
        chosen = plan(phase, device=DEVICES[device], installed=installed, kv_dtype=kv_dtype)
        present = [name for name in servants if name in installed or name == "reference"]
        assert chosen.backend == present[0]
        assert chosen.kernel == ("paged_decode" if phase == "decode" else "sparse_prefill")
        assert set(chosen.rejected) == set(NAMES) - {chosen.backend}
        assert chosen.reason and all(chosen.rejected.values())
        for name in set(OPTIONAL) - installed - {chosen.backend}:
            assert "not installed" in chosen.rejected[name]
        for name in present[1:]:  # able and installed: merely less preferred
            assert chosen.backend in chosen.rejected[name] and "prefer" in chosen.rejected[name]


@pytest.mark.parametrize(
    "heads, topk, rows", [(64, 640, 66), (16, 640, 66), (128, 1152, 18), (128, 2048, 10), (64, 0, 100_000)]
)
def test_few_keys_of_an_h200_go_to_triton_before_flashmla(heads, topk, rows):
    """Measured, see docs/reference/routing.md: 5 blocks of 64 x 64 for each of 132 multiprocessors."""
    shape = {"device": DEVICES["sm90"], "num_heads": heads, "topk": topk}
    few = plan(**shape, num_q_tokens=rows, installed={"flashmla", "triton"})
    assert few.backend == "triton" and "prefer" in few.rejected["flashmla"]
    assert plan(**shape, num_q_tokens=rows, installed={"flashmla"}).backend == "flashmla"
    unknown = plan(**shape | {"topk": None}, num_q_tokens=rows, installed={"flashmla", "triton"})
    assert unknown.backend == "flashmla"
    assert plan("prefill", **shape, num_q_tokens=rows, installed={"flashmla", "triton"}).backend == "flashmla"
    if topk:
        many = plan(**shape, num_q_tokens=rows + 1, installed={"flashmla", "triton"})
        assert many.backend == "flashmla" and "prefer" in many.rejected["triton"]
    assert plan(**shape | {"device": DEVICES["sm100"]}, installed={"flashmla", "triton"}).backend == "flashmla"


def test_reasons_name_what_is_missing():
    on_cpu = plan(device=CPU).rejected
    assert all("CUDA" in on_cpu[name] and "cpu" in on_cpu[name] for name in OPTIONAL)
    on_sm80 = plan(device=DEVICES["sm80"]).rejected
    assert "SM90" in on_sm80["hopper"] and "8.0" in on_sm80["hopper"]
    assert "SM100" in on_sm80["flashmla"] and "SM120" in on_sm80["flashinfer"]
    assert "7.5" in plan(device=DEVICES["sm75"]).rejected["triton"]
    assert "bf16" in plan(device=DEVICES["sm90"], kv_dtype="bf16").rejected["flashmla"]
    assert "prefill" in plan("prefill", device=DEVICES["sm120"]).rejected["flashinfer"]


# --- layouts, by name ---
IN_ANOTHER_ORDER = dataclasses.replace(KVLayout.V32_FP8, group=64, inline_scale_bytes=32)  # keeps its name


@pytest.mark.parametrize("layout", [MADE_UP, IN_ANOTHER_ORDER, dataclasses.replace(KVLayout.V4_BF16, name="other")])
@pytest.mark.parametrize("device", DEVICES)
def test_a_layout_that_no_kernel_was_written_for_is_the_references(device, layout):
    """528 bytes of FP8, and others: kernels that tell layouts by their sizes alone would misread them."""
    spec = dataclasses.replace(DEEPSEEK_V4_FLASH, qk_dim=layout.qk_dim, kv_layout=layout)
    chosen = plan(spec=spec, device=DEVICES[device])
    assert chosen.backend == "reference"
    for name in OPTIONAL:
        assert f"got {layout.name}" in chosen.rejected[name]
        assert "its decode reads rows of V32_FP8 and V4_FP8" in chosen.rejected[name]
        with pytest.raises(ValueError, match=f"'{name}' cannot serve this decode call: .*got {layout.name}"):
            plan(spec=spec, device=DEVICES[device], override=name)
    # Prefill attends to the workspace that such a cache is gathered into.
    assert plan("prefill", spec=spec, device=DEVICES[device]).backend == able(device, "prefill", "fp8")[0]


def test_a_workspace_of_other_rows_is_the_references():
    spec = dataclasses.replace(DEEPSEEK_V4_FLASH, kv_layout=KVLayout("narrow", nope_dim=128, rope_dim=64, v_dim=192))
    chosen = plan("prefill", spec=spec, device=DEVICES["sm90"])
    assert chosen.backend == "reference" and "a workspace of 192 values" in chosen.rejected["hopper"]


@pytest.mark.parametrize("layout", [KVLayout.V32_BF16, KVLayout.V4_BF16, KVLayout.NOPE_BF16], ids=str)
def test_bf16_caches_are_our_own_kernels(layout):
    """At any size `hopper` goes first on SM90, then `triton`, which goes first elsewhere."""
    call = Call("decode", layout, 1, 16, DEVICES["sm90"], 640)
    for rows, heads, topk in ((1, 16, 640), (1024, 128, 2048), (256, 64, None)):
        of_size = dataclasses.replace(call, num_q_tokens=rows, num_heads=heads, topk=topk)
        chosen = plan_call(of_size, unable={})
        assert chosen.backend == "hopper" and "preferred" in chosen.rejected["triton"]
        assert f"got {layout.name} (bf16)" in chosen.rejected["flashmla"]
        assert plan_call(of_size, unable={"hopper": "not built"}).backend == "triton"
        assert plan_call(dataclasses.replace(of_size, device=DEVICES["sm100"]), unable={}).backend == "triton"
    both = dataclasses.replace(call, extra_layout=layout, batch_invariant=True)
    assert plan_call(both, unable={}).backend == "hopper"


# --- paged decode or sparse prefill ---


@pytest.mark.parametrize("rows, kernel", [(1, "paged_decode"), (255, "paged_decode"), (256, "sparse_prefill")])
def test_a_chunk_is_gathered_from_the_measured_crossover_on(rows, kernel):
    """docs/reference/routing.md; only a chunk's rows have a context that can be gathered for all of them."""
    call = Call("decode", KVLayout.V4_FP8, rows, 64, DEVICES["sm90"], 640)
    chunk = plan_call(dataclasses.replace(call, chunk=True), unable={})
    assert (chunk.backend, chunk.kernel) == ("hopper", kernel)
    assert plan_call(call, unable={}).kernel == "paged_decode"


@pytest.mark.parametrize("shared, cap", [(KIB_227, 11_622), (KIB_228, 11_673), (101_376, 5_068), (0, -1)])
def test_flashmla_leaves_paged_decode_where_its_schedule_no_longer_fits(shared, cap):
    device = DeviceInfo("cuda", (9, 0), 132, shared)
    assert cap < 0 or 4 * (5 * cap + 1) <= shared < 4 * (5 * (cap + 1) + 1)  # 5 int32 per row and one more
    for rows, kernel in (
        (max(cap, 0), "paged_decode"),
        (cap + 1, "sparse_prefill"),
        (cap + 9, "sparse_prefill"),
    ):
        chosen = plan(device=device, installed={"flashmla"}, num_q_tokens=rows)
        if cap < 0 and rows == 0:
            continue
        assert (chosen.backend, chosen.kernel) == ("flashmla", kernel)
        if kernel == "sparse_prefill":
            assert str(cap) in chosen.reason and str(rows) in chosen.reason


@pytest.mark.parametrize(
    ("spec", "rows", "order"),
    [
        (DEEPSEEK_V4_FLASH, 1, ["hopper", "triton", "flashmla"]),
        (DEEPSEEK_V4_FLASH, 67, ["hopper", "flashmla", "triton"]),
        (DEEPSEEK_V32, 66, ["hopper", "triton", "flashmla"]),
        (DEEPSEEK_V32, 67, ["hopper", "flashmla", "triton"]),
    ],
)
def test_our_kernel_for_an_h200_goes_first(spec, rows, order):
    """Then which one it is turns at 5 blocks of 64 x 64 for each of 132 multiprocessors (docs/reference/routing.md)."""
    installed = {"hopper", "flashmla", "triton"}
    for name in order:
        chosen = plan(spec=spec, device=DEVICES["sm90"], num_heads=64, topk=640, num_q_tokens=rows, installed=installed)
        assert chosen.backend == name
        installed.remove(name)
    for topk in (None, 640):
        assert plan("prefill", spec=spec, device=DEVICES["sm90"], topk=topk, num_q_tokens=rows).backend == "hopper"


# --- heads, topk, models ---


@pytest.mark.parametrize("spec", [DEEPSEEK_V32, DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO], ids=lambda spec: spec.name)
def test_every_model_and_any_share_of_its_heads(spec):
    for heads, topk in itertools.product((None, 1, 3, 16, 128), (None, 0, 1, 100, 2048)):
        assert plan(spec=spec, device=DEVICES["sm90"], num_heads=heads, topk=topk, num_q_tokens=1).backend == "hopper"


@pytest.mark.parametrize(
    ("phase", "call", "backend", "kernel"),
    [
        # Multiprocessors that are unknown count as busy; a GPU of an unknown capability has the reference.
        ("decode", {"device": DeviceInfo("cuda", (9, 0), 0, KIB_227), "topk": 640}, "flashmla", "paged_decode"),
        ("decode", {"device": DeviceInfo("cuda")}, "reference", "paged_decode"),
        # The cap of FlashMLA's schedule is its own, and of decode.
        ("decode", {"installed": {"hopper"}, "num_q_tokens": 100_000}, "hopper", "paged_decode"),
        ("decode", {"installed": {"triton"}, "num_q_tokens": 100_000}, "triton", "paged_decode"),
        ("decode", {"installed": set(), "num_q_tokens": 100_000}, "reference", "paged_decode"),
        ("decode", {"override": "flashmla", "num_q_tokens": 11_623}, "flashmla", "sparse_prefill"),
        ("prefill", {"num_q_tokens": 11_622}, "flashmla", "sparse_prefill"),
        ("prefill", {"num_q_tokens": 70_000}, "flashmla", "sparse_prefill"),
        # More heads than a kernel takes.
        ("decode", {"num_heads": 129}, "triton", "paged_decode"),
        ("decode", {"device": DEVICES["sm120"], "installed": OPTIONAL, "num_heads": 256}, "triton", "paged_decode"),
    ],
)
def test_a_plan(phase, call, backend, kernel):
    chosen = plan(phase, **{"device": DEVICES["sm90"], "installed": {"flashmla", "triton"}} | call)
    assert (chosen.backend, chosen.kernel) == (backend, kernel)
    assert call.get("num_heads") != 129 or "129" in chosen.rejected["flashmla"]


# --- overrides ---


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_an_override_is_served_or_refused_with_the_reason(name, device, phase):
    served = name in able(device, phase, "fp8")
    for installed in ({name}, set(OPTIONAL), set()):
        arguments = {"device": DEVICES[device], "installed": installed, "override": name}
        if served and (name in installed or name == "reference"):
            chosen = plan(phase, **arguments)
            assert chosen.backend == name
            assert set(chosen.rejected) == set(NAMES) - {name}
        else:
            usual = plan(phase, device=DEVICES[device], installed=installed)
            with pytest.raises(ValueError) as error:
                plan(phase, **arguments)
            assert name in str(error.value) and usual.rejected[name] in str(error.value)


# --- purity ---


@settings(max_examples=50, deadline=None)
@given(
    phase=st.sampled_from(("decode", "prefill")),
    device=st.sampled_from(sorted(DEVICES)),
    installed=st.sets(st.sampled_from(NAMES)),
    kv_dtype=st.sampled_from(("fp8", "bf16")),
    rows=st.integers(0, 200_000),
    heads=st.integers(1, 300),
)
def test_a_plan_depends_on_its_arguments_alone(phase, device, installed, kv_dtype, rows, heads):
    arguments = {"device": DEVICES[device], "kv_dtype": kv_dtype, "num_q_tokens": rows, "num_heads": heads}
    chosen = plan(phase, installed=installed, **arguments)
    assert chosen == plan(phase, installed=sorted(installed, reverse=True), **arguments)
    assert chosen.backend in installed | {"reference"}
    assert {chosen.backend, *chosen.rejected} == set(NAMES)
    assert plan(phase, installed=installed, override=chosen.backend, **arguments).kernel == chosen.kernel


def test_planning_reads_neither_the_environment_nor_jax(monkeypatch):
    monkeypatch.setenv("JAX_SPARSE_MLA_BACKEND", "triton")
    monkeypatch.setenv("JAX_SPARSE_MLA_DECODE_BACKEND", "triton")
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("planning asked for devices"))
    module = sys.modules[plan_attention.__module__]
    assert not any(name == "jax" or name.startswith("jax.") for name in vars(module))
    assert plan(device=DEVICES["sm90"]).backend == "hopper"


# --- the device ---


def test_device_infos_may_be_static_arguments():
    info = DeviceInfo(platform="cuda", compute_capability=(9, 0), sm_count=132, shared_memory_optin=KIB_227)
    assert len({info, DEVICES["sm90"], CPU}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.platform = "cpu"


class FakeDevice:
    def __init__(self, platform: str, compute_capability: str = "", core_count: int = 0):
        self.platform, self.compute_capability, self.core_count = platform, compute_capability, core_count


@pytest.mark.parametrize(
    "device, expected",
    [
        (FakeDevice("cpu"), CPU),
        (FakeDevice("gpu", "9.0", 132), DEVICES["sm90"]),
        (FakeDevice("gpu", "10.3", 148), DEVICES["sm103"]),
        (FakeDevice("cuda", "8.0", 108), DEVICES["sm80"]),
        (FakeDevice("gpu", "12.0", 188), DEVICES["sm120"]),
        (FakeDevice("gpu", "7.5", 40), DeviceInfo("cuda", (7, 5), 40, 48 * 1024)),  # what every GPU has
    ],
)
def test_the_current_device(monkeypatch, device, expected):
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert DeviceInfo.current() == expected

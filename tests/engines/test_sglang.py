"""SGLang 0.5.23 with our hooks, on the CPU: its own attention backends over its own test kit, our functions below.

Skipped where SGLang is not installed; contributing.md has the commands. Errors are relative, root mean square, against
the kit's torch attention over rows that were not quantised: most of them is FP8's. The kit's own tolerances let zeros
pass, whose error here is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from driver import ROOT, reported, skip_without
from sglang_cases import (
    CHUNK,
    DECODE,
    GATHER,
    PREFILL,
    SCATTERED,
    V4_ERROR,
    V41_ERROR,
    most_error,
    scatter_v32,
)

pytestmark = [pytest.mark.torch, pytest.mark.no_gpu, skip_without("sglang")]


def cases(which: str) -> dict:
    return reported("drive_sglang.py", which)


def test_without_the_switch_sglang_is_as_it_was():
    found = cases("unset")["unset"]
    assert "need an SM100" in found.pop("refused") and found == {"wrapped": [], "imported": False}


KIT = [
    *(f"extend_{x}" for x in ("no_prefix", "prefix_within_window", "nonzero_attn_sink", "above_window")),
    *(f"extend_{x}" for x in ("seq_len_eq_window", "seq_below_page", "seq_at_page", "seq_above_page")),
    *(f"extend_{x}" for x in ("prefix_exact_page", "total_exact_page")),
    *(f"decode_{x}" for x in ("within_window", "multi_request_within_window", "above_window")),
]


@pytest.mark.parametrize("name", KIT)
def test_v4_cases_of_the_kit(name):
    found = cases("v4")[f"kit dsv4_swa_{name}"]
    assert found["served"] == {f"{PREFILL if name.startswith('extend') else DECODE} ours": 1}
    assert found["error"] < V4_ERROR


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("name", ["decode", "extend", "prefill"])
def test_v4_by_ratio(name, ratio):
    found = cases("v4")[f"{name}, ratio {ratio}"]
    by_prefill = name == "prefill" or (name, ratio) == ("extend", 0)
    assert found["served"] == {f"{PREFILL if by_prefill else DECODE} ours": 1} and found["error"] < V4_ERROR


@pytest.mark.parametrize("name", ["verify, ratio 0", "verify, ratio 4", "verify, ratio 128", "draft"])
def test_v4_verification_of_drafts(name):
    found = cases("v4")[name]
    assert found["served"] == {f"{DECODE} ours": 1} and found["error"] < V4_ERROR


@pytest.mark.parametrize("layout", ["v41", "v41_new"])
@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("name", ["decode", "extend", "prefill"])
def test_v41_from_its_own_caches(name, ratio, layout):
    """528 bytes a token of the window, 288 of compressed rows, whose rounding the kit's reference has too."""
    found, window, fp4 = cases(layout), layout, layout.replace("v41", "v41_fp4")
    case = found[f"{name}, ratio {ratio}"]
    by_prefill = name == "prefill" or (name, ratio) == ("extend", 0)
    gathered = {f"{GATHER} ours": 1 + (ratio > 0), f"{PREFILL} ours": 1}
    assert case["served"] == (gathered if by_prefill else {f"{DECODE} ours": 1})
    assert case["error"] < (V4_ERROR if ratio == 0 else V41_ERROR)
    assert found[f"caches, {name}, ratio {ratio}"]["layouts"] == [window, fp4 if ratio else window]


PREFILLS = ["flashmla_sparse_topk", "long_extend", "multi_request"]
DECODES = ["flashmla_kv_topk", "short_prefix_padding", "ragged_prefix", "long_prefix"]


V32 = [
    (f"prefill_{x}", f"flashmla_{kernel}") for x in PREFILLS for kernel in ("sparse, bf16", "sparse, fp8", "kv, fp8")
]
V32 += [(f"decode_{x}", f"flashmla_{kernel}") for x in DECODES for kernel in ("sparse, bf16", "kv, bf16", "kv, fp8")]


@pytest.mark.parametrize(("name", "kernel"), V32)
def test_v32(name, kernel):
    found = cases("dsa")[f"dsa_sparse_{name}, {kernel}"]
    assert found["served"] == {f"{DECODE if 'kv' in kernel else PREFILL} ours": 1}
    assert found["error"] < most_error(f"{name}, {kernel}")


@pytest.mark.parametrize("name", ["verify", "draft"])
def test_v32_drafts(name):
    found = cases("dsa")[case := f"dsa_sparse_{name}, flashmla_kv, bf16"]
    assert found["served"] == {f"{DECODE} ours": 1} and found["error"] < most_error(case)


def test_no_case_of_the_kit_is_left_out():
    assert not [name for name, found in (cases("v4") | cases("dsa")).items() if "skipped" in found]
    assert len([name for name in cases("v4") if name.startswith("kit")]) == len(KIT)
    assert len(cases("dsa")) - 1 == len(V32) + 2


def test_what_ours_refuses_is_sglangs():
    found = cases("left")
    assert found["left"]["served"] == {f"{DECODE} refused": 1} and found["left"]["error"] < V4_ERROR
    assert found["log"].count(f"leaves {DECODE} to the engine: ours refuses this") == 1


def test_the_graph_cases_of_the_gpu_form():
    """Metadata as SGLang's graph runner makes it, with a call in the place of a replay."""
    command = [sys.executable, "-m", "benchmarks", "engines", "sglang", "--no-gpu", "--only", "graph: decode, ratio"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_SPARSE_MLA_PLUGIN_STRICT": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("graph: decode, ratio") and "{" in line]
    errors = [float(line.split()[5]) for line in rows if line.endswith("ours': 3}")]
    assert len(errors) == 3 and max(errors) < V4_ERROR


def test_a_served_chunk_of_v32_chooses_positions_of_its_own_in_seconds():
    """Rows of the kit's pattern are the same for all queries, and take nearly a minute of a CPU."""
    kit = SimpleNamespace(DSA_SPARSE_INDEX_TOPK=4, _make_dsa_sparse_topk_rows=lambda case, **options: options)
    torch = pytest.importorskip("torch")
    scatter_v32(kit, torch)
    case = SimpleNamespace(prefix_lens=(CHUNK, 3), input_lens=(CHUNK, 2))
    assert kit._make_dsa_sparse_topk_rows(case) == {"index_topk": 4, "pattern": "trailing"}
    start = time.process_time()  # of the kit's own rows 50 s
    rows = torch.tensor(kit._make_dsa_sparse_topk_rows(case, index_topk=2048, pattern=SCATTERED))
    assert time.process_time() - start < 20
    assert rows.shape == (CHUNK + 2, 2048)
    seen = torch.cat([CHUNK + 1 + torch.arange(CHUNK), 4 + torch.arange(2)])
    assert ((rows >= 0).sum(1) == seen.clamp(max=2048)).all() and (rows.amax(1) < seen).all()
    for row in (rows[0], rows[CHUNK - 1], rows[-1]):
        chosen = row[row >= 0]
        assert (chosen.diff() > 0).all()
    assert (rows[0] != rows[1]).any()

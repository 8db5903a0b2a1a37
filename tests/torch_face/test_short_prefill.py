"""FlashMLA's prefill of few rows by our decode, against the oracle of prefill; which calls are left to prefill."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import drop_in_calls as calls
from attention_calls import H200, small_prefill
from sparse_mla_torch.plugins import short_prefill

pytestmark = [pytest.mark.torch, pytest.mark.cpu]


@pytest.mark.parametrize("dim", [576, 512])
@pytest.mark.parametrize("sink", [True, False])
def test_few_rows_of_prefill_are_decoded(decoded, dim, sink):
    case = small_prefill(dim=dim, heads=16, sizes=(100, 64), sink=sink)
    out, lse = short_prefill.decode(**calls.prefill_arguments(case))
    assert decoded == [(100, 1, 1, 2 * dim)] and out.shape == (6, 16, 512)
    wanted, _, wanted_lse = calls.prefill_oracle(case)
    calls.assert_close_flashmla(calls.array(out), wanted, "prefill.out")
    wanted_lse = np.where(np.isneginf(wanted_lse), np.inf, wanted_lse)
    calls.assert_close_flashmla(calls.array(lse), wanted_lse, "prefill.lse")


def test_other_rows_of_prefill_are_not_decoded(decoded, monkeypatch):
    given = calls.prefill_arguments(small_prefill(dim=576, heads=16, sizes=(128, 64)))
    rows = {name: given[name].repeat(40, *[1] * (given[name].dim() - 1)) for name in ("q", "indices", "topk_length")}
    moved = torch.cat([given["kv"].flatten()[:1], given["kv"].flatten()])[1:].view(given["kv"].shape)  # by two bytes
    assert moved.data_ptr() % 16
    for changes in (rows, {"kv": moved}, {"kv": given["kv"].half()}):
        assert short_prefill.decode(**given | changes) is None
    with monkeypatch.context() as changed:
        changed.setattr(
            short_prefill, "device_info", lambda device: dataclasses.replace(H200, compute_capability=(10, 0))
        )
        assert short_prefill.decode(**given) is None
    with monkeypatch.context() as changed:
        changed.setattr(
            short_prefill, "missing", lambda name, phase, device: "not built"
        )  # Triton would be slower than prefill
        assert short_prefill.decode(**given) is None
    for phase, name in (("PREFILL_", "triton"), ("DECODE_", "triton"), ("", "flashmla")):
        with monkeypatch.context() as changed:
            changed.setenv(f"JAX_SPARSE_MLA_{phase}BACKEND", name)  # what is named serves
            assert short_prefill.decode(**given) is None
    assert not decoded

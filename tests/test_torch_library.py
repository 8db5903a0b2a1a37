"""`torch.ops.jax_sparse_mla.*`: opcheck, compiled graphs against eager calls, and writes that are declared."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
from attention_calls import small_decode, small_prefill  # noqa: E402
from attention_oracle import assert_close_flashmla, decode_oracle, prefill_oracle  # noqa: E402
from sparse_mla_torch import flash_mla  # noqa: E402

import jax_sparse_mla  # noqa: E402
from jax_sparse_mla import KVLayout, PagedKV  # noqa: E402

pytestmark = pytest.mark.torch
DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)]
OPS = torch.ops.jax_sparse_mla
WIDTH = {"V32_FP8": 656, "V4_FP8": 584, "V32_BF16": 1152, "V4_BF16": 1024}


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def tensor(x: np.ndarray | None, device: str) -> torch.Tensor | None:
    if x is None:
        return None
    if x.dtype == attention_oracle.BF16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(x.copy()).to(device)


def pages(host, device: str) -> torch.Tensor | None:
    if host is None:
        return None
    data, width = tensor(host.data, device), WIDTH[host.layout]
    return data.as_strided((len(data), host.page_size, 1, width), (data.shape[1], width, width, 1))


def decode_call(device: str, **setting):
    """A case and the operator's arguments."""
    case = small_decode(2, **setting)
    names = ("topk_length", "extra_k_cache", "extra_indices", "extra_topk_length", "attn_sink")
    rest = {name: tensor(getattr(case, name, None), device) for name in names}
    rest["extra_k_cache"] = pages(case.extra_cache, device)
    first = (tensor(case.q, device), pages(case.cache, device), tensor(case.indices, device), case.softmax_scale)
    return case, (*first, *rest.values())


def prefill_call(device: str, **setting):
    case = small_prefill(2, **setting)
    q, kv, indices, lengths, sink = (
        tensor(getattr(case, name), device) for name in ("q", "kv", "indices", "topk_length", "attn_sink")
    )
    return case, (q, kv, indices, case.softmax_scale, lengths, sink)


def write_call(device: str):
    cache = torch.zeros((5, KVLayout.V4_FP8.page_bytes(64)), dtype=torch.uint8, device=device)
    view = cache.as_strided((5, 64, 1, 584), (cache.shape[1], 584, 584, 1))
    slots = torch.tensor([3, -1, 319, 320, 64], dtype=torch.int32, device=device)
    kv = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    return view, slots, kv


def int32(device: str, *values):
    return [torch.tensor(x, dtype=torch.int32, device=device) for x in values]


def every_call(device: str) -> dict[str, tuple]:
    view, slots, kv = write_call(device)
    swa = int32(device, [[0, 5, -1], [2, 9, 1]], [2, 3], [[0, 1], [3, -1]], [1, 2], 8)
    topk = int32(device, [[0, 2], [1, -1], [0, 1]], [0, 2, 3], [6, 7, 3], [8, 4], [8, 4], [0, 2], [10, 20])
    return {
        "sparse_mla_decode": decode_call(device, extra=(24, 2))[1],
        "sparse_mla_prefill": prefill_call(device)[1],
        "write_kv": (view, slots, kv),
        "gather_kv": (view, slots),
        "combine_swa_extra_indices": tuple(swa),
        "combine_topk_swa_indices": (*topk, 4, 4, 2),
    }


@pytest.mark.parametrize("name", every_call("cpu"))
def test_opcheck(device, name):
    torch.library.opcheck(getattr(OPS, name).default, every_call(device)[name])


@pytest.mark.parametrize("setting", [{}, {"extra": (24, 2)}, {"layout": "V32_FP8"}, {"layout": "V4_BF16"}], ids=str)
def test_decode_equals_the_oracle(device, setting):
    case, arguments = decode_call(device, **setting)
    out, lse = (x.float().cpu().numpy() for x in OPS.sparse_mla_decode(*arguments))
    expected = decode_oracle(case)
    assert_close_flashmla(out, expected[0], "decode.out")
    assert_close_flashmla(lse, expected[1], "decode.lse")


def test_prefill_equals_the_oracle(device):
    case, arguments = prefill_call(device)
    results = OPS.sparse_mla_prefill(*arguments)
    for name, result, expected in zip(("out", "max_logits", "lse"), results, prefill_oracle(case)):
        assert_close_flashmla(result.float().cpu().numpy(), expected, f"prefill.{name}")


def test_bytes_are_those_of_the_jax_functions(device):
    view, slots, kv = write_call(device)
    empty = PagedKV.zeros(KVLayout.V4_FP8, 5, 64)
    values = kv.view(torch.int16).cpu().numpy().view(attention_oracle.BF16)
    expected = jax_sparse_mla.write_kv(empty, slots.cpu().numpy(), values)
    OPS.write_kv(view, slots, kv)
    written = view.as_strided(expected.data.shape, (view.stride(0), 1))
    np.testing.assert_array_equal(written.cpu().numpy(), np.asarray(expected.data))
    rows = np.asarray(jax_sparse_mla.gather_kv(expected, slots.cpu().numpy())).astype(np.float32)
    np.testing.assert_array_equal(OPS.gather_kv(view, slots).float().cpu().numpy(), rows)


def test_merges_are_those_of_the_jax_functions(device):
    for name in ("combine_swa_extra_indices", "combine_topk_swa_indices"):
        arguments = every_call(device)[name]
        arrays = [x.cpu().numpy() if isinstance(x, torch.Tensor) else x for x in arguments]
        options = {}
        if name == "combine_topk_swa_indices":
            options = dict(zip(("window", "compress_ratio", "topk"), arrays[7:]))
        else:
            arrays[4] = int(arrays[4])
        expected = getattr(jax_sparse_mla, name)(*arrays[:7], **options)
        for x, y in zip(getattr(OPS, name)(*arguments), expected, strict=True):
            np.testing.assert_array_equal(x.cpu().numpy(), np.asarray(y))


def step(q, view, slots, kv, indices):
    """What a layer does: write, attend, and work around both."""
    OPS.write_kv(view, slots, kv * 2)
    out, lse = OPS.sparse_mla_decode(q + 1, view, indices, 0.1)
    rows = OPS.gather_kv(view, slots)
    return out * 2, torch.where(torch.isneginf(lse), 0, lse), rows.sum()


def step_arguments(device: str):
    view, slots, kv = write_call(device)
    indices = slots.clamp_max(319).expand(2, 1, -1).contiguous()
    return torch.ones(2, 1, 3, 512, dtype=torch.bfloat16, device=device), view, slots, kv, indices


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_has_no_break(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = step_arguments(device)
    results = step(*expected)
    given = step_arguments(device)
    for x, y in zip(compiled(*given), results, strict=True):
        torch.testing.assert_close(x, y)
    assert expected[1].any() and torch.equal(given[1], expected[1])  # the cache was written in place


@pytest.mark.parametrize("log2", [None, True, False])
def test_the_drop_in_compiles(device, log2):
    def attend(q, k_cache, indices, kv):
        meta, _ = flash_mla.get_mla_metadata()
        out, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, None, None, 512, meta, indices=indices, use_legacy=True)
        again = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv[:, None], indices, 0.1, return_log2_lse=log2)
        return out, lse, *(x for x in again if x is not None)

    q, view, slots, kv, indices = step_arguments(device)
    OPS.write_kv(view, slots, kv)
    indices[1] = -1
    expected = attend(q, view, indices, kv)
    torch._dynamo.reset()
    results = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, view, indices, kv)
    assert torch.isposinf(expected[1][1]).all()
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_pages_stand_where_they_stand(device):
    view, slots, kv = write_call(device)
    OPS.write_kv(view, slots, kv)
    dense, apart = torch.zeros_like(view).contiguous(), torch.zeros((5, 66, 1, 584), dtype=torch.uint8, device=device)
    for other in (dense, apart[:, :64].view(torch.float8_e4m3fn), apart[:, :64].view(torch.int8)):
        OPS.write_kv(other, slots, kv)
        assert torch.equal(other.view(torch.uint8), view)
        assert torch.equal(OPS.gather_kv(other, slots), OPS.gather_kv(view, slots))
    assert not apart[:, 64:].any()
    with pytest.raises(ValueError, match="k_cache must have 656"):
        OPS.gather_kv(view[..., :400], slots)

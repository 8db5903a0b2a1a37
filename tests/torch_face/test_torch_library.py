"""`torch.ops.jax_sparse_mla.*`: opcheck, compiled graphs against eager calls, and writes that are declared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import attention_oracle
import drop_in_calls
import triton_device  # noqa: F401  (repairs the interpreter)
from attention_calls import small_decode, small_prefill
from drop_in_calls import served_by
from sparse_mla_torch import flash_mla
from sparse_mla_torch.operations import merge

import jax_sparse_mla
from jax_sparse_mla import KVLayout, PagedKV

pytestmark = pytest.mark.torch
DEVICES = [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.gpu)]
OPS = torch.ops.jax_sparse_mla


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def decode_call() -> tuple:
    given = drop_in_calls.decode_arguments(small_decode(2, extra=(24, 2)))
    names = ("q", "k_cache", "indices", "softmax_scale", "topk_length", "extra_k_cache", "extra_indices_in_kvcache")
    return tuple(given[name] for name in (*names, "extra_topk_length", "attn_sink"))


def prefill_call() -> tuple:
    q, kv, indices, *rest = drop_in_calls.prefill_arguments(small_prefill(2)).values()
    scale, sink, lengths = rest
    return q, kv[:, 0], indices[:, 0], scale, lengths, sink


def write_call(device: str):
    cache = torch.zeros((5, KVLayout.V4_FP8.page_bytes(64)), dtype=torch.uint8, device=device)
    view = cache.as_strided((5, 64, 1, 584), (cache.shape[1], 584, 584, 1))
    slots = torch.tensor([3, -1, 319, 320, 64], dtype=torch.int32, device=device)
    kv = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    return view, slots, kv


def split_target(device: str) -> torch.Tensor:
    """For the cache of `write_call` in pages of 16 tokens; what is not written stays 7."""
    data = torch.full((20, KVLayout.V4_FP8.page_bytes(16)), 7, dtype=torch.uint8, device=device)
    return data.as_strided((20, 16, 1, 584), (data.shape[1], 584, 584, 1))


def parts(device: str, dtype=torch.bfloat16, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of two rows of three heads; some parts are empty and hold NaN, so are all of the last."""
    generator = torch.Generator().manual_seed(count)
    outs = torch.randn(count, 2, 3, 40, generator=generator).to(dtype)
    lses = 5 * torch.randn(count, 2, 3, generator=generator)
    lses[0, 0, 0] = lses[:, 1, 2] = -torch.inf
    outs[torch.isneginf(lses)] = torch.nan
    return outs.to(device), lses.to(device)


def int32(device: str, *values):
    return [torch.tensor(x, dtype=torch.int32, device=device) for x in values]


def every_call(device: str) -> dict[str, tuple]:
    view, slots, kv = write_call(device)
    swa = int32(device, [[0, 5, -1], [2, 9, 1]], [2, 3], [[0, 1], [3, -1]], [1, 2], 8)
    topk = int32(device, [[0, 2], [1, -1], [0, 1]], [0, 2, 3], [6, 7, 3], [8, 4], [8, 4], [0, 2], [10, 20])
    return {
        "sparse_mla_decode": decode_call(),
        "sparse_mla_prefill": prefill_call(),
        "write_kv": (view, slots, kv),
        "gather_kv": (view, slots),
        "split_pages": (view, split_target(device), slots),
        "merge_attention": parts(device),
        "apply_attn_sink": (*(x[0] for x in parts(device)), torch.randn(3, device=device)),
        "combine_swa_extra_indices": tuple(swa),
        "combine_topk_swa_indices": (*topk, 4, 4, 2),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", every_call("cpu"))
def test_opcheck(device, name):
    torch.library.opcheck(getattr(OPS, name).default, every_call(device)[name])


def rows_of(view: torch.Tensor) -> np.ndarray:
    """The bytes of each page and of the padding behind it."""
    return view.as_strided((len(view), view.stride(0)), (view.stride(0), 1)).cpu().numpy()


def test_bytes_are_those_of_the_jax_functions(device):
    view, slots, kv = write_call(device)
    empty = PagedKV.zeros(KVLayout.V4_FP8, 5, 64)
    values = kv.view(torch.int16).cpu().numpy().view(attention_oracle.BF16)
    expected = jax_sparse_mla.write_kv(empty, slots.cpu().numpy(), values)
    OPS.write_kv(view, slots, kv)
    np.testing.assert_array_equal(rows_of(view), np.asarray(expected.data))
    rows = np.asarray(jax_sparse_mla.gather_kv(expected, slots.cpu().numpy())).astype(np.float32)
    np.testing.assert_array_equal(OPS.gather_kv(view, slots).float().cpu().numpy(), rows)


def test_split_pages_are_those_of_the_jax_function(device):
    view, slots, kv = write_call(device)
    OPS.write_kv(view, slots, kv)
    cache = PagedKV(data=rows_of(view).copy(), layout=KVLayout.V4_FP8, page_size=64)
    for some in (slots, slots[1:2], None):
        out = split_target(device)
        before = PagedKV(data=rows_of(out).copy(), layout=KVLayout.V4_FP8, page_size=16)
        expected = jax_sparse_mla.split_pages(cache, 16, slots=None if some is None else some.cpu().numpy(), out=before)
        OPS.split_pages(view, out, some)
        np.testing.assert_array_equal(rows_of(out), np.asarray(expected.data))
    apart = torch.full((20, 18, 1, 584), 7, dtype=torch.uint8, device=device)
    OPS.split_pages(view, apart[:, :16])
    assert torch.equal(apart[:, :16], out) and (apart[:, 16:] == 7).all()


@pytest.mark.always(4)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("functions", [OPS, merge], ids=["operators", "kernel"])
def test_parts_merge_to_the_whole(device, dtype, count, functions):
    outs, lses = parts(device, dtype, count)
    out, lse = functions.merge_attention(outs, lses)
    assert out.dtype == dtype and out.shape == outs.shape[1:] and lse.shape == lses.shape[1:]
    weights = torch.softmax(lses.double(), 0).nan_to_num()[..., None]
    whole = (weights * outs.double().masked_fill(torch.isneginf(lses)[..., None], 0)).sum(0)
    tolerance = {"rtol": 2**-8 if dtype == torch.bfloat16 else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(out.double(), whole, **tolerance)
    torch.testing.assert_close(lse.double(), torch.logsumexp(lses.double(), 0), rtol=1e-6, atol=1e-6)
    sink = torch.tensor([0.5, torch.inf, -torch.inf], device=device)
    share = torch.sigmoid(lse.double() - sink).nan_to_num()[..., None]
    with_sink = functions.apply_attn_sink(out, lse, sink)
    assert with_sink.dtype == dtype and not with_sink[:, 1].any() and torch.equal(with_sink[:, 2], out[:, 2])
    torch.testing.assert_close(with_sink.double(), share * out.double(), **tolerance)
    assert not out[1, 2].any() and torch.isneginf(lse[1, 2])


def test_far_apart_and_no_parts(device):
    outs = torch.stack([torch.full((2, 4), 1.0), torch.full((2, 4), 2.0)]).to(device)
    lses = torch.tensor([[3e38, -3e38], [-3e38, 1e30]], device=device)
    out, lse = OPS.merge_attention(outs, lses)
    assert out[:, 0].tolist() == [1.0, 2.0] and lse.tolist() == lses.max(0).values.tolist()
    for wrong in ((outs[:0], lses[:0]), (outs, lses[:1]), (outs, lses[..., None]), (outs[:, 0], lses[:, 0])):
        with pytest.raises(ValueError, match="merge_attention: "):
            OPS.merge_attention(*wrong)
    with pytest.raises(TypeError, match="merge_attention: lses"):
        OPS.merge_attention(outs, lses.bfloat16())
    with pytest.raises(ValueError, match="apply_attn_sink: attn_sink"):
        OPS.apply_attn_sink(out, lse, lses[0, :1])


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
    """What a layer does: write, attend to smaller pages in two parts, and work around it."""
    OPS.write_kv(view, slots, kv * 2)
    small = view.new_zeros((20, 16, 1, 584))
    OPS.split_pages(view, small, slots)
    some = [OPS.sparse_mla_decode(q + 1, small, x, 0.1) for x in (indices[..., :3], indices[..., 3:])]
    out, lse = OPS.merge_attention(*(torch.stack(x) for x in zip(*some)))
    out = OPS.apply_attn_sink(out, lse, q[0, 0, :, 0].float())
    rows = OPS.gather_kv(view, slots)
    return out * 2, torch.where(torch.isneginf(lse), 0, lse), rows.sum()


def step_arguments(device: str):
    view, slots, kv = write_call(device)
    indices = slots.clamp_max(319).expand(2, 1, -1).contiguous()
    return torch.ones(2, 1, 3, 512, dtype=torch.bfloat16, device=device), view, slots, kv, indices


@pytest.mark.long
@pytest.mark.parametrize(("compiler", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
def test_a_compiled_graph_has_no_break(device, compiler, dynamic):
    if compiler == "inductor" and device == "cpu":
        pytest.skip("what Inductor makes of the graph is for the GPU")
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=compiler, dynamic=dynamic)
    expected = step_arguments(device)
    results = step(*expected)
    given = step_arguments(device)
    for x, y in zip(compiled(*given), results, strict=True):
        torch.testing.assert_close(x, y)
    assert expected[1].any() and torch.equal(given[1], expected[1])  # the cache was written in place


def attend(q, k_cache, indices, kv, lengths, sink, log2=None, out=None, again=None):
    """Both functions of the drop-in, with most of what they take."""
    meta, _ = flash_mla.get_mla_metadata()
    decoded = flash_mla.flash_mla_with_kvcache(
        *(q, k_cache, None, None, 512, meta),
        indices=indices,
        attn_sink=sink,
        extra_k_cache=k_cache,
        extra_indices_in_kvcache=indices,
        topk_length=lengths,
        extra_topk_length=lengths - 1,
        use_legacy=True,
        out=out,
    )
    options = {"attn_sink": sink, "topk_length": lengths, "return_log2_lse": log2, "out": again}
    prefilled = flash_mla.flash_mla_sparse_fwd(q[:, 0], kv[:, None], indices, 0.1, **options)
    return *decoded, *(x for x in prefilled if x is not None)


def attend_arguments(device: str):
    """Two rows; the second has no key."""
    q, view, slots, kv, indices = step_arguments(device)
    OPS.write_kv(view, slots, kv)
    indices[1] = -1
    lengths, sink = torch.tensor([4, 5], dtype=torch.int32), torch.tensor([0.5, -1, torch.inf])
    return q, view, indices, kv, lengths.to(device), sink.to(device)


@pytest.mark.long
@pytest.mark.parametrize("log2", [None, True, False])
def test_the_drop_in_compiles(device, log2):
    arguments = attend_arguments(device)
    expected = attend(*arguments, log2)
    assert torch.isposinf(expected[1][1]).all() and not expected[0][:, :, 2].any()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*arguments, log2), expected, strict=True):
        torch.testing.assert_close(x, y)


def test_compiled_into_given_results(device):
    arguments = attend_arguments(device)
    expected = attend(*arguments)
    given = [torch.full_like(x, torch.nan).contiguous() for x in expected]
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = compiled(*arguments, out=tuple(given[:2]), again=tuple(given[2:]))
    for x, y, z in zip(results, given, expected, strict=True):
        assert x is y
        torch.testing.assert_close(x, z)
    wrong = (given[0], given[1][..., :0])  # which a copy would broadcast to
    with pytest.raises(Exception, match=r"out\[1\] must have shape"):
        compiled(*arguments, out=wrong)


def test_several_kv_heads_are_refused_in_a_graph_too(device):
    """The first was read, and the others were not."""
    q, _, indices, kv, *_ = attend_arguments(device)
    tensors = {"kv": kv[:, None], "indices": indices}

    def prefill(kv, indices):
        return flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 0.1)[0]

    torch._dynamo.reset()
    compiled = torch.compile(prefill, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tensors), prefill(**tensors))
    for which, function in itertools.product(tensors, (prefill, compiled)):
        twice = tensors | {which: torch.cat([tensors[which]] * 2, 1)}
        with pytest.raises(ValueError, match=rf"{which} must have shape \[\w+, 1, \w+\]"):
            function(**twice)
        with pytest.raises(Exception, match=r"must have shape|Dimension out of range"):  # torch 2.11 wraps the latter
            function(**tensors | {which: tensors[which][:, 0]})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton", "flashmla"])
def test_inductors_cuda_graphs(backend, monkeypatch):
    """It checks that a call leaves nothing behind in the graphs' memory."""
    with served_by(backend, monkeypatch):
        arguments = attend_arguments("cuda")
        expected = attend(*arguments)
        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):  # without a graph, recorded, replayed
            torch.compiler.cudagraph_mark_step_begin()
            for x, y in zip(compiled(*arguments), expected, strict=True):
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


def test_a_page_whose_tokens_are_not_neighbours():
    """On the CPU, where the cache of one page was read as if they were."""
    every_second = torch.randint(1, 100, (1, 128, 1, 1024), dtype=torch.uint8)[:, ::2]
    dense, slots = every_second.clone(), torch.tensor([3, 63], dtype=torch.int32)
    kv = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    for cache in (every_second, dense):
        OPS.write_kv(cache, slots, kv)
    assert torch.equal(every_second, dense) and not torch.equal(dense[0, 3], dense[0, 4])
    assert torch.equal(OPS.gather_kv(every_second, slots), kv)

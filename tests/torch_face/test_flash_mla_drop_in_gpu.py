"""The drop-in `flash_mla` on a GPU: graphs, streams, threads, and what runs beside FlashMLA's own kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import drop_in_calls as calls
from attention_calls import small_prefill
from drop_in_calls import check_decode, decode, per_request, prefill, python, served_by, valid_case
from sparse_mla_torch.attention import route
from sparse_mla_torch.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from torch_graphs import capture

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.mark.parametrize("backend_name", ["hopper", "triton", "flashmla"])
def test_a_graph_replays_on_changed_inputs(backend_name, monkeypatch):
    with served_by(backend_name, monkeypatch):
        cases = [per_request(seed, heads=64, lengths="batch", extra=(64, 64)) for seed in range(3)]
        held = calls.decode_arguments(cases[0])

        def step():
            return flash_mla_with_kvcache(**held | {"tile_scheduler_metadata": get_mla_metadata()[0]})

        step()
        graph, results = capture(step)
        for case in (*cases, cases[0]):
            for name, x in calls.decode_arguments(case).items():
                if isinstance(x, torch.Tensor):
                    held[name].copy_(x)
            graph.replay()
            torch.cuda.synchronize()
            check_decode(case, results)


@pytest.mark.parametrize("backend_name", ["hopper", "triton", "flashmla"])
def test_it_runs_on_the_current_stream(backend_name, monkeypatch):
    """A slow producer on the same stream: read too early, the queries would be NaN."""
    case = per_request(heads=64)
    with served_by(backend_name, monkeypatch):
        decode(case)
        arguments, stream = calls.decode_arguments(case), torch.cuda.Stream()
        queries, arguments["q"] = arguments["q"], torch.full_like(arguments["q"], torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            arguments["q"].copy_(queries)
            results = flash_mla_with_kvcache(**arguments)
        stream.synchronize()
        check_decode(case, results)


@pytest.mark.parametrize("backend_name", ["hopper", "triton", "flashmla"])
def test_two_threads_on_two_streams(backend_name, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    cases = [per_request(seed, heads=64, extra=(64, 64)) for seed in range(2)]
    with served_by(backend_name, monkeypatch):
        expected = [decode(case) for case in cases]
        arguments = [calls.decode_arguments(case) for case in cases]
        torch.cuda.synchronize()

        def work(i):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    fresh = {"tile_scheduler_metadata": get_mla_metadata()[0]}
                    results = flash_mla_with_kvcache(**arguments[i] | fresh)
                torch.cuda.current_stream().synchronize()
            return results

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(work, range(2)))
    for one, other in zip(expected, found):
        assert all(torch.equal(x, y) for x, y in zip(one, other))


def test_only_the_sanitiser_runs_beside_flashmlas_kernels(monkeypatch):
    """As the profiler sees them; and with `assume_valid_indices` not even that."""
    from torch.profiler import ProfilerActivity, profile

    wheel = pytest.importorskip("flash_mla")

    def kernels(function, **arguments) -> list[str]:
        function(**arguments)  # compiles
        if "tile_scheduler_metadata" in arguments:
            arguments["tile_scheduler_metadata"] = type(arguments["tile_scheduler_metadata"])()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            function(**arguments)
            torch.cuda.synchronize()
        names = (event.name() for event in profiler.profiler.kineto_results.events())
        return sorted(name for name in names if not name.startswith(("cuda", "cu")))

    with served_by("flashmla", monkeypatch):
        held = calls.decode_arguments(valid_case())
        theirs = {"use_legacy": True, "tile_scheduler_metadata": wheel.get_mla_metadata()[0]}
        direct = kernels(wheel.flash_mla_with_kvcache, **held | theirs)
        assert direct and kernels(flash_mla_with_kvcache, **held, assume_valid_indices=True) == direct
        assert kernels(flash_mla_with_kvcache, **held) == sorted([*direct, "sanitise_kernel"])
        held = calls.prefill_arguments(small_prefill(heads=64, sizes=(128, 128), topk=128))
        direct = kernels(wheel.flash_mla_sparse_fwd, **held, use_legacy=True)
        assert direct and kernels(flash_mla_sparse_fwd, **held, assume_valid_indices=True) == direct
        assert kernels(flash_mla_sparse_fwd, **held) == sorted([*direct, "sanitise_kernel"])


def test_the_drop_in_equals_the_wheel(monkeypatch):
    wheel = pytest.importorskip("flash_mla")
    with served_by("flashmla", monkeypatch):
        case = valid_case()
        theirs = {"use_legacy": True, "tile_scheduler_metadata": wheel.get_mla_metadata()[0]}
        expected = wheel.flash_mla_with_kvcache(**calls.decode_arguments(case) | theirs)
        results = decode(case)
        assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(expected, results))
        small = small_prefill(heads=64, sizes=(128, 128), topk=128, lengths=False)
        expected = wheel.flash_mla_sparse_fwd(**calls.prefill_arguments(small), use_legacy=True)
        assert all(torch.equal(x, y) for x, y in zip(expected, prefill(small)))


NO_JAX = """
import torch
from jax_sparse_mla import DEEPSEEK_V32
from sparse_mla_torch import engines, flash_mla, ops
q = torch.zeros(2, 1, 64, 512, dtype=torch.bfloat16, device="cuda")
cache = torch.zeros(4, 64, 1, 584, dtype=torch.uint8, device="cuda")
indices = torch.zeros(2, 1, 64, dtype=torch.int32, device="cuda")
flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, flash_mla.get_mla_metadata()[0], indices=indices)
kv = torch.zeros(64, 1, 512, dtype=torch.bfloat16, device="cuda")
flash_mla.flash_mla_sparse_fwd(q[:, 0], kv, indices, 0.1)
torch.ops.jax_sparse_mla.write_kv(cache, indices[0, 0], kv[:, 0])
batch = {name: torch.tensor(x, device="cuda") for name, x in dict(
    seq_lens=[5, 9], req_pool_indices=[0, 1], out_cache_loc=[1, 2]).items()}
table = torch.arange(512, dtype=torch.int32, device="cuda").view(2, 256)
engines.build_metadata(DEEPSEEK_V32, engines.sglang_step("DECODE", **batch, req_to_token=table))
torch.cuda.synchronize()
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
"""


@pytest.mark.parametrize("backend_name", ["hopper", "triton", "flashmla"])
def test_no_jax_backend_is_initialised(backend_name, monkeypatch):
    if why := route.missing(backend_name, "decode", route.device_info(torch.device("cuda"))):
        pytest.skip(f"{backend_name}: {why}")
    monkeypatch.setenv(f"JAX_SPARSE_MLA_{'DECODE_' if backend_name == 'hopper' else ''}BACKEND", backend_name)
    done = python(NO_JAX)
    assert done.returncode == 0, done.stderr

"""The portable Triton attention beside FlashMLA (sgl-flash-mla), in one process on one GPU.

    python benchmarks/bench_triton_attention.py [--tune] [--jax] [--only decode|prefill] [--repeat 20]

Times are CUPTI's (torch's profiler): from the start of a call's first kernel to the end of its last, the L2 flushed
before each; medians. FlashMLA's schedule is computed once, outside the timed calls, as an engine does. Errors are
relative, ‖out − f64‖ / ‖f64‖, on a few rows against float64 on the GPU. `--tune` times several tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "interop")]

from sparse_mla_torch.kernels.sparse_mla import TorchPagedKV, sparse_mla_decode, sparse_mla_prefill  # noqa: E402

from jax_sparse_mla.kernels_triton import plan as planning  # noqa: E402
from jax_sparse_mla.kv_cache.layout import KVLayout  # noqa: E402

FLUSH_BYTES = 512 << 20  # several times the 60 MB L2


@dataclasses.dataclass(frozen=True)
class Decode:
    name: str
    layout: KVLayout
    heads: int
    batch: int
    topk: int
    extra_topk: int = 0

    @property
    def flop(self) -> int:
        return 2 * self.heads * self.batch * (self.topk + self.extra_topk) * (self.layout.qk_dim + 512)


@dataclasses.dataclass(frozen=True)
class Prefill:
    name: str
    heads: int
    qk_dim: int
    topk: int
    kv_len: int
    q_len: int = 4096

    @property
    def flop(self) -> int:
        return 2 * self.heads * self.q_len * self.topk * (self.qk_dim + 512)


V4, V32 = KVLayout.V4_FP8, KVLayout.V32_FP8
DECODES = [
    *(Decode(f"V4 Flash b{b}", V4, 64, b, 128, 512) for b in (1, 8, 64, 256)),
    *(Decode(f"V4 Pro b{b}", V4, 128, b, 128, 1024) for b in (1, 64, 256)),
    *(Decode(f"V3.2 b{b}", V32, 128, b, 2048) for b in (1, 64)),
    *(Decode(f"V4 16 heads b{b}", V4, 16, b, 128, 512) for b in (1, 64)),
]
PREFILLS = [
    Prefill("V4 Flash kv8k", 64, 512, 512, 8192),
    Prefill("V4 Flash kv64k", 64, 512, 512, 65536),
    Prefill("V4 Pro kv64k", 128, 512, 1024, 65536),
    Prefill("V3.2 kv64k", 128, 576, 2048, 65536),
]

# (heads, indices, warps, stages)
FP8_TILES = [(64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 8, 3), (32, 32, 8, 1), (16, 32, 4, 2)]
BF16_TILES = [(64, 64, 8, 2), (64, 64, 8, 3), (64, 128, 8, 1), (16, 32, 4, 2)]
SMALL_TILES = [(16, 64, 4, 3), (16, 32, 8, 2), (16, 64, 8, 2), (16, 64, 8, 5), (64, 64, 8, 2)]


# --- inputs ---------------------------------------------------------------------------------------


def random_cache(layout: KVLayout, slots: int, page_size: int) -> tuple[TorchPagedKV, torch.Tensor]:
    """Random bytes that are finite values, and the bfloat16 rows that they stand for."""
    pages = -(-slots // page_size)
    device = "cuda"
    values = (torch.randn(pages, page_size, layout.fp8_dim, device=device).clamp(-1, 1) * 100).to(torch.float8_e4m3fn)
    rope = (torch.randn(pages, page_size, 64, device=device).clamp(-1, 1) / 10).bfloat16()
    exponent = torch.randint(-11, -8, (pages, page_size, layout.num_groups), device=device)
    scale = torch.exp2(exponent.float())
    data = torch.full((pages, layout.page_bytes(page_size)), 255, dtype=torch.uint8, device=device)
    body = data[:, : page_size * layout.data_bytes].view(pages, page_size, layout.data_bytes)
    body[:, :, : layout.fp8_dim] = values.view(torch.uint8)
    body[:, :, layout.data_bytes - 128 :] = rope.view(torch.uint8)
    if layout.footer_scale_bytes:
        footer = data[:, page_size * layout.data_bytes :][:, : page_size * 8].view(pages, page_size, 8)
        footer[:, :, :7] = (exponent + 127).to(torch.uint8)
    else:
        body[:, :, layout.fp8_dim : layout.fp8_dim + 16] = scale.view(torch.uint8).view(pages, page_size, 16)
    wide = (values.float() * scale.repeat_interleave(layout.group, dim=-1)).bfloat16()
    rows = torch.cat([wide, rope], dim=-1).view(pages * page_size, layout.qk_dim)
    return TorchPagedKV(data, layout, page_size), rows


def random_indices(rows: int, topk: int, slots: int) -> torch.Tensor:
    """Uniform, without replacement within a row."""
    chunks = [torch.rand(min(64, rows - i), slots, device="cuda").topk(topk).indices for i in range(0, rows, 64)]
    return torch.cat(chunks).int()


def float64(q: torch.Tensor, keys: torch.Tensor, scale: float, sink: torch.Tensor) -> torch.Tensor:
    """out of one query row, q [heads, d] over keys [n, d]."""
    scores = scale * (q.double() @ keys.double().T)
    lse = torch.logsumexp(scores, 1)
    weights = torch.exp(scores - torch.logaddexp(lse, sink.double())[:, None])
    return weights @ keys.double()[:, :512]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


# --- timing ---------------------------------------------------------------------------------------


class Timer:
    def __init__(self, repeat: int):
        self.repeat = repeat
        self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, call) -> tuple[float, dict[str, float]]:
        """Median µs from first kernel's start to last kernel's end, and of each kernel."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(self.repeat):
                self.buffer.zero_()
                call()
            torch.cuda.synchronize()
        events = sorted(
            (e for e in profile.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA),
            key=lambda event: event.start_ns(),
        )
        calls: list[list] = []
        for event in events:
            if "Memset" in event.name() or "FillFunctor" in event.name():
                if event.duration_ns() > 50_000:
                    calls.append([])
                continue
            if calls:
                calls[-1].append(event)
        calls = [kernels for kernels in calls if kernels]
        spans = [(k[-1].start_ns() + k[-1].duration_ns() - k[0].start_ns()) / 1e3 for k in calls]
        kernels: dict[str, list[float]] = {}
        for events in calls:
            for event in events:
                kernels.setdefault(event.name().split("(")[0][:48], []).append(event.duration_ns() / 1e3)
        return statistics.median(spans), {name: round(statistics.median(times), 2) for name, times in kernels.items()}


# --- cases ----------------------------------------------------------------------------------------


def flashmla():
    try:
        import flash_mla
    except (ImportError, OSError) as error:
        print(f"flash_mla is not importable: {error}")
        return None
    return flash_mla


def flashmla_cache(cache: TorchPagedKV) -> torch.Tensor:
    """The view that FlashMLA takes: [pages, page_size, 1, bytes per token], the page's padding in the stride."""
    pages, page_bytes = cache.data.shape
    width = cache.layout.bytes_per_token
    return cache.data.as_strided((pages, cache.page_size, 1, width), (page_bytes, width, width, 1))


def decode_case(case: Decode, timer: Timer, peer, tiles, with_jax: bool) -> list[dict]:
    torch.manual_seed(0)
    layout, slots = case.layout, 16384
    scale = layout.qk_dim**-0.5
    q = torch.randn(case.batch, 1, case.heads, layout.qk_dim, device="cuda").clamp(-1, 1).bfloat16()
    sink = torch.randn(case.heads, device="cuda")
    cache, rows = random_cache(layout, slots * 8, 256 if case.extra_topk else 64)
    indices = random_indices(case.batch, case.topk, slots).view(case.batch, 1, -1)
    arguments = {"softmax_scale": scale, "attn_sink": sink if case.extra_topk else None}
    extra = extra_indices = None
    keys = [rows[indices[b, 0].long()] for b in range(min(case.batch, 3))]
    if case.extra_topk:
        extra, extra_rows = random_cache(layout, slots * 8, 64)
        extra_indices = random_indices(case.batch, case.extra_topk, slots).view(case.batch, 1, -1)
        keys = [torch.cat([k, extra_rows[extra_indices[b, 0].long()]]) for b, k in enumerate(keys)]
        arguments |= {"extra_cache": extra, "extra_indices": extra_indices}
    no_sink = torch.full_like(sink, -torch.inf)
    logits = sink if case.extra_topk else no_sink
    expected = torch.stack([float64(q[b, 0], k, scale, logits) for b, k in enumerate(keys)])
    rows = []
    if peer is not None and case.heads in (64, 128):
        meta, _ = peer.get_mla_metadata()
        names = {"extra_k_cache": None if extra is None else flashmla_cache(extra)}
        names |= {"extra_indices_in_kvcache": extra_indices, "attn_sink": arguments["attn_sink"]}
        fixed = (q, flashmla_cache(cache), None, None, 512, meta)
        names |= {"softmax_scale": scale, "indices": indices, "is_fp8_kvcache": True, "use_legacy": True}

        def call():
            return peer.flash_mla_with_kvcache(*fixed, **names)

        error = relative_error(call()[0][: len(keys), 0], expected)
        micros, kernels = timer(call)
        rows.append({"who": "flashmla", "us": micros, "kernels": kernels, "error": error})
    capability = torch.cuda.get_device_capability()
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for tile in tiles:
        for num_splits in (None,) if len(tiles) == 1 else split_choices(case, tile):
            plan = planning.launch_plan(
                layout,
                rows=case.batch,
                num_heads=case.heads,
                topk=case.topk,
                extra_topk=case.extra_topk,
                has_sink=bool(case.extra_topk),
                capability=capability,
                sm_count=sm_count,
                tile=tile and planning.Tile(*tile),
                num_splits=num_splits,
            )
            row = {"who": "ours", "tile": tile, "splits": plan.num_splits}
            try:
                out = sparse_mla_decode(q, cache, indices, **arguments, plan=plan)[0]
                row["error"] = relative_error(out[: len(keys), 0], expected)
                row["us"], row["kernels"] = timer(partial(sparse_mla_decode, q, cache, indices, **arguments, plan=plan))
            except Exception as error:  # a tile that does not fit is a result of tuning
                row["failed"] = f"{type(error).__name__}: {str(error)[:80]}"
            rows.append(row)
    if with_jax:
        given = (q, cache, indices, extra, extra_indices, arguments["attn_sink"], scale)
        rows.append(jitted_row(timer, *given, expected))
    return rows


def jitted_row(timer: Timer, q, cache, indices, extra, extra_indices, attn_sink, scale, expected) -> dict:
    """The same call from jitted JAX, on the same memory; XLA has a stream of its own, so each call waits."""
    import jax
    from sparse_mla_torch import to_jax, to_torch

    from jax_sparse_mla import PagedKV, sparse_mla_decode

    def paged(x):
        return None if x is None else PagedKV(data=to_jax(x.data), layout=x.layout, page_size=x.page_size)

    given = (to_jax(q), paged(cache), to_jax(indices), paged(extra))
    given += tuple(None if x is None else to_jax(x) for x in (extra_indices, attn_sink))

    @jax.jit
    def step(q, cache, indices, extra, extra_indices, sink):
        names = {"extra_cache": extra, "extra_indices": extra_indices, "attn_sink": sink}
        return sparse_mla_decode(q, cache, indices, softmax_scale=scale, backend="triton", **names)

    def call():
        torch.cuda.synchronize()
        return jax.block_until_ready(step(*given))

    error = relative_error(to_torch(call()[0])[: len(expected), 0], expected)
    micros, kernels = timer(call)
    return {"who": "ours, jit", "us": micros, "kernels": kernels, "error": error}


def split_choices(case: Decode, tile) -> list[int | None]:
    return [None] if case.batch > 64 else [None, 1] if case.batch == 64 else [None]


def prefill_case(case: Prefill, timer: Timer, peer, tiles, with_jax: bool) -> list[dict]:
    del with_jax  # the launch is the same; what XLA adds is measured in decode
    torch.manual_seed(0)
    q = (torch.randn(case.q_len, case.heads, case.qk_dim, device="cuda") / 10).bfloat16()
    kv = (torch.randn(case.kv_len, case.qk_dim, device="cuda") / 10).bfloat16()
    indices = random_indices(case.q_len, case.topk, case.kv_len)
    sink = torch.randn(case.heads, device="cuda")
    expected = torch.stack([float64(q[i], kv[indices[i].long()], 0.5, sink) for i in range(3)])
    rows = []
    if peer is not None:

        def call():
            return peer.flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], 0.5, attn_sink=sink, use_legacy=True)

        error = relative_error(call()[0][:3], expected)
        micros, kernels = timer(call)
        rows.append({"who": "flashmla", "us": micros, "kernels": kernels, "error": error})
    for tile in tiles:
        plan = planning.launch_plan(
            planning.workspace_layout(case.qk_dim),
            rows=case.q_len,
            num_heads=case.heads,
            topk=case.topk,
            extra_topk=0,
            has_sink=True,
            capability=torch.cuda.get_device_capability(),
            sm_count=torch.cuda.get_device_properties(0).multi_processor_count,
            may_split=False,
            tile=tile and planning.Tile(*tile),
        )
        row = {"who": "ours", "tile": tile, "splits": 1}
        try:
            out = sparse_mla_prefill(q, kv, indices, softmax_scale=0.5, attn_sink=sink, plan=plan)
            row["error"] = relative_error(out[0][:3], expected)
            arguments = {"softmax_scale": 0.5, "attn_sink": sink, "out": out, "plan": plan}
            row["us"], row["kernels"] = timer(partial(sparse_mla_prefill, q, kv, indices, **arguments))
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:80]}"
        rows.append(row)
    return rows


def tiles_of(case, tune: bool) -> list:
    if not tune:
        return [None]
    if case.heads <= 16:
        return [None, *SMALL_TILES]
    return [None, *(BF16_TILES if isinstance(case, Prefill) else FP8_TILES)]


def print_rows(case, rows: list[dict]) -> None:
    peer = next((row["us"] for row in rows if row["who"] == "flashmla"), None)
    for row in rows:
        tile = row.get("tile") or ""
        if "failed" in row:
            print(f"{case.name:18} {tile!s:17} {row['failed']}", flush=True)
            continue
        ratio = f"{peer / row['us']:5.2f}" if peer else "    -"
        tflops = case.flop / row["us"] / 1e6
        print(
            f"{case.name:18} {row['who']:9} {tile!s:17} s{row.get('splits', 0):<3} {row['us']:8.1f} us {tflops:6.0f} "
            f"TFLOP/s  peer/ours {ratio}  error {row['error']:.1e}  {list(row['kernels'].values())}",
            flush=True,
        )


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else os.environ.get("COMMIT", "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--jax", action="store_true", help="also time decode from jitted JAX")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--match", default="", help="run cases whose name contains this")
    parser.add_argument("--repeat", type=int, default=20)
    arguments = parser.parse_args()
    import triton

    peer, timer = flashmla(), Timer(arguments.repeat)
    results = []
    for case in [*DECODES, *PREFILLS]:
        kind = "decode" if isinstance(case, Decode) else "prefill"
        if arguments.only not in (None, kind) or arguments.match not in case.name:
            continue
        run = decode_case if kind == "decode" else prefill_case
        rows = run(case, timer, peer, tiles_of(case, arguments.tune), arguments.jax)
        print_rows(case, rows)
        shape = {k: str(v) for k, v in dataclasses.asdict(case).items()}
        results.append({"case": shape, "flop": case.flop, "rows": rows})
        torch.cuda.empty_cache()
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "commit": commit(),
        "command": " ".join(sys.argv),
        "timing": "CUPTI, first kernel's start to last kernel's end, L2 flushed, median",
    }
    path = out / ("triton_attention_tune.json" if arguments.tune else "triton_attention.json")
    path.write_text(json.dumps(about | {"results": results}, indent=1))


if __name__ == "__main__":
    main()

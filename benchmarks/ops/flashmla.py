"""FlashMLA from jitted JAX beside the same call from torch, and what the way through XLA adds.

    python -m benchmarks.ops.flashmla

prints, for each production shape: the vendor's attention kernels (split + combine, or prefill) within a JAX call and
within torch's call, by CUPTI with the L2 flushed; beside them the sanitiser and the copies of the results; and the
host's time per call. `cases` has the whole calls for `benchmarks.run`.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.timing import Case, Run, Timer, environment
from jax_sparse_mla.attention import DecodeSchedule, decode_schedule, sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.kv_cache import KVLayout, PagedKV

V4, V32 = KVLayout.V4_FP8, KVLayout.V32_FP8
SLOTS = 1 << 17


class Decode(NamedTuple):
    name: str
    layout: KVLayout
    heads: int
    batch: int
    q_len: int
    topk: int
    extra_topk: int = 0
    extra_page: int = 64

    @property
    def flop(self) -> int:
        columns = self.topk + self.extra_topk
        return 2 * self.heads * self.batch * self.q_len * columns * (self.layout.qk_dim + self.layout.v_dim)


class Prefill(NamedTuple):
    name: str
    heads: int
    qk_dim: int
    topk: int
    kv_len: int
    q_len: int = 4096

    @property
    def flop(self) -> int:
        return 2 * self.heads * self.q_len * self.topk * (self.qk_dim + 512)


DECODES = [
    *(Decode(f"V4 Flash b{b}", V4, 64, b, 1, 128, 512) for b in (1, 64, 256)),
    *(Decode(f"V4 Pro b{b}x2", V4, 128, b, 2, 128, 1024) for b in (2, 64, 128)),
    Decode("V4 Flash C128 b64x2", V4, 64, 64, 2, 128, 1024, extra_page=2),
    *(Decode(f"V3.2 b{b}x2", V32, 128, b, 2, 2048) for b in (2, 64, 128)),
    Decode("V4 Flash, 16 heads b64", V4, 16, 64, 1, 128, 512),
]
PREFILLS = [
    Prefill("V4 Flash kv64k", 64, 512, 512, 65536),
    Prefill("V4 Pro kv64k", 128, 512, 1024, 65536),
    Prefill("V3.2 kv64k", 128, 576, 2048, 65536),
]


# --- inputs ---------------------------------------------------------------------------------------


def random_cache(rng: np.random.Generator, layout: KVLayout, page_size: int) -> PagedKV:
    """Bytes that are finite values of about K's size; the scales of a page repeat."""
    pages = SLOTS // page_size
    data = rng.integers(0, 256, (64, layout.page_bytes(page_size)), dtype=np.uint8)
    body = data[:, : page_size * layout.data_bytes].reshape(64, page_size, layout.data_bytes)
    fp8 = body[:, :, : layout.fp8_dim]
    fp8[(fp8 & 0x7F) == 0x7F] = 0x30  # no NaN
    rope = rng.standard_normal((64, page_size, layout.rope_dim)).astype(np.float32) / 10
    body[:, :, -2 * layout.rope_dim :] = (rope.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if layout.footer_scale_bytes:
        data[:, page_size * layout.data_bytes :] = 127 - 10
    else:
        scales = np.full((64, page_size, layout.num_groups), 2.0**-10, np.float32)
        body[:, :, layout.fp8_dim : layout.fp8_dim + layout.inline_scale_bytes] = scales.view(np.uint8)
    return PagedKV(data=jnp.tile(jnp.asarray(data), (pages // 64, 1)), layout=layout, page_size=page_size)


def random_indices(rng: np.random.Generator, shape: tuple[int, ...], slots: int) -> jax.Array:
    """Uniform over the slots."""
    return jnp.asarray(rng.integers(0, slots, shape, dtype=np.int32))


def decode_arguments(rng: np.random.Generator, case: Decode) -> dict:
    q = rng.standard_normal((case.batch, case.q_len, case.heads, case.layout.qk_dim)).clip(-1, 1)
    rows = (case.batch, case.q_len)
    page = 256 if case.extra_topk else 64
    arguments = {
        "q": jnp.asarray(q, jnp.bfloat16),
        "cache": random_cache(rng, case.layout, page),
        "indices": random_indices(rng, (*rows, case.topk), SLOTS),
    }
    if case.extra_topk:
        arguments |= {
            "extra_cache": random_cache(rng, case.layout, case.extra_page),
            "extra_indices": random_indices(rng, (*rows, case.extra_topk), SLOTS),
            "attn_sink": jnp.asarray(rng.standard_normal(case.heads), jnp.float32),
        }
    return arguments


def prefill_arguments(rng: np.random.Generator, case: Prefill) -> dict:
    kv = rng.standard_normal((4096, case.qk_dim)) / 10
    return {
        "q": jnp.asarray(rng.standard_normal((case.q_len, case.heads, case.qk_dim)) / 10, jnp.bfloat16),
        "kv": jnp.tile(jnp.asarray(kv, jnp.bfloat16), (case.kv_len // 4096, 1)),
        "indices": random_indices(rng, (case.q_len, case.topk), case.kv_len),
        "attn_sink": jnp.asarray(rng.standard_normal(case.heads), jnp.float32),
    }


# --- calls ----------------------------------------------------------------------------------------


def schedule_of(case: Decode) -> DecodeSchedule:
    return decode_schedule((case.batch, case.q_len, case.heads, case.topk, case.extra_topk))


def ours_decode(case: Decode, arguments: dict, **options) -> Run:
    scale = case.layout.qk_dim**-0.5
    call = jax.jit(functools.partial(sparse_mla_decode, softmax_scale=scale, backend="flashmla", **options))
    arguments = arguments | {"schedule": schedule_of(case)}
    return Run(lambda: call(**arguments), "jax")


def peer_decode(flash_mla, case: Decode, arguments: dict) -> Run:
    """FlashMLA's own call; its schedule is computed in the first one, which is not timed."""

    def pages(cache: PagedKV | None):
        if cache is None:
            return None
        data, width = torch.from_dlpack(cache.data), cache.layout.bytes_per_token
        return data.as_strided((len(data), cache.page_size, 1, width), (data.shape[1], width, width, 1))

    def tensor(name: str):
        return torch.from_dlpack(arguments[name]) if name in arguments else None

    kwargs = {
        "q": tensor("q"),
        "k_cache": pages(arguments["cache"]),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.get_mla_metadata()[0],
        "softmax_scale": case.layout.qk_dim**-0.5,
        "is_fp8_kvcache": True,
        "indices": tensor("indices"),
        "attn_sink": tensor("attn_sink"),
        "extra_k_cache": pages(arguments.get("extra_cache")),
        "extra_indices_in_kvcache": tensor("extra_indices"),
        "use_legacy": True,
    }
    return Run(lambda: flash_mla.flash_mla_with_kvcache(**kwargs), "torch")


def ours_prefill(case: Prefill, arguments: dict) -> Run:
    call = jax.jit(functools.partial(sparse_mla_prefill, softmax_scale=0.5, backend="flashmla"))
    return Run(lambda: call(**arguments), "jax")


def peer_prefill(flash_mla, case: Prefill, arguments: dict) -> Run:
    q, kv, indices, sink = (torch.from_dlpack(arguments[name]) for name in ("q", "kv", "indices", "attn_sink"))
    kv, indices = kv[:, None], indices[:, None]
    return Run(lambda: flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, attn_sink=sink, use_legacy=True), "torch")


def peer():
    try:
        import flash_mla
    except (ImportError, OSError):
        return None
    return flash_mla


def cases(rng: np.random.Generator) -> Iterator[Case]:
    flash_mla = peer()
    if flash_mla is None:
        return
    for case in [*DECODES, *PREFILLS]:
        kind = "decode" if isinstance(case, Decode) else "prefill"
        if kind == "decode":
            arguments = decode_arguments(rng, case)
            ours = ours_decode(case, arguments)
            peers = {"flash_mla (torch)": peer_decode(flash_mla, case, arguments)} if case.heads >= 64 else {}
            rows, columns = case.batch * case.q_len, case.topk + case.extra_topk
            row_bytes, d_qk = case.layout.bytes_per_token, case.layout.qk_dim
        else:
            arguments = prefill_arguments(rng, case)
            ours, peers = ours_prefill(case, arguments), {"flash_mla (torch)": peer_prefill(flash_mla, case, arguments)}
            rows, columns, row_bytes, d_qk = case.q_len, case.topk, 2 * case.qk_dim, case.qk_dim
        kv_bytes = min(rows * columns, SLOTS) * row_bytes
        moved = kv_bytes + rows * (4 * columns + 2 * case.heads * (d_qk + 512))
        yield Case(f"flashmla {kind} {case.name}", {"flashmla": ours}, peers, moved, case.flop)


# --- what the way through XLA adds ----------------------------------------------------------------


def parts_of(timer: Timer) -> dict[str, float]:
    """Microseconds of the last call's device operations, by kind; attention from split's start to combine's end."""
    parts = {"sanitise": 0.0, "copies": 0.0, "other": 0.0}
    attention = []
    for operation in timer.operations:
        name = operation.name.lower()
        if any(word in name for word in ("splitkv", "combine", "sparse_attn")):
            attention.append(operation)
        elif "sanitise" in name:
            parts["sanitise"] += operation.duration
        else:
            parts["copies" if "memcpy" in name or "copy" in name else "other"] += operation.duration
    parts["attention"] = max(o.start + o.duration for o in attention) - min(o.start for o in attention)
    return parts


def median_parts(timer: Timer, run: Run, times: int = 5) -> dict[str, float]:
    """Each part's median over several measurements, and the span of the whole call."""
    rows = []
    for _ in range(times):
        span = timer(run)
        rows.append(parts_of(timer) | {"call": span})
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def host_time(run: Run, calls: int = 16, times: int = 9) -> float:
    """Microseconds of the host per call that is only enqueued; few at a time, so that none waits for the device."""

    def wait(out):
        jax.block_until_ready(out) if run.framework == "jax" else torch.cuda.synchronize()

    wait(run.call())
    enqueued = []
    for _ in range(times):
        start = time.perf_counter()
        for _ in range(calls):
            out = run.call()
        enqueued.append((time.perf_counter() - start) / calls * 1e6)
        wait(out)
    return statistics.median(enqueued)


def chained_host_time(case: Decode, arguments: dict, length: int = 64) -> float:
    """Microseconds of the host per decode call, `length` of them in one jitted program: no Python between them.

    What a call costs an engine whose step is one program: the custom call, the operator in it and its launches.
    """
    schedule, scale = schedule_of(case), case.layout.qk_dim**-0.5

    @jax.jit
    def chain(arguments, schedule):
        q = arguments["q"]
        for _ in range(length):
            out, _ = sparse_mla_decode(
                **arguments | {"q": q},
                schedule=schedule,
                softmax_scale=scale,
                assume_valid_indices=True,
                backend="flashmla",
            )
            q = out if case.layout.qk_dim == 512 else jnp.concatenate([out, q[..., 512:]], -1)
        return q

    run = Run(lambda: chain(arguments, schedule), "jax")
    return host_time(run, calls=1) / length


def main() -> None:
    rng, timer, flash_mla = np.random.default_rng(0), Timer(9), peer()
    if flash_mla is None:
        raise SystemExit("flash_mla is not importable here")
    rows = []
    print("us: attention kernels from jit and from torch, their ratio; sanitiser, copies, other; host per dispatch")
    for case in [*DECODES, *PREFILLS]:
        decode = isinstance(case, Decode)
        arguments = (decode_arguments if decode else prefill_arguments)(rng, case)
        ours = (ours_decode if decode else ours_prefill)(case, arguments)
        row = {"case": case.name, "ours": median_parts(timer, ours), "host_us": host_time(ours)}
        if case.heads >= 64:
            theirs = (peer_decode if decode else peer_prefill)(flash_mla, case, arguments)
            row |= {"torch": median_parts(timer, theirs), "torch_host_us": host_time(theirs)}
        rows.append(row)
        a, b = row["ours"], row.get("torch", {}).get("attention", float("nan"))
        print(
            f"{case.name:24} {a['attention']:8.1f} {b:8.1f} {b / a['attention']:6.3f}  sanitise {a['sanitise']:5.1f} "
            f"copies {a['copies']:6.1f} other {a['other']:5.1f} call {a['call']:8.1f}  "
            f"host {row['host_us']:6.1f} torch {row.get('torch_host_us', float('nan')):6.1f}  "
            f"{case.flop / a['attention'] / 1e6:4.0f} TFLOP/s",
            flush=True,
        )
    case = DECODES[0]
    chained = chained_host_time(case, decode_arguments(rng, case))
    print(f"host time per call, 64 calls in one program ({case.name}): {chained:.1f} us")
    out = Path(os.environ.get("OUT") or Path(__file__).parents[1] / "results")
    out.mkdir(parents=True, exist_ok=True)
    record = environment() | {"rows": rows, "chained_host_us": chained}
    (out / "flashmla_from_jit.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

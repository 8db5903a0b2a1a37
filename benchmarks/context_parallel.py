"""Context parallel decode against one GPU: pages over all devices, a layer's attention with its exchange.

    python -m benchmarks.context_parallel [--layers c4,c128,v32] [--contexts 131072,1048576] [--rows 64]

A program calls the attention of CALLS layers one after the other, as those of a step are. Times are wall times of such
a program over CALLS:

    one        sparse_mla_decode on one device, which has all pages
    own keys   on every device, the packing of its own slots and attention to them with all heads: no exchange
    parallel   context_parallel_decode: own keys, the exchange over heads, the merge, the sink; with the mesh, so that
               the exchange is one launch where the devices allow it
    all-to-all the same without the mesh: the exchange is an all-to-all between two launches
    gathered   own keys, whole outputs gathered on every device and merged there: what the exchange replaces

Sent bytes are those that each device sends for a layer. Before anything is timed, outputs are compared with those of
one device. Writes the section context_parallel of two_gpus.json, in $OUT or benchmarks/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.record import section, write_section
from benchmarks.two_gpus import COLLECTIVES
from jax_sparse_mla import DEEPSEEK_V4_FLASH, DEEPSEEK_V32, ModelSpec, PagedKV, write_kv
from jax_sparse_mla.attention import (
    apply_attn_sink,
    context_parallel_decode,
    merge_attention,
    sparse_mla_decode,
)
from jax_sparse_mla.attention.context_parallel import own_tables
from jax_sparse_mla.attention.index_table import IndexTable

CALLS = 10
AXIS = "pages"
ONE_LAUNCH = "jax_sparse_mla.peer_exchange"  # in a program's text, where it does the exchange
SOME = 64  # pages of random rows, which all pages repeat
# How far outputs may be apart: a part is rounded to bfloat16 before it is merged, and the result after it.
TOLERANCE = 2**-6


@dataclasses.dataclass(frozen=True)
class Layer:
    """A kind of layer: the compress ratio (None: V3.2), and the selected keys of a row (None: all)."""

    spec: ModelSpec
    ratio: int | None
    topk: int | None

    @property
    def selects(self) -> bool:
        return self.topk is not None


LAYERS = {
    "c4": Layer(DEEPSEEK_V4_FLASH, 4, DEEPSEEK_V4_FLASH.index_topk),
    "c128": Layer(DEEPSEEK_V4_FLASH, 128, None),
    "v32": Layer(DEEPSEEK_V32, None, DEEPSEEK_V32.index_topk),
}


def tables(layer: Layer, rows: int, context: int, n: int) -> tuple[int, np.ndarray, int, np.ndarray | None]:
    """Pages and slots int32 `[rows, 1, columns]` of the first cache, and of the compressed one.

    A request's pages go to the devices in turn; which of a device's pages it has is random.
    """
    rng, spec = np.random.default_rng(0), layer.spec

    def pages_of(count):  # [rows, count], and how many pages there are
        count = -(-count // n) * n
        groups = rng.permutation(rows * count // n).reshape(rows, -1)
        return (groups[:, :, None] * n + np.arange(n)).reshape(rows, -1), rows * count

    def slots(page, entries, size):
        found = np.take_along_axis(page, entries // size, axis=1) * size + entries % size
        return found.astype(np.int32)[:, None]

    def chosen(count):
        if not layer.selects:
            return np.broadcast_to(np.arange(count), (rows, count))
        return rng.integers(0, count, (rows, min(layer.topk, count)))

    if layer.ratio is None:
        page, total = pages_of(context // spec.page_size)
        return total, slots(page, chosen(context), spec.page_size), 0, None
    page, total = pages_of(3)
    window = np.arange(spec.window) + rng.integers(0, 2 * spec.page_size - spec.window, (rows, 1))
    full, full_total = pages_of(context // spec.page_size)
    extra = slots(full, chosen(context // layer.ratio), spec.page_size // layer.ratio)
    return total, slots(page, window, spec.page_size), full_total, extra


def pool(spec: ModelSpec, pages: int, page_size: int, n: int, device: int | jax.Array) -> PagedKV:
    """A device's share of the pages, all of them where n is 1."""
    some = PagedKV.zeros(spec.kv_layout, SOME, page_size)
    rows = jax.random.normal(jax.random.key(1), (some.num_slots, spec.qk_dim), jnp.bfloat16)
    some = write_kv(some, jnp.arange(some.num_slots, dtype=jnp.int32), rows)
    own = jnp.arange(pages // n, dtype=jnp.int32) * n + device
    return dataclasses.replace(some, data=some.data[own % SOME])


def gathered(q, cache, indices, *, extra_cache=None, extra_indices=None, attn_sink=None, softmax_scale):
    """Whole outputs of every device's keys, gathered and merged."""
    extra = {} if extra_cache is None else {"extra_cache": extra_cache, "extra_indices": extra_indices}
    out, lse = own_keys(q, cache, indices, softmax_scale=softmax_scale, **extra)
    out, lse = merge_attention(lax.all_gather(out, AXIS), lax.all_gather(lse, AXIS))
    return (out if attn_sink is None else apply_attn_sink(out, lse, attn_sink)), lse


def own_keys(q, cache, indices, *, extra_cache=None, extra_indices=None, attn_sink=None, softmax_scale):
    """`context_parallel_decode` without its exchange: parts of all heads, as many as there are devices."""
    del attn_sink
    tables = [IndexTable(cache, indices, None)]
    if extra_cache is not None:
        tables.append(IndexTable(extra_cache, extra_indices, None))
    (indices, lengths), *second = own_tables(tables, AXIS)
    extra = {}
    for extra_indices, extra_lengths in second:
        extra = {"extra_cache": extra_cache, "extra_indices": extra_indices, "extra_topk_length": extra_lengths}
    options = {"softmax_scale": softmax_scale, "topk_length": lengths, "assume_valid_indices": True}
    return sparse_mla_decode(q, cache, indices, **options, **extra)


def chain(attend, layer: Layer, calls: int):
    """`calls` layers, each of which can begin when the one below it is done; (out, lse) of the last, as of any.

    A layer takes a value of the output below it: an optimization barrier alone would let XLA merge all calls to one. A
    selection is a layer's own, and its slots take that value. The window and all entries of C128 are the same in all
    layers, so there the queries do.
    """

    def program(q, caches, indices, sink):
        (cache, *extra_cache), (slots, *extra_slots) = caches, indices
        out = None
        for _ in range(calls):
            if out is not None:
                zero = jnp.isnan(out[0][0, 0, 0, 0])
                if not layer.selects:
                    q = q + zero.astype(q.dtype)
                elif extra_slots:
                    extra_slots = [extra_slots[0] + zero.astype(jnp.int32)]
                else:
                    slots = slots + zero.astype(jnp.int32)
            extra = {"extra_cache": extra_cache[0], "extra_indices": extra_slots[0]} if extra_cache else {}
            out = attend(q, cache, slots, attn_sink=sink, softmax_scale=layer.spec.softmax_scale, **extra)
        return out

    return program


def timed(call, arguments: Sequence[Any], repeats: int) -> float:
    """Median microseconds of a layer, in runs of five programs."""
    jax.block_until_ready(call(*arguments))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(5):
            out = call(*arguments)
        jax.block_until_ready(out)
        seconds.append((time.perf_counter() - started) / 5)
    return statistics.median(seconds) * 1e6


def compare(name: str, found: tuple, wanted: tuple) -> None:
    out, lse = (np.asarray(x, np.float32)[: len(wanted[1])] for x in found)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-3, atol=1e-3, err_msg=name)
    scale = np.abs(wanted[0]).max()
    np.testing.assert_allclose(out / scale, wanted[0] / scale, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def case(layer: Layer, rows: int, context: int, devices: Sequence[jax.Device], calls: int, repeats: int) -> dict:
    """Compares and times one case."""
    spec, n = layer.spec, len(devices)
    pages, slots, extra_pages, extra_slots = tables(layer, rows, context, n)
    sizes = [(pages, spec.page_size)] + ([(extra_pages, spec.page_size // layer.ratio)] if extra_pages else [])
    indices = tuple(jnp.asarray(x) for x in (slots, extra_slots) if x is not None)
    q = jax.random.normal(jax.random.key(0), (rows, 1, spec.num_heads, spec.qk_dim), jnp.bfloat16)
    sink = jax.random.normal(jax.random.key(3), (spec.num_heads,)) if layer.ratio is not None else None

    def whole():
        return tuple(pool(spec, *size, 1, 0) for size in sizes)

    result: dict[str, Any] = {"devices": n, "rows": rows, "columns": sum(x.shape[-1] for x in indices)}
    arguments = jax.device_put((q, jax.jit(whole)(), indices, sink), devices[0])
    one = jax.jit(chain(sparse_mla_decode, layer, calls))
    wanted = tuple(np.asarray(x, np.float32) for x in one(*arguments))
    result["one_us"] = timed(one, arguments, repeats) / calls
    del arguments

    mesh = Mesh(np.array(devices), (AXIS,))

    def own():
        return tuple(pool(spec, *size, n, lax.axis_index(AXIS)) for size in sizes)

    caches = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(), out_specs=P(AXIS)))()
    q, indices, sink = jax.device_put((q, indices, sink), NamedSharding(mesh, P()))
    decode = functools.partial(context_parallel_decode, axis_name=AXIS)
    ways = {
        # Each device's own output, one after the other: of parts, and of what is the same on all devices.
        "own_keys": (own_keys, P(), P(AXIS)),
        "parallel": (functools.partial(decode, mesh=mesh), P(AXIS), P(None, None, AXIS)),
        "all_to_all": (decode, P(AXIS), P(None, None, AXIS)),
        "gathered": (gathered, P(), P(AXIS)),
    }
    for name, (attend, of_sink, of_out) in ways.items():
        specs = {"in_specs": (P(), P(AXIS), P(), of_sink), "out_specs": of_out}
        program = jax.jit(jax.shard_map(chain(attend, layer, calls), mesh=mesh, **specs))
        call = program.lower(q, caches, indices, sink).compile()
        arguments = jax.device_put((q, caches, indices, sink), call.input_shardings[0])
        if name != "own_keys":
            compare(name, call(*arguments), wanted)
        result[f"{name}_us"] = timed(call, arguments, repeats) / calls
        text = call.as_text()
        if name == "parallel":
            result["one_launch"] = ONE_LAUNCH in text
        result[f"{name}_collectives"] = [x for x in COLLECTIVES if re.search(rf" {x}(-start)?\(", text)]
    each = rows * spec.num_heads * (2 * spec.v_dim + 4)
    result["parallel_sent_bytes"], result["gathered_sent_bytes"] = each * (n - 1) // n, each * (n - 1)
    result["speedup"] = result["one_us"] / result["parallel_us"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--contexts", default="131072,1048576")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    devices = jax.devices()
    if len(devices) < 2:
        raise SystemExit(f"two or more devices are needed, JAX has {len(devices)} here")
    results = section("two_gpus.json", "context_parallel")
    for name in arguments.layers.split(","):
        for context in map(int, arguments.contexts.split(",")):
            started = time.perf_counter()
            found = case(LAYERS[name], arguments.rows, context, devices, arguments.calls, arguments.repeats)
            results[f"{name} {context}"] = found
            print(
                f"{name:5} {context:8}: one {found['one_us']:7.1f} us, {len(devices)} devices: own keys "
                f"{found['own_keys_us']:7.1f}, "
                f"parallel {found['parallel_us']:7.1f} ({found['speedup']:.2f} times one), "
                f"{'by one launch' if found['one_launch'] else 'not by one launch'}, "
                f"all-to-all {found['all_to_all_us']:7.1f}, "
                f"gathered {found['gathered_us']:7.1f}; sent {found['parallel_sent_bytes'] / 1e6:.2f} and "
                f"{found['gathered_sent_bytes'] / 1e6:.2f} MB; case {time.perf_counter() - started:.0f} s",
                flush=True,
            )
            write_section("two_gpus.json", "context_parallel", results)


if __name__ == "__main__":
    main()

"""One side of `python -m benchmarks engines vllm`: vLLM's layers, each call compared and timed.

    python -m benchmarks.engines.vllm --side theirs|ours --results FILE [--only TEXT] [--no-gpu]

Writes the file after each case.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.engines import difference, lines_of, served, timed, timers

RATIOS = (1, 4, 128)
CHUNK = 4096  # tokens of a prefill with sizes of serving, the second half of a prompt
SERVED = ((8, 8192), (64, 8192))  # requests, and tokens of each, of the rows with sizes of serving


class Case(NamedTuple):
    """A batch for a layer; `layer(…)` makes the layer, `call(layer)` its call."""

    name: str
    layer: Callable
    call: Callable
    decode: bool  # so that vLLM may have it in a CUDA graph


def cases(layers, backend: str, device: torch.device, served: bool) -> Iterator[Case]:
    """V3.2's and V4's, small batches and, where `served`, sizes of serving."""

    def v32(name, heads, query_lens, seq_lens, **options):
        return Case(
            f"V3.2, {name}, {heads} heads" + ("" if options.get("fp8", True) else ", bf16"),
            lambda: layers.V32(heads, backend, device, **options),
            lambda layer: layer.call(query_lens, seq_lens),
            max(query_lens) <= 2,
        )

    def v4(name, ratio, heads, query_lens, seq_lens, **options):
        return Case(
            f"V4, ratio {ratio}, {name}, {heads} heads",
            lambda: layers.V4(heads, backend, device, **options),
            lambda layer: layer.call(ratio, query_lens, seq_lens),
            max(query_lens) <= 2,
        )

    for heads in (16, 64, 128):
        yield v32("decode", heads, [1, 1, 1], [70, 200, 129])
        yield v32("two tokens", heads, [2, 2, 2], [70, 200, 129])
        yield v32("mixed", heads, [1, 1, 150], [70, 200, 150])
        yield v32("decode", heads, [1, 1, 1], [70, 200, 129], topk=2048, fp8=False)
    for heads in (16, 64):
        for ratio in RATIOS:
            yield v4("decode", ratio, heads, [1, 1, 1], [70, 300, 513])
            yield v4("mixed", ratio, heads, [1, 1, 40], [70, 600, 300])
    for requests, tokens in SERVED if served else ():
        lens, long = ([1] * requests, [tokens] * requests), {"max_len": 2 * tokens}
        for heads in (16, 64, 128):
            for fp8 in (True, False):
                yield v32(f"served {requests}x{tokens}", heads, *lens, topk=2048, fp8=fp8, **long)
        for heads in (16, 64):
            for ratio in RATIOS:
                yield v4(f"served {requests}x{tokens}", ratio, heads, *lens, topk=512, **long)


def chunks(layers, backend: str, device: torch.device) -> Iterator[Case]:
    """Prefill with sizes of serving."""
    long = {"max_len": 2 * CHUNK}
    for heads in (16, 64, 128):
        for fp8 in (True, False):
            yield Case(
                f"V3.2, prefill of {CHUNK}, {heads} heads" + ("" if fp8 else ", bf16"),
                lambda heads=heads, fp8=fp8: layers.V32(heads, backend, device, topk=2048, fp8=fp8, **long),
                lambda layer: layer.call([CHUNK], [2 * CHUNK]),
                False,
            )
    for heads in (16, 64):
        for ratio in RATIOS:
            yield Case(
                f"V4, ratio {ratio}, prefill of {CHUNK}, {heads} heads",
                lambda heads=heads: layers.V4(heads, backend, device, topk=512, **long),
                lambda layer, ratio=ratio: layer.call(ratio, [CHUNK], [2 * CHUNK]),
                False,
            )


def run(case: Case, on: list) -> dict:
    """Output, error, who served, times; or why it failed."""
    from sparse_mla_torch.plugins import calls

    result = {}
    torch.manual_seed(0)
    try:
        call = case.call(case.layer())
        calls.counts.clear()
        output = call.function().clone()
        result |= {
            "served": served(),
            "output": output.detach().float().cpu(),
            "error": difference(output, call.wanted),
        }
        if on:
            result |= timed(call.function, output, on, case.decode)
    except Exception as error:  # the other cases still run
        result["failed"] = f"{type(error).__name__}: {error}"[:400]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("theirs", "ours"), required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], help="cases with this text in their names")
    parser.add_argument("--no-gpu", action="store_true", help="with the stand-ins of tests/engines, untimed")
    arguments = parser.parse_args()
    on, device, said = [], torch.device("cpu"), lines_of("vllm")
    if arguments.no_gpu:
        importlib.import_module("vllm_without_gpu")
        importlib.import_module("drive_vllm").stand_in_for_v32s_operators()
    else:
        on, device = timers(), torch.device("cuda", 0)
    importlib.import_module("sparse_mla_torch.plugins.vllm").register()
    layers = importlib.import_module("vllm_layers")
    backend, results = layers.OURS if arguments.side == "ours" else layers.THEIRS, {}
    layers.MAX_TOKENS = CHUNK if on else layers.MAX_TOKENS
    of_chunks = chunks(layers, backend, device) if on else ()
    for case in itertools.chain(cases(layers, backend, device, served=bool(on)), of_chunks):
        if arguments.only and not any(text in case.name for text in arguments.only):
            continue
        start = time.perf_counter()
        results[case.name] = run(case, on)
        shown = {key: value for key, value in results[case.name].items() if key not in ("output", "kernels")}
        print(f"{case.name}: {shown} in {time.perf_counter() - start:.1f} s", flush=True)
        torch.save({"results": results, "said": said}, arguments.results)


if __name__ == "__main__":
    main()

"""One side of `python -m benchmarks engines sglang`: SGLang's test kit, each layer's call recorded.

    python -m benchmarks.engines.sglang --results FILE [--only TEXT] [--no-gpu]

Ours serves where JAX_SPARSE_MLA_SGLANG=1. Writes the file after each case.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sglang_cases as kit
import torch

from benchmarks.engines import Captured, difference, lines_of, served, timed, timers
from benchmarks.harness import Run

WARM_UP = 2


class Recorder:
    """Runs cases; there are no timers where there is no GPU."""

    def __init__(self, timers: list):
        self.timers, self.found = timers, {}

    def run(self, case: kit.Case, device: str) -> dict[str, Any]:
        """A case's results: output, error, who served, times; or why it was skipped or failed."""
        from sparse_mla_torch.plugins import calls

        self.found, compare = {"in_graph": case.in_graph}, torch.testing.assert_close
        torch.testing.assert_close = self._compared  # the kit's tolerances pass zeros
        calls.counts.clear()
        try:
            case.function(unittest.TestCase(), case.case, device=device, **case.options)
        except unittest.SkipTest as reason:
            self.found["skipped"] = str(reason)
        except Exception as error:  # the other cases still run
            self.found["failed"] = f"{type(error).__name__}: {error}"[:400]
            if os.environ.get("JAX_SPARSE_MLA_PLUGIN_STRICT") == "1":
                raise
        finally:
            torch.testing.assert_close = compare
        self.found.setdefault("served", served())
        return self.found

    def _compared(self, actual: torch.Tensor, expected: torch.Tensor, **tolerances) -> None:
        self.found["error"] = difference(actual, expected)

    # --- a layer's call ----------------------------------------------------------------------------

    def watch(self, module: Any, builder: str) -> None:
        """Records the attention calls of every fixture that the kit's module builds."""
        build = getattr(module, builder)

        def built(*args, **kwargs):
            fixture = build(*args, **kwargs)
            fixture.backend.forward = functools.partial(self._layer, fixture.backend.forward)
            return fixture

        setattr(module, builder, built)

    def _layer(self, forward: Callable, *args, **kwargs) -> torch.Tensor:
        output = forward(*args, **kwargs)
        if "output" not in self.found:
            self.found |= {"output": output.detach().float().cpu(), "served": served()}
            if self.timers:
                call = functools.partial(forward, *args, **kwargs)
                self.found |= timed(call, output, self.timers, self.found["in_graph"])
        return output

    # --- SGLang's graph runner ---------------------------------------------------------------------

    def replayed(self, testcase, case, *, adapter, build_kwargs, capture_batch_size, max_context_len, dtype, device):
        """In the place of the kit's `_run_cuda_graph_decode_case`, which makes no CUDA graph.

        It makes that function's calls in the same order, as SGLang's graph runner does: metadata outside of the graph;
        two warm-ups and the capture of metadata and layer inside; then another batch's metadata and tensors are put
        into the captured one's, and the graph is replayed.
        """
        size = {"max_context_len": max_context_len, "device": device}
        more = {"disable_cuda_graph": False, "runner_batch_size": capture_batch_size}
        fixture = adapter.build_fixture(testcase, case, **build_kwargs, **more)
        backend, inputs, state = fixture.backend, adapter.fixture_inputs(fixture), adapter.clone_state(fixture)
        shortest = max(0, backend.get_cuda_graph_seq_len_fill_value() - 1)

        captured_case = adapter.make_case(case, f"{case.name}_capture", (shortest,) * capture_batch_size)
        held = adapter.make_capture_inputs(captured_case, fixture, dtype=dtype, device=device)
        batch = adapter.make_forward_batch(captured_case, fixture.runner, **size)
        adapter.prepare_inputs(fixture, captured_case, batch, held, max_context_len=max_context_len)
        context = importlib.import_module("sglang.srt.model_executor.forward_context")
        runner = importlib.import_module(kit.GRAPHS)

        def once():
            backend.init_forward_metadata_in_graph(batch)
            return adapter.run_forward(fixture, batch, held)

        with torch.no_grad(), context.forward_context(context.ForwardContext(attn_backend=backend)):
            backend.init_cuda_graph_state(max_bs=capture_batch_size, max_num_tokens=batch.input_ids.numel())
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            for _ in range(WARM_UP):
                once()
                backend.on_after_cuda_graph_warmup()
            graph = Captured(once, bool(self.timers))
            self.found["served"] = served()

            adapter.restore_state(fixture, state)
            pads = (shortest,) * (capture_batch_size - case.batch_size)
            replay_case = adapter.make_case(case, f"{case.name}_replay", case.prefix_lens + pads)
            fresh = adapter.make_replay_inputs(replay_case, fixture, pads, inputs, dtype=dtype, device=device)
            replay_batch = adapter.make_forward_batch(replay_case, fixture.runner, **size)
            adapter.prepare_inputs(fixture, replay_case, replay_batch, fresh, max_context_len=max_context_len)
            _put(vars(batch), vars(replay_batch))
            _put(held, fresh)
            backend_outside = _OutsideOfGraph(backend)
            runner._init_cuda_graph_replay_metadata(backend_outside, capture_batch_size, replay_batch)
            graph.replay()
            output = graph.output[: case.num_input_tokens].detach().float().cpu()
            if self.timers:
                self.found["graph_us"] = self.timers[0](Run(graph.replay, "torch"))
        expected = adapter.expected_output(fixture, replay_case, fresh, state)[: case.num_input_tokens]
        self.found |= {"output": output, "error": difference(output, expected.cpu())}


class _OutsideOfGraph:
    """A backend whose part of the metadata inside of a graph is left to the graph."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def init_forward_metadata_in_graph(self, batch) -> None:
        pass


def _put(held: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Puts a batch's tensors into those that a graph has captured."""
    for name, tensor in held.items():
        other = fresh.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor):
            if tensor.shape != other.shape:
                raise ValueError(f"{name}: the graph was captured with {tuple(tensor.shape)}, not {tuple(other.shape)}")
            tensor.copy_(other)


def load_sglang() -> list[str]:
    """Loads SGLang's plugins as its server's processes do it; the list gets the lines that our plugin logs."""
    os.environ["SGLANG_DSA_FUSE_TOPK"] = "0"  # the kit gives positions, and not slots
    said = lines_of("sglang")
    importlib.import_module("sglang")  # where a package is missing, its name is the error: the plugin logs its own
    from sparse_mla_torch.plugins import sglang as plugin

    plugin.register()  # as SGLang does by its entry point, which a checkout that is not installed has not
    importlib.import_module("sglang.srt.plugins").load_plugins()
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[], help="cases with this text in their names")
    parser.add_argument("--part", choices=kit.PARTS, action="append", help="some of the cases")
    parser.add_argument("--no-gpu", action="store_true", help="with the stand-ins of tests/engines, untimed")
    arguments = parser.parse_args()
    gpu, on, said = not arguments.no_gpu, [], []
    if gpu:
        on, said = timers(), load_sglang()
    else:
        importlib.import_module("sglang_without_gpu")
        importlib.import_module("sparse_mla_torch.plugins.sglang").register()
        importlib.import_module("sglang.srt.plugins").load_plugins()
    v4, dsa, graphs = (importlib.import_module(name) for name in (kit.V4_KIT, kit.DSA_KIT, kit.GRAPHS))
    modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    if not gpu:
        importlib.import_module("sglang_without_gpu").prepare_kit(v4)
    recorder, results = Recorder(on), {}
    kit.enlarge_v4(v4, torch)
    kit.scatter_v32(dsa, torch)
    recorder.watch(v4, "build_dsv4_attention_fixture")
    recorder.watch(dsa, "build_dsa_sparse_attention_fixture")
    graphs._run_cuda_graph_decode_case = recorder.replayed
    cases = [*kit.v4_cases(v4, modes), *kit.dsa_cases(dsa, modes), *kit.graph_cases(graphs, v4, dsa, modes)]
    cases += [*kit.served_v4_cases(v4, modes), *kit.served_dsa_cases(dsa)]
    for case in cases:
        if case.part not in (arguments.part or kit.PARTS):
            continue
        if arguments.only and not any(text in case.name for text in arguments.only):
            continue
        start = time.perf_counter()
        results[case.name] = recorder.run(case, "cuda" if gpu else "cpu")
        results[case.name]["seconds"] = time.perf_counter() - start
        shown = {key: value for key, value in results[case.name].items() if key != "output"}
        print(f"{case.name}: {shown}", flush=True)
        torch.save({"results": results, "said": said}, arguments.results)


if __name__ == "__main__":
    main()

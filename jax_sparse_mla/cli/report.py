"""The output of `generate` before and after it serves: the plan, the attention that ran, and the comparisons."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from jax_sparse_mla.attention.backend import Call
from jax_sparse_mla.attention.machine import plan_here
from jax_sparse_mla.attention.route import Plan
from jax_sparse_mla.cli.progress import STEPS
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.layout import bf16_layout, workspace_layout
from jax_sparse_mla.models import ModelSpec
from jax_sparse_mla.serving.comparison import MAX_LOGIT_DIFFERENCE, compare_backends, layer_kind
from jax_sparse_mla.serving.memory import bytes_of_a_device
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import GATHERED, EngineOptions, prefill_backend
from jax_sparse_mla.serving.speculative import MAX_MARGIN, compare_with_plain


def plans(spec: ModelSpec, options: EngineOptions, backend: str | None) -> dict[str, Plan]:
    """The plan of each kind of step, for the index columns of a layer with an indexer.

    Raises:
      ValueError: the backend cannot.
    """
    gathered = prefill_backend(spec, options) == GATHERED
    gathered = gathered and (spec.windowed or not options.bf16_cache)
    cached = bf16_layout(spec.kv_layout) if options.bf16_cache else spec.kv_layout

    def plan(phase: str, rows: int) -> Plan:
        layout = workspace_layout(spec.qk_dim) if phase == "prefill" else cached
        columns = (spec.window or 0) + spec.index_width
        heads = spec.num_heads * (options.context_parallel if phase == "decode" else 1)  # which share keys
        return plan_here(Call(phase, layout, rows, heads, DeviceInfo.current(), columns), backend=backend)

    planned = {"prefill": plan("prefill" if gathered else "decode", options.chunk_size)}
    planned["decode"] = plan("decode", options.max_batch)
    if options.speculative_steps:
        planned["verify"] = plan("decode", options.max_batch * (options.speculative_steps + 1))
    return planned


def print_header(setup: Any, engine: Any, requests: list[Request], planned: dict[str, Plan]) -> None:
    spec, options = setup.spec, engine.options
    heads = f"{spec.num_heads} heads{'' if engine.mesh is None else ' on each device'}"
    cache = f"{'BF16' if options.bf16_cache else spec.kv_layout.name}, paged, {spec.page_size} tokens a page"
    shared = f", shared by {n} devices" if (n := options.context_parallel) > 1 else ""
    print(f"KV cache   {cache}{shared}, for {setup.model.num_layers} layers of {heads}")
    lengths = [len(r.prompt) for r in requests]
    prompts = ", ".join(map(str, lengths)) if len(lengths) <= 4 else f"{min(lengths)} to {max(lengths)}"
    print(f"requests   {len(requests)} with {prompts} prompt tokens, {requests[0].max_new_tokens} new tokens each")
    weights, state = (f"{bytes_of_a_device(arrays) / 2**30:.2f} GiB" for arrays in (engine.params, engine.state))
    print(f"memory     weights {weights}, caches {state}{'' if engine.mesh is None else ' on each device'}")
    for step, plan in planned.items():
        print(f"route      {step}: {plan.backend}, {plan.kernel} ({plan.reason})")


def print_texts(decode: Callable[[list[int]], str], requests: list[Request], trained: bool, verbose: bool) -> None:
    """Prints what was generated: of a trained model the first request's text, with `verbose` all texts and tokens."""
    for i, request in enumerate(requests if verbose else requests[:trained]):
        print(f"request {i}: …{decode(request.prompt[-40:])!r} → {decode(request.output)!r}")
        if verbose:
            print(f"           tokens {request.output}")
    if trained and not verbose and len(requests) > 1:
        print(f"           --verbose prints the others' texts: {len(requests) - 1}")


def print_accepted(accepted: collections.Counter[int]) -> None:
    rounds = sum(accepted.values())
    tokens = sum((count + 1) * times for count, times in accepted.items())
    print(f"accepted   {tokens / max(rounds, 1):.2f} tokens a round, {rounds} rounds of a request")
    for count, times in sorted(accepted.items()):
        print(f"           {count} drafts: {times:4}  {'#' * round(40 * times / max(rounds, 1))}".rstrip())


def print_routes(setup: Any, engine: Any, verbose: bool) -> None:
    """Prints the attention that the programs of each kind of step called; with `verbose`, for which layers."""
    layers = dict.fromkeys(layer_kind(setup.spec, ratio) for ratio in sorted(set(engine.model.ratios)))
    ran = {}
    for mode, step in STEPS.items():
        # In the order in which programs were made, each once.
        calls = [call for program, calls in engine.routes.items() if program.mode is mode for call in sorted(calls)]
        ran |= {(step, *call): None for call in calls}
    if not verbose:
        print(f"attention  {', '.join(dict.fromkeys(f'{step} by {backend}' for step, _, backend in ran))}")
    for step, phase, backend in ran if verbose else ():
        print(f"ran        {step}: {backend}, {phase} ({'; '.join(layers)})")


def compare(engine: Any, requests: list[Request], names: list[str]) -> int:
    """Compares attention backends; returns the exit status."""
    against = engine.options.backend or "the router's choice"
    print(f"backends   logits after the same tokens, against {against}: "
          f"differences ≤ {MAX_LOGIT_DIFFERENCE} of the largest logit")  # fmt: skip
    reports = compare_backends(engine, requests, names)
    for report in reports:
        print(
            f"           {report.backend:10} {report.difference:.5f}   {report.agreeing} of {report.total} tokens"
            f"{'' if report.passes else '  FAILED'}"
        )
    ok = all(report.passes for report in reports)
    print(f"backends   {'agree' if ok else 'DISAGREE'}")
    return 0 if ok else 1


def check_tokens(
    serve: Callable[[list[Request]], Any], requests: list[Request], plain: list[Request], whose: str = "plain decoding"
) -> int:
    """Compares tokens with those of plain decoding, which `serve` does; returns the exit status."""
    differences = compare_with_plain(serve, requests, plain)
    total = sum(len(r.output) for r in requests)
    print(f"tokens     {total - len(differences)} of {total} are {whose}'s, after the same tokens before them")
    for difference in differences:
        where = f"request {difference.request}, token {difference.index}"
        print(f"           {where} differs, under a top-2 margin of {difference.margin:.4f} of the best logit")
    if any(request.sampling.temperature > 0 for request in requests):
        print("check      not of drawn tokens: a margin of logits does not tell how close a draw was")
        return 0
    ok = all(difference.margin <= MAX_MARGIN for difference in differences)
    print(f"check      {'passed' if ok else 'FAILED'}: a token may differ under a margin of {MAX_MARGIN}")
    return 0 if ok else 1

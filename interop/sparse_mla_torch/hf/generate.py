"""`jax-sparse-mla generate`: a transformers DeepSeek-V3.2 or V4 model generates text through this library.

`jax_sparse_mla.cli.generate` has its arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import jax
import torch

from jax_sparse_mla import ForwardMode, Plan
from jax_sparse_mla.attention.api import plan_here
from jax_sparse_mla.kv_cache.layout import bf16_layout, workspace_layout
from sparse_mla_torch.hf import presets
from sparse_mla_torch.hf.comparison import (
    MAX_LOGIT_DIFFERENCE,
    MIN_COSINE,
    MIN_OVERLAP,
    MIN_ROW_COSINE,
    compare_backends,
    compare_layers,
    count_agreeing_tokens,
    layer_kind,
)
from sparse_mla_torch.hf.engine import GATHERED, Engine, EngineOptions, Request
from sparse_mla_torch.hf.speculative import MAX_MARGIN, DraftOracle, SpeculativeDecoder, compare_with_plain


def choose_device(wanted: str | None) -> torch.device:
    """CUDA where torch and JAX both have it, else the CPU.

    Raises:
      ValueError: CUDA is wanted and one of them lacks it.
    """
    # One GPU's memory holds torch's weights and JAX's caches: JAX must not take most of it beforehand.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if wanted != "cpu" and torch.cuda.is_available() and jax.default_backend() == "gpu":
        return torch.device("cuda", 0)
    if wanted == "cuda":
        lacking = f"JAX {jax.__version__}" if torch.cuda.is_available() else f"torch {torch.__version__}"
        raise ValueError(f"--device cuda: {lacking} has no GPU here")
    jax.config.update("jax_platforms", "cpu")
    return torch.device("cpu")


def run(args: argparse.Namespace) -> int:
    """Generates, prints, compares.

    Args:
      args: as the command's parser gives them.

    Returns:
      0 if every comparison passes (or none was asked for), 1 if one fails, 2 if there is nothing to run: no prompt,
      no such file, no such device, no model that this library serves, a backend that cannot serve it here, an oracle
      without drafts.
    """
    try:
        if args.draft_oracle and not args.speculative_steps:
            raise ValueError("--draft-oracle needs --speculative-steps")
        device = choose_device(args.device)
        name, model, tokenizer = _load_model(args)
        requests = _requests(tokenizer.encode(_prompt_text(args)), args)
        engine = Engine(
            model.to(device),
            EngineOptions(
                bf16_cache=args.kv_cache == "bf16",
                prefill_backend=args.prefill_backend,
                chunk_size=args.chunk_size,
                max_batch=min(args.max_batch, args.requests),
                max_len=len(requests[0].prompt) + args.max_new_tokens,
                seed=args.seed,
                trace=not args.no_check,
                speculative_steps=args.speculative_steps or 0,
                backend=args.backend,
            ),
        )
        plans = _plans(engine, args.backend)
        for other in args.compare_backends:
            _plans(engine, other)
    except (OSError, ValueError) as error:
        print(f"jax-sparse-mla generate: {error}", file=sys.stderr)
        return 2
    print(f"device     {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}")
    print(f"model      {name}: {len(engine.layers)} layers, {engine.spec.num_heads} heads")
    lengths = ", ".join(str(len(r.prompt)) for r in requests)
    print(f"requests   {args.requests} with {lengths} prompt tokens, {args.max_new_tokens} new tokens each")
    print(f"KV cache   {engine.spec.kv_layout.name if args.kv_cache == 'fp8' else 'BF16'}, paged, "
          f"{engine.spec.page_size} tokens a page")  # fmt: skip
    for step, plan in plans.items():
        print(f"route      {step}: {plan.backend}, {plan.kernel} ({plan.reason})")

    if args.speculative_steps:
        status = _run_speculative(engine, requests, tokenizer, args)
    else:
        _serve(engine, requests, tokenizer)
        status = 0 if args.no_check else _check(engine, requests, args.kv_cache)
    if args.compare_backends:
        status = max(status, _compare_backends(engine, requests, args.compare_backends))
    return status


def _run_speculative(engine: Engine, requests: list[Request], tokenizer, args: argparse.Namespace) -> int:
    """Runs plain decoding first, if its tokens or its comparison are asked for; returns the exit status."""
    plain, status = [Request(r.prompt, r.max_new_tokens) for r in requests], 0
    if args.draft_oracle or not args.no_check:
        print("decoding   plain")
        _serve(engine, plain, tokenizer)
    if not args.no_check:
        status = _check(engine, plain, args.kv_cache)
    oracle = DraftOracle(plain, args.draft_oracle, args.seed) if args.draft_oracle else None
    decoder = SpeculativeDecoder(engine, args.speculative_steps, oracle)
    print(f"decoding   speculative, {decoder.steps} draft tokens by the first layer" + (
        f", plain decoding's token with probability {args.draft_oracle}" if oracle else ""))  # fmt: skip
    _serve(engine, requests, tokenizer, decoder.advance)
    _print_accepted(decoder)
    if not args.no_check:
        status = max(status, _check_tokens(engine, requests, plain))
    return status


def _serve(engine: Engine, requests: list[Request], tokenizer, advance=None) -> None:
    progress = _Progress(requests)
    engine.run(requests, progress, advance)
    progress.print_summary()
    for i, request in enumerate(requests):
        print(f"request {i}: …{tokenizer.decode(request.prompt[-40:])!r} → {tokenizer.decode(request.output)!r}")
        print(f"           tokens {request.output}")
    _print_routes(engine)


def _print_accepted(decoder: SpeculativeDecoder) -> None:
    rounds = sum(decoder.accepted.values())
    tokens = sum((count + 1) * times for count, times in decoder.accepted.items())
    print(f"accepted   {tokens / max(rounds, 1):.2f} tokens a round, {rounds} rounds of a request")
    for count, times in sorted(decoder.accepted.items()):
        print(f"           {count} drafts: {times:4}  {'#' * round(40 * times / max(rounds, 1))}".rstrip())


def _load_model(args: argparse.Namespace):
    """The model's name, the model, and its tokenizer."""
    if args.model is not None:
        return args.model, *presets.load_checkpoint(args.model)
    preset = args.preset or "v4"  # not argparse's default: naming it would not conflict with --model
    name = f"preset {preset}, seed {args.seed} (random weights)"
    return name, presets.build_preset(preset, args.seed), presets.ByteTokenizer()


def _requests(prompt: list[int], args: argparse.Namespace) -> list[Request]:
    """The whole prompt, then shorter and shorter beginnings of it."""
    if not prompt:
        raise ValueError("the prompt has no tokens")
    lengths = [max(1, len(prompt) * (args.requests - i) // args.requests) for i in range(args.requests)]
    return [Request(prompt=prompt[:length], max_new_tokens=args.max_new_tokens) for length in lengths]


def _prompt_text(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        return args.prompt_file.read_text(encoding="utf-8")
    return presets.default_prompt()


def _plans(engine: Engine, backend: str | None) -> dict[str, Plan]:
    """The plan of each kind of step, for the index columns of a layer with an indexer.

    Raises:
      ValueError: the backend cannot.
    """
    options, spec = engine.options, engine.spec
    gathered = engine.prefill_backend == GATHERED and (engine.is_v4 or not options.bf16_cache)
    cached = bf16_layout(spec.kv_layout) if options.bf16_cache else spec.kv_layout
    steps = [
        ("prefill", "prefill" if gathered else "decode", options.chunk_size),
        ("decode", "decode", options.max_batch),
    ]
    if options.speculative_steps:
        steps.append(("verify", "decode", options.max_batch * (options.speculative_steps + 1)))
    return {
        step: plan_here(
            phase,
            workspace_layout(spec.qk_dim) if phase == "prefill" else cached,
            rows=rows,
            heads=spec.num_heads,
            topk=(spec.window or 0) + spec.index_topk,
            backend=backend,
        )
        for step, phase, rows in steps
    }


def _print_routes(engine: Engine) -> None:
    """The attention that the programs called."""
    modes = {ForwardMode.EXTEND: "prefill", ForwardMode.DECODE: "decode", ForwardMode.TARGET_VERIFY: "verify"}
    for mode, step in modes.items():
        kinds: dict[str, dict[str, None]] = {}  # of layers, in order, by what attends in them
        for (ran, ratio, _), calls in sorted(engine.routes.items(), key=lambda route: route[0][1:]):
            for phase, backend in calls if ran is mode else ():
                kinds.setdefault(f"{backend}, {phase}", {})[layer_kind(engine, ratio)] = None
        for call, names in kinds.items():
            print(f"ran        {step}: {call} ({'; '.join(names)})")


def _compare_backends(engine: Engine, requests: list[Request], names: list[str]) -> int:
    against = engine.options.backend or "the router's choice"
    print(f"backends   logits after the same tokens, against {against}: "
          f"differences ≤ {MAX_LOGIT_DIFFERENCE} of the largest logit")  # fmt: skip
    reports = compare_backends(engine.model, engine.options, requests, names)
    for report in reports:
        print(
            f"           {report.backend:10} {report.difference:.5f}   {report.agreeing} of {report.total} tokens"
            f"{'' if report.passes else '  FAILED'}"
        )
    ok = all(report.passes for report in reports)
    print(f"backends   {'agree' if ok else 'DISAGREE'}")
    return 0 if ok else 1


class _Progress:
    """Prints the progress of a run and its tokens per second, with and without compilation."""

    def __init__(self, requests: list[Request]):
        self._total = sum(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
        self._start = self._last = time.perf_counter()
        self._seen: set[tuple[ForwardMode, int]] = set()
        # By mode, tokens and seconds of the steps whose bucket had run before and was compiled.
        self._warm = {mode: [0, 0.0] for mode in ForwardMode}
        self._count = 0

    def __call__(self, step, requests: list[Request]) -> None:
        now = time.perf_counter()
        count = sum(r.computed for r in requests)
        tokens, seconds = count - self._count, now - self._last
        self._last, self._count = now, count
        bucket = (step.mode, step.batch.max_seq_len)
        if bucket in self._seen:
            self._warm[step.mode][0] += tokens
            self._warm[step.mode][1] += seconds
        self._seen.add(bucket)
        if step.mode is ForwardMode.EXTEND or self._count == self._total or sys.stderr.isatty():
            end = "\r" if sys.stderr.isatty() and self._count < self._total else "\n"
            print(
                f"{step.mode.value:10} {self._count}/{self._total} tokens, {seconds:.2f} s   ", end=end, file=sys.stderr
            )

    def print_summary(self) -> None:
        seconds = self._last - self._start
        print(f"speed      {self._count / seconds:.1f} tokens/s in all ({seconds:.1f} s with compilation)")
        for mode, (tokens, warm_seconds) in self._warm.items():
            if tokens:
                print(f"           {mode.value}: {tokens / warm_seconds:.1f} tokens/s once compiled")


def _check(engine: Engine, requests: list[Request], cache: str) -> int:
    print(
        "check      against transformers' eager attention on the same inputs and entries: "
        f"cosine ≥ {MIN_COSINE[cache]}, of a row ≥ {MIN_ROW_COSINE[cache]}; "
        f"overlap of the selected entries ≥ {MIN_OVERLAP}"
    )
    print("layer  kind                     cosine    worst row   overlap  (rows that drop entries)")
    ok = True
    for report in compare_layers(engine, requests):
        passed = report.passes(cache)
        ok &= passed
        overlap = "   -   " if report.overlap is None else f"{report.overlap:.5f}"
        print(
            f"{report.layer:5}  {report.kind:22}  {report.cosine:.6f}   {report.worst_row:.6f}   {overlap}  "
            f"({report.dropping_rows}){'' if passed else '  FAILED'}"
        )
    agree, total = count_agreeing_tokens(engine, requests)
    print(f"tokens     {agree} of {total} are transformers' own choice too")
    print("check      passed" if ok else "check      FAILED")
    return 0 if ok else 1


def _check_tokens(engine: Engine, requests: list[Request], plain: list[Request]) -> int:
    differences = compare_with_plain(engine, requests, plain)
    total = sum(len(r.output) for r in requests)
    print(f"tokens     {total - len(differences)} of {total} are plain decoding's, after the same tokens before them")
    for difference in differences:
        where = f"request {difference.request}, token {difference.index}"
        print(f"           {where} differs, under a top-2 margin of {difference.margin:.4f} of the best logit")
    ok = all(difference.margin <= MAX_MARGIN for difference in differences)
    print(f"check      {'passed' if ok else 'FAILED'}: a token may differ under a margin of {MAX_MARGIN}")
    return 0 if ok else 1

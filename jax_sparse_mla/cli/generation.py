"""What `generate` does once JAX is imported: it serves the requests, prints, and compares."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from jax_sparse_mla import activity
from jax_sparse_mla.cli import report
from jax_sparse_mla.cli.arguments import options_of
from jax_sparse_mla.cli.checks import Check
from jax_sparse_mla.cli.generate import refused
from jax_sparse_mla.cli.progress import Progress, Stream
from jax_sparse_mla.cli.setup import check_requests, new_setup
from jax_sparse_mla.serving import memory, presets
from jax_sparse_mla.serving.memory import NotEnoughMemory
from jax_sparse_mla.serving.options import MAX_DRAFTS, default_chunk_size
from jax_sparse_mla.serving.request import Request, Sampling
from jax_sparse_mla.serving.speculative import DraftOracle

MOST_PROMPT_BYTES = 100_000_000


class RequestsFailed(RuntimeError):
    """Requests have ended with an error: there is nothing to compare."""


def run(args: argparse.Namespace, check: Check | None) -> int:
    """As `generate.run`, beside a check that has begun; 1 where a request fails, too."""
    try:
        return _run(args, check)
    except RequestsFailed as error:
        print(f"failed     {error}")
        return 1


def _run(args: argparse.Namespace, check: Check | None) -> int:
    sampling = functools.partial(Sampling, args.temperature, args.top_p)
    try:
        if (args.speculative_steps or 0) > MAX_DRAFTS:
            raise ValueError(f"--speculative-steps must be at most {MAX_DRAFTS}, got {args.speculative_steps}")
        if args.draft_oracle and not args.speculative_steps:
            raise ValueError("--draft-oracle needs --speculative-steps")
        if args.mesh is not None and args.compare_backends:
            raise ValueError("--compare-backends compares logits of one device: leave out --mesh")
        sampling()  # refuses numbers out of their range
        text = _prompt_text(args)
        with activity.show("starting JAX and loading the model"):
            setup = new_setup(args, check)
        prompt = setup.tokenizer.encode(text)
        args.chunk_size = args.chunk_size or default_chunk_size(setup.model.config, args.requests * len(prompt))
        check_requests(args, setup, prompt)
        requests = [
            Request(beginning, args.max_new_tokens, sampling=sampling(args.seed + i), eos_token_ids=setup.eos_token_ids)
            for i, beginning in enumerate(_prompts(prompt, args.requests))
        ]
        shares = args.mesh[0] if args.mesh else 1
        options = options_of(
            args,
            max_batch=min(args.max_batch, -(-args.requests // shares)),
            max_len=len(prompt) + args.max_new_tokens,
            trace=not args.no_check and args.mesh is None,
        )
        # Not without need: a plan waits for the kernels that are being built.
        plans = report.plans(setup.spec, options, args.backend) if args.backend or args.verbose else {}
        for other in args.compare_backends:
            report.plans(setup.spec, options, other)
        engine = setup.new_engine(options)
    except NotEnoughMemory as error:
        names = ("max_new_tokens", "requests", "max_batch", "chunk_size")
        given = ", ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in names)
        return refused(args, ValueError(f"{error} (with {given})"))
    except (OSError, ValueError, ImportError) as error:
        return refused(args, error)
    report.print_header(setup, engine, requests, plans if args.verbose else {})
    if args.stream:
        requests[0].on_token = Stream(setup.tokenizer)

    status = 0
    if args.speculative_steps:
        plain = [_again(request) for request in requests]
        if args.draft_oracle or not args.no_check:
            print("decoding   plain")
            _serve(args, setup, engine, plain)
        if not args.no_check:
            status = _check(args, setup, engine, plain)
        oracle = DraftOracle(plain, args.draft_oracle, args.seed) if args.draft_oracle else None
        print(f"decoding   speculative, {args.speculative_steps} draft tokens by the {engine.drafter}" + (
            f", plain decoding's token with probability {args.draft_oracle}" if oracle else ""))  # fmt: skip
        report.print_accepted(_serve(args, setup, engine, requests, args.speculative_steps, oracle))
        if not args.no_check:
            status = max(status, report.check_tokens(functools.partial(setup.serve, engine), requests, plain))
    else:
        _serve(args, setup, engine, requests)
        status = 0 if args.no_check else _check(args, setup, engine, requests)
    if args.compare_backends:
        status = max(status, report.compare(engine, requests, args.compare_backends))
    return status


def _serve(
    args: argparse.Namespace, setup: Any, engine: Any, requests: list[Any], drafts: int = 0, oracle: Any = None
) -> Any:
    progress = Progress(args.status, requests, args.verbose)
    accepted = setup.serve(engine, requests, progress, drafts, oracle)
    progress.print_summary()
    report.print_texts(setup.tokenizer.decode, requests, args.model is not None and not args.stream, args.verbose)
    report.print_routes(setup, engine, args.verbose)
    if errors := [request.error for request in requests if request.error is not None]:
        raise RequestsFailed(f"{len(errors)} of {len(requests)} requests: {errors[0]}")
    return accepted


def _again(request: Any) -> Any:
    """A new request with the prompt and options of one that was served."""
    new, prompt, count = type(request), request.prompt, request.max_new_tokens
    return new(prompt, count, sampling=request.sampling, eos_token_ids=request.eos_token_ids)


def _check(args: argparse.Namespace, setup: Any, engine: Any, requests: list[Any]) -> int:
    if args.mesh is not None:
        print("decoding   on one device, for the check")
        one, again = setup.new_engine_of_one_device(engine), [_again(request) for request in requests]
        setup.serve(one, again)
        return report.check_tokens(functools.partial(setup.serve, one), requests, again, "one device")
    try:
        with activity.show("loading transformers' model"):
            setup.wait_for_check()
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print("check      not done: transformers' model could not be loaded")
        return refused(args, error)
    try:
        with activity.show("comparing every layer with transformers"):
            result = setup.check.compare(engine, requests)
    except ChildProcessError as error:
        print("check      not done: transformers did not run to its end")
        return refused(args, error)
    print(*(result.table if args.verbose or not result.passed else ()), *result.summary, sep="\n")
    print(f"check      {'passed' if result.passed else 'FAILED'}")
    return 0 if result.passed else 1


def _prompts(prompt: list[int], count: int) -> Iterator[list[int]]:
    """The whole prompt, then shorter and shorter beginnings of it."""
    return (prompt[: max(1, len(prompt) * (count - i) // count)] for i in range(count))


def _prompt_text(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        size = args.prompt_file.stat().st_size
        memory.check_host_memory(f"--prompt-file {args.prompt_file} of {size} bytes needs", 32 * size)
        with args.prompt_file.open("rb") as file:  # a device or a pipe has no size, and may have no end
            text = file.read(MOST_PROMPT_BYTES + 1)
        if len(text) > MOST_PROMPT_BYTES:
            raise ValueError(f"--prompt-file {args.prompt_file} has more than {MOST_PROMPT_BYTES} bytes")
        return text.decode("utf-8")
    return presets.default_prompt()

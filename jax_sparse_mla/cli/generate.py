"""`jax-sparse-mla generate`: a DeepSeek-V3.2, V4 or GLM-5 model generates text through this library."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_sparse_mla import activity
from jax_sparse_mla.attention.route import BACKENDS
from jax_sparse_mla.cli import processes, report
from jax_sparse_mla.cli.arguments import add_engine, natural, options_of, positive_int, probability
from jax_sparse_mla.cli.checks import begin_check
from jax_sparse_mla.cli.endings import REFUSED, one_line
from jax_sparse_mla.cli.progress import Progress, Status, Stream

MOST_PROMPT_BYTES = 100_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from jax_sparse_mla.serving.presets import PRESETS

    add, source = parser.add_argument, parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="a transformers checkpoint: DeepSeek-V3.2, V4, GLM-5 or 5.3")
    preset = "a small random model with the true head dimensions (default: v4)"
    source.add_argument("--preset", choices=PRESETS, help=preset)
    add("--seed", type=natural, default=0, help="of the preset's weights, the page order and the draws")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="the text to continue; a long English text by default")
    text.add_argument("--prompt-file", type=Path, metavar="FILE")
    add("--max-new-tokens", type=positive_int, default=16, metavar="N")
    temperature = "draw tokens at this temperature (default: 0, none)"
    add("--temperature", type=float, default=0.0, metavar="T", help=temperature)
    add("--top-p", type=float, default=1.0, metavar="P", help="of the most likely tokens that sum to P")
    add("--stream", action="store_true", help="print the first request's text as it is generated")
    add("--requests", type=positive_int, default=1, metavar="N", help="serve N requests of different lengths at once")
    add_engine(parser)
    backends = "serve the same tokens with each of these backends too, and compare the logits"
    add("--compare-backends", type=backend_names, default=[], metavar="NAME,…", help=backends)
    oracle = "with --speculative-steps: propose plain decoding's own token with this probability"
    add("--draft-oracle", type=probability, default=0.0, metavar="P", help=oracle)
    no_check = (
        "skip the comparison with transformers' eager attention (with --mesh: with one device's tokens), and of "
        "speculative with plain decoding"
    )
    add("--no-check", action="store_true", help=no_check)
    shown = "a line for each step, request, layer and kernel, the text of untrained models, and a fault's traceback"
    add("--verbose", action="store_true", help=shown)
    processes.add_arguments(parser)


def backend_names(text: str) -> list[str]:
    """An argparse type: names of attention backends between commas."""
    names = text.split(",")
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(BACKENDS)}, got {name!r}")
    return names


class RequestsFailed(RuntimeError):
    """Requests have ended with an error: there is nothing to compare."""


def run(args: argparse.Namespace) -> int:
    """Generates, prints, compares; with several processes it ends the process.

    Returns:
      0 if every comparison passes (or none was asked for), 1 if one fails, 2 if there is nothing to run: no prompt,
      no such file, no such device, no model that this library serves, a backend that cannot serve it here, an oracle
      without drafts, no check or a package missing that it needs, too little memory; if the check cannot load its
      model; and `endings.status_of` for whatever is raised.
    """
    try:
        together = processes.are_several(args)
    except ValueError as error:
        return _refused(args, error)
    args.status = Status()
    activity.show = args.status.working
    try:
        return processes.run_as_one(args, lambda: _status(args)) if together else _status(args)
    finally:
        activity.show = contextlib.nullcontext


def _status(args: argparse.Namespace) -> int:
    """As `run`; 1 where a request fails, too. However it ends, the check's process has ended then."""
    with contextlib.ExitStack() as ending:
        try:
            return _run(args, ending)
        except RequestsFailed as error:
            print(f"failed     {error}")
            return 1


def _run(args: argparse.Namespace, ending: contextlib.ExitStack) -> int:
    check = None
    if args.mesh is None and not args.no_check:
        try:
            check = begin_check()  # first of all: its imports take seconds
        except (ImportError, OSError) as error:
            return _refused(args, error)
        ending.callback(check.close)
    from jax_sparse_mla.cli.setup import check_requests, new_setup
    from jax_sparse_mla.serving.memory import NotEnoughMemory
    from jax_sparse_mla.serving.options import MAX_DRAFTS, default_chunk_size
    from jax_sparse_mla.serving.request import Request, Sampling
    from jax_sparse_mla.serving.speculative import DraftOracle

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
        keep_programs()
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
        return _refused(args, ValueError(f"{error} (with {given})"))
    except (OSError, ValueError, ImportError) as error:
        return _refused(args, error)
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


def _refused(args: argparse.Namespace, error: Exception) -> int:
    """Says why there is nothing to run; returns the exit status."""
    if isinstance(error, BrokenPipeError):
        raise error
    what = "this needs torch and transformers (the extra [hf]): " if isinstance(error, ImportError) else ""
    print(f"jax-sparse-mla generate: {one_line(f'{what}{error}')}", file=sys.stderr)
    if what and not args.no_check:
        print("--no-check goes without them", file=sys.stderr)
    return REFUSED


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
        return _refused(args, error)
    try:
        with activity.show("comparing every layer with transformers"):
            result = setup.check.compare(engine, requests)
    except ChildProcessError as error:
        print("check      not done: transformers did not run to its end")
        return _refused(args, error)
    print(*(result.table if args.verbose or not result.passed else ()), *result.summary, sep="\n")
    print(f"check      {'passed' if result.passed else 'FAILED'}")
    return 0 if result.passed else 1


def _prompts(prompt: list[int], count: int) -> Iterator[list[int]]:
    """The whole prompt, then shorter and shorter beginnings of it."""
    return (prompt[: max(1, len(prompt) * (count - i) // count)] for i in range(count))


def _prompt_text(args: argparse.Namespace) -> str:
    from jax_sparse_mla.serving import memory, presets

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


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache, so that a second run starts at once; a folder that the environment
    or the process names is left as it is."""
    import jax

    from jax_sparse_mla.launch.compile_cache import private_folder

    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = private_folder() / "programs"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        print(f"jax-sparse-mla: compiled programs are not kept: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

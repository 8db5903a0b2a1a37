"""`jax-sparse-mla serve`: a model behind an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

from jax_sparse_mla import activity
from jax_sparse_mla.cli.arguments import add_engine, natural, options_of, positive_int, probability
from jax_sparse_mla.cli.endings import REFUSED, one_line
from jax_sparse_mla.cli.start import announce_ahead
from jax_sparse_mla.cli.status import Status
from jax_sparse_mla.packages import is_found
from jax_sparse_mla.serving.presets import DEFAULT_PRESET, PRESETS

KEY = "JAX_SPARSE_MLA_API_KEY"  # the environment's
NEEDS = ("starlette", "uvicorn", "prometheus_client", "tokenizers", "jinja2")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, source = parser.add_argument, parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="DIR", help="a transformers checkpoint: DeepSeek-V3.2, V4, GLM-5 or 5.3")
    source.add_argument("--preset", choices=PRESETS, help="a small random model (default: v4); text goes as bytes")
    add("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    add("--port", type=natural, default=8000, help="0: any that is free (default: %(default)s)")
    add("--name", help="of the model for clients (default: the preset's, or the folder's)")
    add("--chat-template", type=Path, metavar="FILE", help="instead of the checkpoint's own")
    key = f"clients must send the key that this file holds; or that of the variable {KEY}"
    add("--api-key-file", type=Path, metavar="FILE", help=key)
    add("--warmup", action="store_true", help="compile all programs before the first request")
    add("--max-len", type=positive_int, default=4096, metavar="TOKENS", help="of a request, its output included")
    add("--max-queue", type=natural, default=64, metavar="N", help="requests that wait; more are answered with 429")
    add("--max-body", type=positive_int, default=4 << 20, metavar="BYTES", help="of a request")
    drain = "after SIGTERM, so long may requests that are served take to finish (default: %(default)s)"
    add("--drain-seconds", type=natural, default=30, metavar="S", help=drain)
    share = "of the memory that is free, for the KV caches, at most (default: %(default)s)"
    add("--memory-share", type=probability, default=0.9, metavar="PART", help=share)
    reuse = "prefixes whose states are kept for other requests; 0: none are reused (default: %(default)s)"
    add("--reuse-points", type=natural, metavar="N", help=reuse.replace("%(default)s", "16, GLM-5.3: 0"))
    add_engine(parser)
    add("--seed", type=natural, default=0, help="of the preset's weights and the page order")
    add("--verbose", action="store_true", help="more of the log, and a fault's traceback")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it; returns 0 then, and 2 where there is nothing to serve or the engine has failed."""
    missing = [name for name in NEEDS if not is_found(name)]
    if missing:
        names = ", ".join(missing)
        return _refused(f'this needs {names}: pip install "jax-sparse-mla[serve]"')
    status = Status()
    activity.show = status.working
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        return _run(args)
    except (OSError, ValueError, ImportError) as error:
        return _refused(str(error))
    finally:
        activity.show = contextlib.nullcontext


def _refused(why: str) -> int:
    print(f"jax-sparse-mla serve: {one_line(why)}", file=sys.stderr)
    return REFUSED


def _run(args: argparse.Namespace) -> int:
    from jax_sparse_mla.cli.listen import Server, bound

    key = _key(args.api_key_file)  # before what takes long
    template = None if args.chat_template is None else _read(args.chat_template)
    with bound(args.host, args.port) as socket:
        api = new_api(args, key, template)
        if key is None and args.host not in LOOPBACK:
            print(f"warning    {args.host} is reached from other machines, and no API key is asked for")
        host, port = socket.getsockname()[:2]
        print(f"serving    {api.served.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        Server(api, args.drain_seconds).run([socket])
    return 0 if api.runner.failure is None else _refused(f"the engine has failed: {api.runner.failure}")


def _key(file: Path | None) -> str | None:
    key = os.environ.get(KEY) if file is None else _read(file).strip()
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ValueError(f"the API key of {file or KEY} must be printable ASCII, and not empty")
    return key


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8: {error.reason} at byte {error.start}") from error


def new_api(args: argparse.Namespace, key: str | None = None, template: str | None = None) -> Any:
    """The application of the arguments, its engine ready.

    Raises:
      OSError, ValueError: as `setup.Setup`; a broken tokenizer or template; too little memory.
    """
    announce_ahead(args)
    with activity.show("importing JAX"):
        from jax_sparse_mla.cli.setup import new_setup
        from jax_sparse_mla.server.app import Api
        from jax_sparse_mla.server.protocol import Served
        from jax_sparse_mla.server.text import text_of
        from jax_sparse_mla.serving.adjust import Adjust
        from jax_sparse_mla.serving.model import generation_config
        from jax_sparse_mla.serving.options import default_chunk_size
        from jax_sparse_mla.serving.start import sized, warm_up
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # nobody shares the device
    args.no_check = True
    with activity.show("starting JAX and loading the model"):
        setup = new_setup(args, None)
    hook, model = Adjust(), setup.model
    text = text_of(args.model, model.vocab_size, template)  # before what takes long
    reuse = args.reuse_points if args.reuse_points is not None else 0 if model.is_recurrent else 16
    args.chunk_size = args.chunk_size or default_chunk_size(model.config, args.max_batch * args.max_len)
    options = options_of(args, max_batch=args.max_batch, max_len=args.max_len, reuse_points=reuse, logits_hook=hook)
    options = sized(model, setup.params, options, args.memory_share)
    engine = setup.new_engine(options)
    engine.ahead = engine.ahead and not args.warmup
    shares = 1 if args.mesh is None else args.mesh[0]
    pages, page = engine.scheduler.pool.most_pages, model.spec.page_size
    at_once = f"{shares * args.max_batch} requests of up to {args.max_len}"
    print(f"KV cache   {shares * pages} pages of {page} tokens; {at_once}")
    if args.warmup:
        with activity.show("compiling all programs"):
            print(f"programs   {warm_up(engine)}, all compiled")
    defaults = {} if args.model is None else generation_config(args.model)
    served = Served(
        name=args.name or (Path(args.model).resolve().name if args.model else args.preset or DEFAULT_PRESET),
        text=text,
        hook=hook,
        eos_token_ids=tuple(setup.eos_token_ids),
        room=min(args.max_len, pages * page - options.speculative_steps),
        vocab_size=model.vocab_size,
        **{name: float(defaults[name]) for name in ("temperature", "top_p") if defaults.get(name)},
    )
    limit = shares * args.max_batch + args.max_queue
    return Api(engine, served, limit=limit, most_body=args.max_body, key=key)

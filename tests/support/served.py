"""A server in this process, over a model that compiles in no time."""

import contextlib
import dataclasses
import http.client
import json
import threading
import time

import openai
from counting_model import VOCABULARY, Summing, expected

from jax_sparse_mla.cli.listen import Server, bound
from jax_sparse_mla.server.app import Api
from jax_sparse_mla.server.protocol import Served
from jax_sparse_mla.server.text import Bytes
from jax_sparse_mla.serving.adjust import Adjust
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.scheduler import EngineOptions

HOOK = Adjust(biases=4)
OPTIONS = EngineOptions(chunk_size=16, max_batch=8, max_len=2000, num_pages=600, reuse_points=2, logits_hook=HOOK)


def new_engine(model=None, **changes):
    return Engine(Summing() if model is None else model, (), dataclasses.replace(OPTIONS, **changes))


def text_of(tokens):
    return bytes(tokens).decode()


def right(prompt, count):
    """The text that `Summing` makes of a prompt."""
    return text_of(expected(prompt.encode(), count))


def prompt_of(number, length=20):
    """Characters that are tokens of `Summing`, other ones for each number."""
    return "".join(chr(32 + (number * 7 + i * (number % 5 + 1)) % 27) for i in range(length))


class Running:
    """A server in a thread; `api`, `engine`, `port`."""

    def __init__(self, engine, port=0, queue=64, drain=5.0, **options):
        self.engine = engine
        served = Served("summing", Bytes(), HOOK, (), OPTIONS.max_len, VOCABULARY, temperature=0.0)
        options = {"most_body": 100_000} | options
        self.api = Api(engine, served, limit=engine.options.max_batch + queue, **options)
        self._socket = bound("127.0.0.1", port)
        self.port = self._socket.getsockname()[1]
        self.server = Server(self.api, drain)
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],))

    def __enter__(self):
        self._thread.start()
        wait(lambda: self.server.started)
        return self

    def __exit__(self, *_):
        if not self.server.signals:
            self.server.drain()
        self._thread.join(20)
        self._socket.close()
        assert not self._thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, kind=openai.OpenAI, key="none"):
        return kind(base_url=self.url, api_key=key, max_retries=0, timeout=60)

    def ask(self, method, path, body=None, **headers):
        """The status and body of an answer, as bytes."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            body = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
            headers = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def metric(self, name):
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"jax_sparse_mla_{name}")]
        assert values, name
        return sum(values)

    def everything_is_free(self):
        """Whether no request is open, and no page in use or lost."""
        wait(lambda: self.api.runner.open == 0 and not self.engine.scheduler.running)
        pool = self.engine.scheduler.pool
        pages = len(pool.pages.free) + len(pool.pages.idle) == pool.num_pages - 1
        rows = pool.free_rows == self.engine.options.max_batch
        wait(lambda: not self.api._jobs and not self.api.answering)
        return pages and rows


def wait(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.005)

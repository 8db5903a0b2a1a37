"""The application: endpoints of OpenAI's protocol, health and metrics, over a runner."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jax_sparse_mla.server.metrics import Metrics
from jax_sparse_mla.server.protocol import Answer, ApiError, Asked, Piece, Served, parse, unknown_model
from jax_sparse_mla.server.runner import Refused, Runner, State
from jax_sparse_mla.server.text import Stops
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import ABORTED, CANCELLED, LENGTH, STOP, Request

BODY_SECONDS = 60.0  # in which a body must have come
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Job:
    """A request that is served over a connection. All but the engine's part is used in the event loop alone."""

    def __init__(self, asked: Asked, served: Served, arrived: float):
        self.asked, self.request, self.arrived = asked, asked.request, arrived
        self.tokens = 0  # of the answer
        self.seen = 0  # tokens of the request that are counted
        self.last = arrived  # when its latest token came
        self.finish: str | None = None
        self.given_up = False
        self._eos, self._read = served.eos_token_ids, 0
        self._decoder, self._stops = served.text.decoder(), Stops(asked.stops)
        self.woken = asyncio.Event()  # when there may be more

    async def pieces(self) -> AsyncIterator[Piece]:
        """The text as it comes; the last piece has the reason of the end. Raises ApiError for one with an error."""
        while self.finish is None:
            await self.woken.wait()
            self.woken.clear()
            piece = self._new()
            if piece.text or piece.logprobs or piece.finish:
                yield piece

    def _new(self) -> Piece:
        """What has come since the last call."""
        ended = self.request.ended or (ABORTED if self.given_up else None)  # before its tokens: none comes behind it
        output, piece = self.request.output, Piece("", [])
        while self._read < len(output) and self.finish is None:
            self._take(output[self._read], piece)
        if self.finish is None and ended is not None:
            self._end(ended, piece)
        piece.finish = self.finish
        return piece

    def _take(self, token: int, piece: Piece) -> None:
        self._read += 1
        self.tokens += 1
        if self.request.top_logprobs is not None:
            piece.logprobs.append((token, self.request.logprobs[self._read - 1]))
        if token in self._eos:
            return
        text, stopped = self._stops.feed(self._decoder.feed(token))
        piece.text += text
        if stopped:
            self.finish = STOP
            self.request.cancel()

    def _end(self, ended: str, piece: Piece) -> None:
        if ended not in (STOP, LENGTH):
            self.finish = ended
            status = 503 if ended in (ABORTED, CANCELLED) else 500
            why = self.request.error or "the server is shutting down"
            raise ApiError(status, f"the request has ended before its time: {why}", code=ended)
        text, stopped = self._stops.feed(self._decoder.end())
        piece.text += text if stopped else text + self._stops.end()
        self.finish = STOP if stopped else ended


class Api:
    """What all endpoints share.

    Args:
      engine, served: the engine, and what it serves.
      limit: requests at once, those that wait included; more are answered with 429.
      most_body: bytes of a body.
      key: that clients must send; None for none.
    """

    def __init__(self, engine: Engine, served: Served, *, limit: int, most_body: int, key: str | None = None):
        self.served, self._most_body = served, most_body
        self._key = None if key is None else key.encode()
        self.runner = Runner(engine, limit, self._notify)
        self.metrics = Metrics(self.runner)
        self.answering = 0  # answers that are not sent yet
        self._jobs: dict[Request, Job] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._created = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", functools.partial(self._answer, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", functools.partial(self._answer, chat=True), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers = dict.fromkeys((ApiError, HTTPException, Exception), self._refused)
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self.runner.start()
        yield
        await self.stop()

    async def stop(self) -> None:
        """Ends all requests, also where the engine's thread is in a step that does not end."""
        if not await asyncio.to_thread(self.runner.stop):
            for job in self._jobs.values():
                job.given_up = True
                job.woken.set()

    # From the engine's thread to the jobs.

    def _notify(self, states: Collection[State], now: float) -> None:
        if self._loop.is_closed():  # by a server that did not wait for the last step
            return
        self._loop.call_soon_threadsafe(self._tell, states, now)

    def _tell(self, states: Collection[State], now: float) -> None:
        for request, count, ended in states:
            if (job := self._jobs.get(request)) is None:
                continue
            if new := count - job.seen:
                self._count(job, new, now)
            if ended is not None:
                del self._jobs[request]
                self.metrics.whole.observe(now - job.arrived)
                how = STOP if job.finish == STOP else ended
                self.metrics.ended.labels("chat" if job.asked.chat else "completions", how).inc()
            if new or ended is not None:
                job.woken.set()

    def _count(self, job: Job, new: int, now: float) -> None:
        metrics = self.metrics
        metrics.new_tokens.inc(new)
        if not job.seen:
            metrics.first_token.observe(now - job.arrived)
        else:
            for _ in range(new):
                metrics.next_token.observe((now - job.last) / new)
        job.seen, job.last = job.seen + new, now

    # Endpoints.

    async def _answer(self, http: HttpRequest, chat: bool) -> Response:
        arrived = time.perf_counter()
        self._check_key(http)
        if (refused := self.runner.refuses()) is not None:  # before there is work for its body
            raise _busy(refused)
        raw = await self._body(http)
        asked = await asyncio.to_thread(parse, raw, chat, self.served)
        job = Job(asked, self.served, arrived)
        try:
            self.runner.engine.scheduler.check(job.request)
            self._jobs[job.request] = job
            self.runner.submit(job.request)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages" if chat else "prompt") from error
        except Refused as error:
            del self._jobs[job.request]
            raise _busy(error) from error
        self.metrics.prompt_tokens.inc(len(job.request.prompt))
        return _Sent(self, job, Answer(asked, self.served))

    async def _body(self, http: HttpRequest) -> bytes:
        if (kind := http.headers.get("content-type", "").partition(";")[0].strip().lower()) != "application/json":
            # Else a page of any site could ask a server on its reader's machine without asking first.
            raise ApiError(415, f"the content type must be application/json, got {kind or 'none'}")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in http.stream():
                    body += chunk
                    if len(body) > self._most_body:
                        raise ApiError(413, f"the body has more than {self._most_body} bytes", code="body_too_large")
        except TimeoutError:
            raise ApiError(408, f"the body did not come in {BODY_SECONDS:.0f} seconds") from None
        except ClientDisconnect:
            raise ApiError(400, "the client has gone") from None
        return bytes(body)

    def _check_key(self, http: HttpRequest) -> None:
        if self._key is None:
            return
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1", "replace"), self._key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _models(self, http: HttpRequest) -> Response:
        self._check_key(http)
        card = {"id": self.served.name, "object": "model", "created": self._created, "owned_by": "jax_sparse_mla"}
        card["max_model_len"] = self.served.room
        if (name := http.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [card]})
        if name != self.served.name:
            raise unknown_model(name)
        return JSONResponse(card)

    async def _health(self, _: HttpRequest) -> Response:
        why = self.runner.refusing
        status = "ok" if why is None else "unhealthy" if self.runner.failure is not None else "draining"
        return JSONResponse({"status": status, "reason": why}, 200 if why is None else 503)

    async def _metrics(self, _: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _refused(self, _: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):  # of another path or method
            error = ApiError(error.status_code, str(error.detail))
        elif not isinstance(error, ApiError):
            error = ApiError(500, f"a fault of the server: {type(error).__name__}")
        self.metrics.refused.labels(error.status).inc()
        return _of_error(error)


class _Sent(Response):
    """Sends what a job brings, as it comes or whole. Where the client goes, the engine drops its request."""

    def __init__(self, api: Api, job: Job, answer: Answer):
        self._api, self._job, self._answer = api, job, answer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._api.answering += 1
        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(lambda _: self._job.request.cancel())  # a request that has ended takes no notice
        try:
            if self._job.asked.stream:
                await self._stream(send)
            else:
                await (await self._whole())(scope, receive, send)
        finally:
            self._api.answering -= 1
            gone.cancel()
            self._job.request.cancel()

    async def _whole(self) -> Response:
        try:
            pieces = [piece async for piece in self._job.pieces()]
        except ApiError as error:
            return _of_error(error)
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        whole = Piece("".join(piece.text for piece in pieces), logprobs, pieces[-1].finish)
        return JSONResponse(self._answer.whole(whole, self._job.tokens))

    async def _stream(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in EVENTS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(body: dict[str, Any] | str, more: bool = True) -> None:
            text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False, separators=(",", ":"))
            data = f"data: {text}\n\n".encode(errors="replace")
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            if self._job.asked.chat:
                await event(self._answer.first())
            async for piece in self._job.pieces():
                await event(self._answer.chunk(piece))
            if self._job.asked.usage:
                await event(self._answer.usage(self._job.tokens))
            await event("[DONE]", more=False)
        except ApiError as error:
            await event(error.body(), more=False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _busy(refused: Refused) -> ApiError:
    status, code = (429, "queue_full") if refused.full else (503, "unavailable")
    return ApiError(status, str(refused), code=code, retry=1 if refused.full else 10)


def _of_error(error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after else {}
    body = json.dumps(error.body())  # in ASCII: a body's names may be no UTF-8
    return Response(body, error.status, headers, media_type="application/json")

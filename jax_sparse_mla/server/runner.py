"""The thread that steps an engine. Requests come to it from any thread; what happens to them goes to one callback."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Collection

from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import ABORTED, FAILED, CallbackError, Request

log = logging.getLogger(__name__)
STOP_SECONDS = 5.0  # that `stop` waits for a step to end; one that compiles takes longer

# A request, how many tokens it has and how it has ended, if it has; and the time of all of them.
State = tuple[Request, int, str | None]
Notify = Callable[[Collection[State], float], None]


class Refused(Exception):
    """No request is taken now: `full` where that may pass soon, else the runner ends or has failed."""

    def __init__(self, message: str, full: bool = False):
        super().__init__(message)
        self.full = full


class Runner:
    """Steps an engine in a thread of its own, as long as there are requests.

    A step that fails ends the thread: all requests have ended with an error then, and new ones are refused.

    Args:
      engine: nobody else may use it meanwhile.
      limit: requests at once, those that wait included.
      notify: called in the thread, once a step, with the requests that may have new tokens or have ended, and the time
        (`time.perf_counter`) at which they did. It must not block.

    Attributes:
      failure: what ended the thread before its time.
      refusing: why no request is taken.
    """

    def __init__(self, engine: Engine, limit: int, notify: Notify):
        self.engine, self.limit, self.failure, self.refusing = engine, limit, None, None
        self._notify, self._lock, self._wake = notify, threading.Lock(), threading.Event()
        self._open: set[Request] = set()  # taken, and not ended
        self._coming: collections.deque[Request] = collections.deque()
        self._ended: list[Request] = []
        self._aborting = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def open(self) -> int:  # requests that were taken and have not ended
        return len(self._open)

    def refuses(self) -> Refused | None:
        """Why a request that came now would be refused."""
        if self.refusing is not None:
            return Refused(self.refusing)
        if len(self._open) >= self.limit:
            return Refused(f"{len(self._open)} requests are served or wait: try again later", full=True)
        return None

    def submit(self, request: Request) -> None:
        """Takes a request that `Scheduler.check` passes; its `on_end` is the runner's. Any thread may call it.

        Raises:
          Refused: too many are open, or none is taken any more.
        """
        request.on_end = self._end
        with self._lock:
            if (refused := self.refuses()) is not None:
                raise refused
            self._open.add(request)
            self._coming.append(request)
        self._wake.set()

    def refuse(self, why: str) -> None:
        """Takes no request from now on; those that are open go on."""
        with self._lock:
            self.refusing = self.refusing or why

    def stop(self) -> bool:
        """Ends all requests and the thread; returns whether it has ended within `STOP_SECONDS`."""
        self.refuse("the server is shutting down")
        self._aborting = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._aborting:
                while self._coming:
                    self.engine.submit(self._coming.popleft())
                if self.engine.idle:
                    self._tell(())
                    self._wake.wait()
                    self._wake.clear()
                    continue
                try:
                    plan = self.engine.step()
                except CallbackError as error:
                    log.exception("a callback failed: %s", error)
                    plan = None
                self._tell(plan.requests if plan is not None else ())
            self.engine.abort()
        except BaseException as error:
            self.failure = error
            log.critical("the engine has failed, and serves no more", exc_info=error)
        why = "the server is shutting down" if self.failure is None else f"the engine has failed: {self.failure}"
        self.refuse(why)  # before those that are open end: no other comes
        for request in list(self._open):
            request.error = request.error or why
            request.end(ABORTED if self.failure is None else FAILED)
        self._tell(())

    def _end(self, request: Request) -> None:
        with self._lock:
            self._open.discard(request)
        self._ended.append(request)

    def _tell(self, requests: Collection[Request]) -> None:
        ended, self._ended = self._ended, []
        if requests or ended:
            try:
                self._notify([(r, len(r.output), r.ended) for r in (*requests, *ended)], time.perf_counter())
            except Exception:  # nobody listens any more; no fault of the engine
                log.exception("nobody was told of a step")

"""A change of transformers' functions that several may ask for at once, in any threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SharedPatch:
    """A context: the first that enters makes the change, and the last that leaves takes it back.

    Args:
      apply: makes the change, and returns a function that takes it back.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]]):
        self._apply, self._lock, self._count = apply, threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._take_back = self._apply()
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._take_back()

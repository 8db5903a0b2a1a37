"""The process in which transformers runs, beside the engine: neither waits for the other's imports or its threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from multiprocessing import Pipe
from typing import Any


class Process:
    """It is begun at once; its methods are those of `sparse_mla_torch.eager.model.Eager`, one at a time.

    They raise OSError, ValueError and ImportError as there, RuntimeError for any other exception of it, and
    ChildProcessError where the process has ended.
    """

    def __init__(self):
        self._connection, theirs = Pipe()
        # -P: as an installed command, it imports nothing from the folder that it is called in.
        command = [sys.executable, "-P", "-m", "sparse_mla_torch.eager", str(theirs.fileno())]
        descriptors = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
        self._process, self._one = subprocess.Popen(command, **descriptors), threading.Lock()
        theirs.close()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, *call: Any) -> Any:
        try:
            with self._one:
                self._connection.send(call)
                result, error = self._connection.recv()
        except (EOFError, ConnectionError):
            raise ChildProcessError(
                f"the process that runs transformers has ended, status {self._process.wait()}"
            ) from None
        if error is None:
            return result
        kind, text, where = error
        error = kind(text)
        error.add_note(where)
        raise error

    def close(self) -> None:
        """Ends the process, whatever it does. A call that waits for it raises."""
        self._process.kill()
        self._process.wait()

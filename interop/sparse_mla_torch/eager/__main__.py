"""The process: it answers calls of `model.Eager` over a connection, and ends with whoever began it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from sparse_mla_torch.eager.imports import import_eager


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the command gets it too, and ends this process
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_the_other_side, args=(connection.fileno(),), daemon=True).start()
    eager, broken = None, None
    try:
        eager = import_eager()()  # torch and transformers: seconds, before the first call comes
    except Exception as error:
        broken = error
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if broken is not None:
                raise broken
            answer = getattr(eager, name)(*arguments), None
        except BaseException as error:  # among them panics of Rust
            kind = next((kind for kind in (OSError, ValueError, ImportError) if isinstance(error, kind)), RuntimeError)
            text = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
            answer = None, (kind, text, "".join(traceback.format_exception(error)))
        connection.send(answer)


def _end_with_the_other_side(descriptor: int) -> None:
    """Ends the process, whatever it does, when the other side closes the connection or dies."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()

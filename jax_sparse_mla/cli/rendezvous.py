"""How processes find each other before JAX's own service starts, which aborts the process where one does not come.

Process 0 listens at the coordinator's address. The others connect and say their number, and how many they expect. To
all that have come it sends, whenever another comes or goes, a line with the numbers that are missing: an empty one ends
the meeting. A line that begins with "!" says why there is none.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator

_HELLO = "jax-sparse-mla process {} of {}\n"
_LONGEST = 4096  # characters of a line


class NoMeeting(Exception):
    """Processes do not meet; the message says which, or why."""


def address(text: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator must be HOST:PORT, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def meet(coordinator: str, count: int, number: int, timeout: float) -> None:
    """Returns when all processes are there; nothing listens at the address any more then.

    Args:
      coordinator: HOST:PORT.
      count, number: how many processes, and which of them this is.
      timeout: seconds that each waits, from its own call on. One that has reached process 0 waits until the time of
        process 0 is over.

    Raises:
      NoMeeting: one has not come in time, by its number; process 0 does not answer or cannot listen; two processes have
        one number, or expect another count.
    """
    host, port = address(coordinator)
    deadline = time.monotonic() + timeout
    if number:
        _join(host, port, count, number, deadline, timeout)
    elif count > 1:
        _Host(count).serve(port, deadline, timeout)


def _names(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"process {shown}" if len(numbers) == 1 else f"processes {shown}"


def _late(missing: str, timeout: float) -> NoMeeting:
    return NoMeeting(f"{missing} did not come within {timeout:g} s")


class _Host:
    """Process 0."""

    def __init__(self, count: int):
        self._count = count
        self._unnamed: dict[socket.socket, bytes] = {}  # what those have said who have not ended their line
        self._guests: dict[int, socket.socket] = {}

    @property
    def _missing(self) -> list[int]:
        return [i for i in range(1, self._count) if i not in self._guests]

    def serve(self, port: int, deadline: float, timeout: float) -> None:
        try:
            self._wait(port, deadline)
            if self._missing:
                raise _late(_names(self._missing), timeout)
        except NoMeeting as error:
            self._tell(f"!{error}")
            raise
        finally:
            for guest in self._guests.values():  # each closes first, so that the port is free at once
                with contextlib.suppress(OSError):
                    guest.settimeout(1)
                    guest.recv(1)
            for connection in (*self._guests.values(), *self._unnamed):
                connection.close()

    def _wait(self, port: int, deadline: float) -> None:
        """Until all are there, or the deadline."""
        both = socket.has_dualstack_ipv6()
        try:
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            raise NoMeeting(f"process 0 cannot listen at port {port}: {error.strerror or error}") from error
        with listening, selectors.DefaultSelector() as selector:
            listening.setblocking(False)
            selector.register(listening, selectors.EVENT_READ)
            while self._missing and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is not listening:
                        self._hear(key.fileobj, selector)
                        continue
                    with contextlib.suppress(OSError):
                        connection, _ = listening.accept()
                        connection.setblocking(False)
                        self._unnamed[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
        if not self._missing:
            self._tell("")

    def _hear(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            data = connection.recv(_LONGEST)
        except OSError:
            data = b""
        said = self._unnamed.pop(connection, b"") + data
        number = next((i for i, guest in self._guests.items() if guest is connection), None)
        if not data or number is not None or len(said) > _LONGEST:  # it has ended, or is none of ours
            selector.unregister(connection)
            connection.close()
            if number is not None:
                del self._guests[number]
                self._tell(_names(self._missing))
        elif not said.endswith(b"\n"):
            self._unnamed[connection] = said
        else:
            self._welcome(connection, said.decode(errors="replace"), selector)

    def _welcome(self, connection: socket.socket, said: str, selector: selectors.BaseSelector) -> None:
        words = said.split()
        numbers = [int(word) for word in words if word.isascii() and word.isdigit()]
        if len(numbers) != 2 or said != _HELLO.format(*numbers):
            selector.unregister(connection)
            connection.close()
            return
        number, count = numbers
        taken = number == 0 or number in self._guests
        self._guests[-1 if taken or count != self._count else number] = connection  # it hears the answer in any case
        if count != self._count:
            raise NoMeeting(f"process {number} has --num-processes {count}, process 0 has {self._count}")
        if taken:
            raise NoMeeting(f"two processes have --process-id {number}")
        if self._missing:
            self._tell(_names(self._missing))

    def _tell(self, line: str) -> None:
        for guest in self._guests.values():
            with contextlib.suppress(OSError):
                guest.sendall(f"{line}\n".encode())


def _join(host: str, port: int, count: int, number: int, deadline: float, timeout: float) -> None:
    missing, why = None, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(_HELLO.format(number, count).encode())
                # Process 0 has the last word: its time may have begun later.
                for line in _lines(connection, time.monotonic() + timeout + 5):
                    if line.startswith("!"):
                        raise NoMeeting(line[1:])
                    if not line:
                        return
                    missing = line
            missing, why = None, "it ended before all were there"
        except OSError as error:  # among them that it does not listen yet, and the time-out
            why = error.strerror or str(error)
        time.sleep(min(0.1, max(0, deadline - time.monotonic())))
    raise _late(missing, timeout) if missing else NoMeeting(f"process 0 does not answer within {timeout:g} s: {why}")


def _lines(connection: socket.socket, deadline: float) -> Iterator[str]:
    """The lines that come until the connection ends; raises OSError at the deadline."""
    rest = b""
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        if not (data := connection.recv(_LONGEST)):
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)

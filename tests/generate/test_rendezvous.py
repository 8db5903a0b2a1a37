"""Processes that meet, and those that do not: one line says which is missing."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from jax_sparse_mla.cli.rendezvous import NoMeeting, address, meet


@pytest.fixture
def place():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def meetings(place, *processes, timeout=1.0):
    """What each of these (number, count) is told, in threads that begin one after the other; "" is a meeting."""
    told = {}

    def run(i, number, count):
        try:
            meet(place, count, number, timeout)
            told[i] = ""
        except NoMeeting as error:
            told[i] = str(error)

    threads = [threading.Thread(target=run, args=(i, *process)) for i, process in enumerate(processes)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return [told[i] for i in range(len(processes))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_processes_meet_and_leave_the_port(place, order):
    assert meetings(place, *((number, 3) for number in order), timeout=20) == ["", "", ""]
    with socket.create_server(address(place)):  # as JAX's service does next
        pass
    assert meetings(place, (0, 1)) == [""]


@pytest.mark.parametrize(
    "processes, told",
    [
        ([(0, 2)], "process 1 did not come within 1 s"),
        ([(0, 13)], "processes 1, 2, 3, 4, 5, 6, 7, 8 and 4 more did not come within 1 s"),
        ([(0, 4), (2, 4)], "processes 1, 3 did not come within 1 s"),
        ([(2, 4), (0, 4)], "processes 1, 3 did not come within 1 s"),
        ([(1, 2)], "process 0 does not answer within 1 s: "),
        ([(0, 3), (1, 3), (1, 3)], "two processes have --process-id 1"),
        ([(0, 3), (1, 2)], "process 1 has --num-processes 2, process 0 has 3"),
    ],
)
def test_all_are_told_why_they_do_not_meet(place, processes, told):
    """Those that came too; faults are told at once."""
    start = time.monotonic()
    answers = meetings(place, *processes, timeout=1 if "within" in told else 60)
    assert all(answer.startswith(told) for answer in answers), answers
    assert time.monotonic() - start < 30


def test_strangers_and_those_who_come_again(place):
    """A connection that says nothing or something else does not count, and a number is free when its process ends."""
    ended, listening = [], threading.Event()

    def strangers():
        while not listening.is_set():
            with contextlib.suppress(OSError):
                silent = socket.create_connection(address(place))
                listening.set()
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"x" * 9000, b"jax-sparse-mla process 1 of 3\n"):
            with socket.create_connection(address(place)) as other, contextlib.suppress(OSError):
                other.sendall(said)
                ended.append(other.recv(99))
        time.sleep(0.2)
        ended.append(meetings(place, (1, 3), (2, 3), timeout=20))
        silent.close()

    thread = threading.Thread(target=strangers)
    thread.start()
    assert meetings(place, (0, 3), timeout=20) == [""]
    thread.join()
    assert ended[0] == b"" and ended[-2] == b"process 2\n" and ended[-1] == ["", ""]


def test_a_port_that_is_taken(place):
    with socket.create_server(address(place)):
        (told,) = meetings(place, (0, 2))
    assert told.startswith("process 0 cannot listen at port ") and "in use" in told


def test_an_address():
    assert address("[::1]:99") == ("::1", 99) and address("a.b:1") == ("a.b", 1)
    for wrong in ("a", "a:", ":1", "a:b", "a:0", "a:65536", "a:-1", "a:1²"):
        with pytest.raises(ValueError, match="--coordinator must be HOST:PORT"):
            address(wrong)


def test_the_command_alone(place):
    """Not an abort of the C++ runtime with a stack trace."""
    code = "import sys; from jax_sparse_mla.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "generate", "--mesh", "1x2", "--num-processes", "2"]
    command += ["--process-timeout", "1", "--coordinator"]
    port = int(place.partition(":")[2])
    started = [
        subprocess.Popen([*command, f"127.0.0.1:{port - i}", "--process-id", str(i)], stderr=subprocess.PIPE, text=True)
        for i in (0, 1)  # at different ports
    ]
    for process, told in zip(started, ("process 1 did not come within 1 s", "process 0 does not answer within 1 s")):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        *_, waits, line = err.splitlines()
        assert "waits 1 s for 2 processes to meet" in waits
        assert line.startswith("jax-sparse-mla generate: the processes do not meet at 127.0.0.1:") and told in line

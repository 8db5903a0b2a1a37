"""`jax-sparse-mla generate` over meshes of virtual CPU devices, in processes of their own."""

import functools
import re
import socket

import pytest
import virtual_devices
from virtual_devices import results

start = functools.partial(virtual_devices.start, "cli_over_mesh")


@pytest.fixture(scope="module")
def of_four_devices(request):
    chosen = virtual_devices.chosen_cases(request, "test_the_command_over_a_mesh", "case")
    return results(start(*chosen, devices=4))


@pytest.mark.always("refusals")
@pytest.mark.parametrize("case", ["refusals", "with_the_check", "context_parallel", "from_a_folder", "speculative"])
def test_the_command_over_a_mesh(of_four_devices, case):
    assert of_four_devices[case] == "", of_four_devices[case]


GENERATE = ["generate", "--prompt", "hello to all of the world", "--max-new-tokens", "4", "--chunk-size", "32"]
GENERATE += ["--verbose"]


def processes(breaks, timeout):
    """Two processes with two devices each: their exit statuses and what they print to stdout and stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = [*GENERATE, "--requests", 4, "--mesh", "2x2", "--coordinator", f"127.0.0.1:{port}"]
    shared += ["--num-processes", 2, "--process-timeout", timeout]
    started = [start("--run", how, *shared, "--process-id", i, devices=2) for i, how in enumerate(breaks)]
    try:
        for i, process in enumerate(started):
            if breaks[i] != "stop":
                yield process, *process.communicate(timeout=300)
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.long
def test_two_processes():
    """Process 0 prints, and both compare their tokens with one device's."""
    (first, out, err), (second, other_out, _) = processes(["none", "none"], 60)
    assert first.returncode == second.returncode == 0, err
    assert "in 2 processes" in out and "are one device's" in out and "check      passed" in out
    assert len(re.findall(r"tokens \[", out)) == 4 and "tokens" not in other_out


@pytest.mark.long
def test_a_process_that_fails_ends_the_other():
    (first, *_), (second, _, err) = processes(["none", "raise"], 20)
    assert first.returncode not in (0, None) and second.returncode == 1
    assert "KeyError: 'a failure of one process'" in err and "process 1 failed; the others will end too" in err


@pytest.mark.soak
def test_a_process_that_hangs_is_noticed():
    """It sends no heartbeats, and jaxlib ends the other within the time-out; after that it would wait for ever."""
    ((first, _, err),) = processes(["none", "stop"], 20)
    assert first.returncode not in (0, None) and "another task died" in err

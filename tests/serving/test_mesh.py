"""The engine over meshes of devices against the engine on one: in processes of their own, with virtual CPU devices."""

import functools
import socket

import pytest
import virtual_devices
from virtual_devices import results

start = functools.partial(virtual_devices.start, "serving_over_mesh")


@pytest.fixture(scope="module")
def of_four_devices(request):
    chosen = virtual_devices.chosen_cases(request, "test_every_layout_gives_the_tokens_of_one_device", "case")
    return results(start(*chosen, devices=4))


CASES = ["refusals", "windows", "v4", "context_parallel", "context_parallel_v4", "made_cut", "scales", "loaded"]


@pytest.mark.always("refusals", "windows", "loaded")
@pytest.mark.parametrize("case", [*CASES, "replayed"])
def test_every_layout_gives_the_tokens_of_one_device(of_four_devices, case):
    """Requests and heads over two devices each."""
    assert of_four_devices[case] == "", of_four_devices[case]


@pytest.mark.long  # `windows` cuts requests too, over two devices
def test_requests_over_four_devices():
    """To the bit what one device makes, since each is an engine by itself."""
    (failure,) = results(start("v4_requests", devices=4)).values()
    assert failure == "", failure


@pytest.mark.soak
@pytest.mark.parametrize("case", ["v4_heads", "v32", "glm53", "drafts_and_prefixes", "draft_layers", "replayed_drafts"])
def test_other_models_and_steps_over_a_mesh(case):
    (failure,) = results(start(case, devices=4)).values()
    assert failure == "", failure


@pytest.mark.long
def test_two_processes():
    """Context parallel decode and an engine over two processes: both know all tokens, and one checks them. Both know
    all selected positions too, by which they replay."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start("--process", index, port, devices=2) for index in range(2)]
    try:
        first, second = [results(process, timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert first == second and [len(part) for part in first] == [4, 4]

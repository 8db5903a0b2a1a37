"""Layers whose pages several devices share, in a process with four virtual CPU devices."""

import pytest
import virtual_devices


@pytest.fixture(scope="module")
def of_four_devices(request):
    chosen = virtual_devices.chosen_cases(request, "test_shared_pages_give_what_one_device_gives", "case")
    return virtual_devices.results(virtual_devices.start("shared_pages", *chosen, devices=4))


@pytest.mark.always("v32", "c4")
@pytest.mark.parametrize("case", ["v32", "v32_paged", "v32_wide", "c4", "c4_paged", "c128", "window"])
def test_shared_pages_give_what_one_device_gives(of_four_devices, case):
    assert of_four_devices[case] == "", of_four_devices[case]

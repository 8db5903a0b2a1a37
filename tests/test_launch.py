"""`Launch` without a GPU: what a compiled kernel's launcher is handed, and when Triton's own launch is taken."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from sparse_mla_torch.kernels import launch as launching  # noqa: E402

pytestmark = pytest.mark.torch


class Kernel:
    """Two tensors, two scalars, two results, one constant; compiles to what records its launches."""

    arg_names = ("x", "y", "n", "scale", "out", "absent", "BLOCK")

    def __init__(self):
        self.own, self.direct = [], []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.own.append((grid, args, constants))
            return types.SimpleNamespace(
                run=lambda *args: self.direct.append(args), function="function", packed_metadata="packed"
            )

        return launch


@pytest.fixture
def kernel(monkeypatch):
    active = types.SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: f"stream {device}")
    monkeypatch.setattr(launching.triton.runtime, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(launching.triton, "__version__", "3.6.0")
    return Kernel()


def tensors(count: int, offset: int = 0):
    """Aligned to 64 bytes, and then moved by so many elements."""
    return [torch.zeros(64, dtype=torch.int32)[offset:] for _ in range(count)]


def test_the_second_launch_is_direct(kernel):
    launch = launching.Launch(kernel, (5, 2), (7, 0.5), {"BLOCK": 64, "num_warps": 4})
    x, y, out = tensors(3)
    launch((x, y), (out, None))
    assert kernel.own == [((5, 2), (x, y, 7, 0.5, out, None), {"BLOCK": 64, "num_warps": 4})] and not kernel.direct
    other, *_ = tensors(1)
    launch((other, y), (out, None))
    addresses = (other.data_ptr(), y.data_ptr(), 7, 0.5, out.data_ptr(), None)
    assert kernel.direct == [(5, 2, 1, "stream 3", "function", "packed", None, None, None, *addresses, 64)]
    assert len(kernel.own) == 1


def test_unaligned_tensors_are_tritons(kernel):
    launch = launching.Launch(kernel, (1,), (7, 0.5), {"BLOCK": 64})
    aligned, moved = tensors(3), tensors(3, offset=1)
    for x, y, out in (moved, aligned, moved, aligned):
        launch((x, y), (out, None))
    assert len(kernel.own) == 3 and len(kernel.direct) == 1


def test_other_versions_are_launched_by_triton(kernel, monkeypatch):
    monkeypatch.setattr(launching.triton, "__version__", "9.0.0")
    launch = launching.Launch(kernel, (1,), (7, 0.5), {"BLOCK": 64})
    for x, y, out in (tensors(3), tensors(3)):
        launch((x, y), (out, None))
    assert len(kernel.own) == 2 and not kernel.direct

"""Which top-k kernel serves a call: the decisions, from plain data."""

import pytest

from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indices.topk.route import TOPK_BACKENDS, Call, plan_topk

H200 = {"rows": 64, "columns": 32768, "topk": 2048, "device": DeviceInfo("cuda", (9, 0), 132, 232_448)}


def plan(installed=frozenset(TOPK_BACKENDS), override=None, **changes):
    unable = dict.fromkeys(TOPK_BACKENDS.keys() - {"xla", *installed}, "not installed")
    return plan_topk(Call(**H200 | changes), unable=unable, override=override)


def test_every_backend_has_its_line():
    chosen = plan()
    assert chosen.backend == "cuda"
    assert set(chosen.rejected) == set(TOPK_BACKENDS) - {"cuda"}
    assert chosen.rejected["flashinfer"] == "able, but cuda is preferred"


@pytest.mark.parametrize(
    "changes, backend, rejected",
    [
        ({"topk": 2049}, "cuda", {"flashinfer": "2048 here, got 2049"}),
        ({"installed": {"triton", "flashinfer"}}, "triton", {"cuda": "not installed"}),
        ({"installed": {"flashinfer"}}, "flashinfer", {"cuda": "not installed", "triton": "not installed"}),
        ({"installed": {"flashinfer"}, "columns": 2000}, "xla", {"flashinfer": "2000 here, got 2048"}),
        ({"installed": {"flashinfer"}, "device": DeviceInfo("cuda", (8, 9))}, "xla", {"flashinfer": "128 KiB"}),
        ({"installed": {"flashinfer"}, "device": DeviceInfo("cuda", (12, 0))}, "flashinfer", {}),
        ({"installed": set()}, "xla", {"triton": "not installed"}),
        ({"device": DeviceInfo("cpu")}, "xla", {"triton": "needs a CUDA device"}),
        ({"device": DeviceInfo("cuda", (7, 5))}, "xla", {"cuda": "serves SM80 and up, got compute capability 7.5"}),
        ({"columns": 0}, "xla", {"triton": "nothing to read"}),
        ({"override": "xla"}, "xla", {"cuda": "not asked for"}),
        ({"override": "flashinfer"}, "flashinfer", {"cuda": "not asked for"}),
    ],
)
def test_decisions(changes, backend, rejected):
    chosen = plan(**changes)
    assert chosen.backend == backend
    for name, words in rejected.items():
        assert words in chosen.rejected[name]


def test_an_override_that_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="'flashinfer' cannot serve this call: takes topk up to 2048 here, got 4096"):
        plan(topk=4096, override="flashinfer")
    with pytest.raises(ValueError, match="one of cuda, triton, flashinfer, xla, got 'cub'"):
        plan(override="cub")

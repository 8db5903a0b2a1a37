"""Which kernel serves index logits: the decisions, from plain data."""

import pytest
from without_backend import without

from jax_sparse_mla.backend import first_able
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.indexer.route import LOGITS_BACKENDS, Call
from jax_sparse_mla.launch import build

SIZES = {"device": DeviceInfo("cuda", (9, 0), 132, 232_448), "rows": 256, "heads": 64, "page_size": 64, "run": 64}
FP8 = SIZES | {"queries": "float8_e4m3fn", "keys": "FP8"}
FP4 = SIZES | {"queries": "bfloat16", "keys": "FP4", "rows": 8, "heads": 32}
SM80 = DeviceInfo("cuda", (8, 0), 108, 166_912)


@pytest.mark.parametrize(
    "call, backend, why",
    [
        (FP8, "hopper", None),
        (FP8 | {"rows": 8192, "page_size": 256, "run": 256}, "hopper", None),
        (FP8 | {"device": SM80}, "hopper", "serves SM90, got compute capability 8.0"),
        (FP8 | {"device": DeviceInfo("cpu")}, "hopper", "needs a CUDA device (SM90), got cpu"),
        (FP8 | {"rows": 255}, "hopper", "takes 256 rows or more, got 255"),
        (FP8 | {"heads": 32}, "hopper", "takes 64 to 64 heads, got 32"),
        (FP8 | {"page_size": 96, "run": 96}, "hopper", "takes pages of a multiple of 64 keys, got 96"),
        (FP4 | {"rows": 1, "heads": 1}, "hopper_fp4", None),
        (FP4 | {"rows": 255, "heads": 64, "page_size": 192, "run": 192}, "hopper_fp4", None),
        (FP4 | {"device": DeviceInfo("cuda", (8, 9))}, "hopper_fp4", "serves SM90, got compute capability 8.9"),
        (FP4 | {"rows": 256}, "hopper_fp4", "takes 0 to 255 rows, got 256"),
        (FP4 | {"heads": 65}, "hopper_fp4", "takes 0 to 64 heads, got 65"),
        (FP4 | {"page_size": 32, "run": 32}, "hopper_fp4", "takes pages of a multiple of 64 keys, got 32"),
        (FP4 | {"run": 8}, "hopper_fp4", "reads tables of pages, got runs of 8 keys"),
        (FP4 | {"queries": "float8_e4m3fn"}, "hopper_fp4", "does not read float8_e4m3fn queries over FP4 keys"),
        (FP8 | {"queries": "bfloat16"}, "triton", "does not read bfloat16 queries over FP8 keys"),
    ],
)
def test_decisions(monkeypatch, call, backend, why):
    call = Call(**call)
    assert LOGITS_BACKENDS[backend].cannot(call) == ([] if why is None else [why])
    for binary, serves in ((object(), backend if why is None else "triton"), (None, "triton")):
        monkeypatch.setattr(build, "module", lambda kernel, arch, binary=binary: binary)
        assert first_able(LOGITS_BACKENDS, call, "index_logits").name == serves


def test_what_a_test_does_without_is_as_before_afterwards(monkeypatch):
    """Tests run in any order in one of xdist's workers, which takes them from others."""
    monkeypatch.setattr(build, "module", lambda *_: object())
    before, served = list(LOGITS_BACKENDS.items()), []
    for name in ("hopper", "hopper_fp4"):
        with without(LOGITS_BACKENDS, name):
            served.append([first_able(LOGITS_BACKENDS, Call(**x), "index_logits").name for x in (FP8, FP4)])
        assert list(LOGITS_BACKENDS.items()) == before
        served.append([first_able(LOGITS_BACKENDS, Call(**x), "index_logits").name for x in (FP8, FP4)])
    assert served == [["triton", "hopper_fp4"], both := ["hopper", "hopper_fp4"], ["hopper", "triton"], both]

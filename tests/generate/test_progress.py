"""The figures that `generate` prints are times of work: here the device is a thread that sleeps."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from jax_sparse_mla.cli.progress import Progress
from jax_sparse_mla.cli.status import Status
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.models import DEEPSEEK_V32
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.request import Request
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.step import Result

COMPILE, STEP = 0.5, {ForwardMode.EXTEND: 0.2, ForwardMode.DECODE: 0.1}
CHUNK, CHUNKS, REQUESTS, NEW = 64, 5, 2, 9


class Late:
    """An array that is there when the device has come to it."""

    def __init__(self, future):
        self._future = future

    def copy_to_host_async(self):
        pass

    def __array__(self, dtype=None, copy=None):
        self._future.result()
        return np.zeros(0, np.int32)


class SleepingEngine(Engine):
    """Steps are started at once, and the device sleeps through one after another. Compiling takes the host's time."""

    def __init__(self, options):
        self._device = ThreadPoolExecutor(1)
        super().__init__(SimpleNamespace(spec=DEEPSEEK_V32, config=None, vocab_size=256), None, options)

    def _place(self, params):
        return None, None

    def _compile(self, mode, requests, rows, width, changes, *_, then=None):
        time.sleep(COMPILE)

        def call(params, state, plan):
            return None, Late(self._device.submit(time.sleep, STEP[mode])), None, None, None, None

        return SimpleNamespace(mode=mode, max_seq_len=width, num_changes=changes), call

    def _pack(self, program, plan):
        return plan

    def _unpack(self, program, plan, packed):
        tokens = np.zeros((len(plan.requests), 1), np.int32)
        return Result(tokens=tokens, margins=tokens, accepted=tokens[:, 0], overflow=False)


def near(text, expected):
    """A sleep ends late, by more on a busy machine."""
    return float(text) == pytest.approx(expected, rel=0.25)


def test_every_figure_is_the_time_of_work(capsys):
    """The device works on two steps while the host compiles or reads."""
    engine = SleepingEngine(EngineOptions(max_batch=REQUESTS, chunk_size=CHUNK, max_len=1024))
    # Both prompts end within the last chunk: nobody decodes before.
    requests = [Request([1] * length, NEW) for length in (CHUNK * CHUNKS - 32, 32)]
    progress = Progress(Status(), requests, verbose=True)
    engine.run(requests, progress)
    progress.print_summary()
    out, err = capsys.readouterr()
    steps = re.findall(r"^(\w+) +(\d+) tokens, (\S+) s$", err, re.M)
    assert [step[:2] for step in steps] == [("prefill", "64")] * CHUNKS + [("decode", "2")] * (NEW - 1)
    assert all(near(seconds, 0.2 if mode == "prefill" else 0.1) for mode, _, seconds in steps)
    # Nothing but prefill has been compiled by then.
    first, compiled = re.search(r"320 tokens; .* came after (\S+) s, (\S+) s of them compiling", out).groups()
    assert near(first, COMPILE + CHUNKS * 0.2) and near(compiled, COMPILE)
    work = CHUNKS * 0.2 + (NEW - 1) * 0.1
    new, seconds, speed, compiled = re.search(
        r"(\d+) new tokens in (\S+) s, prompts included: (\S+) tokens/s; compiling took (\S+) s", out
    ).groups()
    assert int(new) == 18 and near(seconds, work) and near(speed, 18 / work) and near(compiled, 2 * COMPILE)
    prefill, decode = re.search(r"prefill (\S+) tokens/s, decode (\S+) tokens/s", out).groups()
    assert near(prefill, CHUNK / 0.2) and near(decode, REQUESTS / 0.1)


def test_long_work_is_shown_with_its_time(capsys, monkeypatch):
    monkeypatch.setattr(Status, "QUICK", 0.1)
    status = Status()
    with status.working("building topk"):
        time.sleep(0.4)
        assert capsys.readouterr().err == "building topk …\n"
        with status.working("a quick thing"):
            pass
    assert re.fullmatch(r"building topk: 0\.[4-9] s\n", capsys.readouterr().err)
    status._on_terminal = True
    with status.working("building topk"):
        time.sleep(0.7)
    err = capsys.readouterr().err
    assert err.startswith("\r\x1b[Kbuilding topk … 0 s\r\x1b[K") and re.search(r"Kbuilding topk: 0\.[7-9] s\n$", err)

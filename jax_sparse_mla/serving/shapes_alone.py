"""Engines without arrays: their programs are traced, for the kernels that they call or the time that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jax_sparse_mla import device
from jax_sparse_mla.launch.transforms import ENGINE_PROGRAM
from jax_sparse_mla.metadata import ForwardMode
from jax_sparse_mla.serving import presets
from jax_sparse_mla.serving.engine import SMALLEST_CHUNK, Engine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import SMALLEST_BUCKET, EngineOptions

H200 = device.DeviceInfo("cuda", (9, 0), 132, 232_448)


class ShapesAlone(Engine):
    """An engine that traces and does not run."""

    def __init__(self, config: Mapping[str, Any], options: EngineOptions, as_stored: bool = False):
        model = Model.from_config(config)
        super().__init__(model, jax.eval_shape(lambda: model.init_params(0, as_stored=as_stored)), options)

    def _place(self, params: Any) -> tuple[Any, Any]:
        place = self.model.looped if device.DeviceInfo.current().platform == "cpu" else lambda params: params
        return jax.eval_shape(lambda params: (self._new_state(params), place(params)), params)

    def trace_step(self, mode: ForwardMode, rows: int, max_len: int) -> jax.stages.Traced:
        """The program of a chunk of so many rows or of so many requests that decode, with up to `max_len` tokens."""
        extends = mode is ForwardMode.EXTEND
        requests = self.options.max_batch if extends else rows
        changes = requests + (-(-rows // self.spec.page_size) if extends else 0)
        width = self.scheduler._bucket(max_len)
        program, arguments = self._program(mode, requests, rows, width, changes, Choice.GREEDY, False, False)
        with ENGINE_PROGRAM(True):
            return self._jitted(program).trace(*arguments)

    def trace_all(self) -> None:
        """All programs that serve greedily without drafts."""
        sizes = (
            (ForwardMode.EXTEND, SMALLEST_CHUNK, self.options.chunk_size),
            (ForwardMode.DECODE, 1, self.options.max_batch),
        )
        lengths = dict.fromkeys(map(self.scheduler._bucket, _doubled(SMALLEST_BUCKET, self.options.max_len)))
        for (mode, least, most), length in itertools.product(sizes, lengths):
            for rows in _doubled(least, most):
                self.trace_step(mode, rows, length)


def served() -> Iterator[ShapesAlone]:
    """What a wheel carries Triton's kernels for: `generate` by its defaults, of one request and of many, and engines of
    the released models' sizes and weights as stored, with default options."""
    max_len = len(presets.ByteTokenizer().encode(presets.default_prompt())) + 16
    for config, max_batch in itertools.product(presets.CONFIGS.values(), (1, 8)):
        yield ShapesAlone(config, EngineOptions(max_batch=max_batch, max_len=max_len, trace=True))
    for config in (presets.V4_FLASH_SLICE, presets.V32_SLICE):
        yield ShapesAlone(config, EngineOptions(), as_stored=True)


def trace_served() -> None:
    """Traces all of their programs as if on an H200, so that what they call is compiled."""
    with device.pretend(H200):
        for engine in served():
            engine.trace_all()


def _doubled(least: int, most: int) -> list[int]:
    """`least`, twice that, and so on below `most`, and `most`."""
    counts = itertools.takewhile(lambda count: count < most, (least << i for i in itertools.count()))
    return [*counts, most]

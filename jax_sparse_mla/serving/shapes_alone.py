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
from jax_sparse_mla.serving.engine import Engine
from jax_sparse_mla.serving.model import Model
from jax_sparse_mla.serving.options import default_chunk_size
from jax_sparse_mla.serving.sampling import Choice
from jax_sparse_mla.serving.scheduler import EngineOptions
from jax_sparse_mla.serving.start import all_programs

H200 = device.DeviceInfo("cuda", (9, 0), 132, 232_448)


class ShapesAlone(Engine):
    """An engine that traces and does not run."""

    def __init__(self, config: Mapping[str, Any], options: EngineOptions, as_stored: bool = False):
        model = Model.from_config(config)
        super().__init__(model, jax.eval_shape(lambda: model.init_params(0, as_stored=as_stored)), options)

    def _place(self, params: Any) -> tuple[Any, Any]:
        place = self.model.looped if device.DeviceInfo.current().platform == "cpu" else lambda params: params
        return jax.eval_shape(lambda params: (self._new_state(params), place(params)), params)

    def greedy(self, mode: ForwardMode) -> list[tuple]:
        """The keys of the programs that serve greedily in this mode; the last has the largest sizes."""
        return [key for key in all_programs(self) if key[0] is mode and key[5] is Choice.GREEDY]

    def trace_program(self, key: tuple) -> jax.stages.Traced:
        """The program of a key, traced as an engine traces it."""
        program, arguments = self._program(*key)
        with ENGINE_PROGRAM(True):
            return self._jitted(program).trace(*arguments)


def served() -> Iterator[ShapesAlone]:
    """What a wheel carries Triton's kernels for: `generate` by its defaults, of one request and of many, and engines of
    the released models' sizes and weights as stored, with default options."""
    max_len = len(presets.ByteTokenizer().encode(presets.default_prompt())) + 16
    for config, max_batch in itertools.product(presets.CONFIGS.values(), (1, 8)):
        yield ShapesAlone(config, EngineOptions(max_batch=max_batch, max_len=max_len, trace=True))
    for config in (presets.V4_FLASH_SLICE, presets.V32_SLICE):
        chunk_size = default_chunk_size(
            Model.from_config(config).config, EngineOptions.max_batch * EngineOptions.max_len
        )
        yield ShapesAlone(config, EngineOptions(chunk_size=chunk_size), as_stored=True)


def trace_served() -> None:
    """Traces all of their programs as if on an H200, so that what they call is compiled."""
    with device.pretend(H200):
        for engine in served():
            for key in [*engine.greedy(ForwardMode.EXTEND), *engine.greedy(ForwardMode.DECODE)]:
                engine.trace_program(key)

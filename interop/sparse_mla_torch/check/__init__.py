"""The check of `jax-sparse-mla generate`: a run of the JAX engine compared with transformers' model.

The command finds `Check` by the entry point `transformers` of the group `jax_sparse_mla.check`. Importing the package
imports neither torch nor transformers, which takes seconds.

Raises:
  ImportError: torch or transformers is missing, or transformers is older than these models.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from jax_sparse_mla.cli.setup import CheckResult
from jax_sparse_mla.packages import version

OLDEST_TRANSFORMERS = (5, 23)  # as the extra `hf` asks for

for _name in ("torch", "transformers"):
    if importlib.util.find_spec(_name) is None:
        raise ImportError(f"no package {_name}")
_installed = version("transformers")  # None if the package has no metadata
if _installed and tuple(map(int, re.findall(r"\d+", _installed)[:2])) < OLDEST_TRANSFORMERS:
    _oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
    raise ImportError(
        f"transformers {_installed} is installed, and the check needs {_oldest} or newer: "
        f'pip install "transformers>={_oldest}"'
    )


class Check:
    """Compares runs of an engine with transformers' model of the same weights.

    They are those of a checkpoint's folder or, if that is None, a preset's from a seed.
    """

    def __init__(self, checkpoint: str | None, preset: str, seed: int):
        self._checkpoint, self._preset, self._seed = checkpoint, preset, seed
        self._model: Any = None

    def load(self) -> None:
        """Loads transformers' model; raises OSError or ValueError for a checkpoint that transformers cannot load.

        A checkpoint's stays on the CPU: the JAX model may leave no room for it on the GPU.
        """
        from sparse_mla_torch.check import presets

        if self._checkpoint is not None:
            self._model = presets.load_checkpoint(self._checkpoint)
        else:
            self._model = presets.build_preset(self._preset, self._seed)

    def compare(self, engine: Any, requests: list[Any]) -> CheckResult:
        """Compares the latest run of a `jax_sparse_mla.serving.engine.Engine`, which it has traced.

        It passes where every layer is as close as its bounds ask for.
        """
        from sparse_mla_torch.check import comparison

        cache = "bf16" if engine.options.bf16_cache else "fp8"
        agreeing = None
        if not any(request.sampling.temperature for request in requests):
            agreeing = comparison.TRANSFORMERS.submit(comparison.count_agreeing_tokens, self._model, requests)
        reports = comparison.compare_layers(engine, self._model, requests)
        table = [
            "check      against transformers' eager attention on the same inputs and entries: "
            f"cosine ≥ {comparison.MIN_COSINE[cache]}, of a row ≥ {comparison.MIN_ROW_COSINE[cache]}; "
            f"overlap of the selected entries ≥ {comparison.MIN_OVERLAP}",
            "layer  kind                     cosine    worst row   overlap  (rows that drop entries)",
        ]
        for report in reports:
            overlap = "   -   " if report.overlap is None else f"{report.overlap:.5f}"
            table.append(
                f"{report.layer:5}  {report.kind:22}  {report.cosine:.6f}   {report.worst_row:.6f}   {overlap}  "
                f"({report.dropping_rows}){'' if report.passes(cache) else '  FAILED'}"
            )
        passing = sum(report.passes(cache) for report in reports)
        worst = min((report.cosine for report in reports), default=1.0)
        summary = [
            f"layers     {passing} of {len(reports)} agree with transformers' eager attention: cosine ≥ {worst:.5f}"
        ]
        if agreeing is not None:
            summary.append("tokens     {} of {} are transformers' own choice too".format(*agreeing.result()))
        return CheckResult(passing == len(reports), summary, table)

"""The check of `jax-sparse-mla generate`: a run of the JAX engine compared with transformers' model.

The command finds `Check` by the entry point `transformers` of the group `jax_sparse_mla.check`. torch and transformers
are imported by a process of their own (`process.py`), not here.

Raises:
  ImportError: torch or transformers is missing, or transformers is older than these models.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from jax_sparse_mla.cli.checks import CheckResult
from jax_sparse_mla.packages import version
from sparse_mla_torch.check.process import Process

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

    Its process begins to import transformers at once, and ends by `close`.

    Args:
      eager: what runs transformers instead of a process, for tests.
    """

    def __init__(self, eager: Any = None):
        self._eager = eager or Process()

    def load_checkpoint(self, folder: str) -> None:
        """Loads transformers' model; raises OSError or ValueError for a checkpoint that transformers cannot load."""
        self._eager.load(folder)

    def load_arrays(self, model: Any, config: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Builds transformers' model from a config and the arrays of which `model` is made; on the GPU if JAX runs
        there and torch has it too."""
        import jax  # not with this module: the command says what it does before it imports JAX
        import numpy as np

        from jax_sparse_mla.serving.checkpoint import canonical_name

        names = {name: canonical_name(name, model.config) for name in self._eager.build(dict(config))}
        float32 = {name: arrays[stored].astype(np.float32) for name, stored in names.items() if stored is not None}
        self._eager.fill(float32, jax.default_backend() == "gpu")

    def close(self) -> None:
        self._eager.close()

    def compare(self, engine: Any, requests: list[Any]) -> CheckResult:
        """Compares the latest run of a `jax_sparse_mla.serving.engine.Engine`, which it has traced.

        It passes where every layer is as close as its bounds ask for. Raises ChildProcessError if the process has died.
        """
        from sparse_mla_torch.check import comparison  # after the engine's start, which needs none of it

        cache = "bf16" if engine.options.bf16_cache else "fp8"
        runs, agreeing = comparison.run_layers(engine, self._eager, requests), None
        if not any(request.sampling.temperature for request in requests):
            agreeing = comparison.TRANSFORMERS.submit(comparison.count_agreeing_tokens, self._eager, requests)
        reports = comparison.compare_layers(engine, runs)
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

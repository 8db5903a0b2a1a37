"""What our plugin says in an engine's log."""

from __future__ import annotations

import logging


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def lines_of(engine: str) -> list[str]:
    """The list that gets each line which our plugin logs from now on ("sglang", "vllm")."""
    log, lines = logging.getLogger(f"{engine}.jax_sparse_mla"), []
    log.addHandler(_Lines(lines))
    log.setLevel(logging.INFO)
    return lines

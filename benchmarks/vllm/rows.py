"""What a row of `benchmarks.engines_vllm` must show. Nothing here imports vLLM or torch."""

from __future__ import annotations

from typing import Any

from benchmarks import engine_row
from benchmarks.engine_row import DECODE, PREFILL

ERROR = 0.004  # of a bfloat16 result: 0.0017 is measured
# Calls that our plugin leaves to FlashMLA, which does them sooner: decode by `attention/route.py`, and decode from
# bfloat16 rows, which vLLM makes by FlashMLA's prefill, by `sooner_than_prefill` of decode_plan.py.
LEFT = (
    "V3.2, served 8x8192, 128 heads",
    *(f"V3.2, served 64x8192, {heads} heads, bf16" for heads in (64, 128)),
    "V4, ratio 1, served 64x8192, 64 heads",
)


def problem(row: dict[str, Any]) -> str | None:
    """Why a row shows nothing, or something wrong; None if all is well."""
    case = row["case"]
    wanted = (PREFILL if case.endswith("bf16") else DECODE), "theirs" if case in LEFT else "ours"

    def wrong(served: engine_row.Served) -> str | None:
        # The prefill beside a decode is FlashMLA's or, of few rows, ours.
        beside = served - {wanted} <= {(PREFILL, "ours"), (PREFILL, "theirs")}
        return None if wanted in served and beside else f"{' '.join(wanted)} was wanted"

    return engine_row.problem(row, wrong, {"error": ERROR, "graph_error": ERROR})

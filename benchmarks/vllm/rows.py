"""What a row of `benchmarks.engines_vllm` must show. Nothing here imports vLLM or torch."""

from __future__ import annotations

from typing import Any

ERROR = 0.004  # of a bfloat16 result: 0.0017 is measured
DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
# Calls that our plugin leaves to FlashMLA, which does them sooner: decode by `attention/route.py`, and decode from
# bfloat16 rows, which vLLM makes by FlashMLA's prefill, by `sooner_than_prefill` of decode_plan.py.
LEFT = (
    *(f"V3.2, {batch}, 128 heads" for batch in ("decode", "two tokens", "mixed")),
    *(f"V3.2, served 8x8192, {heads} heads" for heads in (64, 128)),
    *(f"V3.2, served 64x8192, {heads} heads, bf16" for heads in (64, 128)),
    "V4, ratio 1, served 64x8192, 64 heads",
)


def problem(row: dict[str, Any]) -> str | None:
    """Why a row shows nothing, or something wrong; None if all is well."""
    for key in ("failed", "skipped"):
        if key in row:
            return f"{key}: {row[key]}"
    case, served = row["case"], {tuple(key.split(" ")) for key in row["served"]}
    wanted = (PREFILL if case.endswith("bf16") else DECODE), "theirs" if case in LEFT else "ours"
    # The prefill beside a decode is FlashMLA's or, of few rows, ours.
    if wanted not in served or not served - {wanted} <= {(PREFILL, "ours"), (PREFILL, "theirs")}:
        return f"{' '.join(wanted)} was wanted: {row['served']}"
    for key in ("error", "graph_error"):
        for side, error in row.get(key, {}).items():
            if not error <= ERROR:  # nor is NaN
                return f"{key} of {side} is {error}, above {ERROR}"
    return None if len(row.get("error", {})) == 2 else "a side has no error"

"""What a row of an engine's benchmark must show, whatever the engine. Nothing here imports torch or an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
SERVED = ((8, 8192), (64, 8192))  # requests, and tokens of each, of the rows with sizes of serving

Served = set[tuple[str, str]]  # functions, and who served them


def problem(row: dict[str, Any], wrong: Callable[[Served], str | None], bounds: Mapping[str, float]) -> str | None:
    """Why a row shows nothing, or something wrong; None if all is well.

    Args:
      wrong: what is wrong with who served it.
      bounds: the most that each kind of error may be.
    """
    for key in ("failed", "skipped"):
        if key in row:
            return f"{key}: {row[key]}"
    if why := wrong({tuple(key.split(" ")) for key in row["served"]}):
        return f"{why}: {row['served']}"
    for key in row.keys() & bounds.keys():
        for side, error in row[key].items():
            if not error <= bounds[key]:  # nor is NaN
                return f"{key} of {side} is {error}, above {bounds[key]}"
    return None if len(row.get("error", {})) == 2 else "a side has no error"

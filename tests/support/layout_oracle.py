"""The bytes of V4.1's rows and of rows without rope, written out from the formats' own numbers; numpy, no package."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by code; bit 3 is the sign
TENSOR_SCALE = np.float32(0.00217)  # of NOPE_FP8_TENSOR in tests: no power of two


class Record(NamedTuple):
    """Bytes of a token's 512 values and of its scales, how the scales are stored, and what a page's length divides."""

    value_bytes: int
    scale_bytes: int
    scales: str
    split: bool
    align: int


RECORDS = {
    "V41_FP8": Record(512, 16, "ue8m0", False, 528),
    "V41_FP8_SPLIT": Record(512, 16, "ue8m0", True, 512),
    "V41_FP4": Record(256, 32, "e4m3", False, 288),
    "V41_FP4_SPLIT": Record(256, 32, "e4m3", True, 256),
    "NOPE_BF16": Record(1024, 0, "none", False, 1024),
    "NOPE_FP8": Record(512, 16, "float32", False, 528),
    "NOPE_FP8_TENSOR": Record(512, 0, "tensor", False, 512),
}


def page_bytes(name: str, page_size: int) -> int:
    record = RECORDS[name]
    return -(-page_size * (record.value_bytes + record.scale_bytes) // record.align) * record.align


def place(name: str, page_size: int, offset: int) -> tuple[int, int]:
    """The bytes of a page where a token's values and its scales begin."""
    record = RECORDS[name]
    if record.split:
        return offset * record.value_bytes, page_size * record.value_bytes + offset * record.scale_bytes
    start = offset * (record.value_bytes + record.scale_bytes)
    return start, start + record.value_bytes


def put_token(data: np.ndarray, name: str, page_size: int, slot: int, values: np.ndarray, scales: np.ndarray) -> None:
    """Stores a token's bytes, in place."""
    page, offset = divmod(int(slot), page_size)
    values_at, scales_at = place(name, page_size, offset)
    data[page, values_at : values_at + len(values)] = values
    data[page, scales_at : scales_at + len(scales)] = scales


def tokens_of(name: str, page_size: int, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of values and scales of all slots, `[slots, bytes]`."""
    record, found = RECORDS[name], []
    for slot in range(len(data) * page_size):
        page, offset = divmod(slot, page_size)
        values_at, scales_at = place(name, page_size, offset)
        values = data[page, values_at : values_at + record.value_bytes]
        found.append(np.concatenate([values, data[page, scales_at : scales_at + record.scale_bytes]]))
    return tuple(np.split(np.stack(found), [record.value_bytes], axis=1))


def values_of(name: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 `[slots, 512]`: the products rounded to bfloat16, of bytes `[slots, …]`."""
    kind = RECORDS[name].scales
    if kind == "none":
        return codes.copy().view(BF16).astype(np.float64)
    if kind == "e4m3":
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), 512)
        values = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])
        factors = scales.copy().view(E4M3).astype(np.float64)
    else:
        values = codes.copy().view(E4M3).astype(np.float64)
        if kind == "ue8m0":
            factors = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
        elif kind == "float32":
            factors = scales.copy().view("<f4").astype(np.float64)
        else:
            factors = np.full((len(codes), 1), np.float64(TENSOR_SCALE))
    with np.errstate(over="ignore", invalid="ignore"):
        products = values * np.repeat(factors, 512 // factors.shape[1], axis=1)
        return products.astype(np.float32).astype(BF16).astype(np.float64)


def some_token(name: str, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of values and scales of a bfloat16 row `[512]`; any choice of scale serves a test that reads them."""
    kind, wide = RECORDS[name].scales, row.astype(np.float64)
    none = np.zeros(0, np.uint8)
    if kind == "none":
        return row.view(np.uint8), none
    if kind == "e4m3":
        groups = wide.reshape(32, 16)
        scales = np.clip(np.abs(groups).max(-1) / 6, 2.0**-9, 448).astype(np.float32).astype(E4M3)
        away = np.abs(np.abs(groups / scales.astype(np.float64)[:, None])[..., None] - E2M1)
        codes = (away.argmin(-1) | np.where(groups < 0, 8, 0)).reshape(256, 2).astype(np.uint8)
        return codes[:, 0] | (codes[:, 1] << 4), scales.view(np.uint8)
    if kind == "tensor":
        return np.clip(wide / TENSOR_SCALE, -448, 448).astype(np.float32).astype(E4M3).view(np.uint8), none
    groups = wide.reshape(16 if kind == "ue8m0" else 4, -1)
    exponents = np.ceil(np.log2(np.maximum(np.abs(groups).max(-1) / 448, 1e-4)))
    codes = np.clip(groups / np.exp2(exponents)[:, None], -448, 448).astype(np.float32).astype(E4M3)
    scales = (exponents + 127).astype(np.uint8) if kind == "ue8m0" else np.exp2(exponents).astype("<f4")
    return codes.reshape(512).view(np.uint8), scales.view(np.uint8)

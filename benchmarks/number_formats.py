"""How exact decode would be in other number formats: errors against float64 of the stored values, on the CPU.

    python -m benchmarks.number_formats

Attention over random rows of an FP8 cache, computed in float64, with the one rounding that a line names put in at its
place (and bfloat16 where it names none). Error: norm of the difference over norm of the output, mean over the heads
and rows. Prints the table of docs/kernels-decode-measured.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

E4M3, BF16, F16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float16
E4M3_MAX = 448.0
HEADS, ROWS = 64, 8


def rounded(x: np.ndarray, dtype: type) -> np.ndarray:
    return x.astype(np.float32).astype(dtype).astype(np.float64)


class Model(NamedTuple):
    """Which values of a row are FP8, how many share a scale, which of its values are V, and how many keys there are."""

    nope: int
    rope: int
    tile: int
    power_of_two: bool
    rope_in_v: bool
    topk: int


MODELS = {
    "V4": Model(448, 64, 64, True, True, 640),
    "V3.2": Model(512, 64, 128, False, False, 2048),
}


class Keys(NamedTuple):
    """Stored rows: e4m3 values `[keys, nope]`, their scales `[keys, nope]`, the rope part `[keys, rope]`."""

    values: np.ndarray
    scales: np.ndarray
    rope: np.ndarray

    def whole(self, nope: np.ndarray) -> np.ndarray:
        return np.concatenate([nope, self.rope], axis=-1)


def stored(model: Model, rng: np.random.Generator) -> Keys:
    rows = rng.standard_normal((model.topk, model.nope))
    tiles = rows.reshape(model.topk, -1, model.tile)
    scales = np.abs(tiles).max(-1, keepdims=True) / E4M3_MAX
    if model.power_of_two:
        scales = 2.0 ** np.ceil(np.log2(scales))
    scales = rounded(scales, np.float32)
    values = rounded(tiles / scales, E4M3).reshape(rows.shape)
    rope = rounded(rng.standard_normal((model.topk, model.rope)), BF16)
    return Keys(values, np.broadcast_to(scales, tiles.shape).reshape(rows.shape), rope)


class Scheme(NamedTuple):
    """Roundings: of the queries, of the dequantised keys without their rope part, of the weights, of the output."""

    q: Callable[[np.ndarray], np.ndarray] = lambda q: q
    keys: Callable[[np.ndarray], np.ndarray] = lambda keys: rounded(keys, BF16)
    weights: Callable[[np.ndarray], np.ndarray] = lambda weights: rounded(weights, BF16)
    rope: Callable[[np.ndarray], np.ndarray] = lambda rope: rope


def exact(x: np.ndarray) -> np.ndarray:
    return x


def fp8_by_row(x: np.ndarray) -> np.ndarray:
    """e4m3 with one scale for the last dimension."""
    scale = np.abs(x).max(-1, keepdims=True) / E4M3_MAX
    return rounded(x / scale, E4M3) * scale


def fp8_twice(x: np.ndarray) -> np.ndarray:
    """The sum of two e4m3 values: the rounded one, and what its rounding left."""
    high = fp8_by_row(x)
    return high + fp8_by_row(x - high)


def fp16_keys(keys: np.ndarray) -> np.ndarray:
    """float16, relative to a power of two of each token: its products with scales are exact but for small values."""
    reference = 2.0 ** (np.ceil(np.log2(np.abs(keys).max(-1, keepdims=True))) - 8)
    return rounded(keys / reference, F16) * reference


def plain_cast(x: np.ndarray) -> np.ndarray:
    return rounded(np.clip(x, -E4M3_MAX, E4M3_MAX), E4M3)


SCHEMES = {
    "rounding of the output alone": Scheme(keys=exact, weights=exact),
    "bfloat16 keys and weights (`hopper`, FlashMLA)": Scheme(),
    "float16 keys and weights": Scheme(keys=fp16_keys, weights=lambda w: rounded(w, F16)),
    "FP8 queries, one scale a head": Scheme(q=fp8_by_row),
    "FP8 queries, two parts": Scheme(q=fp8_twice),
    "FP8 weights": Scheme(weights=lambda w: rounded(w * E4M3_MAX, E4M3) / E4M3_MAX),
    "FP8 queries, keys and weights, all scales 1 (SGLang's Q8KV8 prefill)": Scheme(
        q=plain_cast, keys=plain_cast, weights=plain_cast, rope=plain_cast
    ),
}


def attend(model: Model, scheme: Scheme, q: np.ndarray, keys: Keys) -> np.ndarray:
    """The output `[heads, v]`; the sum of the weights is of those before their rounding."""
    nope = scheme.keys(keys.values * keys.scales)
    whole = np.concatenate([nope, scheme.rope(keys.rope)], axis=-1)
    scores = scheme.q(q) @ whole.T * (model.nope + model.rope) ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    values = whole if model.rope_in_v else nope
    return rounded(scheme.weights(weights) @ values / weights.sum(-1, keepdims=True), BF16)


def errors(model: Model, seeds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in SCHEMES}
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        keys = stored(model, rng)
        q = rounded(2 * rng.standard_normal((HEADS, model.nope + model.rope)), BF16)
        whole = keys.whole(keys.values * keys.scales)
        scores = q @ whole.T * (model.nope + model.rope) ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        values = whole if model.rope_in_v else whole[:, : model.nope]
        truth = weights @ values / weights.sum(-1, keepdims=True)
        for name, scheme in SCHEMES.items():
            wrong = np.linalg.norm(attend(model, scheme, q, keys) - truth, axis=-1)
            found[name].append(float(np.mean(wrong / np.linalg.norm(truth, axis=-1))))
    return {name: float(np.mean(values)) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    args = parser.parse_args()
    columns = {name: errors(model, args.rows) for name, model in MODELS.items()}
    print(f"| rounding | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for scheme in SCHEMES:
        print(f"| {scheme} | {' | '.join(f'{found[scheme]:.2e}' for found in columns.values())} |")


if __name__ == "__main__":
    main()

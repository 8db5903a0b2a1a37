"""DeepSeek-V4.1's layers in torch, a request at a time over all its tokens, with the published model's rounding points.

Written from the formulas of SGLang's and vLLM's torch forms: rope, the compressor's pairs, index keys made of the row
before rope, FP4 and FP8 as what a quantised cache gives back, blocks by their maxima, softmax with a sink. It uses
nothing of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 numbers of float64 x; of two as near the one with the even code."""
    away = (x.abs().clamp(max=6).unsqueeze(-1) - E2M1).abs()
    nearest = away == away.amin(-1, keepdim=True)
    preferred = nearest.double() * torch.tensor([2.0, 1.0] * 4)
    return E2M1[preferred.argmax(-1)] * x.sign()


def power_of_two_from(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not less."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(fraction == 0.5, exponent - 1, exponent))


def in_groups(x: torch.Tensor, group: int):
    x = x.double().unflatten(-1, (-1, group))
    return x, x.abs().amax(-1, keepdim=True)


def index_fp4(x: torch.Tensor, floor: float) -> torch.Tensor:
    """Index keys and queries as FP4 with a power of two for each 32; floor of amax / 6."""
    groups, amax = in_groups(x, 32)
    scale = power_of_two_from((amax / 6).clamp(min=floor))
    return rounded((to_e2m1(groups / scale) * scale).flatten(-2).float())


def row_fp4(x: torch.Tensor) -> torch.Tensor:
    """A compressed row as FP4 with an e4m3 scale for each 16."""
    groups, amax = in_groups(x, 16)
    scale = (amax / 6).clamp(2.0**-9, 448).float().to(torch.float8_e4m3fn).double()
    return rounded((to_e2m1(groups / scale) * scale).flatten(-2).float())


def row_fp8(x: torch.Tensor) -> torch.Tensor:
    """A window row as e4m3 with a power of two for each 32, 2^-13 at least."""
    groups, amax = in_groups(x, 32)
    scale = power_of_two_from((amax / 448).clamp(min=2.0**-13))
    codes = (groups / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return rounded((codes.double() * scale).flatten(-2).float())


def index_fp8(x: torch.Tensor) -> torch.Tensor:
    """Index keys and queries as e4m3 with one power of two, as vLLM has them on SM90."""
    _, amax = in_groups(x, 128)
    scale = power_of_two_from(amax[..., 0].clamp(min=1e-4) / 448)
    return ((x.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale).float()


def row_v4(x: torch.Tensor) -> torch.Tensor:
    """A row of 584 bytes: 448 values as e4m3 with a power of two for each 64, and 64 of rope as they are."""
    groups, amax = in_groups(x[:, :448], 64)
    scale = power_of_two_from(amax.clamp(min=1e-4) / 448)
    nope = (groups / scale).float().to(torch.float8_e4m3fn).double() * scale
    return torch.cat([rounded(nope.flatten(-2).float()), x[:, 448:]], dim=-1)


class Caches(NamedTuple):
    """What caches give back of window rows, compressed rows, index keys; and index queries as they are scored."""

    window: Callable[[torch.Tensor], torch.Tensor]
    compressed: Callable[[torch.Tensor], torch.Tensor]
    keys: Callable[[torch.Tensor], torch.Tensor]
    queries: Callable[[torch.Tensor], torch.Tensor]


V41 = Caches(row_fp8, row_fp4, partial(index_fp4, floor=1e-4), partial(index_fp4, floor=2.0**-126))
V4 = Caches(row_v4, row_v4, index_fp8, index_fp8)  # vLLM on SM90
V4_OF_SGLANG = Caches(row_v4, lambda x: row_v4(row_fp4(x)), V41.keys, V41.queries)  # SGLang on SM90


def rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (2i, 2i + 1) of the last values, in float32, and rounds."""
    dim = 2 * len(inv_freq)
    angles = positions.float()[:, None] * inv_freq
    tail = torch.view_as_complex(x[:, -dim:].unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(tail * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([x[:, :-dim], rounded(turned)], dim=-1)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rounded(weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)))


def latents(kv, score, weight, *, round_pooled):
    """The compressed rows before rope; score None: ratio 1."""
    if score is not None:
        whole = len(kv) // 2 * 2
        kv, score = kv[:whole].unflatten(0, (-1, 2)), score[:whole].unflatten(0, (-1, 2))
        kv = (kv * score.softmax(dim=1)).sum(dim=1)
    return norm(rounded(kv) if round_pooled else kv, weight)


def index_keys(latent, wk, weight, positions, inv_freq):
    return rope(norm(rounded(latent @ wk.T), weight), positions, inv_freq)


def logits(q, weights, keys):
    """float64 `[tokens, entries]` of queries `[tokens, heads, 128]`."""
    products = torch.einsum("thd,nd->thn", q.double(), keys.double())
    return (products.relu() * weights.double().unsqueeze(-1)).sum(dim=1)


def visible(length: int, ratio: int) -> torch.Tensor:
    """Entries that each of `length` tokens may select."""
    return (torch.arange(length) + 1) // ratio


def blocks_of(scores, lens, kept, size):
    """For each token `(candidate blocks, gap)`: a set, of the maxima, the newest at infinity; a gap as of `select`."""
    found = []
    for row, n in zip(scores, lens.tolist()):
        if n == 0:
            found.append((set(), np.inf))
            continue
        padded = torch.nn.functional.pad(row[:n], (0, -n % size), value=-torch.inf).unflatten(0, (-1, size))
        top = padded.amax(-1)
        top[(n - 1) // size] = torch.inf
        order = top.argsort(descending=True, stable=True)
        gap = float(top[order[kept - 1]] - top[order[kept]]) if len(order) > kept else np.inf
        found.append((set(order[:kept].tolist()), gap))
    return found


def select(scores, lens, topk, blocks=None, size=8):
    """For each token `(positions, gap)`: the ascending top-k, and by how much the last one beats the next.

    With `blocks` they are of these, and the gap is at most theirs.
    """
    found = []
    for i, (row, n) in enumerate(zip(scores, lens.tolist())):
        allowed = torch.tensor([p for p in range(n) if blocks is None or p // size in blocks[i][0]], dtype=torch.long)
        order = row[allowed].argsort(descending=True, stable=True)  # ties, of logits of 0, go to the lower position
        chosen = allowed[order[:topk]].sort().values
        ranked = row[allowed][order]
        gap = float(ranked[topk - 1] - ranked[topk]) if len(ranked) > topk else np.inf
        found.append((chosen.tolist(), gap if blocks is None else min(gap, blocks[i][1])))
    return found


def attend(q, window_rows, compressed, positions, sink, scale, window):
    """float64 `[tokens, heads, 512]`: each token's last `window` rows and what it has selected."""
    out = []
    for t in range(len(q)):
        keys = window_rows[max(0, t - window + 1) : t + 1].double()
        if compressed is not None:
            keys = torch.cat([keys, compressed[positions[t][0]].double()])
        scores = torch.cat([q[t].double() @ keys.T * scale, sink.double()[:, None]], dim=-1)
        out.append(scores.softmax(-1)[:, :-1] @ keys)
    return torch.stack(out)

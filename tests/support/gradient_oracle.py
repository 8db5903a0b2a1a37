"""The oracle of prefill's gradient: torch differentiates attention, in float64 and as bfloat16 code would."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from attention_oracle import V_DIM, PrefillCase, scanned


class Gradients(NamedTuple):
    q: np.ndarray
    kv: np.ndarray
    attn_sink: np.ndarray | None


def gradients(case: PrefillCase, g_out: np.ndarray, g_lse: np.ndarray, rounded: bool = False) -> Gradients:
    """Of Σ g_out · out + Σ g_lse · lse, the latter over rows with a key; float64 arithmetic.

    `rounded`: probabilities, the output, and the gradients of both and of q and kv are rounded to bfloat16.
    """

    def rounding(x: torch.Tensor) -> torch.Tensor:  # its gradient too
        return x.bfloat16().double() if rounded else x

    def leaf(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.asarray(x, np.float64), requires_grad=True)

    q, kv = leaf(case.q), leaf(np.where(np.isnan(case.kv.astype(np.float64)), 0, case.kv.astype(np.float64)))
    sink = None if case.attn_sink is None else leaf(np.clip(case.attn_sink, -1e30, 1e30))
    loss = (q * 0).sum() + (kv * 0).sum() + (0 if sink is None else (sink * 0).sum())
    for row, index in enumerate(case.indices):
        length = None if case.topk_length is None else case.topk_length[row]
        if not (names := scanned(index, length, len(case.kv))):
            continue
        keys = kv[names]
        scores = case.softmax_scale * (q[row] @ keys.T)
        lse = torch.logsumexp(scores, 1)
        total = lse if sink is None else torch.logaddexp(lse, sink)
        p = rounding(torch.exp(scores - total[:, None]))
        out = rounding(p @ keys[:, :V_DIM])
        loss = loss + (out * torch.tensor(g_out[row].astype(np.float64))).sum()
        loss = loss + (lse * torch.tensor(g_lse[row].astype(np.float64))).sum()
    loss.backward()
    return Gradients(
        rounding(q.grad).numpy(), rounding(kv.grad).numpy(), None if sink is None else sink.grad.float().numpy()
    )


def error(actual, expected: np.ndarray) -> float:
    """Norm over norm."""
    difference = np.linalg.norm(np.asarray(actual).astype(np.float64) - expected)
    return difference / max(np.linalg.norm(expected), 1e-30)

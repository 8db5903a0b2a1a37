"""The oracle of prefill's gradient: torch differentiates attention, in float64 and as bfloat16 code would."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from attention_calls import prefill_arguments
from attention_oracle import V_DIM, PrefillCase, scanned

from jax_sparse_mla.attention import sparse_mla_prefill


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


def cotangents(case, seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng, shape = np.random.default_rng(seed), case.q.shape[:-1]
    return rng.standard_normal((*shape, 512)).astype(ml_dtypes.bfloat16), rng.standard_normal(shape, np.float32)


def gradient_by_jax(case, **options) -> tuple:
    """dq, dkv and dsink (None without a sink) by `jax.grad` of `sparse_mla_prefill`."""
    given = prefill_arguments(case)
    arrays = {name: given.pop(name) for name in ("q", "kv", "attn_sink")}
    g_out, g_lse = map(jnp.asarray, cotangents(case))

    def loss(arrays):
        out, _, lse = sparse_mla_prefill(**given, **arrays, **options)
        return jnp.sum(out.astype(jnp.float32) * g_out) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) * g_lse)

    found = jax.jit(jax.grad(loss))(arrays)
    return found["q"], found["kv"], found["attn_sink"]


def saved(case, backend="reference") -> tuple:
    """What the backward pass takes."""
    given = prefill_arguments(case)
    out, _, lse = sparse_mla_prefill(**given, backend=backend)
    arrays = (given[name] for name in ("q", "kv", "indices", "topk_length", "attn_sink"))
    return *arrays, out, lse, *map(jnp.asarray, cotangents(case))


def check_gradients(case, found) -> None:
    wanted = gradients(case, *cotangents(case))
    rounded = gradients(case, *cotangents(case), rounded=True)
    for name, x, exact, plain in zip(("q", "kv", "attn_sink"), found, wanted, rounded, strict=True):
        if exact is None:
            assert x is None, name
            continue
        x = np.asarray(x).astype(np.float64)
        assert np.isfinite(x).all(), name
        allowed = 2 * max(error(plain, exact), 2**-9)  # a number of its own, such as a sink's gradient, may be lucky
        assert error(x, exact) <= allowed, (name, error(x, exact), error(plain, exact))
        # The whole forgives a row what it may have lost.
        far = np.linalg.norm(x - exact, axis=-1) > 0.02 * np.linalg.norm(exact, axis=-1) + 0.01 * np.abs(exact).max()
        assert not far.any(), (name, np.argwhere(far)[:5].tolist())
        assert not np.any(x[exact == 0]) or name == "attn_sink", name  # rows that nobody reads, NaN in kv

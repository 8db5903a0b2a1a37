"""DSpark's drafter of DeepSeek-V4 in numpy, float64, by the released names: a whole text each time, nothing kept.

It follows what public ports say of the released `inference/model.py`, and reads nothing of the package.
"""

from __future__ import annotations

import dataclasses

import numpy as np

ROPE, EPS, HC_EPS = 64, 1e-6, 1e-6


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a small model; a window of 128 tokens, heads of 512 values."""

    hidden: int = 64
    vocabulary: int = 256
    heads: int = 4
    groups: int = 2
    rank: int = 32  # of queries, and of each output group
    experts: int = 4
    chosen: int = 2
    width: int = 64
    streams: int = 4
    iterations: int = 20
    targets: tuple[int, ...] = (0, 2)
    block: int = 5
    noise: int = 255
    markov: int = 16
    window: int = 128


def config_keys(sizes: Sizes) -> dict:
    """What the released config says of the drafter."""
    return {
        "dspark_block_size": sizes.block,
        "dspark_noise_token_id": sizes.noise,
        "dspark_target_layer_ids": list(sizes.targets),
        "dspark_markov_rank": sizes.markov,
    }


def random_tensors(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Float32 tensors `mtp.*`, all random, the heads' too."""
    rng, n, hidden = np.random.default_rng(seed), sizes.streams, sizes.hidden
    tensors = {}

    def weight(name, *shape):
        tensors[name] = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def near(name, mean, deviation, *shape):
        tensors[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)

    for stage in range(len(sizes.targets)):
        mtp = f"mtp.{stage}"
        weight(f"{mtp}.attn.wq_a.weight", sizes.rank, hidden)
        weight(f"{mtp}.attn.wq_b.weight", sizes.heads * 512, sizes.rank)
        weight(f"{mtp}.attn.wkv.weight", 512, hidden)
        weight(f"{mtp}.attn.wo_a.weight", sizes.groups * sizes.rank, sizes.heads * 512 // sizes.groups)
        weight(f"{mtp}.attn.wo_b.weight", hidden, sizes.groups * sizes.rank)
        near(f"{mtp}.attn.attn_sink", 2, 1, sizes.heads)
        for name, size in (("attn.q_norm", sizes.rank), ("attn.kv_norm", 512), ("attn_norm", hidden)):
            near(f"{mtp}.{name}.weight", 1, 0.1, size)
        near(f"{mtp}.ffn_norm.weight", 1, 0.1, hidden)
        for part in ("attn", "ffn"):
            weight(f"{mtp}.hc_{part}_fn", (2 + n) * n, n * hidden)
            near(f"{mtp}.hc_{part}_base", 1, 0.5, (2 + n) * n)
            near(f"{mtp}.hc_{part}_scale", 1, 0.5, 3)
        weight(f"{mtp}.ffn.gate.weight", sizes.experts, hidden)
        near(f"{mtp}.ffn.gate.bias", 0, 0.1, sizes.experts)
        for expert in [f"experts.{e}" for e in range(sizes.experts)] + ["shared_experts"]:
            weight(f"{mtp}.ffn.{expert}.w1.weight", sizes.width, hidden)
            weight(f"{mtp}.ffn.{expert}.w3.weight", sizes.width, hidden)
            weight(f"{mtp}.ffn.{expert}.w2.weight", hidden, sizes.width)
    weight("mtp.0.main_proj.weight", hidden, len(sizes.targets) * hidden)
    near("mtp.0.main_norm.weight", 1, 0.1, hidden)
    last = f"mtp.{len(sizes.targets) - 1}"
    near(f"{last}.norm.weight", 1, 0.1, hidden)
    weight(f"{last}.hc_head_fn", n, n * hidden)
    near(f"{last}.hc_head_base", 1, 0.5, n)
    near(f"{last}.hc_head_scale", 1, 0.5, 1)
    near(f"{last}.markov_head.markov_w1.weight", 0, 1, sizes.vocabulary, sizes.markov)
    weight(f"{last}.markov_head.markov_w2.weight", sizes.vocabulary, sizes.markov)
    weight(f"{last}.confidence_head.proj.weight", 1, hidden + sizes.markov)
    return tensors


class Oracle:
    """Drafts of one text.

    Args:
      tensors: float arrays by released name.
      embedding, unembedding: the model's, `[vocabulary, hidden]`.
    """

    def __init__(self, sizes: Sizes, tensors, embedding, unembedding):
        self.sizes = sizes
        self.tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.embedding, self.unembedding = np.float64(embedding), np.float64(unembedding)

    def draft(self, hidden: np.ndarray, anchor: int, count: int, forced=()) -> tuple[list[int], np.ndarray]:
        """`count` tokens behind the anchor, and the logits `[count, vocabulary]` that they were chosen from.

        hidden `[n, targets * hidden]`: of the n positions before the anchor, what the target layers put out, the mean
        of the streams. `forced`: tokens that replace the first drafts, where not negative.
        """
        sizes, tensors = self.sizes, self.tensors
        context = self._norm(hidden @ tensors["mtp.0.main_proj.weight"].T, "mtp.0.main_norm.weight")
        first, rows = len(hidden), max(sizes.block, count)
        tokens = [anchor] + [sizes.noise] * (rows - 1)
        streams = np.repeat(self.embedding[tokens][:, None], sizes.streams, 1)
        for stage in range(len(sizes.targets)):
            mtp = f"mtp.{stage}"
            x, post, comb = self._collapse(streams, f"{mtp}.hc_attn")
            x = self._attention(self._norm(x, f"{mtp}.attn_norm.weight"), context, first, f"{mtp}.attn")
            streams = self._expand(streams, x, post, comb)
            x, post, comb = self._collapse(streams, f"{mtp}.hc_ffn")
            x = self._experts(self._norm(x, f"{mtp}.ffn_norm.weight"), f"{mtp}.ffn")
            streams = self._expand(streams, x, post, comb)
        last = f"mtp.{len(sizes.targets) - 1}"
        weights = _normalised(streams.reshape(rows, -1)) @ tensors[f"{last}.hc_head_fn"].T
        weights = _sigmoid(weights * tensors[f"{last}.hc_head_scale"] + tensors[f"{last}.hc_head_base"]) + HC_EPS
        joined = np.einsum("bn,bnh->bh", weights, streams)
        logits = self._norm(joined, f"{last}.norm.weight") @ self.unembedding.T
        drafts, before = [], anchor
        for i in range(count):
            row = tensors[f"{last}.markov_head.markov_w1.weight"][before]
            logits[i] += tensors[f"{last}.markov_head.markov_w2.weight"] @ row
            is_forced = i < len(forced) and forced[i] >= 0
            before = int(forced[i]) if is_forced else int(logits[i].argmax())
            drafts.append(before)
        return drafts, logits[:count]

    def _norm(self, x, name):
        return _normalised(x) * self.tensors[name]

    def _attention(self, x, context, first, name):
        """Every row sees the last `window` tokens before the block, and the whole block."""
        sizes, tensors = self.sizes, self.tensors
        block = first + np.arange(len(x))
        q = self._norm(x @ tensors[f"{name}.wq_a.weight"].T, f"{name}.q_norm.weight") @ tensors[f"{name}.wq_b.weight"].T
        q = _rope(_normalised(q.reshape(len(x), sizes.heads, 512)), block[:, None])
        begin = max(first - sizes.window, 0)
        positions = np.concatenate([np.arange(begin, first), block])
        rows = np.concatenate([context[begin:first], x])
        keys = _rope(self._norm(rows @ tensors[f"{name}.wkv.weight"].T, f"{name}.kv_norm.weight"), positions)
        scores = np.exp(np.einsum("bhd,kd->bhk", q, keys) * 512**-0.5)
        sums = scores.sum(-1) + np.exp(tensors[f"{name}.attn_sink"])
        out = _rope(np.einsum("bhk,kd->bhd", scores, keys) / sums[..., None], -block[:, None])
        grouped = out.reshape(len(x), sizes.groups, -1)
        w = tensors[f"{name}.wo_a.weight"].reshape(sizes.groups, sizes.rank, -1)
        return np.einsum("bgd,grd->bgr", grouped, w).reshape(len(x), -1) @ tensors[f"{name}.wo_b.weight"].T

    def _experts(self, x, name):
        tensors = self.tensors
        scores = np.sqrt(np.log1p(np.exp(x @ tensors[f"{name}.gate.weight"].T)))
        out = self._swiglu(x, f"{name}.shared_experts")
        for row, score in enumerate(scores):
            chosen = np.argsort(-(score + tensors[f"{name}.gate.bias"]))[: self.sizes.chosen]
            for e in chosen:
                share = 1.5 * score[e] / score[chosen].sum()
                out[row] += share * self._swiglu(x[row], f"{name}.experts.{e}")
        return out

    def _swiglu(self, x, name):
        gate, up = (x @ self.tensors[f"{name}.{w}.weight"].T for w in ("w1", "w3"))
        gate, up = np.minimum(gate, 10), np.clip(up, -10, 10)
        return (gate * _sigmoid(gate) * up) @ self.tensors[f"{name}.w2.weight"].T

    def _collapse(self, streams, name):
        rows, n, _ = streams.shape
        mixes = _normalised(streams.reshape(rows, -1)) @ self.tensors[f"{name}_fn"].T
        base, scale = self.tensors[f"{name}_base"], self.tensors[f"{name}_scale"]
        pre = _sigmoid(mixes[:, :n] * scale[0] + base[:n]) + HC_EPS
        post = 2 * _sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(rows, n, n)
        comb = np.exp(comb) / np.exp(comb).sum(-1, keepdims=True) + HC_EPS
        comb = comb / (comb.sum(-2, keepdims=True) + HC_EPS)
        for _ in range(self.sizes.iterations - 1):
            comb = comb / (comb.sum(-1, keepdims=True) + HC_EPS)
            comb = comb / (comb.sum(-2, keepdims=True) + HC_EPS)
        return np.einsum("bn,bnh->bh", pre, streams), post, comb

    @staticmethod
    def _expand(streams, out, post, comb):
        return post[:, :, None] * out[:, None] + np.einsum("bij,bih->bjh", comb, streams)


def _normalised(x):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _rope(x, positions):
    """Neighbours of the last 64 values turn together; without YaRN."""
    angles = np.asarray(positions)[..., None] * 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    even, odd = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    turned = np.stack([even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)], -1)
    return np.concatenate([x[..., :-ROPE], turned.reshape(*x.shape[:-1], ROPE)], -1)

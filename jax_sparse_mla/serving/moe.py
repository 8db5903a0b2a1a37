"""Mixture of experts: which experts a row goes to, and what they make of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.launch.transforms import KernelCall
from jax_sparse_mla.serving.config import MoE
from jax_sparse_mla.serving.layers import linear, matmul, mlp, summed, swiglu_product
from jax_sparse_mla.serving.quantised import Quantised, Weight, kernel_serves, multiplied_out, stored_product

_DOTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)

# Tiles and stages of the ragged product on Hopper.
_BLOCK_M, _BLOCK_N, _BLOCK_K, _STAGES = 64, 128, 128, 3
_MANY_EXPERTS = 16  # fewer cost XLA's way little


@pytree_dataclass
class MoEParams:
    """A layer's experts: router `[experts, hidden]`, gate_up `[experts, 2 * width, hidden]` (the gate first), down
    `[experts, hidden, width]`, the shared expert's two `[2 * width, hidden]` and `[hidden, width]`; of a hash layer
    `experts_of_token` int32 `[vocab, top_k]`."""

    router: jax.Array
    gate_up: jax.Array | Quantised
    down: jax.Array | Quantised
    shared_gate_up: Weight
    shared_down: Weight
    experts_of_token: jax.Array | None = None


@pytree_dataclass
class DenseParams:
    """A wide MLP: gate_up `[2 * width, hidden]`, the gate first, down `[hidden, width]`."""

    gate_up: Weight
    down: Weight


def feed_forward(
    x: jax.Array,
    params: MoEParams | DenseParams,
    bias: jax.Array,
    tokens: jax.Array,
    *,
    config: MoE,
    axis_name: str | None = None,
) -> jax.Array:
    """A layer's MLP, wide or of experts: x `[T, hidden]` → `[T, hidden]`.

    The chosen experts' outputs are added to the shared expert's.

    Args:
      bias: float32 `[experts]`, added to the scores by which experts are chosen, not to those that weigh them.
      tokens: int32 `[T]`, read by a hash layer.
      axis_name: the mesh axis whose devices share the routed experts, in order; None: they are all here.
    """
    if isinstance(params, DenseParams):
        return mlp(x, params.gate_up, params.down, config.limit)
    if config.float32_router:
        logits = matmul(x.astype(jnp.float32), params.router.astype(jnp.float32))
    else:
        logits = linear(x, params.router)
    scores = _scores(logits, config.score)
    if params.experts_of_token is not None:
        chosen = params.experts_of_token[tokens]
    else:
        chosen = choose(scores.astype(jnp.float32) + bias, config)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if config.normalised:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    if axis_name is not None:
        chosen = chosen - lax.axis_index(axis_name) * params.gate_up.shape[0]
    routed = experts(x, chosen, weights * config.scale, params.gate_up, params.down, config.limit)
    return summed(routed, axis_name).astype(x.dtype) + mlp(x, params.shared_gate_up, params.shared_down, config.limit)


def _scores(logits: jax.Array, kind: str) -> jax.Array:
    if kind == "sigmoid":
        return jax.nn.sigmoid(logits)
    if kind == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jnp.sqrt(jax.nn.softplus(logits))


def choose(scores: jax.Array, config: MoE) -> jax.Array:
    """int32 `[T, top_k]`: the experts of the best scores float32 `[T, experts]`, all within the groups whose two best
    experts score highest together."""
    if config.top_groups < config.groups:
        rows = scores.shape[0]
        grouped = scores.reshape(rows, config.groups, -1)
        best = lax.top_k(grouped, 2)[0].sum(axis=-1)
        groups = lax.top_k(best, config.top_groups)[1]
        allowed = jnp.zeros((rows, config.groups), bool).at[jnp.arange(rows)[:, None], groups].set(True)
        scores = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(rows, -1)
    return lax.top_k(scores, config.top_k)[1]


def experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | Quantised,
    down: jax.Array | Quantised,
    limit: float | None,
) -> jax.Array:
    """The weighted sum over each row's experts, float32: x `[T, hidden]`, chosen and weights `[T, k]` → `[T, hidden]`.

    Where there are at least as many experts as rows and choices, each row reads the weights of its own. Of more rows
    those of an expert are sorted together, and each expert is one part of a ragged product. A chosen number that is no
    expert's is left out: its row reads expert 0 or comes behind all parts, and whatever comes of it counts as 0.
    """
    rows, k = chosen.shape
    count = gate_up.shape[0]
    here = (chosen >= 0) & (chosen < count)
    if rows * k <= count:
        flat = jnp.where(here, chosen, 0).reshape(-1)
        out = swiglu_product(_times, _times_by_xla, _times(x, gate_up, flat), down, flat, limit=limit)
    else:
        flat = jnp.where(here, chosen, count).reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
        h = _ragged(x[order // k], gate_up, sizes)
        sorted_out = swiglu_product(_ragged, _ragged_by_xla, h, down, sizes, limit=limit, sizes=True)
        out = jnp.zeros_like(sorted_out).at[order].set(sorted_out, unique_indices=True)
    out = jnp.where(here[:, :, None], out.reshape(rows, k, -1) * weights[:, :, None], 0)
    return jnp.sum(out.astype(x.dtype), axis=1, dtype=jnp.float32)


def _times(x: jax.Array, weight: jax.Array | Quantised, expert: jax.Array) -> jax.Array:
    """Each row times the weight of its expert: x `[R, in]`, weight `[experts, out, in]`, expert `[R]` → `[R, out]`.

    x may have fewer rows, a divisor of R: as many rows in turn take one of x.
    """
    if kernel_serves(x, weight):
        return stored_product(_times_by_xla, x, weight, expert)
    return _times_by_xla(x, weight, expert)


def _times_by_xla(x: jax.Array, weight: jax.Array | Quantised, expert: jax.Array) -> jax.Array:
    """A sum and not a product, for which XLA would copy the weights: so it reads them where they are."""
    x = jnp.repeat(x, expert.shape[0] // max(x.shape[0], 1), axis=0)
    own = multiplied_out(weight[expert]).astype(jnp.float32)
    return jnp.sum(own * x[:, None, :].astype(jnp.float32), axis=-1).astype(x.dtype)


def _ragged(x: jax.Array, weight: jax.Array | Quantised, sizes: jax.Array) -> jax.Array:
    """As `_times`, of rows sorted by expert; `sizes[e]` of them are expert e's."""
    if kernel_serves(x, weight):
        return stored_product(_ragged_by_xla, x, weight, sizes, sizes=True)
    if _hopper_serves(x, weight):
        return KernelCall(_ragged_on_hopper, _ragged_by_xla)(x, weight, sizes)
    return _ragged_by_xla(x, weight, sizes)


def _ragged_by_xla(x: jax.Array, weight: jax.Array | Quantised, sizes: jax.Array) -> jax.Array:
    """Float32 is not rounded to TF32. On GPUs XLA multiplies all rows by every expert, from a copy of the weights."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    arguments = x, multiplied_out(weight), sizes, _DOTS
    product = lax.ragged_dot_general(*arguments, precision=precision, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def _hopper_serves(x: jax.Array, weight: jax.Array | Quantised) -> bool:
    """Whether JAX's own kernel for SM90 can take the product, and there are enough experts for it to pay."""
    if isinstance(weight, Quantised):
        return False
    count, out, width = weight.shape
    fits = x.dtype == weight.dtype == jnp.bfloat16 and width % _BLOCK_K == 0 and out % _BLOCK_N == 0
    return fits and count >= _MANY_EXPERTS and DeviceInfo.current().compute_capability == (9, 0)


@jax.jit  # layers of the same shapes share what is traced and lowered
def _ragged_on_hopper(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """JAX's Pallas kernel: it reads an expert's weights for its own rows alone, where they are."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    rows = x.shape[0]
    # The array holds whole tiles of shared memory's layout, which are 8 rows high, and at least one of the product.
    to = max(_BLOCK_M, -(-rows // 8) * 8)
    out = ragged_dot(
        jnp.pad(x, ((0, to - rows), (0, 0))),
        weight,
        group_sizes=sizes,
        block_m=_BLOCK_M,
        block_n=_BLOCK_N,
        block_k=_BLOCK_K,
        max_concurrent_steps=_STAGES,
        grid_block_n=8,
        transpose_rhs=True,
    )
    return out[:rows]

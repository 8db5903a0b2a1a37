"""A model's tensors by the names of transformers' modules: read from a checkpoint, or random."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_sparse_mla.serving.config import MoE
from jax_sparse_mla.serving.moe import DenseParams, MoEParams
from jax_sparse_mla.serving.quantised import Quantised, Weight, WeightFormat, join_rows

Layer = TypeVar("Layer")
Shape = tuple[int, ...]
# What products read and released checkpoints keep in bfloat16.
_NOT_QUANTISED = re.compile(r"compressor\.(indexer\.)?(kv|gate)_proj|weights_proj|index_kpool")


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Where a model's parameters come from."""

    # (name, shape, dtype, stored) → weight; the name without "model.". `stored`: as the checkpoint has it.
    get: Callable[[str, Shape, Any, bool], Any]
    dtype: Any  # of the weights that are not kept in float32
    prefix: str = ""  # of the names that follow
    read_layer: Callable[..., Any] | None = None  # what `layer` does; None reads

    def __call__(self, name: str, shape: Shape) -> jax.Array:
        """A weight in the model's dtype."""
        return self.get(self.prefix + name, shape, self.dtype, False)

    def stored(self, name: str, shape: Shape) -> Weight:
        """A weight that products read: in the model's dtype, or `Quantised` as it is stored."""
        return self.get(self.prefix + name, shape, self.dtype, True)

    def float32(self, name: str, shape: Shape) -> jax.Array:
        return self.get(self.prefix + name, shape, jnp.float32, False)

    def under(self, prefix: str) -> Tensors:
        """The tensors whose names go on with this prefix."""
        return dataclasses.replace(self, prefix=self.prefix + prefix)

    def layer(self, read: Callable[[Any, int, Tensors], Layer], config: Any, i: int, kind: Hashable) -> Layer:
        """`read(config, i, tensors)`, layer i; layers of one kind have the same shapes."""
        return read(config, i, self) if self.read_layer is None else self.read_layer(read, config, i, kind)

    def swiglu(self, width: int, hidden: int) -> DenseParams:
        gate_up = [self.stored(f"{name}.weight", (width, hidden)) for name in ("gate_proj", "up_proj")]
        return DenseParams(gate_up=join_rows(gate_up), down=self.stored("down_proj.weight", (hidden, width)))

    def moe(self, config: MoE, hidden: int, vocab_size: int | None) -> MoEParams:
        """A layer's experts; with a vocabulary's size those of a hash layer."""
        experts, shared = self.under("experts."), self.under("shared_experts.").swiglu(config.shared_width, hidden)
        table = vocab_size and self.get(f"{self.prefix}gate.tid2eid", (vocab_size, config.top_k), jnp.int32, False)
        return MoEParams(
            router=self("gate.weight", (config.num_experts, hidden)),
            gate_up=experts.stored("gate_up_proj", (config.num_experts, 2 * config.width, hidden)),
            down=experts.stored("down_proj", (config.num_experts, hidden, config.width)),
            shared_gate_up=shared.gate_up,
            shared_down=shared.down,
            experts_of_token=table,
        )


def shapes_of(read_params: Callable[[Tensors], Any]) -> tuple[dict[str, Shape], set[str]]:
    """The shape of each tensor that is read, by its name, and which are read as stored; nothing is allocated."""
    shapes: dict[str, Shape] = {}
    stored: set[str] = set()

    def get(name, shape, dtype, as_stored):
        shapes[name] = shape
        stored.update([name] * as_stored)
        return jnp.zeros(shape, dtype)

    jax.eval_shape(lambda: read_params(Tensors(get, jnp.bfloat16)))
    return shapes, stored


def random_params(
    read_params: Callable[[Tensors], Any],
    seed: int,
    dtype: Any,
    num_experts: int,
    shardings: Callable[[Any], Any] | None = None,
    experts: WeightFormat | None = None,
) -> Any:
    """Random parameters, made on the device: by jitted functions, one for each kind of layer.

    `shardings` makes those of a layer's arrays from the arrays' shapes; by default they are on one device. With a
    format of the experts, what products read is `Quantised` as in a released checkpoint, the rest of it FP8.
    """
    kinds = num_experts, experts
    first: dict[Hashable, int] = {}  # layer of its kind, whose program makes the others too
    placed: dict[Hashable, tuple] = {}  # of its kind, as `_layer_program` takes it

    def read_layer(read, config, i, kind):
        arguments = read, config, first.setdefault(kind, i), dtype, kinds
        if kind not in placed:
            leaves, tree = jax.tree.flatten(shardings and shardings(jax.eval_shape(_random_layer(*arguments), seed)))
            placed[kind] = tuple(leaves), tree
        return _layer_program(*arguments, *placed[kind])(_mixed(seed + jnp.uint32(1 + i)))

    seed = _mixed(jnp.uint32(seed))
    return read_params(dataclasses.replace(_random_tensors(seed, dtype, *kinds), read_layer=read_layer))


def _random_tensors(seed: jax.Array, dtype: Any, num_experts: int, experts: WeightFormat | None) -> Tensors:
    def get(name: str, shape: Shape, dtype: Any, as_stored: bool) -> Any:
        if experts is None or not as_stored or _NOT_QUANTISED.search(name):
            return _random(seed, name, shape, dtype, num_experts)
        form = experts if ".mlp.experts." in name else WeightFormat.FP8
        return _random_quantised(seed, name, shape, np.dtype(dtype), form)

    return Tensors(get, dtype)


def _random_layer(read, config, i, dtype, kinds) -> Callable[[jax.Array], Any]:
    return lambda seed: read(config, i, _random_tensors(seed, dtype, *kinds))


@functools.cache
def _layer_program(read, config, i, dtype, kinds, shardings, tree) -> Callable[[jax.Array], Any]:
    """The jitted function of a layer's seed; it is kept, so that a second model of the kind compiles nothing."""
    make = _random_layer(read, config, i, dtype, kinds)
    return jax.jit(make, out_shardings=jax.tree.unflatten(tree, shardings))


@functools.partial(jax.jit, static_argnames=("name", "shape", "dtype", "num_experts"))
def _random(seed: jax.Array, name: str, shape: Shape, dtype: Any, num_experts: int) -> jax.Array:
    seed = _mixed(seed ^ jnp.uint32(zlib.crc32(name.encode())))
    if _is_table(name):
        return jax.lax.top_k(_unit_variance(seed, (shape[0], num_experts)), shape[1])[1]
    mean, deviation = _distribution(name, shape)
    values = mean + deviation * _unit_variance(seed, shape) if deviation else jnp.full(shape, mean)
    return values.astype(dtype)


@functools.partial(jax.jit, static_argnames=("name", "shape", "dtype", "form"))
def _random_quantised(seed: jax.Array, name: str, shape: Shape, dtype: np.dtype, form: WeightFormat) -> Quantised:
    """Unit gain but for the rounding of the scale, one power of two for all."""
    seed = _mixed(seed ^ jnp.uint32(zlib.crc32(name.encode())))
    rows = math.gcd(form.rows, shape[-2])
    if form is WeightFormat.FP4:  # of random codes, whose mean square is 68.5 / 8
        values, size = _hashed(seed, (*shape[:-1], shape[-1] // 2)).astype(jnp.uint8), (68.5 / 8) ** 0.5
    else:
        size = 64.0
        values = jax.lax.bitcast_convert_type((size * _unit_variance(seed, shape)).astype(jnp.float8_e4m3fn), jnp.uint8)
    exponent = round(math.log2(_distribution(name, shape)[1] / size))
    groups = *shape[:-2], shape[-2] // rows, -(-shape[-1] // form.group)
    return Quantised(format=form, dtype=dtype, values=values, scales=jnp.full(groups, 127 + exponent, jnp.uint8))


def random_host_arrays(read_params: Callable[[Tensors], Any], seed: int, num_experts: int) -> dict[str, np.ndarray]:
    """Random tensors by name, as a checkpoint in bfloat16 has them, for small models: made on the host."""
    arrays = {}
    for name, shape in shapes_of(read_params)[0].items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if _is_table(name):
            arrays[name] = rng.random((shape[0], num_experts)).argsort(-1)[:, : shape[1]].astype(np.int32)
            continue
        mean, deviation = _distribution(name, shape)
        arrays[name] = (mean + deviation * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)
    return arrays


def _is_table(name: str) -> bool:
    """Whether a tensor names the experts of each token: different ones."""
    return name.endswith("tid2eid")


def _distribution(name: str, shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation of a random tensor: weights have unit gain, so that rows keep their size; norms are
    near 1; sinks and position biases are random too, so that code which ignores one of them gives another result."""
    if name.endswith("scale"):
        return 1.0, 0.0
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith(("sinks", "position_bias", "compress_ape", "embed_tokens.weight")):
        return 0.0, 1.0
    if name.endswith("dt_bias"):  # so that linear attention forgets within tens of tokens, and not at once
        return -4.0, 1.0
    return 0.0, 0.0 if name.endswith(("base", "bias")) else shape[-1] ** -0.5


def _unit_variance(seed: jax.Array, shape: Shape) -> jax.Array:
    """float32, uniform with variance 1: a hash of each value's place.

    jax.random would compile for a third of a second for each array on a CPU, and keep the bits of one beside it.
    """
    return ((_hashed(seed, shape) >> 8).astype(jnp.float32) * 2.0**-23 - 1) * 3**0.5


def _hashed(seed: jax.Array, shape: Shape) -> jax.Array:
    bits = jnp.broadcast_to(seed, shape)
    for axis in range(len(shape)):
        bits = _mixed(bits + jax.lax.broadcasted_iota(jnp.uint32, shape, axis))
    return bits


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which each bit depends on all (Chris Wellons, "Prospecting for hash functions")."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)

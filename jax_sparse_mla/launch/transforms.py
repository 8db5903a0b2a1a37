"""How a kernel, which XLA sees as one opaque call, behaves under JAX's transformations.

Where a program is lowered for CUDA the kernel runs, elsewhere the plain code that defines its result. Under `vmap` and
`shard_map`, and where it is differentiated, the rules here say what happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jax_sparse_mla import sharding

__all__ = ["differentiated_as", "on_cuda", "shared", "varying", "varying_alike"]


def shared(function: Callable[..., Any], shares: sharding.PartitionRule) -> Callable[..., Any]:
    """The function, which the partitioner cuts as `shares` allows.

    Under `vmap`, and where it is differentiated, it is the function alone: the partitioner sees what that is made of.
    """

    @functools.wraps(function)
    def either(*args):
        if not sharding.may_be_partitioned(args):
            return function(*args)
        cut = functools.partial(sharding.partitioned, function, shares)
        return differentiated_as(_batched_as(cut, function), function)(*args)

    return either


def on_cuda(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any, kernel_batches: bool = False) -> Any:
    """`dispatch` of a kernel of any kind, which the caller knows to be usable; under `jit`.

    A kernel that batches serves under `vmap` as well. Differentiated, it raises NotImplementedError, which names
    `kernel.__name__`.
    """

    plain = jax.jit(plain)  # traced once, for its shapes and as the other branch
    launched = functools.partial(varying, kernel, plain)
    guarded = _batched_as(launched, launched if kernel_batches else plain)
    return jax.lax.platform_dependent(*args, cuda=guarded, default=plain)


def varying(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)`, its results varying over the mesh axes of a `shard_map` that `plain(*args)` vary over.

    A custom call's results count as the same on all devices. Differentiated, it raises NotImplementedError.
    """
    shapes = jax.eval_shape(plain, *args)  # first: it names what is wrong with the arguments
    return jax.tree.map(_varying_like, _without_gradient(kernel)(*args), shapes)


def _batched_as(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and under `vmap` the other."""

    @jax.custom_batching.custom_vmap
    def guarded(*args):
        return function(*args)

    @guarded.def_vmap
    def batched(axis_size, in_batched, *batched_args):
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        out = jax.vmap(other, in_axes=axes, axis_size=axis_size)(*batched_args)
        return out, jax.tree.map(lambda _: True, out)

    return guarded


def differentiated_as(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the derivatives of the other."""
    called = jax.custom_jvp(function)

    @functools.partial(called.defjvp, symbolic_zeros=True)
    def derivative(primals, tangents):
        leaves, tree = jax.tree.flatten(primals)
        moving = {i: t for i, t in enumerate(jax.tree.leaves(tangents)) if not isinstance(t, SymbolicZero)}

        def of_moving(*moved):
            given = dict(zip(moving, moved))
            return other(*tree.unflatten([given.get(i, x) for i, x in enumerate(leaves)]))

        return jax.jvp(of_moving, tuple(leaves[i] for i in moving), tuple(moving.values()))

    return called


def _without_gradient(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which says what to do where one differentiates through it: a gradient needs a kernel of its own."""
    called = jax.custom_jvp(kernel)

    @called.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            f'{kernel.__name__}: its kernels have no gradient; differentiate with backend="reference"'
        )

    return called


def varying_alike(arrays: Any) -> Any:
    """The arrays of a pytree, all varying over the mesh axes of a `shard_map` that any of them varies over.

    A gradient of what was the same on all devices is summed over them here.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: _varying_over(x, axes), arrays)


def _varying_like(x: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    return _varying_over(x, shape.manual_axis_type.varying if shape.manual_axis_type else frozenset())


def _varying_over(x: jax.Array, wanted: frozenset[str]) -> jax.Array:
    axes = tuple(sorted(wanted - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, axes, to="varying") if axes else x

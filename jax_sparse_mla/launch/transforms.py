"""How a kernel, which XLA sees as one opaque call, behaves under JAX's transformations.

Where a program is lowered for CUDA the kernel runs, elsewhere the plain code that defines its result. Under `vmap` and
`shard_map`, and where it is differentiated, the rules here say what happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero

from jax_sparse_mla import sharding

# Whether the program that is being traced is a serving engine's: it runs on this process's GPU and is never exported,
# and its arguments fit. So it may call what this process alone has compiled, and has no plain code beside its kernels.
ENGINE_PROGRAM = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A kernel where the program is lowered for CUDA, elsewhere the plain code that defines its result.

    All of a kernel's rules stand here: what `vmap`, `shard_map`, a derivative and the partitioner make of the call.
    Differentiated, it raises NotImplementedError: a gradient needs a kernel of its own.

    Attributes:
      kernel: launches; the caller knows it to be usable.
      plain: the same function in plain JAX, which has rules of its own for all of them.
      name: of the function, for errors; by default the kernel's own.
      rule: which dimensions the partitioner may cut of the kernel's arrays; None: each device gets all of them.
      scope: what profilers and a program's text call the kernel.
      batches: whether the kernel has a batching rule; otherwise the plain code serves under `vmap`.
      replaceable: False where the kernel was asked for by name: it runs or fails.
    """

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    name: str | None = None
    rule: sharding.PartitionRule | None = None
    scope: str | None = None
    batches: bool = False
    replaceable: bool = True

    def __call__(self, *args: Any) -> Any:
        cut = self.rule is not None and sharding.may_be_partitioned(args)
        # The plain code is traced once, for its shapes and as the other branch.
        call = dataclasses.replace(self, plain=jax.jit(self.plain), rule=self.rule if cut else None)
        kernel = call._launched()
        if self.replaceable or cut:  # a call that the partitioner cuts has no batching rule
            whole = dataclasses.replace(call, rule=None)._launched()
            kernel = batched_as(kernel, whole if self.batches or not self.replaceable else call.plain)
        if ENGINE_PROGRAM.value or not self.replaceable:
            return kernel(*args)
        return jax.lax.platform_dependent(*args, cuda=kernel, default=call.plain)

    def _launched(self) -> Callable[..., Any]:
        launched = jax.custom_jvp(self._launch)
        launched.defjvp(self._refuse)
        return launched

    def _launch(self, *args: Any) -> Any:
        """The kernel's results, varying over the mesh axes of a `shard_map` that the plain code's vary over.

        Those of a custom call count as the same on all devices.
        """
        # It names what is wrong with the arguments, and takes most of the time that a program is traced.
        needed = not ENGINE_PROGRAM.value or any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(args))
        shapes = jax.eval_shape(self.plain, *args) if needed else None
        with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
            if self.rule is not None:
                results = sharding.partitioned(self.kernel, self.rule, *args)
            else:
                results = self.kernel(*args)
        return jax.tree.map(varying_like, results, shapes) if needed else results

    def _refuse(self, primals: tuple, tangents: tuple) -> NoReturn:
        name = self.name or self.kernel.__name__
        raise NotImplementedError(f'{name}: its kernels have no gradient; differentiate with backend="reference"')


def shared(function: Callable[..., Any], rule: sharding.PartitionRule) -> Callable[..., Any]:
    """The function, which the partitioner cuts as `rule` allows.

    Under `vmap`, and where it is differentiated, it is the function alone: the partitioner sees what that is made of.
    """

    @functools.wraps(function)
    def either(*args):
        if not sharding.may_be_partitioned(args):
            return function(*args)
        cut = functools.partial(sharding.partitioned, function, rule)
        return differentiated_as(batched_as(cut, function), function)(*args)

    return either


def batched_as(function: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and under `vmap` the other."""
    guarded = jax.custom_batching.custom_vmap(function)

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
            values = dict(zip(moving, moved))
            return other(*tree.unflatten([values.get(i, x) for i, x in enumerate(leaves)]))

        return jax.jvp(of_moving, tuple(leaves[i] for i in moving), tuple(moving.values()))

    return called


def varying_alike(arrays: Any) -> Any:
    """The arrays of a pytree, all varying over the mesh axes of a `shard_map` that any of them varies over.

    A gradient of what was the same on all devices is summed over them here.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: _varying_over(x, axes), arrays)


def varying_like(x: jax.Array, other: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """The array, varying over the mesh axes of a `shard_map` that the other one varies over."""
    axes = other.manual_axis_type if isinstance(other, jax.ShapeDtypeStruct) else jax.typeof(other).manual_axis_type
    return _varying_over(x, axes.varying if axes else frozenset())


def _varying_over(x: jax.Array, wanted: frozenset[str]) -> jax.Array:
    axes = tuple(sorted(wanted - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, axes, to="varying") if axes else x

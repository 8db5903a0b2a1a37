"""Arrays over explicit mesh axes: those of `jax.make_mesh` by default, where an array's type says how it is sharded.

XLA cannot see through a kernel, and JAX does not guess how the result of a gather is sharded, so functions whose rows
do not need each other run on each device's own rows, under `shard_map`. Over automatic axes call them under
`jax.shard_map` yourself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_sparse_mla._checks import ArgumentChecks


def is_sharded(*arrays: Any) -> bool:
    """Whether the type of one of these arrays, or pytrees of them, says that it is sharded."""
    return _mesh(arrays) is not None


def refuse_sharded(check: ArgumentChecks, **arrays: Any) -> None:
    """Refuses keys that are sharded over explicit axes: each device would need a copy of all of them."""
    for name, array in arrays.items():
        if is_sharded(array):
            raise check.fail(
                f"{name} is sharded over explicit mesh axes: replicate it, or call under jax.shard_map with each "
                "device's own keys and join the results with merge_attention"
            )


def axes_of(array: jax.Array, *dims: int) -> Sequence[Any]:
    """The mesh axes that these dimensions of an array are sharded over, each a name, a tuple of names or None."""
    spec = jax.typeof(array).sharding.spec
    return [spec[dim] if dim < len(spec) else None for dim in dims]


def on_own_rows(function: Callable[..., Any], arguments: tuple, in_specs: tuple, out_specs: Any, **static: Any) -> Any:
    """`function(*arguments, **static)` on each device's shares, which the specs describe as for `shard_map`.

    Arguments that are sharded in another way are resharded first. The function and what is static are hashable.
    """
    facts = {"function": function, "in_specs": in_specs, "out_specs": out_specs, "mesh": _mesh(arguments)}
    return _on_own_rows(arguments, **facts, static=tuple(static.items()))


@partial(jax.jit, static_argnames=("function", "in_specs", "out_specs", "mesh", "static"))
def _on_own_rows(arguments, *, function, in_specs, out_specs, mesh, static):
    arguments = tuple(_resharded(mesh, *pair) for pair in zip(arguments, in_specs))
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    specs = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": explicit}
    return jax.shard_map(partial(function, **dict(static)), mesh=mesh, **specs)(*arguments)


def replicated(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays with all of their rows on every device."""
    mesh = _mesh(arrays)
    return arrays if mesh is None else _replicated(arrays, mesh=mesh)


@partial(jax.jit, static_argnames="mesh")
def _replicated(arrays, *, mesh):
    return tuple(_resharded(mesh, x, PartitionSpec()) for x in arrays)


def _mesh(arrays: Any) -> Any:
    for leaf in jax.tree.leaves(arrays):
        sharding = jax.typeof(leaf).sharding
        if any(axes is not None for axes in sharding.spec):
            return sharding.mesh
    return None


def _resharded(mesh: Any, tree: Any, specs: Any) -> Any:
    """The tree with the specs of a prefix of it."""

    def reshard(spec: PartitionSpec, part: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), part)

    return jax.tree.map(reshard, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

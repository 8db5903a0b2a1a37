"""Arrays over explicit mesh axes: those of `jax.make_mesh` by default, where an array's type says how it is sharded.

XLA cannot see through a kernel, and JAX does not guess how the result of a gather is sharded, so functions whose rows
do not need each other run on each device's own rows, under `shard_map`. Over automatic axes call them under
`jax.shard_map` yourself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec


def is_sharded(*arrays: Any) -> bool:
    """Whether the type of one of these arrays, or pytrees of them, says that it is sharded."""
    return _mesh(arrays) is not None


def axes_of(array: jax.Array, *dims: int) -> Sequence[Any]:
    """The mesh axes that these dimensions of an array are sharded over, each a name, a tuple of names or None."""
    spec = jax.typeof(array).sharding.spec
    return [spec[dim] if dim < len(spec) else None for dim in dims]


def on_own_rows(function: Callable[..., Any], arguments: tuple, in_specs: tuple, out_specs: tuple) -> Any:
    """`function(*arguments)` on each device's shares, which `in_specs` and `out_specs` describe as for `shard_map`.

    Arguments that are sharded in another way are resharded first.
    """
    mesh = _mesh(arguments)
    arguments = tuple(_resharded(mesh, *pair) for pair in zip(arguments, in_specs))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*arguments)


def replicated(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays with all of their rows on every device."""
    mesh = _mesh(arrays)
    return arrays if mesh is None else tuple(_resharded(mesh, x, PartitionSpec()) for x in arrays)


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

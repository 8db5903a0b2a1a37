"""How the functions run on several devices.

XLA cannot see through a kernel, and JAX does not guess how the result of a gather is sharded. `PartitionRule` says of a
function which dimensions of its arrays may be cut. From it follow two of the three ways:

* Over explicit mesh axes (those of `jax.make_mesh` by default), where an array's type says how it is sharded,
  `by_rule` runs the function on each device's own shares, under `shard_map`.
* Over automatic axes the partitioner decides while it compiles. `partitioned` tells it what it may cut.
* Under `jax.shard_map` the caller has cut the arrays: a function runs as on one device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_sparse_mla.argument_checks import ArgumentChecks


class PartitionRule(NamedTuple):
    """Which dimensions of a function's arrays may be cut; hashable.

    Attributes:
      arguments, results: prefixes of the function's arguments and results, whose leaves are PartitionSpecs of names
        instead of mesh axes. Dimensions of one name are cut alike, others are whole on every device.
      across: None where the function of shares gives the result's shares; otherwise what does, where the dimension
        named `PAGES` is cut: `across(function, mesh axes of that dimension, *shares)`, with collectives where it needs
        them. For automatic axes only.
      summed: whether each device's results are terms of a sum over the dimensions that a result does not have. For
        automatic axes only.
    """

    arguments: tuple
    results: Any
    across: Callable[..., Any] | None = None
    summed: bool = False


PAGES = "pages"


def is_sharded(*arrays: Any) -> bool:
    """Whether the type of one of these arrays, or pytrees of them, says that it is sharded."""
    return _mesh(arrays) is not None


def refuse_sharded(check: ArgumentChecks, name: str, keys: Any) -> None:
    """Refuses keys that are sharded over explicit axes: each device would need a copy of all of them."""
    if is_sharded(keys):
        raise check.fail(
            f"{name} is sharded over explicit mesh axes: replicate it, or call under jax.shard_map with each "
            "device's own keys and join the results with merge_attention"
        )


def by_rule(function: Callable[..., Any], rule: PartitionRule, arguments: tuple, **static: Any) -> Any:
    """`function(*arguments, **static)` on each device's shares, over explicit axes.

    A dimension is cut as the first argument is that has it sharded; the others are resharded to that first. The
    function and what is static are hashable.
    """
    types = (jax.typeof(x).sharding.spec for x in jax.tree.leaves(arguments))
    cut = _cuts(zip(_leaves(rule.arguments, arguments), types))
    return _by_rule(
        arguments,
        function=function,
        in_specs=_specs(rule.arguments, cut),
        out_specs=_specs(rule.results, cut),
        mesh=_mesh(arguments),
        static=tuple(static.items()),
    )


@partial(jax.jit, static_argnames=("function", "in_specs", "out_specs", "mesh", "static"))
def _by_rule(arguments, *, function, in_specs, out_specs, mesh, static):
    arguments = tuple(_resharded(mesh, *pair) for pair in zip(arguments, in_specs))
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    function = partial(function, **dict(static))
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=explicit)(*arguments)


def replicated(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays with all of their rows on every device."""
    mesh = _mesh(arrays)
    return arrays if mesh is None else _replicated(arrays, mesh=mesh)


@partial(jax.jit, static_argnames="mesh")
def _replicated(arrays, *, mesh):
    return tuple(_resharded(mesh, x, PartitionSpec()) for x in arrays)


def may_be_partitioned(arguments: tuple) -> bool:
    """Whether the partitioner may have to cut these: not in a process of one device, and over automatic axes only."""
    if jax.device_count() == 1:
        return False
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments))]
    return all(kind == AxisType.Auto for mesh in meshes for kind in mesh.axis_types)


def partitioned(function: Callable[..., Any], rule: PartitionRule, *arguments: Any) -> Any:
    """`function(*arguments)`, of which the partitioner knows what it may cut. No gradient, no batching rule.

    A program for one device has the function itself.
    """
    # The compilation cache is keyed by program text, which does not contain this function, so we pass its digest.
    jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    program = str(jaxpr).encode() + b"".join(np.asarray(x).tobytes() for x in jaxpr.consts)
    digest = np.frombuffer(hashlib.sha256(program).digest(), np.int32)
    traced = jax.jit(function)  # holds the function's constants, which custom_partitioning refuses
    names = [PartitionSpec(), *_leaves(rule.arguments, arguments)], _leaves(rule.results, results)

    def of_mesh(mesh: Any, tree: Any, names: list, cut: dict) -> Any:
        return jax.tree.structure(tree).unflatten(NamedSharding(mesh, spec) for spec in _specs(names, cut))

    def partition(mesh: Any, arguments: tuple, results: Any) -> tuple:
        leaves = jax.tree.leaves((results, arguments))
        cut = _cuts(zip([*names[1], *names[0]], map(_spec, leaves)))

        def on_shares(_, *parts):
            if PAGES in cut and rule.across:
                return rule.across(traced, cut[PAGES], *parts)
            results = traced(*parts)
            return _summed(results, names[1], cut) if rule.summed else results

        return mesh, on_shares, of_mesh(mesh, results, names[1], cut), of_mesh(mesh, arguments, names[0], cut)

    def infer(mesh: Any, arguments: tuple, results: Any) -> Any:  # GSPMD asks; Shardy has the rule
        cut = _cuts(zip(names[0], map(_spec, jax.tree.leaves(arguments))))
        return of_mesh(mesh, results, names[1], cut)

    called = custom_partitioning(lambda _, *arguments: traced(*arguments))
    text, whole = _shardy_rule(names, (digest, *jax.tree.leaves(arguments)), jax.tree.leaves(results))
    called.def_partition(partition, infer, sharding_rule=text, need_replication_factors=whole)
    return called(jnp.asarray(digest), *arguments)


def _shardy_rule(names: tuple[list, list], *shapes: Iterable[Any]) -> tuple[str, tuple[str, ...]]:
    """Shardy's rule, such as "rows whole0, rows -> rows", and those of its names that must not be cut."""
    whole, sides = [], []
    for specs, arrays in zip(names, shapes):
        mapped = []
        for spec, x in zip(specs, arrays):
            dims = list(spec) + [None] * (x.ndim - len(spec))
            for i, name in enumerate(dims):
                if name is None:
                    whole.append(f"whole{len(whole)}")
                    dims[i] = whole[-1]
            mapped.append(" ".join(dims))
        sides.append(", ".join(mapped))
    return " -> ".join(sides), tuple(whole)


def _cuts(pairs: Iterable[tuple[PartitionSpec, PartitionSpec]]) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each name, by pairs of an array's names and its spec: those of the first array that has any."""
    cut, taken = {}, set()
    for names, spec in sorted(pairs, key=lambda pair: PAGES not in pair[0]):  # a cache is larger than what goes into it
        for name, axes in zip(names, spec):
            axes = (axes,) if isinstance(axes, str) else axes
            if name is not None and axes and name not in cut and taken.isdisjoint(axes):
                cut[name] = tuple(axes)
                taken.update(axes)
    return cut


def _summed(results: Any, names: list[PartitionSpec], cut: dict[str, tuple[str, ...]]) -> Any:
    """The results, each summed over the mesh axes of the dimensions that it does not have."""
    leaves, tree = jax.tree.flatten(results)
    absent = [[axis for name, axes in cut.items() if name not in spec for axis in axes] for spec in names]
    return tree.unflatten(jax.lax.psum(x, axes) if axes else x for x, axes in zip(leaves, absent, strict=True))


def _specs(names: Any, cut: dict[str, tuple[str, ...]]) -> Any:
    """The tree of names with their mesh axes instead."""
    return jax.tree.map(lambda spec: PartitionSpec(*(cut.get(name) for name in spec)), names, is_leaf=_is_spec)


def _leaves(prefix: Any, tree: Any) -> list[PartitionSpec]:
    """The prefix's leaf of each leaf of the tree."""
    return jax.tree.leaves(jax.tree.broadcast(prefix, tree, is_leaf=_is_spec), is_leaf=_is_spec)


def _spec(shape: jax.ShapeDtypeStruct) -> PartitionSpec:
    """The sharding of an array as the partitioner knows it; GSPMD may know nothing yet."""
    return getattr(shape.sharding, "spec", PartitionSpec())


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


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

    return jax.tree.map(reshard, specs, tree, is_leaf=_is_spec)

"""Arrays that hold the same of several layers, one layer after the other, and views of one layer.

A view keeps the whole array and a static number, the layer. XLA has no views of a donated buffer: kernels and plain
code add the layer's first row to what they read and write. In the body of a loop over layers the number is traced; only
plain code takes such a view.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
from jax import lax

from jax_sparse_mla._pytree import pytree_dataclass
from jax_sparse_mla.argument_checks import ArgumentChecks

Pool = TypeVar("Pool", bound="LayerPool")


class LayerPool:
    """The common part of caches and states of several layers; a dataclass with the two static fields below.

    Attributes:
      num_layers: how many layers its arrays hold.
      layer_index: the layer of a view; None for all of them.
    """

    num_layers: int
    layer_index: int | jax.Array | None
    _traced_from: type | None = None  # of a view of a traced number, the class without one

    def layer(self: Pool, index: int | jax.Array) -> Pool:
        """The view of layer `index`, static or a traced int32; of a view, the view of another layer.

        Raises:
          TypeError: index is neither. ValueError: there is no such layer.
        """
        if isinstance(index, jax.core.Tracer) and self.num_layers > 1:
            return self._as(_of_traced_layer(self._static_class), index)
        check = ArgumentChecks(f"{type(self).__name__}.layer")
        index = check.static_int("index", index, minimum=0)
        if index >= self.num_layers:
            raise check.fail(f"index must be below num_layers, {self.num_layers}, got {index}")
        return self._as(self._static_class, None if self.num_layers == 1 else index)

    def whole(self: Pool) -> Pool:
        """All layers: what a step returns, so that its state is the same pytree before and after."""
        return self._as(self._static_class, None)

    @property
    def _static_class(self: Pool) -> type[Pool]:
        return self._traced_from or type(self)

    def _as(self: Pool, cls: type[Pool], index: int | jax.Array | None) -> Pool:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return cls(**fields | {"layer_index": index})

    def first_of(self, rows: int) -> int | jax.Array:
        """The first row of the view's layer in an array that has so many rows a layer."""
        return 0 if self.layer_index is None else self.layer_index * rows

    def share_of(self, array: Any) -> Any:
        """The rows of the view's layer in an array, of JAX or torch."""
        rows = array.shape[0] // self.num_layers
        if self._traced_from:
            return lax.dynamic_slice_in_dim(array, self.first_of(rows), rows)
        return array if self.num_layers == 1 else array[self.first_of(rows) : self.first_of(rows) + rows]

    def alone(self: Pool) -> Pool:
        """The view's layer in arrays of its own; JAX copies them if there are more layers, torch has views."""
        if self.num_layers == 1:
            return self
        return dataclasses.replace(jax.tree.map(self.share_of, self.whole()), num_layers=1)

    def check_view(self, check: ArgumentChecks, name: str, rows: int) -> None:
        """Refuses several layers where one is wanted, and arrays whose rows cannot be those of the layers."""
        layers = check.static_int(f"{name}.num_layers", self.num_layers, minimum=1)
        index = None if self._traced_from else self.layer_index
        if index is not None and (layers == 1 or check.static_int(f"{name}.layer_index", index, minimum=0) >= layers):
            raise check.fail(f"{name}.layer_index must be None or one of several layers, got {index} of {layers}")
        if rows % layers:
            raise check.fail(f"{name} must have as many rows for each of its {layers} layers, got {rows}")
        if layers > 1 and self.layer_index is None:
            raise check.fail(f"{name} holds {layers} layers: pass the view of one, {name}.layer(i)")


@functools.cache
def _of_traced_layer(cls: type[Pool]) -> type[Pool]:
    """The class of the views whose number is an array, so that it is a leaf of the pytree."""
    fields = {"layer_index": None, "__annotations__": {"layer_index": "jax.Array | None"}, "_traced_from": cls}
    return pytree_dataclass(type(cls.__name__, (cls,), fields))


def layer_shape(check: ArgumentChecks, num_layers: int, rows: tuple[str, int], *row_shape: int) -> tuple[int, ...]:
    """The shape of an array with so many rows (a name and a number) for each layer."""
    num_layers = check.static_int("num_layers", num_layers, minimum=1)
    return num_layers * check.static_int(*rows, minimum=1), *row_shape

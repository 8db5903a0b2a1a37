"""Which rank keeps which token where several ranks share the keys of a request: decode context parallel.

Ranks take turns of `interleave` tokens. Each has its own tokens in their order, without gaps, and numbers them from 0:
its local positions. Everything here is for one rank, whose number may be traced, such as `lax.axis_index`. A rank gets
the tokens that its peers chose by `global_topk` under `jax.shard_map`, or by its engine's own all-gather between
`local_candidates` and `select_candidates`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_sparse_mla.argument_checks import FLOATS, INT32, ArgumentChecks
from jax_sparse_mla.indices.topk.api import OUTSIDE_KEY, ascending, ordered_keys, topk_positions
from jax_sparse_mla.launch.dispatch import dispatch
from jax_sparse_mla.launch.triton_call import launching
from jax_sparse_mla.sharding import PartitionRule

# One mesh axis, or several.
AxisName = Hashable
_LAST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Ownership:
    """The rule: position p lies on rank `(p // interleave) % size`.

    Source: vLLM's and SGLang's decode context parallel, whose default interleave is 1.

    Attributes:
      size: ranks. interleave: tokens of a turn.

    Raises:
      ValueError: one of them is below 1.
    """

    size: int
    interleave: int = 1

    def __post_init__(self):
        check = ArgumentChecks("Ownership")
        for field in dataclasses.fields(self):
            check.static_int(field.name, getattr(self, field.name), minimum=1)

    def owner(self, positions: jax.Array) -> jax.Array:
        """The ranks of these positions, int32 of any shape."""
        return positions // self.interleave % self.size

    def local(self, positions: jax.Array) -> jax.Array:
        """These positions as their own ranks count them."""
        turn = self.interleave * self.size
        return positions // turn * self.interleave + positions % self.interleave

    def position(self, local: jax.Array, rank: jax.Array | int) -> jax.Array:
        """The positions of a rank's local ones: the inverse of `local`."""
        turn, offset = local // self.interleave, local % self.interleave
        return (turn * self.size + rank) * self.interleave + offset

    def local_lengths(self, lengths: jax.Array, rank: jax.Array | int) -> jax.Array:
        """How many of the first `lengths` positions lie on the rank; a negative length means 0."""
        lengths = jnp.maximum(lengths, 0)
        full_turns = lengths // (self.interleave * self.size) * self.interleave
        last_turn = lengths - full_turns * self.size - rank * self.interleave
        return full_turns + jnp.clip(last_turn, 0, self.interleave)

    def own(self, positions: jax.Array, rank: jax.Array | int) -> jax.Array:
        """The rank's local positions of these; −1 for those of other ranks and for negative ones."""
        mine = (positions >= 0) & (self.owner(positions) == rank)
        return jnp.where(mine, self.local(positions), -1)

    def pack(
        self, positions: jax.Array, rank: jax.Array | int, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The rank's part of index lists: its local positions in their order, then −1, and how many there are.

        Args:
          positions: int32 `[..., k]`; negative ones are nobody's.
          lengths: int32 `[...]`, how many columns count; None counts all.

        Returns:
          int32 `[..., k]` and `[...]`.

        Raises:
          TypeError, ValueError: other dtypes, or lengths that are not one for each list.
        """
        check = ArgumentChecks("Ownership.pack")
        positions = check("positions", positions, (*[None] * (check.rank("positions", positions) - 1), "k"), INT32)
        lengths = check.optional("lengths", lengths, positions.shape[:-1], INT32)
        return pack_positions([Positions(self, _LAST, positions, lengths)], rank)[0]


class Positions(NamedTuple):
    """Index lists, and which rank has which position.

    Attributes:
      rule: the rank of each position.
      last: the last position that there is; those beyond it are nobody's, as negative ones are.
      positions, lengths: as in `Ownership.pack`.
    """

    rule: Ownership
    last: int
    positions: jax.Array
    lengths: jax.Array | None


def pack_positions(lists: Sequence[Positions], rank: jax.Array | int) -> list[tuple[jax.Array, jax.Array]]:
    """`Ownership.pack` of one or two lists for each row, by rules of one size; on a GPU in one launch."""
    results: list[Any] = [None] * len(lists)
    rules = [(rule, last) for rule, last, _, _ in lists]
    rows = [(_rows(x.positions), x.lengths if x.lengths is None else x.lengths.reshape(-1)) for x in lists]
    with_entries = [i for i, (positions, _) in enumerate(rows) if positions.size]
    empty = [i for i in range(len(rows)) if i not in with_entries]
    for chosen, function in ((with_entries, _pack_rows), (empty, _pack_rows_reference)):
        if chosen:
            chosen_rules = tuple(rules[i] for i in chosen)
            parts = function([rows[i] for i in chosen], jnp.asarray(rank, jnp.int32), chosen_rules)
            for i, (positions, counts) in zip(chosen, parts):
                shape = lists[i].positions.shape
                results[i] = positions.reshape(shape), counts.reshape(shape[:-1])
    return results


@partial(jax.jit, static_argnames="rules")
def _pack_rows(rows: list[tuple], rank: jax.Array, rules: tuple[tuple[Ownership, int], ...]) -> list[tuple]:
    lists = tuple((rule.interleave, last, lengths is not None) for (rule, last), (_, lengths) in zip(rules, rows))

    def kernel(rows, rank):
        launch = launching("indices.triton_ownership.pack", size=rules[0][0].size, lists=lists)
        results = iter(launch(rank, rows))
        return list(zip(results, results))

    plain = partial(_pack_rows_reference, rules=rules)
    return dispatch(kernel, plain, rows, rank, rule=PartitionRule((P("rows"), P()), P("rows")))


def _pack_rows_reference(rows: list[tuple], rank: jax.Array, rules: tuple[tuple[Ownership, int], ...]) -> list[tuple]:
    """`pack_positions` in plain JAX, of `[rows, k]`."""
    results = []
    for (positions, lengths), (rule, last) in zip(rows, rules):
        columns = jnp.arange(positions.shape[-1], dtype=jnp.int32)
        exists = positions <= last
        if lengths is not None:
            exists &= columns < lengths[:, None]
        results.append(packed(rule.own(jnp.where(exists, positions, -1), rank)))
    return results


def packed(indices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index lists int32 `[..., k]` with the entries that are not negative in front, in their order, then −1; and their
    numbers `[...]`.

    Kernels read a list up to its length: holes would cost what keys cost.
    """
    flat = _rows(indices)
    columns, valid = jnp.arange(flat.shape[1], dtype=jnp.int32), flat >= 0
    count = jnp.cumsum(valid, axis=-1, dtype=jnp.int32)
    # Where each column goes: a permutation, for what is dropped goes to the end.
    column = jnp.where(valid, count - 1, count[:, -1:] + columns - count)
    row = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    moved = jnp.full_like(flat, -1).at[row, column].set(jnp.where(valid, flat, -1), unique_indices=True)
    return moved.reshape(indices.shape), jnp.sum(valid, axis=-1, dtype=jnp.int32).reshape(indices.shape[:-1])


def _rows(lists: jax.Array) -> jax.Array:
    *leading, k = lists.shape
    return lists.reshape(math.prod(leading), k)


def local_candidates(
    logits: jax.Array,
    lengths: jax.Array,
    topk: int,
    ownership: Ownership,
    rank: jax.Array | int,
    row_starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A rank's candidates for the top-k of all ranks' positions: the best of its own.

    Args:
      logits: float32 or bfloat16 `[rows, columns]` of the rank's local positions.
      lengths: int32 `[rows]`, positions of each row, those of all ranks together.
      topk: how many positions are chosen (static).
      row_starts: as in `topk_positions`, of the rank's columns.

    Returns:
      keys int32 `[rows, topk]`, in the order of the logits, and positions int32 `[rows, topk]` as all ranks count
      them, −1 where the rank has fewer.

    Raises:
      TypeError, ValueError: as `topk_positions`.
    """
    check = ArgumentChecks("local_candidates")
    logits = check("logits", logits, ("rows", "columns"), FLOATS)
    lengths = check("lengths", lengths, ("rows",), INT32)
    chosen = topk_positions(logits, ownership.local_lengths(lengths, rank), topk, row_starts)
    column = chosen if row_starts is None else chosen + row_starts[:, None]
    valid = (chosen >= 0) & (column >= 0) & (column < logits.shape[1])
    if logits.shape[1] == 0:
        return jnp.full_like(chosen, OUTSIDE_KEY), jnp.full_like(chosen, -1)
    values = jnp.take_along_axis(logits, jnp.where(valid, column, 0), axis=1)
    keys = jnp.where(valid, ordered_keys(values), OUTSIDE_KEY)
    return keys, jnp.where(valid, ownership.position(chosen, rank), -1)


def select_candidates(keys: jax.Array, positions: jax.Array, lengths: jax.Array, topk: int) -> jax.Array:
    """`topk_positions` of the logits of all ranks, out of what each rank offers.

    Args:
      keys, positions: int32 `[ranks, rows, topk]`, `local_candidates` of each rank.
      lengths: int32 `[rows]`, as there.

    Returns:
      int32 `[rows, topk]`: positions in ascending order, then −1; to the bit those of one device.
    """
    check = ArgumentChecks("select_candidates")
    keys = check("keys", keys, ("ranks", "rows", topk), INT32)
    positions = check("positions", positions, ("ranks", "rows", topk), INT32)
    lengths = jnp.maximum(check("lengths", lengths, ("rows",), INT32), 0)[:, None]
    nobody = jnp.iinfo(jnp.int32).max
    # The best key first, of equal ones the lowest position; what no rank has is last of all.
    order = ~keys, jnp.where(positions < 0, nobody, positions)
    _, best = lax.sort([jnp.moveaxis(x, 0, 1).reshape(len(lengths), -1) for x in order], dimension=1, num_keys=2)
    best = best[:, :topk]
    columns = jnp.arange(topk, dtype=jnp.int32)
    everything = jnp.where(columns < lengths, columns, -1)
    return jnp.where(lengths <= topk, everything, ascending(jnp.where(best == nobody, -1, best)))


def global_topk(
    logits: jax.Array,
    lengths: jax.Array,
    topk: int,
    *,
    ownership: Ownership,
    axis_name: AxisName,
    row_starts: jax.Array | None = None,
) -> jax.Array:
    """`topk_positions` over index keys that the devices of a mesh axis share, under `jax.shard_map`.

    Each device gathers `2 · topk` integers a row of every other one. Positions stay integers, so that they are exact at
    any length, and −0.0 equals +0.0, as in `topk_positions`.

    Args:
      logits: float32 or bfloat16 `[rows, columns]` of the device's local positions.
      lengths, topk, row_starts: as in `local_candidates`; lengths are the same on every device.
      axis_name: the mesh axis. ownership: the rank of each position; its size is the axis'.

    Returns:
      int32 `[rows, topk]`, the same on every device: `Ownership.pack` makes each device's part of it.

    Raises:
      ValueError: an axis of another size, and what `local_candidates` raises.
    """
    if (size := lax.axis_size(axis_name)) != ownership.size:
        raise ValueError(f"global_topk: axis {axis_name!r} has {size} devices, the rule has {ownership.size} ranks")
    offered = local_candidates(logits, lengths, topk, ownership, lax.axis_index(axis_name), row_starts)
    keys, positions = lax.all_gather(jnp.stack(offered), axis_name, axis=1)
    return select_candidates(keys, positions, lengths, topk)

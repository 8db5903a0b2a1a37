"""The split-KV schedule of a decode call, built once a step and reused by every layer of the same compress ratio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse_mla._checks import INT32, ArgumentChecks
from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.attention.route import DeviceInfo
from jax_sparse_mla.metadata.schedules import FlashmlaCall, paged_mqa_schedule, step_schedules

# FlashMLA's decode gives each 64 heads a thread block of its own; the blocks of one row work side by side.
_HEADS_PER_BLOCK = 64


class DecodeShape(NamedTuple):
    """The static shape of a decode call: what selects a schedule's size."""

    batch: int
    q_len: int
    num_heads: int
    topk: int
    extra_topk: int = 0


@pytree_dataclass
class DecodeSchedule:
    """How `shape`'s rows (batch · q_len, one request each) are split over the device.

    Attributes:
      tile_scheduler_metadata: int32 `[num_sm_parts, 8]`, see `flashmla_schedule`.
      num_splits: int32 `[batch · q_len + 1]`.
      shape: the calls that it fits (static).
    """

    tile_scheduler_metadata: jax.Array
    num_splits: jax.Array
    shape: DecodeShape = static()


def decode_schedule(
    shape: tuple[int, ...],
    topk_length: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    *,
    device: DeviceInfo | None = None,
) -> DecodeSchedule:
    """Splits the rows of a decode call over the device's multiprocessors, with no cap on the batch.

    Args:
      shape: `(batch, q_len, num_heads, topk)` or `(batch, q_len, num_heads, topk, extra_topk)`, see `DecodeShape`.
      topk_length, extra_topk_length: int32 `[batch]` or `[batch, q_len]`, as given to `sparse_mla_decode`; None
        stands for all columns.
      device: the current one by default.

    Returns:
      A schedule for `sparse_mla_decode(..., schedule=...)`, valid for calls of this shape with these lengths.

    Raises:
      TypeError, ValueError: a shape of another length, with negative sizes or without heads, lengths of another
        shape or dtype, or extra lengths without `extra_topk`.
    """
    return decode_schedules([(shape, topk_length, extra_topk_length)], device=device, function="decode_schedule")[0][0]


def decode_schedules(
    calls: Sequence[tuple],
    context_lens: jax.Array | None = None,
    *,
    device: DeviceInfo | None = None,
    function: str = "decode_schedules",
) -> tuple[list[DecodeSchedule], jax.Array | None]:
    """All schedules of a step, on a GPU in one launch: one for each kind of layer, and the indexer's.

    Args:
      calls: `(shape, topk_length, extra_topk_length)` of each, as `decode_schedule`; all of one batch, q_len and
        number of heads.
      context_lens: int32 `[rows]`, keys of each row of the index logits; None makes no schedule for the indexer.
      device: the current one by default.
      function: named by errors (static).

    Returns:
      The schedules of the calls, and the indexer's (`paged_mqa_schedule`) or None.

    Raises:
      TypeError, ValueError: see `decode_schedule`; calls that differ in batch, q_len or heads.
    """
    check = ArgumentChecks(function)
    device = DeviceInfo.current() if device is None else device
    if not isinstance(device, DeviceInfo):
        raise TypeError(f"{check.function}: device must be a DeviceInfo, got {type(device).__name__}")
    if not calls:
        raise check.fail("calls must be at least one")
    shapes, lengths = [], []
    for shape, topk_length, extra_topk_length in calls:
        shapes.append(_check_shape(check, shape))
        if shapes[-1][:3] != shapes[0][:3]:
            raise check.fail(f"calls must agree in batch, q_len and heads, got {shapes[0]} and {shapes[-1]}")
        main = per_row_lengths(check, "topk_length", topk_length, shapes[-1], flat=True)
        extra = per_row_lengths(check, "extra_topk_length", extra_topk_length, shapes[-1], flat=True)
        if extra is not None and not shapes[-1].extra_topk:
            raise check.fail(f"extra_topk_length needs a shape with extra_topk, got {tuple(shapes[-1])}")
        lengths.append(FlashmlaCall(main, shapes[-1].topk, extra, shapes[-1].extra_topk))
    num_sms = max(device.sm_count, 1)  # a CPU has none
    parts = num_sm_parts(device, shapes[0].num_heads)
    rows = shapes[0].batch * shapes[0].q_len
    if rows == 0:  # an IDLE step: every partition begins at request 0, one past the last, and so is idle
        idle = jnp.zeros((parts, 8), jnp.int32), jnp.zeros((1,), jnp.int32)
        made, indexer = [idle] * len(shapes), None
        if context_lens is not None:
            indexer = paged_mqa_schedule(context_lens, num_sms=num_sms)
    else:
        made, indexer = step_schedules(
            lengths, context_lens, batch=rows, num_sm_parts=parts, num_sms=num_sms, function=function
        )
    return [
        DecodeSchedule(tile_scheduler_metadata=metadata, num_splits=splits, shape=shape)
        for (metadata, splits), shape in zip(made, shapes)
    ], indexer


def num_sm_parts(device: DeviceInfo, num_heads: int) -> int:
    """Partitions that FlashMLA's decode runs on this device: the rows of `tile_scheduler_metadata`."""
    return max(device.sm_count // -(-num_heads // _HEADS_PER_BLOCK), 1)


def _check_shape(check: ArgumentChecks, shape: tuple[int, ...]) -> DecodeShape:
    if not isinstance(shape, tuple) or len(shape) not in (4, 5):
        raise check.fail(f"shape must be (batch, q_len, num_heads, topk[, extra_topk]), got {shape!r}")
    shape = DecodeShape(*shape)
    for name, value in zip(shape._fields, shape):
        check.static_int(f"shape.{name}", value, minimum=1 if name == "num_heads" else 0)
    return shape


def per_row_lengths(
    check: ArgumentChecks, name: str, lengths: jax.Array | None, shape: DecodeShape, *, flat: bool = False
) -> jax.Array | None:
    """int32 lengths `[batch]` or `[batch, q_len]`, spread to `[batch, q_len]` (or, flat, to `[batch · q_len]`)."""
    if lengths is None:
        return None
    if check.rank(name, lengths) == 1:
        lengths = check(name, lengths, (shape.batch,), INT32)[:, None]
    else:
        lengths = check(name, lengths, (shape.batch, shape.q_len), INT32)
    lengths = jnp.broadcast_to(lengths, (shape.batch, shape.q_len))
    return lengths.reshape(-1) if flat else lengths


def check_schedule(check: ArgumentChecks, schedule: DecodeSchedule | None, shape: DecodeShape) -> None:
    """Refuses a schedule that was built for another call shape."""
    if schedule is None:
        return
    if not isinstance(schedule, DecodeSchedule):
        raise TypeError(f"{check.function}: schedule must come from decode_schedule, got {type(schedule).__name__}")
    if schedule.shape != shape:
        raise check.fail(f"schedule was built for {schedule.shape}, this call is {shape}")
    check("schedule.tile_scheduler_metadata", schedule.tile_scheduler_metadata, (None, 8), INT32)
    check("schedule.num_splits", schedule.num_splits, (shape.batch * shape.q_len + 1,), INT32)

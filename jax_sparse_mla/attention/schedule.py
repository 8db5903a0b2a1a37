"""The split-KV schedule of a decode call, built once a step and reused by every layer of the same compress ratio."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_sparse_mla._checks import INT32, ArgumentChecks
from jax_sparse_mla._pytree import pytree_dataclass, static
from jax_sparse_mla.attention.route import DeviceInfo
from jax_sparse_mla.metadata.schedules import flashmla_schedule

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
    check = ArgumentChecks("decode_schedule")
    if not isinstance(shape, tuple) or len(shape) not in (4, 5):
        raise check.fail(f"shape must be (batch, q_len, num_heads, topk[, extra_topk]), got {shape!r}")
    shape = DecodeShape(*shape)
    for name, value in zip(shape._fields, shape):
        check.static_int(f"shape.{name}", value, minimum=1 if name == "num_heads" else 0)
    device = DeviceInfo.current() if device is None else device
    if not isinstance(device, DeviceInfo):
        raise TypeError(f"{check.function}: device must be a DeviceInfo, got {type(device).__name__}")
    parts = max(device.sm_count // -(-shape.num_heads // _HEADS_PER_BLOCK), 1)
    lengths = per_row_lengths(check, "topk_length", topk_length, shape, flat=True)
    extra_lengths = per_row_lengths(check, "extra_topk_length", extra_topk_length, shape, flat=True)
    if extra_lengths is not None and not shape.extra_topk:
        raise check.fail(f"extra_topk_length needs a shape with extra_topk, got {tuple(shape)}")
    rows = shape.batch * shape.q_len
    if rows == 0:  # an IDLE step: every partition begins at request 0, one past the last, and so is idle
        metadata, splits = jnp.zeros((parts, 8), jnp.int32), jnp.zeros((1,), jnp.int32)
    else:
        metadata, splits = flashmla_schedule(
            lengths,
            batch=rows,
            topk=shape.topk,
            extra_topk=shape.extra_topk,
            extra_topk_length=extra_lengths,
            num_sm_parts=parts,
        )
    return DecodeSchedule(tile_scheduler_metadata=metadata, num_splits=splits, shape=shape)


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

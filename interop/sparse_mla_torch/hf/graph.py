"""A step of a fixed number of rows in a CUDA graph: captured once for each bucket, replayed with other inputs.

The step is a function of static buffers. What the host puts into a bucket's buffer is all that changes from step to
step; caches and tables stay where they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import torch

from jax_sparse_mla.serving.comparison import MAX_LOGIT_DIFFERENCE

# Runs a step once more if need be, captures it, and returns its replay and what that writes into.
Capture: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]

# So many replays of a bucket are compared with eager steps: one at the inputs of the capture, one at others. Logits are
# compared, as those of two backends are; caches, which the eager step has just written, are not.
CHECKED_REPLAYS = 2
_ALIGNED = 8  # a bucket's rows of inputs are 32 bytes apart, or more: kernels are compiled for one alignment

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Bucket:
    """A number of rows and a table width.

    Attributes:
      inputs: int32 `[fields, rows]`, read by the step.
      replay, logits: of its graph, `[rows, vocab]`; None before the capture.
      unchecked: replays yet to be compared with eager steps.
    """

    inputs: torch.Tensor
    replay: Callable[[], None] | None = None
    logits: torch.Tensor | None = None
    unchecked: int = CHECKED_REPLAYS


class StepGraph:
    """Runs a step, from a CUDA graph where it can be captured.

    A bucket's first step runs eagerly, is captured, and is replayed: its logits must be the eager step's, and so must
    those of the next step. A step thus runs several times over the same inputs: its writes must be the same ones. Where
    the capture fails or logits differ, this step and all that follow are eager ones.

    Args:
      step: `step(inputs, width) -> logits [rows, vocab]`, of static inputs int32 `[fields, rows]` and a table width; it
        makes no tensor on the host and waits for none.
      max_rows: rows of the largest bucket; the others have powers of two.
      device: of the buffers.
      capture: `cuda_capture` by default.

    Attributes:
      reason: why steps are eager; None while they come from a graph.
      steps, replays: how many there were, and how many whose logits a graph gave.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor, int], torch.Tensor],
        *,
        max_rows: int,
        device: torch.device,
        capture: Capture | None = None,
    ):
        self._step, self._max_rows, self._device = step, max_rows, device
        self._capture = capture or cuda_capture
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self.reason: str | None = None
        self.steps = self.replays = 0

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """(rows, table width) of the buckets that steps have had."""
        return sorted(self._buckets)

    def __call__(self, inputs: np.ndarray, width: int) -> torch.Tensor:
        """Runs a step.

        Args:
          inputs: int32 `[fields, n]`; n is at most `max_rows`. Rows behind them are zeros.
          width: the table width.

        Returns:
          logits `[n, vocab]`, good until the next step.
        """
        n = inputs.shape[1]
        self.steps += 1
        bucket = self._bucket(inputs, width)
        if bucket.replay is not None and not bucket.unchecked:
            bucket.replay()
            self.replays += 1
            return bucket.logits[:n]
        logits = self._step(bucket.inputs, width)[:n]
        if self.reason is None:
            self._try(bucket, width, logits)
        return logits

    def _bucket(self, inputs: np.ndarray, width: int) -> _Bucket:
        fields, n = inputs.shape
        rows = min(1 << (n - 1).bit_length(), self._max_rows)
        if (rows, width) not in self._buckets:
            columns = -(-rows // _ALIGNED) * _ALIGNED
            whole = torch.zeros(fields, columns, dtype=torch.int32, device=self._device)
            self._buckets[rows, width] = _Bucket(whole[:, :rows])
        bucket, padded = self._buckets[rows, width], np.zeros((fields, rows), np.int32)
        padded[:, :n] = inputs
        bucket.inputs.copy_(torch.from_numpy(padded))
        return bucket

    def _try(self, bucket: _Bucket, width: int, logits: torch.Tensor) -> None:
        """Captures the step if that has not been done, and compares a replay with the eager step's logits."""
        try:
            if bucket.replay is None:
                with torch.cuda.device_of(bucket.inputs):
                    bucket.replay, bucket.logits = self._capture(lambda: self._step(bucket.inputs, width))
            bucket.logits.fill_(float("nan"))  # what a replay leaves alone
            bucket.replay()
        except RuntimeError as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            return self._give_up(f"the step cannot be captured: {why[0]}")
        expected, got = logits.float(), bucket.logits[: len(logits)].float()
        difference = float((got - expected).abs().max() / expected.abs().max())
        if not difference <= MAX_LOGIT_DIFFERENCE:
            return self._give_up(f"a replay's logits differ from an eager step's by {difference:.3g} of the largest")
        bucket.unchecked -= 1

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        for bucket in self._buckets.values():
            bucket.replay = bucket.logits = None
        log.warning("decode steps are eager: %s", reason)


def cuda_capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Captures `run`, which has run before on the current stream.

    First it runs on the capture's stream, and whatever waits for the GPU raises there: a capture that breaks would
    leave torch's allocator and generators behind as they are within one.

    Raises:
      RuntimeError: something that a graph cannot hold. What torch keeps of captures is put right again.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side), _waits_raise():
            run()
    finally:
        current.wait_stream(side)
    generator = torch.cuda.default_generators[current.device_index]
    state, pool, graph = generator.clone_state(), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    try:
        # In the default mode a capture breaks as soon as XLA's monitors ask what its streams are doing.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            logits = run()
    except BaseException:
        torch.cuda.set_stream(current)  # torch leaves the capture's stream only where the capture ends well
        generator.graphsafe_set_state(state)
        with contextlib.suppress(RuntimeError, AttributeError):  # it has ended, and is the graph's
            torch._C._cuda_endAllocateToPool(current.device_index, pool)
            torch._C._cuda_releasePool(current.device_index, pool)
        raise
    return graph.replay, logits


@contextlib.contextmanager
def _waits_raise() -> Iterator[None]:
    """Within, torch raises a RuntimeError where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

"""The attention backends, and those of its gradient: one record each, and nothing about a backend is said elsewhere.

A new backend is a record here, its functions in `attention/backends/<name>.py` (JAX) and, where torch calls it too, in
`sparse_mla_torch/attention/backends/<name>.py`. The attention functions, `plan_attention`, torch and
`jax-sparse-mla doctor` read the records. Plain data: no array, no kernel and no framework is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax_sparse_mla import backend as shared
from jax_sparse_mla.backend import SM80_AND_UP, SM90, SM100, SM120, TRITON, TRITON_LAUNCHER, TVM_FFI, Need
from jax_sparse_mla.device import DeviceInfo
from jax_sparse_mla.kv_cache.layout import KVLayout

PHASES = ("decode", "prefill")


@dataclasses.dataclass(frozen=True)
class Call:
    """An attention call as decisions see it; plain data.

    Attributes:
      phase: "decode" (attends to paged caches) or "prefill" (attends to a bf16 workspace).
      layout: of the cached rows, or of the workspace's (`kv_cache.layout.workspace_layout`).
      num_q_tokens, num_heads: query rows, and heads on this rank.
      device: what will run the call.
      topk: index columns of both tables together; None where they are not known.
      dtype: of the queries (and of the workspace).
      chunk: whether the rows are a prefill chunk's, so that a workspace of what they see could be gathered instead.
      batch_invariant: whether a row's result must not depend on the other rows.
      extra_layout: of the second cache's rows; None: `layout`, or there is no second one.
      extra_page_size: tokens of a page of the second cache; None where it is not known, or there is none.
    """

    phase: str
    layout: KVLayout
    num_q_tokens: int
    num_heads: int
    device: DeviceInfo
    topk: int | None = None
    dtype: str = "bfloat16"
    chunk: bool = False
    batch_invariant: bool = False
    extra_layout: KVLayout | None = None
    extra_page_size: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(shared.Backend):
    """The record of an attention backend.

    Attributes:
      module: has the functions `decode(q, tables, attn_sink, *, softmax_scale, assume_valid_indices)`, of one or two
        `IndexTable`s, and `prefill(q, kv, indices, topk_length, attn_sink, *, softmax_scale)`, as
        `attention/reference.py`; no call reaches them that has no row, no head or no key to read. Both take
        `batch_invariant` too, which is False in the phases of `batch_dependent`.
      layouts: the row layouts that its kernels were written for, by phase; without a phase it has no such function.
        None: any layout.
      dtypes: of the queries.
      max_heads: the most query heads; None: any number.
      batches: the phases whose kernel has a batching rule; under `vmap` the reference stands in for the others.
      gradients: the phases that have one. A kernel's is that of `attention/gradient.py`, whichever kernel made the
        forward pass.
      batch_dependent: by phase, why a row's result depends on the other rows whatever the call asks for.
      most_decode_rows: query rows up to which a device's paged decode is the better kernel; None: no such limit.
      torch: the phases that torch calls too.
    """

    module: str
    layouts: Mapping[str, tuple[KVLayout, ...]] | None
    dtypes: tuple[str, ...] = ("bfloat16",)
    max_heads: int | None = None
    batches: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    batch_dependent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    most_decode_rows: Callable[[DeviceInfo], int] | None = None
    torch: tuple[str, ...] = ()

    def function(self, phase: str) -> Callable:
        """The JAX function of a phase."""
        return shared.load(f"{self.module}:{phase}")

    def refuses(self, call: Call) -> list[str | None]:
        reasons = [self._wrong_layout(call)]
        if call.dtype not in self.dtypes:
            reasons.append(f"{call.dtype} inputs are served by the reference only")
        if self.max_heads is not None and call.num_heads > self.max_heads:
            reasons.append(f"its kernels take up to {self.max_heads} heads, got {call.num_heads}")
        return [*reasons, self.batch_dependent.get(call.phase) if call.batch_invariant else None]

    def _wrong_layout(self, call: Call) -> str | None:
        if self.layouts is None:
            return None
        known = self.layouts.get(call.phase, ())
        if not known:
            return f"it has no {call.phase}, only {' and '.join(self.layouts)}"
        unknown = [layout for layout in (call.layout, call.extra_layout) if layout and layout.read_as not in known]
        if not unknown:
            return None
        names = " and ".join(layout.name for layout in known)
        return f"its {call.phase} reads rows of {names}, got {unknown[0].name} ({unknown[0].kind})"


def _flashmla_rows(device: DeviceInfo) -> int:
    """Query rows up to which FlashMLA's own schedule kernel fits in a block's shared memory.

    It keeps 5 int32 per row and one more: `4 · (5 · rows + 1) ≤ shared_memory_optin`. 11,673 at 228 KiB, the
    threshold that SGLang uses; 11,622 on an H200 (227 KiB).
    """
    return (device.shared_memory_optin // 4 - 1) // 5


_FP8 = (KVLayout.V32_FP8, KVLayout.V4_FP8)
_BF16 = (KVLayout.V32_BF16, KVLayout.V4_BF16)  # a workspace's rows too
_V41 = (KVLayout.V41_FP8, KVLayout.V41_FP8_SPLIT, KVLayout.V41_FP4, KVLayout.V41_FP4_SPLIT)
_NOPE = (KVLayout.NOPE_BF16, KVLayout.NOPE_FP8, KVLayout.NOPE_FP8_TENSOR)

_RECORDS = (
    Backend(
        name="hopper",
        module="jax_sparse_mla.attention.backends.hopper",
        layouts={"decode": (*_FP8, *_V41, *_BF16, KVLayout.NOPE_BF16), "prefill": _BF16},
        devices=(SM90,),
        device_names="SM90",
        needs=(
            dataclasses.replace(TVM_FFI, phases=("decode",)),
            Need(("absl-py",), ("absl",), frameworks=("jax",), phases=("prefill",)),  # Mosaic GPU imports it
        ),
        binaries={"decode": ("sparse_decode", "90a")},
        unready="jax_sparse_mla.attention.hopper.prefill.alone:unready",
        batches=("prefill",),
        gradients=("prefill",),
        torch=PHASES,
    ),
    Backend(
        name="flashmla",
        module="jax_sparse_mla.attention.backends.flashmla",
        layouts={"decode": _FP8, "prefill": _BF16},
        devices=(SM90, SM100),
        device_names="SM90 and SM100",
        max_heads=128,
        needs=(
            Need(("sgl-flash-mla", "sglang-kernel"), ("flash_mla", "sgl_kernel")),
            Need(("torch",), ("torch",)),
            dataclasses.replace(TRITON, frameworks=("torch",)),  # our sanitiser goes before its operators
        ),
        unready="jax_sparse_mla.attention.backends.flashmla:unready",
        gradients=("prefill",),
        batch_dependent={"decode": "its split of a row's keys depends on the batch"},
        most_decode_rows=_flashmla_rows,
        torch=PHASES,
    ),
    Backend(
        name="flashinfer",
        module="jax_sparse_mla.attention.backends.flashinfer",
        layouts={"decode": _FP8},
        devices=(SM120,),
        device_names="SM120 and SM121",
        max_heads=128,
        batch_dependent={"decode": "its kernel and its split of a row's keys depend on the batch"},
        needs=(Need(("flashinfer-python",), ("flashinfer",)), TVM_FFI),
        unready="jax_sparse_mla.attention.backends.flashinfer:unready",
    ),
    Backend(
        name="triton",
        module="jax_sparse_mla.attention.backends.triton",
        layouts={"decode": (*_FP8, *_BF16, *_V41, *_NOPE), "prefill": _BF16},
        devices=(SM80_AND_UP,),
        device_names="SM80 and up",
        needs=(TRITON, TRITON_LAUNCHER),
        unready="jax_sparse_mla.launch.dispatch:unready",
        gradients=("prefill",),
        torch=PHASES,
    ),
    Backend(
        name="reference",
        module="jax_sparse_mla.attention.reference",
        layouts=None,
        dtypes=("bfloat16", "float32"),
        batches=PHASES,
        gradients=PHASES,
        torch=PHASES,
    ),
)

# Preferred first; `route` has what measurements say otherwise.
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _RECORDS}


@dataclasses.dataclass(frozen=True)
class GradientCall:
    """A gradient of prefill as decisions see it; plain data.

    Attributes:
      device: what will run it.
      qk_dim: values of a key.
      deterministic: whether dkv must repeat to the bit.
    """

    device: DeviceInfo
    qk_dim: int
    deterministic: bool


class GradientArrays(NamedTuple):
    """The arrays that a gradient kernel reads.

    Attributes:
      q, kv, indices, lengths, lse: as in prefill.
      grad: of out.
      factor, offset: of `statistics` of `attention/gradient.py`.
      key_scales: float32 `[num_keys]`, powers of two, where dkv is summed in integers of 64 bits; otherwise None.
    """

    q: Any
    kv: Any
    indices: Any
    lengths: Any | None
    grad: Any
    lse: Any
    factor: Any
    offset: Any
    key_scales: Any | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientBackend(shared.Backend):
    """The record of a kernel for the gradient of prefill.

    Attributes:
      function: "module:function" of `(executor, arrays, *, softmax_scale)`, dq and dkv of `GradientArrays`.
      qk_dims: values of a key that it takes; None: those of prefill.
      repeats: whether its dkv repeats to the bit where that is asked for.
    """

    function: str
    qk_dims: tuple[int, ...] | None = None
    repeats: bool = False

    def refuses(self, call: GradientCall) -> list[str | None]:
        wrong_dim = self.qk_dims is not None and call.qk_dim not in self.qk_dims
        return [
            f"takes keys of {' or '.join(map(str, self.qk_dims))} values, got {call.qk_dim}" if wrong_dim else None,
            "its dkv does not repeat to the bit" if call.deterministic and not self.repeats else None,
        ]


_GRADIENT_RECORDS = (
    GradientBackend(
        name="hopper",
        function="jax_sparse_mla.attention.hopper.backward:backward",
        devices=(SM90,),
        device_names="SM90",
        needs=(TVM_FFI,),
        binaries={"gradient": ("sparse_backward", "90a")},
        qk_dims=(512, 576),
    ),
    GradientBackend(
        name="triton",
        function="jax_sparse_mla.attention.triton.backward:backward",
        needs=(TRITON, TRITON_LAUNCHER),
        repeats=True,
    ),
)

# Preferred first; the last one takes every call that has a kernel.
GRADIENT_BACKENDS: dict[str, GradientBackend] = {backend.name: backend for backend in _GRADIENT_RECORDS}

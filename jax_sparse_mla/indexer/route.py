"""The kernels of the index logits: one record each, and which of them serves a call. Pure, as `attention/route.py`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_sparse_mla import backend as shared
from jax_sparse_mla.backend import SM90, TRITON, TRITON_LAUNCHER, TVM_FFI
from jax_sparse_mla.device import DeviceInfo

_ANY = 1 << 31  # more than any number of rows


class Call(NamedTuple):
    """The logits of one call as decisions see them; plain data.

    Attributes:
      device: what will run it.
      queries: their dtype, such as "float8_e4m3fn".
      keys: "FP8" or "FP4".
      rows: of the whole call, where it comes in parts.
      heads, page_size: query heads, and keys of a page.
      run: keys that an entry of the table names, a page's or fewer.
    """

    device: DeviceInfo
    queries: str
    keys: str
    rows: int
    heads: int
    page_size: int
    run: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(shared.Backend):
    """The record of a kernel for index logits.

    Attributes:
      function: "module:function" of an executor and the arrays of `index_logits`, with `pages`, `fill` and `fp4` as in
        `indexer/triton.py`.
      reads: pairs of a dtype of queries and a format of keys; None: all.
      rows, heads: the fewest and the most that it takes.
      page_multiple: a page's keys are a multiple of it.
      whole_pages: whether it reads tables of pages alone.
    """

    function: str
    reads: tuple[tuple[str, str], ...] | None = None
    rows: tuple[int, int] = (0, _ANY)
    heads: tuple[int, int] = (0, _ANY)
    page_multiple: int = 1
    whole_pages: bool = True

    def refuses(self, call: Call) -> list[str | None]:
        reasons = []
        if self.reads is not None and (call.queries, call.keys) not in self.reads:
            reasons.append(f"does not read {call.queries} queries over {call.keys} keys")
        for name, (low, high) in (("rows", self.rows), ("heads", self.heads)):
            if not low <= (number := getattr(call, name)) <= high:
                accepted = f"{low} {name} or more" if high == _ANY else f"{low} to {high} {name}"
                reasons.append(f"takes {accepted}, got {number}")
        if call.page_size % self.page_multiple:
            reasons.append(f"takes pages of a multiple of {self.page_multiple} keys, got {call.page_size}")
        if self.whole_pages and call.run != call.page_size:
            reasons.append(f"reads tables of pages, got runs of {call.run} keys")
        return reasons


# Rows from which the kernel for FP8 keys is ahead of Triton's: a prefill chunk. Fewer are rows of different requests
# most likely, which share no keys; the kernel for FP4 keys serves these.
FROM_ROWS = 256
FP4_MOST_ROWS = 256  # the kernel for FP4 keys has room for so many in shared memory
MAX_KERNEL_HEADS = 64  # of both models; a kernel's accumulators grow with them

_HOPPER = Backend(
    name="hopper",
    function="jax_sparse_mla.indexer.hopper:index_logits",
    devices=(SM90,),
    device_names="SM90",
    needs=(TVM_FFI,),
    binaries={"index_logits": ("index_logits", "90a")},
    reads=(("float8_e4m3fn", "FP8"),),
    rows=(FROM_ROWS, _ANY),
    heads=(64, 64),  # a warpgroup's product of a row
    page_multiple=64,  # a copied tile lies in one page
)

_RECORDS = (
    _HOPPER,
    # It multiplies numbers of e5m2. Queries of e4m3 hardly ever fit these, and its way for what does not fit is slower
    # than Triton's kernel. It has specialisations for up to 16, 32 and 64 heads.
    dataclasses.replace(
        _HOPPER,
        name="hopper_fp4",
        reads=(("bfloat16", "FP4"),),
        rows=(0, min(FROM_ROWS - 1, FP4_MOST_ROWS)),
        heads=(0, MAX_KERNEL_HEADS),
    ),
    Backend(
        name="triton",
        function="jax_sparse_mla.indexer.triton:index_logits",
        needs=(TRITON, TRITON_LAUNCHER),
        reads=(("float8_e4m3fn", "FP8"), ("float8_e4m3fn", "FP4"), ("bfloat16", "FP4")),
        heads=(0, MAX_KERNEL_HEADS),
        whole_pages=False,
    ),
)

# Preferred first. Where none serves, plain JAX does.
LOGITS_BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _RECORDS}

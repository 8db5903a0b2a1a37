"""Byte layouts of a cached K row. A layout is data: reader and writer never branch on its name.

Sources: FlashMLA's FP8 and FP4 formats (656 B "V32", 584 B "MODEL1"/"V4", 528 B and 288 B "V41"), and the pools of
SGLang and vLLM, as listed in `docs/reference/layouts.md`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import ClassVar, NamedTuple


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """How one token's K row is laid out in a page of bytes.

    A row is `[quantised part | inline scales | bf16 part]`, `data_bytes` long. Rows follow each other from the start of
    the page. Layouts with `footer_scale_bytes` are split: the scales of the whole page stand behind its rows, at
    `page_size * data_bytes`; the others are interleaved. A page's length is padded to a multiple of `page_align`.

    Attributes:
      name: for messages, and what errors and engines' adapters call it.
      nope_dim, rope_dim: values without and with rotary embedding; `qk_dim` is their sum.
      v_dim: how many leading values of the row serve as V.
      fp8_dim: how many leading values are float8_e4m3fn (0 in the others); the rest are bfloat16.
      fp4_dim: how many leading values are e2m1 instead, two a byte, the even one in the low nibble.
      group: values that share one scale (0 without scales).
      scale_format: one of `SCALE_BYTES`; None: float32 inside the row, UE8M0 behind the rows.
      inline_scale_bytes: bytes of scales inside the row.
      footer_scale_bytes: bytes of scales per token behind the rows (V4: 7 used, the eighth left as it is).
      page_align: a page's length is a multiple of this.
      min_scale_exponent: the writer's smallest scale is `2^min_scale_exponent`, so that an all-zero group has
        a scale too. V4 floors amax at 1e-4 (SGLang); the scale of that rounds up to 2^-22. V3.2 and V4.1 floor the
        scale itself at 1e-4 (FlashMLA's quantisers), which rounds up to 2^-13.
      quantizers: by an engine's name, the smallest exponent of its writer's scales, for `written_by`. None: its scales
        are `amax / 448` as they are, no powers of two.
      writer: the engine of `written_by`; None: `min_scale_exponent` says how rows are quantised.
      extra_only: whether decode kernels read it as the second cache alone, beside a layout that names it in `extras`.
      extras: names of the other layouts that a second cache may have beside this one.
    """

    name: str
    nope_dim: int
    rope_dim: int
    v_dim: int
    fp8_dim: int = 0
    group: int = 0
    inline_scale_bytes: int = 0
    footer_scale_bytes: int = 0
    page_align: int = 1
    min_scale_exponent: int = 0
    fp4_dim: int = 0
    scale_format: str | None = None
    quantizers: tuple[tuple[str, int | None], ...] = ()
    writer: str | None = None
    extra_only: bool = False
    extras: tuple[str, ...] = ()

    V32_FP8: ClassVar[KVLayout]
    V4_FP8: ClassVar[KVLayout]
    V32_BF16: ClassVar[KVLayout]
    V4_BF16: ClassVar[KVLayout]
    V41_FP8: ClassVar[KVLayout]
    V41_FP8_SPLIT: ClassVar[KVLayout]
    V41_FP4: ClassVar[KVLayout]
    V41_FP4_SPLIT: ClassVar[KVLayout]
    NOPE_BF16: ClassVar[KVLayout]
    NOPE_FP8: ClassVar[KVLayout]
    NOPE_FP8_TENSOR: ClassVar[KVLayout]

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def quantised_dim(self) -> int:
        """How many leading values are quantised."""
        return self.fp8_dim + self.fp4_dim

    @property
    def quantised_bytes(self) -> int:
        """Bytes of the quantised part of a row, scales not counted."""
        return self.fp8_dim + self.fp4_dim // 2

    @property
    def kind(self) -> str:
        """The number format that most of a row is stored in: "fp8", "fp4" or "bf16"."""
        return "fp8" if self.fp8_dim else "fp4" if self.fp4_dim else "bf16"

    @property
    def num_groups(self) -> int:
        """Scales per token."""
        return self.quantised_dim // self.group if self.group else 0

    @property
    def scales(self) -> str:
        """The format of the scales, one of `SCALE_BYTES`."""
        return self.scale_format or ("ue8m0" if self.footer_scale_bytes else "float32")

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales that are used."""
        return self.num_groups * SCALE_BYTES[self.scales]

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one float32 scale stands for all values of a layer, outside the pages (`PagedKV.scale`)."""
        return self.scale_format == "tensor"

    @property
    def data_bytes(self) -> int:
        """Bytes of one row, footer scales not counted."""
        return self.quantised_bytes + self.inline_scale_bytes + 2 * (self.qk_dim - self.quantised_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, its scales included and the page's padding not."""
        return self.data_bytes + self.footer_scale_bytes

    def scale_place(self, page_size: int) -> tuple[int, int]:
        """`(start, stride)`: the scales of token i of a page begin at its byte `start + i * stride`."""
        if self.footer_scale_bytes:
            return page_size * self.data_bytes, self.footer_scale_bytes
        return self.quantised_bytes, self.data_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens, padding included."""
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_bytes: page_size must be an int >= 1, got {page_size!r}")
        return -(-page_size * self.bytes_per_token // self.page_align) * self.page_align

    @property
    def least_exponent(self) -> int | None:
        """The smallest exponent of the writer's scales; None where they are no powers of two."""
        return self.min_scale_exponent if self.writer is None else dict(self.quantizers)[self.writer]

    def written_by(self, engine: str) -> KVLayout:
        """The same layout, whose rows are quantised as an engine does it, one of `quantizers`; readers see no other.

        >>> cache = PagedKV.zeros(KVLayout.V41_FP8.written_by("vllm"), num_pages, page_size)

        Raises:
          ValueError: no engine of this name writes the layout.
        """
        known = dict(self.quantizers)
        if engine not in known:
            names = " or ".join(map(repr, known)) or "nobody"
            raise ValueError(f"written_by: engine of {self.name} must be {names}, got {engine!r}")
        is_own = known[engine] == self.min_scale_exponent
        return dataclasses.replace(self, writer=None if is_own else engine)

    @property
    def read_as(self) -> KVLayout:
        """The layout whoever wrote it, which is what readers compare."""
        return self if self.writer is None else dataclasses.replace(self, writer=None)

    @property
    def beside(self) -> tuple[KVLayout, ...]:
        """The layouts that a second cache may have beside this one, this one among them, whoever wrote them."""
        return self.read_as, *(getattr(KVLayout, name) for name in self.extras)

    def __repr__(self) -> str:
        return f"KVLayout.{self.name}" + (f".written_by({self.writer!r})" if self.writer else "")


# The formats of scales, and the bytes of one: UE8M0 byte b is 2^(b − 127), 255 is NaN.
SCALE_BYTES = {"float32": 4, "ue8m0": 1, "e4m3": 1, "tensor": 0}


def _name(layout: KVLayout) -> KVLayout:
    setattr(KVLayout, layout.name, layout)
    return layout


_FLASHMLA, _SGLANG, _VLLM = "flashmla", "sglang", "vllm"

_V32_BF16 = KVLayout("V32_BF16", nope_dim=512, rope_dim=64, v_dim=512)
_V4_BF16 = KVLayout("V4_BF16", nope_dim=448, rope_dim=64, v_dim=512)  # V is the whole row
_NOPE_BF16 = KVLayout("NOPE_BF16", nope_dim=512, rope_dim=0, v_dim=512)  # GLM-5.3: no rotary embedding
_V32_FP8 = _name(
    replace(
        _V32_BF16,
        name="V32_FP8",
        fp8_dim=512,
        group=128,
        inline_scale_bytes=16,
        min_scale_exponent=-13,
        quantizers=((_FLASHMLA, -13),),
    )
)
_name(
    replace(
        _V4_BF16,
        name="V4_FP8",
        fp8_dim=448,
        group=64,
        footer_scale_bytes=8,
        page_align=576,
        min_scale_exponent=-22,
        quantizers=((_SGLANG, -22), (_VLLM, -22)),
    )
)
_name(_V32_BF16)
_name(_V4_BF16)

# DeepSeek-V4.1: the same records in two orders of bytes, which their sizes do not tell apart.
_V41_FP8 = replace(
    _V4_BF16,
    fp8_dim=512,
    group=32,
    scale_format="ue8m0",
    min_scale_exponent=-13,
    quantizers=((_FLASHMLA, -13), (_SGLANG, -13), (_VLLM, -22)),
)
_V41_FP4 = replace(
    _V4_BF16,
    fp4_dim=512,
    group=16,
    scale_format="e4m3",
    min_scale_exponent=-9,
    quantizers=((_FLASHMLA, -9), (_SGLANG, -9), (_VLLM, -9)),
    extra_only=True,
)
_name(replace(_V41_FP8, name="V41_FP8", inline_scale_bytes=16, page_align=528, extras=("V41_FP4",)))
_name(replace(_V41_FP8, name="V41_FP8_SPLIT", footer_scale_bytes=16, page_align=512, extras=("V41_FP4_SPLIT",)))
_name(replace(_V41_FP4, name="V41_FP4", inline_scale_bytes=32, page_align=288))
_name(replace(_V41_FP4, name="V41_FP4_SPLIT", footer_scale_bytes=32, page_align=256))

# Rows without rotary embedding (GLM-5.3).
_name(_NOPE_BF16)
_name(replace(_V32_FP8, name="NOPE_FP8", nope_dim=512, rope_dim=0, quantizers=((_FLASHMLA, -13), (_SGLANG, None))))
_name(replace(_NOPE_BF16, name="NOPE_FP8_TENSOR", fp8_dim=512, group=512, scale_format="tensor"))

# The layouts that the kernels of `kv_cache/triton.py` were written for: they move 64 values or 8 bytes at a time, and
# would leave out the rest of another layout's parts. Plain JAX serves every layout.
KERNEL_LAYOUTS = tuple(layout for layout in vars(KVLayout).values() if isinstance(layout, KVLayout))


class Pages(NamedTuple):
    """The pages of a cache in the buffer that holds them, as kernels take them.

    Attributes:
      layout, page_size: of the cache.
      first_page, num_pages: the cache's first page in the buffer, and how many it has.
      page_bytes: from one page's start to the next one's; None: the layout's own.
    """

    layout: KVLayout
    page_size: int
    first_page: int
    num_pages: int
    page_bytes: int | None = None

    @property
    def stride(self) -> int:
        """Bytes from one page's start to the next one's."""
        return self.layout.page_bytes(self.page_size) if self.page_bytes is None else self.page_bytes


def bf16_layout(layout: KVLayout) -> KVLayout:
    """The unquantised layout with the same dimensions."""
    return _known_or(KVLayout(f"{layout.name} in bfloat16", layout.nope_dim, layout.rope_dim, layout.v_dim))


def workspace_layout(qk_dim: int) -> KVLayout:
    """The layout of a row of prefill's bf16 workspace: its first 512 values serve as V."""
    name = f"a workspace of {qk_dim} values a row"
    return _known_or(KVLayout(name, nope_dim=qk_dim - 64, rope_dim=64, v_dim=min(qk_dim, 512)))


def _known_or(plain: KVLayout) -> KVLayout:
    """The named bf16 layout that equals this one, or this one."""
    known = (KVLayout.V32_BF16, KVLayout.V4_BF16, KVLayout.NOPE_BF16)
    return next((layout for layout in known if dataclasses.replace(plain, name=layout.name) == layout), plain)

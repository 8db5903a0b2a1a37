"""Byte layouts of a cached K row. A layout is data: reader and writer never branch on its name.

Sources: FlashMLA's FP8 formats (656 B "V32", 584 B "MODEL1"/"V4") and SGLang's pools, as listed in
`docs/layouts.md`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """How one token's K row is laid out in a page of bytes.

    A row is `[fp8 part | inline scales | bf16 part]`, `data_bytes` long. Rows follow each other from the start of
    the page. Layouts with `footer_scale_bytes` keep the scales of the whole page behind its rows, at
    `page_size * data_bytes`. The page's length is padded to a multiple of `page_align`.

    Attributes:
      name: for messages.
      nope_dim, rope_dim: values without and with rotary embedding; `qk_dim` is their sum.
      v_dim: how many leading values of the row serve as V.
      fp8_dim: how many leading values are float8_e4m3fn (0 in the bf16 layouts); the rest are bfloat16.
      group: values that share one scale (0 without scales).
      inline_scale_bytes: bytes of float32 scales inside the row (V3.2).
      footer_scale_bytes: bytes of UE8M0 scales per token behind the rows (V4: 7 used, the eighth left as it
        is).
      page_align: a page's length is a multiple of this.
      min_scale_exponent: the writer's smallest scale is `2^min_scale_exponent`, so that an all-zero group has
        a scale too. V4 floors amax at 1e-4 (SGLang); the scale of that rounds up to 2^-22. V3.2 floors the scale
        itself at 1e-4 (FlashMLA's quantiser), which rounds up to 2^-13.
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

    V32_FP8: ClassVar[KVLayout]
    V4_FP8: ClassVar[KVLayout]
    V32_BF16: ClassVar[KVLayout]
    V4_BF16: ClassVar[KVLayout]

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def num_groups(self) -> int:
        """Scales per token."""
        return self.fp8_dim // self.group if self.group else 0

    @property
    def data_bytes(self) -> int:
        """Bytes of one row, footer scales not counted."""
        return self.fp8_dim + self.inline_scale_bytes + 2 * (self.qk_dim - self.fp8_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, its scales included and the page's padding not."""
        return self.data_bytes + self.footer_scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of `page_size` tokens, padding included."""
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_bytes: page_size must be an int >= 1, got {page_size!r}")
        return -(-page_size * self.bytes_per_token // self.page_align) * self.page_align

    def __repr__(self) -> str:
        return f"KVLayout.{self.name}"


KVLayout.V32_FP8 = KVLayout(
    "V32_FP8",
    nope_dim=512,
    rope_dim=64,
    v_dim=512,
    fp8_dim=512,
    group=128,
    inline_scale_bytes=16,
    min_scale_exponent=-13,
)
KVLayout.V4_FP8 = KVLayout(
    "V4_FP8",
    nope_dim=448,
    rope_dim=64,
    v_dim=512,
    fp8_dim=448,
    group=64,
    footer_scale_bytes=8,
    page_align=576,
    min_scale_exponent=-22,
)
KVLayout.V32_BF16 = KVLayout("V32_BF16", nope_dim=512, rope_dim=64, v_dim=512)
KVLayout.V4_BF16 = KVLayout("V4_BF16", nope_dim=448, rope_dim=64, v_dim=512)

# What the kernels of `kernels/triton/kv_cache.py` were written for: they move 64 values or 8 bytes at a time, which
# would leave out the rest of another layout's parts. Plain JAX serves every layout.
KERNEL_LAYOUTS = (KVLayout.V32_FP8, KVLayout.V4_FP8, KVLayout.V32_BF16, KVLayout.V4_BF16)


def bf16_layout(layout: KVLayout) -> KVLayout:
    """The unquantised layout with the same dimensions."""
    return _known_or(KVLayout(f"{layout.name} in bfloat16", layout.nope_dim, layout.rope_dim, layout.v_dim))


def workspace_layout(qk_dim: int) -> KVLayout:
    """The layout of a row of prefill's bf16 workspace: its first 512 values serve as V."""
    name = f"a workspace of {qk_dim} values a row"
    return _known_or(KVLayout(name, nope_dim=qk_dim - 64, rope_dim=64, v_dim=min(qk_dim, 512)))


def _known_or(plain: KVLayout) -> KVLayout:
    """The named bf16 layout that equals this one, or this one."""
    known = (KVLayout.V32_BF16, KVLayout.V4_BF16)
    return next((layout for layout in known if dataclasses.replace(plain, name=layout.name) == layout), plain)

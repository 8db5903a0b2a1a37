"""FlashInfer's SM120 attention behind our contract: stand-ins with the argument lists of 0.7.

`JAX_SPARSE_MLA_SM120_MODULE=<sparse_mla_sm120.so>` adds the module itself, compiled for 12.0f, which needs no GPU: its
signatures, its planner, and its own checks of every argument.
"""

import math
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tvm_stub
from attention_calls import check_decode, decode_arguments, pretend_installed, small_decode
from attention_oracle import attend, decode_cases, page_bytes, unpack_cache

from jax_sparse_mla import packages
from jax_sparse_mla.attention import DeviceInfo, sparse_mla_decode
from jax_sparse_mla.attention.backends import flashinfer
from jax_sparse_mla.kv_cache import KVLayout, PagedKV
from jax_sparse_mla.launch.tvm import Buffer

pytest.importorskip("tvm_ffi")
pytestmark = pytest.mark.cpu

RTX = DeviceInfo("cuda", (12, 0), 188, 101_376)
ROW_BYTES = {"V32_FP8": 656, "V4_FP8": 584}
HEADS = (8, 16, 32, 64, 128)


class Stub:
    """What its entries check, and what they compute."""

    def __init__(self):
        self.calls = []  # (entry, layout, heads, index widths, page sizes)
        entries = {
            "sparse_mla_sm120_decode_dsv4": self.decode_v4,
            "sparse_mla_sm120_decode_dsv3_2": self.decode_v32,
            "sparse_mla_sm120_paged_attention": self.prefill,
        }
        self.module = tvm_stub.module(**entries)

    def decode_v4(self, q, kv, indices, mid_out, mid_lse, out, lse, splits, scale, lengths, sink, *rest):
        extra, rest = rest[:3], rest[3:]
        assert rest == (1, -1, False, 1.0)
        tables = [(kv, indices, lengths), extra]
        self.scratch(q, tables, mid_out, mid_lse, splits)
        self.attend("decode", "V4_FP8", q, tables, scale, sink, out, lse, -np.inf)

    def decode_v32(self, q, kv, indices, mid_out, mid_lse, out, lse, splits, scale, lengths, sink, *rest):
        assert rest == (0, -1, 1.0)
        tables = [(kv, indices, lengths)]
        self.scratch(q, tables, mid_out, mid_lse, splits)
        self.attend("decode", "V32_FP8", q, tables, scale, sink, out, lse, -np.inf)

    def prefill(self, q, kv, indices, out, lse, scale, model, *rest):
        variant, *rest, fp4 = rest
        two = rest[2] is not None
        serves = {1: (8, 16), 2: (32, 64, 128), 4: (64, 128)} if model == 0 else {3: HEADS} if two else {2: HEADS}
        assert q.shape[1] in serves[variant] and fp4 is False
        lengths, sink, *extra = rest
        assert q.shape[0] > 64 and q.shape[1] in HEADS and indices.shape[1] % 64 == 0
        assert model == (1 if q.shape[2] == 512 else 0)
        tables = [(kv, indices, lengths), tuple(extra)]
        layout = "V32_FP8" if model == 0 else "V4_FP8"
        self.attend("prefill", layout, q, tables, scale, sink, out, lse, -1e30)

    def scratch(self, q, tables, mid_out, mid_lse, splits):
        rows, heads, _ = q.shape
        assert rows <= 64
        assert splits == sum(-(-indices.shape[1] // 64) for _, indices, _ in tables if indices is not None)
        kernel_heads = 8 if heads == 8 else -(-heads // 16) * 16
        assert mid_out.shape == (rows, kernel_heads, splits, 512) and mid_out.dtype == ml_dtypes.bfloat16
        assert mid_lse.shape == (rows, kernel_heads, splits) and mid_lse.dtype == np.float32

    def attend(self, entry, layout, q, tables, scale, sink, out, lse, no_key):
        assert sink is None
        tables = [table for table in tables if table[0] is not None]
        widths = [indices.shape[1] for _, indices, _ in tables]
        self.calls.append((entry, layout, q.shape[1], widths, [kv.shape[1] for kv, *_ in tables]))
        caches = [self.rows_of(layout, kv) for kv, *_ in tables]
        for row in range(len(q)):
            keys = []
            for rows, (_, indices, lengths) in zip(caches, tables):
                assert indices.dtype == lengths.dtype == np.int32 and lengths.shape == (len(q),)
                slots = indices[row, : np.clip(lengths[row], 0, indices.shape[1])]
                assert ((slots >= -1) & (slots < len(rows))).all()  # the kernel trusts them
                keys.append(rows[slots[slots >= 0]])
            values, _, natural = attend(q[row], np.concatenate(keys), scale, None)
            out[row] = values
            lse[row] = np.where(np.isneginf(natural), no_key, natural / math.log(2))

    def rows_of(self, layout, kv):
        pages, page_size, row_bytes = kv.shape
        assert kv.dtype == np.uint8 and row_bytes == ROW_BYTES[layout]
        assert kv.strides == (page_bytes(layout, page_size), row_bytes, 1) and kv.strides[0] % 16 == 0
        data = np.zeros((pages, page_bytes(layout, page_size)), np.uint8)
        data[:, : page_size * row_bytes] = kv.reshape(pages, -1)
        return unpack_cache(layout, page_size, data)


@pytest.fixture
def stub(monkeypatch):
    """The stand-in, behind a router that sees an SM120 GPU and FlashInfer."""
    stub = Stub()
    monkeypatch.setattr(flashinfer, "_module", stub.module)
    see_an_sm120(monkeypatch)
    yield stub
    jax.clear_caches()


def see_an_sm120(monkeypatch):
    jax.clear_caches()
    pretend_installed(monkeypatch, "flashinfer")
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: RTX))


def decode(case, **kwargs):
    return sparse_mla_decode(**decode_arguments(case) | kwargs, backend="flashinfer")


@pytest.mark.always(2)
@pytest.mark.parametrize("case", [c for c in decode_cases() if c.cache.layout in ROW_BYTES], ids=lambda c: c.name)
def test_strata(case, stub):
    check_decode(case, decode(case))


@pytest.mark.parametrize("layout", ["V4_FP8", "V32_FP8"])
@pytest.mark.parametrize("extra", [None, (20, 2)])
def test_more_rows_than_decode_takes(layout, extra, stub):
    case = small_decode(layout=layout, batch=33, topk=100, heads=12, extra=extra)
    if layout == "V32_FP8" and extra:
        pytest.skip("covered by decode: each cache is a call")
    check_decode(case, decode(case))
    (entry, _, heads, widths, _), *others = stub.calls
    assert (entry, heads, widths[0], others) == ("prefill", 16, 128, [])


@pytest.mark.parametrize(
    "setting, calls",
    [
        ({"heads": 12, "topk": 100, "extra": (70, 64)}, [("V4_FP8", 12, [100, 70], [64, 64])]),
        ({"layout": "V32_FP8", "extra": (70, 64)}, [("V32_FP8", 4, [16], [64]), ("V32_FP8", 4, [70], [64])]),
        ({"page_size": 256, "topk": 300, "extra": (20, 2)}, [("V4_FP8", 4, [300, 20], [256, 2])]),
        ({"page_size": 192, "topk": 300}, [("V4_FP8", 4, [300], [192])]),
        ({"topk": 1100, "batch": 1, "q_len": 1}, [("V4_FP8", 4, [1100], [64])]),
    ],
)
def test_decode_takes_shapes_as_they_are(stub, setting, calls):
    """Two V3.2 caches are two calls."""
    case = small_decode(**setting)
    check_decode(case, decode(case))
    assert stub.calls == [("decode", *call) for call in calls]


@pytest.mark.parametrize(
    "version, why",
    [
        ("0.6.18", "0.6.18 is too old: install 0.7"),
        ("0.6rc2", "0.6rc2 is too old"),
        ("0.7.2.post1", None),
        ("0.7rc1", None),
        ("1.0", None),
        (None, "flashinfer is found, but the version of flashinfer-python is None"),
        ("unknown", "is unknown: install 0.7"),
    ],
)
def test_an_older_release_is_refused(version, why, monkeypatch):
    monkeypatch.setattr(packages, "version", lambda distribution: version)
    reason = flashinfer.unready("decode", "jax")
    assert reason is None if why is None else why in reason


def test_nothing_to_read(stub):
    case = small_decode()
    nothing = {"indices": jnp.zeros((3, 2, 0), jnp.int32), "topk_length": None}
    out, lse = decode(case, **nothing)
    assert not np.asarray(out, np.float32).any() and np.isneginf(lse).all()
    empty = PagedKV(data=jnp.zeros((0, 37440), jnp.uint8), layout=KVLayout.V4_FP8, page_size=64)
    out, lse = decode(case, cache=empty)
    assert not np.asarray(out, np.float32).any() and np.isneginf(lse).all()
    assert decode(case, q=jnp.zeros((3, 2, 0, 512), jnp.bfloat16), attn_sink=None)[0].shape == (3, 2, 0, 512)
    assert stub.calls == []


# --- the module itself ------------------------------------------------------------------------------------

MODULE = os.environ.get("JAX_SPARSE_MLA_SM120_MODULE")
needs_module = pytest.mark.skipif(MODULE is None, reason="needs FlashInfer's compiled SM120 module")
ENTRIES = [
    (KVLayout.V4_FP8, 1, True),
    (KVLayout.V4_FP8, 2, True),
    (KVLayout.V32_FP8, 1, True),
    (KVLayout.V4_FP8, 1, False),
    (KVLayout.V4_FP8, 2, False),
    (KVLayout.V32_FP8, 1, False),
]


@pytest.fixture
def their_module():
    import tvm_ffi

    return tvm_ffi.load_module(MODULE)


@needs_module
@pytest.mark.parametrize("layout, caches, decodes", ENTRIES)
def test_signatures(layout, caches, decodes, their_module):
    function, arguments = flashinfer._call(layout, [PagedKV.zeros(layout, 1, 64)] * caches, 16, decodes, 2, 0.1)
    with pytest.raises(TypeError, match="Mismatched number of arguments") as error:
        their_module[function]()
    types = re.findall(r"\d+: ([^,)]+?)(?:,|\) ->)", str(error.value))
    kinds = {int: "int", float: "float", bool: "bool"}
    assert len(types) == len(arguments)
    for argument, expected in zip(arguments, types, strict=True):
        if isinstance(argument, Buffer):
            assert expected.removeprefix("Optional<").removesuffix(">") == "DLTensor*"
        elif argument is None:
            assert expected.startswith("Optional<")
        else:
            assert expected == kinds[type(argument)]


@needs_module
def test_scratch(their_module):
    assert [their_module.decode_scratch_heads(h) for h in range(1, 129)] == [
        flashinfer.scratch_heads(h) for h in range(1, 129)
    ]
    assert their_module.resolve_format(512, "auto") == flashinfer._MODELS[KVLayout.V4_FP8]
    assert their_module.resolve_format(576, "auto") == flashinfer._MODELS[KVLayout.V32_FP8]


PRETEND = """
// The function, told that its tensors are on a CUDA device, and that the spoiled one is three float64.
tvm::ffi::Function pretend(tvm::ffi::Function function, int64_t spoiled) {
  return tvm::ffi::Function::FromPacked([=](const tvm::ffi::AnyView* args, int32_t count, tvm::ffi::Any* result) {
    std::vector<tvm::ffi::AnyView> call(args, args + count);
    std::vector<DLTensor> tensors(count);
    int64_t three = 3, one = 1;
    for (int32_t i = 0; i < count; ++i) {
      if (auto tensor = args[i].as<DLTensor*>()) {
        tensors[i] = **tensor;
        tensors[i].device = {kDLCUDA, 0};
        if (i == spoiled) {
          tensors[i].ndim = 1;
          tensors[i].shape = &three;
          tensors[i].strides = &one;
          tensors[i].dtype = {kDLFloat, 64, 1};
        }
        call[i] = &tensors[i];
      }
    }
    function.CallPacked(call.data(), count, result);
  });
}
"""


@needs_module
@pytest.mark.parametrize("layout, caches, decodes", ENTRIES)
def test_planner(layout, caches, decodes, their_module):
    """Our scratch, and the prefill kernel that we name, are what their planner asks for and allows."""
    row_bytes, model = layout.bytes_per_token, flashinfer._MODELS[layout]
    for heads in HEADS if not decodes else (1, 8, 12, 64, 100, 128):
        for topk, extra_topk in [(64, 64), (128, 1024), (2048, 70), (512, 1)]:
            extra_topk = extra_topk if caches == 2 else 0
            page, stride, extra_page, extra_stride = 64, layout.page_bytes(64), 2, layout.page_bytes(2)
            extra = (extra_topk, page, extra_page, stride, extra_stride) if caches == 2 else (0, page, 0, stride, 0)
            tokens = 3 if decodes else 65
            metadata = [model, tokens, heads, topk, *extra, row_bytes, topk, extra_topk, heads, 1, caches - 1, 0, 0, 0]
            allowed = their_module.metadata_candidates(metadata, 1, RTX.sm_count, RTX.shared_memory_optin)
            if decodes:
                assert allowed[0] == -(-topk // 64) + -(-extra_topk // 64)
            else:
                assert flashinfer._prefill_kernel(layout, caches, heads) in allowed


@needs_module
@pytest.mark.parametrize("layout, caches, decodes", ENTRIES)
def test_their_own_checks(layout, caches, decodes, their_module, monkeypatch):
    """A call passes every check of theirs up to the first CUDA call; if one argument is spoiled, they name it."""
    import tvm_ffi.cpp

    pretend = tvm_ffi.cpp.load_inline("pretend", cpp_sources=PRETEND, functions=["pretend"]).pretend
    see_an_sm120(monkeypatch)
    setting = {"layout": layout.name, "batch": 3 if decodes else 33, "heads": 16, "topk": 100, "sink": False}
    case = small_decode(**setting, extra=(70, 64) if caches == 2 else None)
    function, arguments = flashinfer._call(layout, [PagedKV.zeros(layout, 1, 64)] * caches, 16, decodes, 2, 0.1)

    def refusal(spoiled):
        jax.clear_caches()
        monkeypatch.setattr(flashinfer, "_module", lambda: {function: pretend(their_module[function], spoiled)})
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            jax.block_until_ready(decode(case))
        return str(error.value)

    assert "CUDA driver" in refusal(-1)
    scratch = [r"\bmid_out", r"\bmid_lse"] if decodes else []
    words = [r"\bq\b", r"\b(cache|kv)\b", r"\b(indices|ix)\b", *scratch, r"\boutput\b", r"\b(lse|value)\b.*32"]
    words += ["topk_length", r"\b(cache|kv)\b", r"\b(eidx|ix)\b", "extra_topk_length"]
    tensors = [i for i, argument in enumerate(arguments) if isinstance(argument, Buffer)]
    for place, word in zip(tensors, words):  # a single cache has no extra words
        assert re.search(word, refusal(place)), (place, word)

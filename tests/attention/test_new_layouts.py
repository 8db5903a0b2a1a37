"""Attention over V4.1's rows and rows without rope: the reference serves all of them, kernels those that they name.

The oracle is `attention_oracle.py`; the bytes are `layout_oracle.py`'s, and what no call may read is poisoned.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_calls import (
    H200,
    check_decode,
    decode_arguments,
    pretend_h200,
    pretend_installed,
    run_decode,
    small_decode,
)
from attention_oracle import INT_MAX, INT_MIN
from layout_oracle import RECORDS

from jax_sparse_mla.attention import DeviceInfo, plan_attention, sparse_mla_decode, sparse_mla_prefill
from jax_sparse_mla.attention.backend import BACKENDS, Call
from jax_sparse_mla.attention.serve import calls_of
from jax_sparse_mla.kv_cache import KVLayout, PagedKV, gather_kv
from jax_sparse_mla.models import DEEPSEEK_V4_FLASH

FP4 = {"V41_FP8": "V41_FP4", "V41_FP8_SPLIT": "V41_FP4_SPLIT"}
FIRST = tuple(name for name in RECORDS if name not in FP4.values())
PAIRS = [*((name, name) for name in FIRST), *FP4.items()]
OF_PAIRS = pytest.mark.parametrize("layout, extra", PAIRS)


def read_by(backend: str) -> set[str]:
    """The names of the layouts that a backend's decode kernel was written for."""
    return {layout.name for layout in BACKENDS[backend].layouts["decode"]}


def a_case(layout: str, extra: str, seed: int = 0, **setting):
    setting = {"extra": (16, 2), "page_size": 16} | setting
    return small_decode(seed, layout=layout, extra_layout=extra, **setting)


def cache_of(name: str, num_pages: int = 2, page_size: int = 4) -> PagedKV:
    return PagedKV.zeros(getattr(KVLayout, name), num_pages, page_size)


# --- what the reference serves ---


@pytest.mark.always(2)
@OF_PAIRS
def test_decode_equals_the_oracle(layout, extra):
    """Holes, duplicates, hostile indices and lengths, empty rows, infinite and huge sinks: one shape, four draws."""
    for seed in range(4):
        case = a_case(layout, extra, seed, hot=seed == 3)
        check_decode(case, run_decode(case))
    alone = dataclasses.replace(case, extra_cache=None, extra_indices=None, extra_topk_length=None)
    check_decode(alone, run_decode(alone))


def test_the_extra_cache_alone_and_rows_without_a_key():
    case = a_case("V41_FP8", "V41_FP4")
    case.attn_sink = np.array([np.inf, -np.inf, 0.25, -3e38], np.float32)
    first = dataclasses.replace(case, indices=case.indices[..., :0], topk_length=None)
    check_decode(first, run_decode(first))
    case.indices[:] = np.resize(np.array([-1, -7, INT_MIN, INT_MAX, len(case.cache.rows)], np.int32), (2, 16))
    case.extra_topk_length = np.zeros((3, 2), np.int32)
    case.q[2] = np.nan
    out, lse = run_decode(case)
    assert np.all(np.asarray(out, np.float32) == 0) and np.all(np.isneginf(lse))


def test_gradients_and_float32_queries():
    case = a_case("V41_FP8", "V41_FP4", lengths="none", extra_lengths="none")
    arguments = decode_arguments(case)
    q = arguments.pop("q").astype(jnp.float32)
    out, _ = sparse_mla_decode(q, **arguments)
    assert out.dtype == jnp.float32
    gradient = jax.grad(lambda q: sparse_mla_decode(q, **arguments)[0].sum())(q)
    assert np.isfinite(np.asarray(gradient)).all() and np.asarray(gradient).any()


@pytest.mark.parametrize("name", RECORDS)
def test_a_workspace_is_gathered_and_attended_to(name):
    """Prefill from a cache's rows is decode over them: 512 values a row, whatever they were stored in."""
    case = small_decode(layout=name, q_len=1, page_size=16)
    rows = gather_kv(decode_arguments(case)["cache"], jnp.arange(len(case.cache.rows), dtype=jnp.int32))
    lengths = case.topk_length[:, 0]
    sink = case.attn_sink
    facts = {"softmax_scale": case.softmax_scale, "topk_length": lengths, "attn_sink": sink}
    out, _, lse = sparse_mla_prefill(case.q[:, 0], rows, case.indices[:, 0], **facts)
    check_decode(case, (out[:, None], lse[:, None]))


# --- what the kernel serves ---


@pytest.fixture
def by_triton(monkeypatch):
    """`sparse_mla_decode` by the Triton kernel: on a CPU in Triton's interpreter, which no other code stands in for."""
    pytest.importorskip("torch"), pytest.importorskip("triton")
    from triton_device import ON_GPU, Interpreted

    from jax_sparse_mla.attention.backends import triton

    if ON_GPU:
        return lambda **arguments: sparse_mla_decode(**arguments, backend="triton")
    pretend_h200(monkeypatch, "triton")
    launched = []

    class Counted(Interpreted):
        def __call__(self, launch, inputs):
            launched.append(launch.name)
            return super().__call__(launch, inputs)

    def decode(**arguments):
        with monkeypatch.context() as patched, jax.disable_jit():
            patched.setattr(triton, "executor", Counted)
            launched.clear()
            results = sparse_mla_decode(**arguments, backend="triton")
        assert launched[0] == "sparse_mla"
        return results

    return decode


KERNEL_PAIRS = [*FP4.items(), ("NOPE_FP8_TENSOR",) * 2]
OF_KERNEL_PAIRS = pytest.mark.parametrize("layout, extra", KERNEL_PAIRS)


@OF_KERNEL_PAIRS
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of NaN in the interpreter
def test_the_triton_kernel_equals_the_oracle(by_triton, layout, extra):
    """As its backend plans it: one row is split (by the plan for the interpreter), several are not."""
    for seed, rows in enumerate(({"batch": 1, "q_len": 1}, {"batch": 3, "q_len": 2}, {"batch": 2, "q_len": 1})):
        rows |= {"topk": 40, "page_size": 16, "extra": (40, 2), "hot": seed == 2}
        case = small_decode(seed, layout=layout, extra_layout=extra, **rows)
        arguments = decode_arguments(case)
        check_decode(case, by_triton(**arguments, batch_invariant=seed == 1))
    for prefix in ("", "extra_"):
        dropped = arguments | {f"{prefix}indices": arguments[f"{prefix}indices"][..., :0], f"{prefix}topk_length": None}
        setattr(alone := dataclasses.replace(case), f"{prefix}indices", np.asarray(dropped[f"{prefix}indices"]))
        setattr(alone, f"{prefix}topk_length", None)
        check_decode(alone, by_triton(**dropped))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_each_cache_s_own_scale_and_place(by_triton):
    """The caches are layers of pools: the kernel takes the scale, and the pages, of the layer."""
    case = a_case("NOPE_FP8_TENSOR", "NOPE_FP8_TENSOR", lengths="none", extra_lengths="none")
    arguments = decode_arguments(case)
    for name, layer, factor in (("cache", 1, 4.0), ("extra_cache", 0, 0.5)):
        cache = arguments[name]
        poison = jnp.full_like(cache.data, 0xFF)
        data = jnp.concatenate([poison, cache.data] if layer else [cache.data, poison])
        scale = cache.scale * jnp.where(jnp.arange(2) == layer, factor, jnp.nan)
        arguments[name] = dataclasses.replace(cache, data=data, scale=scale, num_layers=2).layer(layer)
        host = getattr(case, name)
        setattr(case, name, dataclasses.replace(host, rows=host.rows * factor))
    check_decode(case, by_triton(**arguments))


# --- what is refused ---


@pytest.mark.parametrize("name", FP4.values())
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_fp4_rows_are_an_extra_cache_s(name, backend, monkeypatch):
    """Whatever would serve: as the first cache they are refused before any backend is asked."""
    pretend_h200(monkeypatch, *BACKENDS)
    case = a_case("V41_FP8", "V41_FP4")
    arguments = decode_arguments(case)
    with pytest.raises(ValueError, match=f"cache has layout KVLayout.{name}, which can be extra_cache's alone"):
        sparse_mla_decode(**arguments | {"cache": cache_of(name)}, backend=backend)
    spec = dataclasses.replace(DEEPSEEK_V4_FLASH, kv_layout=getattr(KVLayout, name))
    with pytest.raises(ValueError, match=f"plan_attention: .*{name}"):
        plan_attention("decode", spec, num_q_tokens=1, device=H200, installed=set(BACKENDS), override=backend)


@pytest.mark.parametrize(
    "layout, extra",
    [
        ("V41_FP8", "V41_FP4_SPLIT"),
        ("V41_FP8_SPLIT", "V41_FP4"),
        ("V41_FP8", "V41_FP8_SPLIT"),
        ("V41_FP8", "NOPE_FP8"),
        ("NOPE_FP8", "V41_FP4"),
        ("V4_FP8", "V41_FP4"),
        ("V4_BF16", "NOPE_BF16"),
    ],
)
@pytest.mark.parametrize("backend", [None, "triton"])
def test_layouts_of_two_orders_do_not_go_together(layout, extra, backend, monkeypatch):
    pretend_h200(monkeypatch, "triton")
    arguments = decode_arguments(a_case("V41_FP8", "V41_FP4"))
    arguments |= {"cache": cache_of(layout), "extra_cache": cache_of(extra)}
    known = " or ".join(f"KVLayout.{name}" for name in (layout, FP4.get(layout)) if name)
    with pytest.raises(ValueError, match=f"extra_cache must have cache's layout {known}, got KVLayout.{extra}$"):
        sparse_mla_decode(**arguments, backend=backend)


def test_which_kernels_read_which():
    """What each kernel was written for, once more: a record must not promise what no kernel reads."""
    served = {name: read_by(name) & set(RECORDS) for name in BACKENDS if name != "reference"}
    # `triton_attention_cases` has all of them: `every_layout`, `two_layouts_at_once`; `test_hopper_decode` V4.1's and
    # bfloat16 rows
    by_hopper = {"NOPE_BF16", *(name for name in RECORDS if name.startswith("V41"))}
    assert served == {"hopper": by_hopper, "flashmla": set(), "flashinfer": set(), "triton": set(RECORDS)}


@pytest.mark.parametrize(
    "backend, layout, extra",
    [(x, *pair) for x in BACKENDS if x != "reference" for pair in PAIRS if not set(pair) <= read_by(x)],
)
def test_a_kernel_refuses_by_name_what_it_was_not_written_for(backend, layout, extra, monkeypatch):
    """On each backend's own device, with all packages there: by its name it is refused, else the reference serves."""
    device = dataclasses.replace(H200, compute_capability=BACKENDS[backend].devices[0][0])
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: device))
    pretend_installed(monkeypatch, backend)
    case = a_case(layout, extra)
    given = decode_arguments(case)
    static = {"softmax_scale": given.pop("softmax_scale")}
    refused = extra if layout in read_by(backend) else layout
    with pytest.raises(ValueError, match=f"'{backend}' cannot serve this decode call: .*got {refused} "):
        sparse_mla_decode(**given, **static, backend=backend)
    lowered = jax.jit(lambda given: sparse_mla_decode(**given, **static)).trace(given)
    assert calls_of(lowered.lower(lowering_platforms=("cuda",))) == {("decode", "reference")}


def test_a_record_is_asked_for_both_caches():
    """A kernel that read V4.1's FP8 rows would not therefore read its FP4 rows."""
    facts = {"layouts": {"decode": (KVLayout.V41_FP8,)}}
    backend = dataclasses.replace(BACKENDS["triton"], **facts)
    call = Call("decode", KVLayout.V41_FP8, 1, 64, H200, 640)
    assert not backend.cannot(call)
    (why,) = backend.cannot(dataclasses.replace(call, extra_layout=KVLayout.V41_FP4))
    assert why == "its decode reads rows of V41_FP8, got V41_FP4 (fp4)"

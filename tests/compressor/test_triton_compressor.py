"""The Triton kernels of the compressor against the plain JAX function: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ml_dtypes
from sparse_mla_torch.launch.executor import executor
from sparse_mla_torch.operations import compressor as torch_compressor
from triton_device import DEVICE, tensor

from jax_sparse_mla.compressor import triton as kernels
from jax_sparse_mla.compressor.api import compress_kv, compress_kv_reference
from jax_sparse_mla.compressor.state import CompressorArrays, CompressorState
from jax_sparse_mla.launch.describe import Launch

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of infinities and NaN in the interpreter
]

HOSTILE = (-1, -7, -(2**31), 2**31 - 1)
PROPERTY = settings(max_examples=8, deadline=None)

plain_compress = jax.jit(compress_kv_reference, static_argnames=("ratio", "norm_eps", "num_entries"))


def compress_case(rng, ratio: int, head_dim: int, lengths: tuple[int, ...], *, more_ring=0, dtype=np.float32):
    """The arrays of compress_kernel's plain function: requests of these lengths, some of them padding, then padding."""
    halves, num_rows, max_requests = (2 if ratio == 4 else 1), sum(lengths) + 2, len(lengths) + 3
    width, ring = halves * head_dim, halves * ratio + more_ring
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions, req_rows = np.full(num_rows, -1, np.int32), np.full(num_rows, -1, np.int32)
    for request, (start, length) in enumerate(zip(starts, lengths)):
        rows = slice(start, start + length)
        positions[rows] = rng.choice([0, 1, ratio - 1, 3 * ratio, 1000 * ratio + 2]) + np.arange(length)
        req_rows[rows] = max_requests - 1 - request
        if rng.random() < 0.15:
            positions[rows] = -1
        elif rng.random() < 0.15:
            req_rows[rows] = rng.choice([*HOSTILE, max_requests])

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    state = normal(max_requests, ring, width), normal(max_requests, ring, width)
    kv, score = normal(num_rows, width), 3 * normal(num_rows, width)
    kv[sum(lengths) :] = score[sum(lengths) :] = np.nan
    parameters = (
        normal(ratio, width),
        1 + normal(head_dim) / 8,
        np.exp(-np.arange(head_dim // 4) / 4).astype(np.float32),
    )
    step = kv.astype(dtype), score.astype(dtype)
    num_entries = min(num_rows, num_rows // ratio + len(lengths))
    return (*state, *step, positions, req_rows, starts, *parameters), {"ratio": ratio, "num_entries": num_entries}


def torch_compress(arguments, *, ratio, num_entries):
    """(entries, rows, state_kv, state_score) by the kernels, into poisoned results."""
    names = ("positions", "req_rows", "query_start_loc", "ape", "norm_weight", "inv_freq")
    *tensors, kv, score = map(tensor, arguments[:4])
    rest = dict(zip(names, map(tensor, arguments[4:])))
    head_dim = arguments[-2].shape[0]
    entries = torch.full((num_entries, head_dim), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    rows = torch.full((num_entries,), 77, dtype=torch.int32, device=DEVICE)
    torch_compressor.compress_kv(*tensors, kv, score, **rest, ratio=ratio, out=(entries, rows))
    return entries, rows, *tensors


def assert_compressed(got, want):
    """Rows and state to the bit; entries within a rounding to bfloat16."""
    entries, rows, *state = (x.cpu() if isinstance(x, torch.Tensor) else x for x in got)
    entries = entries.float().numpy() if isinstance(entries, torch.Tensor) else np.asarray(entries).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(rows), np.asarray(want[1]))
    for actual, expected in zip(state, want[2:]):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    want = np.asarray(want[0]).astype(np.float32)
    np.testing.assert_allclose(entries, want, rtol=2.0**-7, atol=1e-5)
    unused = np.asarray(rows) < 0
    assert not entries[unused].any() and not np.signbit(entries[unused]).any()


@pytest.mark.parametrize("most, idle_requests", [("ring", 3), ("step", 0)])
def test_windows_that_begin_in_the_ring_and_end_in_the_step(monkeypatch, most, idle_requests):
    """Both orders of blocks of 32 and of 8 tokens, for each way in which the step's tokens can begin in them."""
    lengths = 1, 8, 9, 20, 31, 32, 33, 40, *[0] * idle_requests
    arguments, static = compress_case(np.random.default_rng(14), 128, 16, lengths, dtype=ml_dtypes.bfloat16)
    positions, req_rows, starts = arguments[4:7]
    for request, length in enumerate(lengths):  # each completes its own window
        rows = slice(starts[request], starts[request + 1])
        positions[rows], req_rows[rows] = 128 * (request + 1) - length + np.arange(length), request
    launched = []
    monkeypatch.setattr(kernels, "Launch", lambda *fields: launched.append(Launch(*fields)) or launched[-1])
    got = torch_compress(arguments, **static)
    assert launched[0].constants["MOST"] == most and launched[0].constants["LOADED"] == 32
    assert_compressed(got, plain_compress(CompressorArrays(*arguments), **static, norm_eps=1e-6))


COMPRESS_SHAPES = [
    (4, 32, (1,) * 7, 0),
    (4, 16, (9, 0, 30, 3), 3),
    (128, 16, (1, 1, 260, 1), 0),
    (128, 12, (1, 140, 5), 5),
    (3, 12, (10, 2, 1), 4),
    (1, 16, (3, 2), 0),
]


@PROPERTY
@given(st.integers(0, 10**6), st.sampled_from(COMPRESS_SHAPES), st.booleans(), st.booleans())
def test_compress(seed, shape, bfloat16, searched):
    ratio, head_dim, lengths, more_ring = shape
    dtype = ml_dtypes.bfloat16 if bfloat16 else np.float32
    arguments, static = compress_case(
        np.random.default_rng(seed), ratio, head_dim, lengths, more_ring=more_ring, dtype=dtype
    )
    with pytest.MonkeyPatch.context() as patch:
        if not searched:  # as for more rows, and by several programs
            patch.setattr(kernels, "SEARCHED_ROWS", 0)
            patch.setattr(kernels, "FIND_OPTIONS", {"CHUNK": 8, "COUNTED": 16, "num_warps": 1})
        got = torch_compress(arguments, **static)
    assert_compressed(got, plain_compress(CompressorArrays(*arguments), **static, norm_eps=1e-6))


def test_zeros_keep_their_sign_wherever_a_step_begins():
    """A negative sum that a high score multiplies by 0 is -0; tokens that are -0 make 0 of it in any step."""
    kv = np.full((128, 16), -0.0, np.float32)
    score = np.full((128, 16), 200, np.float32)
    kv[0], score[:8] = -1, 0
    parameters = np.zeros((128, 16), np.float32), np.ones(16, np.float32), np.zeros(4, np.float32)
    found = []
    for begin in (0, 40, 100):
        state = [np.concatenate([x[:begin], np.full((128 - begin, 16), np.nan, np.float32)])[None] for x in (kv, score)]
        step = [x[begin:].astype(ml_dtypes.bfloat16) for x in (kv, score)]
        where = np.arange(begin, 128, dtype=np.int32), np.zeros(128 - begin, np.int32)
        case = *state, *step, *where, np.array([0, 128 - begin], np.int32), *parameters
        entries = torch_compress(case, ratio=128, num_entries=(128 - begin) // 128 + 1)[0]
        found.append(entries[0].view(torch.int16).tolist())
    assert found == [[0] * 16] * 3


@pytest.mark.parametrize("searched", [True, False])
def test_rows_beyond_the_entries_are_left_out(monkeypatch, searched):
    """More rows complete a group than there are entries, as hostile positions can make it."""
    monkeypatch.setattr(kernels, "SEARCHED_ROWS", 1024 if searched else 0)
    monkeypatch.setattr(kernels, "FIND_OPTIONS", {"CHUNK": 8, "COUNTED": 16, "num_warps": 1})
    arguments, _ = compress_case(np.random.default_rng(13), 4, 16, (1,) * 9)
    state_kv, state_score, kv, score, positions, req_rows, *rest = map(tensor, arguments)
    positions[:9], req_rows[:9] = 7, torch.arange(9, dtype=torch.int32, device=positions.device)
    entries = torch.full((7, 16), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    rows = torch.full((7,), 77, dtype=torch.int32, device=DEVICE)
    arrays = state_kv, state_score, kv, score, positions, req_rows, *rest
    few = (entries[:4], rows[:4])
    kernels.compress(executor(rows.device), *arrays, ratio=4, norm_eps=1e-6, num_entries=4, out=few)
    assert rows.tolist() == [0, 1, 2, 3, 77, 77, 77]
    assert not entries[:4].isnan().any() and entries[4:].isnan().all()


@pytest.mark.long
@pytest.mark.parametrize("ratio, cuts", [(4, (9, 10, 22)), (128, (1, 100, 257))])
def test_steps_of_any_size_give_the_same_bits(ratio, cuts):
    """A prompt of one request, at once and cut into steps: tokens come from the step's rows or from the ring."""
    rng, tokens, head_dim = np.random.default_rng(10), max(cuts) + 7, 16
    width = head_dim * (2 if ratio == 4 else 1)
    rows = [rng.standard_normal((tokens, width)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    parameters = rng.standard_normal((ratio, width)), 1 + rng.standard_normal(head_dim) / 8, np.exp(-np.arange(4) / 4)

    def entries(bounds):
        state, found = [np.full((2, 2 * 4 if ratio == 4 else ratio, width), np.nan, np.float32)] * 2, []
        for first, last in itertools.pairwise(bounds):
            step = [x[first:last] for x in rows]
            where = np.arange(first, last, dtype=np.int32), np.ones(last - first, np.int32)
            case = *state, *step, *where, np.array([0, last - first], np.int32), *(np.float32(x) for x in parameters)
            count = (last - first) // ratio + 1
            made, completing, *state = torch_compress(case, ratio=ratio, num_entries=min(count, last - first))
            found.append(made[completing >= 0].view(torch.int16).cpu().numpy())
            state = [x.cpu().numpy() for x in state]
        return np.concatenate(found)

    whole = entries((0, tokens))
    assert len(whole) == tokens // ratio
    np.testing.assert_array_equal(entries((0, *cuts, tokens)), whole)


def test_compressor_refuses_bad_tensors_by_name():
    arguments, static = compress_case(np.random.default_rng(8), 4, 16, (9,))
    with pytest.raises(ValueError, match="compress_kv: score must have shape"):
        torch_compress((*arguments[:3], arguments[3][:, :8].copy(), *arguments[4:]), **static)
    with pytest.raises(ValueError, match="a ring of at least 8 tokens"):
        torch_compress((arguments[0][:, :5].copy(), *arguments[1:]), **static)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 512, (1,) * 64), (4, 128, (3, 1100, 0, 40)), (128, 512, (1, 900, 300))], ids=str)
def test_jax_compresses_in_place(shape):
    arguments, static = compress_case(np.random.default_rng(12), *shape, dtype=ml_dtypes.bfloat16)
    want = plain_compress(CompressorArrays(*map(jnp.asarray, arguments)), **static, norm_eps=1e-6)
    kv, score, positions, req_rows, starts, ape, norm_weight, inv_freq = map(jnp.asarray, arguments[2:])

    def step(state):
        return compress_kv(
            state,
            kv,
            score,
            positions=positions,
            req_rows=req_rows,
            query_start_loc=starts,
            ape=ape,
            norm_weight=norm_weight,
            inv_freq=inv_freq,
            ratio=static["ratio"],
        )

    state = CompressorState(kv=jnp.asarray(arguments[0]), score=jnp.asarray(arguments[1]))
    pointers = [x.unsafe_buffer_pointer() for x in (state.kv, state.score)]
    compiled = jax.jit(step, donate_argnums=0).lower(state).compile()
    copied = f"f32[{','.join(map(str, state.kv.shape))}]"
    assert not [line for line in compiled.as_text().splitlines() if copied in line and " copy(" in line]
    entries, rows, carried = compiled(state)
    assert [x.unsafe_buffer_pointer() for x in (carried.kv, carried.score)] == pointers
    assert_compressed((entries, rows, carried.kv, carried.score), want)

"""The top-k kernels against the plain JAX function, index by index.

Without a GPU the Triton kernels run in the interpreter through the torch launcher, and both kinds are compiled for the
architectures that they serve. On a GPU the same tests launch the Triton and the CUDA kernel for real, and those marked
`gpu` go through JAX's dispatch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_facts import ARCHITECTURES, LEAST_SHARED_MEMORY, compiled_facts
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sparse_mla_torch.operations import topk as torch_topk
from topk_cases import INT_MAX, KINDS, TopkCase, assert_selected, expected, make_case, make_logits, method_of, run_jax
from torch_graphs import capture
from triton_device import DEVICE, ON_GPU, poisoned_memory, tensor

from jax_sparse_mla.indices import TopkTransform, topk_positions, topk_transform
from jax_sparse_mla.indices.topk import triton as kernels
from jax_sparse_mla.indices.topk.api import topk_reference
from jax_sparse_mla.launch import build

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of NaN in the interpreter
]

# (rows, columns, topk): one tile; several loads wide and not; longer than a tile, filtered; topk past the columns.
SHAPES = ((5, 50, 8), (3, 301, 1), (2, 6, 70), (4, 1024, 512), (3, 8192, 2048), (3, 8196, 512), (2, 20_001, 2048))
if ON_GPU:  # a cluster that holds keys, and one that makes a list
    SHAPES += ((2, 40_001, 512), (2, 20_001, 2100))
PROPERTY = settings(max_examples=12 if ON_GPU else 16, deadline=None)  # most compile kernels of their own

ENGINES = ("triton", "cuda") if ON_GPU else ("triton",)


def take_engine(name: str, patch: pytest.MonkeyPatch) -> None:
    """Makes the torch launchers take these kernels."""
    if ON_GPU and name == "triton":
        patch.setattr(torch_topk, "_cuda_module", lambda device: None)
    elif ON_GPU and torch_topk._cuda_module(torch.device("cuda")) is None:
        pytest.skip("needs nvcc and apache-tvm-ffi")


@pytest.fixture(autouse=True, params=ENGINES)
def engine(request, monkeypatch):
    """Which kernels the launchers take, torch's and JAX's."""
    take_engine(request.param, monkeypatch)
    if ON_GPU:
        monkeypatch.setenv("JAX_SPARSE_MLA_TOPK_BACKEND", request.param)
    return request.param


def small_cases():
    """(name, case): every path of the kernels, on small arrays, for a memory checker too."""
    for seed, (shape, kind) in enumerate((s, k) for s in SHAPES for k in ("normal", "mostly zero")):
        method = (None, *TopkTransform)[seed % 3]
        yield f"{shape} {kind} {method}", make_case(seed, shape, kind, method, ragged_logits=seed % 2 == 1)


# --- running --------------------------------------------------------------------------------------


def optional_tensors(case: TopkCase) -> dict:
    names = {"page_table": "page_table", "row_to_request": "row_to_request", "offsets": "topk_indices_offset"}
    arrays = {"row_starts": case.row_starts} | {to: getattr(case, name) for name, to in names.items()}
    return {name: x if x is None else tensor(x) for name, x in arrays.items()}


def run_torch(case: TopkCase, **buffers) -> np.ndarray:
    logits, lengths, optional = tensor(case.logits), tensor(case.lengths), optional_tensors(case)
    if (method := method_of(case)) is None:
        out = torch_topk.topk_positions(logits, lengths, case.topk, optional["row_starts"], **buffers)
    else:
        optional["page_size"] = case.page_size
        out = torch_topk.topk_transform(logits, lengths, case.topk, method=method, **optional, **buffers)
    return out.cpu().numpy()


def check(case: TopkCase) -> None:
    out = torch.full((len(case.logits), case.topk), -99, dtype=torch.int32, device=DEVICE)
    with poisoned_memory():
        run_torch(case, out=out)
    assert_selected(out.cpu().numpy(), case)


# --- selection ------------------------------------------------------------------------------------


@PROPERTY
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(KINDS),
    method=st.sampled_from((None, *TopkTransform)),
    ragged_logits=st.booleans(),
    dtype=st.sampled_from([np.float32, jnp.bfloat16]),
)
def test_equals_plain_jax(seed, shape, kind, method, ragged_logits, dtype):
    check(make_case(seed, shape, kind, method, ragged_logits, dtype))


@pytest.mark.always(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 9_001, 512), (2, 20_000, 2048)])
@pytest.mark.parametrize("split", [True, False])
def test_long_rows_of_every_kind(kind, shape, split, monkeypatch):
    """A row filtered by one program or by several that wait for each other, whatever the sample says."""
    if not split:
        monkeypatch.setattr(kernels, "SPLIT_BELOW_ROWS", 1)
    rows, columns, topk = shape
    assert (kernels.plan_topk(rows, columns, topk).chunks > 1) == split
    logits = make_logits(np.random.default_rng(3), rows, columns, kind)
    for starts in (None, np.array([3, 1], np.int32)):
        check(TopkCase(logits, np.array([columns, columns - 5], np.int32), topk, row_starts=starts))


@pytest.mark.always(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_short_rows_of_every_kind(kind, dtype):
    """Rows that registers hold: the largest of them, in whole and in part."""
    rng = np.random.default_rng(4)
    columns = 4096
    logits = make_logits(rng, 3, columns, kind).astype(dtype)
    lengths = np.array([columns, columns - 7, 3000], np.int32)
    table = rng.integers(0, INT_MAX // 64, (3, columns // 64)).astype(np.int32)
    for topk in (512, 2048):
        check(TopkCase(logits, lengths, topk, page_table=table, page_size=64))
        check(TopkCase(logits, lengths, topk, row_starts=np.array([0, 5, -2], np.int32)))


def test_what_is_outside_the_windows_does_not_matter():
    """NaN and infinities beside each window; a length far below the columns."""
    rng = np.random.default_rng(5)
    for columns, topk in ((9_000, 512), (4_096, 512), (130, 16)):
        lengths = np.array([columns // 2 + 1, columns // 3, topk + 1, topk, 3], np.int32)
        starts = np.array([5, 1, columns - topk - 1, 2, 0], np.int32)
        clean = rng.standard_normal((5, columns)).astype(np.float32)
        column = np.arange(columns)
        inside = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
        want = expected(TopkCase(clean, lengths, topk, row_starts=starts))
        for poison in (np.nan, np.inf, -np.inf):
            case = TopkCase(np.where(inside, clean, np.float32(poison)), lengths, topk, row_starts=starts)
            np.testing.assert_array_equal(expected(case), want)
            assert_selected(run_torch(case), case)


@pytest.mark.long
def test_the_candidates_of_a_random_row_fit(engine):
    """The filter, not the fallback, serves rows of every length: the sample's estimate holds."""
    if engine == "cuda":
        pytest.skip("its candidates stay in shared memory")
    rng = np.random.default_rng(6)
    for columns, topk in ((9_000, 2048), (32_768, 512), (131_072, 2048), (131_072, 512)):
        logits, lengths = rng.standard_normal((3, columns)).astype(np.float32), np.full(3, columns, np.int32)
        case = TopkCase(logits, lengths, topk)
        with poisoned_memory() as made:
            assert_selected(run_torch(case), case)
        *_, candidates, _ = made  # the last is the result
        found, tile = candidates.cpu(), kernels.plan_topk(3, columns, topk).tile
        assert (found >= topk).all() and (found <= tile).all(), (found, tile)


def test_longer_rows_do_not_compile_the_kernels_anew():
    """An eager engine's rows grow from step to step: what follows their length must not be a constant."""
    for rows in (8, 600):
        constants = []
        for columns in (100_000, 104_096, 131_072):
            plan = kernels.plan_topk(rows, columns, 512)
            constants.append(
                (kernels.filter_constants(plan, 512, False), kernels.threshold_constants(plan, 512, False))
            )
        assert constants[0] == constants[1] == constants[2]


def test_bad_tensors_are_refused_by_name():
    case = make_case(1, (3, 8196, 512), "normal", TopkTransform.PAGED, False)
    logits, lengths, table = tensor(case.logits), tensor(case.lengths), tensor(case.page_table)
    with pytest.raises(TypeError, match="topk_positions: logits"):
        torch_topk.topk_positions(logits.double(), lengths, 4)
    with pytest.raises(ValueError, match="logits must be contiguous"):
        torch_topk.topk_positions(logits[:, 1:], lengths, 4)
    with pytest.raises(TypeError, match="lengths"):
        torch_topk.topk_positions(logits, lengths.long(), 4)
    with pytest.raises(ValueError, match="topk must be >= 1"):
        torch_topk.topk_positions(logits, lengths, 0)
    with pytest.raises(ValueError, match="out must have shape"):
        torch_topk.topk_positions(logits, lengths, 4, out=torch.empty((3, 5), dtype=torch.int32, device=DEVICE))
    transform = functools.partial(torch_topk.topk_transform, logits, lengths, 4)
    with pytest.raises(TypeError, match="topk_indices_offset"):
        transform(method=TopkTransform.RAGGED)
    with pytest.raises(TypeError, match="page_table"):
        transform(method=TopkTransform.PAGED)
    with pytest.raises(ValueError, match="page_table must have shape"):
        transform(method=TopkTransform.PAGED, page_table=table[:2])
    with pytest.raises(TypeError, match="method"):
        transform(method="paged", page_table=table)


def test_nothing_to_select():
    lengths = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert torch_topk.topk_positions(lengths[:0].float().reshape(0, 9), lengths[:0], 4).shape == (0, 4)
    empty = torch.zeros((3, 0), device=DEVICE)
    assert torch_topk.topk_positions(empty, lengths + 2, 4).tolist() == [[0, 1, -1, -1]] * 3
    assert torch_topk.topk_positions(empty, lengths + 9, 4).tolist() == [[-1] * 4] * 3


# --- compilation and dispatch ---------------------------------------------------------------------


@pytest.mark.long
@ARCHITECTURES
def test_kernels_compile_for_every_architecture_without_a_gpu(capabilities, tmp_path):
    for fact in compiled_facts("topk", tmp_path, capabilities):
        assert fact["shared"] <= LEAST_SHARED_MEMORY, fact


@pytest.mark.long
@ARCHITECTURES
def test_the_cuda_kernel_compiles_for_every_architecture_without_a_gpu(capabilities, tmp_path):
    tvm_ffi = pytest.importorskip("tvm_ffi")
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    include = tvm_ffi.libinfo.find_include_path()
    command = ["nvcc", "-std=c++17", "-cubin", "-Xptxas", "-v", "-I", include, "-I"]
    command += [tvm_ffi.libinfo.find_dlpack_include_path(), "-o", str(tmp_path / "topk.cubin")]
    for capability, logits in itertools.product(capabilities, ("float32", "bfloat16")):
        source = str(build.folder() / "topk" / f"{logits}.cu")
        run = subprocess.run([*command, f"-arch=sm_{capability}", source], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-2000:]
        assert "0 bytes spill stores" in run.stderr and not re.search(r"[1-9]\d* bytes spill stores", run.stderr)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, _ in small_cases()])
def test_jax_runs_the_kernels(name, engine):
    case = dict(small_cases())[name]
    lowered = jax.jit(lambda logits: run_jax(dataclasses.replace(case, logits=logits))).lower(case.logits)
    names = re.findall(r"@jax_sparse_mla\.(\w+)", lowered.as_text())
    assert names and all((name == "topk") == (engine == "cuda") for name in names)
    assert_selected(run_jax(case), case)


@pytest.mark.gpu
def test_jax_maps_over_the_plain_function():
    rng = np.random.default_rng(7)
    logits = jnp.asarray(rng.standard_normal((2, 3, 64)).astype(np.float32))
    lengths = jnp.asarray(rng.integers(0, 64, (2, 3)).astype(np.int32))
    got = jax.vmap(lambda x, n: topk_positions(x, n, 8))(logits, lengths)
    want = [topk_reference(logits[i], lengths[i], 8) for i in range(2)]
    np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "topk"), [(1, 131_072, 2048), (64, 131_072, 512), (1500, 32_768, 2048)])
def test_every_run_gives_the_same(rows, columns, topk):
    """Rows shared by many programs, more programs than run at once, many ties."""
    generator = torch.Generator(DEVICE).manual_seed(8)
    logits = torch.randn(rows, columns, device=DEVICE, generator=generator)
    logits[::2] = (logits[::2] * 64).round()
    lengths = torch.randint(columns // 2, columns + 1, (rows,), device=DEVICE, generator=generator, dtype=torch.int32)
    first = torch_topk.topk_positions(logits, lengths, topk)
    inside = torch.arange(columns, device=DEVICE) < lengths[:, None]
    # A stable sort gives ties to the lower index.
    order = logits.masked_fill(~inside, -torch.inf)[:64].sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(first[:64].long(), order[:, :topk].sort(dim=1).values)
    for _ in range(20):
        again = torch_topk.topk_positions(logits, lengths, topk)
        assert torch.equal(again, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "topk"), [(4096, 131_072, 2048), (16_500, 131_072, 512)])
def test_rows_past_2_gib_and_past_2_to_the_31_elements(rows, columns, topk):
    """Every slot of the first and the last rows, from torch and from JAX, against the tie rule."""
    logits = torch.empty(rows, columns, device=DEVICE).normal_(generator=torch.Generator(DEVICE).manual_seed(9))
    logits[::2].mul_(1024).round_().div_(
        1024
    )  # several equal logits around the k-th; of random ones a row in 1,000 has
    lengths = torch.full((rows,), columns, dtype=torch.int32, device=DEVICE)
    table = torch.arange(columns // 64, dtype=torch.int32, device=DEVICE).flip(0).repeat(rows, 1)
    paged = {"method": TopkTransform.PAGED, "page_size": 64}
    got = [torch_topk.topk_transform(logits, lengths, topk, page_table=table, **paged)]
    shared = [jax.dlpack.from_dlpack(x) for x in (logits, lengths, table)]
    got.append(torch.from_dlpack(topk_transform(*shared[:2], topk, page_table=shared[2], **paged)))
    ties = 0
    for row in range(0, rows, 256) if rows * columns < 1 << 30 else (0, rows - 256):
        part = slice(row, row + 256)
        # A stable sort gives ties to the lower index.
        values, order = logits[part].sort(dim=1, descending=True, stable=True)
        ties += (values[:, topk - 1] == values[:, topk]).sum().item()
        position = order[:, :topk].sort(dim=1).values
        want = ((columns // 64 - 1 - position // 64) * 64 + position % 64).int()
        for name, slots in zip(("torch", "JAX"), got):
            assert torch.equal(slots[part], want), (name, row)
    assert ties > 100


@pytest.mark.gpu
def test_torch_captures_the_kernels_in_a_cuda_graph():
    logits, lengths = torch.randn(8, 40_000, device=DEVICE), torch.full((8,), 40_000, dtype=torch.int32, device=DEVICE)
    table = torch.randperm(8 * 625, device=DEVICE, dtype=torch.int32).reshape(8, 625)
    out = torch.empty((8, 512), dtype=torch.int32, device=DEVICE)
    arguments = {"method": TopkTransform.PAGED, "page_table": table, "page_size": 64}

    def step():
        torch_topk.topk_transform(logits, lengths, 512, **arguments, out=out)

    step()  # compiles
    graph, _ = capture(step)
    for length in (40_000, 9_000, 3_000, 100, 20_000):
        logits.normal_()
        lengths.fill_(length)
        graph.replay()
        again = torch_topk.topk_transform(logits, lengths, 512, **arguments)
        assert torch.equal(out, again)


def check_small_cases() -> None:
    """Every path of both kernels on small arrays: what compute-sanitizer watches.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python tests/indices/test_topk_kernels.py
    """
    cases = [case for _, case in small_cases()]
    for name in ENGINES:
        with pytest.MonkeyPatch.context() as patch:
            take_engine(name, patch)
            for case in cases:
                check(case)
    print(f"{len(ENGINES) * len(cases)} checks passed")


if __name__ == "__main__":
    check_small_cases()

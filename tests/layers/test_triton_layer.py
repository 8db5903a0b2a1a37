"""The kernel of a layer's writes against the kernels that do one part each: to the bit, in Triton's interpreter or on a
GPU. Those are compared with plain JAX in their own tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import ml_dtypes
from sparse_mla_torch.launch.executor import executor
from triton_device import DEVICE, tensor

from jax_sparse_mla.compressor import triton as compressor
from jax_sparse_mla.indexer import triton as indexer
from jax_sparse_mla.indexer.logits import sylvester
from jax_sparse_mla.kv_cache import KVLayout
from jax_sparse_mla.kv_cache import triton as kv_cache
from jax_sparse_mla.kv_cache.layout import Pages
from jax_sparse_mla.layers import triton as layer
from jax_sparse_mla.layers.write import Step

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of NaN in the interpreter
]

execute = executor(torch.device(DEVICE))
PAGES, EPS = 60, (1e-6, 1e-5)
BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass
class Case:
    """numpy arrays of a layer that stands among `layers`; caches and states hold all of them."""

    ratio: int
    layout: KVLayout
    layers: int
    layer: int
    requests: int  # rows of a layer in the states
    step: Step
    kv: np.ndarray
    swa: np.ndarray
    attn_sink: np.ndarray
    compressor: layer.Compressing = layer.NOTHING
    indexer: layer.Compressing = layer.NOTHING
    queries: tuple = (None, None, None)


def make_case(
    seed,
    ratio,
    *,
    layout=KVLayout.V4_FP8,
    lengths=(1, 1, 1, 1),
    layers=1,
    more_ring=0,
    dtype=BF16,
    pages=(PAGES, PAGES, PAGES),
) -> Case:
    """Requests of these many rows, of which some complete a group, and two padding rows; pages of a layer's sliding
    window, of its entries and of its index keys."""
    rng = np.random.default_rng(seed)
    num_rows, requests, own = sum(lengths) + 2, len(lengths) + 1, min(layers - 1, 1)
    positions, req_rows = np.full(num_rows, -1, np.int32), np.full(num_rows, -1, np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    group = ratio or 4
    for i, (start, length) in enumerate(zip(starts, lengths)):
        ends = 5 * group - length  # with a group, as some others do
        first = rng.choice([0, 3 * group, 1000 * group + 1, 7 * group - length]) if i else max(ends, 0)
        positions[start : start + length] = first + np.arange(length)
        req_rows[start : start + length] = requests - 1 - i
    if max(lengths) == 1:
        positions[rng.integers(1, num_rows)] = -1
        req_rows[rng.integers(1, num_rows)] = requests  # the next layer's first

    def normal(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(dtype)

    def slots(count):
        some = np.full(num_rows, -1, np.int32)
        some[:count] = rng.permutation(count)[:num_rows]
        some[lengths[0] + rng.permutation(num_rows - lengths[0])[:3]] = -1, count, 2**31 - 1
        return some

    def pool(rows, *shape):  # a layer's share, the others poisoned
        if np.issubdtype(np.dtype(shape[-1]), np.uint8):
            share, poison = rng.integers(0, 120, (rows, *shape[:-1])).astype(np.uint8), 0xFF
        else:
            share, poison = normal(rows, *shape[:-1]), np.nan
        every = np.full((layers * rows, *shape[:-1]), poison, share.dtype)
        every[own * rows : (own + 1) * rows] = share
        return every

    def compressing(head_dim, cache):
        width, ring = head_dim * (2 if ratio == 4 else 1), (8 if ratio == 4 else ratio) + more_ring
        states = pool(requests, ring, width, np.float32), pool(requests, ring, width, np.float32)
        rows = normal(num_rows, width, dtype=dtype), normal(num_rows, width, dtype=dtype)
        for x in rows:
            x[sum(lengths) :] = np.nan
        rope = np.tile(np.exp(-np.arange(32) / 4).astype(np.float32), layers)
        parameters = normal(layers * ratio, width), 1 + normal(layers * head_dim) / 8, rope
        return layer.Compressing(*rows, *parameters, *states, cache)

    page, entries = 16, 4
    case = Case(
        ratio=ratio,
        layout=layout,
        layers=layers,
        layer=own,
        requests=requests,
        step=Step(positions, req_rows, starts, slots(pages[0] * page), slots(pages[1] * entries) if ratio else None),
        kv=normal(num_rows, 512, dtype=dtype),
        swa=pool(pages[0], layout.page_bytes(page), np.uint8),
        attn_sink=normal(layers * 3),
    )
    if ratio:
        case.compressor = compressing(512, pool(pages[1], layout.page_bytes(entries), np.uint8))
    if ratio == 4:
        case.indexer = compressing(128, pool(pages[2], entries * 132, np.uint8))
        case.queries = normal(num_rows, 3, 128, dtype=dtype), normal(num_rows, 3), sylvester(128).astype(BF16)
    return case


def tensors(tree):
    if isinstance(tree, tuple):
        made = map(tensors, tree)
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    return tree if tree is None or isinstance(tree, torch.Tensor) else tensor(tree)


def page_sizes(case: Case) -> tuple[int, int]:
    return 16, 4


def fused(case: Case) -> tuple:
    parameters = len(case.attn_sink) // 3
    constants = layer.LayerConstants(
        layout=case.layout,
        ratio=case.ratio,
        page_sizes=page_sizes(case),
        layers=(case.layers, case.layer),
        params=(parameters, min(case.layer, parameters - 1)),
        norm_eps=EPS,
    )
    arrays = case.step, case.kv, case.swa, case.attn_sink, case.compressor, case.indexer, case.queries
    return layer.v4_layer(execute, *tensors(arrays), constants=constants)


def one_by_one(case: Case) -> tuple:
    """The same by the kernels of the parts, on tensors of its own."""
    step, swa = tensors(case.step), tensor(case.swa)

    def where(cache):
        count = len(cache) // case.layers
        return case.layer * count, count

    def pages(cache, page_size):
        return Pages(case.layout, page_size, *where(cache))

    def share(x):
        rows = len(x) // case.layers
        return x[case.layer * rows : (case.layer + 1) * rows]

    swa_size, entries = page_sizes(case)
    kv_cache.write_kv(execute, swa, None, step.swa_slots, tensor(case.kv), pages=pages(swa, swa_size))
    results = [swa, *[None] * 6]

    def compress(part, norm_eps):
        part = tensors(part)
        num_entries = min(len(case.kv), len(case.kv) // case.ratio + len(case.step.query_start_loc) - 1)
        parameters = map(share, part[2:5])
        kept, rows, *state = compressor.compress(
            execute,
            *part[5:7],
            *part[:2],
            *step[:3],
            *parameters,
            ratio=case.ratio,
            norm_eps=norm_eps,
            num_entries=num_entries,
            requests=(case.layer * case.requests, case.requests),
        )
        slots = torch.where(rows >= 0, step.entry_slots[rows.clamp(min=0).long()], -1)
        return kept, slots, state, part.cache

    if case.ratio:
        kept, slots, state, cache = compress(case.compressor, EPS[0])
        kv_cache.write_kv(execute, cache, None, slots, kept, pages=pages(cache, entries))
        results[1:4] = cache, *state
    if case.ratio == 4:
        kept, slots, state, cache = compress(case.indexer, EPS[1])
        indexer.write_index_k(execute, cache, slots, kept, hadamard=True, pages=where(cache))
        values, scale = indexer.quantize_index_q(execute, tensor(case.queries[0]), hadamard=True)
        results[4:7] = cache, *state
        results += [values, tensor(case.queries[1]) * scale]
    else:
        results += [None, None]
    results.insert(7, share(tensor(case.attn_sink)) if case.layers > 1 else None)
    return tuple(results)


NAMES = ("swa", "compressed", "state_kv", "state_score", "index_k", "index_state_kv", "index_state_score")
NAMES += ("sink", "values", "weights")


def assert_same(case: Case) -> None:
    got, want = fused(case), one_by_one(case)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            a, b = (x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x for x in (a, b))
            np.testing.assert_array_equal(a.cpu().numpy(), b.cpu().numpy(), err_msg=name)
    if case.ratio:  # the comparison is of something
        assert not np.array_equal(got[1].cpu().numpy(), case.compressor.cache)


@pytest.mark.always(2)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("layout", [KVLayout.V4_FP8, KVLayout.V4_BF16], ids=repr)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_decode(ratio, layout, layers):
    assert_same(make_case(ratio + layers, ratio, layout=layout, layers=layers))


@pytest.mark.parametrize("sm_count", [1, 132])
def test_more_tokens_loaded_together_give_the_same_bits(monkeypatch, sm_count):
    """On a GPU with a multiprocessor for each program, and on one with too few."""
    monkeypatch.setattr(execute, "device", execute.device._replace(sm_count=sm_count))
    assert_same(make_case(5, 128))


@pytest.mark.parametrize("ratio", [4, 128])
def test_drafts_with_room_in_the_ring(ratio):
    """Several rows a request, none of which takes the place of a token that another's window reads: one launch."""
    assert_same(make_case(3, ratio, lengths=(3, 3, 3, 3), more_ring=2, dtype=np.float32))


@pytest.mark.parametrize("field", ["kv", "score", "norm_weight"])
def test_inputs_of_different_dtypes(field):
    case = make_case(7, 4, dtype=np.float32)
    case.compressor = case.compressor._replace(**{field: getattr(case.compressor, field).astype(BF16)})
    case.indexer = case.indexer._replace(**{field: getattr(case.indexer, field).astype(BF16)})
    assert_same(case)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    lengths = (1,) * 64 if seed % 2 else tuple(rng.integers(1, 9, 5))
    assert_same(make_case(seed, [4, 128, 0][seed % 3], lengths=lengths, layers=3, more_ring=max(lengths) - 1))


def as_last_layer(case: Case, layers: int) -> tuple[Case, torch.Tensor]:
    """The layer of a case that has one, as the last of so many, and the bytes in which its caches and states lie. The
    last layers follow each other there, for nothing else may be touched: the others of one pool may be anywhere."""
    arrays = case.swa, case.compressor.cache, *case.compressor[5:7], case.indexer.cache, *case.indexer[5:7]
    end = (layers - 1) * max(x.nbytes for x in arrays)
    memory = torch.full((end + sum(x.nbytes for x in arrays),), 0xFF, dtype=torch.uint8, device=DEVICE)
    pools = []
    for x in map(tensor, arrays):
        end += x.nbytes
        pools.append(memory[end - layers * x.nbytes : end].view(x.dtype).view(-1, *x.shape[1:]))
        pools[-1][-len(x) :] = x
    swa, *pools = pools
    names = "cache", "state_kv", "state_score"
    compressor = case.compressor._replace(**dict(zip(names, pools[:3])))
    indexer = case.indexer._replace(**dict(zip(names, pools[3:])))
    changes = {"swa": swa, "compressor": compressor, "indexer": indexer, "layers": layers, "layer": layers - 1}
    return dataclasses.replace(case, **changes), memory


def check_last_layer(case: Case, layers: int) -> None:
    last, memory = as_last_layer(case, layers)
    got, want = fused(last), one_by_one(case)
    for i, (name, a, b) in enumerate(zip(NAMES, got, want, strict=True)):
        assert (a is None) == (b is None), name
        if a is None:
            continue
        own = a[-len(b) :].view(torch.uint8)
        np.testing.assert_array_equal(own.cpu().numpy(), b.view(torch.uint8).cpu().numpy(), err_msg=name)
        if i < 7:  # a cache or a state
            own.fill_(0xFF)
    assert all(bool((part == 0xFF).all()) for part in memory.split(2**28)), "another layer was written"


FEW_PAGES = 4, 16, 64  # of similar sizes


def test_the_last_layer_of_several():
    check_last_layer(make_case(11, 4, pages=FEW_PAGES), 3)


@pytest.mark.gpu
def test_pools_beyond_2_gib():
    """Every cache and state of the last layer begins beyond 2^31 bytes, the compressor's beyond 2^31 numbers."""
    case, layers = make_case(11, 4, pages=FEW_PAGES), 2**16
    for x in (case.swa, case.compressor.cache, case.compressor.state_kv, case.indexer.cache, case.indexer.state_kv):
        assert (layers - 1) * x.nbytes > 2**31
    assert (layers - 1) * case.compressor.state_kv.size > 2**31
    check_last_layer(case, layers)

"""Products of bfloat16 tensors where torch has no kernel of its own, on any machine."""

import threading

import pytest

torch = pytest.importorskip("torch")

from sparse_mla_torch import cpu_matmul as products
from torch.nn import functional

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True, scope="module")
def torch_without_slow_products():
    """That of all modules would hide what these tests enter."""


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(products, "_has_kernels", lambda: False)


def tensors(*shapes, dtype=torch.bfloat16):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=random).to(dtype) for shape in shapes]


A, B = (2, 16, 24), (2, 24, 8)
GROUPS = torch.tensor([8, 16], dtype=torch.int32)
CALLS = {
    "@": (lambda a, b: a @ b, A, B),
    "matmul": (torch.matmul, A, B),
    "bmm": (torch.bmm, A, B),
    "mm": (lambda a, b: torch.mm(a, mat2=b), A[1:], B[1:]),
    "linear": (functional.linear, A, B[:0:-1]),
    "bias": (functional.linear, A, B[:0:-1], B[2:]),
    "baddbmm": (torch.baddbmm, (2, 16, 8), A, B),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->kbi", a, b), A, B),
    "einsum of a list": (lambda a, b: torch.einsum("bij,bjk->kbi", [a, b]), A, B),
    "grouped_mm": (lambda a, b: functional.grouped_mm(a, b, offs=GROUPS), A[1:], B),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_are_rounded_once(name, without_kernels):
    call, *shapes = CALLS[name]
    operands = tensors(*shapes)
    expected = call(*(x.float() for x in operands)).to(torch.bfloat16)
    with products.quick_products(), products.quick_products():
        found = call(*operands)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def widened(monkeypatch):
    """The dtypes that a product is made of from now on."""
    seen, matmul = [], torch.matmul
    monkeypatch.setattr(products, "_wide", lambda x: seen.append(x.dtype) or x.float())
    return seen, matmul


def test_only_bfloat16_products_of_the_cpu_are_widened(without_kernels, monkeypatch):
    seen, matmul = widened(monkeypatch)
    with products.quick_products():
        for dtype in (torch.float32, torch.float64):
            assert matmul(*tensors(A, B, dtype=dtype)).dtype == dtype
        a, b = tensors(A, A)
        assert (a + b).dtype == torch.bfloat16
        assert not seen
        assert matmul(*tensors(A, B)).dtype == torch.bfloat16 and seen == [torch.bfloat16] * 2
        other = threading.Thread(target=matmul, args=tensors(A, B))
        other.start(), other.join()
    matmul(*tensors(A, B))
    assert len(seen) == 2


def test_nothing_changes_where_torch_has_kernels(monkeypatch):
    monkeypatch.setattr(products, "_has_kernels", lambda: True)
    seen, matmul = widened(monkeypatch)
    with products.quick_products():
        matmul(*tensors(A, B))
    assert not seen


def test_transformers_runs_within_it(without_kernels, monkeypatch):
    pytest.importorskip("transformers")
    from hf_models import random_tokens, small_model
    from sparse_mla_torch.eager.model import Eager

    seen, wide = [], products._wide
    monkeypatch.setattr(products, "_wide", lambda x: seen.append(x) or wide(x))
    model = small_model("v32")
    if next(model.parameters()).device.type != "cpu":
        pytest.skip("products on a GPU are torch's own")
    Eager(model).agreeing(9, [*random_tokens(9, 0), 1, 2])
    assert seen

"""Products by oneDNN against float64, wherever torch has it: also on processors whose runs do not take it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fspo.mcore.machine import cpu_products


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the products that oneDNN made."""
    cpu_products.install_products()
    shapes, linear = [], cpu_products._linear

    def counted(left: Tensor, right: Tensor, *options: object) -> Tensor:
        shapes.append((*left.shape, right.shape[0]))
        return linear(left, right, *options)

    monkeypatch.setattr(cpu_products, "_linear", counted)
    return shapes


def gap(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def test_a_layer_and_its_gradients(asked: list[tuple[int, ...]]) -> None:
    wide = [torch.randn(shape, dtype=torch.float64) for shape in ((700, 160), (300, 160), (700, 300))]
    x, w, slope = (tensor.float().requires_grad_() for tensor in wide)
    out = torch.nn.functional.linear(x, w)
    out.backward(slope)
    assert x.grad is not None and w.grad is not None
    wants = (wide[0] @ wide[1].T, wide[2] @ wide[1], wide[2].T @ wide[0])
    assert max(gap(*pair) for pair in zip((out, x.grad, w.grad), wants, strict=True)) < 1e-6
    # 700 tokens are 512, 128 and 60, which become 64.
    blocks = [[(n, 160, 300) for n in (512, 128, 64)], [(n, 300, 160) for n in (512, 128, 64)]]
    assert asked[:6] in (blocks[0] + blocks[1], blocks[0] + [(300, n, 160) for n in (512, 128, 64)])
    assert len(asked) == 9


def test_few_shapes_are_asked_for(asked: list[tuple[int, ...]]) -> None:
    """oneDNN holds memory for each."""
    w = torch.randn(300, 160)
    for tokens in range(700, 1500, 7):
        x, slope = torch.randn(tokens, 160), torch.randn(tokens, 300)
        for left, right in ((x, w.T), (slope, w), (slope.T, x)):
            assert gap(left @ right, left.double() @ right.double()) < 1e-6
    assert len(set(asked)) <= 3 * 8


@pytest.mark.parametrize("shape", [(6000, 40, 900), (900, 40, 6000)], ids=["rows", "columns"])
@pytest.mark.parametrize("beta", [0, 1])
def test_a_product_into_a_tensor_is_made_in_pieces(
    asked: list[tuple[int, ...]], shape: tuple[int, int, int], beta: int
) -> None:
    rows, inner, columns = shape
    left, right, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(rows, columns)
    want = beta * out.double() + 0.3 * (left.double() @ right.double())
    same = torch.addmm(out, left, right, beta=beta, alpha=0.3, out=out)
    assert same is out and gap(out, want) < 1e-6
    assert len(asked) > 2 and all(shape[0] * shape[2] * 4 <= cpu_products._PIECE_BYTES for shape in asked)


def test_what_is_multiplied_by_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN needs hundreds of times as long for columns of a wider tensor: an update with adapters took four
    times as long."""
    cpu_products.install_products()
    dense, linear = [], cpu_products._linear

    def seen(left: Tensor, right: Tensor, *options: object) -> Tensor:
        dense.append(right.is_contiguous() or right.t().is_contiguous())
        return linear(left, right, *options)

    monkeypatch.setattr(cpu_products, "_linear", seen)
    low, slope, weight = (
        torch.randn(1024, 32)[:, :16],
        torch.randn(1024, 3072)[:, :1536],
        torch.randn(200, 400),
    )
    for left, right in (
        (slope.t(), low),
        (torch.randn(800, 200), weight[:, :200]),
        (torch.randn(800, 200), weight[:, 200:].t()),
    ):
        assert gap(left @ right, left.double() @ right.double()) < 1e-6
    assert len(dense) > 3 and all(dense)


def test_others_stay_torchs(asked: list[tuple[int, ...]]) -> None:
    small, double = torch.randn(8, 8), torch.randn(600, 600, dtype=torch.float64)
    assert gap(small @ small, small.double() @ small.double()) < 1e-6
    assert torch.equal(torch.eye(600, dtype=torch.float64) @ double, double)
    added, into = torch.ones(600, 600), torch.empty(600, 600)
    one = torch.eye(600)
    assert torch.equal(torch.addmm(added, one, one, out=into), added + one)
    assert torch.zeros(0, 5).mm(torch.zeros(5, 7)).shape == (0, 7) and not asked

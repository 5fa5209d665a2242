"""Rounding to fp8: the error that is promised, what a product of rounded matrices is off by, and what compiles."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.train.kernels.float8_rounding import float8_rows, float8_transposed, round_rows
from phalanx.train.parallel import float8


def numbers(tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Columns of very different size, one of zeros, and one with a single large number."""
    torch.manual_seed(0)
    rows = torch.randn(tokens, columns) * torch.logspace(-4, 4, columns)
    rows[:, 1] = 0
    rows[:, 2], rows[3, 2] = 1e-3, 50.0
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [float8_rows, round_rows])
def test_no_element_is_off_by_more_than_is_promised(whole, dtype: torch.dtype) -> None:
    rows = numbers(48, 32, dtype).t().contiguous()
    rounded, scale = whole(rows)
    assert (rounded.shape, rounded.dtype, scale.shape) == (rows.shape, torch.float8_e4m3fn, (32, 1))
    assert rounded.is_contiguous()
    exact = rows.double()
    largest = exact.abs().amax(dim=1, keepdim=True)
    off = (rounded.double() * scale.double() - exact).abs()
    bound = torch.maximum(exact.abs() / 16, largest * 2**-10 / 448) * (1 + 1e-5)
    assert (off <= bound).all()
    assert torch.equal(rounded[1].float(), torch.zeros(48))


def test_a_transposed_copy_has_one_scale() -> None:
    rows = numbers(48, 32)
    scale = float8_rows(rows)[1].amax()
    rounded = float8_transposed(rows, scale)
    assert (rounded.shape, rounded.dtype, rounded.is_contiguous()) == ((32, 48), torch.float8_e4m3fn, True)
    exact = rows.double().t()
    off = (rounded.double() * scale.double() - exact).abs()
    assert (off <= torch.maximum(exact.abs() / 16, exact.abs().amax() * 2**-10 / 448) * (1 + 1e-5)).all()


def test_not_a_number_stays_visible() -> None:
    rows = numbers(16, 16)
    rows[5, 7] = float("nan")
    rounded, scale = float8_rows(rows)
    assert (rounded[5].float() * scale[5]).isnan().any()
    assert not (rounded[6].float() * scale[6]).isnan().any()
    assert float8_transposed(rows, scale.amax()).float().isnan().any()


def test_shapes_are_known_without_data_and_under_compile() -> None:
    with FakeTensorMode():
        rounded = float8_transposed(torch.empty(48, 32, dtype=torch.bfloat16), torch.empty(()))
        assert (rounded.shape, rounded.dtype) == ((32, 48), torch.float8_e4m3fn)
    rows, scale = numbers(48, 32), torch.tensor(0.5)
    compiled = torch.compile(lambda one: float8_transposed(one * 2, scale), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(rows).float(), float8_transposed(rows * 2, scale).float())
    operator = torch.ops.phalanx.float8_transposed.default
    torch.library.opcheck(operator, (rows, scale), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(float8_rows, (rows,), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("tokens", [64, 72])  # 72 is no multiple of 16: its weight gradient is not an fp8 product
def test_the_three_products_of_a_layer(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product is off by the rounding of its factors, and weight gradients are never summed with few bits."""
    sums = []

    def multiply(left, right, dtype, *, fast_sums=True):
        sums.append(fast_sums)
        return ((left[0].double() * left[1]) @ (right[0].double() * right[1]).t()).to(dtype)

    monkeypatch.setattr(float8, "multiply_fp8", multiply)
    torch.manual_seed(0)
    layer = float8.Float8Linear(torch.nn.Linear(32, 48, bias=False))
    x = torch.randn(2, tokens // 2, 32, requires_grad=True)
    grad = torch.randn(2, tokens // 2, 48)
    out = layer(x)
    out.backward(grad)
    exact_x, exact_weight = x.detach().double(), layer.weight.detach().double()
    expected = (
        (out, exact_x @ exact_weight.t()),
        (x.grad, grad.double() @ exact_weight),
        (layer.weight.grad, grad.double().flatten(0, 1).t() @ exact_x.flatten(0, 1)),
    )
    for ours, theirs in expected:
        assert float((ours.detach().double() - theirs).norm() / theirs.norm()) < 0.05  # 4 bits of each factor: 3.7 %
    assert sums == ([True, True, False] if tokens == 64 else [True, True])
    with torch.no_grad():
        assert torch.equal(layer(x), out)

"""Every operation of the library: truth, gradients, shapes without data, compiled code; on a GPU its kernels too."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.train.kernels.adamw import adamw_step_, round_stochastically
from phalanx.train.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_op, reference_loss
from phalanx.train.kernels.moe_permute import combine_rows, gather_rows
from phalanx.train.kernels.operations import load_all
from phalanx.train.kernels.rms_norm import add_rms_norm, rms_norm
from phalanx.train.kernels.rope import rotate_heads
from phalanx.train.kernels.selector import largest_error
from phalanx.train.kernels.swiglu import gated_down, swiglu

OPS = load_all()
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_every_variant_keeps_the_bound_it_states(name: str, device: str) -> None:
    op = OPS[name]
    assert len(op.shapes) >= 12
    for dtype in op.dtypes:
        for variant in op.variants:
            for seed, shape in enumerate(op.odd_shapes):
                off = largest_error(op, variant, shape, dtype, torch.device(device), seed)
                assert off <= op.error_bound(dtype), (variant, shape, dtype, off)


def test_the_error_of_a_wrong_kernel_is_seen() -> None:
    """The measure of the test above: half the rows, and a gradient that is missing a term."""
    op = OPS["swiglu"]
    wrong = {
        "half": lambda gate, up: (torch.cat([swiglu(gate, up)[:-1], torch.zeros_like(up[-1:])]),),
        "gradient": lambda gate, up: (swiglu(gate.detach(), up) + 0 * gate,),
    }
    from dataclasses import replace

    planted = replace(op, variants={**op.variants, **wrong})
    for variant in wrong:
        assert largest_error(planted, variant, op.odd_shapes[1], torch.float32, torch.device("cpu"), 0) > 0.5


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("chunk", [0, 7, 64])
def test_loss_in_parts_is_the_loss_at_once(chunk: int, scale: float) -> None:
    """In float64 exactly; whatever the parts, whatever the loss is multiplied by beforehand or in backward."""
    hidden, weight, targets = OPS["linear-cross-entropy"].make_inputs(
        {"tokens": 37, "width": 12, "vocab": 50}, torch.float64, torch.device("cpu"), 0
    )
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    (truth,) = reference_loss(hidden, weight, targets)
    wanted = torch.autograd.grad(truth * 0.25, leaves)
    loss = linear_cross_entropy(hidden, weight, targets, scale=scale, chunk=chunk)
    for found, expected in zip((loss, *torch.autograd.grad(loss * 0.25, leaves)), (truth, *wanted), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets, chunk=chunk), truth.detach())


def test_a_frozen_head_and_a_second_backward() -> None:
    hidden = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    weight, targets = torch.randn(11, 4, dtype=torch.float64), torch.arange(9)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    (truth,) = torch.autograd.grad(reference_loss(hidden, weight, targets), (hidden,))
    torch.testing.assert_close(hidden.grad, truth)
    with pytest.raises(RuntimeError, match="went backward before"):
        loss.backward()


def test_the_product_of_a_gated_mlp_is_not_kept() -> None:
    gate, up = (torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        out = gated_down(gate, up, weight)
    assert {one.data_ptr() for one in kept} == {gate.data_ptr(), up.data_ptr(), weight.data_ptr()}
    plain = (torch.nn.functional.silu(gate) * up) @ weight.t()
    grad = torch.randn_like(out)
    found, truth = (torch.autograd.grad(one, (gate, up, weight), grad) for one in (out, plain))
    for one, other in zip((out, *found), (plain, *truth), strict=True):
        torch.testing.assert_close(one, other)


def calls() -> dict[str, tuple[object, tuple[torch.Tensor, ...]]]:
    """What compiled code calls, with small inputs that have gradients."""
    torch.manual_seed(0)
    rows, more, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)
    cos, sin = torch.rand(3, 4), torch.rand(3, 4)
    head, targets = torch.randn(10, 8), torch.tensor([1, 2, -100, 4, 5, 9])
    back = torch.randperm(6).view(3, 2)
    return {
        "norm": (rms_norm, (rows, weight)),
        "sum": (lambda *given: sum(add_rms_norm(*given)), (rows, more, weight)),
        "swiglu": (swiglu, (rows, more)),
        "gated_down": (gated_down, (rows, more, head)),
        "rope": (lambda x: rotate_heads(x, cos, sin), (torch.randn(2, 3, 2, 8),)),
        "gather": (lambda x: gather_rows(x, back), (torch.randn(3, 8),)),
        "combine": (lambda y, share: combine_rows(y, back, share), (rows, torch.rand(3, 2))),
        "loss": (lambda x, w: linear_cross_entropy(x, w, targets, chunk=4), (rows, head)),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_compile_and_know_their_shapes_without_data(name: str) -> None:
    call, inputs = calls()[name]
    given = [one.requires_grad_() for one in inputs]
    plain = call(*given)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(compiled, plain)
    for one, other in zip(
        torch.autograd.grad(compiled.sum(), given), torch.autograd.grad(plain.sum(), given), strict=True
    ):
        torch.testing.assert_close(one, other)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(one.detach()).requires_grad_() for one in inputs]
        out = call(*fakes)
        assert (out.shape, out.dtype) == (plain.shape, plain.dtype)
        grads = torch.autograd.grad(out.sum(), fakes)
    assert [one.shape for one in grads] == [one.shape for one in inputs]


def test_operators_say_what_they_change() -> None:
    utils = ("test_schema", "test_faketensor")
    logits, targets = torch.randn(5, 7), torch.tensor([0, -100, 3, 6, 2])
    ops = torch.ops.phalanx
    torch.library.opcheck(ops.cross_entropy_gradient_.default, (logits, targets, 0.5), test_utils=utils)
    torch.library.opcheck(ops.scale_unless_one_.default, (logits, torch.tensor(0.5)), test_utils=utils)
    grad, gate, up = (torch.randn(5, 7) for _ in range(3))
    torch.library.opcheck(ops.swiglu_gradients_.default, (grad, gate, up), test_utils=utils)
    torch.library.opcheck(
        linear_cross_entropy_op, (torch.randn(5, 4), torch.randn(7, 4), targets, 1.0, 2, False), test_utils=utils
    )
    torch.library.opcheck(ops.cross_entropy_float8.default, (logits, targets), test_utils=utils)
    states = tuple(torch.rand(9) for _ in range(4))
    torch.library.opcheck(ops.adamw_.default, (*states, 1e-3, 0.9, 0.95, 1e-8, 0.1, 3, 0), test_utils=utils)


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_rounding_moves_weights_by_less_than_a_digit(device: str) -> None:
    """A step of 1/39 of a bf16 digit moves 1/39 of the weights, and none with rounding to nearest."""
    weight, grad = (torch.ones(100_000, dtype=torch.bfloat16, device=device) for _ in range(2))
    first, second = (torch.zeros(100_000, device=device) for _ in range(2))
    again = weight.clone()
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "decay": 0.0, "step": 1, "seed": 3}
    adamw_step_(weight, grad, first.clone(), second.clone(), **options)
    moved = float(1.0 - weight.double().mean())
    assert abs(moved - 1e-4) < 1e-5  # five standard deviations
    adamw_step_(again, grad, first, second, **options)
    assert torch.equal(weight, again)


def test_stochastic_rounding_leaves_what_is_no_number() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0, 0.0])
    rounded = round_stochastically(values, torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded.float(), values, equal_nan=True)

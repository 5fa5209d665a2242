"""Whatever the shortcut, the result is torch's own: the same shapes, strides, formats and sharing of storage."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.train.tracing.shortcuts import Shortcuts

aten = torch.ops.aten
OPERATORS = {
    "view": lambda x, y: x.view(6, 4),
    "slice": lambda x, y: x[1:, 1:3],
    "transpose": lambda x, y: x.transpose(0, 1),
    "unbind": lambda x, y: x.unbind(),
    "split": lambda x, y: x.split(2, dim=1),
    "a view that does not say so": lambda x, y: aten._unsafe_view.default(x, [24]),
    "product": lambda x, y: x * y,
    "with a number": lambda x, y: x * 2.5,
    "promotion": lambda x, y: x + y.double(),
    "promotion by a tensor without dimensions": lambda x, y: x.to(torch.int64) * y.sum(),
    "strides kept": lambda x, y: x.transpose(0, 2).exp(),
    "matrices": lambda x, y: x @ y.transpose(1, 2),
    "joined": lambda x, y: torch.cat([x, y], dim=1),
    "format": lambda x, y: x.to(torch.bfloat16),
    "several results": lambda x, y: torch.topk(x, 2),
    "in place": lambda x, y: x.mul_(y),
    "made from nothing": lambda x, y: torch.zeros(3, 5, dtype=torch.int32),
    "made of others, in inference": lambda x, y: inferred(x),
    "expanded": lambda x, y: x[:, :1].expand(2, 7, 4) + 1,
}


@torch.inference_mode()
def inferred(x):
    return torch.ops.aten.to.dtype_layout(x, dtype=torch.float64, device=torch.device("cpu"))


class Through(TorchDispatchMode):
    """Sends every operator through the shortcuts, as the recorder does."""

    def __init__(self, mode):
        super().__init__()
        self.shortcuts = Shortcuts(mode)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return self.shortcuts.run(op, args, kwargs or {})


def facts(found, given):
    """All that a listener could tell of a result, with storages named by where they come from."""
    places = {one.untyped_storage()._cdata: number for number, one in enumerate(given)}
    several = found if isinstance(found, (tuple, list)) else (found,)
    return [
        (one.shape, one.stride(), one.dtype, one.device, one.storage_offset(), one.untyped_storage().nbytes(),
         places.get(one.untyped_storage()._cdata, "new"), type(one) is FakeTensor)
        for one in several
    ]  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_the_result_is_torchs_own(name):
    run = OPERATORS[name]
    with FakeTensorMode() as mode:
        x, y = torch.empty(2, 3, 4), torch.empty(2, 3, 4)
        expected = facts(run(x, y), (x, y))
        with Through(mode):
            for _ in range(3):  # learnt, then repeated
                assert facts(run(x, y), (x, y)) == expected


def test_every_repetition_has_a_storage_of_its_own():
    with FakeTensorMode() as mode, Through(mode):
        x = torch.empty(4, 4)
        results = [x * 2.0 for _ in range(4)]
        assert len({one.untyped_storage()._cdata for one in results}) == 4


def test_other_shapes_and_numbers_are_other_results():
    with FakeTensorMode() as mode, Through(mode):
        assert [torch.empty(n, 4).sum(0).shape for n in (2, 3)] == [(4,), (4,)]
        assert [torch.empty(n, 4).sum(1).shape for n in (2, 3)] == [(2,), (3,)]
        square = torch.empty(4, 4)
        assert [(one * 2.0).stride() for one in (square, square.t())] == [(4, 1), (1, 4)]
        ones = torch.empty(4, dtype=torch.int64)
        assert [(ones * factor).dtype for factor in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_what_depends_on_values_is_left_to_torch():
    with FakeTensorMode() as mode, Through(mode):
        x = torch.empty(4, 4)
        with pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException):
            x.nonzero()
        known = torch.tensor(3)
        assert int(known + 1) == 4


def test_gradients_flow():
    with FakeTensorMode() as mode, Through(mode):
        x = torch.empty(2, 3, requires_grad=True)
        for _ in range(2):
            (x.view(6).exp() * 2.0).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (2, 3)

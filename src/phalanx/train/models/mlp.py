"""The dense MLP: two matrices, or three with a gate (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Mlp(nn.Module):
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, hidden: int, ffn: int, *, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=bias) if gated else None
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)
        self.act = ACTIVATIONS[activation]

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Each position on its own."""
        up_BSF = self.up(x_BSD)
        inner_BSF = self.act(up_BSF) if self.gate is None else self.act(self.gate(x_BSD)) * up_BSF
        out_BSD: Tensor = self.down(inner_BSF)
        return out_BSD

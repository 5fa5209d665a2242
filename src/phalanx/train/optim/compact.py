"""AdamW whose moments, or weights, are kept in fewer bits than it computes with: bf16 or 8-bit blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from phalanx.train.optim.base import gradient, state_piece, total_bytes
from phalanx.train.optim.moments import Store, store, working
from phalanx.train.optim.rounding import dice, to_bf16
from phalanx.train.parallel.pieces import Piece


class CompactAdamW:
    """The update of AdamW in fp32, one piece at a time: only that piece's moments are ever wide."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decays: Callable[[str], bool],
        kind: str,
    ) -> None:
        self.steps = 0
        self._pieces = list(pieces)
        self._betas, self._eps = betas, eps
        self._decay = [weight_decay if decays(piece.name) else 0.0 for piece in pieces]
        self._first = [store(piece, "exp_avg", kind=kind, signed=True) for piece in pieces]
        self._second = [store(piece, "exp_avg_sq", kind=kind, signed=False) for piece in pieces]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every piece."""
        self.steps += 1
        for i, piece in enumerate(self._pieces):
            if piece.tensor.numel():
                update = self._direction(piece, self._first[i], self._second[i])
                apply(piece, update, lr=lr, weight_decay=self._decay[i], step=self.steps)

    def _direction(self, piece: Piece, first: Store, second: Store) -> torch.Tensor:
        (beta1, beta2), grad = self._betas, gradient(piece).to(working(piece.tensor.dtype))
        m = first.read().lerp_(grad, 1.0 - beta1)
        first.write(m, self.steps)
        v = second.read().mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        second.write(v, self.steps)
        root = (v / (1.0 - beta2**self.steps)).sqrt_().add_(self._eps)
        return m / root / (1.0 - beta1**self.steps)

    def state(self) -> list[Piece]:
        """The moments, decoded: two wide tensors per piece, so ask for it only to save or to load."""
        return [
            state_piece(piece, name, kept.read())
            for piece, *moments in zip(self._pieces, self._first, self._second, strict=True)
            for name, kept in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)
        ]

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Encode the moments anew; what this very layout wrote comes back bit by bit."""
        for piece, first, second in zip(self._pieces, self._first, self._second, strict=True):
            first.write(state[f"{piece.name}#exp_avg"], steps)
            second.write(state[f"{piece.name}#exp_avg_sq"], steps)
        self.steps = steps

    def state_bytes(self) -> int:
        """4 bytes per parameter in bf16, 2.03 in 8-bit blocks."""
        return total_bytes([tensor for kept in (*self._first, *self._second) for tensor in kept.tensors()])


def apply(piece: Piece, update: torch.Tensor, *, lr: float, weight_decay: float, step: int) -> None:
    """weight = weight · (1 - lr · decay) - lr · update, in the working format; bf16 weights are rounded by dice."""
    wide = piece.tensor.to(update.dtype)
    wide = wide.mul(1.0 - lr * weight_decay).add_(update, alpha=-lr)
    if piece.tensor.dtype == torch.bfloat16:
        wide = to_bf16(wide, dice(piece, step=step, salt="weight"))
    piece.tensor.copy_(wide)

"""Tokens to vectors: the token table, learned positions (GPT-2) and a norm (BLOOM) where the shape has them."""

from __future__ import annotations

from torch import Tensor, nn

from phalanx.job.model import ModelShape


def norm_of(shape: ModelShape) -> nn.Module:
    """The norm every part of this model uses."""
    kind = nn.LayerNorm if shape.norm == "layer" else nn.RMSNorm
    return kind(shape.hidden, eps=shape.norm_eps)


class Embedding(nn.Module):
    """The first stage's entrance."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        learned = shape.positions == "learned"
        self.positions = nn.Embedding(shape.max_positions, shape.hidden) if learned else None
        self.norm = norm_of(shape) if shape.embedding_norm else None

    def forward(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        """hidden_BSD of these tokens at these positions."""
        x_BSD: Tensor = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(positions_S)
        return x_BSD if self.norm is None else self.norm(x_BSD)

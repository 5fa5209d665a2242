"""The decoder: embedding, blocks, norm and head, or the slice of them that one pipeline stage holds.

B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.job.model import ModelShape
from phalanx.train.kernels.linear_cross_entropy import linear_cross_entropy
from phalanx.train.models.initial_values import draw_values
from phalanx.train.models.layers import Attention, Embedding, Mlp, Rope, norm_of, rope_tables
from phalanx.train.models.moe import Moe
from phalanx.train.models.support import refuse_untrainable

TIED = ("embed.tokens.weight", "head.weight")


class OutputHead(nn.Linear):
    """Logits of hidden states; or, given targets, the summed loss, without ever holding all logits."""

    float8 = False  # its three products while training, where that was asked for and measured to be faster

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """logits_BSV; or the cross-entropy summed over the valid targets, which will be multiplied by `scale`."""
        if targets_BS is None:
            return super().forward(x_BSD)
        return linear_cross_entropy(
            x_BSD.flatten(0, 1), self.weight, targets_BS.flatten(), scale=scale, float8=self.float8
        )


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the stream."""

    # The same by operators that hold norms and activations with their matrices, where they were measured to be faster.
    fused: Callable[[Block, Tensor, Rope | None], Tensor] | None = None

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.attn_norm = norm_of(shape)
        self.attn = Attention(shape)
        self.mlp_norm = norm_of(shape)
        routed = shape.is_moe and layer >= shape.dense_layers
        self.mlp = (
            Moe(shape)
            if routed
            else Mlp(shape.hidden, shape.ffn, gated=shape.gated, bias=shape.bias, activation=shape.activation)
        )

    def forward(self, x_BSD: Tensor, rope: Rope | None) -> Tensor:
        """One layer."""
        if self.fused is not None and torch.is_grad_enabled():
            return self.fused(self, x_BSD, rope)
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), rope)
        out_BSD: Tensor = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return out_BSD


class Decoder(nn.Module):
    """A GPT-2 or Llama style decoder, dense or with experts. `layers` are keyed by their number in the whole model."""

    def __init__(
        self, shape: ModelShape, *, layers: range | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        refuse_untrainable(shape)
        held = range(shape.layers) if layers is None else layers
        self.shape = shape
        self.positions: Tensor | None = None  # positions_S of the tokens held here; None means 0 .. S-1
        self.rope_kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # where one was chosen
        self.embed = Embedding(shape) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(shape, layer) for layer in held})
        self.norm = norm_of(shape) if last else None
        self.head = OutputHead(shape.hidden, shape.vocab, bias=False) if last else None
        self.register_state_dict_post_hook(_drop_tied)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_tied)  # type: ignore[no-untyped-call]
        self.tie()

    @property
    def is_tied_here(self) -> bool:
        """Whether head and embedding are one parameter of this stage; on separate stages they are two."""
        return self.shape.tied and self.embed is not None and self.head is not None

    def tie(self) -> None:
        """Make the head the embedding's own weight, where both are here. Again after anything that replaced either."""
        if self.is_tied_here:
            assert self.embed is not None
            assert self.head is not None
            self.head.weight = self.embed.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie()  # to_empty() from the meta device makes new parameters, one per name
        return self

    def forward(self, x: Tensor, targets_BS: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """logits_BSV (hidden_BSD when not the last stage) from tokens_BS (hidden_BSD when not the first).

        Of the last stage, given targets: the summed loss instead, which will be multiplied by `scale`.
        """
        positions_S = torch.arange(x.shape[1], device=x.device) if self.positions is None else self.positions
        if self.embed is not None:
            x = self.embed(x, positions_S)
        rope = rope_tables(self.shape, positions_S, x.dtype) if self.shape.positions == "rope" else None
        if rope is not None:
            rope.kernel = self.rope_kernel
        for block in self.layers.values():
            x = block(x, rope)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x)) if targets_BS is None else self.head(self.norm(x), targets_BS, scale)
        return x

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every parameter by (seed, name): the same in whatever stage, order or dtype. Buffers become zero."""
        for name, parameter in self.named_parameters():
            value = draw_values(name, parameter.shape, seed=seed, layers=self.shape.layers, dtype=parameter.dtype)
            parameter.copy_(value)
        if self.shape.tied and not self.is_tied_here and self.head is not None:
            # Alone on the last stage, the head starts as the embedding it stands for.
            size, dtype = self.head.weight.shape, self.head.weight.dtype
            self.head.weight.copy_(draw_values(TIED[0], size, seed=seed, layers=self.shape.layers, dtype=dtype))
        for buffer in self.buffers():
            buffer.zero_()

    def blocks(self) -> Mapping[str, nn.Module]:
        """The parts that are sharded, recomputed and compiled one by one."""
        return {f"layers.{name}": block for name, block in self.layers.items()}

    def stage(self, layers: range, *, first: bool, last: bool) -> Decoder:
        """A new decoder of only these layers, not yet initialised."""
        return Decoder(self.shape, layers=layers, first=first, last=last)


def _drop_tied(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """The state holds a tied weight once, under the embedding's name."""
    if isinstance(module, Decoder) and module.is_tied_here:
        state.pop(prefix + TIED[1], None)


def _add_tied(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    if isinstance(module, Decoder) and module.is_tied_here and prefix + TIED[0] in state:
        state.setdefault(prefix + TIED[1], state[prefix + TIED[0]])

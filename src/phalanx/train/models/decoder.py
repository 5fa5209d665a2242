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
    """Output projection to logits, or, given targets, to the summed loss without storing all logits."""

    # Compute the three products in fp8 while training; set if the job allows it and it was measured to be faster
    float8 = False

    def forward(self, x_BSD: Tensor, targets_BS: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Return logits_BSV, or the cross-entropy summed over the valid targets.

        The caller multiplies it by `scale`.
        """
        if targets_BS is None:
            return super().forward(x_BSD)
        return linear_cross_entropy(
            x_BSD.flatten(0, 1), self.weight, targets_BS.flatten(), scale=scale, float8=self.float8
        )


class Block(nn.Module):
    """A pre-norm decoder layer: attention and MLP, each after a norm and added to the residual stream."""

    # Replaces forward by operators that fuse norms and activations with matrices, if they were measured to be
    # faster.
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
        """Compute one layer."""
        if self.fused is not None and torch.is_grad_enabled():
            return self.fused(self, x_BSD, rope)
        x_BSD = x_BSD + self.attn(self.attn_norm(x_BSD), rope)
        out_BSD: Tensor = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return out_BSD


class Decoder(nn.Module):
    """A GPT-2 or Llama style decoder, dense or with experts; `layers` are keyed by their number in the full model."""

    def __init__(
        self, shape: ModelShape, *, layers: range | None = None, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        refuse_untrainable(shape)
        layer_numbers = range(shape.layers) if layers is None else layers
        self.shape = shape
        # positions_S of this rank's tokens; None means 0 .. S-1
        self.positions: Tensor | None = None
        # The measured choice of a kernel, if any
        self.rope_kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.embed = Embedding(shape) if first else None
        self.layers = nn.ModuleDict({str(layer): Block(shape, layer) for layer in layer_numbers})
        self.norm = norm_of(shape) if last else None
        self.head = OutputHead(shape.hidden, shape.vocab, bias=False) if last else None
        self.register_state_dict_post_hook(_drop_tied)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_tied)  # type: ignore[no-untyped-call]
        self.tie()

    @property
    def is_tied_here(self) -> bool:
        """True if head and embedding are one parameter of this stage; on separate stages they are two."""
        return self.shape.tied and self.embed is not None and self.head is not None

    def tie(self) -> None:
        """Make the head share the embedding's weight if both are on this stage.

        Call again after either was replaced.
        """
        if self.is_tied_here:
            assert self.embed is not None
            assert self.head is not None
            self.head.weight = self.embed.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # to_empty() from the meta device makes new parameters, one per name
        self.tie()
        return self

    def forward(self, x: Tensor, targets_BS: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Return logits_BSV (hidden_BSD if not the last stage) from tokens_BS (hidden_BSD if not the first).

        On the last stage, given targets, return the summed loss instead; the caller multiplies it by `scale`.
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
        """Draw every parameter by (seed, name), so that stage, order and dtype make no difference; zero the buffers."""
        for name, parameter in self.named_parameters():
            value = draw_values(name, parameter.shape, seed=seed, layers=self.shape.layers, dtype=parameter.dtype)
            parameter.copy_(value)
        if self.shape.tied and not self.is_tied_here and self.head is not None:
            # On a last stage without the embedding, the tied head starts with the embedding's values.
            size, dtype = self.head.weight.shape, self.head.weight.dtype
            self.head.weight.copy_(draw_values(TIED[0], size, seed=seed, layers=self.shape.layers, dtype=dtype))
        for buffer in self.buffers():
            buffer.zero_()

    def blocks(self) -> Mapping[str, nn.Module]:
        """Return the modules that are sharded, recomputed and compiled one by one."""
        return {f"layers.{name}": block for name, block in self.layers.items()}

    def stage(self, layers: range, *, first: bool, last: bool) -> Decoder:
        """Build a new decoder of only these layers, not yet initialised."""
        return Decoder(self.shape, layers=layers, first=first, last=last)


def _drop_tied(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    """Remove the tied head from a state dict, which holds the weight once, under the embedding's name."""
    if isinstance(module, Decoder) and module.is_tied_here:
        state.pop(prefix + TIED[1], None)


def _add_tied(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    if isinstance(module, Decoder) and module.is_tied_here and prefix + TIED[0] in state:
        state.setdefault(prefix + TIED[1], state[prefix + TIED[0]])

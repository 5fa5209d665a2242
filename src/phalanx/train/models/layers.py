"""Layers of the decoder: norms, attention, MLP, embedding and rotary positions.

B batch, S sequence, D model, N query heads, K key/value heads, H head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.job.model import ModelShape
from phalanx.train.kernels.swiglu import gated_down

# q_BNSH, k_BKSH, v_BKSH -> o_BNSH
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_kernel(*tensors: Tensor) -> bool:
    """Return whether a selected kernel may run: torch.compile is not tracing, and no tensor is a DTensor."""
    return not torch.compiler.is_compiling() and all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)


class SelectedNorm(nn.RMSNorm):
    """RMSNorm by PyTorch's kernel, or by one that was measured to be faster (kernels/model_kernels.py)."""

    kernel: Callable[[Tensor, Tensor, float], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return x / rms(x) · weight."""
        if self.kernel is None or self.eps is None or not by_kernel(x, self.weight):
            return super().forward(x)
        return self.kernel(x, self.weight, self.eps)


def causal_attention(q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √H) v over earlier positions, by the kernel that torch selects.

    `kernels/attention.py` sets kernels by name.
    """
    grouped = q_BNSH.shape[1] != k_BKSH.shape[1]
    out_BNSH: Tensor = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=grouped)
    return out_BNSH


class Attention(nn.Module):
    """Self-attention with grouped key and value heads; context parallelism replaces its `core`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias = shape.bias or shape.qkv_bias
        self.head_dim = shape.head_dim
        self.wq = nn.Linear(shape.hidden, query, bias=bias)
        self.wk = nn.Linear(shape.hidden, key, bias=bias)
        self.wv = nn.Linear(shape.hidden, key, bias=bias)
        self.wo = nn.Linear(query, shape.hidden, bias=shape.bias)
        self.q_norm = SelectedNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = SelectedNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.core: Core = causal_attention

    def forward(self, x_BSD: Tensor, rope: Rope | None) -> Tensor:
        """Mix each position with the earlier ones; `rope` is None if positions were added to the embedding."""
        out_BSD: Tensor = self.wo(self.mix(self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD), rope))
        return out_BSD

    def mix(self, query: Tensor, key: Tensor, value: Tensor, rope: Rope | None) -> Tensor:
        """Compute attention between the projections: split heads, normalise, rotate by position, and apply the core."""
        q_BSNH, k_BSKH, v_BSKH = (self._split_heads(flat) for flat in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSNH, k_BSKH = self.q_norm(q_BSNH), self.k_norm(k_BSKH)
        if rope is not None:
            q_BSNH, k_BSKH = rope.turn(q_BSNH), rope.turn(k_BSKH)
        o_BNSH = self.core(q_BSNH.transpose(1, 2), k_BSKH.transpose(1, 2), v_BSKH.transpose(1, 2))
        return o_BNSH.transpose(1, 2).flatten(2)

    def _split_heads(self, flat: Tensor) -> Tensor:
        """Split into heads; a tensor-parallel rank holds only some, so the width gives their number."""
        return flat.view(*flat.shape[:-1], -1, self.head_dim)


def repeat_heads(k_BKSH: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for every query head of its group, for cores without grouped heads."""
    return torch.repeat_interleave(k_BKSH, heads // k_BKSH.shape[1], dim=1)


# The dense MLP: two matrices, or three with a gate (SwiGLU, arXiv:2002.05202).


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Mlp(nn.Module):
    """MLP: down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, hidden: int, ffn: int, *, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=bias) if gated else None
        self.up = nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)
        self.act = ACTIVATIONS[activation]
        # The selected kernel of act(gate) · up, if any
        self.kernel: Callable[[Tensor, Tensor], Tensor] | None = None
        # Backward recomputes act(gate) · up instead of saving it
        self.drops_product = False

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the MLP to each position."""
        up_BSF = self.up(x_BSD)
        if self.drops_product:
            assert self.gate is not None
            down_BSD = gated_down(self.gate(x_BSD), up_BSF, self.down.weight)
            return down_BSD if self.down.bias is None else down_BSD + self.down.bias
        if self.gate is None:
            inner_BSF = self.act(up_BSF)
        elif self.kernel is not None and by_kernel(up_BSF):
            inner_BSF = self.kernel(self.gate(x_BSD), up_BSF)
        else:
            inner_BSF = self.act(self.gate(x_BSD)) * up_BSF
        out_BSD: Tensor = self.down(inner_BSF)
        return out_BSD


# Embedding of tokens: the token table, with learned positions (GPT-2) and a norm (BLOOM) if the shape has them.


def norm_of(shape: ModelShape) -> nn.Module:
    """Build the norm that this model uses everywhere."""
    kind = nn.LayerNorm if shape.norm == "layer" else SelectedNorm
    return kind(shape.hidden, eps=shape.norm_eps)


class Embedding(nn.Module):
    """Input of the first stage: token table, optional learned positions, optional norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        learned = shape.positions == "learned"
        self.positions = nn.Embedding(shape.max_positions, shape.hidden) if learned else None
        self.norm = norm_of(shape) if shape.embedding_norm else None

    def forward(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        """Return hidden_BSD of these tokens at these positions."""
        x_BSD: Tensor = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(positions_S)
        return x_BSD if self.norm is None else self.norm(x_BSD)


# Rotary positions (arXiv:2104.09864) with the scalings of long-context models.
#
# S sequence, N heads, H head, R = H / 2 rotated pairs. Pairs are (i, i + H/2), as in Hugging Face's layout.


# YaRN's band of rotations within the original length, arXiv:2309.00071 section 3.2 ("alpha = 1, beta = 32").
YARN_SLOW, YARN_FAST = 1.0, 32.0


class Rope:
    """Cosine and sine tables of one forward pass.

    A plain class, because FSDP2 casts tensors in tuples and dataclasses, and a bfloat16 cosine has only 8 bits.
    """

    def __init__(self, *, cos_SR: Tensor, sin_SR: Tensor) -> None:
        self.cos_SR = cos_SR
        self.sin_SR = sin_SR
        # The selected kernel, if any: (heads, cosines, sines) -> rotated heads
        self.kernel: Core | None = None

    def turn(self, x_BSNH: Tensor) -> Tensor:
        """Rotate every pair of every head by its position's angle."""
        if self.kernel is not None and by_kernel(x_BSNH):
            return self.kernel(x_BSNH, self.cos_SR, self.sin_SR)
        cos_S1R, sin_S1R = self.cos_SR[:, None, :], self.sin_SR[:, None, :]
        first_half, second_half = x_BSNH.chunk(2, dim=-1)
        rotated = torch.cat(
            (first_half * cos_S1R - second_half * sin_S1R, second_half * cos_S1R + first_half * sin_S1R), dim=-1
        )
        return rotated.to(x_BSNH.dtype)


def rope_tables(shape: ModelShape, positions_S: Tensor, dtype: torch.dtype) -> Rope:
    """Return cosines and sines for these positions, in float32 or wider.

    Angles are computed in float64: position 100,000 times a float32 frequency is off by up to 0.006 radians.
    """
    frequency_R = rotary_frequencies(shape, positions_S.device)
    angle_SR = positions_S.to(torch.float64)[:, None] * frequency_R[None, :]
    factor = _yarn_attention(shape.rope_factor) if shape.rope_scaling == "yarn" else 1.0
    table_dtype = torch.promote_types(dtype, torch.float32)
    return Rope(cos_SR=(angle_SR.cos() * factor).to(table_dtype), sin_SR=(angle_SR.sin() * factor).to(table_dtype))


def rotary_frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Return radians per position of each pair in float64, scaled as the shape requires."""
    exponent_R = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64) / shape.head_dim
    frequency_R = shape.rope_theta**-exponent_R
    match shape.rope_scaling:
        case "linear":
            return frequency_R / shape.rope_factor
        case "llama3":
            return _scale_llama3(shape, frequency_R)
        case "yarn":
            return _scale_yarn(shape, frequency_R)
        case _:
            return frequency_R


def _scale_llama3(shape: ModelShape, frequency_R: Tensor) -> Tensor:
    """Scale as Llama 3.1 does.

    Slow pairs are divided by the factor, fast ones are unchanged, the others are mixed by their turns in the original
    length.
    """
    low, high = shape.rope_low_factor, shape.rope_high_factor
    turns_R = shape.rope_original_positions * frequency_R / (2 * math.pi)
    unscaled_share_R = ((turns_R - low) / (high - low)).clamp(0.0, 1.0)
    return frequency_R * unscaled_share_R + frequency_R / shape.rope_factor * (1.0 - unscaled_share_R)


def _scale_yarn(shape: ModelShape, frequency_R: Tensor) -> Tensor:
    """Scale as YaRN: like llama3, but the mix is linear in the index of the pair."""

    def pair_index(times: float) -> float:
        ratio = shape.rope_original_positions / (times * 2 * math.pi)
        return shape.head_dim * math.log(ratio) / (2 * math.log(shape.rope_theta))

    first = max(math.floor(pair_index(YARN_FAST)), 0)
    last = min(math.ceil(pair_index(YARN_SLOW)), shape.head_dim - 1)
    index_R = torch.arange(shape.head_dim // 2, device=frequency_R.device, dtype=frequency_R.dtype)
    stretched_R = ((index_R - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return frequency_R * (1.0 - stretched_R) + frequency_R / shape.rope_factor * stretched_R


def _yarn_attention(factor: float) -> float:
    """Return YaRN's attention temperature, applied to the tables: arXiv:2309.00071 eq. 22."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
